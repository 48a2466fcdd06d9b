"""Digest of a trainable's source code, by which a resume detects that it has changed."""

from __future__ import annotations

import ast
import importlib.util
import inspect
from pathlib import Path

from prefect_tune.core.models import digest_of

__all__ = ["code_of"]


def code_of(trainable: object) -> str:
    """Return a digest of the source of a class or function, or of `package.module:Name`, whose file is not imported.

    Empty if the source is not available. It covers this one definition: a change in code that it calls is not
    detected.
    """
    try:
        source = _source_named(trainable) if isinstance(trainable, str) else inspect.getsource(trainable)  # type: ignore[arg-type]  # TypeError is caught below
    except (TypeError, OSError, SyntaxError, ValueError, ImportError):
        return ""
    return digest_of(source.encode())[:16] if source else ""


def _source_named(name: str) -> str:
    module, _, attribute = name.partition(":")
    spec = importlib.util.find_spec(module)
    if spec is None or not spec.origin:
        return ""
    text = Path(spec.origin).read_text(encoding="utf-8")
    for node in ast.parse(text).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == attribute:
            first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
            return "".join(text.splitlines(keepends=True)[first - 1 : node.end_lineno])
    return ""
