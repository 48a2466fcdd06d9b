"""Digest of a trainable's source code, by which a resume detects that it has changed."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import linecache
from pathlib import Path

from prefect_tune.core.models import digest_of


def code_of(trainable: object) -> str:
    """Return a digest of the source of a class or function, or of `package.module:Name`, whose file is not imported.

    Empty if the source is not available. It covers this one definition: a change in code that it calls is not
    detected.
    """
    try:
        source = _source_named(trainable) if isinstance(trainable, str) else _source_of(trainable)
    except (TypeError, OSError, SyntaxError, ValueError, ImportError, SystemError):  # the last: see `trial_process`
        return ""
    return digest_of(source.encode())[:16] if source else ""


def _source_of(trainable: object) -> str:
    try:
        return inspect.getsource(trainable)  # type: ignore[arg-type]  # its TypeError is for the caller
    except (TypeError, OSError):
        if isinstance(trainable, type):
            return _source_in_cell(trainable)
        raise


def _source_in_cell(trainable: type) -> str:
    """Return the source of a class that a notebook's cell defines: `__main__` has no file, but the methods have one."""
    methods = (each for each in vars(trainable).values() if inspect.isfunction(each))
    files = dict.fromkeys(each.__code__.co_filename for each in methods)
    texts = ("".join(linecache.getlines(file)) for file in files)
    return next((found for text in texts if (found := _definition_in(text, trainable.__name__))), "")


def _source_named(name: str) -> str:
    module, _, attribute = name.partition(":")
    spec = importlib.util.find_spec(module)
    if spec is None or not spec.origin:
        return ""
    return _definition_in(Path(spec.origin).read_text(encoding="utf-8"), attribute)


def _definition_in(text: str, name: str) -> str:
    for node in ast.parse(text).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name:
            first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
            return "".join(text.splitlines(keepends=True)[first - 1 : node.end_lineno])
    return ""
