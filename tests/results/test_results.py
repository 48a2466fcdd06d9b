"""Results of a search: in the run that trained it, in a later process, and exported; why there is no best trial."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta, tzinfo
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import prefect_tune as pt
from prefect_tune import arrow_tables, clock
from prefect_tune.arrow_tables import COLUMN_VERSIONS, parse_reports, reports_to_arrow, to_parquet, trials_to_arrow
from prefect_tune.core.experiment.experiment import make_empty_experiment
from prefect_tune.core.experiment.retention import find_sequences_to_retire
from prefect_tune.core.experiment.summary import Scope, find_best_trial, objective_from_settings
from prefect_tune.core.experiment.trial_transitions import Status, Trial
from prefect_tune.core.journal_events import AttemptStarted, Cause, Event, StepReported, TrialAdded, TrialErrored
from prefect_tune.core.search.objective import Objective
from prefect_tune.core.values import StepReport
from prefect_tune.results import no_ranking_reason
from prefect_tune.tasks.experiments import publish_results
from prefect_tune.testing import without_server
from tests.fakes.checkpoints import first_generation
from tests.fakes.searches.experiments import apply_events, write_curves, write_experiment, write_search
from tests.fakes.searches.journal_builder import JournalBuilder, all_statuses
from tests.trainables.counting import Scripted

LOSSES = [[1.0, 9.0, 9.0], [8.0, 8.0, 2.0], [5.0, 4.0, 4.0], []]
A, B, C, BROKEN = "00000", "00001", "00002", "00003"


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target with a finished search of four trials, the last of which errored."""
    folder = tmp_path_factory.mktemp("results") / "target"
    with without_server():
        results = pt.tune(
            Scripted,
            {"losses": pt.grid_search(LOSSES), "model": {"depth": 2}},
            target=str(folder),
            experiment="e",
            metric="loss",
            num_samples=1,
            checkpoint=pt.Cadence(every_steps=1),
            max_concurrent_trials=2,
            isolation="thread",
        )
    assert [str(trial.status) for trial in results.trials.values()] == ["completed"] * 3 + ["errored"]
    return folder


@pytest.fixture
def results(target: Path) -> pt.Results:
    return pt.load_results(target, "e", metric="loss")


def results_of(search: JournalBuilder, folder: Path) -> pt.Results:
    objective = objective_from_settings(search.state.settings)
    return pt.Results(search.state, pt.LocalTarget(path=str(folder)), objective)


def read_count(checkpoint: pt.Checkpoint | None) -> str:
    """The step of a checkpoint."""
    assert checkpoint is not None
    with checkpoint.as_directory() as directory:
        return Path(directory, "count").read_text()


def test_any_metric_and_mode_can_be_asked_for(results: pt.Results) -> None:
    assert results.best.config == {"losses": [8.0, 8.0, 2.0], "model": {"depth": 2}}
    assert results.best_trial("loss", "max").id == A
    with pytest.raises(pt.InvalidInput, match="none of its 4 trials has reported accuracy"):
        results.best_trial("accuracy")
    with pytest.raises(pt.InvalidInput, match="scope 'first'"):
        results.best_trial(scope="first")
    with pytest.raises(pt.InvalidInput, match="rows 'trial': expected 'trials', 'reports' or 'attempts'"):
        results.to_arrow("trial")


def test_a_mode_without_a_metric_is_that_of_the_search_or_refused(results: pt.Results, target: Path) -> None:
    with pytest.raises(pt.InvalidInput, match="mode 'max' without a metric: the search has min loss"):
        results.best_trial(mode="max")
    with pytest.raises(pt.InvalidInput, match="mode 'max' without a metric: the search has min loss"):
        pt.load_results(target, "e", mode="max")
    assert pt.load_results(target, "e", metric="loss", mode="max").best_trial(mode="max").id == A


@pytest.mark.parametrize("scope", ["last", "all", "last-5-avg"])
def test_a_nested_metric_is_named_by_its_way(scope: Scope, results: pt.Results) -> None:
    assert results.best_trial("eval/size", "max", scope=scope).id == A
    assert read_count(results.best_checkpoint(A, "eval/size", "max")) == "3"
    assert read_count(results.best_checkpoint(C, ["loss", "eval/size"], ["min", "min"])) == "2"  # losses 5, 4, 4
    with pytest.raises(pt.InvalidInput, match="none of its 4 trials has reported eval/lost"):
        results.best_trial("eval/lost", scope=scope)


def test_of_several_metrics_the_next_decides_between_equals(tmp_path: Path) -> None:
    search = JournalBuilder(settings={"metric": ["loss", "size"], "mode": "min"})
    for name, size in (("a", 10), ("b", 5), ("c", 5)):
        search.add_trial(name, {})
        search.start_attempt(name)
        search.report(name, 1, {"loss": 1.0, "size": size})
    results = results_of(search, tmp_path)
    assert [trial.id for trial in results.best_trials] == ["b", "c"]
    assert results.best is results.best_trials[0]
    assert results.best is find_best_trial(search.state)  # what `ls` and `export` name
    assert results.best.id == search.report_input().ranking[0].id  # what the report names


def test_what_the_search_was_for_is_known_from_its_journal(target: Path, tmp_path: Path) -> None:
    assert pt.load_results(target, "e").best.id == B
    assert pt.load_results(target, "e", metric="loss", mode="max").best.id == A
    write_experiment(tmp_path / "target", "of-no-search", [1])
    with pytest.raises(pt.InvalidInput, match=r"no metric to compare by; .* Pass one: results.best_trial"):
        _ = pt.load_results(tmp_path / "target", "of-no-search").best


def test_errors_say_which_trial_and_why(results: pt.Results) -> None:
    assert list(results.errors) == [BROKEN]
    assert "ValueError: no losses" in results.errors[BROKEN]


def test_every_checkpoint_of_every_trial_can_be_had(results: pt.Results) -> None:
    for trial, steps in ((A, "3"), (results.trials[B], "3")):
        assert read_count(results.checkpoint(trial)) == steps
    assert read_count(results.best_checkpoint(A)) == "1"
    assert results.checkpoint(BROKEN) is None
    assert results.best_checkpoint(BROKEN) is None
    with pytest.raises(pt.InvalidInput, match="there is no trial '99999'"):
        results.checkpoint("99999")


def test_the_best_checkpoint_is_of_the_best_report_of_all_trials_and_the_one_that_retention_keeps(
    results: pt.Results,
) -> None:
    best = results.best_checkpoint()
    assert best is not None
    assert f"/{results.best_trial(scope='all').id}/" in best.path
    assert read_count(best) == "1"
    assert results.best.id != results.best_trial(scope="all").id
    assert read_count(results.best_checkpoint(metric="eval/size", mode="max")) == "3"
    saves = results.trials[C].checkpoints  # of losses 5, 4, 4: of equal ones the older stays
    kept = [
        ref for ref in saves if ref.sequence not in find_sequences_to_retire(saves, pt.Retention(best=1, metric="loss"))
    ]
    assert f"/{kept[0].step:010}-{kept[0].sequence:010}" in results.best_checkpoint(C).path
    assert results.best_checkpoint(metric="accuracy") is None


def test_a_learning_curve_has_one_report_for_each_step(results: pt.Results, monkeypatch: pytest.MonkeyPatch) -> None:
    read, results = Mock(wraps=arrow_tables.read_curves), replace(results)  # a copy has read nothing yet
    monkeypatch.setattr("prefect_tune.results.read_curves", read)
    assert [(report.step, report.metrics["loss"]) for report in results.curve(A)] == [(1, 1.0), (2, 9.0), (3, 9.0)]
    assert list(results.curve(BROKEN)) == []
    read.assert_called_once()  # one journal has the curves of all trials


def test_tables_have_a_row_for_each_trial_or_each_report(results: pt.Results) -> None:
    trials = results.to_arrow().to_pylist()
    assert [row["trial"] for row in trials] == [A, B, C, BROKEN]
    assert [row["status"] for row in trials] == ["completed"] * 3 + ["errored"]
    assert [row["loss"] for row in trials] == [9.0, 2.0, 4.0, None]
    columns = {"config/losses", "config/model/depth", "eval/size", "attempts", "recomputed_steps", "checkpoint"}
    assert columns <= set(trials[0])
    reports = results.to_arrow("reports").to_pylist()
    curves = zip((A, B, C), LOSSES, strict=False)
    expected = [(trial, step, loss) for trial, losses in curves for step, loss in enumerate(losses, 1)]
    assert [(row["trial"], row["step"], row["loss"]) for row in reports] == expected


def test_the_tables_lie_on_the_target_as_parquet_for_any_tool(target: Path, results: pt.Results) -> None:
    for rows in ("trials", "reports"):
        (path,) = target.glob(f"e/1/results/{rows}/*.parquet")
        table = pq.read_table(path)
        assert table.to_pylist() == results.to_arrow(rows).to_pylist()
        assert (table.schema.metadata or {})[b"prefect-tune/experiment"] == b"e"


def test_a_table_with_the_columns_of_another_release_is_made_from_the_journal_again() -> None:
    def read_back(**metadata: str) -> pa.Table | None:
        return parse_reports(to_parquet(pa.table({"step": [1]}), {"digest": "d", **metadata}), "d")

    assert read_back(version="1") == pa.table({"step": [1]})
    assert read_back(version="2") is None
    assert read_back() is None
    assert read_back(version="1", digest="of another history") is None


def test_a_damaged_table_is_made_from_the_journal_again() -> None:
    whole = to_parquet(pa.table({"step": [1] * 1000}), {"digest": "d", "version": "1"})
    assert parse_reports(whole, "d") is not None
    for damaged in (b"", b"no Parquet file", whole[:-20], bytes(50) + whole[50:]):
        assert parse_reports(damaged, "d") is None


def test_a_number_that_no_float_can_hold_is_text_in_a_table() -> None:
    search = JournalBuilder()
    for name, rate in (("a", 10**400), ("b", 0.5), ("c", 2)):
        search.add_trial(name, {"rate": rate})
    column = trials_to_arrow(search.state).column("config/rate").to_pylist()
    assert column == [f"1{'0' * 400}", "0.5", "2"]


@pytest.mark.parametrize(
    ("values", "column"),
    [([[1, 2], None], ["[1, 2]", None]), ([[1, 2], "a"], ["[1, 2]", '"a"'])],
    ids=["lists", "mixed"],
)
def test_a_list_is_json_in_a_table_once(values: Sequence[object], column: Sequence[str]) -> None:
    search = JournalBuilder()
    for name, value in zip("ab", values, strict=True):
        search.add_trial(name, {} if value is None else {"layers": value})
    assert trials_to_arrow(search.state).column("config/layers").to_pylist() == column


def test_a_metric_with_the_name_of_a_column_is_compared_and_drawn_by_what_was_reported(tmp_path: Path) -> None:
    search = JournalBuilder(settings={"metric": "step", "mode": "max"})
    curves = [
        (name, [StepReport(step=step, metrics={"step": value}) for step, value in enumerate(values, 1)])
        for name, values in (("a", [9.0, 1.0]), ("b", [2.0, 3.0, 4.0]))
    ]
    for name, reports in curves:
        search.add_trial(name, {})
        search.start_attempt(name)
        for report in reports:
            search.report(name, report.step, report.metrics)
    results = results_of(search, tmp_path)
    vars(results)["_reports"] = reports_to_arrow(curves)
    assert (results.best.id, results.best_trial(scope="all").id) == ("b", "a")
    assert results._read_curve_points(["a"], ["step"]) == {"a": {"step": [(1, 9.0), (2, 1.0)]}}


def test_an_experiment_that_is_not_there_is_an_error_and_makes_no_folder(tmp_path: Path) -> None:
    (tmp_path / "target").mkdir()
    with pytest.raises(pt.InvalidInput, match="there is no experiment 'gone'"):
        pt.load_results(tmp_path / "target", "gone")
    assert list((tmp_path / "target").iterdir()) == []
    with pytest.raises(pt.StoreUnavailable, match="the root does not exist"):
        pt.load_results(tmp_path / "mistyped", "gone")
    assert not (tmp_path / "mistyped").exists()


def test_results_tell_at_a_glance_how_many_trials_are_how_far(results: pt.Results) -> None:
    best = "best: 00001 with loss 2.0"
    assert repr(results) == f"Results(experiment='e', trials: 3 completed, 1 errored, {best})"


def test_a_trial_is_found_by_its_number_and_one_that_is_not_there_is_named(results: pt.Results) -> None:
    assert results.trials["1"] is results.trials["00001"]
    with pytest.raises(KeyError, match=r"there is no trial '7'; expected one of: 00000, 00001, 00002, \.\.\."):
        _ = results.trials["7"]


def test_completion_offers_the_fields_of_a_trial_and_not_the_methods_of_pydantic(results: pt.Results) -> None:
    names = set(dir(results.best))
    assert {"id", "config", "metrics", "status"} <= names
    assert not {"parse_raw", "schema_json", "model_dump"} & names


def test_the_column_has_the_word_alone_and_the_step_is_in_a_column_of_its_own() -> None:
    rows = trials_to_arrow(all_statuses().state).to_pylist()
    assert [row["status"] for row in rows] == [row["trial"] for row in rows] == [str(status) for status in Status]
    assert [row["step"] for row in rows] == [3] * 6 + [0]


def test_a_file_of_results_says_the_version_of_its_columns(tmp_path: Path) -> None:
    target = pt.LocalTarget(path=str(tmp_path))
    paths = publish_results.fn(target, all_statuses().state)
    for rows, version in COLUMN_VERSIONS.items():
        metadata = pq.read_schema(tmp_path / paths[rows]).metadata
        assert metadata[b"prefect-tune/version"].decode() == version


def test_a_table_begins_with_what_a_person_asks_and_ends_with_the_long_texts() -> None:
    search = JournalBuilder()
    search.add_trial("a", {"lr": 0.5, "net": {"depth": 2}})
    search.start_attempt("a")
    search.report("a", 1, {"loss": 0.25, "reason": 7})
    names = trials_to_arrow(search.state).column_names
    assert names[:7] == ["trial", "status", "step", "config/lr", "config/net/depth", "loss", "metrics/reason"]
    assert names[-3:] == ["checkpoint", "cause", "reason"]


@pytest.mark.parametrize("count", [0, 3, 500])
def test_the_trials_are_printed_and_displayed_as_a_short_table(count: int, tmp_path: Path) -> None:
    search = JournalBuilder(settings={"metric": "loss", "mode": "min"})
    for number in range(count):
        search.add_trial(f"{number:05}", {"lr": number / 8, "text": "x" * 400})
        search.start_attempt(f"{number:05}")
        search.report(f"{number:05}", 1, {"loss": number / 4, "other": 1})
    results = results_of(search, tmp_path)
    assert dict(results.trials) == results.trials == search.state.trials
    lines, html = repr(results.trials).splitlines(), results.trials._repr_html_()
    assert max(map(len, lines)) <= 80
    assert html.count(" running ") == min(count, 20)
    if not count:
        assert lines == ["no trials"]
        assert "no trials" in html
        return
    assert lines[0].split() == ["trial", "status", "step", "loss", "lr"]
    assert lines[2].split() == ["00001", "running", "1", "0.25", "0.125"]
    more = "and 480 more trials: results.to_pandas()"
    assert len(lines) == (22 if count == 500 else 4)
    assert (lines[-1] == more) == (more in html) == (count == 500)


# The error for a search without comparable trials.


LOSS = Objective(metrics=("loss",), modes=("min",))


def make_trial(*reports: Mapping[str, object], error: str = "") -> Trial:
    """A trial with these reports; with an error, it errored after them."""
    events: list[Event] = [TrialAdded(trial="00000", config={}), AttemptStarted(trial="00000", attempt=1, from_step=0)]
    for step, metrics in enumerate(reports, 1):
        events.append(StepReported(trial="00000", report=StepReport(step=step, metrics=metrics)))
    events += [TrialErrored(trial="00000", cause=Cause.TRAINABLE, reason=error)] * bool(error)
    return apply_events(make_empty_experiment(first_generation("e")), events).trial("00000")


def rank_error(*trials: Trial, scope: str = "last", curves: Sequence[Mapping[str, object]] = ()) -> str:
    return no_ranking_reason(trials, LOSS, scope, {"00000": curves})


def test_a_cell_of_a_running_search_waits_at_most_20_s_for_each_read_of_the_target(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    timeouts: list[timedelta] = []

    def refuse(_: pt.LocalTarget, *, timeout: timedelta) -> None:
        timeouts.append(timeout)
        raise pt.StoreUnavailable("no answer")

    monkeypatch.setattr(pt.LocalTarget, "open", refuse)
    search = JournalBuilder()
    search.add_trial("a", {})
    search.start_attempt("a")
    html = pt.Results(search.state, pt.LocalTarget(path=str(tmp_path)), None)._repr_html_()
    assert "The learning curves could not be read: no answer" in html
    assert timeouts == [timedelta(seconds=20)] * 2


def test_without_a_metric_the_error_of_the_best_says_where_one_is_named(tmp_path: Path) -> None:
    write_search(tmp_path / "target", "e", {"00000": 0.5}, settings={})
    message = (
        r"its reports have \['loss'\]. Pass one: results.best_trial\('loss'\), or pt.load_results\(..., metric='loss'\)"
    )
    with pytest.raises(pt.InvalidInput, match=message):
        _ = pt.load_results(tmp_path / "target", "e").best


def test_a_metric_that_only_the_last_reports_lack_is_found_by_another_scope() -> None:
    reports: list[Mapping[str, object]] = [{"loss": 1.0}, {"accuracy": 0.5}]
    message = "the last reports have ['accuracy']; scope='all' compares all reports"
    assert rank_error(make_trial(*reports), curves=reports) == message
    assert rank_error(make_trial(*reports), scope="avg") == "their reports have ['accuracy']"


def best_trial_error(folder: Path, **scope: Any) -> str:
    with pytest.raises(pt.InvalidInput) as error:
        pt.load_results(folder, "e").best_trial(**scope)
    return str(error.value)


def test_a_metric_that_some_reports_have_is_not_said_to_be_in_none(tmp_path: Path) -> None:
    write_curves(tmp_path / "a", "e", [[{"loss": 1.0}, {"accuracy": 0.5}], [{"accuracy": 0.25}]], ["loss"])
    assert "no last report of its 2 trials has loss as a number: the last reports have ['accuracy']; scope='all'" in (
        best_trial_error(tmp_path / "a")
    )
    assert pt.load_results(tmp_path / "a", "e").best_trial(scope="all").id == "00000"
    write_curves(tmp_path / "b", "e", [[{"loss": "0.5"}]], ["loss"])
    assert "no last report of its 1 trials has loss as a number: trial 00000 reported 'loss' as text" in (
        best_trial_error(tmp_path / "b")
    )
    write_curves(tmp_path / "c", "e", [[{"loss": 1.0}], [{"accuracy": 0.5}]], ["loss", "accuracy"])
    assert "no last report of its 2 trials has loss, accuracy as a number" in best_trial_error(tmp_path / "c")
    assert "no report of its 2 trials has loss, accuracy as a number" in best_trial_error(tmp_path / "c", scope="avg")
    write_curves(tmp_path / "d", "e", [[{"size": 1}], []], ["loss"])
    for scope in ("last", "all"):
        assert "none of its 2 trials has reported loss: their reports have ['size']" in best_trial_error(
            tmp_path / "d", scope=scope
        )


# The cost of a search whose machine's clock was set, or that slept, while it ran.


def train(config: dict[str, Any]) -> None:
    for _ in range(2):
        pt.report({"loss": config["loss"]})
    Path(config["moves_clock"]).touch()


@pytest.mark.usefixtures("no_prefect_server")
@pytest.mark.parametrize("jump", [timedelta(hours=8), timedelta(hours=-1)])
def test_a_clock_that_is_moved_between_two_trials_adds_and_hides_no_second(
    jump: timedelta, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    moved = tmp_path / "moved"

    class MovedClock(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> Any:
            return datetime.now(tz) + (jump if moved.exists() else timedelta(0))

    monkeypatch.setattr(clock, "datetime", MovedClock)
    space = {"loss": pt.grid_search([1.0, 2.0, 3.0]), "moves_clock": str(moved)}
    options: dict[str, Any] = {"metric": "loss", "num_samples": 1, "max_concurrent_trials": 1, "isolation": "thread"}
    cost = pt.tune(train, space, target=str(tmp_path / "runs"), experiment="e", **options).cost
    assert moved.exists()
    assert "earlier run" not in caplog.text
    (run,) = cost.runs
    assert 0 < run.seconds < 600
    assert cost.slot_seconds == pytest.approx(run.seconds, rel=0.01, abs=0.1)
    assert all(0 <= seconds < 600 for seconds in cost.seconds.values())
