"""The Prefect events of an experiment: the events of its journal, and four others.

The journal is the truth: Prefect events may get lost, and no decision depends on them. A journal event becomes the
Prefect event `prefect-tune.<type>`, with the fields of the journal event as payload; `NOT_EMITTED` lists the
exceptions. Each other event is a class of this module: `name` is the name of the event, and the docstring says when the
event is emitted. `docs/events.md` lists all events.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import ClassVar

from prefect_tune.core.display_text import first_line, shorten
from prefect_tune.core.experiment.experiment import Experiment
from prefect_tune.core.experiment.summary import Losses, compute_losses, rank_checkpoints
from prefect_tune.core.experiment.trial_transitions import ENDED_PHASES, Trial, newest_checkpoint
from prefect_tune.core.journal_events import (
    AttemptEnded,
    CheckpointQuarantined,
    Event,
    StopRequested,
    TrialErrored,
    TrialFinished,
    TrialPaused,
)
from prefect_tune.core.reasons import get_reason_code
from prefect_tune.core.search.objective import Objective
from prefect_tune.core.usage_records import GroupUsage
from prefect_tune.core.values import Json, Metrics, Value, get_metric


class BestModelTracker:
    """Tracks the best model: compares each commit, and the last step of each ended trial, with the best model so far.

    Several metrics are compared in order, like tuples. Without an objective, no result is better than another result.
    """

    def __init__(self, objective: Objective | None, experiment: Experiment) -> None:
        """Start with the best model in `experiment`, the state before the first `on_commit` or `on_trial_ended`."""
        self._objective = objective
        self._experiment = experiment.key
        self._losses: Losses | None = None
        self.trial: str | None = None
        """The trial of the best model; None if no trial can be compared."""
        for trial in experiment.trials.values():
            ended = [trial.metrics] if trial.phase in ENDED_PHASES else []
            for metrics in [*(checkpoint.metrics for checkpoint in trial.checkpoints), *ended]:
                self._record_if_best(trial.id, metrics)

    def on_commit(self, trial: Trial) -> BestImproved | None:
        """Return an event if the trial's newest checkpoint is better than all earlier models; otherwise None."""
        if (newest := newest_checkpoint(trial)) is None or not self._record_if_best(trial.id, newest.metrics):
            return None
        key = self._experiment.trial_key(trial.id).checkpoint_key(newest)
        return self._make_best_improved(trial.id, newest.step, newest.metrics, key.manifest_path)

    def on_trial_ended(self, trial: Trial) -> BestImproved | None:
        """Return an event if the trial's last step, saved or not, is better than all earlier models; otherwise None."""
        is_best = self._record_if_best(trial.id, trial.metrics)
        return self._make_best_improved(trial.id, trial.step, trial.metrics, None) if is_best else None

    def _record_if_best(self, trial: str, metrics: Metrics) -> bool:
        """Record a result that is better than all earlier results; return whether it is better."""
        losses = None if self._objective is None else compute_losses(metrics, self._objective)
        if losses is None or (self._losses is not None and losses >= self._losses):
            return False
        self._losses, self.trial = losses, trial
        return True

    def _make_best_improved(self, trial: str, step: int, metrics: Metrics, manifest: str | None) -> BestImproved:
        compared = () if self._objective is None else self._objective.metrics
        first = {name: get_metric(metrics, name) for name in compared}
        return BestImproved(trial=trial, step=step, metrics={**first, **metrics}, manifest=manifest)


def find_best_checkpoints(experiment: Experiment, objective: Objective | None) -> Mapping[str, int]:
    """Return the best checkpoint of all, as its trial and sequence; if trials tie, one checkpoint of each.

    The result includes the model that `BestModelTracker` reported last, if it is saved. Empty without an objective.
    """
    if objective is None:
        return {}
    by_trial = {t.id: rank_checkpoints(t.checkpoints, objective)[:1] for t in experiment.trials.values()}
    best = [(trial, ref, compute_losses(ref.metrics, objective)) for trial, refs in by_trial.items() for ref in refs]
    best_losses = min((losses for _, _, losses in best if losses is not None), default=None)
    return {trial: ref.sequence for trial, ref, losses in best if losses == best_losses}


PAYLOAD_VERSION = 2
"""The version of the payloads. It increases if a field is renamed or changes its meaning, but not for a new field."""
NOT_EMITTED = frozenset(
    (
        *("decision-made", "owner-changed", "step-reported", "trial-added"),
        *("checkpoints-retired", "slot-freed", "attempt-launched", "post-received", "outbox-closed"),
        *("checkpoints-adopted", "experiment-configured", "experiment-forked", "deletion-started"),
    )
)
"""The types of journal events that are not emitted, because they are too frequent or only the journal needs them."""
LABEL_FIELDS = ("trial", "status", "cause", "reason_code", "kind", "crashes_trainable", "end")
"""The payload's fields that are also labels of the event's resource, because automations match labels, not payloads."""
_MAX_TEXT_LENGTH = 500
_MAX_ITEM_COUNT = 20


class ExperimentEvent(Value):
    """An event that concerns an experiment, but is not in its journal."""

    name: ClassVar[str]


class ExperimentStarted(ExperimentEvent):
    """A run starts the experiment, or resumes it."""

    name: ClassVar[str] = "prefect-tune.experiment.started"
    term: int
    """The number of the owner: 1 for the first run."""
    trials: Mapping[str, int]
    """The number of trials by status."""


class TrialStalled(ExperimentEvent):
    """A running trial has not reported for an unusually long time."""

    name: ClassVar[str] = "prefect-tune.experiment.stalled"
    trial: str
    silent_seconds: float


class BestImproved(ExperimentEvent):
    """A checkpoint or an ended trial is better than all earlier models; emitted at most every 30 s, and at the end."""

    name: ClassVar[str] = "prefect-tune.experiment.best"
    trial: str
    step: int
    metrics: Metrics
    manifest: str | None
    """The path of the checkpoint's manifest; None if the step was not saved."""


class ExperimentEnded(ExperimentEvent):
    """This run has ended: `finished` with no trial left, `stopped`, `superseded` by another run, or `failed`."""

    name: ClassVar[str] = "prefect-tune.experiment.ended"
    end: str
    message: str
    """Why the run ended before the experiment was finished; empty for `finished`."""
    trials: Mapping[str, int]
    best: str | None
    """The trial with the best model so far; None if no trial can be compared."""
    dropped: int
    """The number of trial events that the rate limit dropped."""


def get_event_name(event: Event) -> str:
    """Return the name of the Prefect event for a journal event: `prefect-tune.<type>`, except for a reinstatement."""
    if isinstance(event, CheckpointQuarantined) and not event.quarantined:
        return "prefect-tune.checkpoint-reinstated"
    return f"prefect-tune.{event.type}"


def make_event_payload(event: Event | ExperimentEvent, after: Trial | None = None) -> dict[str, object]:
    """Return an event's payload as JSON, with the version; if the event ends an attempt, add values of `after`.

    A reason becomes a sentence, and a `reason_code` for automations to match; the code is None for a user's own text.
    Values are truncated by `truncate_json`.
    """
    fields = event.model_dump(mode="json", exclude={"type"})
    if (reason := getattr(event, "reason", None)) is not None:
        fields |= {"reason": str(reason), "reason_code": get_reason_code(reason)}
    if isinstance(use := getattr(event, "usage", None), GroupUsage):
        fields["usage"] |= {"ends": [{**end.model_dump(), "how": str(end.how)} for end in use.ends]}
    if isinstance(event, StopRequested) and event.refused is not None:
        fields["refused"] = str(event.refused)
    if after is not None and isinstance(event, AttemptEnded | TrialErrored | TrialFinished | TrialPaused):
        outcome = {"attempt", "step", "metrics", "recomputed_steps", "recomputed_is_lower_bound"}
        fields |= {"status": after.status.value, **after.model_dump(mode="json", include=outcome)}
    return {"version": PAYLOAD_VERSION, **{name: truncate_json(value) for name, value in fields.items()}}


def make_event_labels(payload: Mapping[str, object]) -> dict[str, str]:
    """Return the labels of an event's resource, from the event's payload; bools become `true` and `false`."""
    labels = {name: payload[name] for name in LABEL_FIELDS if payload.get(name) is not None}
    texts = {name: str(value).lower() if isinstance(value, bool) else str(value) for name, value in labels.items()}
    return {f"prefect-tune.{name}": word for name, word in texts.items()}


def truncate_json(value: Json) -> Json:
    """Truncate a JSON value: texts to their first line and 500 characters, lists and dicts to 20 items."""
    match value:
        case str():
            return shorten(first_line(value), _MAX_TEXT_LENGTH)
        case dict():
            return {name: truncate_json(item) for name, item in islice(value.items(), _MAX_ITEM_COUNT)}
        case list():
            return [truncate_json(item) for item in value[:_MAX_ITEM_COUNT]]
        case _:
            return value


@dataclass
class TokenBucket:
    """A token bucket for events: at most `capacity` events in a burst, and `per_second` events on average."""

    capacity: float
    per_second: float
    _tokens: float = field(init=False)
    _updated_at: float = field(init=False, default=0.0)

    def __post_init__(self) -> None:
        self._tokens = self.capacity

    def try_take_tokens(self, count: int, now: float) -> bool:
        """Take `count` tokens if they are available; return whether they were taken."""
        self._tokens = min(self.capacity, self._tokens + max(0.0, now - self._updated_at) * self.per_second)
        self._updated_at = max(self._updated_at, now)
        if self._tokens < count:
            return False
        self._tokens -= count
        return True
