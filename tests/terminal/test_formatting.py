"""Printed text that comes from a target."""

from __future__ import annotations

import pytest

from prefect_tune.core.experiment.trial_transitions import Trial
from prefect_tune.terminal.formatting import borderless_table, facts_table, plain_cells, print_parts, visible
from prefect_tune.terminal.trials_table import trials_table

ATTACK = "\x1b]0;title\x07\x1b[2J\x9b31m\rbold"


def test_control_characters_are_spelled_out_and_lines_stay_lines() -> None:
    assert visible("\x1b[31mred\r\x9b") == r"\x1b[31mred\x0d\x9b"
    assert visible("a\tü\nline") == "a\tü\nline"


def test_nothing_turns_the_direction_of_text_or_cannot_be_printed_at_all() -> None:
    assert visible("gpj.\u202eexe\u2066\u2028") == r"gpj.\u202eexe\u2066\u2028"
    assert visible("\udcff 😀 שלום") == r"\udcff 😀 שלום"


def test_nothing_that_a_target_says_gives_the_terminal_commands(capsys: pytest.CaptureFixture[str]) -> None:
    table = borderless_table("name")
    table.add_row(*plain_cells([ATTACK]))
    config = {ATTACK: 1, "y": ATTACK}
    trials = [Trial(trial=name, config={**config, "x": name}) for name in ("a", "b")]
    print_parts(ATTACK, table, facts_table({ATTACK: {ATTACK: [ATTACK]}}), trials_table(trials, [ATTACK]))
    said = capsys.readouterr().out
    assert r"\x1b]0;title\x07" in said
    assert not any(each in said for each in "\x1b\x07\x9b\r")
