"""The code that a resume runs is never chosen by an object on the target."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr

import prefect_tune as pt
from prefect_tune import trust
from prefect_tune.blocks import LocalTarget, S3Target, StorageTarget
from prefect_tune.core.errors import UnsafePayload
from prefect_tune.core.experiment.experiment import Experiment
from prefect_tune.core.experiment.trial_transitions import Status
from prefect_tune.core.journal_events import Owner
from prefect_tune.core.operations.fork_experiment import begin_fork, complete_fork, load_fork_point
from prefect_tune.core.storage.documents import add_signature
from prefect_tune.core.storage.layout import JournalKey
from prefect_tune.core.values import WriteStamp
from prefect_tune.flows.resume import resume
from prefect_tune.trust import TRUSTED_PACKAGES_VARIABLE, require_trusted_code
from prefect_tune.tuner.run_search import read_warm_starts
from tests.fakes.checkpoints import first_generation
from tests.fakes.pages import ROOT, blocks_of
from tests.fakes.untrusted import TRAIN, VECTORS, Untrusted, make_untrusted_target, write_settings
from tests.long_cases import long_after
from tests.trainables.moody import train

KEY = SecretStr("a key that is hard to guess")


@pytest.fixture
def attacker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Untrusted:
    return make_untrusted_target(tmp_path, monkeypatch)


def resume_from_code(target: StorageTarget, **options: Any) -> object:
    """Resume like a script; a refusal comes before any request to Prefect."""
    return resume.fn("e", target=target, **options)


def resume_from_form(target: StorageTarget, **options: Any) -> object:
    """Resume with JSON parameters, like a form, a schedule or an automation."""
    parameters = json.loads(json.dumps({"experiment": "e", "target": target.uri, **options}))
    return resume.fn(**resume.validate_parameters(parameters))


def arguments_for(vector: str) -> Mapping[str, str]:
    """Return the arguments that the user passes: all except those of the tested vector."""
    return {} if "trainable" in vector else {"trainable": TRAIN}


def require_untouched(attacker: Untrusted) -> None:
    assert not attacker.marker.exists()
    assert attacker.module not in sys.modules


@pytest.mark.parametrize("call", [resume_from_code, resume_from_form])
@pytest.mark.parametrize("vector", [vector for vector in VECTORS if vector not in ("scheduler", "search")])
def test_what_a_journal_chooses_is_neither_imported_nor_opened(
    vector: str, call: Callable[..., object], attacker: Untrusted
) -> None:
    attacker.forge(vector)
    with pytest.raises((UnsafePayload, pt.InvalidInput)):
        call(attacker.target, **arguments_for(vector))
    require_untouched(attacker)


_LATE = ("trainable", "trainable of the standard library", "syncer", "place of artifacts", "scheduler", "search")
"""Vectors whose code would run late; the test above covers the others, which would run before any request."""


@pytest.mark.usefixtures("no_prefect_server")
@pytest.mark.parametrize(
    "vector",
    long_after(2, [pytest.param(vector, marks=[] if vector in _LATE else pytest.mark.deep) for vector in VECTORS]),
)
def test_a_flow_run_runs_nothing_that_a_journal_chooses(vector: str, attacker: Untrusted) -> None:
    attacker.forge(vector)
    with pytest.raises((UnsafePayload, pt.InvalidInput)):
        pt.resume("e", target=attacker.target, **arguments_for(vector))
    require_untouched(attacker)


@pytest.mark.usefixtures("no_prefect_server")
@pytest.mark.parametrize("vector", ["trainable", pytest.param("sample_from", marks=pytest.mark.deep)])
def test_a_fork_of_such_a_journal_runs_nothing_either(vector: str, attacker: Untrusted) -> None:
    attacker.forge(vector)
    with pytest.raises(UnsafePayload, match="experiment 'e'"):  # refused before the fork is written
        pt.resume("e", target=attacker.target, fork="copy")
    assert not attacker.marker.exists()
    require_untouched(attacker)


def settings_of_all_vectors(attacker: Untrusted) -> Mapping[str, Any]:
    """Return settings with all vectors at once."""
    vectors = ("trainable", "sample_from", "stop", "callbacks", "syncer", "command of a worker")
    return {name: value for vector in vectors for name, value in VECTORS[vector](attacker.module, "x").items()}


@pytest.mark.usefixtures("no_prefect_server")
def test_a_search_that_is_called_again_or_learns_takes_nothing_from_a_journal(attacker: Untrusted) -> None:
    for name in ("mine", "theirs"):
        write_settings(attacker.target, name, settings_of_all_vectors(attacker))
    assert count_completed(begin_search(attacker.target, experiment="mine", warm_start=["theirs"])) == 1
    require_untouched(attacker)


def refusal_of(target: StorageTarget, **options: Any) -> str:
    """Require that a resume of `e` is refused; return the message."""
    with pytest.raises(UnsafePayload) as caught:
        resume.fn("e", target=target, **options)
    return str(caught.value)


def test_the_refusal_says_what_was_found_and_the_call_that_allows_it(attacker: Untrusted) -> None:
    space = {"x": {"sample_from": "theirs.spaces:width"}}
    write_settings(attacker.target, "e", {"trainable": "theirs.train:Net", "space": space, "num_samples": 1})
    message = refusal_of(attacker.target)
    assert f"experiment 'e' at {attacker.target.uri}" in message
    assert "can be written by others (drwxrwxrwx" in message
    assert "  trainable: 'theirs.train:Net'" in message
    assert "  space: sample_from 'theirs.spaces:width'" in message
    call = f"pt.resume('e', target={attacker.target.uri!r}, trainable='theirs.train:Net', space={space!r})"
    assert call in message
    assert f"trusted_packages=['theirs'], or {TRUSTED_PACKAGES_VARIABLE}=theirs" in message
    assert "trainable" not in refusal_of(attacker.target, trainable=train)


def test_the_refusal_on_the_page_is_the_one_that_is_raised() -> None:
    (example,) = [block.code for block in blocks_of(ROOT / "docs" / "trust.md")]
    settings = {"trainable": "my_project.train:Net"}
    experiment = Experiment(key=JournalKey(experiment="digits", generation=1), settings=settings)
    with pytest.raises(UnsafePayload) as caught:
        require_trusted_code(S3Target(bucket="bucket", prefix="runs"), experiment, (), ())
    assert example.split() == str(caught.value).split()


def test_a_refusal_does_not_repeat_the_variables_of_a_job(attacker: Untrusted) -> None:
    attacker.forge("command of a worker", trial_job_variables={})
    message = refusal_of(attacker.target, trainable=train)
    assert "'command'" in message
    assert "touch" not in message


def test_what_the_person_passes_is_not_asked_of_the_journal(attacker: Untrusted) -> None:
    write_settings(attacker.target, "e", settings_of_all_vectors(attacker))
    arguments: dict[str, Any] = {"trainable": train, "space": {}, "stop": {}, "callbacks": [], "sync": pt.SyncConfig()}
    assert "trial_job_variables" in refusal_of(attacker.target, **arguments)
    for name in arguments:
        rest = {other: value for other, value in arguments.items() if other != name}
        assert f"  {name}: " in refusal_of(attacker.target, **rest)
    assert not attacker.marker.exists()


@pytest.mark.parametrize("name", ["subprocess:call", "$(touch x):y", "a\nb:c"])
def test_a_refusal_proposes_no_trust_in_all_of_python_and_no_words_for_a_shell(name: str, attacker: Untrusted) -> None:
    write_settings(attacker.target, "e", {"trainable": name, "num_samples": 1})
    message = refusal_of(attacker.target)
    assert f"  trainable: {name!r}" in message
    assert "trusted_packages" not in message
    assert f"{TRUSTED_PACKAGES_VARIABLE}=" not in message


def fork_experiment(target: StorageTarget, name: str, copy: str) -> None:
    with target.open(timeout=timedelta(seconds=60)) as store:
        fork_point = load_fork_point(store, first_generation(name), None)
        owner = Owner(name="a person", host="here", pid=1)
        stamp = WriteStamp(write_id=copy, at="")
        fork = begin_fork(store, first_generation(copy), fork_point.origin, owner, stamp)
        complete_fork(store, fork_point, fork, stamp)


def test_a_fork_is_no_more_ones_own_than_what_it_was_forked_from(attacker: Untrusted) -> None:
    attacker.forge("stop")
    root = Path(attacker.target.path)
    root.chmod(0o755)
    (root / "e" / "1" / "journal").chmod(0o777)
    fork_experiment(attacker.target, "e", "copy")
    fork_experiment(attacker.target, "copy", "copy-of-copy")
    for name in ("copy", "copy-of-copy"):
        with pytest.raises(UnsafePayload, match=r"e/1/journal can be written by others"):
            resume.fn(name, target=attacker.target, trainable=TRAIN)
    require_untouched(attacker)


def test_what_was_learned_from_is_not_opened_when_the_journal_says_so_no_more(attacker: Untrusted) -> None:
    attacker.forge("warm start")
    (location,) = VECTORS["warm start"](attacker.module, str(attacker.marker))["warm_start"]
    experiment = Experiment(key=JournalKey(experiment="e", generation=1), warm_starts={location: 1})
    assert not read_warm_starts([location], attacker.target, "e", experiment)
    require_untouched(attacker)


def test_what_is_to_be_signed_holds_no_place_that_only_a_journal_says_was_read(attacker: Untrusted) -> None:
    settings = {"trainable": TRAIN, "warm_start": [location := "s3://theirs/first"], "num_samples": 1}
    experiment = Experiment(key=JournalKey(experiment="e", generation=1), settings=settings, warm_starts={location: 1})
    require_trusted_code(attacker.target, experiment, ["trainable"], ())
    with pytest.raises(UnsafePayload, match="warm_start: 's3://theirs/first'"):
        require_trusted_code(signing_target(attacker), experiment, ["trainable"], ())
    settings = dict(add_signature(settings, "e", KEY.get_secret_value().encode()))
    require_trusted_code(signing_target(attacker), experiment.model_copy(update={"settings": settings}), (), ())


# ---------------------------------------------------------------------------------------- accepted resumes


def begin_search(target: StorageTarget, **options: Any) -> pt.Results:
    common: dict[str, Any] = {"num_samples": 1, "metric": "loss", "isolation": "thread"}
    space = {"x": {"sample_from": "tests.fakes.untrusted:two"}} if options.pop("computes", False) else {"x": 1.0}
    return pt.tune(TRAIN, space, target=target, **{"experiment": "e", **common, **options})


def count_completed(results: pt.Results) -> int:
    assert {trial.status for trial in results.trials.values()} <= {Status.COMPLETED}
    return len(results.trials)


@pytest.mark.long
@pytest.mark.usefixtures("no_prefect_server")
def test_a_bucket_is_resumed_with_the_trainable_that_the_person_names(s3_target: S3Target) -> None:
    begin_search(s3_target)
    with pytest.raises(UnsafePayload, match="the target is not a local folder"):
        pt.resume("e", target=s3_target, num_samples=2)
    assert count_completed(pt.resume("e", target=s3_target, num_samples=2, trainable=TRAIN)) == 2
    assert count_completed(pt.resume("e", target=s3_target, num_samples=3, trainable=train)) == 3


@pytest.mark.long
@pytest.mark.usefixtures("no_prefect_server")
def test_a_bucket_is_resumed_where_the_deployment_trusts_the_package(
    s3_target: S3Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin_search(s3_target)
    with pytest.raises(UnsafePayload, match=r"tests\.trainables\.moody is not in a trusted package"):
        pt.resume("e", target=s3_target, trusted_packages=["test", "tests.trainables.mood"])
    assert count_completed(pt.resume("e", target=s3_target, num_samples=2, trusted_packages=["tests"])) == 2
    monkeypatch.setenv(TRUSTED_PACKAGES_VARIABLE, "another, tests.trainables")
    assert count_completed(pt.resume("e", target=s3_target, num_samples=3)) == 3
    with pytest.raises(UnsafePayload):
        pt.resume("e", target=s3_target, trusted_packages=[])


def test_a_trusted_package_covers_code_and_neither_places_nor_commands(attacker: Untrusted) -> None:
    for vector in ("place of artifacts", "warm start", "command of a worker", "deployment"):
        attacker.forge(vector)
        message = refusal_of(attacker.target, trusted_packages=["tests", attacker.module])
        assert "(no package)" in message
        assert "  trainable: " not in message


@pytest.mark.parametrize("name", ["", "my-project", "a..b", "*", "a:b", 3])
def test_a_name_that_no_package_can_have_is_no_trust_in_everything(name: Any, attacker: Untrusted) -> None:
    attacker.forge("trainable")
    with pytest.raises(pt.InvalidInput, match="trusted_packages: expected names of packages"):
        resume.fn("e", target=attacker.target, trusted_packages=[name])


@pytest.mark.usefixtures("no_prefect_server")
def test_a_folder_of_ones_own_is_resumed_by_name_alone(local_target: LocalTarget) -> None:
    begin_search(local_target)
    assert count_completed(pt.resume("e", target=local_target, num_samples=2)) == 2


@pytest.mark.parametrize("below", ["", "e", "e/1/journal", "e/1/journal/0000000001.json"])
def test_a_folder_that_others_can_write_to_is_not_ones_own(
    below: str, local_target: LocalTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trust, "_is_private_group", lambda *_: False)  # the tests' user may have one
    write_settings(local_target, "e", {"trainable": "theirs:Net", "num_samples": 1})
    with pytest.raises(pt.InvalidInput, match="there is no module 'theirs'"):  # it is looked for
        resume.fn("e", target=local_target)
    for bits in (0o020, 0o002):
        path = Path(local_target.path, below)
        mode = path.stat().st_mode
        path.chmod(mode | bits)
        assert f"{path} can be written by others" in refusal_of(local_target)
        path.chmod(mode)


def test_a_mount_that_may_hang_is_shared(local_target: LocalTarget) -> None:
    write_settings(local_target, "e", {"trainable": "theirs:Net", "num_samples": 1})
    assert "the target is a network mount" in refusal_of(local_target.model_copy(update={"may_hang": True}))


# ---------------------------------------------------------------------------------------------- signatures


def signing_target(attacker: Untrusted, key: SecretStr | None = KEY) -> LocalTarget:
    return LocalTarget(path=attacker.target.path, signing_key=key)


@pytest.mark.usefixtures("no_prefect_server")
def test_a_signed_journal_is_resumed_by_name_alone_with_all_that_it_chooses(attacker: Untrusted) -> None:
    begin_search(
        signing_target(attacker),
        computes=True,
        stop={"loss": 9.0},
        scheduler={"ASHA": {"max_t": 9, "variant": "stopping"}},
    )
    assert count_completed(pt.resume("e", target=signing_target(attacker), num_samples=2)) == 2
    assert (
        count_completed(pt.resume("e", target=signing_target(attacker), num_samples=3, stop={"step": 4})) == 3
    )  # it was signed again
    assert count_completed(pt.resume("e", target=signing_target(attacker), fork="copy", num_samples=4)) == 4
    assert count_completed(pt.resume("copy", target=signing_target(attacker), num_samples=5)) == 5
    assert "does not match the target's signing_key" in refusal_of(
        signing_target(attacker, SecretStr("another user's long key"))
    )


@pytest.mark.usefixtures("no_prefect_server")
def test_a_signature_survives_a_run_without_the_key_that_changes_nothing(attacker: Untrusted) -> None:
    begin_search(signing_target(attacker))
    begin_search(attacker.target)
    assert count_completed(pt.resume("e", target=signing_target(attacker), num_samples=2)) == 2
    begin_search(attacker.target, num_samples=3)
    assert "the signature of its settings is missing" in refusal_of(signing_target(attacker))


_SETTINGS: Mapping[str, Any] = {"trainable": TRAIN, "space": {"x": 1.0}, "num_samples": 1}
_GOOD = add_signature(_SETTINGS, "e", KEY.get_secret_value().encode())


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        (_SETTINGS, "is missing"),
        ({**_GOOD, "trainable": "subprocess:call"}, "does not match"),
        ({**_GOOD, "trial_job_variables": {"command": "touch"}}, "does not match"),
        ({**_GOOD, "signature": ["hmac"]}, "does not match"),
        (add_signature(_SETTINGS, "e", b"another key of another user"), "does not match"),
        (add_signature(_SETTINGS, "other", KEY.get_secret_value().encode()), "does not match"),
    ],
)
def test_a_signature_that_is_wrong_or_missing_or_of_another_experiment_is_refused(
    settings: Mapping[str, Any], problem: str, attacker: Untrusted
) -> None:
    write_settings(attacker.target, "e", settings)
    message = refusal_of(signing_target(attacker), trusted_packages=["tests"])  # with a key these are not enough
    assert f"the signature of its settings {problem}" in message
    assert "trusted_packages" not in message
    assert "trainable" in message


def test_a_key_that_is_short_is_none() -> None:
    with pytest.raises(pt.InvalidInput, match="signing_key: expected at least 16 characters"):
        LocalTarget(path="/runs", signing_key="too short")
