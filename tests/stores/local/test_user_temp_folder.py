"""The user's folder for temporary files, in a directory that all users of the machine share."""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

import prefect_tune as pt
from prefect_tune.stores.deadline import Deadline
from prefect_tune.stores.local.scratch import ScratchDirectory, _this_machine, locked_folder, user_folder

NAME = f"prefect-tune-{os.geteuid()}"
NOBODY = 65534
# A child that only changes its user and makes a folder takes no lock that another thread might hold.
pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="acts as another user, which takes root")


@pytest.fixture(autouse=True)
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory like /tmp: all users write to it, and only owners remove."""
    folder = tmp_path / "shared"
    folder.mkdir()
    folder.chmod(0o1777)
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr("tempfile.tempdir", None)
    return folder


def as_another_user(shared: Path, act: Callable[[], object]) -> None:
    """Call the function in a process of the Unix user `nobody`, whose working directory is `shared`."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.chdir(shared)  # from here no folder above has to be readable
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            os.umask(0)
            act()
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def made_open() -> None:
    Path(NAME).mkdir(mode=0o777)


def made_private() -> None:
    Path(NAME).mkdir(mode=0o700)


def linked_to_a_folder() -> None:
    Path("lair").mkdir(mode=0o777)
    Path(NAME).symlink_to("lair")


def linked_to_nothing() -> None:
    Path(NAME).symlink_to("not-there")


def made_a_file() -> None:
    Path(NAME).touch()


def made_a_pipe() -> None:
    os.mkfifo(NAME)


PRE_CREATED = [
    made_open,
    made_private,
    linked_to_a_folder,
    linked_to_nothing,
    made_a_file,
    made_a_pipe,
]


def kept_by(path: Path) -> str:
    status = path.lstat()
    return f"{stat.S_IMODE(status.st_mode):o} of {status.st_uid}"


def test_it_is_made_for_this_user_alone_and_found_again(shared: Path) -> None:
    folder = user_folder()
    assert folder == shared / NAME
    assert kept_by(folder) == f"700 of {os.geteuid()}"
    assert user_folder() == folder


@needs_root
@pytest.mark.parametrize("pre_create", PRE_CREATED)
@pytest.mark.parametrize(
    "use",
    [ScratchDirectory, lambda: locked_folder("name", Deadline.never()).__enter__()],
    ids=["scratch directory", "locked folder"],
)
def test_what_another_user_made_under_the_name_is_refused_and_left_alone(
    shared: Path, pre_create: Callable[[], object], use: Callable[[], object]
) -> None:
    as_another_user(shared, pre_create)
    theirs = sorted(shared.rglob("*"))
    with pytest.raises(pt.StoreRefused, match=rf"{NAME}: expected a folder of user 0 .* of user {NOBODY}: .* TMPDIR"):
        use()
    assert sorted(shared.rglob("*")) == theirs


@needs_root
def test_a_folder_of_the_superuser_is_no_folder_of_another_user(shared: Path) -> None:
    theirs = shared / f"prefect-tune-{NOBODY}"
    theirs.mkdir()
    theirs.chmod(0o777)

    def use() -> None:
        tempfile.tempdir = "."
        with pytest.raises(pt.StoreRefused, match="of user 0: remove it"):
            ScratchDirectory("staging")

    as_another_user(shared, use)
    assert not any(theirs.iterdir())


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o702], ids=oct)
def test_an_own_folder_that_others_can_write_to_is_refused(shared: Path, mode: int) -> None:
    (shared / NAME).mkdir()
    (shared / NAME).chmod(mode)
    with pytest.raises(pt.StoreRefused, match="set TMPDIR to a folder of your own"):
        user_folder()


def test_a_link_to_an_own_folder_is_refused(shared: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    (shared / NAME).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(pt.StoreRefused, match="found lrwx"):
        ScratchDirectory()
    assert not any((tmp_path / "elsewhere").iterdir())


@needs_root
def test_a_file_system_that_keeps_no_owners_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    before = Path.mkdir

    def as_on_a_squashed_mount(self: Path, mode: int = 0o777) -> None:
        before(self, mode)
        os.chown(self, NOBODY, NOBODY)

    monkeypatch.setattr(Path, "mkdir", as_on_a_squashed_mount)
    with pytest.raises(pt.StoreRefused, match=r"of user 65534: .* set TMPDIR"):
        user_folder()


def test_what_a_killed_process_left_is_removed_and_what_its_links_lead_to_stays(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    (outside / "folder").mkdir(parents=True)
    (outside / "file").write_text("precious")
    left = user_folder() / f"{_this_machine()}-left"
    (left / "temporary").mkdir(parents=True)
    left.with_name(f"{left.name}.lock").touch()
    (left / "temporary" / "folder").symlink_to(outside / "folder")
    (left / "temporary" / "file").symlink_to(outside / "file")
    link = user_folder() / f"{_this_machine()}-link"
    link.symlink_to(outside / "folder")
    link.with_name(f"{link.name}.lock").touch()
    with ScratchDirectory():
        assert not left.exists()
    assert (outside / "file").read_text() == "precious"
    assert (outside / "folder").is_dir()


def test_a_temporary_copy_of_a_checkpoint_is_out_of_other_users_reach(tmp_path: Path, shared: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "weights").write_bytes(b"w")
    copy = Path(pt.Checkpoint(source).to_directory())
    assert copy.is_relative_to(shared / NAME)
    assert kept_by(shared / NAME) == f"700 of {os.geteuid()}"
