"""Check that a name can be imported, from the source alone: nothing is imported before it is trusted.

`why_not_defined` says whether trusted packages define what a journal names. `require_importable` uses it before a
search, and imports a trainable only if its source does not say what it is: in a process as a trial has.
"""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Literal, TypeAlias

from prefect_tune.attempt.processes.process_output import Log, WaitLog
from prefect_tune.attempt.processes.process_pool import TrialProcessPool
from prefect_tune.attempt.trial_spec import import_path, pickled_or_path
from prefect_tune.core.errors import InvalidInput
from prefect_tune.core.experiment.retention import Cadence
from prefect_tune.core.experiment.stoppers import Never
from prefect_tune.core.journal_events import AttemptEnded
from prefect_tune.core.messages.process_messages import Start, TrialEnded
from prefect_tune.core.reasons import Reason
from prefect_tune.core.shown_text import first_line
from prefect_tune.runtime.load_named import require_loadable
from prefect_tune.runtime.trainable import CALLED_WITH
from prefect_tune.stores.local.scratch import ScratchDirectory

_POLL_INTERVAL = timedelta(seconds=0.5)


def require_importable(
    trainable: object, isolation: Literal["process", "thread"], log: Log, cadence: Cadence | None = None
) -> None:
    """Require that the trials can import `trainable`, if it is a name; nothing is written.

    A name that the source of its package defines as a function, or as a subclass of `pt.Trainable` with `step` and
    `save_checkpoint`, is taken as it is: its first trial imports it. Any other one is imported by a process that ends
    then.

    Args:
        trainable: as passed to a search.
        isolation: where its trials run.
        log: receives what the import prints.
        cadence: when its trials save; None if that is not known, and not checked.

    Raises:
        InvalidInput: its module cannot be imported, lacks the name, or has no trainable under it, or one that cannot
            save though `cadence` says when.
    """
    if not isinstance(trainable, str):
        return
    package = trainable.partition(":")[0].partition(".")[0]
    if not why_not_defined(trainable, [package], is_accepted=_is_trainable):
        return
    config = {"trainable": trainable, "cadence": None if cadence is None else cadence.model_dump(mode="json")}
    if isolation == "thread":
        require_loadable(config)
        return
    with ScratchDirectory("import") as scratch, TrialProcessPool(slots=0) as pool:
        folder = str(scratch / "import")
        start = Start(
            experiment="import",
            trial="import",
            attempt=1,
            trainable=f"{require_loadable.__module__}:{require_loadable.__name__}",
            stopper=pickled_or_path(Never()),
            import_path=import_path(),
            config=config,
            directory=folder,
            staging=folder,
            cadence=Cadence(at_end=False),
        )
        waits = WaitLog(log, f"importing trainable {trainable!r}")
        with pool.process(start, log) as channel:
            while True:
                waits.note()
                try:
                    message = channel.receive(_POLL_INTERVAL)
                except EOFError:  # the process was killed: its trials decide
                    return
                match message:
                    case TrialEnded(raised=True, outcome=AttemptEnded(reason=Reason(arguments=arguments) as reason)):
                        is_invalid = arguments.get("type") == InvalidInput.__name__
                        raise InvalidInput(str(arguments["text"]) if is_invalid else first_line(reason))
                    case TrialEnded():
                        return
                    case _:
                        pass


def _is_trainable(definition: ast.stmt, module: ast.Module) -> bool:
    """Whether the source says that this is a trainable; if not, only the import can tell."""
    match definition:
        case ast.FunctionDef(decorator_list=[]):
            return _takes(definition, 1)
        case ast.ClassDef(decorator_list=[], bases=bases, body=body):
            known = dict(_trainables_imported_by(module))
            ours = {known[name] for name in map(ast.unparse, bases) if name in known}
            methods = {each.name: each for each in body if isinstance(each, ast.FunctionDef)}
            are_async = any(isinstance(each, ast.AsyncFunctionDef) for each in body)
            is_whole = ours != {"Trainable"} or methods.keys() >= {"step", "save_checkpoint"}
            called = [(method, CALLED_WITH[name]) for name, method in methods.items() if name in CALLED_WITH]
            are_plain = all(not method.decorator_list and _takes(method, count) for method, count in called)
            return bool(ours) and is_whole and are_plain and not are_async
        case _:
            return False


def _takes(definition: ast.FunctionDef, count: int) -> bool:
    """Whether a function takes this many positional arguments, and has no `yield`, maybe in one that it defines."""
    parameters = definition.args
    positional = len(parameters.posonlyargs) + len(parameters.args)
    is_enough = positional - len(parameters.defaults) <= count and None not in parameters.kw_defaults
    is_plain = not any(isinstance(node, ast.Yield | ast.YieldFrom) for node in ast.walk(definition))
    return is_plain and is_enough and (count <= positional or parameters.vararg is not None)


def _trainables_imported_by(module: ast.Module) -> Iterator[tuple[str, str]]:
    """Yield each name under which a module imports a trainable class of this package, with the name of that class."""
    for statement in module.body:
        match statement:
            case ast.Import(names=names):
                ours = (each.asname or each.name for each in names if each.name == "prefect_tune")
                yield from ((f"{each}.Trainable", "Trainable") for each in ours)
            case ast.ImportFrom(module=str(source), names=names, level=0) if source.partition(".")[0] == "prefect_tune":
                yield from ((each.asname or each.name, each.name) for each in names if each.name.endswith("Trainable"))
            case _:
                pass


# Check that a trusted package defines a name, by parsing its source instead of importing the module.

_MODULE = r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*"
_CODE_NAME = re.compile(rf"({_MODULE}):({_MODULE})", re.ASCII)
_DEFINITIONS = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
_MADE = ast.Call | ast.Lambda | ast.BinOp
"""Expressions whose value the module itself creates; a name or an attribute may alias an object of another module."""
_MAX_IMPORTS = 20

DefinitionCheck: TypeAlias = Callable[[ast.stmt, ast.Module], bool]
"""Whether a definition, which is in this module, is accepted."""


def is_module_name(name: object) -> bool:
    """Return whether `name` can be the name of a package or module."""
    return isinstance(name, str) and re.fullmatch(_MODULE, name, re.ASCII) is not None


def why_not_defined(name: str, packages: Sequence[str], is_accepted: DefinitionCheck = lambda *_: True) -> str:
    """Return why `package.module:Name` is not a class, function or object that `packages` define; empty if it is.

    Imported names are followed through modules of `packages`. Finding a module's source imports its parent
    packages, and not the module itself.

    Args:
        name: the name.
        packages: the packages or modules that may define it.
        is_accepted: a further check, which each definition of the name has to pass.
    """
    parts = _CODE_NAME.fullmatch(name)
    if parts is None:
        return "expected 'package.module:Name'"
    return _Lookup(packages, is_accepted).why_not(parts[1], parts[2].split("."))


class _Lookup:
    """Follows a name through the sources of trusted packages; `depth` counts the modules that import it."""

    def __init__(self, packages: Sequence[str], is_accepted: DefinitionCheck) -> None:
        self._packages = packages
        self._is_accepted = is_accepted

    def why_not(self, module: str, path: Sequence[str], depth: int = 0) -> str:
        """Return why `module` does not define the name at `path`; empty if it does."""
        if not self._is_trusted(module):
            return f"{module} is not in a trusted package"
        if depth == _MAX_IMPORTS:
            return f"{module} imports it in a circle, or through more than {_MAX_IMPORTS} modules"
        try:
            spec = importlib.util.find_spec(module)
            origin = spec.origin if spec is not None and spec.has_location else None
            tree = None if origin is None else ast.parse(Path(origin).read_bytes())
        except (Exception, SystemExit) as error:  # noqa: BLE001 - its parent packages are imported, which may raise anything
            return f"the source of {module} cannot be read: {error}"
        if spec is None:
            return f"there is no module {module}; is its project installed here, or its folder in PYTHONPATH?"
        if tree is None:
            return f"{module} has no source"
        return self._why_not_in(tree.body, path, spec, tree, depth)

    def _is_trusted(self, module: str) -> bool:
        return any(module == each or module.startswith(f"{each}.") for each in self._packages)

    def _why_not_in(
        self, body: Sequence[ast.stmt], path: Sequence[str], spec: ModuleSpec, tree: ast.Module, depth: int
    ) -> str:
        """Return why `body`, of a module or a class in it, does not define the name at `path`; empty if it does.

        Every statement that binds the name has to define it: only running them would tell which one comes last.
        """
        name, *rest = path
        aliases = f"{spec.name} does not define {name!r}, but aliases another object"
        is_defined = False
        for statement in _statements(body):
            if _binds_otherwise(statement, name):
                return aliases
            match statement:
                case ast.ClassDef(name=bound, body=inner) if bound == name and rest:
                    why = self._why_not_in(inner, rest, spec, tree, depth)
                case ast.FunctionDef(name=bound) | ast.AsyncFunctionDef(name=bound) if bound == name and rest:
                    why = f"{name} in {spec.name} is a function"
                case ast.ClassDef(name=bound) | ast.FunctionDef(name=bound) | ast.AsyncFunctionDef(name=bound) if (
                    bound == name
                ):
                    why = "" if self._is_accepted(statement, tree) else "not accepted"
                case ast.Assign() | ast.AnnAssign() if name in _names_in(statement):
                    is_made = isinstance(statement.value, _MADE) and not rest
                    why = aliases if not is_made else "" if self._is_accepted(statement, tree) else "not accepted"
                case ast.Import(names=names) if any(_bound_by(each) == name for each in names):
                    why = f"{spec.name} does not define {name!r}: it imports a module under this name"
                case ast.ImportFrom(names=[ast.alias(name="*")]):
                    source, why = self._why_not_imported(statement, path, spec, depth)
                    if why and is_defined and not self._is_trusted(source):
                        return f"{spec.name} may replace {name!r} by `import *`: {why}"
                    is_defined = is_defined or not why
                    continue
                case ast.ImportFrom(names=names) if origins := [each.name for each in names if _bound_by(each) == name]:
                    _, why = self._why_not_imported(statement, [origins[-1], *rest], spec, depth)
                case _:
                    continue
            if why:
                return why
            is_defined = True
        return "" if is_defined else f"{spec.name} does not define {name!r}"

    def _why_not_imported(
        self, statement: ast.ImportFrom, path: Sequence[str], spec: ModuleSpec, depth: int
    ) -> tuple[str, str]:
        """Return the module that a statement imports from, empty for none, and why that does not define the name."""
        package = spec.name if spec.submodule_search_locations is not None else spec.parent
        try:
            module = importlib.util.resolve_name(f"{'.' * statement.level}{statement.module or ''}", package)
        except ImportError as error:
            return "", f"{spec.name}: {error}"
        return module, self.why_not(module, path, depth + 1)


def _statements(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield all statements that may bind a name of the module, also those in nested blocks such as `if` and `try`."""
    for statement in body:
        yield statement
        if not isinstance(statement, _DEFINITIONS):
            yield from _statements([each for each in ast.iter_child_nodes(statement) if isinstance(each, ast.stmt)])
            for part in (*getattr(statement, "handlers", ()), *getattr(statement, "cases", ())):
                yield from _statements(part.body)


def _binds_otherwise(statement: ast.stmt, name: str) -> bool:
    """Whether the statement binds the name by a loop, `with`, pattern, assignment expression or `global`."""
    if isinstance(statement, _DEFINITIONS):
        return any(isinstance(each, ast.Global) and name in each.names for each in ast.walk(statement))
    parts: list[ast.AST | None] = list(ast.iter_child_nodes(statement))
    if isinstance(statement, ast.Assign | ast.AnnAssign):
        parts = [statement.value]
    while parts:
        match parts.pop():
            case None | ast.stmt():
                continue
            case ast.Name(id=bound, ctx=ast.Store() | ast.Del()) if bound == name:
                return True
            case (
                ast.MatchAs(name=bound)
                | ast.MatchStar(name=bound)
                | ast.MatchMapping(rest=bound)
                | ast.ExceptHandler(name=bound)
            ) if bound == name:
                return True
            case part:
                parts += ast.iter_child_nodes(part)
    return False


def _names_in(statement: ast.Assign | ast.AnnAssign) -> list[str]:
    targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
    return [each.id for target in targets for each in ast.walk(target) if isinstance(each, ast.Name)]


def _bound_by(alias: ast.alias) -> str:
    return alias.asname or alias.name.partition(".")[0]
