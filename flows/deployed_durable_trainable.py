"""The flow `durable-trainable` for deployments: its form shows few parameters first, and the others in one group.

Deployments of earlier releases name `prefect_tune.flows.durable_trainable.durable_trainable`, and still run.
"""

from __future__ import annotations

from prefect_tune.flows.durable_trainable import durable_trainable as flat
from prefect_tune.parameters.grouped_flow import GroupedFlow

__all__ = ["durable_trainable"]

durable_trainable = GroupedFlow(
    flat,
    first=("trainable", "target", "config", "experiment", "stop"),
    module=__name__,
)
