"""Length of a regular expression or a grammar with every repetition written out: an upper bound on what it can force at
once.

The grammar library processes a forced text in one go, however long it is. Its own limits bound rules, but neither
regular expressions nor terminals: `a{1000000000}` costs a gigabyte of work and memory in 13 characters. Python's parser
of regular expressions knows how short a match can be, but it is private and takes another syntax. All alternatives are
counted here, so the result is an upper bound. The parser is lenient, because the library refuses what is not well
formed; and its time is linear: what is not closed takes the rest of the line or of the text, so nothing is read again.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Final

MAX_EXPANDED: Final = 20_000
"""Characters. With `a{20000}` each mask takes about 5 ms with all cores free."""
_REGEX: Final = re.compile(
    r"\\[pPxuU]\{[^{}\\]*\}?|\\.|(?P<verbose>\(\?[a-zA-Z]*x)|(?P<open>\((?:\?(?:P?<[^<>()]*>|[a-zA-Z-]*:))?)"
    r"|(?P<close>\))|\{\s*(?P<least>\d+)[\s\d,]*\}?|(?P<free>[|*+?^$])|.",
    re.DOTALL,
)
"""A token of a regular expression, or the first character of a set."""
_SET_PART: Final = re.compile(r"\\.?|\[:\^?\w+:\]|(?P<open>\[\^?\]?)|(?P<close>\])|[^\\\[\]]+", re.DOTALL)
"""A part of a set; sets may contain sets."""
_VERBOSE: Final = "a regular expression cannot have the flag x, with which white space and comments in it do not count"
_LARK: Final = re.compile(
    r'"(?P<text>(?:\\[^\n]?|[^"\\\n]+)*)"?i?|(?:#|//)[^\n]*|<[^<>\s]+>'
    r"|/(?P<regex>(?:\\.?|[^/\\]+)+)/?(?P<flags>[imslux]*)"
    r"|[{~]\s*\+?(?P<least>\d+)(?:[\d\s,.]*\})?|(?P<open>[(\[{])|(?P<close>[)\]}])"
    r"|(?P<name>_?(?:[A-Z][_A-Z0-9-]*|[a-z][_a-z0-9-]*))|\S",
    re.DOTALL,
)
"""A token of a grammar, as the library's lexer splits it."""


def expanded_length(expression: str) -> int:
    """Expanded length of a regular expression, in characters. Raises `ValueError` for one with the flag x."""
    return _sum(_regex_tokens(expression), lambda token: 0 if token["free"] else 1)


def expanded_grammar_length(grammar: str) -> int:
    """Expanded length of the longest rule of a grammar in Lark's notation, with named rules inserted, in characters.
    Rules that lead back to each other count once, all of them, because they can always end. Raises `ValueError` for a
    regular expression with the flag x."""
    bodies = _bodies(grammar)
    lengths: dict[str, int] = {}

    def length_of(token: re.Match[str]) -> int:
        if token["text"] is not None:
            return len(token["text"])
        if token["regex"] is not None:
            if "x" in token["flags"]:
                raise ValueError(_VERBOSE)
            return expanded_length(token["regex"])
        return lengths.get(token["name"], 1) if token["name"] is not None else 0

    named = {
        rule: [each for each in dict.fromkeys(token["name"] for token in _LARK.finditer(body)) if each in bodies]
        for rule, body in bodies.items()
    }
    for rules in _circles(named):
        total = sum(_sum(_LARK.finditer(bodies[rule]), length_of) for rule in rules)
        lengths.update(dict.fromkeys(rules, min(total, 2**40)))
    return max(lengths.values())


def _circles(named: Mapping[str, Iterable[str]]) -> Iterator[list[str]]:
    """The rules, together with those that lead back to them, after all that they name (Tarjan, "Depth-first search and
    linear graph algorithms", 1972)."""
    number: dict[str, int] = {}
    least: dict[str, int] = {}
    """The first of the rules to which one leads back, by number."""
    open_ = dict[str, None]()
    for first in named:
        path = [] if first in number else [(first, iter(named[first]))]
        while path:
            rule, left = path[-1]
            if rule not in number:
                number[rule] = least[rule] = len(number)
                open_[rule] = None
            following = next((each for each in left if each not in number or each in open_), None)
            if following is None:
                path.pop()
                if path:
                    least[path[-1][0]] = min(least[path[-1][0]], least[rule])
                if least[rule] == number[rule]:
                    circle = [open_.popitem()[0]]
                    while circle[-1] != rule:
                        circle.append(open_.popitem()[0])
                    yield circle
            elif following in number:
                least[rule] = min(least[rule], number[following])
            else:
                path.append((following, iter(named[following])))


def _regex_tokens(expression: str) -> Iterator[re.Match[str]]:
    """The tokens of a regular expression; a set is one token, the match of its first character."""
    at = 0
    while token := _REGEX.match(expression, at):
        if token["verbose"]:
            raise ValueError(_VERBOSE)
        yield token
        at = _set_end(expression, at) if token[0] == "[" else token.end()


def _set_end(expression: str, start: int) -> int:
    """Where the set that begins at `start` ends."""
    depth = 0
    for part in _SET_PART.finditer(expression, start):
        depth += bool(part["open"]) - bool(part["close"])
        if not depth:
            return part.end()
    return len(expression)


def _bodies(grammar: str) -> dict[str, str]:
    """Text of each rule by its name, and under "" what comes before all rules. A rule begins with a name and a colon
    outside brackets; between them there may be a priority and attributes."""
    bodies: dict[str, str] = {}
    rule, start, depth = "", 0, 0
    name: re.Match[str] | None = None
    for token in _LARK.finditer(grammar):
        depth += bool(token["open"]) - bool(token["close"])
        if depth:
            continue
        if token["name"] is not None:
            name = token
        elif token[0] == ":" and name is not None:
            bodies[rule] = grammar[start : name.start()]
            rule, start, name = name["name"], token.end(), None
    bodies[rule] = grammar[start:]
    return bodies


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
