"""Parse HTTP requests from a connection, in one piece or in chunks."""

from __future__ import annotations

import socket
import ssl
from urllib.parse import unquote


class Source:
    """Bytes that come in order; bytes read beyond the last answer stay in `ahead`."""

    def __init__(self) -> None:
        self.ahead = bytearray()

    def more(self, limit_bytes: int) -> bytes:
        """Return 1 to `limit_bytes` new bytes, or none at the end."""
        raise NotImplementedError

    def pour(self, view: memoryview) -> None:
        """Read exactly `len(view)` new bytes into `view`."""
        raise NotImplementedError

    def until(self, mark: bytes, piece_bytes: int) -> bytes | None:
        """Return what comes before `mark` and skip the mark; None at the end."""
        while (end := self.ahead.find(mark)) < 0:
            piece = self.more(piece_bytes)
            if not piece:
                return None
            self.ahead += piece
        before = bytes(self.ahead[:end])
        del self.ahead[: end + len(mark)]
        return before

    def fill(self, view: memoryview) -> None:
        """Read exactly `len(view)` bytes into `view`."""
        have = min(len(self.ahead), len(view))
        view[:have] = self.ahead[:have]
        del self.ahead[:have]
        if have < len(view):
            self.pour(view[have:])


class Wire(Source):
    """A connection; small reads are served from one large one, large ones go straight to where they belong."""

    def __init__(self, sock: socket.socket) -> None:
        super().__init__()
        self.sock = sock
        self._all = 0 if isinstance(sock, ssl.SSLSocket) else socket.MSG_WAITALL
        self._scratch = memoryview(bytearray(1 << 18))
        self._begin = self._end = 0

    def more(self, limit_bytes: int) -> bytes:
        return bytes(self._next(limit_bytes))

    def pour(self, view: memoryview) -> None:
        have = 0
        while have < len(view):
            left = len(view) - have
            if self._begin == self._end and left >= len(self._scratch):
                got = self.sock.recv_into(view[have:], 0, self._all)
            else:
                piece = self._next(left)
                got = len(piece)
                view[have : have + got] = piece
            if not got:
                raise ConnectionResetError
            have += got

    def _next(self, limit_bytes: int) -> memoryview:
        if self._begin == self._end:
            self._begin, self._end = 0, self.sock.recv_into(self._scratch)
        piece = self._scratch[self._begin : min(self._end, self._begin + limit_bytes)]
        self._begin += len(piece)
        return piece

    def wait_until_closed(self) -> None:
        while self.sock.recv(65536):
            pass


class Chunked(Source):
    """The bytes inside HTTP's chunks, or inside those that AWS clients wrap a body in (`aws-chunked`)."""

    def __init__(self, outer: Source) -> None:
        super().__init__()
        self._outer = outer
        self._left: int | None = None

    def _chunk(self) -> int:
        """Return how many bytes of the current chunk are left, beginning the next one; 0 at the end."""
        if self._left:
            return self._left
        if self._left == 0:
            self._outer.until(b"\r\n", 16)
        line = self._outer.until(b"\r\n", 16)
        if line is None:
            raise ConnectionResetError
        self._left = int(line.split(b";")[0], 16)
        return self._left

    def more(self, limit_bytes: int) -> bytes:
        piece = bytearray(min(limit_bytes, self._chunk()))
        self._take(memoryview(piece))
        return bytes(piece)

    def pour(self, view: memoryview) -> None:
        have = 0
        while have < len(view):
            count = min(len(view) - have, self._chunk())
            if not count:
                raise ConnectionResetError
            self._take(view[have : have + count])
            have += count

    def _take(self, view: memoryview) -> None:
        self._outer.fill(view)
        self._left = (self._left or 0) - len(view)

    def finish(self) -> None:
        """Read the last, empty chunk and the trailers."""
        if self._chunk():
            raise ConnectionResetError
        while self._outer.until(b"\r\n", 16):
            pass
        self._left = None


def parsed_head(head: bytes) -> tuple[str, str, str, dict[str, str]]:
    first, *lines = head.decode("latin-1").split("\r\n")
    method, target, _ = first.split(" ", 2)
    path, _, query = target.partition("?")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    return method, unquote(path), query, headers
