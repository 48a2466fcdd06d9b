"""The deployable flows are listed once, and both ways to deploy use that list."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import pytest
import yaml

import prefect_tune as pt
from prefect_tune.deploy.deployment_specs import (
    OFFERS,
    TAG,
    DeploymentSchedule,
    Interval,
    named,
    of_one_experiment,
    wanted,
)
from tests.fakes.pages import ROOT

TUNE = named(["tune"])[0]


def in_file() -> Mapping[str, Mapping[str, Any]]:
    return {each["name"]: each for each in yaml.safe_load((ROOT / "prefect.yaml").read_text())["deployments"]}


def test_the_file_for_prefects_own_command_says_the_same() -> None:
    assert {name: each["entrypoint"] for name, each in in_file().items()} == {
        offer.name: offer.entrypoint for offer in OFFERS
    }
    for offer in OFFERS:
        there = in_file()[offer.name]
        assert (there["tags"], there["pull"]) == ([TAG], [])
        limit = {"limit": offer.at_once, "collision_strategy": "CANCEL_NEW"}
        assert there.get("concurrency_limit") == (limit if offer.at_once else None)


def test_every_deployment_has_the_name_of_its_flow_and_a_dotted_entrypoint() -> None:
    for offer in OFFERS:
        assert offer.entrypoint == f"{offer.module}.{offer.name.replace('-', '_')}"
        assert ":" not in offer.entrypoint


def test_deployments_with_another_name_start_trials_of_their_own_kind() -> None:
    staged = {each.offer.name: each for each in wanted(OFFERS, "staging-")}
    assert staged["resume"].full_name == "resume/staging-resume"
    assert staged["tune"].parameters == {"trial_deployment": "train-trial/staging-train-trial"}
    assert all(each.parameters == {} for each in wanted(OFFERS))


def test_a_deployment_for_one_experiment_is_named_like_it_and_runs_once_at_a_time() -> None:
    schedules = [DeploymentSchedule("0 2 * * *", "Europe/Berlin"), DeploymentSchedule(Interval(timedelta(hours=12)))]
    nightly = of_one_experiment(TUNE, "nightly", {"samples_per_run": 20}, schedules)
    assert nightly.parameters == {"experiment": "nightly", "samples_per_run": 20}
    assert (nightly.full_name, nightly.at_once, nightly.collision) == ("tune/nightly", 1, "cancel-new")
    other = of_one_experiment(TUNE, "nightly", {"experiment": "digits"}, None)
    assert other.parameters == {"experiment": "digits"}
    hourly = of_one_experiment(named(["maintain"])[0], "hourly", {"target": "s3://b/runs"}, schedules)
    assert hourly.parameters == {"target": "s3://b/runs"}


def test_what_is_not_offered_is_said_with_what_was_meant() -> None:
    with pytest.raises(pt.InvalidInput, match=r"no flow 'tunes' to deploy: .* did you mean 'tune'\?"):
        named(["tunes"])
    with pytest.raises(pt.InvalidInput, match="becomes a folder on the target"):
        of_one_experiment(TUNE, "every night", {}, None)
