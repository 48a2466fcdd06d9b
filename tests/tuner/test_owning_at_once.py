"""Several processes of one flow run begin an experiment at once; and a task is retried that died while it began it."""

from __future__ import annotations

import threading
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from prefect_tune import journal_access, ownership
from prefect_tune.blocks import LocalTarget
from prefect_tune.core.restore import adopt
from prefect_tune.ownership import opening_events, own, write_if_unchanged


def test_two_processes_of_a_flow_run_begin_an_experiment_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = LocalTarget(path=str(tmp_path))
    monkeypatch.setattr(ownership, "_writing", defaultdict(threading.RLock))  # two processes have no common lock
    calls: list[int] = []

    def meanwhile(*arguments: Any, **options: Any) -> Any:
        if not calls:
            calls.append(1)
            state = own(target, "e")
            write_if_unchanged(target, state, "b", opening_events(None, "b", 1))
        return adopt(*arguments, **options)

    monkeypatch.setattr(journal_access, "adopt", meanwhile)
    assert "b" in own(target, "e").trials


def test_a_retried_task_adopts_what_its_first_try_had_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = LocalTarget(path=str(tmp_path))

    def dies(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(journal_access, "append_entry", dies)
        with pytest.raises(KeyboardInterrupt):
            own(target, "e")
    state = own(target, "e")
    assert state.adopted_in == state.term
