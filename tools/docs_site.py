"""Build the documentation site: the pages of docs/, and beside them what is made from the code, which cannot drift.

`python -m tools.docs_site [FOLDER]` writes it into FOLDER (default: site). It exits with 1, and says why, at a link
that leads nowhere, a page that nothing lists, a public name that no page of the API holds, and anything that a page
would load from elsewhere.
"""

from __future__ import annotations

import ast
import inspect
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

import prefect_tune as pt
from prefect_tune.cli import load_application
from tools.docs_links import broken

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("flows", "tasks", "blocks")
MADE = {"CHANGELOG.md": "changelog.md", "benchmarks/README.md": "benchmarks.md"}
"""Pages that lie elsewhere in the repository, and their places among those of docs/."""

API: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "flows": (
        "Flows and results",
        (
            "flows.tune",
            "flows.resume",
            "flows.durable_trainable",
            "results",
            "tuner.stop_requests",
            "tuner.audit",
            "flows.drill",
            "drills",
            "flows.maintain",
            "maintenance",
        ),
    ),
    "trainables": (
        "Trainables",
        (
            "runtime.trainable",
            "runtime.checkpoint",
            "core.experiment.retention",
            "core.experiment.failure_policy",
        ),
    ),
    "searches": (
        "Spaces and searches",
        (
            "core.search.domains",
            "core.search.space_json",
            "core.search.random_search",
            "integrations.optuna",
            "core.search.base",
        ),
    ),
    "schedulers": ("Schedulers", ("core.schedulers", "core.search.objective")),
    "stoppers": ("Stoppers", ("core.experiment.stoppers",)),
    "targets": ("Targets", ("blocks",)),
    "callbacks": ("Callbacks and loggers", ("callbacks", "loggers")),
    "tasks": ("Tasks", ("tasks", "artifact_sync")),
    "errors": ("Errors", ("core.errors",)),
}
"""The pages of the API, and the modules whose public names each holds, in the order in which they are shown."""


def main(folder: Path) -> int:
    """Return the exit code."""
    complaints = build(folder)
    for complaint in complaints:
        print(complaint)
    print(f"{folder}: {sum(1 for _ in folder.rglob('*.html'))} pages, {len(complaints)} complaints")
    return 1 if complaints else 0


def build(folder: Path) -> list[str]:
    """Write the site into `folder`, which is replaced; return what is wrong with it."""
    with tempfile.TemporaryDirectory(prefix="prefect-tune-site-") as stage:
        stage_pages(Path(stage))
        command = [sys.executable, "-m", "zensical", "build", "--strict", "--clean"]
        built = subprocess.run(command, cwd=stage, capture_output=True, text=True, check=False)
        if built.returncode:
            return [re.sub(r"\x1b\[[\d;]*m", "", built.stdout + built.stderr)]
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(Path(stage, "site"), folder)
        return [*unlisted(Path(stage)), *broken(folder)]


def stage_pages(stage: Path) -> None:
    """Lay out in `stage` everything that the site is made of."""
    pages = stage / "docs"
    shutil.copytree(ROOT / "docs", pages)
    shutil.copy(ROOT / "zensical.toml", stage)
    for source, page in MADE.items():
        (pages / page).write_text(re.sub(r"\]\((\.\./)?docs/", "](", (ROOT / source).read_text()))
    with (pages / "cli.md").open("a") as command_line:
        command_line.writelines(commands())
    for name, text in api_pages().items():
        (pages / "api").mkdir(exist_ok=True)
        (pages / "api" / f"{name}.md").write_text(text)
    homes = {name: f"api/{page}.md#prefect_tune.{name}" for page, names in api_names().items() for name in names}
    for path in pages.rglob("*.md"):
        path.write_text(finished(path.read_text(), depth=len(path.relative_to(pages).parts) - 1, homes=homes))
    for name, text in _BESIDE.items():
        (stage / name).parent.mkdir(parents=True, exist_ok=True)
        (stage / name).write_text(text)
    link_packages(stage / "packages" / "prefect_tune")


def link_packages(package: Path) -> None:
    """Show the rooms where they are imported from: nothing is imported to read what they say."""
    package.mkdir(parents=True)
    for source in [*(ROOT / "src" / "prefect_tune").iterdir(), *(ROOT / room for room in ROOMS)]:
        (package / source.name).symlink_to(source)


_BESIDE = {
    # All that the API has to know of Prefect: that a block is a model, whose fields have descriptions.
    "packages/prefect/__init__.py": "",
    "packages/prefect/blocks/__init__.py": "",
    "packages/prefect/blocks/core.py": "from pydantic import BaseModel\n\n\nclass Block(BaseModel): ...\n",
    # A model without the lists of its fields, which are shown one by one, and of its validators, which are private.
    "templates/python/material/pydantic_model.html.jinja": '{% extends "_base/pydantic_model.html.jinja" %}\n'
    + "".join(f"{{% block {part} %}}{{% endblock %}}\n" for part in ("config", "fields", "validators")),
}


# ------------------------------------------------------------------------------------------------------- pages


def finished(text: str, *, depth: int, homes: Mapping[str, str]) -> str:
    """Return a page as the site has it: links to pages that moved, to the API, and drawings in place of their links."""
    up = "../" * depth
    for source, page in MADE.items():
        text = text.replace(f"]({up}../{source}", f"]({up}{page}")
    return with_drawings(linked_to_api(with_code(text), {name: up + home for name, home in homes.items()}))


def with_code(text: str) -> str:
    """Put in the code of another file where a page asks for it: a whole module, or the first block of a page.

    Readers of the file itself, without the site, have a link in the next line.
    """

    def code(found: re.Match[str]) -> str:
        source = (ROOT / found["file"]).read_text()
        block = re.search(r"^```python\n.*?^```$", source, re.MULTILINE | re.DOTALL)
        return block[0] if block else f"```python\n{source}```"

    return re.sub(r"^<!-- the code of (?P<file>[\w./-]+) -->(\n\[.*\]\(.*\))?$", code, text, flags=re.MULTILINE)


def linked_to_api(text: str, homes: Mapping[str, str]) -> str:
    """Make a link of each public name where a page's prose first says it."""
    seen: set[str] = set()

    def link(found: re.Match[str]) -> str:
        code, name = found["code"], found["name"]
        if code is None or name in seen or name not in homes:
            return found[0]
        seen.add(name)
        return f"[{code}]({homes[name]})"

    skipped = r"^```.*?^```$|^#.*?$|\[[^\]]*\]\([^)]*\)"  # blocks, headings and links stay as they are
    said = r"(?P<code>`pt\.(?P<name>\w+)(?:\([^`]*\))?`)"
    return re.sub(f"{skipped}|{said}", link, text, flags=re.MULTILINE | re.DOTALL)


def with_drawings(text: str) -> str:
    """Put a drawing of ours into the page itself: then it has the colours that the reader chose there."""

    def drawing(found: re.Match[str]) -> str:
        svg = (ROOT / "docs" / found["file"]).read_text()
        plain = re.sub(r"<!--.*?-->|\n\s*", " ", svg, flags=re.DOTALL).strip()
        return f'<div class="drawing">\n{plain}\n</div>'

    return re.sub(r"^!\[[^\]]*\]\((?P<file>[\w-]+\.drawing\.svg)\)$", drawing, text, flags=re.MULTILINE)


def unlisted(stage: Path) -> Iterator[str]:
    """Yield a complaint for each page that is not in the site's lists, or only there."""
    listed = set(re.findall(r'"([\w./-]+\.md)"', (stage / "zensical.toml").read_text()))
    there = {path.relative_to(stage / "docs").as_posix() for path in (stage / "docs").rglob("*.md")}
    yield from (f"docs/{page}: not in the nav of zensical.toml" for page in sorted(there - listed))
    yield from (f"zensical.toml: there is no page {page}" for page in sorted(listed - there))


# --------------------------------------------------------------------------------------------------------- API


def public_names() -> dict[str, str]:
    """Return each public name's module, as `prefect_tune/__init__.py` imports it for type checkers."""
    door = ast.parse((ROOT / "src" / "prefect_tune" / "__init__.py").read_text())
    imports = [node for node in ast.walk(door) if isinstance(node, ast.ImportFrom) and node.module]
    return {
        name.name: str(node.module).removeprefix("prefect_tune.")
        for node in imports
        if str(node.module).startswith("prefect_tune.")
        for name in node.names
        if name.asname is None  # else it is no public name
    }


def api_names() -> dict[str, list[str]]:
    """Return the public names on each page of the API.

    Raises:
        LookupError: a name comes from a module that no page is for.
    """
    pages: dict[str, list[str]] = {page: [] for page in API}
    for name, module in sorted(public_names().items(), key=_place):
        homes = [page for page, (_, modules) in API.items() if module.startswith(modules)]
        if not homes:
            raise LookupError(f"pt.{name} of prefect_tune.{module}: tools/docs_site.py names no page for that module")
        pages[homes[0]].append(name)
    return pages


def _place(named: tuple[str, str]) -> tuple[int, str]:
    """Return what names are sorted by: the place of their modules in `API`, then themselves."""
    name, module = named
    every = [each for _, modules in API.values() for each in modules]
    return next((place for place, each in enumerate(every) if module.startswith(each)), len(every)), name.casefold()


def api_pages() -> dict[str, str]:
    """Return the pages of the API, by name."""
    pages = {}
    for page, names in api_names().items():
        title = API[page][0]
        summary = "".join(f"| [`pt.{name}`](#prefect_tune.{name}) | {_summary(name)} |\n" for name in names)
        pages[page] = f"# {title}\n\n`import prefect_tune as pt`\n\n| | |\n|---|---|\n{summary}\n" + "".join(
            f"::: prefect_tune.{name}\n\n" for name in names
        )
    return {**pages, "integrations": _integrations()}


def _summary(name: str) -> str:
    """Return the first line of a public name's docstring."""
    found = getattr(getattr(pt, name), "fn", getattr(pt, name))
    said = inspect.getdoc(found) if inspect.isclass(found) or inspect.isfunction(found) else None  # not of an alias
    return (said or "").partition("\n\n")[0].replace("\n", " ").replace("|", "\\|")


def _integrations() -> str:
    modules = sorted(path.stem for path in (ROOT / "src/prefect_tune/integrations").glob("*.py"))
    shown = [name for name in modules if name not in ("__init__", "common")]
    said = "# Integrations\n\n[How to use these modules](../integrations.md).\n\n"
    return said + "".join(
        f"## `prefect_tune.integrations.{name}`\n\n::: prefect_tune.integrations.{name}\n"
        "    options:\n      show_root_heading: false\n      heading_level: 3\n\n"
        for name in shown
    )


# ---------------------------------------------------------------------------------------------------- commands


def commands() -> Iterator[str]:
    """Yield what the page on the command line says of each command and its options."""
    yield "\n## Every command, every option\n"
    yield from _commands_of(typer.main.get_command(load_application()), "prefect-tune")


def _commands_of(command: Any, path: str) -> Iterator[str]:
    context = typer.Context(command)
    if isinstance(command, TyperGroup):
        for name in command.list_commands(context):
            found = command.get_command(context, name)
            if found is not None and not found.hidden:
                yield from _commands_of(found, f"{path} {name}")
    else:
        yield from _command(command, context, path)


def _command(command: TyperCommand, context: typer.Context, path: str) -> Iterator[str]:
    first, _, more = (command.help or "").partition("\n\n")
    yield f"\n### {path.removeprefix('prefect-tune ')}\n\n{_escaped(' '.join(first.split()))}\n\n"
    usage = " ".join(piece.strip("{}") for piece in command.collect_usage_pieces(context))
    yield f"```text\n{path} {usage}\n```\n"
    for paragraph in filter(None, (each.strip("\b\n ") for each in more.split("\n\n"))):
        is_example = paragraph.startswith("prefect-tune ")
        yield f"\n```text\n{paragraph}\n```\n" if is_example else f"\n{_escaped(' '.join(paragraph.split()))}\n"
    records = [found for param in command.params if (found := param.get_help_record(context)) is not None]
    shown = [(option, about) for option, about in records if option.startswith("-")]
    if shown:
        yield "\n| option | |\n|---|---|\n"
    for option, about in shown:
        bars = option.replace("|", "\\|")
        yield f"| `{bars}` | {_escaped(about)} |\n"


def _escaped(text: str) -> str:
    """Return `text` as Markdown that shows it as it is."""
    return re.sub(r"([\\`*_{}\[\]<>|])", r"\\\1", text)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "site"))
