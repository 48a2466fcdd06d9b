"""Experiments that earlier releases wrote: they read as they did then, and can be resumed."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

import prefect_tune as pt
from prefect_tune.core.errors import JournalCorrupt
from prefect_tune.core.journal_events.experiment_events import Started
from prefect_tune.core.storage.documents import Document, unseal
from tests.fakes.checkpoints import files_in
from tests.flows.resuming.write_release import KEY, Release, facts_of, releases, words_on
from tests.flows.training import entries_at, trial_at

KINDS: Mapping[str, type[Document]] = {
    each.model_fields["format"].default: each
    for each in Document.__subclasses__()
    if each.__module__.startswith("prefect_tune.")
}


@pytest.fixture(scope="module", params=releases(), ids=lambda path: path.name)
def released(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Release:
    """The target of an earlier release, for tests that only read."""
    return Release(request.param, tmp_path_factory.mktemp("released"))


@pytest.fixture(params=releases(), ids=lambda path: path.name)
def release(request: pytest.FixtureRequest, tmp_path: Path, prefect_server: str) -> Release:
    """The target of an earlier release, for tests that resume its experiments."""
    assert prefect_server
    return Release(request.param, tmp_path)


def never_rewritten(target: pt.LocalTarget) -> Mapping[str, bytes]:
    """Return the entries of all journals."""
    return {path: data for path, data in files_in(target.path).items() if "/journal/" in path}


def test_every_experiment_reads_as_it_did_when_it_was_written_and_reading_writes_nothing(released: Release) -> None:
    before = files_in(released.target.path)
    for name, facts in released.facts.items():
        require_in(facts_of(released.target, name), facts)
    assert files_in(released.target.path) == before


def require_in(found: Any, facts: Any) -> None:
    """Fail if one of the facts is missing; a later release may have more."""
    if isinstance(facts, dict):
        for name, fact in facts.items():
            require_in(found[name], fact)
    elif isinstance(facts, list):
        assert len(found) == len(facts)
        for each, fact in zip(found, facts, strict=True):
            require_in(each, fact)
    else:
        assert found == facts


def test_every_document_is_of_a_known_kind_and_each_kind_that_there_was_is_there(released: Release) -> None:
    documents = {path: data for path, data in files_in(released.target.path).items() if ".json" in path}
    found = set()
    for path, data in documents.items():
        first = data.partition(b"\n")[0]
        kind = KINDS[json.loads(first)["format"]]
        assert unseal(kind, first, path, JournalCorrupt).version == kind.current_version
        found.add(kind)
    assert {each.model_fields["format"].default for each in found} == words_on(released.target, "format")
    assert len(found) >= 9


def test_a_search_that_was_killed_goes_on_from_the_checkpoints_that_it_had(release: Release) -> None:
    before = never_rewritten(release.target)
    results = pt.resume("killed", target=release.target)
    for trial, facts in release.facts["killed"]["trials"].items():
        last = facts["checkpoints"][-1]["step"]
        assert [each.from_step for each in started(release.target, trial)] == [0, last]
        assert (results.trials[trial].status, results.trials[trial].step) == ("completed", 8)
        assert [report.metrics["count"] for report in results.curve(trial)] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert before.items() <= files_in(release.target.path).items()


def started(target: pt.LocalTarget, trial: str) -> list[Started]:
    events = chain.from_iterable(_events_of(entry.events) for entry in entries_at(target, "killed"))
    return [event for event in events if isinstance(event, Started) and event.trial == trial]


def _events_of(events: Any) -> Iterator[Any]:
    for event in events:
        yield event
        yield from getattr(event, "events", ())


MORE: Mapping[str, Mapping[str, Any]] = {
    "asha": {"num_samples": 8},
    "pbt": {"stop": {"step": 8}},
    "optuna": {"search": {"OptunaSearch": {"num_samples": 6}}},
    "failed": {"rerun_errored": True},
    "signed": {"num_samples": 3},
    "warm": {"samples_per_run": 1},
    "fork": {"num_samples": 8},
    "stopped": {"stop": {"step": 12}},
}
"""The options by which each search is extended."""


@pytest.mark.deep
@pytest.mark.parametrize("name", MORE)
def test_every_search_goes_on_from_what_it_had(release: Release, name: str) -> None:
    before, old = never_rewritten(release.target), release.facts[name]["trials"]
    target = pt.LocalTarget(path=release.target.path, signing_key=KEY) if name == "signed" else release.target
    results = pt.resume(name, target=target, **MORE[name])
    statuses = {each.status for each in results.trials.values()}
    assert statuses - {"pruned", "interrupted"} == ({"completed", "errored"} if name == "failed" else {"completed"})
    for trial, facts in old.items():
        found = results.trials[trial]
        assert name == "pbt" or found.config == facts["config"]
        assert found.step >= facts["step"] or name == "failed"
        steps = [report.step for report in results.curve(trial)]
        assert [report.metrics["count"] for report in results.curve(trial)] == steps
        assert steps == list(range(1 if name != "pbt" else steps[0], found.step + 1))
    assert len(results.trials) - len(old) == {"asha": 2, "optuna": 2, "signed": 1, "warm": 1, "fork": 1}.get(name, 0)
    assert before.items() <= files_in(release.target.path).items()


@pytest.mark.deep
@pytest.mark.parametrize("name", ["training", "damaged", "pruned"])
def test_every_training_goes_on_from_its_newest_checkpoint(release: Release, name: str) -> None:
    before, (facts,) = never_rewritten(release.target), release.facts[name]["trials"].values()
    steps = facts["step"] + 2
    result = pt.durable_trainable(
        "tests.trainables.decay:Decay", {"rate": 0.5}, target=release.target, experiment=name, stop={"step": steps}
    )
    assert (result.status, result.step, result.metrics["count"]) == ("completed", steps, steps)
    assert result.wasted_steps == facts["wasted_steps"]
    assert before.items() <= files_in(release.target.path).items()


@pytest.mark.deep
@pytest.mark.parametrize("name", ["asha", "pbt", "optuna", "killed", "stopped", "fork", "warm"])
def test_every_search_is_forked_with_what_it_had(release: Release, name: str) -> None:
    before, old = never_rewritten(release.target), release.facts[name]
    forked = pt.resume(name, target=release.target, fork="another", **MORE.get(name, {}))
    assert forked.experiment.origin is not None
    assert (forked.experiment.origin.experiment, forked.experiment.origin.number) == (name, old["entries"])
    assert [each.config for each in forked.trials.values()][: len(old["trials"])] == [
        each["config"] for each in old["trials"].values()
    ] or name == "pbt"
    assert {each.phase for each in forked.trials.values()} == {"finished"}
    assert before.items() <= files_in(release.target.path).items()


def test_maintenance_reads_every_checkpoint_and_what_is_needed_stays(release: Release) -> None:
    before = never_rewritten(release.target)
    report = pt.maintain(release.target, verify="all")
    assert (report.damaged, len(report.experiments)) == ([], len(release.facts))
    live = [each for facts in release.facts.values() for trial in facts["trials"].values() for each in trial["live"]]
    assert report.verified_count == len(live)
    assert before.items() <= files_in(release.target.path).items()
    for name, facts in release.facts.items():
        found = facts_of(release.target, name)
        assert {each: found["trials"][each]["live"] for each in facts["trials"]} == {
            each: trial["live"] for each, trial in facts["trials"].items()
        }


@pytest.mark.deep
def test_a_checkpoint_of_a_newer_release_is_refused_and_never_put_aside(release: Release) -> None:
    (newest,) = Path(release.target.path).glob("training/trials/trial/checkpoints/0000000006-*/manifest.json")
    newest.chmod(0o644)
    newest.write_bytes(newest.read_bytes().replace(b'"version":1', b'"version":2'))
    report = pt.maintain(release.target, experiments=["training"], verify="all")
    assert report.damaged == []
    assert {"upgrade prefect-tune" in each.why for each in report.not_looked_at} == {True}
    asked: Mapping[str, Any] = {"target": release.target, "experiment": "training", "stop": {"step": 8}}
    with pytest.raises(pt.TuneError, match="Written by a newer prefect-tune: upgrade prefect-tune"):
        pt.durable_trainable("tests.trainables.decay:Decay", {"rate": 0.5}, **asked)
    assert trial_at(release.target, "training").quarantined == ()
    newest.write_bytes(newest.read_bytes().replace(b'"version":2', b'"version":1'))
    assert pt.durable_trainable("tests.trainables.decay:Decay", {"rate": 0.5}, **asked).step == 8
