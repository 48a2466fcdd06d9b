"""Reasons for ends and decisions, as codes with arguments. This module makes the sentences; no code parses sentences.

A user's own scheduler, stopper or stop request passes a text instead. The text is shown unchanged, and never compared.
"""

from __future__ import annotations

import math
import re
import string
from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Annotated, Any, Final, TypeAlias

from pydantic import AfterValidator, Field, ValidationError

from prefect_tune.core.display_text import first_line, format_elapsed, format_size, make_storable, pluralize
from prefect_tune.core.values import Message, Value


class Cause(StrEnum):
    """Why an attempt ended although its trial did not finish. Each cause counts toward at most one retry budget."""

    MACHINE = "machine"
    """The machine, the worker or the target failed, not the trial."""
    PREEMPTED = "preempted"
    """The attempt received a stop request, and stopped gracefully, which is not a failure."""
    TRAINABLE = "trainable"
    """The user's code raised an exception."""
    IMPORT = "import"
    """The trainable could not be loaded; a retry does not help."""
    OUT_OF_MEMORY = "out-of-memory"
    """The kernel killed the process for using too much memory; a retry does not help."""
    BAD_METRIC = "bad-metric"
    """The trainable reported a metric that cannot be stored, such as a NaN; a retry does not help."""
    BAD_STOP = "bad-stop"
    """The stop criterion needs a metric that the trainable did not report; a retry does not help."""


class FinishKind(StrEnum):
    """How a trial finished. Only a trial that met its stop criterion continues when the criterion changes."""

    RETURNED = "returned"
    """The trainable returned by itself."""
    CRITERION = "criterion"
    """A stop criterion was met."""
    ALL_STEPS = "all-steps"
    """The trial has trained all steps of the scheduler."""
    PRUNED = "pruned"
    """The scheduler ended the trial early."""
    STOPPED = "stopped"
    """The user ended the trial, by a stop request or by an answer in the form of Resume."""


_MAX_DEPTH = 16
_MAX_NUMBER = 2**63


def _require_plain_arguments(arguments: Mapping[str, Any], depth: int = 0) -> Mapping[str, Any]:
    """Return `arguments`, which a trial may have sent; raise if they are not JSON, too deep, or have huge numbers."""
    for argument in arguments.values():
        for value in argument if isinstance(argument, list | tuple) else (argument,):
            if isinstance(value, Mapping) and depth < _MAX_DEPTH:
                _require_plain_arguments(value, depth + 1)
            elif not (value is None or isinstance(value, str) or _is_storable_number(value)):
                raise ValueError("expected texts, numbers up to 2**63, lists of these, or a reason")
    return arguments


def _is_storable_number(value: object) -> bool:
    return abs(value) < _MAX_NUMBER if isinstance(value, int) else isinstance(value, float) and math.isfinite(value)


class Reason(Value):
    """Why a trial, an attempt or a search ended, or why a decision was made. `str()` returns the sentence."""

    code: str
    """A key of `_SENTENCES`. A code of a newer release is shown unchanged, with its arguments."""
    arguments: Annotated[Mapping[str, Any], AfterValidator(_require_plain_arguments)] = Field(default_factory=dict)
    """JSON values; an argument that is itself a reason is stored as the JSON of that reason."""

    def __str__(self) -> str:
        try:
            return _format_sentence(_SENTENCES[self.code], self.arguments) or self.code
        except (ArithmeticError, LookupError, ValueError, TypeError, AttributeError):  # from an altered journal
            return f"{self.code} {dict(self.arguments)}"


AnyReason: TypeAlias = Reason | Message
"""A reason of this package, or a user's text."""


class ProcessEnd(Value):
    """How a process of a trial ended: its exit code, or the signal that killed it; both None if unknown."""

    exit_code: int | None = None
    signal: str | None = None
    """The signal's name, such as `SIGKILL`."""
    reason: Reason | None = None
    """Why both are unknown, for example because the node is lost, or because the training runs in a thread."""
    output: Message = ""
    """The last lines that the process printed."""

    def __str__(self) -> str:
        """Return how the process ended, as the predicate of a sentence: `exited with code 1`."""
        return _format_sentence(_PROCESS_ENDED, _make_process_end_arguments(self))


def rank_end_reason(end: ProcessEnd) -> Reason:
    """Return a reason that says how a rank ended, for display in a list of ranks."""
    return make_reason("rank-died", **_make_process_end_arguments(end))


def process_end_reason(end: ProcessEnd, rank: int | None = None, memory: Reason | None = None) -> Reason:
    """Return the reason for the end of an attempt whose process ended.

    Args:
        rank: the rank of the process; None if it is the only process.
        memory: how the process exceeded the memory limit, if it was killed for that.
    """
    location = find_code_location(end.output, is_newest_first=True)  # faulthandler prints the newest frame first
    context = {"location": location, "rank": rank, "output": end.output or None}
    return make_reason("process-ended", **_make_process_end_arguments(end), **context, memory=memory)


def _make_process_end_arguments(end: ProcessEnd) -> Mapping[str, object]:
    return {"exit_code": end.exit_code, "signal": end.signal, "detail": end.reason}


def make_reason(code: str, /, **arguments: object) -> Reason:
    """Return a reason of this package, without the arguments that are None."""
    return Reason(code=code, arguments={n: _argument_to_json(v) for n, v in arguments.items() if v is not None})


def _argument_to_json(argument: object) -> object:
    match argument:
        case Reason():
            return {"code": argument.code, "arguments": argument.arguments}
        case str():
            return make_storable(argument)
        case list() | tuple():
            return [_argument_to_json(part) for part in argument]
        case float() if not math.isfinite(argument):
            return str(argument)
        case _:
            return argument


def get_reason_code(reason: AnyReason) -> str | None:
    """Return the code of a reason; None for a text."""
    return reason.code if isinstance(reason, Reason) else None


_CODES_WITH_ERROR = frozenset(
    {"not-retried", "max-machine-failures", "max-failures", "died-at-start", "died-at-each-start", "retried"}
)
"""The codes whose argument `error` is the error that ended the attempt."""


def find_root_error(reason: AnyReason) -> AnyReason:
    """Return the error that ended an attempt, without the reasons about retries that enclose the error."""
    while isinstance(reason, Reason) and "error" in reason.arguments and reason.code in _CODES_WITH_ERROR:
        reason = _parse_reason(reason.arguments["error"])
    return reason


def summarize_error(reason: AnyReason) -> AnyReason:
    """Return the error that ended an attempt, for comparisons: without traceback, rank, location and output."""
    error = find_root_error(reason)
    if not isinstance(error, Reason):
        return first_line(error)
    context = ("traceback", "rank", "location", "output")
    return make_reason(error.code, **{name: value for name, value in error.arguments.items() if name not in context})


def format_error(reason: AnyReason) -> str:
    """Format an error in one line, with its code location if known: `KeyError: 'lr' (train.py:9)`."""
    error = find_root_error(reason)
    location = error.arguments.get("location") if isinstance(error, Reason) else None
    return first_line(f"{first_line(error)} ({location})" if location else error)


def _parse_reason(argument: object) -> AnyReason:
    if isinstance(argument, Reason):
        return argument
    try:
        return Reason.model_validate(argument) if isinstance(argument, Mapping) else str(argument)
    except ValidationError:  # from an altered journal
        return str(argument)


_FRAME_PATTERN = re.compile(r'^[ \t]*File "(.+)", line (\d+)', re.MULTILINE)
_SEPARATORS: Final = r"[/\\]"
_NON_USER_PATH = re.compile(rf"{_SEPARATORS}prefect_tune{_SEPARATORS}|(^|{_SEPARATORS})<[^/\\]*$")
_LIBRARY_PATH = re.compile(r"[/\\](site-packages|dist-packages|lib(64)?[/\\]python3(\.\d+)?)[/\\]", re.IGNORECASE)


def find_code_location(trace: str, *, is_newest_first: bool) -> str | None:
    """Return the innermost line of the user's code in a traceback or a faulthandler dump, such as `train.py:9`.

    Without user code, return the innermost line outside of this package. For a dump, pass `is_newest_first=True`.
    """
    frames = [frame for frame in _FRAME_PATTERN.findall(trace) if not _NON_USER_PATH.search(frame[0])]
    users = [frame for frame in frames if not _LIBRARY_PATH.search(frame[0])] or frames
    if not users:
        return None
    path, line = users[0 if is_newest_first else -1]
    return f"{re.split(_SEPARATORS, path)[-1]}:{line}"


def omit_step_result(reason: AnyReason, step: int) -> AnyReason:
    """Return a scheduler's reason without the result of `step`, for a text that already shows this result."""
    codes = ("rank-promoted", "rank-continued", "cutoff")
    if isinstance(reason, Reason) and reason.code in codes and reason.arguments.get("step") == step:
        return make_reason(reason.code, **{**reason.arguments, "value": None})
    return reason


# The sentences, by code. A part between < and > is omitted if one of its arguments is missing.

_OPTIONAL_PART = re.compile(r"<([^>]*)>")


class _SentenceFormatter(string.Formatter):
    """Formats like `str.format`, by a key of `_FORMATS`, or by words for a number: `one|many`, `none|one|# many`."""

    def format_field(self, value: Any, format_spec: str) -> str:
        forms = format_spec.split("|")
        if len(forms) > 1:
            return pluralize(value, *forms) if len(forms) == 2 else forms[min(value, 2)].replace("#", str(value))
        own_format = _FORMATS.get(format_spec)
        return str(super().format_field(value, format_spec) if own_format is None else own_format(value))


_FORMATS: Mapping[str, Callable[[Any], str]] = {
    "span": format_elapsed,
    "size": format_size,
    "count": lambda count: f"{count:.0f}" if float(count).is_integer() else f"{count:g}",
    "ranks": lambda ranks: f"rank{'' if len(ranks) == 1 else 's'} {', '.join(map(str, ranks))}",
    "reason": lambda reason: str(_parse_reason(reason)),
    "line": lambda reason: first_line(find_root_error(_parse_reason(reason))),
}
_formatter = _SentenceFormatter()


def _format_sentence(sentence: str, arguments: Mapping[str, Any]) -> str:
    def format_optional(part: re.Match[str]) -> str:
        names = [name for _, name, _, _ in _formatter.parse(part[1]) if name]
        return part[1] if all(arguments.get(name) not in (None, "") for name in names) else ""

    return _formatter.vformat(_OPTIONAL_PART.sub(format_optional, sentence), (), arguments).rstrip()


_RESULT = "<{metric} = {value:g} at step {step}: >"
_PROCESS_ENDED = "<ended by {signal}><exited with code {exit_code}><{detail:reason}>"
_RAISED = "<rank {rank}: ><{type}: >{text}<{advice:reason}><; {memory:reason}>\n<{traceback}>"

_SENTENCES: Mapping[str, str] = {
    # A stop criterion is met, or a scheduler has decided.
    "step-limit": "step {step:count} of {limit:count}",
    "metric-limit": "{metric} = {value:g}, the limit is {limit:g}",
    "time-limit": "trained for {seconds:span}, the limit is {limit:span}",
    "plateau": "{metric} has settled at {mean:g} ± {spread:g}",
    "stop-function": "{name} returned a true value",
    "done-reported": "the trainable reported that it is done",
    "returned": "the trainable returned",
    "said": "its flow run reported {status}",
    "rank-promoted": (
        _RESULT + "rank {rank} of {ranked}, {quota:none is promoted yet|the best is promoted|the best # are promoted}"
    ),
    "rank-continued": (
        _RESULT + "rank {rank} of {ranked}, {quota:none continues|the best continues|the best # continue}"
    ),
    "cutoff": _RESULT + "needed {metric} = {cutoff:g} or better, judging by {judges:trial|trials} before it",
    "median": "its best {metric} by step {step} is {best:g}; {count} other trials' averages have the median {median:g}",
    "exploit": (
        "{metric} = {value:g} at step {step} is among the worst; "
        "the other trial's {metric} = {source_value:g} at step {source_step} is among the best"
    ),
    "turn-over": "paused at step {step}: another trial's turn",
    "waits-for-others": "waits at step {step} for <{others} >other trials to compare with",
    "waits-for-slot": "continues to step {step} once a slot is free",
    "pruner": "decided by {name} at {metric} = {value:g}",
    # The search ends, or starts no more trials.
    "failed-trials": "{count:trial has|trials have} errored; the limit is MaxFailures({limit})",
    "trial-budget": "the trial budget of {limit} is spent",
    "search-time-limit": "its trials have trained for {seconds:span}, the limit is {limit:span}",
    "search-plateau": "{metric} of the best {top} trials has settled: ± {spread:g}",
    "time-budget": "the time budget of {seconds:span} is spent",
    "fail-fast": "trial {trial} errored, and fail_fast ends the experiment: {error:line}",
    "same-errors": "{count} trials errored before step 2, all with: {error:line}; to continue, set fail_fast=False",
    "stop-request": "stopped by {by}<: {text}>",
    "stopped-on-resume": "stopped, as chosen on Resume",
    "stop-unreadable": "{error}",
    # A stop request is refused.
    "request-unreadable": "it cannot be read",
    "request-repeated": "it is already journaled",
    "request-outdated": "it was for owner {owner}, but owner {successor} has taken over",
    "request-without-trial": "there is no trial {trial!r}",
    "request-for-ended-trial": "trial {trial!r} is {status} already",
    # A trial continues.
    "retried": "retried after: {error:reason}",
    "extended": "extended beyond step {step}",
    "attempt-requested": "another attempt was requested",
    "trained-on": "trained further after it had {status}",
    "step-repeated": "step {step} is trained again, from step {start}",
    "checkpoint-deleted": "it returns to step {start}: the checkpoint of step {step} was deleted",
    "goes-back": "it returns to step {step}, as chosen on Resume",
    "went-back": "returned to step {step}, as chosen on Resume",
    # An attempt ends.
    "raised": _RAISED,
    "invalid-use": _RAISED,
    "process-ended": "<rank {rank}: ><{memory:reason}; >the trial's process "
    + _PROCESS_ENDED
    + "<\nlast output:\n{output}>",
    "out-of-memory": (
        "out of memory: peak {peak_bytes:size} of limit {limit_bytes:size}"
        "< (process {process}, {process_bytes:size} in its last sample)>"
    ),
    "thread-ended": "runs in a thread, which has ended",
    "thread-runs": "runs in a thread, which still runs, because a thread cannot be killed",
    "process-kept": "waits for another trial",
    "rank-vanished": "(process {process}) was killed, or called os._exit",
    "rank-elsewhere": "is on node {node}, and ends with the attempt",
    "node-lost": "is on node {node}, which is lost: {error:reason}",
    "node-silent": "the connection to node {node} was closed, or was silent for {seconds:g} s; the node is lost",
    "node-unreadable": "node {node} sent an unreadable message: {error}",
    "node-not-started": "its processes did not start on node {node}: {error}",
    "node-not-needed": "the attempt has ended, has begun without this node, or has another process for this node",
    "node-0-late": "node 0 did not begin within {seconds:g} s",
    "nodes-missing": "{error}",
    "attempt-over": "the attempt has ended",
    "save-overtaken": "it was saved while another checkpoint was quarantined, and may have the same damage",
    "owner-vanished": "the process that ran the attempt exited without ending it",
    "supervisor-failed": "its supervisor failed, and was retried",
    "task-failed": "its task failed, and was started again",
    "saved-as-requested": "saved, as requested",
    "stopped-before-start": "asked to stop before it began",
    "silent": "no report for {seconds:span}: presumed hung, and killed",
    "not-committed": "step {step} is not committed: {error:reason}",
    "save-failed": "its checkpoint cannot be saved: {error}",
    "write-failed": "its reports could not be written: {error}",
    "upload-unfinished": "asked to stop; its checkpoint was still being uploaded after {seconds:g} s",
    "no-checkpoint": "asked to stop; no checkpoint within the grace period of {seconds:g} s",
    "interrupted-twice": "interrupted twice, and killed",
    "launcher-returned": (
        "the trial's own process returned before rank 0, which it had started; perhaps the launcher was killed. Wait "
        "for it, and raise if it fails, like subprocess.run(..., check=True). Rank 0 was killed {seconds:g} s later"
    ),
    "ranks-missing": "{ranks:ranks} of {world_size} did not join the trial within {seconds:g} s of the first rank",
    "ranks-left-save": "{ranks:ranks} ended before step {step}, for which rank 0 reported a checkpoint",
    "ranks-left-mean": "{ranks:ranks} ended before step {step}, for which rank 0 reported metrics",
    "part-late": "{ranks:ranks} did not add a part within {seconds:g} s",
    "part-missing": "{error}",
    "metrics-late": "{ranks:ranks} did not report step {step} within {seconds:g} s",
    "surplus-report": (
        "rank {rank} reported step {step} after rank 0 had ended: after a surplus report, each mean mixes different "
        "steps. Call pt.report once per step on every rank"
    ),
    # What to do about an error.
    "advice-no-terminal": "breakpoint() found no terminal: debug with isolation='thread'",
    "advice-signal-handler": (
        ", raised by a signal handler. A trial ignores SIGTERM: its supervisor asks it to save and end"
    ),
    "advice-exit": (
        ". sys.exit(0) in a function completes its trial, like the end of a script; a class returns {{'done': True}}"
    ),
    "advice-address-space": "the address space is limited to {limit_bytes:size} (ulimit -v)",
    "advice-config": ". A configuration is a dict, even for a dataclass: config[{name!r}]",
    "advice-main-module": ". Move what the script or notebook defines to a module, which each process can import",
    # A retry budget is spent, or a checkpoint is quarantined.
    "not-retried": "{cause} is not retried: {error:reason}",
    "max-machine-failures": "{failures} machine failures without a commit (max_machine_failures): {error:reason}",
    "max-failures": "failure {failures} of the trainable (max_failures={limit}): {error:reason}",
    "died-at-start": "{attempts} attempts failed before their first step: {error:reason}",
    "died-at-each-start": (
        "{attempts} attempts failed before their first step, also from the previous checkpoint, so no checkpoint is "
        "the cause: {error:reason}"
    ),
    "attempts-lost": "{count} attempts were lost without a commit: {error:reason}",
    "no-result": "the attempt ended without writing a result",
    # How a rank's end differs from that of the other ranks.
    "rank-died": _PROCESS_ENDED,
    "rank-without-part": "did not add its part to a checkpoint",
    "rank-without-report": "did not report a step",
    "rank-outlived": "was still running {seconds:g} s after rank 0",
}
