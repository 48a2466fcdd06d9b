"""Attempts as runs of a deployment: each is started once, even if the API fails meanwhile."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self, cast
from uuid import UUID, uuid4

import httpx
import pytest
from prefect.client.schemas.filters import FlowRunFilter
from prefect.client.schemas.objects import ConcurrencyLimitStrategy, ConcurrencyOptions, FlowRun, State, WorkPoolStatus
from prefect.client.schemas.responses import OrchestrationResult, SetStateStatus, StateAcceptDetails
from prefect.exceptions import ObjectNotFound, PrefectHTTPStatusError
from prefect.logging import disable_run_logger
from prefect.states import Cancelled, Cancelling, Completed, Crashed, Pending, Running, Scheduled

from prefect_tune import storage_retries
from prefect_tune.attempt.attempt import make_node_state
from prefect_tune.attempt.trial_spec import AttemptRequest, TrialSpec
from prefect_tune.blocks import LocalTarget
from prefect_tune.core.errors import InvalidInput
from prefect_tune.core.experiment.trial_transitions import Trial
from prefect_tune.core.reasons import Reason, make_reason
from prefect_tune.executors import launchers
from prefect_tune.executors.launchers import DeploymentLauncher
from prefect_tune.executors.remote_executor import RemoteSearchChannel
from prefect_tune.executors.trial_executor import AttemptCancelledError
from tests.fakes.searches.far_attempts import make_spec


def make_request(attempt: int) -> AttemptRequest:
    """Make the request for an attempt of a trial; each attempt has its outbox."""
    trial = Trial(id="00000", config={}, attempt=attempt - 1, outbox=attempt, outbox_count=attempt)
    return AttemptRequest(owner_term=1, trial=trial)


class Api:
    """An API that makes one run for each key, fails as `troubles` say, and is the callers' clock."""

    def __init__(self) -> None:
        self.troubles: list[Callable[[], None]] = []
        self.runs: dict[str, FlowRun] = {}
        self.slept: list[float] = []
        self.polled: list[list[UUID]] = []
        self.earlier: list[State[Any]] = []
        """The states that each run has had before its present one."""
        self.strategy = ConcurrencyLimitStrategy.ENQUEUE
        self.is_paused = False

    def run_deployment(self, _name: str, *, idempotency_key: str, **_: Any) -> FlowRun:
        run = FlowRun(id=uuid4(), flow_id=uuid4(), name="a run", state=Scheduled())
        run = self.runs.setdefault(idempotency_key, run)
        if self.troubles:
            self.troubles.pop(0)()
        return run

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None: ...

    def read_flow_run(self, run_id: UUID) -> FlowRun:
        return next(run for run in self.runs.values() if run.id == run_id)

    def read_flow_runs(self, *, flow_run_filter: FlowRunFilter, limit: int) -> list[FlowRun]:
        if flow_run_filter.id is not None:
            self.polled.append(list(flow_run_filter.id.any_ or ()))
            return [run for run in self.runs.values() if run.id in self.polled[-1]][:limit]
        assert flow_run_filter.idempotency_key is not None
        if self.troubles:
            self.troubles.pop(0)()
        return [self.runs[key] for key in flow_run_filter.idempotency_key.any_ or () if key in self.runs][:limit]

    def set_flow_run_state(self, run: UUID, state: State[Any]) -> OrchestrationResult[Any]:
        self.read_flow_run(run).state = state
        return OrchestrationResult(state=state, status=SetStateStatus.ACCEPT, details=StateAcceptDetails())

    def read_flow_run_states(self, run: UUID) -> list[State[Any]]:
        state = self.read_flow_run(run).state
        return self.earlier + ([] if state is None else [state])

    def read_deployment_by_name(self, _name: str) -> SimpleNamespace:
        options = ConcurrencyOptions(collision_strategy=self.strategy)
        return SimpleNamespace(concurrency_options=options, work_pool_name="pool", work_queue_name=None)

    def read_work_pool(self, _name: str) -> SimpleNamespace:
        return SimpleNamespace(is_paused=self.is_paused, concurrency_limit=None, status=WorkPoolStatus.READY)

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)

    def monotonic(self) -> float:
        return sum(self.slept)


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> Iterator[Api]:
    api = Api()
    monkeypatch.setattr(launchers, "run_deployment", api.run_deployment)
    monkeypatch.setattr(launchers, "time", api)
    monkeypatch.setattr(storage_retries, "_pause", lambda seconds: api.sleep(seconds))  # noqa: PLW0108  tests replace `sleep`
    monkeypatch.setattr(storage_retries, "_JITTER", 0)
    monkeypatch.setattr(launchers, "get_client", lambda **_: api)
    with disable_run_logger():
        yield api


@pytest.fixture
def spec(tmp_path: Path) -> TrialSpec:
    return make_spec(LocalTarget(path=str(tmp_path)), trainable="package.module:Name")


def start_attempt(spec: TrialSpec, deployment: DeploymentLauncher | None = None) -> Callable[[], object]:
    deployment = deployment or DeploymentLauncher("flow/deployment")
    run = deployment.start_attempt(spec, make_request(1), 1)
    return lambda: deployment.wait_for_run(run)


def finish_runs(api: Api) -> None:
    api.slept.append(2.0)
    for run in api.runs.values():
        run.state = Completed()


def refuse_connection() -> None:
    raise httpx.ConnectError("All connection attempts failed")


def answer_with(status: int) -> Callable[[], None]:
    def answer() -> None:
        response = httpx.Response(status, request=httpx.Request("POST", "http://api"))
        raise PrefectHTTPStatusError(str(status), request=response.request, response=response)

    return answer


def raise_not_found() -> None:
    raise ObjectNotFound(http_exc=Exception("404"))


def test_an_api_that_restarts_is_waited_for_and_no_attempt_is_begun_twice(api: Api, spec: TrialSpec) -> None:
    api.troubles = [refuse_connection, answer_with(503), answer_with(429)]
    start_attempt(spec)
    assert (len(api.runs), api.slept) == (1, [1.0, 2.0, 4.0])


@pytest.mark.parametrize(
    ("trouble", "error"), [(answer_with(422), PrefectHTTPStatusError), (raise_not_found, InvalidInput)]
)
def test_what_waiting_cannot_mend_is_said_at_once(
    api: Api, spec: TrialSpec, trouble: Callable[[], None], error: type[Exception]
) -> None:
    api.troubles = [trouble]
    with pytest.raises(error):
        start_attempt(spec)
    assert api.slept == []


@pytest.mark.parametrize("try_seconds", [0.0, 120.0])
def test_an_api_that_does_not_come_back_is_not_waited_for_for_ever(
    api: Api, spec: TrialSpec, try_seconds: float
) -> None:
    def time_out() -> None:
        api.slept.append(try_seconds)
        raise httpx.ConnectTimeout("")

    api.troubles = [time_out] * 99
    with pytest.raises(httpx.ConnectTimeout):
        start_attempt(spec)
    assert 240 < sum(api.slept) <= 300 + 1.25 * try_seconds


def test_a_start_is_not_retried_once_its_process_ends(api: Api, spec: TrialSpec) -> None:
    api.troubles, abandoned = [refuse_connection] * 99, threading.Event()
    abandoned.set()
    with pytest.raises(httpx.ConnectError), storage_retries.stopping_retries_on(abandoned):
        start_attempt(spec)
    assert api.slept == []


def test_one_request_in_two_seconds_asks_for_all_runs(api: Api, spec: TrialSpec) -> None:
    deployment = DeploymentLauncher("flow/deployment")
    runs = [deployment.start_attempt(spec, make_request(attempt), attempt) for attempt in (1, 2, 3)]
    barrier = threading.Barrier(4)

    def sleep(_: float) -> None:  # each of the three threads polls once a tick
        barrier.wait(timeout=60)
        barrier.wait(timeout=60)

    api.sleep = sleep  # type: ignore[assignment, method-assign]  # for this one
    threads = [threading.Thread(target=deployment.wait_for_run, args=(run,), daemon=True) for run in runs]
    for thread in threads:
        thread.start()
    for tick in range(5):
        barrier.wait(timeout=60)
        api.slept.append(2.0)
        if tick == 4:
            for run in api.runs.values():
                run.state = Completed()
        barrier.wait(timeout=60)
    for thread in threads:
        thread.join(timeout=60)
    assert len(api.polled) == 6
    assert set(api.polled[-1]) == set(runs)


def test_a_start_does_not_wait_for_the_api_in_the_thread_of_the_search(api: Api, spec: TrialSpec) -> None:
    api.troubles = [refuse_connection]
    wait = DeploymentLauncher("flow/deployment")(
        spec, make_request(1), RemoteSearchChannel(spec.target, spec.trial, 1), 1
    )
    assert (api.slept, api.runs) == ([], {})
    api.sleep = lambda _: finish_runs(api)  # type: ignore[assignment, method-assign]  # for this one
    wait()
    assert len(api.runs) == 1


@pytest.mark.parametrize("state", [Scheduled(), Pending()], ids=["no-worker", "starting"])
def test_a_run_that_has_not_begun_when_its_search_ends_is_cancelled_and_begun_as_another_by_the_next(
    api: Api, spec: TrialSpec, state: State
) -> None:
    deployment = DeploymentLauncher("flow/deployment")
    wait = start_attempt(spec, deployment)
    (run,) = api.runs.values()
    run.state = state
    deployment.cancel_unstarted_attempts()
    wait()
    assert run.state.is_cancelled()
    start_attempt(spec)
    assert [flow_run.state is not None and flow_run.state.is_scheduled() for flow_run in api.runs.values()] == [
        False,
        True,
    ]


def test_a_run_that_has_begun_is_waited_for_when_its_search_ends(
    api: Api, spec: TrialSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    deployment = DeploymentLauncher("flow/deployment")
    wait = start_attempt(spec, deployment)
    (run,) = api.runs.values()
    run.state = Running()

    def end_run(seconds: float) -> None:
        api.slept.append(seconds)
        assert run.state is not None
        assert run.state.is_running()
        run.state = Completed()

    monkeypatch.setattr(api, "sleep", end_run)
    deployment.cancel_unstarted_attempts()
    wait()
    assert run.state.is_completed()


# ----------------------------------------------------------------------------------------- the run of an attempt


def crash_newest_run(api: Api) -> None:
    """Set the newest run to Crashed, before its attempt has begun."""
    list(api.runs.values())[-1].state = Crashed()


def test_an_attempt_whose_first_run_died_is_found_by_the_next_search_in_its_second(api: Api, spec: TrialSpec) -> None:
    search = DeploymentLauncher("flow/deployment")
    start_attempt(spec, search)
    crash_newest_run(api)
    start_attempt(spec, search)
    _, second = api.runs.values()
    second.state = Running()
    pauses: list[float] = []

    def end_run(seconds: float) -> None:
        pauses.append(seconds)
        api.slept.append(seconds)
        second.state = Completed()

    api.sleep = end_run  # type: ignore[method-assign]  # for this one
    start_attempt(spec)()
    assert pauses, "the live run is waited for, and not the dead one"
    assert len(api.runs) == 2


def test_the_second_run_is_looked_for_again_where_the_api_is_away(api: Api, spec: TrialSpec) -> None:
    search = DeploymentLauncher("flow/deployment")
    start_attempt(spec, search)
    crash_newest_run(api)
    start_attempt(spec, search)
    api.troubles = [lambda: None, refuse_connection]
    start_attempt(spec)
    assert (api.slept, len(api.runs)) == ([1.0], 2)


def test_where_all_runs_of_an_attempt_have_died_the_next_is_made_only_when_it_is_begun_again(
    api: Api, spec: TrialSpec
) -> None:
    search = DeploymentLauncher("flow/deployment")
    for _ in range(2):
        start_attempt(spec, search)
        crash_newest_run(api)
    resumed = DeploymentLauncher("flow/deployment")
    start_attempt(spec, resumed)()
    assert len(api.runs) == 2
    start_attempt(spec, resumed)
    assert [key.rpartition("/")[2] for key in api.runs] == ["1", "2", "3"]


def test_a_run_that_a_deleted_experiment_of_the_same_name_has_left_in_the_pool_is_not_taken(
    api: Api, spec: TrialSpec
) -> None:
    for experiment_id in ("deleted", "again", "again"):
        request = replace(make_request(1), experiment_id=experiment_id)
        DeploymentLauncher("flow/deployment").start_attempt(spec, request, 1)
    assert len(api.runs) == 2


@pytest.mark.parametrize(
    ("reason", "ends_as"),
    [(make_reason("node-silent", node=0, seconds=40.0), "Crashed"), (make_reason("attempt-over"), "Scheduled")],
)
def test_the_run_of_a_node_0_that_has_lost_its_machine_is_marked_once_the_other_nodes_have_ended(
    reason: Reason, ends_as: str, api: Api, spec: TrialSpec
) -> None:
    deployment = DeploymentLauncher("flow/deployment")
    first = deployment.start_attempt(replace(spec, nodes_per_trial=3), make_request(1), 1)
    others = [run for run in api.runs.values() if run.id != first]
    assert len(others) == 2
    deployment._awaited.add(first)  # as `wait_for_run` does

    others[0].state = make_node_state(reason)
    ended = [_poll_for(api, deployment, first, 60)]
    others[1].state = make_node_state(make_reason("attempt-over"))
    ended += [_poll_for(api, deployment, first, seconds) for seconds in (28, 6)]
    assert ended == [False, False, ends_as == "Crashed"]
    state = api.read_flow_run(first).state
    assert state is not None
    assert (state.name, state.message) == (ends_as, str(reason) if ends_as == "Crashed" else None)


def _poll_for(api: Api, deployment: DeploymentLauncher, run: UUID, seconds: float) -> bool:
    """Poll every 2 s for so long; return whether the run has ended."""
    for _ in range(int(seconds / 2)):
        api.slept.append(2.0)
        ended = deployment._poll_and_check_end(run)
    return ended


def cancel_runs(api: Api) -> None:
    for run in api.runs.values():
        if run.state is not None and not run.state.is_final():
            run.state = Cancelled()


@pytest.mark.parametrize("earlier", [[Running(), Cancelling()], [Scheduled()]])
def test_a_run_that_a_person_cancels_stops_its_trial(api: Api, spec: TrialSpec, earlier: list[State[Any]]) -> None:
    wait, api.earlier = start_attempt(spec), earlier
    cancel_runs(api)
    with pytest.raises(AttemptCancelledError, match="was cancelled"):
        wait()


def test_a_trial_that_ends_as_cancelled_by_itself_is_not_stopped(api: Api, spec: TrialSpec) -> None:
    wait, api.earlier = start_attempt(spec), [Running()]  # such as by SIGTERM to its machine
    cancel_runs(api)
    wait()


def test_a_run_for_which_its_deployment_has_no_slot_is_begun_again(
    api: Api, spec: TrialSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launchers, "_SLOT_RETRY_SECONDS", 0.01)
    api.strategy, launcher = ConcurrencyLimitStrategy.CANCEL_NEW, DeploymentLauncher("flow/deployment")
    wait = launcher(spec, make_request(1), cast("RemoteSearchChannel", None), 1)
    api.troubles = [lambda: cancel_runs(api), lambda: cancel_runs(api)]
    api.sleep = lambda seconds: finish_runs(api) if len(api.runs) > 2 else api.slept.append(seconds)  # type: ignore[method-assign]  # it ends the third
    wait()
    assert len(api.runs) == 3


def test_the_log_says_once_that_a_paused_pool_begins_no_trial(
    api: Api, spec: TrialSpec, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launchers, "get_run_logger", lambda: logging.getLogger("run"))
    api.is_paused, wait = True, start_attempt(spec)
    api.sleep = lambda seconds: finish_runs(api) if len(api.slept) > 20 else api.slept.append(seconds)  # type: ignore[method-assign]  # it ends the run
    wait()
    message = "trials cannot start: work pool 'pool' is paused; to resume it: prefect work-pool resume pool"
    assert caplog.messages.count(message) == 1
