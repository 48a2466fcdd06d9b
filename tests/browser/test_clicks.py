"""The life of a search in Prefect's UI, by clicks: started, watched, suspended, killed, cancelled, resumed."""

from __future__ import annotations

from pathlib import Path
from uuid import UUID

import pytest

from prefect_tune.core.experiment.trial_transitions import Status, newest_checkpoint
from prefect_tune.parameters.forms import flatten_parameters
from tests.browser.prefect_ui import LINGERS_AT, SAVED_EVERY, STEPS, Form, Installation, Search, Ui, until

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

BOTH = {"rate": {"grid_search": [0.1, 0.4]}}
SAVES = {"checkpoint": {"every_steps": SAVED_EVERY}}


@pytest.fixture(scope="module")
def killed(installation: Installation, tmp_path_factory: pytest.TempPathFactory) -> tuple[Search, UUID]:
    """A running search that was started elsewhere."""
    search = Search(tmp_path_factory.mktemp("killed"), "nightly", BOTH, also=SAVES)
    return search, installation.start("tune", **search.parameters)


@pytest.fixture(scope="module")
def cancelled(installation: Installation, tmp_path_factory: pytest.TempPathFactory) -> tuple[Search, UUID]:
    """Another search, one of whose trials fails."""
    search = Search(tmp_path_factory.mktemp("cancelled"), "fragile", {**BOTH, "breaks_above": 0.3}, also=SAVES)
    return search, installation.start("tune", **search.parameters)


@pytest.mark.usefixtures("killed", "cancelled")  # they start meanwhile
def test_a_search_begun_in_the_form_is_watched_suspended_and_resumed_with_a_larger_budget(
    ui: Ui, installation: Installation, tmp_path: Path
) -> None:
    space = {"rate": {"loguniform": [0.01, 1]}, "width": {"choice": [4, 16, 64]}}
    search = Search(tmp_path, "rates", space, num_samples=4, also={"max_concurrent_trials": 2, "seed": 1})
    form = ui.deployment("tune").custom_run()
    form.tab("advanced", "Options")
    for title, value in search.parameters.items():
        form.fill(title, value)
    form.tab("checkpoint", "Cadence")
    form.fill("every_steps", SAVED_EVERY)
    ui.picture("1-tune-form")
    page = form.submit()
    page.shows("Running")
    run = page.flow_run
    until(lambda: _lingering(search) == 2, what=lambda: installation.log.read_text()[-3000:])
    assert flatten_parameters(installation.run(run).parameters).items() >= search.parameters.items()

    page.report("report-rates").get_by_text("4 trials").first.wait_for()
    ui.picture("2-report-while-it-runs")

    page = ui.run(run)
    page.confirm(page.act("Pause"), "Pause Flow Run")
    page.shows("Suspended")
    until(lambda: _asks(installation, run), what=lambda: installation.run(run).state)
    saved = {name: each.step for name, each in search.trials().items()}
    page = ui.run(run)
    dialog = page.act("Resume")
    answer = Form(ui.page, dialog)
    answer.choose("How to continue", "extend")
    answer.fill("Total samples", 6)
    ui.picture("3-resume-form")
    search.hurry()
    page.confirm(dialog, "Resume")

    page = ui.run(run)
    page.shows("Completed")
    page.report("report-rates").get_by_text("6 trials").first.wait_for()
    ui.picture("4-report-at-the-end")
    trials = search.trials()
    assert [(each.status, each.step) for each in trials.values()] == [(Status.COMPLETED, STEPS)] * 6
    assert sum(each.recomputed_steps for each in trials.values()) == 0
    assert all(trials[name].attempt == 2 for name, step in saved.items() if step >= LINGERS_AT)


def test_a_search_whose_process_was_killed_goes_on_when_its_run_is_retried(
    ui: Ui, installation: Installation, killed: tuple[Search, UUID]
) -> None:
    search, run = killed
    until(lambda: _lingering(search) == 2, what=lambda: installation.log.read_text()[-3000:])
    page = ui.run(run)
    page.shows("Running")
    installation.kill(run)
    page.shows("Crashed")
    ui.picture("5-crashed")
    # The worker's later report of the crash undoes a click made before it: a user would click again.
    until(installation.knows_of_a_kill, what=lambda: installation.log.read_text()[-3000:])
    before = installation.runs().keys()
    search.hurry()
    page.confirm(page.act("Retry"), "Retry")
    page.shows("Completed")
    ui.picture("6-retried")
    page.attempts("Crashed")
    ui.picture("6-attempts-of-the-killed-process")

    assert installation.runs().keys() == before
    assert installation.run(run).run_count == 2
    trials = search.trials().values()
    assert [(each.status, each.step, each.attempt) for each in trials] == [(Status.COMPLETED, STEPS, 2)] * 2
    assert all(each.recomputed_steps <= SAVED_EVERY for each in trials)


def test_a_cancelled_search_goes_on_by_the_resume_form_and_tries_again_what_errored(
    ui: Ui, installation: Installation, cancelled: tuple[Search, UUID]
) -> None:
    search, run = cancelled
    until(lambda: _lingering(search) == 1 and _broken(search) == 1, what=lambda: installation.log.read_text()[-3000:])
    page = ui.run(run)
    page.confirm(page.act("Cancel"), "Cancel Flow Run")
    page.shows("Cancelled")
    page.logs("resumable")
    ui.picture("7-cancelled")
    page.attempts("Failed")
    ui.picture("7-attempts-interrupted-and-failed")
    whole, broken = search.trials().values()
    assert (broken.status, broken.attempt) == (Status.ERRORED, 1)
    saved = newest_checkpoint(whole)
    assert saved is not None
    assert saved.step == whole.step >= LINGERS_AT - 1

    search.hurry()
    search.mend()
    form = ui.deployment("resume").custom_run()
    form.fill("experiment", search.experiment)
    form.fill("target", search.parameters["target"])
    form.fill("rerun_errored", value=True)
    ui.picture("8-resume-deployment-form")
    page = form.submit()
    page.shows("Completed")
    page.report(f"report-{search.experiment}").get_by_text("2 trials").first.wait_for()
    ui.picture("9-report-of-what-was-resumed")
    trials = search.trials().values()
    assert [(each.status, each.step, each.attempt) for each in trials] == [(Status.COMPLETED, STEPS, 2)] * 2
    assert sum(each.recomputed_steps for each in trials) <= 2  # of the one that errored


def _lingering(search: Search) -> int:
    return sum(each.step >= LINGERS_AT - 1 and each.status is Status.RUNNING for each in search.trials().values())


def _broken(search: Search) -> int:
    return sum(each.attempt == 1 and each.status is not Status.RUNNING for each in search.trials().values())


def _asks(installation: Installation, run: UUID) -> bool:
    """Whether the run waits for an answer, and its process has ended."""
    state = installation.run(run).state
    return state is not None and state.state_details.run_input_keyset is not None
