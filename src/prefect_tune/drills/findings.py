"""The result of a drill: its verdict, the differences, the unrestored states, and the costs of saves and kills."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import sqrt
from statistics import median
from typing import Any, ClassVar, Literal, NamedTuple, TypeAlias

from prefect_tune.core.display_text import format_size, pluralize
from prefect_tune.core.errors import TuneError
from prefect_tune.core.renamed import RenamedMembers
from prefect_tune.drills.evidence import (
    CHECKPOINTS,
    Difference,
    DrillRun,
    Kill,
    ProbeRecord,
    collect_metric_histories,
    find_result_metrics,
    find_unexplained_differences,
)
from prefect_tune.drills.plan import DrillPlan
from prefect_tune.drills.values import MISSING, UNEXPECTED, iter_scalars

_KIND_NOUNS = {
    "global": "a global random generator",
    "rng": "the state of a random generator",
    "schedule": "the learning-rate schedule",  # listed before the optimizer, whose rate the schedule sets
    "scaler": "the gradient scaler",
    "optimizer": "the optimizer",
    "data": "the place in the data",
    "counter": "a counter",
    "model": "the model",
    "value": "a value",
    "state": "an attribute",
    "metric": "a variable that holds a metric",
}
_GLOBAL_GENERATORS = {
    "random": ("Python's generator", "random.getstate()"),
    "numpy.random": ("NumPy's global generator", "numpy.random.get_state()"),
    "torch": ("torch's generator of the CPU", "torch.get_rng_state()"),
}
_KIND_ORDER = list(_KIND_NOUNS)
_MAX_STATES = 6
_ADVICE = {
    "data": "save the order and the position, or use ResumableLoader",
    "metric": "save and load it if the next step reads it",
}
_FILLED_ON_USE = frozenset({"optimizer", "schedule", "scaler"})
"""Kinds of objects whose states get entries on first use, such as the moments of an optimizer."""
_ABSENT = "absent"
_LASTING_KINDS = frozenset({"global", "rng", "optimizer", "schedule", "scaler"})
"""Kinds of states that affect the training sooner or later; other states, such as attributes, may never affect it."""


@dataclass(frozen=True, slots=True)
class UnrestoredState:
    """A state that was not restored."""

    kind: str
    """`global`, `rng`, `optimizer`, `schedule`, `scaler`, `data`, `model`, `counter`, `value`, `state` or `metric`."""
    name: str
    """The attribute or variable, or the library of a global generator."""
    step: int
    """The step from which the run resumed."""
    actual: str
    expected: str
    is_local: bool = False
    """Whether the state is a function's local variable; if so, both values are from one step after the resume."""

    def __str__(self) -> str:
        if self.kind == "global":
            of_gpu = f"torch's generator of {self.name.removeprefix('torch.')}", "torch.cuda.get_rng_state_all()"
            generator, call = _GLOBAL_GENERATORS.get(self.name, of_gpu)
            return f"{generator}, after step {self.step}: save {call}, and set it on a resume"
        later = " one step later" if self.is_local else ""
        values = f" ({self.actual}, expected {self.expected}{later})"
        if _is_digest(self.actual) or _is_digest(self.expected):
            values = f" ({_ABSENT})" if self.actual == _ABSENT else ""
        noun = "a local variable" if self.is_local and self.kind == "state" else _KIND_NOUNS[self.kind]
        return f"{noun}, `{self.name}`{values}, after step {self.step}: {_ADVICE.get(self.kind, 'save and load it')}"


def _is_digest(text: str) -> bool:
    return len(text.strip("'")) == 16 and set(text) <= set("'0123456789abcdef")  # a generator's digest is in quotes


def find_unrestored_states(
    undisturbed: DrillRun,
    killed: DrillRun,
    again: DrillRun | None = None,
    saved: Collection[str] = (),
    differs_at: int | None = None,
) -> Sequence[UnrestoredState]:
    """Find the first resume that did not restore all states; return the unrestored states, the likeliest cause first.

    Compare the states after the load of the checkpoint (for a function, after the next step) with the states of the
    undisturbed run. Ignore a state that training does not change, and a state that has differed without a kill up to
    the step of the resume. Ignore a resume from step `differs_at` or later, where the runs already differ. One step
    after the resume of a function, every weight or loss differs, whatever the cause, so return such values only if no
    generator, count or rate differs. Then return values that are not `saved` in checkpoints and are no metric; if there
    are none, unsaved variables that hold a metric; if there are none of these either, saved values.
    """
    references = {record.step: record for record in undisturbed.records}
    pairs = {pair for record in undisturbed.records for pair in record.states.items()}
    values = Counter(name for name, _ in pairs)
    changing = {name for name, count in values.items() if count > 1}
    without_kills = [*(record for record in killed.records if record.attempt == 1), *(again.records if again else ())]
    for record in killed.restart_records:
        reference = references.get(record.step)
        if reference is None or (differs_at is not None and record.resumed_from >= differs_at):
            continue
        evidence = changing - {
            name
            for other in without_kills
            for name, state in other.states.items()
            if other.step <= record.step and (same := references.get(other.step)) and same.states.get(name) != state
        }
        if states := list(_iter_differing_states(record, reference, evidence)):
            if not record.is_restored:
                states = _select_causes(states, killed.metrics.get(record.step, {}), saved)
            optimizers = {_strip_path(name) for name in reference.states if name.startswith("optimizer ")}
            roots = _select_one_per_object(states, has_one_optimizer=len(optimizers) == 1)
            return sorted(roots, key=lambda root: (not _may_be_cause(root), _KIND_ORDER.index(root.kind)))[:_MAX_STATES]
    return []


def _select_causes(
    states: list[UnrestoredState], metrics: Mapping[str, object], saved: Collection[str]
) -> list[UnrestoredState]:
    """Return the states that may have caused all differences one step after a resume."""
    results = {repr(value) for _, value in iter_scalars(metrics) if isinstance(value, float)}
    unsaved = [state for state in states if state.name.partition(".")[0] not in saved]
    plain = [state for state in unsaved if state.actual not in results]
    metrics_in_variables = [replace(state, kind="metric") for state in unsaved if state.kind in {"value", "state"}]
    causes = [state for state in states if _may_be_cause(state) and state.actual not in results]
    return causes or plain or metrics_in_variables or unsaved or states


def _may_be_cause(state: UnrestoredState) -> bool:
    """Return whether a state can be a cause: a generator, rate or count can; a weight may differ only as a result."""
    return state.kind in {"global", "rng"} or not (_is_digest(state.actual) or state.kind == "value")


def _iter_differing_states(
    record: ProbeRecord, reference: ProbeRecord, evidence: Collection[str]
) -> Iterator[UnrestoredState]:
    objects = {_strip_path(name) for name in record.states}
    for name, expected in reference.states.items():
        kind, _, path = name.partition(" ")
        actual = record.states.get(name)
        if actual is None and kind in _FILLED_ON_USE and _strip_path(name) in objects:
            actual = _ABSENT  # not created yet, such as the moments of a new optimizer
        if actual in {None, expected} or name not in evidence:
            continue
        if "<" not in {actual[:1], expected[:1]}:
            yield UnrestoredState(kind, path, record.resumed_from, actual, expected, is_local=not record.is_restored)


def _strip_path(name: str) -> str:
    """Return the kind of a state and its attribute or variable, without the path below it."""
    return name.partition(".")[0]


def _select_one_per_object(states: Sequence[UnrestoredState], *, has_one_optimizer: bool) -> Sequence[UnrestoredState]:
    """Return one state of each object, preferably one with a readable value, such as a counter.

    If a single optimizer has a schedule, omit the optimizer's learning rate, because the schedule sets the rate.
    """
    first: dict[tuple[str, str], UnrestoredState] = {}
    if has_one_optimizer and any(state.kind == "schedule" for state in states):
        states = [state for state in states if not (state.kind == "optimizer" and state.name.endswith(".lr"))]
    for state in sorted(states, key=lambda state: _is_digest(state.actual)):
        object_name = state.name if state.kind in {"global", "rng"} else state.name.partition(".")[0]
        first.setdefault((state.kind, object_name), state)
    return list(first.values())


Verdict: TypeAlias = Literal["exact", "not exact", "not deterministic"]
_MAX_SHOWN = 8
_SEED_ADVICE = "set seeds, and the library's deterministic mode"
_FILE_NAME_ADVICE = "give the files of a checkpoint the same names in each run"
_VICTIMS = {"trial": "the trial", "rank": "another rank", "search": "the search", "upload": "the search, in an upload"}


class RunComparison(NamedTuple):
    """The runs of a drill, and their differences."""

    undisturbed: DrillRun
    killed: DrillRun
    second_undisturbed: DrillRun | None
    """The second undisturbed run; None if it was not needed."""
    differences: Sequence[Difference]
    """The differences between the undisturbed run and the killed run."""
    unstable: Sequence[Difference]
    """The differences without a kill: between the undisturbed runs, and before the killed run's first kill."""
    result_locations: Collection[tuple[str, str]]
    """The locations of the values in checkpoints that are results of training; step counts, for example, are not."""
    generators: Sequence[Difference] = ()
    """The unseeded generators from which the training draws."""


@dataclass(frozen=True)
class SaveCosts:
    """The median costs of a save of the undisturbed run."""

    save_count: int
    seconds: float
    """The time of an upload."""
    blocked_seconds: float
    """The time that training waited for the save, both for the files and for the upload."""
    size_bytes: int
    sent_bytes: int
    """The bytes that were not on the target yet."""


@dataclass(frozen=True)
class SaveAdvice:
    """How often to save, given the mean time between failures."""

    hours_between_failures: float
    seconds: float
    """The seconds of training between two saves; see `compute_optimal_interval`."""
    steps: int
    """The same interval in steps of this training."""
    lost_time_share: float
    """The share of the total time that is lost to saves, failures and restarts."""


@dataclass(frozen=True)
class DrillReport(RenamedMembers):
    """The report of a drill."""

    _renamed: ClassVar[Mapping[str, str]] = {"forgotten": "unrestored", "shows_nothing": "is_inconclusive"}

    name: str
    """The prefix with which the names of the drill's experiments begin."""
    trainable: str
    """The import path of the trainable."""
    verdict: Verdict
    """`not deterministic` if training results differ, or may differ, without a kill."""
    steps: int
    compared_metric_count: int
    """The number of compared metric values."""
    compared_file_count: int
    """The number of compared checkpoint files."""
    kills: Sequence[Kill]
    """The kills of the run, each with the resume after it."""
    missed_kill_count: int
    """The number of planned kills that were not made, because no step or upload began after their step."""
    differences: Sequence[Difference]
    """The first difference of each metric, file, tensor or key, except those in `unstable`; in the order of steps."""
    unstable: Sequence[Difference]
    """The differences that also occur without a kill; values that training changes come first."""
    is_inconclusive: bool
    """Whether the equal values prove nothing, since such values, like step counts, are equal in any training."""
    unrestored: Sequence[UnrestoredState]
    """The states that were probably not restored."""
    save: SaveCosts | None
    """The costs of a save; None if nothing was saved."""
    advice: SaveAdvice | None
    """How often to save; None if nothing was saved."""

    @property
    def is_exact(self) -> bool:
        """Whether the killed run has the same metrics and checkpoints as the undisturbed run."""
        return self.verdict == "exact"

    def fields(self) -> dict[str, object]:
        """Return the report as JSON values."""
        fields: dict[str, Any] = {**asdict(self), "is_exact": self.is_exact}
        for diff in (*fields["differences"], *fields["unstable"]):
            del diff["detail"]["path"], diff["detail"]["scalars"]  # only for comparisons
        return fields

    def lines(self) -> Iterator[str]:
        """Yield the report as text."""
        yield self._format_headline()
        if self.verdict == "not exact":
            first = self.differences[0]
            yield f"  {f'equal up to step {first.step - 1}; ' if first.step > 1 else ''}{self._format_counts()}"
            yield from _format_list("", _summarize_differences(self.differences)[1:])
        without_kills = _summarize_differences(self.unstable)
        if self.verdict == "not deterministic":  # the headline has the first difference
            yield from _format_list("differs without a kill too: ", without_kills[1:])
            if self.is_inconclusive:
                yield f"  the rest is equal, but shows little of the training: {self._format_counts()}"
        else:
            yield from _format_list("differs without a kill too, and is ignored: ", without_kills)
        yield from self._format_causes()
        yield from self._format_costs()

    def summary(self) -> str:
        """Return the message of `NotExact`: the verdict, and the states that were probably not restored."""
        return "\n".join((self._format_headline(), *self._format_causes()))

    def _format_causes(self) -> Iterator[str]:
        prefix = f"no effect in {self.steps} steps, but not restored" if self.is_exact else "probably not restored"
        for state in self.unrestored:
            yield f"  {prefix}: {state}"
        if self.verdict == "not exact" and not self.unrestored:
            yield self._format_hint()

    def _format_hint(self) -> str:
        if all(diff.location == (CHECKPOINTS, "") for diff in self.differences):
            return "  only the steps of checkpoints differ: save a checkpoint at the same steps after a resume, too"
        if all(diff.detail.is_byte_comparison for diff in self.differences):
            return (
                "  all metrics are equal; only the bytes of files that the drill cannot read differ. Their values may "
                "be equal: to compare the values, save arrays, JSON or skops, or use PartialFitTrainable"
            )
        return (
            "  the drill found no state that a resume lost: look for an iterator over the data, a library's own "
            "generator, or files that the training reads"
        )

    def _format_headline(self) -> str:
        if self.verdict == "exact":
            times = pluralize(len(self.kills), "time", "times")
            return f"exact: the run that was killed {times} equals the undisturbed run; {self._format_counts()}"
        if self.verdict == "not deterministic":
            first = self.unstable[0]
            is_named = first.detail.description in {MISSING, UNEXPECTED}
            advice = _FILE_NAME_ADVICE if is_named else _SEED_ADVICE
            return (
                f"not deterministic: two runs differ without a kill, at {first}. To show that a resume is exact, first "
                f"make both runs equal: {advice}"
            )
        return f"not exact: first difference at {_summarize_differences(self.differences)[0]}"

    def _format_counts(self) -> str:
        metrics = pluralize(self.compared_metric_count, "metric value", "metric values")
        files = pluralize(self.compared_file_count, "checkpoint file", "checkpoint files")
        return f"{metrics} and {files} of {self.steps} steps compared"

    def _format_costs(self) -> Iterator[str]:
        for kill in self.kills:
            repeated = f"trained {pluralize(kill.repeated_steps, 'step', 'steps')} again"
            kept_text = f", {format_size(kill.kept_bytes)} of the upload kept" if kill.victim == "upload" else ""
            yield (
                f"  kill of {_VICTIMS[kill.victim]} after step {kill.step}: resumed from step {kill.resumed_from}, "
                f"{repeated}, next step done after {kill.seconds:.1f} s{kept_text}"
            )
        if self.missed_kill_count:
            missed_text = pluralize(self.missed_kill_count, "kill was", "kills were")
            yield f"  {missed_text} not made, because no step or upload began after their step"
        if (save := self.save) is not None:
            yield (
                f"  a save: {format_size(save.size_bytes)}, {format_size(save.sent_bytes)} of it sent, in "
                f"{save.seconds:.2f} s; training waits {save.blocked_seconds:.2f} s"
            )
        if (advice := self.advice) is not None:
            yield (
                f"  with a failure every {advice.hours_between_failures:g} h: save every {advice.seconds:.0f} s "
                f"({pluralize(advice.steps, 'step', 'steps')}), which loses the least time, "
                f"{advice.lost_time_share:.1%}"
            )


def _format_list(prefix: str, differences: Sequence[str]) -> Iterator[str]:
    for diff in differences[:_MAX_SHOWN]:
        yield f"  {prefix}{diff}"
    if len(differences) > _MAX_SHOWN:
        yield f"  … and {len(differences) - _MAX_SHOWN} more"


def _summarize_differences(differences: Sequence[Difference]) -> Sequence[str]:
    """Return the differences as texts, with one text for all differences between elements of the same list."""
    lists: dict[tuple[str, str], list[Difference]] = {}
    for diff in differences:
        lists.setdefault((diff.detail.file, re.sub(r"(\.|^)\d+(\.\d+)*$", "", diff.detail.key)), []).append(diff)
    return [
        f"{diffs[0]}" if len(diffs) == 1 else f"{diffs[0]}; the first of {len(diffs):,} differences in `{name or file}`"
        for (file, name), diffs in lists.items()
    ]


def make_drill_report(plan: DrillPlan, name: str, runs: RunComparison) -> DrillReport:
    """Return the report of the runs of a drill.

    Raises:
        TuneError: there is nothing to compare after the first resume.
    """
    undisturbed, killed, again, differences, unstable, changing, _ = runs
    ignored = {diff.location for diff in unstable}
    resumed_at = killed.undisturbed_steps
    if max(undisturbed.manifests, default=0) > resumed_at >= max(killed.manifests, default=0):
        ignored -= {(CHECKPOINTS, "")}  # report that no checkpoint was saved after a resume
    remaining = [diff for diff in differences if diff.location not in ignored]
    saved = {part for diff in differences for part in re.split(r"[./]", f"{diff.detail.file}.{diff.detail.key}")}
    differs_at = remaining[0].step if remaining else None
    unrestored = find_unrestored_states(undisturbed, killed, again, saved, differs_at)
    # The steps at which checkpoints have different results even without a kill. For metrics, see `doubts` below.
    results = [diff.step for diff in unstable if diff.location in changing]
    verdict: Verdict = "not exact" if remaining else "exact"
    if results and (not remaining or min(results) <= remaining[0].step):
        verdict = "not deterministic"
    compared = {key: values for key, values in collect_metric_histories(undisturbed).items() if key not in ignored}
    both = undisturbed.manifests.keys() & killed.manifests.keys()
    if verdict == "exact" and not compared and max(both, default=0) <= resumed_at:
        raise TuneError(
            "nothing to compare after the resume: all metrics differ without a kill, and no checkpoint followed the "
            "resume; train more --steps, or save more often (--save-every)"
        )
    unstable = sorted(unstable, key=lambda diff: (diff.location not in changing, diff.step))
    doubts = _find_inconclusive_differences(runs) if verdict == "exact" else ()
    if doubts:
        verdict, unstable = "not deterministic", doubts
    save_costs = _measure_saves(undisturbed)
    sent, sent_again = ({save.step: save.sent_bytes for save in run.saves} for run in (undisturbed, killed))
    kept = {step: max(0, size - sent_again.get(step, 0)) for step, size in sent.items()}
    return DrillReport(
        name=name,
        trainable=plan.trainable,
        verdict=verdict,
        steps=plan.steps,
        compared_metric_count=sum(map(len, compared.values())),
        compared_file_count=sum(len(undisturbed.manifests[step].files) for step in both),
        # The undisturbed run sent all new bytes. The repeated upload did not send those that the target had kept.
        kills=[
            replace(kill, kept_bytes=kept.get(kill.step, 0) if kill.victim == "upload" else 0) for kill in killed.kills
        ],
        missed_kill_count=len(plan.kills) - len(killed.kills),
        differences=remaining,
        unstable=unstable,
        is_inconclusive=bool(doubts),
        unrestored=[state for state in unrestored if remaining or state.kind in _LASTING_KINDS],
        save=save_costs,
        advice=_make_advice(plan, undisturbed, killed, save_costs),
    )


def _find_inconclusive_differences(runs: RunComparison) -> Sequence[Difference]:
    """If equal values prove nothing, return the differences without a kill, the best evidence first; otherwise none.

    If a value differs without a kill, or the training draws from an unseeded generator, equal values prove something
    only if one of them is a result, that is, does not follow from the step. If a metric (except a measured time)
    differs without a kill, one of the equal results must be in a checkpoint, and all generators must be seeded.

    Raises:
        TuneError: no value differs, and no value changes during the training.
    """
    undisturbed, killed, _, _, unstable, changing, generators = runs
    metrics, unexplained = (
        find_result_metrics(undisturbed, unstable),
        find_unexplained_differences(undisturbed, unstable),
    )
    both = sorted(undisturbed.manifests.keys() & killed.manifests.keys())
    files = set(changing) - {diff.location for diff in unstable} if both[-1:] > [killed.undisturbed_steps] else set()
    if generators and (unexplained or not (metrics or files)):
        return [*generators, *unstable]
    if unexplained and not files:
        return [*unexplained, *(diff for diff in unstable if diff not in unexplained)]
    if unstable:
        return () if metrics or files else unstable
    contents = {tuple((file.path, file.chunks) for file in undisturbed.manifests[step].files) for step in both}
    histories = collect_metric_histories(undisturbed).values()
    if len(contents) < 2 and all(len(set(map(repr, history.values()))) < 2 for history in histories):
        raise TuneError(
            "nothing to compare: no metric and no checkpoint changes from step to step, so all runs are equal; "
            "report a metric, or save a value, that training changes"
        )
    return ()


def _measure_saves(run: DrillRun) -> SaveCosts | None:
    if not run.saves:
        return None
    saved = {save.step for save in run.saves}
    waited = [record.wait_seconds for record in run.records if record.step - 1 in saved] or [0.0]
    return SaveCosts(
        save_count=len(run.saves),
        seconds=median(save.upload_seconds for save in run.saves),
        blocked_seconds=median(waited),
        size_bytes=int(median(save.size_bytes for save in run.saves)),
        sent_bytes=int(median(save.sent_bytes for save in run.saves)),
    )


def _make_advice(plan: DrillPlan, undisturbed: DrillRun, killed: DrillRun, save: SaveCosts | None) -> SaveAdvice | None:
    steps = [record.seconds for record in undisturbed.records if record.seconds > 0]
    if save is None or not steps:
        return None
    mean, cost, step_seconds = plan.hours_between_failures * 3600, max(save.blocked_seconds, 1e-3), median(steps)
    seconds = compute_optimal_interval(cost, mean)
    restart = median(kill.seconds for kill in killed.kills) if killed.kills else 0.0
    share = compute_lost_time_share(seconds, cost, restart, mean)
    return SaveAdvice(plan.hours_between_failures, seconds, max(1, round(seconds / step_seconds)), share)


# How often to save: the interval with the least time lost to failures and saves.


def compute_optimal_interval(save_seconds: float, seconds_between_failures: float) -> float:
    """Return the interval between saves, in seconds of training, that loses the least time to saves and failures.

    The first-order optimum is `sqrt(2 C M)`, for the cost `C` of a save and the mean time `M` between failures
    (J. W. Young, *A first order approximation to the optimum checkpoint interval*, CACM 17(9), 1974). This function
    returns the higher-order estimate if `C < 2 M`, and `M` otherwise
    (J. T. Daly, *A higher order estimate of the optimum checkpoint interval for restart dumps*, FGCS 22, 2006, eq. 37).
    The time of a restart does not change the optimum.

    Args:
        save_seconds: how long a save blocks the training.
        seconds_between_failures: the mean time between failures.
    """
    cost, mean = save_seconds, seconds_between_failures
    if cost >= 2 * mean:
        return mean
    ratio = cost / (2 * mean)
    return sqrt(2 * cost * mean) * (1 + sqrt(ratio) / 3 + ratio / 9) - cost


def compute_lost_time_share(
    interval_seconds: float, save_seconds: float, restart_seconds: float, seconds_between_failures: float
) -> float:
    """Return the share of the time that is lost to saves and failures; a failure costs half an interval and a restart.

    The first-order model of Young (1974) assumes that the time between failures is much longer than the interval.
    """
    cycle = interval_seconds + save_seconds
    return min(1.0, save_seconds / cycle + (cycle / 2 + restart_seconds) / seconds_between_failures)
