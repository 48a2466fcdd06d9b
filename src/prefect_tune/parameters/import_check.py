"""Check before a search that its trainable can be imported, in a process as a trial has; it is not imported here."""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Literal, TypeAlias

from prefect_tune.attempt.processes.process_channel import TrialChannel
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

_CHECK = f"{require_loadable.__module__}:{require_loadable.__name__}"
_PATIENCE = timedelta(seconds=0.5)


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
    if not isinstance(trainable, str) or not why_not_defined(trainable, [_package(trainable)], _why_unsure):
        return
    if isolation == "thread":
        require_loadable(_about(trainable, cadence))
        return
    with ScratchDirectory("import") as scratch, TrialProcessPool(slots=0) as pool:
        folder = str(scratch / "import")
        with pool.process(_start(_about(trainable, cadence), folder), log) as channel:
            _raise_what_it_says(channel, WaitLog(log, f"importing trainable {trainable!r}"))


def _about(trainable: str, cadence: Cadence | None) -> Mapping[str, object]:
    return {"trainable": trainable, "cadence": None if cadence is None else cadence.model_dump(mode="json")}


def _package(trainable: str) -> str:
    return trainable.partition(":")[0].partition(".")[0]


def _why_unsure(definition: ast.stmt, module: ast.Module) -> str:
    """Return why only the import can say whether this is a trainable; empty if its source says that it is one."""
    match definition:
        case ast.FunctionDef(decorator_list=[], args=parameters):
            return "" if _takes(parameters, 1) and not _yields(definition) else "its parameters or a `yield` decide"
        case ast.ClassDef(decorator_list=[], bases=bases, body=body):
            names = dict(_trainables_in(module))
            ours = {names.get(ast.unparse(each), "") for each in bases} - {""}
            methods = {each.name: each for each in body if isinstance(each, ast.FunctionDef)}
            is_trainable = ours and (methods.keys() >= {"step", "save_checkpoint"} or ours != {"Trainable"})
            called = [(each, CALLED_WITH[name]) for name, each in methods.items() if name in CALLED_WITH]
            are_plain = all(
                not each.decorator_list and _takes(each.args, count) and not _yields(each) for each, count in called
            ) and not any(isinstance(each, ast.AsyncFunctionDef) for each in body)
            return "" if is_trainable and are_plain else "its bases or methods decide"
        case _:
            return "its value decides"


def _takes(parameters: ast.arguments, count: int) -> bool:
    """Whether a function with these parameters takes this many positional arguments."""
    positional = len(parameters.posonlyargs) + len(parameters.args)
    is_enough = positional - len(parameters.defaults) <= count and None not in parameters.kw_defaults
    return is_enough and (count <= positional or parameters.vararg is not None)


def _yields(definition: ast.FunctionDef) -> bool:
    """Whether there is a `yield` in it, maybe in a function that it defines."""
    return any(isinstance(node, ast.Yield | ast.YieldFrom) for node in ast.walk(definition))


def _trainables_in(module: ast.Module) -> Iterator[tuple[str, str]]:
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


def _start(config: Mapping[str, object], folder: str) -> Start:
    return Start(
        experiment="import",
        trial="import",
        attempt=1,
        trainable=_CHECK,
        stopper=pickled_or_path(Never()),
        import_path=import_path(),
        config=config,
        directory=folder,
        staging=folder,
        temporary=folder,
        restored=None,
        from_step=0,
        trained_seconds=0.0,
        curve=(),
        cadence=Cadence(at_end=False),
        overlap=False,
    )


def _raise_what_it_says(channel: TrialChannel, waits: WaitLog) -> None:
    """Wait for the end of the check; if the process is killed, its trials decide."""
    while True:
        waits.note()
        try:
            message = channel.receive(_PATIENCE)
        except EOFError:
            return
        match message:
            case TrialEnded(raised=True, outcome=AttemptEnded(reason=Reason(arguments=arguments) as reason)):
                is_invalid = arguments.get("type") == InvalidInput.__name__
                raise InvalidInput(str(arguments["text"]) if is_invalid else first_line(reason))
            case TrialEnded():
                return
            case _:
                pass


# Check that a trusted package defines a name, by parsing its source instead of importing the module.

_MODULE = r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*"
_CODE_NAME = re.compile(rf"({_MODULE}):({_MODULE})", re.ASCII)
_DEFINITIONS = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
_MADE = ast.Call | ast.Lambda | ast.BinOp
"""Expressions whose value the module itself creates; a name or an attribute may alias an object of another module."""
_MOST_IMPORTS = 20

DefinitionCheck: TypeAlias = Callable[[ast.stmt, ast.Module], str]
"""Returns why a definition, which is in this module, is not accepted; empty if it is."""


def is_module_name(name: object) -> bool:
    """Return whether `name` can be the name of a package or module."""
    return isinstance(name, str) and re.fullmatch(_MODULE, name, re.ASCII) is not None


def why_not_defined(name: str, packages: Sequence[str], why_not: DefinitionCheck = lambda *_: "") -> str:
    """Return why `package.module:Name` is not a class, function or object that `packages` define; empty if it is.

    Imported names are followed through modules of `packages`. Finding a module's source imports its parent
    packages, and not the module itself.

    Args:
        name: the name.
        packages: the packages or modules that may define it.
        why_not: a further check, which each definition of the name has to pass.
    """
    parts = _CODE_NAME.fullmatch(name)
    if parts is None:
        return "expected 'package.module:Name'"
    return _why_not(parts[1], parts[2].split("."), _Limits(packages, why_not, _MOST_IMPORTS))


@dataclass(frozen=True, slots=True)
class _Limits:
    """What a definition may be."""

    packages: Sequence[str]
    why_not: DefinitionCheck
    imports_left: int


def _why_not(module: str, path: Sequence[str], limits: _Limits) -> str:
    if not _is_in(module, limits.packages):
        return f"{module} is not in a trusted package"
    if not limits.imports_left:
        return f"{module} imports it in a circle, or through more than {_MOST_IMPORTS} modules"
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
    return _Source(spec, tree, limits).why_not(tree.body, path)


def _is_in(module: str, packages: Sequence[str]) -> bool:
    return any(module == each or module.startswith(f"{each}.") for each in packages)


class _Source:
    """The parsed source of one module, and the packages that it may import names from."""

    def __init__(self, spec: ModuleSpec, tree: ast.Module, limits: _Limits) -> None:
        self._module = spec.name
        self._package = spec.name if spec.submodule_search_locations is not None else spec.parent
        self._tree = tree
        self._limits = limits

    def why_not(self, body: Sequence[ast.stmt], path: Sequence[str]) -> str:
        """Return why `body` does not define the name at `path`; empty if it does.

        Every statement that binds the name has to define it: only running them would tell which one comes last.
        """
        name, *rest = path
        is_defined = False
        for each in _statements(body):
            if isinstance(each, ast.ImportFrom) and each.names[0].name == "*":
                why = self._why_not_imported(each, path)
                if why and is_defined and not self._is_trusted(each):
                    return f"{self._module} may replace {name!r} by `import *`: {why}"
                is_defined = is_defined or not why
            elif (answer := self._why_not_by(each, name, rest)) is not None:
                if answer:
                    return answer
                is_defined = True
        return "" if is_defined else f"{self._module} does not define {name!r}"

    def _why_not_by(self, statement: ast.stmt, name: str, rest: Sequence[str]) -> str | None:
        """Return None where the statement does not bind `name`."""
        if _binds_otherwise(statement, name):
            return f"{self._module} does not define {name!r}, but aliases another object"
        match statement:
            case ast.ClassDef(name=bound, body=body) if bound == name and rest:
                return self.why_not(body, rest)
            case ast.FunctionDef(name=bound) | ast.AsyncFunctionDef(name=bound) if bound == name and rest:
                return f"{name} in {self._module} is a function"
            case ast.ClassDef(name=bound) | ast.FunctionDef(name=bound) | ast.AsyncFunctionDef(name=bound) if (
                bound == name
            ):
                return self._limits.why_not(statement, self._tree)
            case ast.Assign() | ast.AnnAssign() if name in _names_in(statement):
                is_made = isinstance(statement.value, _MADE) and not rest
                if is_made:
                    return self._limits.why_not(statement, self._tree)
                return f"{self._module} does not define {name!r}, but aliases another object"
            case ast.Import(names=names) if any(_bound_by(each) == name for each in names):
                return f"{self._module} does not define {name!r}: it imports a module under this name"
            case ast.ImportFrom(names=names):
                origins = [each.name for each in names if _bound_by(each) == name]
                return self._why_not_imported(statement, [origins[-1], *rest]) if origins else None
            case _:
                return None

    def _why_not_imported(self, statement: ast.ImportFrom, path: Sequence[str]) -> str:
        try:
            module = self._imported_from(statement)
        except ImportError as error:
            return f"{self._module}: {error}"
        return _why_not(module, path, replace(self._limits, imports_left=self._limits.imports_left - 1))

    def _is_trusted(self, statement: ast.ImportFrom) -> bool:
        try:
            return _is_in(self._imported_from(statement), self._limits.packages)
        except ImportError:
            return False

    def _imported_from(self, statement: ast.ImportFrom) -> str:
        return importlib.util.resolve_name(f"{'.' * statement.level}{statement.module or ''}", self._package)


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
