"""The life of a search in Prefect's UI, by clicks: started, watched, suspended, killed, cancelled, resumed."""

from __future__ import annotations

from pathlib import Path
from uuid import UUID

import pytest

from prefect_tune.core.experiment.trial_transitions import Status, newest_checkpoint
from prefect_tune.parameters.forms import flatten_parameters
from tests.browser.prefect_ui import LINGERS_AT, SAVE_INTERVAL, STEPS, Form, Installation, Search, Ui, wait_until

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

BOTH = {"rate": {"grid_search": [0.1, 0.4]}}
SAVES = {"checkpoint": {"every_steps": SAVE_INTERVAL}}


@pytest.fixture(scope="module")
def killed_search(installation: Installation, tmp_path_factory: pytest.TempPathFactory) -> tuple[Search, UUID]:
    """A running search that was started elsewhere."""
    search = Search(tmp_path_factory.mktemp("killed"), "nightly", BOTH, also=SAVES)
    return search, installation.start("tune", **search.parameters)


@pytest.fixture(scope="module")
def cancelled_search(installation: Installation, tmp_path_factory: pytest.TempPathFactory) -> tuple[Search, UUID]:
    """Another search, one of whose trials fails."""
    search = Search(tmp_path_factory.mktemp("cancelled"), "fragile", {**BOTH, "breaks_above": 0.3}, also=SAVES)
    return search, installation.start("tune", **search.parameters)


@pytest.mark.usefixtures("killed_search", "cancelled_search")  # they start meanwhile
def test_a_search_begun_in_the_form_is_watched_suspended_and_resumed_with_a_larger_budget(
    ui: Ui, installation: Installation, tmp_path: Path
) -> None:
    space = {"rate": {"loguniform": [0.01, 1]}, "width": {"choice": [4, 16, 64]}}
    search = Search(tmp_path, "rates", space, num_samples=4, also={"max_concurrent_trials": 2, "seed": 1})
    form = ui.open_deployment("tune").open_custom_run()
    form.choose_tab("advanced", "Options")
    for title, value in search.parameters.items():
        form.fill(title, value)
    form.choose_tab("checkpoint", "Cadence")
    form.fill("every_steps", SAVE_INTERVAL)
    ui.take_picture("1-tune-form")
    page = form.submit()
    page.wait_for_state("Running")
    run = page.flow_run
    wait_until(lambda: _count_lingering(search) == 2, what=installation.read_log_tail)
    assert flatten_parameters(installation.run(run).parameters).items() >= search.parameters.items()

    page.open_report("report-rates").get_by_text("4 trials").first.wait_for()
    ui.take_picture("2-report-while-it-runs")

    page = ui.open_run(run)
    page.confirm(page.open_dialog("Pause"), "Pause Flow Run")
    page.wait_for_state("Suspended")
    wait_until(lambda: _awaits_answer(installation, run), what=lambda: installation.run(run).state)
    saved = {name: trial.step for name, trial in search.trials().items()}
    page = ui.open_run(run)
    dialog = page.open_dialog("Resume")
    answer = Form(ui.page, dialog)
    answer.choose("How to continue", "extend")
    answer.fill("Total samples", 6)
    ui.take_picture("3-resume-form")
    search.hurry()
    page.confirm(dialog, "Resume")

    page = ui.open_run(run)
    page.wait_for_state("Completed")
    page.open_report("report-rates").get_by_text("6 trials").first.wait_for()
    ui.take_picture("4-report-at-the-end")
    trials = search.trials()
    assert [(trial.status, trial.step) for trial in trials.values()] == [(Status.COMPLETED, STEPS)] * 6
    assert sum(trial.recomputed_steps for trial in trials.values()) == 0
    assert all(trials[name].attempt == 2 for name, step in saved.items() if step >= LINGERS_AT)


def test_a_search_whose_process_was_killed_goes_on_when_its_run_is_retried(
    ui: Ui, installation: Installation, killed_search: tuple[Search, UUID]
) -> None:
    search, run = killed_search
    wait_until(lambda: _count_lingering(search) == 2, what=installation.read_log_tail)
    page = ui.open_run(run)
    page.wait_for_state("Running")
    installation.kill(run)
    page.wait_for_state("Crashed")
    ui.take_picture("5-crashed")
    # The worker's later report of the crash undoes a click made before it: a user would click again.
    wait_until(installation.has_reported_kill, what=installation.read_log_tail)
    before = installation.runs().keys()
    search.hurry()
    page.confirm(page.open_dialog("Retry"), "Retry")
    page.wait_for_state("Completed")
    ui.take_picture("6-retried")
    page.wait_for_attempt("Crashed")
    ui.take_picture("6-attempts-of-the-killed-process")

    assert installation.runs().keys() == before
    assert installation.run(run).run_count == 2
    trials = search.trials().values()
    assert [(trial.status, trial.step, trial.attempt) for trial in trials] == [(Status.COMPLETED, STEPS, 2)] * 2
    assert all(trial.recomputed_steps <= SAVE_INTERVAL for trial in trials)


def test_a_cancelled_search_goes_on_by_the_resume_form_and_tries_again_what_errored(
    ui: Ui, installation: Installation, cancelled_search: tuple[Search, UUID]
) -> None:
    search, run = cancelled_search
    wait_until(lambda: _count_lingering(search) == 1 and _count_errored(search) == 1, what=installation.read_log_tail)
    page = ui.open_run(run)
    page.confirm(page.open_dialog("Cancel"), "Cancel Flow Run")
    page.wait_for_state("Cancelled")
    page.wait_for_log("resumable")
    ui.take_picture("7-cancelled")
    page.wait_for_attempt("Failed")
    ui.take_picture("7-attempts-interrupted-and-failed")
    whole, broken = search.trials().values()
    assert (broken.status, broken.attempt) == (Status.ERRORED, 1)
    saved = newest_checkpoint(whole)
    assert saved is not None
    assert saved.step == whole.step >= LINGERS_AT - 1

    search.hurry()
    search.mend()
    form = ui.open_deployment("resume").open_custom_run()
    form.fill("experiment", search.experiment)
    form.fill("target", search.parameters["target"])
    form.fill("rerun_errored", value=True)
    ui.take_picture("8-resume-deployment-form")
    page = form.submit()
    page.wait_for_state("Completed")
    page.open_report(f"report-{search.experiment}").get_by_text("2 trials").first.wait_for()
    ui.take_picture("9-report-of-what-was-resumed")
    trials = search.trials().values()
    assert [(trial.status, trial.step, trial.attempt) for trial in trials] == [(Status.COMPLETED, STEPS, 2)] * 2
    assert sum(trial.recomputed_steps for trial in trials) <= 2  # of the one that errored


def _count_lingering(search: Search) -> int:
    return sum(trial.step >= LINGERS_AT - 1 and trial.status is Status.RUNNING for trial in search.trials().values())


def _count_errored(search: Search) -> int:
    return sum(trial.attempt == 1 and trial.status is not Status.RUNNING for trial in search.trials().values())


def _awaits_answer(installation: Installation, run: UUID) -> bool:
    """Whether the run waits for an answer, and its process has ended."""
    state = installation.run(run).state
    return state is not None and state.state_details.run_input_keyset is not None
