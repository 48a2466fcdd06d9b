"""What the command line says of experiments that earlier releases wrote."""

from __future__ import annotations

import json
from collections import Counter

import pytest

from tests.fakes.command_line import Run
from tests.flows.write_release import Release, releases


@pytest.fixture(scope="module", params=releases(), ids=lambda path: path.name)
def release(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Release:
    return Release(request.param, tmp_path_factory.mktemp("released"))


def test_all_of_them_are_listed_and_shown(run: Run, release: Release) -> None:
    listed = {each["experiment"]: each for each in json.loads(run("ls", release.target.path, "--json").out)}
    assert listed.keys() == release.facts.keys()
    for name, facts in release.facts.items():
        assert listed[name]["damage"] is None
        statuses = Counter(each["status"] for each in facts["trials"].values())
        assert listed[name]["trials"] == statuses
        shown = json.loads(run("show", release.target.path, name, "--json").out)
        assert shown.get("trials_by_status", {shown.get("status"): 1}) == statuses


def test_every_byte_of_every_checkpoint_is_verified_and_garbage_is_found(run: Run, release: Release) -> None:
    for name, facts in release.facts.items():
        verified = run("verify", release.target.path, name, "--json")
        assert verified.code == 0
        live = [(trial, step) for trial, each in facts["trials"].items() for step in each["live"]]
        assert [(each["trial"], each["step"]) for each in json.loads(verified.out)] == live
        assert run("gc", release.target.path, name, "--json").code == 0
