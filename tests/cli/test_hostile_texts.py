"""Every output of the command line, for a journal whose texts control a terminal and reorder a line."""

from __future__ import annotations

import base64
import json
import re
from itertools import count
from pathlib import Path

import pytest

from prefect_tune.cli.app import COMMANDS
from prefect_tune.core.journal.journal import acquire_ownership, append_events
from prefect_tune.core.journal_events import (
    AttemptEnded,
    AttemptStarted,
    Cause,
    CheckpointCommitted,
    CheckpointRef,
    Event,
    ExperimentConfigured,
    Owner,
    StepReported,
    StopRequested,
    TrialAdded,
    TrialErrored,
)
from prefect_tune.core.reasons import Reason, make_reason
from prefect_tune.core.storage.layout import CheckpointKey, TrialKey
from prefect_tune.core.usage_records import AttemptUsage, PhaseSeconds
from prefect_tune.core.values import StepReport, WriteStamp
from prefect_tune.stores.posix_store import PosixStore, make_root
from tests.fakes.checkpoints import commit_files, first_generation, write_files
from tests.fakes.command_line import Run
from tests.fakes.untrusted import HOSTILE, require_visible

CALLS = {
    "ls": [["ls", "{target}"]],
    "show": [["show", "{target}", "e"], *(["show", "{target}", "e", "--trial", name] for name in ("errored", "lost"))],
    "logs": [["logs", "{target}", "e", "lost"], ["logs", "{target}", "e", "errored"], ["logs", "{target}", "e"]],
    "report": [
        ["report", "{target}", "e"],
        ["report", "{target}", "e", "--output", "{folder}/page.html"],
        ["report", "{target}", "e", "--output", "{folder}/page.md"],
    ],
    "audit": [["audit", "{target}", "e"]],
    "checkpoints": [["checkpoints", "{target}", "e"]],
    "verify": [["verify", "{target}", "e"]],
    "export": [["export", "{target}", "e", "{folder}/out"]],
    "gc": [["gc", "{target}", "e"]],
    "stop": [["stop", "{target}", "e", "--trial", "errored"]],
    "delete": [["delete", "{target}", "e", "--yes", "--even-if-running"]],
}
SHOW_NO_TEXT_OF_A_TARGET = {"demo", "drill", "blocks", "run", "deploy"}
SHOW_LOG_LINES_AND_ERRORS = {"resume", "maintain"}
"""Of a flow: see `tests/suspension/test_hostile_texts.py`."""


@pytest.fixture
def target(tmp_path: Path) -> Path:
    make_root(tmp_path / "target")
    store, stamps = PosixStore(tmp_path / "target"), (WriteStamp(write_id=f"w{number}", at="now") for number in count())
    state = acquire_ownership(store, first_generation("e"), Owner(name=HOSTILE, host=HOSTILE, pid=1), next(stamps))

    def record(*events: Event) -> None:
        nonlocal state
        state = append_events(store, state, events, next(stamps))

    settings = {"metric": ["loss", HOSTILE], "mode": "min", "note": HOSTILE, "space": {HOSTILE: HOSTILE}}
    record(ExperimentConfigured(settings=settings))
    for number, name in enumerate(("errored", "running", "lost")):
        record(TrialAdded(trial=name, config={HOSTILE: HOSTILE, "x": f"{HOSTILE}{number}"}))
        record(AttemptStarted(trial=name, attempt=1, from_step=0))
        metrics = {"loss": 1.0 + number, HOSTILE: 2.0 - number, "text": HOSTILE}
        trial = TrialKey(experiment="e", generation=1, trial=name)
        key = CheckpointKey(trial=trial, step=1, sequence=state.entry_count)
        commit_files(store, write_files(tmp_path / f"staged-{name}", {"file": b"x"}), key, metrics=metrics)
        ref = CheckpointRef(step=1, sequence=key.sequence, metrics=metrics)
        report = StepReported(trial=name, report=StepReport(step=1, metrics=metrics))
        record(report, CheckpointCommitted(trial=name, checkpoint=ref))
    error = make_reason("raised", type=HOSTILE, text=HOSTILE, traceback=f"Traceback\n{HOSTILE}", location=HOSTILE)
    record(TrialErrored(trial="errored", cause=Cause.TRAINABLE, reason=error))
    usage = AttemptUsage(seconds=PhaseSeconds(), output=f"{HOSTILE}\n{HOSTILE} printed")
    reason = Reason(code=HOSTILE, arguments={HOSTILE: HOSTILE})
    record(AttemptEnded(trial="lost", cause=Cause.MACHINE, reason=reason, usage=usage))
    record(StopRequested(reason=HOSTILE, request="r"))
    manifest = next((tmp_path / "target" / "e" / "1" / "trials" / "lost" / "checkpoints").rglob("*.json"))
    manifest.write_text(f"{{{HOSTILE}")
    return tmp_path / "target"


def test_every_command_is_in_one_of_these_lists() -> None:
    commands = {name for names in COMMANDS.values() for name in names}
    assert commands == {*CALLS, *SHOW_NO_TEXT_OF_A_TARGET, *SHOW_LOG_LINES_AND_ERRORS}


@pytest.mark.parametrize("command", CALLS)
def test_no_text_of_a_target_controls_what_reads_an_output(
    command: str, run: Run, target: Path, tmp_path: Path
) -> None:
    for arguments in CALLS[command]:
        result = run(*(argument.format(target=target, folder=tmp_path) for argument in arguments))
        require_visible(result.out + result.err)
        for page in tmp_path.glob("page.*"):
            require_visible(page.read_text())
            pictures = re.findall(r"data:image/svg\+xml;base64,([A-Za-z0-9+/=]+)", page.read_text())
            assert pictures
            for picture in pictures:
                require_visible(base64.b64decode(picture).decode())


@pytest.mark.parametrize("command", ["ls", "show", "report", "checkpoints"])
def test_json_has_the_text_as_it_is_in_escapes(command: str, run: Run, target: Path) -> None:
    out = run(command, target, *(["e"] if command != "ls" else []), "--json").out
    require_visible(out)
    assert json.dumps(HOSTILE)[1:-1] in out
