"""Initial points: configurations of the user that a search tries first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from prefect_tune.core.errors import InvalidInput
from prefect_tune.core.search.config_inverse import Found, Misfit, read
from prefect_tune.core.search.domains import domains_in, frozen

__all__ = ["Point", "fixed_by", "valid_points"]

Point = Mapping[str, object]


def valid_points(points: Sequence[Point]) -> tuple[dict[str, object], ...]:
    """Return a copy of `points_to_evaluate` as plain JSON.

    Raises:
        InvalidInput: a point is not an object of plain values.
    """
    return tuple(_point(each, index) for index, each in enumerate(points))


def fixed_by(point: Point, space: Mapping[str, object]) -> dict[str, object]:
    """Return the values and option indexes that the point fixes, by the names of the parameters.

    Raises:
        InvalidInput: the point is outside of the space.
    """
    readings = list(read(space, point))
    for each in readings:
        if isinstance(each, Misfit):
            raise InvalidInput(
                f"points_to_evaluate: {each.name}: expected {each.expected}, found {each.found!r}, "
                f"in {dict(point)!r}; correct the point, or widen the space"
            )
    return {each.name: each.drawn for each in readings if isinstance(each, Found)}


def _point(point: object, index: int) -> dict[str, object]:
    where = f"points_to_evaluate[{index}]"
    copied = frozen(point, where)
    if isinstance(copied, dict) and not any(domains_in(copied)):
        return copied
    raise InvalidInput(f"{where}: expected a configuration of plain values, found {point!r}")
