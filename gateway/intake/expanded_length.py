"""Length of a regular expression or a grammar with every repetition written out: an upper bound on what it can force at
once.

The grammar library processes a forced text in one go, however long it is: `a{1000000000}` costs a gigabyte of work and
memory in 13 characters. All alternatives are counted, so the result is an upper bound. The parser here is lenient.
"""

from __future__ import annotations

import re
from typing import Final

MAX_EXPANDED: Final = 20_000
"""Characters. With `a{20000}` each mask takes about 5 ms with all cores free."""
_REGEX: Final = re.compile(
    r"\\[pPxu]\{[^}]*\}|\\.|\[\^?\]?(?:\\.|\[:\w+:\]|[^\]\\])*\]|\(\?[^:)]*:|\{(?P<least>\d+)[^}]*\}|.", re.DOTALL
)
_DEFINITION: Final = re.compile(r"^[ \t]*[?!]?([A-Za-z_][\w-]*)(?:\.-?\d+)?(?:\[[^\]\n]*\])?\s*:", re.MULTILINE)
_LARK: Final = re.compile(
    r'"(?P<text>(?:\\.|[^"\\])*)"i?|//[^\n]*|/(?P<regex>(?:\\.|[^/\\\n])+)/\w*|(?:\{\s*|~\s*)(?P<least>\d+)[^}\s)]*\}?'
    r"|(?P<name>[A-Za-z_][\w-]*)|(?P<other>\S)",
    re.DOTALL,
)


def expanded_length(expression: str) -> int:
    """Expanded length of a regular expression, in characters."""
    sums, last = [0], 0
    for token in _REGEX.finditer(expression):
        text = token[0]
        if text.startswith("("):
            sums.append(0)
            last = 0
        elif text == ")" and len(sums) > 1:
            last = sums.pop()
            sums[-1] += last
        elif token["least"] is not None:
            more = last * (_number(token["least"]) - 1)
            sums[-1] += max(0, more)
            last += max(0, more)
        elif text not in ("|", "*", "+", "?", "^", "$"):
            last = 1
            sums[-1] += 1
    return sum(sums)


def expanded_grammar_length(grammar: str) -> int:
    """Expanded length of the longest rule of a grammar in Lark's notation or GBNF, with named rules inserted, in
    characters. A rule that leads back to itself counts once, because it can always end."""
    found = list(_DEFINITION.finditer(grammar))
    ends = [each.start() for each in found[1:]] + [len(grammar)]
    bodies = {each[1]: grammar[each.end() : end] for each, end in zip(found, ends, strict=True)}
    lengths: dict[str, int] = {}

    def of_rule(name: str, below: frozenset[str]) -> int:
        if name not in bodies or name in below or len(below) > 200:
            return 1
        if name not in lengths:
            lengths[name] = min(of_body(bodies[name], below | {name}), 2**40)
        return lengths[name]

    def of_body(body: str, below: frozenset[str]) -> int:
        sums, last = [0], 0
        for token in _LARK.finditer(body):
            if token["other"] in ("(", "["):
                sums.append(0)
                last = 0
                continue
            if token["other"] in (")", "]") and len(sums) > 1:
                last = sums.pop()
            elif token["least"] is not None:
                last *= max(0, _number(token["least"]) - 1)
            elif token["text"] is not None:
                last = len(token["text"])
            elif token["regex"] is not None:
                last = expanded_length(token["regex"])
            elif token["name"] is not None:
                last = of_rule(token["name"], below)
            else:
                continue
            sums[-1] += last
        return sum(sums)

    return max((of_rule(name, frozenset()) for name in bodies), default=0)


def _number(digits: str) -> int:
    return int(digits) if len(digits) < 12 else 10**12
