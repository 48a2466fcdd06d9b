"""An owner whose checkpoints several nodes write together: each sends its own files, then its part."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from prefect_tune.core.checkpoints import commit as committing
from prefect_tune.core.checkpoints.commit import ExpectedParts, Reverification, merge_parts, send_part
from prefect_tune.core.checkpoints.manifest import CheckpointMetadata
from prefect_tune.core.errors import PartMissing, StoreUnavailable, Superseded
from prefect_tune.core.experiment.trial_transitions import min_reusable_sequence
from prefect_tune.core.storage.layout import CheckpointKey, NodesKey
from prefect_tune.core.storage.object_store import ObjectStore
from tests.core.driver import KEY, Files, Session, Witness, run_to
from tests.fakes.stores.memory_files import MemoryFiles
from tests.fakes.stores.memory_store import MemoryStore


def too_late() -> Callable[[], bool]:
    """Wait for no part."""
    return lambda: False


@dataclass
class GroupSession(Session):
    """Node 0. Its fields are lost with its process; only the store remains."""

    node_count: int = 2
    nodes_run: bool = True
    """Whether the other nodes send their parts when it saves; otherwise they are processes of their own."""

    @property
    def nodes(self) -> NodesKey:
        return NodesKey(trial=KEY, attempt=self.trial.attempt)

    def files(self, step: int) -> Files:
        shards = {f"shard-{node}": bytes([node]) * step + self.head for node in range(self.node_count)}
        return {**super().files(step), **shards}

    def files_of(self, node: int) -> Files:
        """The files of one node: its shard, and what all nodes have."""
        of_all = self.files(self.pending[-1].step)
        shared = {"backbone": of_all["backbone"], f"shard-{node}": of_all[f"shard-{node}"]}
        others = {f"shard-{each}" for each in range(self.node_count)}
        return shared if node else {name: of for name, of in of_all.items() if name == "shard-0" or name not in others}

    def send(self, store: ObjectStore, node: int, key: CheckpointKey) -> None:
        """Send the part of another node."""
        reuse = committing.find_reusable_bytes(store, KEY, self.parent, min_reusable_sequence(self.trial))
        source, of = MemoryFiles(self.files_of(node)), (self.nodes, node, self.experiment.term)
        send_part(store, key, source, sender=of, reuse=reuse)

    def _commit(self, key: CheckpointKey, files: Files, about: CheckpointMetadata) -> committing.SaveResult:
        del files
        others = range(1, self.node_count)
        for node in others if self.nodes_run else ():
            self.send(self.store, node, key)
        wanted = ExpectedParts(self.nodes, self.experiment.term, tuple(others), too_late, dict)
        done = committing.commit_checkpoint(
            self.store,
            key,
            MemoryFiles(self.files_of(0), empty_directories=["none"]),
            about,
            reuse=committing.find_reusable_bytes(self.store, KEY, self.parent, min_reusable_sequence(self.trial)),
            reverification=Reverification(self.commit_count, self.reverify_every),
            finalize_manifest=partial(merge_parts, self.store, wanted),
        )
        with suppress(StoreUnavailable):
            self.store.delete([self.nodes.part_path(key, node) for node in others])
        return done


def grouped_run(nodes: int) -> Callable[[ObjectStore, Witness], None]:
    """A story: train and save on this many nodes, from whatever is there."""

    def run(store: ObjectStore, witness: Witness) -> None:
        run_to(GroupSession(store, witness, owner=f"of {nodes}", node_count=nodes), 3)

    return run


def old_group(nodes: int) -> GroupSession:
    """An owner with a checkpoint, and a step that its nodes have not saved yet, each a process of its own."""
    session = GroupSession(MemoryStore(), Witness(), owner="old", node_count=nodes)
    session.open()
    session.start()
    session.train()
    session.to_delete = session.acknowledge(session.publish())
    session.train()
    session.nodes_run = False
    return session


def commits(session: Session) -> None:
    """Node 0 commits if all parts are there, and continues without the checkpoint if one is missing."""
    with suppress(PartMissing, Superseded):
        session.save()


def adds(node: int) -> Callable[[Session], None]:
    """Another node sends its part of the same step."""

    def act(session: Session) -> None:
        assert isinstance(session, GroupSession)
        key = CheckpointKey(trial=KEY, step=session.pending[-1].step, sequence=session.experiment.entry_count)
        with suppress(Superseded):
            session.send(session.store, node, key)

    return act
