"""The processes of one attempt, by rank: a single process is a group of one."""

from __future__ import annotations

import random
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from datetime import timedelta
from multiprocessing.connection import wait

from prefect_tune.attempt.processes.process_channel import TrialChannel
from prefect_tune.core.messages.process_messages import FromTrial, Rank, Start, ToTrial
from prefect_tune.runtime.message_stream import MalformedMessage

_NOW = timedelta(0)
# Below the ports that the kernel gives to clients: none of them takes it between this choice and rank 0's use.
_PORTS = range(20_000, 32_000)


class RankEnded(Exception):
    """The process of a rank is gone, or wrote invalid bytes."""

    def __init__(self, rank: int, error: EOFError | MalformedMessage) -> None:
        super().__init__(str(error))
        self.rank = rank
        self.is_gone = isinstance(error, EOFError)


class RankGroup:
    """The channels to the processes of an attempt. Call `receive` from one thread, `tell` from any."""

    def __init__(self, channels: Sequence[TrialChannel]) -> None:
        self._channels = channels
        self._open = dict(enumerate(channels))

    @property
    def world_size(self) -> int:
        """The number of processes."""
        return len(self._channels)

    @property
    def open_ranks(self) -> frozenset[int]:
        """The ranks from which messages may still come."""
        return frozenset(self._open)

    def tell(self, message: ToTrial) -> None:
        """Send a message to rank 0; if it is gone the message is dropped."""
        self._channels[0].tell(message)

    def tell_others(self, message: ToTrial) -> None:
        """Send a message to all ranks but the first."""
        for each in self._channels[1:]:
            each.tell(message)

    def receive(self, patience: timedelta) -> tuple[int, FromTrial] | None:
        """Return the next message with its rank; None if none arrives within `patience`.

        Raises:
            RankEnded: a rank is gone, and all its messages have been received; or it wrote invalid bytes.
        """
        if len(self._open) == 1:
            [(rank, channel)] = self._open.items()
            message = self._received(rank, channel, patience)
            return None if message is None else (rank, message)
        ready = wait([each.connection for each in self._open.values()], patience.total_seconds())
        for rank, channel in [*self._open.items()]:
            if ready and channel.connection not in ready:
                continue
            if (message := self._received(rank, channel, _NOW)) is not None:
                return rank, message
        return None

    def _received(self, rank: int, channel: TrialChannel, patience: timedelta) -> FromTrial | None:
        try:
            return channel.receive(patience)
        except (EOFError, MalformedMessage) as error:
            self.leave(rank)
            raise RankEnded(rank, error) from None

    def leave(self, rank: int) -> None:
        """Receive nothing more from a rank: it has sent its end."""
        self._open.pop(rank, None)

    def end(self, rank: int = 0) -> str:
        """End the process of a rank, and its descendants; return a description of how it ended."""
        return self._channels[rank].end()

    def end_all(self) -> None:
        """End the processes of all ranks."""
        for each in self._channels:
            each.end()


@contextmanager
def rank_group(
    start: Start, world_size: int, open_channel: Callable[[Start], AbstractContextManager[TrialChannel]]
) -> Iterator[RankGroup]:
    """Open the processes of an attempt, each with its rank, and end them when the block is left."""
    if world_size == 1:
        with open_channel(start) as channel:
            yield RankGroup([channel])
        return
    port = _free_port()
    ranks = [Rank(rank=each, world_size=world_size, local_rank=each) for each in range(world_size)]
    with ExitStack() as channels:
        yield RankGroup(
            [
                channels.enter_context(
                    open_channel(
                        start.model_copy(
                            update={
                                "rank": each.model_copy(update={"variables": _variables(each, port)}),
                                "waits": False,
                            }
                        )
                    )
                )
                for each in ranks
            ]
        )


def _variables(rank: Rank, port: int) -> Mapping[str, str]:
    """Return what `torch.distributed` and frameworks read, under torchrun's names."""
    return {
        "RANK": str(rank.rank),
        "LOCAL_RANK": str(rank.local_rank),
        "WORLD_SIZE": str(rank.world_size),
        "LOCAL_WORLD_SIZE": str(rank.world_size),
        "GROUP_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def _free_port() -> int:
    for port in random.SystemRandom().sample(_PORTS, 100):
        with socket.socket() as tried:
            try:
                tried.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise OSError("no free port on 127.0.0.1 for the ranks of a trial, in 100 tries")
