"""Check what no linter counts: the size limits of CONTRIBUTING.md.

Prints one line per violation and one line of figures; exits with 1 when there is a violation.
"""

from __future__ import annotations

import ast
import gc
import io
import re
import sys
import tokenize
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path

from tools.plain_words import PACKAGE, count_plain_words, find_shared_class_names, find_vague_names
from tools.sources import Source, read_sources

CHECKED_FOLDERS = ("src", "blocks", "tasks", "flows", "tools")
OTHER_FOLDERS = ("tests", "benchmarks")  # only the length of files, vague names and exemptions are checked
FILE_LINES = 700
# 65,423 and 78,161 when the refactoring began (one journal, one event view): it lowers both after each step.
PACKAGE_LINES = 54_960
TESTS_LINES = 68_040
"""The limits only decrease, unless an issue says otherwise."""

NOT_IN_A_CLONE = frozenset({"build/screenshots", "site/", "filesystems.py", "server/collection_blocks_data.json"})
"""Paths in CONTRIBUTING.md that a clone lacks: outputs of commands, and files of Prefect."""
PREFECT_API = Path("src/prefect_tune/prefect_api")  # the only package that may use private parts of Prefect

_MAIN = "src/prefect_tune"

_DIRECTIVE = re.compile(
    r"#\s*(noqa(:\s*[A-Z]+[0-9]+(,\s*[A-Z]+[0-9]+)*)?|type:\s*ignore(\[[^\]]*\])?|pragma: no cover)"
)
_REASON_CHARACTERS = 8


def swallows_errors(handler: ast.ExceptHandler) -> bool:
    """Return whether the handler catches everything and does not end by raising."""
    caught = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    names = {kind.id for kind in caught if isinstance(kind, ast.Name)}
    broad = handler.type is None or names & {"Exception", "BaseException"}
    return bool(broad) and not isinstance(handler.body[-1], ast.Raise)


def find_exemptions(text: str) -> Iterator[tuple[int, bool]]:
    """Return the line of each `noqa`, `type: ignore` and `pragma: no cover`, and whether it says why."""
    if not _DIRECTIVE.search(text):
        return  # tokenizing takes most of the time
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT and _DIRECTIVE.search(token.string):
            reason = _DIRECTIVE.sub("", token.string).strip(" #:-")
            yield token.start[0], len(reason) >= _REASON_CHARACTERS


def find_violations(source: Source) -> Iterator[str]:
    """Yield each limit that the file exceeds."""
    if source.line_count > FILE_LINES:
        yield f"{source.path}:1: {source.line_count} lines, at most {FILE_LINES}: it is about two things"
    yield from _find_swallowed_errors(source)


def _find_swallowed_errors(source: Source) -> Iterator[str]:
    explained_lines = {line for line, has_reason in find_exemptions(source.text) if has_reason}
    for node in ast.walk(source.tree):
        if isinstance(node, ast.ExceptHandler) and swallows_errors(node) and node.lineno not in explained_lines:
            yield f"{source.path}:{node.lineno}: a broad except that neither ends with raise nor says why"


def find_unexplained_exemptions(source: Source) -> Iterator[str]:
    """Yield each exemption without a reason on its line."""
    for line, has_reason in find_exemptions(source.text):
        if not has_reason:
            yield f"{source.path}:{line}: an exemption without its reason on the line"


def find_unpromised_uses(source: Source) -> Iterator[str]:
    """Yield each use of what Prefect does not promise: private modules and names, forced states, changed classes."""
    theirs = {name.asname or name.name for node in _find_prefect_imports(source) for name in node.names}
    for node in ast.walk(source.tree):
        match node:
            case ast.Import(names=names) if any(_is_private(name.name) for name in names):
                use = "imports a private module of Prefect"
            case ast.ImportFrom(module=str(module), names=names) if any(
                _is_private(f"{module}.{name.name}") for name in names
            ):
                use = "imports a private name of Prefect"
            case ast.Attribute(value=ast.Name(id=name), attr=attr) if name in theirs and _is_private(f"prefect.{attr}"):
                use = f"reads {name}.{attr}, which is private to Prefect"
            case ast.keyword(arg="force", value=ast.Constant(value=True)):
                use = "forces a state, against the rules of Prefect's server"
            case ast.Attribute(attr="__class__", ctx=ast.Store()):
                use = "changes the class of an object"
            case _:
                continue
        yield f"{source.path}:{getattr(node, 'lineno', 1)}: {use}: only {PREFECT_API} may"


def _find_prefect_imports(source: Source) -> Iterator[ast.ImportFrom]:
    for node in ast.walk(source.tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "prefect":
            yield node


def _is_private(name: str) -> bool:
    """Return whether the dotted name is a private one of Prefect; `__version__` is not."""
    package, *parts = name.split(".")
    return package == "prefect" and any(part.startswith("_") and not part.endswith("__") for part in parts)


def measure_lines(name: str, sources: Sequence[Source], limit: int) -> tuple[str, list[str]]:
    """Return the files and lines of the package or of the tests as a line of text, and the limit if it is exceeded."""
    lines = sum(source.line_count for source in sources)
    exceeded = [f"{name}: {lines} lines, at most {limit}"] if lines > limit else []
    return f"{name}: {len(sources)} files, {lines} lines", exceeded


def check_journeys(root: Path) -> tuple[str, list[str]]:
    """Return the number of files of each journey that CONTRIBUTING.md draws, and the paths in it that do not exist."""
    journeys = re.findall(r"^```journey\n(.*?)^```", (root / "CONTRIBUTING.md").read_text(), re.MULTILINE | re.DOTALL)
    files = [re.findall(r"\S+\.py", journey) for journey in journeys]
    missing = [
        path for path in sorted({*chain(*files)}) if not ((root / path).exists() or (root / _MAIN / path).exists())
    ]
    counts = ", ".join(str(len(set(paths))) for paths in files)
    missing += _find_missing_paths(root)
    return f"journeys (a metric, a checkpoint's bytes, a decision, Resume to the first step): {counts} files", [
        f"CONTRIBUTING.md names {path}, which does not exist" for path in missing
    ]


def _find_missing_paths(root: Path) -> Iterator[str]:
    """Yield each path in the text of CONTRIBUTING.md that does not exist; one with a placeholder is no path."""
    named = re.findall(r"`([\w./-]+/|[\w./-]+\.\w{2,4})`", (root / "CONTRIBUTING.md").read_text())
    for path in sorted({*named}):
        candidates = (root / folder / path for folder in ("", _MAIN, "tests", "src"))
        if not any(candidate.exists() for candidate in candidates) and path not in NOT_IN_A_CLONE:
            yield path


def main(root: Path) -> int:
    """Print violations and figures; return the exit code."""
    gc.disable()  # the trees stay until the end: their garbage collection takes a third of the time
    checked, others = read_sources(root, CHECKED_FOLDERS), read_sources(root, OTHER_FOLDERS)
    violations = [*chain(*map(find_violations, checked), *map(find_unexplained_exemptions, [*checked, *others]))]
    violations += [
        f"{source.path}:1: {source.line_count} lines, at most {FILE_LINES}"
        for source in others
        if source.line_count > FILE_LINES
    ]
    package = [source for source in checked if source.path.parts[0] in PACKAGE]
    tests = [source for source in others if source.path.parts[0] == "tests"]
    sizes = [measure_lines("package", package, PACKAGE_LINES), measure_lines("tests", tests, TESTS_LINES)]
    violations += [*chain(*(exceeded for _, exceeded in sizes)), *find_shared_class_names(package)]
    restricted = [source for source in package if PREFECT_API not in source.path.parents]
    violations += chain(*map(find_unpromised_uses, restricted), *map(find_vague_names, [*package, *others]))
    words, plain_word_violations = count_plain_words(package)
    journey_counts, missing_paths = check_journeys(root)
    violations += [*plain_word_violations, *missing_paths]
    print(*violations, sep="\n", end="\n" if violations else "")
    longest_file = max((source.line_count for source in checked), default=0)
    print(f"house: {len(checked)} files, longest {longest_file} lines; {len(violations)} violations")
    print("sizes:", "; ".join(figures for figures, _ in sizes))
    print("names:", words)
    print(journey_counts)
    return 1 if violations else 0


if __name__ == "__main__":
    sys.exit(main(Path(__file__).resolve().parent.parent))
