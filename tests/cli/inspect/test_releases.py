"""The output about experiments that earlier releases wrote."""

from __future__ import annotations

import json
from collections import Counter

import pytest

from tests.fakes.command_line import Run
from tests.flows.resuming.write_release import Release, releases

WRITTEN = {"completed": {"finished"}, "pruned": {"finished"}, "interrupted": {"finished", "pending"}}
"""What a journal may hold of a trial of this status; of others it holds that word."""


@pytest.fixture(scope="module", params=releases(), ids=lambda path: path.name)
def release(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Release:
    return Release(request.param, tmp_path_factory.mktemp("released"))


def test_all_of_them_are_listed_and_shown(run: Run, release: Release) -> None:
    listed = {each["experiment"]: each for each in json.loads(run("ls", release.target.path, "--json").out)}
    assert listed.keys() == release.facts.keys()
    for name, facts in release.facts.items():
        assert listed[name]["damage"] is None
        shown = json.loads(run("show", release.target.path, name, "--json").out)
        trials = {each["trial"]: each["status"] for each in shown.get("trials", [shown])}
        assert trials.keys() == facts["trials"].keys()
        for trial, status in trials.items():
            assert facts["trials"][trial]["status"] in WRITTEN.get(status, {status}), (name, trial)
        assert (
            listed[name]["trials"]
            == shown.get("trials_by_status", Counter(trials.values()))
            == Counter(trials.values())
        )


def test_what_was_said_to_be_finished_is_said_to_be_completed_pruned_or_interrupted(run: Run, release: Release) -> None:
    trials = json.loads(run("show", release.target.path, "asha", "--json").out)["trials"]
    assert {(each["status"], each["step"]) for each in trials} == {("completed", 9), ("pruned", 1)}
    trials = json.loads(run("show", release.target.path, "stopped", "--json").out)["trials"]
    assert "interrupted" in {each["status"] for each in trials}


def test_every_byte_of_every_checkpoint_is_verified_and_garbage_is_found(run: Run, release: Release) -> None:
    for name, facts in release.facts.items():
        verified = run("verify", release.target.path, name, "--json")
        assert verified.code == 0
        live = [(trial, step) for trial, each in facts["trials"].items() for step in each["live"]]
        assert [(each["trial"], each["step"]) for each in json.loads(verified.out)] == live
        assert run("gc", release.target.path, name, "--json").code == 0
