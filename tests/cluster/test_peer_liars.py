"""Peers that lie, stammer or fall silent: no wrong byte is taken, nobody waits for ever, and the
next holder is asked.
"""

from __future__ import annotations

import secrets
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import anyio
import anyio.abc
import numpy as np
import pytest
from peer_rig import INCARNATION, SECRET, Known, Reader, keys_of, open_owner, open_reader
from rig import SPEC, STRIDE, pattern, prompt

from flexkv.backends.remote.heads import checksums
from flexkv.cluster import peerwire as wire
from flexkv.cluster.fetching import PeerSettings
from flexkv.cluster.holdings import DISK_MEDIUM
from flexkv.memory import Arena
from flexkv.model import DAMAGED, FAILED, LANDED, MISSING

BLOCKS = 6
ALL = range(BLOCKS)
FRAME_BYTES = SPEC.block_bytes + 8  # a block, and its checksum
TOKENS = prompt(1, BLOCKS)
BRIEF = PeerSettings(timeout_ms=600, failures=100)

Stream = anyio.abc.SocketStream
Answer = Callable[[Stream, wire.Lease], Awaitable[None]]


def framed(message: Any) -> bytes:
    packet = wire.pack(message)
    return b"FXP1" + struct.pack("<I", len(packet)) + packet


async def heard(stream: Stream) -> Any:
    """One request."""
    data = b""
    while len(data) < 8 or len(data) < 8 + struct.unpack("<I", data[4:8])[0]:
        data += await stream.receive()
    return wire.unpack_for_owner(data[8:])


async def let_in(stream: Stream) -> None:
    """Do an owner's part of the handshake, properly."""
    handshake, ours = wire.Handshake(SECRET), wire.Handshake.nonce()
    await stream.send(framed(wire.Challenge(wire.PROTOCOL_VERSION, ours)))
    hello = await heard(stream)
    facts = (ours, hello.nonce, hello.identity, hello.node.encode())
    assert handshake.holds(hello.proof, "reader", *facts)
    proof = handshake.prove("owner", *facts, b"liar")
    await stream.send(
        framed(wire.Welcome(wire.PROTOCOL_VERSION, "liar", INCARNATION, 1, 4096, STRIDE, proof))
    )


@asynccontextmanager
async def liar(
    known: Known, answer: Answer, node: int = 0, *, join: bool = True
) -> AsyncIterator[None]:
    """A node that lets readers in and answers a lease by `answer`."""

    async def serve(stream: Stream) -> None:
        async with stream:
            try:
                if join:
                    await let_in(stream)
                    await answer(stream, await heard(stream))
                else:
                    await answer(stream, None)  # type: ignore[arg-type]
            except (anyio.BrokenResourceError, anyio.EndOfStream):
                pass

    listener = await anyio.create_tcp_listener(local_host="127.0.0.1")
    async with listener, anyio.create_task_group() as group:
        group.start_soon(listener.serve, serve)
        port = listener.extra(anyio.abc.SocketAttribute.local_port)
        known.add(node, f"127.0.0.1:{port}")
        known.hold(ALL, node)
        yield
        group.cancel_scope.cancel()


def true_answer(request: wire.Lease, token: int = 9) -> tuple[wire.Leased, bytes]:
    """What an honest owner would say, and the bytes behind it."""
    arena = Arena(BLOCKS, STRIDE, huge_pages=False)
    slots = np.arange(BLOCKS, dtype=np.uint32)
    for i in range(BLOCKS):
        arena.view(i)[: SPEC.block_bytes] = pattern(TOKENS, i)
    sums = checksums(arena, slots, keys_of(TOKENS), SPEC.block_bytes)
    body = b"".join(
        arena.view(i)[: SPEC.block_bytes].tobytes() + sums[i].tobytes() for i in range(BLOCKS)
    )
    arena.close()
    statuses = bytes([LANDED] * BLOCKS)
    numbers = slots.astype("<u4").tobytes()
    return wire.Leased(request.request, token, 10_000, statuses, numbers), body


async def hang() -> None:
    await anyio.sleep_forever()


async def says_nothing(stream: Stream, request: wire.Lease) -> None:
    await hang()


async def says_garbage(stream: Stream, request: wire.Lease) -> None:
    await stream.send(secrets.token_bytes(1 << 16))
    await hang()


async def answers_another_request(stream: Stream, request: wire.Lease) -> None:
    answer, body = true_answer(request)
    answer.request += 1
    await stream.send(framed(answer) + body)
    await hang()


async def answers_half_a_frame(stream: Stream, request: wire.Lease) -> None:
    answer, _ = true_answer(request)
    await stream.send(framed(answer)[:40])
    await hang()


async def ends_after_half_a_frame(stream: Stream, request: wire.Lease) -> None:
    answer, _ = true_answer(request)
    await stream.send(framed(answer)[:40])


async def announces_gigabytes(stream: Stream, request: wire.Lease) -> None:
    await stream.send(b"FXP1" + struct.pack("<I", 0xFFFF_FFF0))
    await hang()


async def sends_a_message_of_another_kind(stream: Stream, request: wire.Lease) -> None:
    await stream.send(framed(wire.Released(request.request, [True], b"")))
    await hang()


async def tells_of_too_many_blocks(stream: Stream, request: wire.Lease) -> None:
    answer, body = true_answer(request)
    answer.statuses += bytes([LANDED])
    await stream.send(framed(answer) + body)
    await hang()


async def tells_of_too_few_slots(stream: Stream, request: wire.Lease) -> None:
    answer, body = true_answer(request)
    answer.slots = answer.slots[:-4]
    await stream.send(framed(answer) + body)
    await hang()


async def makes_up_statuses(stream: Stream, request: wire.Lease) -> None:
    answer, body = true_answer(request)
    answer.statuses = bytes([200] * BLOCKS)
    await stream.send(framed(answer) + body)
    await hang()


async def has_blocks_without_a_lease(stream: Stream, request: wire.Lease) -> None:
    answer, body = true_answer(request, token=0)
    await stream.send(framed(answer) + body)
    await hang()


async def closes(stream: Stream, request: wire.Lease) -> None:
    pass


NO_ANSWER = [
    says_nothing,
    says_garbage,
    answers_another_request,
    answers_half_a_frame,
    ends_after_half_a_frame,
    announces_gigabytes,
    sends_a_message_of_another_kind,
    tells_of_too_many_blocks,
    tells_of_too_few_slots,
    makes_up_statuses,
    has_blocks_without_a_lease,
    closes,
]


async def check(known: Known, reader: Reader, expected: list[int]) -> None:
    """Read once from the liar alone; then an honest node holds the blocks, too."""
    with anyio.fail_after(90):
        assert (await reader.read(TOKENS)).tolist() == expected
        async with open_owner(known=known, node=1) as owner:
            await owner.rig.put(TOKENS)
            known.hold(ALL, 1, DISK_MEDIUM)
            assert (await reader.read(TOKENS)).tolist() == [LANDED] * BLOCKS
            await owner.unpinned()


@pytest.mark.parametrize("answer", NO_ANSWER)
async def test_who_gives_no_answer_costs_a_failure_and_the_next_holder_is_asked(
    answer: Answer,
) -> None:
    known = Known()
    async with liar(known, answer), open_reader(known, settings=BRIEF) as reader:
        await check(known, reader, [FAILED] * BLOCKS)
        assert known.losses == []


@pytest.mark.parametrize("answer", [says_nothing, says_garbage, announces_gigabytes, closes])
async def test_who_is_no_node_at_all_costs_a_failure(answer: Answer) -> None:
    known = Known()
    async with liar(known, answer, join=False), open_reader(known, settings=BRIEF) as reader:
        await check(known, reader, [FAILED] * BLOCKS)


async def test_bytes_that_are_not_the_blocks_are_never_taken() -> None:
    async def sends_other_bytes(stream: Stream, request: wire.Lease) -> None:
        answer, body = true_answer(request)
        changed = bytearray(body)
        changed[2 * FRAME_BYTES + 5] ^= 0x40
        await stream.send(framed(answer) + changed)
        await hang()

    known = Known()
    async with liar(known, sends_other_bytes), open_reader(known, settings=BRIEF) as reader:
        await check(known, reader, [LANDED, LANDED, DAMAGED, LANDED, LANDED, LANDED])


async def test_the_blocks_of_other_keys_are_never_taken() -> None:
    """Swapped, with the checksums that each would have under its own key."""

    async def swaps(stream: Stream, request: wire.Lease) -> None:
        answer, body = true_answer(request)
        size = FRAME_BYTES
        await stream.send(framed(answer) + body[size : 2 * size] + body[:size] + body[2 * size :])
        await hang()

    known = Known()
    async with liar(known, swaps), open_reader(known, settings=BRIEF) as reader:
        await check(known, reader, [DAMAGED] * 2 + [LANDED] * 4)


async def test_a_connection_cut_within_a_block_leaves_the_whole_ones_before_it() -> None:
    async def cuts(stream: Stream, request: wire.Lease) -> None:
        answer, body = true_answer(request)
        await stream.send(framed(answer) + body[: 2 * FRAME_BYTES + 100])

    known = Known()
    async with liar(known, cuts), open_reader(known, settings=BRIEF) as reader:
        await check(known, reader, [LANDED] * 2 + [FAILED] * 4)


async def test_a_slow_peer_is_given_up_at_the_deadline() -> None:
    """1 KB/s: six blocks of 4 KiB would take 24 seconds."""

    async def dribbles(stream: Stream, request: wire.Lease) -> None:
        answer, body = true_answer(request)
        await stream.send(framed(answer))
        for at in range(0, len(body), 64):
            await stream.send(body[at : at + 64])
            await anyio.sleep(0.064)

    known = Known()
    async with liar(known, dribbles), open_reader(known, settings=BRIEF) as reader:
        await check(known, reader, [FAILED] * BLOCKS)


async def test_a_peer_that_says_it_has_nothing_is_believed() -> None:
    async def denies(stream: Stream, request: wire.Lease) -> None:
        none = wire.Leased(request.request, 0, 10_000, bytes([MISSING] * BLOCKS), b"")
        await stream.send(framed(none))
        await hang()

    known = Known()
    async with liar(known, denies), open_reader(known, settings=BRIEF) as reader:
        await check(known, reader, [MISSING] * BLOCKS)
        assert known.losses[0] == (0, BLOCKS, False)
