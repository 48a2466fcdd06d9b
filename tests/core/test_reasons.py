"""Reasons: each code has a sentence that takes its arguments, and errors are compared by codes and arguments."""

from __future__ import annotations

import ast
import string
from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import ValidationError

from prefect_tune.core import reasons
from prefect_tune.core.reasons import (
    AnyReason,
    ProcessEnd,
    Reason,
    find_code_location,
    find_root_error,
    format_error,
    make_reason,
    process_end_reason,
    summarize_error,
)

ROOT = Path(__file__).parents[2]
ERROR = make_reason("raised", type="ValueError", text="no", location="train.py:9", traceback="Traceback ...")


def iter_make_reason_calls() -> Iterator[tuple[str, ast.Call]]:
    for folder in ("src", "flows", "tasks", "blocks"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Call) and ast.unparse(node.func) == "make_reason":
                    yield f"{path.relative_to(ROOT)}:{node.lineno}", node


def test_each_reason_of_the_package_has_a_sentence_that_takes_its_arguments() -> None:
    used = set()
    for location, call in iter_make_reason_calls():
        for name in [str(part.value) for part in ast.walk(call.args[0]) if isinstance(part, ast.Constant)]:
            assert name in reasons._SENTENCES, f"{location}: {name}"
            used.add(name)
            passed = {keyword.arg for keyword in call.keywords if keyword.arg}
            taken = {field for _, field, _, _ in string.Formatter().parse(reasons._SENTENCES[name]) if field}
            assert passed - {"location"} <= taken, f"{location}: {name} does not show {passed - taken}"
    assert used >= reasons._SENTENCES.keys(), "a sentence that no code makes"


@pytest.mark.parametrize("code", reasons._SENTENCES)
def test_a_reason_of_an_altered_journal_is_shown_with_its_code_if_its_arguments_make_no_sentence(code: str) -> None:
    names = [name for _, name, _, _ in string.Formatter().parse(reasons._SENTENCES[code]) if name]
    altered = Reason(code=code, arguments={name: {"code": {}} for name in names} | {"extra": 3})
    assert str(altered)
    assert str(Reason(code=code))


@pytest.mark.parametrize(
    ("reason", "sentence"),
    [
        (
            make_reason("rank-promoted", metric="loss", value=0.5, step=3, rank=1, ranked=4, quota=0),
            "none is promoted yet",
        ),
        (
            make_reason("rank-continued", metric="loss", value=0.5, step=3, rank=1, ranked=4, quota=1),
            "the best continues",
        ),
        (
            make_reason("rank-promoted", metric="loss", value=0.5, step=3, rank=1, ranked=4, quota=2),
            "best 2 are promoted",
        ),
        (
            make_reason("max-failures", failures=3, limit=2, error=ERROR),
            "(max_failures=2): ValueError: no\nTraceback ...",
        ),
        (make_reason("retried", error="a text"), "retried after: a text"),
        (make_reason("died-at-each-start", attempts=3, error=ERROR), "no checkpoint is the cause: ValueError"),
        (process_end_reason(ProcessEnd(exit_code=3), rank=1), "rank 1: the trial's process exited with code 3"),
        (process_end_reason(ProcessEnd(signal="SIGKILL")), "the trial's process ended by SIGKILL"),
        (
            process_end_reason(ProcessEnd(reason=make_reason("thread-ended"))),
            "the trial's process runs in a thread, which has ended",
        ),
        (Reason(code="of-a-newer-release", arguments={"step": 3}), "of-a-newer-release {'step': 3}"),
    ],
)
def test_a_reason_is_a_sentence_for_people(reason: Reason, sentence: str) -> None:
    assert sentence in str(Reason.model_validate_json(reason.model_dump_json()))


def test_the_same_error_is_known_whatever_its_rank_traceback_and_retries() -> None:
    repeated = make_reason("raised", type="ValueError", text="no", location="train.py:10", traceback="other", rank=2)
    wrapped = make_reason("max-failures", failures=1, limit=0, error=ERROR)
    assert summarize_error(wrapped) == summarize_error(repeated)
    assert summarize_error(ERROR) != summarize_error(make_reason("raised", type="KeyError", text="no"))
    assert summarize_error(ERROR) != summarize_error(make_reason("silent", seconds=3.0))


@pytest.mark.parametrize(
    ("reason", "line"),
    [
        (make_reason("not-retried", cause="import", error=ERROR), "ValueError: no (train.py:9)"),
        (
            make_reason("max-failures", failures=3, limit=2, error=make_reason("silent", seconds=30.0)),
            "no report for 30 s",
        ),
        ("a text\nof two lines", "a text"),
    ],
)
def test_an_error_is_named_in_one_line_without_the_budget_that_it_spent(reason: AnyReason, line: str) -> None:
    assert format_error(reason).startswith(line)
    assert "\n" not in format_error(reason)


def test_the_error_of_an_attempt_that_ended_for_another_reason_is_that_reason() -> None:
    lost = make_reason("attempts-lost", count=3, error="OSError: gone")
    assert find_root_error(lost) == lost
    assert find_root_error("a text") == "a text"


TRACE = "Traceback (most recent call last):\n"
LOADER = '  File "/v/lib/python3.11/site-packages/torch/utils/data/dataloader.py", line 380, in __init__\n'
WORKER = f'{LOADER}  File "/home/me/data.py", line 33, in __getitem__\n    raise ValueError("no")\n'
DECODER = """  File "/usr/lib/python3/dist-packages/loads.py", line 2, in load
  File "/usr/lib64/python3.11/json/decoder.py", line 355, in raw_decode
"""
FRAME = 'File "/home/me/train.py", line 9, in train'
OURS = 'File "/lib/python3.12/site-packages/prefect_tune/core/metrics.py", line 70, in _finite'


@pytest.mark.parametrize(
    ("trace", "is_newest_first", "location"),
    [
        (f"{TRACE}  {FRAME}\n    config['lr']", False, "train.py:9"),
        (f"{TRACE}  {FRAME}\n    report()\n  {OURS}\n", False, "train.py:9"),
        (f"{TRACE}  {OURS}\n", False, None),
        (
            (
                "Current thread 0x1 (most recent call first):\n"
                f'  {FRAME} in train\n  File "/x/main.py", line 2 in <module>\n  File "<frozen runpy>", line 8 in run'
            ),
            True,
            "train.py:9",
        ),
        (f"{TRACE}  {FRAME}\n    for batch in loader\n{LOADER}", False, "train.py:9"),
        (f"{TRACE}  {FRAME}\n{LOADER}Original {TRACE}{WORKER}", False, "data.py:33"),
        (f"{TRACE}  {FRAME}\n{DECODER}", False, "train.py:9"),
        (f"{TRACE}{LOADER}", False, "dataloader.py:380"),
        ("its process was killed", False, None),
        ("\n" * 300_000, True, None),  # in linear time
    ],
    ids=[
        "with its line",
        "raised in this package",
        "raised in this package only",
        "of a signal",
        "raised in a library",
        "in a worker of a DataLoader",
        "raised in Python's library",
        "of a trainable that is installed",
        "without a traceback",
        "blank lines",
    ],
)
def test_an_error_is_located_in_the_code_of_the_user(
    trace: str, location: str | None, *, is_newest_first: bool
) -> None:
    assert find_code_location(trace, is_newest_first=is_newest_first) == location


def nest(depth: int) -> dict[str, object]:
    reason: dict[str, object] = {"code": "silent", "arguments": {"seconds": 3}}
    for _ in range(depth):
        reason = {"code": "retried", "arguments": {"error": reason}}
    return reason


@pytest.mark.parametrize(
    "arguments",
    [{"seconds": 10**400}, {"seconds": float("nan")}, {"ranks": [10**30]}, {"error": nest(98)}, {"error": [[1]]}],
    ids=["huge", "not a number", "huge in a list", "deep", "lists of lists"],
)
def test_a_process_or_a_journal_cannot_hold_arguments_that_no_reason_has(arguments: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        Reason(code="silent", arguments=arguments)
    assert str(Reason.model_validate(nest(6))).startswith("retried after: retried after: ")


def test_a_nested_reason_that_is_none_is_shown_as_it_is() -> None:
    altered = Reason(code="max-failures", arguments={"error": {"arguments": {}}})
    assert format_error(altered)
    assert summarize_error(altered) != summarize_error(ERROR)


def test_no_part_of_an_error_in_one_line_gives_the_terminal_commands() -> None:
    hostile = make_reason("raised", text="\x1b[2J", location="\x1b]0;title\x07")
    assert format_error(hostile) == r"\x1b[2J (\x1b]0;title\x07)"


def test_steps_are_counted_exactly() -> None:
    assert str(make_reason("step-limit", step=1234568, limit=1234567.0)) == "step 1234568 of 1234567"


def test_a_number_that_json_lacks_is_a_text() -> None:
    assert str(make_reason("median", metric="loss", best=1.0, median=float("inf"), step=3, count=2))


def test_what_a_dead_process_printed_last_is_shown_with_its_error_and_does_not_tell_errors_apart() -> None:
    died = process_end_reason(ProcessEnd(exit_code=3, output="dying words"))
    assert str(died) == "the trial's process exited with code 3\nlast output:\ndying words"
    assert summarize_error(died) == summarize_error(process_end_reason(ProcessEnd(exit_code=3, output="others")))
    assert str(summarize_error(make_reason("max-failures", failures=1, limit=0, error=died))).endswith("code 3")
