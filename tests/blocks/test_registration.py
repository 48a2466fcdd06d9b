"""Blocks on a Prefect server: the catalogue in its UI, saved documents, secrets."""

from __future__ import annotations

import ast
import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import prefect
import pytest
from prefect.blocks.core import Block
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import BlockDocumentUpdate
from prefect.testing.standard_test_suites.blocks import BlockStandardTestSuite

from prefect_tune import blocks
from prefect_tune.blocks import (
    AzureTarget,
    FsspecTarget,
    GcsTarget,
    LocalTarget,
    S3Target,
    StorageTarget,
    SyncConfig,
    resolve_target,
    target_reference,
    targets,
)
from prefect_tune.blocks.targets import TARGET_TYPES
from prefect_tune.core.errors import InvalidInput
from tests.blocks.conftest import load, save
from tests.long_cases import long_after

KINDS: list[type[Block]] = [*TARGET_TYPES, SyncConfig]
SECRET = "never-shown-to-anybody"
S3 = S3Target(bucket="bucket", prefix="runs", access_key_id="id", secret_access_key=SECRET)
TARGETS: list[StorageTarget] = [
    LocalTarget(path="/runs"),
    S3,
    GcsTarget(bucket="bucket", service_account_json=json.dumps({"client_email": "me", "private_key": SECRET})),
    AzureTarget(container="container", account_name="account", account_key=SECRET),
    FsspecTarget(location="sftp://me@host/runs", secret_options={"password": SECRET}),
]


def test_every_target_of_the_list_is_exported_and_saved_here() -> None:
    assert {kind.__name__ for kind in TARGET_TYPES} == set(targets.__all__) <= set(blocks.__all__)
    assert [type(target) for target in TARGETS] == [*TARGET_TYPES]


@pytest.mark.parametrize("block", KINDS)
class TestStandard(BlockStandardTestSuite):
    def test_has_a_valid_image(self, block: type[Block]) -> None:
        """Prefect's own test downloads the image; ours are images that Prefect itself uses."""
        shipped = Path(prefect.__file__).parent
        sources = (shipped / "server/collection_blocks_data.json").read_text() + (
            shipped / "filesystems.py"
        ).read_text()
        assert str(block._logo_url) in sources

    @pytest.fixture
    def block(self) -> type[Block]:
        raise NotImplementedError


def fetch(path: str) -> Mapping[str, Any]:
    """Return the API's answer; Prefect's own client retries when a busy server answers 503."""
    with get_client(sync_client=True) as client:
        answer: Mapping[str, Any] = client._client.get(path).json()
        return answer


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@pytest.mark.usefixtures("prefect_server")
def test_a_server_shows_every_block_without_being_told(kind: type[Block]) -> None:
    answer = fetch(f"/block_types/slug/{kind.get_block_type_slug()}")
    assert answer["name"] == kind.get_block_type_name()
    assert answer["logo_url"] == str(kind._logo_url)
    assert answer["documentation_url"] == str(kind._documentation_url)
    assert answer["description"] == kind.get_description()
    assert f'{kind.__name__}.load("BLOCK_NAME")' in answer["code_example"].replace("&quot;", '"')


def test_the_form_in_the_ui_begins_with_what_must_be_filled_in() -> None:
    assert next(iter(S3Target.model_json_schema()["properties"])) == "bucket"


@pytest.mark.parametrize("target", long_after(1, TARGETS), ids=lambda target: type(target).__name__)
@pytest.mark.usefixtures("prefect_server")
def test_a_saved_target_comes_back_with_its_secrets(target: StorageTarget) -> None:
    name = f"saved-{target.get_block_type_slug()}"
    save(target.model_copy(), name)
    loaded = resolve_target(f"{target.get_block_type_slug()}/{name}")
    assert type(loaded) is type(target)
    assert list(loaded.iter_secret_values()) == list(target.iter_secret_values())
    assert loaded.uri == target.uri
    assert target_reference(loaded) == f"{target.get_block_type_slug()}/{name}"


@pytest.mark.usefixtures("prefect_server")
def test_the_api_masks_secrets() -> None:
    save(S3.model_copy(), "masked")
    answer = fetch("/block_types/slug/s3-target/block_documents/name/masked")
    assert SECRET not in json.dumps(answer)
    assert answer["data"]["secret_access_key"] == "********"
    assert answer["data"]["access_key_id"] == "id"


@pytest.mark.long
@pytest.mark.usefixtures("prefect_server")
def test_a_saved_sync_config_keeps_its_target() -> None:
    target = S3.model_copy()
    save(target, "within")
    save(SyncConfig(upload_dir=target, sync_period_seconds=7), "nested")
    loaded = load(SyncConfig, "nested")
    assert isinstance(loaded.upload_dir, S3Target)
    assert list(loaded.upload_dir.iter_secret_values()) == [SECRET]
    assert loaded.sync_period_seconds == 7
    assert target_reference(loaded.upload_dir) == "s3-target/within"


@pytest.mark.usefixtures("prefect_server")
def test_a_slug_is_resolved_within_a_running_event_loop_too() -> None:
    @prefect.flow
    async def resolve() -> str:
        return resolve_target("local-target/looped").uri

    save(LocalTarget(path="/looped"), "looped")
    assert asyncio.run(resolve()) == "file:///looped"


@pytest.mark.usefixtures("prefect_server")
def test_a_slug_that_nobody_saved_is_an_input_error() -> None:
    with pytest.raises(InvalidInput, match=r"'s3-target/nowhere': no such block is saved on the Prefect server"):
        resolve_target("s3-target/nowhere")


@pytest.mark.usefixtures("prefect_server")
def test_a_saved_block_of_another_age_says_what_does_not_fit() -> None:
    save(LocalTarget(path="/x"), "aged")
    update = BlockDocumentUpdate(data={"path": "/x", "folder": "/x"}, merge_existing_data=False)
    with get_client(sync_client=True) as client:
        client.update_block_document(client.read_block_document_by_name("aged", "local-target").id, update)
    with pytest.raises(InvalidInput, match=r"the saved block is not valid.*no field 'folder'"):
        resolve_target("local-target/aged")


@pytest.mark.long
def test_the_collection_that_prefect_loads_registers_the_blocks_of_a_target_before_it(tmp_path: Path) -> None:
    (entry,) = entry_points(group="prefect.collections", name="prefect_tune")
    lines = [f"import prefect_tune.blocks, {entry.value}", "print(*get_registry_for_type(Block))"]
    order = run_with_fake_aws(tmp_path, *lines).split()
    expected = ["aws-credentials", "minio-credentials", "s3-target", "sync-config"]
    assert [slug for slug in order if slug in expected] == expected


_FAKE_AWS = """
from prefect.blocks.core import Block
class AwsCredentials(Block): _block_type_slug = "aws-credentials"
class MinIOCredentials(Block): _block_type_slug = "minio-credentials"
"""


def run_with_fake_aws(folder: Path, *lines: str) -> str:
    """Run the lines in a process with a fake prefect-aws; return its output."""
    (folder / "prefect_aws.py").write_text(_FAKE_AWS)
    preamble = [
        "import sys",
        f"sys.path.insert(0, {str(folder)!r})",
        "from prefect.blocks.core import Block",
        "from prefect.utilities.dispatch import get_registry_for_type",
    ]
    command = [sys.executable, "-c", "\n".join([*preamble, *lines])]
    environment = {**os.environ, "PYTHONWARNINGS": "ignore"}
    process = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr
    return process.stdout


_CLIENTS = (
    *("adlfs", "aiobotocore", "boto3", "botocore", "gcsfs", "obstore", "paramiko", "prefect_aws", "prefect_azure"),
    *("prefect_gcp", "pyarrow", "s3fs"),
)


@pytest.mark.long
@pytest.mark.parametrize(
    ("line", "imported"),
    [
        ("import prefect_tune.blocks", []),
        ("import prefect_tune as pt; pt.tune; pt.durable_trainable; pt.resume", []),
        ("import prefect_tune as pt; repr(pt.S3Target(bucket='runs'))", []),
        ("from prefect_tune import S3Target as S3; S3(bucket='runs', credentials={})", ["prefect_aws"]),
        ("from prefect_tune import S3Target as S3; S3.model_json_schema()", ["prefect_aws"]),
    ],
)
def test_the_packages_of_credentials_are_imported_for_a_block_or_a_form_only(
    line: str, imported: list[str], tmp_path: Path
) -> None:
    output = run_with_fake_aws(tmp_path, line, f"print([name for name in {_CLIENTS} if name in sys.modules])")
    assert ast.literal_eval(output) == imported


@pytest.mark.long
def test_a_form_refers_to_the_blocks_of_its_credentials(tmp_path: Path) -> None:
    imports = "import json; from prefect_tune.blocks import S3Target, SyncConfig"
    dump = "print(json.dumps([SyncConfig.model_json_schema(), S3Target.model_json_schema()]))"
    sync, target = json.loads(run_with_fake_aws(tmp_path, imports, dump))
    references = [reference["block_type_slug"] for reference in target["block_schema_references"]["credentials"]]
    assert references == ["aws-credentials", "minio-credentials"]
    assert [kind.get("$ref", "null") for kind in target["properties"]["credentials"]["anyOf"]] == [
        "#/definitions/AwsCredentials",
        "#/definitions/MinIOCredentials",
        "null",
    ]
    assert {"AwsCredentials", "MinIOCredentials"} <= target["definitions"].keys() & sync["definitions"].keys()
