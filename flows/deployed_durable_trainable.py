"""The flow `durable-trainable` for deployments: its form shows few parameters first, and the others in one group."""

from __future__ import annotations

from prefect_tune.flows.durable_trainable import durable_trainable as flat
from prefect_tune.parameters.grouped_flow import GroupedFlow

__all__ = ["durable_trainable"]

durable_trainable = GroupedFlow(
    flat,
    first=("trainable", "target", "config", "experiment", "stop"),
    module=__name__,
)
