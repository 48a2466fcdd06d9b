"""The error of a resume by name for an experiment that is no search."""

from __future__ import annotations

from itertools import count

import pytest

import prefect_tune as pt
from prefect_tune.core.experiment.experiment import Experiment
from prefect_tune.core.journal.journal import append, take_over
from prefect_tune.core.journal_events import Configured, Event, Owner, TrialAdded
from prefect_tune.core.values import Stamp
from prefect_tune.parameters.plan_checks import require_search
from tests.fakes.checkpoints import first_generation
from tests.fakes.stores.memory_store import MemoryStore

_STAMPS = (Stamp(write_id=f"w{number}", at="2026-11-21T08:00:00+00:00") for number in count())
TRAINABLE = {"trainable": "Net"}


def begun(*events: Event, attempt: int = 0) -> Experiment:
    store, owner = MemoryStore(), Owner(name="brave-fox", host="here", pid=1, flow_run="f", attempt=attempt)
    state = take_over(store, first_generation("e"), owner, next(_STAMPS), side_by_side=map)
    return append(store, state, events, next(_STAMPS))


def added(fingerprint: dict[str, str]) -> TrialAdded:
    return TrialAdded(trial="trial", config={}, fingerprint=fingerprint)


@pytest.mark.parametrize(
    ("state", "said"),
    [
        (begun(added({})), r"a flow of your own.*Retry its last run, brave-fox \(pid 1 on here, flow run f\)"),
        (begun(added(TRAINABLE), attempt=1), "a flow of your own"),
        (begun(attempt=1), "a flow of your own"),
        (begun(added(TRAINABLE)), r"is a single training, not a search: call pt\.durable_trainable"),
        (begun(), "has no trials and no settings yet: call again what began it"),
    ],
    ids=["saves", "attempts of run_trial", "opened by a flow", "one training", "opened only"],
)
def test_an_experiment_that_is_no_search_says_what_continues_it(state: Experiment, said: str) -> None:
    with pytest.raises(pt.InvalidInput, match=rf"experiment 'e' at s3://b .*{said}"):
        require_search(state, "s3://b")


def test_a_search_is_resumed_by_its_name() -> None:
    require_search(begun(Configured(settings={"metric": "loss"})), "s3://b")
