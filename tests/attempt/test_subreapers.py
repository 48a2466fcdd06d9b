"""A subreaper serves one trial's process after another; no orphan of one trial is left to the next."""

from __future__ import annotations

import ctypes
import multiprocessing
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from prefect_tune.attempt.processes.process_pool import TrialProcessPool
from prefect_tune.core.messages.process_messages import TrialEnded
from prefect_tune.core.reasons import ProcessEnd
from tests.fakes.trial_processes import LogRecorder, family, log_to, messages_of, metrics_of, start_of, until
from tests.trainables.processes.forked import daemonizes, looks_around
from tests.trainables.witness import acts_of

LOG = log_to(LogRecorder())
_NOT_TEXT = b"\xff\xfe odd) S"


def pid_of_a_trial(pool: TrialProcessPool, folder: Path) -> int:
    with pool.process(start_of(looks_around, folder), LOG) as channel:
        return int(metrics_of(channel)["pid"])


def test_a_subreaper_looks_after_the_next_trial_too_and_leaves_where_none_comes(tmp_path: Path) -> None:
    with family() as ours, TrialProcessPool(slots=1) as made:
        looked_after = defaultdict(set)

        def one_looks_after_three() -> bool:
            trial = pid_of_a_trial(made, tmp_path)
            looked_after[ours.one("tune-subreaper")].add(trial)
            return max(map(len, looked_after.values())) == 3

        # it leaves after a fifth of a second, in which a busy machine may start no trial
        until(one_looks_after_three, seconds=60, what=lambda: f"one for three: {looked_after}")
        subreaper = ours.one("tune-subreaper")
        made.dismiss()
        until(lambda: ours.names() == {"tune-forkserver"}, what=lambda: f"the end of {ours.names()}")
        pid_of_a_trial(made, tmp_path)
        assert ours.one("tune-subreaper") != subreaper


def test_what_an_earlier_trial_of_a_subreaper_has_started_does_not_outlive_it(tmp_path: Path) -> None:
    witness = tmp_path / "witness"
    with family() as ours, TrialProcessPool(slots=1) as made:
        for number in (1, 2):
            config = {"witness": str(witness), "gate": ""}
            with made.process(start_of(daemonizes, tmp_path, config), LOG) as channel:
                messages_of(channel)
                left = [each.step for each in acts_of(witness) if each.act in ("child", "orphan")]
                assert len(left) == 3 * number
                channel.end()
                assert not set(left) & set(ours.pids())


@pytest.mark.long
def test_trials_that_follow_each_other_as_a_subreaper_leaves_all_have_one(tmp_path: Path) -> None:
    with family() as ours, TrialProcessPool(slots=1) as made:
        pid_of_a_trial(made, tmp_path)
        pool = ours.one("tune-forkserver")
        for number in range(30):
            made.dismiss()  # what was forked ahead: its subreaper is free from now on, for a fifth of a second
            time.sleep(0.185 + number * 0.001)
            pid_of_a_trial(made, tmp_path)
        assert ours.one("tune-forkserver") == pool  # one that did not answer would have been replaced


@contextmanager
def a_process_whose_name_is_no_text() -> Iterator[None]:
    """As Linux makes them: it cuts a name to 15 bytes, even in the middle of a character."""
    context = multiprocessing.get_context("fork")
    named = context.Event()

    def idle() -> None:
        ctypes.CDLL(None).prctl(15, _NOT_TEXT)
        named.set()
        time.sleep(600)

    process = context.Process(target=idle)
    process.start()
    try:
        assert named.wait(60)
        assert Path(f"/proc/{process.pid}/comm").read_bytes() == _NOT_TEXT + b"\n"
        yield
    finally:
        process.kill()
        process.join()


def test_strays_end_where_some_process_of_the_machine_has_a_name_that_is_no_text(tmp_path: Path) -> None:
    witness = tmp_path / "witness"
    with family() as ours, a_process_whose_name_is_no_text(), TrialProcessPool(slots=1) as made:
        config = {"witness": str(witness), "gate": ""}
        with made.process(start_of(daemonizes, tmp_path, config), LOG) as channel:
            assert isinstance(messages_of(channel)[-1], TrialEnded)
            assert channel.end() == ProcessEnd(exit_code=0)
        left = [each.step for each in acts_of(witness) if each.act in ("child", "orphan")]
        assert len(left) == 3
        assert not set(left) & set(ours.pids())
