from __future__ import annotations

from pathlib import Path

import pytest

from prefect_tune.stores.posix import PosixStore, make_root
from tests.stores.contract import StoreContract


class TestPosixStore(StoreContract):
    @pytest.fixture
    def store(self, tmp_path: Path) -> PosixStore:
        make_root(tmp_path / "new" / "root")
        return PosixStore(tmp_path / "new" / "root")
