"""The cost of an experiment as people read it: a sentence, a table, a bar, JSON and an Arrow table."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa
from rich.console import Console

from prefect_tune.arrow_tables import attempts_as_arrow
from prefect_tune.core.experiment.cost import AttemptCost, Category, ExperimentCost, RunCost, cost_sentence
from prefect_tune.core.usage_records import AttemptUse, GroupUse, PhaseSeconds, RankEnd
from prefect_tune.terminal.formatting import (
    attempt_fields,
    attempts_table,
    cost_fields,
    cost_table,
)

BEGAN = datetime(2026, 11, 26, 3, tzinfo=UTC)
USE = AttemptUse(
    seconds=PhaseSeconds(start=1000, training=24300),
    cpu_seconds=48600,
    peak_memory_bytes=3 << 30,
    mean_memory_bytes=2 << 30,
    peak_gpu_memory_bytes=5 << 30,
    mean_gpu_utilization=0.83,
)


def attempt(number: int, use: AttemptUse | None = None, **seconds: float) -> AttemptCost:
    taken = {each: seconds.get(each.key, 0.0) for each in Category if each is not Category.IDLE}
    return AttemptCost("t", number, BEGAN, taken, use)


def cost(*runs: RunCost, **seconds: float) -> ExperimentCost:
    taken = {each: seconds.get(each.key, 0.0) for each in Category}
    return ExperimentCost(runs or [RunCost(BEGAN, 15000, 2)], [attempt(1, USE, training=24300)], taken)


def text_of(table: object) -> str:
    console = Console(width=240, color_system=None, force_jupyter=False)
    with console.capture() as text:
        console.print(table)
    return text.get()


def test_the_sentence_says_the_share_of_training_and_the_largest_losses() -> None:
    usual = cost(training=24300, start=2700, idle=1500, saving=1200, lost=300)
    assert cost_sentence(usual) == (
        "81 % of 4 h 10 min of 2 slots was training; the largest losses: start and import 9 %, idle 5 %, saving 4 %"
    )


def test_the_sentence_of_runs_with_different_slots_says_the_time_of_all_slots() -> None:
    runs = RunCost(BEGAN, 3600, 2), RunCost(BEGAN, 3600, 1)
    assert cost_sentence(cost(*runs, training=5400, idle=5400)) == (
        "50 % of 3 h of all slots was training; the only loss: idle 50 %"
    )
    assert cost_sentence(cost(RunCost(BEGAN, 60, None), training=60)) == "100 % of 1 min of all slots was training"


def test_nothing_is_said_before_a_slot_was_held() -> None:
    assert cost_sentence(ExperimentCost([], [], dict.fromkeys(Category, 0.0))) == ""


def test_the_tables_have_what_took_time_and_what_was_used() -> None:
    table = text_of(cost_table(cost(training=75, idle=25)))
    assert [" ".join(line.split()) for line in table.splitlines()[1:]] == ["training 1 min 15 s 75 %", "idle 25 s 25 %"]
    attempts = text_of(attempts_table([attempt(1, USE, training=24300, start=1000), attempt(2, training=2.5)]))
    assert "start and import 16 min 40 s" in attempts
    assert "3 GiB (mean 2 GiB)" in attempts
    assert "5 GiB, 83 % busy" in attempts
    assert text_of(attempts_table([attempt(1, training=2.5)])).split() == (
        ["attempt", "in", "all", "training", "largest", "losses", "1", "2.5", "s", "2.5", "s"]
    )


def test_one_sample_says_nothing_of_the_processors() -> None:
    once = USE.model_copy(update={"cpu_seconds": None})
    (_, row) = text_of(attempts_table([attempt(2, once, training=0.6)])).splitlines()
    assert row.split()[:6] == ["2", "0.6", "s", "0.6", "s", "-"]


def test_short_times_are_shown_to_the_hundredth_of_a_second() -> None:
    table = text_of(cost_table(cost(training=9.87, start=0.006, saving=0.0049, lost=0.25)))
    assert [row.split()[-4] for row in table.splitlines()[1:]] == ["9.9", "0.25", "0.01"]


def test_the_json_and_the_arrow_table_have_each_number_and_null_for_what_was_not_measured() -> None:
    found = cost(training=3, idle=1)
    assert cost_fields(found)["seconds"] == {each.key: found.seconds[each] for each in Category}
    assert attempt_fields(attempt(2, USE))["cpu_seconds"] == 48600
    assert "cpu_seconds" not in attempt_fields(attempt(2))

    both = ExperimentCost([], [attempt(1, USE, training=2), attempt(2, start=1)], dict.fromkeys(Category, 0.0))
    table = attempts_as_arrow(both)
    assert table.schema.field("began_at").type == pa.timestamp("ms", "UTC")
    assert table.column("training_seconds").to_pylist() == [2, 0]
    assert table.column("peak_memory_bytes").to_pylist() == [3 << 30, None]


def test_the_page_on_the_cost_says_what_each_category_means() -> None:
    page = (Path(__file__).parents[2] / "docs" / "cost.md").read_text()
    assert all(f"| {each} | {each.meaning} |" in page for each in Category)


def test_the_table_of_attempts_names_the_ends_of_ranks_unlike_the_others() -> None:
    ends = (
        RankEnd(ranks=(1,), how="ValueError: x", is_cause=True),
        RankEnd(ranks=tuple(range(2, 12)), how="RuntimeError: Connection closed"),
    )
    table = attempts_table([attempt(1, GroupUse(seconds=PhaseSeconds(), ends=ends)), attempt(2)])
    said = "rank 1: ValueError: x, the cause; ranks 2, 3, 4, 5, 6, 7, 8, 9 and 2 more: RuntimeError: Connection closed"
    assert text_of(table).splitlines()[1].rstrip().endswith(said)
    assert "ended otherwise" not in text_of(attempts_table([attempt(2)]))
