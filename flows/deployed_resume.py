"""The flow `resume` for deployments: its form shows few parameters first, and the others in one group."""

from __future__ import annotations

from prefect_tune.flows.resume import resume as flat
from prefect_tune.parameters.grouped_flow import GroupedFlow

__all__ = ["resume"]

resume = GroupedFlow(
    flat,
    first=("experiment", "target", "trainable", "num_samples", "stop", "rerun_errored"),
    module=__name__,
)
