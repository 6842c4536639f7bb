"""Cold copies: what is kept of one session's prompt when all of its KV is not worth the bytes.

`SinkWindow`, `TopBlocks` (which blocks stay) - `ColdCopy` (a prompt with holes, as all verbs of a
manager take it: its tokens, its namespace, its slots) - `ColdCopy.find` (all of it, or nothing).

Engines that attend over a prefix with holes exist; what they compute is an approximation. So a copy
has a namespace of its own, named after its session, the whole prompt and the blocks that stay: no
other prompt, session or selection can match it, and it never is anybody's prefix. Within that it is
like any prompt: host, disk, remote and other nodes hold it, it is evicted, retained and removed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from flexkv.errors import InputError
from flexkv.keys import as_tokens

if TYPE_CHECKING:
    from flexkv.transfer import Plan

LABEL = "flexkv: lossy cold copy"

Numbers = NDArray[np.int64]


class Selection(Protocol):
    """Decides which blocks of a prompt stay."""

    def select(self, blocks: int, tokens_per_block: int) -> Numbers:
        """Return the numbers of those that stay, ascending, of a prompt of so many blocks."""
        ...


@dataclass(frozen=True)
class SinkWindow:
    """The first tokens, which all others attend to, and the last ones; both in whole blocks.

    Source: Xiao et al., Efficient Streaming Language Models with Attention Sinks (ICLR 2024).
    """

    sink_tokens: int
    window_tokens: int

    def __post_init__(self) -> None:
        if min(self.sink_tokens, self.window_tokens) < 0 or not self.sink_tokens + (
            self.window_tokens
        ):
            raise InputError(
                f"sink_tokens ({self.sink_tokens}) and window_tokens ({self.window_tokens}) must "
                f"not be negative, and one of them must keep something"
            )

    def select(self, blocks: int, tokens_per_block: int) -> Numbers:
        """See Selection."""
        sink = min(blocks, -(-self.sink_tokens // tokens_per_block))
        window = max(sink, blocks - -(-self.window_tokens // tokens_per_block))
        return np.concatenate([np.arange(sink), np.arange(window, blocks)])


@dataclass(frozen=True, eq=False)
class TopBlocks:
    """A share of the blocks: the sink, the window, and of the others those with the highest scores.

    Args:
        scores: [tokens] of the prompt, for instance the attention that its last tokens paid to each
            (summed over heads and layers); a block has the sum of its tokens'.
        share: of the blocks, above 0, at most 1; rounded up. Sink and window count and always stay.

    Source: Zhang et al., H2O (NeurIPS 2023); Li et al., SnapKV (NeurIPS 2024).
    """

    scores: Any
    share: float
    sink_tokens: int = 16
    window_tokens: int = 64

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise InputError(f"share must be above 0 and at most 1, got {self.share!r}")
        if min(self.sink_tokens, self.window_tokens) < 0:
            raise InputError(
                f"sink_tokens ({self.sink_tokens}) and window_tokens ({self.window_tokens}) must "
                f"not be negative"
            )

    def select(self, blocks: int, tokens_per_block: int) -> Numbers:
        """See Selection.

        Raises:
            InputError: there is not one finite score for each token.
        """
        scores = np.asarray(self.scores, np.float64)
        whole = blocks * tokens_per_block
        if scores.ndim != 1 or not whole <= len(scores) < whole + tokens_per_block:
            raise InputError(
                f"scores must be one for each token of {blocks} blocks of {tokens_per_block}, got "
                f"shape {scores.shape}"
            )
        if not np.isfinite(scores).all():
            raise InputError("scores must be finite")
        sums = scores[:whole].reshape(blocks, tokens_per_block).sum(1)
        if self.sink_tokens + self.window_tokens:
            always = SinkWindow(self.sink_tokens, self.window_tokens)
            sums[always.select(blocks, tokens_per_block)] = np.inf
        stay = max(int(np.isinf(sums).sum()), int(np.ceil(self.share * blocks)))
        return np.sort(np.argsort(-sums, kind="stable")[:stay])


class Matching(Protocol):
    """What `ColdCopy.find` asks of a KVManager."""

    def get_match(self, tokens: Any, *, namespace: Any, weigh: bool) -> Plan: ...


@dataclass(frozen=True, eq=False)
class ColdCopy:
    """A prompt with holes. `ColdCopy.of` makes one; whoever restores it makes it again, from the
    same prompt, session and blocks.

    Put it with `kv.put_async(copy.tokens, copy.slots(slot_mapping), namespace=copy.namespace)`.

    Attributes:
        tokens: [kept tokens] ids of what stays.
        namespace: its own; nothing else matches in it.
        blocks: numbers of the prompt's blocks that stay, ascending.
        positions: [kept tokens] where each stood in the prompt. K carries these positions already:
            tokens that are computed behind the copy go on at `prompt_tokens`.
        prompt_tokens: of the whole blocks of the prompt.
    """

    tokens: NDArray[Any]
    namespace: tuple[str, ...]
    blocks: Numbers
    positions: Numbers
    prompt_tokens: int

    @classmethod
    def of(
        cls,
        tokens: Any,
        keep: Selection | Sequence[int],
        *,
        session: str,
        tokens_per_block: int,
        namespace: Sequence[str] | None = None,
    ) -> ColdCopy:
        """Choose what stays of a prompt; the part of a block at its end never does.

        Args:
            keep: what chooses, or the numbers of the blocks that stay, ascending (as `blocks` of an
                earlier copy has them).
            session: whose copy it is.
            namespace: of the prompt itself.

        Raises:
            InputError: no session, no block stays, or numbers do not ascend within the prompt.
        """
        tokens = as_tokens(tokens)
        if not isinstance(session, str) or not session:
            raise InputError(f"session must be a text that is not empty, got {session!r}")
        size, count = tokens_per_block, len(tokens) // tokens_per_block
        blocks = keep.select(count, size) if hasattr(keep, "select") else as_tokens(keep)
        blocks = blocks.astype(np.int64)
        if not len(blocks) or blocks[-1] >= count or (np.diff(blocks) < 1).any():
            raise InputError(
                f"blocks that stay must ascend below {count} and be one at least, got {blocks}"
            )
        whole = tokens[: count * size]
        name = hashlib.blake2b(digest_size=16)
        for part in (np.array([size, count]), blocks, whole):
            name.update(part.astype("<i8").tobytes())
        positions = (blocks[:, None] * size + np.arange(size)).ravel()
        labels = (*(namespace or ()), LABEL, session, name.hexdigest())
        return cls(whole[positions], labels, blocks, positions, count * size)

    @property
    def lossy(self) -> bool:
        """Whether there are holes: what is computed behind the copy is an approximation then."""
        return len(self.tokens) < self.prompt_tokens

    def slots(self, slot_mapping: Any) -> NDArray[Any]:
        """Return the slots of the tokens that stay, from those of the prompt's.

        Raises:
            InputError: there are fewer than `prompt_tokens`.
        """
        slots = as_tokens(slot_mapping, name="slot_mapping")
        if len(slots) < self.prompt_tokens:
            raise InputError(f"{len(slots)} slots for a prompt of {self.prompt_tokens} tokens")
        return slots[self.positions]

    def find(self, kv: Matching) -> Plan | None:
        """Return a plan for all that stays, to be launched; None if a block of it is not there.

        The others stay until they are evicted: it may be on its way, and putting the copy again
        stores only what is missing. With a BlockingKVManager: `kv.call(copy.find, kv.manager)`.
        """
        plan = kv.get_match(self.tokens, namespace=self.namespace, weigh=False)
        if plan.matched == len(self.tokens):
            return plan
        plan.cancel()
        return None
