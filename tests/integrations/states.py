"""Saved states as plain values, for bitwise comparison."""

from __future__ import annotations

from typing import Any


def flat(state: Any) -> Any:
    """Return it with every tensor as its type and all its numbers."""
    if isinstance(state, dict):
        return {str(name): flat(each) for name, each in state.items()}
    if isinstance(state, list | tuple):
        return [flat(each) for each in state]
    return (str(state.dtype), state.tolist()) if hasattr(state, "tolist") else state
