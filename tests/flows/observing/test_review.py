"""Behaviour that only a whole flow shows: how the end of an attempt reaches the journal, the budget and the UI."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path

import pytest

import prefect_tune as pt
from prefect_tune.core.errors import TrialFailed
from prefect_tune.core.experiment.failure_policy import FailurePolicy
from prefect_tune.core.experiment.trial_transitions import Status
from tests.flows.interruptions.trouble import Trouble


def _shown_in_the_ui(experiment: str) -> str:
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterKey

    only = ArtifactFilter(key=ArtifactFilterKey(any_=[f"report-{experiment}"]))
    with get_client(sync_client=True) as client:
        newest = max(client.read_artifacts(artifact_filter=only, limit=200), key=lambda each: str(each.created))
    return next(line for line in str(newest.data).splitlines() if line.startswith("**"))


@pytest.mark.long
@pytest.mark.usefixtures("prefect_server")
def test_a_directory_that_cannot_be_saved_spends_the_trainables_budget_and_the_ui_shows_the_trial_errored(
    tmp_path: Path,
) -> None:
    def links_to_nothing(_config: Mapping[str, object]) -> None:
        directory = Path(tempfile.mkdtemp())
        (directory / "latest").symlink_to("what-is-not-there")
        pt.report({"loss": 1.0}, checkpoint=pt.Checkpoint.from_directory(directory))

    trouble = Trouble(tmp_path)
    trouble.trainable = links_to_nothing
    with pytest.raises(TrialFailed, match=r"max_failures=1.*a link to"):
        trouble.run(failures=FailurePolicy(max_failures=1))
    found = trouble.trial
    assert (found.status, found.attempt, found.user_failures) == (Status.ERRORED, 2, 2)
    assert found.machine_failures == 0
    assert "errored" in _shown_in_the_ui("troubled")
