"""What the pages of the deployments and automations show at a glance."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from playwright.sync_api import Locator
from prefect.blocks.notifications import CustomWebhookNotificationBlock
from prefect.settings import PREFECT_API_URL, temporary_settings

from prefect_tune.deploy.apply_automations import install_automations, uninstall_automations
from tests.browser.installation import Installation
from tests.browser.prefect_ui import Ui

pytestmark = pytest.mark.timeout(900)


def test_explore(ui: Ui) -> None:
    ui.deployment("tune")
    ui.page.get_by_text("an example to copy").first.wait_for()
    ui.picture("10-tune-deployment")
    form = ui.deployment("tune").custom_run()
    form.field("advanced").wait_for()
    ui.picture("11-tune-form-empty")
    print("HEIGHT", ui.page.evaluate("document.documentElement.scrollHeight"), ui.page.locator("label").all_inner_texts())
    form.fill("trainable", "my_project.train:Net")
    for number in (1, 2):
        form.place.get_by_role("button", name="Submit").click()
        for wait in (300, 1500):
            ui.page.wait_for_timeout(wait)
            ui.page.screenshot(path=ui.pictures / f"x-submit-{number}-{wait}.png")
            print("TOASTS", number, wait, ui.page.locator("[data-sonner-toast]").all_inner_texts(), ui.page.evaluate("scrollY"))
    ui.picture("12-submitted")
    form.tab("advanced", "Options")
    ui.page.wait_for_timeout(500)
    ui.picture("13-advanced")
    print("HEIGHT", ui.page.evaluate("document.documentElement.scrollHeight"))


def test_explore_automations(ui: Ui, installation: Installation) -> None:
    two = ["prefect-tune: new best", "prefect-tune: run failed"]
    with temporary_settings({PREFECT_API_URL: installation.api_url}):
        install_automations(names=two)
        ui.page.goto(f"{ui.url}/v2/automations")
        ui.page.get_by_text("prefect-tune: new best").first.wait_for()
        ui.page.wait_for_timeout(1000)
        ui.picture("14-alerts-off")
        print(ui.page.locator("main").inner_text())
        CustomWebhookNotificationBlock(name="hook", url="http://127.0.0.1:9/").save("alerts", overwrite=True)
        install_automations(names=two, notify="custom-webhook/alerts")
        ui.page.reload()
        ui.page.get_by_text("prefect-tune: new best").first.wait_for()
        ui.page.wait_for_timeout(1000)
        ui.picture("15-alerts-on")
        print(ui.page.locator("main").inner_text())
        uninstall_automations(names=two)
