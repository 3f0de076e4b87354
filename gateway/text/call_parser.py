"""Finds function calls in a model's text as it arrives, however it is cut into pieces.

Each family of models writes calls in its own format, and each format has a parser. The output is the text around the
calls, and each call in deltas: one with its id and name, then its arguments as they arrive.

    outside   text; its end is held back while it could be the beginning of an opening
    inside    a call, or what looks like one. A coroutine, `_block`, reads each character; characters that belong to
              no call yet are held
              [_held)   once the call has begun, arguments go out at once; only what follows them is held

A call begins, irrevocably, once its name is one of the request's functions and its arguments open an object. What turns
out to be no call before that is text, to the last character; it is searched again from behind its opening. If the
arguments of a begun call are not JSON after all, the call is cut there and the rest is text. White space between calls,
and around them where there is no text, belongs to the format.

The result depends on the text alone: any cut gives the same, except for the number of deltas.
"""

from __future__ import annotations

import json
import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Generator
from dataclasses import dataclass
from typing import ClassVar, Final, TypeAlias

from gateway.text.json_scanner import JsonScanner, NotJson

WHITESPACE: Final = " \t\n\r"
MAX_NAME_CHARS: Final = 256
"""Longest key, name or id within a call, in characters; a longer one is no call."""
_PIECE_CHARS: Final = 256
"""Longest text read at a time. It is bounded because each opening copies the rest of the text."""
_MEMBERS: Final = {"name": "name", "arguments": "arguments", "parameters": "arguments", "id": "id", "type": "type"}
"""Keys of a call's object and their meanings; an object with any other key is no call."""

Reading: TypeAlias = Generator[None, str, None]
"""A coroutine that receives one character at each `yield`."""
ReadingText: TypeAlias = Generator[None, str, str]
"""A `Reading` that returns a text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallDelta:
    """Part of a call: the first has its id and name and no arguments; the others have more of its arguments."""

    index: int
    """Number of the call within the choice, from 0."""
    id: str | None = None
    name: str | None = None
    arguments: str = ""


Event: TypeAlias = str | CallDelta
"""Text, or part of a call."""


class NotACall(Exception):  # noqa: N818
    """The last character read cannot belong to a call."""


class CallParser(ABC):
    """Finds the calls in the text of one choice."""

    markers: ClassVar[tuple[str, ...]]
    """Tags of the format; where these are special tokens, the text must contain their spelling."""
    openings: ClassVar[tuple[str, ...]]
    """Strings that a call, or several, begin with."""

    def __init__(self, names: Collection[str], most_calls: int | None = None) -> None:
        """`names` are the functions that may be called. No output follows after `most_calls` complete calls."""
        self.num_begun = 0
        self.num_complete = 0
        """Calls whose arguments are complete."""
        self.num_malformed = 0
        """Apparent calls that were none, and calls that were cut because their arguments are not JSON."""
        self._names = names
        self._most_calls = most_calls
        self._events: list[Event] = []
        self._fragment: list[str] = []
        """Arguments that are not among the events yet."""
        self._words: list[str] = []
        """Text that is not among the events yet; this or `_fragment` is empty."""
        self._tail = ""
        """Outside: the end of the text, which might be the beginning of an opening."""
        self._space: list[str] = []
        """Outside: white space that is emitted with the next text, if any follows."""
        self._at_gap = True
        """Outside: whether there was no text since the beginning or the last call."""
        self._reading: Reading | None = None
        """Inside: the coroutine that reads the next character."""
        self._held: list[str] = []
        """Inside: held text in pieces; each but the opening is one character."""
        self._in_doubt = False
        """Inside: whether no call has begun since the opening."""
        self._num_opening = 0
        """Inside: number of held pieces that are certainly text if no call begins."""

    @property
    def full(self) -> bool:
        """Whether the choice has as many complete calls as it may have."""
        return self.num_complete == self._most_calls

    def push(self, text: str) -> list[Event]:
        """Take more text, and return the events that are settled with it."""
        self._read(text)
        return self._take()

    def finish(self) -> list[Event]:
        """End the text: text held back is no call, or the end of one. Returns the last events."""
        while self._reading is not None:
            if self._in_doubt:
                self._read(self._give_up())
            else:
                self._reading = None
                self._held.clear()
        self._say(self._tail)
        if not self.num_begun:
            self._say_all("".join(self._space))
        self._tail = ""
        self._space.clear()
        return self._take()

    # Methods for formats to override.

    def draw_id(self) -> str:
        """A new id for a call."""
        return f"call_{secrets.token_hex(12)}"

    @abstractmethod
    def _block(self, opening: str) -> Reading:
        """Read what follows an opening, up to the end of the call or calls. Raises `NotACall`."""

    def _find_opening(self, text: str) -> tuple[int, str] | None:
        """Position of the first opening in `text`, and the opening; None if there is none."""
        found = [(at, opening) for opening in self.openings if (at := text.find(opening)) >= 0]
        return min(found, default=None)

    # Outside.

    def _read(self, text: str) -> None:
        waiting = _pieces(text)
        while waiting and not self.full:
            piece = waiting.pop()
            waiting += _pieces(self._outside(piece) if self._reading is None else self._inside(piece))

    def _outside(self, text: str) -> str:
        """Emit text up to the next opening, and return what follows it."""
        text, self._tail = self._tail + text, ""
        found = self._find_opening(text)
        if found is None:
            keep = max(_overlap(text, opening) for opening in self.openings)
            self._say(text[: len(text) - keep])
            self._tail = text[len(text) - keep :]
            return ""
        at, opening = found
        self._say(text[:at])
        self._held = [opening]
        self._reading = self._block(opening)
        self._open()
        next(self._reading)
        return text[at + len(opening) :]

    def _say(self, text: str) -> None:
        """Emit text, except white space that may turn out to lie between calls."""
        if self._at_gap:
            rest = text.lstrip()
            self._space.append(text[: len(text) - len(rest)])
            if not rest:
                return
            text, self._at_gap = "".join(self._space) + rest, False
            self._space.clear()
        self._say_all(text)

    def _say_all(self, text: str) -> None:
        if text:
            if self._fragment:
                self._settle()
            self._words.append(text)

    # Inside.

    def _inside(self, text: str) -> str:
        """Read up to the end of the block or its failure. Returns the text to read outside: what follows, after what is
        to be read again."""
        assert self._reading is not None
        for index, char in enumerate(text):
            self._held.append(char)
            try:
                self._reading.send(char)
            except StopIteration:
                self._reading = None
                self._held.clear()
                return text[index + 1 :]
            except NotACall:
                return self._give_up() + text[index + 1 :]
            if self.full:
                break
        return ""

    def _open(self) -> None:
        """Note that the held text may be a call from here on."""
        self._in_doubt = True
        self._num_opening = len(self._held)

    def _begin(self, name: str) -> None:
        """Begin a call of this function."""
        self._settle()
        self._events.append(CallDelta(index=self.num_begun, id=self.draw_id(), name=name))
        self.num_begun += 1
        self._in_doubt, self._at_gap = False, True
        self._held.clear()
        self._space.clear()

    def _argue(self, text: str) -> None:
        """Add to the arguments of the call."""
        self._fragment.append(text)
        self._held.clear()

    def _complete(self) -> None:
        """Note that the arguments of the call are complete."""
        self.num_complete += 1

    def _give_up(self) -> str:
        """Leave the block, because the last character cannot belong to a call. Returns the text to be read again,
        outside."""
        held, self._held, self._reading = self._held, [], None
        if self._in_doubt:
            self.num_malformed += 1
            self._say("".join(held[: self._num_opening]))
            return "".join(held[self._num_opening :])
        if self.num_complete < self.num_begun:
            self.num_malformed += 1
            self._at_gap = False
        return "".join(held)

    def _take(self) -> list[Event]:
        self._settle()
        events, self._events = self._events, []
        return events

    def _settle(self) -> None:
        if self._words:
            self._events.append("".join(self._words))
            self._words.clear()
        if self._fragment:
            self._events.append(CallDelta(index=self.num_begun - 1, arguments="".join(self._fragment)))
            self._fragment.clear()

    # Coroutines for formats to read with.

    def _call_object(self) -> Reading:
        """Read `{"name": …, "arguments": {…}}` after its opening brace."""
        seen: set[str] = set()
        name, arguments = "", "{}"
        while True:
            if (yield from no_space()) != '"':
                raise NotACall
            member = _MEMBERS.get((yield from _text(MAX_NAME_CHARS)), "")
            if not member or member in seen or (yield from no_space()) != ":":
                raise NotACall
            seen.add(member)
            char = yield from no_space()
            if member == "arguments" and char == "{" and name:
                self._begin(name)
                yield from self._object(char, self._argue)
                self._complete()
            elif member == "arguments":
                arguments = yield from self._whole_arguments(char)
            elif char != '"':
                raise NotACall
            else:
                value = yield from _text(MAX_NAME_CHARS)
                name = self._known(value) if member == "name" else name
            char = yield from no_space()
            if char == "}":
                break
            if char != ",":
                raise NotACall
        if self._in_doubt:
            self._begin(self._known(name))
            self._argue(arguments)
            self._complete()
        self._held.clear()

    def _whole_arguments(self, char: str) -> ReadingText:
        """Read arguments that cannot be emitted as they arrive: those before the name, the text of an object, or
        null."""
        if char == "n":
            for expected in "ull":
                if (yield) != expected:
                    raise NotACall
            return "{}"
        if char == '"':
            arguments = yield from _text(None)
            try:
                if isinstance(json.loads(arguments), dict):
                    return arguments
            except (ValueError, RecursionError):
                pass
            raise NotACall
        chars: list[str] = []
        yield from self._object(char, chars.append)
        return "".join(chars)

    def _object(self, char: str, take: Callable[[str], None]) -> Reading:
        """Read a JSON object from its opening brace, `char`, to its closing one, and pass each character to `take`."""
        scanner = JsonScanner()
        while True:
            try:
                complete = scanner.feed(char)
            except NotJson:
                raise NotACall from None
            take(char)
            if complete:
                return
            char = yield

    def _known(self, name: str) -> str:
        if name not in self._names:
            raise NotACall
        return name


def no_space() -> ReadingText:
    """Read up to the next character that is not white space, and return it."""
    while (char := (yield)) in WHITESPACE:
        pass
    return char


def _text(most_chars: int | None) -> ReadingText:
    """Read the rest of a JSON string after its opening quote, and return its value. A lone surrogate is no call."""
    chars: list[str] = []
    while (char := (yield)) != '"':
        chars.append(char)
        if char == "\\":
            chars.append((yield))
        if most_chars is not None and len(chars) > most_chars:
            raise NotACall
    try:
        text: str = json.loads('"' + "".join(chars) + '"')
        text.encode()
    except ValueError:
        raise NotACall from None
    return text


def _pieces(text: str) -> list[str]:
    """The text in pieces, last piece first."""
    return [text[start : start + _PIECE_CHARS] for start in reversed(range(0, len(text), _PIECE_CHARS))]


def _overlap(text: str, opening: str) -> int:
    """Length of the longest suffix of `text` that is a proper prefix of `opening`."""
    for length in range(min(len(opening) - 1, len(text)), 0, -1):
        if text.endswith(opening[:length]):
            return length
    return 0
