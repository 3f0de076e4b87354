"""JSON encoding of answers: whole ones in pieces, and the chunks of a stream. Most chunks of a choice differ in nothing
but their text, so what surrounds the text is encoded once."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator

from gateway.answer.answer_schemas import Usage
from gateway.answer.responses import AnswerFormat
from gateway.text.choice_text import Piece

_ITEMS_AT_ONCE = 4096
_JSON = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), default=list)


_LINE_ENDS = {each: f"\\u{ord(each):04x}" for each in "\x85\u2028\u2029"}
"""What JSON may have as it is, and clients that cut a stream into lines as Python does take for the end of one."""


def encode(value: object) -> bytes:
    """Encode as JSON without spaces; an iterator becomes an array."""
    text = _JSON.encode(value)
    if not text.isascii():
        for end, escaped in _LINE_ENDS.items():
            text = text.replace(end, escaped)
    return text.encode()


def encode_in_pieces(payload: object) -> Iterator[bytes]:
    """Encode as JSON, in pieces. Each item of an iterator is made only when it is encoded, so that other tasks can run
    between any two pieces. Objects are encoded member by member; lists at once, except long ones, which are split."""
    match payload:
        case dict():
            for number, (name, value) in enumerate(payload.items()):
                yield (b"," if number else b"{") + encode(name) + b":"
                yield from encode_in_pieces(value)
            yield b"}" if payload else b"{}"
        case Iterator():
            number = 0
            for number, item in enumerate(payload, 1):
                yield b"," if number > 1 else b"["
                yield from encode_in_pieces(item)
            yield b"]" if number else b"[]"
        case list() | tuple() if len(payload) > _ITEMS_AT_ONCE:
            for start in range(0, len(payload), _ITEMS_AT_ONCE):
                yield (b"," if start else b"[") + encode(payload[start : start + _ITEMS_AT_ONCE])[1:-1]
            yield b"]"
        case _:
            yield encode(payload)


class ChunkEncoder:
    """Encodes the chunks of one request."""

    def __init__(self, answer: AnswerFormat, *, usage_follows: bool) -> None:
        """`usage_follows`: the stream ends with a usage chunk, so every other chunk without usage has `"usage":
        null`."""
        self._answer = answer
        self._rest: dict[str, object] = {"usage": None} if usage_follows else {}
        self._around: dict[int, tuple[bytes, bytes]] = {}
        """Choice → encoded bytes before and after the text of its plain chunks."""

    def encode(self, piece: Piece, first: bool, usage: Usage | None = None) -> bytes:
        """Encode a piece, the choice's `first` or a later one, as `AnswerFormat.chunk` builds it, with the usage so
        far."""
        if usage is not None:
            return encode({**self._answer.chunk(piece, first), "usage": usage})
        if first or not piece.plain:
            return encode({**self._answer.chunk(piece, first), **self._rest})
        around = self._around.get(piece.choice)
        if around is None:
            around = self._around[piece.choice] = self._split(piece.choice)
        return around[0] + encode(piece.text) + around[1]

    def _split(self, choice: int) -> tuple[bytes, bytes]:
        mark = secrets.token_hex(16)  # occurs nowhere else in the chunk
        piece = Piece(choice=choice, text=mark, num_tokens=1, reports=(), finish_reason=None)
        before, _, after = encode({**self._answer.chunk(piece, False), **self._rest}).partition(f'"{mark}"'.encode())
        return before, after
