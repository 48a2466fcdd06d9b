"""Processes that are reused for the next trial of a class with `reset_config`, and the state that they reset."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from prefect_tune.attempt.processes.process_channel import READ_ONCE_VARIABLES, TrialChannel, open_trial_thread
from prefect_tune.attempt.processes.process_pool import TrialProcessPool
from prefect_tune.core.experiment.retention import Cadence
from prefect_tune.core.journal_events import TrialPaused
from prefect_tune.core.messages.process_messages import (
    CheckpointAndStop,
    CheckpointSaved,
    StepDone,
    StopTrial,
    TrainableLoaded,
    TrainingEnded,
)
from prefect_tune.core.reasons import get_reason_code
from prefect_tune.runtime.trainable import Reuse
from tests.attempt.processes.modules import Module
from tests.fakes.trial_processes import (
    PORTABLE,
    Family,
    LogRecorder,
    count_descriptors,
    family,
    make_log,
    make_start,
    no_leaks,
    receive_messages,
    receive_metrics,
    wait_until,
)
from tests.long_cases import long_after
from tests.trainables.processes.forked import AnotherKind, Leads, Resettable
from tests.trainables.witness import acts_of

LOG = make_log(LogRecorder())
NO_VARIABLES: Mapping[str, str] = {}
SLOTS = 2


@pytest.fixture
def processes(module_processes: Family) -> Family:
    return module_processes


@pytest.fixture
def witness(tmp_path: Path) -> Path:
    return tmp_path / "witness"


Trainer = Callable[..., Mapping[str, Any]]


@pytest.fixture
def train_trial(pool: TrialProcessPool, tmp_path: Path, witness: Path) -> Trainer:
    """Train one step of a trial; return its metrics."""

    def train(
        x: int = 0, kind: type = Resettable, environment: Mapping[str, str] = NO_VARIABLES, **config: object
    ) -> Mapping[str, Any]:
        start = make_start(kind, tmp_path, {"x": x, "witness": str(witness), **config}, steps=1)
        with pool.open_process(start, LOG, environment) as channel:
            metrics = receive_metrics(channel)
            channel.end()
        return metrics

    return train


def acknowledge_save(channel: TrialChannel) -> None:
    wait_until(lambda: isinstance(channel.receive(timedelta(0)), StepDone), what=lambda: "the step")
    channel.send(CheckpointSaved(step=1))


def read_acts(witness: Path) -> list[str]:
    return [f"{act.act} {act.step}" for act in acts_of(witness)]


# ----------------------------------------------------------------------------------- processes that are reused


def test_a_trainable_that_can_be_reset_serves_the_next_trial_as_the_same_object(
    train_trial: Trainer, witness: Path
) -> None:
    first, second, third = train_trial(1), train_trial(2), train_trial(3)
    assert (first["pid"], first["object"]) == (second["pid"], second["object"]) == (third["pid"], third["object"])
    assert [metrics["x"] for metrics in (first, second, third)] == [1, 2, 3]
    assert read_acts(witness) == ["setup 1", "reset 2", "reset 3"]


def test_what_waits_goes_on_from_a_checkpoint_where_there_is_one(
    pool: TrialProcessPool, train_trial: Trainer, tmp_path: Path, witness: Path
) -> None:
    first = train_trial(1)
    (tmp_path / "count").write_text("7")
    config = {"x": 2, "witness": str(witness)}
    start = make_start(Resettable, tmp_path, config, steps=8, restored_directory=str(tmp_path), from_step=7)
    with pool.open_process(start, LOG) as channel:
        metrics = receive_metrics(channel)
    assert (metrics["pid"], metrics["count"]) == (first["pid"], 8)
    assert read_acts(witness) == ["setup 1", "reset 2", "loaded 7"]


def test_a_trial_that_was_over_when_it_began_leaves_what_waits_as_it_is(
    pool: TrialProcessPool, train_trial: Trainer, tmp_path: Path, witness: Path
) -> None:
    first = train_trial(1)
    report = {"step": 1, "metrics": {"done": True}}
    with pool.open_process(make_start(Resettable, tmp_path, {}, steps=1, reports=(report,)), LOG) as channel:
        (last_message,) = receive_messages(channel)
    assert get_reason_code(last_message.outcome.reason) == "done-reported"
    assert train_trial(2)["object"] == first["object"]
    assert read_acts(witness) == ["setup 1", "reset 2"]


def test_a_trial_that_is_asked_to_stop_while_a_process_declines_stops_in_the_new_one(
    pool: TrialProcessPool, train_trial: Trainer, tmp_path: Path, witness: Path
) -> None:
    train_trial(1)
    config = {"x": 2, "witness": str(witness), "declines": True}
    with pool.open_process(make_start(Resettable, tmp_path, config, cadence=Cadence(every_steps=1)), LOG) as channel:
        channel.send(CheckpointAndStop())
        acknowledge_save(channel)
        last = receive_messages(channel)[-1]
    assert get_reason_code(last.outcome.reason) == "saved-as-requested"
    assert read_acts(witness)[:3] == ["setup 1", "cleanup 1", "setup 2"]


def test_a_trainable_that_declines_cleans_up_and_the_trial_begins_in_a_new_process(
    train_trial: Trainer, witness: Path
) -> None:
    first, second = train_trial(1), train_trial(2, declines=True)
    assert first["pid"] != second["pid"]
    assert read_acts(witness) == ["setup 1", "cleanup 1", "setup 2"]
    assert train_trial(3)["pid"] == second["pid"]


@pytest.mark.parametrize("how", ["raises", "is killed", "is interrupted", "is given up"])
def test_a_process_whose_trial_did_not_end_well_serves_no_other(
    pool: TrialProcessPool, processes: Family, train_trial: Trainer, tmp_path: Path, witness: Path, how: str
) -> None:
    before = train_trial(1)["pid"]
    config = {
        "raises": {"raises": True},
        "is killed": {"signals": signal.SIGKILL},
        "is interrupted": {},
        "is given up": {"gate": "/none"},
    }[how]
    start = make_start(
        Resettable, tmp_path, {"x": 2, "witness": str(witness), **config}, cadence=Cadence(every_steps=1)
    )
    with pool.open_process(start, LOG) as channel:
        if how == "is interrupted":
            channel.send(CheckpointAndStop())
            acknowledge_save(channel)
        if how == "is given up":
            wait_until(lambda: isinstance(channel.receive(timedelta(0)), TrainableLoaded), what=lambda: "the trial")
        else:
            last = receive_messages(channel)[-1]
            assert isinstance(last, TrainableLoaded if how == "is killed" else TrainingEnded)
            assert (isinstance(last, TrainingEnded) and last.raised) == (how == "raises")
        pids = set(processes.pids("trial"))
        channel.end()
    assert pids.isdisjoint(processes.pids("trial"))  # the one that is forked ahead for the next trial may be there
    assert train_trial(3)["pid"] != before
    assert read_acts(witness).count("setup 3") == 1


def test_a_process_that_has_led_the_ranks_of_a_launcher_serves_no_other(train_trial: Trainer) -> None:
    """Its ranks, their process group and their socket belong to that trial."""
    assert train_trial(1, Leads)["pid"] != train_trial(2, Leads)["pid"]


def test_a_trial_that_gave_its_slot_away_leaves_a_process_that_serves(
    pool: TrialProcessPool, train_trial: Trainer, tmp_path: Path, witness: Path
) -> None:
    start = make_start(Resettable, tmp_path, {"x": 1, "witness": str(witness)}, milestone=1)
    paused = TrialPaused(trial="t", reason="paused")
    with pool.open_process(start, LOG) as channel:
        wait_until(lambda: isinstance(channel.receive(timedelta(0)), StepDone), what=lambda: "the step")
        channel.send(StopTrial(outcome=paused, save=False))
        (last,) = receive_messages(channel)
    assert (last.outcome, last.awaits_reuse) == (paused, True)
    train_trial(2)
    assert read_acts(witness) == ["setup 1", "reset 2"]


def test_a_waiting_process_serves_only_trials_with_the_same_trainable_and_variables(train_trial: Trainer) -> None:
    first = train_trial(1, environment={"CUDA_VISIBLE_DEVICES": "0"})["pid"]
    second = train_trial(2, environment={"CUDA_VISIBLE_DEVICES": "1"})["pid"]
    assert first != second
    assert train_trial(3, environment={"CUDA_VISIBLE_DEVICES": "0"})["pid"] == first
    assert train_trial(4, environment={"CUDA_VISIBLE_DEVICES": "1"})["pid"] == second
    assert train_trial(5, AnotherKind)["pid"] not in (first, second)


def test_a_started_process_is_kept_as_a_forked_one_is(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, witness: Path
) -> None:
    monkeypatch.setenv(*PORTABLE)
    with family(), no_leaks(), TrialProcessPool(slots=1) as pool:
        for x in (1, 2):
            start = make_start(Resettable, tmp_path, {"x": x, "witness": str(witness)}, steps=1)
            with pool.open_process(start, LOG) as channel:
                receive_metrics(channel)
    assert read_acts(witness) == ["setup 1", "reset 2", "cleanup 2"]


def test_in_a_thread_of_the_flow_none_is_kept(tmp_path: Path, witness: Path) -> None:
    with open_trial_thread(
        make_start(Resettable, tmp_path, {"x": 1, "witness": str(witness)}, steps=1), LOG
    ) as channel:
        last = receive_messages(channel)[-1]
        channel.end()
    assert not last.awaits_reuse
    assert read_acts(witness) == ["setup 1", "cleanup 1"]


@pytest.mark.parametrize("name", long_after(2, READ_ONCE_VARIABLES))
def test_a_worker_whose_devices_change_trains_in_another_process(
    train_trial: Trainer, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    pids = []
    for value in ("1", "1", "2"):
        monkeypatch.setenv(name, value)
        pids.append(train_trial()["pid"])
    assert (pids[0] == pids[1], pids[1] == pids[2]) == (True, False)


# --------------------------------------------------------------------------------------------- state that is reset


@pytest.mark.parametrize("reuse", long_after(1, ["auto", "never"]))
def test_what_the_import_has_set_is_set_for_each_trial_of_a_kept_process(module: Module, reuse: Reuse) -> None:
    module.write("""
        import random
        import prefect_tune as pt
        os.environ["SET_BY_IMPORT"] = "yes"
        random.seed(7)
        class Trains(pt.Trainable):
            def step(self):
                metrics = {"pid": os.getpid(), "set": os.environ.get("SET_BY_IMPORT"), "drawn": random.random()}
                os.environ["SET_BY_IMPORT"] = "changed"
                return metrics
            def save_checkpoint(self, checkpoint_dir): pass
            def reset_config(self, config): return True
    """)
    start = module.start().model_copy(update={"trainable": f"{module.name}:Trains"})
    results = []
    with TrialProcessPool(slots=1, reuse=reuse) as pool:
        for _ in range(3):
            with pool.open_process(start, LOG) as channel:
                results.append(dict(receive_metrics(channel)))
    assert results[0] == results[1] == results[2]
    assert (results[0]["set"], results[0]["drawn"]) == ("yes", random.Random(7).random())


def test_what_a_trial_left_in_its_process_is_not_there_for_the_next(
    train_trial: Trainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    first, second, third = [train_trial(x, litters=True) for x in (1, 2, 3)]
    assert first["pid"] == second["pid"] == third["pid"]
    for metrics in (first, second, third):
        assert (metrics["directory"], metrics["variable"], metrics["left"]) == (str(tmp_path), None, [])
        assert metrics["temporary"].startswith(str(Path(first["temporary"]).parent))
    assert not set(second["drawn"]) & set(third["drawn"])


def test_temporary_files_live_as_long_as_their_process_which_may_use_them_yet(train_trial: Trainer) -> None:
    first, second = train_trial(1), train_trial(2)
    assert first["temporary"] != second["temporary"]
    assert Path(first["temporary"]).is_dir()
    train_trial(3, declines=True)
    assert not Path(first["temporary"]).exists()


def test_what_each_trial_prints_is_logged_as_its_own(pool: TrialProcessPool, tmp_path: Path) -> None:
    for x, act in ((1, "setup"), (2, "reset"), (3, "reset")):
        recorder = LogRecorder()
        with pool.open_process(make_start(Resettable, tmp_path, {"x": x}, steps=1), make_log(recorder)) as channel:
            receive_metrics(channel)
        assert recorder.reasons == [f"{act} {x}"]


def test_a_message_to_a_trial_after_its_end_does_not_reach_the_next_one(pool: TrialProcessPool, tmp_path: Path) -> None:
    with pool.open_process(make_start(Resettable, tmp_path, {"x": 1}, steps=1), LOG) as first:
        pid = receive_metrics(first)["pid"]
        first.send(CheckpointAndStop())
    with pool.open_process(make_start(Resettable, tmp_path, {"x": 2}, steps=3), LOG) as second:
        first.send(CheckpointAndStop())
        metrics = receive_metrics(second)
    assert (metrics["pid"], metrics["count"]) == (pid, 3)


# ------------------------------------------------------------------------------------------- failures and kills


@pytest.mark.parametrize("fails", ["only after an earlier one", "in each process"])
def test_a_trial_that_fails_in_a_kept_process_begins_again_in_a_new_one(
    module: Module, recorder: LogRecorder, fails: str
) -> None:
    module.write(f"""
        import prefect_tune as pt
        trials = []
        class Trains(pt.Trainable):
            def setup(self, config): self.begin(config)
            def step(self): return {{"pid": os.getpid(), "x": self.x}}
            def save_checkpoint(self, checkpoint_dir): pass
            def reset_config(self, config):
                self.begin(config)
                return True
            def begin(self, config):
                self.x = config["x"]
                trials.append(self.x)
                if self.x == 2 and ({fails!r} == "in each process" or len(trials) > 1):
                    raise RuntimeError("only once in a process")
    """)
    pids = []
    with TrialProcessPool(slots=1) as pool:
        for x in (1, 2):
            start = module.start(x).model_copy(update={"trainable": f"{module.name}:Trains"})
            with pool.open_process(start, make_log(recorder)) as channel:
                messages = receive_messages(channel)
                pids.append([message.report.metrics["pid"] for message in messages if isinstance(message, StepDone)])
    assert isinstance(messages[-1], TrainingEnded)
    assert (pids[0] != pids[1], messages[-1].raised) == (True, fails == "in each process")
    (line,) = recorder.reasons
    assert line.endswith("before its first report (RuntimeError: only once in a process); starting a new process")


@pytest.mark.parametrize("when", ["as it waits", "as it is reset"])
def test_a_process_that_is_killed_before_it_has_taken_the_trial_on_costs_no_attempt(
    pool: TrialProcessPool, processes: Family, tmp_path: Path, witness: Path, train_trial: Trainer, when: str
) -> None:
    first = train_trial(1)["pid"]
    recorder = LogRecorder()
    if when == "as it waits":
        os.kill(first, signal.SIGKILL)
        wait_until(lambda: not processes.pids("tune-subreaper"), what=lambda: f"the end of {first}")
    config = {"x": 2, "witness": str(witness)} | ({"in_reset": signal.SIGKILL} if when == "as it is reset" else {})
    with pool.open_process(make_start(Resettable, tmp_path, config, steps=1), make_log(recorder)) as channel:
        metrics = receive_metrics(channel)
    assert (metrics["x"], metrics["pid"] != first) == (2, True)
    lines = [line for line in recorder.reasons if "reused from an earlier trial ended by SIGKILL" in line]
    assert len(lines) == (when == "as it is reset")


# -------------------------------------------------------------------------------------------- number of processes


def test_no_more_wait_than_there_are_slots(pool: TrialProcessPool, processes: Family, tmp_path: Path) -> None:
    gate, witness = tmp_path / "gate", tmp_path / "witness"

    def train(x: int) -> None:
        config = {"x": x, "gate": str(gate), "witness": str(witness)}
        with pool.open_process(make_start(Resettable, tmp_path, config, steps=1), LOG) as channel:
            receive_metrics(channel)

    with ThreadPoolExecutor(4) as threads:
        results = threads.map(train, range(4))
        wait_until(lambda: len(read_acts(witness)) == 4, what=lambda: f"four trials: {read_acts(witness)}")
        gate.touch()
        list(results)
    cleaned_up = [act for act in read_acts(witness) if act.startswith("cleanup")]
    assert len(processes.pids("trial")) == 4 - len(cleaned_up) <= 2


def test_waiting_processes_make_room_for_trials_of_another_kind(
    train_trial: Trainer, processes: Family, witness: Path
) -> None:
    for x in range(3):
        train_trial(x, environment={"SLOT": str(x)})
    assert len(processes.pids("trial")) == 2
    assert read_acts(witness) == ["setup 0", "setup 1", "cleanup 0", "setup 2"]


def test_at_the_end_waiting_processes_clean_up_and_end(tmp_path: Path, witness: Path) -> None:
    with family() as processes, TrialProcessPool(slots=2) as pool:
        start = make_start(Resettable, tmp_path, {"x": 1, "witness": str(witness)}, steps=1)
        with pool.open_process(start, LOG) as channel:
            temporary = receive_metrics(channel)["temporary"]
        assert len(processes.pids("trial")) == 1
        descriptors = count_descriptors()
    assert not processes.pids()
    assert read_acts(witness) == ["setup 1", "cleanup 1"]
    assert count_descriptors() < descriptors
    assert not Path(temporary).exists()


def test_100_trials_in_kept_processes_leave_neither_descriptors_nor_threads(train_trial: Trainer) -> None:
    train_trial(0)
    with no_leaks():
        assert len({train_trial(x)["pid"] for x in range(100)}) == 1
