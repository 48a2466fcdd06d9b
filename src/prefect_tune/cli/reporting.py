"""`report`: an experiment on one page."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from prefect_tune.cli.app import LOOK, ExperimentName, Target, app
from prefect_tune.cli.looking import best_first, best_of, counted, objective_in, opened, place_at, written_at
from prefect_tune.core.errors import InvalidInput
from prefect_tune.terminal.printing import said, said_counts, said_time
from prefect_tune.terminal.trials_table import cells_of

if TYPE_CHECKING:
    from prefect_tune.core.experiment import Experiment
    from prefect_tune.core.trial import Trial

__all__: list[str] = []

_TRIALS_SHOWN = 50
_WIDE = 160


@app.command(rich_help_panel=LOOK)
def report(
    target: Target,
    experiment: ExperimentName,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Default: stdout.", show_default=False)] = None,
) -> None:
    """Write one page about an experiment, in Markdown: the best trial, all trials, errors, what was asked for."""
    from prefect_tune.core.journal import next_entry

    with opened(target, experiment) as (store, state):
        first = next_entry(store, state.key, 0)
        times = f"{said_time(first.at if first else '')} to {said_time(written_at(store, state))}"
    page = "\n".join(_page(state, place_at(target).uri, times)) + "\n"
    if output is None:
        print(page, end="")
        return
    try:
        output.write_text(page, encoding="utf-8")
    except OSError as error:
        raise InvalidInput(f"{output}: {error.strerror}") from error


def _page(state: Experiment, uri: str, times: str) -> Iterator[str]:
    trials = list(state.trials.values())
    yield f"# {_escaped(state.name)}"
    yield ""
    yield f"- **where**: {_escaped(uri)}"
    yield f"- **when**: {times}"
    yield f"- **trials**: {said_counts(counted(state))}"
    trained, attempts = sum(each.trained_seconds for each in trials), sum(each.attempt for each in trials)
    redone = sum(each.wasted_steps for each in trials)
    yield f"- **training**: {trained:.1f} s in {attempts} attempts; {redone} steps redone"
    if best := best_of(state):
        yield from _best(state, best)
    yield from _trials(state, trials)
    yield from _errors(trials)
    if state.settings:
        yield from ("", "## Asked for", "", "```json", json.dumps(dict(state.settings), indent=2), "```")


def _best(state: Experiment, best: Trial) -> Iterator[str]:
    yield from ("", f"## Best: trial {best.trial}", "")
    yield f"- **metrics**: {_escaped(said(best.metrics))}"
    yield f"- **step**: {best.step}"
    if best.checkpoints:
        newest = best.checkpoints[-1]
        command = f"prefect-tune export TARGET {state.name} DIRECTORY --trial {best.trial}"
        yield f"- **checkpoint**: step {newest.step}; `{command}`"
    yield from ("", "```json", json.dumps(dict(best.config), indent=2), "```")


def _trials(state: Experiment, trials: Sequence[Trial]) -> Iterator[str]:
    objective = objective_in(state.settings)
    metrics = objective.metrics if objective else tuple(_common(trials))
    names, rows = cells_of(best_first(trials, objective)[:_TRIALS_SHOWN], metrics, _WIDE)
    yield from ("", "## Trials", "", _line(names), _line(["---"] * len(names)))
    yield from map(_line, rows)
    if len(trials) > _TRIALS_SHOWN:
        yield from ("", f"and {len(trials) - _TRIALS_SHOWN} more.")


def _common(trials: Sequence[Trial]) -> Mapping[str, object]:
    return trials[0].metrics if trials else {}


def _errors(trials: Sequence[Trial]) -> Iterator[str]:
    errors = [each for each in trials if each.status == "errored"]
    if errors:
        yield from ("", "## Errors", "")
    for each in errors:
        first = each.reason.strip().partition("\n")[0]
        yield f"- {each.trial}, step {each.step}: {_escaped(first)}"


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(map(_escaped, cells))} |"


def _escaped(text: str) -> str:
    """Text is text, whatever a user named: no markup, no row that breaks."""
    one_line = " ".join(text.split())
    return "".join(f"\\{each}" if each in "\\`*_[]<>|#" else each for each in one_line)
