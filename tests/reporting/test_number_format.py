"""How a report formats numbers."""

from __future__ import annotations

import pytest

from prefect_tune.terminal.formatting import format_cell, format_count, format_metrics, format_number, format_span


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
    assert format_count(12_345) == "12,345"
    assert format_metrics({"loss": 1 / 3, "n": 1000}) == "loss 0.3333, n 1,000"
    assert [format_span(each) for each in (0.0, 0.5312, 8.149, 12.4, 205, 7_500, 8.64e18)] == [
        *("0 s", "0.531 s", "8.15 s", "12 s", "3 min 25 s", "2 h 5 min", "100000000000000 d")
    ]
