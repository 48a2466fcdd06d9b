"""The regret of a search over time: the incumbent that a user would have if the search ended then."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from statistics import median, quantiles

from benchmarks.quality.simulation import Report

__all__ = ["Trajectory", "quartiles", "trajectory"]

Trajectory = Sequence[tuple[float, float]]
"""Seconds of training, and the final loss of the incumbent from then on."""


def trajectory(reports: Sequence[Report]) -> Trajectory:
    """Return the incumbents: of the trials that have trained the furthest, the one with the best loss there.

    This is the rule of HPOBench (Eggensperger et al. 2021, section 5): losses of different fidelities are not compared.
    An incumbent counts by its loss after the last step, even if it has not got there.
    """
    best: tuple[int, float] | None = None
    incumbents: list[tuple[float, float]] = []
    for report in reports:
        rank = (-report.step, report.loss)
        if best is None or rank < best:
            best = rank
            incumbents.append((report.seconds, report.final))
    return incumbents


def quartiles(trajectories: Sequence[Trajectory], seconds: float, least: float) -> tuple[float, float, float] | None:
    """Return the quartiles of the regret after so many seconds; None if a search has no report by then."""
    indices = [bisect_right(trajectory, seconds, key=lambda point: point[0]) - 1 for trajectory in trajectories]
    if min(indices) < 0:
        return None
    regrets = [trajectory[index][1] - least for trajectory, index in zip(trajectories, indices, strict=True)]
    if len(regrets) == 1:
        return regrets[0], regrets[0], regrets[0]
    low, _, high = quantiles(regrets, n=4, method="inclusive")
    return low, median(regrets), high
