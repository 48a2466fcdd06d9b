"""The ways to resume a search: fork it, retry only errored trials, start from others' results; and the refusals."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

import prefect_tune as pt
from prefect_tune.blocks import LocalTarget
from prefect_tune.clock import new_write_stamp
from prefect_tune.core.errors import CheckpointNotFound
from prefect_tune.core.experiment.experiment import Experiment
from prefect_tune.core.experiment.trial_transitions import list_live_checkpoint_keys
from prefect_tune.core.journal_events import ExperimentConfigured
from prefect_tune.core.operations.scrub import quarantine_in_journal
from prefect_tune.parameters.argument_checks import compute_source_digest
from prefect_tune.storage_retries import READ_TIMEOUT
from tests.fakes.checkpoints import read_files
from tests.fakes.searches.failed_searches import results_of_failed
from tests.flows.training import entries_at, experiment_at, statuses
from tests.long_cases import long_after
from tests.trainables.digits_table import EPOCHS, ROWS, DigitsTable
from tests.trainables.moody import Moody, report_accuracy, train

pytestmark = [pytest.mark.usefixtures("no_prefect_server"), pytest.mark.timeout(400)]


DIGITS = "tests.trainables.digits_table:DigitsTable"
SPACE = {"row": pt.randint(0, ROWS)}
ASHA = {"ASHA": {"max_t": EPOCHS, "reduction_factor": 3, "variant": "stopping"}}
TPE = {"OptunaSearch": {"num_samples": 6}}


def run_search(target: LocalTarget, experiment: str = "old", trainable: Any = DIGITS, **options: Any) -> pt.Results:
    """Search with the common options of these tests: one trial after the other, in this process."""
    common: dict[str, Any] = {
        "space": SPACE,
        "target": target,
        "experiment": experiment,
        "metric": "error",
        "stop": {"step": 3},
        "checkpoint": pt.Cadence(every_steps=2),
        "max_concurrent_trials": 1,
        "isolation": "thread",
        **({} if "search" in options else {"num_samples": 3}),
    }
    return pt.tune(trainable, **{**common, **options})


def read_objects(target: LocalTarget, below: str = "") -> Mapping[str, bytes]:
    return {path: data for path, data in read_files(target.path).items() if path.startswith(below)}


def table_of(experiment: Experiment) -> Sequence[tuple[object, ...]]:
    return [(trial.id, trial.config, str(trial.status), trial.step) for trial in experiment.trials.values()]


def configs_of(results: pt.Results) -> Sequence[Mapping[str, object]]:
    return [trial.config for trial in results.trials.values()]


# ------------------------------------------------------------------------------------------------------- fork


@pytest.mark.deep
@pytest.mark.timeout(3000)
def test_and_that_from_whichever_entry(local_target: LocalTarget) -> None:
    old = run_search(local_target, search=TPE, scheduler=ASHA, stop={"step": 9}, num_samples=6)
    first = next(
        entry.number for entry in entries_at(local_target, "old") if isinstance(entry.events[0], ExperimentConfigured)
    )
    for number in range(first, old.experiment.entry_count + 1):
        new = pt.resume("old", target=local_target, fork=f"new-{number}", at=number)
        assert table_of(new.experiment) == table_of(old.experiment), number


def test_a_fork_goes_on_with_other_settings_and_a_retry_of_it_goes_on_too(local_target: LocalTarget) -> None:
    old = run_search(local_target)
    wider = {"row": pt.randint(0, 2)}
    fork = {"target": local_target, "fork": "new", "space": wider, "num_samples": 5, "stop": {"step": 5}}
    new = pt.resume("old", **fork)
    assert configs_of(new)[:3] == configs_of(old)
    assert all(config["row"] in (0, 1) for config in configs_of(new)[3:])
    assert [trial.step for trial in new.trials.values()] == [5] * 5
    assert [trial.attempt for trial in new.trials.values()] == [2, 2, 2, 1, 1]
    assert [trial.step for trial in experiment_at(local_target, "old").trials.values()] == [3] * 3
    again = pt.resume("old", **fork)
    assert table_of(again.experiment) == table_of(new.experiment)
    assert configs_of(run_search(local_target, num_samples=4))[:3] == configs_of(old)


@pytest.mark.long
def test_what_the_origin_has_deleted_since_is_said_and_refused_where_that_is_asked(
    local_target: LocalTarget, caplog: pytest.LogCaptureFixture
) -> None:
    run_search(local_target, num_samples=1, retention=pt.Retention(last=1))
    number = experiment_at(local_target, "old").entry_count
    run_search(local_target, num_samples=1, retention=pt.Retention(last=1), stop={"step": 6})
    before = read_objects(local_target)
    fork = {"target": local_target, "fork": "new", "at": number, "stop": {"step": 4}}
    with pytest.raises(CheckpointNotFound, match=r"as of entry \d+: checkpoints deleted since: trial 00000, step 3"):
        pt.resume("old", strict_fork=True, **fork)
    assert read_objects(local_target) == before
    new = pt.resume("old", **fork)
    assert "the origin has since deleted checkpoints: trial 00000, step 3" in caplog.text
    (trial,) = new.trials.values()
    assert (trial.step, trial.recomputed_steps) == (4, 3)


def test_a_fork_of_a_trial_whose_checkpoints_are_all_quarantined_says_so_once(
    local_target: LocalTarget, caplog: pytest.LogCaptureFixture
) -> None:
    run_search(local_target, num_samples=1, callbacks=[Diary()])
    (trial,) = (state := experiment_at(local_target, "old")).trials.values()
    damaged = dict.fromkeys(list_live_checkpoint_keys(state.trial_key(trial.id), trial), "damaged")
    with local_target.open(timeout=READ_TIMEOUT) as store:
        quarantine_in_journal(store, state.key, damaged, new_write_stamp())
    new = pt.resume("old", target=local_target, fork="new", stop={"step": 4})
    assert [trial.step for trial in new.trials.values()] == [4]
    message = f"trial {trial.id}: all {len(damaged)} of its checkpoints are quarantined\n"  # it has ended
    assert caplog.text.count(message) == 1
    assert "the journal cannot store callback objects" in caplog.text


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"fork": "new"}, pt.ResumeFailed, "there is no experiment 'old'"),
        ({"at": 3}, pt.InvalidInput, "pass fork="),
        ({"fork": "../x"}, pt.InvalidInput, "expected 1 to 128 letters"),
    ],
)
def test_what_cannot_be_forked_is_said_and_nothing_is_written(
    options: Mapping[str, Any], error: type[Exception], message: str, local_target: LocalTarget
) -> None:
    with pytest.raises(error, match=message):
        pt.resume("old", target=local_target, **options)
    assert not read_objects(local_target)


# ---------------------------------------------------------------------------------- existing and missing experiments


def test_what_must_be_there_is_not_begun_and_what_must_not_is_not_gone_on_with(local_target: LocalTarget) -> None:
    with pytest.raises(pt.ResumeFailed, match="there is no experiment 'old'"):
        run_search(local_target, resume=True)
    assert not read_objects(local_target)
    run_search(local_target, resume=False, num_samples=1)
    before = read_objects(local_target)
    with pytest.raises(pt.InvalidInput, match="already exists, with 1 trials"):
        run_search(local_target, resume="never")
    assert read_objects(local_target) == before
    assert len(run_search(local_target, resume="LOCAL", num_samples=2).trials) == 2


@pytest.mark.parametrize("resume", ["auto", pytest.param("must", marks=pytest.mark.deep)])
def test_a_journal_that_does_not_hold_together_is_an_error_and_no_fresh_start(
    resume: str, local_target: LocalTarget
) -> None:
    run_search(local_target, num_samples=1)
    entry = Path(local_target.path, "old/1/journal/0000000003.json")
    entry.write_bytes(entry.read_bytes().replace(b'"term":1', b'"term":2'))
    shutil.rmtree(Path(local_target.path, "old/1/segments"), ignore_errors=True)
    before = read_objects(local_target, "old")
    with pytest.raises(pt.ResumeFailed, match="Nothing was started"):
        run_search(local_target, resume=resume)
    for fork in (None, "new"):
        with pytest.raises(pt.ResumeFailed, match="Nothing was started"):
            pt.resume("old", target=local_target, fork=fork)
    assert read_objects(local_target, "old") == before
    assert not read_objects(local_target, "new")


# --------------------------------------------------------------------------------------------- errored trials


def test_only_what_errored_is_tried_again(local_target: LocalTarget, tmp_path: Path) -> None:
    space = {"fails": pt.grid_search(["raise", "not", "neither"]), "until": str(tmp_path / "mended")}
    options: dict[str, Any] = {"space": space, "metric": "loss", "num_samples": 1}
    first = results_of_failed(lambda: run_search(local_target, trainable=Moody, fail_fast=True, **options))
    assert statuses(first) == ["errored"]
    (tmp_path / "mended").touch()
    again = run_search(local_target, trainable=Moody, resume="ERRORED_ONLY", **options)
    assert statuses(again) == ["completed"]
    rest = run_search(local_target, trainable=Moody, **options)
    assert statuses(rest) == ["completed"] * 3


# ----------------------------------------------------------------------------------------------- warm start


@pytest.mark.long
def test_a_search_learns_from_earlier_experiments_once_and_remembers_when_they_are_gone(
    local_target: LocalTarget, tmp_path: Path
) -> None:
    space = {"row": pt.randint(0, ROWS), "note": "x"}
    run_search(local_target, "first", space=space, num_samples=12)
    pt.resume("first", target=local_target, fork="copy")
    elsewhere = LocalTarget(path=str(tmp_path / "elsewhere"))
    run_search(elsewhere, "second", space={"row": 9999 % ROWS, "more": pt.uniform(0, 1)}, num_samples=1)
    warm: dict[str, Any] = {
        "space": space,
        "search": TPE,
        "seed": 3,
        "warm_start": ["first", f"{elsewhere.path}/second", "copy", "first"],
    }
    whole = run_search(local_target, "whole", **warm)
    assert len(whole.trials) == 6
    folders = [f"{local_target.uri}/first", f"{elsewhere.uri}/second", f"{local_target.uri}/copy"]
    assert list(whole.experiment.warm_start_locations) == folders
    assert sorted(whole.experiment.warm_starts) == sorted(["first", "copy", f"{elsewhere.path}/second"])
    cut = run_search(local_target, "cut", **{**warm, "search": {"OptunaSearch": {"num_samples": 2}}})
    for name in ("first", "copy"):
        shutil.rmtree(Path(local_target.path, name))
    shutil.rmtree(elsewhere.path)
    rest = pt.resume("cut", target=local_target, search=TPE)
    assert configs_of(cut) == configs_of(whole)[:2]
    assert configs_of(rest) == configs_of(whole)
    cold = run_search(local_target, "cold", **{**warm, "warm_start": None})
    assert configs_of(cold) != configs_of(whole)


@pytest.mark.parametrize(
    ("warm_start", "message"),
    [
        (["gone"], "there is no experiment 'gone'"),
        (["old"], "is the search itself, which has its own trials"),
        (["s4/nothing/first"], "'s4' is not a type of target block"),
    ],
)
def test_what_cannot_be_learned_from_is_said(warm_start: list[Any], message: str, local_target: LocalTarget) -> None:
    with pytest.raises(pt.InvalidInput, match=message):
        run_search(local_target, warm_start=warm_start)
    assert not read_objects(local_target)


def test_points_to_evaluate_come_first(local_target: LocalTarget) -> None:
    search = {"RandomSearch": {"num_samples": 3, "points_to_evaluate": [{"row": 17}, {"row": 3}]}}
    results = run_search(local_target, search=search)
    assert [config["row"] for config in configs_of(results)][:2] == [17, 3]
    assert len(results.trials) == 3


# ----------------------------------------------------------------------------------------------- changed code


def test_a_changed_trainable_is_refused_where_that_is_asked(local_target: LocalTarget) -> None:
    options: dict[str, Any] = {"space": {"x": 1.0}, "metric": "loss", "stop": None, "on_code_change": "refuse"}
    run_search(local_target, num_samples=1, trainable=train, **options)
    before = read_objects(local_target)
    with pytest.raises(pt.InvalidInput, match=r"the trainable has changed .* on_code_change='refuse'"):
        run_search(local_target, num_samples=2, trainable=report_accuracy, **options)
    assert read_objects(local_target) == before


def test_the_source_is_the_same_by_name_and_by_object() -> None:
    assert compute_source_digest(Moody) == compute_source_digest("tests.trainables.moody:Moody") != ""
    assert (
        compute_source_digest(train)
        == compute_source_digest("tests.trainables.moody:train")
        != compute_source_digest(Moody)
    )
    assert compute_source_digest("tests.trainables.moody:nothing") == compute_source_digest(len) == ""


# A run whose parameters do not fit the experiment is refused; a running owner is not disturbed.


@pytest.mark.parametrize(
    ("changed", "message"),
    long_after(
        1,
        [
            ({"metric": "accuracy"}, "metric: experiment 'old' was begun with 'error'"),
            ({"mode": "max"}, "mode: experiment 'old' was begun with 'min', and this run passes 'max'"),
            ({"seed": 3}, "seed: experiment 'old' was begun with"),
        ],
    ),
)
def test_another_metric_mode_or_seed_is_refused_before_anybody_is_superseded(
    local_target: LocalTarget, changed: dict[str, Any], message: str
) -> None:
    run_search(local_target, num_samples=1)
    before = read_objects(local_target)
    with pytest.raises(pt.InvalidInput, match=message):
        run_search(local_target, **changed)
    assert read_objects(local_target) == before


class Diary(pt.Callback):
    def __init__(self) -> None:
        self.ended: list[str] = []

    def on_trial_complete(self, trial: Any, finished: Any) -> None:
        assert finished
        self.ended.append(trial.id)


def test_what_is_before_the_first_entry_cannot_be_forked(local_target: LocalTarget) -> None:
    run_search(local_target, num_samples=1)
    with pytest.raises(pt.InvalidInput, match="0"):
        pt.resume("old", target=local_target, fork="new", at=0)
    assert not read_objects(local_target, "new")


@pytest.mark.long
def test_a_fork_that_cannot_be_resumed_with_its_arguments_is_not_made(local_target: LocalTarget) -> None:
    def report_error(_config: object) -> None:
        pt.report({"error": 1.0})

    run_search(local_target, num_samples=2)
    run_search(local_target, "unnamed", report_error, num_samples=1)
    with pytest.raises(pt.InvalidInput, match="already has 2 samples"):
        pt.resume("old", target=local_target, fork="new", num_samples=1)
    with pytest.raises(pt.InvalidInput, match="does not store 'trainable'"):
        pt.resume("unnamed", target=local_target, fork="new")
    assert not read_objects(local_target, "new")


def test_a_search_that_counts_for_itself_takes_no_number_of_samples() -> None:
    with pytest.raises(pt.InvalidInput, match=r"num_samples: .* has its own number of samples"):
        pt.tune(Moody, SPACE, target="./nowhere", search=pt.Repeated(pt.RandomSearch(2), 2), num_samples=3)


def has_two_steps(metrics: Mapping[str, Any]) -> bool:
    return metrics["step"] >= 2


def choose_row(_config: Mapping[str, Any]) -> int:
    return 3


@pytest.mark.long
def test_objects_with_an_import_path_are_resumed_by_name(
    local_target: LocalTarget, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    options: dict[str, Any] = {
        "stop": has_two_steps,
        "space": {"row": pt.sample_from(choose_row)},
        "callbacks": [Diary],
    }
    run_search(local_target, num_samples=1, trainable=DigitsTable, **options)
    here = __name__
    paths = {"trainable": DIGITS, "stop": f"{here}:has_two_steps", "callbacks": [f"{here}:Diary"]}
    settings = experiment_at(local_target, "old").settings
    assert {name: settings[name] for name in paths} == paths
    assert settings["space"] == {"row": {"sample_from": f"{here}:choose_row"}}
    assert len(pt.resume("old", target=local_target, num_samples=2).trials) == 2
    # The object and its name are the same trainable: the journal takes the second call for no change.
    run_search(local_target, num_samples=3, trainable=DigitsTable, on_code_change="refuse", **options)
    run_search(local_target, num_samples=4, trainable=DIGITS, on_code_change="refuse", **options)
    resumed = pt.resume("old", target=local_target, num_samples=5, on_code_change="refuse")
    assert dict(resumed.experiment.settings) == {**settings, "num_samples": 5}
    assert [(trial.status, trial.step) for trial in resumed.trials.values()] == [("completed", 2)] * 5
    assert not any("has changed" in record.message for record in caplog.records)
    # An experiment that was begun with an object without a path resumes with the object, and then by name.
    monkeypatch.setattr("prefect_tune.parameters.search_plan.find_import_name", lambda _: None)
    run_search(local_target, "earlier", num_samples=1, trainable=DigitsTable)
    monkeypatch.undo()
    with pytest.raises(pt.InvalidInput, match="does not store 'trainable'"):
        pt.resume("earlier", target=local_target)
    run_search(local_target, "earlier", num_samples=2, trainable=DigitsTable)
    assert len(pt.resume("earlier", target=local_target, num_samples=3).trials) == 3
