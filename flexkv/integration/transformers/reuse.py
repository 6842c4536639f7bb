"""PrefixReuse: any Hugging Face causal LM gets its prompt prefixes back from flexkv.

`config_for` (settings that name the model) - `PrefixReuse.restore` (tokens -> a cache that holds
their known prefix) - `PrefixReuse.store` (put what is new) - `PrefixReuse.generate` (both around a
greedy decode loop, as a stream of tokens). Forward passes run in a worker thread; the event loop
never waits for them.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Collection, Sequence
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Any, Self

import anyio
from anyio import to_thread
from transformers import Cache, PreTrainedModel

from flexkv.config import FlexKVConfig
from flexkv.errors import CapacityError, InputError, TransferError
from flexkv.integration.transformers.forward import run_model
from flexkv.integration.transformers.seats import Seat, SeatCache, Seats, fill, kv_spec
from flexkv.integration.transformers.weights import fingerprint
from flexkv.manager import KVManager
from flexkv.transfer import GetResult, PutResult, Transfer

Namespace = Sequence[str] | None


def config_for(
    model: PreTrainedModel, *, tokens_per_block: int = 16, **settings: Any
) -> FlexKVConfig:
    """Return a FlexKVConfig that names this model and its KV shape; `settings` are further
    settings.

    The revision is a fingerprint of the configuration and the weights, so two models never share
    blocks.

    Raises:
        ConfigError: the model's cache cannot be restored by prefix, or a setting is wrong.
    """
    settings.setdefault("model", type(model).__name__)
    settings.setdefault("revision", fingerprint(model))
    return FlexKVConfig(spec=kv_spec(model, tokens_per_block=tokens_per_block), **settings)


class Restored:
    """A request's cache, holding the first `tokens` tokens of its prompt. Use it as a context
    manager.

    `cache` goes to the model's forward; `result` says where the bytes came from. On exit the memory
    is given back, whatever still reads it.
    """

    def __init__(self, reuse: PrefixReuse, cache: SeatCache, result: GetResult) -> None:
        self.cache, self.result = cache, result
        self.tokens = result.loaded
        self._reuse: PrefixReuse | None = reuse

    def release(self) -> None:
        """Give the memory back; calling it again does nothing."""
        if self._reuse is not None:
            self._reuse.seats.release(self.cache.seat)
            self._reuse = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.release()


class PrefixReuse:
    """Prefix reuse for one model through one open KVManager; both must outlive it.

    Make it before you serve: it runs one token through the model and touches all its memory.

    Args:
        model: a causal LM in eval mode, whose layers keep all keys and values.
        kv: an entered manager, configured with `config_for(model)` or an equal spec.
        max_tokens: longest prompt plus answer of a request.
        requests: requests that may hold a cache at once; more wait. Memory: requests x max_tokens.
        forwards: forward passes at once; transfers of other requests go on meanwhile.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        kv: KVManager,
        *,
        max_tokens: int = 4096,
        requests: int = 2,
        forwards: int = 1,
    ) -> None:
        self.model, self.kv = model, kv
        spec = kv_spec(model, tokens_per_block=kv.tokens_per_block)
        self.seats = Seats(spec, max_tokens, requests, model.device)
        self._forwards = anyio.CapacityLimiter(forwards)
        kv.register(self.seats.tensors, axes=self.seats.axes)

    async def restore(self, tokens: Sequence[int], *, namespace: Namespace = None) -> Restored:
        """Bring back the longest known prefix of a prompt; at least its last token stays to be
        computed.

        Raises:
            InputError: no tokens, or more than `max_tokens`.
        """
        self._check(tokens, 0)
        seat = await self.seats.acquire()
        try:
            result = await self._fetch(tokens, seat, namespace)
        except BaseException:
            self.seats.release(seat)
            raise
        if result.timed_out:
            # Bytes may still land in this seat: give it back and compute in another one.
            self.seats.release(seat)
            seat = await self.seats.acquire()
            result = replace(result, loaded=0)
        return Restored(self, SeatCache(seat, result.loaded), result)

    async def _fetch(self, tokens: Sequence[int], seat: Seat, namespace: Namespace) -> GetResult:
        plan = self.kv.get_match(tokens, namespace=namespace, leave_tokens=1)
        if not plan.matched:
            return GetResult(0, 0, declined_blocks=plan.declined_blocks)
        fetch = self.kv.launch(plan, seat.slots)
        seat.transfers.append(fetch)
        try:
            result: GetResult = await fetch
            if not result.timed_out:
                await fetch.quiesced()
        except BaseException:
            fetch.cancel()
            raise
        return result

    async def store(
        self, tokens: Sequence[int], cache: Cache, *, namespace: Namespace = None
    ) -> PutResult:
        """Put the whole blocks of `tokens` that `cache` holds and flexkv does not; return when they
        are in host memory.

        `cache` is a Restored's cache, or any transformers cache of this model with one sequence
        (copied once). Decoding may go on behind the stored tokens meanwhile.

        Raises:
            CapacityError: the host tier cannot take them; nothing was stored.
        """
        tokens = tokens[: int(cache.get_seq_length())]
        if isinstance(cache, SeatCache):
            cache.check()
            stored: PutResult = await self._put(tokens, cache, namespace)
            return stored
        self._check(tokens, 0)
        seat = await self.seats.acquire()
        try:
            layers = [(layer.keys, layer.values) for layer in cache.layers]
            copy = SeatCache(seat, len(tokens))
            await self._compute(copy, partial(fill, seat, layers, len(tokens)))
            stored = await self._put(tokens, copy, namespace)
            return stored
        finally:
            self.seats.release(seat)

    def generate(
        self,
        tokens: Sequence[int],
        *,
        max_new_tokens: int = 128,
        namespace: Namespace = None,
        stop: Collection[int] | None = None,
        store: bool = True,
    ) -> Generation:
        """Answer a prompt greedily: an async iterable of token ids. Nothing runs before it is
        iterated.

        Args:
            stop: token ids that end the answer (not part of it); the model's end-of-sequence ids if
                None.
            store: put the prompt's and the answer's new blocks.

        Raises:
            InputError: no tokens, or prompt and answer together exceed `max_tokens`.
        """
        self._check(tokens, max_new_tokens)
        return Generation(
            self, tokens, max_new_tokens, namespace, stop_tokens(self.model, stop), store
        )

    async def next_token(self, restored: Restored, tokens: Sequence[int]) -> int:
        """Compute `tokens` behind a restored cache, in a worker thread; return the greedy next
        token.
        """
        cache, past = restored.cache, int(restored.cache.get_seq_length())
        token, elapsed_s = await self._compute(cache, partial(self._timed, tokens, cache))
        if self.kv.config.fetch_or_recompute:
            prompt = len(tokens) if len(tokens) > 1 else 0  # decoding says nothing of prefill
            share = 1 / self._forwards.total_tokens
            self.kv.computed(prompt, elapsed_s * 1e3, past_tokens=past, share=share)
        return int(token)

    def _timed(self, tokens: Sequence[int], cache: SeatCache) -> tuple[int, float]:
        begun_s = time.perf_counter()
        return run_model(self.model, tokens, cache), time.perf_counter() - begun_s

    async def _compute(self, cache: SeatCache, work: partial[Any]) -> Any:
        def step() -> Any:
            with cache.seat.lock:
                cache.check()
                return work()

        return await to_thread.run_sync(step, limiter=self._forwards)

    def _put(self, tokens: Sequence[int], cache: SeatCache, namespace: Namespace) -> Transfer:
        put = self.kv.put_async(tokens, cache.seat.slots, namespace=namespace)
        cache.seat.transfers.append(put)
        return put

    def _check(self, tokens: Sequence[int], new_tokens: int) -> None:
        if len(tokens) == 0 or len(tokens) + new_tokens > self.seats.max_tokens:
            raise InputError(
                f"a request of {len(tokens)} tokens and {new_tokens} new ones does not fit: 1 to "
                f"{self.seats.max_tokens} in all; raise max_tokens"
            )


class Generation:
    """An answer in the making; iterate it once (`async for token in ...`), or await `run()`.

    Filled in on the way: `tokens` (the answer), `restored` (what the prefix brought), `ttft_ms`
    (from the start of iteration to the first token), `puts` (what was stored; prompt first, then
    the answer). A put that finds no room or fails costs the answer nothing; it is counted in
    `failed_puts`.
    """

    def __init__(
        self,
        reuse: PrefixReuse,
        prompt: Sequence[int],
        max_new_tokens: int,
        namespace: Namespace,
        stop: frozenset[int],
        store: bool,
    ) -> None:
        self.prompt = list(prompt)
        self.tokens: list[int] = []
        self.restored = GetResult(0, 0)
        self.ttft_ms = 0.0
        self.puts: list[PutResult] = []
        self.failed_puts = 0
        self._reuse, self._namespace, self._stop = reuse, namespace, stop
        self._max_new_tokens, self._store = max_new_tokens, store

    async def run(self) -> list[int]:
        """Generate to the end and return the answer's tokens."""
        async for _ in self:
            pass
        return self.tokens

    async def __aiter__(self) -> AsyncGenerator[int, None]:
        reuse, started = self._reuse, anyio.current_time()
        restored = await reuse.restore(self.prompt, namespace=self._namespace)
        with restored:
            self.restored = restored.result
            puts: list[Transfer] = []
            pending = self.prompt[restored.tokens :]
            while len(self.tokens) < self._max_new_tokens:
                token = await reuse.next_token(restored, pending)
                if not self.tokens:
                    self.ttft_ms = (anyio.current_time() - started) * 1e3
                    # The prompt's blocks are complete: they travel while the answer is decoded.
                    self._start_put(puts, restored)
                if token in self._stop:
                    break
                self.tokens.append(token)
                pending = [token]
                yield token
            self._start_put(puts, restored)
            for put in puts:
                await self._finish_put(put)

    def _start_put(self, puts: list[Transfer], restored: Restored) -> None:
        if self._store:
            known = [*self.prompt, *self.tokens][: restored.cache.get_seq_length()]
            puts.append(self._reuse._put(known, restored.cache, self._namespace))

    async def _finish_put(self, put: Transfer) -> None:
        try:
            self.puts.append(await put)
        except (CapacityError, TransferError):
            self.failed_puts += 1


def stop_tokens(model: PreTrainedModel, stop: Collection[int] | None = None) -> frozenset[int]:
    """The tokens that end an answer: `stop`, or the model's end-of-sequence ids if it is None."""
    if stop is not None:
        return frozenset(stop)
    generation = getattr(model, "generation_config", None)
    ends = getattr(generation, "eos_token_id", None) or model.config.eos_token_id
    return frozenset() if ends is None else frozenset([ends] if isinstance(ends, int) else ends)
