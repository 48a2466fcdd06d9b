"""Text that comes from a target, ranges of steps, and the numbers of a report."""

from __future__ import annotations

from datetime import timedelta

import pytest

from prefect_tune.core.experiment.trial_transitions import Trial
from prefect_tune.core.shown_text import format_duration, format_span, visible
from prefect_tune.terminal.formatting import (
    borderless_table,
    facts_table,
    format_cell,
    format_metrics,
    format_number,
    format_steps,
    plain_cells,
    print_parts,
)
from prefect_tune.terminal.progress_view import trials_table

ATTACK = "\x1b]0;title\x07\x1b[2J\x9b31m\rbold"


def test_control_characters_are_spelled_out_and_lines_stay_lines() -> None:
    assert visible("\x1b[31mred\r\x9b") == r"\x1b[31mred\r\x9b"
    assert visible("a\tü\nline") == "a\tü\nline"


def test_nothing_turns_the_direction_of_text_or_cannot_be_printed_at_all() -> None:
    assert visible("gpj.\u202eexe\u2066\u2028") == r"gpj.\u202eexe\u2066\u2028"
    assert visible("\udcff 😀 שלום") == r"\udcff 😀 שלום"


def test_nothing_that_a_target_says_gives_the_terminal_commands(capsys: pytest.CaptureFixture[str]) -> None:
    table = borderless_table("name")
    table.add_row(*plain_cells([ATTACK]))
    config = {ATTACK: 1, "y": ATTACK}
    trials = [Trial(trial=name, config={**config, "x": name}) for name in ("a", "b")]
    print_parts(ATTACK, table, facts_table({ATTACK: {ATTACK: [ATTACK]}}), *trials_table(trials, [ATTACK]))
    said = capsys.readouterr().out
    assert r"\x1b]0;title\x07" in said
    assert not any(each in said for each in "\x1b\x07\x9b\r")


@pytest.mark.parametrize(
    ("steps", "shown"),
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
def test_ranges_stand_for_steps_that_are_equally_far_apart(steps: list[int], shown: str) -> None:
    assert format_steps(list(steps)) == shown


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(0.2, "0 s"), (59, "59 s"), (60, "1 min"), (3599, "59 min 59 s"), (7500, "2 h 5 min"), (90000, "1 d 1 h")],
)
def test_a_span_is_told_by_its_two_largest_units(seconds: float, said: str) -> None:
    assert format_duration(timedelta(seconds=seconds)) == said


def test_no_line_ends_with_blanks(capsys: pytest.CaptureFixture[str]) -> None:
    table = borderless_table("trial", "reason")
    for row in (("1", "a long reason"), ("2", "")):
        table.add_row(*row)
    print_parts("head", "", table)
    assert capsys.readouterr().out.split("\n") == ["head", "", "trial  reason", "1      a long reason", "2", ""]


@pytest.mark.parametrize(
    ("value", "said"),
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
def test_a_number_has_four_significant_digits_and_commas_between_thousands(value: float, said: str) -> None:
    assert format_number(value) == said


@pytest.mark.parametrize(
    ("value", "said"),
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
def test_a_whole_number_is_said_in_full_and_other_values_as_they_are(value: object, said: str) -> None:
    assert format_cell(value) == said
    assert isinstance(value, int | str | list | dict | None)


def test_counts_metrics_and_durations_are_of_the_same_style() -> None:
    assert format_metrics({"loss": 1 / 3, "n": 1000}) == "loss 0.3333, n 1,000"
    assert [format_span(each) for each in (0.0, 0.5312, 8.149, 12.4, 205, 7_500, 8.64e18)] == [
        *("0 s", "0.531 s", "8.15 s", "12 s", "3 min 25 s", "2 h 5 min", "100000000000000 d")
    ]
