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
from tests.integrations.states import flat
from tests.integrations.undisturbed import Reports

pytestmark = pytest.mark.integrations
torch = pytest.importorskip("torch")
pytest.importorskip("transformers")


def learned(directory: Path) -> Mapping[str, Any]:
    """Return weights, moments, schedule, and the generator that dropout uses."""
    states = {name: torch.load(directory / name, weights_only=True) for name in ("optimizer.pt", "scheduler.pt")}
    with safe_numpy():
        random = torch.load(directory / "rng_state.pth", weights_only=True)
    weights = (directory / "model.safetensors").read_bytes()
    return {**flat(states), "torch": flat(random["cpu"]), "weights": weights}


def safe_numpy() -> Any:
    """Allow what the file of a generator's state holds, besides tensors."""
    import numpy as np

    names = [np._core.multiarray._reconstruct, np.ndarray, np.dtype, type(np.dtype(np.uint32))]  # type: ignore[attr-defined]  # pickles name it
    return torch.serialization.safe_globals(names)


@pytest.mark.timeout(2000)
def test_the_example_ends_with_the_state_of_an_undisturbed_one(example: Callable[[str, str], Example]) -> None:
    example("transformers", "train").ends_as_undisturbed(learned, reach=3, interval=1, steps={4, 12})


def module() -> Any:
    """A model that is none of Hugging Face's, though it has a `from_pretrained`, like PEFT's."""

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


def language_model() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(vocab_size=8, n_positions=4, n_embd=4, n_layer=1, n_head=1))


def with_lora() -> Any:
    import peft

    return peft.get_peft_model(language_model(), lora())


def lora() -> Any:
    import peft

    return peft.LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True)


def train(model: Callable[[], Any], reports: Reports, **options: Any) -> None:
    """Train ten steps as the only trial of a context; evaluate after the fifth, and report each second."""
    from transformers import Trainer, TrainingArguments, set_seed

    from prefect_tune.integrations.transformers import TuneReportCheckpointCallback, get_checkpoint_path

    def fit() -> None:
        activate_session(reports, whole_process=False)
        set_seed(0)
        made = model()
        tokens = [{"input_ids": row, "labels": row} for row in torch.randint(0, 8, (24, 4))]
        data = [{"inputs": row, "labels": row} for row in torch.randn(24, 2)] if hasattr(made, "layers") else tokens
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
        trainer = Trainer(made, arguments, train_dataset=data, eval_dataset=data[:4], callbacks=[callback])
        trainer.train(resume_from_checkpoint=get_checkpoint_path())

    copy_context().run(fit)


@pytest.mark.parametrize("model", [module, language_model, with_lora])
def test_a_training_resumed_from_any_of_its_checkpoints_reports_as_undisturbed(
    model: Callable[[], Any], tmp_path: Path
) -> None:
    def learned_by(reports: Reports) -> Mapping[int, Mapping[str, float]]:
        measured = ("runtime", "per_second")  # times
        return {
            step: {name: value for name, value in metrics.items() if not any(part in name for part in measured)}
            for step, metrics in reports.metrics.items()
        }

    undisturbed = Reports({}, 0, tmp_path)
    train(model, undisturbed)
    expected = learned_by(undisturbed)
    assert ["eval_loss" in metrics for metrics in expected.values()] == [False, False, True, True, True]
    assert [*undisturbed.allow_missing.values()] == [True, True, False, False, False]
    for step in (1, 3):
        train(model, resumed := Reports({}, 0, tmp_path, restored_step=step))
        assert learned_by(resumed) == {later: expected[later] for later in expected if later > step}
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
        train(module, Reports({}, 0, tmp_path), **options)


def test_an_adapter_whose_checkpoints_the_trainer_cannot_load_is_refused(tmp_path: Path) -> None:
    def model() -> Any:
        made = language_model()
        made.add_adapter(lora())
        return made

    with pytest.raises(pt.InvalidInput, match="get_peft_model"):
        train(model, Reports({}, 0, tmp_path))
