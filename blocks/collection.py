"""Prefect loads this module as an entry point of `prefect.collections`, so that the UI shows our blocks.

A server registers blocks in the order of Prefect's registry, and rejects a block that refers to an unregistered type.
So this module imports the credential blocks, which servers and workers import anyway, and moves our blocks to the end.
"""

from __future__ import annotations

from collections.abc import Sequence

from prefect.blocks.core import Block
from prefect.utilities.dispatch import get_registry_for_type

from prefect_tune.blocks.credentials import import_lazy_block_types
from prefect_tune.blocks.sync_config import SyncConfig
from prefect_tune.blocks.targets import TARGET_TYPES

_registry = get_registry_for_type(Block) or {}
_KINDS: Sequence[type[Block]] = (*TARGET_TYPES, SyncConfig)
for _kind in _KINDS:
    import_lazy_block_types(_kind)
    _registry[_kind.get_block_type_slug()] = _registry.pop(_kind.get_block_type_slug())
