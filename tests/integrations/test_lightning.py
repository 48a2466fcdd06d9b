"""Lightning: bitwise identical after kills, also in the middle of an epoch."""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

import prefect_tune as pt
from prefect_tune.testing import without_server
from tests.integrations.examples import Example
from tests.integrations.states import to_plain
from tests.integrations.undisturbed import RecordingSession

pytestmark = pytest.mark.integrations
torch = pytest.importorskip("torch")
pytest.importorskip("lightning")
if True:  # only with torch and Lightning
    import lightning
    from lightning.pytorch.loops import fit_loop

    from prefect_tune.integrations.torch import ResumableLoader
    from tests.integrations.lightning_runs import BATCHES, run, train_and_kill


def read_state(directory: Path) -> Mapping[str, Any]:
    """Return weights, moments, schedule, position in the data, and the generator of dropout."""
    checkpoint = torch.load(directory / "checkpoint.ckpt", weights_only=True)
    names = ("state_dict", "optimizer_states", "lr_schedulers", "global_step", "epoch")
    (callback,) = checkpoint["callbacks"].values()
    data = checkpoint["loops"]["fit_loop"]["state_dict"]["combined_loader"]
    return to_plain({**{name: checkpoint[name] for name in names}, "torch": callback["random"]["torch"], "data": data})


@pytest.mark.timeout(2000)
def test_the_example_ends_with_the_state_of_an_undisturbed_one(example: Callable[[str, str], Example]) -> None:
    example("lightning", "train").require_undisturbed_end(read_state, reach=4, interval=3, steps={6, 18})


@pytest.mark.parametrize("every_steps", [None, 3, 4])
@pytest.mark.parametrize("limit", [{"max_epochs": 3}, {"max_steps": 16}], ids=str)
@pytest.mark.parametrize(
    "kind",
    [
        "plain",
        "plateau",
        "plateau within an epoch",
        "one cycle",
        "averaged weights",
        "early stopping",
        "early stopping at the end of an epoch",
        "validation each second epoch",
        "validation within an epoch",
        "validation each fourth batch",
        "shortened epochs",
        "accumulated gradients",
    ],
)
def test_a_training_resumed_from_any_of_its_checkpoints_reports_and_ends_as_undisturbed(
    kind: str, limit: Mapping[str, int], every_steps: int | None, tmp_path: Path
) -> None:
    undisturbed = RecordingSession({}, 0, tmp_path)
    end = run(kind, limit, every_steps, undisturbed)
    assert len(undisturbed.metrics) > 1
    for step in undisturbed.metrics:
        resumed = RecordingSession({}, 0, tmp_path, restored_step=step)
        end_of_resumed = run(kind, limit, every_steps, resumed)
        assert resumed.metrics == {later: undisturbed.metrics[later] for later in undisturbed.metrics if later > step}
        assert resumed.allow_missing == {n: undisturbed.allow_missing[n] for n in undisturbed.metrics if n > step}
        if step < len(undisturbed.metrics):  # Lightning does not begin a training that has reached its limit
            assert to_plain(end_of_resumed) == to_plain(end)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("signal_number", [signal.SIGKILL, signal.SIGTERM])
def test_trials_that_get_a_signal_report_as_undisturbed(signal_number: signal.Signals, tmp_path: Path) -> None:
    """At the end of an epoch, and within one. SIGTERM, which clusters send to a whole group, ends no trial."""
    with without_server():
        results = pt.tune(
            train_and_kill,
            {
                "every_steps": pt.grid_search([None, 4]),
                "kill_at": pt.grid_search([None, 12, 15]),
                "signal": int(signal_number),
            },
            target=str(tmp_path / "runs"),
            experiment="e",
            checkpoint=pt.Cadence(every_steps=1),
            max_concurrent_trials=2,
        )
    curves: dict[object, list[Any]] = {}
    for trial in results.trials.values():
        assert trial.attempt == (1 if trial.config["kill_at"] is None or signal_number == signal.SIGTERM else 2)
        curve = [(point.step, point.metrics) for point in results.curve(trial)]
        curves.setdefault(trial.config["every_steps"], []).append(curve)
    for undisturbed, *others in curves.values():
        assert others == [undisturbed] * 2


@pytest.mark.timeout(600)
def test_only_reports_before_the_first_validation_may_lack_the_metric_of_the_search(tmp_path: Path) -> None:
    def search(metric: str) -> pt.Results:
        config = {"every_steps": 4, "kill_at": None, "signal": 0}
        return pt.tune(train_and_kill, config, target=str(tmp_path), experiment=metric, metric=metric, num_samples=1)

    with without_server():
        assert search("val_loss").best.step == 6
        with pytest.raises(pt.SearchFailed, match="metrics of step 2: expected a number for metric 'val_los'"):
            search("val_los")


@pytest.mark.parametrize("every_steps", [None, 3])
def test_a_training_paused_at_each_of_its_reports_reports_and_ends_as_undisturbed(
    every_steps: int | None, tmp_path: Path
) -> None:
    undisturbed = RecordingSession({}, 0, tmp_path / "undisturbed")
    end = run("plateau", {"max_epochs": 3}, every_steps, undisturbed)
    reports: dict[int, Mapping[str, float]] = {}
    for step in range(len(undisturbed.metrics)):
        paused = RecordingSession({}, 0, tmp_path, restored_step=step, pause_at=step + 1)
        end_of_paused = run("plateau", {"max_epochs": 3}, every_steps, paused)
        reports |= paused.metrics
    assert reports == undisturbed.metrics
    assert to_plain(end_of_paused) == to_plain(end)
    if every_steps is None:
        assert all("val_loss" in metrics for metrics in reports.values())


def test_a_report_has_the_metrics_of_a_validation_at_its_step(tmp_path: Path) -> None:
    reports = RecordingSession({}, 0, tmp_path)
    run("validation within an epoch", {"max_epochs": 1}, 3, reports)
    assert ["val_loss" in metrics for metrics in reports.metrics.values()] == [True, True]


@pytest.mark.parametrize(
    ("option", "trained", "validated"), [({"limit_train_batches": 4}, 4, 6), ({"overfit_batches": 2}, 2, 2)]
)
def test_a_shortened_epoch_is_followed_by_a_new_one(option: Any, trained: int, validated: int, tmp_path: Path) -> None:
    """A loader without the callback, in training and in validation, after Lightning's sanity check of two batches."""

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)
            self.seen: dict[tuple[str, int], list[float]] = {}

        def record(self, stage: str, batch: Any) -> None:
            if not self.trainer.sanity_checking:
                self.seen.setdefault((stage, self.trainer.current_epoch), []).extend(batch[0][:, 0].tolist())

        def training_step(self, batch: Any, _number: int) -> Any:
            self.record("train", batch)
            return self.layer(batch[0]).mean()

        def validation_step(self, batch: Any, _number: int) -> None:
            self.record("validate", batch)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    data = torch.utils.data.TensorDataset(torch.arange(2.0 * BATCHES)[:, None])
    options = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, **option}
    trainer = lightning.Trainer(accelerator="cpu", max_epochs=3, default_root_dir=str(tmp_path), **options)
    trainer.fit(module := Module(), ResumableLoader(data, 2), ResumableLoader(data, 2))
    for epoch in range(3):
        for stage, batches in (("train", trained), ("validate", validated)):
            assert len(set(module.seen[stage, epoch])) == len(module.seen[stage, epoch]) == 2 * batches


def test_another_training_loop_than_the_callback_knows_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(fit_loop._FitLoop, "on_advance_end")
    with pytest.raises(pt.InvalidInput, match=r"training loop of version 2\.6: .*on_advance_end"):
        run("plain", {"max_epochs": 1}, None, RecordingSession({}, 0, tmp_path))
