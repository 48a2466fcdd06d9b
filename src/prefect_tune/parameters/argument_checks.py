"""Checks of a flow's arguments, before any work starts. Imported by the command line's help: no Prefect at the top."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import linecache
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from prefect_tune.core.errors import InvalidInput
from prefect_tune.core.experiment.stoppers import StopCriteria, Stopper, as_stopper
from prefect_tune.core.metrics import shown
from prefect_tune.core.search.domains import as_dicts, domains_in, frozen
from prefect_tune.core.search.space_json import distribution_in
from prefect_tune.core.values import digest_of, valid_name
from prefect_tune.parameters.json_specs import stop_from
from prefect_tune.runtime.load_named import import_advice
from prefect_tune.runtime.trainable import require_trainable

if TYPE_CHECKING:
    from prefect.task_runners import TaskRunner


def experiment_name(given: str | None) -> str:
    """Return the experiment's name: as given, or the id of the flow run; a call by a flow or task has its own default.

    Raises:
        InvalidInput: the name cannot be a folder on every target.
    """
    if given is not None:
        return valid_name(given)
    from prefect.runtime import flow_run

    return valid_name(str(flow_run.id))


def storable_config(config: object) -> dict[str, object]:
    """Return the configuration, a mapping, a dataclass or None, as plain JSON.

    Raises:
        InvalidInput: it holds a value that JSON cannot represent.
    """
    plain = plain_json({} if config is None else config, "config")
    if found := distribution_in(plain):
        raise InvalidInput(
            f"config: expected values, found the distribution {shown(found)}: only pt.tune draws, for its `space`"
        )
    if isinstance(plain, dict):
        return plain
    raise InvalidInput(f"config: expected a dict or a dataclass, found {shown(config)}")


def plain_json(value: object, where: str) -> object:
    """Return a value as plain JSON, by the rule of `frozen`.

    Raises:
        InvalidInput: it holds a value that JSON cannot represent, or a distribution.
    """
    plain = frozen(as_dicts(value), where)
    if node := next(domains_in(plain), None):
        raise InvalidInput(
            f"{where}: expected values, found {node!r}: a distribution is drawn for the `space` of pt.tune only"
        )
    return plain


def existing_limits(names: Sequence[str]) -> tuple[str, ...]:
    """Return `names`, checked to be global concurrency limits of Prefect: a missing one would limit nothing.

    Raises:
        InvalidInput: a limit does not exist.
    """
    if names:
        from prefect.client.orchestration import get_client
        from prefect.exceptions import ObjectNotFound

        with get_client(sync_client=True) as client:
            for name in names:
                try:
                    client.read_global_concurrency_limit_by_name(name)
                except ObjectNotFound as missing:
                    raise InvalidInput(
                        f"concurrency_limits: Prefect has no global concurrency limit {name!r}; create it: "
                        f"prefect gcl create {name} --limit 2"
                    ) from missing
    return tuple(names)


def stopper_for(stop: StopCriteria | str) -> Stopper:
    """Return the stopper for `stop`: an object, its JSON, or its name as `package.module:name`.

    Raises:
        InvalidInput: `stop` is none of these.
    """
    return as_stopper(cast("StopCriteria", stop_from(stop)))


def valid_trainable(trainable: object) -> object:
    """Return the trainable, checked as far as possible without importing the user's module.

    Raises:
        InvalidInput: it is neither a subclass of `Trainable` with `step`, nor a function, nor `package.module:Name`.
    """
    if isinstance(trainable, str):
        return _importable(trainable)
    return require_trainable(trainable, trainable)


def import_string(name: str, where: str) -> tuple[str, str]:
    """Split `package.module:Name` into the module and the name in it; import nothing.

    Raises:
        InvalidInput: `name` does not have that form.
    """
    module, _, attribute = name.partition(":")
    if not module or not attribute:
        raise InvalidInput(f"{where} {name!r}: expected 'package.module:Name', as in 'my_project.train:Model'")
    return module, attribute


def name_of(trainable: object) -> Mapping[str, str]:
    """Return what identifies a trainable: its name without its module, which depends on how the code is run."""
    name = trainable.partition(":")[2] if isinstance(trainable, str) else getattr(trainable, "__qualname__", "")
    return {"trainable": name.rpartition(".")[2]} if name else {}


def code_of(trainable: object) -> str:
    """Return a digest of the source of a class or function, or of `package.module:Name`, whose file is not imported.

    Empty if the source is not available. It covers this one definition: a change in code that it calls is not
    detected.
    """
    try:
        source = _source_named(trainable) if isinstance(trainable, str) else _source_of(trainable)
    except (TypeError, OSError, SyntaxError, ValueError, ImportError, SystemError):  # the last: see `trial_process`
        return ""
    return digest_of(source.encode())[:16] if source else ""


def _source_of(trainable: object) -> str:
    try:
        return inspect.getsource(trainable)  # type: ignore[arg-type]  # its TypeError is for the caller
    except (TypeError, OSError):
        if isinstance(trainable, type):
            return _source_in_cell(trainable)
        raise


def _source_in_cell(trainable: type) -> str:
    """Return the source of a class that a notebook's cell defines: `__main__` has no file, but the methods have one."""
    methods = (each for each in vars(trainable).values() if inspect.isfunction(each))
    files = dict.fromkeys(each.__code__.co_filename for each in methods)
    texts = ("".join(linecache.getlines(file)) for file in files)
    return next((found for text in texts if (found := _definition_in(text, trainable.__name__))), "")


def _source_named(name: str) -> str:
    module, _, attribute = name.partition(":")
    spec = importlib.util.find_spec(module)
    if spec is None or not spec.origin:
        return ""
    return _definition_in(Path(spec.origin).read_text(encoding="utf-8"), attribute)


def _definition_in(text: str, name: str) -> str:
    for node in ast.parse(text).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name:
            first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
            return "".join(text.splitlines(keepends=True)[first - 1 : node.end_lineno])
    return ""


def _importable(name: str) -> str:
    module, _ = import_string(name, "trainable")
    missing: str | None = None
    try:
        if importlib.util.find_spec(module) is None:
            missing = module
    except ModuleNotFoundError as error:
        missing = error.name
        if not f"{module}.".startswith(f"{missing}."):  # its package is there, and imports another module
            raise InvalidInput(f"trainable {name!r}: {import_advice(error)}") from error
    except (Exception, SystemExit) as error:  # its package is imported, which may raise anything
        raise InvalidInput(f"trainable {name!r}: {import_advice(error)}") from error
    if missing is not None:
        raise InvalidInput(f"trainable {name!r}: there is no module {missing!r}{_where_to_install()}")
    return name


def _where_to_install() -> str:
    from prefect_tune.blocks.resolve_target import is_in_run_of_deployment

    if is_in_run_of_deployment():
        return (
            "; install its project where the worker runs, or name its folder there: prefect-tune deploy "
            """--job-variable 'env={"PYTHONPATH": "/home/me/project"}'"""
        )
    return "; is its project installed here, or its folder in PYTHONPATH?"


# Refuse searches with several writers of one journal on a target that is safe for one writer only.


def runner_elsewhere() -> TaskRunner[Any] | None:
    """Return the flow's task runner; None if it is a thread pool of this process."""
    from prefect.context import FlowRunContext
    from prefect.task_runners import ThreadPoolTaskRunner

    context = FlowRunContext.get()
    runner = context.task_runner if context is not None else None
    return None if isinstance(runner, ThreadPoolTaskRunner) else runner


def require_one_runner(uri: str, *, exploiting: str = "", elsewhere: str = "") -> None:
    """Refuse a flow in which two processes could write one journal at once; call it before anything is written.

    Args:
        uri: of the target, which has no atomic create-if-absent.
        exploiting: name of a scheduler whose trials clone each other's checkpoints; empty for any other scheduler.
        elsewhere: what runs the trials outside this process, if it is not the flow's task runner.

    Raises:
        InvalidInput: `exploiting` or `elsewhere` is not empty, or the flow's task runner has other processes.
    """
    if not elsewhere and (runner := runner_elsewhere()) is not None:
        elsewhere = f"task runner: {type(runner).__name__}"
    if exploiting:
        why = "its trials clone each other's checkpoints, and write that into each other's journals"
        _refuse(
            uri,
            f"scheduler: {exploiting}",
            why,
            "a scheduler that clones no checkpoints (FIFO, ASHA, Hyperband, MedianStopping)",
        )
    if elsewhere:
        why = "an attempt in another process may be presumed lost, still run, and write beside its successor"
        _refuse(uri, elsewhere, why, "trials='tasks' with a thread pool task runner")


def _refuse(uri: str, asked: str, why: str, instead: str) -> None:
    raise InvalidInput(
        f"{asked}, at {uri}: {why}. Expected a target with atomic create-if-absent, found one without (ONE RUNNER "
        "ONLY), where the second of two writers overwrites the first. Nothing was started: use S3, GCS, Azure or a "
        f"folder (prefect-tune blocks check TARGET), or {instead}"
    )
