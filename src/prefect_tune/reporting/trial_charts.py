"""Charts that compare trials: learning curves, parallel coordinates."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from prefect_tune.core.search_view import numbers_in
from prefect_tune.reporting.facts import ReportInput, spread
from prefect_tune.reporting.svg import (
    BLUE,
    END,
    FAINT,
    GREY,
    INKS,
    MIDDLE,
    ORANGE,
    PALE,
    SMALL,
    Drawing,
    Frame,
    Pen,
    Point,
    Scale,
    draw_axes,
    fitted,
)
from prefect_tune.terminal.formatting import format_number

WIDTH = 880
_NAMED = 4
_AXES = 8
_LINES = 160
_CATEGORIES = 12
_SMALL_COLUMNS = 3
_SMALL_HEIGHT = 150
_LONGEST_NAME = 36
SMALL_CURVES = 12
"""The most curves in a small panel."""
_BEST = Pen(ORANGE, 2.4)
_GOOD = Pen(BLUE, 1.6)
_OTHERS = Pen(BLUE, 1, PALE)
_UNRANKED = Pen(GREY, 1.2, 0.8)
_LABEL = 'font-size="10.5" font-weight="700"'


# ---------------------------------------------------------------------------------------------- learning curves


def learning_curves(report_input: ReportInput) -> str | None:
    """Draw a panel for each metric, a small one for each that is not of the objective; None if nothing was reported."""
    history = report_input.history
    metrics, others = (
        [name for name in names if any(name in each for each in history.curves.values())]
        for names in (history.metrics, history.others)
    )
    columns = 1 if len(metrics) == 1 else 2
    height = 300 if columns == 1 else 230
    bottom = height * -(-len(metrics) // columns)
    drawing = Drawing(WIDTH, bottom + _SMALL_HEIGHT * -(-len(others) // _SMALL_COLUMNS))
    for index, name in enumerate(metrics):
        left, top = WIDTH / columns * (index % columns), height * (index // columns)
        right = left + WIDTH / columns - (70 if columns == 1 else 56)
        _curves(drawing, Frame(left + 62, top + 26, right, top + height - 42), report_input, name)
    for index, name in enumerate(others):
        left = WIDTH / _SMALL_COLUMNS * (index % _SMALL_COLUMNS)
        top = bottom + _SMALL_HEIGHT * (index // _SMALL_COLUMNS)
        frame = Frame(left + 62, top + 26, left + WIDTH / _SMALL_COLUMNS - 12, top + _SMALL_HEIGHT - 36)
        _curves(drawing, frame, report_input, name, is_small=True)
    return drawing.svg() if metrics or others else None


def _curves(drawing: Drawing, frame: Frame, report_input: ReportInput, metric: str, *, is_small: bool = False) -> None:
    curves = {trial: each[metric] for trial, each in report_input.history.curves.items() if each.get(metric)}
    if is_small and len(curves) > SMALL_CURVES:
        first = [each.trial for each in spread(report_input.ranking, SMALL_CURVES) if each.trial in curves]
        curves = {trial: curves[trial] for trial in list(dict.fromkeys([*first, *curves]))[:SMALL_CURVES]}
    x = fitted([step for each in curves.values() for step, _ in each], frame.left, frame.right, is_log=False)
    x = replace(x, is_whole=True)
    y = fitted([value for each in curves.values() for _, value in each], frame.bottom, frame.top, room=0.03)
    draw_axes(drawing, frame, x, y, ("step", metric[-_LONGEST_NAME:]))
    lines = {trial: [(x.at(step), y.at(value)) for step, value in each] for trial, each in curves.items()}
    ranked = [each.trial for each in report_input.ranking if each.trial in lines]
    best = [each.trial for each in report_input.best if each.trial in lines]
    named = [each for each in ranked[:_NAMED] if each not in best] if len(best) <= 1 else []
    others = [each for each in ranked if each not in best and each not in named]
    unranked = [trial for trial in lines if trial not in report_input.losses]
    for index, trial in enumerate(unranked):
        drawing.lines([lines[trial]], Pen(INKS[index], 1.8) if len(unranked) <= len(INKS) else _UNRANKED)
    drawing.lines([lines[each] for each in reversed(others)], _OTHERS)
    drawing.lines([lines[each] for each in named], _GOOD)
    drawing.lines([lines[each] for each in best], _BEST if len(best) == 1 else Pen(ORANGE, 1.5, 0.8))
    drawing.dots([line[-1] for line in lines.values() if len(line) == 1], Pen(BLUE, 4, PALE))
    if not is_small:
        _name_ends(drawing, frame, [(each, lines[each][-1], each in best) for each in [*best[:1], *named]])


def _name_ends(drawing: Drawing, frame: Frame, ends: Sequence[tuple[str, Point, bool]]) -> None:
    """Write each name beside the end of its curve, unless it would overlap another name."""
    taken: list[Point] = []
    for trial, (x, y), is_best in ends:
        at = (min(x, frame.right) + 6, min(frame.bottom, max(frame.top + 8, y + 4)))
        if all(abs(at[1] - other[1]) >= 12 or abs(at[0] - other[0]) > 48 for other in taken):
            taken.append(at)
            drawing.text(at, trial[-9:], SMALL + ' font-weight="600"' * is_best, ORANGE if is_best else BLUE)


# ---------------------------------------------------------------------------------------- parallel coordinates


@dataclass(frozen=True)
class _Axis:
    """A parameter, or a metric, as a vertical line."""

    name: str
    values: Mapping[str, object] = field(repr=False)
    numbers: Scale | None = None
    categories: Sequence[str] = ()

    def at(self, trial: str, frame: Frame) -> float | None:
        value = self.values.get(trial)
        if value is None:
            return None
        if self.numbers is not None:
            return self.numbers.at(float(str(value)))
        return self.place(self.categories.index(_category(value)), frame)

    def place(self, index: int, frame: Frame) -> float:
        return frame.bottom - (index + 0.5) * (frame.bottom - frame.top) / len(self.categories)


def parallel_coordinates(report_input: ReportInput) -> str | None:
    """Draw each trial as a line through its parameters to its metric; None with fewer than two trials or no metric."""
    if report_input.objective is None or len(report_input.ranking) < 2:
        return None
    frame = Frame(70, 44, WIDTH - 70, 280)
    axes = list(_axes(report_input, frame))
    if len(axes) < 2:
        return None
    drawing = Drawing(WIDTH, 300)
    places = [frame.left + index * (frame.right - frame.left) / (len(axes) - 1) for index in range(len(axes))]
    drawn = spread(report_input.ranking, _LINES)
    lines = [_through(axes, places, each.trial, frame) for each in drawn]
    best = {each.trial for each in report_input.best}
    good = max(1, len(drawn) // 5)
    drawing.lines(reversed(lines[good:]), Pen(BLUE, 1, FAINT if len(lines) > 40 else PALE))
    drawing.lines([line for line, each in zip(lines[:good], drawn, strict=False) if each.trial not in best], _GOOD)
    drawing.lines([line for line, each in zip(lines, drawn, strict=True) if each.trial in best], _BEST)
    for axis, place in zip(axes, places, strict=True):
        _draw_axis(drawing, axis, place, frame)
    return drawing.svg()


def _axes(report_input: ReportInput, frame: Frame) -> Iterator[_Axis]:
    names = [each.trial for each in report_input.trials]
    found = (
        _axis(name, dict(zip(names, values, strict=True)), frame, is_log=report_input.is_log(name))
        for name, values in report_input.cells.items()
    )
    yield from [axis for axis in found if axis is not None][: _AXES - 1]
    for metric in report_input.objective.metrics if report_input.objective else ():
        values: dict[str, object] = {
            each.trial: report_input.compared(each.trial).get(metric) for each in report_input.ranking
        }
        if (axis := _axis(metric, values, frame)) is not None:
            yield axis


def _axis(name: str, values: Mapping[str, object], frame: Frame, *, is_log: bool | None = None) -> _Axis | None:
    """Return the axis of a parameter; None for text with too many different values."""
    there = [each for each in values.values() if each is not None]
    numbers = numbers_in({str(index): each for index, each in enumerate(there)})
    if there and len(numbers) == len(there) and len(set(there)) > 3:
        return _Axis(name, values, numbers=fitted(list(numbers.values()), frame.bottom, frame.top, is_log=is_log))
    categories = sorted(set(map(_category, there)), key=float if len(numbers) == len(there) else None)
    return _Axis(name, values, categories=categories) if 0 < len(categories) <= _CATEGORIES else None


def _category(value: object) -> str:
    """A number is the same with and without a fraction."""
    return str(next(iter(numbers_in({"": value}).values()), value))


def _through(axes: Sequence[_Axis], places: Sequence[float], trial: str, frame: Frame) -> Sequence[Point]:
    """Return the trial's points on all axes; a missing value is below the axis."""
    found = ((x, axis.at(trial, frame)) for axis, x in zip(axes, places, strict=True))
    return [(x, frame.bottom + 10 if y is None else y) for x, y in found]


def _draw_axis(drawing: Drawing, axis: _Axis, x: float, frame: Frame) -> None:
    drawing.line([(x, frame.top), (x, frame.bottom)], Pen(GREY, 1, 0.8))
    drawing.text((x, frame.top - 22), axis.name[-22:], f'{SMALL} {MIDDLE} font-weight="600"')
    for y, said in axis.numbers.ticks(4) if axis.numbers else ():
        drawing.line([(x - 3, y), (x + 3, y)], Pen(GREY, 1, 0.8))
        drawing.text((x - 6, y + 4), said, f"{_LABEL} {END}")
    for index, category in enumerate(axis.categories):
        drawing.text((x, axis.place(index, frame) - 7), _label(category), f"{_LABEL} {MIDDLE}")


def _label(category: str) -> str:
    try:
        return format_number(float(category))
    except ValueError:
        return category[:14]
