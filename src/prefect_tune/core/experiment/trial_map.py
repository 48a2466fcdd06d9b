"""A persistent mapping of an experiment's trials: one change costs the same with ten trials and with ten thousand."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TypeAlias

from pydantic import GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema
from rpds import HashTrieMap, HashTrieSet

from prefect_tune.core.experiment.segment_levels import level_of
from prefect_tune.core.experiment.trial_transitions import Trial

__all__ = ["TrialMap"]

_Changed: TypeAlias = "tuple[HashTrieSet[int], ...]"
_NONE: HashTrieSet[int] = HashTrieSet()
_MOST_SHOWN = 10


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class TrialMap(Mapping[str, Trial]):
    """Immutable trials by name, in the order in which they were added. A changed copy shares unchanged trials.

    It also records which trials changed since which segment boundary, for writing segments.
    """

    _numbers: HashTrieMap[str, int]
    """By name, the trial's number in the order in which they were added."""
    _trials: HashTrieMap[int, Trial]
    _changed: _Changed = (_NONE,)
    """Sets of trials' numbers. Those in the first set changed since the last boundary that ends with two zeros, those
    in the second between it and the last one that ends with three, and so on. A superfluous number costs bytes; a
    missing one would lose the change."""

    @classmethod
    def of(cls, trials: Iterable[Trial] = ()) -> TrialMap:
        """Return `trials`, in this order, each marked as changed."""
        found = cls(HashTrieMap(), HashTrieMap())
        for trial in trials:
            found = found.with_trial(trial)
        return found

    def with_trial(self, trial: Trial) -> TrialMap:
        """Return a copy with `trial` replaced, or added at the end if it is new."""
        number = self._numbers.get(trial.trial)
        numbers = self._numbers
        if number is None:
            number = len(numbers)
            numbers = numbers.insert(trial.trial, number)
        lately, *earlier = self._changed
        changed = self._changed if number in lately else (lately.insert(number), *earlier)
        return TrialMap(numbers, self._trials.insert(number, trial), changed)

    def at_boundary(self, number: int) -> TrialMap:
        """Return a copy after entry `number`, which ends a segment: the segments within it are merged into it."""
        changed = [*self._changed, *[_NONE] * (level_of(number) - len(self._changed))]
        for level in range(level_of(number) - 1):
            changed[level + 1] = changed[level + 1].update(changed[level])
            changed[level] = _NONE
        return TrialMap(self._numbers, self._trials, tuple(changed))

    def changed_in(self, number: int) -> Sequence[Trial]:
        """Return the trials for the segment that ends with the last entry, `number`, in the order of addition."""
        return [self._trials[each] for each in sorted(self._changed[level_of(number) - 1])]

    def with_segment(self, number: int, changed: Sequence[Trial]) -> TrialMap:
        """Return a copy after the next segment, the one at `number`, which holds `changed`."""
        numbers, trials = self._numbers, self._trials
        for trial in changed:
            if trial.trial not in numbers:
                numbers = numbers.insert(trial.trial, len(numbers))
            trials = trials.insert(numbers[trial.trial], trial)
        lately = HashTrieSet(numbers[trial.trial] for trial in changed)
        wider = self._changed[level_of(number) :]
        return TrialMap(numbers, trials, (*[_NONE] * (level_of(number) - 1), lately, *wider))

    def __getitem__(self, trial: str) -> Trial:
        return self._trials[self._numbers[trial]]

    def __contains__(self, trial: object) -> bool:
        return trial in self._numbers

    def __iter__(self) -> Iterator[str]:
        return (self._trials[number].trial for number in range(len(self._trials)))

    def __len__(self) -> int:
        return len(self._trials)

    def __eq__(self, other: object) -> bool:
        return self._trials == other._trials if isinstance(other, TrialMap) else dict(self) == other

    __hash__ = None  # type: ignore[assignment]  # as any mapping

    def __repr__(self) -> str:
        shown = [repr(each) for each in islice(self.values(), _MOST_SHOWN)]
        more = [f"and {len(self) - _MOST_SHOWN:,} more"] if len(self) > _MOST_SHOWN else []
        return f"Trials([{', '.join([*shown, *more])}])"

    @classmethod
    def __get_pydantic_core_schema__(cls, _source: object, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Read and write JSON as a list of trials."""
        listed = handler.generate_schema(tuple[Trial, ...])
        read = core_schema.no_info_after_validator_function(cls.of, listed)
        return core_schema.json_or_python_schema(
            json_schema=read,
            python_schema=core_schema.union_schema([core_schema.is_instance_schema(cls), read]),
            serialization=core_schema.plain_serializer_function_ser_schema(_listed, return_schema=listed),
        )


def _listed(trials: TrialMap) -> tuple[Trial, ...]:
    return tuple(trials.values())
