"""Where everything lies below a target's root. `docs/storage-layout.md` tells it to people.

<experiment>/journal/0000000001.json
<experiment>/segments/0000000010.jsonl
<experiment>/requests/0000000001.json
<experiment>/maintenance/0000000001.json
<experiment>/results/trials/0000000010.parquet
<experiment>/results/reports/0000000010.parquet
<experiment>/callbacks/<name>/0000000001.json
<experiment>/trials/<trial>/journal/0000000001.json
<experiment>/trials/<trial>/segments/0000000010.jsonl
<experiment>/trials/<trial>/checkpoints/<step>-<sequence>/manifest.json
<experiment>/trials/<trial>/checkpoints/<step>-<sequence>/metadata/0000000001.json
<experiment>/trials/<trial>/blobs/<digest>-<sequence>
<experiment>/trials/<trial>/answers/<attempt>-<step>.json
<experiment>/trials/<trial>/artifacts/index/0000000001.json
<experiment>/trials/<trial>/artifacts/files/<digest>-<number>/<name>

What each is, the page says. Where the results and the callbacks' states lie, `published` and `callback_state` know.
"""

from __future__ import annotations

from typing import Protocol

from prefect_tune.core.values import Digest, Value, valid_name

__all__ = [
    "MANIFEST",
    "CheckpointKey",
    "JournalKey",
    "Saved",
    "TrialKey",
    "below",
    "blob_sequence",
    "in_digits",
    "journal_key",
    "maintenance_folder",
    "maintenance_path",
    "number_in",
    "numbered",
    "request_path",
    "requests_folder",
]

MANIFEST = "manifest.json"
_DIGITS = 10


class JournalKey(Value):
    """Names a journal on a target: an experiment's, or the one that a trial of it has for itself."""

    experiment: str
    trial: str | None = None

    def __str__(self) -> str:
        experiment = f"experiment {self.experiment!r}"
        return experiment if self.trial is None else f"trial {self.trial!r} of {experiment}"

    @property
    def folder(self) -> str:
        if self.trial is None:
            return valid_name(self.experiment)
        return TrialKey(experiment=self.experiment, trial=self.trial).folder

    @property
    def entries(self) -> str:
        """The folder of the numbered entries."""
        return f"{self.folder}/journal"

    @property
    def segments(self) -> str:
        return f"{self.folder}/segments"

    def entry_path(self, number: int) -> str:
        """Return the path of entry `number` (from 1)."""
        return numbered(self.entries, number)

    def segment_path(self, number: int) -> str:
        """Return the path of the segment that ends with entry `number`."""
        return numbered(self.segments, number, "jsonl")


def journal_key(journal: JournalKey | str) -> JournalKey:
    """Return the key of a journal; a name alone is that of an experiment."""
    return journal if isinstance(journal, JournalKey) else JournalKey(experiment=journal)


def in_digits(number: int) -> str:
    """Return a number as names spell it: names sort as their numbers do."""
    return f"{number:0{_DIGITS}d}"


def numbered(folder: str, number: int, kind: str = "json") -> str:
    """Return the path of the document in `folder` that is named by `number`."""
    return f"{folder}/{in_digits(number)}.{kind}"


def number_in(folder: str, path: str, kind: str = "json") -> int | None:
    """Return the number that the document at `path` in `folder` is named by; None for a foreign file."""
    stem, _, suffix = path.removeprefix(f"{folder}/").partition(".")
    is_number = stem.isascii() and stem.isdecimal() and len(stem) == _DIGITS
    return int(stem) if suffix == kind and is_number else None


def below(root_uri: str, folder: str) -> str:
    """Return the URI of a folder or file of a target: the options of the target's own URI stay behind it."""
    root, mark, options = root_uri.partition("?")
    return f"{root if root.endswith('/') else f'{root}/'}{folder}{mark}{options}"


def requests_folder(experiment: str) -> str:
    """Return the folder of what is asked of an experiment from outside."""
    return f"{valid_name(experiment)}/requests"


def request_path(experiment: str, number: int) -> str:
    """Return the path of request `number` (from 1)."""
    return numbered(requests_folder(experiment), number)


def maintenance_folder(experiment: str) -> str:
    """Return the folder of what maintenance remembers of an experiment."""
    return f"{valid_name(experiment)}/maintenance"


def maintenance_path(experiment: str, number: int) -> str:
    """Return the path of round `number` (from 1)."""
    return numbered(maintenance_folder(experiment), number)


class Saved(Protocol):
    """What names a checkpoint within its trial."""

    @property
    def step(self) -> int: ...

    @property
    def sequence(self) -> int: ...


class TrialKey(Value):
    """Names a trial on a target."""

    experiment: str
    trial: str

    @property
    def folder(self) -> str:
        return f"{valid_name(self.experiment)}/trials/{valid_name(self.trial)}"

    @property
    def blobs(self) -> str:
        return f"{self.folder}/blobs"

    @property
    def checkpoints(self) -> str:
        return f"{self.folder}/checkpoints"

    @property
    def artifacts(self) -> str:
        return f"{self.folder}/artifacts"

    def checkpoint_key(self, checkpoint: Saved) -> CheckpointKey:
        """Return the key of a checkpoint of this trial."""
        return CheckpointKey(trial=self, step=checkpoint.step, sequence=checkpoint.sequence)

    @property
    def answers(self) -> str:
        return f"{self.folder}/answers"

    def answer_path(self, attempt: int, step: int) -> str:
        """Return the path of what an attempt is told when it asks at `step`; step 0 is for what it did not ask."""
        return f"{self.answers}/{attempt:06d}-{in_digits(step)}.json"

    def blob_path(self, digest: Digest, sequence: int) -> str:
        """Return the path of a blob first written by the save that began after entry `sequence`."""
        return f"{self.blobs}/{digest}-{in_digits(sequence)}"


class CheckpointKey(Value):
    """Names one checkpoint: its step, and the journal's length when its save began.

    The sequence is never given twice to two checkpoints of one step, so a name is written once, ever.
    """

    trial: TrialKey
    step: int
    sequence: int

    @property
    def name(self) -> str:
        return f"{in_digits(self.step)}-{in_digits(self.sequence)}"

    @property
    def folder(self) -> str:
        return f"{self.trial.checkpoints}/{self.name}"

    @property
    def manifest_path(self) -> str:
        return f"{self.folder}/{MANIFEST}"

    @property
    def metadata_folder(self) -> str:
        """The folder of what is said of the checkpoint after its commit."""
        return f"{self.folder}/metadata"

    @classmethod
    def from_manifest_path(cls, trial: TrialKey, path: str) -> CheckpointKey | None:
        """Return the key whose manifest lies at `path`; None for a foreign file."""
        step, _, sequence = path.removeprefix(f"{trial.checkpoints}/").removesuffix(f"/{MANIFEST}").partition("-")
        if not (step.isdecimal() and sequence.isdecimal()):
            return None
        key = cls(trial=trial, step=int(step), sequence=int(sequence))
        return key if key.manifest_path == path else None


def blob_sequence(path: str) -> int:
    """Return the sequence in a blob's name; -1 for a foreign file, which is older than everything."""
    sequence = path.rpartition("-")[2]
    return int(sequence) if sequence.isascii() and sequence.isdecimal() else -1
