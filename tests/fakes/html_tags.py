"""The tags, attributes and text of an HTML text."""

from __future__ import annotations

from html.parser import HTMLParser

_VOID = frozenset({"!doctype", "br", "img", "meta"})


class Tags(HTMLParser):
    """Each tag with its attributes, and the text; asserts that each tag is closed."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self._open: list[str] = []
        self.feed(html)
        assert self._open == []

    @property
    def names(self) -> set[str]:
        return {tag for tag, _ in self.elements}

    @property
    def attributes(self) -> set[str]:
        return {name for _, attributes in self.elements for name in attributes}

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in _VOID:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data
