"""What a reader of traces is told: `ReadOptions`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from flexkv.errors import InputError, TraceError
from flexkv.traces.lines import Progress

Tokenize = Callable[[str], Sequence[int]]
FILLS = ("none", "unique", "chat")


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """See `flexkv.traces.read_trace` for what each of them means."""

    tokens_per_block: int | None = None
    coarsen: int = 1
    strict: bool = False
    progress: Progress | None = None
    seed: int = 0
    fill: str | None = None
    tokenize: Tokenize | None = None
    characters_per_token: float = 4.0

    def __post_init__(self) -> None:
        if self.tokens_per_block is not None and self.tokens_per_block < 1:
            raise InputError(f"tokens_per_block is at least 1, got {self.tokens_per_block}")
        if self.coarsen < 1:
            raise InputError(f"coarsen is a number of blocks from 1, got {self.coarsen}")
        if not self.characters_per_token > 0:
            raise InputError(f"characters_per_token is above 0, got {self.characters_per_token}")
        if self.fill is not None and self.fill not in FILLS:
            raise InputError(f"fill is one of {', '.join(FILLS)}, got {self.fill!r}")

    def agreed(self, path: object, said: int) -> int:
        """Return the block size that a file says it has.

        Raises:
            TraceError: the caller was told another one.
        """
        if said and self.tokens_per_block not in (None, said):
            raise TraceError(
                f"{path} has blocks of {said} tokens, not {self.tokens_per_block}; "
                "merge blocks with coarsen (--coarsen)"
            )
        return said or self.tokens_per_block or 0
