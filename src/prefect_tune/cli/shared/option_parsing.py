"""Parse spaces, stop criteria, schedulers and settings from command line options and files."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from prefect_tune.core.did_you_mean import did_you_mean
from prefect_tune.core.errors import InvalidInput

_CALL = re.compile(r"([A-Za-z_]\w*)\((.*)\)", re.DOTALL)
_DECIMAL = re.compile(r"[-+]?(\d+(\.\d*)?|\.\d+)([eE][-+]?\d+)?")
_CHOICES = frozenset({"choice", "grid_search"})
_RANGES = frozenset({"uniform", "loguniform", "randint", "lograndint", "randn"})
_DOMAINS = _CHOICES | _RANGES | {f"q{name}" for name in _RANGES}
_TORN = re.compile(rf"\s*({'|'.join(_DOMAINS)})\s*[(\[{{]")
_NOT_PLAIN = re.compile(r"""["'()\[\]{}]""")
_QUOTED = "write a text in quotes: '\"...\"'"


def space_from(file: Path | None, settings: Sequence[str]) -> dict[str, Any]:
    """Return the space as JSON: the file's, with each `name=value` set in it; `model.depth=3` sets it in `model`.

    Raises:
        InvalidInput: the file cannot be read, or a setting is not valid.
    """
    space = _read(file) if file else {}
    for setting in settings:
        name, equals, text = setting.partition("=")
        *above, last = name.split(".")
        if not (equals and last and all(above)):
            raise InvalidInput(f"--set {setting!r}: expected name=value, such as lr=loguniform(1e-4,1e-1)")
        within = space
        for each in above:
            within = within.setdefault(each, {})
            if not isinstance(within, dict):
                raise InvalidInput(f"--set {setting!r}: expected {each!r} to be an object, found a value")
        within[last] = _value(text, setting)
    return space


def _read(file: Path) -> dict[str, Any]:
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInput(f"--space {file}: {error}") from error
    found = _yaml(text, file) if file.suffix in {".yaml", ".yml"} else _json(text, f"--space {file}")
    if isinstance(found, dict):
        return found
    raise InvalidInput(f'--space {file}: expected an object such as {{"lr": {{"uniform": [0, 1]}}}}')


def object_from(text: str, where: str) -> dict[str, Any]:
    """Parse `text` as a JSON object.

    Raises:
        InvalidInput: it is not a JSON object.
    """
    found = _json(text, where)
    if isinstance(found, dict):
        return found
    raise InvalidInput(f'{where}: expected a JSON object such as {{"name": "value"}}, found {text[:40]!r}')


def _json(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidInput(f"{where}: not valid JSON: {error}") from error


def _yaml(text: str, file: Path) -> Any:
    """Parse YAML with the floats of YAML 1.2, where 1e-4 is a number."""
    import yaml

    loader: Any = type("Loader", (yaml.SafeLoader,), {})  # of its own: a resolver stays with the class
    loader.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(f"{_DECIMAL.pattern}$"), list("-+.0123456789"))
    try:
        return yaml.load(text, loader)  # noqa: S506  it is a SafeLoader
    except (yaml.YAMLError, RecursionError) as error:
        raise InvalidInput(f"--space {file}: not valid YAML: {' '.join(str(error).split())}") from error


def _value(text: str, setting: str) -> Any:
    call = _CALL.fullmatch(text.strip())
    if call is None:
        if torn := _TORN.match(text):
            raise InvalidInput(f"--set {setting!r}: expected {torn[1]}(...) in round brackets; {_QUOTED}")
        return _plain(text)
    name, arguments = call[1], _arguments(call[2], setting)
    if name not in _DOMAINS:
        meant = did_you_mean(name, _DOMAINS) or ";"
        raise InvalidInput(f"--set {setting!r}: unknown distribution {name!r}{meant} {_QUOTED}")
    is_list = name in _CHOICES and len(arguments) == 1 and isinstance(arguments[0], list)
    return {name: arguments[0] if is_list else arguments}


def _arguments(text: str, setting: str) -> list[Any]:
    try:
        return list(json.loads(f"[{text}]"))
    except ValueError as error:  # choice(adam,sgd)
        if _NOT_PLAIN.search(text):
            expected = 'JSON, such as choice("adam","sgd") or choice([1,2],[3]), or words alone: choice(adam,sgd)'
            raise InvalidInput(f"--set {setting!r}: in the brackets expected {expected}") from error
        return [_plain(each.strip()) for each in text.split(",")]


def _plain(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return float(text) if _DECIMAL.fullmatch(text) else text


def stop_from(criteria: Sequence[str]) -> str | dict[str, Any] | None:
    """Parse stop criteria: `step=100` (of several, the first one reached stops), `package.module:Name`, or JSON.

    Raises:
        InvalidInput: a criterion is none of these.
    """
    match criteria:
        case [text] if text.lstrip().startswith("{"):
            found: dict[str, Any] = _json(text, "--stop")
            return found
        case [name] if ":" in name and "=" not in name:
            return name
    return numbers_from(criteria, "--stop", "step=100, or package.module:name")


def numbers_from(settings: Sequence[str], option: str, expected: str = "name=number") -> dict[str, float] | None:
    """Parse `name=number` settings into one dict; None if there are none.

    Raises:
        InvalidInput: a setting is not of this form.
    """
    for setting in settings:
        found = _plain(setting.partition("=")[2])
        if isinstance(found, bool) or not isinstance(found, int | float):
            raise InvalidInput(f"{option} {setting!r}: expected {expected}")
    return values_from(settings, option, expected)


def values_from(settings: Sequence[str], option: str, expected: str = "name=value") -> dict[str, Any] | None:
    """Parse `name=value` settings into one dict, each value as JSON or else as text; None if there are none.

    Raises:
        InvalidInput: a setting is not of this form.
    """
    found: dict[str, Any] = {}
    for setting in settings:
        name, equals, text = setting.partition("=")
        if not (name and equals):
            raise InvalidInput(f"{option} {setting!r}: expected {expected}")
        found[name] = _plain(text)
    return found or None


def spelling_from(text: str | None, option: str) -> str | Mapping[str, Any] | None:
    """Parse a scheduler or a search from JSON; a name alone stands for its defaults."""
    if text is None or not text.lstrip().startswith("{"):
        return text
    found = _json(text, option)
    return found if isinstance(found, dict) else text
