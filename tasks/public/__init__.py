"""The tasks of `pt`: plain arguments, resolved here, and then the functions that the engine's own tasks run."""

from __future__ import annotations
