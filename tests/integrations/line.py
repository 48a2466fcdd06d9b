"""A Lightning module that can be pickled into another process."""

from __future__ import annotations

from typing import Any

import lightning
import torch

import prefect_tune as pt


class Line(lightning.LightningModule):
    """One weight; `reports` says whether it reports its loss itself."""

    def __init__(self, *, reports: bool) -> None:
        super().__init__()
        self.reports = reports
        self.layer = torch.nn.Linear(1, 1)

    def training_step(self, batch: Any, _number: int) -> Any:
        loss = self.layer(batch[0]).mean()
        self.log("loss", loss)
        if self.reports:
            pt.report({"loss": float(loss)})
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)
