"""The result of a drill: its verdict, what differs, what was probably forgotten, and what saves and kills cost."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import sqrt
from statistics import median
from typing import Any, Literal, NamedTuple, TypeAlias

from prefect_tune.core.errors import TuneError
from prefect_tune.core.shown_text import plural, shown_size
from prefect_tune.drills.evidence import (
    CHECKPOINTS,
    Difference,
    DrillRun,
    Kill,
    Record,
    metric_histories,
    result_metrics,
    unexplained_metrics,
)
from prefect_tune.drills.plan import DrillPlan
from prefect_tune.drills.values import MISSING, UNEXPECTED, scalars_in

_NOUNS = {
    "global": "a global random generator",
    "rng": "the state of a random generator",
    "schedule": "the learning-rate schedule",  # it sets the rate of the optimizer
    "scaler": "the gradient scaler",
    "optimizer": "the optimizer",
    "data": "the place in the data",
    "counter": "a counter",
    "model": "the model",
    "value": "a value",
    "state": "an attribute",
    "metric": "a variable that holds a metric",
}
_GLOBAL = {
    "random": ("Python's generator", "random.getstate()"),
    "numpy.random": ("NumPy's global generator", "numpy.random.get_state()"),
    "torch": ("torch's generator of the CPU", "torch.get_rng_state()"),
}
_ORDER = list(_NOUNS)
_MOST = 6
_ADVICE = {
    "data": "save the order and the position, or use ResumableLoader",
    "metric": "save and load it if the next step reads it",
}
_FILLED = frozenset({"optimizer", "schedule", "scaler"})
"""Kinds whose states have more entries once they are used, as the moments of an optimizer."""
_ABSENT = "absent"
LASTING = frozenset({"global", "rng", "optimizer", "schedule", "scaler"})
"""Kinds whose states matter later if they do not yet; an attribute may be anything."""


@dataclass(frozen=True, slots=True)
class Forgotten:
    """Something that was not restored."""

    kind: str
    """`global`, `rng`, `optimizer`, `schedule`, `scaler`, `data`, `model`, `counter`, `value`, `state` or `metric`."""
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
        values = f" ({self.found}, expected {self.expected}{later})"
        if _is_digest(self.found) or _is_digest(self.expected):
            values = f" ({_ABSENT})" if self.found == _ABSENT else ""
        noun = "a local variable" if self.is_local and self.kind == "state" else _NOUNS[self.kind]
        return f"{noun}, `{self.name}`{values}, after step {self.step}: {_ADVICE.get(self.kind, 'save and load it')}"


def _is_digest(text: str) -> bool:
    return len(text.strip("'")) == 16 and set(text) <= set("'0123456789abcdef")  # a generator's is a text


def forgotten_in(
    undisturbed: DrillRun,
    killed: DrillRun,
    again: DrillRun | None = None,
    saved: Collection[str] = (),
    differs_at: int | None = None,
) -> Sequence[Forgotten]:
    """Return what was not restored at the first resume that shows it, the likeliest first.

    Compared are the states after the checkpoint was loaded (of a function, after the next step) with those of the
    undisturbed run. A state that training does not change, or that differs without a kill up to then, is no evidence;
    nor is a resume after the runs have differed, at step `differs_at`. Of a function all that follows from a sum
    differs after that step, whatever the cause: it is named only if no generator, count or rate differs, a variable
    that holds a metric only if nothing but it and what is `saved` in the checkpoints differs, and what is saved only if
    nothing else does.
    """
    known = {each.step: each for each in undisturbed.records}
    seen = {pair for each in undisturbed.records for pair in each.states.items()}
    values = Counter(name for name, _ in seen)
    changing = {name for name, count in values.items() if count > 1}
    without_kills = [*(each for each in killed.records if each.attempt == 1), *(again.records if again else ())]
    for record in killed.restarts:
        reference = known.get(record.step)
        if reference is None or (differs_at is not None and record.resumed_from >= differs_at):
            continue
        evidence = changing - {
            name
            for each in without_kills
            for name, found in each.states.items()
            if each.step <= record.step and each.step in known and known[each.step].states.get(name) != found
        }
        if found := list(_unlike(record, reference, evidence)):
            likely = found if record.is_restored else _likely(found, killed.metrics.get(record.step, {}), saved)
            optimizers = {_owner(name) for name in reference.states if name.startswith("optimizer ")}
            roots = _roots(likely, has_one_optimizer=len(optimizers) == 1)
            return sorted(roots, key=lambda each: (not _is_cause(each), _ORDER.index(each.kind)))[:_MOST]
    return []


def _likely(found: Sequence[Forgotten], metrics: Mapping[str, object], saved: Collection[str]) -> Sequence[Forgotten]:
    """Return what of the differences one step after a resume may be their cause."""
    results = {repr(value) for _, value in scalars_in(metrics) if isinstance(value, float)}
    unsaved = [each for each in found if each.name.partition(".")[0] not in saved]
    plain = [each for each in unsaved if each.found not in results]
    held = [replace(each, kind="metric") for each in unsaved if each.kind in {"value", "state"}]
    return (
        [each for each in found if _is_cause(each) and each.found not in results] or plain or held or unsaved or found
    )


def _is_cause(found: Forgotten) -> bool:
    """Whether it is no result of another difference one step later: sums are, generators and counts are not."""
    return found.kind in {"global", "rng"} or not (_is_digest(found.found) or found.kind == "value")


def _unlike(record: Record, reference: Record, evidence: Collection[str]) -> Iterator[Forgotten]:
    owners = {_owner(name) for name in record.states}
    for name, expected in reference.states.items():
        kind, _, path = name.partition(" ")
        found = record.states.get(name)
        if found is None and kind in _FILLED and _owner(name) in owners:
            found = _ABSENT  # such as the moments of a new optimizer
        if found in {None, expected} or name not in evidence:
            continue
        if "<" not in {found[:1], expected[:1]}:
            yield Forgotten(kind, path, record.resumed_from, found, expected, is_local=not record.is_restored)


def _owner(name: str) -> str:
    """Return the kind and the attribute or variable of a state, without its path in it."""
    return name.partition(".")[0]


def _roots(found: Sequence[Forgotten], *, has_one_optimizer: bool) -> Sequence[Forgotten]:
    """Return one of each object: a counter in it if there is one, since that says the most.

    The rate of the one optimizer follows from its schedule.
    """
    first: dict[tuple[str, str], Forgotten] = {}
    is_scheduled = has_one_optimizer and any(each.kind == "schedule" for each in found)
    own = [each for each in found if not (is_scheduled and each.kind == "optimizer" and each.name.endswith(".lr"))]
    for each in sorted(own, key=lambda one: _is_digest(one.found)):
        owner = each.name if each.kind in {"global", "rng"} else each.name.partition(".")[0]
        first.setdefault((each.kind, owner), each)
    return list(first.values())


Verdict: TypeAlias = Literal["exact", "not exact", "not deterministic"]
_SHOWN, _SHOWN_LEFT_OUT = 8, 8
_SET_SEEDS = "set seeds, and the library's deterministic mode"
_NAME_ALIKE = "give the files of a checkpoint the same names in each run"
_WHO = {
    "trial": "the trial",
    "rank": "another rank",
    "search": "the search",
    "upload": "the search, in an upload",
}


class Runs(NamedTuple):
    """The runs of a drill, and what differs between them."""

    undisturbed: DrillRun
    killed: DrillRun
    again: DrillRun | None
    """The second undisturbed one; None if there was no need of it."""
    differences: Sequence[Difference]
    """Between the first two."""
    unstable: Sequence[Difference]
    """Without a kill: between the undisturbed ones, and before the first kill."""
    changing: Collection[tuple[str, str]]
    """The places in checkpoints that hold results of training: no counts of steps, and nothing that may be left out."""
    generators: Sequence[Difference] = ()
    """The generators without a seed from which the training draws."""


@dataclass(frozen=True)
class SaveCosts:
    """What a save of the undisturbed run costs; medians."""

    saves: int
    seconds: float
    """Of an upload."""
    blocked_seconds: float
    """In which training waited: to write the files, and for the upload."""
    size_bytes: int
    sent_bytes: int
    """The bytes that were not on the target yet."""


@dataclass(frozen=True)
class Advice:
    """How often to save, for a mean time between failures."""

    hours_between_failures: float
    seconds: float
    """Of training between two saves; Daly (2006)."""
    steps: int
    """The same in steps of this training."""
    lost_share: float
    """Of the time, to saves, failures and restarts."""


@dataclass(frozen=True)
class DrillReport:
    """What a drill found."""

    name: str
    """The beginning of the names of its experiments."""
    trainable: str
    """Its import path."""
    verdict: Verdict
    """`exact`; `not exact`; or `not deterministic`, if two runs differ without a kill."""
    steps: int
    compared_metrics: int
    """Values of metrics."""
    compared_files: int
    """Files of checkpoints."""
    kills: Sequence[Kill]
    """The kills that were made, each with what followed it."""
    missed_kills: int
    """Kills that were planned and not made, since no step began after theirs, or no upload that could be cut."""
    differences: Sequence[Difference]
    """The first one of each metric, file, tensor or key, by step, without those of `unstable`."""
    unstable: Sequence[Difference]
    """What differs without a kill too: what training changes first."""
    shows_nothing: bool
    """Whether what is the same in all runs may be so in any training, such as counts of steps."""
    forgotten: Sequence[Forgotten]
    """What was probably not restored."""
    save: SaveCosts | None
    """None if nothing was saved."""
    advice: Advice | None
    """How often to save; None if nothing was saved."""

    @property
    def is_exact(self) -> bool:
        """Whether the run that was killed has the metrics and checkpoints of the undisturbed one."""
        return self.verdict == "exact"

    def fields(self) -> dict[str, object]:
        """Return the report as JSON values."""
        fields: dict[str, Any] = {**asdict(self), "is_exact": self.is_exact}
        for difference in (*fields["differences"], *fields["unstable"]):
            del difference["what"]["path"], difference["what"]["scalars"]  # for comparisons
        return fields

    def lines(self) -> Iterator[str]:
        """Yield the report as text."""
        yield self._headline()
        if self.verdict == "not exact":
            first = self.differences[0]
            yield f"  {f'equal up to step {first.step - 1}; ' if first.step > 1 else ''}{self._compared()}"
            yield from _listed("", _summed(self.differences)[1:], _SHOWN)
        without_kills = _summed(self.unstable)
        if self.verdict == "not deterministic":  # the headline has the first
            yield from _listed("differs without a kill too: ", without_kills[1:], _SHOWN_LEFT_OUT)
            if self.shows_nothing:
                yield f"  the rest is the same, but shows little of the training: {self._compared()}"
        else:
            yield from _listed("differs without a kill too, and is left out: ", without_kills, _SHOWN_LEFT_OUT)
        yield from self._causes()
        yield from self._costs()

    def summary(self) -> str:
        """Return the verdict, and what was probably not restored: the message of `NotExact`."""
        return "\n".join((self._headline(), *self._causes()))

    def _causes(self) -> Iterator[str]:
        no_effect = f"no effect in {self.steps} steps, but not restored"
        found = no_effect if self.is_exact else "probably not restored"
        for each in self.forgotten:
            yield f"  {found}: {each}"
        if self.verdict == "not exact" and not self.forgotten:
            yield self._hint()

    def _hint(self) -> str:
        if all(each.place == (CHECKPOINTS, "") for each in self.differences):
            return "  all that is in both runs is equal: save a checkpoint at the same steps after a resume, too"
        if all(each.what.is_of_bytes for each in self.differences):
            return (
                "  all metrics are equal, and only bytes of files that the drill cannot read differ; the values in "
                "them may be equal: to compare them, save arrays, JSON or skops, or use PartialFitTrainable"
            )
        return (
            "  nothing that the drill can see was left out: look for an iterator over the data, a generator of a "
            "library of its own, or files that the training reads"
        )

    def _headline(self) -> str:
        if self.verdict == "exact":
            times = plural(len(self.kills), "time", "times")
            return f"exact: the run that was killed {times} is the same; {self._compared()}"
        if self.verdict == "not deterministic":
            first = self.unstable[0]
            is_named = first.what.what in {MISSING, UNEXPECTED}
            return (
                f"not deterministic: two runs differ without a kill, at {first}. A resume cannot be shown to be exact "
                "before they are the same: "
                f"{_NAME_ALIKE if is_named else _SET_SEEDS}"
            )
        return f"not exact: first difference at {_summed(self.differences)[0]}"

    def _compared(self) -> str:
        metrics = plural(self.compared_metrics, "metric value", "metric values")
        files = plural(self.compared_files, "checkpoint file", "checkpoint files")
        return f"{metrics} and {files} of {self.steps} steps compared"

    def _costs(self) -> Iterator[str]:
        for each in self.kills:
            again = f"trained {plural(each.steps_again, 'step', 'steps')} again"
            kept = f", {shown_size(each.kept_bytes)} of the upload kept" if each.victim == "upload" else ""
            yield (
                f"  kill of {_WHO[each.victim]} after step {each.step}: resumed from step {each.resumed_from}, "
                f"{again}, next step done after {each.seconds:.1f} s{kept}"
            )
        if self.missed_kills:
            missed = plural(self.missed_kills, "kill was", "kills were")
            yield f"  {missed} not made: no step or upload began after their step"
        if self.save is not None:
            found = self.save
            yield (
                f"  a save: {shown_size(found.size_bytes)}, {shown_size(found.sent_bytes)} of it sent, in "
                f"{found.seconds:.2f} s; training waits {found.blocked_seconds:.2f} s"
            )
        if self.advice is not None:
            advice = self.advice
            yield (
                f"  with a failure every {advice.hours_between_failures:g} h: save every {advice.seconds:.0f} s "
                f"({plural(advice.steps, 'step', 'steps')}), which loses the least time, {advice.lost_share:.1%}"
            )


def _listed(before: str, differences: Sequence[str], shown: int) -> Iterator[str]:
    for each in differences[:shown]:
        yield f"  {before}{each}"
    if len(differences) > shown:
        yield f"  … and {len(differences) - shown} more"


def _summed(differences: Sequence[Difference]) -> Sequence[str]:
    """Return the differences as text, those within one list as one."""
    lists: dict[tuple[str, str], list[Difference]] = {}
    for each in differences:
        lists.setdefault((each.what.file, re.sub(r"(\.|^)\d+(\.\d+)*$", "", each.what.key)), []).append(each)
    return [
        f"{found[0]}" if len(found) == 1 else f"{found[0]}; the first of {len(found):,} values of `{name or file}`"
        for (file, name), found in lists.items()
    ]


def report_of(plan: DrillPlan, name: str, runs: Runs) -> DrillReport:
    """Return the report of the runs of a drill.

    Raises:
        TuneError: all that could be compared after the first resume differs without a kill.
    """
    undisturbed, killed, again, differences, unstable, changing, _ = runs
    places = {each.place for each in unstable}
    resumed_at = killed.undisturbed_steps
    if max(undisturbed.manifests, default=0) > resumed_at >= max(killed.manifests, default=0):
        places -= {(CHECKPOINTS, "")}  # none was saved after a resume
    left = [each for each in differences if each.place not in places]
    saved = {part for each in differences for part in re.split(r"[./]", f"{each.what.file}.{each.what.key}")}
    differs_at = left[0].step if left else None
    forgotten = forgotten_in(undisturbed, killed, again, saved, differs_at)
    # What two undisturbed runs do not share matters if it is in a checkpoint and training changes it.
    results = [each.step for each in unstable if each.place in changing]
    verdict: Verdict = "not exact" if left else "exact"
    if results and (not left or min(results) <= left[0].step):
        verdict = "not deterministic"
    compared = {place: values for place, values in metric_histories(undisturbed).items() if place not in places}
    both = undisturbed.manifests.keys() & killed.manifests.keys()
    if verdict == "exact" and not compared and max(both, default=0) <= resumed_at:
        raise TuneError(
            "nothing to compare after the resume: all metrics differ without a kill, and no checkpoint follows it; "
            "train more --steps, or save more often (--save-every)"
        )
    unstable = sorted(unstable, key=lambda each: (each.place not in changing, each.step))
    doubts = _doubts(runs) if verdict == "exact" else ()
    if doubts:
        verdict, unstable = "not deterministic", doubts
    save = _save_costs(undisturbed)
    sent, sent_again = ({each.step: each.sent_bytes for each in run.saves} for run in (undisturbed, killed))
    kept = {step: max(0, size - sent_again.get(step, 0)) for step, size in sent.items()}
    return DrillReport(
        name=name,
        trainable=plan.trainable,
        verdict=verdict,
        steps=plan.steps,
        compared_metrics=sum(map(len, compared.values())),
        compared_files=sum(len(undisturbed.manifests[step].files) for step in both),
        # The undisturbed run has sent all that was new; the upload after the resume did not send again what was there.
        kills=[
            replace(each, kept_bytes=kept.get(each.step, 0) if each.victim == "upload" else 0) for each in killed.kills
        ],
        missed_kills=len(plan.kills) - len(killed.kills),
        differences=left,
        unstable=unstable,
        shows_nothing=bool(doubts),
        forgotten=[each for each in forgotten if left or each.kind in LASTING],
        save=save,
        advice=_advice(plan, undisturbed, killed, save),
    )


def _doubts(runs: Runs) -> Sequence[Difference]:
    """Return what differs without a kill, the first reason first, if what is the same may be so in any training.

    A count of steps and a rate that follows from them are the same whatever was drawn, so they show nothing if metrics
    differ. Then the checkpoints have to show that the training is deterministic; if it draws from a generator without
    a seed, metrics that differ and are not measured times show that it is not.

    Raises:
        TuneError: nothing differs, and nothing changes either.
    """
    undisturbed, killed, _, _, unstable, changing, generators = runs
    metrics, unexplained = result_metrics(undisturbed, unstable), unexplained_metrics(undisturbed, unstable)
    both = sorted(undisturbed.manifests.keys() & killed.manifests.keys())
    files = set(changing) - {each.place for each in unstable} if both[-1:] > [killed.undisturbed_steps] else set()
    if generators and (unexplained or not (metrics or files)):
        return [*generators, *unstable]
    if unexplained and not files:
        return [*unexplained, *(each for each in unstable if each not in unexplained)]
    if unstable:
        return () if metrics or files else unstable
    contents = {tuple((file.path, file.chunks) for file in undisturbed.manifests[step].files) for step in both}
    if len(contents) < 2 and all(
        len(set(map(repr, each.values()))) < 2 for each in metric_histories(undisturbed).values()
    ):
        raise TuneError(
            "nothing to compare: no metric and no checkpoint changes from step to step, so that all trainings are the "
            "same; report a metric that training changes, or save what it changes"
        )
    return ()


def _save_costs(run: DrillRun) -> SaveCosts | None:
    if not run.saves:
        return None
    saved = {each.step for each in run.saves}
    waited = [each.waited for each in run.records if each.step - 1 in saved] or [0.0]
    return SaveCosts(
        saves=len(run.saves),
        seconds=median(each.upload_seconds for each in run.saves),
        blocked_seconds=median(waited),
        size_bytes=int(median(each.size_bytes for each in run.saves)),
        sent_bytes=int(median(each.sent_bytes for each in run.saves)),
    )


def _advice(plan: DrillPlan, undisturbed: DrillRun, killed: DrillRun, save: SaveCosts | None) -> Advice | None:
    steps = [each.seconds for each in undisturbed.records if each.seconds > 0]
    if save is None or not steps:
        return None
    mean, cost, step_seconds = plan.hours_between_failures * 3600, max(save.blocked_seconds, 1e-3), median(steps)
    seconds = best_interval(cost, mean)
    restart = median(each.seconds for each in killed.kills) if killed.kills else 0.0
    share = lost_share(seconds, cost, restart, mean)
    return Advice(plan.hours_between_failures, seconds, max(1, round(seconds / step_seconds)), share)


# How often to save: the interval at which failures and saves together cost the least time.


def best_interval(save_seconds: float, seconds_between_failures: float) -> float:
    """Return the seconds of training between two saves that lose the least time to saves and failures.

    The first-order optimum is `sqrt(2 C M)`, for the cost `C` of a save and the mean time `M` between failures
    (J. W. Young, *A first order approximation to the optimum checkpoint interval*, CACM 17(9), 1974). This is the
    higher-order estimate for `C < 2 M`; beyond that it is `M`
    (J. T. Daly, *A higher order estimate of the optimum checkpoint interval for restart dumps*, FGCS 22, 2006, eq. 37).
    The time of a restart does not change the optimum.

    Args:
        save_seconds: how long a save blocks the training.
        seconds_between_failures: the mean time between failures, in the same seconds.
    """
    cost, mean = save_seconds, seconds_between_failures
    if cost >= 2 * mean:
        return mean
    ratio = cost / (2 * mean)
    return sqrt(2 * cost * mean) * (1 + sqrt(ratio) / 3 + ratio / 9) - cost


def lost_share(interval: float, save_seconds: float, restart_seconds: float, seconds_between_failures: float) -> float:
    """Return the share of time lost with an interval: to saves, and per failure to half an interval and the restart.

    The first-order model of Young (1974), for failures that are rare beside the interval.
    """
    per_failure = (interval + save_seconds) / 2 + restart_seconds
    return min(1.0, save_seconds / (interval + save_seconds) + per_failure / seconds_between_failures)
