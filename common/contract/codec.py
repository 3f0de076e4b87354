"""Frames: messages are encoded as MessagePack, and validated when decoded. No pickle, no code, every size is bounded.

A frame is `[sender incarnation, [[kind, fields], ...]]`. Messages that wait for one peer at the same time travel in one
frame, as far as they fit into `GATHERED_FRAME_BYTES`; a larger message has a frame of its own. The cost of unpacking a
frame is bounded before it is unpacked: by its length for a gathered frame; by the number of its values for a larger
frame, which are counted without creating objects.
"""

from __future__ import annotations

import dataclasses
import operator
import struct
import typing
from collections.abc import Callable, Iterable
from enum import Enum
from itertools import islice
from typing import Any, NamedTuple

import msgpack
from pydantic import TypeAdapter, ValidationError

from common.contract.errors import ProtocolError
from common.contract.ids import Incarnation
from common.contract.messages import gateway, handoff, session, worker
from common.contract.messages.fields import MAX_OPEN_REQUESTS, MAX_TOKENS, Message
from common.contract.packed import Packed
from common.contract.printable import printable

GATHERED_FRAME_BYTES = 2**20
"""Largest frame of several messages."""
MAX_FRAME_BYTES = 2 * 4 * MAX_TOKENS + 2 * 2**20
"""Largest frame that is sent or accepted: two packed arrays of `MAX_TOKENS` numbers (`BlocksReady` with checksums), and
2 MiB for everything else, which is enough for every other message."""
MAX_VALUES = 4 * MAX_OPEN_REQUESTS
"""Most values in a frame above `GATHERED_FRAME_BYTES`: a Hello that lists every request has three values for each."""
MAX_MESSAGES_PER_FRAME = 4096
"""Most messages in one frame; a sender with more sends several frames."""

MESSAGES: tuple[type[Message], ...] = tuple(
    each
    for module in (session, gateway, worker, handoff)
    for name, each in vars(module).items()
    if isinstance(each, type) and issubclass(each, Message) and each.__module__ == module.__name__ and name[0] != "_"
)
"""Every message of the protocol: the public classes of messages that these files declare."""

_MAX_REFUSAL_CHARS = 500
_MAX_NAME_CHARS = 100
"""Most characters of a received field name that a refusal quotes."""

_VALIDATORS = {cls.__name__: TypeAdapter(cls).validator for cls in MESSAGES}
"""The validators inside the type adapters: calling them directly saves a call for each message."""
_FIELDS: dict[type, _Fields] = {}


class _Fields(NamedTuple):
    """The fields of a class of messages, or of parts of messages."""

    names: tuple[str, ...]
    read: Callable[[Any], tuple[Any, ...]]
    """Returns the values of an object's fields."""
    packed: tuple[tuple[str, Callable[[Any], bytes]], ...]
    """(name, packing function) of each field that travels as bytes."""


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
    """Encode the leading `messages` that fit into one frame: (frame, number of messages in it).

    Raises `ProtocolError` if the first cannot be encoded, or is too large; no valid message is too large.
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
"""Most bytes of a frame before its first message."""


def decode(frame: bytes | memoryview) -> tuple[Incarnation, list[Message]]:
    """Decode and validate a frame; return the sender's incarnation and the messages.

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
    """Require that a frame is complete and, if it is large, that it holds at most `MAX_VALUES` values.

    Creates no objects from the frame. Raises `ValueError`, or msgpack's own exceptions, otherwise. Without this check a
    few bytes could announce nested arrays, each of which is allocated before the next is read, and a frame of
    one-byte values would become millions of objects.
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
    """Convert for msgpack: a dataclass to a map of its fields, an enum to its value."""
    if isinstance(value, Enum):
        return value.value
    known = _FIELDS.get(type(value)) or _learn(type(value))
    fields = dict(zip(known.names, known.read(value), strict=True))
    for name, pack in known.packed:
        if fields[name] is not None:
            fields[name] = pack(fields[name])
    return fields


def _learn(cls: type) -> _Fields:
    if not dataclasses.is_dataclass(cls):
        raise TypeError(f"{cls.__name__} cannot travel")
    hints = typing.get_type_hints(cls, include_extras=True)
    names = tuple(field.name for field in dataclasses.fields(cls))
    packings = ((name, _packing(hints[name])) for name in names)
    packed = tuple((name, packing.pack) for name, packing in packings if packing is not None)
    read: Callable[[Any], tuple[Any, ...]] = (
        operator.attrgetter(*names) if len(names) > 1 else lambda value: tuple(getattr(value, name) for name in names)
    )
    _FIELDS[cls] = _Fields(names, read, packed)
    return _FIELDS[cls]


def _packing(hint: Any) -> Packed | None:
    """The packing of a field with this type hint; None if it is not packed. An optional field may be packed, too."""
    marks = [mark for each in (hint, *typing.get_args(hint)) for mark in getattr(each, "__metadata__", ())]
    return next((mark for mark in marks if isinstance(mark, Packed)), None)
