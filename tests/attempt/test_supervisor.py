"""How the supervisor classifies the end of an attempt: cause, pending uploads, silence and grace period."""

from __future__ import annotations

import logging
import os
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from multiprocessing import Pipe
from pathlib import Path
from typing import cast

import pytest

from prefect_tune.attempt import supervisor as attempt_supervisor
from prefect_tune.attempt import usage_meter
from prefect_tune.attempt.commit_worker import CommitWorker, GroupSave
from prefect_tune.attempt.processes.process_channel import (
    PARENT_RANK,
    RankGroup,
    RankLostError,
    TrialChannel,
    _JoinedRank,
)
from prefect_tune.attempt.processes.process_pool import TrialProcessPool
from prefect_tune.attempt.search_channel import InProcessChannel
from prefect_tune.attempt.supervisor import MetricsCollector, PartCollector
from prefect_tune.attempt.trial_spec import TrialSpec
from prefect_tune.attempt.usage_meter import UsageMeter
from prefect_tune.blocks import LocalTarget
from prefect_tune.core.errors import InvalidInput, StagedFilesChanged, StoreRefused
from prefect_tune.core.journal_events import Cause, FinishKind, Outcome, TrialFinished
from prefect_tune.core.messages.process_messages import (
    CheckpointAndStop,
    CheckpointSaved,
    ContinueTraining,
    FromTrial,
    MeanMetrics,
    MilestoneReached,
    RankCommand,
    RankMetrics,
    SaveFailed,
    StepDone,
    StopTrial,
    ToTrial,
    TrainableLoaded,
    TrainingEnded,
)
from prefect_tune.core.reasons import ProcessEnd, Reason, get_reason_code, make_reason
from prefect_tune.core.storage.layout import TrialKey
from prefect_tune.core.usage_records import GroupUsage, RankEnd
from prefect_tune.core.values import StepReport
from prefect_tune.linux import MemoryLimit
from prefect_tune.storage_retries import stopping_retries_on
from tests.fakes.outcomes import make_failure, make_stop
from tests.long_cases import long_after

LOADED = TrainableLoaded(pid=1, source_digest="")
KILLED = ProcessEnd(signal="SIGKILL")
DONE = TrialFinished(trial="t", reason="done")
RETURNED = TrialFinished(trial="t", reason=make_reason("returned"), kind=FinishKind.RETURNED)


@dataclass
class FakeChannel:
    """A trial that sends `messages` (a float is a pause in seconds), then is silent or ends with `process_end`."""

    messages: Sequence[FromTrial | float]
    process_end: ProcessEnd | None = None
    sent: list[ToTrial] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._unread = list(self.messages)
        self.connection, self._other = Pipe()
        self._other.send_bytes(b"there may always be a message")

    def receive(self, timeout: timedelta) -> FromTrial | None:
        del timeout
        if self._unread:
            message = self._unread.pop(0)
            if not isinstance(message, float):
                return message
            time.sleep(message)
            return None
        if self.process_end is not None:
            raise EOFError
        time.sleep(0.01)
        return None

    def send(self, message: ToTrial) -> None:
        self.sent.append(message)

    def end(self) -> ProcessEnd:
        return self.process_end or ProcessEnd()

    def last_output(self) -> str:
        return self.end().output


@dataclass
class FakeCommitWorker:
    """Completes a save when the test calls its item of `uploads`."""

    log: logging.Logger = field(default_factory=logging.getLogger)
    error: BaseException | None = None
    source_digest: str = ""
    queued_reports: list[tuple[int, bool]] = field(default_factory=list)
    """Each step, and whether it awaits a decision."""
    flushes: int = 0
    uploads: list[Callable[[], None]] = field(default_factory=list)

    def queue_report(self, report: StepReport, *, awaits_decision: bool) -> None:
        self.queued_reports.append((report.step, awaits_decision))

    def queue_flush(self) -> None:
        self.flushes += 1

    def queue_save(self, save: GroupSave, committed: Callable[[int], None], _failed: object) -> None:
        self.uploads.append(lambda: committed(save.done.report.step))


@pytest.fixture
def spec(tmp_path: Path) -> TrialSpec:
    return TrialSpec(
        target=LocalTarget(path=str(tmp_path)),
        trial=TrialKey(experiment="e", generation=1, trial="t"),
        trainable="",
        stopper="",
        needs_history=False,
        grace_period=timedelta(seconds=0.3),
        silence_timeout=timedelta(seconds=0.3),
    )


def make_step(number: int, *, saves: bool = False) -> StepDone:
    report = StepReport(step=number, metrics={})
    return StepDone(report=report, checkpoint="/tmp/none" if saves else None, is_owned_by_supervisor=saves)


LAST = make_step(1, saves=True).model_copy(update={"finish_reason": "its criterion is met"})


@pytest.fixture
def patient_spec(spec: TrialSpec) -> TrialSpec:
    return replace(spec, silence_timeout=None)


def make_group(*channels: FakeChannel, **options: int) -> RankGroup:
    return RankGroup(cast("Sequence[TrialChannel]", channels), **options)


def supervise_group(group: RankGroup, spec: TrialSpec, meter: UsageMeter | None = None) -> Outcome:
    worker = cast("CommitWorker", FakeCommitWorker())
    return attempt_supervisor.supervise(group, worker, spec, make_channel(), meter or UsageMeter())


def supervise(
    channel: FakeChannel,
    spec: TrialSpec,
    commit_worker: FakeCommitWorker | None = None,
    search_channel: InProcessChannel | None = None,
) -> Outcome:
    worker, answers = cast("CommitWorker", commit_worker or FakeCommitWorker()), search_channel or make_channel()
    return attempt_supervisor.supervise(make_group(channel), worker, spec, answers, UsageMeter())


def make_channel() -> InProcessChannel:
    return InProcessChannel("t", lambda _: None, TrialProcessPool(slots=1))


@pytest.mark.parametrize(
    ("process_end", "cause", "at_start"),
    long_after(
        3,
        [
            (KILLED, Cause.MACHINE, False),
            (ProcessEnd(signal="SIGTERM"), Cause.MACHINE, False),
            (ProcessEnd(signal="SIGSEGV"), Cause.TRAINABLE, True),
            (ProcessEnd(signal="SIGABRT", output="terminate called"), Cause.TRAINABLE, True),
            (ProcessEnd(exit_code=0), Cause.TRAINABLE, True),
            (
                ProcessEnd(signal="SIGKILL", output="worker 7 exited with code 1, maybe by SIGSEGV"),
                Cause.MACHINE,
                False,
            ),
            (ProcessEnd(exit_code=1, output="my worker was ended by SIGKILL"), Cause.TRAINABLE, True),
        ],
    ),
)
def test_a_death_before_the_first_step_speaks_against_the_checkpoint_only_if_the_trainable_caused_it(
    spec: TrialSpec, process_end: ProcessEnd, cause: Cause, at_start: bool
) -> None:
    outcome = supervise(FakeChannel([LOADED], process_end), spec)
    assert (outcome.cause, outcome.before_first_step) == (cause, at_start)


def test_a_death_before_the_trainable_is_loaded_or_after_a_step_speaks_against_no_checkpoint(spec: TrialSpec) -> None:
    for messages in ([], [LOADED, make_step(1)]):
        outcome = supervise(FakeChannel(messages, ProcessEnd(signal="SIGSEGV")), spec)
        assert (outcome.cause, outcome.before_first_step) == (Cause.TRAINABLE, False)


@pytest.mark.parametrize(("seconds_before", "cause"), [(0.4, Cause.MACHINE), (0.0, Cause.OUT_OF_MEMORY)])
def test_what_the_kernel_killed_for_memory_long_before_is_not_this_trial(
    patient_spec: TrialSpec, monkeypatch: pytest.MonkeyPatch, seconds_before: float, cause: Cause
) -> None:
    monkeypatch.setattr(usage_meter, "_MIN_SAMPLE_INTERVAL_SECONDS", 0.1)
    kills = [5]

    class Channel(FakeChannel):
        def receive(self, timeout: timedelta) -> FromTrial | None:
            if self._unread == [] or self._unread[0] == seconds_before:
                kills[0] = 6
            return super().receive(timeout)

    monkeypatch.setattr(MemoryLimit, "count_oom_kills", lambda _: kills[0])
    messages = [LOADED, make_step(1), *([seconds_before, 0.2, 0.2, 0.2] if seconds_before else [])]
    assert supervise(Channel(messages, KILLED), patient_spec).cause is cause


@pytest.mark.parametrize("error", [InvalidInput("a link to nothing"), StagedFilesChanged("it grew")])
def test_what_is_wrong_with_the_directory_handed_over_is_the_trials_failure(
    spec: TrialSpec, error: BaseException
) -> None:
    outcome = supervise(FakeChannel([LOADED, make_step(1, saves=True)]), spec, FakeCommitWorker(error=error))
    assert (outcome.cause, outcome.reason) == (Cause.TRAINABLE, make_reason("save-failed", error=str(error)))


def test_a_process_that_is_killed_during_its_save_is_the_machines_failure_though_its_files_are_gone(
    spec: TrialSpec,
) -> None:
    commit_worker = FakeCommitWorker()

    class Channel(FakeChannel):
        def end(self) -> ProcessEnd:
            commit_worker.error = StagedFilesChanged("its temporary files were removed with it")
            return super().end()

    outcome = supervise(Channel([LOADED, make_step(1, saves=True)], KILLED), spec, commit_worker)
    assert (outcome.cause, outcome.reason) == (Cause.MACHINE, make_reason("process-ended", signal="SIGKILL"))


def test_a_target_that_fails_is_the_machines_failure(spec: TrialSpec) -> None:
    commit_worker = FakeCommitWorker(error=StoreRefused("AccessDenied"))
    outcome = supervise(FakeChannel([LOADED, make_step(1, saves=True)]), spec, commit_worker)
    assert (outcome.cause, outcome.before_first_step) == (Cause.MACHINE, False)
    assert outcome.reason == make_reason("write-failed", error="StoreRefused: AccessDenied")


def test_an_attempt_that_leaves_since_its_metric_cannot_be_compared_has_failed(spec: TrialSpec) -> None:
    search_channel = InProcessChannel("t", lambda _: search_channel.send_answer(stop), TrialProcessPool(slots=1))
    failure = make_failure("found no metric 'loss'", Cause.BAD_METRIC)
    stop = StopTrial(outcome=failure, save=False)
    step = StepDone(report=StepReport(step=2, metrics={}), awaits_decision=True)
    channel = FakeChannel([LOADED, step, TrainingEnded(outcome=failure)])
    assert supervise(channel, spec, search_channel=search_channel) == failure
    assert channel.sent == [stop]


def test_the_clock_of_silence_does_not_run_while_the_trainable_is_being_loaded(spec: TrialSpec) -> None:
    assert supervise(FakeChannel([0.6, 0.0, LOADED, TrainingEnded(outcome=DONE)]), spec) == DONE


def test_who_waits_for_an_upload_is_not_taken_for_hung_and_who_waits_for_nothing_is(spec: TrialSpec) -> None:
    commit_worker = FakeCommitWorker()

    class Channel(FakeChannel):
        def receive(self, timeout: timedelta) -> FromTrial | None:
            if self._unread == [0.0]:  # the trial was blocked in `pt.report` until here
                commit_worker.uploads.pop()()
            return super().receive(timeout)

    channel = Channel([LOADED, make_step(1, saves=True), 0.4, 0.0])
    start_time = time.monotonic()
    outcome = supervise(channel, spec, commit_worker)
    assert time.monotonic() - start_time >= 0.4 + 0.3
    assert channel.sent == [CheckpointSaved(step=1)]
    assert (outcome.cause, get_reason_code(outcome.reason)) == (Cause.MACHINE, "silent")


def test_the_clock_of_silence_starts_again_when_a_save_has_failed(
    spec: TrialSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    late = timedelta(seconds=0.5)  # the ranks wait for the missing part, longer than silence is allowed
    monkeypatch.setattr(attempt_supervisor, "PartCollector", lambda size: PartCollector(size, late))
    monkeypatch.setattr(attempt_supervisor, "_RANK_EXIT_TIMEOUT", timedelta(0))
    done = TrainingEnded(outcome=DONE)
    first, messages = FakeChannel([]), list[FromTrial]([LOADED, make_step(1, saves=True)])

    def receive(timeout: timedelta) -> FromTrial | None:
        del timeout
        time.sleep(0.01)
        return messages.pop(0) if messages else done if first.sent == [SaveFailed(step=1)] else None

    monkeypatch.setattr(first, "receive", receive)
    outcome = supervise_group(make_group(first, FakeChannel([LOADED])), spec)
    assert get_reason_code(outcome.reason) == "not-committed", "the trial heard of the failed save, and ended"


def test_who_is_told_unasked_to_leave_is_taken_for_hung_all_the_same(spec: TrialSpec) -> None:
    search_channel = make_channel()

    class Channel(FakeChannel):
        def receive(self, timeout: timedelta) -> FromTrial | None:
            if not self._unread:
                search_channel.send_answer(make_stop("enough", save=True))
            return super().receive(timeout)

        def send(self, message: ToTrial) -> None:
            super().send(message)
            assert len(self.sent) < 100, "the supervisor waits for ever"

    outcome = supervise(Channel([LOADED, make_step(1)]), spec, search_channel=search_channel)
    assert get_reason_code(outcome.reason) == "silent"


def test_an_answer_before_the_trainable_is_loaded_starts_no_clock(spec: TrialSpec) -> None:
    answer = ContinueTraining(milestone=None)
    search_channel = InProcessChannel("t", lambda _: search_channel.send_answer(answer), TrialProcessPool(slots=1))
    messages = [MilestoneReached(report=StepReport(step=1, metrics={})), 0.6, 0.0, LOADED, TrainingEnded(outcome=DONE)]
    channel = FakeChannel(messages)
    assert supervise(channel, spec, search_channel=search_channel) == DONE
    assert channel.sent == [answer]


@pytest.mark.parametrize(("saves", "code"), [(True, "upload-unfinished"), (False, "no-checkpoint")])
def test_who_is_asked_to_stop_has_the_grace_and_then_it_is_said_what_was_missing(
    spec: TrialSpec, saves: bool, code: str
) -> None:
    search_channel, channel = make_channel(), FakeChannel([LOADED, make_step(1, saves=saves)])
    search_channel.run_stop.set()
    outcome = supervise(channel, spec, search_channel=search_channel)
    assert (outcome.cause, outcome.before_first_step) == (Cause.PREEMPTED, False)
    assert outcome.reason == make_reason(code, seconds=0.3)
    assert channel.sent == [CheckpointAndStop()]


def test_a_trial_whose_process_is_interrupted_twice_is_ended_before_its_grace_is_over(spec: TrialSpec) -> None:
    search_channel, abandoned = make_channel(), threading.Event()
    search_channel.run_stop.set()
    abandoned.set()
    long_grace = replace(spec, grace_period=timedelta(hours=1))
    with stopping_retries_on(abandoned):
        outcome = supervise(FakeChannel([LOADED]), long_grace, search_channel=search_channel)
    assert (outcome.cause, outcome.reason) == (Cause.PREEMPTED, make_reason("interrupted-twice"))


def test_a_group_that_was_asked_to_stop_and_whose_last_save_failed_does_not_say_that_it_has_saved(
    patient_spec: TrialSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attempt_supervisor, "PartCollector", lambda size: PartCollector(size, timedelta(0)))
    monkeypatch.setattr(attempt_supervisor, "_RANK_EXIT_TIMEOUT", timedelta(0))
    saved = TrainingEnded(outcome=make_failure("saved", Cause.PREEMPTED))
    first = FakeChannel([LOADED, make_step(1, saves=True), *[0.01] * 9, saved])
    outcome = supervise_group(make_group(first, FakeChannel([LOADED])), patient_spec)
    assert first.sent == [SaveFailed(step=1)]
    assert (outcome.cause, get_reason_code(outcome.reason)) == (Cause.PREEMPTED, "not-committed")


def test_a_trial_knows_of_its_commit_when_it_counts(spec: TrialSpec) -> None:
    """Another thread may end it at once: as a failure, unless the newest save counts by then."""
    states: list[tuple[list[Reason], bool]] = []

    class Channel(FakeChannel):
        def send(self, message: ToTrial) -> None:
            super().send(message)
            states.append(([*supervisor._failed_save_reasons], supervisor._has_pending_saves))

    group, worker = make_group(Channel([])), cast("CommitWorker", FakeCommitWorker())
    supervisor = attempt_supervisor._Supervisor(group, worker, spec, make_channel(), UsageMeter())
    supervisor._failed_save_reasons.append(make_reason("not-committed", step=1, error="late"))
    supervisor._on_step(make_step(2, saves=True))
    supervisor._on_checkpoint_committed(2)
    assert states == [([], False)]


@pytest.mark.parametrize("received", range(4))
def test_the_end_of_a_rank_is_received_before_what_its_launcher_says_of_it(received: int) -> None:
    launcher = FakeChannel([TrainingEnded(outcome=make_failure("rank 1 failed"), raised=True)])
    rank = FakeChannel([], KILLED)
    group = make_group(launcher, rank)
    group._channels = group._open_channels = cast("dict[int, TrialChannel]", {PARENT_RANK: launcher, 1: rank})
    group._turn = received
    with pytest.raises(RankLostError):
        group.receive(timedelta(0))


def make_raised(text: str, traceback: str = "File x, line 1") -> TrainingEnded:
    """Return the message of a rank that raised an exception of type `E`."""
    return TrainingEnded(outcome=make_failure(text, type="E", traceback=traceback), raised=True)


def make_rank_end(text: str) -> Reason:
    """Return the end reason of a rank that sent `make_raised(text)`."""
    return make_reason("raised", text=text, type="E")


@pytest.mark.parametrize(("is_alive", "cause"), [(True, Cause.MACHINE), (False, Cause.TRAINABLE)])
def test_a_rank_that_is_dead_before_another_one_has_exited_was_not_ended_by_their_launcher(
    is_alive: bool, cause: Cause, patient_spec: TrialSpec
) -> None:
    """The supervisor receives the message of the failed rank before the death of the other."""
    dead = subprocess.Popen(["true"])
    dead.wait()
    failed = FakeChannel([LOADED, make_raised("connection reset by peer")])
    channels = {PARENT_RANK: FakeChannel([]), 0: FakeChannel([0.01] * 5, KILLED), 1: failed}
    group = make_group(*channels.values())
    group._channels = cast("dict[int, TrialChannel]", channels)
    group._open_channels = dict(group._channels)
    group._pids = {0: dead.pid, 1: os.getpid() if is_alive else dead.pid}
    outcome = supervise_group(group, patient_spec)
    assert outcome.cause is cause, outcome


@pytest.mark.parametrize(
    ("ranks", "ends"),
    long_after(
        6,
        [
            (
                [
                    FakeChannel([LOADED, make_raised("peer\nand more", "File y, line 2")]),
                    FakeChannel([], KILLED),
                    FakeChannel([make_raised("peer")]),
                ],
                [
                    RankEnd(ranks=(1,), how=make_reason("rank-died", signal="SIGKILL"), is_cause=True),
                    RankEnd(ranks=(0, 2), how=make_rank_end("peer")),
                ],
            ),
            (
                [
                    FakeChannel([LOADED]),
                    FakeChannel([TrainingEnded(outcome=RETURNED)]),
                    FakeChannel([make_raised("x")]),
                ],
                [
                    RankEnd(ranks=(2,), how=make_rank_end("x"), is_cause=True),
                    RankEnd(ranks=(1,), how=make_reason("returned")),
                ],
            ),
            (
                [
                    FakeChannel([LOADED, make_step(1), TrainingEnded(outcome=RETURNED)]),
                    FakeChannel([TrainingEnded(outcome=RETURNED)]),
                    FakeChannel([], ProcessEnd(exit_code=3)),
                ],
                [
                    RankEnd(ranks=(2,), how=make_reason("rank-died", exit_code=3), is_cause=True),
                    RankEnd(ranks=(0, 1), how=make_reason("returned")),
                ],
            ),
            (
                [
                    FakeChannel([LOADED, make_raised("a")]),
                    FakeChannel([], KILLED),
                    *(FakeChannel([make_raised(text)]) for text in "ba"),
                ],
                [
                    RankEnd(ranks=(1,), how=make_reason("rank-died", signal="SIGKILL"), is_cause=True),
                    RankEnd(ranks=(0, 3), how=make_rank_end("a")),
                    RankEnd(ranks=(2,), how=make_rank_end("b")),
                ],
            ),
            (
                [
                    FakeChannel([LOADED, make_step(1), TrainingEnded(outcome=RETURNED)]),
                    FakeChannel([*[0.01] * 9, make_raised("x")]),
                    FakeChannel([0.01] * 4, KILLED),
                ],
                [
                    RankEnd(ranks=(1,), how=make_rank_end("x"), is_cause=True),
                    RankEnd(ranks=(0,), how=make_reason("returned")),
                    RankEnd(ranks=(2,), how=make_reason("rank-died", signal="SIGKILL")),
                ],
            ),
            (
                [FakeChannel([LOADED, RankMetrics(step=1, metrics={})]), FakeChannel([LOADED])],
                [RankEnd(ranks=(1,), how=make_reason("rank-without-report"), is_cause=True)],
            ),
            ([FakeChannel([LOADED, make_step(1), TrainingEnded(outcome=RETURNED)])] * 3, []),
            ([FakeChannel([LOADED, make_raised("x")])], []),
            (
                [FakeChannel([LOADED, make_step(1, saves=True), make_step(2, saves=True)]), *[FakeChannel([])] * 2],
                [RankEnd(ranks=(1, 2), how=make_reason("rank-without-part"), is_cause=True)],
            ),
            (
                [FakeChannel([LOADED, LAST]), FakeChannel([])],
                [RankEnd(ranks=(1,), how=make_reason("rank-without-part"), is_cause=True)],
            ),
        ],
    ),
    ids=[
        "a killed rank",
        "one returned",
        "a rank that dies",
        "equal ends",
        "a rank that raises in its last step",
        "a rank without metrics",
        "all alike",
        "a single process",
        "ranks without a part",
        "a rank without a part of the last save",
    ],
)
def test_the_ends_of_ranks_unlike_the_others_are_known_by_rank(
    patient_spec: TrialSpec, monkeypatch: pytest.MonkeyPatch, ranks: Sequence[FakeChannel], ends: Sequence[RankEnd]
) -> None:
    monkeypatch.setattr(attempt_supervisor, "PartCollector", lambda size: PartCollector(size, timedelta(0)))
    monkeypatch.setattr(attempt_supervisor, "MetricsCollector", lambda size: MetricsCollector(size, timedelta(0)))
    if all(rank.process_end or (rank.messages and isinstance(rank.messages[-1], TrainingEnded)) for rank in ranks):
        # wait for all ranks, even on a slow machine
        monkeypatch.setattr(attempt_supervisor, "_ROOT_CAUSE_TIMEOUT", timedelta(minutes=1))
    meter = UsageMeter()
    supervise_group(make_group(*map(replace, ranks)), patient_spec, meter)
    assert list(meter.rank_ends) == ends
    assert isinstance(meter.get_usage(), GroupUsage) == bool(ends)


class OutOfMemoryMeter(UsageMeter):
    """Reports that the kernel killed a process for memory."""

    def _has_new_oom_kill(self) -> bool:
        return True


def test_a_rank_of_a_launcher_that_was_killed_for_memory_is_not_taken_for_a_failure_of_the_machine(
    patient_spec: TrialSpec,
) -> None:
    killed = FakeChannel([LOADED], _JoinedRank(7).end())
    outcome = supervise_group(make_group(FakeChannel([0.01] * 9), killed), patient_spec, OutOfMemoryMeter())
    assert outcome.cause is Cause.OUT_OF_MEMORY, outcome


def test_of_another_node_no_process_is_measured_and_no_kill_explained_with_the_memory_of_this_one(
    patient_spec: TrialSpec,
) -> None:
    with subprocess.Popen(["sleep", "60"]) as local_process:
        here, loaded = (TrainableLoaded(source_digest="", pid=pid) for pid in (os.getpid(), local_process.pid))
        ranks, meter = [FakeChannel([here, *[0.01] * 9]), FakeChannel([loaded], KILLED)], OutOfMemoryMeter()
        try:
            outcome = supervise_group(make_group(*ranks, local_rank_count=1), patient_spec, meter)
        finally:
            local_process.kill()
    assert outcome.cause is Cause.MACHINE, outcome
    assert meter.get_usage().peak_memory_bytes is None


def test_the_time_for_the_metrics_of_all_ranks_begins_when_all_have_loaded(
    patient_spec: TrialSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    class CountingMetrics(MetricsCollector):
        """Counts checks instead of seconds, so that a slow machine has as many."""

        def restart_timeout(self) -> None:
            super().restart_timeout()
            self.check_count = 0

        def overdue_reason(self) -> Reason | None:
            self.check_count += 1
            return make_reason("metrics-late") if self.check_count > 30 else None

    monkeypatch.setattr(attempt_supervisor, "MetricsCollector", CountingMetrics)
    reported = RankMetrics(step=1, metrics={"loss": 1.0})
    command = RankCommand(step=1, save=False, stop=False, outcome=None)
    first = FakeChannel([LOADED, reported, *[0.001] * 180, command, TrainingEnded(outcome=DONE)])
    second = FakeChannel([*[0.001] * 120, LOADED, reported, TrainingEnded(outcome=DONE)])
    assert supervise_group(make_group(first, second), patient_spec) == DONE
    assert first.sent == [MeanMetrics(step=1, metrics={"loss": 1.0})]


def test_a_trial_that_is_complete_when_its_attempt_begins_does_not_fail_because_a_rank_trains(
    patient_spec: TrialSpec,
) -> None:
    first = FakeChannel([LOADED, *[0.01] * 3, TrainingEnded(outcome=DONE)])
    second = FakeChannel([LOADED, RankMetrics(step=5, metrics={"loss": 1.0})])
    assert supervise_group(make_group(first, second), patient_spec) == DONE
