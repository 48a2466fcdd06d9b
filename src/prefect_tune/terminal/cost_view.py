"""The cost of an experiment in words and tables, for a terminal, a report and a notebook."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.table import Table

from prefect_tune.core.experiment.cost import LOSSES_NAMED, AttemptCost, Category, ExperimentCost, format_share
from prefect_tune.core.shown_text import format_seconds, shown_amount, shown_size
from prefect_tune.core.usage_records import RankEnd
from prefect_tune.terminal.formatting import borderless_table, plain_cells

_RANKS_NAMED = 8
LEAST_SECONDS = 0.005
"""A shorter time is in no table."""


def cost_rows(cost: ExperimentCost) -> Sequence[tuple[str, str, str]]:
    """Return each category that took time, its time and its share."""
    total = cost.slot_seconds or 1.0
    shown = {each: found for each, found in cost.seconds.items() if found >= LEAST_SECONDS}
    return [(str(each), _time(found), format_share(found / total)) for each, found in shown.items()]


def _time(seconds: float) -> str:
    """Return a time that can be read beside others: to the hundredth of a second at most."""
    return format_seconds(seconds) if seconds >= 10 else f"{round(seconds, 2 if seconds < 1 else 1):g} s"


def cost_table(cost: ExperimentCost) -> Table:
    """Return the table of categories for a terminal."""
    table = borderless_table("slots", "time", "share")
    for row in cost_rows(cost):
        table.add_row(*plain_cells(row))
    return table


def attempts_table(attempts: Sequence[AttemptCost]) -> Table:
    """Return the table of a trial's attempts: their time, the largest losses, processors, memory, ends of ranks."""
    used = {name: cells for name, cell in _USED.items() if any(cells := [cell(each) for each in attempts])}
    if any(each.rank_ends for each in attempts):
        used["ranks that ended otherwise"] = [ends_words(each.rank_ends) for each in attempts]
    table = borderless_table("attempt", "in all", "training", "largest losses", *used)
    for place, each in enumerate(attempts):
        times = _time(each.total_seconds), _time(each.seconds[Category.TRAINING])
        resources = (cells[place] for cells in used.values())
        table.add_row(*plain_cells((str(each.attempt), *times, _losses(each), *resources)))
    return table


def ends_words(ends: Sequence[RankEnd]) -> str:
    """Return how ranks ended that did not end like the others: `rank 1: ended by SIGKILL, the cause`."""
    return "; ".join(map(_end_words, ends))


def _end_words(end: RankEnd) -> str:
    said = f"rank{'s' * (len(end.ranks) > 1)} {_numbers(end.ranks)}: {end.how}"
    return f"{said}, the cause" if end.is_cause else said


def _numbers(ranks: Sequence[int]) -> str:
    more = len(ranks) - _RANKS_NAMED
    return ", ".join(map(str, ranks[:_RANKS_NAMED])) + (f" and {more} more" if more > 0 else "")


def _losses(cost: AttemptCost) -> str:
    lost = [each for each in cost.seconds.items() if each[0] is not Category.TRAINING and each[1] >= LEAST_SECONDS]
    largest = sorted(lost, key=lambda each: -each[1])[:LOSSES_NAMED]
    return ", ".join(f"{category} {_time(found)}" for category, found in largest)


def _processors(cost: AttemptCost) -> str:
    """Return how many processors were busy at a time, since the trainable was loaded; `-` after a single sample."""
    if cost.use is None or cost.use.peak_memory_bytes is None:
        return ""
    if cost.use.cpu_seconds is None:
        return "-"
    seconds = cost.use.seconds
    return shown_amount(cost.use.cpu_seconds / max(0.01, seconds.total - seconds.start), digits=2)


def _memory(cost: AttemptCost) -> str:
    if cost.use is None or cost.use.peak_memory_bytes is None or cost.use.mean_memory_bytes is None:
        return ""
    return f"{shown_size(cost.use.peak_memory_bytes)} (mean {shown_size(cost.use.mean_memory_bytes)})"


def _gpu(cost: AttemptCost) -> str:
    if cost.use is None or cost.use.peak_gpu_memory_bytes is None:
        return ""
    return f"{shown_size(cost.use.peak_gpu_memory_bytes)}, {format_share(cost.use.mean_gpu_utilization or 0.0)} busy"


_USED = {"processors": _processors, "peak memory": _memory, "GPU": _gpu}


def cost_fields(cost: ExperimentCost) -> Mapping[str, object]:
    """Return the cost of an experiment as JSON, without its attempts."""
    return {
        "slot_seconds": round(cost.slot_seconds, 3),
        "run_seconds": round(cost.run_seconds, 3),
        "runs": [
            {"began_at": each.began_at.isoformat(), "seconds": round(each.seconds, 3), "slots": each.slots}
            for each in cost.runs
        ],
        "seconds": _seconds_fields(cost.seconds),
    }


def attempt_fields(cost: AttemptCost) -> Mapping[str, object]:
    """Return the cost of an attempt as JSON; null for what was not measured."""
    use = cost.use.model_dump(mode="json", exclude={"seconds", "output"}) if cost.use else {}
    if cost.rank_ends:
        use["ends"] = [{**end.model_dump(mode="json"), "how": str(end.how)} for end in cost.rank_ends]
    begins = {"attempt": cost.attempt, "began_at": cost.began_at.isoformat(), "is_bounded": cost.is_bounded}
    return {**begins, "seconds": _seconds_fields(cost.seconds), **use}


def _seconds_fields(seconds: Mapping[Category, float]) -> Mapping[str, float]:
    return {each.key: round(found, 3) for each, found in seconds.items()}
