"""The flows for deployments; each form shows the main parameters first, and all others in one group."""

from __future__ import annotations

from prefect_tune.flows.durable_trainable import durable_trainable as flat_training
from prefect_tune.flows.resume import resume as flat_resume
from prefect_tune.flows.tune import tune as flat_tune
from prefect_tune.parameters.forms import GroupedFlow

__all__ = ["durable_trainable", "resume", "tune"]

tune = GroupedFlow(
    flat_tune,
    first=(
        *("trainable", "target", "space", "experiment", "metric", "mode", "num_samples", "stop", "scheduler"),
        "max_concurrent_trials",
    ),
    module=__name__,
)

durable_trainable = GroupedFlow(
    flat_training, first=("trainable", "target", "config", "experiment", "stop"), module=__name__
)

resume = GroupedFlow(
    flat_resume, first=("experiment", "target", "trainable", "num_samples", "stop", "rerun_errored"), module=__name__
)
