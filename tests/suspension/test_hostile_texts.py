"""Forms, states, events, artifacts, log lines and errors with texts that other users may have written."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from prefect_tune.attempt import attempt
from prefect_tune.blocks import LocalTarget
from prefect_tune.core.errors import DamageFound, InvalidInput, Superseded, TuneError
from prefect_tune.core.experiment.experiment import Experiment, TrialMap
from prefect_tune.core.experiment.trial_transitions import Phase, Trial
from prefect_tune.core.journal_events import (
    CheckpointRef,
    FinishKind,
    Outcome,
    QuarantinedCheckpoint,
    TrialFinished,
    TrialPaused,
)
from prefect_tune.core.prefect_events import truncate_json
from prefect_tune.core.storage.layout import JournalKey, TrialKey
from prefect_tune.maintenance import DamageFinding, ExperimentMaintenance, MaintenanceReport, SkippedWork, format_report
from prefect_tune.suspension import format_form_description
from prefect_tune.tuner import run_search, run_training
from tests.fakes.outcomes import make_failure
from tests.fakes.untrusted import HOSTILE, require_visible

_MARKUP = "![x](http://theirs) <img src=x>"


def test_what_a_journal_says_of_the_code_is_text_on_the_page() -> None:
    page = format_form_description(Experiment(key=JournalKey(experiment="e", generation=1)), "s3://b", None, _MARKUP)
    assert "![" not in page
    assert "\\!\\[x\\]" in page


def test_the_log_of_a_finished_training_gives_the_terminal_no_commands(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(run_training, "get_run_logger", lambda: logging.getLogger("a run"))
    caplog.set_level(logging.INFO)
    ended = Trial(id="trial", config={}, phase=Phase.FINISHED, end_reason="done\x1b]0;title\x07")
    state = Experiment(key=JournalKey(experiment="e", generation=1), trials=TrialMap.from_trials([ended]))
    spec: Any = SimpleNamespace(target=LocalTarget(path="/runs"))
    run_training._log_resume_point(spec, spec, state, is_finished=True)
    assert "done\\x1b]0;title\\x07" in caplog.text
    assert "\x1b" not in caplog.text


def test_the_errors_of_a_search_give_the_terminal_no_commands() -> None:
    errored = Trial(id="00000", config={}, phase=Phase.ERRORED, end_reason="ValueError: \x1b]0;title\x07")
    experiment = SimpleNamespace(name="e", uri="s3://b", settings={})
    errors = {"00000": errored.reason}
    results = SimpleNamespace(experiment=experiment, target=experiment, trials={"0": errored}, errors=errors)
    message = run_search._all_errored_message(results, 0)
    assert "its only trial errored: ValueError: \\x1b]0;title\\x07. Remove" in message


def test_the_log_of_a_quarantined_checkpoint_gives_the_terminal_no_commands(caplog: pytest.LogCaptureFixture) -> None:
    bad = QuarantinedCheckpoint(checkpoint=CheckpointRef(step=3, sequence=1), since=1, reason="bad\x1b]0;title\x07")
    trial = Trial(id="t", config={}, quarantined_checkpoints=(bad,))
    attempt._log_quarantined_checkpoints(trial, logging.getLogger("a run"))
    assert "bad\\x1b]0;title\\x07" in caplog.text
    assert "\x1b" not in caplog.text


def test_the_states_of_attempts_and_their_log_give_no_commands(caplog: pytest.LogCaptureFixture) -> None:
    failed = make_failure(HOSTILE, type="ValueError", traceback=HOSTILE)
    key = TrialKey(experiment="e", generation=1, trial="t")
    spec: Any = SimpleNamespace(target=LocalTarget(path="/runs"), trial=key)
    attempt.log_failure(failed, 1, spec, 1, logging.getLogger("a run"))
    (logged,) = caplog.messages
    outcomes: tuple[Outcome, ...] = (
        TrialFinished(trial="t", reason=HOSTILE),
        TrialFinished(trial="t", reason=HOSTILE, kind=FinishKind.PRUNED),
        TrialPaused(trial="t", reason=HOSTILE),
        failed,
    )
    for text in (logged, *(str(attempt.make_task_state(outcome).message) for outcome in outcomes)):
        require_visible(text)
        assert "\\u202e" in text


def test_an_error_an_event_and_the_page_of_maintenance_give_no_commands() -> None:
    damaged = DamageFinding("e", "t", 1, "e/1/trials/t", HOSTILE, is_quarantined=True)
    upkeep = ExperimentMaintenance("e", damaged=[damaged], skipped=[SkippedWork("e", HOSTILE, HOSTILE)])
    report = MaintenanceReport(f"s3://{HOSTILE}", (upkeep,), (), dry_run=False)
    errors = [str(kind(HOSTILE)) for kind in (TuneError, InvalidInput, Superseded)]
    damage = str(DamageFound(report.damage_message, report))
    for text in (format_report(report), damage, *errors, str(truncate_json(HOSTILE))):
        require_visible(text)
        assert "\\u202e" in text
