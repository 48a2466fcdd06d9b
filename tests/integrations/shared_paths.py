"""Trainables that give every trial the same paths, relative or absolute, like the examples of frameworks."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import prefect_tune as pt


def hugging_face(config: dict[str, Any]) -> None:
    import torch
    from transformers import Trainer, TrainingArguments

    from prefect_tune.integrations.transformers import TuneReportCheckpointCallback, get_checkpoint_path

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(300, 300)

        def forward(self, inputs: Any) -> Any:
            return {"loss": self.layer(inputs).square().mean()}

    path = _get_path(config)
    output = {} if path is None else {"output_dir": path}
    saving: Any = {"save_strategy": "steps", "save_steps": 4}
    plain: Any = {"report_to": "none", "disable_tqdm": True, "use_cpu": True}
    arguments = TrainingArguments(max_steps=8, learning_rate=config["lr"], **saving, **plain, **output)
    data = [{"inputs": torch.ones(300)} for _ in range(64)]
    callback = TuneReportCheckpointCallback("loss", every_steps=1)
    trainer = Trainer(Model(), arguments, train_dataset=data, callbacks=[callback])
    trainer.train(resume_from_checkpoint=get_checkpoint_path())
    trainer.save_model()
    _record_path(trainer.args.output_dir)


def lightning(config: dict[str, Any]) -> None:
    import torch
    from lightning.pytorch import Trainer
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.loggers import CSVLogger

    from prefect_tune.integrations.lightning import TuneReportCheckpointCallback, get_checkpoint_path
    from prefect_tune.integrations.torch import ResumableLoader
    from tests.integrations.line import Line

    path = _get_path(config)
    savers = [] if path is None else [ModelCheckpoint(f"{path}/best", save_top_k=-1, every_n_train_steps=1)]
    root = {} if path is None else {"default_root_dir": path}
    logger = CSVLogger(path or ".", flush_logs_every_n_steps=1)
    trainer = Trainer(
        accelerator="cpu",
        max_steps=8,
        logger=logger,
        log_every_n_steps=1,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[*savers, TuneReportCheckpointCallback("loss", every_steps=1)],
        **root,
    )
    data = ResumableLoader(torch.utils.data.TensorDataset(torch.ones(64, 1)), batch_size=4)
    trainer.fit(Line(reports=False), data, ckpt_path=get_checkpoint_path(), weights_only=True)
    assert len(Path(logger.log_dir, "metrics.csv").read_text().splitlines()) == 1 + 8
    assert trainer.checkpoint_callback is not None
    for path in (trainer.default_root_dir, logger.log_dir, str(trainer.checkpoint_callback.dirpath)):
        _record_path(path)


def keras(config: dict[str, Any]) -> None:
    os.environ.setdefault("KERAS_BACKEND", "torch")
    import keras
    import numpy as np

    from prefect_tune.integrations.keras import TuneReportCheckpointCallback, get_initial_epoch

    model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    folder = _get_path(config) or "."
    Path(folder).mkdir(exist_ok=True)
    others = [
        keras.callbacks.BackupAndRestore(f"{folder}/backup"),
        keras.callbacks.ModelCheckpoint(f"{folder}/best-{{epoch}}.keras"),
        keras.callbacks.CSVLogger(f"{folder}/log.csv"),
    ]
    model.fit(
        np.ones((16, 4)),
        np.ones(16),
        epochs=4,
        initial_epoch=get_initial_epoch(),
        verbose=0,
        callbacks=[others[0], TuneReportCheckpointCallback(), *others[1:]],
    )
    for path in (others[0].backup_dir, others[1].filepath, others[2].filename):
        _record_path(path)
    assert Path(others[1].filepath.format(epoch=4)).exists()


def xgboost(config: dict[str, Any]) -> None:
    import numpy as np
    import xgboost as xgb

    from prefect_tune.integrations.xgboost import TuneReportCheckpointCallback, remaining_rounds

    data = xgb.DMatrix(np.arange(16).reshape(8, 2), np.arange(8))
    saving = xgb.callback.TrainingCheckPoint(_get_path(config) or ".", interval=1)
    callbacks = [saving, TuneReportCheckpointCallback()]
    xgb.train({"nthread": 1}, data, **remaining_rounds(4), evals=[(data, "t")], callbacks=callbacks, verbose_eval=False)
    assert list(Path(saving._path).glob("model_*"))
    _record_path(saving._path)


def _get_path(config: dict[str, Any]) -> str | None:
    return config["path"] and config["path"].replace("{trial}", pt.get_trial().id)


def _record_path(path: str) -> None:
    """Require that only this trial writes to the path, and record it."""
    trial = pt.get_trial()
    assert Path(path).absolute().is_relative_to(trial.directory) or trial.id in path, path
    with Path(trial.directory, "places").open("a") as file:
        file.write(f"{path}\n")
