"""`ray/tune/examples/pbt_transformers/pbt_transformers.py` of ray 2.55.0 (Apache-2.0).

The lines of docs/integrations.md are in it.

Changed: the callback and `resume_from_checkpoint`; a small BERT with new weights and drawn sentences in place of
`bert-base-uncased` and GLUE, which are downloads; no evaluation, which needs GLUE; `no_cuda` is called `use_cpu`.
"""

from __future__ import annotations

import tempfile

import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

from prefect_tune.integrations.transformers import TuneReportCheckpointCallback, get_checkpoint_path


def sentences():
    tokens = torch.randint(5, 100, (256, 16), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": row, "labels": int(row[0] > row[1])} for row in tokens]


def tune_transformer(config):
    shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}

    def get_model():
        return BertForSequenceClassification(BertConfig(vocab_size=100, num_labels=2, **shape))

    training_args = TrainingArguments(
        output_dir=config.get("output_dir") or tempfile.mkdtemp(),
        learning_rate=1e-5,  # config
        do_train=True,
        use_cpu=True,
        save_strategy="no",
        num_train_epochs=2,  # config
        max_steps=-1,
        per_device_train_batch_size=16,  # config
        warmup_steps=0,
        weight_decay=0.1,  # config
        skip_memory_metrics=True,
        report_to="none",
        disable_tqdm=True,
    )

    trainer = Trainer(
        model_init=get_model,
        args=training_args,
        train_dataset=sentences(),
        callbacks=[TuneReportCheckpointCallback("loss", every_steps=4)],
    )
    trainer.train(resume_from_checkpoint=get_checkpoint_path())
