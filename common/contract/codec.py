"""Frames: MessagePack out, validated messages in. No pickle, no code, nothing unbounded.

A frame is `[sender incarnation, [[kind, fields], ...]]`: the messages of one moment for one peer travel together.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from enum import Enum

import msgpack
from pydantic import TypeAdapter, ValidationError

from common.contract.errors import ProtocolError
from common.contract.ids import Incarnation
from common.contract.messages import MAX_TOKENS, MESSAGES, Message

MAX_FRAME_BYTES = 64 * 2**20
"""Largest frame that is sent or looked at."""
MAX_MESSAGES_PER_FRAME = 4096
"""Most messages in one frame; a sender with more sends several frames."""

_MAX_REFUSAL_CHARS = 500

_VALIDATORS = {cls.__name__: TypeAdapter(cls).validator for cls in MESSAGES}
"""The adapters' own, which are asked without a detour for each message."""
_FIELDS: dict[type, tuple[str, ...]] = {}


def encode(sender: Incarnation, messages: Sequence[Message]) -> bytes:
    """Encode `messages` from `sender` as one frame.

    Raises `ProtocolError` if the frame would be larger than a receiver accepts.
    """
    if len(messages) > MAX_MESSAGES_PER_FRAME:
        raise ProtocolError(f"{len(messages)} messages in one frame, at most {MAX_MESSAGES_PER_FRAME}")
    body = [[type(message).__name__, _as_map(message)] for message in messages]
    try:
        frame: bytes = msgpack.packb([sender, body], default=_as_map, use_bin_type=True)
    except (OverflowError, ValueError, TypeError) as error:
        raise ProtocolError(f"a message that cannot travel: {error}") from error
    if len(frame) > MAX_FRAME_BYTES:
        raise ProtocolError(f"a frame of {len(frame)} bytes, at most {MAX_FRAME_BYTES}")
    return frame


def encode_some(sender: Incarnation, messages: Sequence[Message]) -> tuple[bytes, int]:
    """Encode as many of `messages` as one frame holds, in order: (frame, how many of them).

    Raises `ProtocolError` if the first alone is too large, which no valid message is.
    """
    count = min(len(messages), MAX_MESSAGES_PER_FRAME)
    while True:
        try:
            return encode(sender, messages[:count]), count
        except ProtocolError:
            if count == 1:
                raise
            count //= 2


def decode(frame: bytes | memoryview) -> tuple[Incarnation, list[Message]]:
    """Decode and validate a frame; the sender's incarnation and its messages.

    Raises `ProtocolError`, naming what was wrong, for anything that is not a well-formed frame of known messages.
    """
    if len(frame) > MAX_FRAME_BYTES:
        raise ProtocolError(f"a frame of {len(frame)} bytes, at most {MAX_FRAME_BYTES}")
    try:
        unpacked = msgpack.unpackb(
            frame,
            use_list=False,
            raw=False,
            strict_map_key=True,
            max_array_len=MAX_TOKENS,
            max_map_len=64,
            max_ext_len=0,
        )
    except (ValueError, msgpack.UnpackException, RecursionError) as error:
        raise ProtocolError(f"not MessagePack, or beyond its bounds: {error!r}") from error
    match unpacked:
        case (str() as sender, tuple() as body) if 0 < len(sender) <= 64 and len(body) <= MAX_MESSAGES_PER_FRAME:
            return Incarnation(sender), [_message(item) for item in body]
        case _:
            raise ProtocolError("not a frame of [sender, messages]")


def _message(item: object) -> Message:
    match item:
        case (str() as kind, dict() as fields) if kind in _VALIDATORS:
            try:
                message: Message = _VALIDATORS[kind].validate_python(fields)
            except ValidationError as error:
                problems = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()[:3])
                raise ProtocolError(f"invalid {kind}: {problems[:_MAX_REFUSAL_CHARS]}") from error
            return message
        case _:
            raise ProtocolError("not a message of [kind, fields]")


def _as_map(value: object) -> object:
    """A dataclass as a map of its fields; an enum as its value."""
    if isinstance(value, Enum):
        return value.value
    cls = type(value)
    names = _FIELDS.get(cls)
    if names is None:
        if not dataclasses.is_dataclass(cls):
            raise TypeError(f"{cls.__name__} cannot travel")
        names = _FIELDS[cls] = tuple(field.name for field in dataclasses.fields(cls))
    return {name: getattr(value, name) for name in names}
