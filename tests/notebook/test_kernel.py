"""Searches in a real kernel: the output of their cells, the training, and the state after an interrupt."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import prefect_tune as pt
from tests.fakes.kernels import CellOutput, Kernel, start_kernel
from tests.long_cases import long_after

pytestmark = pytest.mark.timeout(900)

NET = """
import tempfile, time
from pathlib import Path
import prefect_tune as pt

class Net(pt.Trainable):
    def setup(self, config):
        self.x, self.rate, self.seconds = 8.0, config["rate"], config.get("seconds", 0)
        if config.get("breaks"):
            raise ValueError(f"<img src=x onerror=alert(1)> {config['breaks']}")

    def step(self):
        time.sleep(self.seconds)
        self.x -= self.rate * (self.x - 3)
        return {"loss": (self.x - 3) ** 2, "version": 1}

    def save_checkpoint(self, checkpoint_dir):
        Path(checkpoint_dir, "x").write_text(repr(self.x))

    def load_checkpoint(self, checkpoint_dir):
        self.x = float(Path(checkpoint_dir, "x").read_text())
"""
THREAD = "isolation='thread'"
PRINT = "; print(results.best.metrics)"
RATES = '{"rate": pt.grid_search([0.1, 0.5])}'


def tune_code(name: str, space: str = RATES, more: str = "", trainable: str = "Net") -> str:
    return (
        f"results = pt.tune({trainable}, {space}, target='./runs', experiment={name!r}, metric='loss', "
        f"num_samples=1, stop={{'step': 4}}, {more})"
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("notebook")


@pytest.fixture(scope="module")
def kernel(prefect_server: str, folder: Path) -> Iterator[Kernel]:
    with start_kernel(folder, {"PREFECT_API_URL": prefect_server}) as kernel:
        kernel.run(NET)
        yield kernel


def test_a_search_is_one_display_that_is_updated_in_place_and_nothing_else(kernel: Kernel) -> None:
    output = kernel.run(tune_code("one", '{"rate": pt.grid_search([0.1, 0.5]), "seconds": 0.6}'))
    assert output.streams == ""
    assert len(output.displays) == 1
    assert "tune: starting" in output.updates[0]
    assert any("2 running of 2" in update for update in output.updates)
    assert "2 completed of 2" in output.html
    assert "done after" in output.html
    assert re.search(r'<a href="http://[^"]+/runs/flow-run/[-0-9a-f]{36}" ', output.html)
    assert "version" not in output.html  # the table shows the objective's metric only


def test_results_trial_and_checkpoint_are_displayed_as_html_and_printed_on_one_line(kernel: Kernel) -> None:
    kernel.run(tune_code("shown", more=THREAD))
    results = kernel.run("results").result
    assert "data:image/svg+xml" in results["text/html"]
    assert "2 completed" in results["text/html"]
    assert results["text/plain"] == (
        "Results(experiment='shown', trials: 2 completed, best: 00001 with loss 0.09765625)"
    )
    best = kernel.run("results.best").result
    assert best["text/plain"].startswith("Trial(trial='00001', status='completed', step=4, metrics={'loss': ")
    assert "results.checkpoint(" in best["text/html"]
    saved = kernel.run("results.checkpoint(results.best)").result
    assert saved["text/plain"].startswith("Checkpoint(filesystem=file, path=")
    assert "Checkpoint of step 4, trial 00001 of shown" in saved["text/html"]
    assert kernel.run("print(results.best)").streams == best["text/plain"] + "\n"


def test_an_error_is_in_the_cell_once_and_its_markup_is_text(kernel: Kernel) -> None:
    space = '{"rate": 0.1, "breaks": pt.grid_search(["", "<script>alert(2)</script>"])}'
    output = kernel.run(tune_code("broken", space, THREAD))
    assert output.streams.count("Traceback (most recent call last)") == 1
    assert "1 completed, 1 errored of 2" in output.html
    trial = kernel.run("results.trials['00001']").result["text/html"]
    assert "&lt;img src=x onerror=alert(1)&gt;" in trial
    for html in (output.html, trial, kernel.run("results").result["text/html"]):
        assert "<img src=x" not in html
        assert "<script" not in html


@pytest.mark.parametrize("reuse", long_after(1, ["auto", "never"]))
def test_a_class_that_a_cell_redefines_is_the_one_that_trains(kernel: Kernel, reuse: str) -> None:
    more = f"reuse={reuse!r}, max_concurrent_trials=1"
    kernel.run(NET)
    print_versions = "; print({trial.metrics['version'] for trial in results.trials.values()})"
    before = kernel.run(tune_code(f"{reuse}-1", more=more) + print_versions)
    kernel.run(NET.replace('"version": 1', '"version": 2'))
    after = kernel.run(tune_code(f"{reuse}-2", more=more) + print_versions)
    assert (before.streams, after.streams) == ("{1}\n", "{2}\n")


def test_a_function_and_what_it_calls_are_those_of_the_last_cells(kernel: Kernel) -> None:
    kernel.run("def helper(): return 1\ndef train(config):\n    for _ in range(4): pt.report({'loss': helper()})")
    assert kernel.run(tune_code("function-1", trainable="train") + PRINT).streams == "{'loss': 1}\n"
    kernel.run("def helper(): return 2")
    assert kernel.run(tune_code("function-2", trainable="train") + PRINT).streams == "{'loss': 2}\n"


@pytest.mark.parametrize("isolation", long_after(1, ["process", "thread"]))
def test_a_module_that_is_edited_and_imported_again_is_the_one_that_trains(
    kernel: Kernel, folder: Path, isolation: str
) -> None:
    module = folder / f"edited_{isolation}.py"
    module.write_text("import prefect_tune as pt\ndef train(config):\n    pt.report({'loss': 1})\n")
    name, more = f"{module.stem}.train", f"isolation={isolation!r}"
    kernel.run(f"import importlib, {module.stem}")
    assert kernel.run(tune_code(f"{isolation}-1", more=more, trainable=name) + PRINT).streams == "{'loss': 1}\n"
    module.write_text("import prefect_tune as pt\ndef train(config):\n    pt.report({'loss': 2.5})\n")
    kernel.run(f"importlib.reload({module.stem})")
    assert kernel.run(tune_code(f"{isolation}-2", more=more, trainable=name) + PRINT).streams == "{'loss': 2.5}\n"


def test_a_single_training_has_a_display_too(kernel: Kernel) -> None:
    options = f"target='./runs', experiment='single', stop={{'step': 3}}, {THREAD}"
    code = f"pt.durable_trainable(Net, {{'rate': 0.1}}, {options})"
    output = kernel.run(code)
    assert "done after" in output.html
    assert "3 of 3, completed" in output.html
    assert "single · completed" in output.result["text/html"]
    assert output.streams == ""


def test_a_search_that_is_awaited_in_a_thread_has_one_display(kernel: Kernel) -> None:
    code = tune_code("awaited", more=THREAD).replace("pt.tune(", "await asyncio.to_thread(pt.tune, ")
    output = kernel.run(f"import asyncio\n{code}")
    assert "2 completed of 2" in output.html
    assert output.streams == ""


def test_a_wrong_argument_leaves_its_error_and_no_display_that_runs(kernel: Kernel) -> None:
    output = kernel.wait_for_cell(kernel.start_cell(tune_code("wrong", more="scheduler={'ASHAA': {}}")))
    assert output.error.startswith("InvalidInput: ")
    assert not any("starting" in display for display in output.displays.values())


@pytest.mark.long
def test_an_interrupted_search_says_how_to_resume_it_and_resumes(kernel: Kernel, folder: Path) -> None:
    space = '{"rate": pt.grid_search([0.1, 0.5]), "seconds": 0.5}'
    code = tune_code("stopped", space, "checkpoint=pt.Cadence(every_steps=1)")
    slow = code.replace("'step': 4", "'step': 40")
    pressed = []

    def interrupt_at_step_2(output: CellOutput) -> None:
        if not pressed and any("at step 2" in update for update in output.updates):
            pressed.append(True)
            kernel.interrupt()

    output = kernel.wait_for_cell(kernel.start_cell(slow), interrupt_at_step_2)
    assert output.error == "KeyboardInterrupt: tune was interrupted; run the cell again to resume it"
    assert "interrupted after" in output.html
    assert "experiment=&#x27;stopped&#x27;" in output.html
    assert "2 interrupted of 2" in output.html
    assert len(output.displays) == 1
    again = kernel.run(code.replace("'step': 4", "'step': 6"))
    assert "done after" in again.html
    trials = pt.load_results(folder / "runs", "stopped").trials.values()
    assert [(trial.status, trial.attempt, trial.recomputed_steps) for trial in trials] == [("completed", 2, 0)] * 2
