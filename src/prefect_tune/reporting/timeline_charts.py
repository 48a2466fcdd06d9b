"""The timeline: the owners of the experiment, and all attempts."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from itertools import pairwise

from prefect_tune.core.experiment.trial import ENDED, Status
from prefect_tune.core.experiment.trial_transitions import Trial
from prefect_tune.core.search_view import AttemptEnd, AttemptPeriod, OwnershipPeriod
from prefect_tune.core.shown_text import format_duration
from prefect_tune.reporting.facts import ReportInput
from prefect_tune.reporting.svg import (
    BLUE,
    END,
    GREEN,
    GREY,
    MIDDLE,
    ORANGE,
    PALE,
    RED,
    SMALL,
    TEAL,
    VIOLET,
    Drawing,
    Fill,
    Frame,
    Pen,
    draw_y_axis,
    fitted,
)
from prefect_tune.terminal.cost_view import ends_words

WIDTH = 880
_LEFT, _RIGHT = 92.0, WIDTH - 16.0
_ROW = 13.0
_ROWS = 26
_BARS = 500
_BREAK = 26.0
"""The width, in pixels, of a long time in which no attempt ran."""
FILLS: Mapping[Status, Fill] = {
    Status.COMPLETED: Fill(GREEN),
    Status.PRUNED: Fill(TEAL, "outline"),
    Status.INTERRUPTED: Fill(ORANGE, "hatch"),
    Status.ERRORED: Fill(RED),
    Status.RUNNING: Fill(BLUE),
    Status.PAUSED: Fill(VIOLET, "outline"),
}
"""How an attempt is drawn, by the status that it ended with: told apart by more than a color."""
_STATUSES: Mapping[AttemptEnd | None, Status] = {
    None: Status.RUNNING,
    AttemptEnd.FINISHED: Status.COMPLETED,
    AttemptEnd.PAUSED: Status.PAUSED,
    AttemptEnd.STOPPED: Status.INTERRUPTED,
    AttemptEnd.LOST: Status.INTERRUPTED,
    AttemptEnd.FAILED: Status.ERRORED,
}
_LEGEND = 22.0
_BREAK_LABEL = 90.0
"""The width that the label of such a time needs."""


@dataclass(frozen=True)
class _Clock:
    """A time axis on which long idle times are compressed."""

    knots: Sequence[tuple[float, float]]
    """Pairs of seconds and horizontal position."""
    breaks: Sequence[tuple[float, timedelta]]
    """The position and length of each idle time that is left out."""
    begin: datetime

    def at(self, when: datetime) -> float:
        seconds = (when - self.begin).total_seconds()
        for (before, left), (after, right) in pairwise(self.knots):
            if seconds <= after:
                return left + max(0.0, seconds - before) / max(1e-9, after - before) * (right - left)
        return self.knots[-1][1]


def timeline(report_input: ReportInput) -> str | None:
    """Draw the owners of the experiment and, below them, all attempts; None if no attempt has started."""
    history, now = report_input.history, report_input.now
    if not history.ownerships:
        return None
    attempts = [each if each.ended else replace(each, ended=_still(each, report_input)) for each in history.attempts]
    clock = _clock(history.ownerships, attempts, now)
    is_crowded = len(attempts) > _BARS
    lanes = [] if is_crowded else _lanes(attempts)
    body = 120.0 if is_crowded else max(1, len(lanes)) * _row(lanes)
    drawing = Drawing(WIDTH, 44 + body + 44 + (0 if is_crowded else _LEGEND))
    _draw_ownerships(drawing, clock, history.ownerships)
    if is_crowded:
        _draw_load(drawing, clock, attempts, (44, 44 + body))
    else:
        statuses = _statuses(attempts, report_input)
        _draw_lanes(drawing, clock, lanes, statuses)
        _draw_legend(drawing, 44 + body + 44 + 12, set(statuses.values()))
    _draw_clock(drawing, clock, 44 + body + 6)
    return drawing.svg()


def _still(attempt: AttemptPeriod, report_input: ReportInput) -> datetime:
    """Return the end to draw for an attempt without one: the last journal entry of its owner."""
    return max(attempt.began, report_input.history.ownerships[-1].last)


def _clock(ownerships: Sequence[OwnershipPeriod], attempts: Sequence[AttemptPeriod], now: datetime) -> _Clock:
    spans = [(each.began, each.last) for each in ownerships] + [(each.began, each.ended or now) for each in attempts]
    begin = min(start for start, _ in spans)
    merged = _merged([((start - begin).total_seconds(), (end - begin).total_seconds()) for start, end in spans])
    busy = sum(end - start for start, end in merged) or 1.0
    gaps = [later[0] - earlier[1] for earlier, later in pairwise(merged)]
    is_broken = [gap > busy * 0.15 for gap in gaps]
    straight = busy + sum(gap for gap, broken in zip(gaps, is_broken, strict=True) if not broken)
    scale = (_RIGHT - _LEFT - _BREAK * sum(is_broken)) / straight
    knots, breaks, x = [(merged[0][0], _LEFT)], [], _LEFT
    for index, (start, end) in enumerate(merged):
        x += (end - start) * scale
        knots.append((end, x))
        if index < len(gaps):
            if is_broken[index]:
                breaks.append((x + _BREAK / 2, timedelta(seconds=gaps[index])))
            x += _BREAK if is_broken[index] else gaps[index] * scale
            knots.append((merged[index + 1][0], x))
    return _Clock(knots, breaks, begin)


def _merged(spans: Sequence[tuple[float, float]]) -> Sequence[tuple[float, float]]:
    found: list[tuple[float, float]] = []
    for start, end in sorted(spans):
        if found and start <= found[-1][1] + 1e-6:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((start, end))
    return found


def _draw_ownerships(drawing: Drawing, clock: _Clock, ownerships: Sequence[OwnershipPeriod]) -> None:
    drawing.text((_LEFT - 8, 27), "runs", f"{SMALL} {END}")
    for ownership in ownerships:
        left, right = clock.at(ownership.began), clock.at(ownership.last)
        said = f"owner {ownership.term}: {ownership.owner}"
        drawing.bar((left, 14), (max(2.0, right - left - 1), 19), Fill(GREY), title=said)
        name = ownership.owner.name if right - left > 7 * len(ownership.owner.name) + 30 else ""
        label = f"{ownership.term} {name}".strip()
        if right - left > 7 * len(label):
            drawing.text((left + 6, 27.5), label, f'{SMALL} font-weight="600"', "#fff")


def _lanes(attempts: Sequence[AttemptPeriod]) -> Sequence[tuple[str, Sequence[AttemptPeriod]]]:
    """Return a row per trial; for many trials a row per slot, with trials one after the other."""
    of_trials: dict[str, list[AttemptPeriod]] = {}
    for each in attempts:
        of_trials.setdefault(each.trial, []).append(each)
    if len(of_trials) <= _ROWS:
        return sorted(of_trials.items())
    slots: list[list[AttemptPeriod]] = []
    for each in sorted(attempts, key=lambda attempt: attempt.began):
        free = next((slot for slot in slots if (slot[-1].ended or each.began) <= each.began), None)
        if free is None:
            slots.append([each])
        else:
            free.append(each)
    return [(f"slot {number}", slot) for number, slot in enumerate(slots, 1)]


def _row(lanes: Sequence[object]) -> float:
    return min(20.0, max(_ROW, 120 / max(1, len(lanes)))) if len(lanes) <= 40 else 520 / len(lanes)


def _statuses(attempts: Sequence[AttemptPeriod], report_input: ReportInput) -> Mapping[tuple[str, int], Status]:
    """Return the status that each attempt ended with, by its trial and number."""
    trials = {each.trial: each for each in report_input.trials}
    return {(each.trial, each.attempt): _status_of(each, trials[each.trial]) for each in attempts}


def _status_of(attempt: AttemptPeriod, trial: Trial) -> Status:
    """The last attempt of a trial that has ended has its status: a paused one is pruned if it was not promoted."""
    is_last = attempt.attempt == trial.attempt and trial.phase in ENDED
    has_ended_well = attempt.end in (AttemptEnd.FINISHED, AttemptEnd.PAUSED)
    return trial.status if is_last and has_ended_well else _STATUSES[attempt.end]


def _draw_legend(drawing: Drawing, y: float, shown: Collection[Status]) -> None:
    x = _LEFT
    for status in Status:
        if status in shown:
            drawing.swatch((x, y - 9), FILLS[status])
            drawing.text((x + 28, y), str(status), SMALL)
            x += 28 + 7 * len(status) + 18


def _draw_lanes(
    drawing: Drawing,
    clock: _Clock,
    lanes: Sequence[tuple[str, Sequence[AttemptPeriod]]],
    statuses: Mapping[tuple[str, int], Status],
) -> None:
    row = _row(lanes)
    for index, (name, attempts) in enumerate(lanes):
        y = 44 + index * row
        if row >= 11:
            drawing.text((_LEFT - 8, y + row / 2 + 2), name[-13:], f'font-size="10" {END}')
        for attempt in attempts:
            _draw_attempt(drawing, clock, attempt, statuses[attempt.trial, attempt.attempt], (y, row))


def _draw_attempt(
    drawing: Drawing, clock: _Clock, attempt: AttemptPeriod, status: Status, y_and_row: tuple[float, float]
) -> None:
    y, row = y_and_row
    left, right = clock.at(attempt.began), clock.at(attempt.ended or attempt.began)
    height = max(1.0, row - 3)
    said = f"{attempt.trial}, attempt {attempt.attempt}, steps {attempt.from_step} to {attempt.step}: {status}"
    if attempt.rank_ends:
        said = f"{said}; {ends_words(attempt.rank_ends)}"
    drawing.bar((left, y), (max(1.5, right - left - 0.8), height), FILLS[status], title=said)
    if attempt.end in (AttemptEnd.LOST, AttemptEnd.FAILED):
        drawing.cross((right, y + height / 2), Pen(RED, 2), min(3.5, height / 2))


def _draw_load(
    drawing: Drawing, clock: _Clock, attempts: Sequence[AttemptPeriod], top_and_bottom: tuple[float, float]
) -> None:
    """For too many attempts to draw each: draw how many ran at once, and where attempts were lost."""
    top, bottom = top_and_bottom
    left_at = [(clock.at(each.began), clock.at(each.ended or each.began)) for each in attempts]
    columns = [0] * int(_RIGHT - _LEFT + 1)
    for left, right in left_at:
        for column in range(int(left - _LEFT), max(int(left - _LEFT) + 1, int(right - _LEFT))):
            columns[min(column, len(columns) - 1)] += 1
    y = fitted([0, max(columns)], bottom, top + 6, is_log=False)
    draw_y_axis(drawing, Frame(_LEFT, top, _RIGHT, bottom), y, 4)
    outline = [(_LEFT + column, y.at(count)) for column, count in enumerate(columns)]
    drawing.area([(_LEFT, bottom), *outline, (_LEFT + len(columns) - 1, bottom)], Pen(BLUE, 1, PALE))
    lost = [
        (right, bottom - 4) for (_, right), each in zip(left_at, attempts, strict=True) if each.end is AttemptEnd.LOST
    ]
    drawing.dots(lost[:_BARS], Pen(RED, 5, 0.8))


def _draw_clock(drawing: Drawing, clock: _Clock, y: float) -> None:
    drawing.line([(_LEFT, y), (_RIGHT, y)], Pen(GREY, 1, 0.8))
    said_at = -_BREAK_LABEL
    for x, left_out in clock.breaks:
        for shift in (-3, 3):
            drawing.line([(x + shift - 3, y + 6), (x + shift + 3, y - 6)], Pen(GREY, 1.2))
        if x - said_at >= _BREAK_LABEL:
            drawing.text((x, y + 31), f"{format_duration(left_out)} later", f'font-size="10" {MIDDLE}')
            said_at = x
    began, ended = clock.begin, clock.begin + timedelta(seconds=clock.knots[-1][0])
    drawing.text((_LEFT, y + 17), f"{began:%Y-%m-%d %H:%M:%S} UTC", SMALL)
    pattern = "%H:%M:%S" if ended.date() == began.date() else "%Y-%m-%d %H:%M:%S"
    drawing.text((_RIGHT, y + 17), f"{ended:{pattern}}", f"{SMALL} {END}")
