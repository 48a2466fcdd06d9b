"""Whether this process is the kernel of a notebook (Jupyter, VS Code, Colab)."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping


def can_show_output(environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether this process is a kernel, whose cells show HTML; `PREFECT_TUNE_PROGRESS=off` forbids it.

    A kernel has imported IPython and ipykernel; no other process does so for this.
    """
    if environment.get("PREFECT_TUNE_PROGRESS") == "off" or "ipykernel" not in sys.modules:
        return False
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    return getattr(shell, "kernel", None) is not None
