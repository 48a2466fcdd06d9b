"""Input forms for the Resume of a suspended run, and the text above their fields."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, cast

from prefect.input import RunInput
from pydantic import Field, create_model

from prefect_tune.core.experiment.experiment import Experiment
from prefect_tune.core.experiment.ranking import best_label, ranked
from prefect_tune.core.experiment.resume_options import Standing
from prefect_tune.core.experiment.summary import counted
from prefect_tune.core.experiment.trial_transitions import Trial, newest_checkpoint
from prefect_tune.core.journal_events.experiment_events import Questioned
from prefect_tune.core.journal_events.question_fields import default_of, valid_fields
from prefect_tune.core.models import metric_in
from prefect_tune.core.search.objective import Objective
from prefect_tune.reporting.render_markdown import escaped

InputForm = type[RunInput]
_MOST_STEPS = 20


class _Search(RunInput):
    """How to continue the search."""

    way: Literal["continue", "extend", "stop here"] = Field(
        default="continue",
        title="How to continue",
        description="continue: with the same settings. extend: with the larger numbers below. stop here: save nothing "
        "more, publish the results, and end; unfinished trials can be resumed later.",
    )
    samples: int = Field(default=0, title="Total samples", description="To extend: more than now.")
    steps: int = Field(
        default=0, title="Steps of each trial", description="To extend: finished trials continue too. 0: unchanged."
    )
    hours: float = Field(
        default=0, title="Hours for this run", description="To extend: after these, all trials save. 0: unchanged."
    )


class _Training(RunInput):
    """How to continue the training."""

    way: Literal["continue", "extend", "other checkpoint", "stop here"] = Field(
        default="continue",
        title="How to continue",
        description="continue: from the newest checkpoint. extend: with the larger numbers below. other checkpoint: "
        "go back to the step below; later checkpoints are kept. stop here: the training ends.",
    )
    steps: int = Field(default=0, title="Total steps", description="To extend: more than before. 0: unchanged.")
    hours: float = Field(
        default=0, title="Total hours of training", description="To extend: more than before. 0: unchanged."
    )
    checkpoint: int = Field(
        default=0, title="Step of the checkpoint", description="To go back: one of the steps listed above."
    )


def form_of_search(standing: Standing, page: str) -> InputForm:
    """Return the form of a suspended search; its fields show the current numbers."""
    return _filled(_Search, page, samples=standing.samples, steps=standing.steps)


def form_of_training(standing: Standing, page: str) -> InputForm:
    """Return the form of a suspended training; its fields show the current numbers."""
    newest = max(standing.checkpoints, default=0)
    return _filled(_Training, page, steps=standing.steps, hours=standing.hours, checkpoint=newest)


def _filled(form: InputForm, page: str, **defaults: float) -> InputForm:
    """Return the form with these defaults. Prefect's `with_initial_data` drops the fields' titles and descriptions."""
    fields: dict[str, Any] = {
        name: (
            info.annotation,
            Field(default=defaults.get(name, info.default), title=info.title, description=info.description),
        )
        for name, info in form.model_fields.items()
    }
    filled = cast("InputForm", create_model(form.__name__.strip("_"), __base__=RunInput, **fields))
    return filled.with_initial_data(description=page)


def form_of_question(asked: Questioned, experiment: str, why: str = "") -> InputForm:
    """Return the form of a trial's question. Raises `InvalidInput` for fields that `pt.ask` does not allow."""
    fields: dict[str, Any] = {name: _field(value) for name, value in valid_fields(asked.fields).items()}
    form = cast("InputForm", create_model("Answer", __base__=RunInput, **fields))
    question = map(escaped, asked.question.splitlines())
    page = [*_refused(why), f"**{experiment}, trial {asked.trial}**, asks:", "", *question]
    return form.with_initial_data(description="\n".join(page))


def _field(value: object) -> tuple[Any, Any]:
    if isinstance(value, list | tuple):
        return Literal[tuple(value)], value[0]
    return type(value), default_of(value)


def page_of(state: Experiment, uri: str, objective: Objective | None, code: str, why: str = "") -> str:
    """Return the text above the form that asks how to continue: the state of the experiment."""
    lines = [*_refused(why), f"**{state.name}** at `{uri}` is saved.", ""]
    return "\n".join([*lines, *(f"- {fact}" for fact in _facts(state, objective, code))])


def _refused(why: str) -> list[str]:
    return [f"⚠️ **Please answer again**: {escaped(why)}", ""] if why else []


def _facts(state: Experiment, objective: Objective | None, code: str) -> Iterator[str]:
    trials = list(state.trials.values())
    if len(trials) != 1 or trials[0].apart:
        counts = ", ".join(f"{count} {status}" for status, count in counted(state).items())
        yield f"trials: {len(trials)} ({counts})"
    if objective is not None and (compared := ranked(trials, objective)):
        best = compared[0][0]
        metrics = ", ".join(f"{escaped(name)} {metric_in(best.metrics, name):.6g}" for name in objective.metrics)
        yield f"{escaped(best_label(objective))}: trial {best.trial}, {metrics} at step {best.step}"
    yield from _of_one(trials[0]) if len(trials) == 1 else _newest(trials)
    yield escaped(code)


def _of_one(trial: Trial) -> Iterator[str]:
    yield f"step {trial.step}, attempt {trial.attempt}, steps redone: {trial.wasted_count}"
    steps = [str(each.step) for each in reversed(trial.checkpoints)]
    more = f", and {len(steps) - _MOST_STEPS} older ones" if len(steps) > _MOST_STEPS else ""
    yield f"checkpoints, newest first: {', '.join(steps[:_MOST_STEPS]) or 'none'}{more}"


def _newest(trials: list[Trial]) -> Iterator[str]:
    saved = [(newest, each.trial) for each in trials if (newest := newest_checkpoint(each)) is not None]
    yield f"checkpoints: {sum(len(each.checkpoints) for each in trials)}, of {len(saved)} trials"
