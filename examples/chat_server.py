"""A chat server in plain asyncio whose prompts come back from flexkv. docs/quickstart.md walks
through it.

Talk to it with JSON lines: send {"text": "..."}, receive {"piece": "..."} while the answer is made
and then {"done": true, "restored_tokens": ..., "ttft_ms": ...}. A connection is a conversation.

Usage: python examples/chat_server.py [--model DIR] [--port 8000] [--disk DIR]
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from flexkv import KVManager
from flexkv.integration.transformers import (
    PrefixReuse,
    config_for,
    load_model,
    use_grouped_attention,
)

SYSTEM = "You are a friendly lighthouse keeper. You answer in one or two short sentences."


class Chat:
    """One conversation, kept as tokens: text that is encoded anew may become other tokens, and then
    nothing matches.
    """

    def __init__(self, reuse: PrefixReuse, tokenizer: Any, max_new_tokens: int) -> None:
        self.reuse, self.tokenizer, self.max_new_tokens = reuse, tokenizer, max_new_tokens
        self.messages = [{"role": "system", "content": SYSTEM}]
        self.text = ""  # what self.tokens stand for
        self.tokens: list[int] = []

    def render(self) -> str:
        """The conversation as the model wants to read it."""
        if self.tokenizer.chat_template:
            return str(
                self.tokenizer.apply_chat_template(
                    self.messages, tokenize=False, add_generation_prompt=True
                )
            )
        lines = (f"{message['role']}: {message['content']}" for message in self.messages)
        return "\n".join(lines) + "\nassistant: "

    def hear(self, text: str) -> None:
        """Add a message of the user."""
        self.messages.append({"role": "user", "content": text})
        now = self.render()
        if not now.startswith(self.text):  # a template that changes what was said before
            self.text, self.tokens = "", []
        new = self.tokenizer(now.removeprefix(self.text), add_special_tokens=False)["input_ids"]
        self.text, self.tokens = now, self.tokens + new

    async def answer(self) -> AsyncIterator[dict[str, Any]]:
        """Stream the answer: pieces of text, then what it cost."""
        generation = self.reuse.generate(self.tokens, max_new_tokens=self.max_new_tokens)
        shown = ""
        async for _ in generation:
            # Decode from the start: a token may be half a character.
            whole = self.tokenizer.decode(generation.tokens)
            yield {"piece": whole.removeprefix(shown)}
            shown = whole
        self.messages.append({"role": "assistant", "content": shown})
        self.text, self.tokens = self.text + shown, self.tokens + generation.tokens
        yield {
            "done": True,
            "text": shown,
            "restored_tokens": generation.restored.loaded,
            "ttft_ms": round(generation.ttft_ms, 1),
        }


async def talk(
    reuse: PrefixReuse,
    tokenizer: Any,
    max_new_tokens: int,
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
) -> None:
    """Serve one connection."""
    chat = Chat(reuse, tokenizer, max_new_tokens)
    try:
        while line := await reader.readline():
            chat.hear(json.loads(line)["text"])
            async for event in chat.answer():
                writer.write(json.dumps(event).encode() + b"\n")
                await writer.drain()
    except (ConnectionError, ValueError) as error:
        print(f"connection closed: {error}", flush=True)
    finally:
        writer.close()


async def serve(arguments: argparse.Namespace) -> None:
    """Load the model, open flexkv, and answer until the process ends."""
    model, tokenizer = await asyncio.to_thread(load_model, arguments.model)
    use_grouped_attention(model)
    config = config_for(
        model,
        host_cache_bytes="512MiB",
        disk_cache_bytes="1GiB" if arguments.disk else 0,
        disk_dirs=(arguments.disk or Path("unused"),),
    )
    async with KVManager(config) as kv:
        reuse = PrefixReuse(model, kv, max_tokens=arguments.max_tokens, requests=2)
        handler = functools.partial(talk, reuse, tokenizer, arguments.max_new_tokens)
        server = await asyncio.start_server(handler, "127.0.0.1", arguments.port)
        print(f"listening on 127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
        async with server:
            await server.serve_forever()


def main() -> None:
    """Read the command line and serve."""
    parser = argparse.ArgumentParser(description="A chat server with prefix reuse")
    parser.add_argument("--model", type=Path, help="local model directory (default: SmolLM2)")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--disk", type=Path, help="also keep the cache on disk, in this directory")
    parser.add_argument("--max-tokens", type=int, default=2048, help="longest conversation")
    parser.add_argument("--max-new-tokens", type=int, default=64, help="longest answer")
    try:
        asyncio.run(serve(parser.parse_args()))
    except KeyboardInterrupt:
        print("bye")


if __name__ == "__main__":
    main()
