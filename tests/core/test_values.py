"""Names, digests, JSON, and sealed documents."""

from __future__ import annotations

import copy
import math
import pickle
import re

import pytest
from pydantic import ValidationError

from prefect_tune.core.display_text import format_amount, format_size
from prefect_tune.core.errors import CheckpointCorrupt, InvalidInput
from prefect_tune.core.journal_events import Owner
from prefect_tune.core.storage.layout import (
    NON_ARTIFACT_PATTERNS,
    CheckpointKey,
    TrialKey,
    blob_sequence,
    document_number,
    document_path,
    join_uri,
    matches_any_pattern,
)
from prefect_tune.core.values import WriteStamp, canonical_json, get_metric, hash_bytes, parse_json, validate_name
from tests.core.driver import JOURNAL, KEY

STAMP = WriteStamp(write_id="w", at="now")


@pytest.mark.parametrize(
    ("root", "uri"),
    [
        ("s3://bucket", "s3://bucket/a/b"),
        ("s3://bucket/runs/", "s3://bucket/runs/a/b"),
        ("s3://bucket/runs?region=eu&anonymous=true", "s3://bucket/runs/a/b?region=eu&anonymous=true"),
        ("memory://", "memory://a/b"),
    ],
)
def test_what_lies_below_a_uri_stands_before_its_options(root: str, uri: str) -> None:
    assert join_uri(root, "a/b") == uri


@pytest.mark.parametrize("name", ["a", "resnet-50_lr=0.1", "2026.11", "x" * 128, "A" + "." + "b"])
def test_a_name_that_can_be_a_folder_everywhere_is_taken(name: str) -> None:
    assert validate_name(name) == name
    assert TrialKey(experiment=name, generation=1, trial=name).folder == f"{name}/1/trials/{name}"


@pytest.mark.parametrize(
    "name",
    ["", ".", "..", ".hidden", "-x", "a/b", "a\\b", "a..b", "a b", "é", "a\n", "a\0", "x" * 129, "../../etc", "C:"],
)
def test_a_name_that_could_lead_elsewhere_is_refused(name: str) -> None:
    with pytest.raises(InvalidInput, match="becomes a folder"):
        validate_name(name)
    for path in (
        TrialKey(experiment=name, generation=1, trial="t"),
        TrialKey(experiment="e", generation=1, trial=name),
    ):
        with pytest.raises(InvalidInput):
            _ = path.blobs_folder


def test_equal_values_have_equal_bytes() -> None:
    assert canonical_json({"b": 1, "a": [1.5, None, "é"]}) == b'{"a":[1.5,null,"\\u00e9"],"b":1}'


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_canonical_json_says_no_infinity(value: float) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        canonical_json({"x": value})


def test_a_digest_is_blake3() -> None:
    assert hash_bytes(b"") == "af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262"


@pytest.mark.parametrize(
    ("size", "shown"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1023, "1,023 B"),
        (1536, "1.5 KiB"),
        (3 << 20, "3 MiB"),
        (1023 << 20, "1,023 MiB"),
        ((1 << 30) - 1, "1,024 MiB"),
        (5 << 30, "5 GiB"),
        (3 << 41, "6 TiB"),
        (1 << 52, "4,096 TiB"),
    ],
)
def test_sizes_are_shown_in_binary_units(size: int, shown: str) -> None:
    assert format_size(size) == shown


def test_an_amount_shows_its_whole_part_in_full() -> None:
    assert [format_amount(amount) for amount in (0.53125, 12.46, 999.4, 999.5, 12_345)] == [
        *("0.531", "12.5", "999", "1,000", "12,345")
    ]
    assert format_amount(128, digits=2) == "128"


@pytest.mark.parametrize(
    ("data", "problem"),
    [(b"[]", "the document"), (b'{"write_id":"w"}', "at: Field required"), (b'{"write_id":1,"at":"x"}', "write_id")],
)
def test_what_does_not_fit_is_named(data: bytes, problem: str) -> None:
    with pytest.raises(CheckpointCorrupt, match=f"here: {problem}"):
        parse_json(WriteStamp, data, CheckpointCorrupt, "here")


def test_a_value_refuses_fields_that_it_does_not_know() -> None:
    with pytest.raises(ValidationError):
        WriteStamp.model_validate({"write_id": "w", "at": "now", "att": "now"})


# --------------------------------------------------------------------------------------------- layout


def test_every_path_can_be_read_back() -> None:
    key = CheckpointKey(trial=KEY, step=12, sequence=345)

    assert key.manifest_path == "e/1/trials/t/checkpoints/0000000012-0000000345/manifest.json"
    assert CheckpointKey.from_manifest_path(KEY, key.manifest_path) == key
    assert document_number("e/1/journal", JOURNAL.entry_path(7)) == 7
    assert document_number("e/1/snapshots", JOURNAL.snapshot_path(640), "jsonl") == 640
    assert document_path("e/1/results/trials", 7, "parquet") == "e/1/results/trials/0000000007.parquet"
    assert document_number("e/1/results/trials", "e/1/results/trials/0000000007.parquet", "parquet") == 7
    assert blob_sequence(KEY.blob_path(hash_bytes(b""), 345)) == 345
    assert KEY.artifacts_folder == "e/1/trials/t/artifacts"


@pytest.mark.parametrize(
    "path",
    [
        "e/1/trials/t/checkpoints/0000000012-0000000345/other.json",
        "e/1/trials/t/checkpoints/0000000012-0000000345/deeper/manifest.json",
        "e/1/trials/t/checkpoints/12-345/manifest.json",
        "e/1/trials/t/checkpoints/0000000012/manifest.json",
        "e/1/trials/t/checkpoints/٠٠٠٠٠٠٠٠١٢-0000000345/manifest.json",
        "e/1/trials/other/checkpoints/0000000012-0000000345/manifest.json",
        "manifest.json",
    ],
)
def test_a_foreign_file_is_no_manifest(path: str) -> None:
    assert CheckpointKey.from_manifest_path(KEY, path) is None


@pytest.mark.parametrize("path", ["e/1/trials/t/blobs/README", "e/1/trials/t/blobs/abc-١٢", "e/1/trials/t/blobs/abc-"])
def test_a_foreign_file_is_a_blob_older_than_everything(path: str) -> None:
    assert blob_sequence(path) == -1


@pytest.mark.parametrize(
    ("name", "value"),
    [("loss", 1), ("eval/loss", 2), ("eval/deep/er", 3), ("a/b", 4), ("eval", {"loss": 2, "deep": {"er": 3}})],
)
def test_a_nested_metric_is_named_by_its_way(name: str, value: object) -> None:
    assert get_metric({"loss": 1, "eval": {"loss": 2, "deep": {"er": 3}}, "a/b": 4}, name) == value


@pytest.mark.parametrize("name", ["", "/", "lost", "loss/x", "eval/lost", "eval/loss/x"])
def test_what_was_not_reported_is_none(name: str) -> None:
    assert get_metric({"loss": 1, "eval": {"loss": 2}}, name) is None


def test_an_owner_says_who_it_is() -> None:
    assert re.fullmatch(r"n \(pid 1 on h\)", str(Owner(name="n", host="h", pid=1)))
    assert "flow run brave-otter" in str(Owner(name="n", host="h", pid=1, flow_run="brave-otter"))


def test_all_values_of_a_class_share_the_names_of_their_fields() -> None:
    stamp = WriteStamp(write_id="w", at="now")
    assert stamp.__pydantic_fields_set__ is stamp.model_copy(update={"at": "later"}).__pydantic_fields_set__
    assert stamp.model_fields_set == {"write_id", "at"}
    assert stamp.model_copy(update={"at": "later"}) == WriteStamp(write_id="w", at="later")
    assert stamp.model_copy() == stamp == copy.deepcopy(stamp) == pickle.loads(pickle.dumps(stamp))


# ------------------------------------------------------------------------------- what is no artifact


@pytest.mark.parametrize(
    ("path", "pattern"),
    [
        ("a.tmp", "*.tmp"),
        ("deep/er/a.tmp", "*.tmp"),
        ("logs/a.txt", "logs"),
        ("logs/a/b.txt", "logs/"),
        ("deep/logs/a.txt", "logs"),
        ("trial/checkpoint_3/model.pt", "*/checkpoint_*"),
        ("logs/a.txt", "logs/*.txt"),
        ("rank_0", "./rank_*"),
        ("rank_0/a/b", "./rank_*"),
        ("a[1].txt", "a[[]1].txt"),
    ],
)
def test_excluded(path: str, pattern: str) -> None:
    assert matches_any_pattern(path, ["other", pattern])


@pytest.mark.parametrize(
    ("path", "pattern"),
    [
        ("checkpoint_3/model.pt", "*/checkpoint_*"),
        ("a.TMP", "*.tmp"),
        ("deep/logs/a.txt", "logs/*"),
        ("deep/rank_0", "./rank_*"),
        ("catalogs/a.txt", "logs"),
        ("a.txt", ""),
    ],
)
def test_kept(path: str, pattern: str) -> None:
    assert not matches_any_pattern(path, [pattern])


def test_what_old_trainables_leave_at_the_top_is_no_artifact() -> None:
    paths = ("checkpoint_-00001", "checkpoint_tmp12", "save_to_object9", "rank_0", ".lazy_checkpoint_marker")
    assert all(matches_any_pattern(path, NON_ARTIFACT_PATTERNS) for path in paths)
    assert not any(matches_any_pattern(f"mine/{path}", NON_ARTIFACT_PATTERNS) for path in paths)
