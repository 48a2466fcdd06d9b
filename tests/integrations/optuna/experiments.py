"""A simulated search: three concurrent trials that end out of order, and a history to resume from."""

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
AT_ONCE = 3


@dataclass
class Experiment:
    """The calls of a search so far, which a resume repeats on the next one."""

    search: Search
    space: Mapping[str, object]
    objective: Objective = LOSS
    events: list[tuple[str, tuple[Any, ...]]] = field(default_factory=list)
    configs: list[Config] = field(default_factory=list)
    running: list[int] = field(default_factory=list)

    def run(self, count: int, *, sittings: int = 1) -> list[Config]:
        """Propose so many trials, with kills and resumes in between."""
        for _ in range(sittings):
            proposals = self.resumed()
            for _ in range(count // sittings):
                if not self._propose(proposals):
                    return self.configs
        return self.configs

    def resumed(self) -> SearchState:
        """Begin a new search, and repeat the journal's calls: from JSON, with its keys in another order."""
        proposals = self.search.begin(_turned(self.space), self.objective, SEED)
        for act, arguments in self.events:
            _tell(proposals, act, arguments)
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
        if len(self.running) >= AT_ONCE:
            self._end(proposals, self.running.pop(random.Random(number).randrange(AT_ONCE)))
        return True

    def _end(self, proposals: SearchState, number: int) -> None:
        """Report twice, then finish; each seventh trial fails, and each fifth is stopped after its first report."""
        one, two = [StepReport(step=step, metrics=metrics(self.configs[number], step)) for step in (1, 2)]
        acts: list[tuple[str, tuple[Any, ...]]]
        if number % 7 == 6:
            acts = [("failed", (number, None))]
        elif number % 5 == 4:
            acts = [("on_report", (number, one)), ("on_trial_stopped", (number,)), ("on_trial_ended", (number, one))]
        else:
            acts = [("on_report", (number, one)), ("on_trial_ended", (number, two))]
        for act, arguments in acts:
            self.events.append((act, arguments))
            _tell(proposals, act, arguments)


def metrics(config: Config, step: int = 1) -> dict[str, object]:
    """The metrics of a trial: best near the middle of every range, and for the first of all options."""
    loss = sum(_distance(value) for value in _values(config)) / step
    return {"loss": loss, "score": -abs(loss - 1), "size": loss - 0.5}


def _tell(proposals: SearchState, act: str, arguments: tuple[Any, ...]) -> None:
    match act:
        case "on_trial_ended" | "failed":
            proposals.on_trial_ended(*arguments, failed=act == "failed")
        case _:
            getattr(proposals, act)(*arguments)


def _values(node: object) -> list[object]:
    if isinstance(node, Mapping):
        return [each for key in sorted(node) for each in _values(node[key])]
    return [each for part in node for each in _values(part)] if isinstance(node, list) else [node]


def _distance(value: object) -> float:
    if isinstance(value, str):
        return len(value) / 10
    return 0.0 if value is None else abs(float(value) - 0.5)  # type: ignore[arg-type]  # numbers are left


def _turned(node: object) -> Any:
    """Return the space with its keys in reverse order."""
    if isinstance(node, dict):
        return {key: _turned(node[key]) for key in reversed(node)}
    if isinstance(node, Choice):
        return Choice(tuple(map(_turned, node.options)), node.weights)
    return node
