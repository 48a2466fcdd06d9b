"""Loggers: callbacks that write reports to CSV, JSON, TensorBoard, MLflow or Weights & Biases."""

from __future__ import annotations

from prefect_tune.loggers.file_logger import FileLogger
from prefect_tune.loggers.mlflow_logger import MLflowLogger
from prefect_tune.loggers.tensorboard_logger import TensorBoardLogger
from prefect_tune.loggers.wandb_logger import WandbLogger

__all__ = ["FileLogger", "MLflowLogger", "TensorBoardLogger", "WandbLogger"]
