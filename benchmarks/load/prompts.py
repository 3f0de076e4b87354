"""Makes prompts as JSON that is ready to be sent: token ids, or words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from benchmarks.load.trace import BLOCK_TOKENS

WORDS = (
    *("able", "also", "back", "best", "book", "both", "call", "case", "city", "come", "days", "door", "down", "each"),
    *("even", "face", "fact", "feel", "find", "fire", "four", "free", "full", "game", "girl", "give", "good", "half"),
    *("hand", "hard", "have", "head", "help", "here", "high", "hold", "home", "hour", "idea", "into", "just", "keep"),
    *("kind", "know", "land", "last", "left", "life", "like", "line", "list", "live", "long", "look", "love", "made"),
    *("main", "make", "many", "mean", "mind", "more", "most", "move", "much", "must", "name", "near", "need", "next"),
    *("once", "only", "open", "over", "page", "part", "past", "plan", "play", "read", "real", "rest", "road", "room"),
    *("said", "same", "seem", "show", "side", "some", "soon", "such", "sure", "take", "talk", "team", "tell", "than"),
    *("that", "them", "then", "they", "this", "time", "town", "tree", "turn", "very", "wait", "walk", "wall", "want"),
    *("week", "well", "were", "what", "when", "wide", "wife", "will", "wind", "with", "word", "work", "year", "your"),
)
"""Short and common words, so that most tokenizers have each of them, with the space before it, as one token."""


@dataclass(frozen=True, slots=True)
class Alphabet:
    """The pieces from which a prompt is drawn, and the way in which they are joined to a JSON value."""

    pieces: Sequence[str]
    opening: str
    between: str
    closing: str
    tokens_per_piece: float = 1.0

    def prompt(self, random: Random, tokens: int) -> str:
        """A prompt of `tokens` tokens."""
        return self._join(random.choices(self.pieces, k=self._count(tokens)))

    def prompt_of_blocks(self, seed: int, blocks: Sequence[int], tokens: int) -> str:
        """A prompt whose blocks of 512 tokens are drawn from their hashes: equal hashes give equal tokens."""
        per_block = self._count(BLOCK_TOKENS)
        drawn: list[str] = []
        for block in blocks:
            drawn += Random(f"{seed}/block/{block}").choices(self.pieces, k=per_block)
        return self._join(drawn[: self._count(tokens)])

    def _count(self, tokens: int) -> int:
        return max(1, round(tokens / self.tokens_per_piece))

    def _join(self, pieces: Sequence[str]) -> str:
        return self.opening + self.between.join(pieces) + self.closing


def token_alphabet(low: int, high: int) -> Alphabet:
    """Prompts as arrays of token ids from `low` to `high`."""
    return Alphabet([str(token) for token in range(low, high + 1)], "[", ",", "]")


def word_alphabet(tokens_per_word: float) -> Alphabet:
    """Prompts as strings of words. The number of tokens depends on the model's tokenizer, so `tokens_per_word` is
    given."""
    return Alphabet(WORDS, '"', " ", '"', tokens_per_word)
