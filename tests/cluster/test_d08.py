"""D08: what a node wrote never outlives it, and a late heartbeat brings nothing back for good."""

from __future__ import annotations

import anyio
import anyio.to_thread
import redis
from directory_rig import Node, chain, quick, running, until_killed

from flexkv.testing.remote import RedisServer


class Auditor:
    """Looks at what a node has on the server, again and again."""

    def __init__(self, server: RedisServer, node: Node) -> None:
        self.client, self.name = redis.Redis(port=server.port), node.name.encode()
        self.seen = 0

    def records(self) -> dict[bytes, int]:
        """Keys that belong to the node, and for how many ms they are there yet."""
        keys = [key for key in self.client.scan_iter() if b"%b/" % self.name in key]
        return {key: left for key in keys if (left := self.client.pttl(key)) != -2}

    async def watch(self) -> None:
        """Complain of a record without an expiry."""
        while True:
            records = await anyio.to_thread.run_sync(self.records)
            self.seen += len(records)
            endless = [key for key, left in records.items() if left < 0]
            assert not endless, f"they would outlive their node: {endless}"


async def test_d08_a_node_that_stops_and_beats_once_more(redis_server: RedisServer) -> None:
    settings = quick(redis_server.url, node_ttl_ms=300)
    one, two = Node("one", settings), Node("two", settings)
    one.store(chain(1, 40))
    auditor = Auditor(redis_server, one)
    async with running(two), anyio.create_task_group() as group:
        group.start_soon(auditor.watch)
        async with until_killed(one):
            await two.sees(one)
        await two.sees()  # it stopped: neither it nor its blocks are listed
        assert two.books.of("one") is None
        async with until_killed(one):  # a late beat, and then no more
            await two.sees(one)
        await two.sees()
        while await anyio.to_thread.run_sync(auditor.records):
            pass
        one.store(chain(2, 8))
        async with until_killed(one):  # it comes back, with what it holds now
            await two.sees(one)
        assert auditor.seen > 0
        group.cancel_scope.cancel()
