"""An owner whose nodes write checkpoints together: each sends its files, then its part."""

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


def make_expired_deadline() -> Callable[[], bool]:
    return lambda: False


@dataclass
class GroupSession(Session):
    """Node 0. A crash loses its fields; only the store remains."""

    node_count: int = 2
    nodes_run: bool = True
    """Whether the other nodes send their parts when it saves; otherwise they act on their own."""

    @property
    def nodes(self) -> NodesKey:
        return NodesKey(trial=KEY, attempt=self.trial.attempt)

    def files(self, step: int) -> Files:
        shards = {f"shard-{node}": bytes([node]) * step + self.head for node in range(self.node_count)}
        return {**super().files(step), **shards}

    def node_files(self, node: int) -> Files:
        """Return the files of one node: its shard, and the shared ones."""
        files, shard = self.files(self.pending[-1].step), f"shard-{node}"
        if node:
            return {"backbone": files["backbone"], shard: files[shard]}
        return {name: data for name, data in files.items() if name == shard or not name.startswith("shard-")}

    def send(self, store: ObjectStore, node: int, key: CheckpointKey) -> None:
        """Send the part of another node."""
        reuse = committing.find_reusable_bytes(store, KEY, self.parent, min_reusable_sequence(self.trial))
        source, sender = MemoryFiles(self.node_files(node)), (self.nodes, node, self.experiment.term)
        send_part(store, key, source, sender=sender, reuse=reuse)

    def _commit(self, key: CheckpointKey, files: Files, metadata: CheckpointMetadata) -> committing.SaveResult:
        del files
        others = range(1, self.node_count)
        for node in others if self.nodes_run else ():
            self.send(self.store, node, key)
        expected = ExpectedParts(self.nodes, self.experiment.term, tuple(others), make_expired_deadline, dict)
        result = committing.commit_checkpoint(
            self.store,
            key,
            MemoryFiles(self.node_files(0), empty_directories=["none"]),
            metadata,
            reuse=committing.find_reusable_bytes(self.store, KEY, self.parent, min_reusable_sequence(self.trial)),
            reverification=Reverification(self.commit_count, self.reverify_every),
            finalize_manifest=partial(merge_parts, self.store, expected),
        )
        with suppress(StoreUnavailable):
            self.store.delete([self.nodes.part_path(key, node) for node in others])
        return result


def run_nodes(nodes: int) -> Callable[[ObjectStore, Witness], None]:
    """Return a story that trains and saves on this many nodes, from the newest checkpoint."""

    def run(store: ObjectStore, witness: Witness) -> None:
        run_to(GroupSession(store, witness, owner=f"of {nodes}", node_count=nodes), 3)

    return run


def make_group(nodes: int) -> GroupSession:
    """Return an owner with a checkpoint, and with a step that its nodes have not saved yet."""
    session = GroupSession(MemoryStore(), Witness(), owner="old", node_count=nodes)
    session.open()
    session.start()
    session.train()
    session.to_delete = session.acknowledge(session.publish())
    session.train()
    session.nodes_run = False
    return session


def commit_step(session: Session) -> None:
    """Commit as node 0, or continue without the checkpoint if a part is missing."""
    with suppress(PartMissing, Superseded):
        session.save()


def send_part_of(node: int) -> Callable[[Session], None]:
    """Return an act in which another node sends its part of the same step."""

    def act(session: Session) -> None:
        assert isinstance(session, GroupSession)
        key = CheckpointKey(trial=KEY, step=session.pending[-1].step, sequence=session.experiment.entry_count)
        with suppress(Superseded):
            session.send(session.store, node, key)

    return act
