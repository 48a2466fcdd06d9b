"""Format values, steps, errors, numbers, ages, costs and tables for terminals, notebooks and reports."""

from __future__ import annotations

import io
import math
import os
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from prefect_tune.core.display_text import format_amount, format_duration, format_elapsed, format_size, make_visible
from prefect_tune.core.experiment.cost import (
    MAX_LISTED_LOSSES,
    AttemptCost,
    CostCategory,
    ExperimentCost,
    format_percentage,
)
from prefect_tune.core.experiment.summary import format_best_trial_name
from prefect_tune.core.experiment.trial_transitions import Status, Trial
from prefect_tune.core.messages.target_messages import ExperimentView
from prefect_tune.core.metrics import short_repr
from prefect_tune.core.reasons import format_error
from prefect_tune.core.usage_records import RankEnd
from prefect_tune.core.values import flatten, get_metric, parse_time

# Tables, and output to stdout.

UNLIMITED_WIDTH = 100_000
"""The width for output to a pipe or a file, so that all columns and complete cells are written."""


def get_output_width() -> int:
    """Return `COLUMNS` if it is set, else the width of stdout's terminal, or `UNLIMITED_WIDTH` without a terminal."""
    has_width = "COLUMNS" in os.environ or (sys.stdout is not None and sys.stdout.isatty())
    return Console().width if has_width else UNLIMITED_WIDTH


def print_to_stdout(*parts: Table | str) -> None:
    """Print tables and lines to stdout; lines are neither parsed as markup nor wrapped."""
    console = Console(highlight=False, width=get_output_width())
    with console.capture() as output:
        for part in parts:
            content = make_visible(part) if isinstance(part, str) else part
            console.print(content, markup=False, soft_wrap=isinstance(part, str))
    lines = (line.rstrip(" ") for line in output.get().split("\n"))  # tables pad their rows with spaces
    console.file.write("\n".join(lines))


def render_text(*parts: RenderableType, width: int) -> str:
    """Return the plain text that a terminal of this width would show for these parts."""
    console = Console(color_system=None, force_jupyter=False, width=width, file=io.StringIO())
    with console.capture() as output:
        for part in parts:
            console.print(part)
    return "\n".join(line.rstrip() for line in output.get().splitlines())


def make_borderless_table(*names: str) -> Table:
    """Return an empty table without borders."""
    return Table(*names, box=None, header_style="dim", pad_edge=False)


def to_plain_cells(cells: Iterable[str]) -> Iterator[Text]:
    """Return cells as plain text, so that names chosen by users are not parsed as markup."""
    return (Text(make_visible(cell)) for cell in cells)


def make_facts_table(facts: Mapping[str, object]) -> Table:
    """Return a table with one row per name and value."""
    table = Table.grid(padding=(0, 2))
    for name, value in facts.items():
        table.add_row(Text(make_visible(name), style="dim"), Text(make_visible(format_value(value))))
    return table


# Values, steps and errors.

_MIN_RANGE_STEPS = 4
"""The minimum number of steps that are written as a range."""
_MAX_NAMED_TRIALS = 3


def format_value(value: object) -> str:
    """Format a value for display: floats with six digits, lists and mappings without brackets."""
    match value:
        case Mapping():
            return ", ".join(f"{name} {format_value(item)}" for name, item in value.items())
        case list() | tuple():
            return ", ".join(map(format_value, value))
        case float():
            return f"{value:.6g}"
        case None:
            return ""
        case _:
            return str(value)


def format_trial(trial: Trial, metrics: Iterable[str]) -> str:
    """Return a trial's name, marked if it errored, and these metrics, like `trial 00003, errored, loss 0.25`."""
    values = ", ".join(f"{name} {format_value(get_metric(trial.metrics, name))}" for name in metrics)
    return f"trial {format_best_trial_name(trial.id, trial.status)}, {values}"


def format_counts(counts: Mapping[str, int]) -> str:
    """Return counts like `7 completed, 2 errored`; `none` for no counts."""
    return ", ".join(f"{count} {name}" for name, count in counts.items()) or "none"


def format_time(at: str) -> str:
    """Format a time from the journal, without fractions of a second."""
    return at.replace("T", " ")[:19]


def format_steps(steps: Sequence[int]) -> str:
    """Return steps like `1-40 (40)`, `10, 20 … 60 (6)` or `1, 2, 5-9 (7)`; omit the count if each step is listed."""
    parts: list[str] = []
    begin = 0
    while begin < len(steps):
        first, end = steps[begin], begin + 1
        stride = steps[end] - first if end < len(steps) else 0
        while stride > 0 and end < len(steps) and steps[end] - steps[end - 1] == stride:
            end += 1
        if end - begin < _MIN_RANGE_STEPS:
            end = begin + 1
            parts.append(str(first))
        else:
            parts.append(f"{first}{'-' if stride == 1 else f', {first + stride} … '}{steps[end - 1]}")
        begin = end
    return ", ".join(parts) + (f" ({len(steps):,})" if len(parts) < len(steps) else "")


def append_last_output(reason: object, output: str) -> str:
    """Return why a process ended, followed by its last output; omit this output if the reason already ends with it."""
    text, last_output = make_visible(reason).strip(), make_visible(output.rstrip())
    return text if text.endswith(last_output) else f"{text}\nlast output:\n{last_output}"


def group_trials_by_error(trials: Iterable[Trial]) -> Sequence[tuple[str, Sequence[Trial]]]:
    """Return each distinct error with the errored trials that have this error, the most frequent error first."""
    trials_by_error: dict[str, list[Trial]] = defaultdict(list)
    for trial in trials:
        trials_by_error[format_error(trial.end_reason)].append(trial)
    return sorted(trials_by_error.items(), key=lambda item: -len(item[1]))


def format_trial_names(trials: Sequence[Trial]) -> str:
    """Return trial names like `00000, 00001, 00002 and 5 more`."""
    more = len(trials) - _MAX_NAMED_TRIALS
    names = ", ".join(trial.id for trial in trials[:_MAX_NAMED_TRIALS])
    return f"{names} and {more} more" if more > 0 else names


# Numbers in a report: four significant digits, commas between thousands, durations with units.

_SIGNIFICANT_DIGITS = 4
_MIN_LARGE_NUMBER = 10_000_000
_MIN_PLAIN_NUMBER = 0.001
"""Floats of at least `_MIN_LARGE_NUMBER`, or below `_MIN_PLAIN_NUMBER`, are written with an exponent."""
_MAX_PLAIN_INT = 10**15


def format_number(value: float) -> str:
    """Return a number like `0.02041`, `27`, `12,346` or `2.148e-28`."""
    if not math.isfinite(value):
        return str(value)
    if value and not _MIN_PLAIN_NUMBER <= abs(value) < _MIN_LARGE_NUMBER:
        digits, _, exponent = f"{value:.{_SIGNIFICANT_DIGITS - 1}e}".partition("e")
        end = f"e{int(exponent)}"
    else:
        places = _SIGNIFICANT_DIGITS - 1 - math.floor(math.log10(abs(value))) if value else 0
        digits, end = f"{value:,.{max(0, places)}f}", ""
    return (digits.rstrip("0").rstrip(".") if "." in digits else digits) + end


def format_cell(value: object) -> str:
    """Format a parameter or a metric for a table cell."""
    match value:
        case int() if not isinstance(value, bool):
            return f"{value:,}" if abs(value) < _MAX_PLAIN_INT else short_repr(value)
        case float():
            return format_number(value)
        case None:
            return ""
        case Mapping():
            return format_metrics(value)
        case list() | tuple():
            return ", ".join(map(format_cell, value))
        case _:
            return str(value)


def format_metrics(metrics: Mapping[str, object]) -> str:
    """Return metrics on one line, like `loss 0.02041, accuracy 0.9931`."""
    return ", ".join(f"{name} {format_cell(value)}" for name, value in flatten(metrics).items())


# The age of the experiment state that a command shows, as JSON fields and in words.

_MAX_MISSED_UPDATES = 2
_STALE_MARGIN = timedelta(seconds=1)
"""A live status is stale when `_MAX_MISSED_UPDATES` updates are missing and this additional time has passed."""
_MAX_TIME_ONLY_AGE = timedelta(hours=12)


@dataclass(frozen=True, slots=True)
class Freshness:
    """The time of the shown state, and the age of the state by this machine's clock."""

    as_of: datetime | None
    """None if the experiment records no time."""
    age: timedelta
    is_running: bool
    """Whether a trial is running according to the journal."""
    period: timedelta | None = None
    """The time between two updates; None if the owner publishes no updates."""

    @property
    def is_stale(self) -> bool:
        """Whether the process of a running experiment has probably ended, because its last two updates are missing."""
        if not self.is_running or self.period is None:
            return False
        return self.age > self.period * _MAX_MISSED_UPDATES + _STALE_MARGIN

    def to_json(self) -> Mapping[str, object]:
        return {
            "as_of": self.as_of.isoformat(timespec="seconds") if self.as_of else None,
            "age_seconds": round(self.age.total_seconds(), 1) if self.as_of else None,
            "is_stale": self.is_stale,
        }

    def format_short(self) -> str:
        """Return time and rough age, like `01:32:20, 9 min ago`; after 12 hours, with the date instead of seconds."""
        if self.as_of is None:
            return ""
        pattern = "%H:%M:%S" if self.age < _MAX_TIME_ONLY_AGE else "%Y-%m-%d %H:%M"
        rough_age = " ".join(format_duration(self.age).split()[:2])
        return f"{self.as_of:{pattern}}, {rough_age} ago"

    def describe(self, since: str = "ago") -> str:
        """Return time and age, with a warning if the state may be outdated. `since` is the word after the age."""
        if self.as_of is None:
            return "an unknown time"
        pattern = "%H:%M:%S" if self.age < _MAX_TIME_ONLY_AGE else "%Y-%m-%d %H:%M:%S"
        text = f"{self.as_of:{pattern}} UTC, {format_duration(self.age)} {since}"
        if self.is_stale and self.period is not None:
            return f"{text}; updates every {format_duration(self.period)} are missing; the process has probably ended"
        if self.is_running and self.period is None:
            return f"{text}: the last journal entry; running trials may have progressed further"
        return text


UNKNOWN_FRESHNESS = Freshness(None, timedelta(0), is_running=False)


def compute_freshness(view: ExperimentView, now: datetime) -> Freshness:
    """Return the freshness of `view` at `now`. Clocks differ, so a time in the future counts as `now`."""
    is_running = any(trial.status is Status.RUNNING for trial in view.experiment.trials.values())
    period = timedelta(seconds=view.live.period_seconds) if view.live is not None else None
    as_of = parse_time(view.as_of)
    return Freshness(as_of, max(timedelta(0), now - (as_of or now)), is_running, period)


def format_age(at: str | None, now: datetime) -> str:
    """Return the age of a time that the target recorded, like `12 s ago`; empty for None."""
    time = parse_time(at) if at else None
    return "" if time is None else f"{format_duration(max(timedelta(0), now - time))} ago"


# The cost of an experiment, as tables and as JSON.

_MAX_NAMED_RANKS = 8
MIN_SHOWN_SECONDS = 0.005
"""Shorter times are left out of tables."""


def make_cost_table(cost: ExperimentCost) -> Table:
    """Return a table of the cost categories that took time, with the time of each and its share of the slots' time."""
    table = make_borderless_table("slots", "time", "share")
    for category, seconds in cost.seconds.items():
        if seconds >= MIN_SHOWN_SECONDS:
            share = format_percentage(seconds / (cost.slot_seconds or 1.0))
            table.add_row(*to_plain_cells((str(category), format_elapsed(seconds), share)))
    return table


def make_attempts_table(attempts: Sequence[AttemptCost]) -> Table:
    """Return a table of a trial's attempts: times, largest losses of time, resources, and exceptional ends of ranks."""
    rows = [_format_resources(attempt) for attempt in attempts]
    names = [name for name in _RESOURCES if any(name in resources for resources in rows)]
    table = make_borderless_table("attempt", "in all", "training", "largest losses", *names)
    for attempt, resources in zip(attempts, rows, strict=True):
        training = attempt.seconds[CostCategory.TRAINING]
        losses = [(seconds, kind) for kind, seconds in attempt.seconds.items() if kind is not CostCategory.TRAINING]
        shown = sorted(losses, key=lambda loss: -loss[0])[:MAX_LISTED_LOSSES]
        largest = [f"{kind} {format_elapsed(seconds)}" for seconds, kind in shown if seconds >= MIN_SHOWN_SECONDS]
        times = format_elapsed(attempt.total_seconds), format_elapsed(training)
        cells = (str(attempt.attempt), *times, ", ".join(largest), *(resources.get(name, "") for name in names))
        table.add_row(*to_plain_cells(cells))
    return table


_RESOURCES = ("processors", "peak memory", "GPU", "ranks that ended otherwise")


def _format_resources(attempt: AttemptCost) -> Mapping[str, str]:
    """Return the resources that an attempt used, by column; "-" for the processors if they were measured only once."""
    use, resources = attempt.usage, dict[str, str]()
    if use is not None and use.peak_memory_bytes is not None:
        busy_count = None
        if use.cpu_seconds is not None:
            busy_count = use.cpu_seconds / max(0.01, use.seconds.total - use.seconds.start)
        resources["processors"] = "-" if busy_count is None else format_amount(busy_count, digits=2)
        if use.mean_memory_bytes is not None:
            mean = format_size(use.mean_memory_bytes)
            resources["peak memory"] = f"{format_size(use.peak_memory_bytes)} (mean {mean})"
    if use is not None and use.peak_gpu_memory_bytes is not None:
        share = format_percentage(use.mean_gpu_utilization or 0.0)
        resources["GPU"] = f"{format_size(use.peak_gpu_memory_bytes)}, {share} busy"
    if attempt.rank_ends:
        resources["ranks that ended otherwise"] = format_rank_ends(attempt.rank_ends)
    return resources


def format_rank_ends(ends: Sequence[RankEnd]) -> str:
    """Describe the ranks that ended differently from most ranks, like `rank 1: ended by SIGKILL, the cause`."""
    parts = []
    for end in ends:
        more = len(end.ranks) - _MAX_NAMED_RANKS
        ranks = ", ".join(map(str, end.ranks[:_MAX_NAMED_RANKS])) + (f" and {more} more" if more > 0 else "")
        cause = ", the cause" if end.is_cause else ""
        parts.append(f"rank{'s' if len(end.ranks) > 1 else ''} {ranks}: {end.how}{cause}")
    return "; ".join(parts)


def cost_to_json(cost: ExperimentCost) -> Mapping[str, object]:
    """Return the cost of an experiment as JSON, without the costs of its attempts."""
    return {
        "slot_seconds": round(cost.slot_seconds, 3),
        "run_seconds": round(cost.run_seconds, 3),
        "runs": [
            {"began_at": run.began_at.isoformat(), "seconds": round(run.seconds, 3), "slots": run.slots}
            for run in cost.runs
        ],
        "seconds": _round_seconds(cost.seconds),
    }


def attempt_cost_to_json(cost: AttemptCost) -> Mapping[str, object]:
    """Return the cost of an attempt as JSON; values that were not measured are null."""
    use = cost.usage.model_dump(mode="json", exclude={"seconds", "output"}) if cost.usage else {}
    if cost.rank_ends:
        use["ends"] = [{**end.model_dump(mode="json"), "how": str(end.how)} for end in cost.rank_ends]
    began = {"began_at": cost.began_at.isoformat(), "is_begin_clamped": cost.is_begin_clamped}
    return {"attempt": cost.attempt, **began, "seconds": _round_seconds(cost.seconds), **use}


def _round_seconds(seconds: Mapping[CostCategory, float]) -> Mapping[str, float]:
    return {category.key: round(spent, 3) for category, spent in seconds.items()}
