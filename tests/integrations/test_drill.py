"""The drill: it names what a training did not restore, and the step; each example passes its drill."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

import prefect_tune as pt
from prefect_tune.drills.plan import DrillPlan, plan_kills
from prefect_tune.drills.probe import collect_states
from prefect_tune.drills.run_drill import run_drill

pytestmark = [pytest.mark.integrations, pytest.mark.timeout(1800)]
torch = pytest.importorskip("torch")
on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU of NVIDIA, and PyTorch for CUDA")
MODULE = "tests.trainables.forgetful"


def run_plan(plan: DrillPlan, api: str, folder: Path) -> pt.DrillReport:
    return run_drill(plan, pt.LocalTarget(path=str(folder)), {**os.environ, "PREFECT_API_URL": api})


def run_drill_once(trainable: str, config: dict[str, object], api: str, folder: Path) -> pt.DrillReport:
    """Train six steps, save every second step, and kill the trial once after step 3."""
    return run_plan(DrillPlan(trainable, config, 6, 2, kills=((3, "trial"),)), api, folder)


@pytest.mark.parametrize("trainable", ["Whole", "train"])
def test_a_training_that_saves_everything_is_exact(trainable: str, prefect_server: str, tmp_path: Path) -> None:
    report = run_drill_once(f"{MODULE}:{trainable}", {}, prefect_server, tmp_path)
    assert report.is_exact, list(report.lines())


@pytest.mark.parametrize(
    ("forgets", "kind", "name"),
    [
        ("python", "global", "random"),
        ("numpy", "global", "numpy.random"),
        ("torch", "global", "torch"),
        ("order", "counter", "place"),
        ("optimizer", "optimizer", "optimizer."),
        ("schedule", "schedule", "schedule."),
        ("scaler", "scaler", "scaler."),
        ("steps", "counter", "steps"),
    ],
)
@pytest.mark.parametrize("trainable", ["Whole", "train"])
def test_what_it_forgets_is_named(
    trainable: str, forgets: str, kind: str, name: str, prefect_server: str, tmp_path: Path
) -> None:
    report = run_drill_once(f"{MODULE}:{trainable}", {"forgets": forgets}, prefect_server, tmp_path)
    assert report.verdict == "not exact", list(report.lines())
    assert report.differences[0].step in {3, 4, 5}, "the steps after the resume, until the first save"
    first = report.unrestored[0]
    assert first.kind == kind, list(report.lines())
    assert first.name.removeprefix("trainable.").startswith(name)


@pytest.mark.parametrize(
    ("trainable", "config"),
    [
        ("torch_ddp_digits:Digits", {"lr": 0.1, "width": 16}),
        ("torch_fsdp_digits:Digits", {"lr": 0.1, "width": 16}),
        ("lightning_digits:train", {"lr": 0.1, "width": 16}),
        ("transformers_digits:train", {"lr": 1e-3, "weight_decay": 0.01}),
        pytest.param(
            "deepspeed_digits:Digits",
            {"lr": 0.1, "width": 16},
            marks=pytest.mark.skipif(not find_spec("deepspeed"), reason="needs `pip install deepspeed`"),
        ),
    ],
)
def test_the_examples_with_ranks_are_exact_whichever_rank_is_killed(
    trainable: str, config: dict[str, object], prefect_server: str, tmp_path: Path
) -> None:
    plan = DrillPlan(f"examples.{trainable}", config, 6, 2, kills=((2, "rank"), (4, "trial")), processes=2)
    report = run_plan(plan, prefect_server, tmp_path)
    assert report.is_exact, list(report.lines())
    assert [kill.victim for kill in report.kills] == ["rank", "trial"]


def test_the_example_with_ddp_is_exact_after_twenty_kills_of_all_kinds(prefect_server: str, tmp_path: Path) -> None:
    kills = plan_kills(41, 20, (), 0, processes=2)
    plan = DrillPlan("examples.torch_ddp_digits:Digits", {"lr": 0.1, "width": 16}, 41, 2, kills, processes=2)
    report = run_plan(plan, prefect_server, tmp_path)
    assert report.is_exact, list(report.lines())
    assert {kill.victim for kill in report.kills} == {"trial", "rank", "search", "upload"}


# ------------------------------------------------------------------------------------------------------------- GPUs


@on_gpu
@pytest.mark.parametrize("trainable", ["Whole", "train"])
def test_a_training_on_a_gpu_that_saves_everything_is_exact(
    trainable: str, prefect_server: str, tmp_path: Path
) -> None:
    report = run_drill_once(f"{MODULE}:{trainable}", {"device": "cuda"}, prefect_server, tmp_path)
    assert report.is_exact, list(report.lines())


@on_gpu
@pytest.mark.parametrize("trainable", ["Whole", "train"])
def test_the_generator_of_a_gpu_is_named(trainable: str, prefect_server: str, tmp_path: Path) -> None:
    report = run_drill_once(f"{MODULE}:{trainable}", {"device": "cuda", "forgets": "cuda"}, prefect_server, tmp_path)
    assert report.verdict == "not exact", list(report.lines())
    assert str(report.unrestored[0]).startswith("torch's generator of cuda:0, after step "), list(report.lines())


@on_gpu
def test_the_state_of_the_generator_of_a_gpu_changes_with_each_draw() -> None:
    torch.cuda.init()
    first = dict(collect_states({}))["global torch.cuda:0"]
    assert dict(collect_states({}))["global torch.cuda:0"] == first
    torch.rand(1, device="cuda")
    assert dict(collect_states({}))["global torch.cuda:0"] != first


def test_the_drill_does_not_initialize_cuda() -> None:
    code = "import torch; from prefect_tune.drills import probe; assert dict(probe.collect_states({}))['global torch']"
    subprocess.run([sys.executable, "-c", f"{code}; assert not torch.cuda.is_initialized()"], check=True)


# --------------------------------------------------------------------------------------------------------- examples


@pytest.mark.parametrize(
    ("trainable", "config"),
    [
        ("torch_digits:Digits", {"lr": 0.1, "width": 32}),
        ("sklearn_digits:Digits", {"loss": "log_loss", "alpha": 1e-4}),
        ("lightning_digits:train", {"lr": 0.1, "width": 32}),
        ("transformers_digits:train", {"lr": 1e-3, "weight_decay": 0.01}),
        ("keras_digits:train", {"lr": 0.01, "width": 16}),
        ("xgboost_digits:train", {"max_depth": 3, "eta": 0.3}),
        ("lightgbm_digits:train", {"num_leaves": 8, "learning_rate": 0.1}),
        ("torchrun_digits:train", {"lr": 0.1, "width": 16}),
    ],
)
def test_each_example_passes_its_drill(
    trainable: str, config: dict[str, object], prefect_server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    examples = Path(__file__).parents[2] / "examples"
    monkeypatch.setenv("PYTHONPATH", f"{examples}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    report = run_drill_once(trainable, config, prefect_server, tmp_path)
    assert report.is_exact, list(report.lines())


def test_the_part_of_this_rank_is_read_of_a_distributed_tensor() -> None:
    code = """
from torch import distributed, ones
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh
from prefect_tune.drills.probe import collect_states
distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
first, second = (distribute_tensor(ones(4) * factor, init_device_mesh("cpu", (1,)), [Shard(0)]) for factor in (1, 2))
states = dict(collect_states({"first": first, "second": second, "like_first": ones(4)}))
assert states["state first"] == states["state like_first"] != states["state second"], states
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)  # a process has only one group of ranks


# ---------------------------------------------------------------------------------------------- the examples of others

XGBOOST = {"objective": "binary:logistic", "eval_metric": ["logloss", "error"], "max_depth": 3, "subsample": 0.8}
LIGHTGBM = {"objective": "binary", "metric": ["binary_error", "binary_logloss"], "verbose": -1, "num_leaves": 31}
LIGHTNING = {"layer_1": 32, "layer_2": 64, "lr": 0.01, "batch_size": 64}
KERAS = {"lr": 0.05, "momentum": 0.5, "hidden": 64}


@pytest.mark.parametrize(
    ("trainable", "config", "verdict", "first"),
    [
        ("ray_xgboost:train_breast_cancer", XGBOOST, "not deterministic", "differ without a kill, at step "),
        ("ray_xgboost:train_with_seed", XGBOOST, "not exact", "first difference at step 3: metric `test-logloss`"),
        ("ray_lightgbm:train_breast_cancer", LIGHTGBM, "not deterministic", "differ without a kill, at step "),
        ("ray_lightgbm:train_with_seed", LIGHTGBM, "not exact", "first difference at step 4: `model.txt`, `line "),
        ("ray_lightning:train_mnist_tune", LIGHTNING, "not deterministic", "differ without a kill, at step "),
        ("ray_lightning:train_with_seed", LIGHTNING, "exact", ""),
        ("ray_keras:train_mnist", KERAS, "not deterministic", "differ without a kill, at step "),
        ("ray_keras:train_with_seed", KERAS, "exact", ""),
        ("ray_transformers:tune_transformer", {}, "exact", ""),
    ],
)
def test_what_it_finds_in_the_examples_of_ray_is_as_documented(
    trainable: str, config: dict[str, object], verdict: str, first: str, prefect_server: str, tmp_path: Path
) -> None:
    report = run_drill_once(f"tests.integrations.foreign.{trainable}", config, prefect_server, tmp_path)
    assert report.verdict == verdict, list(report.lines())
    assert first in next(report.lines())
