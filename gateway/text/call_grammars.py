r"""Grammars of the parts of a function call, read in pieces by the library that also enforces grammars.

The library goes on where it stopped, and tells the first byte that does not fit. Parsers of partial JSON, such as
`pydantic_core.from_json`, read the whole text again with each piece, and tell neither that byte nor where a value ends.
"""

from __future__ import annotations

from typing import Final

from llguidance import LLMatcher, LLTokenizer

MAX_DEPTH: Final = 64
"""Most objects and arrays nested in each other in a call's arguments: it bounds what the library keeps of them."""
SPACE: Final = r"[ \t\n\r]*"
_BYTES: Final = LLTokenizer("byte")
_STRING: Final = r'"([^"\\\x00-\x1f]|\\(["\\\/bfnrt]|u[0-9a-fA-F]{4}))*"'
_ARGUMENTS: Final = rf'"(arguments|parameters)"{SPACE}:{SPACE}'
_NUMBER: Final = r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?"
_KNOWN: Final = rf'("(name|id|type)"{SPACE}:{SPACE}{_STRING}|{_ARGUMENTS}(null|{_STRING}))'
_OTHER: Final = rf"{SPACE},{SPACE}{_STRING}{SPACE}:{SPACE}({_STRING}|{_NUMBER}|true|false|null)"
"""A member behind another one, behind a marker of calls: some models add members that mean nothing."""


def read_on(matcher: LLMatcher, text: str) -> tuple[str, str]:
    """Read the part of `text` that fits behind what the matcher has read. Returns it, and what is left."""
    content = text.encode()
    num_read = matcher.try_consume_tokens(list(content))
    return content[:num_read].decode(), content[num_read:].decode()


def pattern(regex: str) -> LLMatcher:
    """A matcher of a regular expression. It has stopped when nothing can follow."""
    return LLMatcher(_BYTES, LLMatcher.grammar_from_regex(regex), log_level=0)


def _arguments() -> LLMatcher:
    rules = [
        f"SCALAR: STRING | /{_NUMBER}|true|false|null/",
        f"STRING: /{_STRING}/",
        *(f"{name}: /{SPACE}{mark}/" for name, mark in [("COMMA", ","), ("COLON", ":"), ("END", "}"), ("LAST", "]")]),
        r"S: /[ \t\n\r]+/",
        "start: object1",
    ]
    for depth in range(1, MAX_DEPTH + 1):
        inner = f' | "{{" object{depth + 1} | "[" array{depth + 1}' if depth < MAX_DEPTH else ""
        rules += [
            f"value{depth}: S? (SCALAR{inner})",
            f"member{depth}: S? STRING COLON value{depth}",
            f"object{depth}: END | member{depth} (COMMA member{depth})* END",
            f"array{depth}: LAST | value{depth} (COMMA value{depth})* LAST",
        ]
    return LLMatcher(_BYTES, LLMatcher.grammar_from_lark("\n".join(rules)), log_level=0)


HEAD: Final = pattern(rf"{SPACE}({_ARGUMENTS}\{{|{_KNOWN}({_OTHER})*{SPACE}(\}}|,{SPACE}{_ARGUMENTS}\{{))")
"""A call's object behind its opening brace, up to where its arguments open an object, or whole."""
BARE_HEAD: Final = pattern(rf"{SPACE}({_KNOWN}{SPACE},{SPACE})*({_ARGUMENTS}\{{|{_KNOWN}{SPACE}\}})")
"""The same, where no marker says that an object is a call: answers in JSON are not to be held back."""
ARGUMENTS: Final = _arguments()
"""A JSON object (RFC 8259) behind its opening brace."""
REST: Final = pattern(rf"({_OTHER})*{SPACE}\}}")
"""A call's object behind its arguments."""
