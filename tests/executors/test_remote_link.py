"""The answers that a remote trial receives through the target, also while the target fails."""

from __future__ import annotations

import logging
import time
from collections.abc import Hashable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from prefect_tune.attempt.search_link import Answer
from prefect_tune.blocks import LocalTarget
from prefect_tune.core.errors import StoreRefused
from prefect_tune.core.messages.process_messages import Leave, Proceed, Start, StopAndSave
from prefect_tune.core.messages.target_messages import UNASKED, answer
from prefect_tune.core.storage.layout import TrialKey
from prefect_tune.core.storage.object_store import Buffer
from prefect_tune.core.values import StepReport
from prefect_tune.executors import remote_executor
from prefect_tune.executors.remote_executor import StoreLink
from prefect_tune.runtime.trainable import Reuse
from prefect_tune.stores.posix_store import PosixStore
from tests.fakes.outcomes import make_leave
from tests.fakes.trial_processes import until

TRIAL = TrialKey(experiment="e", generation=1, trial="00000")
PROCEED = Proceed(milestone=9)
LEAVE = make_leave("enough", save=True, trial=TRIAL.trial)


class Ends:
    """Both ends of a link: the answers on the target, and those that the trial received."""

    def __init__(self, target: LocalTarget) -> None:
        self.target = target
        self.link = StoreLink(target, TRIAL, attempt=1)
        self.received: list[Answer] = []
        self.link.connect(self.received.append)

    def say(self, said: Proceed | Leave | StopAndSave, step: int = UNASKED) -> None:
        with self.target.open(timeout=timedelta(seconds=9)) as store:
            answer(store, TRIAL, 1, step, said)

    def ask(self, step: int) -> None:
        self.link.ask(StepReport(step=step, metrics={}))


@pytest.fixture
def ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Ends]:
    monkeypatch.setattr(remote_executor, "_UNASKED_SECONDS", 0.02)
    made = Ends(LocalTarget(path=str(tmp_path)))
    yield made
    made.link.close()


def test_a_trial_whose_reads_are_refused_for_a_while_gets_the_answer_later_and_warns_once(
    ends: Ends, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    read, refusals = PosixStore.read, [StoreRefused("AccessDenied")] * 5

    def refuses(store: PosixStore, path: str, **part: int) -> Buffer:
        if refusals:
            raise refusals.pop()
        return read(store, path, **part)

    with caplog.at_level(logging.WARNING, logger="prefect_tune"):
        monkeypatch.setattr(PosixStore, "read", refuses)
        ends.ask(3)
        until(lambda: not refusals)
        ends.say(PROCEED, 3)
        until(lambda: ends.received)
    assert ends.received == [PROCEED]
    assert [each.getMessage() for each in caplog.records if each.name == "prefect_tune"] == [
        "trial 00000 cannot read its answers on the target: StoreRefused: AccessDenied"
    ]


@pytest.mark.parametrize("damaged", [b"junk", b'{"version":2}'])
def test_a_trial_whose_answer_cannot_be_read_saves_and_ends(ends: Ends, damaged: bytes) -> None:
    path = Path(ends.target.path) / TRIAL.answer_path(1, 3)
    path.parent.mkdir(parents=True)
    path.write_bytes(damaged)
    ends.ask(3)
    until(ends.link.stop.is_set)
    assert ends.received == []


def test_an_answer_without_a_question_is_delivered_once(ends: Ends) -> None:
    ends.say(LEAVE)
    until(lambda: ends.received)
    ends.ask(3)
    time.sleep(0.2)
    ends.say(PROCEED, 3)
    until(lambda: PROCEED in ends.received)
    assert ends.received == [LEAVE, PROCEED]


def test_a_search_of_the_same_name_after_a_deletion_imports_the_trainable_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pools: list[object] = []

    @contextmanager
    def worker_pool(search: Hashable, _reuse: Reuse) -> Iterator[Any]:
        pools.append(search)
        yield SimpleNamespace(process=lambda *_: nullcontext())

    monkeypatch.setattr(remote_executor, "worker_pool", worker_pool)
    start, log = cast("Start", None), logging.getLogger("a run")
    for generation, trial in ((1, "00000"), (1, "00001"), (2, "00000")):
        key = TrialKey(experiment="e", generation=generation, trial=trial)
        link = StoreLink(LocalTarget(path=str(tmp_path)), key, 1, search_term=1)
        with link.process(start, log, {}):
            link.close()
    assert pools[0] == pools[1] != pools[2]
