"""Real system calls of a real process, killed or failed one by one by strace."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from prefect_tune.core.errors import AlreadyExists, ObjectNotFound
from prefect_tune.stores.posix_store import PosixStore
from tests.long_cases import long_after

pytestmark = pytest.mark.skipif(
    shutil.which("strace") is None, reason="strace is not installed (apt-get install strace)"
)

NEW = b"0123456789" * 1000
CALLS = ("mkdirat", "openat", "write", "fsync", "linkat", "unlinkat")
REPLACED = (*CALLS[1:], "renameat")
EXIT_NOT_DONE, EXIT_REFUSED, EXIT_UNKNOWN = 3, 4, 5
CHILD = f"""
import os, sys
from pathlib import Path
from prefect_tune.core.errors import CommitUnknown, StoreRefused, StoreUnavailable
from prefect_tune.stores import posix_store as posix
posix._WRITE_BYTES = 4096
store = posix.PosixStore(Path(sys.argv[1]))
act = {{
    "create": lambda: store.create("a/b/object", b"0123456789" * 1000),
    "put": lambda: store.put("a/b/object", b"0123456789" * 1000),
    "replace": lambda: store.replace("old/object", [b"0123456789" * 400, b"0123456789" * 600]),
    "delete": lambda: store.delete(["old/object", "old/other"]),
}}[sys.argv[2]]
os.access("/begin", os.F_OK)
try:
    act()
except StoreUnavailable:
    os._exit({EXIT_NOT_DONE})
except StoreRefused:
    os._exit({EXIT_REFUSED})
except CommitUnknown:
    os._exit({EXIT_UNKNOWN})
os._exit(0)
"""


def _run_strace(root: Path, operation: str, *options: str) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONDONTWRITEBYTECODE": "1"}
    command = ["strace", "-f", "-qq", *options, sys.executable, "-c", CHILD, str(root), operation]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


def _inject(root: Path, operation: str, call: str, fault: str) -> subprocess.CompletedProcess[str]:
    """Run the operation with this fault at the system call."""
    return _run_strace(root, operation, "-o", os.devnull, "-e", f"trace={call}", "-e", f"inject={call}:{fault}")


def _make_root(root: Path) -> Path:
    root.mkdir()
    store = PosixStore(root)
    store.put("old/object", b"old")
    store.put("old/other", b"old")
    return root


def _list_calls(tmp_path: Path, operation: str) -> list[tuple[str, int]]:
    """Return the name of each system call of the operation, and its ordinal in the process."""
    log = tmp_path / f"trace of {operation}"
    traced = f"trace=access,{','.join({*CALLS, *REPLACED})}"
    process = _run_strace(_make_root(tmp_path / f"count {operation}"), operation, "-e", traced, "-o", str(log))
    assert process.returncode == 0, process.stderr
    seen: Counter[str] = Counter()
    calls: list[tuple[str, int]] = []
    has_begun = False
    for name, arguments in re.findall(r"^(?:\d+ +)?(\w+)\((.*)", log.read_text(), re.MULTILINE):
        has_begun = has_begun or '"/begin"' in arguments
        seen[name] += 1
        if has_begun and name != "access":
            calls.append((name, seen[name]))
    return calls


def _read(root: Path, path: str) -> bytes | None:
    try:
        return PosixStore(root).read(path)
    except ObjectNotFound:
        return None


def _check_survivors(root: Path, operation: str, label: str, *, acknowledged: bool) -> None:
    """Require that every object is whole, that acknowledged writes persist, and that a retry succeeds."""
    store = PosixStore(root)
    listed = {entry.path for entry in store.list("")}
    assert listed <= {"old/object", "old/other", "a/b/object"}, label
    old = [_read(root, "old/object"), _read(root, "old/other")]
    if operation == "delete":
        assert set(old) <= ({None} if acknowledged else {None, b"old"}), label
        store.delete(["old/object", "old/other"])
        assert store.list("") == [], label
        return
    if operation == "replace":
        assert old[0] in ((NEW,) if acknowledged else (NEW, b"old")), label
        store.replace("old/object", [NEW])
        assert [_read(root, "old/object"), _read(root, "old/other")] == [NEW, b"old"], label
        return
    assert old == [b"old", b"old"], label
    assert _read(root, "a/b/object") in ((NEW,) if acknowledged else (NEW, None)), label
    try:
        (store.create if operation == "create" else store.put)("a/b/object", NEW)
    except AlreadyExists:
        assert operation == "create", label
    assert _read(root, "a/b/object") == NEW, label


@pytest.mark.parametrize(
    "operation", [*long_after(1, ["create", "replace", "delete"]), pytest.param("put", marks=pytest.mark.deep)]
)
def test_a_process_killed_at_any_system_call_leaves_whole_objects(tmp_path: Path, operation: str) -> None:
    points = _list_calls(tmp_path, operation)
    for number, (call, nth) in enumerate(points):
        root = _make_root(tmp_path / f"killed {number}")
        process = _inject(root, operation, call, f"signal=KILL:when={nth}")
        assert process.returncode != 0, f"{call} {nth} was not reached"
        _check_survivors(root, operation, f"killed at {call} {nth}", acknowledged=False)
    print(f"{operation}: killed at {len(points)} system calls")
    needed = {"delete": {"unlinkat", "fsync"}, "replace": set(REPLACED)}
    assert {call for call, _ in points} >= needed.get(operation, set(CALLS))


@pytest.mark.long
@pytest.mark.parametrize(
    ("operation", "error"),
    [
        ("create", "ENOSPC"),
        ("delete", "EIO"),
        ("replace", "ENOSPC"),
        pytest.param("create", "EIO", marks=pytest.mark.deep),
        pytest.param("put", "ENOSPC", marks=pytest.mark.deep),
        pytest.param("put", "EIO", marks=pytest.mark.deep),
        pytest.param("delete", "ENOSPC", marks=pytest.mark.deep),
    ],
)
def test_a_system_call_that_fails_is_told_and_leaves_whole_objects(tmp_path: Path, operation: str, error: str) -> None:
    points = _list_calls(tmp_path, operation)
    for index, (call, nth) in enumerate(points):
        root = _make_root(tmp_path / f"failed {index}")
        process = _inject(root, operation, call, f"error={error}:when={nth}")
        label = f"{error} at {call} {nth}: exit {process.returncode} {process.stderr}"
        # Only the removal of the hidden name may fail without an error: the object exists by then.
        allowed = [EXIT_NOT_DONE, *[EXIT_UNKNOWN] * (operation == "create"), *[0] * (call == "unlinkat")]
        assert process.returncode in allowed, label
        _check_survivors(root, operation, label, acknowledged=process.returncode == 0)
    print(f"{operation}: {error} at {len(points)} system calls")


@pytest.mark.parametrize(
    ("operation", "call"),
    [
        ("create", "linkat"),
        pytest.param("put", "linkat", marks=pytest.mark.deep),
        pytest.param("create", "openat", marks=pytest.mark.deep),
        pytest.param("create", "write", marks=pytest.mark.deep),
    ],
)
@pytest.mark.parametrize("error", ["ENOSYS", pytest.param("EOPNOTSUPP", marks=pytest.mark.deep)])
def test_a_system_call_that_the_file_system_lacks_is_a_refusal(
    tmp_path: Path, operation: str, call: str, error: str
) -> None:
    for index, nth in enumerate(nth for name, nth in _list_calls(tmp_path, operation) if name == call):
        root = _make_root(tmp_path / f"lacking {index}")
        process = _inject(root, operation, call, f"error={error}:when={nth}+")
        assert process.returncode == EXIT_REFUSED, (
            f"{error} at {call} {nth}: exit {process.returncode} {process.stderr}"
        )
        _check_survivors(root, operation, f"{error} at {call} {nth}", acknowledged=False)
