from __future__ import annotations

import pickle
from datetime import timedelta
from pathlib import Path

import pytest
from pydantic import SecretStr

from prefect_tune.blocks import LocalTarget, S3Target, SyncConfig
from prefect_tune.core.errors import InvalidInput
from prefect_tune.core.storage.layout import matches_any_pattern


class CopyingSyncer:
    """A user's syncer."""

    def sync_up(self, local_dir: str, remote_dir: str, exclude: list[str] | None = None) -> bool:
        return bool(local_dir and remote_dir and not exclude)

    def sync_down(self, remote_dir: str, local_dir: str, exclude: list[str] | None = None) -> bool:
        return bool(local_dir and remote_dir and not exclude)

    def delete(self, remote_dir: str) -> bool:
        return bool(remote_dir)

    @classmethod
    def validate_upload_dir(cls, upload_dir: str) -> bool:
        if not upload_dir.startswith("shelf://"):
            raise ValueError(f"{upload_dir} is on no shelf")
        return True


def test_the_defaults_are_those_of_ray() -> None:
    config = SyncConfig()
    assert (config.upload_dir, config.syncer, config.commit) == (None, "auto", "sync")
    assert (config.sync_period, config.sync_timeout) == (timedelta(seconds=300), timedelta(seconds=1800))
    assert (config.sync_artifacts, config.sync_on_checkpoint) == (True, True)


def test_an_upload_dir_is_a_block_a_uri_a_path_or_nothing(tmp_path: Path) -> None:
    target = S3Target(bucket="bucket")
    assert SyncConfig().target() is None
    assert SyncConfig(upload_dir=target).target() is target
    assert SyncConfig(upload_dir="s3://bucket").target() == target
    assert SyncConfig(upload_dir=tmp_path).target() == LocalTarget(path=str(tmp_path))


def test_a_syncer_of_the_users_own_is_kept_as_it_is() -> None:
    mine = CopyingSyncer()
    assert SyncConfig(upload_dir="s3://bucket", syncer=mine).syncer is mine


def test_a_syncer_can_be_named_by_an_import_string() -> None:
    config = SyncConfig(upload_dir="s3://bucket", syncer="my_package.syncers:Mine")
    assert SyncConfig(**config.model_dump()) == config


def test_a_syncer_object_says_how_it_could_be_stored() -> None:
    config = SyncConfig(upload_dir="s3://bucket", syncer=CopyingSyncer())
    advice = r"a CopyingSyncer object cannot be stored: pass syncer='package\.module:Name'"
    with pytest.raises(ValueError, match=advice):
        config.model_dump()


def test_it_travels_to_another_process() -> None:
    config = SyncConfig(upload_dir="s3://bucket", artifact_excludes=["*.tmp"], commit="async")
    assert pickle.loads(pickle.dumps(config)) == config


def test_excludes_name_what_trials_keep_to_themselves_too() -> None:
    excludes = SyncConfig(artifact_excludes=["./cache/*", "*.tmp"]).excludes
    assert excludes[:2] == ("./cache/*", "*.tmp")
    assert all(matches_any_pattern(path, excludes) for path in ("cache/a", "deep/a.tmp", "rank_0", "checkpoint_tmp1/a"))
    assert not any(matches_any_pattern(path, excludes) for path in ("mine/cache/a", "plots/rank_0"))


@pytest.mark.parametrize("upload_dir", [None, "s3://bucket", "file:///runs", "/runs", LocalTarget(path="/runs")])
def test_an_upload_dir_that_could_work_is_valid(upload_dir: str | None) -> None:
    assert SyncConfig(upload_dir=upload_dir).validate_upload_dir() is True


def test_an_upload_dir_that_cannot_work_says_why() -> None:
    with pytest.raises(InvalidInput, match="unknown scheme 'gopher'"):
        SyncConfig(upload_dir="gopher://host").validate_upload_dir()


def test_a_syncer_of_the_users_own_is_asked_instead() -> None:
    assert SyncConfig(upload_dir="shelf://third", syncer=CopyingSyncer()).validate_upload_dir() is True
    with pytest.raises(ValueError, match="is on no shelf"):
        SyncConfig(upload_dir="s3://bucket", syncer=CopyingSyncer()).validate_upload_dir()


def test_a_notebook_shows_where_and_when() -> None:
    html = SyncConfig(upload_dir="s3://bucket/<runs>", sync_period_seconds=60)._repr_html_()
    assert "<td>s3://bucket/&lt;runs&gt;</td>" in html
    assert "<td>Sync period</td><td>60 s</td>" in html
    assert "<td>Sync on checkpoint</td><td>True</td>" in html
    assert "syncer" not in html.lower().replace("syncconfig", "")


def test_a_notebook_shows_no_secret() -> None:
    target = S3Target(bucket="bucket", access_key_id="id", secret_access_key="never-shown")
    assert "never-shown" not in SyncConfig(upload_dir=target)._repr_html_()


def test_its_parameters_hold_no_secret_and_make_an_equal_one() -> None:
    config = SyncConfig(upload_dir="s3://bucket/artifacts?region=eu-west-1", commit="async")
    assert SyncConfig.model_validate(config.parameters()) == config
    path = SyncConfig(upload_dir=LocalTarget(path="/artifacts"))
    assert SyncConfig.model_validate(path.parameters()).upload_dir == path.upload_dir.uri
    secret = SyncConfig(upload_dir=S3Target(bucket="bucket", access_key_id="id", secret_access_key=SecretStr("hidden")))
    with pytest.raises(InvalidInput, match="Save the block"):
        secret.parameters()
