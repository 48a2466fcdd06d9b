"""Events of real runs on a real server: each is emitted once, follows the schema, and names stable resources."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, get_args

import pytest

import prefect_tune as pt
from prefect_tune.blocks import LocalTarget
from prefect_tune.core.errors import TrialFailed
from prefect_tune.core.journal_events import Event
from prefect_tune.core.prefect_events import PAYLOAD_VERSION, ExperimentEvent
from tests.fakes.feed import Feed
from tests.trainables.moody import Moody

Events = Sequence[dict[str, Any]]
MADE = "prefect.asset.materialization.succeeded"
NAMED: Mapping[str, Any] = {kind.name: kind for kind in ExperimentEvent.__subclasses__()}
JOURNALED: Mapping[str, Any] = {
    f"prefect-tune.{kind.model_fields['type'].default}": kind for kind in get_args(get_args(Event)[0])
}


def names_of(events: Events) -> list[str]:
    return [event["event"].removeprefix("prefect-tune.") for event in events]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> LocalTarget:
    return LocalTarget(path=str(tmp_path_factory.mktemp("events") / "target"))


@pytest.fixture(scope="module")
def runs(prefect_server: str, target: LocalTarget) -> Sequence[Events]:
    """Two runs of three trials: one trains, one raises at step 2, one is killed there once."""
    feed = Feed(prefect_server, f"{target.uri}/searched")
    by_run: list[Events] = []
    for run in (1, 2):
        pt.tune(
            Moody,
            {"fails": pt.grid_search(["not", "raise", "kill"]), "until": f"{target.path}-killed"},
            target=target,
            experiment="searched",
            metric="loss",
            num_samples=1,
            stop={"step": 2},
            checkpoint=pt.Cadence(every_steps=1),
            max_concurrent_trials=1,
        )
        events = feed.wait_until(lambda events, run=run: names_of(events).count("experiment.ended") == run)
        by_run.append(events[sum(map(len, by_run)) :])
    return by_run


def test_each_thing_that_happened_is_told_once(runs: Sequence[Events]) -> None:
    counts = Counter(names_of(runs[0]))
    better, referenced = counts.pop("experiment.best"), counts.pop("prefect.asset.referenced")
    assert counts == {
        "experiment.started": 1,
        "attempt-started": 4,
        "attempt-ended": 2,
        "trial-errored": 1,
        "trial-finished": 2,
        "checkpoint-committed": 5,
        MADE: 5 + better,
        "experiment.ended": 1,
    }
    assert 1 <= referenced <= better <= 2  # the first at once, the next after half a minute or at the end


def test_a_run_that_goes_on_tells_nothing_that_was_there_before(runs: Sequence[Events]) -> None:
    assert Counter(names_of(runs[1])) == {"experiment.started": 1, "experiment.ended": 1}
    assert [event["payload"]["term"] for events in runs for event in events if "term" in event["payload"]] == [1, 2]


def test_every_payload_is_by_the_schema(runs: Sequence[Events], target: LocalTarget) -> None:
    kinds = {**NAMED, **JOURNALED}
    ours = [event for events in runs for event in events if event["event"] in kinds]
    assert len({event["event"] for event in ours}) >= 8
    for event in ours:
        payload, kind = dict(event["payload"]), kinds[event["event"]]
        common = {name: payload.pop(name) for name in ("version", "target", "experiment")}
        assert common == {"version": PAYLOAD_VERSION, "target": target.uri, "experiment": "searched"}
        assert kind.model_validate({name: value for name, value in payload.items() if name in kind.model_fields})
        extra = {"reason_code", "status", "attempt", "step", "metrics", "recomputed_steps", "recomputed_is_lower_bound"}
        assert payload.keys() - kind.model_fields <= extra


def test_a_training_that_is_given_up_says_so(prefect_server: str, target: LocalTarget) -> None:
    with pytest.raises(TrialFailed):
        pt.durable_trainable(Moody, {"fails": "raise"}, target=target, experiment="fails", stop={"step": 3})
    events = Feed(prefect_server, f"{target.uri}/fails").wait_until(
        lambda events: "experiment.ended" in names_of(events)
    )
    names = ["experiment.started", "attempt-started", "attempt-ended", "trial-errored", "experiment.ended"]
    assert names_of(events) == names
    assert events[-1]["payload"]["trials"] == {"errored": 1}
