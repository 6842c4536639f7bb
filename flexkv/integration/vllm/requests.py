"""What the scheduler's side keeps of vLLM's requests: `State` (one request), `Work` (one load or
save of it), `serves` (whether it is looked up), `namespace_of` (who may share its blocks),
`slots_of` (blocks as the manager takes them).
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flexkv.errors import FlexKVError
from flexkv.integration.vllm.hints import Hint
from flexkv.telemetry import log
from flexkv.transfer import GetResult, Plan, Transfer


@dataclass(eq=False, slots=True)
class Work:
    """A load or a save under way. `reported` is set when vLLM is told of its end."""

    request: str
    blocks: list[int]
    is_load: bool
    step: int = 0  # of the engine, from which on the request has the blocks
    tokens: int = 0  # from the request's first one on, or of a load: those it brings
    parts: tuple[int, ...] = ()  # tokens of each group; their blocks stand one behind the other
    held: list[Any] | None = None  # see groups.Found
    answer_tokens: int | None = None  # of a request that has ended
    kept: list[Any] = field(default_factory=list)
    number: int = 0  # of a load that the workers wait for themselves
    silent: bool = False  # vLLM is not to be told: it does not wait
    failed: tuple[int, ...] = ()
    transfer: Transfer | None = None
    naming: Any = None  # what vLLM calls the blocks, where it wants to hear of them
    moved_tokens: int = 0
    elapsed_s: float = 0.0
    reported: bool = False

    def cancel(self) -> None:
        """Drop what has not started; in the manager's thread."""
        if self.transfer is not None:
            self.transfer.cancel()

    def book(self, transfer: Transfer) -> None:
        """Note what the transfer, which is over, has moved."""
        try:
            result = transfer.result()
        except FlexKVError as error:
            log.warning("vllm.transfer_failed", request=self.request, error=repr(error))
            return
        self.moved_tokens = result.loaded if isinstance(result, GetResult) else result.stored
        self.elapsed_s = result.elapsed_ms / 1e3


@dataclass(slots=True)
class State:
    """What is known of one request."""

    namespace: tuple[str, ...]
    tokens: NDArray[np.int32] = field(default_factory=lambda: np.empty(0, np.int32))
    asked: tuple[int, int] = (-1, -1)  # computed tokens and length of the last question
    plan: Plan | None = None
    load: Work | None = None
    known_tokens: int = 0  # leading tokens that the cache held when it was asked
    junction_tokens: int = 0  # leading tokens of which it lacked nothing but a window
    load_failed: bool = False
    hint: Hint | None = None

    def read(self, request: Any) -> NDArray[np.int32]:
        """Return the request's tokens so far; only new ones are converted."""
        have = len(self.tokens)
        if request.num_tokens > have:
            added = request.all_token_ids[have:]
            packed = struct.pack(f"{len(added)}i", *added)  # in half the time of np.array(added)
            new = np.frombuffer(packed, np.int32)
            self.tokens = np.concatenate((self.tokens, new)) if have else new
        return self.tokens


def serves(request: Any) -> bool:
    """Whether a request is known by its tokens, and may be looked up."""
    return (
        request.prompt_token_ids is not None
        and getattr(request, "prompt_embeds", None) is None
        and not getattr(request, "skip_reading_prefix_cache", False)
    )


def slots_of(blocks: list[int], size: int) -> NDArray[np.int64]:
    """Return the device slots of blocks of `size` tokens."""
    starts = np.asarray(blocks, np.int64) * size
    return (starts[:, None] + np.arange(size)).reshape(-1)


def namespace_of(request: Any) -> tuple[str, ...]:
    """Return the labels within which a request's blocks may be shared.

    Each label names its kind, so that an adapter and a salt of the same name never meet: the
    adapter's name and path, `cache_salt`, each multimodal input with its place, `namespace_info`.
    """
    labels: list[str] = []
    lora = getattr(request, "lora_request", None)
    if lora is not None:
        labels += [f"lora={lora.lora_name}", f"lora_path={getattr(lora, 'lora_path', '')}"]
    salt = getattr(request, "cache_salt", None)
    if salt is not None:
        labels.append(f"salt={salt}")
    labels += [
        f"mm={feature.identifier}@{feature.mm_position.offset}+{feature.mm_position.length}"
        for feature in _features(request)
    ]
    info = getattr(request, "namespace_info", None)
    if info is not None:
        labels.append(f"info={info!r}")
    return tuple(labels)


def _features(request: Any) -> Iterable[Any]:
    return getattr(request, "mm_features", None) or ()
