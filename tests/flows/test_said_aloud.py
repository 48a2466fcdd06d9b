"""What a search says where it would else be green and useless."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

import prefect_tune as pt
from prefect_tune.blocks import LocalTarget
from prefect_tune.core.events import Cause, Described, Event, GaveUp, TrialAdded
from prefect_tune.core.experiment import Experiment, after_event, nothing_yet
from prefect_tune.flows.agreement import say_code, say_errored, say_space, settings_today
from prefect_tune.flows.asked import Asked
from prefect_tune.flows.limits import Limits
from tests.trainables.moody import Moody, silent, train

LOG = logging.getLogger("a flow run")
SPACE: Mapping[str, Any] = {"x": pt.uniform(0, 1)}


def asked(trainable: Any = train, **options: Any) -> Asked:
    return Asked(trainable=trainable, target="./nowhere", **{"space": SPACE, "num_samples": 3, **options})


def searched(then: Asked, *news: Event) -> Experiment:
    """An experiment of three trials that was asked for so."""
    name = then.trainable.__name__
    added = [TrialAdded(trial=f"0000{n}", config={}, fingerprint={"trainable": name}, apart=True) for n in range(3)]
    return after(nothing_yet("e"), [Described(settings=settings_today(then)), *added, *news])


def after(state: Experiment, events: Sequence[Event]) -> Experiment:
    for event in events:
        state = after_event(state, event, state.number + 1)
    return state


def gave_up(*trials: str) -> list[Event]:
    return [GaveUp(trial=trial, cause=Cause.USER, message="KeyError: 'lr'") for trial in trials]


# ---------------------------------------------------------------------------------------------------- going on


def test_trials_that_errored_and_are_not_tried_again_are_told_of(caplog: pytest.LogCaptureFixture) -> None:
    state = searched(asked(), *gave_up("00000", "00002"))
    say_errored(state, Limits(max_concurrent_trials=1, reruns_errored=True), LOG)
    say_errored(searched(asked()), Limits(max_concurrent_trials=1), LOG)
    assert caplog.messages == []
    say_errored(state, Limits(max_concurrent_trials=1), LOG)
    assert caplog.messages[0].startswith(
        "2 trials errored in an earlier run and are not tried again: pass rerun_errored"
    )


def test_changed_code_promises_no_trial_that_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    changed = searched(asked())
    changed = after(changed, [Described(settings={**changed.settings, "code": "before"})])
    say_code(changed, asked(), LOG)
    (said,) = caplog.messages
    assert said.startswith("the source of the trainable has changed since experiment 'e' last ran (before -> ")
    assert "trials go on" not in said


def test_another_trainable_is_told_by_its_name(caplog: pytest.LogCaptureFixture) -> None:
    say_code(searched(asked()), asked(silent), LOG)
    (said,) = caplog.messages
    assert said.startswith("the trainable is another one than when experiment 'e' last ran (train ")
    assert " -> silent " in said


def test_another_space_under_the_same_name_is_told_of(caplog: pytest.LogCaptureFixture) -> None:
    state = searched(asked())
    say_space(state, asked(), LOG)
    say_space(state, asked(space={"x": {"uniform": [0, 1]}}), LOG)
    say_space(nothing_yet("e"), asked(), LOG)
    assert caplog.messages == []
    other = {"x": pt.uniform(0, 2)}
    say_space(state, asked(space=other), LOG)
    say_space(state, asked(space=other, num_samples=4), LOG)
    said = "the space is another one; 3 earlier trials are of the old one"
    assert caplog.messages == [
        f"{said}, and there are to be 3 in all: raise num_samples to draw from it",
        said,
    ]


def test_a_space_that_no_journal_holds_is_compared_with_none(caplog: pytest.LogCaptureFixture) -> None:
    in_code = {"x": pt.sample_from(lambda _config: 1)}
    say_space(searched(asked(space=in_code)), asked(), LOG)
    say_space(searched(asked()), asked(space=in_code), LOG)
    assert caplog.messages == []


@pytest.mark.usefixtures("prefect_server")
def test_a_search_that_trains_nothing_says_why(local_target: LocalTarget, caplog: pytest.LogCaptureFixture) -> None:
    common: dict[str, Any] = {"target": local_target, "experiment": "e", "metric": "loss", "isolation": "thread"}
    broken = pt.tune(Moody, {"fails": "raise"}, num_samples=1, **common)
    assert list(broken.errors) == ["00000"]
    assert "not tried again" not in caplog.text
    pt.tune(Moody, {"fails": "raise"}, num_samples=1, **common)
    assert caplog.text.count("1 trial errored in an earlier run and is not tried again") == 1
    pt.tune(Moody, {"fails": "not"}, num_samples=1, **common)
    assert "the space is another one; 1 earlier trial is of the old one, and there are to be 1 in all" in caplog.text
    (*_, last) = (each.message for each in caplog.records if each.levelname == "WARNING")
    assert last.startswith("e: 1 errored of 1 after ")
