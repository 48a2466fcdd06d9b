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


def states_of_attempts(flow_run: str | UUID | None) -> Mapping[str, tuple[str | None, str | None]]:
    """Return name and message of the state of each attempt's task run, by the name of the run."""
    only = FlowRunFilter(id=FlowRunFilterId(any_=[UUID(str(flow_run))]))
    with get_client(sync_client=True) as client:
        runs = client.read_task_runs(flow_run_filter=only, limit=200)
    ours = sorted((each for each in runs if each.name.startswith("train ")), key=lambda each: each.name)
    return {each.name: (each.state_name, each.state.message if each.state else None) for each in ours}


def searched(
    target: LocalTarget, xs: Sequence[float], trainable: type[pt.Trainable] = Fragile, **options: Any
) -> Results:
    """Search these values of `x`, one after the other."""
    space = {"x": pt.grid_search(xs), "breaks": BREAKS_BELOW, **options.pop("also", {})}
    common: Mapping[str, Any] = {"target": target, "experiment": NAME, "num_samples": 1, "max_concurrent_trials": 1}
    defaults: Mapping[str, Any] = {"metric": "loss", "stop": {"step": 4}, "isolation": "thread"}
    results: Results = pt.tune(trainable, space, **common, **{**defaults, **options})
    return results


def run_of(results: Results) -> str:
    owner = results.experiment.owner
    assert owner is not None
    assert owner.flow_run is not None
    return owner.flow_run


def require_states(flow_run: str, expected: Mapping[str, tuple[str, str]]) -> None:
    """Wait until the server shows these attempts in these states, with messages that begin so."""

    def fits() -> bool:
        found = states_of_attempts(flow_run)
        return found.keys() == expected.keys() and all(
            found[name][0] == state and str(found[name][1]).startswith(message)
            for name, (state, message) in expected.items()
        )

    wait_until(fits, seconds=60, what=lambda: str(states_of_attempts(flow_run)))


# ------------------------------------------------------------------------------------------- ends of attempts


@pytest.mark.usefixtures("prefect_server")
def test_attempts_end_completed_pruned_or_failed_with_the_reason_and_the_search_continues(
    local_target: LocalTarget,
) -> None:
    results = searched(local_target, [0.1, 0.9, 0.05], scheduler=HALF)
    require_states(
        run_of(results),
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
    flow_run = run_of(searched(local_target, [0.3, 0.1], scheduler=promotion))

    def fits() -> bool:
        """The server records the states a moment later, one after the other."""
        found = states_of_attempts(flow_run)
        paused = found.get("train 00001 · attempt 1", ("", ""))[0] == "Paused"
        return paused and {name for name, _ in found.values()} <= {"Paused", "Completed", "Pruned"}

    wait_until(fits, seconds=60, what=lambda: str(states_of_attempts(flow_run)))


@pytest.mark.usefixtures("prefect_server")
def test_attempts_of_a_search_that_stops_end_interrupted(local_target: LocalTarget) -> None:
    endless = {"step_seconds": 0.05}
    results = searched(local_target, [0.1], also=endless, stop={"step": 100_000}, time_budget_seconds=2)
    require_states(run_of(results), {"train 00000 · attempt 1": ("Interrupted", "")})


# -------------------------------------------------------------------------------------- a search of errors only


@pytest.mark.usefixtures("prefect_server")
def test_a_search_in_which_every_trial_errored_fails_and_hands_out_its_results(local_target: LocalTarget) -> None:
    said = (
        r"2 of 2 trials errored: 1 with: ArithmeticError: x is too large: 0\.05 \(counting\.py:\d+\) \(such as 00000\);"
    )
    with pytest.raises(pt.SearchFailed, match=said) as failed:
        searched(local_target, [0.05, 0.06])
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
    def printed(verb: str, *options: str) -> str:
        capsys.readouterr()
        monkeypatch.setattr("sys.argv", ["prefect-tune", verb, local_target.uri, NAME, *options])
        with suppress(SystemExit):
            main()
        return capsys.readouterr().out

    with pytest.raises(
        pt.SearchFailed, match=r"3 of 3 trials errored, all with: KeyError: 'lr' \(test_\w+\.py:\d+\)\."
    ):
        searched(local_target, [0.1, 0.2, 0.3], Careless)
    raised = 'raise KeyError("lr")'
    assert caplog.text.count(raised) == 1
    assert caplog.text.count("the same error as trial 00000") == 2
    shown = printed("show")
    assert "00000, 00001, 00002  KeyError: 'lr' (test_states_of_runs.py:" in shown
    assert raised not in shown
    assert printed("show", "--trial", "00000").count(raised) == 1
    assert printed("report").count(raised) == 1


# ----------------------------------------------------------------------------------------------- after a kill


@pytest.mark.long
@pytest.mark.parametrize("flow", ["tune", "durable_trainable"])
def test_attempts_that_died_with_their_flow_are_crashed_by_the_run_that_takes_over(
    drivers: Drivers, local_target: LocalTarget, tmp_path: Path, flow: Flow
) -> None:
    witness, gate = tmp_path / "witness", tmp_path / "gate"
    config = {"x": 0.1, "witness": str(witness), "gate": str(gate)}
    options: dict[str, Any] = {"target": local_target, "experiment": NAME, "stop": {"step": 5}, "flow": flow}
    options |= {"checkpoint": Cadence(every_steps=1)}
    options |= {"metric": "loss", "num_samples": 2, "max_concurrent_trials": 2} if flow == "tune" else {}
    names = ["00000", "00001"] if flow == "tune" else ["trial"]

    first = drivers.start("tests.trainables.counting:Fragile", config, **options)
    wait_until(
        lambda: sum(each.step == 3 for each in acts_of(witness)) == len(names),
        seconds=120,
        what=lambda: first.log[-3000:],
    )
    dead = str(owners_at(local_target, NAME)[first.pid].flow_run)
    running = {f"train {name} · attempt 1": ("Running", "") for name in names}
    wait_until(lambda: {n: s for n, (s, _) in states_of_attempts(dead).items()} == dict.fromkeys(running, "Running"),
          seconds=60, what=lambda: str(states_of_attempts(dead)))  # fmt: skip
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
    def calling() -> None:
        if flow_name == "tune":
            searched(local_target, [0.1])
        else:
            options: Any = {"target": local_target, "experiment": NAME, "stop": {"step": 1}, "isolation": "thread"}
            pt.durable_trainable(Fragile, {"x": 0.1}, **options)

    @flow
    def parent() -> None:
        calling()

    parent()
    owners = owners_at(local_target, NAME).values()
    runs = {vars(each).get("flow_run_id") for each in caplog.records if f"experiment '{NAME}'" in each.getMessage()}
    assert runs == {each.flow_run for each in owners}
    assert {each.task_run for each in owners} == {None}


# What a trainable logs by Prefect's means is in the log of its run, although its process has no flow run.


@pytest.mark.usefixtures("prefect_server")
@pytest.mark.parametrize(
    ("module", "is_imported", "said"),
    [
        ("logs_to_run", False, "INFO trial: said to the run"),
        pytest.param("logs_to_run_at_once", True, "WARNING trial: said at once, 42", marks=pytest.mark.long),
    ],
)
def test_a_trainable_logs_by_the_run_logger_and_by_extra_loggers(
    module: str,
    is_imported: bool,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("PREFECT_LOGGING_EXTRA_LOGGERS", "other, a_library")
    trainable = f"tests.trainables.{module}:train"
    results = pt.tune(trainable, {}, target=str(tmp_path), metric="loss", num_samples=1)
    assert results.trials["00000"].metrics["is_imported"] is is_imported
    lines = [each.removeprefix("trial 00000: ") for each in caplog.messages]
    assert said in lines
    assert "INFO a_library: said by a library" in lines
    assert not any("nobody" in each for each in lines)


class Deletes(Callback):
    """Deletes the flow run of its search in the middle."""

    def on_trial_result(self, *_: object) -> None:
        with get_client(sync_client=True) as client:
            client.delete_flow_run(flow_run.id)


@pytest.mark.usefixtures("prefect_server")
def test_a_flow_run_that_is_deleted_while_it_runs_ends_with_one_sentence(tmp_path: Path) -> None:
    deletes = Deletes()
    with pytest.raises(pt.TuneError, match="was deleted on the Prefect server while it ran") as deleted:
        pt.tune(_once, {}, target=str(tmp_path), metric="loss", num_samples=1, isolation="thread", callbacks=[deletes])
    assert "\n" not in str(deleted.value)


def _once(_config: object) -> dict[str, float]:
    return {"loss": 1.0}
