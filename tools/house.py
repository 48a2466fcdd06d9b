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

from tools.plain_words import PACKAGE, plain_word_counts, shared_class_names, vague_names
from tools.sources import Source, read_sources

ROOMS = ("src", "blocks", "tasks", "flows", "tools")  # all holds here ...
BESIDE = ("tests", "benchmarks")  # ... and here the longest file, vague names, a reason for each exemption
FILE_LINES = 700
# 65,423 and 78,161 when the refactoring began (one journal, one event view): it lowers both after each step.
PACKAGE_LINES = 54_900
TESTS_LINES = 69_170
"""They only go down, or up for an issue that says so: a feature brings its lines from somewhere else."""

NOT_IN_A_CLONE = frozenset({"build/screenshots", "site/", "filesystems.py", "server/collection_blocks_data.json"})
"""What CONTRIBUTING.md names though a clone lacks it: what commands make, and files of Prefect."""
PREFECT_API = Path("src/prefect_tune/prefect_api")  # the one package that may lean on what Prefect does not promise

_MAIN = "src/prefect_tune"

_DIRECTIVE = re.compile(
    r"#\s*(noqa(:\s*[A-Z]+[0-9]+(,\s*[A-Z]+[0-9]+)*)?|type:\s*ignore(\[[^\]]*\])?|pragma: no cover)"
)
_REASON_CHARACTERS = 8


def swallows(handler: ast.ExceptHandler) -> bool:
    """Whether the handler catches everything and does not end by raising."""
    caught = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    names = {each.id for each in caught if isinstance(each, ast.Name)}
    broad = handler.type is None or names & {"Exception", "BaseException"}
    return bool(broad) and not isinstance(handler.body[-1], ast.Raise)


def exemptions(text: str) -> Iterator[tuple[int, bool]]:
    """Return the line of each `noqa`, `type: ignore` and `pragma: no cover`, and whether it says why."""
    if not _DIRECTIVE.search(text):
        return  # tokens take most of the time
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT and _DIRECTIVE.search(token.string):
            said = _DIRECTIVE.sub("", token.string).strip(" #:-")
            yield token.start[0], len(said) >= _REASON_CHARACTERS


def violations(source: Source) -> Iterator[str]:
    """Every house number that the file breaks."""
    if source.line_count > FILE_LINES:
        yield f"{source.path}:1: {source.line_count} lines, at most {FILE_LINES}: it is about two things"
    yield from _swallowed(source)


def _swallowed(source: Source) -> Iterator[str]:
    said = {line for line, has_reason in exemptions(source.text) if has_reason}
    for node in ast.walk(source.tree):
        if isinstance(node, ast.ExceptHandler) and swallows(node) and node.lineno not in said:
            yield f"{source.path}:{node.lineno}: a broad except that neither ends with raise nor says why"


def unexplained(source: Source) -> Iterator[str]:
    """Every exemption without its reason on the line."""
    for line, has_reason in exemptions(source.text):
        if not has_reason:
            yield f"{source.path}:{line}: an exemption without its reason on the line"


def unpromised(source: Source) -> Iterator[str]:
    """Every use of Prefect that Prefect does not promise: private modules and names, forced states, other classes."""
    theirs = {name.asname or name.name for node in _imports(source) for name in node.names}
    for node in ast.walk(source.tree):
        match node:
            case ast.Import(names=names) if any(_is_private(each.name) for each in names):
                found = "imports a private module of Prefect"
            case ast.ImportFrom(module=str(module), names=names) if any(
                _is_private(f"{module}.{each.name}") for each in names
            ):
                found = "imports a private name of Prefect"
            case ast.Attribute(value=ast.Name(id=name), attr=attr) if name in theirs and _is_private(f"prefect.{attr}"):
                found = f"reads {name}.{attr}, which is private to Prefect"
            case ast.keyword(arg="force", value=ast.Constant(value=True)):
                found = "forces a state, against the rules of Prefect's server"
            case ast.Attribute(attr="__class__", ctx=ast.Store()):
                found = "changes the class of an object"
            case _:
                continue
        yield f"{source.path}:{getattr(node, 'lineno', 1)}: {found}: only {PREFECT_API} may"


def _imports(source: Source) -> Iterator[ast.ImportFrom]:
    for node in ast.walk(source.tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "prefect":
            yield node


def _is_private(name: str) -> bool:
    """Whether the dotted name is Prefect's, and private; `__version__` and the like are not."""
    room, *parts = name.split(".")
    return room == "prefect" and any(part.startswith("_") and not part.endswith("__") for part in parts)


def measure_lines(name: str, sources: Sequence[Source], limit: int) -> tuple[str, list[str]]:
    """Return the files and lines of the package or of the tests as a line of text, and the limit if it is exceeded."""
    lines = sum(source.line_count for source in sources)
    exceeded = [f"{name}: {lines} lines, at most {limit}"] if lines > limit else []
    return f"{name}: {len(sources)} files, {lines} lines", exceeded


def journeys(root: Path) -> tuple[str, list[str]]:
    """Return the number of files of each journey that CONTRIBUTING.md draws, and the paths in it that do not exist."""
    drawn = re.findall(r"^```journey\n(.*?)^```", (root / "CONTRIBUTING.md").read_text(), re.MULTILINE | re.DOTALL)
    files = [re.findall(r"\S+\.py", each) for each in drawn]
    missing = [
        each for each in sorted({*chain(*files)}) if not any((root / room / each).exists() for room in ("", _MAIN))
    ]
    counts = ", ".join(str(len(set(each))) for each in files)
    missing += _missing_paths(root)
    return f"journeys (a metric, a checkpoint's bytes, a decision, Resume to the first step): {counts} files", [
        f"CONTRIBUTING.md names {each}, which does not exist" for each in missing
    ]


def _missing_paths(root: Path) -> Iterator[str]:
    """Yield each path in the text of CONTRIBUTING.md that does not exist; one with a placeholder is no path."""
    named = re.findall(r"`([\w./-]+/|[\w./-]+\.\w{2,4})`", (root / "CONTRIBUTING.md").read_text())
    for path in sorted({*named}):
        places = (root / room / path for room in ("", _MAIN, "tests", "src"))
        if not any(each.exists() for each in places) and path not in NOT_IN_A_CLONE:
            yield path


def main(root: Path) -> int:
    """Print violations and figures; return the exit code."""
    gc.disable()  # the trees stay until the end: to look through them for garbage takes a third of the time
    inside, beside = read_sources(root, ROOMS), read_sources(root, BESIDE)
    found = [each for source in inside for each in violations(source)]
    found += [each for source in (*inside, *beside) for each in unexplained(source)]
    found += [
        f"{source.path}:1: {source.line_count} lines, at most {FILE_LINES}"
        for source in beside
        if source.line_count > FILE_LINES
    ]
    package = [source for source in inside if source.path.parts[0] in PACKAGE]
    tests = [source for source in beside if source.path.parts[0] == "tests"]
    sizes = [measure_lines("package", package, PACKAGE_LINES), measure_lines("tests", tests, TESTS_LINES)]
    found += [*chain(*(exceeded for _, exceeded in sizes)), *shared_class_names(package)]
    found += [each for source in package if PREFECT_API not in source.path.parents for each in unpromised(source)]
    found += [each for source in (*package, *beside) for each in vague_names(source)]
    words, violated = plain_word_counts(package)
    found += violated
    drawn, missing = journeys(root)
    found += missing
    print(*found, sep="\n", end="\n" if found else "")
    longest_file = max((source.line_count for source in inside), default=0)
    print(f"house: {len(inside)} files, longest {longest_file} lines; {len(found)} violations")
    print("sizes:", "; ".join(figures for figures, _ in sizes))
    print("names:", words)
    print(drawn)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(Path(__file__).resolve().parent.parent))
