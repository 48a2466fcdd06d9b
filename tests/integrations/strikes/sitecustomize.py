"""On the PYTHONPATH of an unchanged example, this kills its trials by SIGKILL.

Each trial's process draws a step and an event of it: "trained", "written" (the checkpoint) or "reported". It kills
itself there if a file `strike-*` is left in the folder.
"""

from __future__ import annotations

import json
import os
import random
import signal
from pathlib import Path
from typing import Any

_FOLDER = os.environ.get("PREFECT_TUNE_TEST_STRIKES")


class _Killer:
    """The step and the event at which this process kills itself."""

    def __init__(self, session: Any) -> None:
        info = session.make_trial_info()
        self.trial, self.attempt = info.id, info.attempt
        self._record(event="started", step=session.step)
        chance = random.Random(f"{os.environ['PREFECT_TUNE_TEST_SEED']} {self.trial} {self.attempt}")
        self.step = session.step + chance.randint(1, int(os.environ["PREFECT_TUNE_TEST_REACH"]))
        self.event = chance.choice(["trained", "written", "reported"])

    def kill_at(self, step: int, event: str) -> None:
        if step < self.step or (event != self.event and step == self.step):
            return
        for token in sorted(Path(str(_FOLDER)).glob("strike-*")):
            try:
                token.unlink()
            except FileNotFoundError:
                continue  # another trial took it
            self._record(event=event, step=step)
            os.kill(os.getpid(), signal.SIGKILL)

    def _record(self, *, event: str, step: int) -> None:
        line = json.dumps({"trial": self.trial, "attempt": self.attempt, "event": event, "step": step})
        with Path(str(_FOLDER), "witness").open("a") as witness:
            witness.write(f"{line}\n")


def _patch_session() -> None:
    from prefect_tune.runtime.session import TrialSession

    original_report_step, original_write_checkpoint = TrialSession.report_step, TrialSession._write_checkpoint
    killers: dict[int, _Killer] = {}

    def get_killer(session: TrialSession) -> _Killer:
        if id(session) not in killers:
            killers.clear()
            killers[id(session)] = _Killer(session)
        return killers[id(session)]

    def report_step(self: TrialSession, metrics: Any, save: Any, **options: Any) -> None:
        killer = get_killer(self)
        killer.kill_at(self.step + 1, "trained")
        original_report_step(self, metrics, save, **options)
        killer.kill_at(self.step, "reported")

    def write_checkpoint(self: TrialSession, save: Any) -> Path:
        directory = original_write_checkpoint(self, save)
        get_killer(self).kill_at(self.step, "written")
        return directory

    TrialSession.report_step, TrialSession._write_checkpoint = report_step, write_checkpoint  # type: ignore[method-assign]  # what this file is for


if _FOLDER:
    _patch_session()
