"""Tests; `tests.fakes` is shared."""
