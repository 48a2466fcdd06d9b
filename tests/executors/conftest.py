from __future__ import annotations

from pathlib import Path

import pytest

from prefect_tune.blocks import LocalTarget


@pytest.fixture
def target(tmp_path: Path) -> LocalTarget:
    return LocalTarget(path=str(tmp_path / "target"))
