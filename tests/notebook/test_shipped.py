"""The notebook in examples/ runs from top to bottom."""

from __future__ import annotations

from pathlib import Path

from tests.fakes.notebooks import executed, shipped


def test_the_shipped_notebook_runs_from_top_to_bottom(prefect_server: str, tmp_path: Path) -> None:
    notebook = executed(shipped(), tmp_path, {"PREFECT_API_URL": prefect_server})
    outputs = [each["outputs"] for each in notebook.cells if each["cell_type"] == "code"]
    assert [len(each) for each in outputs] == [0, *[1] * 6]  # one display, no log lines
    search, results, best, checkpoint, more, _ = ["".join(each[0]["data"]["text/html"]) for each in outputs[1:]]
    assert "done after" in search
    assert "of 12" in search
    assert "<svg" in results
    assert "Trial " in best
    assert "Checkpoint of step" in checkpoint
    assert "of 16" in more


def test_the_shipped_notebook_has_no_outputs() -> None:
    assert all(not each.get("outputs") and each.get("execution_count") is None for each in shipped().cells)
