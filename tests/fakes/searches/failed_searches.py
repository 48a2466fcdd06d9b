"""Searches in which every trial errors."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import prefect_tune as pt


def results_of_failed(search: Callable[[], object]) -> pt.Results:
    """Call `search`, whose trials must all error, and return its results."""
    with pytest.raises(pt.SearchFailed) as failed:
        search()
    results = failed.value.results
    assert isinstance(results, pt.Results)
    return results
