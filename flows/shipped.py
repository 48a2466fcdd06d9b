"""The automations that come with this package: when each fires, and what it does then. Values, known to no server yet.

Two start again what died without a word. Prefect's own *retries* do not: nobody is left to carry them out. The others
are alerts on our own events (`prefect_tune.core.news`), which do what they are installed with.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta

from prefect.automations import ChangeFlowRunState, EventTrigger, Posture
from prefect.client.schemas.objects import StateType
from prefect.events.actions import ActionTypes

from prefect_tune.core.news import (
    BestImproved,
    BudgetNearlySpent,
    CheckpointCorrupt,
    ExperimentFailed,
    Lagging,
    News,
    TrialStale,
)

__all__ = ["Shipped", "shipped"]

_PREFIX = "prefect-tune: "
_TAG = "prefect-tune"
_ATTEMPTS = "train-trial"
_FLOW_RUN = "prefect.flow-run."
_UNTIL = "Until it is given an action, it is seen in the event feed only."
_COOL_DOWN = timedelta(seconds=30)
# Who does one of these has been started again already, or is to be left alone. A heartbeat: it is alive after all.
_GOES_ON = (
    "Pending",
    "Submitting",
    "Running",
    "Retrying",
    "AwaitingRetry",
    "Scheduled",
    "Late",
    "Resuming",
    "heartbeat",
)
_IS_OVER = ("Completed", "Failed", "Cancelled", "Cancelling", "Suspended", "Paused", "Skipped")


@dataclass(frozen=True, slots=True)
class Shipped:
    """One automation."""

    name: str
    description: str
    trigger: EventTrigger
    acts: Sequence[ActionTypes] = ()
    """What it does; nothing for an alert, which does what it is installed with."""
    says: str = ""
    """What an alert says, as a template of Prefect's."""

    @property
    def is_alert(self) -> bool:
        """Whether what it does is for the user to say."""
        return not self.acts


def shipped(heartbeat_window: timedelta) -> Mapping[str, Shipped]:
    """Return all automations by their names.

    Args:
        heartbeat_window: how long a run may be silent: at least two of its heartbeats.
    """
    every = [_start_again(), _silent(heartbeat_window), *_ALERTS]
    return {each.name: each for each in every}


def _start_again() -> Shipped:
    """Not at once: the runner says that a run has crashed, and some seconds later its worker says so too.

    Started again in between, the run is two processes. Attempts of trials are started again by their search.
    """
    return Shipped(
        f"{_PREFIX}start again after a crash",
        f"{_COOL_DOWN.seconds} s after a run of a deployment tagged {_TAG!r} has crashed it is to run again, as the "
        "same run: it goes on from its last commit. Should it be alive all the same, only one of the two commits.",
        EventTrigger(
            posture=Posture.Proactive,
            match={"prefect.resource.id": f"{_FLOW_RUN}*"},
            match_related=[_tagged(), {"prefect.resource.role": "flow", "prefect.resource.name": f"!{_ATTEMPTS}"}],
            after={f"{_FLOW_RUN}Crashed"},
            expect={f"{_FLOW_RUN}{each}" for each in (*_GOES_ON, *_IS_OVER)},
            for_each={"prefect.resource.id"},
            threshold=1,
            within=_COOL_DOWN,
        ),
        [
            ChangeFlowRunState(
                state=StateType.SCHEDULED, name="AwaitingRetry", message="It crashed: prefect-tune goes on with it."
            )
        ],
    )


def _silent(window: timedelta) -> Shipped:
    """A machine that is gone says nothing: the absence of heartbeats does."""
    return Shipped(
        f"{_PREFIX}take a silent run for crashed",
        f"A run of a deployment tagged {_TAG!r} that has sent no heartbeat for {window.total_seconds():g} s is marked "
        "Crashed: its machine is gone. Runs say how often they send one by PREFECT_FLOWS_HEARTBEAT_FREQUENCY.",
        EventTrigger(
            posture=Posture.Proactive,
            match={"prefect.resource.id": f"{_FLOW_RUN}*"},
            match_related=[_tagged()],
            after={f"{_FLOW_RUN}heartbeat"},
            expect={f"{_FLOW_RUN}{each}" for each in ("heartbeat", "Crashed", "AwaitingRetry", "Scheduled", *_IS_OVER)},
            for_each={"prefect.resource.id"},
            threshold=1,
            within=window,
        ),
        [
            ChangeFlowRunState(
                state=StateType.CRASHED, name="Crashed", message=f"No heartbeat for {window.total_seconds():g} s."
            )
        ],
    )


def _tagged() -> dict[str, str | list[str]]:
    return {"prefect.resource.role": "tag", "prefect.resource.id": f"prefect.tag.{_TAG}"}


def _alert(name: str, news: type[News], description: str, says: str) -> Shipped:
    about = "Experiment {{ event.payload.experiment }} at {{ event.payload.target }}: "
    trigger = EventTrigger(
        posture=Posture.Reactive,
        match={"prefect.resource.id": f"{_TAG}.*"},
        expect={news.name},
        threshold=1,
        within=timedelta(0),
    )
    return Shipped(f"{_PREFIX}{name}", f"{description} {_UNTIL}", trigger, says=about + says)


_ALERTS = (
    _alert(
        "corrupt checkpoint",
        CheckpointCorrupt,
        "A committed checkpoint is damaged. Training goes on from the one before it; look at the target.",
        "a checkpoint of trial {{ event.payload.trial }} is damaged, and put aside: {{ event.payload.reason }}",
    ),
    _alert(
        "new best",
        BestImproved,
        "The best model so far: notify, or run a deployment that evaluates it.",
        "trial {{ event.payload.trial }} is the best, at step {{ event.payload.step }}: {{ event.payload.metrics }}",
    ),
    _alert(
        "stale trial",
        TrialStale,
        "A trial has not reported for five times as long as it ever took, and at least 5 minutes.",
        "trial {{ event.payload.trial }} has not reported for {{ event.payload.silent_seconds }} s",
    ),
    _alert(
        "lag",
        Lagging,
        "What is trained is not safe: the target does not take what is reported, or a trial does not save.",
        "the {{ event.payload.what }} is {{ event.payload.seconds }} s behind; trial: {{ event.payload.trial }}",
    ),
    _alert(
        "budget at 80 %",
        BudgetNearlySpent,
        "80 % of a budget is spent: of time, of training time, or of trials.",
        "{{ event.payload.spent }} of {{ event.payload.budget }} are spent ({{ event.payload.what }})",
    ),
    _alert(
        "run failed",
        ExperimentFailed,
        "A run ended with an error. It is not started again: the cause is to be mended first.",
        "its run failed: {{ event.payload.message }}",
    ),
)
