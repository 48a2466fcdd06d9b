"""Nodes on machines that share the store only: each is a process worker with a network, processes and files of its own.

A machine is a set of Linux namespaces (network, processes, mounts, name), and ends as one that loses its power: with
all of its processes at once. PyTorch's gloo connects the ranks over the network between them.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from urllib.parse import urlsplit

import pytest

import prefect_tune as pt
from prefect_tune.blocks import S3Target
from prefect_tune.testing import without_server
from tests.fakes.servers.tcp_proxy import TcpProxy
from tests.flows.conftest import POOL, s3_at
from tests.flows.driver import until

pytestmark = [pytest.mark.integrations, pytest.mark.timeout(900)]
pytest.importorskip("torch")
if True:  # only with torch
    from tests.integrations.ranks.test_torch_ranks import CASES, STEPS, StruckDDP, trained


class Slow(StruckDDP):
    """The example with DDP, whose steps leave time to end a machine."""

    def step(self) -> dict[str, float]:
        time.sleep(0.5)
        return super().step()


_BRIDGE, _NETWORK = "ptune0", "10.203.0"
_ROUTER = f"{_NETWORK}.1"


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@pytest.fixture
def network() -> Iterator[str]:
    """A network between machines; yields the address of this one in it."""
    if os.geteuid():
        pytest.skip("namespaces take root")
    try:
        _ip("link", "add", "name", _BRIDGE, "type", "bridge")
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no network between namespaces: {error}")
    try:
        _ip("addr", "add", f"{_ROUTER}/24", "dev", _BRIDGE)
        _ip("link", "set", _BRIDGE, "up")
        yield _ROUTER
    finally:
        _ip("link", "del", _BRIDGE)


class Machine:
    """A worker on a machine of its own."""

    def __init__(self, number: int, api: str, folder: Path) -> None:
        self.name = f"node-{number}"
        self._network = f"ptune-{number}"
        self._address = f"{_NETWORK}.{number + 2}"
        self._folder = folder
        self._environment = {
            **os.environ,
            "PREFECT_API_URL": api,
            "TMPDIR": str(folder / "own"),
            "PREFECT_HOME": str(folder / "own" / "prefect"),
            "PREFECT_WORKER_QUERY_SECONDS": "1",
            "PYTHONPATH": str(Path.cwd()),
            "GLOO_SOCKET_IFNAME": "eth0",  # gloo asks for the machine's name, which no one resolves here
            "NO_PROXY": "*",
        }

    def start(self) -> None:
        _ip("netns", "add", self._network)
        outside = f"veth-{self.name}"
        _ip("link", "add", outside, "type", "veth", "peer", "name", "eth0", "netns", self._network)
        _ip("link", "set", outside, "master", _BRIDGE, "up")
        for words in (
            ("addr", "add", f"{self._address}/24", "dev", "eth0"),
            ("link", "set", "eth0", "up"),
            ("link", "set", "lo", "up"),
            ("route", "add", "default", "via", _ROUTER),
        ):
            _ip("-n", self._network, *words)
        worker = f"{sys.executable} -m prefect worker start --pool {POOL} --limit 1"
        own_files = f"mount -t tmpfs tmpfs {self._folder}/own && mount -t tmpfs tmpfs /dev/shm && cd {self._folder}/own"
        inside = f"hostname {self.name} && {own_files} && exec {worker}"
        own = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "--uts", "--ipc")
        with (self._folder / f"{self.name}.log").open("ab") as log:
            self._process = subprocess.Popen(
                ["ip", "netns", "exec", self._network, *own, "sh", "-c", inside],
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def lose_power(self) -> None:
        self._process.kill()  # the first process of its own, and with it all
        self._process.wait()
        _ip("link", "del", f"veth-{self.name}")  # the network lasts until its last process has ended
        _ip("netns", "del", self._network)

    def log(self) -> str:
        return (self._folder / f"{self.name}.log").read_text(errors="replace")


@contextmanager
def machines(api: str, folder: Path) -> Iterator[list[Machine]]:
    (folder / "own").mkdir()  # each machine has other files there
    started = [Machine(number, api, folder) for number in range(2)]
    with ExitStack() as at_end:
        for each in started:
            each.start()
            at_end.callback(each.lose_power)
        yield started


def _checkpoints(target: S3Target) -> list[str]:
    with target.open(timeout=timedelta(seconds=60)) as store:
        return [each.path for each in store.list("apart/") if each.path.endswith("/manifest.json")]


@pytest.mark.usefixtures("deployed")
@pytest.mark.parametrize("dies", [0, 1])
def test_two_machines_train_and_after_one_has_lost_its_power_they_go_on_bit_for_bit(
    dies: int, network: str, prefect_server: str, s3_port: int, tmp_path: Path
) -> None:
    with without_server():
        _, undisturbed = trained(tmp_path / "undisturbed", "ddp", 2)
    api = urlsplit(prefect_server)
    with TcpProxy(s3_port, network) as store, TcpProxy(int(api.port or 0), network) as server:
        target = s3_at(s3_port).model_copy(update={"endpoint_url": store.url})
        target.save("apart", overwrite=True)
        with machines(f"{server.url}/api", tmp_path) as nodes:

            def strike() -> None:
                until(lambda: _checkpoints(target), seconds=300, what=nodes[dies].log)
                nodes[dies].lose_power()
                nodes[dies].start()

            striking = threading.Thread(target=strike)
            striking.start()
            results = pt.tune(
                f"{Slow.__module__}:{Slow.__name__}",
                {"lr": 0.1, "width": 16},
                target="s3-target/apart",
                experiment="apart",
                num_samples=1,
                stop={"step": STEPS},
                checkpoint=pt.Cadence(every_steps=5),
                trials="deployment",
                nodes_per_trial=2,
            )
            striking.join()
        [trial] = results.trials.values()
        assert (trial.status, trial.step, trial.attempt) == ("completed", STEPS, 2), [each.log() for each in nodes]
        checkpoint = results.checkpoint(trial.trial)
        assert checkpoint is not None
        with checkpoint.as_directory() as directory:
            assert CASES["ddp"][1](Path(directory)) == undisturbed
