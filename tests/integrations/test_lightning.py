"""Lightning: bitwise identical after kills, also in the middle of an epoch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from prefect_tune.attempt.processes.process_pool import TrialProcessPool
from prefect_tune.core.journal_events import Cause
from prefect_tune.core.messages.process_messages import Broke, StepDone
from tests.fakes.trial_processes import LogRecorder, log_to, messages_of, start_of
from tests.integrations.examples import Example
from tests.integrations.ranks import several_ranks
from tests.integrations.states import flat

pytestmark = pytest.mark.integrations
torch = pytest.importorskip("torch")
pytest.importorskip("lightning")


def learned(directory: Path) -> Mapping[str, Any]:
    """Return weights, moments, schedule, place in the data, and the generator that dropout uses."""
    saved = torch.load(directory / "checkpoint.ckpt", weights_only=True)
    names = ("state_dict", "optimizer_states", "lr_schedulers", "global_step", "epoch")
    (callback,) = saved["callbacks"].values()
    data = saved["loops"]["fit_loop"]["state_dict"]["combined_loader"]
    return flat({**{name: saved[name] for name in names}, "torch": callback["random"]["torch"], "data": data})


@pytest.mark.timeout(2000)
def test_the_example_ends_with_the_state_of_an_undisturbed_one(example: Callable[[str, str], Example]) -> None:
    example("lightning", "train").ends_as_undisturbed(learned, reach=4, interval=3, steps={6, 18})


@pytest.mark.parametrize("callback", [True, False])
@pytest.mark.parametrize("strategy", ["ddp", "ddp_spawn", "ddp_fork"])
def test_several_processes_are_refused_as_the_users_error_whatever_starts_them(
    pool: TrialProcessPool, tmp_path: Path, strategy: str, callback: bool
) -> None:
    config = {"strategy": strategy, "callback": callback}
    recorder = LogRecorder()
    with pool.process(start_of(several_ranks.trainer, tmp_path, config), log_to(recorder)) as channel:
        said = messages_of(channel, seconds=300)
    (*_, ended) = said
    assert isinstance(ended, Broke), said
    assert ended.cause is Cause.USER
    assert "InvalidInput: " in ended.message
    assert "One process trains a trial" in ended.message
    assert not [each for each in said if isinstance(each, StepDone)]


def test_fabric_is_refused_likewise(pool: TrialProcessPool, tmp_path: Path) -> None:
    with pool.process(start_of(several_ranks.fabric, tmp_path), log_to(LogRecorder())) as channel:
        (*_, ended) = messages_of(channel, seconds=300)
    assert isinstance(ended, Broke)
    assert "One process trains a trial" in ended.message
