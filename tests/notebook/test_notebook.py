"""What a search shows in a notebook, and the notebook in examples/.

The HTML is bounded, escaped, readable on any background, without external resources. A cell shows the end of a search
also after a failed update, and only warnings of Prefect's log.
"""

from __future__ import annotations

import io
import logging
import re
import threading
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from prefect.logging.handlers import PrefectConsoleHandler

import prefect_tune as pt
from prefect_tune.core.experiment.cost import CostCategory, ExperimentCost
from prefect_tune.core.experiment.trial_transitions import Phase, Status, Trial
from prefect_tune.core.reasons import make_reason
from prefect_tune.core.search.objective import Objective
from prefect_tune.core.search_view import SearchSnapshot
from prefect_tune.notebook import (
    CellOutput,
    CellStatus,
    live_output,
    quiet_console,
    render_progress_html,
    render_results_html,
)
from prefect_tune.reporting.facts import ReportInput, make_report_input
from prefect_tune.terminal.live_display import NOTICE
from prefect_tune.terminal.progress_view import Note, ProgressState, SearchExtent
from tests.fakes.checkpoints import write_files
from tests.fakes.html_tags import Tags
from tests.fakes.kernels import read_notebook, run_notebook
from tests.fakes.searches.journal_builder import JournalBuilder, asha
from tests.fakes.untrusted import HOSTILE, require_visible

LOSS = Objective(metrics=("loss",), modes=("min",))
NOON = datetime(2026, 11, 21, 12, tzinfo=UTC)
NO_COST = ExperimentCost([], [], dict.fromkeys(CostCategory, 0.0))
EVIL = "</td></style><script>alert(1)</script><img src=http://evil onerror=alert(2)>\"'" + HOSTILE
EVIL_ERROR = make_reason("raised", type=EVIL, text=EVIL, traceback=f"Traceback {EVIL}", location=EVIL)


def make_trial(number: int, status: Phase = Phase.FINISHED, **more: object) -> Trial:
    fields = {"config": {EVIL: EVIL, "lr": 10.0**-number}, "step": number, "metrics": {"loss": number / 7}}
    return Trial(**{"id": f"{number:05d}", "phase": status, **fields, **more})  # type: ignore[arg-type]  # as given


def make_state(**changes: object) -> ProgressState:
    fields = {
        "extent": SearchExtent("first", LOSS, trial_count=20),
        "elapsed": timedelta(seconds=200),
        "counts": {Status.RUNNING: 1, Status.COMPLETED: 2, Status.ERRORED: 7},
        "running": [make_trial(3, Phase.RUNNING)],
        "others": [make_trial(1), make_trial(2)],
        "best": make_trial(1),
        "notes": [Note(NOON, EVIL)],
    }
    return ProgressState(**{**fields, **changes})


def make_report(search: JournalBuilder, uri: str) -> ReportInput:
    return make_report_input(SearchSnapshot(search.state), uri=uri, now=NOON, objective=LOSS)


def render_all(tmp_path: Path) -> dict[str, str]:
    search = JournalBuilder()
    search.add_trial("a", {EVIL: EVIL, "lr": 1})
    search.add_trial("b", {EVIL: EVIL, "lr": 2})
    for name in "ab":
        search.start_attempt(name)
        search.report(name, 1, {"loss": 1.0, EVIL: EVIL})
        search.report(name, 2, {"loss": 0.5, EVIL: EVIL})
    points = {"a": {"loss": [(1.0, 1.0), (2.0, 0.5)]}, "b": {"loss": [(1.0, 1.0), (2.0, 0.5)]}}
    checkpoint = pt.Checkpoint(write_files(tmp_path / "plain", {EVIL.replace("/", "_"): b"x"}) / "<script>")
    report = make_report(search, f"s3://{EVIL}")
    results = render_results_html(report, lambda _trials, _metrics: points, lambda: NO_COST)
    result = pt.TrialResult(
        "e", "t", Status.ERRORED, EVIL, 3, {EVIL: EVIL}, checkpoint, 1, 0, recomputed_is_lower_bound=False
    )
    return {
        "running": render_progress_html(make_state(), CellStatus.RUNNING, ""),
        "failed": render_progress_html(make_state(stop_reason=EVIL), CellStatus.FAILED, EVIL),
        "ended early": render_progress_html(make_state(stop_reason=EVIL), CellStatus.DONE, ""),
        "results": results,
        "trial": make_trial(1, Phase.ERRORED, end_reason=EVIL_ERROR)._repr_html_(),
        "checkpoint": checkpoint._repr_html_(),
        "result": result._repr_html_(),
    }


def test_what_users_wrote_is_text_and_nothing_is_loaded(tmp_path: Path) -> None:
    allowed = {"div", "style", "h1", "h2", "p", "table", "tr", "th", "td", "code", "pre", "img"}
    for html in render_all(tmp_path).values():
        require_visible(html)
        tags = Tags(html)
        assert tags.names <= allowed
        assert not {name for name in tags.attributes if name.startswith("on")} | tags.attributes & {"href"}
        sources = [str(attributes["src"]) for _, attributes in tags.elements if "src" in attributes]
        assert all(source.startswith("data:image/svg+xml;base64,") for source in sources)
        assert not re.search(r"@import|url\(", html)
        assert "alert(1)" in tags.text or "<script>" in tags.text


def test_the_run_in_the_prefect_ui_is_a_link_if_its_address_is_known() -> None:
    for ending in CellStatus:
        html = render_progress_html(make_state(), ending, "", 'http://ui/runs/flow-run/1?a="b')
        link = '<a href="http://ui/runs/flow-run/1?a=&quot;b" target="_blank" rel="noopener">in the Prefect UI</a>'
        assert link in html
        assert "<a " not in render_progress_html(make_state(), ending, "")


def test_text_has_the_color_of_the_cell(tmp_path: Path) -> None:
    for html in render_all(tmp_path).values():
        (style,) = re.findall(r"<style>(.*?)</style>", html, re.DOTALL)
        assert set(re.findall(r"(?<![-\w])color:([^;}]+)", style)) == {"inherit"}
        assert set(re.findall(r"background:([^;}]+)", style)) == {"none"}


def test_ten_thousand_trials_are_a_short_table() -> None:
    others = [make_trial(number) for number in range(1, 10_000)]
    state = make_state(others=others, counts={Status.COMPLETED: 9_999, Status.RUNNING: 1})
    html = render_progress_html(state, CellStatus.DONE, "")
    assert html.count(" completed ") == 15
    assert len(html) < 40_000


def test_curves_that_cannot_be_read_are_said_to_be_missing() -> None:
    def refuse(_trials: object, _metrics: object) -> dict[str, dict[str, list[tuple[float, float]]]]:
        raise pt.StoreUnavailable("the bucket <b>sleeps</b>")

    def refuse_cost() -> ExperimentCost:
        raise pt.StoreUnavailable("asleep")

    search = asha(5)
    html = render_results_html(make_report(search, "s3://bucket/runs"), refuse, refuse_cost)
    assert "The learning curves could not be read: the bucket &lt;b&gt;sleeps&lt;/b&gt;" in html
    assert "Best trial" in html


def test_a_cell_shows_the_table_of_a_terminal_and_how_the_search_ended() -> None:
    running = render_progress_html(make_state(), CellStatus.RUNNING, "")
    assert "running for 3 min 20 s" in running
    assert "best    trial 00001, loss 0.142857 at step 1" in running
    assert "done after 3 min 20 s" in render_progress_html(make_state(), CellStatus.DONE, "")
    ended_early = render_progress_html(make_state(stop_reason="a budget"), CellStatus.DONE, "")
    assert "ended early after 3 min 20 s: a budget" in ended_early
    interrupted = render_progress_html(make_state(), CellStatus.INTERRUPTED, "")
    assert "run the cell again with <code>experiment=&#x27;first&#x27;</code>" in interrupted


def test_a_trial_shows_its_history_and_its_whole_error() -> None:
    search = asha(4)
    pruned = next(trial for trial in search.state.trials.values() if trial.status is Status.PRUNED)
    html = Tags(pruned._repr_html_()).text
    assert f"Trial {pruned.id} · pruned @{pruned.step}" in html
    assert f"step {pruned.step}: stop, " in html
    saved = next(trial for trial in search.state.trials.values() if trial.checkpoints)
    assert f"results.checkpoint('{saved.id}')" in Tags(saved._repr_html_()).text
    broken = make_trial(1, Phase.ERRORED, end_reason=make_reason("raised", text="no", traceback="Traceback\n  line 3"))
    assert "Traceback\n  line 3" in Tags(broken._repr_html_()).text


@pytest.mark.parametrize(
    "name", ["policy_events", "proposed_by_search", "fingerprint", "trainable_failures", "outbox", "clones"]
)
def test_a_trial_prints_nothing_internal(name: str) -> None:
    search = asha(3)
    for trial in search.state.trials.values():
        assert f"{name}=" not in repr(trial)
        assert f"{name}=" not in str(trial)


def test_a_checkpoint_that_is_gone_says_so_instead_of_raising(tmp_path: Path) -> None:
    html = pt.Checkpoint(f"file://{tmp_path}/runs/e/1/trials/t/checkpoints/0000000001-0000000001")._repr_html_()
    assert "CheckpointNotFound" in html
    assert "with checkpoint.as_directory()" in html


class Cell(CellOutput):
    """A cell whose first update fails."""

    def __init__(self) -> None:
        self.shown: list[str] = []
        self.failed = threading.Event()

    def show(self, html: str, text: str) -> None:
        del text
        if not self.failed.is_set():
            self.failed.set()
            raise OSError("the kernel's channel is closed")
        self.shown.append(html)


def test_the_end_is_drawn_also_after_an_update_that_failed() -> None:
    cell, errors = Cell(), list[Exception]()
    with live_output(cell, lambda ending, _: (str(ending), ""), errors.append, threading.Event()):
        assert cell.failed.wait(60)
    assert [str(ending) for ending in cell.shown] == [str(CellStatus.DONE)]
    assert [str(error) for error in errors] == ["the kernel's channel is closed"]


@pytest.mark.parametrize(
    ("error", "end"), [(KeyboardInterrupt(), "interrupted "), (ValueError("no\nmore"), "failed ValueError: no")]
)
def test_how_it_ended_is_drawn_and_an_interrupt_is_no_failure(error: BaseException, end: str) -> None:
    cell = Cell()
    output = live_output(cell, lambda *ending: (" ".join(ending), ""), lambda _: None, threading.Event())
    with pytest.raises(type(error)), output:
        raise error
    assert cell.shown[-1:] == [end]


@pytest.fixture
def console() -> Iterator[io.StringIO]:
    """The output of Prefect's console handler."""
    stream = io.StringIO()
    handler = PrefectConsoleHandler(stream=stream)
    logger = logging.getLogger("prefect.of_a_cell")
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    yield stream
    logger.removeHandler(handler)


def test_the_console_has_only_warnings_and_notices_until_the_last_search_ends(console: io.StringIO) -> None:
    log = logging.getLogger("prefect.of_a_cell")
    with quiet_console():
        with quiet_console():
            log.info("one")
        log.info("two")
        log.warning("three")
        log.info("resumes", extra=NOTICE)
    log.info("four")
    assert console.getvalue().split() == ["three", "resumes", "four"]


def test_at_the_level_debug_everything_is_written(console: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.getLogger("prefect"), "level", logging.DEBUG)
    logging.getLogger("prefect").manager._clear_cache()  # type: ignore[attr-defined]  # logging caches enabled levels
    with quiet_console():
        logging.getLogger("prefect.of_a_cell").info("one")
    assert console.getvalue().split() == ["one"]


@pytest.mark.long
def test_the_shipped_notebook_runs_from_top_to_bottom(prefect_server: str, tmp_path: Path) -> None:
    notebook = run_notebook(read_notebook(), tmp_path, {"PREFECT_API_URL": prefect_server})
    outputs = [cell["outputs"] for cell in notebook.cells if cell["cell_type"] == "code"]
    assert list(map(len, outputs)) == [0, *[1] * 6]  # one display, no log lines
    search, results, best, checkpoint, more, _ = ["".join(output["data"]["text/html"]) for [output] in outputs[1:]]
    assert "done after" in search
    assert "of 12" in search
    assert "data:image/svg+xml" in results
    assert "Trial " in best
    assert "Checkpoint of step" in checkpoint
    assert "of 16" in more


def test_the_shipped_notebook_has_no_outputs() -> None:
    assert all(not cell.get("outputs") and cell.get("execution_count") is None for cell in read_notebook().cells)
