"""Journals of simulated searches, without training: events with times, their experiment state and history."""

from __future__ import annotations

import math
import random
from bisect import insort
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

from prefect_tune.core.experiment.experiment import Experiment, apply_event, make_empty_experiment
from prefect_tune.core.experiment.trial_transitions import make_clone_ref
from prefect_tune.core.journal_events import (
    AttemptEnded,
    AttemptStarted,
    Cause,
    CheckpointCloned,
    CheckpointCommitted,
    CheckpointRef,
    DecisionMade,
    Event,
    ExperimentConfigured,
    FinishKind,
    Owner,
    OwnerChanged,
    StepReported,
    TrialAdded,
    TrialErrored,
    TrialFinished,
    TrialPaused,
    TrialResumed,
)
from prefect_tune.core.schedulers.base import Continue, Decision, Exploit, Stop
from prefect_tune.core.search_view import SearchView
from prefect_tune.core.values import StepReport
from prefect_tune.reporting.facts import ReportInput, make_report_input, select_curve_trials
from tests.fakes.checkpoints import first_generation

STARTED_AT = datetime(2026, 11, 21, 8, tzinfo=UTC)
URI = "s3://bucket/runs"


@dataclass
class JournalBuilder:
    """Builds a journal, event by event."""

    name: str = "rates"
    settings: Mapping[str, object] = field(default_factory=lambda: {"metric": "loss", "mode": "min"})
    now: datetime = STARTED_AT
    number: int = 1

    def __post_init__(self) -> None:
        self.state: Experiment = make_empty_experiment(first_generation(self.name))
        self.view = SearchView(self.state.model_copy(update={"settings": self.settings}))
        self.change_owner()
        if self.settings:
            self.record(ExperimentConfigured(settings=self.settings))

    def record(self, *events: Event, after: float = 0.0) -> None:
        self.now += timedelta(seconds=after)
        for event in events:
            self.number += 1
            self.state = apply_event(self.state, event, self.number)
            self.view.apply_event(event, self.now, self.state)

    def change_owner(self, name: str = "clever-otter", after: float = 0.0) -> None:
        owner = Owner(name=name, host="gpu-1", pid=7, flow_run=f"run-{self.state.term + 1}")
        event = OwnerChanged(experiment=self.name, generation=1, term=self.state.term + 1, owner=owner)
        self.record(event, after=after)

    def add_trial(self, trial: str, config: Mapping[str, object]) -> None:
        self.record(TrialAdded(trial=trial, config=config))

    def start_attempt(self, trial: str) -> None:
        state = self.state.trial(trial)
        newest = state.checkpoints[-1] if state.checkpoints else None
        step, sequence = (newest.step, newest.sequence) if newest else (0, None)
        event = AttemptStarted(trial=trial, attempt=state.attempt + 1, from_step=step, from_sequence=sequence)
        self.record(event, after=0.2)

    def report(self, trial: str, step: int, metrics: Mapping[str, object], *, seconds: float = 1.0) -> None:
        report = StepReport(step=step, metrics=metrics, trained_seconds=step * seconds)
        self.record(StepReported(trial=trial, report=report), after=seconds)

    def commit(self, trial: str, size_bytes: int = 5_000_000) -> None:
        state = self.state.trial(trial)
        new = CheckpointRef(step=state.step, sequence=state.next_sequence, metrics=state.metrics, size_bytes=size_bytes)
        sent = size_bytes if len(state.checkpoints) == 0 else size_bytes // 10
        self.record(CheckpointCommitted(trial=trial, checkpoint=new, sent_bytes=sent, upload_seconds=0.25))

    def decide(self, trial: str, decision: Decision) -> None:
        state = self.state.trial(trial)
        report = StepReport(step=state.step, metrics=state.metrics)
        self.record(DecisionMade(trial=trial, report=report, decision=decision))

    def report_input(self, expected: int | None = None) -> ReportInput:
        def link_to(owner: Owner) -> str | None:
            return f"http://ui/runs/flow-run/{owner.flow_run}" if owner.flow_run else None

        snapshot = self.view.take_snapshot(select_curve_trials(self.state))
        return make_report_input(snapshot, uri=URI, now=self.now, run_url=link_to, expected_trial_count=expected)


def asha(count: int, *, seed: int = 0, steps: int = 27, kills: bool = True) -> JournalBuilder:
    """Build a search in which a third continues at each rung; every 7th trial is killed once, every 11th fails."""
    draw = random.Random(seed)
    search = JournalBuilder()
    seen: dict[int, list[float]] = {}
    per_run = max(1, count // 3)
    for index in range(count):
        if index and index % per_run == 0 and index // per_run < 3:
            search.change_owner(f"nightly-{index // per_run + 1}", after=86_000)
        _asha_trial(search, f"{index:05}", draw, (seen, steps), kills=kills and index % 7 == 3)
    return search


def _asha_trial(
    search: JournalBuilder, trial: str, draw: random.Random, rungs: tuple[dict[int, list[float]], int], *, kills: bool
) -> None:
    seen, steps = rungs
    config: dict[str, Any] = {
        "lr": 10 ** draw.uniform(-4, -0.5),
        "model": {"depth": draw.choice([2, 3, 4]), "act": draw.choice(["relu", "gelu"])},
        "dropout": draw.uniform(0, 0.5),
        "seed": draw.randint(0, 999),
    }
    search.add_trial(trial, config)
    search.start_attempt(trial)
    good = abs(math.log10(config["lr"]) + 2) / 3 + config["dropout"] * 0.3 + 0.1 * (config["model"]["act"] == "relu")
    step = 0
    while step < steps:
        step += 1
        loss = 0.02 + good * 0.4 + 2.2 * math.exp(-step / 4) * draw.uniform(0.85, 1.15)
        search.report(trial, step, {"loss": loss, "accuracy": 1 - loss / 3})
        if int(trial) % 11 == 10 and step == 4:
            for kind in (AttemptEnded, TrialErrored):
                search.record(kind(trial=trial, cause=Cause.TRAINABLE, reason="ValueError: a | bad <b>row</b>\nmore"))
            return
        if step % 3 == 0:
            search.commit(trial)
        if kills and step == 5:
            kills = False
            search.record(AttemptEnded(trial=trial, cause=Cause.MACHINE, reason="killed by signal 9"), after=0.5)
            search.start_attempt(trial)
            step = search.state.trial(trial).checkpoints[-1].step
        if step in (1, 3, 9) and not _decide(search, trial, loss, seen.setdefault(step, [])):
            search.record(TrialFinished(trial=trial, reason=f"loss {loss:.3g} at step {step}", kind=FinishKind.PRUNED))
            return
    search.record(TrialFinished(trial=trial, reason=f"step {steps} of {steps}"))


def _decide(search: JournalBuilder, trial: str, loss: float, losses: list[float]) -> bool:
    """Record whether the loss is in the best third; return it."""
    insort(losses, loss)
    is_good = loss <= losses[len(losses) // 3]
    search.decide(trial, Continue() if is_good else Stop(reason="not good enough"))
    return is_good


def population(members: int = 8, rounds: int = 8, *, seed: int = 0) -> JournalBuilder:
    """Build a population in which the worst quarter continues from the best."""
    draw = random.Random(seed)
    search = JournalBuilder(name="population", settings={"metric": "score", "mode": "max"})
    names = [f"{index:05}" for index in range(members)]
    scores = {}
    for name in names:
        search.add_trial(name, {"h0": draw.random(), "h1": draw.random()})
    for turn in range(1, rounds + 1):
        for name in names:
            search.start_attempt(name)
            step = turn * 4
            rate = float(str(search.state.trial(name).config["h0"]))
            scores[name] = scores.get(name, 0.0) + rate * draw.uniform(0.5, 1.5)
            search.report(name, step, {"score": scores[name]}, seconds=4)
            search.commit(name)
            worst, best = sorted(scores, key=scores.__getitem__)[: members // 4], max(scores, key=scores.__getitem__)
            if turn < rounds and name in worst and name != best:
                search.decide(name, Exploit(source=best, config=search.state.trial(best).config, reason="behind"))
                search.record(TrialPaused(trial=name, reason="behind"), TrialResumed(trial=name))
                _clone(search, name, best)
                scores[name] = scores[best]
            else:
                search.record(TrialPaused(trial=name, reason="a turn"), TrialResumed(trial=name))
    for name in names:
        search.start_attempt(name)
        search.record(TrialFinished(trial=name, reason="enough"))
    return search


def _clone(search: JournalBuilder, name: str, best: str) -> None:
    source = search.state.trial(best)
    copy = make_clone_ref(search.state.trial(name), source.checkpoints[-1], best)
    search.record(CheckpointCloned(trial=name, checkpoint=copy, source=best, config=source.config, reason="behind"))


def pareto(count: int = 40, *, seed: int = 0) -> JournalBuilder:
    """Build a search with two metrics."""
    draw = random.Random(seed)
    search = JournalBuilder(name="two", settings={"metric": ["loss", "size"], "mode": ["min", "min"]})
    for index in range(count):
        trial, width = f"{index:05}", draw.choice([8, 16, 32, 64, 128, 256])
        search.add_trial(trial, {"width": width, "lr": 10 ** draw.uniform(-3, 0)})
        search.start_attempt(trial)
        for step in (1, 2, 3):
            loss = 3 / math.log(width) / step + draw.random() / 3
            search.report(trial, step, {"loss": loss, "size": width * 1.5 + step})
        search.record(TrialFinished(trial=trial, reason="enough"))
    return search


def single(steps: int = 60, *, kills: Sequence[int] = (23, 41)) -> JournalBuilder:
    """Build one training that was killed twice, and resumed by two more owners."""
    search = JournalBuilder(name="digits", settings={})
    search.add_trial("trial", {"rate": 0.1, "width": 64})
    search.start_attempt("trial")
    step, left = 0, list(kills)
    while step < steps:
        step += 1
        loss = 2 * math.exp(-step / 15) + 0.05 * math.sin(step)
        search.report("trial", step, {"loss": loss, "accuracy": 1 - math.exp(-step / 9)})
        if step % 5 == 0:
            search.commit("trial")
        if left and step == left[0]:
            left.pop(0)
            search.change_owner(f"run-{step}", after=3600)
            search.record(AttemptEnded(trial="trial", cause=Cause.MACHINE, reason="its owner died"), after=2)
            search.start_attempt("trial")
            step = search.state.trial("trial").checkpoints[-1].step
    search.record(TrialFinished(trial="trial", reason=f"step {steps} of {steps}"))
    return search


def all_statuses() -> JournalBuilder:
    """Build a trial of each status, named by it."""
    search = JournalBuilder()
    for name in ("completed", "pruned", "interrupted", "errored", "running", "paused", "pending"):
        search.add_trial(name, {"x": len(name)})
        if name != "pending":
            search.start_attempt(name)
            search.report(name, 3, {"loss": len(name) / 10})
    search.record(TrialFinished(trial="completed", reason="enough"))
    search.decide("pruned", Stop(reason="rung 3"))
    search.record(TrialFinished(trial="pruned", reason="rung 3", kind=FinishKind.PRUNED))
    search.record(AttemptEnded(trial="interrupted", cause=Cause.PREEMPTED, reason="stopped"))
    search.record(TrialErrored(trial="errored", cause=Cause.TRAINABLE, reason="no"))
    search.record(TrialPaused(trial="paused", reason="rung 3"))
    return search
