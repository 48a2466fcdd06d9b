"""Whether a folder belongs to this user alone, on real files."""

from __future__ import annotations

import os
import pwd
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

import prefect_tune as pt
from prefect_tune import linux, trust
from prefect_tune.core.errors import InvalidInput
from prefect_tune.parameters.search_plan import OPTIONS, SearchPlan, StoredForm, plan_from_settings
from prefect_tune.trust import _CODE_FINDERS, find_code_choices, shared_access_reason
from tests.fakes.checkpoints import write_files

OTHER = 4242
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only the administrator can give files away")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return write_files(tmp_path / "above" / "root", {"e/journal/1.json": b"{}"})


def sharing_reason(root: Path) -> str:
    return shared_access_reason(root, ["e/journal", "e/snapshots"]) or ""


def test_a_folder_that_only_its_user_can_write_to_is_their_own(root: Path) -> None:
    assert not sharing_reason(root)
    assert not sharing_reason(root / ".." / "root")


@pytest.mark.parametrize("below", ["..", ".", "e", "e/journal", "e/journal/1.json"])
@pytest.mark.parametrize("bits", [0o020, 0o002])
def test_what_others_can_write_is_not(root: Path, below: str, bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trust, "_is_private_group", lambda *_: False)
    path = root / below
    path.chmod(path.stat().st_mode | bits)
    assert sharing_reason(root).startswith(f"{path.resolve()} can be written by others (")


def test_above_it_a_sticky_folder_will_do_and_it_itself_must_not_be_one(root: Path) -> None:
    root.parent.chmod(0o1777)
    assert not sharing_reason(root)
    root.chmod(0o1777)
    assert f"{root} can be written by others (drwxrwxrwt;" in sharing_reason(root)


@needs_root
@pytest.mark.parametrize("below", ["..", ".", "e", "e/journal", "e/journal/1.json"])
def test_what_belongs_to_another_user_is_not(root: Path, below: str) -> None:
    os.chown(root / below, OTHER, -1)
    assert f"{(root / below).resolve()} belongs to user {OTHER}" in sharing_reason(root)


def test_links_above_it_are_followed_as_far_as_they_are_ones_own(root: Path) -> None:
    link = root.parents[1] / "link"
    link.symlink_to(Path("above", "..", "above"))
    assert not sharing_reason(link / "root")
    root.parent.chmod(0o777)
    assert f"{root.parent} can be written by others" in sharing_reason(link / "root")


@needs_root
@pytest.mark.parametrize("mode", [0o755, 0o777], ids=["of another user", "of everybody"])
def test_a_folder_that_a_link_leads_through_is_checked(root: Path, mode: int) -> None:
    team = root.parent / "team"
    team.mkdir()
    (team / "me").symlink_to(os.path.relpath(root, team))
    (root.parent / "runs").symlink_to(team / "me")
    assert sharing_reason(root.parent / "runs") == ""
    team.chmod(mode)
    if mode == 0o755:
        os.chown(team, OTHER, -1)
    assert str(team) in sharing_reason(root.parent / "runs")


@needs_root
def test_a_link_of_another_user_is_not_followed(root: Path) -> None:
    link = root.parents[1] / "link"
    link.symlink_to(root.parent)
    os.chown(link, OTHER, -1, follow_symlinks=False)
    assert f"{link} belongs to user {OTHER}" in sharing_reason(link / "root")


@pytest.mark.parametrize("linked", ["e", "e/journal", "e/journal/1.json"])
def test_a_link_below_it_is_not_followed(root: Path, linked: str) -> None:
    path = root / linked
    path.rename(elsewhere := root.parent / "elsewhere")
    path.symlink_to(elsewhere)
    assert sharing_reason(root)


def test_links_in_a_circle_and_what_is_not_there_are_not_ones_own(root: Path) -> None:
    (root.parent / "a").symlink_to("b")
    (root.parent / "b").symlink_to("a")
    assert "Too many levels of symbolic links" in sharing_reason(root.parent / "a")
    assert "No such file" in sharing_reason(root.parent / "gone")
    assert sharing_reason(root / "e" / "journal" / "1.json")


@pytest.mark.parametrize(("kind", "is_own"), [("fuse.s3fs", False), ("fuse", False), ("cifs", False), ("ext4", True)])
def test_a_mount_that_makes_up_owners_is_not_ones_own(
    kind: str, is_own: bool, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = root.stat().st_dev
    table = root.parent / "mounts"
    other = f"20 1 8:999 / /mnt rw - {'cifs' if is_own else 'ext4'} /dev/sdz rw\n"
    ours = f"21 1 {os.major(device)}:{os.minor(device)} / /a\\040b rw shared:1 master:2 - {kind} bucket rw\n"
    table.write_text(other + ours)
    monkeypatch.setattr(linux, "_MOUNTS", str(table))
    assert (sharing_reason(root) == "") is is_own
    assert is_own or f"is on a mount of type {kind}, which hides which other users can write" in sharing_reason(root)
    monkeypatch.setattr(linux, "_MOUNTS", str(root / "gone"))
    assert not sharing_reason(root)


@pytest.fixture
def private_group(monkeypatch: pytest.MonkeyPatch) -> int:
    """Make a group this user's private group: root runs these tests, and has none."""
    monkeypatch.setattr(trust, "_is_private_group", lambda _, group: group == OTHER)
    return OTHER


def give_to_group(root: Path, group: int) -> None:
    """Give the folder to the group, with the modes of umask 002."""
    for path in (root, root / "e", root / "e" / "journal", root / "e" / "journal" / "1.json"):
        os.chown(path, -1, group)
        path.chmod(0o775)


@needs_root
def test_a_group_that_has_the_user_alone_may_write(root: Path, private_group: int) -> None:
    give_to_group(root, private_group)
    assert not sharing_reason(root)
    (root / "e" / "journal" / "1.json").chmod(0o777)
    assert "1.json can be written by others" in sharing_reason(root)


@needs_root
@pytest.mark.parametrize("below", [".", "e", "e/journal/1.json"])
def test_an_access_list_may_let_others_write_and_counts_as_that(root: Path, below: str, private_group: int) -> None:
    give_to_group(root, private_group)
    grant_write(root / below, OTHER)
    assert f"{(root / below).resolve()} can be written by others (" in sharing_reason(root)


def grant_write(path: Path, user: int) -> None:
    """Write an access list as Linux stores it: owner, user, group, mask, others."""
    entries = [(0x01, 7, -1), (0x02, 7, user), (0x04, 5, -1), (0x10, 7, -1), (0x20, 5, -1)]
    packed = struct.pack("<I", 2) + b"".join(struct.pack("<HHi", tag, bits, owner) for tag, bits, owner in entries)
    try:
        os.setxattr(path, "system.posix_acl_access", packed)
    except OSError:
        pytest.skip("this file system has no access lists")


def test_a_group_is_private_that_is_a_users_first_and_has_nobody_else() -> None:
    user = pwd.getpwnam("www-data")
    assert trust._is_private_group(user.pw_uid, user.pw_gid)
    assert not trust._is_private_group(0, 0)
    assert not trust._is_private_group(user.pw_uid, 0)
    assert not trust._is_private_group(pwd.getpwnam("nobody").pw_uid, user.pw_gid)
    shared = pwd.getpwnam("nobody").pw_gid  # `_apt` and others have it too
    assert not trust._is_private_group(pwd.getpwnam("nobody").pw_uid, shared)
    assert not trust._is_private_group(987654, user.pw_gid)


# Settings that name code, files or commands to run, import or open.


def list_choices(settings: Mapping[str, object], known_sources: Sequence[str] = ()) -> list[tuple[str, str | None]]:
    return [(choice.parameter, choice.name) for choice in find_code_choices(settings, known_sources)]


def test_each_option_that_is_declared_as_a_choice_is_examined() -> None:
    assert {name for name, option in OPTIONS.items() if option.stored is StoredForm.CHOICE} == _CODE_FINDERS.keys()


def test_a_resume_takes_nothing_of_one_run_from_the_journal() -> None:
    of_the_run = {name: "of a journal" for name, option in OPTIONS.items() if option.stored is None}
    run = {"target": "/runs", "experiment": "e"}
    plan = plan_from_settings({"trainable": "json:loads", **of_the_run}, run, {})
    assert plan == SearchPlan(trainable="json:loads", **run)


def test_a_search_that_is_all_data_chooses_nothing() -> None:
    plan = SearchPlan(
        trainable=lambda _: None,
        target="/runs",
        space={"x": pt.loguniform(1e-4, 1), "text": "subprocess:call", "n": pt.choice([1, {"m": pt.randint(0, 3)}])},
        metric="a:b",
        search={"OptunaSearch": {"sampler": {"TPESampler": {"n_startup_trials": 3}}, "num_samples": 4}},
        scheduler=pt.PBT(perturbation_interval=2, hyperparam_mutations={"x": pt.uniform(0, 1)}),
        stop={"a:b": 3, "MaxFailures": {"failures": 2}},
        trials="deployment",
        trial_deployment="train-trial/gpu",
        sync=pt.SyncConfig(upload_dir="s3-target/artifacts"),
        warm_start=["earlier"],
        failures=pt.FailurePolicy(max_failures=1),
    )
    assert list_choices(plan.settings) == []


@pytest.mark.parametrize(
    ("settings", "choices"),
    [
        ({"trainable": "a:B"}, [("trainable", "a:B")]),
        ({"space": {"x": {"choice": [1, {"sample_from": "a:f"}]}}}, [("space", "a:f")]),
        ({"stop": "a:f"}, [("stop", "a:f")]),
        ({"stop": [{"step": 3}, ["a:f", "b:g"]]}, [("stop", "a:f"), ("stop", "b:g")]),
        ({"callbacks": ["a:B", "c:D"]}, [("callbacks", "a:B"), ("callbacks", "c:D")]),
        ({"callbacks": "a:B"}, [("callbacks", None), ("callbacks", "a:B")]),
        ({"sync": {"syncer": "a:B"}}, [("sync", "a:B")]),
        ({"sync": {"syncer": None, "upload_dir": "s3://bucket"}}, [("sync", None)]),
        ({"sync": {"upload_dir": {"block_type_slug": "fsspec-target", "location": "dask://h"}}}, [("sync", None)]),
        ({"sync": {"upload_dir": "/etc"}}, [("sync", None)]),
        ({"trial_job_variables": {"command": "sh"}}, [("trial_job_variables", None)]),
        ({"trial_job_variables": ["command"]}, [("trial_job_variables", None)]),
        ({"trial_job_variables": {}}, []),
        ({"trial_deployment": "other/train-trial"}, [("trial_deployment", None)]),
        ({"trial_deployment": 3}, [("trial_deployment", None)]),
        ({"warm_start": ["s3://bucket/x", "here", "s3-target/prod/x"]}, [("warm_start", None)] * 2),
    ],
)
def test_what_names_code_or_a_place_or_a_command_is_a_choice(
    settings: Mapping[str, Any], choices: list[tuple[str, str | None]]
) -> None:
    assert list_choices(settings) == choices


def test_a_place_that_was_learned_from_already_is_not_opened_again() -> None:
    settings = {"warm_start": ["s3://bucket/x", "s3://bucket/y"]}
    assert list_choices(settings, ["s3://bucket/x"]) == [("warm_start", None)]


def test_a_space_that_is_none_is_refused_before_it_is_used() -> None:
    with pytest.raises(InvalidInput, match="sample_from: expected"):
        list_choices({"space": {"x": {"sample_from": "no name"}}})
