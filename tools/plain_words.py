"""Count the naming rules of CONTRIBUTING.md, so that names stay plain.

- A function is a verb and its object, so its name is not a bare participle: `verify`, not `verified`.
- A variable is named by what it holds: `trial`, not `each`.
- A limit is `MAX_...` or `MIN_...`, a time `..._TIMEOUT` or `..._INTERVAL`; no superlative, no metaphor.
- A name that four files define has one meaning in all of them.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

from tools.sources import Source

# Words that say less than the noun of the field: VAGUE for the package, VAGUE_IN_TESTS for tests and benchmarks.
VAGUE = frozenset({"apart", "aside", "happened", "heard", "learned", "outside", "standing", "told"})
VAGUE_IN_TESTS = frozenset({"happened", "heard", "told"})
VAGUE_AS_FIELD = frozenset({"go_on", "left", "say"})  # fields are stored, or read far from where they are set
ALLOWED_FIELDS = {(Path("src/prefect_tune/reporting/svg.py"), "left")}  # the side of a frame

ALLOWED_SHARED_NAMES = {"TuneReportCheckpointCallback"}  # Ray's name of the callback, in the module of each framework
PACKAGE = ("src", "blocks", "tasks", "flows")
MAX_PARTICIPLES = 0
MAX_VAGUE_BINDINGS = 1  # the public field `AuditDifference.found`
MAX_SHARING_FILES = 3
VAGUE_VARIABLES = frozenset({"each", "found", "given", "known", "place", "said", "why"})
_IRREGULAR_PARTICIPLES = """
begun born bound broken built caught chosen dealt done drawn driven fallen fed felt found frozen given gone
gotten grown heard held hidden kept known laid left lent lost made meant met overtaken rerun resent rewritten
said seen sent shown spent spoken stood stuck swept taken taught thrown told torn understood undone unknown
unread unseen unwritten withdrawn won worn written
"""
_SUPERLATIVES = """
EARLIEST FEWEST HIGHEST LARGEST LEAST LONGEST LOWEST MOST NEWEST OLDEST SHORTEST SMALLEST WIDEST ENDLESS GOODBYE
HOPELESS MOMENT PATIENCE SILENCE TRASH
"""
_ONE_MEANING = """
has_conditional_create copy create delete list put read replace size begin decide next_milestone
next_trial_to_resume on_event on_no_new_trial on_trial_added on_trial_ended on_trial_resumed restore_trial
suggest trial_count to_json_form load_checkpoint save_checkpoint setup step report
close end name open run send stop train write
"""
# `_ONE_MEANING`: implementations of one protocol (stores, schedules, searches, observers, callbacks, commands),
# and verbs that mean the same everywhere: of a file, a thread, a connection, a process, a training.
IRREGULAR_PARTICIPLES, SUPERLATIVES, ONE_MEANING = (
    frozenset(words.split()) for words in (_IRREGULAR_PARTICIPLES, _SUPERLATIVES, _ONE_MEANING)
)
NO_PARTICIPLES = frozenset({"embed", "exceed", "feed", "hundred", "need", "proceed", "seed", "speed", "succeed"})


def find_vague_names(source: Source) -> Iterator[str]:
    """Yield each name of the file with a vague word; the name of a test is a sentence, and may have any word."""
    words = VAGUE if source.path.parts[0] in PACKAGE else VAGUE_IN_TESTS
    for line, name in _find_names(source.tree):
        if not name.startswith("test_") and (vague := words & set(_split_words(name))):
            yield f"{source.path}:{line}: {name}: {min(vague)!r} says less than the noun of the field"
    for line, name in _find_fields(source.tree) if source.path.parts[0] in PACKAGE else ():
        if name in VAGUE_AS_FIELD and (source.path, name) not in ALLOWED_FIELDS:
            yield f"{source.path}:{line}: {name}: a field says what it holds"


def _find_names(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield the line and the name of each function, class, argument, variable and attribute that the file defines."""
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield node.lineno, name
            case ast.arg(arg=name) | ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                yield node.lineno, name
            case _:
                pass


def _split_words(name: str) -> Sequence[str]:
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower().split("_")


def _find_fields(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            annotated = (statement.target for statement in node.body if isinstance(statement, ast.AnnAssign))
            yield from ((target.lineno, target.id) for target in annotated if isinstance(target, ast.Name))


def find_shared_class_names(sources: Sequence[Source]) -> Iterator[str]:
    """Yield each class whose name another module defines, too."""
    first: dict[str, Path] = {}
    classes = ((source.path, node) for source in sources for node in source.tree.body if isinstance(node, ast.ClassDef))
    for path, node in classes:
        if node.name in first and node.name not in ALLOWED_SHARED_NAMES:
            yield f"{path}:{node.lineno}: class {node.name} has the name of one in {first[node.name]}"
        first[node.name] = path


def is_participle(name: str) -> bool:
    """Return whether a function's name is one word, and a participle or a past tense."""
    word = name.strip("_")
    return word in IRREGULAR_PARTICIPLES or (word.endswith("ed") and "_" not in word and word not in NO_PARTICIPLES)


def find_participle_functions(source: Source) -> Iterator[tuple[int, str]]:
    """Yield the line and the name of each function of the file that is named by a bare participle."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and is_participle(node.name):
            yield node.lineno, node.name


def find_vague_bindings(source: Source) -> Iterator[tuple[int, str]]:
    """Yield the line and the name of each variable and parameter of the file that does not say what it holds."""
    for node in ast.walk(source.tree):
        match node:
            case (
                ast.Name(id=name, ctx=ast.Store())
                | ast.arg(arg=name)
                | ast.MatchAs(name=str(name))
                | ast.MatchStar(name=str(name))
                | ast.ExceptHandler(name=str(name))
            ) if name in VAGUE_VARIABLES:
                yield node.lineno, name
            case _:
                pass


def find_poetic_constants(source: Source) -> Iterator[tuple[int, str]]:
    """Yield the line and the name of each constant of the file that has a superlative or a metaphor in its name."""
    for node in ast.walk(source.tree):
        match node:
            case ast.Name(id=name, ctx=ast.Store()) if name.isupper() and SUPERLATIVES & {*name.split("_")}:
                yield node.lineno, name
            case _:
                pass


def find_homonyms(sources: Sequence[Source]) -> Iterator[str]:
    """Yield each name that more than three files define, and that is not known to have one meaning."""
    files: defaultdict[str, set[Path]] = defaultdict(set)
    for source in sources:
        for node in ast.walk(source.tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                files[node.name].add(source.path)
    for name, paths in sorted(files.items()):
        is_special = re.fullmatch(r"__\w+__|_repr_\w+_", name)
        if len(paths) > MAX_SHARING_FILES and not is_special and name not in ONE_MEANING | ALLOWED_SHARED_NAMES:
            yield f"{min(paths)}:1: {name} is defined in {len(paths)} files: name each by what it does"


def count_plain_words(sources: Sequence[Source]) -> tuple[str, list[str]]:
    """Return the counts as a line of text, and the violations of their limits."""
    violations = list(find_homonyms(sources))
    counts = []
    for rule, limit, names in (
        ("functions named by a participle", MAX_PARTICIPLES, find_participle_functions),
        ("vague variables", MAX_VAGUE_BINDINGS, find_vague_bindings),
        ("poetic constants", 0, find_poetic_constants),
    ):
        lines = [f"{source.path}:{line}: {name}" for source in sources for line, name in names(source)]
        counts.append(f"{len(lines)} {rule} (at most {limit})")
        if len(lines) > limit:
            violations += [f"{line}: one of {len(lines)} {rule}, at most {limit}" for line in lines]
    return ", ".join(counts), violations
