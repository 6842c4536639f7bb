"""The demo's engine process: answers over one document, says what it did as JSON lines on stdout,
expects SIGKILL.

`first` (no cache, then fill, then host hits, then a write that never ends well) - `second` (a new
process on the same directory: SSD hits). Run as `python -m
flexkv.integration.transformers.demo_worker LIFE SETTINGS`, SETTINGS being the JSON of `Settings`.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

import anyio
import torch
from anyio import to_thread
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

from flexkv.config import FlexKVConfig
from flexkv.integration.transformers.demo_text import (
    CHAT,
    FIRST_QUESTION,
    QUESTIONS,
    Prompts,
    Settings,
)
from flexkv.integration.transformers.forward import run_model, use_grouped_attention
from flexkv.integration.transformers.reuse import (
    Generation,
    PrefixReuse,
    config_for,
    stop_tokens,
)
from flexkv.integration.transformers.weights import load_model
from flexkv.manager import KVManager

_events: TextIO | None = None


def keep_stdout_for_events() -> TextIO:
    """Give stdout to `say` alone; what anything else prints there goes to stderr, that is, into the
    log.
    """
    events = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return events


def say(event: str, **fields: Any) -> None:
    """Write one event for the parent."""
    assert _events is not None
    _events.write(json.dumps({"event": event, **fields}) + "\n")
    _events.flush()


def bytes_read() -> int:
    """Bytes this process has fetched from storage devices; 0 where the kernel does not say."""
    try:
        text = Path("/proc/self/io").read_text(encoding="ascii")
    except OSError:
        return 0
    return int(text.split("read_bytes:")[1].split()[0])


class Engine:
    """One life of the engine: the model, its prompts, and flexkv opened when it is needed."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        path, cache = settings.model, settings.cache_dir
        self.model: PreTrainedModel
        self.tokenizer: PreTrainedTokenizerBase
        self.model, self.tokenizer = load_model(
            Path(path) if path else None, cache_dir=Path(cache) if cache else None
        )
        torch.set_num_threads(len(os.sched_getaffinity(0)))
        use_grouped_attention(self.model)
        self.prompts = Prompts(
            self.tokenizer,
            settings.document_tokens,
            settings.chat_tokens,
            settings.tokens_per_block,
        )
        self.stop = stop_tokens(self.model)
        run_model(self.model, self.prompts.shared[:64], DynamicCache(config=self.model.config))

    def config(self) -> FlexKVConfig:
        """Room on both tiers for the document twice, the chat, and every answer."""
        settings = self.settings
        tokens = 2 * settings.document_tokens + settings.chat_tokens
        tokens += (len(QUESTIONS) + len(CHAT) + 2) * (settings.answer_tokens + 128)
        blocks = tokens // settings.tokens_per_block
        probe = config_for(self.model, tokens_per_block=settings.tokens_per_block)
        assert probe.spec is not None
        size_bytes = blocks * probe.spec.stride_bytes
        return FlexKVConfig(
            spec=probe.spec,
            model=probe.model,
            revision=probe.revision,
            host_cache_bytes=size_bytes,
            disk_cache_bytes=size_bytes,
            disk_dirs=(Path(settings.disk_dir),),
        )

    @contextlib.asynccontextmanager
    async def open(self, config: FlexKVConfig) -> AsyncIterator[PrefixReuse]:
        """Open flexkv with empty host memory and one seat."""
        async with KVManager(config) as kv:
            room = len(self.prompts.shared) + self.settings.answer_tokens + 128
            yield PrefixReuse(self.model, kv, max_tokens=room, requests=1)

    async def cold(self, who: str, prompt: Sequence[int]) -> list[int]:
        """Answer without flexkv, the plain transformers way, and say so."""
        tokens, ttft_ms = await to_thread.run_sync(self._cold, prompt)
        say(
            "answer",
            way="cold",
            who=who,
            prompt_tokens=len(prompt),
            ttft_ms=ttft_ms,
            **self.shown(tokens),
        )
        return tokens

    def _cold(self, prompt: Sequence[int]) -> tuple[list[int], float]:
        started = time.monotonic()
        cache = DynamicCache(config=self.model.config)
        tokens: list[int] = []
        token = run_model(self.model, prompt, cache)
        ttft_ms = (time.monotonic() - started) * 1e3
        while token not in self.stop and len(tokens) < self.settings.answer_tokens:
            tokens.append(token)
            if len(tokens) < self.settings.answer_tokens:
                token = run_model(self.model, [token], cache)
        return tokens, ttft_ms

    async def ask(
        self, reuse: PrefixReuse, way: str, who: str, prompt: Sequence[int], *, store: bool = True
    ) -> list[int]:
        """Answer with flexkv and say what it brought."""
        before = bytes_read()
        answer = reuse.generate(prompt, max_new_tokens=self.settings.answer_tokens, store=store)
        tokens = await answer.run()
        say(
            "answer",
            way=way,
            who=who,
            prompt_tokens=len(prompt),
            ttft_ms=answer.ttft_ms,
            disk_read_bytes=bytes_read() - before,
            **self.moved(answer),
            **self.shown(tokens),
        )
        return tokens

    def moved(self, answer: Generation) -> dict[str, Any]:
        """What was restored and stored for an answer; times in milliseconds."""
        got, puts = answer.restored, answer.puts
        size = self.settings.tokens_per_block
        return {
            "restored_tokens": got.loaded,
            "restored_by_tier": {tier: blocks * size for tier, blocks in got.by_tier.items()},
            "get_bytes": got.size_bytes,
            "get_ms": got.elapsed_ms,
            "get_exposed_ms": got.exposed_ms,
            "get_hidden_ms": got.hidden_ms,
            "put_bytes": sum(put.size_bytes for put in puts),
            "put_exposed_ms": sum(put.exposed_ms for put in puts),
            "put_hidden_ms": sum(put.hidden_ms for put in puts),
            "failed_puts": answer.failed_puts,
        }

    def shown(self, tokens: Sequence[int]) -> dict[str, Any]:
        """An answer as ids and as text."""
        return {"tokens": list(tokens), "text": self.tokenizer.decode(list(tokens))}


async def first(engine: Engine) -> None:
    """No cache; fill; host hits; wait until all is durable; die while writing something else."""
    prompts = engine.prompts
    for number, question in enumerate(QUESTIONS, 1):
        await engine.cold(f"user {number}", prompts.question(question))
    answers: list[list[int]] = []
    for turn in range(len(CHAT)):
        answers.append(await engine.cold(f"chat {turn + 1}", prompts.chat(answers)))
    async with engine.open(engine.config()) as reuse:
        await engine.ask(reuse, "fill", "user 0", prompts.question(FIRST_QUESTION))
        await engine.ask(reuse, "fill", "chat 1", prompts.chat([]))
        for number, question in enumerate(QUESTIONS, 1):
            await engine.ask(reuse, "host", f"user {number}", prompts.question(question))
        answers = []
        for turn in range(len(CHAT)):
            prompt = prompts.chat(answers)
            answers.append(await engine.ask(reuse, "host", f"chat {turn + 1}", prompt))
        await reuse.kv.flush()
        say("durable", usage=reuse.kv.usage())
        # The same bytes under another namespace: a long write, without 10 s of computing, to be
        # killed in.
        with await reuse.restore(prompts.question(FIRST_QUESTION)) as restored:
            await reuse.store(prompts.shared, restored.cache, namespace=("unfinished",))
            say("writing", blocks=len(prompts.shared) // engine.settings.tokens_per_block)
            await anyio.sleep_forever()


async def second(engine: Engine) -> None:
    """SSD hits: flexkv is opened anew for every question, so that host memory is empty."""
    prompts, config = engine.prompts, engine.config()
    async with engine.open(config) as reuse:
        plan = reuse.kv.get_match(prompts.shared, namespace=("unfinished",))
        plan.cancel()
        say("reopened", unfinished_tokens=plan.matched, usage=reuse.kv.usage())
    for number, question in enumerate(QUESTIONS, 1):
        async with engine.open(config) as reuse:
            await engine.ask(
                reuse, "ssd", f"user {number}", prompts.question(question), store=False
            )
    answers: list[list[int]] = []
    for turn in range(len(CHAT)):
        async with engine.open(config) as reuse:
            prompt = prompts.chat(answers)
            answers.append(await engine.ask(reuse, "ssd", f"chat {turn + 1}", prompt, store=False))
    say("done")


def main(life: str, settings: str) -> None:
    """Live one life of the engine."""
    global _events
    _events = keep_stdout_for_events()
    parsed = Settings(**json.loads(settings))
    engine = Engine(parsed)
    say(
        "loaded",
        life=life,
        settings=asdict(parsed),
        model=parsed.model or "SmolLM2-135M-Instruct",
        threads=torch.get_num_threads(),
        torch=torch.__version__,
    )
    anyio.run({"first": first, "second": second}[life], engine)


if __name__ == "__main__":
    main(*sys.argv[1:])
