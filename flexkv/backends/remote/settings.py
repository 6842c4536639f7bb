"""Options of remote stores: `RemoteSettings.read` checks what the configuration says, once, at the
door; `secret` reads a password from where it is kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any, Self

from flexkv.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteSettings:
    """What may be set for every remote store.

    `prefix` tells caches that share a server apart. Blocks move over `connections` connections, a
    thread each. No answer within `timeout_ms` for one block is a failure; `failures` in a row and
    the store is left alone for `retry_ms`, for longer each time.
    """

    prefix: str = "flexkv"
    connections: int = 2
    timeout_ms: int = 2000
    failures: int = 3
    retry_ms: int = 500

    @classmethod
    def read(cls, settings: Mapping[str, Any]) -> Self:
        """Check `settings`.

        Raises:
            ConfigError: an option is unknown, missing, of the wrong type or out of range.
        """
        known = {option.name: option for option in fields(cls)}
        if unknown := sorted(set(settings) - set(known)):
            raise ConfigError(
                f"remote store: unknown setting {', '.join(unknown)}; known: {', '.join(known)}"
            )
        for name, option in known.items():
            required = option.default is MISSING and option.default_factory is MISSING
            if required and name not in settings:
                raise ConfigError(f"remote store: {name} is missing")
        made = cls(**settings)
        made.check()
        return made

    def check(self) -> None:
        """Raise ConfigError for values that cannot be used; subclasses check theirs, too."""
        if not isinstance(self.prefix, str) or not self.prefix.isprintable() or " " in self.prefix:
            raise ConfigError(f"remote store: prefix must be a word, got {self.prefix!r}")
        for name in ("connections", "timeout_ms", "failures", "retry_ms"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ConfigError(
                    f"remote store: {name} must be a whole number >= 1, got {value!r}"
                )


def secret(given: str, path: str) -> str:
    """Return a password: `given`, or what the file at `path` holds; it is never logged.

    Raises:
        ConfigError: the file cannot be read.
    """
    if not path:
        return given
    try:
        return Path(path).expanduser().read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the password file {path}: {error}") from error


def hidden(default: str = "") -> Any:
    """A field whose value no repr shows."""
    return field(default=default, repr=False)
