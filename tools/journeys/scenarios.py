"""The small searches whose values are traced, one for each journey."""

from __future__ import annotations

import sys
from pathlib import Path

import prefect_tune as pt
from prefect_tune.testing import without_server


class Traced(pt.Trainable):
    """Report the traced metric at its second step, and save a file of the traced name."""

    def setup(self, config: dict[str, float]) -> None:
        self.step_count = int(config["rate"] < 0)

    def step(self) -> dict[str, float]:
        from tools.journeys.sitecustomize import METRIC

        self.step_count += 1
        return {"loss": METRIC if self.step_count == 2 else 9.0}

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        from tools.journeys.sitecustomize import CHECKPOINT_FILE

        Path(checkpoint_dir, CHECKPOINT_FILE).write_bytes(bytes(1 << 16))

    def load_checkpoint(self, checkpoint_dir: str) -> None:
        self.step_count = len(list(Path(checkpoint_dir).iterdir())) + 1


def run_scenario(journey: str, target: str) -> None:
    """Run the search whose value is traced; the scenario `resume` resumes that of `before`."""
    from tools.journeys.sitecustomize import CONFIG_VALUE

    with without_server():
        if journey == "resume":
            pt.resume(target=target, experiment="traced", stop={"step": 4})
            return
        pt.tune(
            Traced,
            {"rate": pt.grid_search([CONFIG_VALUE, 2 * CONFIG_VALUE])},
            target=target,
            experiment="traced",
            metric="loss",
            stop={"step": 2 if journey == "before" else 4},
            scheduler=pt.ASHA(max_t=4, grace_period=1) if journey == "decision" else None,
        )


if __name__ == "__main__":
    from tools.journeys import scenarios

    scenarios.run_scenario(*sys.argv[1:])
