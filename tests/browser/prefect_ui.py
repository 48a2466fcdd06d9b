"""Prefect's UI as a user operates it: pages, buttons, fields. Every step waits for its element."""

from __future__ import annotations

import json
import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from uuid import UUID

from playwright.sync_api import Error, Locator, Page

_CONTROL = "textarea, input, [role=switch], .cm-content"
_CLICKS = 30
_BETWEEN_CLICKS_MS = 1_000
_RESPONSE_MS = 20_000
_LOOKS = 12
_LISTED_MS = 5_000
_REDRAWN_MS = 500
"""Time for a canvas to be redrawn: the page gives no signal."""


@dataclass(frozen=True)
class Ui:
    """The UI in a browser's tab."""

    page: Page
    url: str
    pictures: Path
    """The folder for pictures of it."""

    def deployment(self, name: str) -> DeploymentPage:
        """Go to the deployments, and to the one of this name."""
        self.page.goto(f"{self.url}/v2/deployments")
        self.page.locator('a[href*="/deployments/deployment/"]').get_by_text(name, exact=True).click()
        return DeploymentPage(self.page)

    def run(self, flow_run: UUID) -> RunPage:
        """Go to a flow run's page, as by a link in a message."""
        self.page.goto(f"{self.url}/v2/runs/flow-run/{flow_run}")
        return RunPage(self.page)

    def picture(self, name: str) -> None:
        """Take a picture of the whole page in both themes; of a dialog, with what is around it."""
        self.page.evaluate("scrollTo(0, 0)")
        self._take(name, whole=not self.page.get_by_role("dialog").count())

    def picture_of_the_window(self, name: str) -> None:
        """Take a picture in both themes of the part of the page that is in the window."""
        self._take(name, whole=False)

    def _take(self, name: str, *, whole: bool) -> None:
        self.pictures.mkdir(parents=True, exist_ok=True)
        for theme in ("dark", "light"):
            self.page.emulate_media(color_scheme=theme, reduced_motion="reduce")
            self._redraw_graph(can_type=whole)
            self.page.screenshot(path=self.pictures / f"{name}-{theme}.png", full_page=whole, animations="disabled")

    def _redraw_graph(self, *, can_type: bool) -> None:
        """The graph of a run loses its place with the theme; "c" centers it."""
        if can_type and self.page.locator("main canvas").count():
            self.page.wait_for_timeout(_REDRAWN_MS)
            self.page.keyboard.press("c")
        self.page.wait_for_timeout(_REDRAWN_MS)


@dataclass(frozen=True)
class DeploymentPage:
    page: Page

    def custom_run(self) -> RunForm:
        self.page.get_by_role("button", name="Run", exact=True).click()
        self.page.get_by_role("menuitem", name="Custom run").click()
        return RunForm(self.page, self.page.locator("form"))


@dataclass(frozen=True)
class Form:
    """The fields of a schema, in a page or in a dialog."""

    page: Page
    place: Locator

    def field(self, title: str) -> Locator:
        """Return the field of this title: its label, description and control."""
        said = re.compile(rf"^{title.replace('_', '[ _]')}( \(Optional\))?$", re.IGNORECASE)
        return self.place.locator("div.group").filter(has=self.page.locator("label").filter(has_text=said)).last

    def fill(self, title: str, value: object) -> None:
        """Type this value into the field, or switch it on or off."""
        control = self.field(title).locator(_CONTROL).first
        control.wait_for()
        if isinstance(value, bool):
            control.set_checked(value)
        elif "cm-content" in (control.get_attribute("class") or ""):  # an editor for JSON
            control.fill(json.dumps(value))
        else:
            control.fill(str(value))

    def choose(self, title: str, option: str) -> None:
        """Choose from the field's list."""
        self.field(title).get_by_role("button", name=re.compile("^Select ")).click()
        self.page.get_by_role("option", name=option, exact=True).click()

    def tab(self, title: str, kind: str) -> None:
        """Choose the kind of value for the field."""
        self.field(title).get_by_role("tab", name=kind, exact=True).click()


@dataclass(frozen=True)
class RunForm(Form):
    """The form of a deployment's parameters."""

    def submit(self) -> RunPage:
        """Start the run, and follow the link to it; once more where the server was too busy, as a person would."""
        for _ in range(_CLICKS):
            with self.page.expect_response("**/create_flow_run") as answer:
                self.place.get_by_role("button", name="Submit").click()
            if answer.value.ok:
                break
            self.page.wait_for_timeout(_BETWEEN_CLICKS_MS)
        self.page.get_by_role("link", name="View run").click()
        return RunPage(self.page)


@dataclass(frozen=True)
class RunPage:
    page: Page

    @property
    def flow_run(self) -> UUID:
        """Return the flow run of this page, from its address."""
        self.page.wait_for_url("**/flow-run/*")
        return UUID(self.page.url.partition("/flow-run/")[2][:36])

    def shows(self, state: str) -> None:
        """Wait until the page shows the state of this name."""
        self.page.locator("main").locator('[data-slot="badge"]').get_by_text(state, exact=True).first.wait_for()

    def logs(self, text: str) -> None:
        """Wait until one of the last lines in its log holds this text."""
        self.page.get_by_role("tab", name="Logs").click()
        self.page.get_by_role("combobox").filter(has_text="Oldest to newest").click()
        self.page.get_by_role("option", name="Newest to oldest").click()
        self.page.locator("main").get_by_text(text).first.wait_for()

    def attempts(self, state: str) -> None:
        """List the task runs of attempts; wait until one of them is in the state of this name."""
        self.page.get_by_role("tab", name="Task Runs").click()
        search = self.page.get_by_placeholder("Search by run name")
        search.fill("train ")
        self.page.locator("main").get_by_text(re.compile("^train .* · attempt 1$")).first.wait_for()
        self.shows(state)
        search.blur()  # what is typed for a picture goes to the page

    def report(self, key: str) -> Locator:
        """Open the artifact of this key, once there is one; return its text."""
        self.page.get_by_role("tab", name="Artifacts").click()
        listed = self.page.get_by_text(key, exact=True).first
        for _ in range(_LOOKS):
            with suppress(Error):
                listed.wait_for(timeout=_LISTED_MS)
                break
            self.page.reload()  # it does not look again by itself
        listed.click()
        self.page.wait_for_url("**/artifacts/artifact/*")
        return self.page.locator("main")

    def confirm(self, dialog: Locator, name: str) -> None:
        """Press this button; again if the server was too busy: the dialog stays until the server accepts."""
        button = dialog.get_by_role("button", name=name, exact=True)
        button.click()
        for _ in range(_CLICKS):
            with suppress(Error):
                return dialog.wait_for(state="hidden", timeout=_RESPONSE_MS)
            if button.is_enabled():
                button.click()
        raise AssertionError(f"the server did not accept {name!r}: {dialog.inner_text()}")

    def act(self, name: str) -> Locator:
        """Choose from the run's menu; return the dialog that opens."""
        self.page.get_by_role("button", name="Open menu").first.click()
        self.page.get_by_role("menuitem", name=name, exact=True).click()
        dialog = self.page.get_by_role("dialog").or_(self.page.get_by_role("alertdialog"))
        dialog.wait_for()
        return dialog
