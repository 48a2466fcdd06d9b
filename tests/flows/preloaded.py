"""Imports of the process that drivers are forked from, so that a driver starts at once."""

from __future__ import annotations

import importlib

# No thread or event loop may exist before the fork: these imports start none.
for _name in (
    "prefect.client.orchestration",
    "prefect.flow_engine",
    "prefect.task_engine",
    "prefect.events.worker",
    "prefect.logging.handlers",
    "prefect_tune.flows.durable_trainable",
    "prefect_tune.flows.tune",
    "prefect_tune.stores.obstore_store",
    "prefect_tune.stores.posix_store",
    "tests.trainables.numpy_mlp",
):
    importlib.import_module(_name)
