"""Whatever is chosen among the tokens that a JSON schema leaves: an answer that ends validates."""

from __future__ import annotations

import json
import random
from decimal import Decimal, localcontext
from typing import Any

import jsonschema
import pytest
from llguidance import LLMatcher, LLTokenizer

from common.runtime.grammar_limits import grammar_limits
from gateway.intake.structured_output import compile_grammar

TOKENIZER = LLTokenizer("byte")
END = TOKENIZER.eos_token
NAMES = ("a", "ab", "u0061", 'é"', "\\", "x", "x1", "y", "\n")
PATTERNS = ("^a+$", "b", "^(x|é)[0-9]{1,3}$", r"^\d{2}-\w$", "[^a]$", r"^[^\x00-\x1f]*\\$")
VALUES = (None, True, 0, -7, 2.5, "", "a", 'é"\\\n', [1, "a"], {"a": 1, "b": [None]})
TEMPTING = rb"abx01u6\""
"""With these, names repeat."""
CLOSING = rb'"}]e1'
"""With these, an answer ends some time."""


class Draw:
    """Small schemas of all kinds, and walks through their grammars. The same for the same seed."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def some(self, **keywords: Any) -> dict[str, Any]:
        """Some of the keywords."""
        return {key: value for key, value in keywords.items() if self.random.random() < 0.4}

    def schema(self, depth: int = 3) -> Any:
        kinds = ["number", "string", "enum", "plain"] + ["object", "object", "array", "any", "all"] * (depth > 0)
        return getattr(self, f"_{self.random.choice(kinds)}")(depth - 1)

    def _number(self, depth: int) -> dict[str, Any]:
        low, high = sorted(self.random.sample([-100, -3, -0.5, 0, 0.25, 1, 7, 9.99, 250], 2))
        return {
            "type": self.random.choice(["integer", "number"]),
            **self.some(minimum=low, maximum=high),
            **self.some(exclusiveMinimum=low, exclusiveMaximum=high),
            **({"multipleOf": self.random.choice([1, 3, 20, 0.25])} if self.random.random() < 0.2 else {}),
        }

    def _string(self, depth: int) -> dict[str, Any]:
        bounds = self.some(minLength=self.random.randrange(3), maxLength=self.random.randrange(2, 6))
        return {"type": "string", **bounds, **self.some(pattern=self.random.choice(PATTERNS))}

    def _enum(self, depth: int) -> dict[str, Any]:
        return {"enum": self.random.sample(VALUES, self.random.randint(1, 4))}

    def _plain(self, depth: int) -> Any:
        return self.random.choice([{}, {"type": "null"}, {"type": ["boolean", "null"]}, {"const": "a"}, True])

    def _array(self, depth: int) -> dict[str, Any]:
        given = [self.schema(depth) for _ in range(self.random.randrange(3))]
        least = self.random.randrange(3)
        bounds = self.some(minItems=least, maxItems=least + self.random.randrange(3))
        more = self.some(items=self.random.choice([False, self.schema(depth)]))
        return {"type": "array", **bounds, **more, **({"prefixItems": given} if given else {})}

    def _object(self, depth: int) -> dict[str, Any]:
        given = self.random.sample(NAMES, self.random.randrange(4))
        required = [name for name in given if self.random.random() < 0.6] + self.random.sample(NAMES, 1)
        more = self.random.choice([False, True, self.schema(depth)])
        keywords = {
            **self.some(properties={name: self.schema(depth) for name in given}, required=sorted(set(required))),
            **self.some(patternProperties={"^x": self.schema(depth), "^y": self.schema(depth)}),
            **self.some(additionalProperties=more),
        }
        least = len(keywords.get("required", ())) + self.random.randrange(3)
        bounds = self.some(minProperties=least, maxProperties=least + self.random.randrange(2))
        return {"type": "object", **keywords, **(bounds if self.random.random() < 0.3 else {})}

    def _any(self, depth: int) -> dict[str, Any]:
        return {self.random.choice(["anyOf", "oneOf"]): [self.schema(depth), self.schema(depth)]}

    def _all(self, depth: int) -> dict[str, Any]:
        return {"allOf": [self._object(depth), self._object(depth)]}

    def answer(self, grammar: str, most: int = 400) -> str | None:
        """A text that follows the grammar to its end; None if it does not come to one."""
        matcher, text = LLMatcher(TOKENIZER, grammar, log_level=0, limits=grammar_limits()), bytearray()
        while len(text) < most:
            bits = matcher.compute_bitmask()
            allowed = [token for token in range(TOKENIZER.vocab_size) if bits[token // 8] >> (token % 8) & 1]
            if not allowed:
                return None
            liked = CLOSING if self.random.random() < len(text) / 60 else TEMPTING
            preferred = [token for token in allowed if token == END or token in liked]
            token = self.random.choice(preferred if preferred and self.random.random() < 0.8 else allowed)
            if token == END:
                return text.decode()
            assert matcher.consume_token(token)
            text.append(token)
        return None


def number(text: str) -> Decimal:
    """As it is written, but for an exponent without measure, which only numbers without bounds have."""
    digits, _, exponent = text.lower().partition("e")
    return Decimal(digits).scaleb(max(-1000, min(int(exponent or "0"), 1000)))


def exactly(text: str) -> Any:
    return json.loads(text, parse_float=number)


@pytest.mark.parametrize("first", range(0, 600, 100))
def test_an_answer_that_ends_validates(first: int) -> None:
    num_followed = num_ended = 0
    for seed in range(first, first + 100):
        draw = Draw(seed)
        schema = draw.schema()
        if not isinstance(schema, dict):
            continue
        text = json.dumps(schema)
        grammar, error = compile_grammar("json_schema", text)
        if error:
            continue
        judge = jsonschema.Draft202012Validator(exactly(text))
        for _ in range(4):
            num_followed += 1
            answer = draw.answer(grammar)
            if answer is not None:
                num_ended += 1
                with localcontext(prec=10_000):
                    assert judge.is_valid(exactly(answer)), f"seed {seed}: {text}\n{answer}"
    assert num_followed > 100
    assert num_ended > 0.8 * num_followed
