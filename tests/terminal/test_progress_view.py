"""The progress of a running search: counts, best trial, rates, rungs, notes; and all of it as text."""

from __future__ import annotations

import io
import sys
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from rich.console import Console

from prefect_tune.core.experiment.experiment import Experiment, apply_event, make_empty_experiment
from prefect_tune.core.experiment.trial_transitions import Phase, Status, Trial
from prefect_tune.core.journal_events import (
    AttemptEnded,
    AttemptStarted,
    Cause,
    CheckpointRef,
    DecisionMade,
    Event,
    StepReported,
    StopRequested,
    TrialAdded,
    TrialErrored,
    TrialFinished,
)
from prefect_tune.core.schedulers.asha import ASHA
from prefect_tune.core.schedulers.base import FIFO, Continue
from prefect_tune.core.schedulers.hyperband import Hyperband
from prefect_tune.core.schedulers.pbt import PBT
from prefect_tune.core.search.objective import Objective
from prefect_tune.core.values import StepReport
from prefect_tune.terminal.progress_view import (
    Note,
    ProgressState,
    SearchExtent,
    estimate_remaining_steps,
    fit_columns,
    render_progress,
    render_progress_line,
    resumes_all_paused_trials,
)
from tests.fakes.checkpoints import first_generation
from tests.fakes.searches.journal_builder import all_statuses
from tests.fakes.searches.tracked_progress import TrackedProgress

NOON = datetime(2026, 11, 21, 12, tzinfo=UTC)
LOSS = Objective(metrics=("loss",), modes=("min",))


class Search:
    """Sends events to a tracker, as a driver does."""

    def __init__(self, extent: SearchExtent, experiment: Experiment | None = None) -> None:
        self.experiment = experiment or make_empty_experiment(first_generation("e"))
        self.tracker = TrackedProgress(self.experiment, extent, 0.0, NOON)

    def apply(self, *events: Event) -> None:
        for event in events:
            self.experiment = apply_event(self.experiment, event, self.experiment.entry_count + 1)
            self.tracker.apply_event(event, self.experiment)

    def start_trials(self, *trials: str) -> None:
        for trial in trials:
            self.apply(TrialAdded(trial=trial, config={"lr": 0.1}))
            self.apply(AttemptStarted(trial=trial, attempt=1, from_step=0))

    def report(self, trial: str, step: int, loss: float) -> None:
        self.tracker.apply_report(trial, make_report(step, loss))


def make_report(step: int, loss: float) -> StepReport:
    return StepReport(step=step, metrics={"loss": loss})


@pytest.fixture
def search() -> Search:
    return Search(SearchExtent("e", LOSS, trial_count=4, max_steps=10))


def test_trials_are_counted_by_state(search: Search) -> None:
    search.start_trials("0", "1", "2")
    error = TrialErrored(trial="1", cause=Cause.TRAINABLE, reason="no")
    search.apply(TrialFinished(trial="0", reason="enough"), error)
    state = search.tracker.read_state(1.0)
    assert state.counts == {Status.COMPLETED: 1, Status.ERRORED: 1, Status.RUNNING: 1}


def test_the_best_so_far_is_known_as_soon_as_it_is_reported(search: Search) -> None:
    search.start_trials("0", "1")
    search.report("0", 1, 0.5)
    search.report("1", 1, 0.4)
    assert search.tracker.read_state(1.0).best.id == "1"
    search.report("0", 2, 0.3)
    best = search.tracker.read_state(1.0).best
    assert (best.id, best.step, best.metrics) == ("0", 2, {"loss": 0.3})


def test_a_report_that_the_journal_tells_again_counts_once(search: Search) -> None:
    search.start_trials("0")
    search.report("0", 1, 0.5)
    search.apply(*(StepReported(trial="0", report=make_report(step, 0.5)) for step in (1, 2)))
    assert search.tracker.read_state(2.0).reports_per_second == pytest.approx(1.0)


def test_the_rate_is_that_of_the_last_seconds(search: Search) -> None:
    search.start_trials("0")
    for step in range(1, 101):
        search.report("0", step, 0.5)
    assert search.tracker.read_state(10.0).reports_per_second == pytest.approx(10.0)
    assert search.tracker.read_state(20.0).reports_per_second == pytest.approx(0.0)


def test_what_an_attempt_reported_is_forgotten_when_the_next_one_begins(search: Search) -> None:
    search.start_trials("0")
    search.report("0", 5, 0.5)
    search.apply(
        AttemptEnded(trial="0", cause=Cause.MACHINE, reason="gone\nTraceback"),
        AttemptStarted(trial="0", attempt=2, from_step=0),
    )
    (running,) = search.tracker.read_state(1.0).running
    assert running.step < 5


def test_an_attempt_that_ended_without_a_word_is_forgotten_too(search: Search) -> None:
    search.start_trials("0")
    search.report("0", 5, 0.5)
    search.tracker.apply_event(AttemptStarted(trial="0", attempt=2, from_step=0), search.experiment)
    assert search.tracker.read_state(1.0).best is None


def test_rungs_tell_how_many_trials_were_judged_where_also_before_this_run(search: Search) -> None:
    search.start_trials("0", "1")
    for trial, step in (("0", 1), ("1", 1), ("0", 3)):
        search.apply(DecisionMade(trial=trial, report=make_report(step, 0.5), decision=Continue()))
    assert search.tracker.read_state(1.0).rungs == {1: 2, 3: 1}
    assert Search(SearchExtent("e"), search.experiment).tracker.read_state(0.0).rungs == {1: 2, 3: 1}


def test_the_time_left_is_that_of_the_remaining_steps_at_the_pace_of_this_run(search: Search) -> None:
    search.start_trials("0", "1")
    assert search.tracker.read_state(60.0).time_left is None, "no step is trained yet"
    search.report("0", 3, 0.5)
    search.report("1", 5, 0.5)
    assert search.tracker.read_state(60.0).time_left == timedelta(minutes=(40 - 8) / 8)
    search.apply(
        AttemptEnded(trial="1", cause=Cause.MACHINE, reason="lost"), AttemptStarted(trial="1", attempt=2, from_step=0)
    )
    search.report("1", 2, 0.5)
    assert search.tracker.read_state(60.0).time_left == timedelta(minutes=(40 - 5) / 10), "two steps were trained again"


def test_nothing_takes_longer_than_the_time_budget() -> None:
    search = Search(SearchExtent("e", LOSS, trial_count=100, max_steps=10, time_budget=timedelta(seconds=30)))
    assert search.tracker.read_state(10.0).time_left == timedelta(seconds=20)
    search.start_trials("0")
    search.report("0", 1, 0.5)
    assert search.tracker.read_state(10.0).time_left == timedelta(seconds=20)
    assert search.tracker.read_state(40.0).time_left == timedelta(0)


@pytest.mark.parametrize("steps", [sys.maxsize, 10**400], ids=["maxsize", "no float"])
def test_a_number_of_steps_that_is_no_limit_gives_no_estimate(steps: int) -> None:
    search = Search(SearchExtent("e", LOSS, trial_count=4, max_steps=steps))
    search.start_trials("0")
    search.report("0", 1, 0.5)
    assert search.tracker.read_state(10.0).time_left is None


def test_a_search_that_ends_early_has_no_time_left_that_is_known(search: Search) -> None:
    search.start_trials("0")
    search.report("0", 1, 0.5)
    assert search.tracker.read_state(3.0).time_left is not None
    search.apply(StopRequested(reason="enough"))
    assert (search.tracker.read_state(3.0).time_left, search.tracker.read_state(3.0).stop_reason) == (None, "enough")


_PAUSED_AT_4 = {"phase": Phase.PAUSED, "step": 5, "checkpoints": (CheckpointRef(step=4, sequence=1),)}


@pytest.mark.parametrize(
    ("trials", "changes", "steps"),
    [
        ([{"phase": Phase.RUNNING, "step": 3}], {}, 7 + 10),
        ([{"phase": Phase.FINISHED, "step": 6}], {}, 6),
        ([{"phase": Phase.FINISHED, "step": 6}, {"phase": Phase.RUNNING, "step": 2}], {"max_steps": None}, 4),
        ([{"phase": Phase.RUNNING, "step": 2}], {"max_steps": None}, None),
        ([{"phase": Phase.ERRORED, "step": 6}], {"max_steps": None}, None),
        ([{"phase": Phase.RUNNING, "step": 2}], {"trial_count": None}, None),
        ([{**_PAUSED_AT_4, "phase": Phase.PENDING}], {}, 6 + 10),
        ([_PAUSED_AT_4], {}, 6 + 10),
        ([{"phase": Phase.RUNNING, "step": 2}], {"resumes_all_paused": False}, None),
    ],
)
def test_the_remaining_steps_are_unknown_where_trials_are_promoted_or_the_search_has_no_end(
    trials: list[dict[str, object]], changes: dict[str, object], steps: float | None
) -> None:
    extent = replace(SearchExtent("e", trial_count=2, max_steps=10), **changes)
    search_trials = [Trial(id=str(number), config={}, **fields) for number, fields in enumerate(trials)]
    assert estimate_remaining_steps(search_trials, extent) == steps


def test_a_population_resumes_all_that_it_pauses_and_a_promotion_search_some() -> None:
    asha, hyperband = ASHA(max_t=27, grace_period=3), Hyperband(max_t=27)
    others = (PBT(4, {"lr": [0.1, 0.2]}), ASHA(max_t=27, variant="stopping"), FIFO(), None)
    results = [resumes_all_paused_trials(scheduler) for scheduler in (asha, hyperband, *others)]
    assert results == [False, False, True, True, True, True]


def make_trial(number: int, phase: Phase) -> Trial:
    config = {"lr": 10.0**-number, "model": {"depth": number}, "same": "always", "name": f"[bold]{'x' * 30}"}
    return Trial(id=f"{number:05d}", config=config, phase=phase, step=number, metrics={"loss": number / 7})


def make_state(running: int = 2, finished: int = 3, **changes: object) -> ProgressState:
    fields = {
        "extent": SearchExtent("first", LOSS, trial_count=20),
        "elapsed": timedelta(seconds=200),
        "counts": {Status.RUNNING: running, Status.COMPLETED: finished},
        "reports_per_second": 12.345,
        "time_left": timedelta(hours=2, minutes=5),
        "rungs": {1: 5, 3: 2},
        "running": [make_trial(number, Phase.RUNNING) for number in range(10, 10 + running)],
        "others": [make_trial(number, Phase.FINISHED) for number in range(1, 1 + finished)],
        "best": make_trial(1, Phase.FINISHED),
        "notes": [Note(NOON, f"trial 00003 paused at step {number} of 27") for number in range(9)],
    }
    return ProgressState(**{**fields, **changes})


def render_lines(state: ProgressState, width: int = 80, height: int = 30) -> list[str]:
    file = io.StringIO()
    console = Console(file=file, width=width, height=height, color_system=None, highlight=False, markup=False)
    console.print(render_progress(state, width, height))
    return [text.rstrip() for text in file.getvalue().splitlines()]


def test_all_there_is_to_know_is_shown() -> None:
    lines = render_lines(make_state())
    assert lines[:6] == [
        "first  3 min 20 s, about 2 h 5 min left  12.3 reports/s",
        "trials  3 completed, 2 running of 20",
        "rungs   5 at step 1, 2 at step 3",
        "best    trial 00001, loss 0.142857 at step 1",
        "        lr 0.1, model/depth 1, same always, name [bold]xxxxxxxxxxxxxxxxx…",
        "",
    ]
    assert lines[6].split() == ["trial", "status", "step", "loss", "lr", "model/depth"]
    assert [text.split()[0] for text in lines[7:12]] == ["00010", "00011", "00001", "00002", "00003"]
    assert lines[-1] == "12:00:00  trial 00003 paused at step 8 of 27"


@pytest.mark.parametrize("width", [40, 80, 140])
@pytest.mark.parametrize("height", [5, 10, 24, 60])
@pytest.mark.parametrize(("running", "others"), [(0, 0), (2, 3), (16, 500)])
def test_it_fits_every_terminal(width: int, height: int, running: int, others: int) -> None:
    lines = render_lines(make_state(running, others), width, height)
    assert max(map(len, lines)) <= width
    assert len(lines) < max(height, 8)  # a lower terminal sees the first lines


def test_in_a_log_it_is_one_line() -> None:
    assert render_progress_line(make_state()) == (
        "first: 3 completed, 2 running of 20 after 3 min 20 s; about 2 h 5 min left; best: trial 00001, loss 0.142857"
    )


def test_what_a_trial_wrote_controls_neither_the_terminal_nor_the_number_of_lines() -> None:
    evil = "x\ny \x1b[31m\x1b]0;title\x07"
    update = {"config": {"name": evil, evil: 1}, "metrics": {"loss": evil}}
    errored = make_trial(1, Phase.ERRORED).model_copy(update=update)
    lines = render_lines(make_state(0, 0, others=[errored], best=errored, notes=[Note(NOON, evil)]), 200)
    assert "\x1b" not in "".join(lines)
    assert "\\x1b[31m" in lines[-1]
    assert [text.split()[0] for text in lines if text.startswith("00001")] == ["00001"]
    assert lines[3].startswith("best    trial 00001, errored, loss x")


def test_the_status_says_at_which_step_a_trial_stopped_short() -> None:
    search = all_statuses()
    names, rows, _ = fit_columns(list(search.state.trials.values()), ["loss"], 200)
    assert [row[names.index("status")] for row in rows] == [
        *("completed", "pruned @3", "interrupted @3", "errored", "running", "paused @3", "pending")
    ]


def make_training(**changes: object) -> ProgressState:
    """A single training at step 12 of 80, of which step 10 is saved."""
    saved = (CheckpointRef(step=10, sequence=3),)
    more = {"step": 12, "attempt": 2, "checkpoints": saved, "metrics": {"loss": 0.5, "eval": {"accuracy": 0.75}}}
    fields = {
        "extent": SearchExtent("first", None, 1, 80, is_training=True),
        "running": [make_trial(1, Phase.RUNNING).model_copy(update={**more, "config": {"lr": 0.1}})],
        "others": [],
        "best": None,
        "rungs": {},
    }
    return replace(make_state(), **{**fields, **changes})


def test_a_single_training_shows_its_step_metrics_pace_and_newest_checkpoint() -> None:
    assert render_lines(make_training(notes=[])) == [
        "first  3 min 20 s, about 2 h 5 min left  12.3 steps/s",
        "step    12 of 80, attempt 2",
        "metrics loss 0.5, eval/accuracy 0.75",
        "saved   step 10",
        "config  lr 0.1",
    ]
    assert render_progress_line(make_training()) == (
        "first: step 12 of 80, attempt 2, loss 0.5, eval/accuracy 0.75 after 3 min 20 s; 12.3 steps/s; "
        "about 2 h 5 min left; saved: step 10"
    )
    ended = [make_trial(3, Phase.FINISHED)]
    line = render_progress_line(make_training(running=[], others=ended))
    assert line == "first: step 3 of 80, completed, loss 0.428571 after 3 min 20 s"
    assert render_lines(make_training(running=[], notes=[]))[1:] == ["step    none yet"]
