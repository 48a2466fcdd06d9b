"""The reaction of a search to its scheduler's decisions and errors; without a server, and without training."""

from __future__ import annotations

import optuna
import pytest

from prefect_tune.attempt.trial_spec import AttemptRequest, TrialSpec
from prefect_tune.blocks import LocalTarget
from prefect_tune.core.experiment.experiment import Experiment
from prefect_tune.core.experiment.trial_transitions import Status
from prefect_tune.core.journal_events import (
    CheckpointRef,
    Committed,
    Decided,
    Event,
    Finished,
    Paused,
    Reported,
    Started,
    TrialAdded,
)
from prefect_tune.core.schedulers.asha import ASHA
from prefect_tune.core.schedulers.base import FIFO, Exploit, Pause, Scheduler
from prefect_tune.core.schedulers.hyperband import Hyperband
from prefect_tune.core.schedulers.median_stopping import MedianStopping
from prefect_tune.core.schedulers.pbt import PBT
from prefect_tune.core.storage.layout import JournalKey
from prefect_tune.core.values import StepReport
from prefect_tune.integrations.optuna import OptunaPruner
from prefect_tune.journal_access import Opening, current_owner, new_write_id, open_journal, write_directly
from tests.fakes.searches.limits import limits_of
from tests.flows.simulated_search import NAME, SimulatedSearch, StoppableExecutor

SCHEDULERS = {
    "asha stopping": ASHA(max_t=9, variant="stopping"),
    "asha promotion": ASHA(max_t=9, variant="promotion"),
    "hyperband": Hyperband(max_t=9),
    "median": MedianStopping(min_time_slice=2),
    "pbt": PBT(perturbation_interval=2, hyperparam_mutations={"x": [1.0, 2.0]}),
    "pruner": OptunaPruner(optuna.pruners.MedianPruner()),
}
SAVED = CheckpointRef(step=3, sequence=1, metrics={"loss": 1.0})


def began_elsewhere(target: LocalTarget, *events: Event) -> Experiment:
    """An experiment with one trial, whose own journal has events of its first attempt that no search has read."""
    added = TrialAdded(trial="00000", config={"x": 0.5})
    began = [added, Started(trial="00000", attempt=1, from_step=0), *events]
    own = JournalKey(experiment=NAME, generation=1, trial="00000")
    search = open_journal(target, JournalKey(experiment=NAME, generation=1), Opening(current_owner(), new_write_id()))
    open_journal(target, own, Opening(current_owner(), new_write_id(), lambda _: began))
    return write_directly(target, search, [added.model_copy(update={"own_journal": True})])


@pytest.mark.parametrize("scheduler", SCHEDULERS.values(), ids=SCHEDULERS)
def test_a_metric_that_nobody_reports_is_each_trials_error_and_the_search_goes_on(
    scheduler: Scheduler, local_target: LocalTarget
) -> None:
    acted = SimulatedSearch(local_target, samples=3, slots=2, metric="lsos")
    state = acted.run(scheduler)
    assert acted.are(state) == ["errored"] * 3
    assert all("'lsos'" in each.reason for each in state.trials.values())
    assert acted.are(acted.run(scheduler)) == ["errored"] * 3


@pytest.mark.parametrize("scheduler", [FIFO(), *SCHEDULERS.values()], ids=["fifo", *SCHEDULERS])
def test_a_trial_that_paused_without_a_decision_goes_on(scheduler: Scheduler, local_target: LocalTarget) -> None:
    began_elsewhere(
        local_target,
        Reported(trial="00000", report=StepReport(step=1, metrics={"accuracy": 1.0})),
        Paused(trial="00000", reason="expected a number for metric 'loss'"),
    )
    acted = SimulatedSearch(local_target, samples=2)
    assert set(acted.are(acted.run(scheduler))) == {"finished"}


PAUSING = {name: each for name, each in SCHEDULERS.items() if name not in ("asha stopping", "pruner")}
OTHERS = {**SCHEDULERS, "fifo": FIFO(), "smaller": Hyperband(max_t=1), "larger": Hyperband(max_t=27)}
CHANGES = [(one, other) for one in PAUSING for other in OTHERS if one != other]


@pytest.mark.long
@pytest.mark.parametrize("started", [7, *(pytest.param(count, marks=pytest.mark.deep) for count in (2, 5, 9))])
@pytest.mark.parametrize(("one", "other"), CHANGES)
def test_whatever_paused_goes_on_where_another_scheduler_decides_from_now_on(
    one: str, other: str, started: int, local_target: LocalTarget
) -> None:
    acted = SimulatedSearch(local_target)
    before = acted.run(PAUSING[one], until=lambda: acted.executor.start_count >= started and not len(acted.executor))
    assert "paused" in acted.are(before)
    after = acted.run(OTHERS[other])
    assert acted.are(after) == ["finished"] * 9
    assert acted.run(OTHERS[other]).trials == after.trials


@pytest.mark.parametrize("is_saved", [True, False])
def test_a_pause_that_was_decided_and_not_done_does_not_outlast_its_scheduler(
    is_saved: bool,
    local_target: LocalTarget,
) -> None:
    reported = Reported(trial="00000", report=StepReport(step=3, metrics={"loss": 1.0}))
    committed = [Committed(trial="00000", checkpoint=SAVED)] if is_saved else []
    pause = Decided(trial="00000", report=reported.report, decision=Pause(reason="waits for others"))
    write_directly(local_target, began_elsewhere(local_target, reported, *committed), [pause])
    acted = SimulatedSearch(local_target, StoppableExecutor(9, saved={"00000": SAVED} if is_saved else {}), samples=2)
    state = acted.run()
    assert [(str(each.status), each.step) for each in state.trials.values()] == [("completed", 9)] * 2


def test_a_trial_whose_end_nobody_had_heard_goes_on_where_the_budget_is_larger_now(local_target: LocalTarget) -> None:
    began = began_elsewhere(
        local_target,
        Reported(trial="00000", report=StepReport(step=3, metrics={"loss": 1.0})),
        Committed(trial="00000", checkpoint=SAVED),
        Finished(trial="00000", reason="step 3 of 3"),
    )
    assert began.trial("00000").status is Status.PENDING
    acted = SimulatedSearch(local_target, StoppableExecutor(9, saved={"00000": SAVED}), samples=1)
    for _ in range(2):
        state = acted.run(limits=limits_of(1, has_had_enough=lambda trial: trial.step >= 9))
        assert (state.trial("00000").status, state.trial("00000").step) == (Status.COMPLETED, 9)
        assert (state.trial("00000").attempt, acted.executor.start_count) == (2, 1)


class _Requests(StoppableExecutor):
    """Keeps the requests that exploit, each with the steps of the comparisons until then."""

    def start(self, spec: TrialSpec, request: AttemptRequest, attempt: int, absorbed: int) -> None:
        if request.exploit is not None:
            self.exploits.append((spec.trial.trial, request.exploit.source, request.milestone))
        super().start(spec, request, attempt, absorbed)

    exploits: list[tuple[str, str, int | None]]


def test_after_an_exploit_a_trial_is_compared_an_interval_after_its_sources_last_comparison(
    local_target: LocalTarget,
) -> None:
    """With one slot the source is behind: the trial does not wait until its own old step is passed again."""
    executor = _Requests(9)
    executor.exploits = []
    state = SimulatedSearch(local_target, executor, samples=2).run(SCHEDULERS["pbt"])
    past = [each for trial in state.trials.values() for each in trial.past if each.report is not None]
    compared: dict[str, int] = {}
    decided = []
    for each in sorted(past, key=lambda each: each.order):
        trial = next(name for name, known in state.trials.items() if each in known.past)
        if each.what == "decided" and each.report is not None:
            exploit = each.decision if isinstance(each.decision, Exploit) else None
            compared[trial] = compared[exploit.source] if exploit else each.report.step
            decided += [(trial, exploit.source, compared[trial] + 2)] if exploit else []
    assert executor.exploits == decided
    assert any(milestone == 4 for *_, milestone in decided)
