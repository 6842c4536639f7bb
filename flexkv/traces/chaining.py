"""From contents to prefix-chained ids: `Chainer.extend` - `Prompt.add`, `fork`.

A content-hash id names one block whatever stands before it, and such a block can be served only
behind the very prefix it was computed for. Chaining gives a new number to every (number of the
block before, content) pair.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable

ROOT = -1


class Chainer:
    """Numbers prefixes, from 0 in the order of their first appearance."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[Hashable, Hashable], int] = {}

    def __len__(self) -> int:
        return len(self._numbers)

    def extend(self, contents: Iterable[Hashable], before: Hashable = ROOT) -> list[int]:
        """Return the ids of blocks that stand one behind the other, the first behind `before`."""
        numbers, ids = self._numbers, []
        for content in contents:
            before = numbers.setdefault((before, content), len(numbers))
            ids.append(before)
        return ids


class Prompt:
    """A prompt that is put together from contents of known lengths, cut into blocks of tokens.

    Two prompts share a block where all contents up to its end, and their lengths, are the same.
    `ids` are those of the full blocks, `tokens` counts all of them.
    """

    __slots__ = ("_chainer", "_open", "_size", "ids", "tokens")

    def __init__(self, chainer: Chainer, tokens_per_block: int) -> None:
        self._chainer, self._size = chainer, tokens_per_block
        self.ids: list[int] = []
        self.tokens = 0
        self._open: tuple[tuple[Hashable, int, int], ...] = ()  # pieces of the block not full yet

    def add(self, content: Hashable, tokens: int) -> None:
        """Append `tokens` tokens that are named by `content`."""
        position, room = 0, self._size - self.tokens % self._size
        blocks = []
        while tokens - position >= room:
            blocks.append((*self._open, (content, position, position + room)))
            position, room, self._open = position + room, self._size, ()
        if position < tokens:
            self._open = (*self._open, (content, position, tokens))
        self.tokens += tokens
        self.ids += self._chainer.extend(blocks, self.ids[-1] if self.ids else ROOT)

    def fork(self) -> Prompt:
        """Return a copy that goes its own way."""
        copy = Prompt(self._chainer, self._size)
        copy.ids, copy.tokens, copy._open = self.ids.copy(), self.tokens, self._open
        return copy
