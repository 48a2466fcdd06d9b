"""The pages of deployments and automations: a short form, errors for missing values, switchable alerts."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from playwright.sync_api import expect
from prefect.blocks.notifications import CustomWebhookNotificationBlock
from prefect.settings import PREFECT_API_URL, temporary_settings

from prefect_tune.deploy.automations import install_automations, uninstall_automations
from tests.browser.prefect_ui import Installation, Ui

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

FIRST = [
    *("trainable", "target", "space (Optional)", "experiment (Optional)", "metric (Optional)", "mode (Optional)"),
    *("num_samples (Optional)", "stop (Optional)", "scheduler (Optional)", "max_concurrent_trials (Optional)"),
    "advanced (Optional)",
]
HIGHEST = 2_000
"""Pixels, of a form that had 4,400 with all parameters in one list."""
PATIENCE_MS = 120_000
ALERTS = ["prefect-tune: alert on a new best trial", "prefect-tune: alert on a failed run"]


def test_the_description_of_a_deployment_has_an_example_to_copy(ui: Ui) -> None:
    ui.deployment("tune")
    ui.page.get_by_role("tab", name="Description").click()
    ui.page.get_by_text("an example to copy").wait_for()
    ui.picture("0-tune-description")


def test_a_form_shows_ten_fields_and_a_group_and_submit_says_what_is_missing(ui: Ui) -> None:
    form = ui.deployment("tune").custom_run()
    expect(form.place.locator(".cm-content")).to_have_count(3, timeout=PATIENCE_MS)  # its editors load last
    labels = form.place.locator("label").all_inner_texts()
    assert labels == ["Run Name", *FIRST, "Enforce Parameter Schema", "Start"]
    assert ui.page.evaluate("document.documentElement.scrollHeight") < HIGHEST
    ui.picture("0-tune-form-empty")

    form.fill("trainable", "my_project.train:Net")
    form.place.get_by_role("button", name="Submit").click()
    missing = "'target' is a required property"
    message = ui.page.locator("[data-sonner-toast]").get_by_text(missing)
    expect(message).to_be_in_viewport(timeout=PATIENCE_MS)
    message.hover()  # it stays meanwhile
    ui.picture_of_the_window("0-tune-form-submitted-without-a-target")
    expect(form.field("target").get_by_text(missing, exact=True)).to_be_visible()

    form.tab("advanced", "Options")
    form.field("silence_timeout_seconds").wait_for()
    ui.picture("0-tune-form-advanced")


@pytest.fixture
def api(installation: Installation) -> Iterator[None]:
    """The installation's server is the one of this process; without automations before and after the test."""
    with temporary_settings({PREFECT_API_URL: installation.api_url}):
        uninstall_automations()
        yield
        uninstall_automations()


@pytest.mark.usefixtures("api")
def test_an_alert_is_switched_off_until_it_has_an_action(ui: Ui) -> None:
    install_automations(names=ALERTS)
    assert alerts(ui, "Do nothing from the triggering event") == [False, False]
    ui.picture("10-alerts-without-a-block")
    block = CustomWebhookNotificationBlock(name="hook", url="http://127.0.0.1:9/")
    block.save("alerts", overwrite=True, _sync=True)  # type: ignore[call-arg]  # added by Prefect's async_dispatch
    install_automations(names=ALERTS, notify="custom-webhook/alerts")
    assert alerts(ui, "Send a custom webhook using") == [True, True]
    ui.picture("10-alerts-with-a-block")


def alerts(ui: Ui, action: str) -> list[bool]:
    """Go to the automations; return which alerts are switched on, once each shows the action."""
    ui.page.goto(f"{ui.url}/v2/automations")
    main = ui.page.locator("main")
    expect(main.get_by_text(action)).to_have_count(len(ALERTS), timeout=PATIENCE_MS)
    for name in ALERTS:
        main.get_by_text(name, exact=True).wait_for()
    return [each.is_checked() for each in main.get_by_role("switch").all()]
