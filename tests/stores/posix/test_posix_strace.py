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


def _traced(root: Path, act: str, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", CHILD, str(root), act]
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(
        ["strace", "-f", "-qq", *options, *command], capture_output=True, text=True, check=False, env=environment
    )


def _furnished(root: Path) -> Path:
    root.mkdir()
    store = PosixStore(root)
    store.put("old/object", b"old")
    store.put("old/other", b"old")
    return root


def _ordinals(tmp_path: Path, act: str) -> list[tuple[str, int]]:
    """Return each system call of the act as its name and its number in the life of the process."""
    log = tmp_path / f"trace of {act}"
    done = _traced(
        _furnished(tmp_path / f"count {act}"),
        act,
        "-e",
        f"trace=access,{','.join({*CALLS, *REPLACED})}",
        "-o",
        str(log),
    )
    assert done.returncode == 0, done.stderr
    seen: Counter[str] = Counter()
    found: list[tuple[str, int]] = []
    begun = False
    for name, arguments in re.findall(r"^(?:\d+ +)?(\w+)\((.*)", log.read_text(), re.MULTILINE):
        begun = begun or '"/begin"' in arguments
        seen[name] += 1
        if begun and name != "access":
            found.append((name, seen[name]))
    return found


def _read(root: Path, path: str) -> bytes | None:
    try:
        return PosixStore(root).read(path)
    except ObjectNotFound:
        return None


def _check_survivors(root: Path, act: str, label: str, *, acknowledged: bool) -> None:
    """Require that every object is whole, that acknowledged writes persist, and that a retry succeeds."""
    store = PosixStore(root)
    listed = {found.path for found in store.list("")}
    assert listed <= {"old/object", "old/other", "a/b/object"}, label
    old = [_read(root, "old/object"), _read(root, "old/other")]
    if act == "delete":
        assert set(old) <= ({None} if acknowledged else {None, b"old"}), label
        store.delete(["old/object", "old/other"])
        assert store.list("") == [], label
        return
    if act == "replace":
        assert old[0] in ((NEW,) if acknowledged else (NEW, b"old")), label
        store.replace("old/object", [NEW])
        assert [_read(root, "old/object"), _read(root, "old/other")] == [NEW, b"old"], label
        return
    assert old == [b"old", b"old"], label
    assert _read(root, "a/b/object") in ((NEW,) if acknowledged else (NEW, None)), label
    try:
        (store.create if act == "create" else store.put)("a/b/object", NEW)
    except AlreadyExists:
        assert act == "create", label
    assert _read(root, "a/b/object") == NEW, label


@pytest.mark.parametrize(
    "act", [*long_after(1, ["create", "replace", "delete"]), pytest.param("put", marks=pytest.mark.deep)]
)
def test_a_process_killed_at_any_system_call_leaves_whole_objects(tmp_path: Path, act: str) -> None:
    points = _ordinals(tmp_path, act)
    for number, (call, nth) in enumerate(points):
        root = _furnished(tmp_path / f"killed {number}")
        done = _traced(
            root, act, "-o", "/dev/null", "-e", f"trace={call}", "-e", f"inject={call}:signal=KILL:when={nth}"
        )
        assert done.returncode != 0, f"{call} {nth} was not reached"
        _check_survivors(root, act, f"killed at {call} {nth}", acknowledged=False)
    print(f"{act}: killed at {len(points)} system calls")
    needed = {"delete": {"unlinkat", "fsync"}, "replace": set(REPLACED)}
    assert {call for call, _ in points} >= needed.get(act, set(CALLS))


@pytest.mark.long
@pytest.mark.parametrize(
    ("act", "number"),
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
def test_a_system_call_that_fails_is_told_and_leaves_whole_objects(tmp_path: Path, act: str, number: str) -> None:
    points = _ordinals(tmp_path, act)
    for place, (call, nth) in enumerate(points):
        root = _furnished(tmp_path / f"failed {place}")
        done = _traced(
            root, act, "-o", "/dev/null", "-e", f"trace={call}", "-e", f"inject={call}:error={number}:when={nth}"
        )
        label = f"{number} at {call} {nth}: exit {done.returncode} {done.stderr}"
        # Only the removal of the hidden name may fail without an error: the object exists by then.
        allowed = (
            {EXIT_NOT_DONE} | ({EXIT_UNKNOWN} if act == "create" else set()) | ({0} if call == "unlinkat" else set())
        )
        assert done.returncode in allowed, label
        _check_survivors(root, act, label, acknowledged=done.returncode == 0)
    print(f"{act}: {number} at {len(points)} system calls")


@pytest.mark.parametrize(
    ("act", "call"),
    [
        ("create", "linkat"),
        pytest.param("put", "linkat", marks=pytest.mark.deep),
        pytest.param("create", "openat", marks=pytest.mark.deep),
        pytest.param("create", "write", marks=pytest.mark.deep),
    ],
)
@pytest.mark.parametrize("number", ["ENOSYS", pytest.param("EOPNOTSUPP", marks=pytest.mark.deep)])
def test_a_system_call_that_the_file_system_lacks_is_a_refusal(
    tmp_path: Path, act: str, call: str, number: str
) -> None:
    for place, nth in enumerate(nth for name, nth in _ordinals(tmp_path, act) if name == call):
        root = _furnished(tmp_path / f"lacking {place}")
        done = _traced(
            root, act, "-o", "/dev/null", "-e", f"trace={call}", "-e", f"inject={call}:error={number}:when={nth}+"
        )
        assert done.returncode == EXIT_REFUSED, f"{number} at {call} {nth}: exit {done.returncode} {done.stderr}"
        _check_survivors(root, act, f"{number} at {call} {nth}", acknowledged=False)
