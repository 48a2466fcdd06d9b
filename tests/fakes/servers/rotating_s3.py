"""An S3 server on loopback whose clients' credentials expire during use, and are replaced after a while."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

from tests.fakes.servers.s3_sink import Fault, ParsedRequest, Reply, S3Sink, error_reply

_TRIAL = re.compile(r"/trials/([^/]+)/")
_SIGNED_BY = re.compile(r"Credential=([^/]+)/")


def write_profile(path: Path, key: str) -> None:
    """Make `key` the credentials of the default profile, in one rename: that is how they are rotated."""
    new = path.with_suffix(".new")
    new.write_text(
        f"[default]\naws_access_key_id = {key}\naws_secret_access_key = secret\naws_session_token = token-of-{key}\n"
    )
    new.rename(path)


class RotatingS3(S3Sink):
    """`S3Sink` that knows one access key at a time, and refuses requests that are signed with another one.

    The first key expires once `trials` of them wait for that with no request under way: one whose last commit is not
    journaled yet would wait for the journal, and meet no refusal. `expired` is called then. For `outage` no key is
    accepted, and for as long as there is a trial that has not met a refusal. Then `renew` is called with the next key,
    which may be the same (`renews_key=False`: what was refused is allowed again).
    """

    def __init__(
        self,
        refusal: tuple[str, str],
        *,
        trials: int,
        count_waiting: Callable[[], int],
        outage: timedelta,
        expired: Callable[[], None],
        renew: Callable[[str], None],
        renews_key: bool = True,
    ) -> None:
        super().__init__()
        self._refusal = error_reply(*refusal)
        self._trials = trials
        self._count_waiting = count_waiting
        self._outage = outage
        self._on_expiry, self._renew = expired, renew
        self._next_key = "KEY2" if renews_key else "KEY1"
        self._accepted: str | None = "KEY1"
        self._expired_at: float | None = None
        self._changing = threading.Lock()
        self.refused: set[str] = set()
        self.refusals = 0

    def accept(self, key: str) -> None:
        """End the outage now: `key` is accepted from now on, and the client has it."""
        with self._changing:
            self._accepted = key
            self._renew(key)

    def _reply(self, request: ParsedRequest, fault: Fault | None) -> Reply:
        with self._changing:
            self._advance()
            signed = _SIGNED_BY.search(request.headers.get("authorization", ""))
            is_accepted = signed is not None and signed[1] == self._accepted
            if not is_accepted:
                if trial := _TRIAL.search(request.key):
                    self.refused.add(trial[1])
                self.refusals += 1
        return super()._reply(request, fault) if is_accepted else self._refusal

    def _advance(self) -> None:
        """Take the step that is due: from the first key to none, from none to the next."""
        if self._expired_at is None:
            if self._count_waiting() >= self._trials:
                self._expired_at, self._accepted = time.monotonic(), None
                self._on_expiry()
        elif self._accepted is None:
            is_over = time.monotonic() - self._expired_at >= self._outage.total_seconds()
            if is_over and len(self.refused) >= self._trials:
                self._accepted = self._next_key
                self._renew(self._next_key)
