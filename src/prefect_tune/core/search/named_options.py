"""Objects whose class has a name in JSON, and whose fields are its options: `{"ASHA": {"max_t": 81}}`.

The metadata of a field says which value is a space, or a time, named `time_seconds` in JSON.
"""

from __future__ import annotations

from dataclasses import MISSING, Field, fields, is_dataclass
from typing import Any, cast

from prefect_tune.core.search.space_json import space_to_json
from prefect_tune.core.values import HasJsonForm, canonical_json
from prefect_tune.registry import BUILT_IN

_MODULES = {name: module for kind in BUILT_IN.values() for name, module in kind.items()}


class NamedOptions(HasJsonForm):
    """The configuration of a scheduler, search algorithm or stopper. Only built-in classes have a name in JSON."""

    __slots__ = ()

    def json_form(self) -> object:
        """Return the name of the class with the options that differ from their defaults."""
        name, options = type(self).__name__, cast("Any", self)
        if not is_dataclass(options) or not type(self).__module__.startswith(_MODULES.get(name, "no module")):
            return super().json_form()
        defaults = {option: None if option.default is MISSING else option.default for option in fields(options)}
        values = {option: getattr(options, option.name) for option in defaults}
        changed = {option: value for option, value in values.items() if value != defaults[option]}
        form: dict[str, dict[str, object]] = {name: {}}
        for option, value in changed.items():
            kind = option.metadata.get("json")
            written = value.total_seconds() if kind == "seconds" else space_to_json(value) if kind == "space" else value
            form[name][option_name(option)] = written
        try:
            canonical_json(form)
        except (TypeError, ValueError):
            return super().json_form()
        return form


def option_name(option: Field[Any]) -> str:
    """Return the name of a field in JSON."""
    return f"{option.name}_seconds" if option.metadata.get("json") == "seconds" else option.name
