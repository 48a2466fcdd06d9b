"""Hugging Face Trainer: search for the best small vision transformer for handwritten digits.

Kill it whenever you like and run it again: no trial loses more than four steps.
"""

import sys
import tempfile
from typing import Any

import torch
from sklearn.datasets import load_digits
from transformers import Trainer, TrainingArguments, ViTConfig, ViTForImageClassification, set_seed

import prefect_tune as pt
from prefect_tune.integrations.transformers import TuneReportCheckpointCallback, get_checkpoint_path


def train(config: dict[str, Any]) -> None:
    set_seed(0)
    images, labels = load_digits(return_X_y=True)
    pixels = torch.tensor(images / 16, dtype=torch.float32).reshape(-1, 1, 8, 8)
    data = [{"pixel_values": image, "labels": label} for image, label in zip(pixels, labels.tolist(), strict=True)]
    shape = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    digits = {"image_size": 8, "patch_size": 2, "num_channels": 1, "num_labels": 10}
    model = ViTForImageClassification(ViTConfig(**shape, **digits, hidden_dropout_prob=0.1))
    arguments = TrainingArguments(
        output_dir=tempfile.mkdtemp(),
        max_steps=48,
        per_device_train_batch_size=64,
        learning_rate=config["lr"],
        weight_decay=config["weight_decay"],
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
    )
    callback = TuneReportCheckpointCallback("loss", every_steps=4)
    trainer = Trainer(model, arguments, train_dataset=data, callbacks=[callback])
    trainer.train(resume_from_checkpoint=get_checkpoint_path())


if __name__ == "__main__":
    results = pt.tune(
        train,
        {"lr": pt.loguniform(0.0003, 0.03), "weight_decay": pt.choice([0.0, 0.01, 0.1])},
        target=sys.argv[1] if len(sys.argv) > 1 else "./runs",
        experiment="transformers-digits",
        metric="loss",
        num_samples=3,
        scheduler=pt.ASHA(max_t=12, grace_period=4),
    )
    print(results.best.config, results.best.metrics)
