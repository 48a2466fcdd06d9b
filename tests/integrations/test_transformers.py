"""Hugging Face's Trainer: bitwise identical after kills."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextvars import copy_context
from pathlib import Path
from typing import Any

import pytest

import prefect_tune as pt
from prefect_tune.runtime.trainable import activate_session
from tests.integrations.examples import Example
from tests.integrations.states import to_plain
from tests.integrations.undisturbed import RecordingSession

pytestmark = pytest.mark.integrations
torch = pytest.importorskip("torch")
pytest.importorskip("transformers")


def read_state(directory: Path) -> Mapping[str, Any]:
    """Return weights, moments, schedule, and the generator of dropout."""
    states = {name: torch.load(directory / name, weights_only=True) for name in ("optimizer.pt", "scheduler.pt")}
    with safe_numpy():
        random = torch.load(directory / "rng_state.pth", weights_only=True)
    weights = (directory / "model.safetensors").read_bytes()
    return {**to_plain(states), "torch": to_plain(random["cpu"]), "weights": weights}


def safe_numpy() -> Any:
    """Allow the types in the file of a generator's state."""
    import numpy as np

    names = [np._core.multiarray._reconstruct, np.ndarray, np.dtype, type(np.dtype(np.uint32))]  # type: ignore[attr-defined]  # pickles name it
    return torch.serialization.safe_globals(names)


@pytest.mark.timeout(2000)
def test_the_example_ends_with_the_state_of_an_undisturbed_one(example: Callable[[str, str], Example]) -> None:
    example("transformers", "train").require_undisturbed_end(read_state, reach=3, interval=1, steps={4, 12})


def make_plain_model() -> Any:
    """Return a model that is not Hugging Face's, but has a `from_pretrained`, like PEFT's."""

    class Line(torch.nn.Module):  # type: ignore[name-defined,misc]  # torch is imported if it is there
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Dropout(0.2))

        def forward(self, inputs: Any, labels: Any) -> Any:
            return {"loss": (self.layers(inputs) - labels).square().mean()}

        @classmethod
        def from_pretrained(cls, model: Any, path: str) -> Any:
            raise NotImplementedError

    return Line()


def make_language_model() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(vocab_size=8, n_positions=4, n_embd=4, n_layer=1, n_head=1))


def make_lora_model() -> Any:
    import peft

    return peft.get_peft_model(make_language_model(), make_lora_config())


def make_lora_config() -> Any:
    import peft

    return peft.LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True)


def train(model: Callable[[], Any], reports: RecordingSession, **options: Any) -> None:
    """Train ten steps as the only trial of a context; evaluate after the fifth, and report every second step."""
    from transformers import Trainer, TrainingArguments, set_seed

    from prefect_tune.integrations.transformers import TuneReportCheckpointCallback, get_checkpoint_path

    def fit() -> None:
        activate_session(reports, whole_process=False)
        set_seed(0)
        network = model()
        tokens = [{"input_ids": row, "labels": row} for row in torch.randint(0, 8, (24, 4))]
        data = [{"inputs": row, "labels": row} for row in torch.randn(24, 2)] if hasattr(network, "layers") else tokens
        arguments = TrainingArguments(
            output_dir=str(reports.directory / "out"),
            max_steps=10,
            per_device_train_batch_size=4,
            eval_strategy="steps",
            eval_steps=5,
            save_strategy="no",
            logging_steps=1,
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
            **options,
        )
        callback = TuneReportCheckpointCallback(every_steps=2)
        trainer = Trainer(network, arguments, train_dataset=data, eval_dataset=data[:4], callbacks=[callback])
        trainer.train(resume_from_checkpoint=get_checkpoint_path())

    copy_context().run(fit)


@pytest.mark.parametrize("model", [make_plain_model, make_language_model, make_lora_model])
def test_a_training_resumed_from_any_of_its_checkpoints_reports_as_undisturbed(
    model: Callable[[], Any], tmp_path: Path
) -> None:
    def select_metrics(reports: RecordingSession) -> Mapping[int, Mapping[str, float]]:
        measurements = ("runtime", "per_second")  # times
        return {
            step: {name: value for name, value in metrics.items() if not any(part in name for part in measurements)}
            for step, metrics in reports.metrics.items()
        }

    undisturbed = RecordingSession({}, 0, tmp_path)
    train(model, undisturbed)
    expected = select_metrics(undisturbed)
    assert ["eval_loss" in metrics for metrics in expected.values()] == [False, False, True, True, True]
    assert [*undisturbed.allow_missing.values()] == [True, True, False, False, False]
    for step in (1, 3):
        train(model, resumed := RecordingSession({}, 0, tmp_path, restored_step=step))
        assert select_metrics(resumed) == {later: expected[later] for later in expected if later > step}
        assert resumed.allow_missing == {later: undisturbed.allow_missing[later] for later in expected if later > step}


@pytest.mark.parametrize(
    "options",
    [
        {"dataloader_persistent_workers": True, "dataloader_num_workers": 1},
        {"ignore_data_skip": True},
        {"enable_jit_checkpoint": True},
    ],
)
def test_options_with_which_a_resumed_training_would_differ_are_refused(
    options: Mapping[str, Any], tmp_path: Path
) -> None:
    with pytest.raises(pt.InvalidInput, match=rf"{next(iter(options))}.*\): expected False"):
        train(make_plain_model, RecordingSession({}, 0, tmp_path), **options)


def test_an_adapter_whose_checkpoints_the_trainer_cannot_load_is_refused(tmp_path: Path) -> None:
    def model() -> Any:
        network = make_language_model()
        network.add_adapter(make_lora_config())
        return network

    with pytest.raises(pt.InvalidInput, match="get_peft_model"):
        train(model, RecordingSession({}, 0, tmp_path))
