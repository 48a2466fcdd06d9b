"""What a resumed run has probably not restored, from the states that the probe recorded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from prefect_tune.drills.evidence import DrillRun, Record

_NOUNS = {
    "global": "a global random generator",
    "rng": "the state of a random generator",
    "schedule": "the learning-rate schedule",  # it sets the rate of the optimizer
    "scaler": "the gradient scaler",
    "optimizer": "the optimizer",
    "counter": "a counter",
    "model": "the model",
    "value": "a value",
    "state": "an attribute",
}
_GLOBAL = {
    "random": ("Python's generator", "random.getstate()"),
    "numpy.random": ("NumPy's global generator", "numpy.random.get_state()"),
    "torch": ("torch's generator of the CPU", "torch.get_rng_state()"),
}
_ORDER = list(_NOUNS)
_MOST = 6
LASTING = frozenset({"global", "rng", "optimizer", "schedule", "scaler"})
"""Kinds whose states matter later if they do not yet; an attribute may be anything."""


@dataclass(frozen=True, slots=True)
class Forgotten:
    """Something that was not restored."""

    kind: str
    """`global`, `rng`, `optimizer`, `schedule`, `scaler`, `model`, `counter`, `value` or `state`."""
    name: str
    """The attribute or variable, or the library of a global generator."""
    step: int
    """After which step the run resumed."""
    found: str
    expected: str
    is_local: bool = False
    """Whether it is of a function: then both values are of the next step."""

    def __str__(self) -> str:
        """Say what was not restored, and what to save."""
        if self.kind == "global":
            of_gpu = f"torch's generator of {self.name.removeprefix('torch.')}", "torch.cuda.get_rng_state_all()"
            generator, call = _GLOBAL.get(self.name, of_gpu)
            return f"{generator}, after step {self.step}: save {call}, and set it on a resume"
        later = " one step later" if self.is_local else ""
        values = "" if _is_digest(self.found) else f" ({self.found}, expected {self.expected}{later})"
        noun = "a local variable" if self.is_local and self.kind == "state" else _NOUNS[self.kind]
        return f"{noun}, `{self.name}`{values}, after step {self.step}: save and load it"


def _is_digest(text: str) -> bool:
    return len(text.strip("'")) == 16 and set(text) <= set("'0123456789abcdef")  # a generator's is a text


def forgotten_in(
    undisturbed: DrillRun, killed: DrillRun, again: DrillRun | None = None, saved: Collection[str] = ()
) -> Sequence[Forgotten]:
    """Return what was not restored at the first resume that shows it, the likeliest first.

    Compared are the states after the checkpoint was loaded (of a function, after the next step) with those of the
    undisturbed run. A state that training does not change, or that differs between two undisturbed runs, is no
    evidence. Of a function all that follows from a sum differs after that step, whatever the cause: it is named only
    if no generator, count or rate differs, and what is `saved` in the checkpoints only if nothing else differs.
    """
    known = {each.step: each for each in undisturbed.records}
    others = {each.step: each for each in again.records} if again is not None else known
    seen = {pair for each in undisturbed.records for pair in each.states.items()}
    values = Counter(name for name, _ in seen)
    changing = {name for name, count in values.items() if count > 1}
    for record in _resumed(killed):
        reference, other = known.get(record.step), others.get(record.step)
        if reference is None or other is None:
            continue
        if found := list(_unlike(record, reference, other, changing)):
            causes = [] if record.is_restored else [each for each in found if _is_cause(each)]
            unsaved = [] if record.is_restored else [each for each in found if each.name.partition(".")[0] not in saved]
            likely = _roots(causes or unsaved or found)
            return sorted(likely, key=lambda each: (not _is_cause(each), _ORDER.index(each.kind)))[:_MOST]
    return []


def _is_cause(found: Forgotten) -> bool:
    """Whether it is no result of another difference one step later: sums are, generators and counts are not."""
    return found.kind in {"global", "rng"} or not (_is_digest(found.found) or found.kind == "value")


def _resumed(killed: DrillRun) -> Iterator[Record]:
    """Yield the first record of each attempt after the first one."""
    attempt = 1
    for each in killed.records:
        if each.attempt != attempt:
            attempt = each.attempt
            yield each


def _unlike(record: Record, reference: Record, other: Record, changing: Collection[str]) -> Iterator[Forgotten]:
    for name, expected in reference.states.items():
        found = record.states.get(name)
        says_something = name in changing and other.states.get(name) == expected
        if found is not None and found != expected and says_something and "<" not in {found[:1], expected[:1]}:
            kind, _, path = name.partition(" ")
            step = record.step if record.is_restored else record.step - 1
            yield Forgotten(kind, path, step, found, expected, is_local=not record.is_restored)


def _roots(found: Sequence[Forgotten]) -> Sequence[Forgotten]:
    """Return one of each object: a counter in it if there is one, since that says the most."""
    first: dict[tuple[str, str], Forgotten] = {}
    for each in sorted(found, key=lambda one: _is_digest(one.found)):
        owner = each.name if each.kind in {"global", "rng"} else each.name.partition(".")[0]
        first.setdefault((each.kind, owner), each)
    return list(first.values())
