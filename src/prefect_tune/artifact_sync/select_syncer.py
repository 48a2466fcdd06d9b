"""The syncer that a configuration asks for: the built-in one, a class named by its import path, or an object."""

from __future__ import annotations

import copy
from importlib import import_module
from typing import TYPE_CHECKING

from prefect_tune.core.errors import (
    InvalidInput,
)

if TYPE_CHECKING:
    from prefect_tune.blocks import StorageTarget, SyncConfig
from prefect_tune.artifact_sync.syncer import Syncer
from prefect_tune.artifact_sync.target_syncer import TargetSyncer


def syncer_for(config: SyncConfig, target: StorageTarget) -> Syncer | None:
    """Return the syncer of artifacts for one attempt, which must close it; None if `config.syncer` is None.

    Raises:
        InvalidInput: `config.syncer` is not a syncer, cannot be imported, or cannot be copied.
    """
    syncer = config.syncer
    if syncer is None:
        return None
    if syncer == "auto":
        return TargetSyncer(target, sync_period=config.sync_period, sync_timeout=config.sync_timeout)
    if isinstance(syncer, str):
        return _named(syncer, config)
    if isinstance(syncer, Syncer):
        return _copied(syncer)
    raise InvalidInput(f"syncer: expected 'auto', 'package.module:Name', a pt.Syncer or None, found {syncer!r}")


def _named(name: str, config: SyncConfig) -> Syncer:
    module, _, attribute = name.partition(":")
    try:
        found = getattr(import_module(module), attribute)
    except (ImportError, AttributeError) as missing:
        raise InvalidInput(f"syncer {name!r}: cannot be imported: {missing}") from missing
    if isinstance(found, Syncer):
        return _copied(found)
    if isinstance(found, type) and issubclass(found, Syncer):
        return _made(found, name, config)
    raise InvalidInput(f"syncer {name!r}: expected a pt.Syncer, or a class of them, found {found!r}")


def _copied(syncer: Syncer) -> Syncer:
    """Return a copy: several attempts may run at once, and each closes its own syncer."""
    try:
        return copy.deepcopy(syncer)
    except Exception as uncopied:
        kind = type(syncer).__name__
        raise InvalidInput(
            f"syncer: each attempt needs its own copy, and this {kind} cannot be copied ({uncopied}). Name the class, "
            f"syncer='package.module:{kind}', create what cannot be copied inside its methods, or define __deepcopy__"
        ) from uncopied


def _made(kind: type[Syncer], name: str, config: SyncConfig) -> Syncer:
    """Create a syncer; the config's periods are passed only to a class that has the constructor of `Syncer`."""
    try:
        made = kind() if kind.__init__ is not Syncer.__init__ else kind(config.sync_period, config.sync_timeout)
    except TypeError as unmade:
        raise InvalidInput(f"syncer {name!r}: cannot be constructed without arguments: {unmade}") from unmade
    return made
