"""The flow `tune` for deployments: its form shows few parameters first, and the others in one group."""

from __future__ import annotations

from prefect_tune.flows.tune import tune as flat
from prefect_tune.parameters.grouped_flow import GroupedFlow

__all__ = ["tune"]

tune = GroupedFlow(
    flat,
    first=(
        *("trainable", "target", "space", "experiment", "metric", "mode", "num_samples", "stop", "scheduler"),
        "max_concurrent_trials",
    ),
    module=__name__,
)
