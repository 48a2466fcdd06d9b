"""Build the documentation site: the pages of docs/, and pages generated from the code.

`python -m tools.docs_site [FOLDER]` writes it into FOLDER (default: site). It prints complaints and exits with 1 for
broken links, unlisted pages, public names on no page of the API, and resources of other hosts.
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
from importlib import import_module
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

import prefect_tune as pt
from prefect_tune.cli import load_application
from tools.docs_links import find_broken_links

ROOT = Path(__file__).resolve().parent.parent
PACKAGE_FOLDERS = ("flows", "tasks", "blocks")
MOVED_PAGES = {"CHANGELOG.md": "changelog.md", "benchmarks/README.md": "benchmarks.md"}
"""Pages from elsewhere in the repository, and their paths below docs/."""

API: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "flows": (
        "Flows and results",
        (
            *("flows.tune", "flows.resume", "flows.durable_trainable", "results", "tuner.stop_requests"),
            *("tuner.audit", "flows.drill", "drills", "flows.maintain", "maintenance"),
        ),
    ),
    "trainables": (
        "Trainables",
        ("runtime.trainable", "runtime.checkpoint", "core.experiment.retention", "core.experiment.failure_policy"),
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
        process = subprocess.run(command, cwd=stage, capture_output=True, text=True, check=False)
        if process.returncode:
            return [re.sub(r"\x1b\[[\d;]*m", "", process.stdout + process.stderr)]
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(Path(stage, "site"), folder)
        return [*find_unlisted_pages(Path(stage)), *find_broken_links(folder)]


def stage_pages(stage: Path) -> None:
    """Write the sources of the site into `stage`."""
    pages = stage / "docs"
    shutil.copytree(ROOT / "docs", pages)
    shutil.copy(ROOT / "zensical.toml", stage)
    for source, page in MOVED_PAGES.items():
        (pages / page).write_text(re.sub(r"\]\((\.\./)?docs/", "](", (ROOT / source).read_text()))
    with (pages / "cli.md").open("a") as command_line:
        command_line.writelines(describe_commands())
    for name, text in make_api_pages().items():
        (pages / "api").mkdir(exist_ok=True)
        (pages / "api" / f"{name}.md").write_text(text)
    homes = {name: f"api/{page}.md#prefect_tune.{name}" for page, names in find_api_names().items() for name in names}
    for path in pages.rglob("*.md"):
        path.write_text(prepare_page(path.read_text(), depth=len(path.relative_to(pages).parts) - 1, homes=homes))
    for name, text in _EXTRA_FILES.items():
        (stage / name).parent.mkdir(parents=True, exist_ok=True)
        (stage / name).write_text(text)
    link_packages(stage / "packages" / "prefect_tune")


def link_packages(package: Path) -> None:
    """Link the source folders to where they are imported from: the site reads them without an import."""
    package.mkdir(parents=True)
    for source in [*(ROOT / "src" / "prefect_tune").iterdir(), *(ROOT / folder for folder in PACKAGE_FOLDERS)]:
        (package / source.name).symlink_to(source)


_EXTRA_FILES = {
    # The API pages need only this of Prefect: a block is a model whose fields have descriptions.
    "packages/prefect/__init__.py": "",
    "packages/prefect/blocks/__init__.py": "",
    "packages/prefect/blocks/core.py": "from pydantic import BaseModel\n\n\nclass Block(BaseModel): ...\n",
    # A model without the lists of its fields, which are shown one by one, and of its validators, which are private.
    "templates/python/material/pydantic_model.html.jinja": '{% extends "_base/pydantic_model.html.jinja" %}\n'
    + "".join(f"{{% block {part} %}}{{% endblock %}}\n" for part in ("config", "fields", "validators")),
}


# ------------------------------------------------------------------------------------------------------- pages


def prepare_page(text: str, *, depth: int, homes: Mapping[str, str]) -> str:
    """Return a page of the site: links to moved pages and to the API resolved, code and drawings inserted."""
    prefix = "../" * depth
    for source, page in MOVED_PAGES.items():
        text = text.replace(f"]({prefix}../{source}", f"]({prefix}{page}")
    return insert_drawings(link_to_api(insert_code(text), {name: prefix + home for name, home in homes.items()}))


def insert_code(text: str) -> str:
    """Insert the code of another file where a page asks for it: a whole module, or the first block of a page.

    Readers of the file itself, without the site, have a link in the next line.
    """

    def insert(match: re.Match[str]) -> str:
        source = (ROOT / match["file"]).read_text()
        block = re.search(r"^```python\n.*?^```$", source, re.MULTILINE | re.DOTALL)
        return block[0] if block else f"```python\n{source}```"

    return re.sub(r"^<!-- the code of (?P<file>[\w./-]+) -->(\n\[.*\]\(.*\))?$", insert, text, flags=re.MULTILINE)


def link_to_api(text: str, homes: Mapping[str, str]) -> str:
    """Link each public name to the API where the page's prose first mentions it."""
    seen: set[str] = set()

    def link(match: re.Match[str]) -> str:
        code, name = match["code"], match["name"]
        if code is None or name in seen or name not in homes:
            return match[0]
        seen.add(name)
        return f"[{code}]({homes[name]})"

    skipped = r"^```.*?^```$|^#.*?$|\[[^\]]*\]\([^)]*\)"  # blocks, headings and links stay as they are
    mention = r"(?P<code>`pt\.(?P<name>\w+)(?:\([^`]*\))?`)"
    return re.sub(f"{skipped}|{mention}", link, text, flags=re.MULTILINE | re.DOTALL)


def insert_drawings(text: str) -> str:
    """Embed our drawings into the page: they get the color scheme that the reader chose."""

    def insert(match: re.Match[str]) -> str:
        svg = (ROOT / "docs" / match["file"]).read_text()
        plain = re.sub(r"<!--.*?-->|\n\s*", " ", svg, flags=re.DOTALL).strip()
        return f'<div class="drawing">\n{plain}\n</div>'

    return re.sub(r"^!\[[^\]]*\]\((?P<file>[\w-]+\.drawing\.svg)\)$", insert, text, flags=re.MULTILINE)


def find_unlisted_pages(stage: Path) -> Iterator[str]:
    """Yield a complaint for each page that is not in the site's lists, or only there."""
    listed = set(re.findall(r'"([\w./-]+\.md)"', (stage / "zensical.toml").read_text()))
    existing = {path.relative_to(stage / "docs").as_posix() for path in (stage / "docs").rglob("*.md")}
    yield from (f"docs/{page}: not in the nav of zensical.toml" for page in sorted(existing - listed))
    yield from (f"zensical.toml: there is no page {page}" for page in sorted(listed - existing))


# --------------------------------------------------------------------------------------------------------- API


def find_public_names() -> dict[str, str]:
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


def find_api_names() -> dict[str, list[str]]:
    """Return the public names on each page of the API.

    Raises:
        LookupError: a name comes from a module that no page is for.
    """
    pages: dict[str, list[str]] = {page: [] for page in API}
    for name, module in sorted(find_public_names().items(), key=_sort_key):
        homes = [page for page, (_, modules) in API.items() if module.startswith(modules)]
        if not homes:
            raise LookupError(f"pt.{name} of prefect_tune.{module}: tools/docs_site.py names no page for that module")
        pages[homes[0]].append(name)
    return pages


def _sort_key(api_name: tuple[str, str]) -> tuple[int, str]:
    """Return the index of the name's module in `API`, and the name."""
    name, module = api_name
    prefixes = [prefix for _, modules in API.values() for prefix in modules]
    index = next((number for number, prefix in enumerate(prefixes) if module.startswith(prefix)), len(prefixes))
    return index, name.casefold()


def make_api_pages() -> dict[str, str]:
    """Return the pages of the API, by name."""
    pages = {}
    for page, names in find_api_names().items():
        title = API[page][0]
        summary = "".join(f"| [`pt.{name}`](#prefect_tune.{name}) | {_get_summary(name)} |\n" for name in names)
        pages[page] = f"# {title}\n\n`import prefect_tune as pt`\n\n| | |\n|---|---|\n{summary}\n" + "".join(
            f"::: prefect_tune.{name}\n\n" for name in names
        )
    return {**pages, "integrations": _make_integrations_page()}


def find_alias_docstring(name: str) -> str:
    """Return the docstring below a public type alias; empty if it has none."""
    source = inspect.getsource(import_module(f"prefect_tune.{find_public_names()[name]}"))
    match = re.search(rf'^{name}: TypeAlias = .*\n"""(.*?)"""', source, re.MULTILINE | re.DOTALL)
    return match[1] if match else ""


def _get_summary(name: str) -> str:
    """Return the first line of a public name's docstring."""
    value = getattr(getattr(pt, name), "fn", getattr(pt, name))
    is_alias = not (inspect.isclass(value) or inspect.isfunction(value))
    docstring = find_alias_docstring(name) if is_alias else inspect.getdoc(value) or ""
    return docstring.partition("\n\n")[0].replace("\n", " ").replace("|", "\\|")


def _make_integrations_page() -> str:
    modules = sorted(path.stem for path in (ROOT / "src/prefect_tune/integrations").glob("*.py"))
    names = [name for name in modules if name not in ("__init__", "common")]
    heading = "# Integrations\n\n[How to use these modules](../integrations.md).\n\n"
    return heading + "".join(
        f"## `prefect_tune.integrations.{name}`\n\n::: prefect_tune.integrations.{name}\n"
        "    options:\n      show_root_heading: false\n      heading_level: 3\n\n"
        for name in names
    )


# ---------------------------------------------------------------------------------------------------- commands


def describe_commands() -> Iterator[str]:
    """Yield the section of the command-line page on each command and its options."""
    yield "\n## Every command, every option\n"
    yield from _describe_commands(typer.main.get_command(load_application()), "prefect-tune")


def _describe_commands(command: Any, path: str) -> Iterator[str]:
    context = typer.Context(command)
    if isinstance(command, TyperGroup):
        for name in command.list_commands(context):
            subcommand = command.get_command(context, name)
            if subcommand is not None and not subcommand.hidden:
                yield from _describe_commands(subcommand, f"{path} {name}")
    else:
        yield from _describe_command(command, context, path)


def _describe_command(command: TyperCommand, context: typer.Context, path: str) -> Iterator[str]:
    first, _, more = (command.help or "").partition("\n\n")
    yield f"\n### {path.removeprefix('prefect-tune ')}\n\n{_escape_markdown(' '.join(first.split()))}\n\n"
    usage = " ".join(piece.strip("{}") for piece in command.collect_usage_pieces(context))
    yield f"```text\n{path} {usage}\n```\n"
    for paragraph in filter(None, (part.strip("\b\n ") for part in more.split("\n\n"))):
        is_example = paragraph.startswith("prefect-tune ")
        yield f"\n```text\n{paragraph}\n```\n" if is_example else f"\n{_escape_markdown(' '.join(paragraph.split()))}\n"
    records = [record for param in command.params if (record := param.get_help_record(context)) is not None]
    options = [(option, about) for option, about in records if option.startswith("-")]
    if options:
        yield "\n| option | |\n|---|---|\n"
    for option, about in options:
        bars = option.replace("|", "\\|")
        yield f"| `{bars}` | {_escape_markdown(about)} |\n"


def _escape_markdown(text: str) -> str:
    """Return `text` as Markdown that shows it as it is."""
    return re.sub(r"([\\`*_{}\[\]<>|])", r"\\\1", text)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "site"))
