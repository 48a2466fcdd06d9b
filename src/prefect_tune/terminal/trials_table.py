"""The trials of a search as a table that fits its terminal."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType

from rich.console import Console
from rich.table import Table
from rich.text import Text

from prefect_tune.core.experiment.trial_status import status_label
from prefect_tune.core.experiment.trial_transitions import Status, Trial
from prefect_tune.core.models import flat, metric_in
from prefect_tune.core.texts import visible
from prefect_tune.terminal.formatting import borderless_table, format_value, plain_cells

_GAP = 2
_WIDEST_CELL = 24


def trials_table(
    trials: Sequence[Trial],
    metrics: Sequence[str],
    more: Mapping[str, list[str]] = MappingProxyType({}),
    *,
    width: int | None = None,
    styles: Mapping[Status, str] = MappingProxyType({}),
) -> Table:
    """Return a table with a row per trial: metrics, the columns `more`, and the differing parameters that fit.

    `width` is that of the terminal by default; `styles` are Rich's styles of rows.
    """
    names, rows = cells_of(trials, metrics, width or Console().width, more)
    table = borderless_table()
    for name in names:
        table.add_column(Text(visible(name)), no_wrap=True)
    for trial, row in zip(trials, rows, strict=True):
        table.add_row(*plain_cells(row), style=styles.get(trial.status, ""))
    return table


def cells_of(
    trials: Sequence[Trial], metrics: Sequence[str], width: int, more: Mapping[str, list[str]] = MappingProxyType({})
) -> tuple[list[str], list[list[str]]]:
    """Return column names and rows that are no wider than `width` if that is possible."""
    kept: dict[str, list[str]] = {
        "trial": [each.trial for each in trials],
        "status": [status_label(each.status, each.step) for each in trials],
        "step": [str(each.step) for each in trials],
    }
    for name in metrics:
        kept[_free(name, kept, "metrics/")] = [_on_one_line(metric_in(each.metrics, name)) for each in trials]
    for name, cells in more.items():
        kept[_free(name, kept, "trial's ")] = cells
    used = sum(_width(name, cells) + _GAP for name, cells in kept.items()) - _GAP
    for name, cells in _configuration(trials).items():
        used += _width(name, cells) + _GAP
        if used <= width:
            kept[_free(name, kept, "config/")] = cells
    return list(kept), [list(row) for row in zip(*kept.values(), strict=True)]


def _free(name: str, taken: Collection[str], prefix: str) -> str:
    """Return `name`, or with a prefix if another column has it."""
    return f"{prefix}{name}" if name in taken else name


def config_cells(trial: Trial) -> Sequence[tuple[str, str]]:
    """Return the names and values of a configuration, each short."""
    return [(name, cells[0]) for name, cells in _configuration([trial]).items()]


def _width(name: str, cells: Sequence[str]) -> int:
    return max(len(name), *map(len, cells), 0)


def _configuration(trials: Sequence[Trial]) -> Mapping[str, list[str]]:
    """Return the parameters that differ between the trials; all parameters for a single trial."""
    configs = [flat(each.config) for each in trials]
    names = dict.fromkeys(name for config in configs for name in config)
    found = {name: [_short(_on_one_line(config.get(name))) for config in configs] for name in names}
    return {name: cells for name, cells in found.items() if len(set(cells)) > 1 or len(cells) == 1}


def _on_one_line(value: object) -> str:
    return " ".join(format_value(value).split())


def _short(text: str) -> str:
    return text if len(text) <= _WIDEST_CELL else f"{text[: _WIDEST_CELL - 1]}…"
