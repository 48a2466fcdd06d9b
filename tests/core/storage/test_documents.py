"""Documents that are stored: sealed, read back as they were written, of some version, and signed settings."""

from __future__ import annotations

import hashlib
import hmac
import json
import math
import re
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from pkgutil import walk_packages
from typing import Any, ClassVar, Literal

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from prefect_tune import core
from prefect_tune.core.errors import CheckpointCorrupt, InvalidInput, JournalCorrupt, UnknownVersion
from prefect_tune.core.experiment.experiment import Experiment
from prefect_tune.core.journal import journal
from prefect_tune.core.journal_events import AttemptStarted, Entry, Owner, TrialAdded
from prefect_tune.core.storage import documents
from prefect_tune.core.storage.documents import (
    Document,
    Upgrade,
    add_signature,
    has_signature,
    has_valid_signature,
    read_newest_document,
    read_sealed,
    seal,
    seal_and_read_back,
    strip_signature,
    unseal,
    upgrade_document,
)
from prefect_tune.core.storage.generations import claim_experiment, end_generation, read_claiming_call
from prefect_tune.core.storage.layout import JournalKey
from prefect_tune.core.storage.object_store import ListedObject
from prefect_tune.core.values import WriteStamp, canonical_json, hash_bytes
from tests.core.driver import JOURNAL
from tests.core.journal.test_journal import nest_lists
from tests.fakes.stores.memory_store import MemoryStore

JSON_LIKE = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.just("\ud800") | st.binary(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner)
        | st.dictionaries(st.text(max_size=3) | st.integers() | st.floats(), inner, max_size=3)
    ),
    max_leaves=8,
)


class Holder(Document):
    """A document with keys before and after the digest's key."""

    format: Literal["test/holder"] = "test/holder"
    version: Literal[1] = 1
    a: object = None
    digest: object = None
    z: object = None


class Early(Document):
    format: Literal["test/early"] = "test/early"
    version: Literal[1] = 1
    a: int = 1


class Late(Document):
    """A document without a key before the digest's key."""

    format: Literal["test/late"] = "test/late"
    version: Literal[1] = 1
    z: int = 1


@settings(max_examples=300)
@given(value=JSON_LIKE)
@example(10**5000)
@example(-0.0)
@example(1e22)
@example(math.nan)
@example([1, math.inf])
@example({1: 2, "1": 3})
def test_what_is_read_back_at_once_is_what_is_read_from_the_target(value: object) -> None:
    check_reads_agree(value)


@pytest.mark.parametrize("depth", [150, 190, 199, 250, 500, 1000, 3000, 100_000])
def test_what_nests_too_deep_to_be_read_is_refused_at_once(depth: int) -> None:
    check_reads_agree(nest_lists(depth))


def check_reads_agree(value: object) -> None:
    document = Holder(a=value, digest=1, z={"value": value})
    try:
        data = seal(document)
        later = unseal(Holder, data, "here", InvalidInput)
    except InvalidInput:
        with pytest.raises(InvalidInput):
            seal_and_read_back(document)
    else:
        assert seal_and_read_back(document) == (data, later)


@pytest.mark.parametrize("document", [Holder(a=[1, "ä"]), Early(), Late()])
def test_a_document_is_canonical_json_with_the_digest_of_all_else(document: Document) -> None:
    data = seal(document)
    body = json.loads(data)
    assert canonical_json(body) == data
    claimed = body.pop("digest_of_document")
    assert claimed == hash_bytes(canonical_json(body)) == hash_bytes(canonical_json(document.model_dump(mode="json")))
    assert unseal(type(document), data, "here", InvalidInput) == document


# ------------------------------------------------------------------------------------------------ sizes


def test_no_document_beyond_the_limit_is_written_or_read(monkeypatch: pytest.MonkeyPatch) -> None:
    store, limit = MemoryStore(), len(seal(Holder(a="x" * 5000)))
    monkeypatch.setattr(documents, "_FIRST_READ_BYTES", 1000)
    monkeypatch.setattr(documents, "MAX_DOCUMENT_BYTES", limit)
    for letters in (10, 5000):
        store.put(f"{letters}", seal(Holder(a="x" * letters)))
        assert read_sealed(store, Holder, f"{letters}", CheckpointCorrupt) == Holder(a="x" * letters)
    with pytest.raises(InvalidInput, match=r"Holder: expected at most 5\S* KiB of JSON, found 5\S* KiB: put"):
        seal(Holder(a="x" * 5001))

    store.put("large", b"x" * (limit + 1))
    store.bytes_out = 0
    with pytest.raises(CheckpointCorrupt, match=r"large: expected a document of at most 5.* KiB, found .*not read"):
        read_sealed(store, Holder, "large", CheckpointCorrupt)
    assert store.bytes_out == 1000


def test_a_document_that_is_deleted_while_it_is_read_is_not_found(monkeypatch: pytest.MonkeyPatch) -> None:
    class Vanishing(MemoryStore):
        def size(self, path: str) -> int | None:  # noqa: ARG002  no object has a size
            return None

    monkeypatch.setattr(documents, "_FIRST_READ_BYTES", 10)
    store = Vanishing()
    store.put("a", seal(Holder()))
    assert read_sealed(store, Holder, "a", CheckpointCorrupt) is None


# ------------------------------------------------------------------------------------------ what is no document


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"", id="nothing"),
        pytest.param(b"not JSON", id="not JSON"),
        pytest.param(b"\x80\x04\x95\x1f\x00\x00\x00\x00\x00\x00\x00", id="a pickle"),
        pytest.param(b"[1,2]", id="a list"),
        pytest.param(b"null", id="null"),
        pytest.param(b'{"at":"now","write_id":"w"}', id="no digest"),
        pytest.param(seal(Early()).replace(b'"a":1', b'"a":12'), id="altered"),
        pytest.param(seal(Early()).replace(b",", b", "), id="other spaces"),
        pytest.param(seal(Early()).replace(b'"a":1,', b"")[:-1] + b',"a":1}', id="another order"),
        pytest.param(seal(Early()) + b" ", id="a space too many"),
        pytest.param(seal(Early())[:-1], id="torn"),
        pytest.param(b"\xef\xbb\xbf" + seal(Early()), id="a byte order mark"),
        pytest.param(seal(Early()).decode().encode("utf-16"), id="another encoding"),
        pytest.param(seal(Early()).replace(b'{"a"', b'{"a":2,"a"'), id="a key twice"),
        pytest.param(b'{"x":NaN}', id="a NaN"),
        pytest.param(b'{"x":1e999}', id="an infinity"),
        pytest.param(b'{"x":' + b"9" * 5000 + b"}", id="a number without end"),
        *[
            pytest.param(b'{"x":' + b"[" * depth + b"]" * depth + b"}", id=f"{depth} levels")
            for depth in (200, 900, 990, 1000, 10_000, 1_000_000)
        ],
    ],
)
def test_nothing_is_believed_that_was_not_written_so(data: bytes) -> None:
    with pytest.raises(CheckpointCorrupt, match="here: "):
        unseal(Early, data, "here", CheckpointCorrupt)


def test_what_another_model_wrote_is_not_taken_for_this_one() -> None:
    with pytest.raises(CheckpointCorrupt):
        unseal(Early, seal(Late()), "here", CheckpointCorrupt)


# ----------------------------------------------------------------------------------- kinds and versions

KINDS = {
    "prefect-tune/answer": 4,
    "prefect-tune/callback": 1,
    "prefect-tune/checkpoint": 3,
    "prefect-tune/generation": 1,
    "prefect-tune/unnamed-call": 1,
    "prefect-tune/journal": 5,
    "prefect-tune/live-status": 2,
    "prefect-tune/metadata": 1,
    "prefect-tune/node-address": 1,
    "prefect-tune/part": 1,
    "prefect-tune/post": 2,
    "prefect-tune/snapshot": 2,
    "prefect-tune/stop-request": 2,
}
"""The kinds of documents on a target and their versions. Raise a version here too."""
SOURCE_FOLDERS = ("src", "blocks", "tasks", "flows")


def iter_kinds() -> Iterator[type[Document]]:
    """Yield the document classes of the package, without subclasses that tests define."""
    for module in walk_packages(core.__path__, f"{core.__name__}."):
        import_module(module.name)
    import_module("prefect_tune.monitoring.callback_runner")
    return (kind for kind in iter_subclasses(Document) if kind.__module__.startswith("prefect_tune."))


def iter_subclasses(base: type[Document]) -> Iterator[type[Document]]:
    for kind in base.__subclasses__():
        yield kind
        yield from iter_subclasses(kind)


def test_every_kind_of_document_is_there_once_and_has_its_own_version() -> None:
    versions = [(kind.model_fields["format"].default, kind.current_version) for kind in iter_kinds()]
    assert sorted(versions) == sorted(KINDS.items())


def test_every_format_that_the_source_names_is_a_kind_of_document() -> None:
    root = Path(__file__).parents[3]
    sources = [path.read_text() for folder in SOURCE_FOLDERS for path in (root / folder).rglob("*.py")]
    named = [name for source in sources for name in re.findall(r'format: \w+\["([^"]+)"\]', source)]
    named.remove("prefect-tune-torch-distributed")  # a file in a checkpoint, and no document on the target
    assert sorted(named) == sorted(KINDS)


# ------------------------------------------------------------------------------------- a kind of three versions


class First(Document):
    format: Literal["test/lap"] = "test/lap"
    version: Literal[1] = 1
    seconds: int
    runner: str | None = None


def convert_to_milliseconds(body: dict[str, Any]) -> dict[str, Any]:
    body["milliseconds"] = 1000 * body.pop("seconds")
    return body


def convert_to_runners(body: dict[str, Any]) -> dict[str, Any]:
    runner = body.pop("runner")
    return {**body, "runners": [runner] if runner else []}


class Second(Document):
    format: Literal["test/lap"] = "test/lap"
    version: Literal[2] = 2
    upgrades: ClassVar[Mapping[int, Upgrade]] = {1: convert_to_milliseconds}
    milliseconds: int
    runner: str | None = None


class Third(Document):
    format: Literal["test/lap"] = "test/lap"
    version: Literal[3] = 3
    upgrades: ClassVar[Mapping[int, Upgrade]] = {1: convert_to_milliseconds, 2: convert_to_runners}
    milliseconds: int
    runners: tuple[str, ...] = ()


class OnlyNewer(Third):
    """Reads no documents of version 1."""

    upgrades: ClassVar[Mapping[int, Upgrade]] = {2: convert_to_runners}


LAP = First(seconds=2, runner="ada")


def reseal(document: Document, **changes: object) -> bytes:
    """Return the document with `changes` (`...` removes a field) and a valid digest."""
    body = {**document.model_dump(mode="json"), **changes}
    body = {name: value for name, value in body.items() if value is not ...}
    return canonical_json({**body, "digest_of_document": hash_bytes(canonical_json(body))})


def read(data: bytes, kind: type[Document] = Third) -> Document:
    return unseal(kind, data, "here", CheckpointCorrupt)


@given(seconds=st.integers(), runner=st.none() | st.text(min_size=1))
def test_a_document_reads_the_same_however_many_releases_upgrade_it(seconds: int, runner: str | None) -> None:
    first = First(seconds=seconds, runner=runner)
    second, third = read(seal(first), Second), read(seal(first))
    assert second == Second(milliseconds=1000 * seconds, runner=runner)
    assert third == Third(milliseconds=1000 * seconds, runners=(runner,) if runner else ())
    assert read(seal(second)) == read(seal(third)) == third


@given(seconds=st.integers(), runner=st.none() | st.text(min_size=1))
def test_upgrading_twice_is_upgrading_once(seconds: int, runner: str | None) -> None:
    old = First(seconds=seconds, runner=runner).model_dump(mode="json")
    new = upgrade_document(Third, old, "here", CheckpointCorrupt)
    assert new["version"] == 3
    assert upgrade_document(Third, dict(new), "here", CheckpointCorrupt) == new


@pytest.mark.parametrize("old", [LAP, Second(milliseconds=5)])
def test_an_old_document_with_a_field_that_its_release_did_not_write_is_refused(old: Document) -> None:
    with pytest.raises(CheckpointCorrupt, match="here: extra: Extra inputs are not permitted"):
        read(reseal(old, extra=1))


@pytest.mark.parametrize("changes", [{"seconds": ...}, {"seconds": None}, {"seconds": "two"}, {"runner": ...}])
def test_an_old_document_that_no_release_wrote_is_damaged(changes: dict[str, object]) -> None:
    with pytest.raises(CheckpointCorrupt, match="here: "):
        read(reseal(LAP, **changes))


def test_an_altered_old_document_is_damaged_and_no_step_sees_it() -> None:
    with pytest.raises(CheckpointCorrupt, match="incomplete, or altered"):
        read(seal(LAP).replace(b'"seconds":2', b'"seconds":"two"'))


@pytest.mark.parametrize("version", [..., None, 0, -1, "1", True, 1.0, [1]])
def test_a_document_that_does_not_say_its_version_is_damaged(version: object) -> None:
    with pytest.raises(CheckpointCorrupt, match=r"here: version: expected a number from 1 to 3, found "):
        read(reseal(LAP, version=version))


@pytest.mark.parametrize(
    "data", [reseal(LAP, version=4), reseal(LAP, version=4, seconds={}), b'{"version":4,"sealed":"otherwise"}']
)
def test_a_newer_document_is_refused_with_what_to_do_however_it_is_sealed(data: bytes) -> None:
    expected = "here: test/lap of version 4; this prefect-tune reads versions 1 to 3. A newer prefect-tune wrote it"
    with pytest.raises(UnknownVersion, match=f"^{re.escape(expected)}: upgrade prefect-tune$"):
        read(data)


def test_a_document_that_is_too_old_is_refused_with_what_to_do() -> None:
    expected = "here: test/lap of version 1; this prefect-tune reads versions 2 to 3. Read it with the older"
    with pytest.raises(UnknownVersion, match=f"^{re.escape(expected)} prefect-tune that wrote it$"):
        read(seal(LAP), OnlyNewer)
    assert read(seal(Second(milliseconds=5)), OnlyNewer) == OnlyNewer(milliseconds=5)


@pytest.mark.parametrize("versions", [(1,), (3,), (2, 3), (1, 2, 3)])
def test_a_kind_that_lacks_a_step_or_has_one_too_many_cannot_be_defined(versions: tuple[int, ...]) -> None:
    with pytest.raises(TypeError, match=r"Wrong: expected upgrades of versions \["):
        type("Wrong", (Third,), {"upgrades": dict.fromkeys(versions, convert_to_runners), "__module__": __name__})


# ------------------------------------------------------------------------------------- in a journal


class NewEntry(Entry):
    """An entry as a later release may write it: `at` is called `written_at`."""

    version: int = Entry.current_version + 1  # type: ignore[assignment]  # what a release raises
    upgrades: ClassVar[Mapping[int, Upgrade]] = {
        **Entry.upgrades,
        Entry.current_version: lambda body: {**body, "written_at": body["at"]},
    }
    written_at: str = "now"


def append_trial(store: MemoryStore, number: int) -> Experiment:
    """Acquire the journal, and add a trial."""
    owner, stamp = Owner(name="o", host="h", pid=1), WriteStamp(write_id=f"w{number}", at="then")
    state = journal.acquire_ownership(store, JOURNAL, owner, stamp)
    added = [TrialAdded(trial=f"t{number}", config={}), AttemptStarted(trial=f"t{number}", attempt=1, from_step=0)]
    return journal.append_events(store, state, added, stamp)


def test_a_journal_of_two_versions_is_one_history_and_nothing_in_it_is_rewritten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = MemoryStore()
    old = append_trial(store, 1)
    written = dict(store.objects)

    monkeypatch.setattr(journal, "Entry", NewEntry)
    assert journal.load_experiment(store, JOURNAL) == old
    new = append_trial(store, 2)

    assert written.items() <= store.objects.items()
    versions = [json.loads(store.objects[JOURNAL.entry_path(number)])["version"] for number in (1, 2, 3, 4)]
    assert versions == [Entry.current_version] * 2 + [NewEntry.current_version] * 2
    assert journal.load_experiment(store, JOURNAL) == new
    assert list(new.trials) == ["t1", "t2"]
    times = [entry.written_at for entry in journal.read_entries(store, JOURNAL) if isinstance(entry, NewEntry)]
    assert times == ["then", "then", "now", "now"]


def test_a_listing_that_keeps_naming_a_document_that_is_gone_ends_with_an_error() -> None:
    class StaleListing(MemoryStore):
        def list(self, prefix: str, *, after: str = "") -> list[ListedObject]:
            del after
            return [ListedObject(f"{prefix}/{3:010d}.json", 1)]

    with pytest.raises(JournalCorrupt, match="the newest listed document did not exist"):
        read_newest_document(StaleListing(), Entry, "folder", JournalCorrupt)


# --------------------------------------------------------------------------------------- signed settings

SIGNING_KEY = b"a secret key"
SETTINGS: dict[str, Any] = {"trainable": "mine:Net", "space": {"x": [1, 2.5, None]}, "stop": {"step": 3}}
_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.text(), _JSON, max_size=4))
def test_what_is_written_and_read_back_is_signed_still(settings: dict[str, Any]) -> None:
    read_back = json.loads(canonical_json(add_signature(settings, "e", SIGNING_KEY)))
    assert has_valid_signature(read_back, "e", SIGNING_KEY)
    assert strip_signature(read_back) == strip_signature(settings)


def test_the_signature_is_of_these_settings_this_experiment_and_this_key() -> None:
    good = add_signature(SETTINGS, "e", SIGNING_KEY)
    assert has_valid_signature(good, "e", SIGNING_KEY)
    assert add_signature(good, "e", SIGNING_KEY) == good
    assert not has_valid_signature(good, "other", SIGNING_KEY)
    assert not has_valid_signature(good, "e", SIGNING_KEY + b"!")
    for name in SETTINGS:
        assert not has_valid_signature({**good, name: "another"}, "e", SIGNING_KEY)
        assert not has_valid_signature({key: value for key, value in good.items() if key != name}, "e", SIGNING_KEY)
    assert not has_valid_signature({**good, "trial_job_variables": {}}, "e", SIGNING_KEY)


def test_the_signature_is_made_as_the_page_on_the_layout_says() -> None:
    document = '{"experiment":"e","format":"hmac-sha256-v1","settings":{"a":[1,2.5],"b":null}}'
    expected = hmac.new(SIGNING_KEY, document.encode(), hashlib.sha256).hexdigest()
    assert add_signature({"b": None, "a": [1, 2.5]}, "e", SIGNING_KEY)["signature"] == f"hmac-sha256-v1:{expected}"


@pytest.mark.parametrize("signature", [None, 3, "", "hmac-sha256-v1:", ["x"], "ü"])
def test_something_else_is_no_signature(signature: object) -> None:
    assert not has_valid_signature({**SETTINGS, "signature": signature}, "e", SIGNING_KEY)


def test_settings_without_a_signature_are_known() -> None:
    assert not has_signature(SETTINGS)
    assert not has_valid_signature(SETTINGS, "e", SIGNING_KEY)
    assert has_signature(add_signature(SETTINGS, "e", SIGNING_KEY))


# The call that owns the experiment named after its flow run.


def test_the_first_call_has_the_name_and_each_repetition_of_it_has_it_again() -> None:
    store = MemoryStore()
    assert read_claiming_call(store, "run") is None
    claims = [claim_experiment(store, "run", call) for call in ("one", "two", "one", "two")]
    assert claims == [True, False, True, False]
    assert read_claiming_call(store, "run") == "one"


def test_the_name_of_a_deleted_experiment_is_free_and_was_in_use() -> None:
    store = MemoryStore()
    claim_experiment(store, "run", "one")
    end_generation(store, JournalKey(experiment="run", generation=1), at="now", by="a test")
    assert read_claiming_call(store, "run") == ""
    assert claim_experiment(store, "run", "two")
