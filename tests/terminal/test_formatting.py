"""Text that comes from a target, ranges of steps, numbers, ages, and the cost of an experiment."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pyarrow as pa
import pytest
from rich.console import Console

from prefect_tune.arrow_tables import attempts_to_arrow
from prefect_tune.core.display_text import format_duration, format_elapsed, make_visible
from prefect_tune.core.experiment.cost import AttemptCost, CostCategory, ExperimentCost, RunCost, format_cost
from prefect_tune.core.experiment.experiment import Experiment, make_empty_experiment
from prefect_tune.core.experiment.trial_transitions import Trial
from prefect_tune.core.journal_events import AttemptStarted, TrialAdded
from prefect_tune.core.messages.target_messages import ExperimentView, LiveStatus
from prefect_tune.core.usage_records import AttemptUsage, GroupUsage, PhaseSeconds, RankEnd
from prefect_tune.terminal.formatting import (
    attempt_cost_to_json,
    compute_freshness,
    cost_to_json,
    format_age,
    format_cell,
    format_metrics,
    format_number,
    format_steps,
    make_attempts_table,
    make_borderless_table,
    make_cost_table,
    make_facts_table,
    print_to_stdout,
    to_plain_cells,
)
from prefect_tune.terminal.progress_view import make_trials_table
from tests.fakes.checkpoints import first_generation
from tests.fakes.searches.experiments import apply_events

ATTACK = "\x1b]0;title\x07\x1b[2J\x9b31m\rbold"


def test_control_characters_are_spelled_out_and_lines_stay_lines() -> None:
    assert make_visible("\x1b[31mred\r\x9b") == r"\x1b[31mred\r\x9b"
    assert make_visible("a\tü\nline") == "a\tü\nline"


def test_nothing_turns_the_direction_of_text_or_cannot_be_printed_at_all() -> None:
    assert make_visible("gpj.\u202eexe\u2066\u2028") == r"gpj.\u202eexe\u2066\u2028"
    assert make_visible("\udcff 😀 שלום") == r"\udcff 😀 שלום"


def test_nothing_that_a_target_says_gives_the_terminal_commands(capsys: pytest.CaptureFixture[str]) -> None:
    table = make_borderless_table("name")
    table.add_row(*to_plain_cells([ATTACK]))
    config = {ATTACK: 1, "y": ATTACK}
    trials = [Trial(id=name, config={**config, "x": name}) for name in ("a", "b")]
    print_to_stdout(ATTACK, table, make_facts_table({ATTACK: {ATTACK: [ATTACK]}}), *make_trials_table(trials, [ATTACK]))
    output = capsys.readouterr().out
    assert r"\x1b]0;title\x07" in output
    assert not any(character in output for character in "\x1b\x07\x9b\r")


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        ([], ""),
        ([7], "7"),
        ([1, 2, 3], "1, 2, 3"),
        (range(60), "0-59 (60)"),
        (range(10, 70, 10), "10, 20 … 60 (6)"),
        ([1, 2, 5, 6, 7, 8, 9], "1, 2, 5-9 (7)"),
        ([*range(1, 1001), 2000, 2010, 2020, 2030], "1-1000, 2000, 2010 … 2030 (1,004)"),
        ([4, 4, 4, 4, 5], "4, 4, 4, 4, 5"),
        ([1, 3, 4, 8, 9], "1, 3, 4, 8, 9"),
    ],
)
def test_ranges_stand_for_steps_that_are_equally_far_apart(steps: list[int], expected: str) -> None:
    assert format_steps(list(steps)) == expected


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [(0.2, "0 s"), (59, "59 s"), (60, "1 min"), (3599, "59 min 59 s"), (7500, "2 h 5 min"), (90000, "1 d 1 h")],
)
def test_a_span_is_told_by_its_two_largest_units(seconds: float, expected: str) -> None:
    assert format_duration(timedelta(seconds=seconds)) == expected


def test_no_line_ends_with_blanks(capsys: pytest.CaptureFixture[str]) -> None:
    table = make_borderless_table("trial", "reason")
    for row in (("1", "a long reason"), ("2", "")):
        table.add_row(*row)
    print_to_stdout("head", "", table)
    assert capsys.readouterr().out.split("\n") == ["head", "", "trial  reason", "1      a long reason", "2", ""]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (0.0, "0"),
        (27.0, "27"),
        (0.25, "0.25"),
        (0.0204123, "0.02041"),
        (-0.5, "-0.5"),
        (0.99996, "1"),
        (1234.567, "1,235"),
        (12345.6, "12,346"),
        (9_999_999.0, "9,999,999"),
        (1e7, "1e7"),
        (0.0005, "5e-4"),
        (2.14767e-28, "2.148e-28"),
        (-1.5e300, "-1.5e300"),
        (float("nan"), "nan"),
        (float("-inf"), "-inf"),
    ],
)
def test_a_number_has_four_significant_digits_and_commas_between_thousands(value: float, expected: str) -> None:
    assert format_number(value) == expected


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (12_345_678, "12,345,678"),
        (True, "True"),
        (None, ""),
        ("relu", "relu"),
        ([1, 2.5, "x"], "1, 2.5, x"),
        ({"eval": {"loss": 0.123456, "steps": 10_000}}, "eval/loss 0.1235, eval/steps 10,000"),
        (10**400, f"1{'0' * 78}… (401 characters)"),
    ],
)
def test_a_whole_number_is_said_in_full_and_other_values_as_they_are(value: object, expected: str) -> None:
    assert format_cell(value) == expected
    assert isinstance(value, int | str | list | dict | None)


def test_counts_metrics_and_durations_are_of_the_same_style() -> None:
    assert format_metrics({"loss": 1 / 3, "n": 1000}) == "loss 0.3333, n 1,000"
    assert [format_elapsed(seconds) for seconds in (0.0, 0.5312, 8.149, 12.4, 205, 7_500, 8.64e18)] == [
        *("0 s", "0.531 s", "8.15 s", "12 s", "3 min 25 s", "2 h 5 min", "100000000000000 d")
    ]


# The age of a view, in words and as JSON, by the reader's clock.


NOW = datetime(2026, 11, 23, 1, 33, 18, tzinfo=UTC)
AT = "2026-11-23T01:32:20.123+00:00"


def make_running() -> Experiment:
    events = [TrialAdded(trial="a", config={}), AttemptStarted(trial="a", attempt=1, from_step=0)]
    return apply_events(make_empty_experiment(first_generation("e")), events)


def make_live_status(period_seconds: float) -> LiveStatus:
    return LiveStatus(term=0, owner=None, number=1, at=AT, period_seconds=period_seconds, trials=())


@pytest.mark.parametrize(
    ("period", "expected"),
    [
        (30, "01:32:20 UTC, 58 s ago"),
        (5, "01:32:20 UTC, 58 s ago; updates every 5 s are missing; the process has probably ended"),
        (None, "01:32:20 UTC, 58 s ago: the last journal entry; running trials may have progressed further"),
    ],
)
def test_what_is_old_says_its_age_and_what_that_means(period: float | None, expected: str) -> None:
    view = ExperimentView(make_running(), AT, make_live_status(period) if period else None)
    fresh = compute_freshness(view, NOW)
    assert fresh.describe() == expected
    assert fresh.to_json() == {"as_of": "2026-11-23T01:32:20+00:00", "age_seconds": 57.9, "is_stale": period == 5}
    assert fresh.format_short() == "01:32:20, 58 s ago"
    assert compute_freshness(view, NOW + timedelta(hours=1)).format_short() == "01:32:20, 1 h ago"
    assert expected.replace(" ago", " before now") == fresh.describe("before now")


@pytest.mark.parametrize(("seconds", "is_stale"), [(10, False), (10.9, False), (11.1, True), (60, True)])
def test_it_is_stale_once_the_next_two_updates_are_missing(seconds: float, is_stale: bool) -> None:
    time = NOW - timedelta(seconds=seconds)
    status = make_live_status(5).model_copy(update={"at": time.isoformat()})
    assert compute_freshness(ExperimentView(make_running(), status.at, status), NOW).is_stale == is_stale


def test_without_a_running_trial_nothing_is_stale_and_what_is_old_has_its_date() -> None:
    fresh = compute_freshness(ExperimentView(make_empty_experiment(first_generation("e")), AT), NOW + timedelta(days=2))
    assert fresh.describe() == "2026-11-23 01:32:20 UTC, 2 d ago"
    assert fresh.format_short() == "2026-11-23 01:32, 2 d ago"
    assert not fresh.is_stale


@pytest.mark.parametrize("time", ["", "yesterday", "0001-01-01T00:00:00+14:00"])
def test_a_journal_that_says_no_time_has_no_age(time: str) -> None:
    fresh = compute_freshness(ExperimentView(make_running(), time), NOW)
    assert (fresh.describe(), fresh.format_short()) == ("an unknown time", "")
    assert fresh.to_json() == {"as_of": None, "age_seconds": None, "is_stale": False}


def test_the_future_of_another_clock_is_now() -> None:
    assert compute_freshness(ExperimentView(make_running(), AT), NOW - timedelta(hours=1)).age == timedelta(0)
    assert format_age(AT, NOW - timedelta(hours=1)) == "0 s ago"


def test_a_moment_is_an_age_and_none_is_nothing() -> None:
    assert (format_age(AT, NOW), format_age(None, NOW)) == ("58 s ago", "")


# The cost of an experiment as people read it: a sentence, a table, a bar, JSON and an Arrow table.


STARTED_AT = datetime(2026, 11, 26, 3, tzinfo=UTC)
USAGE = AttemptUsage(
    seconds=PhaseSeconds(start=1000, training=24300),
    cpu_seconds=48600,
    peak_memory_bytes=3 << 30,
    mean_memory_bytes=2 << 30,
    peak_gpu_memory_bytes=5 << 30,
    mean_gpu_utilization=0.83,
)


def make_attempt(number: int, usage: AttemptUsage | None = None, **seconds: float) -> AttemptCost:
    by_category = {
        category: seconds.get(category.key, 0.0) for category in CostCategory if category is not CostCategory.IDLE
    }
    return AttemptCost("t", number, STARTED_AT, by_category, usage)


def make_cost(*runs: RunCost, **seconds: float) -> ExperimentCost:
    by_category = {category: seconds.get(category.key, 0.0) for category in CostCategory}
    attempts = [make_attempt(1, USAGE, training=24300)]
    return ExperimentCost(runs or [RunCost(STARTED_AT, 15000, 2)], attempts, by_category)


def render_text(table: object) -> str:
    console = Console(width=240, color_system=None, force_jupyter=False)
    with console.capture() as text:
        console.print(table)
    return text.get()


def test_the_sentence_says_the_share_of_training_and_the_largest_losses() -> None:
    usual = make_cost(training=24300, start=2700, idle=1500, saving=1200, lost=300)
    assert format_cost(usual) == (
        "81 % of 4 h 10 min of 2 slots was training; the largest losses: start and import 9 %, idle 5 %, saving 4 %"
    )


def test_nothing_is_said_before_a_slot_was_held() -> None:
    assert format_cost(ExperimentCost([], [], dict.fromkeys(CostCategory, 0.0))) == ""


def test_the_tables_have_what_took_time_and_what_was_used() -> None:
    table = render_text(make_cost_table(make_cost(training=75, idle=25)))
    assert [" ".join(line.split()) for line in table.splitlines()[1:]] == ["training 1 min 15 s 75 %", "idle 25 s 25 %"]
    costs = [make_attempt(1, USAGE, training=24300, start=1000), make_attempt(2, training=2.5)]
    attempts = render_text(make_attempts_table(costs))
    assert "start and import 16 min 40 s" in attempts
    assert "3 GiB (mean 2 GiB)" in attempts
    assert "5 GiB, 83 % busy" in attempts
    assert render_text(make_attempts_table([make_attempt(1, training=2.5)])).split() == (
        ["attempt", "in", "all", "training", "largest", "losses", "1", "2.5", "s", "2.5", "s"]
    )


def test_the_json_and_the_arrow_table_have_each_number_and_null_for_what_was_not_measured() -> None:
    cost = make_cost(training=3, idle=1)
    assert cost_to_json(cost)["seconds"] == {category.key: cost.seconds[category] for category in CostCategory}
    assert attempt_cost_to_json(make_attempt(2, USAGE))["cpu_seconds"] == 48600
    assert "cpu_seconds" not in attempt_cost_to_json(make_attempt(2))

    attempts = [make_attempt(1, USAGE, training=2), make_attempt(2, start=1)]
    table = attempts_to_arrow(ExperimentCost([], attempts, dict.fromkeys(CostCategory, 0.0)))
    assert table.schema.field("began_at").type == pa.timestamp("ms", "UTC")
    assert table.column("training_seconds").to_pylist() == [2, 0]
    assert table.column("peak_memory_bytes").to_pylist() == [3 << 30, None]


def test_the_page_on_the_cost_says_what_each_category_means() -> None:
    page = (Path(__file__).parents[2] / "docs" / "cost.md").read_text()
    assert all(f"| {category} | {category.meaning} |" in page for category in CostCategory)


def test_the_table_of_attempts_names_the_ends_of_ranks_unlike_the_others() -> None:
    cause = RankEnd(ranks=(1,), how="ValueError: x", is_cause=True)
    ends = (cause, RankEnd(ranks=tuple(range(2, 12)), how="RuntimeError: Connection closed"))
    table = make_attempts_table([make_attempt(1, GroupUsage(seconds=PhaseSeconds(), ends=ends)), make_attempt(2)])
    first, others = "ValueError: x, the cause", "RuntimeError: Connection closed"
    expected = f"rank 1: {first}; ranks 2, 3, 4, 5, 6, 7, 8, 9 and 2 more: {others}"
    assert render_text(table).splitlines()[1].rstrip().endswith(expected)
    assert "ended otherwise" not in render_text(make_attempts_table([make_attempt(2)]))
