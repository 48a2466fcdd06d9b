"""The paths of all objects below a target's root. `docs/storage-layout.md` describes each object.

<experiment>/generations/0000000002.json
<experiment>/<generation>/unnamed-call.json
<experiment>/<generation>/journal/0000000001.json
<experiment>/<generation>/snapshots/0000000200.jsonl
<experiment>/<generation>/live/0000000001-0000000001.json
<experiment>/<generation>/requests/0000000001.json
<experiment>/<generation>/results/trials/0000000010.parquet
<experiment>/<generation>/results/reports/0000000010.parquet
<experiment>/<generation>/callbacks/<name>.json
<experiment>/<generation>/trials/<trial>/outbox/0000000001/0000000001.json
<experiment>/<generation>/trials/<trial>/checkpoints/<step>-<sequence>/manifest.json
<experiment>/<generation>/trials/<trial>/checkpoints/<step>-<sequence>/metadata/0000000001.json
<experiment>/<generation>/trials/<trial>/blobs/<digest>-<sequence>
<experiment>/<generation>/trials/<trial>/answers/<attempt>-<step>.json
<experiment>/<generation>/trials/<trial>/nodes/<attempt>/address.json
<experiment>/<generation>/trials/<trial>/nodes/<attempt>/parts/<step>-<sequence>-<node>.json
<experiment>/<generation>/trials/<trial>/artifacts/<path>

The module `generations` finds the current generation of a name. Each path is made from a key that has the generation.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Annotated, Literal, TypeAlias

from pydantic import AfterValidator, Field

from prefect_tune.core.storage.object_store import ObjectStore, is_normalized_path, is_path_too_long
from prefect_tune.core.values import Digest, TrialId, Value, validate_name

if TYPE_CHECKING:
    from prefect_tune.core.journal_events import CheckpointRef

MANIFEST_FILE = "manifest.json"
_DIGIT_COUNT = 10
_NUMBERED = re.compile(r"[0-9]{10}(-[0-9]{10})?\.(json|parquet)")


def _check_portable_path(path: str) -> str:
    if not is_normalized_path(path) or "\\" in path:
        raise ValueError(f"path {path!r} is not a plain relative path")
    if is_path_too_long(path):
        raise ValueError(f"path {path[:40]!r}…: expected names of at most 255 bytes, and 4096 bytes in all")
    return path


PortablePath: TypeAlias = Annotated[str, AfterValidator(_check_portable_path)]
"""A relative path that names the same file in its folder on every operating system."""

Generation: TypeAlias = Annotated[int, Field(ge=1)]
"""The number of an experiment among all experiments of its name, from 1. Each deletion ends a generation."""


class JournalKey(Value):
    """Names the journal of an experiment on a target."""

    experiment: str
    generation: Generation

    def __str__(self) -> str:
        return f"experiment {self.experiment!r}"

    def trial_key(self, trial: str) -> TrialKey:
        return TrialKey(experiment=self.experiment, generation=self.generation, trial=trial)

    @property
    def folder(self) -> str:
        return f"{validate_name(self.experiment)}/{self.generation}"

    @property
    def unnamed_call_path(self) -> str:
        """The path of the document that names the call to which the experiment belongs; see `UnnamedCall`."""
        return f"{self.folder}/unnamed-call.json"

    @property
    def entries_folder(self) -> str:
        return f"{self.folder}/journal"

    @property
    def snapshots_folder(self) -> str:
        return f"{self.folder}/snapshots"

    @property
    def live_folder(self) -> str:
        return f"{self.folder}/live"

    def request_path(self, number: int) -> str:
        """Return the path of stop request `number` (from 1), which another process sends to the experiment."""
        return document_path(f"{self.folder}/requests", number)

    def live_status_path(self, term: int, number: int) -> str:
        """Return the path of live status `number` (from 1) of the owner of `term`; only the newest status is kept."""
        return f"{self.live_folder}/{_pad_number(term)}-{_pad_number(number)}.json"

    def entry_path(self, number: int) -> str:
        """Return the path of entry `number` (from 1)."""
        return document_path(self.entries_folder, number)

    def snapshot_path(self, number: int) -> str:
        """Return the path of the snapshot of the experiment after entry `number`."""
        return document_path(self.snapshots_folder, number, "jsonl")


def _pad_number(number: int) -> str:
    """Return a number as ten digits, so that names sort like their numbers."""
    return f"{number:0{_DIGIT_COUNT}d}"


def document_path(folder: str, number: int, kind: str = "json") -> str:
    """Return the path of document `number` in `folder`."""
    return f"{folder}/{_pad_number(number)}.{kind}"


def document_number(folder: str, path: str, kind: str = "json") -> int | None:
    """Return the number of the document at `path` in `folder`; None for a foreign file."""
    stem, _, suffix = path.removeprefix(f"{folder}/").partition(".")
    is_number = stem.isascii() and stem.isdecimal() and len(stem) == _DIGIT_COUNT
    return int(stem) if suffix == kind and is_number else None


def list_document_paths(store: ObjectStore, folder: str) -> Sequence[str]:
    """Return the sorted paths of the objects in `folder` whose names are one or two numbers."""
    return [listed.path for listed in store.list(folder) if _NUMBERED.fullmatch(listed.path.removeprefix(f"{folder}/"))]


def delete_older_documents(store: ObjectStore, before: str) -> None:
    """In the folder of the document `before`, delete the documents with lower numbers; keep all other files."""
    if paths := [path for path in list_document_paths(store, before.rpartition("/")[0]) if path < before]:
        store.delete(paths)


NON_ARTIFACT_PATTERNS = (
    "./checkpoint_-00001*",
    "./checkpoint_tmp*",
    "./save_to_object*",
    "./rank_*",
    "./.lazy_checkpoint_marker",
)
"""Patterns of files that trainables of older APIs leave at the top of their directory; they are not artifacts."""


def matches_any_pattern(path: str, patterns: Sequence[str]) -> bool:
    """Return whether the file at `path` (relative to a trial's directory, with slashes) matches a pattern.

    Patterns are shell patterns (`*`, `?`, `[...]`), in which `*` also matches slashes. They match files and folders; if
    a folder matches, so does everything in the folder.

    - A pattern with a slash is compared with the path from the top of the directory (`logs/*.tmp`).
      A leading `./` has the same effect, so `./rank_*` matches only at the top.
    - A pattern without a slash is compared with names at any depth (`*.tmp`, `__pycache__`).
    """
    names = path.split("/")
    prefixes = ["/".join(names[:depth]) for depth in range(1, len(names) + 1)]
    normalized = [pattern.removesuffix("/") for pattern in patterns]
    return any(
        fnmatchcase(candidate, pattern.removeprefix("./"))
        for pattern in normalized
        for candidate in (prefixes if "/" in pattern else names)
    )


def join_uri(root_uri: str, folder: str) -> str:
    """Return the URI of a folder or file on a target, with the query options of the target's URI at its end."""
    root, mark, options = root_uri.partition("?")
    return f"{root if root.endswith('/') else f'{root}/'}{folder}{mark}{options}"


class CheckpointOrigin(Value):
    """The checkpoint of another trial from which a clone was made. The clone uses the original's manifest and bytes."""

    trial: TrialId
    step: int
    sequence: int


class TrialKey(Value):
    """Names a trial on a target."""

    experiment: str
    generation: Generation
    trial: str

    @property
    def folder(self) -> str:
        return f"{validate_name(self.experiment)}/{self.generation}/trials/{validate_name(self.trial)}"

    @property
    def journal_key(self) -> JournalKey:
        return JournalKey(experiment=self.experiment, generation=self.generation)

    @property
    def blobs_folder(self) -> str:
        return f"{self.folder}/blobs"

    @property
    def checkpoints_folder(self) -> str:
        return f"{self.folder}/checkpoints"

    @property
    def artifacts_folder(self) -> str:
        return f"{self.folder}/artifacts"

    def checkpoint_key(self, checkpoint: CheckpointRef) -> CheckpointKey:
        """Return the key under which a checkpoint of this trial is stored; for a clone, the key of its origin."""
        if (origin := checkpoint.origin) is not None:
            folder = self.journal_key.trial_key(origin.trial)
            return CheckpointKey(trial=folder, step=origin.step, sequence=origin.sequence)
        return CheckpointKey(trial=self, step=checkpoint.step, sequence=checkpoint.sequence)

    @property
    def answers_folder(self) -> str:
        return f"{self.folder}/answers"

    def answer_path(self, attempt: int, step: int) -> str:
        """Return the path of the answer to an attempt at `step`; step 0 is for an answer that no report awaits."""
        return f"{self.answers_folder}/{attempt:06d}-{_pad_number(step)}.json"

    def post_path(self, outbox: int, post: int) -> str:
        """Return the path of post number `post` in the trial's outbox number `outbox`; both count from 1."""
        return document_path(f"{self.outboxes_folder}/{_pad_number(outbox)}", post)

    @property
    def outboxes_folder(self) -> str:
        return f"{self.folder}/outbox"

    @property
    def nodes_folder(self) -> str:
        """The folder of the objects that the nodes of an attempt exchange."""
        return f"{self.folder}/nodes"

    def blob_path(self, digest: Digest, sequence: int) -> str:
        """Return the path of a blob that was first written by the save with this sequence."""
        return f"{self.blobs_folder}/{digest}-{_pad_number(sequence)}"


class NodesKey(Value):
    """Names an attempt that runs on several nodes."""

    trial: TrialKey
    attempt: int

    @property
    def folder(self) -> str:
        return f"{self.trial.nodes_folder}/{self.attempt:06d}"

    @property
    def address_path(self) -> str:
        """The path of the object with the address at which node 0 waits for the other nodes."""
        return f"{self.folder}/address.json"

    def part_path(self, key: CheckpointKey, node: int) -> str:
        """Return the path of the object in which a node lists the files that it adds to a checkpoint."""
        return f"{self.folder}/parts/{key.name}-{node:04d}.json"

    @classmethod
    def from_path(cls, trial: TrialKey, path: str) -> NodesKey | None:
        """Return the key of the attempt whose nodes wrote the object at `path`; None for a foreign file."""
        attempt = path.removeprefix(f"{trial.nodes_folder}/").partition("/")[0]
        if not (attempt.isascii() and attempt.isdecimal()):
            return None
        key = cls(trial=trial, attempt=int(attempt))
        return key if path.startswith(f"{key.folder}/") else None


class CheckpointKey(Value):
    """Names a checkpoint by its step and by the sequence of its save. The sequence counts the saves of the trial.

    No two checkpoints of a step have the same sequence, so a name is written at most once.
    """

    trial: TrialKey
    step: int
    sequence: int

    @property
    def name(self) -> str:
        return f"{_pad_number(self.step)}-{_pad_number(self.sequence)}"

    @property
    def folder(self) -> str:
        return f"{self.trial.checkpoints_folder}/{self.name}"

    @property
    def manifest_path(self) -> str:
        return f"{self.folder}/{MANIFEST_FILE}"

    @property
    def metadata_folder(self) -> str:
        """The folder of the metadata that is written after the commit."""
        return f"{self.folder}/metadata"

    @classmethod
    def from_manifest_path(cls, trial: TrialKey, path: str) -> CheckpointKey | None:
        """Return the key of the checkpoint whose manifest is stored at `path`; None for a foreign file."""
        name = path.removeprefix(f"{trial.checkpoints_folder}/").removesuffix(f"/{MANIFEST_FILE}")
        step, _, sequence = name.partition("-")
        if not (step.isdecimal() and sequence.isdecimal()):
            return None
        key = cls(trial=trial, step=int(step), sequence=int(sequence))
        return key if key.manifest_path == path else None


def blob_sequence(path: str) -> int:
    """Return the sequence in a blob's name; -1 for a foreign file, which then counts as older than every save."""
    sequence = path.rpartition("-")[2]
    return int(sequence) if sequence.isascii() and sequence.isdecimal() else -1


ResultsTable: TypeAlias = Literal["trials", "reports"]


def results_path(experiment: JournalKey, rows: ResultsTable, number: int) -> str:
    """Return the path of the Parquet file with the results after entry `number` of the journal.

    Only the file with the highest number is kept, because each file can be made again from the journal.
    """
    return document_path(f"{experiment.folder}/results/{rows}", number, "parquet")
