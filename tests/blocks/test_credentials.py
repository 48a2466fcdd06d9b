"""Credential blocks of other packages (extras `aws`, `gcp`, `azure`)."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from prefect_tune.blocks import AzureTarget, GcsTarget, S3Target, SyncConfig
from prefect_tune.core.errors import InvalidInput
from tests.blocks.conftest import KEYS, SHORT, load, save
from tests.fakes.servers.canned_http import canned_server, s3_error
from tests.fakes.servers.gcs_server import gcs_server, service_account

pytestmark = pytest.mark.integrations


class TestAws:
    @pytest.fixture
    def aws(self) -> Any:
        return import_module("prefect_aws")

    def test_keys_region_and_endpoint_come_from_the_block(self, aws: Any) -> None:
        with canned_server(404, s3_error("NoSuchBucket", "")) as server:
            block = aws.AwsCredentials(
                aws_access_key_id=KEYS["access_key_id"],
                aws_secret_access_key=KEYS["secret_access_key"],
                region_name="eu-west-1",
                aws_client_parameters={"endpoint_url": server.url},
            )
            result = S3Target(bucket="bucket", credentials=block, allow_http=True).check(timeout=SHORT)
        assert "no such bucket" in result.message
        assert f"Credential={KEYS['access_key_id']}/" in server.request_headers[0]["authorization"]
        assert "/eu-west-1/s3/" in server.request_headers[0]["authorization"]

    def test_a_minio_block_works_against_a_real_server(self, aws: Any, moto: str) -> None:
        block = aws.MinIOCredentials(
            minio_root_user=KEYS["access_key_id"],
            minio_root_password=KEYS["secret_access_key"],
            aws_client_parameters={"endpoint_url": moto},
        )
        assert S3Target(bucket="bucket", prefix="minio", credentials=block, allow_http=True).check().ok

    def test_a_block_that_names_a_profile_is_asked_for_its_keys(self, aws: Any, tmp_path: Path) -> None:
        (tmp_path / ".aws").mkdir()
        (tmp_path / ".aws" / "credentials").write_text(
            "[team]\naws_access_key_id=of-the-team\naws_secret_access_key=secret-of-the-team\n"
        )
        with canned_server(404, s3_error("NoSuchBucket", "")) as server:
            block = aws.AwsCredentials(profile_name="team", region_name="eu-west-1")
            S3Target(bucket="bucket", credentials=block, endpoint_url=server.url, allow_http=True).check(timeout=SHORT)
        assert "Credential=of-the-team/" in server.request_headers[0]["authorization"]

    def test_keys_beside_a_block_are_refused(self, aws: Any) -> None:
        with pytest.raises(InvalidInput, match="access_key_id and credentials contradict each other"):
            S3Target(bucket="bucket", credentials=aws.AwsCredentials(), **KEYS)

    @pytest.mark.usefixtures("prefect_server")
    def test_a_saved_target_refers_to_its_saved_credentials(self, aws: Any) -> None:
        block = aws.AwsCredentials(aws_access_key_id="id", aws_secret_access_key="secret-of-mine")
        save(block, "aws-of-mine")
        save(S3Target(bucket="bucket", credentials=block), "with-block")
        loaded = load(S3Target, "with-block")
        assert loaded.credentials.aws_secret_access_key.get_secret_value() == "secret-of-mine"
        assert loaded.credentials._block_document_name == "aws-of-mine"
        save(SyncConfig(upload_dir=loaded), "with-both")
        config = load(SyncConfig, "with-both")
        assert config.upload_dir.credentials.aws_secret_access_key.get_secret_value() == "secret-of-mine"


class TestGcp:
    @pytest.fixture
    def gcp(self) -> Any:
        return import_module("prefect_gcp")

    @pytest.mark.parametrize("source", ["info", "file"])
    def test_the_service_account_comes_from_the_block(self, gcp: Any, source: str, tmp_path: Path) -> None:
        key, public_key = service_account()
        (tmp_path / "key.json").write_text(key)
        account: Any = json.loads(key) if source == "info" else tmp_path / "key.json"
        with gcs_server("bucket", public_key=public_key) as server:
            block = gcp.GcpCredentials(**{f"service_account_{source}": account})
            target = GcsTarget(bucket="bucket", credentials=block, endpoint_url=server.url, allow_http=True)
            assert target.check().ok


class TestAzure:
    @pytest.fixture
    def azure(self) -> Any:
        return import_module("prefect_azure")

    def test_the_connection_string_comes_from_the_block(self, azure: Any) -> None:
        with canned_server(404, s3_error("ContainerNotFound", ""), {"x-ms-error-code": "ContainerNotFound"}) as server:
            text = f"AccountName=acc;AccountKey=a2V5a2V5;BlobEndpoint={server.url}/acc"
            block = azure.AzureBlobStorageCredentials(connection_string=text)
            result = AzureTarget(container="container", credentials=block, allow_http=True).check(timeout=SHORT)
        assert "no such bucket or container" in result.message
        assert server.request_headers[0]["authorization"].startswith("SharedKey acc:")

    def test_the_account_comes_from_the_blocks_address(self, azure: Any) -> None:
        block = azure.AzureBlobStorageCredentials(account_url="https://acc.blob.core.windows.net")
        target = AzureTarget(container="container", prefix="runs", credentials=block)
        assert target.uri == "abfss://container@acc.dfs.core.windows.net/runs"
