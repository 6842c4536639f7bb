"""KV events on vLLM's wire: who decodes and replays them knows what each medium holds."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from engines import BLOCK, BUILT_IN, MODULE, Engine, connector, prompt

zmq = pytest.importorskip("zmq")
msgspec = pytest.importorskip("msgspec")

pytestmark = [pytest.mark.timeout(600)]
MEDIA = {"host": "CPU", "disk": "STORAGE"}


class Subscriber:
    """A router: decodes vLLM's messages by itself and keeps what each medium holds."""

    def __init__(self) -> None:
        self.socket = zmq.Context.instance().socket(zmq.SUB)
        self.socket.setsockopt(zmq.SUBSCRIBE, b"kv")
        self.port = self.socket.bind_to_random_port("tcp://127.0.0.1")
        self.sequence = -1
        self.held: dict[str, set[int]] = {"GPU": set(), "CPU": set(), "STORAGE": set()}
        self.blocks: dict[int, tuple[Any, ...]] = {}  # what was said of each
        self.kinds: set[tuple[str, str]] = set()

    @property
    def config(self) -> dict[str, Any]:
        endpoint = f"tcp://127.0.0.1:{self.port}"
        return {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": endpoint,
            "topic": "kv",
        }

    def close(self) -> None:
        self.socket.close(linger=0)

    def join(self) -> None:
        """Let the engine's end of the line know what is wanted, before it says anything."""
        assert not self.socket.poll(500)

    def expect(self, hashes: dict[str, list[int]]) -> None:
        """Read on until it holds exactly this; a while at most."""
        wanted = {tier: set(names) for tier, names in hashes.items()}
        deadline = time.monotonic() + 10
        while any(self.held[MEDIA[tier]] != names for tier, names in wanted.items()):
            left = deadline - time.monotonic()
            if left <= 0 or not self.socket.poll(int(left * 1000)):
                break
            self.read()
        assert {tier: self.held[MEDIA[tier]] for tier in wanted} == wanted

    def read(self) -> None:
        topic, sequence, payload = self.socket.recv_multipart()
        assert topic == b"kv"
        number = int.from_bytes(sequence, "big")
        assert number == self.sequence + 1, "a message was lost"
        self.sequence = number
        _, events, _ = msgspec.msgpack.decode(payload)
        for event in events:
            self.replay(event)

    def replay(self, event: dict[str, Any]) -> None:
        medium = event.get("medium") or "GPU"
        self.kinds.add((medium, event["type"]))
        if event["type"] == "AllBlocksCleared":  # vLLM speaks of its own blocks
            self.held["GPU"].clear()
            return
        names = event["block_hashes"]
        if event["type"] == "BlockRemoved":
            assert medium == "GPU" or set(names) <= self.held[medium]
            self.held[medium] -= set(names)
            return
        assert medium == "GPU" or not set(names) & self.held[medium]
        self.held[medium] |= set(names)
        size, tokens = event["block_size"], event["token_ids"]
        assert len(tokens) == size * len(names)
        parent = event["parent_block_hash"]
        extra = event.get("extra_keys") or [None] * len(names)
        for number, name in enumerate(names):
            said = (tuple(tokens[number * size : (number + 1) * size]), parent, extra[number])
            # the same block by the same name, whichever medium it is in
            assert self.blocks.setdefault(name, said) == said
            parent = name


@pytest.fixture
def subscriber() -> Any:
    subscriber = Subscriber()
    yield subscriber
    subscriber.close()


class Talk:
    """Prompts that went through an engine, with the answers that were stored with them."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.sequences: list[list[int]] = []
        self.salts: list[str | None] = []

    def ask(self, tokens: list[int], salt: str | None = None) -> list[int]:
        answer = self.engine.generate(prompts=[tokens], tokens=40, salts=[salt])["tokens"][0]
        self.sequences.append(tokens + answer)
        self.salts.append(salt)
        assert self.engine.settle()
        return list(answer)

    def check(self, subscriber: Subscriber) -> dict[str, int]:
        """The subscriber holds what the manager can read; returns how much."""
        found = self.engine.resident(sequences=self.sequences, salts=self.salts)
        assert {tier: len(names) for tier, names in found["hashes"].items()} == found["total"]
        subscriber.expect(found["hashes"])
        total: dict[str, int] = found["total"]
        return total


def test_a_consumer_that_replays_the_events_holds_what_the_manager_can_read(
    tiny: Path, tmp_path: Path, subscriber: Subscriber
) -> None:
    block_bytes = 2 * 2 * BLOCK * 2 * 64 * 4
    small = {
        "host_cache_bytes": 20 * block_bytes,
        "disk_cache_bytes": 40 * block_bytes,
        "disk_dirs": [str(tmp_path / "ssd")],
        "model": "tiny",
    }
    shared = prompt(4 * BLOCK, 50)
    options = {"kv_events_config": subscriber.config}
    with Engine(tiny, connector(**small), **options) as engine:
        subscriber.join()
        talk = Talk(engine)
        first = shared + prompt(100, 1)
        answer = talk.ask(first)
        assert talk.check(subscriber)["host"] == (len(first) + 39) // BLOCK
        for seed in range(2, 8):  # more than fits into either tier
            talk.ask(shared + prompt(200, seed), salt="a" if seed % 2 else None)
            talk.check(subscriber)
        assert {("CPU", "BlockRemoved"), ("STORAGE", "BlockRemoved")} <= subscriber.kinds
        assert subscriber.blocks.keys() >= subscriber.held["CPU"] | subscriber.held["STORAGE"]

        # the same request again: from the disk, some of it damaged
        assert engine.reset_local()
        engine.damage_reads(times=1)
        assert talk.ask(shared + prompt(200, 4)) == talk.sequences[3][len(shared) + 200 :]
        assert sum(engine.counters()["damaged_blocks"].values()) == 1
        talk.check(subscriber)

        assert engine.reset_all()
        assert engine.settle()
        assert talk.check(subscriber) == {"host": 0, "disk": 0}
        assert talk.ask(first) == answer
        stored = talk.check(subscriber)["disk"]
        assert stored > 0
        engine.kill()

    again = Subscriber()
    try:
        with Engine(tiny, connector(**small), kv_events_config=again.config) as engine:
            again.join()
            talk = Talk(engine)
            # found on the disk, but vLLM has no name for it yet
            assert engine.resident(sequences=[], salts=[])["total"]["disk"] == stored
            talk.ask(prompt(64, 99))
            again.expect({"disk": engine.resident(**_of(talk))["hashes"]["disk"]})
            talk.ask(first)
            assert talk.check(again)["disk"] >= stored
    finally:
        again.close()


def _of(talk: Talk) -> dict[str, Any]:
    return {"sequences": talk.sequences, "salts": talk.salts}


def test_the_built_in_connector_publishes_events_too(tiny: Path, subscriber: Subscriber) -> None:
    with Engine(tiny, connector(BUILT_IN), kv_events_config=subscriber.config) as engine:
        subscriber.join()
        talk = Talk(engine)
        talk.ask(prompt(100, 1))
        talk.ask(prompt(100, 2))  # its steps carry what is left of the first one's events
        talk.ask(prompt(100, 3))
        found = engine.resident(sequences=talk.sequences[:2], salts=talk.salts[:2])
        deadline = time.monotonic() + 10
        while not set(found["hashes"]["host"]) <= subscriber.held["CPU"]:
            assert time.monotonic() < deadline
            subscriber.read()


def test_without_kv_events_nothing_is_recorded(tiny: Path) -> None:
    with Engine(tiny, connector(MODULE)) as engine:
        Talk(engine).ask(prompt(100, 1))
        assert not engine.listens()
