"""The status of trials in Arrow tables, and in a trial's own journal."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import pyarrow.parquet as pq

from prefect_tune.arrow_tables import COLUMNS_VERSIONS, trials_as_arrow
from prefect_tune.blocks import LocalTarget
from prefect_tune.core.experiment.trial_status import Status
from prefect_tune.tasks.publish_results import publish_results
from tests.fakes.searches.journal_builder import all_statuses


def test_the_column_has_the_word_alone_and_the_step_is_in_a_column_of_its_own() -> None:
    rows = trials_as_arrow(all_statuses().state).to_pylist()
    assert [row["status"] for row in rows] == [row["trial"] for row in rows] == [str(each) for each in Status]
    assert [row["step"] for row in rows] == [3] * 6 + [0]


def test_a_file_says_which_words_it_has_and_reports_have_the_columns_that_they_had(tmp_path: Path) -> None:
    target = LocalTarget(path=str(tmp_path))
    paths = publish_results.fn(target, all_statuses().state)
    versions: Mapping[Literal["trials", "reports"], str] = {"trials": "2", "reports": "1"}
    for rows, version in versions.items():
        about = pq.read_schema(tmp_path / paths[rows]).metadata
        assert about[b"prefect-tune/version"].decode() == COLUMNS_VERSIONS[rows] == version
