"""On the PYTHONPATH of an example, this kills its trials by SIGKILL; the example itself is unchanged.

Each trial's process draws a step, and a moment in it: before the step is reported, when its state has been written, or
after it was reported. There it dies, as long as there are strikes left in the folder.
"""

from __future__ import annotations

import json
import os
import random
import signal
from pathlib import Path
from typing import Any

_FOLDER = os.environ.get("PREFECT_TUNE_TEST_STRIKES")


class _Striker:
    """The step and the moment at which this process dies."""

    def __init__(self, session: Any) -> None:
        info = session.make_trial_info()
        self.trial, self.attempt = info.id, info.attempt
        self._note(at="started", step=session.step)
        chance = random.Random(f"{os.environ['PREFECT_TUNE_TEST_SEED']} {self.trial} {self.attempt}")
        self.step = session.step + chance.randint(1, int(os.environ["PREFECT_TUNE_TEST_REACH"]))
        self.moment = chance.choice(["trained", "written", "reported"])

    def strike(self, step: int, moment: str) -> None:
        if step < self.step or (moment != self.moment and step == self.step):
            return
        for token in sorted(Path(str(_FOLDER)).glob("strike-*")):
            try:
                token.unlink()
            except FileNotFoundError:
                continue  # another trial's
            self._note(at=moment, step=step)
            os.kill(os.getpid(), signal.SIGKILL)

    def _note(self, *, at: str, step: int) -> None:
        line = json.dumps({"trial": self.trial, "attempt": self.attempt, "at": at, "step": step})
        with Path(str(_FOLDER), "witness").open("a") as witness:
            witness.write(f"{line}\n")


def _arm() -> None:
    from prefect_tune.runtime.session import TrialSession

    reported, written = TrialSession.report_step, TrialSession._write_checkpoint
    strikers: dict[int, _Striker] = {}

    def striker_of(session: TrialSession) -> _Striker:
        if id(session) not in strikers:
            strikers.clear()
            strikers[id(session)] = _Striker(session)
        return strikers[id(session)]

    def report_step(self: TrialSession, metrics: Any, save: Any, **options: Any) -> None:
        striker = striker_of(self)
        striker.strike(self.step + 1, "trained")
        reported(self, metrics, save, **options)
        striker.strike(self.step, "reported")

    def written_by(self: TrialSession, save: Any) -> Path:
        directory = written(self, save)
        striker_of(self).strike(self.step, "written")
        return directory

    TrialSession.report_step, TrialSession._write_checkpoint = report_step, written_by  # type: ignore[method-assign]  # what this file is for


if _FOLDER:
    _arm()
