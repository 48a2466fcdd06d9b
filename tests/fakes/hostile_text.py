"""A text that controls a terminal and reorders a line, and the check that an output has made it visible."""

from __future__ import annotations

import unicodedata

HOSTILE = "a\x1b]0;title\x07\x9b31m\u202egpj.exe\u2066\u200f\r\x85\u2028z"
_BIDIRECTIONAL = {"LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI"}


def require_visible(output: str) -> None:
    """Check that `output` has no control character but tab and newline, and no bidirectional one."""
    found = {
        ascii(each)
        for each in set(output) - {"\n", "\t"}
        if unicodedata.category(each) in ("Cc", "Zl", "Zp", "Cs")
        or unicodedata.bidirectional(each) in _BIDIRECTIONAL
        or each in "\u061c\u200e\u200f"
    }
    assert not found, f"{found} in {output!r}"
