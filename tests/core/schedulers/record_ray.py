"""Records the decisions of Ray Tune's own schedulers on random reports, to compare ours with (`test_base.py`).

In an environment that has Ray 2.60 (`pip install 'ray[tune]==2.60.0'`), from the root of the repository:
`python tests/core/schedulers/record_ray.py > tests/data/ray_decisions.json`.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

Options = Mapping[str, Any]
Answer = Callable[[str, int, float], str]
"""Answers a trial's report of a step: `.` to continue, `s` to stop, `-` or the exploited source if PBT compared it."""


def iter_cases() -> Iterator[tuple[str, Options]]:
    for factor in (2, 3, 4, 2.2, 2.5, 3.3):
        for grace in (1, 2, 5):
            yield "ASHA", {"max_t": 30, "grace_period": grace, "reduction_factor": factor}
    for grace in (1, 2, 4, 7):
        for needed in (1, 2, 3):
            yield "MedianStopping", {"grace_period": grace, "min_samples_required": needed}
    for interval, burn_in in ((1, 0), (3, 0), (3, 4), (4, 9), (5, 5)):
        for fraction in (0.25, 0.1):
            yield "PBT", {"perturbation_interval": interval, "burn_in_period": burn_in, "quantile_fraction": fraction}


def answers_to(kind: str, seed: int, answer: Answer) -> str:
    """Return the answers to random reports of a few trials, one character each."""
    chance = random.Random(seed)
    steps = dict.fromkeys("abcd" if kind == "PBT" else "abcdefghij", 0)
    strides = {trial: chance.choice([1, 1, 2]) if kind == "MedianStopping" else 1 for trial in steps}
    worse = {trial: chance.randint(0, 5) for trial in steps}
    compared = dict(steps)
    answers = ""
    while steps and len(answers) < 150:
        trial = chance.choice(list(steps))
        steps[trial] += strides[trial]
        value = chance.randint(0, 5) + worse[trial] if kind == "MedianStopping" else chance.random()
        answers += (decision := answer(trial, steps[trial], value))
        if decision == "s":
            del steps[trial]
        elif decision in steps:
            steps[trial] = compared[trial] = compared[decision]
        elif decision == "-":
            compared[trial] = steps[trial]
    return answers


def answer_by_ray(kind: str, options: Options) -> Answer:
    """Return the answers of Ray's scheduler."""
    from ray.tune.schedulers import ASHAScheduler, MedianStoppingRule

    if kind == "PBT":
        return _answer_by_ray_pbt(options)
    common = {"metric": "loss", "mode": "min", "time_attr": "step"}
    scheduler = {"ASHA": ASHAScheduler, "MedianStopping": MedianStoppingRule}[kind](**common, **options)
    trials: dict[str, Any] = {}

    def answer(name: str, step: int, value: float) -> str:
        if name not in trials:
            trials[name] = MagicMock(trial_id=name)
            scheduler.on_trial_add(MagicMock(), trials[name])
        controller = MagicMock()
        controller.get_live_trials.return_value = []
        decision = scheduler.on_trial_result(controller, trials[name], {"step": step, "loss": value})
        return "s" if decision == "STOP" else "."

    return answer


def _answer_by_ray_pbt(options: Options) -> Answer:
    from ray import tune
    from ray.tune.schedulers import PopulationBasedTraining

    answers: list[str] = []

    class Population(PopulationBasedTraining):
        """Each trial has a checkpoint of its last comparison, as here: Ray's have one only while they are the best."""

        def _checkpoint_or_exploit(self, trial: Any, controller: Any, upper: Any, lower: Any) -> None:
            answers.append("-")
            self._trial_state[trial].exploited = False
            for best in upper:
                state = self._trial_state[best]
                state.last_checkpoint = None if getattr(state, "exploited", False) else SimpleNamespace()
            super()._checkpoint_or_exploit(trial, controller, upper, lower)

        def _exploit(self, controller: Any, trial: Any, source: Any) -> None:
            super()._exploit(controller, trial, source)
            self._trial_state[trial].exploited = True
            answers.append(source.trial_id)

    space = {"x": tune.uniform(0, 1)}
    common = {"metric": "loss", "mode": "min", "time_attr": "step", "hyperparam_mutations": space}
    scheduler = Population(**common, **options, log_config=False)
    trials = {name: MagicMock(trial_id=name, config={"x": 0.5}, status="RUNNING") for name in "abcd"}
    controller = MagicMock(search_alg=None)
    controller.get_trials.return_value = list(trials.values())
    for trial in trials.values():
        trial.is_finished.return_value = False
        trial.run_metadata.checkpoint_manager.checkpoint_config.num_to_keep = None
        scheduler.on_trial_add(controller, trial)

    def answer(name: str, step: int, value: float) -> str:
        answers.clear()
        scheduler.on_trial_result(controller, trials[name], {"step": step, "loss": value})
        return answers[-1] if answers else "."

    return answer


def main() -> None:
    lines = [
        json.dumps([kind, options, seed, answers_to(kind, seed, answer_by_ray(kind, options))])
        for seed, (kind, options) in enumerate(iter_cases())
    ]
    sys.stdout.write("[\n" + ",\n".join(lines) + "\n]\n")


if __name__ == "__main__":
    main()
