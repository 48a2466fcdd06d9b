"""The environment variables of a trial's process; all that sets or selects them is here, but for those of a slot."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

# Libraries read these variables once: when they are imported, or when they first compute.
READ_ONCE = (
    "ASCEND_RT_VISIBLE_DEVICES",
    "CUDA_VISIBLE_DEVICES",
    "GPU_DEVICE_ORDINAL",
    "HABANA_VISIBLE_DEVICES",
    "HABANA_VISIBLE_MODULES",
    "HIP_VISIBLE_DEVICES",
    "MKL_NUM_THREADS",
    "NEURON_RT_NUM_CORES",
    "NEURON_RT_VISIBLE_CORES",
    "OMP_NUM_THREADS",
    "ONEAPI_DEVICE_SELECTOR",
    "OPENBLAS_NUM_THREADS",
    "ROCR_VISIBLE_DEVICES",
    "TPU_VISIBLE_CHIPS",
    "TPU_VISIBLE_DEVICES",
    "ZE_AFFINITY_MASK",
)
# The interpreter and the C library read these at start, so a fork has the values of its fork server.
_READ_AT_START = ("GLIBC_", "LANG", "LC_", "LD_", "MALLOC_", "PYTHON")


def added_to_this(added: Mapping[str, str]) -> Mapping[str, str]:
    """Return the variables of this process, with `added` in addition to them or replacing them."""
    return {**os.environ, **added}


def fixed_by_this() -> Mapping[str, str]:
    """Return the variables of this process that libraries read once: processes with other values serve other trials."""
    return {name: os.environ[name] for name in READ_ONCE if name in os.environ}


def read_at_start(variables: Mapping[str, str]) -> Mapping[str, str]:
    """Return those that an interpreter reads at its start."""
    return {name: value for name, value in variables.items() if name.startswith(_READ_AT_START)}


def of_interpreter(variables: Mapping[str, str]) -> Mapping[str, str]:
    """Return the variables with which an interpreter starts: what it prints is read line by line."""
    return {**variables, "PYTHONUNBUFFERED": "1"}


def of_trial(variables: Mapping[str, str], temporary: str | Path) -> Mapping[str, str]:
    """Return all variables of a trial; its temporary files are removed with that directory, however it ends."""
    return {**of_interpreter(variables), "TMPDIR": str(temporary)}
