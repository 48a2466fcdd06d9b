"""Prefect's UI as a person uses it: which page, which button, which field. Every step waits for what it needs."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from uuid import UUID

from playwright.sync_api import Locator, Page, expect

__all__ = ["DeploymentPage", "Form", "RunForm", "RunPage", "Ui"]


@dataclass(frozen=True)
class Ui:
    """The UI in a browser's tab."""

    page: Page
    url: str

    def deployment(self, name: str) -> DeploymentPage:
        """Go to the deployments, and to the one of this name."""
        self.page.goto(f"{self.url}/v2/deployments")
        self.page.locator('a[href*="/deployments/deployment/"]').get_by_text(name, exact=True).click()
        return DeploymentPage(self.page)

    def run(self, flow_run: UUID) -> RunPage:
        """Go to a flow run's page, as by a link in a message."""
        self.page.goto(f"{self.url}/v2/runs/flow-run/{flow_run}")
        return RunPage(self.page)


@dataclass(frozen=True)
class DeploymentPage:
    page: Page

    def custom_run(self) -> RunForm:
        self.page.get_by_role("button", name="Run", exact=True).click()
        self.page.get_by_role("menuitem", name="Custom run").click()
        return RunForm(self.page, self.page.locator("form"))


@dataclass(frozen=True)
class Form:
    """Fields for the parameters of a schema, in a page or in a dialog."""

    page: Page
    place: Locator

    def field(self, title: str) -> Locator:
        """Return the field of this title: its label, description and control."""
        said = re.compile(rf"^{title.replace('_', '[ _]')}( \(Optional\))?$", re.IGNORECASE)
        return self.place.locator("div.group").filter(has=self.page.locator("label").filter(has_text=said)).last

    def fill(self, title: str, value: object, *, variant: str | None = None) -> None:
        """Give the field this value; `variant` is the tab to choose where it may be of several types."""
        field = self.field(title)
        if variant:
            field.get_by_role("tab", name=variant, exact=True).click()
        control = field.locator("textarea, input, [role=switch], .cm-content").first
        control.wait_for()
        if isinstance(value, bool):
            control.set_checked(value)
        elif "cm-content" in (control.get_attribute("class") or ""):  # an editor for JSON
            control.fill(json.dumps(value))
        else:
            control.fill(str(value))


@dataclass(frozen=True)
class RunForm(Form):
    """The form of a deployment's parameters."""

    def submit(self) -> RunPage:
        """Start the run, and follow the link to it."""
        self.place.get_by_role("button", name="Submit").click()
        self.page.get_by_role("link", name="View run").click()
        return RunPage(self.page)


@dataclass(frozen=True)
class RunPage:
    page: Page

    def shows(self, state: str) -> None:
        """Wait until it shows the state of this name."""
        expect(self.page.locator("main").get_by_text(state, exact=True).first).to_be_visible()

    def act(self, name: str) -> Locator:
        """Choose from the run's menu; return the dialog that opens."""
        self.page.get_by_role("button", name="Open menu").click()
        self.page.get_by_role("menuitem", name=name, exact=True).click()
        return self.page.get_by_role("dialog").or_(self.page.get_by_role("alertdialog"))
