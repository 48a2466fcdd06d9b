"""Another process that uses a checkpoint: `python -m tests.fakes.checkpoint_user <act>`.

It reads the pickled checkpoint from standard input and prints its result; then it waits for a line before it continues.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
from pathlib import Path
from typing import Self

from prefect_tune.runtime.checkpoint import Checkpoint


class CheckpointUser:
    """The process, as its parent controls it."""

    def __init__(self, checkpoint: Checkpoint, act: str, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.fakes.checkpoint_user", act, *arguments],
            cwd=Path(__file__).parents[2],  # where `tests` is
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdin
        self.process.stdin.write(pickle.dumps(checkpoint).hex() + "\n")
        self.process.stdin.flush()

    def read_line(self) -> str:
        """Return the next line it prints."""
        assert self.process.stdout
        assert self.process.stderr
        if line := self.process.stdout.readline():
            return line.rstrip("\n")
        raise AssertionError(self.process.stderr.read())

    def finish(self) -> int:
        """Let it end, and return its exit code."""
        sys.stderr.write(self.process.communicate("\n", timeout=60)[1])
        return self.process.returncode

    def kill(self) -> None:
        """Kill it, as the kernel does when memory runs out."""
        self.process.kill()
        self.process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.process.kill()
        self.process.communicate()


def _main() -> None:
    checkpoint: Checkpoint = pickle.loads(bytes.fromhex(sys.stdin.readline()))
    match sys.argv[1:]:
        case ["borrow"]:
            with checkpoint.as_directory() as directory:
                print(directory, flush=True)
                sys.stdin.readline()
        case ["borrow and fork"]:
            with checkpoint.as_directory() as directory:
                if not os.fork():
                    print(os.getpid(), flush=True)  # by then it has closed what it inherited
                    signal.pause()
                sys.stdin.readline()
        case ["have", *path]:
            print(checkpoint.to_directory(*path), flush=True)
            sys.stdin.readline()
        case ["say", name, count]:
            for number in range(int(count)):
                checkpoint.update_metadata({f"{name}{number}": number})
        case unknown:
            raise SystemExit(f"unknown act {unknown}")


if __name__ == "__main__":
    _main()
