"""A trial asks for input where no worker would restart the run: it waits, or asks in the terminal."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any
from uuid import UUID

import httpx
import pytest
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.objects import FlowRun, State
from prefect.client.schemas.responses import SetStateStatus
from prefect.exceptions import Abort
from prefect.states import Cancelled

import prefect_tune as pt
from prefect_tune.blocks import LocalTarget
from prefect_tune.core.journal_events import Question
from prefect_tune.suspension import resume_forms
from prefect_tune.suspension.suspend_and_resume import asked_in_terminal
from tests.flows.driver import Drivers, until
from tests.flows.training import experiment_at, owners_at

_NAME = "here"


def test_a_script_waits_for_the_answer_and_goes_on(drivers: Drivers, local_target: LocalTarget) -> None:
    driver = drivers.start(
        "tests.trainables.inquisitive:Inquisitive",
        {"asks_at": 3},
        target=local_target,
        experiment=_NAME,
        stop={"step": 4},
    )
    found: list[FlowRun] = []

    def waits() -> bool:
        if owner := owners_at(local_target, _NAME).get(driver.pid):
            found[:] = [client.read_flow_run(str(owner.flow_run))]  # type: ignore[arg-type]  # it takes text as well
        return bool(found and found[0].state and found[0].state.name == "Paused")

    with get_client(sync_client=True) as client:
        until(waits, seconds=90, what=lambda: driver.log[-3000:])
        resumed = client.resume_flow_run(found[0].id, run_input={"by": 5, "why": "or so"})
    assert resumed.status is SetStateStatus.ACCEPT, resumed.details
    outcome = driver.wait(seconds=120)
    assert (outcome.get("step"), outcome.get("metrics")) == (4, {"count": 2 + 2 * 5}), outcome
    assert [dict(each.answer) for each in experiment_at(local_target, _NAME).answers] == [{"by": 5, "why": "or so"}]


def as_soon_as_it_pauses(monkeypatch: pytest.MonkeyPatch, act: Callable[[SyncPrefectClient, UUID], object]) -> None:
    """Call `act` in the instant in which a run of this process, which has no terminal, is set Paused."""
    set_state = SyncPrefectClient.set_flow_run_state

    def set_and_act(client: SyncPrefectClient, run_id: UUID, state: State[Any], **options: Any) -> object:
        done = set_state(client, run_id, state, **options)
        if state.is_paused():
            act(client, run_id)
        return done

    monkeypatch.setattr(sys, "stdin", None)
    monkeypatch.setattr(SyncPrefectClient, "set_flow_run_state", set_and_act)


@pytest.mark.usefixtures("prefect_server")
def test_a_resume_in_the_instant_of_pausing_is_accepted(
    monkeypatch: pytest.MonkeyPatch, local_target: LocalTarget
) -> None:
    answers: list[dict[str, object]] = [{"go_on": False}, {}]

    def resume(client: SyncPrefectClient, run_id: UUID) -> None:
        resumed = client.resume_flow_run(run_id, run_input=answers.pop(0))
        assert resumed.status is SetStateStatus.ACCEPT, resumed.details

    as_soon_as_it_pauses(monkeypatch, resume)
    done = pt.durable_trainable(inquisitor, {"questions": 2}, target=local_target, experiment=_NAME, isolation="thread")
    assert done.metrics == {"loss": 0.0}
    given = [dict(each.answer) for each in experiment_at(local_target, _NAME).answers]
    assert given == [{"go_on": False}, {"go_on": True}]  # an untouched form means its defaults


@pytest.mark.usefixtures("prefect_server")
def test_an_answer_after_the_experiment_was_deleted_does_not_train_it_again_from_nothing(
    monkeypatch: pytest.MonkeyPatch, local_target: LocalTarget
) -> None:
    def delete_and_resume(client: SyncPrefectClient, run_id: UUID) -> None:
        pt.delete_experiment(_NAME, target=local_target)
        client.resume_flow_run(run_id, run_input={"go_on": True})

    as_soon_as_it_pauses(monkeypatch, delete_and_resume)
    with pytest.raises(pt.Superseded, match=f"experiment {_NAME!r}: the experiment was deleted at .* Stop here"):
        pt.durable_trainable(inquisitor, {"questions": 1}, target=local_target, experiment=_NAME, isolation="thread")
    with local_target.open(timeout=timedelta(seconds=9)) as store:
        assert [each.path for each in store.list("")] == [f"{_NAME}/generations/0000000002.json"]


@pytest.mark.long
@pytest.mark.usefixtures("prefect_server")
@pytest.mark.parametrize("status", [429, 500, 504])
def test_a_run_that_waits_for_an_answer_outlasts_an_api_that_fails(
    monkeypatch: pytest.MonkeyPatch, local_target: LocalTarget, status: int
) -> None:
    monkeypatch.setattr(resume_forms, "_POLL_INTERVAL", timedelta(seconds=0.1))
    calls = ("read_flow_run", "filter_flow_run_input")
    failing: list[str] = []

    def failing_first(call: str) -> Callable[..., object]:
        whole = getattr(SyncPrefectClient, call)

        def answer(client: SyncPrefectClient, *arguments: Any, **options: Any) -> object:
            if call in failing:
                failing.remove(call)
                request = httpx.Request("GET", "http://api")
                raise httpx.HTTPStatusError("ill", request=request, response=httpx.Response(status, request=request))
            return whole(client, *arguments, **options)

        return answer

    def resume(client: SyncPrefectClient, run_id: UUID) -> None:
        client.resume_flow_run(run_id, run_input={"go_on": False})
        failing[:] = calls

    for call in calls:
        monkeypatch.setattr(SyncPrefectClient, call, failing_first(call))
    as_soon_as_it_pauses(monkeypatch, resume)
    done = pt.durable_trainable(inquisitor, {"questions": 1}, target=local_target, experiment=_NAME, isolation="thread")
    assert (done.metrics, failing) == ({"loss": 0.0}, [])
    assert [dict(each.answer) for each in experiment_at(local_target, _NAME).answers] == [{"go_on": False}]


@pytest.mark.usefixtures("prefect_server")
def test_a_run_that_is_cancelled_while_it_waits_for_an_answer_ends(
    monkeypatch: pytest.MonkeyPatch, local_target: LocalTarget
) -> None:
    as_soon_as_it_pauses(monkeypatch, lambda client, run_id: client.set_flow_run_state(run_id, Cancelled(), force=True))
    with pytest.raises(Abort, match="is Cancelled now"):
        pt.durable_trainable(inquisitor, {"questions": 1}, target=local_target, experiment=_NAME, isolation="thread")


def test_what_is_typed_is_asked_for_again_until_it_can_be_meant(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fields = {"go_on": True, "count": 3, "rate": 0.5, "why": "", "how": ["slow", "fast"]}
    question = Question(key="k", question="Loss is flat; continue?", fields=fields)
    typed = ["perhaps", "n", "many", "4", "", "since", "soon", "fast"]
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join(typed) + "\n"))
    answer = asked_in_terminal("00003", question)
    assert answer == {"go_on": False, "count": 4, "rate": 0.5, "why": "since", "how": "fast"}
    said = capsys.readouterr().out
    assert "Trial 00003 asks: Loss is flat; continue?" in said
    assert "how (slow, fast) [slow]: " in said
    assert "go_on: expected yes or no, found 'perhaps'" in said


class _Keyboard(io.StringIO):
    def isatty(self) -> bool:
        return True


def inquisitor(config: Mapping[str, Any]) -> None:
    """Ask `config["questions"]` questions before the first report."""
    for number in range(config["questions"]):
        pt.ask(f"Question {number}?", {"go_on": True})
    pt.report({"loss": 0.0})


@pytest.mark.long
@pytest.mark.usefixtures("prefect_server")
def test_a_script_may_ask_more_often_than_it_may_be_started_again(
    monkeypatch: pytest.MonkeyPatch, local_target: LocalTarget
) -> None:
    questions = 3
    monkeypatch.setattr(sys, "stdin", _Keyboard("y\n" * questions))
    done = pt.durable_trainable(
        inquisitor,
        {"questions": questions},
        target=local_target,
        experiment=_NAME,
        isolation="thread",
        failures=pt.FailurePolicy(max_restarts=1),
    )
    assert done.metrics == {"loss": 0.0}
    assert len(experiment_at(local_target, _NAME).answers) == questions


@pytest.mark.deep
@pytest.mark.usefixtures("prefect_server")
def test_a_search_may_have_more_trials_that_ask_than_it_may_be_started_again(
    monkeypatch: pytest.MonkeyPatch, local_target: LocalTarget
) -> None:
    monkeypatch.setattr(sys, "stdin", _Keyboard("y\n" * 3))
    done = pt.tune(
        inquisitor,
        {"questions": 1, "trial": pt.grid_search([1, 2, 3])},
        target=local_target,
        experiment=_NAME,
        isolation="thread",
        num_samples=1,
        max_concurrent_trials=3,
        failures=pt.FailurePolicy(max_restarts=1),
    )
    assert [trial.metrics for trial in done.trials.values()] == [{"loss": 0.0}] * 3
