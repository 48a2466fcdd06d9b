"""A simulated search: three concurrent trials that end out of order, and a history to resume."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from prefect_tune.core.search.base import Exhausted, Proposed, Search, SearchState
from prefect_tune.core.search.domains import Choice
from prefect_tune.core.search.objective import Objective
from prefect_tune.core.values import StepReport

Config = Mapping[str, Any]
LOSS = Objective(metrics=("loss",), modes=("min",))
LOSS_AND_SCORE = Objective(metrics=("loss", "score"), modes=("min", "max"))
SEED = 7
CONCURRENT_TRIALS = 3


@dataclass
class Experiment:
    """The calls of a search, which a resume repeats on a new search."""

    search: Search
    space: Mapping[str, object]
    objective: Objective = LOSS
    events: list[tuple[str, tuple[Any, ...]]] = field(default_factory=list)
    configs: list[Config] = field(default_factory=list)
    running: list[int] = field(default_factory=list)

    def run(self, count: int, *, sessions: int = 1) -> list[Config]:
        """Propose `count` trials in several sessions, with a resume before each session."""
        for _ in range(sessions):
            proposals = self.resume()
            for _ in range(count // sessions):
                if not self._propose(proposals):
                    return self.configs
        return self.configs

    def resume(self) -> SearchState:
        """Begin a new search and repeat the calls, with the keys of the space in another order."""
        proposals = self.search.begin(_reverse_keys(self.space), self.objective, SEED)
        for method, arguments in self.events:
            _apply_call(proposals, method, arguments)
        return proposals

    def _propose(self, proposals: SearchState) -> bool:
        number = len(self.configs)
        suggestion = proposals.suggest(number)
        if isinstance(suggestion, Exhausted):
            return False
        assert isinstance(suggestion, Proposed)
        self.configs.append(suggestion.config)
        self.events.append(("restore_trial", (number, json.loads(json.dumps(suggestion.config, sort_keys=True)))))
        self.running.append(number)
        if len(self.running) >= CONCURRENT_TRIALS:
            self._end(proposals, self.running.pop(random.Random(number).randrange(CONCURRENT_TRIALS)))
        return True

    def _end(self, proposals: SearchState, number: int) -> None:
        """Report twice, then finish; every seventh trial fails, every fifth is stopped after its first report."""
        one, two = [StepReport(step=step, metrics=make_metrics(self.configs[number], step)) for step in (1, 2)]
        calls: list[tuple[str, tuple[Any, ...]]]
        if number % 7 == 6:
            calls = [("failed", (number, None))]
        elif number % 5 == 4:
            calls = [("on_report", (number, one)), ("on_trial_stopped", (number,)), ("on_trial_ended", (number, one))]
        else:
            calls = [("on_report", (number, one)), ("on_trial_ended", (number, two))]
        for method, arguments in calls:
            self.events.append((method, arguments))
            _apply_call(proposals, method, arguments)


def make_metrics(config: Config, step: int = 1) -> dict[str, object]:
    """Return the metrics of a trial: best near the middle of each range, and for the first options."""
    loss = sum(_distance(value) for value in _values(config)) / step
    return {"loss": loss, "score": -abs(loss - 1), "size": loss - 0.5}


def _apply_call(proposals: SearchState, method: str, arguments: tuple[Any, ...]) -> None:
    if method in ("on_trial_ended", "failed"):
        proposals.on_trial_ended(*arguments, failed=method == "failed")
    else:
        getattr(proposals, method)(*arguments)


def _values(node: object) -> list[object]:
    if isinstance(node, Mapping):
        return [value for key in sorted(node) for value in _values(node[key])]
    return [value for item in node for value in _values(item)] if isinstance(node, list) else [node]


def _distance(value: object) -> float:
    if isinstance(value, str):
        return len(value) / 10
    return 0.0 if value is None else abs(float(value) - 0.5)  # type: ignore[arg-type]  # numbers are left


def _reverse_keys(node: object) -> Any:
    """Return the space with its keys in reverse order."""
    if isinstance(node, dict):
        return {key: _reverse_keys(node[key]) for key in reversed(node)}
    if isinstance(node, Choice):
        return Choice(tuple(map(_reverse_keys, node.options)), node.weights)
    return node
