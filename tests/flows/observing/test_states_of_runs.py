"""States and logs of flow runs and task runs: Prefect's UI shows how and why each attempt ended."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from prefect import flow, task
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId
from prefect.runtime import flow_run

import prefect_tune as pt
from prefect_tune.blocks import LocalTarget
from prefect_tune.callbacks import Callback
from prefect_tune.cli import main
from prefect_tune.core.experiment.retention import Cadence
from prefect_tune.core.schedulers.asha import ASHA
from prefect_tune.results import Results
from tests.fakes.trial_processes import wait_until
from tests.flows.driver import Drivers, Flow
from tests.flows.training import owners_at, state_of_flow_run
from tests.trainables.counting import Fragile
from tests.trainables.witness import acts_of

NAME = "shown"
HALF = ASHA(max_t=4, reduction_factor=2, variant="stopping")
BREAKS_BELOW = pt.sample_from(lambda config: config["x"] < 0.07)


class Careless(Fragile):
    """Every step raises the same error."""

    def step(self) -> Mapping[str, Any]:
        raise KeyError("lr")


def read_attempt_states(flow_run: str | UUID | None) -> Mapping[str, tuple[str | None, str | None]]:
    """Return the state's name and message of each attempt's task run, by the name of the task run."""
    run_filter = FlowRunFilter(id=FlowRunFilterId(any_=[UUID(str(flow_run))]))
    with get_client(sync_client=True) as client:
        runs = client.read_task_runs(flow_run_filter=run_filter, limit=200)
    runs = [run for run in runs if run.name.startswith("train ")]
    return {run.name: (run.state_name, run.state.message if run.state else None) for run in runs}


def run_search(
    target: LocalTarget, xs: Sequence[float], trainable: type[pt.Trainable] = Fragile, **options: Any
) -> Results:
    """Search these values of `x`, one trial after the other."""
    space = {"x": pt.grid_search(xs), "breaks": BREAKS_BELOW, **options.pop("also", {})}
    common: Mapping[str, Any] = {"target": target, "experiment": NAME, "num_samples": 1, "max_concurrent_trials": 1}
    defaults: Mapping[str, Any] = {"metric": "loss", "stop": {"step": 4}, "isolation": "thread"}
    return pt.tune(trainable, space, **common, **{**defaults, **options})


def flow_run_of(results: Results) -> str:
    assert results.experiment.owner is not None
    assert results.experiment.owner.flow_run is not None
    return results.experiment.owner.flow_run


def require_states(flow_run: str, expected: Mapping[str, tuple[str, str]]) -> None:
    """Wait until the server shows these attempts in these states, with these prefixes of their messages."""

    def is_as_expected() -> bool:
        states = read_attempt_states(flow_run)
        return states.keys() == expected.keys() and all(
            states[name][0] == state and str(states[name][1]).startswith(message)
            for name, (state, message) in expected.items()
        )

    wait_until(is_as_expected, seconds=60, what=lambda: str(read_attempt_states(flow_run)))


# ------------------------------------------------------------------------------------------- ends of attempts


@pytest.mark.usefixtures("prefect_server")
def test_attempts_end_completed_pruned_or_failed_with_the_reason_and_the_search_continues(
    local_target: LocalTarget,
) -> None:
    results = run_search(local_target, [0.1, 0.9, 0.05], scheduler=HALF)
    require_states(
        flow_run_of(results),
        {
            "train 00000 · attempt 1": ("Completed", "step 4 of 4"),
            "train 00001 · attempt 1": ("Pruned", "loss = 0.9 at step 1"),
            "train 00002 · attempt 1": ("Failed", "ArithmeticError: x is too large: 0.05"),
        },
    )
    state, _ = state_of_flow_run(next(iter(owners_at(local_target, NAME).values())))
    assert state == "Completed"


@pytest.mark.usefixtures("prefect_server")
def test_attempts_that_give_their_slots_to_others_end_paused(local_target: LocalTarget) -> None:
    promotion = ASHA(max_t=4, reduction_factor=2, variant="promotion")
    flow_run = flow_run_of(run_search(local_target, [0.3, 0.1], scheduler=promotion))

    def is_paused() -> bool:  # the server records the states one after the other
        states = {name: state for name, (state, _) in read_attempt_states(flow_run).items()}
        ends = {"Paused", "Completed", "Pruned"}
        return states.get("train 00001 · attempt 1") == "Paused" and {*states.values()} <= ends

    wait_until(is_paused, seconds=60, what=lambda: str(read_attempt_states(flow_run)))


@pytest.mark.usefixtures("prefect_server")
def test_attempts_of_a_search_that_stops_end_interrupted(local_target: LocalTarget) -> None:
    endless = {"step_seconds": 0.05}
    results = run_search(local_target, [0.1], also=endless, stop={"step": 100_000}, time_budget_seconds=2)
    require_states(flow_run_of(results), {"train 00000 · attempt 1": ("Interrupted", "")})


# -------------------------------------------------------------------------------------- a search of errors only


@pytest.mark.usefixtures("prefect_server")
def test_a_search_in_which_every_trial_errored_fails_and_hands_out_its_results(local_target: LocalTarget) -> None:
    pattern = (
        r"2 of 2 trials errored: 1 with: ArithmeticError: x is too large: 0\.05 \(counting\.py:\d+\) \(such as 0{5}\);"
    )
    with pytest.raises(pt.SearchFailed, match=pattern) as failed:
        run_search(local_target, [0.05, 0.06])
    results = failed.value.results
    assert isinstance(results, Results)
    assert list(results.errors) == ["00000", "00001"]
    state, message = state_of_flow_run(next(iter(owners_at(local_target, NAME).values())))
    assert (state, message) == ("Failed", str(failed.value))


@pytest.mark.usefixtures("prefect_server")
def test_an_error_of_all_trials_is_said_once_and_its_traceback_logged_once(
    local_target: LocalTarget,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def run_cli(verb: str, *options: str) -> str:
        capsys.readouterr()
        monkeypatch.setattr("sys.argv", ["prefect-tune", verb, local_target.uri, NAME, *options])
        with suppress(SystemExit):
            main()
        return capsys.readouterr().out

    pattern = r"3 of 3 trials errored, all with: KeyError: 'lr' \(test_\w+\.py:\d+\)\."
    with pytest.raises(pt.SearchFailed, match=pattern):
        run_search(local_target, [0.1, 0.2, 0.3], Careless)
    raised = 'raise KeyError("lr")'
    assert caplog.text.count(raised) == 1
    assert caplog.text.count("the same error as trial 00000") == 2
    output = run_cli("show")
    assert "00000, 00001, 00002  KeyError: 'lr' (test_states_of_runs.py:" in output
    assert raised not in output
    assert run_cli("show", "--trial", "00000").count(raised) == 1
    assert run_cli("report").count(raised) == 1


# ----------------------------------------------------------------------------------------------- after a kill


@pytest.mark.long
@pytest.mark.parametrize("flow", ["tune", "durable_trainable"])
def test_attempts_that_died_with_their_flow_are_crashed_by_the_run_that_takes_over(
    drivers: Drivers, local_target: LocalTarget, tmp_path: Path, flow: Flow
) -> None:
    witness, gate = tmp_path / "witness", tmp_path / "gate"
    config = {"x": 0.1, "witness": str(witness), "gate": str(gate)}
    options: dict[str, Any] = {"target": local_target, "experiment": NAME, "stop": {"step": 5}, "flow": flow}
    options["checkpoint"] = Cadence(every_steps=1)
    options |= {"metric": "loss", "num_samples": 2, "max_concurrent_trials": 2} if flow == "tune" else {}
    names = ["00000", "00001"] if flow == "tune" else ["trial"]

    first = drivers.start("tests.trainables.counting:Fragile", config, **options)
    first.wait_until(lambda: sum(act.step == 3 for act in acts_of(witness)) == len(names), seconds=120)
    dead = str(owners_at(local_target, NAME)[first.pid].flow_run)
    running = {f"train {name} · attempt 1": ("Running", "") for name in names}
    require_states(dead, running)
    first.kill_everything()
    gate.touch()
    second = drivers.start("tests.trainables.counting:Fragile", config, **options)
    assert "error" not in second.wait(seconds=200)

    owner = owners_at(local_target, NAME)[second.pid]
    require_states(
        dead, dict.fromkeys(running, ("Crashed", f"its process was lost; flow run {owner.name!r} took over"))
    )
    require_states(str(owner.flow_run), {f"train {name} · attempt 2": ("Completed", "step 5 of 5") for name in names})


# ------------------------------------------------------------------------------------------------------ the log


@pytest.mark.usefixtures("prefect_server")
@pytest.mark.parametrize("flow_name", ["tune", "durable_trainable"])
def test_what_a_task_calls_logs_to_its_own_flow_run_and_its_attempts_are_not_taken_for_that_task(
    flow_name: str, local_target: LocalTarget, caplog: pytest.LogCaptureFixture
) -> None:
    @task
    def call_search() -> None:
        if flow_name == "tune":
            run_search(local_target, [0.1])
        else:
            options: Any = {"target": local_target, "experiment": NAME, "stop": {"step": 1}, "isolation": "thread"}
            pt.durable_trainable(Fragile, {"x": 0.1}, **options)

    @flow
    def parent() -> None:
        call_search()

    parent()
    owners = owners_at(local_target, NAME).values()
    runs = {
        vars(record).get("flow_run_id") for record in caplog.records if f"experiment '{NAME}'" in record.getMessage()
    }
    assert runs == {owner.flow_run for owner in owners}
    assert {owner.task_run for owner in owners} == {None}


# What a trainable logs by Prefect's means is in the log of its run, although its process has no flow run.


@pytest.mark.usefixtures("prefect_server")
@pytest.mark.parametrize(
    ("module", "is_imported", "message"),
    [
        ("logs_to_run", False, "INFO trial: said to the run"),
        pytest.param("logs_to_run_at_once", True, "WARNING trial: said at once, 42", marks=pytest.mark.long),
    ],
)
def test_a_trainable_logs_by_the_run_logger_and_by_extra_loggers(
    module: str,
    is_imported: bool,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("PREFECT_LOGGING_EXTRA_LOGGERS", "other, a_library")
    results = pt.tune(f"tests.trainables.{module}:train", {}, target=str(tmp_path), metric="loss", num_samples=1)
    assert results.trials["00000"].metrics["is_imported"] is is_imported
    lines = [line.removeprefix("trial 00000: ") for line in caplog.messages]
    assert message in lines
    assert "INFO a_library: said by a library" in lines
    assert not any("nobody" in line for line in lines)


class Deletes(Callback):
    """Deletes the flow run of its search in the middle."""

    def on_trial_result(self, *_: object) -> None:
        with get_client(sync_client=True) as client:
            client.delete_flow_run(flow_run.id)


@pytest.mark.usefixtures("prefect_server")
def test_a_flow_run_that_is_deleted_while_it_runs_ends_with_one_sentence(tmp_path: Path) -> None:
    def train(_config: object) -> dict[str, float]:
        return {"loss": 1.0}

    options: dict[str, Any] = {"metric": "loss", "num_samples": 1, "isolation": "thread", "callbacks": [Deletes()]}
    with pytest.raises(pt.TuneError, match="was deleted on the Prefect server while it ran") as raised:
        pt.tune(train, {}, target=str(tmp_path), **options)
    assert "\n" not in str(raised.value)
