"""What a trainable logs by Prefect's means is in the log of its run, although its process has no flow run."""

from __future__ import annotations

from pathlib import Path

import pytest
from prefect.client.orchestration import get_client
from prefect.runtime import flow_run

import prefect_tune as pt
from prefect_tune.callbacks import Callback

pytestmark = pytest.mark.usefixtures("prefect_server")


@pytest.mark.parametrize(
    ("module", "is_imported", "said"),
    [
        ("logs_to_run", False, "INFO trial: said to the run"),
        pytest.param("logs_to_run_at_once", True, "WARNING trial: said at once, 42", marks=pytest.mark.long),
    ],
)
def test_a_trainable_logs_by_the_run_logger_and_by_extra_loggers(
    module: str,
    is_imported: bool,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("PREFECT_LOGGING_EXTRA_LOGGERS", "other, a_library")
    trainable = f"tests.trainables.{module}:train"
    results = pt.tune(trainable, {}, target=str(tmp_path), metric="loss", num_samples=1)
    assert results.trials["00000"].metrics["is_imported"] is is_imported
    lines = [each.removeprefix("trial 00000: ") for each in caplog.messages]
    assert said in lines
    assert "INFO a_library: said by a library" in lines
    assert not any("nobody" in each for each in lines)


class Deletes(Callback):
    """Deletes the flow run of its search in the middle."""

    def on_trial_result(self, *_: object) -> None:
        with get_client(sync_client=True) as client:
            client.delete_flow_run(flow_run.id)


def test_a_flow_run_that_is_deleted_while_it_runs_ends_with_one_sentence(tmp_path: Path) -> None:
    deletes = Deletes()
    with pytest.raises(pt.TuneError, match="was deleted on the Prefect server while it ran") as deleted:
        pt.tune(_once, {}, target=str(tmp_path), metric="loss", num_samples=1, isolation="thread", callbacks=[deletes])
    assert "\n" not in str(deleted.value)


def _once(_config: object) -> dict[str, float]:
    return {"loss": 1.0}
