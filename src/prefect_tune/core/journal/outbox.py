"""Pass the events of an attempt on another machine to the owner of the experiment, as numbered posts in an outbox.

The idea: the attempt creates the objects of its outbox, numbered from 1, each only if its number is free. A post is
durable when `write_post` returns, whether or not a search runs. The owner journals the posts in order, then deletes
them. The journal counts the posts, so it holds each event once. To fence off the attempt, the owner creates the
object with the next free number, the end of the outbox. So the target decides whether this end or a post is first.

    attempt     1 AttemptStarted ─ 2 ─ 3 CheckpointCommitted        4 refused: closed → Superseded, the attempt stops
    owner       journals 1, 2 …      closes: reads 3, creates ─▶ 4

- **One execution.** If a second process runs the same attempt, it finds that post 1 has another process's write id, and
  stops. Therefore, post 1 is deleted only with its experiment.
- **Closing** may be repeated, by one owner or by several, because each closing reads all posts up to the end.
- **A late post** comes from a request that seemed lost. If the end has the same number, the late post is refused. If a
  post of the same number was journaled and deleted, no process reads the late post.
- **Deletion.** A post counts only once its writer has checked, after creating it, that entry 1 of the journal exists.

Never delete a post before the entry that holds its events is durable. Never use an outbox for two attempts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from prefect_tune.core.errors import AlreadyExists, JournalCorrupt, StoreUnavailable, Superseded, UnknownVersion
from prefect_tune.core.experiment.trial_transitions import Trial
from prefect_tune.core.journal.journal import confirm_creation
from prefect_tune.core.journal_events import AttemptEvent
from prefect_tune.core.storage.documents import Document, read_sealed, seal
from prefect_tune.core.storage.layout import TrialKey, document_number
from prefect_tune.core.storage.object_store import ListedObject, ObjectStore, create_idempotently
from prefect_tune.core.values import WriteStamp

_MAX_RACES = 16
MAX_POSTS_PER_READ = 200
"""The most posts that `read_posts` returns; reading so many takes seconds on an object store, less than any timeout."""


class Post(Document):
    """A group of events of an attempt, or the end of the attempt's outbox."""

    format: Literal["prefect-tune/post"] = "prefect-tune/post"
    version: Literal[2] = 2
    write_id: str
    at: str
    events: tuple[Annotated[AttemptEvent, Field(discriminator="type")], ...] = ()
    closed_by: str = ""
    """The owner that closed the outbox, if this is the end of the outbox; empty in a post of the attempt."""


def write_post(store: ObjectStore, trial: TrialKey, outbox: int, number: int, post: Post) -> None:
    """Create post `number`, which is durable when this returns.

    Raises:
        Superseded: the outbox is closed, another process uses it, or the experiment was deleted.
        CommitUnknown: the target did not say whether it wrote; call again with the same post.
        StoreUnavailable: the target cannot be reached, or the experiment's first entry is missing.
    """
    path = trial.post_path(outbox, number)
    try:
        create_idempotently(store, path, seal(post))
    except AlreadyExists as exists:
        stored = read_post(store, trial, outbox, number)
        if stored is None:
            raise StoreUnavailable(f"{path}: the post exists, but cannot be read; try again") from exists
        who = f"{stored.closed_by} has ended" if stored.closed_by else "another process trains"
        raise Superseded(
            f"{trial.folder}: {who} this attempt at {stored.at}. Stop here: every committed checkpoint is kept"
        ) from exists
    confirm_creation(store, trial.journal_key, path)


def read_post(store: ObjectStore, trial: TrialKey, outbox: int, number: int) -> Post | None:
    """Return object `number` of the outbox: a post, or the end. None if it does not exist yet. Sends one request.

    Raises:
        JournalCorrupt: the post is damaged, or has events of another trial.
    """
    path = trial.post_path(outbox, number)
    post = read_sealed(store, Post, path, JournalCorrupt)
    if post is not None and (others := {event.trial for event in post.events} - {trial.trial}):
        raise JournalCorrupt(f"{path}: expected events of trial {trial.trial!r}, found some of {', '.join(others)}")
    return post


def read_posts(store: ObjectStore, trial: TrialKey, outbox: int, after: int) -> Sequence[Post]:
    """Return the posts after number `after`, up to the first free number or the end; at most `MAX_POSTS_PER_READ`.

    There can be more, because an attempt can post for days while no search runs. Raises like `read_post`.
    """
    posts: list[Post] = []
    while len(posts) < MAX_POSTS_PER_READ:
        post = read_post(store, trial, outbox, after + len(posts) + 1)
        if post is None or post.closed_by:
            break
        posts.append(post)
    return posts


@dataclass(frozen=True, slots=True)
class ClosedOutbox:
    """The readable posts of a closed outbox."""

    posts: Sequence[Post]
    damage: str = ""
    """What is wrong with the first unreadable post; empty if all can be read. `posts` ends before that post."""


def close_outbox(
    store: ObjectStore, trial: TrialKey, outbox: int, after: int, closed_by: str, stamp: WriteStamp
) -> ClosedOutbox:
    """Close an outbox, so that no post can be added any more; return its posts after number `after`.

    Raises:
        CommitUnknown: the target did not say whether it wrote; call again with the same arguments.
        StoreUnavailable: the target cannot be reached, or a post was added during each of 16 tries.
    """
    end = seal(Post(write_id=stamp.write_id, at=stamp.at, closed_by=closed_by))
    folder = trial.post_path(outbox, 1).rpartition("/")[0]
    posts: list[Post] = []
    damage, number, races = "", after + 1, 0
    while races < _MAX_RACES:
        try:
            post = read_post(store, trial, outbox, number)
        except (JournalCorrupt, UnknownVersion) as unreadable:
            damage = damage or str(unreadable)
            # Posts after an unreadable one do not count, so skip to the last object, which may be the end.
            number = max(number + 1, *(document_number(folder, listed.path) or 0 for listed in store.list(folder)))
            continue
        if post is not None and not post.closed_by:
            posts += [] if damage else [post]
            number += 1
            continue
        with suppress(AlreadyExists):
            if post is None:
                create_idempotently(store, trial.post_path(outbox, number), end)
            return ClosedOutbox(posts, damage)
        races += 1  # a post, or the end, was added meanwhile
    raise StoreUnavailable(f"{trial.folder}: {_MAX_RACES} posts were added while the outbox was closed; try again")


def delete_posts(store: ObjectStore, posts: Iterable[tuple[TrialKey, int, int]]) -> None:
    """Delete posts (trial, outbox, number) whose events are journaled, but never the first post of an outbox."""
    store.delete([trial.post_path(outbox, number) for trial, outbox, number in posts if number > 1])


def list_journaled_posts(store: ObjectStore, trial: TrialKey, state: Trial) -> Sequence[ListedObject]:
    """Return the posts with events that the journal already has; never the first and the last post of an outbox."""
    if not state.outbox_count:
        return ()
    outboxes: dict[str, dict[int, ListedObject]] = {}
    for listed in store.list(trial.outboxes_folder):
        folder = listed.path.rpartition("/")[0]
        if (number := document_number(folder, listed.path)) is not None:
            outboxes.setdefault(folder, {})[number] = listed
    newest = trial.post_path(state.outbox_count, 1).rpartition("/")[0]
    return [
        post
        for folder, posts in outboxes.items()
        for number, post in posts.items()
        if 1 < number < max(posts) and (folder < newest or (folder == newest and number <= state.last_post))
    ]
