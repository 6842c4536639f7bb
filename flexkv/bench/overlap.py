"""How much of a get hides behind other work: `run`, on the simulated device.

That device (plugins/flexkv-simulated) takes the time that its model says and moves true bytes, so
the figures are of the planner, the engine and its lanes, on a machine without an accelerator.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from flexkv import plugins
from flexkv.bench.cache import LLAMA, Blocks, DeviceMemory, OpenCache, Tokens, prompts
from flexkv.bench.report import Progress, Result, interleave, median, ratio_of_pairs
from flexkv.errors import ConfigError, PluginError, TransferError
from flexkv.model import KVSpec
from flexkv.plugins import BACKENDS
from flexkv.protocols import BlockCopy
from flexkv.ranks.loads import Loads

DEVICE = "simulated"
_LAYERED = "simulated_telling_layers"
_CHUNKS = 8  # of each of the requests that share the copy engines
_DEVICE_BYTES_PER_S = 4 << 30
_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class _Setup:
    """What all parts of the benchmark share."""

    spec: KVSpec
    tokens: int
    repeats: int
    device: DeviceMemory
    sources: Blocks
    targets: Blocks
    chunk_bytes: int

    @property
    def size_bytes(self) -> int:
        return len(self.sources) * self.spec.block_bytes

    @property
    def chunks(self) -> int:
        """Pieces that a get of all tokens moves in."""
        return -(-len(self.sources) // max(1, self.chunk_bytes // self.spec.block_bytes))

    def params(self, **more: Any) -> dict[str, Any]:
        return {
            "tokens": self.tokens,
            "size_bytes": self.size_bytes,
            "block_bytes": self.spec.block_bytes,
            "chunk_bytes": self.chunk_bytes,
        } | more

    @contextmanager
    def cache(self, name: str = DEVICE, rate: int = 0, **settings: Any) -> Iterator[OpenCache]:
        """Open a cache on a device of `rate` bytes per second; the host holds one set of tokens."""
        rates = {"to_device_bytes_per_s": rate, "from_device_bytes_per_s": 0}
        with OpenCache.open(
            self.spec,
            self.device,
            device=name,
            device_options={"host_tensors": True, **rates},
            host_cache_bytes=len(self.sources) * self.spec.stride_bytes,
            chunk_bytes=self.chunk_bytes,
            **settings,
        ) as cache:
            yield cache

    def fill(self, cache: OpenCache, *sets: list[Tokens]) -> None:
        """Store sets of prompts, each as long as the device; make sure that the bytes come back."""
        for texts in sets:
            count = sum(len(text) for text in texts) // self.spec.tokens_per_block
            self.device.fill()
            cache.put(texts, blocks=self.sources[:count], durable=True)
            self.device.wipe()
            cache.get(texts, blocks=self.targets[:count])
            self.device.check(self.sources[:count], self.targets[:count])


def run(
    progress: Progress,
    *,
    directory: Path | str | None = None,
    tokens: int = 8192,
    repeats: int = 7,
    requests: int = 64,
    chunk_bytes: int = 1 << 24,
    spec: KVSpec = LLAMA,
) -> list[Result]:
    """Measure `hidden_share` (of the shorter leg of a get from disk, behind the longer one),
    `exposed_layers` (of a get that brings first layers first to an engine that computes for as
    long as a layer is copied) and `completion_spread` (of `requests` begun at once).

    Args:
        directory: where the disk tier is made (and removed).
        chunk_bytes: piece of a long get that moves as one, as in the configuration.

    Raises:
        ConfigError: the simulated device is not installed, or tokens are no whole blocks.
        TransferError: other bytes came back, or fewer.
    """
    blocks = tokens // spec.tokens_per_block
    if blocks < 1 or tokens % spec.tokens_per_block or requests < 1:
        raise ConfigError(
            f"{tokens} tokens for {requests} requests: at least one, and whole blocks of "
            f"{spec.tokens_per_block}"
        )
    try:
        backend = plugins.load(BACKENDS, DEVICE)
    except PluginError as error:
        raise ConfigError(
            f"the simulated device is what this measures: pip install ./plugins/flexkv-simulated "
            f"({error})"
        ) from error
    order = np.random.default_rng(0)
    places = order.permutation(blocks), order.permutation(blocks)
    setup = _Setup(spec, tokens, repeats, DeviceMemory(spec, blocks), *places, chunk_bytes)
    steps: list[tuple[str, Callable[[], Result]]] = [
        ("disk and device", lambda: _legs(setup, directory)),
        ("layer by layer", lambda: _layers(setup, backend)),
        (f"{requests} at once", lambda: _shares(setup, requests)),
    ]
    results = []
    for number, (name, step) in enumerate(steps):
        progress(name, number, len(steps))
        results.append(step())
    progress("done", len(steps), len(steps))
    return results


# a get from disk: two legs


def _legs(setup: _Setup, directory: Path | str | None) -> Result:
    """Measure each leg alone and both in one get; the device is about as fast as the disk."""
    texts = [prompts(1, setup.tokens, name)[0] for name in (1, 2)]
    with tempfile.TemporaryDirectory(dir=directory, prefix="flexkv-bench-") as path:
        disk: dict[str, Any] = {
            "disk_cache_bytes": 2 * len(setup.sources) * setup.spec.stride_bytes,
            "disk_dirs": [Path(path)],
        }
        with setup.cache(**disk) as cache:  # the host holds one of them: the other is on disk
            setup.fill(cache, *([text] for text in texts))
            setup.device.wipe()
            _from(cache, "disk", texts[0], setup.targets)
            setup.device.check(setup.sources, setup.targets)
            taken = [_from(cache, "disk", texts[turn % 2], None) for turn in (1, 0, 1, 0, 1)]
        rate = int(setup.size_bytes / median(taken))
        with setup.cache(rate=rate, **disk) as cache:
            _from(cache, "disk", texts[1], None)
            rounds = [_round(setup, cache, texts, turn) for turn in range(setup.repeats)]
    read, copied, whole = (list(times) for times in zip(*rounds, strict=True))
    shares = [(a + b - both) / min(a, b) for a, b, both in rounds]
    best = 1 - 1 / setup.chunks
    return Result(
        "hidden_share",
        (median(read) + median(copied) - median(whole)) / min(median(read), median(copied)),
        "of the shorter leg",
        limit=best,
        samples=len(rounds),
        params=setup.params(
            disk_ms=median(read) * 1e3,
            device_ms=median(copied) * 1e3,
            together_ms=median(whole) * 1e3,
            median_of_rounds=median(shares),
            device_bytes_per_s=rate,
            goal=0.9,
        ),
    )


def _round(
    setup: _Setup, cache: OpenCache, texts: list[Tokens], turn: int
) -> tuple[float, float, float]:
    """Return the seconds of disk, device and both. The host holds the second prompt, before and
    after; who goes first changes with each round.
    """

    def apart(text: Tokens) -> tuple[float, float]:
        return _from(cache, "disk", text, None), _from(cache, "host", text, setup.targets)

    if turn % 2:
        both = _from(cache, "disk", texts[0], setup.targets)
        return *apart(texts[1]), both
    alone = apart(texts[0])
    return *alone, _from(cache, "disk", texts[1], setup.targets)


def _from(cache: OpenCache, tier: str, text: Tokens, blocks: Blocks | None) -> float:
    """Return the seconds of a get (None: a prefetch) all of whose blocks come from one tier."""
    result = cache.one(text, blocks)
    if not result.by_tier[tier] * cache.device.tokens_per_block == result.loaded == len(text):
        raise TransferError(f"not all of a prompt came from {tier}: {result}")
    return result.elapsed_ms / 1e3


# first layers first


def _telling(backend: Any) -> Any:
    """A device backend that calls the tag of a plan with each of its copies that has landed."""

    async def copy(self: Any, batch: BlockCopy) -> None:
        await backend.copy(self, batch)
        if batch.tag is not None:
            batch.tag(batch)

    return type("TellingBackend", (backend,), {"copy": copy})


class _Engine:
    """Computes layer by layer, as one whose kernels are queued: each begins when the one before is
    done and its layer has landed, and the thread waits for the next layer meanwhile.
    """

    def __init__(self, setup: _Setup, cache: OpenCache, text: Tokens) -> None:
        self._setup, self._cache, self._text = setup, cache, text
        self._loads, self._number = Loads(setup.spec.layers), 0
        self._loads.joined(0)

    def exposed(self, compute_s: float) -> float:
        """Return the seconds beyond those of computing, `compute_s` per layer."""
        self._number += 1
        number, loads, blocks = self._number, self._loads, self._setup.targets

        def landed(batch: BlockCopy) -> None:
            loads.landed(number, batch.layers, len(batch))

        begun = ready = time.monotonic()
        end = self._cache.launch(self._text, blocks, landed)
        for layer in range(self._setup.spec.layers):
            if loads.wait(number, len(blocks), layer, _TIMEOUT_S) is None:
                raise TransferError(f"layer {layer} has not landed")
            ready = max(ready, time.monotonic()) + compute_s
        if end().loaded != len(self._text):
            raise TransferError("tokens that were stored were not loaded")
        loads.wait(number, len(blocks), None, _TIMEOUT_S)  # it is forgotten
        return ready - begun - self._setup.spec.layers * compute_s


def _layers(setup: _Setup, backend: Any) -> Result:
    """Measure a load alone, and what is seen of it by an engine that computes as long per layer."""
    (text,) = prompts(1, setup.tokens)
    layers = setup.spec.layers
    layer_s: list[float] = []
    with (
        plugins.register(BACKENDS, _LAYERED, _telling(backend)),
        setup.cache(_LAYERED, _DEVICE_BYTES_PER_S) as cache,
    ):
        setup.fill(cache, [text])
        engine = _Engine(setup, cache, text)

        def alone() -> float:
            layer_s.append(engine.exposed(0.0) / layers)
            return layer_s[-1]

        alone()
        samples = interleave(
            {"layer": alone, "exposed": lambda: engine.exposed(layer_s[-1])}, setup.repeats
        )
    modelled_s = setup.size_bytes / layers / _DEVICE_BYTES_PER_S
    return Result(
        "exposed_layers",
        ratio_of_pairs(samples["exposed"], samples["layer"]),
        "layers",
        limit=1.0,
        samples=setup.repeats,
        params=setup.params(
            layers=layers,
            layer_ms=median(samples["layer"]) * 1e3,
            modelled_layer_ms=modelled_s * 1e3,
            exposed_ms=median(samples["exposed"]) * 1e3,
            goal=1.3,
        ),
    )


# many requests


def _shares(setup: _Setup, requests: int) -> Result:
    """Measure when requests of equal size end that began at once, from the host."""
    chunk = max(1, setup.chunk_bytes // setup.spec.block_bytes)
    blocks = min(len(setup.sources), _CHUNKS * chunk)
    count = len(setup.sources) // blocks  # prompts; requests share them, and what they load
    texts = prompts(count, blocks * setup.spec.tokens_per_block)
    shares = np.array_split(setup.targets[: count * blocks], count)
    with setup.cache(rate=_DEVICE_BYTES_PER_S) as cache:
        setup.fill(cache, texts)
        ends = [
            cache.at_once(
                [texts[number % count] for number in range(requests)],
                [shares[number % count] for number in range(requests)],
            )
            for _ in range(setup.repeats)
        ]
    spreads = [max(times) / min(times) for times in ends]
    return Result(
        "completion_spread",
        median(spreads),
        "x",
        limit=1.0,
        samples=setup.repeats,
        params=setup.params(
            requests=requests,
            tokens_per_request=blocks * setup.spec.tokens_per_block,
            chunks_per_request=-(-blocks // chunk),
            first_ms=median([min(times) for times in ends]) * 1e3,
            last_ms=median([max(times) for times in ends]) * 1e3,
            goal=1.5,
        ),
    )
