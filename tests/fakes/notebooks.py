"""The shipped notebook, run by a kernel and exported as a page."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import nbformat
from nbconvert import HTMLExporter
from nbconvert.preprocessors import ExecutePreprocessor
from nbformat import NotebookNode

SHIPPED = Path(__file__).parents[2] / "examples" / "search.ipynb"
_TIMEOUT_SECONDS = 300


def executed(cells: NotebookNode, folder: Path, environment: Mapping[str, str]) -> NotebookNode:
    """Run all cells of a notebook in `folder`, and return it with its outputs. Raises if a cell fails."""
    with _environment(environment):
        ExecutePreprocessor(timeout=_TIMEOUT_SECONDS).preprocess(cells, {"metadata": {"path": str(folder)}})
    return cells


def shipped() -> NotebookNode:
    return nbformat.read(SHIPPED, as_version=4)


def exported(notebook: NotebookNode, theme: str) -> str:
    """Return the page as JupyterLab shows it, in the theme `light` or `dark`."""
    page, _ = HTMLExporter(template_name="lab", theme=theme).from_notebook_node(notebook)
    return str(page)


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """A kernel inherits the environment of the process that starts it."""
    with patch.dict(os.environ, variables):
        yield
