"""Checks whether tokens of the model can follow a grammar, as workers do it, but with a sample of the vocabulary.

A grammar's cost shows only with tokens of several characters, because each token is a text to try. Fewer tokens cost
less, so a grammar that is too expensive here is too expensive for every worker.
"""

from __future__ import annotations

import functools
import random
from typing import Final

from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from common.runtime.grammar_limits import exceeded, grammar_limits
from gateway.text.tokenizer import ModelTokenizer

_MAX_TOKENS: Final = 4096
"""Most tokens in the sample, spread evenly over the vocabulary, in addition to the 256 single bytes."""
_NUM_STEPS: Final = 8
"""Tokens that are drawn, one after the other."""
_END: Final = 256


class _Share:
    """The tokenizer interface that the grammar library expects, for a sample of the vocabulary."""

    eos_token_id = _END
    bos_token_id = None
    special_token_ids = (_END,)

    def __init__(self, texts: list[bytes]) -> None:
        self.tokens = [bytes([byte]) for byte in range(256)] + [b"<end>"] + texts

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


@functools.lru_cache(maxsize=32)
def token_error(grammar: str, tokenizer: ModelTokenizer) -> str:
    """Why a text of tokens cannot follow `grammar`, tried along one random path from its beginning; "" if it can."""
    matcher = LLMatcher(_tokens(tokenizer), grammar, log_level=0, limits=grammar_limits())
    if matcher.is_error():
        return ""  # the grammar names tokens of the model, which workers know
    draw = random.Random(0)
    for _ in range(_NUM_STEPS):
        mask = matcher.compute_bitmask()
        if matcher.is_error():
            bound = exceeded(matcher.get_error())
            return "" if bound is None else f"it is too ambiguous, or too large: {bound[1]}"
        allowed = [token for token in range(8 * len(mask)) if mask[token >> 3] >> (token & 7) & 1 and token != _END]
        if matcher.is_stopped() or not allowed:
            return ""
        matcher.consume_token(draw.choice(allowed))
    return ""


@functools.lru_cache(maxsize=1)
def _tokens(tokenizer: ModelTokenizer) -> LLTokenizer:
    step = -(-tokenizer.vocab_size // _MAX_TOKENS)
    texts = {
        tokenizer.spelling(token)[1] for token in range(0, tokenizer.vocab_size, step) if tokenizer.has_text(token)
    }
    return LLTokenizer(TokenizerWrapper(_Share(sorted(text for text in texts if len(text) > 1))))
