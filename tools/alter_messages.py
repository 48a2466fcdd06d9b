"""Run tests with every message of the package altered, to show that no decision depends on a text.

    python -m tools.alter_messages [OPTIONS OF pytest]      default: the fast suite

A copy of the package gets a mark in each word of its messages. The mark of a line differs from that of any other line:
texts that were equal, or contained one another, no longer do. A test that fails by an assertion, a pattern or a
lookup whose report has such a mark is a test of wording. Any other failure is a decision that reads a text.
Prints the tests of wording as a number, and the others by name; exits with 1 if there are others.
"""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from xml.etree import ElementTree as ET

ROOT = Path(__file__).parents[1]
MARK = "\N{FOUR DOT PUNCTUATION}"
_WORD = re.compile(r"\{[^{}]*\}|%(?:\(\w+\))?[-.\d]*\w|\b[A-Za-z]{3,}")
_SENTENCE = re.compile(r"[A-Za-z]{2,}\S* (?:\S+ )*?\S*[A-Za-z]{2,}|[A-Za-z]{3,} $|^ [A-Za-z]{3,}")
_SKIPPED_FILES = frozenset(
    {
        "__init__.py",  # lists of names
        "linux.py",  # formats of the kernel's files
        "stores/obstore_store.py",  # a table of error codes, as a text
        *("core/page_elements.py", "core/display_text.py", "notebook.py", "reporting/svg.py"),  # styles of pages
    }
)


class _Alter(ast.NodeTransformer):
    """Marks the words of messages; keys, docstrings, patterns and names stay."""

    def __init__(self, codes: frozenset[str], seed: int) -> None:
        self._codes = codes
        self._seed = seed
        self.count = 0

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        if isinstance(node.value, str) and node.value not in self._codes and _SENTENCE.search(node.value):
            return ast.copy_location(ast.Constant(self._mark(node.value, node.lineno)), node)
        return node

    def visit_JoinedStr(self, node: ast.JoinedStr) -> ast.AST:
        whole = "".join(str(part.value) if isinstance(part, ast.Constant) else "{x}" for part in node.values)
        is_sentence = _SENTENCE.search(whole.replace("{x}", "xx")) is not None and re.search(r"[a-z]{2,}", whole)
        for part in node.values:
            if isinstance(part, ast.Constant) and is_sentence:
                part.value = self._mark(str(part.value), node.lineno)
            elif isinstance(part, ast.FormattedValue):
                part.value = self.visit(part.value)
        return node

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        return node if isinstance(node.value, ast.Constant) else self.generic_visit(node)

    def visit_Dict(self, node: ast.Dict) -> ast.AST:
        node.values = [self.visit(value) for value in node.values]
        return node

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        node.value = self.visit(node.value)  # what a key looks up is no message
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        node.value = None if node.value is None else self.visit(node.value)
        return node

    def visit_MatchValue(self, node: ast.MatchValue) -> ast.AST:
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        name = ast.unparse(node.func)
        is_message = not name.startswith("re.") and name not in ("TypeVar", "getattr", "ContextVar")
        return self.generic_visit(node) if is_message else node

    def _mark(self, text: str, line: int) -> str:
        self.count += 1
        mark = f"{MARK}{(self._seed + line) % 9973}{MARK}"
        return _WORD.sub(lambda word: word[0] if word[0][0] in "{%" else f"{word[0][0]}{mark}{word[0][1:]}", text)


def find_codes(trees: Sequence[ast.Module]) -> Iterator[str]:
    """Yield the texts that are values and no messages: those of a `Literal`, and those of an enumeration."""
    for tree in trees:
        for node in ast.walk(tree):
            is_literal = isinstance(node, ast.Subscript) and ast.unparse(node.value).endswith("Literal")
            is_enum = isinstance(node, ast.ClassDef) and any("Enum" in ast.unparse(base) for base in node.bases)
            if is_literal or is_enum:
                yield from (
                    part.value
                    for part in ast.walk(node)
                    if isinstance(part, ast.Constant) and isinstance(part.value, str)
                )


def write_altered_package(folder: Path) -> int:
    """Write the altered package below `folder`; return the number of its messages."""
    package = folder / "prefect_tune"
    shutil.copytree(ROOT / "src/prefect_tune", package, ignore=shutil.ignore_patterns("__pycache__"))
    for folder_name in ("flows", "tasks", "blocks"):
        shutil.copytree(ROOT / folder_name, package / folder_name, ignore=shutil.ignore_patterns("__pycache__"))
    trees = {path: ast.parse(path.read_text()) for path in sorted(package.rglob("*.py"))}
    codes, count = frozenset(find_codes([*trees.values()])), 0
    for number, (path, tree) in enumerate(trees.items()):
        if path.relative_to(package).as_posix() not in _SKIPPED_FILES:
            alter = _Alter(codes, seed=number * 701)
            path.write_text(ast.unparse(ast.fix_missing_locations(alter.visit(tree))))
            count += alter.count
    return count


def main(options: Sequence[str]) -> int:
    """Run the tests with the altered package; see the module."""
    with tempfile.TemporaryDirectory(prefix="altered-") as name:
        folder = Path(name)
        print(f"{write_altered_package(folder):,} messages are altered")
        report = folder / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "--no-header", "--tb=short", f"--junit-xml={report}", *options]
        subprocess.run(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(folder)}, check=False)
        cases = ET.parse(report).iter("testcase")  # noqa: S314 - pytest has just written it
        failed = [
            (f"{case.get('classname')}::{case.get('name')}", "".join(result.itertext()) + (result.get("message") or ""))
            for case in cases
            for result in case
            if result.tag in ("failure", "error")
        ]
    others = [test for test, text in failed if MARK not in text]
    print(f"{len(failed) - len(others)} tests of wording fail; {len(others)} others", *others, sep="\n")
    return bool(others)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
