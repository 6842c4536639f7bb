"""Who may share blocks: different requests have different labels, whatever is in their names."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from flexkv.integration.vllm.requests import namespace_of
from flexkv.keys import Keyring
from flexkv.model import Identity, KVSpec

nasty = st.text(alphabet="a1@+=,'|:\\\x00 ", max_size=6) | st.sampled_from(
    ["lora=a", "salt=a", "lora_path=b", "mm=a@1+2", "info='a'", "None", "a", "b", "a,b"]
)
loras = st.none() | st.tuples(nasty, nasty)
images = st.lists(st.tuples(nasty, st.integers(0, 30), st.integers(1, 30)), max_size=3)
infos = st.none() | st.lists(nasty, max_size=2).map(tuple)
parts = st.tuples(loras, st.none() | nasty, images, infos)
keyring = Keyring(Identity("m", spec=KVSpec.uniform(1, 1, 8, "float16", tokens_per_block=4)))


def request(lora: Any, salt: Any, media: Any, info: Any) -> Any:
    return SimpleNamespace(
        lora_request=lora and SimpleNamespace(lora_name=lora[0], lora_path=lora[1]),
        cache_salt=salt,
        mm_features=[
            SimpleNamespace(
                identifier=name, mm_position=SimpleNamespace(offset=offset, length=length)
            )
            for name, offset, length in media
        ],
        namespace_info=info,
    )


@given(parts, parts)
def test_labels_are_equal_only_where_everything_is(one: Any, other: Any) -> None:
    first, second = namespace_of(request(*one)), namespace_of(request(*other))
    assert (first == second) == (one == other)
    assert (tuple(keyring.root(first)) == tuple(keyring.root(second))) == (first == second)


def test_an_adapter_and_a_salt_of_one_name_are_strangers() -> None:
    adapter = namespace_of(request(("a", ""), None, [], None))
    salt = namespace_of(request(None, "a", [], None))
    assert not set(adapter) & set(salt)
    assert namespace_of(request(None, "a", [], None)) == salt
    assert namespace_of(request(None, None, [], None)) == ()


def test_media_differ_by_place() -> None:
    assert namespace_of(request(None, None, [("a", 0, 4)], None)) != namespace_of(
        request(None, None, [("a", 4, 4)], None)
    )
