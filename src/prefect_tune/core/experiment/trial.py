"""The state of a trial as a frozen value, queries on it, and its status: the words in every table, report and event.

The words are Optuna's and Ray's. A journal holds phases. `trial_transitions` has the transitions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import StrEnum
from typing import Any, Literal, assert_never

from pydantic import Field

from prefect_tune.core.html_tables import (
    Html,
    cell_html,
    code,
    escaped,
    facts_table,
    format_html_value,
    paragraph,
    soft,
)
from prefect_tune.core.journal_events import (
    Cause,
    CheckpointOrigin,
    CheckpointRef,
    FinishKind,
    Owner,
    QuarantinedCheckpoint,
)
from prefect_tune.core.reasons import AnyReason
from prefect_tune.core.schedulers.base import Continue, Decision, Exploit
from prefect_tune.core.shown_text import first_line, plural, shown_size
from prefect_tune.core.storage.layout import CheckpointKey, TrialKey
from prefect_tune.core.usage_records import AttemptRecord
from prefect_tune.core.values import StepReport, TrialId, Value, flat

# The status of a trial: the words in every table, report, event and message, and the phases they are derived from.
#
# The words are Optuna's and Ray's. A journal holds phases; so a journal of any release is read with these words.


class Phase(StrEnum):
    """What can happen to a trial next, see `trial_transitions.NEXT`. Its values are on targets, in snapshots."""

    PENDING = "pending"
    RUNNING = "running"
    PAUSED = "paused"
    FINISHED = "finished"
    ERRORED = "errored"


ENDED = frozenset({Phase.FINISHED, Phase.ERRORED})


class Status(StrEnum):
    """The status of a trial, in the order of tables and counts."""

    COMPLETED = "completed"
    """It met its stop criterion, trained all of the scheduler's steps, or its trainable returned."""
    PRUNED = "pruned"
    """The scheduler ended it early."""
    INTERRUPTED = "interrupted"
    """It ended before it was done, and not by its scheduler: its run was stopped, suspended or killed, its attempt
    failed and is to be repeated, or a stop request named it. A resume continues it, except after a stop request."""
    ERRORED = "errored"
    """It failed, and its retries are spent."""
    RUNNING = "running"
    """It trains."""
    PAUSED = "paused"
    """The scheduler gave its slot to another trial, and may resume it."""
    PENDING = "pending"
    """It waits for a slot."""


_ENDED_SHORT = frozenset({Status.PRUNED, Status.INTERRUPTED, Status.PAUSED})


def status_of(trial: Trial) -> Status:
    """Return the status of a trial."""
    match trial.phase:
        case Phase.FINISHED:
            match trial.finish_kind:
                case FinishKind.PRUNED:
                    return Status.PRUNED
                case FinishKind.STOPPED:
                    return Status.INTERRUPTED
                case _:
                    return Status.COMPLETED
        case Phase.ERRORED:
            return Status.ERRORED
        case Phase.RUNNING:
            return Status.RUNNING
        case Phase.PAUSED:
            return Status.PAUSED
        case Phase.PENDING:
            return Status.PENDING if trial.cause is None else Status.INTERRUPTED
        case never:
            assert_never(never)


def status_label(status: str, step: int) -> str:
    """Return the status for people, with the step where it says how far the trial came: `pruned @3`, `completed`."""
    return f"{status} @{step}" if status in _ENDED_SHORT and step else str(status)


class PastEvent(Value):
    """A fact that is replayed to search and scheduler; `order` counts over all trials of the experiment."""

    order: int
    what: Literal["added", "decided", "resumed", "ended"]
    report: StepReport | None = None
    """With "decided": the report that was decided on; with "ended": the last report."""
    decision: Decision | None = None
    failed: bool = False
    """With "ended": whether the trial errored."""
    stopped: bool = False
    """With "ended": whether the scheduler ended it early."""


class Clone(Value):
    """A clone that another trial has of one of the trial's checkpoints."""

    step: int
    sequence: int
    trial: TrialId
    """The trial that has the clone."""
    clone_sequence: int
    """The sequence of the clone there."""


class Trial(Value):
    """One configuration being trained, as of the journal's last entry.

    For users: its name `trial`, its `config` and `status`, the `metrics` of its newest `step`, its `checkpoints`
    (`results.checkpoint` opens the newest), the `reason` of its end, `attempt`, the number of its attempts, and
    `trained_seconds`. The other fields are what the search needs to continue it.
    """

    trial: TrialId
    config: Mapping[str, Any]
    fingerprint: Mapping[str, str] = Field(default_factory=dict)
    of_search: bool = False
    """Whether a search proposed it; False for a single training, and in a flow of one's own."""
    phase: Phase = Phase.PENDING
    """What can happen to it next; its status is derived from it."""
    attempt: int = 0
    step: int = 0
    """The newest step reported in the present history (without steps that were lost)."""
    metrics: Mapping[str, Any] = Field(default_factory=dict)
    """The metrics of that step."""
    trained_seconds: float = 0.0
    """The training time up to that step, in seconds; 0 also if it was not measured."""
    checkpoints: tuple[CheckpointRef, ...] = ()
    """The live checkpoints, oldest first."""
    quarantined: tuple[int, ...] = ()
    """Sequences of checkpoints that must not be used."""
    quarantined_checkpoints: tuple[QuarantinedCheckpoint, ...] = ()
    """The quarantined checkpoints that were committed and are not retired: their bytes stay, for a reinstatement."""
    lost_checkpoints: int = 0
    """How many committed checkpoints were quarantined and not reinstated; with no other left, all progress is lost."""
    next_sequence: int = 1
    """The sequence of its next save. Each save, each attempt and each limit for running saves counts it up."""
    settled_from: int = 1
    """Manifests with lower sequences that the journal does not name are no checkpoints, and never become any."""
    collected_up_to: int = 0
    """The limit of the last retirement: blobs of earlier saves are reused only while a checkpoint refers to them."""
    clones: tuple[Clone, ...] = ()
    """The clones that other trials have of its live and retired checkpoints, whose bytes stay until then."""
    user_failures: int = 0
    """Failures of the user's code since the trial was added or requeued."""
    machine_failures: int = 0
    """Failures of the machine since the last commit."""
    same_start: int = 0
    """How many attempts in a row died before their first step, starting from the same checkpoint (or from nothing)."""
    blamed_checkpoints: int = 0
    """How many checkpoints were quarantined since the last commit because the trainable died from them."""
    started_from: int | None = None
    """The sequence that the last attempt restored; None for a start from nothing."""
    cloned: int | None = None
    """The sequence of the clone that it last continued from: of another trial's checkpoint."""
    wasted_steps: int = 0
    """Steps that are known to have been trained again."""
    wasted_at_least: bool = False
    """Whether they may be more: the owner of an attempt vanished, and its last reports with it."""
    reached: int | None = None
    """The last step that its last attempt is known to have trained, from the live status of an owner that has vanished.

    Only `wasted_steps` depends on it.
    """
    reached_seconds: float = 0.0
    """The training time up to that step; 0 where it is not known. Only the cost depends on it."""
    vanished: bool = False
    """Whether the owner of its last attempt vanished."""
    end_reason: AnyReason = ""
    """Why the trial ended, or why its last attempt did; empty while it runs. `reason` is the sentence."""
    cause: Cause | None = None
    """The cause of the last attempt's end; None if that attempt paused."""
    finish_kind: FinishKind | None = None
    """How it finished; None if it has not."""
    outbox: int | None = None
    """The number of the open outbox of an attempt on another machine; None where there is none."""
    outbox_count: int = 0
    """How many outboxes it has had; the next one has the next number."""
    post: int = 0
    """The last post of the open outbox that the journal has."""
    search_term: int = 0
    """The owner of the experiment that launched the attempt of the last outbox."""
    supervisor: Owner | None = None
    """The process that supervises its last attempt, on another machine; None where that is the journal's owner."""
    proposed: Mapping[str, object] | None = None
    """The configuration it was added with, if it has exploited another trial since."""
    exploits: Exploit | None = None
    """An exploit that the scheduler has decided and the trial has not carried out yet."""
    past: tuple[PastEvent, ...] = ()
    """The events that are replayed to search and scheduler when the experiment is resumed, oldest first."""
    records: tuple[AttemptRecord, ...] = ()
    """What each of its attempts used, the first one first; see `cost.cost_of`."""

    @property
    def status(self) -> Status:
        """Its status: completed, pruned, interrupted, errored, running, paused or pending."""
        return status_of(self)

    @property
    def reason(self) -> str:
        """Why the trial ended, or why its last attempt did, with the traceback of an error; empty while it runs."""
        return str(self.end_reason)

    @property
    def inherits(self) -> bool:
        """Whether its last report is that of the trial whose checkpoint it continues from: it has made none since."""
        newest = self.checkpoints[-1] if self.checkpoints else None
        return newest is not None and (newest.sequence, newest.step) == (self.cloned, self.step)

    @property
    def trained_again(self) -> str:
        """Its wasted steps in words; empty if none is known."""
        return wasted_words(self.wasted_steps, at_least=self.wasted_at_least)

    @property
    def wasted_count(self) -> str:
        """The number of its wasted steps: `3`, `at least 3`, or `none known`."""
        if self.wasted_at_least and not self.wasted_steps:
            return "none known"
        return f"{'at least ' * self.wasted_at_least}{self.wasted_steps}"

    @property
    def measured_seconds(self) -> float | None:
        """The training time in seconds; None if it was not measured: the saves of a flow of one's own need not say."""
        return None if self.step and not self.trained_seconds else self.trained_seconds

    def __repr__(self) -> str:
        """Return what a person asks of a trial, on one line."""
        facts = {"trial": self.trial, "status": str(self.status), "step": self.step}
        facts |= {"metrics": dict(self.metrics), "config": dict(self.config)}
        if self.status is Status.ERRORED:
            facts["reason"] = first_line(self.reason)
        return f"Trial({', '.join(f'{name}={_short(repr(value))}' for name, value in facts.items())})"

    __str__ = __repr__

    def _repr_html_(self) -> str:
        """Return the same for a notebook, with the trial's history, its newest checkpoint and its whole error."""
        is_errored = self.status is Status.ERRORED
        facts = {
            "metrics": facts_table({name: format_html_value(value) for name, value in flat(self.metrics).items()}),
            "config": facts_table({name: format_html_value(value) for name, value in flat(self.config).items()}),
            "trained": escaped(_effort(self)),
            "history": Html("<br>".join(_past_lines(self))),
            "checkpoint": _checkpoint_html(self),
            "error": code(self.reason) if is_errored else Html(""),
            "reason": Html("") if is_errored else escaped(first_line(self.reason)),
        }
        title = f"Trial {self.trial} · {status_label(self.status, self.step)}"
        return cell_html(paragraph(escaped(title), kind="pt-title"), facts_table(facts))


def with_report(trial: Trial, report: StepReport | None) -> Trial:
    """Return the trial updated to `report`, which may not be journaled yet; unchanged if it is not newer."""
    if report is None or report.step <= trial.step:
        return trial
    newest = {"step": report.step, "metrics": report.metrics, "trained_seconds": report.trained_seconds}
    return trial.model_copy(update=newest)


def newest_checkpoint(trial: Trial) -> CheckpointRef | None:
    """Return the checkpoint to resume from: the last one committed that is not quarantined."""
    return trial.checkpoints[-1] if trial.checkpoints else None


def newest_key(folder: TrialKey, trial: Trial) -> CheckpointKey | None:
    """Return the key of the newest checkpoint; None where there is none."""
    newest = newest_checkpoint(trial)
    return folder.checkpoint_key(newest) if newest else None


def clonable_checkpoint(trial: Trial, last_step: int | None = None) -> CheckpointRef | None:
    """Return the newest checkpoint from which a clone trains at least one more step; None if there is none.

    Args:
        trial: the trial that has the checkpoints.
        last_step: the step with which each trial ends at the latest; None if that is not known.
    """
    ends = [] if last_step is None else [last_step]
    if trial.status is Status.COMPLETED:
        ends.append(trial.step)
    return next((ref for ref in reversed(trial.checkpoints) if all(ref.step < end for end in ends)), None)


def clone_for(trial: Trial, ref: CheckpointRef, source: str) -> CheckpointRef:
    """Return the reference by which `trial` has a checkpoint of the trial `source` as its next one."""
    origin = ref.origin or CheckpointOrigin(trial=source, step=ref.step, sequence=ref.sequence)
    return ref.model_copy(update={"sequence": trial.next_sequence, "origin": origin, "pinned": False})


def live_keys(folder: TrialKey, trial: Trial) -> list[CheckpointKey]:
    """Return the keys of all live checkpoints, oldest first."""
    return [folder.checkpoint_key(each) for each in trial.checkpoints]


def is_live(trial: Trial, key: CheckpointKey) -> bool:
    """Return whether `key` is a live checkpoint of `trial`, or the origin of one."""
    return any(_has_key(trial, ref, key) for ref in trial.checkpoints)


def is_quarantined(trial: Trial, key: CheckpointKey) -> bool:
    """Return whether `key` is quarantined in `trial`: not used, but it can be reinstated."""
    return any(_has_key(trial, quarantined.checkpoint, key) for quarantined in trial.quarantined_checkpoints)


def _has_key(trial: Trial, ref: CheckpointRef, key: CheckpointKey) -> bool:
    at = ref.origin or ref
    name = ref.origin.trial if ref.origin is not None else trial.trial
    return (at.step, at.sequence, name) == (key.step, key.sequence, key.trial.trial)


def parent_of_next(folder: TrialKey, trial: Trial) -> CheckpointKey | None:
    """Return the checkpoint whose bytes the next save may reuse: the newest one, or none.

    None where the newest one is older than one that was quarantined: they may share the damaged blobs.
    """
    newest = newest_key(folder, trial)
    return None if newest is None or is_overtaken(trial, newest.sequence) else newest


def is_overtaken(trial: Trial, sequence: int) -> bool:
    """Return whether a checkpoint was quarantined after the save with this sequence had begun."""
    return any(sequence < each.since for each in trial.quarantined_checkpoints)


def reused_from(trial: Trial) -> int:
    """Return the first sequence whose blobs the next save may reuse, if no live checkpoint refers to them.

    Blobs begun before the last retirement may be deleted at any time; those that existed when a checkpoint
    was quarantined may be the damaged ones.
    """
    return max((trial.collected_up_to, *(each.since for each in trial.quarantined_checkpoints)))


def is_held(trial: Trial, key: CheckpointKey) -> bool:
    """Return whether `key` is no longer live in `trial`, and another trial has a clone of it."""
    has_clone = any((clone.step, clone.sequence) == (key.step, key.sequence) for clone in trial.clones)
    return has_clone and not is_live(trial, key)


def is_acceptable(trial: Trial, sequence: int) -> bool:
    """Return whether the save with this sequence may still become a checkpoint of `trial`.

    Not if it began before the last retirement: blobs that it reused may have been deleted since. Not if its
    sequence is at most that of a checkpoint in the journal: the trial has continued without it.
    """
    known = max((*(each.sequence for each in trial.checkpoints), *trial.quarantined), default=0)
    return sequence > known and sequence >= trial.collected_up_to


def is_collectable(state: Trial, key: CheckpointKey) -> bool:
    """Return whether the bytes of `key` may be deleted, now and at any later time.

    True if it is not live, not quarantined, without a clone, and was begun before the last retirement in `state`.
    Then no later save reuses it, here or in a process that takes over during the deletion, and it is not cloned.
    """
    if is_quarantined(state, key):
        return False
    return not is_live(state, key) and not is_held(state, key) and key.sequence < state.collected_up_to


# --------------------------------------------------------------------------------------------- as text, as HTML

_LONGEST = 400
_PAST_LINES = 8


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"


def wasted_words(steps: int, *, at_least: bool) -> str:
    """Return a number of wasted steps in words; empty if none is known."""
    return f"{'at least ' * at_least}{plural(steps, 'step', 'steps')}" if steps else ""


def _effort(trial: Trial) -> str:
    seconds = "" if trial.measured_seconds is None else f" in {trial.measured_seconds:,.1f} s"
    effort = f"{plural(trial.step, 'step', 'steps')}{seconds}"
    attempts = f", {plural(trial.attempt, 'attempt', 'attempts')}" if trial.attempt > 1 else ""
    again = f", {trial.trained_again} trained again" if trial.wasted_steps else ""
    return f"{effort}{attempts}{again}"


def _past_lines(trial: Trial) -> Iterator[Html]:
    """Yield the scheduler's decisions and the ends; of many the last ones."""
    found = [words for each in trial.past if (words := _words_of(each))]
    if len(found) > _PAST_LINES:
        yield soft(f"{plural(len(found) - _PAST_LINES, 'earlier event', 'earlier events')}")
    yield from map(escaped, found[-_PAST_LINES:])


def _words_of(past_event: PastEvent) -> str:
    at = f"step {past_event.report.step}: " if past_event.report else ""
    if past_event.what == "decided" and past_event.decision is not None:
        decision = past_event.decision
        reason = "" if isinstance(decision, Continue) else f", {first_line(decision.reason)}"
        return f"{at}{decision.type}{reason}"
    if past_event.what == "resumed":
        return f"{at}resumed"
    return f"{at}failed" if past_event.failed else ""


def _checkpoint_html(trial: Trial) -> Html:
    newest = newest_checkpoint(trial)
    if newest is None:
        return soft("none")
    others = f"; {len(trial.checkpoints)} are kept" if len(trial.checkpoints) > 1 else ""
    size = f", {shown_size(newest.size_bytes)}" if newest.size_bytes else ""
    how = f"results.checkpoint({trial.trial!r})"
    return Html(f"{escaped(f'step {newest.step}{size}{others}')}: <code>{escaped(how)}</code>")
