"""The demo: a drill on a shipped model, whose one kill is in the middle of the last upload but one."""

from __future__ import annotations

from importlib.util import find_spec

from prefect_tune.core.errors import InvalidInput
from prefect_tune.drills.plan import DrillPlan

_WIDTH = 120_000  # of the network: its checkpoint has to be large enough to be hit in its middle


def demo_plan(steps: int) -> DrillPlan:
    """Return the plan of the demo.

    Raises:
        InvalidInput: scikit-learn is not installed.
    """
    if not find_spec("sklearn"):
        raise InvalidInput("the demo trains on scikit-learn's digits: pip install 'prefect-tune[demo]'")
    save_every = steps // 4
    hit_step = (steps - 1) // save_every * save_every  # the last checkpoint but one
    return DrillPlan(
        "prefect_tune.demo.model:Digits", {"width": _WIDTH}, steps, save_every, kills=((hit_step, "upload"),)
    )
