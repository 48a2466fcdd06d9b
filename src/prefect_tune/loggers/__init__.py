"""Loggers: callbacks that write reports to CSV, JSON, TensorBoard, MLflow or Weights & Biases."""

from __future__ import annotations

from prefect_tune.loggers.file_logger import FileLogger
from prefect_tune.loggers.trackers import MLflowLogger, TensorBoardLogger, WandbLogger

__all__ = ["FileLogger", "MLflowLogger", "TensorBoardLogger", "WandbLogger"]
