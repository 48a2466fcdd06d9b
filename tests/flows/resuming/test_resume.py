"""The ways to resume a search: fork it, retry only errored trials, start from others' results; and the refusals."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

import prefect_tune as pt
from prefect_tune.blocks import LocalTarget
from prefect_tune.core.errors import CheckpointNotFound, StoreUnavailable
from prefect_tune.core.experiment.experiment import Experiment
from prefect_tune.core.experiment.trial_transitions import Status, live_keys
from prefect_tune.core.journal_events import Configured, Decided
from prefect_tune.core.operations.scrub import quarantine
from prefect_tune.core.schedulers.base import Stop
from prefect_tune.journal_access import new_write_id
from prefect_tune.maintenance import delete_experiment
from prefect_tune.parameters.argument_checks import code_of
from prefect_tune.storage_retries import READ_TIMEOUT
from tests.fakes.checkpoints import files_in
from tests.fakes.searches.failed_searches import results_of_failed
from tests.fakes.servers.processes import free_port
from tests.flows.conftest import s3_at
from tests.flows.driver import Driver, Drivers
from tests.flows.training import entries_at, experiment_at, owners_at, statuses
from tests.trainables.digits_table import EPOCHS, ROWS
from tests.trainables.moody import Moody, train

pytestmark = [pytest.mark.usefixtures("no_prefect_server"), pytest.mark.timeout(400)]

DIGITS = "tests.trainables.digits_table:DigitsTable"
SPACE = {"row": pt.randint(0, ROWS)}
ASHA = {"ASHA": {"max_t": EPOCHS, "reduction_factor": 3, "variant": "stopping"}}
TPE = {"OptunaSearch": {"num_samples": 6}}


def searched(target: LocalTarget, experiment: str = "old", trainable: Any = DIGITS, **options: Any) -> pt.Results:
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


def objects(target: LocalTarget, below: str = "") -> Mapping[str, bytes]:
    return {path: data for path, data in files_in(target.path).items() if path.startswith(below)}


def table(experiment: Experiment) -> Sequence[tuple[object, ...]]:
    return [(each.trial, each.config, str(each.status), each.step) for each in experiment.trials.values()]


def configs(results: pt.Results) -> Sequence[Mapping[str, object]]:
    return [each.config for each in results.trials.values()]


# ------------------------------------------------------------------------------------------------------- fork


def entry_of_a_stop(target: LocalTarget) -> int:
    """Return the number of the first journal entry that decides to stop a trial; no trial has stopped at it."""
    return next(
        entry.number
        for entry in entries_at(target, "old")
        if any(isinstance(event, Decided) and isinstance(event.decision, Stop) for event in entry.events)
    )


@pytest.mark.long
@pytest.mark.parametrize(
    "search",
    [
        pytest.param({"RandomSearch": {"num_samples": 6}}, id="random", marks=pytest.mark.deep),
        pytest.param(TPE, id="optuna"),
    ],
)
def test_a_fork_with_nothing_changed_ends_as_its_origin_did(search: Any, local_target: LocalTarget) -> None:
    old = searched(local_target, search=search, scheduler=ASHA, stop={"step": 9}, num_samples=6)
    before = objects(local_target, "old/1/journal")
    number = entry_of_a_stop(local_target)
    assert len(experiment_at(local_target, "old").trials) > 2
    new = pt.resume("old", target=local_target, fork="new", at=number)
    assert table(new.experiment) == table(old.experiment)
    assert new.experiment.origin is not None
    assert (new.experiment.origin.experiment, new.experiment.origin.number) == ("old", number)
    assert objects(local_target, "old/1/journal") == before


@pytest.mark.deep
@pytest.mark.timeout(3000)
def test_and_that_from_whichever_entry(local_target: LocalTarget) -> None:
    old = searched(local_target, search=TPE, scheduler=ASHA, stop={"step": 9}, num_samples=6)
    described = next(
        entry.number for entry in entries_at(local_target, "old") if isinstance(entry.events[0], Configured)
    )
    for number in range(described, old.experiment.number + 1):
        new = pt.resume("old", target=local_target, fork=f"new-{number}", at=number)
        assert table(new.experiment) == table(old.experiment), number


def test_a_fork_goes_on_with_other_settings_and_a_retry_of_it_goes_on_too(local_target: LocalTarget) -> None:
    old = searched(local_target)
    wider = {"row": pt.randint(0, 2)}
    fork = {"target": local_target, "fork": "new", "space": wider, "num_samples": 5, "stop": {"step": 5}}
    new = pt.resume("old", **fork)
    assert configs(new)[:3] == configs(old)
    assert all(config["row"] in (0, 1) for config in configs(new)[3:])
    assert [each.step for each in new.trials.values()] == [5] * 5
    assert [each.attempt for each in new.trials.values()] == [2, 2, 2, 1, 1]
    assert [each.step for each in experiment_at(local_target, "old").trials.values()] == [3] * 3
    again = pt.resume("old", **fork)
    assert table(again.experiment) == table(new.experiment)
    assert configs(searched(local_target, num_samples=4))[:3] == configs(old)


@pytest.mark.long
def test_what_the_origin_has_deleted_since_is_said_and_refused_where_that_is_asked(
    local_target: LocalTarget, caplog: pytest.LogCaptureFixture
) -> None:
    searched(local_target, num_samples=1, retention=pt.Retention(last=1))
    number = experiment_at(local_target, "old").number
    searched(local_target, num_samples=1, retention=pt.Retention(last=1), stop={"step": 6})
    before = objects(local_target)
    fork = {"target": local_target, "fork": "new", "at": number, "stop": {"step": 4}}
    with pytest.raises(CheckpointNotFound, match=r"as of entry \d+: deleted since then: trial 00000, step 3"):
        pt.resume("old", strict_fork=True, **fork)
    assert objects(local_target) == before
    new = pt.resume("old", **fork)
    assert "trial 00000: the origin has deleted trial 00000, step 3 since" in caplog.text
    (trial,) = new.trials.values()
    assert (trial.step, trial.wasted_steps) == (4, 3)


def test_a_fork_of_a_trial_whose_checkpoints_are_all_quarantined_says_so_once(
    local_target: LocalTarget, caplog: pytest.LogCaptureFixture
) -> None:
    searched(local_target, num_samples=1)
    (trial,) = (state := experiment_at(local_target, "old")).trials.values()
    damaged = dict.fromkeys(live_keys(state.trial_key(trial.trial), trial), "damaged")
    with local_target.open(timeout=READ_TIMEOUT) as store:
        quarantine(store, state.key, damaged, new_write_id(), side_by_side=map)
    new = pt.resume("old", target=local_target, fork="new", stop={"step": 4})
    assert [each.step for each in new.trials.values()] == [4]
    said = f"trial {trial.trial}: all {len(damaged)} of its checkpoints are quarantined; it resumes from nothing"
    assert caplog.text.count(said) == 1


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"fork": "new"}, pt.ResumeFailed, "there is no experiment 'old'"),
        ({"at": 3}, pt.InvalidInput, "name the fork"),
        ({"fork": "../x"}, pt.InvalidInput, "expected 1 to 128 letters"),
    ],
)
def test_what_cannot_be_forked_is_said_and_nothing_is_written(
    options: Mapping[str, Any], error: type[Exception], said: str, local_target: LocalTarget
) -> None:
    with pytest.raises(error, match=said):
        pt.resume("old", target=local_target, **options)
    assert not objects(local_target)


# ---------------------------------------------------------------------------------- existing and missing experiments


def test_what_must_be_there_is_not_begun_and_what_must_not_is_not_gone_on_with(local_target: LocalTarget) -> None:
    with pytest.raises(pt.ResumeFailed, match="there is no experiment 'old'"):
        searched(local_target, resume=True)
    assert not objects(local_target)
    searched(local_target, resume=False, num_samples=1)
    before = objects(local_target)
    with pytest.raises(pt.InvalidInput, match="exists already, with 1 trials"):
        searched(local_target, resume="never")
    assert objects(local_target) == before
    assert len(searched(local_target, resume="LOCAL", num_samples=2).trials) == 2


@pytest.mark.parametrize("resume", ["auto", pytest.param("must", marks=pytest.mark.deep)])
def test_a_journal_that_does_not_hold_together_is_an_error_and_no_fresh_start(
    resume: str, local_target: LocalTarget
) -> None:
    searched(local_target, num_samples=1)
    entry = Path(local_target.path, "old/1/journal/0000000003.json")
    entry.write_bytes(entry.read_bytes().replace(b'"term":1', b'"term":2'))
    shutil.rmtree(Path(local_target.path, "old/1/segments"), ignore_errors=True)
    before = objects(local_target, "old")
    with pytest.raises(pt.ResumeFailed, match="Nothing was started"):
        searched(local_target, resume=resume)
    for fork in (None, "new"):
        with pytest.raises(pt.ResumeFailed, match="Nothing was started"):
            pt.resume("old", target=local_target, fork=fork)
    assert objects(local_target, "old") == before
    assert not objects(local_target, "new")


@pytest.mark.deep
def test_a_target_that_cannot_be_reached_is_an_error_and_its_state_is_nowhere_else() -> None:
    target = s3_at(free_port(), request_timeout_seconds=2)
    with pytest.raises(StoreUnavailable):
        searched(target, resume="REMOTE")
    with pytest.raises(pt.InvalidInput, match="no copy on this machine that could be newer or older"):
        searched(target, resume="LOCAL")


# --------------------------------------------------------------------------------------------- errored trials


def test_only_what_errored_is_tried_again(local_target: LocalTarget, tmp_path: Path) -> None:
    space = {"fails": pt.grid_search(["raise", "not", "neither"]), "until": str(tmp_path / "mended")}
    options: dict[str, Any] = {"space": space, "metric": "loss", "num_samples": 1}
    first = results_of_failed(lambda: searched(local_target, trainable=Moody, fail_fast=True, **options))
    assert statuses(first) == ["errored"]
    (tmp_path / "mended").touch()
    again = searched(local_target, trainable=Moody, resume="ERRORED_ONLY", **options)
    assert statuses(again) == ["completed"]
    rest = searched(local_target, trainable=Moody, **options)
    assert statuses(rest) == ["completed"] * 3


# ----------------------------------------------------------------------------------------------- warm start


@pytest.mark.long
def test_a_search_learns_from_earlier_experiments_once_and_remembers_when_they_are_gone(
    local_target: LocalTarget, tmp_path: Path
) -> None:
    space = {"row": pt.randint(0, ROWS), "note": "x"}
    searched(local_target, "first", space=space, num_samples=12)
    pt.resume("first", target=local_target, fork="copy")
    elsewhere = LocalTarget(path=str(tmp_path / "elsewhere"))
    searched(elsewhere, "second", space={"row": 9999 % ROWS, "more": pt.uniform(0, 1)}, num_samples=1)
    warm: dict[str, Any] = {
        "space": space,
        "search": TPE,
        "seed": 3,
        "warm_start": ["first", f"{elsewhere.path}/second", "copy", "first"],
    }
    whole = searched(local_target, "whole", **warm)
    assert len(whole.trials) == 6
    folders = [f"{local_target.uri}/first", f"{elsewhere.uri}/second", f"{local_target.uri}/copy"]
    assert list(whole.experiment.warm_start_places) == folders
    assert sorted(whole.experiment.warm_starts) == sorted(["first", "copy", f"{elsewhere.path}/second"])
    cut = searched(local_target, "cut", **{**warm, "search": {"OptunaSearch": {"num_samples": 2}}})
    for name in ("first", "copy"):
        shutil.rmtree(Path(local_target.path, name))
    shutil.rmtree(elsewhere.path)
    rest = pt.resume("cut", target=local_target, search=TPE)
    assert configs(cut) == configs(whole)[:2]
    assert configs(rest) == configs(whole)
    cold = searched(local_target, "cold", **{**warm, "warm_start": None})
    assert configs(cold) != configs(whole)


@pytest.mark.parametrize(
    ("warm_start", "said"),
    [
        (["gone"], "there is no experiment 'gone'"),
        (["old"], "is the search itself, which has its own trials"),
        (["s4/nothing/first"], "'s4' is not a type of target block"),
    ],
)
def test_what_cannot_be_learned_from_is_said(warm_start: list[Any], said: str, local_target: LocalTarget) -> None:
    with pytest.raises(pt.InvalidInput, match=said):
        searched(local_target, warm_start=warm_start)
    assert not objects(local_target)


def test_points_to_evaluate_come_first(local_target: LocalTarget) -> None:
    search = {"RandomSearch": {"num_samples": 3, "points_to_evaluate": [{"row": 17}, {"row": 3}]}}
    found = searched(local_target, search=search)
    assert [config["row"] for config in configs(found)][:2] == [17, 3]
    assert len(found.trials) == 3


# ----------------------------------------------------------------------------------------------- changed code

_TRAINABLE = """
def train(config):
    return {"error": %s}
"""


def changing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """A module whose source changes."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def write(value: str) -> str:
        (tmp_path / "changing_trainable.py").write_text(_TRAINABLE % value)
        return "changing_trainable:train"

    return write


@pytest.mark.long
def test_changed_code_is_said_once_or_refused(
    local_target: LocalTarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def warned() -> int:
        messages = [each.message for each in caplog.records if each.levelname == "WARNING"]
        return sum("source of the trainable has changed" in message for message in messages)

    written = changing(tmp_path, monkeypatch)
    common: dict[str, Any] = {"stop": None, "isolation": "process", "num_samples": 1}
    searched(local_target, trainable=written("1.0"), **common)
    before = objects(local_target, "old")
    with pytest.raises(pt.InvalidInput, match=r"the source of the trainable has changed .* on_code_change='refuse'"):
        searched(local_target, trainable=written("2.0"), on_code_change="refuse", **common)
    assert objects(local_target, "old") == before
    assert warned() == 0
    common["num_samples"] = 2
    searched(local_target, trainable="changing_trainable:train", **common)
    assert warned() == 1
    searched(local_target, trainable="changing_trainable:train", on_code_change="refuse", **common)
    assert warned() == 1


def test_the_source_is_the_same_by_name_and_by_object() -> None:
    assert code_of(Moody) == code_of("tests.trainables.moody:Moody") != ""
    assert code_of(train) == code_of("tests.trainables.moody:train") != code_of(Moody)
    assert code_of("tests.trainables.moody:nothing") == code_of(len) == ""


# ------------------------------------------------------------------------------------------------- two at once


@pytest.mark.timeout(900)
@pytest.mark.long
def test_of_two_searches_of_one_experiment_one_owns_it_and_the_other_ends_saying_so(
    drivers: Drivers, local_target: LocalTarget
) -> None:
    def start(name: str, step_seconds: float) -> Driver:
        return drivers.start(
            DIGITS,
            {"row": pt.randint(0, ROWS), "step_seconds": step_seconds},
            flow="tune",
            target=local_target,
            experiment=name,
            metric="error",
            num_samples=4,
            seed=1,
            stop={"step": 20},
            max_concurrent_trials=2,
            checkpoint=pt.Cadence(every_steps=2),
        )

    both = [start("both", 0.4), start("both", 0.4)]
    outcomes = [each.wait(seconds=200) for each in both]
    refused = next(each for each in outcomes if "error" in each)
    whole = next(each for each in outcomes if "error" not in each)
    owner = both[outcomes.index(whole)]
    assert refused["error"] == "Superseded", refused
    assert f"pid {owner.pid}" in refused["message"]
    assert whole["trials"] == {f"{number:05d}": "completed" for number in range(4)}
    for each in both:
        each.require_no_leftovers()
    experiment = experiment_at(local_target, "both")
    assert sorted(owners_at(local_target, "both")) == sorted(each.pid for each in both)
    assert [(each.status, each.step) for each in experiment.trials.values()] == [(Status.COMPLETED, 20)] * 4
    assert start("alone", 0).wait(seconds=200)["trials"] == whole["trials"]
    alone = experiment_at(local_target, "alone")
    assert rows(alone) == rows(experiment)


def rows(experiment: Experiment) -> Sequence[object]:
    return [each.config["row"] for each in experiment.trials.values()]


@pytest.mark.long
def test_a_fork_is_deleted_and_its_origin_is_as_it_was(local_target: LocalTarget) -> None:
    searched(local_target, num_samples=1)
    before = objects(local_target, "old/1/trials/00000/checkpoints")
    pt.resume("old", target=local_target, fork="new", num_samples=2)
    assert delete_experiment("new", target=local_target).object_count > 0
    assert list(objects(local_target, "new")) == ["new/generations/0000000002.json"]
    assert objects(local_target, "old/1/trials/00000/checkpoints") == before
    assert len(searched(local_target, num_samples=2).trials) == 2
    assert delete_experiment("old", target=local_target).object_count > 0
    assert list(objects(local_target, "old")) == ["old/generations/0000000002.json"]


DEVELOPMENT = Path(__file__).parents[2] / "data" / "development_layout"


@pytest.mark.long
def test_an_experiment_of_a_development_version_is_refused_and_nothing_is_written(tmp_path: Path) -> None:
    target = LocalTarget(path=str(tmp_path / "target"))
    shutil.copytree(DEVELOPMENT, tmp_path / "target")
    before = objects(target, "")
    said = "was written by a development version of prefect-tune, before its first release, and is not read"
    acts: list[Callable[[], object]] = [
        lambda: pt.durable_trainable(train, {"x": 1}, target=target, experiment="training"),
        lambda: pt.tune(train, {"x": 1}, target=target, experiment="asha", metric="loss", mode="min"),
        lambda: pt.resume("pbt", target=target),
        lambda: pt.resume("asha", target=target, fork="other"),
        lambda: pt.load_results(target, "fork"),
        lambda: delete_experiment("own", target=target),
    ]
    for act in acts:
        with pytest.raises((pt.ResumeFailed, pt.UnknownVersion), match=said):
            act()
    left = objects(target, "")
    assert {path: left[path] for path in before} == before
    assert all(path.startswith(".") for path in left.keys() - before.keys())
