"""Whether a text of a model's tokens can follow a grammar: as workers follow it, but with a share of the tokens.

What a grammar costs shows only with tokens of several characters: each is a text that is tried. With fewer of them it
costs less, so what is too much here is too much for any worker.
"""

from __future__ import annotations

import functools
import random
from typing import Final

from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from common.runtime.grammar_limits import exceeded, grammar_limits
from gateway.text.tokenizer import ModelTokenizer

_MAX_TOKENS: Final = 4096
"""Of the vocabulary, evenly spread, beside each byte."""
_NUM_STEPS: Final = 8
"""Tokens that are drawn, one after the other."""
_END: Final = 256


class _Share:
    """What the library wants to know of a tokenizer."""

    eos_token_id = _END
    bos_token_id = None
    special_token_ids = (_END,)

    def __init__(self, texts: list[bytes]) -> None:
        self.tokens = [bytes([byte]) for byte in range(256)] + [b"<end>"] + texts

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


@functools.lru_cache(maxsize=32)
def token_error(grammar: str, tokenizer: ModelTokenizer) -> str:
    """What keeps a text of tokens from following `grammar` at its beginning, on one way that is drawn; or nothing."""
    matcher = LLMatcher(_tokens(tokenizer), grammar, log_level=0, limits=grammar_limits())
    if matcher.is_error():
        return ""  # the model's own tokens are named: workers know them
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
