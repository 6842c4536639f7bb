"""Leases are given back exactly once and in time; late and foreign tokens are refused."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from flexkv.cluster.leases import Lease, LeaseError, LeaseTable, Token
from flexkv.errors import CapacityError

TTL_S = 10.0


class Books:
    """Pins of blocks, as an index would count them."""

    def __init__(self) -> None:
        self.pins: Counter[int] = Counter()
        self.returned: list[Token] = []

    def take(self, *blocks: int) -> tuple[np.ndarray, np.ndarray]:
        self.pins.update(blocks)
        keys = np.stack((np.array(blocks), np.array(blocks)), 1).astype(np.uint64)
        return np.array(blocks, np.uint32), keys

    def give_back(self, lease: Lease) -> None:
        self.pins.subtract(lease.blocks.tolist())
        self.returned.append(lease.token)

    @property
    def pinned(self) -> int:
        assert min(self.pins.values(), default=0) >= 0, "a pin was given back twice"
        return sum(self.pins.values())


@pytest.fixture
def books() -> Books:
    return Books()


@pytest.fixture
def table(books: Books) -> LeaseTable:
    return LeaseTable(7, books.give_back, ttl_s=TTL_S, max_leases=4, max_blocks=8)


def test_a_lease_is_given_back_once(books: Books, table: LeaseTable) -> None:
    lease = table.grant("a", *books.take(1, 2), now=0.0)
    assert table.release([lease.token, lease.token], 1.0) == [True, False]
    assert table.release([lease.token], 1.0) == [False]
    assert books.returned == [lease.token]
    assert (books.pinned, len(table), table.leased_blocks, table.of_reader("a")) == (0, 0, 0, 0)


def test_a_lease_that_is_past_its_time_is_over_before_anybody_looks(
    books: Books, table: LeaseTable
) -> None:
    lease = table.grant("a", *books.take(1), now=0.0)
    assert table.find(lease.token, TTL_S - 0.001) is lease
    with pytest.raises(LeaseError):
        table.find(lease.token, TTL_S)
    assert (books.pinned, table.expired) == (0, 1)
    assert table.release([lease.token], TTL_S) == [False]


def test_expiry_unpins_what_nobody_gave_back(books: Books, table: LeaseTable) -> None:
    table.grant("a", *books.take(1), now=0.0)
    table.grant("b", *books.take(2), now=3.0)
    assert table.next_expiry() == TTL_S
    assert table.expire(TTL_S) == 1
    assert (books.pinned, table.next_expiry()) == (1, TTL_S + 3.0)
    assert table.expire(TTL_S + 3.0) == 1
    assert (books.pinned, table.next_expiry()) == (0, None)


def test_blocks_that_are_being_sent_stay_until_that_has_ended(
    books: Books, table: LeaseTable
) -> None:
    lease = table.grant("a", *books.take(1), now=0.0)
    table.begin(lease.token, 1.0)
    assert table.expire(TTL_S) == 1
    assert books.pinned == 1
    with pytest.raises(LeaseError):
        table.begin(lease.token, TTL_S)
    table.end(lease)
    assert books.pinned == 0


def test_the_time_of_a_lease_stops_while_its_owner_works_for_it(
    books: Books, table: LeaseTable
) -> None:
    lease = table.grant("a", *books.take(1), now=0.0)
    table.pause(lease)
    assert table.expire(1e6) == 0
    table.renew(lease, 1e6)
    assert table.next_expiry() == 1e6 + TTL_S


@pytest.mark.parametrize("token", [Token(7, 2), Token(6, 1), Token(8, 1)])
def test_tokens_of_others_are_refused(books: Books, table: LeaseTable, token: Token) -> None:
    """Of a lease that never was, and of other incarnations."""
    table.grant("a", *books.take(1), now=0.0)
    with pytest.raises(LeaseError):
        table.find(token, 0.0)
    assert table.release([token], 0.0) == [False]
    assert (books.pinned, table.refused) == (1, 2)


def test_numbers_are_never_used_again(books: Books, table: LeaseTable) -> None:
    numbers = []
    for _ in range(10):
        lease = table.grant("a", *books.take(1), now=0.0)
        numbers.append(lease.token.number)
        table.release([lease.token], 0.0)
    assert numbers == sorted(set(numbers))


def test_what_is_on_lease_is_limited(books: Books) -> None:
    table = LeaseTable(7, books.give_back, ttl_s=1, max_leases=3, max_blocks=8, max_reader_blocks=5)
    table.grant("a", *books.take(1, 2, 3), now=0.0)
    with pytest.raises(CapacityError, match="'a' has 3 blocks"):
        table.grant("a", *books.take(4, 5, 6), now=0.0)
    table.grant("b", *books.take(1, 2, 3), now=0.0)
    with pytest.raises(CapacityError, match="exceed 8"):
        table.grant("c", *books.take(4, 5, 6), now=0.0)
    table.grant("c", *books.take(1), now=0.0)
    with pytest.raises(CapacityError, match="all 3 leases"):
        table.grant("d", *books.take(1), now=0.0)
    assert (len(table), table.leased_blocks) == (3, 7)


def test_revoking_ends_the_leases_of_one_reader_or_of_all(books: Books, table: LeaseTable) -> None:
    for reader in ("a", "a", "b"):
        table.grant(reader, *books.take(1), now=0.0)
    assert table.revoke("a") == 2
    assert books.pinned == 1
    assert table.revoke() == 1
    assert books.pinned == 0


class Life(RuleBasedStateMachine):
    """Any schedule of readers, clock and owner; pins are those of the leases that are open."""

    def __init__(self) -> None:
        super().__init__()
        self.books, self.now = Books(), 0.0
        self.table = LeaseTable(
            7, self.books.give_back, ttl_s=TTL_S, max_leases=6, max_blocks=20, max_reader_blocks=12
        )
        self.granted: list[Lease] = []
        self.busy: list[Lease] = []
        self.over: set[Token] = set()  # by the model: released, revoked, or past their time

    @rule(reader=st.sampled_from("ab"), blocks=st.lists(st.integers(0, 9), min_size=1, max_size=5))
    def grant(self, reader: str, blocks: list[int]) -> None:
        taken = self.books.take(*blocks)
        try:
            self.granted.append(self.table.grant(reader, *taken, now=self.now))
        except CapacityError:
            self.books.pins.subtract(blocks)

    @rule(seconds=st.sampled_from([0.0, 1.0, 5.0, TTL_S]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        for lease in self.granted:
            if self.now >= lease.expires:
                self.over.add(lease.token)

    @rule()
    def expire(self) -> None:
        self.table.expire(self.now)

    @precondition(lambda self: self.granted)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        token = data.draw(st.sampled_from(self.granted)).token
        assert self.table.release([token], self.now) == [token not in self.over]
        self.over.add(token)

    @precondition(lambda self: self.granted)
    @rule(data=st.data())
    def begin(self, data: st.DataObject) -> None:
        lease = data.draw(st.sampled_from(self.granted))
        try:
            assert self.table.begin(lease.token, self.now) is lease
        except LeaseError:
            assert lease.token in self.over
        else:
            assert lease.token not in self.over
            self.busy.append(lease)

    @precondition(lambda self: self.busy)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        lease = data.draw(st.sampled_from(self.busy))
        self.busy.remove(lease)
        self.table.end(lease)

    @rule(reader=st.sampled_from(["a", "b", None]))
    def revoke(self, reader: str | None) -> None:
        self.table.revoke(reader)
        self.over |= {x.token for x in self.granted if reader in (None, x.reader)}

    @invariant()
    def books_agree(self) -> None:
        held = [x for x in self.granted if x.token not in self.books.returned]
        for lease in self.granted:
            if lease in self.busy or lease.token not in self.over:
                assert lease in held, "given back under somebody's hands, or too early"
        assert len(set(self.books.returned)) == len(self.books.returned), "given back twice"
        assert self.books.pinned == sum(len(x.blocks) for x in held) == self.table.leased_blocks
        assert len(self.table) == len(held)
        for reader in "ab":
            mine = sum(len(x.blocks) for x in held if x.reader == reader)
            assert self.table.of_reader(reader) == mine

    def teardown(self) -> None:
        for lease in self.busy:
            self.table.end(lease)
        self.busy.clear()
        self.table.expire(self.now + TTL_S)
        assert self.books.pinned == 0


TestLife = Life.TestCase
TestLife.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
