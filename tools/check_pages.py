"""Check the claims of the documentation about the code: names, options, files, examples, tests.

Prints one line per false claim; exits with 1 if there is one. `tests/test_docs.py` runs the code on the pages. Runs the
checks of `tools/repository_checks.py`, too.
"""

from __future__ import annotations

import ast
import json
import re
import sys
from collections.abc import Iterator
from datetime import timedelta
from functools import cache
from inspect import getsource, signature
from pathlib import Path
from typing import get_origin

from optuna import pruners, samplers

import prefect_tune as pt
from prefect_tune import loggers
from prefect_tune.core.checkpoints.manifest import Manifest
from prefect_tune.core.experiment.stoppers import ExperimentStopper
from prefect_tune.core.journal_events import Entry
from prefect_tune.core.search import space_json
from prefect_tune.core.storage import layout
from prefect_tune.deploy.automations import make_automation_specs
from prefect_tune.registry import BUILT_IN_MODULES
from tests.fakes.event_table import events_table, journal_events_table
from tests.fakes.pages import PAGES, ROOT, blocks_of
from tools import repository_checks
from tools.docs_site import find_alias_docstring

DOCS = ROOT / "docs"
SEARCH_OPTIONS = {name for flow in (pt.tune, pt.resume, pt.durable_trainable) for name in signature(flow.fn).parameters}
BEHAVIOR_COUNT, BUG_COUNT = 144, 48  # as numbered by the page on parity
REASONS = ("not carried over: ", "not yet: ")


def check_names() -> Iterator[str]:
    """Yield the public names, options and files that a page names and that do not exist."""
    for page in PAGES:
        text = page.read_text()
        yield from _report_missing(page, "public name", set(re.findall(r"\bpt\.(\w+)", text)), set(pt.__all__))
        links = [page.parent / link for link in re.findall(r"\]\((?!https?://)([^)#]+)", text)]
        named = re.findall(r"`((?:tests|docs|src|flows|tasks|blocks|benchmarks)/[^`<> ]*)`", text)
        for path in [*links, *(ROOT / name.partition("::")[0] for name in named)]:
            if not path.exists():
                yield f"{page.relative_to(ROOT)}: there is no {path}"
    for page in [ROOT / "README.md", *(DOCS / f"{name}.md" for name in ("searches", "where-trials-run", "resume"))]:
        options = set(re.findall(r"`(\w+)=", page.read_text())) - {"commit"}  # of SyncConfig
        yield from _report_missing(page, "option", options, SEARCH_OPTIONS)
    stopping = DOCS / "stopping.md"
    options = set(re.findall(r'`(\w+)=[{\["\d]', stopping.read_text()))
    yield from _report_missing(stopping, "option", options, SEARCH_OPTIONS)


def check_lists() -> Iterator[str]:
    """Yield the differences between the lists on pages and the names in the code."""
    results = (DOCS / "results.md").read_text()
    callbacks, logging = results[results.index("## Callbacks") :], results[results.index("## Loggers") :]
    hooks = {name for name in vars(pt.Callback) if not name.startswith("_")} - {"name"}
    theirs = {*samplers.__all__, *pruners.__all__} - {"BaseSampler", "BaseGASampler", "BasePruner", "nsgaii"}
    spaces = (DOCS / "search-spaces.md").read_text()
    rows = re.findall(r"^\|.*$", spaces[spaces.index("| name |") : spaces.index("## Conditional")], re.MULTILINE)
    stoppers = re.findall(r"\*\*`(\w+)\(", (DOCS / "stopping.md").read_text())
    automations = re.findall(r"^\| `(prefect-tune: [^`]*)`", (DOCS / "automations.md").read_text(), re.MULTILINE)
    for page, expected, named in (
        ("results", hooks, set(re.findall(r"`(\w+)\(", callbacks)) & hooks),
        ("results", set(loggers.__all__), set(re.findall(r"`pt\.(\w+)\(", logging)) & set(loggers.__all__)),
        ("optuna", theirs, theirs & set(re.findall(r"`(\w+(?:Sampler|Pruner))`", (DOCS / "optuna.md").read_text()))),
        (
            "search-spaces",
            space_json.JSON_FORMS.keys() - {"constant", "space"},
            {*re.findall(r"`(\w+)\(", "".join(rows))},
        ),
        ("stopping", {kind.__name__ for kind in ExperimentStopper.__subclasses__()}, set(stoppers)),
        ("automations", set(make_automation_specs(timedelta(seconds=90))), set(automations)),
    ):
        if expected != named:
            yield f"docs/{page}.md: expected exactly {', '.join(sorted(expected))}: {sorted(expected ^ named)} differ"
    for page, table in (("events", events_table()), ("storage-layout", journal_events_table())):
        if table not in (DOCS / f"{page}.md").read_text():
            yield f"docs/{page}.md: expected this table:\n{table}"


def check_schedulers() -> Iterator[str]:
    """Yield the schedulers whose options the page or the docstring does not show."""
    page = " ".join((DOCS / "schedulers.md").read_text().replace('"', "'").split())
    for name in BUILT_IN_MODULES["scheduler"]:
        scheduler = getattr(pt, name)
        parameters = signature(scheduler).parameters
        texts = [re.sub(r": [^=]*", "", str(parameter)).replace(" ", "") for parameter in parameters.values()]
        signature_text = ", ".join(texts).replace("(1.2,0.8)", "(1.2, 0.8)")
        if f"**`{name}({signature_text})`**" not in page:
            yield f"docs/schedulers.md: expected **`{name}({signature_text})`**"
        if re.findall(r"^ +(\w+): ", str(scheduler.__doc__).partition("Args:\n")[2], re.MULTILINE) != list(parameters):
            yield f"pt.{name}: expected a line of its docstring for each option"


def check_code_blocks() -> Iterator[str]:
    """Yield the documents and code blocks that differ from the code base."""
    page = DOCS / "storage-layout.md"
    blocks = blocks_of(page)
    documents = [block.code for block in blocks if block.language == "json"]
    for kind, code in ((Manifest, documents[1]), (Entry, documents[2])):
        document = json.loads(code)
        if kind.model_validate(document).model_dump(mode="json") != document:
            yield f"docs/storage-layout.md: expected every field of {kind.__name__}"
    paths = next(block.code.split() for block in blocks if block.language == "text")
    if paths != [line for line in (layout.__doc__ or "").split() if line.startswith("<experiment>")]:
        yield "docs/storage-layout.md: expected the paths of core/storage/layout.py"
    examples = {path.name: _dedent(path.read_text()) for path in (ROOT / "examples").glob("*.py")}
    named = set(re.findall(r"`examples/(\w+\.py)`", (DOCS / "integrations.md").read_text()))
    if named != set(examples):
        yield f"docs/integrations.md: {sorted(named ^ set(examples))} differ from examples/"
    for name in ("integrations", "many-processes"):
        for block in blocks_of(DOCS / f"{name}.md"):
            if block.language == "python" and not any(_dedent(block.code) in code for code in examples.values()):
                yield f"docs/{name}.md: in no example:\n{block.code}"
    for name, example in (("lightning", "lightning_digits.py"), ("hugging-face", "transformers_digits.py")):
        if f"<!-- the code of examples/{example} -->" not in (DOCS / "recipes" / f"{name}.md").read_text():
            yield f"docs/recipes/{name}.md: expected the code of examples/{example}"


def check_docstrings() -> Iterator[str]:
    """Yield the public names whose docstring is missing or does not explain an argument or field."""
    for name in sorted(set(pt.__all__) - {"__version__"}):
        value = getattr(pt, name)
        if get_origin(value) is not None:  # a type alias
            if not find_alias_docstring(name):
                yield f"pt.{name}: expected a docstring"
            continue
        value = getattr(value, "fn", value)  # of a flow or a task
        docstring = (vars(value).get("__doc__") if isinstance(value, type) else value.__doc__) or ""
        if len(docstring.split()) < 4 or docstring.startswith(f"{name}("):  # generated by `dataclass`
            yield f"pt.{name}: expected a docstring"
        named = _find_undescribed_fields(value) if isinstance(value, type) else list(signature(value).parameters)
        yield from (f"pt.{name}: {part} is not explained" for part in named if not re.search(rf"\b{part}\b", docstring))


def _find_undescribed_fields(kind: type) -> list[str]:
    """Return the fields of `kind` that neither a description nor a docstring below them explains."""
    source = getsource(sys.modules[kind.__module__])
    described = {name for name, field in getattr(kind, "model_fields", {}).items() if field.description}
    fields = [name for name in vars(kind).get("__annotations__", {}) if not name.startswith("_") and name != "type"]
    explained = r'^    %s: .*\n    """'
    return [name for name in fields if name not in described and not re.search(explained % name, source, re.MULTILINE)]


def check_parity() -> Iterator[str]:
    """Yield the rows of the page on parity that name neither an existing test nor a reason."""
    page = (DOCS / "parity.md").read_text()
    lines = [line for line in page.splitlines() if re.match(r"\| [FB]\d", line)]
    rows = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]
    expected = [
        *(f"F{number + 1}" for number in range(BEHAVIOR_COUNT)),
        *(f"B{number + 1}" for number in range(BUG_COUNT)),
    ]
    if [row[0] for row in rows] != expected:
        yield f"docs/parity.md: expected the rows F1 to F{BEHAVIOR_COUNT} and B1 to B{BUG_COUNT}"
    counts = (f"**{BEHAVIOR_COUNT}** of them", f"code, **{BUG_COUNT}**, B1 to B{BUG_COUNT}")
    yield from (f"docs/parity.md: expected {count!r}" for count in counts if count not in page.replace("\n", " "))
    for row_id, was, here, shown_by in rows:
        tests = re.findall(r"`(tests/[^`]+)`", shown_by)
        reason = next((shown_by.removeprefix(word) for word in REASONS if shown_by.startswith(word)), None)
        if not (was and here) or (reason is None and not tests) or (reason is not None and len(reason.split()) < 3):
            yield f"docs/parity.md: {row_id}: expected what was, what is, and a test or a reason"
        for test in tests:
            path, _, name = test.partition("::")
            if re.sub(r"\[.*\]$", "", name) not in _find_tests(ROOT / path):
                yield f"docs/parity.md: {row_id}: there is no {test}"


def _report_missing(page: Path, kind: str, named: set[str], existing: set[str]) -> Iterator[str]:
    yield from (f"{page.relative_to(ROOT)}: there is no {kind} {name}" for name in sorted(named - existing))


def _dedent(code: str) -> str:
    """Return the lines without their indentation: pages show parts of functions."""
    return "\n".join(line.strip() for line in code.strip().splitlines())


@cache
def _find_tests(path: Path) -> frozenset[str]:
    """Return the tests of a module, those of classes as `Class::test`."""
    tests = set()
    for node in ast.parse(path.read_text()).body if path.is_file() else ():
        if isinstance(node, ast.FunctionDef):
            tests.add(node.name)
        elif isinstance(node, ast.ClassDef):
            tests |= {f"{node.name}::{inner.name}" for inner in node.body if isinstance(inner, ast.FunctionDef)}
    return frozenset(tests)


def main() -> int:
    """Return the exit code."""
    checks = (check_names, check_lists, check_schedulers, check_code_blocks, check_docstrings, check_parity)
    complaints = [complaint for check in (*checks, *repository_checks.CHECKS) for complaint in check()]
    print(*complaints, sep="\n", end="\n" if complaints else "")
    print(f"pages: {len(PAGES)} pages; {len(complaints)} claims that are not true")
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main())
