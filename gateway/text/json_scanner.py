"""Scanner of one JSON object, character by character: finds its end, or the first character that is invalid.

It follows RFC 8259, with a bound on the nesting depth. It builds no values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

MAX_DEPTH: Final = 64
"""Most objects and arrays nested in each other."""
_WHITESPACE: Final = " \t\n\r"
_DIGITS: Final = "0123456789"
_HEX: Final = _DIGITS + "abcdefABCDEF"

_NUMBER: Final[Mapping[str, tuple[tuple[str, str], ...]]] = {
    "minus": (("0", "zero"), ("123456789", "whole")),
    "zero": ((".", "point"), ("eE", "exponent")),
    "whole": ((_DIGITS, "whole"), (".", "point"), ("eE", "exponent")),
    "point": ((_DIGITS, "fraction"),),
    "fraction": ((_DIGITS, "fraction"), ("eE", "exponent")),
    "exponent": (("+-", "sign"), (_DIGITS, "power")),
    "sign": ((_DIGITS, "power"),),
    "power": ((_DIGITS, "power"),),
}
"""State of a number → characters that may follow, each with the next state."""
_WHOLE_NUMBERS: Final = frozenset({"zero", "whole", "fraction", "power"})


class NotJson(ValueError):  # noqa: N818
    """A character that is not valid in the object."""


class JsonScanner:
    """Reads one object, from its opening brace on."""

    def __init__(self) -> None:
        self.complete = False
        """Whether the object's closing brace has been read; nothing more may be fed."""
        self._open: list[str] = []
        """Closing brackets of all open objects and arrays, innermost last."""
        self._state: Callable[[str], None] = self._first
        self._number = ""
        self._rest = ""
        """Characters left of a literal, or of an escape's digits."""
        self._in_key = False

    def feed(self, char: str) -> bool:
        """Read the next character. Returns whether it completes the object. Raises `NotJson`."""
        self._state(char)
        return self.complete

    def _first(self, char: str) -> None:
        if char != "{":
            raise NotJson(char)
        self._value(char)

    def _value(self, char: str) -> None:
        if char in _WHITESPACE:
            return
        if char in "{[":
            if len(self._open) == MAX_DEPTH:
                raise NotJson(char)
            self._open.append("}" if char == "{" else "]")
            self._state = self._first_key if char == "{" else self._first_item
        elif char == '"':
            self._in_key = False
            self._state = self._string
        elif char == "-" or char in _DIGITS:
            self._number = "minus" if char == "-" else "zero" if char == "0" else "whole"
            self._state = self._in_number
        else:
            self._rest = {"t": "rue", "f": "alse", "n": "ull"}.get(char, "")
            if not self._rest:
                raise NotJson(char)
            self._state = self._literal

    def _first_item(self, char: str) -> None:
        if char == "]":
            self._close()
        else:
            self._value(char)

    def _first_key(self, char: str) -> None:
        if char == "}":
            self._close()
        else:
            self._key(char)

    def _key(self, char: str) -> None:
        if char == '"':
            self._in_key = True
            self._state = self._string
        elif char not in _WHITESPACE:
            raise NotJson(char)

    def _string(self, char: str) -> None:
        if char == '"':
            self._state = self._colon if self._in_key else self._after_value
        elif char == "\\":
            self._state = self._escape
        elif char < " ":
            raise NotJson(char)

    def _escape(self, char: str) -> None:
        if char == "u":
            self._rest = "xxxx"
            self._state = self._hex
        elif char in '"\\/bfnrt':
            self._state = self._string
        else:
            raise NotJson(char)

    def _hex(self, char: str) -> None:
        if char not in _HEX:
            raise NotJson(char)
        self._rest = self._rest[1:]
        if not self._rest:
            self._state = self._string

    def _literal(self, char: str) -> None:
        if char != self._rest[0]:
            raise NotJson(char)
        self._rest = self._rest[1:]
        if not self._rest:
            self._state = self._after_value

    def _in_number(self, char: str) -> None:
        for chars, state in _NUMBER[self._number]:
            if char in chars:
                self._number = state
                return
        if self._number not in _WHOLE_NUMBERS:
            raise NotJson(char)
        self._state = self._after_value
        self._after_value(char)

    def _colon(self, char: str) -> None:
        if char == ":":
            self._state = self._value
        elif char not in _WHITESPACE:
            raise NotJson(char)

    def _after_value(self, char: str) -> None:
        if char == self._open[-1]:
            self._close()
        elif char == ",":
            self._state = self._key if self._open[-1] == "}" else self._value
        elif char not in _WHITESPACE:
            raise NotJson(char)

    def _close(self) -> None:
        self._open.pop()
        self.complete = not self._open
        self._state = self._after_value
