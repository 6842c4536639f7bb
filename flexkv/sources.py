"""Where settings come from: `Source` (one of them, translated to our names) - `environment` (the
only reader of the environment), `read_file` - `explain` (what is wrong, in a line), `warn`.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource

from flexkv.compat import translate
from flexkv.errors import ConfigError

PREFIX = "FLEXKV_"
_MACHINERY = {"flexkv", "pydantic", "pydantic_settings"}


class ConfigWarning(UserWarning):
    """A setting was accepted but does nothing here; the message says why."""


def warn(message: str) -> None:
    """Warn at the line that asked for the configuration, however deep the machinery above it is."""
    frame, depth = sys._getframe(1), 1
    while frame.f_back and frame.f_globals["__name__"].split(".")[0] in _MACHINERY:
        frame, depth = frame.f_back, depth + 1
    warnings.warn(message, ConfigWarning, stacklevel=depth + 1)


class Source(PydanticBaseSettingsSource):
    """One source of settings, already translated to our names."""

    def __init__(
        self, settings_cls: type[BaseSettings], given: Mapping[str, Any], origin: str
    ) -> None:
        super().__init__(settings_cls)
        self.values, dead = translate(given, settings_cls.model_fields.keys(), origin)
        for name, reason in dead.items():
            warn(f"{origin}: {name!r} has no effect: {reason}")

    def get_field_value(self, field: Any, field_name: str) -> tuple[Any, str, bool]:
        return self.values.get(field_name), field_name, False

    def __call__(self) -> dict[str, Any]:
        return self.values


def environment() -> dict[str, str]:
    """Return the variables that begin with FLEXKV_, by their names in lower case without it."""
    return {
        name.removeprefix(PREFIX).lower(): value
        for name, value in os.environ.items()
        if name.startswith(PREFIX) and value != ""
    }


def read_file(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read a YAML or JSON file of settings.

    Raises:
        ConfigError: it cannot be read, or holds something else.
    """
    try:
        content = yaml.safe_load(Path(str(path)).expanduser().read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read the configuration file {path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is neither YAML nor JSON: {error}") from error
    if content is None:
        return {}
    if not isinstance(content, dict) or not all(isinstance(name, str) for name in content):
        raise ConfigError(
            f"{path} must hold one mapping of settings, such as 'host_cache_bytes: 32GiB'"
        )
    return content


def explain(error: ValidationError) -> str:
    """One line per wrong setting: which, its value, what is expected."""
    lines = []
    for item in error.errors(include_url=False):
        message = item["msg"].removeprefix("Value error, ")
        where = ".".join(str(part) for part in item["loc"])
        got = repr(item["input"])
        shown = where and item["loc"][0] != "key_secret" and got not in message
        lines.append((f"{where}: " if where else "") + message + (f" (got {got})" if shown else ""))
    return "; ".join(lines)
