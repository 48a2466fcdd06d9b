"""Find broken links in a built site, and resources that it would load from other hosts.

Links to other sites are parsed and not requested: the build needs no network.
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
_NOT_LOADED = ("canonical", "alternate", "prev", "next")  # kinds of <link> that a browser does not load
_HOST = re.compile(r"[a-z0-9-]+(\.[a-z0-9-]+)+")


@dataclass
class _Page(HTMLParser):
    """The anchors and links of a page."""

    anchors: set[str] = field(default_factory=set)
    followed: list[str] = field(default_factory=list)
    loaded: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = {name: value or "" for name, value in attrs}
        self.anchors |= {attributes[name] for name in ("id", "name") if name in attributes}
        if tag in _FOLLOWED and _FOLLOWED[tag] in attributes:
            self.followed.append(attributes[_FOLLOWED[tag]])
        if tag in _LOADED and _LOADED[tag] in attributes and attributes.get("rel") not in _NOT_LOADED:
            self.loaded.append(attributes[_LOADED[tag]])


def find_broken_links(site: Path) -> Iterator[str]:
    """Yield a complaint for each broken link of each page."""
    pages = {path: _parse_page(path) for path in sorted(site.rglob("*.html"))}
    for path, page in pages.items():
        if path.name == "404.html":
            continue  # it is shown at any depth, and its links begin at the root of the host
        page_path = path.relative_to(site)
        for link in sorted({*page.followed, *page.loaded}):
            if problem := _find_link_problem(link, path, pages):
                yield f"{page_path}: {link!r}: {problem}"
        yield from (f"{page_path}: {link!r} is loaded from elsewhere" for link in page.loaded if _is_external(link))


def _parse_page(path: Path) -> _Page:
    page = _Page()
    page.feed(path.read_text())
    return page


def _is_external(link: str) -> bool:
    return bool(urlsplit(link).netloc)


def _find_link_problem(link: str, path: Path, pages: dict[Path, _Page]) -> str | None:
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
