"""Find what does not work in a built site: links that lead nowhere, and what would be loaded from elsewhere.

Links to other sites are looked at, and not asked for: the build needs no network.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

_FOLLOWED = {"a": "href"}
_LOADED = {"img": "src", "script": "src", "link": "href", "source": "src", "iframe": "src"}
_TOLD = ("canonical", "alternate", "prev", "next")  # kinds of <link> that a browser does not load
_HOST = re.compile(r"[a-z0-9-]+(\.[a-z0-9-]+)+")


@dataclass
class _Page(HTMLParser):
    """What a page holds that can be pointed at, and what it points at."""

    anchors: set[str] = field(default_factory=set)
    followed: list[str] = field(default_factory=list)
    loaded: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.anchors |= {given[name] for name in ("id", "name") if name in given}
        if tag in _FOLLOWED and _FOLLOWED[tag] in given:
            self.followed.append(given[_FOLLOWED[tag]])
        if tag in _LOADED and _LOADED[tag] in given and given.get("rel") not in _TOLD:
            self.loaded.append(given[_LOADED[tag]])


def broken(site: Path) -> Iterator[str]:
    """Yield a complaint for each link of each page that does not lead anywhere."""
    pages = {path: _read(path) for path in sorted(site.rglob("*.html"))}
    for path, page in pages.items():
        if path.name == "404.html":
            continue  # it is shown at any depth, and its links begin at the root of the host
        where = path.relative_to(site)
        for link in sorted({*page.followed, *page.loaded}):
            if wrong := _wrong_with(link, path, pages):
                yield f"{where}: {link!r}: {wrong}"
        yield from (f"{where}: {each!r} is loaded from elsewhere" for each in page.loaded if _is_elsewhere(each))


def _read(path: Path) -> _Page:
    page = _Page()
    page.feed(path.read_text())
    return page


def _is_elsewhere(link: str) -> bool:
    return bool(urlsplit(link).netloc)


def _wrong_with(link: str, path: Path, pages: dict[Path, _Page]) -> str | None:
    parts = urlsplit(link)
    if parts.scheme in ("data", "mailto"):
        return None
    if parts.scheme or parts.netloc:
        return None if parts.scheme == "https" and _HOST.fullmatch(parts.netloc) else "no https address"
    target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
    target = target / "index.html" if target.is_dir() else target
    if not target.is_file():
        return "nothing is there"
    if parts.fragment and target in pages and unquote(parts.fragment) not in pages[target].anchors:
        return "there is no such place on that page"
    return None
