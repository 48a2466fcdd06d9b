"""The S3 operations on a namespace of `bucket/key` names, with the bytes in one memory file."""

from __future__ import annotations

import mmap
import os
import re
import threading
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import islice
from urllib.parse import unquote
from xml.sax.saxutils import escape, unescape

_PIECE_BYTES = 1 << 20
_ARENA_BYTES = 1 << 36

Extent = tuple[int, int]
Extents = tuple[Extent, ...]


class Arena:
    """Bytes in one memory file, so that a reply is a `sendfile`; freed extents are reused by size."""

    def __init__(self) -> None:
        self.fd = os.memfd_create("s3-sink")
        os.ftruncate(self.fd, _ARENA_BYTES)
        self.view = memoryview(mmap.mmap(self.fd, _ARENA_BYTES))
        self._end = 0
        self._free: dict[int, list[int]] = {}
        self._lock = threading.Lock()

    def allocate(self, size_bytes: int) -> Extent:
        with self._lock:
            free = self._free.get(size_bytes)
            if free:
                return free.pop(), size_bytes
            start, self._end = self._end, self._end + -(-size_bytes // 4096) * 4096
            return start, size_bytes

    def free(self, extents: Iterable[Extent]) -> None:
        with self._lock:
            for start, size_bytes in extents:
                self._free.setdefault(size_bytes, []).append(start)

    def forget(self) -> None:
        """Begin again at the start, whose pages are in memory already."""
        with self._lock:
            self._end, self._free = 0, {}

    def prefault(self, size_bytes: int) -> None:
        """Touch the first bytes of the arena, so that no measured request pays for page faults."""
        zeros = bytes(_PIECE_BYTES)
        for start in range(0, size_bytes, _PIECE_BYTES):
            self.view[start : start + _PIECE_BYTES] = zeros

    def bytes_of(self, extents: Extents) -> bytes:
        return b"".join(self.view[start : start + size] for start, size in extents)


def size_of(extents: Extents) -> int:
    return sum(size for _, size in extents)


def cut(extents: Extents, offset: int, length: int) -> Extents:
    """Return the extents of `length` bytes from `offset` within `extents`."""
    wanted: list[Extent] = []
    for start, size in extents:
        skip = min(offset, size)
        take = min(size - skip, length)
        if take > 0:
            wanted.append((start + skip, take))
        offset, length = offset - skip, length - take
    return tuple(wanted)


@dataclass(frozen=True, slots=True)
class Reply:
    status: str
    headers: str = ""
    text: bytes = b""
    extents: Extents = ()
    head_only: bool = False


def failure(status: str, code: str) -> Reply:
    text = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>{code}</Message></Error>"
    return Reply(status, "Content-Type: application/xml\r\n", text.encode())


_NOT_FOUND = failure("404 Not Found", "NoSuchKey")
_EXISTS = failure("412 Precondition Failed", "PreconditionFailed")


@dataclass(frozen=True, slots=True)
class Asked:
    """One parsed request; a body is already in the arena (`extents`) or small (`text`)."""

    method: str
    key: str
    query: dict[str, str]
    headers: dict[str, str]
    extents: Extents
    text: bytes


class Objects:
    """The S3 verbs over one namespace of `bucket/key` names."""

    def __init__(self, arena: Arena) -> None:
        self.arena = arena
        self.objects: dict[str, Extents] = {}
        self.uploads: dict[str, dict[int, Extents]] = {}
        self._lock = threading.Lock()
        self._serial = 0

    def answer(self, asked: Asked) -> Reply:
        is_object = bool(asked.key.partition("/")[2])
        verb = f"{asked.method} {'object' if is_object else 'bucket'}"
        with self._lock:
            match verb:
                case "PUT object":
                    return self._put(asked)
                case "GET object" | "HEAD object":
                    return self._get(asked)
                case "DELETE object":
                    return self._delete(asked)
                case "POST object":
                    return self._multipart(asked)
                case "POST bucket":
                    return self._delete_many(asked)
                case "GET bucket" if "location" not in asked.query:
                    return self._list(asked)
        return Reply("200 OK")

    def _put(self, asked: Asked) -> Reply:
        self._serial += 1
        etag = f'ETag: "{self._serial:032x}"\r\n'
        if "uploadId" in asked.query:
            parts = self.uploads.get(asked.query["uploadId"])
            if parts is None:
                return failure("404 Not Found", "NoSuchUpload")
            parts[int(asked.query["partNumber"])] = asked.extents
            return Reply("200 OK", etag)
        if (source := asked.headers.get("x-amz-copy-source")) is not None:
            return self._copy(unquote(source).lstrip("/"), asked.key, etag)
        if asked.headers.get("if-none-match") == "*" and asked.key in self.objects:
            self.arena.free(asked.extents)
            return _EXISTS
        self._replace(asked.key, asked.extents)
        return Reply("200 OK", etag)

    def _copy(self, source: str, key: str, etag: str) -> Reply:
        if (copied := self.objects.get(source)) is None:
            return _NOT_FOUND
        start, size = self.arena.allocate(size_of(copied))
        self.arena.view[start : start + size] = self.arena.bytes_of(copied)
        self._replace(key, ((start, size),))
        return _xml(f"<CopyObjectResult>{etag.replace('ETag: ', '<ETag>').strip()}</ETag></CopyObjectResult>")

    def _replace(self, key: str, extents: Extents) -> None:
        self.arena.free(self.objects.get(key, ()))
        self.objects[key] = extents

    def _get(self, asked: Asked) -> Reply:
        extents, head_only = self.objects.get(asked.key), asked.method == "HEAD"
        if extents is None:
            return replace(_NOT_FOUND, head_only=head_only)
        size = size_of(extents)
        common = (
            f'ETag: "{abs(hash(extents)):032x}"\r\nAccept-Ranges: bytes\r\n'
            "Last-Modified: Mon, 02 Nov 2026 10:00:00 GMT\r\nContent-Type: application/octet-stream\r\n"
        )
        span = re.fullmatch(r"bytes=(\d*)-(\d*)", asked.headers.get("range", ""))
        if span is None:
            return Reply("200 OK", common, extents=extents, head_only=head_only)
        first = int(span[1]) if span[1] else max(0, size - int(span[2]))
        last = min(int(span[2]), size - 1) if span[1] and span[2] else size - 1
        if first >= size:
            return failure("416 Range Not Satisfiable", "InvalidRange")
        common += f"Content-Range: bytes {first}-{last}/{size}\r\n"
        wanted = cut(extents, first, last - first + 1)
        return Reply("206 Partial Content", common, extents=wanted, head_only=head_only)

    def _delete(self, asked: Asked) -> Reply:
        if "uploadId" in asked.query:
            for part in self.uploads.pop(asked.query["uploadId"], {}).values():
                self.arena.free(part)
        else:
            self.arena.free(self.objects.pop(asked.key, ()))
        return Reply("204 No Content")

    def _multipart(self, asked: Asked) -> Reply:
        bucket, _, key = asked.key.partition("/")
        names = f"<Bucket>{bucket}</Bucket><Key>{escape(key)}</Key>"
        if "uploads" in asked.query:
            self._serial += 1
            upload = f"upload-{self._serial}"
            self.uploads[upload] = {}
            text = f"<InitiateMultipartUploadResult>{names}<UploadId>{upload}</UploadId>"
            return _xml(text + "</InitiateMultipartUploadResult>")
        parts = self.uploads.pop(asked.query["uploadId"], None)
        if parts is None:
            return failure("404 Not Found", "NoSuchUpload")
        numbers = [int(n) for n in re.findall(rb"<PartNumber>(\d+)</PartNumber>", asked.text)]
        self._replace(asked.key, tuple(extent for n in numbers for extent in parts[n]))
        text = f'<CompleteMultipartUploadResult>{names}<ETag>"{self._serial:032x}"</ETag>'
        return _xml(text + "</CompleteMultipartUploadResult>")

    def _delete_many(self, asked: Asked) -> Reply:
        bucket = asked.key.rstrip("/")
        keys = re.findall(r"<Key>([^<]*)</Key>", asked.text.decode())
        for key in keys:
            self.arena.free(self.objects.pop(f"{bucket}/{_unescaped(key)}", ()))
        deleted = "".join(f"<Deleted><Key>{key}</Key></Deleted>" for key in keys)
        return _xml(f"<DeleteResult>{deleted}</DeleteResult>")

    def _list(self, asked: Asked) -> Reply:
        bucket = asked.key.rstrip("/") + "/"
        prefix = asked.query.get("prefix", "")
        after = asked.query.get("continuation-token") or asked.query.get("start-after", "")
        limit = int(asked.query.get("max-keys", "1000"))
        names = sorted(key[len(bucket) :] for key in self.objects if key.startswith(bucket + prefix))
        rows = list(islice(_rows(names, prefix, asked.query.get("delimiter", ""), after), limit + 1))
        text = "".join(self._row(bucket, name, is_folder=is_folder) for name, is_folder in rows[:limit])
        more = len(rows) > limit
        token = f"<NextContinuationToken>{escape(rows[limit - 1][0])}</NextContinuationToken>" if more else ""
        return _xml(
            f"<ListBucketResult><Prefix>{escape(prefix)}</Prefix><KeyCount>{len(rows[:limit])}</KeyCount>"
            f"<IsTruncated>{str(more).lower()}</IsTruncated>{token}{text}</ListBucketResult>"
        )

    def _row(self, bucket: str, name: str, *, is_folder: bool) -> str:
        if is_folder:
            return f"<CommonPrefixes><Prefix>{escape(name)}</Prefix></CommonPrefixes>"
        size = size_of(self.objects[bucket + name])
        return (
            f"<Contents><Key>{escape(name)}</Key><Size>{size}</Size><ETag>&quot;0&quot;</ETag>"
            "<LastModified>2026-11-02T10:00:00.000Z</LastModified></Contents>"
        )


def _unescaped(text: str) -> str:
    return unescape(text, {"&quot;": '"', "&apos;": "'"})


def _rows(names: list[str], prefix: str, delimiter: str, after: str) -> Iterable[tuple[str, bool]]:
    """Yield (name, is_folder) beyond `after`, folding names below a delimiter into their folder."""
    last = ""
    for name in names:
        inner, cut, _ = name[len(prefix) :].partition(delimiter) if delimiter else (name, "", "")
        row = prefix + inner + cut if cut else name
        if row > after and row != last:
            last = row
            yield row, bool(cut)


def _xml(text: str) -> Reply:
    return Reply("200 OK", "Content-Type: application/xml\r\n", f"<?xml version='1.0'?>{text}".encode())
