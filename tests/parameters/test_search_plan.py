"""The parameters of a search agree: those of the flow, of the plan, and of a resume."""

from __future__ import annotations

import logging
from inspect import Parameter, signature

import pytest

import prefect_tune as pt
from prefect_tune.cli.shared.search_options import _OPTIONS, RUN
from prefect_tune.flows.resume import resume
from prefect_tune.flows.tune import tune
from prefect_tune.parameters.checks.search_limits import warn_of_constants
from prefect_tune.parameters.search_plan import OF_THE_RUN, SearchPlan

KEPT = {name: Parameter.empty if each.is_required() else each.default for name, each in SearchPlan.model_fields.items()}


NOT_AN_OPTION = {
    "trainable": "an argument",
    "target": "an argument",
    "experiment": "an argument",
    "sync": "a dozen settings: in code, or in the parameters of a deployment",
    "resources_total": "of the machine; the same for each run on it",
}
"""The parameters of a search that `prefect-tune run` does not take as an option, and why."""


def test_what_the_journal_leaves_out_as_a_default_is_the_default_of_a_search() -> None:
    assert {name: each.default for name, each in signature(tune.fn).parameters.items()} == KEPT


def test_every_parameter_of_a_search_is_an_option_of_run_or_has_a_reason_not_to_be() -> None:
    options = {_OPTIONS[name].sets or name for name in RUN} - {"settings"}  # a part of the space
    assert options == KEPT.keys() - NOT_AN_OPTION.keys()


def test_whatever_a_resume_is_given_says_which_experiment_what_is_trusted_or_how_its_search_goes_on() -> None:
    which = {"experiment", "target", "fork", "at", "strict_fork", "trusted_packages"}
    given = {name: each.default for name, each in signature(resume.fn).parameters.items() if name not in which}
    assert given.keys() <= KEPT.keys()
    assert given == {name: KEPT[name] if name in OF_THE_RUN else None for name in given}


class _NeverSaved(pt.Trainable):
    def step(self) -> dict[str, object]:
        return {"loss": 1.0}


def test_a_class_that_cannot_save_is_refused_unless_its_cadence_never_saves() -> None:
    with pytest.raises(ValueError, match="trainable _NeverSaved: expected the method `save_checkpoint`"):
        SearchPlan(trainable=_NeverSaved, target="./nowhere", checkpoint=pt.Cadence(every_seconds=None))
    never = pt.Cadence(every_seconds=None, at_end=False)
    assert SearchPlan(trainable=_NeverSaved, target="./nowhere", checkpoint=never).checkpoint == never


def test_the_functions_of_a_space_are_tried_before_there_is_an_experiment() -> None:
    rare = pt.choice([1, {"depth": pt.sample_from(lambda config: config["width"] + "1")}], weights=[1e9, 1])
    with pytest.raises(pt.InvalidInput, match=r"sample_from at model\?1.depth: its function raised TypeError"):
        SearchPlan(trainable=print, target="./nowhere", experiment="e", space={"width": 1, "model": rare})


@pytest.mark.parametrize(
    ("search", "warns"),
    [
        (None, True),
        (pt.RandomSearch(3), True),
        (pt.Repeated(pt.RandomSearch(1), 3, index_as="seed"), False),
    ],
)
def test_nothing_to_draw_is_a_warning_unless_the_search_proposes_more_than_the_space_has(
    search: object, warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    plan = SearchPlan(trainable=print, target="./nowhere", experiment="e", space=None, search=search)
    warn_of_constants(plan, logging.getLogger(__name__))
    assert ("the space has no distribution" in caplog.text) == warns
