"""What the demo's users talk about: a long shared document, their questions, and a chat. The same
on every run.

`Settings` (what both lives of the engine agree on) - `document` (the handbook with its log) -
`Prompts` (token ids: shared prefix, questions, chat turns, for any model).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flexkv.errors import ConfigError

QUESTIONS = (
    "What is the goat called?",
    "Who built the tower?",
    "What is the relief boat called?",
    "How much mercury is in the bath?",
)
FIRST_QUESTION = "How high is the tower?"
CHAT = (
    "Hello! Who keeps the light tonight?",
    "And what does the second assistant do?",
    "Thank you. When does the boat come?",
)
_WIND = ("north", "north-east", "east", "south-east", "south", "south-west", "west", "north-west")
_SEA = (
    "calm",
    "a long swell from the west",
    "short and steep",
    "white at the Carrick Stone",
    "heavy at the landing",
)
_SKY = (
    "clear",
    "high cloud",
    "showers",
    "drizzle until noon",
    "low cloud on the hills",
    "haze in the east",
)
_WORK = (
    "Wiped the prisms and oiled the curtain rings",
    "Tightened the strap on Martha",
    "Ran both compressors for ten minutes",
    "Painted the door of the boat shed",
    "Strained the mercury; weight as it should be",
    "Mended the garden wall on the north side",
    "Turned the oil drums in the store",
    "Read the cistern with the brass rod",
    "Spliced a new breeches line",
)
_SEEN = (
    "a barque under all sail, bound north",
    "two seals on the landing",
    "the Petrel turning back off the north gully",
    "a flock of redwings at the lantern",
    "nothing but gulls",
    "the tender Solan with forty drums",
    "a whale and her calf inside the Carrick Stone",
)
_ASIDE = (
    "Admiral ate the end of a heaving line.",
    "Soft eggs for everybody.",
    "A letter from the museum about the birds.",
    "The toast set off the alarm.",
    "The hens laid seven.",
)
_MONTHS = ("January", "February", "March", "April", "May", "June", "July", "August")


def document(days: int = 140) -> str:
    """Return the handbook followed by `days` entries of its log."""
    handbook = Path(__file__).with_name("demo_handbook.md").read_text(encoding="utf-8")
    return handbook + "\n".join(_entry(day) for day in range(days)) + "\n"


def _entry(day: int) -> str:
    """One day of the log; strides without a factor of the tables' lengths keep entries apart."""
    wind, force = _WIND[(day * 3 + day // 7) % 8], 1 + (day * 7 + day // 5) % 9
    pressure = 984 + (day * 13 + day // 3) % 44
    sky, sea = _SKY[(day * 5 + day // 11) % 6], _SEA[(day * 2 + day // 9) % 5]
    work, seen = _WORK[(day * 4 + day // 4) % 9], _SEEN[(day * 3 + day // 6) % 7]
    aside = _ASIDE[(day * 2 + day // 13) % 5]
    return (
        f"{1 + day % 28} {_MONTHS[day // 28 % len(_MONTHS)]}. "
        f"Wind {wind}, force {force}; barometer {pressure}; sky: {sky}; sea: {sea}. "
        f"{work}. Seen: {seen}. {aside}"
    )


@dataclass(frozen=True, slots=True)
class Settings:
    """What both lives of the engine must agree on. Lengths are in tokens; paths are absolute."""

    disk_dir: str
    model: str | None = None
    cache_dir: str | None = None
    document_tokens: int = 7168
    chat_tokens: int = 1024
    answer_tokens: int = 16
    tokens_per_block: int = 16


class Prompts:
    """Token ids of everything that is asked.

    Args:
        tokenizer: of the model; its chat template is used if it has one that knows a system
            message.
        document_tokens: length of the shared prefix in tokens, rounded down to whole blocks. The
            document is cut there, as a server that means to share it would pad it.
        chat_tokens: length of the chat's own system prompt (an excerpt), likewise.
    """

    def __init__(
        self, tokenizer: Any, document_tokens: int, chat_tokens: int, tokens_per_block: int = 16
    ) -> None:
        self.tokenizer = tokenizer
        self._before, self._middle, self._after = (self.encode(part) for part in self._frame())
        self._body = self.encode(document())
        self.shared = self._prefix(
            "You answer questions about this handbook in one sentence.\n\n",
            document_tokens // tokens_per_block * tokens_per_block,
        )
        self.excerpt = self._prefix(
            "You are the keeper of this lighthouse and like to talk.\n\n",
            chat_tokens // tokens_per_block * tokens_per_block,
        )

    def encode(self, text: str) -> list[int]:
        """The tokens of a text, without special tokens around it."""
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def _frame(self) -> tuple[str, str, str]:
        """What stands before the system message, between it and a question, and between a question
        and its answer.
        """
        if not getattr(self.tokenizer, "chat_template", None):
            return "", "\n\nQuestion: ", "\nAnswer:"
        messages = [
            {"role": "system", "content": "<<system>>"},
            {"role": "user", "content": "<<question>>"},
        ]
        text = self.tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )
        before, _, rest = text.partition("<<system>>")
        middle, _, after = rest.partition("<<question>>")
        return before, middle, after

    def _prefix(self, instruction: str, length: int) -> list[int]:
        """Exactly `length` tokens: frame, instruction and as much of the document as fits."""
        head = self._before + self.encode(instruction)
        room = length - len(head) - len(self._middle)
        if not 0 < room <= len(self._body):
            raise ConfigError(
                f"a shared prefix of {length} tokens cannot be made of {len(self._body)} "
                "tokens of text"
            )
        return head + self._body[:room] + self._middle

    def question(self, text: str) -> list[int]:
        """The whole prompt of one user's question."""
        return self.shared + self.encode(text) + self._after

    def chat(self, answers: Sequence[Sequence[int]]) -> list[int]:
        """The prompt of the chat's turn number len(answers): everything said before, then the next
        question.

        Between an answer and the next question stands what the template puts between system message
        and question.
        """
        tokens = self.excerpt + self.encode(CHAT[0]) + self._after
        for answer, question in zip(answers, CHAT[1:], strict=False):
            tokens = [*tokens, *answer, *self._middle, *self.encode(question), *self._after]
        return tokens
