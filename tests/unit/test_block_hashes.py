"""The names of blocks: fixed for ever, one to one with prefix and salt, and the same however a sequence grew."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.contract.block_hashes import HASH_BYTES, BlockChain, block_hashes
from common.contract.codec import decode, encode
from common.contract.errors import ProtocolError
from common.contract.ids import Incarnation, RequestId
from common.contract.messages.handoff import AttachPrefix

ME = Incarnation("0123456789abcdef")
TOKENS = st.lists(st.integers(0, 1), max_size=12)
"""Of a tiny alphabet, so that prefixes coincide."""


def test_the_names_are_what_they_have_always_been() -> None:
    """Workers of two releases exchange names under one protocol version: a change here is a change of the protocol."""
    assert [name.hex() for name in block_hashes([1, 2, 3, 2**62], 2)] == [
        "ab70cb8b86fadf1f76b85bcbce3749b69f78f24ac27494f30430ce3f0c665e71",
        "7d6665e46fd7eb9ecc95ca1883039841683bdc05c778b9ac6c558f89f7b00a0a",
    ]
    assert [name.hex() for name in block_hashes([1, 2], 2, "salt")] == [
        "8ed7fd838f49df2bf6aca95e7e228ad640a676aa384cdded8f12dce3660f9834"
    ]


def test_everything_before_a_block_is_in_its_name() -> None:
    names = [
        *block_hashes([1, 2, 1, 2], 2),
        *block_hashes([2, 1, 1, 2], 2),
        *block_hashes([1, 2, 1, 2], 2, "a"),
        *block_hashes([1, 2, 1, 2], 2, "b"),
        *block_hashes([1, 2, 1, 2], 4),
        *block_hashes([1, 2, 1, 2], 1),
    ]
    assert len(set(names)) == len(names)
    assert {len(name) for name in names} == {HASH_BYTES}


@pytest.mark.parametrize(("num_tokens", "num_named"), [(0, 0), (3, 0), (4, 1), (7, 1), (8, 2)])
def test_a_partial_block_has_no_name(num_tokens: int, num_named: int) -> None:
    assert len(block_hashes(range(num_tokens), 4)) == num_named


def test_only_the_tokens_told_of_are_named() -> None:
    chain = BlockChain(2)
    chain.extend([1, 2, 3, 4], 3)
    assert chain.hashes == block_hashes([1, 2], 2)
    with pytest.raises(AssertionError, match="5 of 4 tokens"):
        chain.extend([1, 2, 3, 4], 5)


@given(TOKENS, st.lists(st.integers(0, 12)), st.integers(1, 4), st.sampled_from(["", "a"]))
def test_step_by_step_is_the_same_as_at_once(token_ids: list[int], ends: list[int], size: int, salt: str) -> None:
    chain = BlockChain(size, salt)
    for end in sorted(min(end, len(token_ids)) for end in ends):
        chain.extend(token_ids, end)
        assert chain.hashes == block_hashes(token_ids[:end], size, salt)
    chain.extend(token_ids, len(token_ids))
    assert chain.hashes == block_hashes(token_ids, size, salt)


@given(TOKENS, TOKENS, st.integers(1, 4))
def test_names_are_equal_as_far_as_the_tokens_are(one: list[int], other: list[int], size: int) -> None:
    num_common = next(
        (i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other))
    )
    names, others = block_hashes(one, size), block_hashes(other, size)
    assert [a == b for a, b in zip(names, others, strict=False)] == [
        (index + 1) * size <= num_common for index in range(min(len(names), len(others)))
    ]
    assert len(set(names) & set(others)) == num_common // size, "two places share a name"


@given(TOKENS, TOKENS, TOKENS)
def test_a_fork_goes_on_by_itself(prompt: list[int], one: list[int], other: list[int]) -> None:
    chain = BlockChain(2, "a")
    chain.extend(prompt, len(prompt))
    fork = chain.fork()
    chain.extend([*prompt, *one], len(prompt) + len(one))
    fork.extend([*prompt, *other], len(prompt) + len(other))
    assert chain.hashes == block_hashes([*prompt, *one], 2, "a")
    assert fork.hashes == block_hashes([*prompt, *other], 2, "a")


def test_names_travel_and_only_whole_ones() -> None:
    names = tuple(block_hashes(range(8), 2))
    attach = AttachPrefix(request=RequestId("r1"), attempt=1, block_hashes=names)
    assert decode(encode(ME, [attach])) == (ME, [attach])
    for bad in ((), (names[0][:-1],), (names[0] + b"x",), (names[0].hex(),)):
        with pytest.raises(ProtocolError):
            decode(encode(ME, [AttachPrefix(request=RequestId("r1"), attempt=1, block_hashes=bad)]))  # type: ignore[arg-type]
