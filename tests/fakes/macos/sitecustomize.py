"""Hide from a Python process what only Linux has: run it with this folder in `PYTHONPATH`.

The type stubs of the standard library, which have a branch for each platform, name it. `/proc` and the control groups
are hidden once `PREFECT_TUNE_PORTABLE` is set: third-party packages read them when they are imported.
"""

from __future__ import annotations

import ast
import os
import sys
from collections.abc import Iterator, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

# `socket` imports `select`, and chooses by what it finds there.
MODULES = ("os", "select", "errno", "fcntl", "resource", "time", "mmap", "signal", "socket")


def linux_only_names(module: str) -> set[str]:
    """Return the names that a module of the standard library has on Linux, and not on macOS."""
    (folder,) = find_spec("mypy").submodule_search_locations  # type: ignore[union-attr,misc]  # it is installed, as one folder
    stub = Path(folder, "typeshed", "stdlib", module)
    path = stub / "__init__.pyi" if stub.is_dir() else stub.with_suffix(".pyi")
    body = ast.parse(path.read_text()).body
    return set(_iter_names(body, "linux")) - set(_iter_names(body, "darwin"))


def _iter_names(body: Sequence[ast.stmt], platform: str) -> Iterator[str]:
    system = SimpleNamespace(platform=platform, version_info=sys.version_info)
    for statement in body:
        match statement:
            case ast.If(test=test):
                holds = eval(compile(ast.Expression(test), "stub", "eval"), {"sys": system})
                yield from _iter_names(statement.body if holds else statement.orelse, platform)
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.AnnAssign(target=ast.Name(id=name)):
                yield name
            case ast.Assign(targets=[ast.Name(id=name)]):
                yield name
            case ast.ImportFrom(names=names):
                yield from (alias.asname or alias.name for alias in names)
            case _:
                pass


def _hide_kernel_files(event: str, arguments: Sequence[object]) -> None:
    path = str(arguments[0]) if event in ("open", "os.listdir", "os.scandir") else ""
    if path.startswith(("/proc/", "/sys/")) and "PREFECT_TUNE_PORTABLE" in os.environ:
        raise FileNotFoundError(path)


if __name__ == "sitecustomize":
    for _module in MODULES:
        _imported = import_module(_module)
        for _name in linux_only_names(_module) & vars(_imported).keys() - {"AF_PACKET"}:  # psutil for Linux reads it
            delattr(_imported, _name)
    sys.addaudithook(_hide_kernel_files)
