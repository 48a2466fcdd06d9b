"""The report page: its content, its escaping, its maximum size."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from datetime import UTC, datetime

import pytest
from markdown_it import MarkdownIt

from prefect_tune.core.experiment.cost import AttemptCost, CostCategory, ExperimentCost, RunCost
from prefect_tune.core.experiment.trial_transitions import newest_checkpoint_key
from prefect_tune.core.journal_events import Cause, StopRequested, TrialErrored
from prefect_tune.core.reasons import make_reason
from prefect_tune.core.storage.layout import TrialKey
from prefect_tune.reporting.facts import ReportInput, report_to_json
from prefect_tune.reporting.page import make_cost_rows, make_page, render_html, render_markdown
from prefect_tune.terminal.formatting import format_cell
from tests.fakes.html_tags import Tags
from tests.fakes.searches.journal_builder import JournalBuilder, all_statuses, asha, pareto, single

MAX_CHARACTERS = 300_000


def render_page(report_input: ReportInput) -> str:
    return render_markdown(make_page(report_input))


def headings_of(page: str) -> list[str]:
    return [line.removeprefix("## ") for line in page.splitlines() if line.startswith("## ")]


def render_as_html(page: str) -> str:
    """Render Markdown with tables; HTML passes through unchanged."""
    reader = MarkdownIt("commonmark", {"html": True}).enable("table")
    reader.__dict__["validateLink"] = lambda _: True  # the worst case: every link is accepted
    return reader.render(page)


def test_a_search_has_everything_in_its_order() -> None:
    page = render_page(asha(40).report_input(expected=50))
    best = asha(40).report_input().best_trials[0]
    figures = ["Learning curves", "Parameters", "Timeline"]
    tables = ["Trials", "Errors (1)", "Cost", "Runs", "Settings"]
    assert headings_of(page) == [f"Best trial: {best.id}", *figures, *tables]
    assert f"**Best loss: {format_cell(best.metrics['loss'])} (trial {best.id}) · 40 of 50 trials done" in page
    assert page.count("](http://ui/runs/flow-run/run-") >= 40
    assert f"prefect-tune export s3://bucket/runs rates DIRECTORY --trial {best.id}" in page
    assert f"The newest checkpoint, of step {best.checkpoints[-1].step}, and the command" in page


def test_the_commands_and_paths_on_a_page_lead_to_the_very_server() -> None:
    report_input = replace(asha(4).report_input(), uri="s3://runs/digits?endpoint_url=http://minio:9000&region=eu")
    page = render_page(report_input)
    assert "prefect-tune export 's3://runs/digits?endpoint_url=http://minio:9000&region=eu' rates DIRECTORY" in page
    best = report_input.best_trials[0]
    key = newest_checkpoint_key(TrialKey(experiment="rates", generation=1, trial=best.id), best)
    assert key is not None
    assert f"\ns3://runs/digits/{key.folder}?endpoint_url=http://minio:9000&region=eu\n" in page


def test_keys_in_the_variables_of_a_job_are_on_no_page() -> None:
    search = JournalBuilder(settings={"metric": "loss", "trial_job_variables": {"env": {"WANDB_API_KEY": "topsecret"}}})
    page = render_page(search.report_input())
    assert "WANDB_API_KEY" in page
    assert "topsecret" not in page


def test_one_training_is_reported_without_a_table_of_trials() -> None:
    page = render_page(single().report_input())
    assert headings_of(page) == ["The trial", "Learning curves", "Timeline", "Cost", "Runs"]
    assert "**completed at step 60" in page


def test_with_several_metrics_the_front_stands_in_for_the_best() -> None:
    page = render_page(pareto(40).report_input())
    assert headings_of(page)[0] == "Learning curves"
    rows = page.partition("## Trials")[2].partition("##")[0]
    front = [line for line in rows.splitlines() if "| yes |" in line]
    assert len(front) == len(pareto(40).report_input().best_trials) > 1
    assert "Pareto" in rows.partition("| ---")[0]
    assert re.search(r"\*\*\d+ trials on the Pareto front · 40 of 40 proposed trials done\*\*", page)


def test_without_a_metric_the_trials_are_reported_and_none_is_the_best() -> None:
    search = JournalBuilder(settings={"num_samples": 2})
    for name in ("0", "1"):
        search.add_trial(name, {"x": int(name)})
        search.start_attempt(name)
        search.report(name, 1, {"loss": 1.0, "text": "not a number"})
    page = render_page(search.report_input())
    assert headings_of(page) == ["Learning curves", "Timeline", "Trials", "Cost", "Settings"]


def test_where_all_trials_errored_it_is_said_why_and_nothing_is_drawn_of_no_number() -> None:
    search = JournalBuilder()
    for index in range(30):
        search.add_trial(str(index), {"x": index})
        search.start_attempt(str(index))
        search.record(TrialErrored(trial=str(index), cause=Cause.TRAINABLE, reason=f"ValueError: {index}\ntrace"))
    page = render_page(search.report_input())
    assert headings_of(page) == ["Timeline", "Trials", "Errors (30)", "Cost", "Settings"]
    assert page.count("ValueError") == 11  # ten messages, and one traceback
    assert "And 20 more." in page


def test_the_totals_tell_what_was_done_in_vain_and_what_was_not_sent() -> None:
    totals = single(60, kills=(23, 41)).report_input().totals
    assert (totals.attempts, totals.attempts_lost, totals.recomputed_steps) == (3, 2, 3 + 1)
    assert totals.checkpoints_committed == 12
    assert (totals.committed_bytes, totals.sent_bytes) == (60_000_000, 10_500_000)
    assert totals.saved_bytes == 49_500_000
    assert totals.upload_seconds == pytest.approx(3.0)


def test_the_training_time_of_the_report_is_that_of_the_cost() -> None:
    report_input = single(60, kills=(23, 41)).report_input()
    start = datetime(2026, 11, 26, tzinfo=UTC)
    seconds = dict.fromkeys(CostCategory, 0.0) | {CostCategory.TRAINING: 7.5, CostCategory.LOST: 2.5}
    cost = ExperimentCost([RunCost(start, 10.0, 1)], [AttemptCost("0", 1, start, seconds, None)], seconds)
    report_input.__dict__["cost"] = cost
    assert (report_input.totals.useful_seconds, report_input.totals.lost_seconds) == (7.5, 2.5)
    assert make_cost_rows(report_input.totals)["training"] == "7.5 s in 3 attempts, 2 killed or lost"


def test_the_same_facts_are_json() -> None:
    facts = json.loads(json.dumps(report_to_json(asha(20).report_input())))
    assert facts["trials_by_status"] == {"completed": 4, "pruned": 15, "errored": 1}
    assert facts["ended_count"] == 20
    assert [(run["term"], run["attempts"]) for run in facts["runs"]] == [(1, 6), (2, 6), (3, 8)]
    assert facts["best"][0]["trial"] == facts["trials"][0]["trial"]
    assert facts["errors"][0]["error"].startswith("ValueError: a | bad")


@pytest.mark.parametrize("count", [1, 100, 1_000])
def test_it_stays_small_however_many_trials_there_are(count: int) -> None:
    report_input = asha(count).report_input()
    page = make_page(report_input)
    assert len(render_markdown(page)) < MAX_CHARACTERS
    assert len(render_html(page)) < MAX_CHARACTERS
    assert render_markdown(page).count("\n| [") <= 50 + 10 + 3


def test_it_stays_small_however_much_is_in_a_configuration_and_a_metric() -> None:
    search = JournalBuilder(settings={"metric": "loss", "mode": "min", "space": "x" * 500_000})
    for index in range(60):
        search.add_trial(str(index), {f"{'p' * 500}{number}": f"{'v' * 500}{index}{number}" for number in range(300)})
        search.start_attempt(str(index))
        search.report(str(index), 1, {"loss": 1.0, **{f"{'m' * 300}{number}": 1.0 for number in range(300)}})
        search.record(TrialErrored(trial=str(index), cause=Cause.TRAINABLE, reason="e" * 100_000))
    assert len(render_page(search.report_input())) < MAX_CHARACTERS


HOSTILE = "</summary><script>alert(1)</script>![x](http://evil/x.png)[y](javascript:z)|`a`\n# no *b* _c_ \x00\x1b &lt;"


def make_hostile_input() -> ReportInput:
    search = JournalBuilder(settings={"metric": HOSTILE, "mode": "min", "note": f"{HOSTILE}\n```\n# no"})
    for index in range(12):
        search.add_trial(str(index), {HOSTILE: f"{HOSTILE}{index % 3}", "lr": index})
        search.start_attempt(str(index))
        search.report(str(index), 1, {HOSTILE: float(index)})
    error = make_reason("raised", type=HOSTILE, text=HOSTILE, traceback=HOSTILE, location=HOSTILE)
    search.record(TrialErrored(trial="3", cause=Cause.TRAINABLE, reason=error))
    return search.report_input()


def test_what_a_user_named_is_text_in_markdown() -> None:
    html = render_as_html(render_page(make_hostile_input()))
    assert "<script" not in html
    assert set(re.findall(r'(?:src|href)="([a-z]+:)', html)) == {"data:", "http:"}
    assert "evil/x.png" not in "".join(re.findall(r'(?:src|href)="[^"]*"', html))
    assert len(re.findall("<h1>", html)) == 1
    rows = re.findall(r"<tr>(.*?)</tr>", html.partition("<h2>Trials")[2].partition("</table>")[0], re.DOTALL)
    assert {row.count("<t") for row in rows} == {rows[0].count("<t")}


def test_what_a_user_named_is_text_in_html_and_nothing_is_fetched() -> None:
    tags = Tags(render_html(make_page(make_hostile_input())))
    assert "script" not in tags.names
    images = [str(attributes["src"]) for tag, attributes in tags.elements if tag == "img"]
    links = [str(attributes["href"]) for _, attributes in tags.elements if "href" in attributes]
    assert all(image.startswith("data:image/svg+xml;base64,") for image in images)
    assert all(link.startswith("http://ui/") for link in links)
    assert not [attributes for _, attributes in tags.elements if any(name.startswith("on") for name in attributes)]


MIN_BOTH = {"metric": ["loss", "ok"], "mode": "min"}
ODD_INPUTS: dict[str, tuple[dict[str, object], list[object], list[dict[str, object]]]] = {
    "a number with and without a fraction": ({"metric": "loss", "mode": "min"}, [1, 1.0, 2.0], [{"loss": 1.0}]),
    "a bool among numbers": ({"metric": "loss", "mode": "min"}, [1, 1.0, True], [{"loss": 1.0}]),
    "a bool as second metric": (MIN_BOTH, [1, 2, 3], [{"loss": 1.0, "ok": True}, {"loss": 2.0, "ok": False}]),
    "a bool as only metric": ({"metric": "ok", "mode": "max"}, [1, 2, 3], [{"ok": True}, {"ok": False}]),
    "a parameter that no float can hold": ({"metric": "loss", "mode": "min"}, [10**400, 2, 3, 4, 5], [{"loss": 1.0}]),
    "a metric that no float can hold": ({"metric": "loss", "mode": "min"}, [1, 2], [{"loss": 10**400}, {"loss": 1}]),
}


def make_odd_input(settings: dict[str, object], values: list[object], metrics: list[dict[str, object]]) -> ReportInput:
    search = JournalBuilder(settings=settings)
    for index in range(12):
        search.add_trial(str(index), {"x": values[index % len(values)], "y": index})
        search.start_attempt(str(index))
        search.report(str(index), 1, metrics[index % len(metrics)])
    return search.report_input()


@pytest.mark.parametrize("case", ODD_INPUTS)
def test_no_odd_number_takes_a_figure_off_the_page(case: str) -> None:
    page = render_page(make_odd_input(*ODD_INPUTS[case]))
    assert "Parameters" in headings_of(page)
    assert "could not be drawn" not in page


def test_a_figure_that_fails_is_left_out_and_the_rest_of_the_page_is_there() -> None:
    too_far_apart: list[dict[str, object]] = [{"loss": -1.7e308}, {"loss": 1.7e308}]
    page = render_page(make_odd_input({"metric": "loss", "mode": "min"}, [1, 2, 3], too_far_apart))
    assert "Learning curves" not in headings_of(page)
    assert "Learning curves could not be drawn: " in page
    assert {"Timeline", "Trials", "Cost"} <= set(headings_of(page))


def test_a_run_that_was_ended_before_its_time_says_why() -> None:
    search = JournalBuilder()
    assert "ended early" not in render_page(search.report_input())
    search.record(StopRequested(reason=make_reason("time-budget", seconds=3600.0)))
    assert "| **ended early** | the time budget of 1 h is spent |" in render_page(search.report_input())
    search.change_owner("the next one")
    assert "ended early" not in render_page(search.report_input())


def test_statuses_are_words_and_say_at_which_step_a_trial_stopped_short() -> None:
    page = render_page(all_statuses().report_input())
    table = page.replace("\N{NO-BREAK SPACE}", " ").partition("## Trials")[2].partition("##")[0]
    rows = [row.split(" | ") for row in table.splitlines() if "|" in row]
    same = {status: status for status in ("completed", "errored", "running", "pending")}
    with_step = {status: f"{status} @3" for status in ("pruned", "interrupted", "paused")}
    assert {re.sub(r"[|[ ]|].*", "", row[0]): row[1] for row in rows[2:]} == {**same, **with_step}
    assert "**Best loss: 0.6 (trial pruned) · 3 of 7 proposed trials done · 1 interrupted · 1 errored" in page
    pictograms = re.compile("[\N{HOURGLASS WITH FLOWING SAND}\N{WHITE HEAVY CHECK MARK}\U0001f000-\U0001ffff]")
    assert not pictograms.search(page), "a font may lack these characters"
