"""A real Jupyter kernel and the output of its cells; the example notebook."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty
from typing import Any
from unittest.mock import patch

import nbformat
from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_client.manager import KernelManager
from nbconvert.preprocessors import ExecutePreprocessor
from nbformat import NotebookNode

_TIMEOUT_SECONDS = 600.0


@dataclass
class CellOutput:
    """The output of one cell: displays are updated in place, as a frontend does."""

    displays: dict[str, str] = field(default_factory=dict)
    """The HTML of each display, by its id."""
    updates: list[str] = field(default_factory=list)
    """Every HTML that a display had, in order."""
    streams: str = ""
    """Its output on stdout and stderr."""
    result: Mapping[str, str] = field(default_factory=dict)
    """The value of its last expression, by media type."""
    error: str = ""
    """The name and the text of its exception."""
    traceback: str = ""

    def apply_message(self, kind: str, content: Mapping[str, Any]) -> None:
        match kind:
            case "display_data" | "update_display_data":
                name = content["transient"].get("display_id", f"without id {len(self.displays)}")
                assert (kind == "display_data") == (name not in self.displays)
                self.displays[name] = content["data"].get("text/html", "")
                self.updates.append(self.displays[name])
            case "stream":
                self.streams += content["text"]
            case "execute_result":
                self.result = content["data"]
            case "error":
                self.error, self.traceback = f"{content['ename']}: {content['evalue']}", "\n".join(content["traceback"])

    @property
    def html(self) -> str:
        """The HTML of the only display."""
        (html,) = self.displays.values()
        return html


class Kernel:
    """A running kernel, which runs one cell at a time."""

    def __init__(self, manager: KernelManager, client: BlockingKernelClient) -> None:
        self._manager = manager
        self._client = client

    def run(self, code: str) -> CellOutput:
        """Run a cell that must not fail."""
        output = self.wait_for_cell(self.start_cell(code))
        assert not output.error, output.traceback
        return output

    def start_cell(self, code: str) -> str:
        """Start a cell, and return its id."""
        return str(self._client.execute(code))

    def wait_for_cell(self, cell: str, on_message: Callable[[CellOutput], None] = lambda _: None) -> CellOutput:
        """Wait for the end of a cell; call `on_message` after each message."""
        output, deadline = CellOutput(), time.monotonic() + _TIMEOUT_SECONDS
        while True:
            assert time.monotonic() < deadline, output
            try:
                message = self._client.get_iopub_msg(timeout=5)
            except Empty:
                continue
            kind, content = message["msg_type"], message["content"]
            if kind == "status" and content["execution_state"] == "idle" and message["parent_header"]["msg_id"] == cell:
                return output
            output.apply_message(kind, content)
            on_message(output)

    def interrupt(self) -> None:
        """Interrupt the kernel, as its stop button does."""
        self._manager.interrupt_kernel()


@contextmanager
def start_kernel(folder: Path, environment: Mapping[str, str]) -> Iterator[Kernel]:
    """Start a kernel that works in `folder`."""
    manager = KernelManager(kernel_name="python3")
    manager.start_kernel(cwd=str(folder), env={**os.environ, **environment})
    client = manager.client()
    try:
        client.start_channels()
        client.wait_for_ready(timeout=_TIMEOUT_SECONDS)
        yield Kernel(manager, client)
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


def run_notebook(notebook: NotebookNode, folder: Path, environment: Mapping[str, str]) -> NotebookNode:
    """Run all cells of a notebook in `folder`, and return it with its outputs; raise if a cell fails."""
    with patch.dict(os.environ, environment):  # which a kernel inherits
        ExecutePreprocessor(timeout=300).preprocess(notebook, {"metadata": {"path": str(folder)}})
    return notebook


def read_notebook() -> NotebookNode:
    return nbformat.read(Path(__file__).parents[2] / "examples" / "search.ipynb", as_version=4)
