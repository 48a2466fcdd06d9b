"""How often to save: the interval at which failures and saves together cost the least time."""

from __future__ import annotations

from math import sqrt


def best_interval(save_seconds: float, seconds_between_failures: float) -> float:
    """Return the seconds of training between two saves that lose the least time to saves and failures.

    The first-order optimum is `sqrt(2 C M)`, for the cost `C` of a save and the mean time `M` between failures
    (J. W. Young, *A first order approximation to the optimum checkpoint interval*, CACM 17(9), 1974). This is the
    higher-order estimate for `C < 2 M`; beyond that it is `M`
    (J. T. Daly, *A higher order estimate of the optimum checkpoint interval for restart dumps*, FGCS 22, 2006, eq. 37).
    The time of a restart does not change the optimum.

    Args:
        save_seconds: how long a save blocks the training.
        seconds_between_failures: the mean time between failures, in the same seconds.
    """
    cost, mean = save_seconds, seconds_between_failures
    if cost >= 2 * mean:
        return mean
    ratio = cost / (2 * mean)
    return sqrt(2 * cost * mean) * (1 + sqrt(ratio) / 3 + ratio / 9) - cost


def lost_share(interval: float, save_seconds: float, restart_seconds: float, seconds_between_failures: float) -> float:
    """Return the share of time lost with an interval: to saves, and per failure to half an interval and the restart.

    The first-order model of Young (1974), for failures that are rare beside the interval.
    """
    per_failure = (interval + save_seconds) / 2 + restart_seconds
    return min(1.0, save_seconds / (interval + save_seconds) + per_failure / seconds_between_failures)
