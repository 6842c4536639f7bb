"""Options of the disk tier: `DiskSettings.read` checks what the configuration says, once, at the
door.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from flexkv.errors import ConfigError

ENGINES = ("auto", "io_uring", "threads")
MISMATCH_RULES = ("error", "clear")
REGISTER_RULES = ("auto", "never")


@dataclass(frozen=True, slots=True)
class DiskSettings:
    """What may be set for the disk tier.

    `directories` are striped in the order given; put them on different devices. `engine` is
    "auto", "io_uring" or "threads". `queue_depth` (I/Os) and `in_flight_bytes` limit what the
    device has to do at once, `threads` is the size of the thread engine. `register_buffers` "auto"
    registers a prefaulted host tier with io_uring, which pins it and spares much of the CPU time of
    large I/Os; "never" does not. A batch is moved in
    chunks of `chunk_bytes`, `chunks_in_flight` of them at a time, so that checksums of one
    chunk are computed while the next one is read. `on_mismatch` says what to do with a foreign,
    older or damaged store or one of another identity: "error" or "clear". `lock_timeout_ms` is
    how long to wait for a killed owner whose last I/O the kernel has not finished yet.
    """

    directories: tuple[Path, ...]
    engine: str = "auto"
    queue_depth: int = 64
    in_flight_bytes: int = 32 << 20
    register_buffers: str = "auto"
    threads: int = 8
    chunk_bytes: int = 8 << 20
    chunks_in_flight: int = 8
    on_mismatch: str = "error"
    lock_timeout_ms: int = 3000

    @classmethod
    def read(cls, settings: Mapping[str, Any]) -> DiskSettings:
        """Check `settings`; `directories` may be a list of paths or one text with ";" between them.

        Raises:
            ConfigError: an option is unknown, missing, of the wrong type or out of range.
        """
        known = {field.name for field in fields(cls)}
        unknown = sorted(set(settings) - known)
        if unknown:
            raise ConfigError(
                f"disk tier: unknown setting {', '.join(unknown)}; "
                f"known: {', '.join(sorted(known))}"
            )
        values = dict(settings)
        values["directories"] = _directories(settings.get("directories"))
        made = cls(**values)
        for name, allowed in (
            ("engine", ENGINES),
            ("on_mismatch", MISMATCH_RULES),
            ("register_buffers", REGISTER_RULES),
        ):
            value = getattr(made, name)
            if value not in allowed:
                raise ConfigError(
                    f"disk tier: {name} must be one of {', '.join(allowed)}, got {value!r}"
                )
        for name in (
            "queue_depth",
            "in_flight_bytes",
            "threads",
            "chunk_bytes",
            "chunks_in_flight",
        ):
            _at_least(made, name, 1)
        _at_least(made, "lock_timeout_ms", 0)
        return made


def _at_least(settings: DiskSettings, name: str, lowest: int) -> None:
    value = getattr(settings, name)
    if not isinstance(value, int) or value < lowest:
        raise ConfigError(f"disk tier: {name} must be a whole number >= {lowest}, got {value!r}")


def _directories(value: Any) -> tuple[Path, ...]:
    if isinstance(value, Path):
        value = [value]
    elif isinstance(value, str):
        value = [part for part in value.split(";") if part.strip()]
    if not value:
        raise ConfigError('disk tier: "directories" is missing; name at least one directory')
    paths = tuple(Path(str(part).strip()).expanduser() for part in value)
    real = [path.resolve() for path in paths]
    twice = sorted({str(path) for path in real if real.count(path) > 1})
    if twice:
        raise ConfigError(f"disk tier: directory {', '.join(twice)} is named more than once")
    return paths
