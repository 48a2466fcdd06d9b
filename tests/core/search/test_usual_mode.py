"""The mode that the name of a metric suggests."""

from __future__ import annotations

import pytest

from prefect_tune.core.search.objective import usual_mode

NAMES = {
    "max": "accuracy acc val_acc test/accuracy eval_f1 mAP@50 map50 valAcc top1_acc AUC roc_auc f1-score F1Score r2 "
    "IoU episode_reward bleu recall@10 macro.precision score neg_mean_squared_error negLogLoss",
    "min": "loss val_loss train/loss error error_score err error_rate rmse valRMSE brier_score perplexity nll FID "
    "negative_log_likelihood accuracy_loss wer",
    None: "surf1 step lr tracc lossy accident mapping speed x metric seconds 1 é",
}


@pytest.mark.parametrize(("name", "mode"), [(name, mode) for mode, names in NAMES.items() for name in names.split()])
def test_the_mode_that_a_name_suggests(name: str, mode: str | None) -> None:
    assert usual_mode(name) == mode
