"""An owner or a reader in a process of its own, for tests that kill and stop it.

`python peer_child.py owner|reader ...` says what it does in JSON lines; for each line that it is
told it says when nothing is pinned.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import anyio
import anyio.to_thread
from peer_rig import INCARNATION, SECRET, identity, keys_of, open_owner
from rig import SPEC, prompt

from flexkv.cluster import tcp
from flexkv.cluster.blocks import Passage
from flexkv.cluster.peerlink import Me, PeerLink
from flexkv.cluster.peerwire import Handshake

BLOCKS = 6


def say(what: str, **facts: Any) -> None:
    """Tell the parent."""
    print(json.dumps({"what": what, **facts}), flush=True)


async def owner(fault: str, ttl_s: str) -> None:
    """Lend the blocks of prompt 1.

    With the first lease: `stalls` before it answers, or sends `half` of the bytes.
    """
    async with open_owner(ttl_s=float(ttl_s)) as mine:
        await mine.rig.put(prompt(1, BLOCKS))
        lend, send = mine.lender.lend, tcp.Wire.send_blocks
        faults = [fault] if fault != "none" else []

        async def stalling(*arguments: Any) -> Any:
            loan = await lend(*arguments)
            if "stalls" in faults:
                faults.clear()
                say("leased")
                await anyio.sleep_forever()
            return loan

        async def halving(self: tcp.Wire, passage: Passage) -> None:
            if "half" in faults:
                faults.clear()
                _, slots, keys = passage._keep
                arena = mine.rig.kv._stack.arena
                await send(self, Passage(arena, slots[:3], keys[:3], SPEC.block_bytes))
                say("half")
                await anyio.sleep_forever()
            await send(self, passage)

        mine.lender.lend = stalling  # type: ignore[method-assign]
        tcp.Wire.send_blocks = halving  # type: ignore[method-assign]
        say("ready", address=mine.address)
        while await anyio.to_thread.run_sync(sys.stdin.readline):
            await mine.unpinned()
            say("unpinned")


async def reader(address: str) -> None:
    """Take a lease on the blocks of prompt 1, and keep it."""
    me = Me("child", identity().digest(), SPEC.block_bytes, Handshake(SECRET))
    link = PeerLink(address, me, anyio.CapacityLimiter(1), 1, anyio.current_time)
    keys = keys_of(prompt(1, BLOCKS))
    grant = await link.lease(keys, incarnation=INCARNATION, epoch=1, deadline_s=20)
    say("leased", blocks=len(grant.landed))
    await anyio.sleep_forever()


if __name__ == "__main__":
    anyio.run({"owner": owner, "reader": reader}[sys.argv[1]], *sys.argv[2:])
