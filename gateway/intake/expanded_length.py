"""Length of a regular expression or a grammar with every repetition written out: an upper bound on what it can force at
once.

The grammar library processes a forced text in one go, however long it is. Its own limits bound rules, but neither
regular expressions nor terminals: `a{1000000000}` costs a gigabyte of work and memory in 13 characters. Python's parser
of regular expressions knows how short a match can be, but it is private and takes another syntax. All alternatives are
counted here, so the result is an upper bound. The parser is lenient.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Final

MAX_EXPANDED: Final = 20_000
"""Characters. With `a{20000}` each mask takes about 5 ms with all cores free."""
_REGEX: Final = re.compile(
    r"\\[pPxu]\{[^}]*\}|\\.|\[\^?\]?(?:\\.|\[:\w+:\]|[^\]\\])*\]|(?P<open>\(\?[^:)]*:|\()|(?P<close>\))"
    r"|\{(?P<least>\d+)[^}]*\}|(?P<free>[|*+?^$])|.",
    re.DOTALL,
)
_DEFINITION: Final = re.compile(r"^[ \t]*[?!]?([A-Za-z_][\w-]*)(?:\.-?\d+)?(?:\[[^\]\n]*\])?\s*:", re.MULTILINE)
_LARK: Final = re.compile(
    r'"(?P<text>(?:\\.|[^"\\])*)"i?|//[^\n]*|/(?P<regex>(?:\\.|[^/\\\n])+)/\w*|(?P<open>[(\[])|(?P<close>[)\]])'
    r"|(?:\{\s*|~\s*)(?P<least>\d+)[^}\s)]*\}?|(?P<name>[A-Za-z_][\w-]*)|\S",
    re.DOTALL,
)


def expanded_length(expression: str) -> int:
    """Expanded length of a regular expression, in characters."""
    return _sum(_REGEX.finditer(expression), lambda token: 0 if token["free"] else 1)


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
            tokens = _LARK.finditer(bodies[name])
            lengths[name] = min(_sum(tokens, lambda token: of_token(token, below | {name})), 2**40)
        return lengths[name]

    def of_token(token: re.Match[str], below: frozenset[str]) -> int:
        if token["text"] is not None:
            return len(token["text"])
        if token["regex"] is not None:
            return expanded_length(token["regex"])
        return of_rule(token["name"], below) if token["name"] is not None else 0

    return max((of_rule(name, frozenset()) for name in bodies), default=0)


def _sum(tokens: Iterable[re.Match[str]], length_of: Callable[[re.Match[str]], int]) -> int:
    """Sum of the tokens' lengths; a repetition multiplies the token or the group before it by its least number."""
    sums, last = [0], 0
    for token in tokens:
        if token["open"]:
            sums.append(0)
            last = 0
        elif token["close"]:
            last = sums.pop() if len(sums) > 1 else 0
            sums[-1] += last
        elif token["least"]:
            more = last * max(0, int(token["least"]) - 1)
            sums[-1] += more
            last += more
        elif length := length_of(token):
            last = length
            sums[-1] += last
    return sum(sums)
