"""The flow `resume` for deployments: its form shows few parameters first, and the others in one group.

Deployments of earlier releases name `prefect_tune.flows.resume.resume`, and still run.
"""

from __future__ import annotations

from prefect_tune.flows.resume import resume as flat
from prefect_tune.parameters.grouped_flow import GroupedFlow

__all__ = ["resume"]

resume = GroupedFlow(
    flat,
    first=("experiment", "target", "trainable", "num_samples", "stop", "rerun_errored"),
    module=__name__,
)
