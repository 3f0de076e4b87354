"""Which worker probably holds which blocks: what this gateway has seen computed, and where. Pure state.

A worker evicts as it must and tells nobody, so whatever is read here is a hint. A wrong one costs time, never a token.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

from common.contract.block_hashes import BlockChain, BlockHash
from gateway.attempt import Place

MAX_PLACES: Final = 4
"""Workers remembered for one block."""


class PrefixIndex:
    """At most `max_blocks` block names, the least recently confirmed forgotten first.

    A name stands for its block and all before it. So a name that is here has all before it here, too, each at least as
    recently confirmed; and a worker that holds a block holds those before it, whether it is listed with them or not.
    """

    def __init__(self, max_blocks: int) -> None:
        self._max_blocks = max_blocks
        self._places: OrderedDict[BlockHash, tuple[Place, ...]] = OrderedDict()
        """Least recently confirmed first; a block's places, too."""

    def __len__(self) -> int:
        return len(self._places)

    def add(self, block_hashes: Sequence[BlockHash], place: Place) -> None:
        """`place` has just held these blocks, the leading ones of a sequence."""
        before: tuple[Place, ...] | None = None
        after: tuple[Place, ...] = (place,)
        for name in reversed(block_hashes[: self._max_blocks]):
            held = self._places.get(name, ())
            if held is not before:  # neighbours mostly have the same places, and share the tuple
                before, after = held, (*(other for other in held if other != place), place)[-MAX_PLACES:]
            self._places[name] = after
            self._places.move_to_end(name)
        while len(self._places) > self._max_blocks:
            self._places.popitem(last=False)

    def longest(self, block_hashes: Sequence[BlockHash]) -> dict[Place, int]:
        """How many of these blocks, the leading ones of a sequence, each place probably holds; those that hold none are
        left out. Lives that have ended are still named, as nobody says that one will not come back: the caller knows
        who is there."""
        known = []
        for name in block_hashes:
            places = self._places.get(name)
            if places is None:
                break
            known.append(places)
        longest: dict[Place, int] = {}
        before: tuple[Place, ...] = ()
        for num_blocks in range(len(known), 0, -1):
            if known[num_blocks - 1] is not before:
                before = known[num_blocks - 1]
                for place in before:
                    longest.setdefault(place, num_blocks)
        return longest

    def check_invariants(self) -> None:
        """Assert what must hold between any two calls."""
        assert len(self._places) <= self._max_blocks
        assert all(1 <= len(places) <= MAX_PLACES for places in self._places.values())
        assert all(len(set(places)) == len(places) for places in self._places.values())


class Trail:
    """One request's tokens, and what it leaves in the index. Blocks are named when it begins and when it has ended,
    not while its tokens flow."""

    def __init__(self, index: PrefixIndex, block_size: int, cache_salt: str, prompt: Sequence[int]) -> None:
        self._index = index
        self._block_size = block_size
        self._token_ids = list(prompt)
        self._num_prompt_tokens = len(prompt)
        self._chain = BlockChain(block_size, cache_salt)
        self._chain.extend(self._token_ids, len(prompt))

    def cached(self) -> dict[Place, int]:
        """Leading tokens of the prompt that a place probably holds. The last token, whose logits are asked for, is
        computed in any case."""
        num_blocks = (self._num_prompt_tokens - 1) // self._block_size
        longest = self._index.longest(self._chain.hashes[:num_blocks])
        return {place: num * self._block_size for place, num in longest.items()}

    def append(self, token_ids: Sequence[int]) -> None:
        """More output."""
        self._token_ids += token_ids

    def prompt_computed(self, place: Place) -> None:
        """The prompt's KV is there."""
        self._index.add(self._chain.hashes, place)

    def decoded(self, place: Place) -> None:
        """The KV of every token but the last, which was never an input, is there. Called once, at the end."""
        self._chain.extend(self._token_ids, len(self._token_ids) - 1)
        self._index.add(self._chain.hashes, place)
