"""Finds function calls in a model's text as it arrives, however it is cut into pieces.

Each family of models writes calls in its own format, and each format has a parser. The output is the text around the
calls, and each call in deltas: one with its id and name, then its arguments as they arrive.

    outside   text; its end is held back while it could be the beginning of an opening
    inside    a call, or what looks like one, read part by part by the grammars of `call_grammars`. What belongs to no
              call yet is held; once the call has begun, arguments go out at once

    part          ends with
    before call   the brace of a call's object
    head          the brace of the arguments, or the call's object if its arguments are no object
    arguments     their closing brace
    rest          the end of the call's object
    after call    the brace of another call's object, or the end of the calls

A call begins, irrevocably, once its name is one of the request's functions and its arguments open an object. What turns
out to be no call before that is text, to the last character; it is searched again from behind its opening. If the
arguments of a begun call are not JSON after all, the call is cut there and the rest is text. White space between calls,
and around them where there is no text, belongs to the format.

The result depends on the text alone: any cut gives the same, except for the number of deltas.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from itertools import groupby
from typing import ClassVar, Final, NoReturn, TypeAlias

from llguidance import LLMatcher

from gateway.text.call_grammars import ARGUMENTS, HEAD, REST, read_on

_PIECE_CHARS: Final = 256
"""Longest text read at a time. It is bounded because each opening copies the rest of the text."""
_DECODER: Final = json.JSONDecoder(object_pairs_hook=list, parse_int=float)
"""Python bounds the digits of an int."""


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
    """What was read is no call."""


class CallParser:
    """Finds the calls in the text of one choice."""

    markers: ClassVar[tuple[str, ...]]
    """Tags of the format; where these are special tokens, the text must contain their spelling."""
    opening: ClassVar[str]
    """String that a call, or several, begin with."""
    head: ClassVar[LLMatcher] = HEAD
    before_call: ClassVar[LLMatcher]
    after_call: ClassVar[LLMatcher]

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
        """What is settled, in pieces as they were read."""
        self._tail = ""
        """Outside: the end of the text, which might be the beginning of an opening."""
        self._space: list[str] = []
        """Outside: white space that is emitted with the next text, if any follows."""
        self._at_gap = True
        """Outside: whether there was no text since the beginning or the last call."""
        self._part: tuple[LLMatcher, Callable[[], None]] | None = None
        """Inside: what reads the current part, and what is called at its end, which may raise `NotACall`."""
        self._held: list[str] = []
        """Inside: held text in pieces."""
        self._in_doubt = False
        """Inside: whether no call has begun since an opening or the brace of a call; the first piece held is text then
        if none begins."""
        self._head = ""
        """Inside: the head of the call."""

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
        while self._part is not None:
            if self._in_doubt:
                self._read(self._give_up())
            else:
                self._leave()
        self._say(self._tail)
        if not self.num_begun:
            self._say_all("".join(self._space))
        self._tail = ""
        self._space.clear()
        return self._take()

    def draw_id(self) -> str:
        """A new id for a call."""
        return f"call_{secrets.token_hex(12)}"

    def _read(self, text: str) -> None:
        waiting = _pieces(text)
        while waiting and not self.full:
            piece = waiting.pop()
            waiting += _pieces(self._outside(piece) if self._part is None else self._inside(piece))

    # Outside.

    def _outside(self, text: str) -> str:
        """Emit text up to the next opening, and return what follows it."""
        text, self._tail = self._tail + text, ""
        before, opening, after = self._split(text)
        if not opening:
            keep = next(n for n in reversed(range(len(self.opening))) if text.endswith(self.opening[:n]))
            self._say(text[: len(text) - keep])
            self._tail = text[len(text) - keep :]
            return ""
        self._say(before)
        self._held, self._in_doubt = [opening], True
        if opening == "{":
            self._expect_head()
        else:
            self._expect(self.before_call, self._expect_head)
        return after

    def _split(self, text: str) -> tuple[str, str, str]:
        """The text before the first opening, the opening, and the text after it; the last two are empty if there is
        none."""
        return text.partition(self.opening)

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
            self._events.append(text)

    # Inside.

    def _inside(self, text: str) -> str:
        """Read up to the end of the part or its failure. Returns the text to read then: what follows, after what is to
        be read again."""
        assert self._part is not None
        matcher, at_end = self._part
        text, rest = read_on(matcher, text)
        if self.num_complete < self.num_begun:
            self._argue(text)
        else:
            self._held.append(text)
        try:
            if matcher.is_stopped():
                at_end()
            elif rest:
                raise NotACall
        except NotACall:
            return self._give_up() + rest
        return rest

    def _expect(self, part: LLMatcher, at_end: Callable[[], None]) -> None:
        self._part = part.deep_copy(), at_end

    def _expect_head(self) -> None:
        self._held, self._in_doubt = ["".join(self._held)], True
        self._expect(self.head, self._end_head)

    def _end_head(self) -> None:
        self._head = self._object()
        if self._head.endswith("}"):
            self._end_call()
            return
        name = _members(self._head + "}}").get("name")
        if name is not None:
            self._begin(name, "{")
        self._expect(ARGUMENTS, self._end_arguments)

    def _end_arguments(self) -> None:
        self.num_complete += not self._in_doubt
        self._expect(REST, self._end_call)

    def _end_call(self) -> None:
        if self._in_doubt:
            members = _members(self._object())
            self._begin(members.get("name"), _arguments(members.get("arguments"), self._object(), len(self._head) - 1))
            self.num_complete += 1
        else:
            _members(self._head + "}" + "".join(self._held))
        self._held.clear()
        self._expect(self.after_call, self._end_gap)

    def _end_gap(self) -> None:
        if self._held[-1].endswith("{"):
            self._expect_head()
        else:
            self._leave()

    def _object(self) -> str:
        """What is held of a call's object."""
        return "{" + "".join(self._held[1:])

    def _begin(self, name: object, arguments: str) -> None:
        """Begin a call of this function with these arguments, or the beginning of them."""
        if name not in self._names:
            raise NotACall
        self._events.append(CallDelta(index=self.num_begun, id=self.draw_id(), name=str(name)))
        self.num_begun += 1
        self._argue(arguments)
        self._in_doubt, self._at_gap = False, True
        self._held.clear()
        self._space.clear()

    def _give_up(self) -> str:
        """Leave the part, because what was read is no call. Returns the text to be read again, outside."""
        if self._in_doubt:
            self.num_malformed += 1
            self._say(self._held.pop(0))
        elif self.num_complete < self.num_begun:
            self.num_malformed += 1
            self._at_gap = False
        held = "".join(self._held)
        self._leave()
        return held

    def _leave(self) -> None:
        self._part, self._in_doubt = None, False
        self._held.clear()

    def _argue(self, text: str) -> None:
        if text:
            self._events.append(CallDelta(index=self.num_begun - 1, arguments=text))

    def _take(self) -> list[Event]:
        """The settled events: neighbouring texts joined, and neighbouring arguments."""
        events: list[Event] = []
        for _, run in groupby(self._events, _run_of):
            pieces = list(run)
            joined = "".join(piece if isinstance(piece, str) else piece.arguments for piece in pieces)
            events.append(joined if isinstance(pieces[0], str) else replace(pieces[0], arguments=joined))
        self._events.clear()
        return events


def _run_of(event: Event) -> str | int | None:
    return None if isinstance(event, str) else event.id or event.index


def _members(text: str) -> dict[str, object]:
    """Members of a call's object; objects among them are lists. Raises `NotACall` if one comes twice."""
    pairs = _DECODER.decode(text)
    members = {"arguments" if name == "parameters" else name: value for name, value in pairs}
    if len(members) < len(pairs):
        raise NotACall
    return members


def _arguments(value: object, text: str, start: int) -> str:
    """A call's arguments: an object, which begins at `start` of the text, or the text of an object, or none."""
    if value is None or value == "":
        return "{}"
    if isinstance(value, list):
        return text[start : _DECODER.raw_decode(text, start)[1]]
    try:
        if isinstance(value, str) and value.encode() and isinstance(_STRICT.decode(value), dict):
            return value
    except (ValueError, RecursionError):
        pass
    raise NotACall


def _no_number(name: str) -> NoReturn:
    raise ValueError(name)


def _pieces(text: str) -> list[str]:
    """The text in pieces, last piece first."""
    return [text[start : start + _PIECE_CHARS] for start in reversed(range(0, len(text), _PIECE_CHARS))]


_STRICT: Final = json.JSONDecoder(parse_int=str, parse_constant=_no_number)
"""JSON as RFC 8259 has it: no `NaN`."""
