"""The state of one choice of a request in an engine, and the rule by which it ends. No torch, no I/O."""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterable

from common.contract.ids import RequestKey
from common.contract.messages.fields import FinishReason
from common.contract.sampling import SamplingParams
from common.engine.grammar import GrammarState
from common.engine.token_counts import TokenCounts, token_counts


class TokenSequence:
    """One choice of a request: its tokens, how many of them are in the KV cache, and where.

    The tokens are `[0, prompt_len)` prompt, `[prompt_len, num_tokens)` output. The KV of `[0, num_computed)` is in the
    cache, in the blocks of `block_table`. This is an array, because each step copies it.
    """

    __slots__ = (
        "block_table", "choice", "counts", "grammar_state", "key", "num_computed", "prompt_len", "sampling",
        "token_ids",
    )  # fmt: skip

    def __init__(
        self,
        key: RequestKey,
        choice: int,
        token_ids: list[int],
        prompt_len: int,
        sampling: SamplingParams,
        num_computed: int = 0,
        block_table: Iterable[int] = (),
        shared_counts: TokenCounts | None = None,
    ) -> None:
        """`shared_counts` are those of leading tokens that all choices of the request begin with."""
        assert 1 <= prompt_len <= len(token_ids), (prompt_len, len(token_ids))
        assert 0 <= num_computed <= len(token_ids), (num_computed, len(token_ids))
        self.key = key
        self.choice = choice
        self.token_ids = token_ids
        self.prompt_len = prompt_len
        self.sampling = sampling
        self.num_computed = num_computed
        self.block_table = array("q", block_table)
        self.counts = token_counts(sampling, token_ids, prompt_len, shared_counts)
        """Token counts for penalties. They stay with the sequence wherever its blocks are."""
        self.grammar_state = None if sampling.grammar is None else GrammarState()

    @property
    def num_tokens(self) -> int:
        """Tokens of prompt and output together."""
        return len(self.token_ids)

    @property
    def num_output(self) -> int:
        """Tokens generated so far, on this or other workers."""
        return len(self.token_ids) - self.prompt_len

    def most_tokens(self, max_sequence_tokens: int) -> int:
        """Most tokens of prompt and output that it can get where a sequence may have `max_sequence_tokens`."""
        return min(self.prompt_len + self.sampling.max_tokens, max_sequence_tokens)

    def __repr__(self) -> str:
        return (
            f"TokenSequence({self.key.request}.{self.key.attempt}, choice {self.choice}, {self.prompt_len} prompt + "
            f"{self.num_output} output tokens, {self.num_computed} computed, {len(self.block_table)} blocks)"
        )


def finish_reason(
    token_id: int,
    num_output: int,
    sampling: SamplingParams,
    eos_token_ids: Collection[int],
    num_tokens: int,
    max_sequence_tokens: int,
) -> FinishReason | None:
    """Why a choice ends with the token that it just produced; None if it goes on.

    `num_output` and `num_tokens` (prompt and output) count that token; `max_sequence_tokens` is the most tokens that
    one sequence may have. A token that both stops the choice and is the last allowed gives "stop".
    """
    if num_output > sampling.min_tokens:
        if token_id in sampling.stop_token_ids:
            return "stop"
        if not sampling.ignore_eos and token_id in eos_token_ids:
            return "stop"
    if num_output >= sampling.max_tokens or num_tokens >= max_sequence_tokens:
        return "length"
    return None
