"""Calls of functions in a model's text, found as it comes in, wherever the pieces are cut.

Each family of models writes calls in a way of its own; there is a parser for each. What comes out is the text around
the calls, and each call in deltas: one with its id and name, then its arguments as they come.

    outside   text; its end is held back while it could be the beginning of an opening
    inside    a call, or what looks like one. Each character is read by a coroutine, `_block`; what is no part of any
              call yet is held
              [_held)   once the call has begun: arguments go out at once, only what follows them is held

A call begins, and cannot be taken back, once its name is one of the request's functions and its arguments open an
object. Whatever turns out to be no call before that is text, to the last character, and is looked through again
behind its opening. If the arguments of a call that has begun are not JSON after all, the call is cut there and the
rest is text. White space between calls, and around them where there is no text, belongs to the format.

This depends on the text alone: any cut gives the same, but for the number of deltas.
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
"""Longest key, name or id within a call; what is longer is none."""
_PIECE_CHARS: Final = 256
"""Longest text that is read at a time: the rest of it is copied at each opening."""
_MEMBERS: Final = {"name": "name", "arguments": "arguments", "parameters": "arguments", "id": "id", "type": "type"}
"""Keys of a call's object; an object with any other is no call."""

Reading: TypeAlias = Generator[None, str, None]
"""Takes a character at each `yield`."""
ReadingText: TypeAlias = Generator[None, str, str]
"""And has a text in the end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallDelta:
    """A part of a call: its first, which has the id and the name and no arguments yet, or more of its arguments."""

    index: int
    """Which call of the choice, from 0."""
    id: str | None = None
    name: str | None = None
    arguments: str = ""


Event: TypeAlias = str | CallDelta
"""Text, or part of a call."""


class NotACall(Exception):  # noqa: N818
    """The character that was read last is no part of a call."""


class CallParser(ABC):
    """Text with calls in it, for one choice."""

    markers: ClassVar[tuple[str, ...]]
    """What the format is made of beside JSON; where these are special tokens, their text must be in the text."""
    openings: ClassVar[tuple[str, ...]]
    """What a call, or several, begin with."""

    def __init__(self, names: Collection[str], most_calls: int | None = None) -> None:
        """`names` are the functions that may be called; after `most_calls` nothing more comes out."""
        self.num_begun = 0
        self.num_complete = 0
        """Calls whose arguments are whole."""
        self.num_malformed = 0
        """What looked like a call, and was none or was cut by something that is no JSON."""
        self._names = names
        self._most_calls = most_calls
        self._events: list[Event] = []
        self._fragment: list[str] = []
        """Arguments that are not among the events yet."""
        self._words: list[str] = []
        """Text that is not; one of both is empty."""
        self._tail = ""
        """Outside: the end of the text, which might be the beginning of an opening."""
        self._space: list[str] = []
        """Outside: white space that goes out with the next text, if any comes."""
        self._at_gap = True
        """Outside: no text yet since the beginning, or the last call."""
        self._reading: Reading | None = None
        """Inside: reads the next character."""
        self._held: list[str] = []
        """Inside: in pieces, of which each but the opening is a character."""
        self._in_doubt = False
        """Inside: no call has begun since the opening."""
        self._num_opening = 0
        """Inside: how many pieces of what is held are text for certain, if no call begins."""

    @property
    def full(self) -> bool:
        """Whether there are as many calls as there may be."""
        return self.num_complete == self._most_calls

    def push(self, text: str) -> list[Event]:
        """Take more text; what is settled with it."""
        self._read(text)
        return self._take()

    def finish(self) -> list[Event]:
        """The text is over: what was held back is no call after all, or the end of one."""
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

    # Each format's own.

    def draw_id(self) -> str:
        """A new call's id."""
        return f"call_{secrets.token_hex(12)}"

    @abstractmethod
    def _block(self, opening: str) -> Reading:
        """Read what follows an opening, up to the end of the call or calls. Raises `NotACall`."""

    def _find_opening(self, text: str) -> tuple[int, str] | None:
        """Where in `text` the first opening is, and which."""
        found = [(at, opening) for opening in self.openings if (at := text.find(opening)) >= 0]
        return min(found, default=None)

    # Outside.

    def _read(self, text: str) -> None:
        waiting = _pieces(text)
        while waiting and not self.full:
            piece = waiting.pop()
            waiting += _pieces(self._outside(piece) if self._reading is None else self._inside(piece))

    def _outside(self, text: str) -> str:
        """Pass text on up to the next opening; what follows that."""
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
        """Text, but for white space that may turn out to lie between calls."""
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
        """Read up to the end of the block, or of what is a call; what is to be read again or follows that."""
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
        """What is held may be a call from here on."""
        self._in_doubt = True
        self._num_opening = len(self._held)

    def _begin(self, name: str) -> None:
        """It is one, of this function."""
        self._settle()
        self._events.append(CallDelta(index=self.num_begun, id=self.draw_id(), name=name))
        self.num_begun += 1
        self._in_doubt, self._at_gap = False, True
        self._held.clear()
        self._space.clear()

    def _argue(self, text: str) -> None:
        """More of the call's arguments."""
        self._fragment.append(text)
        self._held.clear()

    def _complete(self) -> None:
        """The call's arguments are whole."""
        self.num_complete += 1

    def _give_up(self) -> str:
        """What was read last is no part of a call; what is to be read again, from outside."""
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

    # What formats are read with.

    def _call_object(self) -> Reading:
        """`{"name": …, "arguments": {…}}`, after its brace."""
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
        """Arguments that cannot go out as they come: before the name, or as the text of an object, or none."""
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
        """A JSON object from its brace, `char`, to the one that closes it; each character is given to `take`."""
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
    """The next character that is no white space."""
    while (char := (yield)) in WHITESPACE:
        pass
    return char


def _text(most_chars: int | None) -> ReadingText:
    """What a JSON string says, after its quote. It can spell half a surrogate pair, which is no text."""
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
    """A text cut up, the last piece first."""
    return [text[start : start + _PIECE_CHARS] for start in reversed(range(0, len(text), _PIECE_CHARS))]


def _overlap(text: str, opening: str) -> int:
    """Length of the longest end of `text` that is a beginning of `opening`, but not all of it."""
    for length in range(min(len(opening) - 1, len(text)), 0, -1):
        if text.endswith(opening[:length]):
            return length
    return 0
