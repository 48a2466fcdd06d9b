"""Check before a search that its trainable can be imported, in a process as a trial has; it is not imported here."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import Literal

from prefect_tune.core.checkpoints.cadence import Cadence
from prefect_tune.core.errors import InvalidInput
from prefect_tune.core.experiment.trial_stoppers import Never
from prefect_tune.core.messages.process_messages import Broke, Start, TrialEnded
from prefect_tune.parameters.checks.source_definitions import why_not_defined
from prefect_tune.runtime.load_named import require_loadable
from prefect_tune.runtime.trainable import CALLED_WITH
from prefect_tune.stores.local.scratch import ScratchDirectory
from prefect_tune.supervisor.processes.process_channel import TrialChannel
from prefect_tune.supervisor.processes.process_output import Log, WaitLog
from prefect_tune.supervisor.processes.process_pool import TrialProcessPool
from prefect_tune.supervisor.trial_spec import import_path, pickled_or_path

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
            return "" if _takes(parameters, 1) else "its parameters decide"
        case ast.ClassDef(decorator_list=[], bases=bases, body=body):
            names = dict(_trainables_in(module))
            ours = {names.get(ast.unparse(each), "") for each in bases} - {""}
            methods = {each.name: each for each in body if isinstance(each, ast.FunctionDef)}
            is_trainable = ours and (methods.keys() >= {"step", "save_checkpoint"} or ours != {"Trainable"})
            called = [(each, CALLED_WITH[name]) for name, each in methods.items() if name in CALLED_WITH]
            are_plain = all(not each.decorator_list and _takes(each.args, count) for each, count in called)
            return "" if is_trainable and are_plain else "its bases or methods decide"
        case _:
            return "its value decides"


def _takes(parameters: ast.arguments, count: int) -> bool:
    """Whether a function with these parameters takes this many positional arguments."""
    positional = len(parameters.posonlyargs) + len(parameters.args)
    is_enough = positional - len(parameters.defaults) <= count and None not in parameters.kw_defaults
    return is_enough and (count <= positional or parameters.vararg is not None)


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
            case Broke(message=why):
                raise InvalidInput(why.removeprefix("InvalidInput: "))
            case TrialEnded():
                return
            case _:
                pass
