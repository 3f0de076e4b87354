"""Frames: MessagePack out, validated messages in. No pickle, no code, nothing unbounded.

A frame is `[sender incarnation, [[kind, fields], ...]]`: the messages of one moment for one peer travel together, as
far as they fit into `GATHERED_FRAME_BYTES`; a larger message goes alone. A frame's cost is known before it is unpacked:
a gathered one's by its length, a larger one's by the number of values in it, which are counted without making them.
"""

from __future__ import annotations

import dataclasses
import struct
import typing
from collections.abc import Callable, Iterable
from enum import Enum
from itertools import islice
from typing import Any

import msgpack
from pydantic import TypeAdapter, ValidationError

from common.contract.errors import ProtocolError
from common.contract.ids import Incarnation
from common.contract.messages import MAX_OPEN_REQUESTS, MAX_TOKENS, MESSAGES, Message
from common.contract.packed import Packed
from common.contract.printable import printable

GATHERED_FRAME_BYTES = 2**20
"""Largest frame of several messages."""
MAX_FRAME_BYTES = 2 * 4 * MAX_TOKENS + 2 * 2**20
"""Largest frame that is sent or looked at: two packed arrays of `MAX_TOKENS` numbers (`BlocksReady` with checksums),
and 2 MiB for everything else, which is enough for every other message."""
MAX_VALUES = 4 * MAX_OPEN_REQUESTS
"""Most values in a frame above `GATHERED_FRAME_BYTES`: a Hello that lists every request has three for each."""
MAX_MESSAGES_PER_FRAME = 4096
"""Most messages in one frame; a sender with more sends several frames."""

_MAX_REFUSAL_CHARS = 500
_MAX_NAME_CHARS = 100
"""Of a name from outside, in a refusal."""

_VALIDATORS = {cls.__name__: TypeAdapter(cls).validator for cls in MESSAGES}
"""The adapters' own, which are asked without a detour for each message."""
_FIELDS: dict[type, tuple[tuple[str, ...], tuple[tuple[str, Callable[[Any], bytes]], ...]]] = {}
"""Of each class: its fields, and how those of them are packed that travel as bytes."""


def encode(sender: Incarnation, messages: Iterable[Message]) -> bytes:
    """Encode `messages` from `sender` as one frame.

    Raises `ProtocolError` if they do not fit into one.
    """
    messages = list(messages)
    frame, count = encode_some(sender, messages)
    if count < len(messages):
        raise ProtocolError(f"{len(messages)} messages in one frame, into which {count} fit")
    return frame


def encode_some(sender: Incarnation, messages: Iterable[Message]) -> tuple[bytes, int]:
    """Encode as many of `messages` as travel in one frame, in order: (frame, how many of them).

    Raises `ProtocolError` if the first cannot travel, or is too large, which no valid message is.
    """
    packer = msgpack.Packer(default=_as_map, use_bin_type=True)
    parts: list[bytes] = []
    num_bytes = 0
    try:
        for message in islice(messages, MAX_MESSAGES_PER_FRAME):
            part = packer.pack((type(message).__name__, message))
            num_bytes += len(part)
            if parts and num_bytes > GATHERED_FRAME_BYTES - _HEADER_BYTES:
                break
            parts.append(part)
    except (OverflowError, ValueError, TypeError, struct.error) as error:
        if not parts:
            raise ProtocolError(f"a message that cannot travel: {error}") from error
    head = (packer.pack_array_header(2), packer.pack(sender), packer.pack_array_header(len(parts)))
    frame = b"".join((*head, *parts))
    if len(frame) > MAX_FRAME_BYTES:
        raise ProtocolError(f"a frame of {len(frame)} bytes, at most {MAX_FRAME_BYTES}")
    return frame, len(parts)


_HEADER_BYTES = 5 + 2 + 4 * 64 + 5
"""Most that a frame has before its messages."""


def decode(frame: bytes | memoryview) -> tuple[Incarnation, list[Message]]:
    """Decode and validate a frame; the sender's incarnation and its messages.

    Raises `ProtocolError`, naming what was wrong, for anything that is not a well-formed frame of known messages.
    """
    if len(frame) > MAX_FRAME_BYTES:
        raise ProtocolError(f"a frame of {len(frame)} bytes, at most {MAX_FRAME_BYTES}")
    try:
        _require_affordable(frame)
        unpacked = msgpack.unpackb(
            frame,
            use_list=False,
            raw=False,
            strict_map_key=True,
            max_array_len=MAX_OPEN_REQUESTS,
            max_map_len=64,
            max_ext_len=0,
        )
    except (ValueError, msgpack.UnpackException, RecursionError) as error:
        why = printable(f"{type(error).__name__}: {error}", _MAX_REFUSAL_CHARS)  # its `repr` may hold the whole frame
        raise ProtocolError(f"not MessagePack, or beyond its bounds: {why}") from None
    match unpacked:
        case (str() as sender, tuple() as body) if 0 < len(sender) <= 64 and len(body) <= MAX_MESSAGES_PER_FRAME:
            if len(body) > 1 and len(frame) > GATHERED_FRAME_BYTES:
                raise ProtocolError(f"{len(body)} messages in a frame of {len(frame)} bytes")
            return Incarnation(sender), [_message(item) for item in body]
        case _:
            raise ProtocolError("not a frame of [sender, messages]")


def _require_affordable(frame: bytes | memoryview) -> None:
    """Whether a frame is whole, and, if it is large, of few values; nothing of it is made into objects.

    Raises `ValueError`, or what msgpack raises, otherwise. Without this, a few bytes announce arrays within arrays,
    each of which is allocated before the next is looked at, and a byte each makes millions of objects.
    """
    unpacker = msgpack.Unpacker(max_buffer_size=MAX_FRAME_BYTES, read_size=len(frame))
    unpacker.feed(frame)
    if len(frame) <= GATHERED_FRAME_BYTES:
        unpacker.skip()
        return
    num_values, num_open = 0, 1
    while num_open:
        if num_values + num_open > MAX_VALUES:
            raise ValueError(f"more than {MAX_VALUES} values in a frame of {len(frame)} bytes")
        if unpacker.tell() == len(frame):
            raise ValueError("incomplete input")
        first = frame[unpacker.tell()]
        num_values, num_open = num_values + 1, num_open - 1
        if 0x90 <= first <= 0x9F or first in (0xDC, 0xDD):
            num_open += unpacker.read_array_header()
        elif 0x80 <= first <= 0x8F or first in (0xDE, 0xDF):
            num_open += 2 * unpacker.read_map_header()
        else:
            unpacker.skip()


def _message(item: object) -> Message:
    match item:
        case (str() as kind, dict() as fields) if kind in _VALIDATORS:
            try:
                message: Message = _VALIDATORS[kind].validate_python(fields)
            except ValidationError as error:
                problems = "; ".join(
                    f"{printable('.'.join(map(str, e['loc'])), _MAX_NAME_CHARS)}: {e['msg']}"
                    for e in error.errors(include_url=False, include_context=False, include_input=False)[:3]
                )
                raise ProtocolError(f"invalid {kind}: {printable(problems, _MAX_REFUSAL_CHARS)}") from error
            return message
        case _:
            raise ProtocolError("not a message of [kind, fields]")


def _as_map(value: object) -> object:
    """A dataclass as a map of its fields; an enum as its value."""
    if isinstance(value, Enum):
        return value.value
    names, packed = _FIELDS.get(type(value)) or _learn(type(value))
    fields = {name: getattr(value, name) for name in names}
    for name, pack in packed:
        if fields[name] is not None:
            fields[name] = pack(fields[name])
    return fields


def _learn(cls: type) -> tuple[tuple[str, ...], tuple[tuple[str, Callable[[Any], bytes]], ...]]:
    if not dataclasses.is_dataclass(cls):
        raise TypeError(f"{cls.__name__} cannot travel")
    hints = typing.get_type_hints(cls, include_extras=True)
    names = tuple(field.name for field in dataclasses.fields(cls))
    packings = ((name, _packing(hints[name])) for name in names)
    _FIELDS[cls] = names, tuple((name, packing.pack) for name, packing in packings if packing is not None)
    return _FIELDS[cls]


def _packing(hint: Any) -> Packed | None:
    """How a field of this type is packed; None if it is not. An optional field is packed if it is there."""
    marks = [mark for each in (hint, *typing.get_args(hint)) for mark in getattr(each, "__metadata__", ())]
    return next((mark for mark in marks if isinstance(mark, Packed)), None)
