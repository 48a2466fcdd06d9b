"""The S3 server of the tests in a process of its own, so that it is not the bottleneck of a measured client."""

from __future__ import annotations

import json
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.fakes.servers.s3_sink import S3Sink

_REPOSITORY = Path(__file__).parents[2]


class S3SinkProcess:
    """The same server in a process of its own, so that it shares no interpreter with a measured client."""

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.measuring.s3_process"],
            cwd=_REPOSITORY,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )
        self.endpoint = str(self._read_reply())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process.stdin:
            self._process.stdin.close()
        self._process.wait(timeout=10)
        if self._process.stdout:
            self._process.stdout.close()

    def take_counts(self) -> dict[str, int]:
        """Return the counts since the last call: requests, bytes_in, bytes_out and one per method."""
        return dict(self._request("counts"))

    def set_latency(self, latency: timedelta) -> None:
        """Add `latency` to every reply from now on."""
        self._request(f"latency {latency.total_seconds()}")

    def drop(self, prefix: str = "") -> None:
        """Remove the objects whose `bucket/key` starts with `prefix`."""
        self._request(f"drop {prefix}")

    def _request(self, command: str) -> dict[str, int]:
        if self._process.stdin is None:
            raise RuntimeError("the sink was started without a pipe")
        self._process.stdin.write(command + "\n")
        answer = self._read_reply()
        if not isinstance(answer, dict):
            raise TypeError(answer)
        return answer

    def _read_reply(self) -> object:
        if self._process.stdout is None:
            raise RuntimeError("the sink was started without a pipe")
        return json.loads(self._process.stdout.readline())


def _run_command(sink: S3Sink, command: str) -> dict[str, int]:
    verb, _, argument = command.strip().partition(" ")
    match verb:
        case "latency":
            sink.latency = timedelta(seconds=float(argument))
        case "drop":
            sink.drop(argument)
        case "counts":
            counts = {"requests": len(sink.log), "bytes_in": sink.bytes_in, "bytes_out": sink.bytes_out}
            counts |= dict(sink.requests)
            sink.reset()
            return counts
        case _:
            raise ValueError(f"unknown command {command!r}")
    return {}


def _main() -> None:
    sys.setswitchinterval(0.0005)
    with S3Sink() as sink:
        sys.stdout.write(json.dumps(sink.endpoint) + "\n")
        sys.stdout.flush()
        for command in sys.stdin:
            sys.stdout.write(json.dumps(_run_command(sink, command)) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    _main()
