"""The demo: a drill on a shipped model, with one kill in the middle of the second-to-last upload."""

from __future__ import annotations

from importlib.util import find_spec

from prefect_tune.core.errors import InvalidInput
from prefect_tune.drills.plan import DrillPlan

_NETWORK_WIDTH = 120_000  # the checkpoint must be large enough for a kill in the middle of its upload


def make_demo_plan(steps: int) -> DrillPlan:
    """Return the plan of the demo.

    Raises:
        InvalidInput: scikit-learn is not installed.
    """
    if not find_spec("sklearn"):
        raise InvalidInput("the demo needs scikit-learn: pip install 'prefect-tune[demo]'")
    save_every = steps // 4
    kill_step = (steps - 1) // save_every * save_every  # the second-to-last checkpoint
    return DrillPlan(
        "prefect_tune.demo.model:Digits", {"width": _NETWORK_WIDTH}, steps, save_every, kills=((kill_step, "upload"),)
    )
