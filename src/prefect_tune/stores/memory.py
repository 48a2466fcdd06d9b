"""Memory for bytes in motion that begins at a page, and is used again.

The kernel copies a GiB from a file into such memory in 0.13 CPU seconds and into a `bytearray`, which begins 16
bytes after a page, in 0.47 (AMD EPYC; what a socket delivers, 0.25 and 0.45); fresh memory costs page faults.
"""

from __future__ import annotations

import mmap
import sys
import threading

__all__ = ["SpareMemory"]

_BLOCK_BYTES = 16 << 20
_UNUSED_REFERENCES = 3  # the pool's list, the loop's variable, and the argument of getrefcount itself


class SpareMemory:
    """Hands out page-aligned memory with anything in it, a block at a time; may be used from several threads."""

    def __init__(self, block_bytes: int = _BLOCK_BYTES) -> None:
        self._block_bytes = block_bytes
        self._blocks: list[mmap.mmap] = []
        self._lock = threading.Lock()

    def view(self, size_bytes: int) -> memoryview:
        """Return memory that belongs to whoever holds the view, or a slice of it, and to nobody else."""
        with self._lock:
            for block in self._blocks:
                # A view refers to its block: where nobody else does, nobody has a view.
                if len(block) >= size_bytes and sys.getrefcount(block) == _UNUSED_REFERENCES:
                    return memoryview(block)[:size_bytes]
            block = mmap.mmap(-1, max(size_bytes, self._block_bytes))
            if hasattr(mmap, "MADV_HUGEPAGE"):
                block.madvise(mmap.MADV_HUGEPAGE)
            self._blocks.append(block)
            return memoryview(block)[:size_bytes]

    def clear(self) -> None:
        """Let go of what nobody holds."""
        with self._lock:
            self._blocks.clear()
