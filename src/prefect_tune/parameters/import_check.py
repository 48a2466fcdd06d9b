"""Check by the source alone that a name can be imported, so that no module is imported before it is trusted.

`undefined_name_reason` returns why trusted packages do not define a name that a journal contains. Before a search,
`require_importable` checks the trainable this way, or imports it in a temporary process if the source proves nothing.
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
from prefect_tune.attempt.trial_spec import get_absolute_sys_path, serialize_for_trial
from prefect_tune.core.display_text import first_line
from prefect_tune.core.errors import InvalidInput
from prefect_tune.core.experiment.retention import Cadence
from prefect_tune.core.experiment.stoppers import Never
from prefect_tune.core.journal_events import AttemptEnded
from prefect_tune.core.messages.process_messages import Start, TrainingEnded
from prefect_tune.core.reasons import Reason
from prefect_tune.runtime.load_named import require_loadable
from prefect_tune.runtime.trainable import METHOD_ARGUMENT_COUNTS
from prefect_tune.stores.local.scratch import ScratchDirectory

_POLL_INTERVAL = timedelta(seconds=0.5)


def require_importable(
    trainable: object, isolation: Literal["process", "thread"], log: Log, cadence: Cadence | None = None
) -> None:
    """Require that the trials can import `trainable`, if `trainable` is a name; nothing is written.

    A name is accepted without an import if the source of its package defines it as a function, or as a subclass of
    `pt.Trainable` with `step` and `save_checkpoint`. Any other name is imported in a temporary process.

    Args:
        trainable: the trainable of a search.
        isolation: whether the trials run in processes or in threads.
        log: receives the output of the import.
        cadence: when the trials save; None to skip the check that the trainable can save.

    Raises:
        InvalidInput: the module cannot be imported or lacks the name; or the object is not a trainable, or cannot save
            although `cadence` requires it.
    """
    if not isinstance(trainable, str):
        return
    package = trainable.partition(":")[0].partition(".")[0]
    if not undefined_name_reason(trainable, [package], is_accepted=_is_trainable_definition):
        return
    config = {"trainable": trainable, "cadence": None if cadence is None else cadence.model_dump(mode="json")}
    if isolation == "thread":
        require_loadable(config)
        return
    with ScratchDirectory("import") as scratch, TrialProcessPool(slots=0) as pool:
        directory = str(scratch / "import")
        start = Start(
            experiment="import",
            trial="import",
            attempt=1,
            trainable=f"{require_loadable.__module__}:{require_loadable.__name__}",
            stopper=serialize_for_trial(Never()),
            import_path=get_absolute_sys_path(),
            config=config,
            directory=directory,
            staging=directory,
            cadence=Cadence(at_end=False),
        )
        wait_log = WaitLog(log, f"importing trainable {trainable!r}")
        with pool.open_process(start, log) as channel:
            while True:
                wait_log.log_if_due()
                try:
                    message = channel.receive(_POLL_INTERVAL)
                except EOFError:  # the process was killed; the trials will report the reason
                    return
                match message:
                    case TrainingEnded(raised=True, outcome=AttemptEnded(reason=Reason(arguments=arguments) as reason)):
                        is_invalid = arguments.get("type") == InvalidInput.__name__
                        raise InvalidInput(str(arguments["text"]) if is_invalid else first_line(reason))
                    case TrainingEnded():
                        return
                    case _:
                        pass


def _is_trainable_definition(definition: ast.stmt, module: ast.Module) -> bool:
    """Return whether the source proves that the definition is a trainable; if False, it may still be a trainable."""
    match definition:
        case ast.FunctionDef(decorator_list=[]):
            return _is_plain_function(definition, 1)
        case ast.ClassDef(decorator_list=[], bases=bases, body=body):
            imported = dict(_iter_imported_trainables(module))
            base_names = {imported[name] for name in map(ast.unparse, bases) if name in imported}
            methods = {statement.name: statement for statement in body if isinstance(statement, ast.FunctionDef)}
            has_async_method = any(isinstance(statement, ast.AsyncFunctionDef) for statement in body)
            has_required_methods = base_names != {"Trainable"} or methods.keys() >= {"step", "save_checkpoint"}
            counts = METHOD_ARGUMENT_COUNTS
            called = [(method, counts[name]) for name, method in methods.items() if name in counts]
            are_callable = all(not m.decorator_list and _is_plain_function(m, count) for m, count in called)
            return bool(base_names) and has_required_methods and are_callable and not has_async_method
        case _:
            return False


def _is_plain_function(definition: ast.FunctionDef, count: int) -> bool:
    """Return whether a function accepts `count` positional arguments, and neither it nor a nested function yields."""
    parameters = definition.args
    positional = len(parameters.posonlyargs) + len(parameters.args)
    is_count_accepted = positional - len(parameters.defaults) <= count and None not in parameters.kw_defaults
    has_no_yield = not any(isinstance(node, ast.Yield | ast.YieldFrom) for node in ast.walk(definition))
    return has_no_yield and is_count_accepted and (count <= positional or parameters.vararg is not None)


def _iter_imported_trainables(module: ast.Module) -> Iterator[tuple[str, str]]:
    """For each of this package's trainable classes that a module imports, yield the local name and the real name."""
    for statement in module.body:
        match statement:
            case ast.Import(names=names):
                module_names = (alias.asname or alias.name for alias in names if alias.name == "prefect_tune")
                yield from ((f"{alias}.Trainable", "Trainable") for alias in module_names)
            case ast.ImportFrom(module=str(source), names=names, level=0) if source.partition(".")[0] == "prefect_tune":
                yield from ((name.asname or name.name, name.name) for name in names if name.name.endswith("Trainable"))
            case _:
                pass


# Check that a trusted package defines a name, by parsing the source of the module, without importing it.

_MODULE = r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*"
_CODE_NAME = re.compile(rf"({_MODULE}):({_MODULE})", re.ASCII)
_DEFINITION_TYPES = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
_VALUE_EXPRESSIONS = ast.Call | ast.Lambda | ast.BinOp
"""Expressions that create a new object; a name or an attribute, in contrast, may refer to another module's object."""
_MAX_IMPORTS = 20

DefinitionCheck: TypeAlias = Callable[[ast.stmt, ast.Module], bool]
"""Returns whether a definition in a module is accepted."""


def is_module_name(name: object) -> bool:
    """Return whether `name` can be the name of a package or module."""
    return isinstance(name, str) and re.fullmatch(_MODULE, name, re.ASCII) is not None


def undefined_name_reason(name: str, packages: Sequence[str], is_accepted: DefinitionCheck = lambda *_: True) -> str:
    """Return why `packages` do not define `package.module:Name` as a class, function or object; empty if they do.

    The lookup follows imports through modules of `packages`. To find a module's source, it imports the parent packages,
    but not the module. Each definition of the name must also pass `is_accepted`.
    """
    parts = _CODE_NAME.fullmatch(name)
    if parts is None:
        return "expected 'package.module:Name'"
    return _DefinitionLookup(packages, is_accepted).undefined_reason(parts[1], parts[2].split("."))


class _DefinitionLookup:
    """Looks up names in the sources of trusted packages; `depth` is the number of imports that the lookup followed."""

    def __init__(self, packages: Sequence[str], is_accepted: DefinitionCheck) -> None:
        self._packages = packages
        self._is_accepted = is_accepted

    def undefined_reason(self, module: str, path: Sequence[str], depth: int = 0) -> str:
        """Return why `module` does not define the name at `path`; empty if it does."""
        if not self._is_in_trusted_package(module):
            return f"{module} is not in a trusted package"
        if depth == _MAX_IMPORTS:
            return f"{module} imports the name in a cycle, or through more than {_MAX_IMPORTS} modules"
        try:
            spec = importlib.util.find_spec(module)
            origin = spec.origin if spec is not None and spec.has_location else None
            tree = None if origin is None else ast.parse(Path(origin).read_bytes())
        except (Exception, SystemExit) as error:  # noqa: BLE001 - the import of parent packages may raise anything
            return f"the source of {module} cannot be read: {error}"
        if spec is None:
            return f"there is no module {module}; is its project installed here, or its folder in PYTHONPATH?"
        if tree is None:
            return f"{module} has no source"
        return self._undefined_reason_in_body(tree.body, path, spec, tree, depth)

    def _is_in_trusted_package(self, module: str) -> bool:
        return any(module == package or module.startswith(f"{package}.") for package in self._packages)

    def _undefined_reason_in_body(
        self, body: Sequence[ast.stmt], path: Sequence[str], spec: ModuleSpec, tree: ast.Module, depth: int
    ) -> str:
        """Return why `body`, of a module or class, does not define the name at `path`; empty if it does.

        Every statement that binds the name must define it or import a definition, since any of them may run last.
        """
        name, *rest = path
        aliases = f"{spec.name} does not define {name!r}, but aliases another object"
        is_defined = False
        for statement in _walk_body(body):
            if _has_other_binding(statement, name):
                return aliases
            match statement:
                case ast.ClassDef(name=bound, body=inner) if bound == name and rest:
                    reason = self._undefined_reason_in_body(inner, rest, spec, tree, depth)
                case ast.FunctionDef(name=bound) | ast.AsyncFunctionDef(name=bound) if bound == name and rest:
                    reason = f"{name} in {spec.name} is a function"
                case ast.ClassDef(name=bound) | ast.FunctionDef(name=bound) | ast.AsyncFunctionDef(name=bound) if (
                    bound == name
                ):
                    reason = "" if self._is_accepted(statement, tree) else "not accepted"
                case ast.Assign() | ast.AnnAssign() if name in _list_assigned_names(statement):
                    is_value = isinstance(statement.value, _VALUE_EXPRESSIONS) and not rest
                    reason = aliases if not is_value else "" if self._is_accepted(statement, tree) else "not accepted"
                case ast.Import(names=names) if any(_get_local_name(alias) == name for alias in names):
                    reason = f"{spec.name} does not define {name!r}: it imports a module under this name"
                case ast.ImportFrom(names=[ast.alias(name="*")]):
                    source, reason = self._resolve_import(statement, path, spec, depth)
                    if reason and is_defined and not self._is_in_trusted_package(source):
                        return f"{spec.name} may replace {name!r} by `import *`: {reason}"
                    is_defined = is_defined or not reason
                    continue
                case ast.ImportFrom(names=names) if origins := [a.name for a in names if _get_local_name(a) == name]:
                    _, reason = self._resolve_import(statement, [origins[-1], *rest], spec, depth)
                case _:
                    continue
            if reason:
                return reason
            is_defined = True
        return "" if is_defined else f"{spec.name} does not define {name!r}"

    def _resolve_import(
        self, statement: ast.ImportFrom, path: Sequence[str], spec: ModuleSpec, depth: int
    ) -> tuple[str, str]:
        """Return the module from which `statement` imports ("" if none), and why it lacks `path` ("" if it has it)."""
        package = spec.name if spec.submodule_search_locations is not None else spec.parent
        try:
            module = importlib.util.resolve_name(f"{'.' * statement.level}{statement.module or ''}", package)
        except ImportError as error:
            return "", f"{spec.name}: {error}"
        return module, self.undefined_reason(module, path, depth + 1)


def _walk_body(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield all statements that may bind a name of the module, including those in blocks such as `if` and `try`."""
    for statement in body:
        yield statement
        if not isinstance(statement, _DEFINITION_TYPES):
            yield from _walk_body([node for node in ast.iter_child_nodes(statement) if isinstance(node, ast.stmt)])
            for branch in (*getattr(statement, "handlers", ()), *getattr(statement, "cases", ())):
                yield from _walk_body(branch.body)


def _has_other_binding(statement: ast.stmt, name: str) -> bool:
    """Return whether a statement binds the name otherwise: by a loop, `with`, a pattern, `:=`, `global` or the like."""
    if isinstance(statement, _DEFINITION_TYPES):
        return any(isinstance(node, ast.Global) and name in node.names for node in ast.walk(statement))
    nodes: list[ast.AST | None] = list(ast.iter_child_nodes(statement))
    if isinstance(statement, ast.Assign | ast.AnnAssign):
        nodes = [statement.value]
    while nodes:
        match nodes.pop():
            case None | ast.stmt():
                continue
            case ast.Name(id=bound_name, ctx=ast.Store() | ast.Del()) if bound_name == name:
                return True
            case (
                ast.MatchAs(name=bound_name)
                | ast.MatchStar(name=bound_name)
                | ast.MatchMapping(rest=bound_name)
                | ast.ExceptHandler(name=bound_name)
            ) if bound_name == name:
                return True
            case node:
                nodes += ast.iter_child_nodes(node)
    return False


def _list_assigned_names(statement: ast.Assign | ast.AnnAssign) -> list[str]:
    targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
    return [node.id for target in targets for node in ast.walk(target) if isinstance(node, ast.Name)]


def _get_local_name(alias: ast.alias) -> str:
    return alias.asname or alias.name.partition(".")[0]
