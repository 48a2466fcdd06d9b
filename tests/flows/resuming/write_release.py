"""Write experiments as this release writes them, for all later releases to read.

`python -m tests.flows.resuming.write_release` writes `tests/data/written_by_<version>/`: a target (`target.tar.xz`),
and what is known of each experiment on it (`facts.json`). It is run once for each release; a folder that is there is
never written again.
"""

from __future__ import annotations

import getpass
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from importlib.metadata import version
from pathlib import Path
from typing import Any, get_args

import prefect_tune as pt
from prefect_tune.core.checkpoints.artifact_index import newest_index
from prefect_tune.core.experiment.experiment import Experiment
from prefect_tune.core.experiment.trial_transitions import Trial
from prefect_tune.core.journal import journal
from prefect_tune.core.journal_events.experiment_events import (
    Answered,
    Described,
    Event,
    Owner,
    Pinned,
    Questioned,
    RemovalBegun,
    RemovalGivenUp,
    Retired,
    Started,
    TrialAdded,
)
from prefect_tune.core.messages.process_messages import GoOn, Leave, StopAndSave
from prefect_tune.core.messages.stop_requests import StopRequest, ask, read_request
from prefect_tune.core.messages.trial_replies import answer, read_answer
from prefect_tune.core.notifications.callback_delivery import newest_state
from prefect_tune.core.operations.quarantine import reinstate
from prefect_tune.core.recovery.restore import read_manifest
from prefect_tune.core.storage.documents import Document
from prefect_tune.core.storage.layout import CheckpointKey, JournalKey, TrialKey, number_in, requests_folder
from prefect_tune.core.storage.object_store import ObjectStore
from prefect_tune.maintenance.delete_experiment import delete_experiment
from prefect_tune.results.results import load_results
from prefect_tune.supervisor.run_identity import new_write_id
from prefect_tune.tasks.publish_results import read_curves
from prefect_tune.tuner.stopping.send_stop_request import stop

KEY = "a key of no secret at all"
"""The signing key of the experiment `signed`."""
OWNER = Owner(name="a test", host="machine", pid=1)
TRAINABLE = "tests.trainables.decay:Decay"
_DATA = Path(__file__).parents[2] / "data"
_FOLDER = "written_by_"
_PATIENCE = timedelta(minutes=5)


# ------------------------------------------------------------------------------------- the files of a release


class Release:
    """A target as a release wrote it, unpacked into `folder`, and the facts of each experiment on it."""

    def __init__(self, written: Path, folder: Path) -> None:
        self.facts: Mapping[str, Any] = json.loads((written / "facts.json").read_text())
        self.target = pt.LocalTarget(path=str(folder / "target"))
        with tarfile.open(written / "target.tar.xz") as archive:
            archive.extractall(self.target.path, filter="data")


def releases() -> Sequence[Path]:
    """Return the folders of all releases."""
    return sorted(_DATA.glob(f"{_FOLDER}*"))


def words_on(target: pt.LocalTarget, field: str) -> frozenset[str]:
    """Return all values of `field` in all documents on the target."""
    named = re.compile(rb'"%s":"([^"]+)"' % field.encode())
    documents = (path.read_bytes() for path in Path(target.path).rglob("*.json*"))
    return frozenset(word.decode() for document in documents for word in named.findall(document))


# ------------------------------------------------------------------------------------- the facts of an experiment


def facts_of(target: pt.LocalTarget, name: str) -> dict[str, Any]:
    """Return, as JSON, what the package reads of an experiment: through its public names, and document by document."""
    results = load_results(target, name)
    with target.open(timeout=_PATIENCE) as store:
        curves = read_curves(store, results.experiment)
        facts = {
            **_facts_of_state(results.experiment),
            "best": _best(results),
            "trials": {each.trial: _facts_of_trial(store, name, each) for each in results.trials.values()},
            "curves": {
                each: [[report.step, dict(report.metrics)] for report in curves.of(each)] for each in results.trials
            },
            "rows": results.to_arrow("reports").num_rows,
            "requests": _requests(store, name),
            "callback": _callback(store, name),
        }
    plain: dict[str, Any] = json.loads(json.dumps(facts))
    return plain


def _best(results: pt.Results) -> str | None:
    try:
        return results.best.trial
    except pt.InvalidInput:  # it compares no trials, or none has reported yet
        return None


def _facts_of_state(state: Experiment) -> dict[str, Any]:
    return {
        "entries": state.number,
        "epoch": state.epoch,
        "settings": dict(state.settings),
        "origin": state.origin and state.origin.model_dump(mode="json"),
        "learned": dict(state.learned),
        "heard": len(state.heard),
        "ends": state.ends,
    }


def _facts_of_trial(store: ObjectStore, experiment: str, trial: Trial) -> dict[str, Any]:
    key = TrialKey(experiment=experiment, trial=trial.trial)
    own = JournalKey(experiment=experiment, trial=trial.trial)
    state = journal.load(store, own, side_by_side=map)
    itself = state.trials.get(trial.trial, trial)
    index = newest_index(store, key.artifacts)
    return {
        "status": str(trial.phase),
        "reason": trial.reason,
        "config": dict(trial.config),
        "step": trial.step,
        "attempt": trial.attempt,
        "wasted_steps": trial.wasted_steps,
        "quarantined": list(trial.quarantined),
        "own": {
            "entries": state.number,
            "status": str(itself.phase),
            "step": itself.step,
            "config": dict(itself.config),
        },
        "checkpoints": [_facts_of_checkpoint(store, key.checkpoint_key(each)) for each in itself.checkpoints],
        "live": [each.step for each in itself.checkpoints],
        "artifacts": {each.path: each.size_bytes for each in index.files} if index else {},
        "answers": [_answer(store, key, *place) for place in _answered(store, key)],
    }


def _facts_of_checkpoint(store: ObjectStore, key: CheckpointKey) -> dict[str, Any]:
    about = read_manifest(store, key).about
    return {"step": key.step, "sequence": key.sequence, "metrics": dict(about.metrics), "parent": about.parent}


def _answered(store: ObjectStore, trial: TrialKey) -> Sequence[tuple[int, int]]:
    names = [each.path.removeprefix(f"{trial.answers}/").removesuffix(".json") for each in store.list(trial.answers)]
    return [(int(attempt), int(step)) for attempt, step in (name.split("-") for name in names)]


def _answer(store: ObjectStore, trial: TrialKey, attempt: int, step: int) -> dict[str, Any]:
    found = read_answer(store, trial, attempt, step)
    assert found is not None
    return {"attempt": attempt, "step": step, **found.model_dump(mode="json")}


def _requests(store: ObjectStore, name: str) -> list[dict[str, Any]]:
    folder = requests_folder(name)
    numbers = [number_in(folder, each.path) for each in store.list(folder)]
    found = [read_request(store, name, number) for number in numbers if number]
    return [each.model_dump(mode="json", exclude={"format", "version"}) for each in found if each]


def _callback(store: ObjectStore, name: str) -> Mapping[str, object] | None:
    found = newest_state(store, name, "StepCounter")
    return found.state if found else None


# --------------------------------------------------------------------------------- the experiments


def tuned(target: pt.LocalTarget, experiment: str, **options: Any) -> pt.Results:
    common: dict[str, Any] = {
        "space": {"rate": pt.uniform(0.1, 1)},
        "target": target,
        "metric": "loss",
        "seed": 1,
        "stop": {"step": 4},
        "max_concurrent_trials": 1,
        "checkpoint": pt.Cadence(every_steps=2),
    }
    return pt.tune(TRAINABLE, experiment=experiment, **{**common, **options})


def write_searches(target: pt.LocalTarget) -> None:
    """Write one completed search for each kind of search and scheduler."""
    asha = pt.ASHA(max_t=9, grace_period=1, reduction_factor=3)
    counted: dict[str, Any] = {"callbacks": ["tests.trainables.decay:StepCounter"], "retention": pt.Retention(last=2)}
    tuned(target, "asha", scheduler=asha, num_samples=6, stop={"step": 9}, **counted)
    pbt = pt.PBT(perturbation_interval=2, hyperparam_mutations={"rate": pt.uniform(0.1, 1)})
    tuned(target, "pbt", scheduler=pbt, num_samples=4, stop={"step": 6})
    tuned(target, "optuna", search={"OptunaSearch": {"num_samples": 4}})
    tuned(target, "failed", space={"rate": 0.5, "fails_at": pt.grid_search([3, 9])})
    tuned(pt.LocalTarget(path=target.path, signing_key=KEY), "signed", num_samples=2)
    tuned(target, "warm", samples_per_run=2, warm_start=["asha"])
    pt.resume("asha", target=target, fork="fork", num_samples=7)
    pt.resume("asha", target=target, fork="gone", num_samples=6)
    delete_experiment("gone", target=target)


def trained(target: pt.LocalTarget, experiment: str, steps: int) -> None:
    options: dict[str, Any] = {"target": target, "checkpoint": pt.Cadence(every_steps=2), "stop": {"step": steps}}
    pt.durable_trainable(TRAINABLE, {"rate": 0.5}, experiment=experiment, **options)


def write_trainings(target: pt.LocalTarget) -> None:
    """Write experiments of one trial: with metadata, with damaged checkpoints, with pruned checkpoints."""
    for name in ("training", "damaged", "pruned"):
        trained(target, name, 6)
    checkpoint = load_results(target, "training").checkpoint("trial")
    assert checkpoint is not None
    checkpoint.set_metadata({"good": True})
    checkpoint.update_metadata({"for": "production"})

    damage(target, "damaged", -1)
    trained(target, "damaged", 8)  # finds it, and resumes from the one before
    damage(target, "damaged", 0)
    with suppress(pt.DamageFound):
        pt.maintain(target, experiments=["damaged", "training"], verify="all", collect=False)
    pt.maintain(target, experiments=["pruned"], retention=pt.Retention(last=1))
    write_rare_events(target)


def write_rare_events(target: pt.LocalTarget) -> None:
    """Pin a checkpoint of `pruned`, and record one of `damaged` as intact again: written entry by entry."""
    with target.open(timeout=_PATIENCE) as store:
        state = journal.take_over(store, "pruned", OWNER, new_write_id(), side_by_side=map)
        (kept,) = state.trial("trial").checkpoints
        rare = [Pinned(trial="trial", sequence=kept.sequence), Retired(trial="trial", retires=())]
        journal.append(store, state, rare, new_write_id())
        trial = TrialKey(experiment="damaged", trial="trial")
        state = journal.load(store, "damaged", side_by_side=map)
        keys = {CheckpointKey(trial=trial, step=2, sequence=each) for each in state.trial("trial").quarantined}
        whole = {key for key in keys if store.size(key.manifest_path) is not None}
        (blob,) = {path for key in whole for path in read_manifest(store, key).blob_paths()}
        (Path(target.path) / blob).write_bytes(b"2")
        reinstate(store, trial, whole, new_write_id(), side_by_side=map)


def damage(target: pt.LocalTarget, experiment: str, which: int) -> None:
    """Change a byte of a checkpoint."""
    checkpoint = load_results(target, experiment).trials["trial"].checkpoints[which]
    key = TrialKey(experiment=experiment, trial="trial").checkpoint_key(checkpoint)
    with target.open(timeout=_PATIENCE) as store:
        path = Path(target.path) / read_manifest(store, key).blob_path(0)
    path.chmod(0o644)
    path.write_bytes(b"!")


def write_questions(target: pt.LocalTarget) -> None:
    """Write questions of trials to users, and a deletion that was given up: written entry by entry."""
    events: Sequence[Event] = [
        Described(settings={"metric": "loss", "mode": "min"}),
        TrialAdded(trial="t", config={"rate": 0.5}),
        Started(trial="t", attempt=1, from_step=0),
        Questioned(trial="t", key="why", question="Why?", fields={"why": "so"}),
        Answered(key="why", answer={"why": "or so"}, trial="t"),
        RemovalBegun(),
        RemovalGivenUp(),
    ]
    with target.open(timeout=_PATIENCE) as store:
        state = journal.take_over(store, "questions", OWNER, new_write_id(), side_by_side=map)
        for event in events:
            state = journal.append(store, state, [event], new_write_id())


def write_stopped(target: pt.LocalTarget) -> None:
    """Write a search that was asked to stop while it ran, and again when it no longer ran."""
    slow = {"rate": pt.grid_search([0.25, 0.5]), "first_attempt_step_seconds": 0.5}
    asking = threading.Thread(target=ask_when_trained, args=(target, "stopped", 2))
    asking.start()
    state = tuned(target, "stopped", space=slow, stop={"step": 40}, max_concurrent_trials=2).experiment
    asking.join()
    request = StopRequest(write_id="asked-late", at="2026-11-23T08:00:00+00:00", reason="late", epoch=state.epoch)
    with target.open(timeout=_PATIENCE) as store:
        ask(store, state, request)


def ask_when_trained(target: pt.LocalTarget, name: str, step: int) -> None:
    until(lambda: any(each >= step for each in steps_at(target, name)))
    stop(name, target=target, reason="seen enough")


def write_killed(target: pt.LocalTarget, api_url: str) -> None:
    """A search that was killed when both trials had a checkpoint of step 4; and answers written to one of them."""
    command = [sys.executable, "-m", "tests.flows.resuming.write_release", "killed", target.path]
    environment = {**os.environ, "PREFECT_API_URL": api_url}
    process = subprocess.Popen(command, env=environment, start_new_session=True)
    until(lambda: len([each for each in steps_at(target, "killed") if each >= 4]) >= 2)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    answers = {5: GoOn(milestone=6), 6: StopAndSave(), 0: Leave(reason="seen enough", save=True, for_good=False)}
    with target.open(timeout=_PATIENCE) as store:
        for step, said in answers.items():
            answer(store, TrialKey(experiment="killed", trial="00000"), 1, step, said)


def search_to_be_killed(target: pt.LocalTarget) -> None:
    slow = {"rate": pt.grid_search([0.25, 0.5]), "first_attempt_step_seconds": 0.5}
    tuned(target, "killed", space=slow, stop={"step": 8}, max_concurrent_trials=2)


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + _PATIENCE.total_seconds()
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def steps_at(target: pt.LocalTarget, name: str) -> Sequence[int]:
    """Return the steps of all committed checkpoints of a search."""
    manifests = Path(target.path, name, "trials").glob("*/checkpoints/*/manifest.json")
    return [int(each.parent.name.partition("-")[0]) for each in manifests]


# --------------------------------------------------------------------------------- the folder


def write_target(folder: Path, api_url: str) -> pt.LocalTarget:
    target = pt.LocalTarget(path=str(folder))
    write_searches(target)
    write_trainings(target)
    write_questions(target)
    write_stopped(target)
    write_killed(target, api_url)
    return target


def require_all(target: pt.LocalTarget) -> None:
    """Fail where a kind of document is missing on the target, or an event."""
    kinds = {each.model_fields["format"].default for each in Document.__subclasses__()}
    events = {each.model_fields["type"].default for each in _classes_in(Event)}
    missing = (kinds - words_on(target, "format")) | (events - words_on(target, "type"))
    assert not missing, f"this release can write what its experiments do not hold: {sorted(missing)}"


def _classes_in(annotation: Any) -> frozenset[Any]:
    """Return the classes of a union, of which some may be unions again."""
    inner = (_classes_in(each) for each in get_args(annotation))
    return frozenset({annotation}) if isinstance(annotation, type) else frozenset().union(*inner)


def anonymize_owner() -> None:
    """Have the journals name no real machine or person."""
    socket.gethostname = lambda: "machine"
    getpass.getuser = lambda: "ada"


def main() -> None:
    from prefect.settings import get_current_settings
    from prefect.testing.utilities import prefect_test_harness  # imports all of Prefect's server

    anonymize_owner()
    if sys.argv[1:2] == ["killed"]:
        search_to_be_killed(pt.LocalTarget(path=sys.argv[2]))
        return
    folder = _DATA / f"{_FOLDER}{version('prefect-tune')}"
    os.environ |= {"PREFECT_SERVER_ANALYTICS_ENABLED": "false", "DO_NOT_TRACK": "1"}  # for the server's process
    folder.mkdir()
    with tempfile.TemporaryDirectory(prefix="release-") as scratch, prefect_test_harness(server_startup_timeout=300):
        target = write_target(Path(scratch, "target"), str(get_current_settings().api.url))
        require_all(target)
        names = sorted(each.name for each in Path(target.path).iterdir() if not each.name.startswith("."))
        facts = {name: facts_of(target, name) for name in names}
        (folder / "facts.json").write_text(json.dumps(facts, indent=1, sort_keys=True) + "\n")
        with tarfile.open(folder / "target.tar.xz", "w:xz") as archive:
            archive.add(target.path, ".", filter=_without_owner)


def _without_owner(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
    member.uid, member.gid, member.uname, member.gname = 0, 0, "", ""
    return None if member.name.startswith("./.tmp") else member


if __name__ == "__main__":
    main()
