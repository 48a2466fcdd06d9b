"""The training that schedulers save, and the cost of their decisions.

    python -m benchmarks.quality.schedulers [--write]

The first table runs each scheduler over 160 recorded trainings (`tests/data/README.md`) in 200 orders, one trial at a
time, in virtual time. The second counts the CPU time of all calls of a schedule (new trials, milestones, decisions, the
trial for the next slot), per decision, with 100, 1,000 and 10,000 trials so far, 50 of them at a time; and of replaying
the history of all 10,000 on a new one, as a resume does.
"""

from __future__ import annotations

import argparse
import gc
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from statistics import mean, median
from typing import Any, TypeAlias

from benchmarks.measuring.tables import describe_setup, format_table, publish_section
from benchmarks.quality import digits
from prefect_tune.core.schedulers.asha import ASHA
from prefect_tune.core.schedulers.base import FIFO, Decision, Schedule, Scheduler, Stop, TrialReport
from prefect_tune.core.schedulers.hyperband import Hyperband
from prefect_tune.core.schedulers.median_stopping import MedianStopping
from prefect_tune.core.schedulers.pbt import PBT
from prefect_tune.core.search.domains import uniform
from prefect_tune.core.search.objective import Objective
from tests.fakes.searches.virtual_driver import Config, Outcome, State, VirtualRun, World

Call: TypeAlias = tuple[str, tuple[object, ...]]
CHANGES = {"on_trial_added", "decide", "on_trial_resumed", "on_trial_ended"}
ORDERS = 200
REPEATS = 3
SIZES = (100, 1_000, 10_000)
SLOTS = 50
LOSS = Objective(metrics=("loss",), modes=("min",))
SAVING: Mapping[str, Scheduler] = {
    "`FIFO()`": FIFO(),
    "`MedianStopping()`": MedianStopping(),
    "`Hyperband(27)`": Hyperband(27),
    '`ASHA(27, variant="stopping")`': ASHA(27, variant="stopping"),
    '`ASHA(27, variant="promotion")`': ASHA(27, variant="promotion"),
}
DECIDING: Mapping[str, Scheduler] = {
    '`ASHA(81, variant="stopping")`': ASHA(81, variant="stopping"),
    '`ASHA(81, variant="promotion")`': ASHA(81, variant="promotion"),
    "`Hyperband(81)`": Hyperband(81),
    "`MedianStopping(interval=9)`": MedianStopping(grace_period=9, interval=9),
    "`PBT(9, ...)`, all of them one population": PBT(9, {"lr": uniform(0, 1)}),
}


class RecordingSchedule(Schedule):
    """Another schedule, with a record of every call."""

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule
        self.calls: list[Call] = []

    def on_trial_added(self, trial: str, config: Mapping[str, object]) -> None:
        self._call("on_trial_added", trial, config)

    def decide(self, report: TrialReport) -> Decision:
        decision: Decision = self._call("decide", report)
        return decision

    def on_trial_resumed(self, trial: str) -> None:
        self._call("on_trial_resumed", trial)

    def on_trial_ended(self, trial: str) -> None:
        self._call("on_trial_ended", trial)

    def on_no_new_trial(self) -> None:
        self._call("on_no_new_trial")

    def next_milestone(self, trial: str, step: int) -> int | None:
        milestone: int | None = self._call("next_milestone", trial, step)
        return milestone

    def next_trial_to_resume(self) -> str | None:
        trial: str | None = self._call("next_trial_to_resume")
        return trial

    def next_trial_to_stop(self) -> tuple[str, Stop] | None:
        stopped: tuple[str, Stop] | None = self._call("next_trial_to_stop")
        return stopped

    def _call(self, name: str, *arguments: object) -> Any:
        self.calls.append((name, arguments))
        return getattr(self._schedule, name)(*arguments)


class Noise:
    """Losses that fall with the steps, about a level that each trial draws."""

    def begin(self, config: Config) -> State:
        del config
        return None

    def advance(self, config: Config, state: State, steps: int) -> State:
        del config, state, steps
        return None

    def metrics(self, config: Config, state: State, step: int) -> Mapping[str, object]:
        del state
        return {"loss": float(str(config["level"])) + 1 / step}


def configs(count: int) -> Iterator[Config]:
    chance = random.Random(0)
    return ({"level": chance.random(), "lr": 0.5} for _ in range(count))


def measure_decisions(scheduler: Scheduler, trials: int) -> tuple[float, float]:
    """Return the CPU time per decision in microseconds, and that of replaying all calls in seconds.

    The first is of the last tenth of all calls up to the last new trial, questions included: then there are as
    many trials as there will be. The best of three, with the garbage of this script out of the way.
    """
    recording = RecordingSchedule(scheduler.begin(LOSS, 0))
    world = World(slots=SLOTS, max_steps=27 if isinstance(scheduler, PBT) else 82)
    VirtualRun(recording, Noise(), configs(trials), world).run()
    end = max(index for index, (name, _) in enumerate(recording.calls) if name == "on_trial_added")
    changes = [call for call in recording.calls if call[0] in CHANGES]
    gc.collect()
    gc.freeze()
    per_decision = min(_per_decision_us(scheduler, recording.calls[:end]) for _ in range(REPEATS))
    again = min(_seconds(scheduler.begin(LOSS, 0), changes) for _ in range(REPEATS))
    gc.unfreeze()
    return per_decision, again


def _per_decision_us(scheduler: Scheduler, calls: Sequence[Call]) -> float:
    schedule, begin = scheduler.begin(LOSS, 0), len(calls) - max(50, len(calls) // 10)
    _seconds(schedule, calls[:begin])
    decisions = sum(name == "decide" for name, _ in calls[begin:])
    return _seconds(schedule, calls[begin:]) / decisions * 1e6


def _seconds(schedule: Schedule, calls: Sequence[Call]) -> float:
    start = time.process_time()
    for name, arguments in calls:
        getattr(schedule, name)(*arguments)
    return time.process_time() - start


def run_searches(scheduler: Scheduler) -> Sequence[Outcome]:
    """Return one search over all recorded trainings for each order."""
    world = World(max_steps=digits.EPOCHS)
    return [
        VirtualRun(scheduler.begin(LOSS, seed), digits.table(), digits.configs(seed), world).run()
        for seed in range(ORDERS)
    ]


def epochs_to_a_good_one(search: Outcome) -> int | None:
    """Return how many epochs were trained until one of the best configurations was trained to the end."""
    trials = search.trials
    return search.steps_until(lambda run: run.end >= digits.EPOCHS and digits.is_good(trials[run.trial].config))


def _saving_row(name: str, scheduler: Scheduler) -> list[str]:
    outcomes = run_searches(scheduler)
    epoch_counts = list(map(epochs_to_a_good_one, outcomes))
    budget = mean(outcome.steps for outcome in outcomes) / (digits.TRIALS * digits.EPOCHS)
    epochs = median(digits.TRIALS * digits.EPOCHS if count is None else count for count in epoch_counts)
    full = mean(len(outcome.trials_reaching(digits.EPOCHS)) for outcome in outcomes)
    found_share = mean(count is not None for count in epoch_counts)
    return [name, f"{budget:.1%}", f"{found_share:.2f}", f"{epochs:.0f}", f"{full:.1f}"]


def _deciding_row(name: str, scheduler: Scheduler) -> list[str]:
    costs = [measure_decisions(scheduler, size) for size in SIZES]
    return [name, *(f"{microseconds:.0f}" for microseconds, _ in costs), f"{costs[-1][1]:.2f}"]


def _main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="put the tables into benchmarks/README.md")
    args = parser.parse_args()
    columns = ["share of all epochs", "a good one was found", "epochs until then", "trained to the end"]
    saving = format_table(["scheduler", *columns], [_saving_row(*item) for item in SAVING.items()])
    deciding_head = ["scheduler", *(f"µs at {size:,} trials" for size in SIZES), "s to replay it all"]
    deciding = format_table(deciding_head, [_deciding_row(*item) for item in DECIDING.items()])
    text = f"{saving}\n\n{deciding}\n\n{describe_setup('pydantic', 'blake3')}"
    publish_section("schedulers", text, write=args.write)


if __name__ == "__main__":
    _main()
