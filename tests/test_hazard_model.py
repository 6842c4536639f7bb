"""The C core of hazard decides as the slow model of it does, at every step."""

from __future__ import annotations

from itertools import islice

import pytest
from hazard_model import Model
from hazard_rig import Replay, chats
from hypothesis import given, settings
from hypothesis import strategies as st


def serve_both(replay: Replay, model: Model, now: float, ids: list[int]) -> bool:
    """Serve a prompt twice and compare; whether the learned order is followed from now on."""
    ids = ids[: replay.capacity]
    before = replay.policy.state
    replay.serve(now, ids)
    after = replay.policy.state
    hits, lru_hits, following, held = model.put(ids, now)
    assert after["hits"] - before["hits"] == hits
    assert after["lru_hits"] - before["lru_hits"] == lru_hits
    assert after["following"] == ("learned" if following else "lru")
    assert (after["used"], after["ghosts"]) == (len(held), len(model.ghosts))
    assert after["runs"] == len(model.runs)
    assert after["classes"] == len(model.rates.classes)
    assert after["lead"] == model.lead
    return following


@settings(max_examples=4, deadline=None)
@given(
    seed=st.integers(0, 1 << 30),
    capacity=st.integers(8, 50),
    scans=st.sampled_from([0.2, 0.5, 0.8]),
)
def test_until_it_is_followed(seed: int, capacity: int, scans: float) -> None:
    """Evictions by what was learned begin after a hundred prompts, to be followed after 300 at the
    earliest. In which order blocks become ghosts when that begins is nobody's business.
    """
    replay, model = Replay(capacity), Model(capacity)
    for now, ids in islice(chats(seed, 310, scans=scans), 310):
        if serve_both(replay, model, now, ids):
            break
    assert model.rates.learned


@pytest.mark.parametrize(("seed", "capacity"), [(1, 40), (2, 25)])
def test_while_it_is_followed(seed: int, capacity: int) -> None:
    replay, model = Replay(capacity), Model(capacity)
    followed = [serve_both(replay, model, now, ids) for now, ids in chats(seed, 500)]
    assert sum(followed) > 100
