"""A running search as text."""

from __future__ import annotations

import io
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from rich.console import Console

from prefect_tune.core.experiment.trial_transitions import Phase, Status, Trial
from prefect_tune.core.journal_events import CheckpointRef
from prefect_tune.core.search.objective import Objective
from prefect_tune.terminal.progress_view import Note, ProgressState, cells_of, frame, line
from prefect_tune.terminal.time_left import SearchEstimate
from tests.fakes.searches.journal_builder import all_statuses

LOSS = Objective(metrics=("loss",), modes=("min",))
NOON = datetime(2026, 11, 21, 12, tzinfo=UTC)


def trial(number: int, phase: Phase) -> Trial:
    config = {"lr": 10.0**-number, "model": {"depth": number}, "same": "always", "name": f"[bold]{'x' * 30}"}
    return Trial(trial=f"{number:05d}", config=config, phase=phase, step=number, metrics={"loss": number / 7})


def state(running: int = 2, finished: int = 3, **changes: object) -> ProgressState:
    known = {
        "outlook": SearchEstimate("first", LOSS, trial_count=20),
        "elapsed": timedelta(seconds=200),
        "counts": {Status.RUNNING: running, Status.COMPLETED: finished},
        "reports_per_second": 12.345,
        "left": timedelta(hours=2, minutes=5),
        "rungs": {1: 5, 3: 2},
        "running": [trial(number, Phase.RUNNING) for number in range(10, 10 + running)],
        "others": [trial(number, Phase.FINISHED) for number in range(1, 1 + finished)],
        "best": trial(1, Phase.FINISHED),
        "notes": [Note(NOON, "00003", f"completed: step {number} of 27") for number in range(9)],
    }
    return ProgressState(**{**known, **changes})


def drawn(shown: ProgressState, width: int = 80, height: int = 30) -> list[str]:
    file = io.StringIO()
    console = Console(file=file, width=width, height=height, color_system=None, highlight=False, markup=False)
    console.print(frame(shown, width, height))
    return [text.rstrip() for text in file.getvalue().splitlines()]


def test_all_there_is_to_know_is_shown() -> None:
    lines = drawn(state())
    assert lines[:6] == [
        "first  3 min 20 s, about 2 h 5 min left  12.3 reports/s",
        "trials  3 completed, 2 running of 20",
        "rungs   5 at step 1, 2 at step 3",
        "best    by last report: trial 00001, loss 0.142857 at step 1",
        "        lr 0.1, model/depth 1, same always, name [bold]xxxxxxxxxxxxxxxxx…",
        "",
    ]
    assert lines[6].split() == ["trial", "status", "step", "loss", "lr", "model/depth"]
    assert [text.split()[0] for text in lines[7:12]] == ["00010", "00011", "00001", "00002", "00003"]
    assert lines[-1] == "12:00:00  00003 completed: step 8 of 27"


@pytest.mark.parametrize("width", [40, 80, 140])
@pytest.mark.parametrize("height", [5, 10, 24, 60])
@pytest.mark.parametrize(("running", "others"), [(0, 0), (2, 3), (16, 500)])
def test_it_fits_every_terminal(width: int, height: int, running: int, others: int) -> None:
    lines = drawn(state(running, others), width, height)
    assert max(map(len, lines)) <= width
    assert len(lines) < max(height, 8)  # a lower terminal sees the first lines


def test_of_many_that_run_some_give_way_to_the_best_of_the_others() -> None:
    lines = drawn(state(running=100, finished=100), height=60)
    assert sum(" running " in text for text in lines[6:]) == 11
    assert sum(" completed " in text for text in lines[6:]) == 5


def test_without_a_metric_there_is_no_best_one() -> None:
    lines = drawn(state(outlook=SearchEstimate("first")))
    assert not any(text.startswith("best") for text in lines)
    assert "loss" in lines[4].split()


def test_many_rungs_are_cut_in_their_middle() -> None:
    (rungs,) = [text for text in drawn(state(rungs=dict.fromkeys(range(1, 30), 9)), 200) if "rungs" in text]
    assert rungs.count("at step") == 8
    assert "9 at step 4, …, 9 at step 26" in rungs


def test_in_a_log_it_is_one_line() -> None:
    assert line(state()) == (
        "first: 3 completed, 2 running of 20 after 3 min 20 s; about 2 h 5 min left; "
        "best by last report: trial 00001, loss 0.142857"
    )


def test_what_is_over_takes_no_more_time() -> None:
    assert "left" not in line(state(running=0))


def test_while_a_search_ends_early_its_reason_stands_in_for_the_time_left() -> None:
    ending = state(left=None, ended_because="the time budget of 1:00:00 is spent\nmore")
    assert "after 3 min 20 s; ending: the time budget of 1:00:00 is spent; best by last report: " in line(ending)
    assert drawn(ending)[0] == "first  3 min 20 s, ending: the time budget of 1:00:00 is spent  12.3 reports/s"


def test_what_a_trial_wrote_controls_neither_the_terminal_nor_the_number_of_lines() -> None:
    evil = "x\ny \x1b[31m\x1b]0;title\x07"
    shown = trial(1, Phase.ERRORED).model_copy(update={"config": {"name": evil, evil: 1}, "metrics": {"loss": evil}})
    lines = drawn(state(0, 0, others=[shown], best=shown, notes=[Note(NOON, "00001", evil)]), 200)
    assert "\x1b" not in "".join(lines)
    assert "\\x1b[31m" in lines[-1]
    assert [text.split()[0] for text in lines if text.startswith("00001")] == ["00001"]
    assert lines[3].startswith("best    by last report: trial 00001, errored, loss x")


def test_with_paused_trials_of_which_unknown_many_resume_the_time_left_is_a_least() -> None:
    assert "; at least 2 h 5 min left; " in line(state(may_take_longer=True))
    assert drawn(state(may_take_longer=True))[0].startswith("first  3 min 20 s, at least 2 h 5 min left")
    assert "left" not in drawn(state(may_take_longer=True, left=timedelta(seconds=0.4)))[0]
    assert "about 0 s left" in drawn(state(left=timedelta(seconds=0.4)))[0]


def test_the_status_says_at_which_step_a_trial_stopped_short() -> None:
    search = all_statuses()
    names, rows = cells_of(list(search.state.trials.values()), ["loss"], 200)
    assert [row[names.index("status")] for row in rows] == [
        *("completed", "pruned @3", "interrupted @3", "errored", "running", "paused @3", "pending")
    ]


def test_a_metric_or_a_parameter_with_the_name_of_another_column_is_told_apart() -> None:
    trials = [Trial(trial=name, config={"loss": name}, metrics={"status": 7, "loss": 0.5}) for name in "ab"]
    names, rows = cells_of(trials, ["status", "loss"], 200)
    assert names == ["trial", "status", "step", "metrics/status", "loss", "config/loss"]
    assert rows[0] == ["a", "pending", "0", "7", "0.5", "a"]


def test_completed_trials_that_cannot_be_compared_are_counted() -> None:
    assert "; 2 without loss in the last report; best by last report: " in line(state(lacking_count=2))


def training(**changes: object) -> ProgressState:
    """A single training at step 12 of 80, of which step 10 is saved."""
    saved = (CheckpointRef(step=10, sequence=3),)
    more = {"step": 12, "attempt": 2, "checkpoints": saved, "metrics": {"loss": 0.5, "eval": {"accuracy": 0.75}}}
    known = {
        "outlook": SearchEstimate("first", None, 1, 80, is_training=True),
        "running": [trial(1, Phase.RUNNING).model_copy(update={**more, "config": {"lr": 0.1}})],
        "others": [],
        "best": None,
        "rungs": {},
    }
    return replace(state(), **{**known, **changes})


def test_a_single_training_shows_its_step_metrics_pace_and_newest_checkpoint() -> None:
    assert drawn(training(notes=[])) == [
        "first  3 min 20 s, about 2 h 5 min left  12.3 steps/s",
        "step    12 of 80, attempt 2",
        "metrics loss 0.5, eval/accuracy 0.75",
        "saved   step 10",
        "config  lr 0.1",
    ]
    assert line(training()) == (
        "first: step 12 of 80, attempt 2, loss 0.5, eval/accuracy 0.75 after 3 min 20 s; 12.3 steps/s; "
        "about 2 h 5 min left; saved: step 10"
    )
    ended = [trial(3, Phase.FINISHED)]
    assert line(training(running=[], others=ended)) == "first: step 3 of 80, completed, loss 0.428571 after 3 min 20 s"
    assert drawn(training(running=[], notes=[]))[1:] == ["step    none yet"]
