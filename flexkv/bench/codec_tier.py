"""`flexkv bench codec --tier`: a disk tier behind a codec against a plain one, and what the
simulator says of both.

`run`: two managers with the same bytes of disk and the same prompts, more than either holds. First
how many blocks each disk holds; then gets of prompts that both hold and the host has not (every
byte comes from disk), in turn. The simulator serves the same requests with the same brain and the
rates of a profile of `flexkv calibrate`.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from flexkv import plugins
from flexkv.bench import calibrate
from flexkv.bench.cache import DeviceMemory, OpenCache, Tokens
from flexkv.bench.codec import random_blocks, round_trip
from flexkv.bench.report import Progress, Result, interleave, median, ratio_of_pairs
from flexkv.bench.yardsticks import disk_read_speed
from flexkv.errors import ConfigError, TransferError
from flexkv.model import DISK, HOST, PAGE_BYTES, KVSpec
from flexkv.protocols import Codec
from flexkv.sim.compute import shape
from flexkv.sim.serving.measured import Calibration
from flexkv.sim.serving.sizing import kv_spec
from flexkv.sim.serving.together import Rounds, together
from flexkv.traces import block_keys

_AT_ONCE = 4  # prompts of a set
_SETS = 2  # that the plain disk holds and that are got in turn; the host has room for one
_FILLED = 5 * _AT_ONCE  # prompts that are put: more than either disk holds
_SAMPLE_BLOCKS = 4  # that differ
_BATCHES = (1, 2, 4, 8, 16, 32)
_DEPTH = 16  # of fio, in blocks


@dataclass(frozen=True, slots=True)
class _Work:
    """Prompts of `blocks` blocks each; the last sets of them are got again and again."""

    spec: KVSpec
    blocks: int

    def prompt(self, number: int) -> Tokens:
        """Return a prompt's tokens; none begins like another."""
        tokens = self.blocks * self.spec.tokens_per_block
        return np.arange(tokens, dtype=np.int64) + number * tokens

    def numbers(self, turn: int) -> range:
        """Return the prompts of a set."""
        first = _FILLED - _AT_ONCE * (1 + turn % _SETS)
        return range(first, first + _AT_ONCE)

    @property
    def set_bytes(self) -> int:
        """Bytes of KV that a set brings."""
        return _AT_ONCE * self.blocks * self.spec.block_bytes


def run(
    progress: Progress,
    *,
    directory: Path | str | None = None,
    codec: str = "int8",
    model: str = "llama-3.1-8b",
    disk_bytes: int = 1 << 29,
    repeats: int = 5,
    profile: Path | str | None = None,
) -> list[Result]:
    """Measure `tier_held` (blocks), `tier_get` (GB/s of KV brought) and what was predicted.

    Args:
        directory: where files are made (and removed); its file system is what is measured.
        model: whose KV the blocks are shaped like, in blocks of 16 tokens.
        disk_bytes: of each of the two disk tiers.
        profile: a file of `flexkv calibrate`; None measures the machine now, and its disk between
            the gets (by fio, where there is one).

    Raises:
        ConfigError: the disk holds too few blocks, or the codec is refused.
        TransferError: other bytes came back, or fewer.
    """
    spec = kv_spec(shape(model), 16)
    held = disk_bytes // spec.stride_bytes
    work = _Work(spec, held // (_SETS * _AT_ONCE))
    if not work.blocks:
        raise ConfigError(
            f"disk_bytes={disk_bytes} holds {held} blocks of {spec.stride_bytes} bytes: at least "
            f"{_SETS * _AT_ONCE} are needed"
        )
    with ExitStack() as stack:
        folder = Path(
            stack.enter_context(tempfile.TemporaryDirectory(dir=directory, prefix="flexkv-tier-"))
        )
        device = _Memory(spec, _AT_ONCE * work.blocks)
        tiers = {
            name: stack.enter_context(_Tier.open(name, work, device, disk_bytes, folder))
            for name in ("", codec)
        }
        for number, tier in enumerate(tiers.values()):
            progress(f"filling, codec: {tier.codec or 'none'}", number, 4)
            tier.fill()
        progress("calibrating", 2, 4)
        measured = _calibration(profile, folder, tiers[codec].stored_bytes, spec)
        progress("gets from disk", 3, 4)
        actions: dict[str, Callable[[], float]] = {}
        for name, tier in tiers.items():
            actions[name] = tier.set_s
            if profile is None:
                actions[f"disk of {name}"] = partial(tier.disk_speed, folder)
        samples = interleave(actions, repeats)
        machines = dict.fromkeys(tiers, measured)
        if profile is None:
            for name in tiers:
                rate = median(samples[f"disk of {name}"])
                machines[name] = measured.with_rate((DISK, HOST), rate) if rate else measured
        plain, coded = tiers[""], tiers[codec]
        said = {name: tier.predicted(machines[name]) for name, tier in tiers.items()}
        results = [_held(plain, coded, said), *_gets(plain, coded, samples, said, machines)]
    progress("done", 4, 4)
    return results


class _Memory(DeviceMemory):
    """KV of normal numbers: a codec must not find noise."""

    def __init__(self, spec: KVSpec, blocks: int) -> None:
        super().__init__(spec, blocks)
        self._spec = spec
        self._sample = random_blocks(spec, _SAMPLE_BLOCKS)

    def show(self, codec: Codec | None = None) -> None:
        """Fill all blocks, as a codec would bring them back."""
        found = self._sample if codec is None else round_trip(codec, self._spec, self._sample)
        group = self._spec.groups[0]
        cut = found.view(np.uint16).reshape(
            _SAMPLE_BLOCKS, self._spec.layers, group.parts, -1, group.heads, group.head_size
        )
        numbers = np.arange(self.blocks) % _SAMPLE_BLOCKS
        for layer, cache in enumerate(self.caches.values()):
            for part in range(group.parts):
                cache[part] = cut[numbers, layer, part]

    def copy(self) -> list[Any]:
        """Return a copy of every layer."""
        return [cache.copy() for cache in self.caches.values()]


class _Tier:
    """One of the two managers."""

    def __init__(self, codec: str, work: _Work, device: _Memory, cache: OpenCache) -> None:
        self.codec, self.work, self._device, self._cache = codec, work, device, cache
        self._shares = np.split(np.arange(device.blocks), _AT_ONCE)
        self._coder: Codec | None = plugins.load(plugins.CODECS, codec)() if codec else None
        self._turn = self.held = 0
        size = self._coder.encoded_bytes(work.spec) if self._coder else work.spec.block_bytes
        self.stored_bytes = -(-size // PAGE_BYTES) * PAGE_BYTES

    @classmethod
    @contextmanager
    def open(
        cls, codec: str, work: _Work, device: _Memory, disk_bytes: int, folder: Path
    ) -> Iterator[_Tier]:
        """Open a manager over `device`."""
        settings: dict[str, Any] = {
            "host_cache_bytes": _AT_ONCE * work.blocks * work.spec.stride_bytes,
            "disk_cache_bytes": disk_bytes,
            "disk_dirs": [folder / (codec or "plain")],
            "disk_codec": codec or None,
        }
        with OpenCache.open(work.spec, device, **settings) as cache:
            yield cls(codec, work, device, cache)

    def fill(self) -> None:
        """Put all prompts; check that a set comes back from disk as it must.

        Raises:
            TransferError: it does not.
        """
        self._device.show()
        for number in range(_FILLED):
            share = self._shares[number % _AT_ONCE]
            self._cache.put([self.work.prompt(number)], blocks=share, durable=True)
        self.held = self._cache.usage()[DISK]["resident"]
        self._turn = 1  # the host has set 0
        self._device.show(self._coder)
        expected = self._device.copy()
        self._device.wipe()
        self.set_s()
        for was, now in zip(expected, self._device.copy(), strict=True):
            if not np.array_equal(was, now):
                raise TransferError(f"other bytes came back through codec {self.codec or 'none'}")

    def set_s(self) -> float:
        """Get the set that the host has not, all prompts at once; return the seconds it took.

        Raises:
            TransferError: not all of their blocks came, or not from disk.
        """
        texts = [self.work.prompt(number) for number in self.work.numbers(self._turn)]
        self._turn += 1
        return self._cache.from_tier(DISK, texts, self._shares)

    def disk_speed(self, folder: Path) -> float:
        """Return bytes per second of fio reading blocks like those of this tier, anywhere in a
        file; 0 without fio.
        """
        size = self.work.set_bytes // self.work.spec.stride_bytes * self.stored_bytes
        return disk_read_speed(folder, size, self.stored_bytes, _DEPTH, shuffled=True) or 0.0

    def predicted(self, calibration: Calibration) -> Rounds:
        """Return what the simulator says of the same puts and gets."""
        work = self.work
        spec = work.spec
        coding = calibration.coding(self.codec, spec) if self.codec else None
        keys = [block_keys(work.blocks * n + np.arange(work.blocks)) for n in range(_FILLED)]
        sets = [[keys[number] for number in work.numbers(turn)] for turn in (1, 2, 3)]
        costs = calibration.costs(spec.block_bytes, coding)
        found = together(self._cache.config, costs, keys, sets)
        assert all(
            one.by_tier.get(DISK) == work.blocks for moved in found.moved for one in moved
        ), "the simulator found other blocks than the data plane"
        return found


def _calibration(
    profile: Path | str | None, folder: Path, stored_bytes: int, spec: KVSpec
) -> Calibration:
    if profile is not None:
        return Calibration.read(Path(profile))
    return calibrate.run(
        lambda *_: None,
        directory=folder,
        block_bytes=(64 << 10, stored_bytes, spec.stride_bytes),
        batches=_BATCHES,
        repeats=5,
    )


def _held(plain: _Tier, coded: _Tier, said: Mapping[str, Rounds]) -> Result:
    """How many blocks each disk holds."""
    predicted, predicted_peer = (said[tier.codec].resident[DISK] for tier in (coded, plain))
    return Result(
        "tier_held",
        float(coded.held),
        "blocks",
        peer=float(plain.held),
        ratio=coded.held / plain.held,
        samples=1,
        params={
            "codec": coded.codec,
            "predicted": predicted,
            "predicted_peer": predicted_peer,
            "error": predicted / coded.held - 1,
        },
    )


def _gets(
    plain: _Tier,
    coded: _Tier,
    samples: Mapping[str, Sequence[float]],
    said: Mapping[str, Rounds],
    machines: Mapping[str, Calibration],
) -> list[Result]:
    """GB/s of KV that gets bring from either disk, measured and predicted, and how many times as
    fast the one with the codec is.
    """
    work, repeats = plain.work, len(samples[""])
    giga, results, predicted = work.set_bytes / 1e9, [], {}
    for tier in (plain, coded):
        measured = giga / median(samples[tier.codec])
        predicted[tier.codec] = giga / median(said[tier.codec].seconds)
        params = {
            "predicted": predicted[tier.codec],
            "error": predicted[tier.codec] / measured - 1,
            "block_bytes": work.spec.block_bytes,
            "stored_bytes": tier.stored_bytes,
            "disk_gb_per_s": machines[tier.codec].bytes_per_s[DISK, HOST] / 1e9,
            "prompts": _AT_ONCE,
            "blocks_per_prompt": work.blocks,
        }
        name = f"tier_get_{tier.codec or 'plain'}"
        results.append(Result(name, measured, "GB/s", samples=repeats, params=params))
    speedup = ratio_of_pairs(samples[""], samples[coded.codec])
    coding = machines[""].coding(coded.codec, work.spec)
    blocks, link = _AT_ONCE * work.blocks, machines[""].bytes_per_s[DISK, HOST]
    params = {
        "predicted": predicted[coded.codec] / predicted[""],
        "error": predicted[coded.codec] / predicted[""] / speedup - 1,
        "break_even_gb_per_s": coding.break_even_bytes_per_s(blocks) / 1e9,
        "rule": coding.payoff(blocks, link).speedup,
    }
    results.append(Result("tier_speedup", speedup, "x", samples=repeats, params=params))
    return results
