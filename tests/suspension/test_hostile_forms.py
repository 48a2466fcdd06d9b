"""Forms and terminal questions with texts from a journal that other users may have written."""

from __future__ import annotations

import pytest

from prefect_tune.core.experiment.experiment import Experiment
from prefect_tune.core.journal_events.experiment_events import Questioned
from prefect_tune.core.storage.layout import JournalKey
from prefect_tune.suspension.resume_forms import form_of_question, page_of
from prefect_tune.suspension.terminal_prompt import asked_in_terminal

_MARKUP = "![x](http://theirs) <img src=x>"
_ASKED = Questioned(
    trial="00000", key="k", question=f"Continue?\n{_MARKUP}\x1b]0;title\x07", fields={"go": True, "rate": 0.5}
)


def test_a_question_is_text_in_the_form_and_no_markup() -> None:
    form = form_of_question(_ASKED, "e", why=_MARKUP)
    said = str(getattr(form, "_description", None))
    assert "Continue?\n\\!\\[x\\]" in said
    assert "![" not in said
    assert said.count("\\<img") == 2


def test_what_a_journal_says_of_the_code_is_text_on_the_page() -> None:
    page = page_of(Experiment(key=JournalKey(experiment="e")), "s3://b", None, _MARKUP)
    assert "![" not in page
    assert "\\!\\[x\\]" in page


def test_a_question_gives_the_terminal_no_commands(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts: list[str] = []

    def typed(prompt: str) -> str:
        prompts.append(prompt)
        return ""

    monkeypatch.setattr("builtins.input", typed)
    asked_in_terminal(_ASKED.model_copy(update={"fields": {"go\x1b[2J": True}}))
    assert "\\x1b]0;title\\x07" in (said := capsys.readouterr().out)
    assert "\x1b" not in said + "".join(prompts)
