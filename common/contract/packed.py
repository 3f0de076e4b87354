"""Fields that travel as bytes: a long list of numbers or names is one value, so that unpacking the frame is cheap."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from pydantic import GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema


@dataclass(frozen=True, slots=True)
class Packed:
    """Marks a field of a message, within `Annotated`, that travels as bytes."""

    pack: Callable[[Any], bytes]
    unpack: Callable[[bytes], Any]
    """Raises `ValueError`."""
    min_bytes: int
    max_bytes: int

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """A schema that takes `min_bytes` to `max_bytes` bytes and calls `unpack`, the only check of their content."""
        wire = core_schema.bytes_schema(strict=True, min_length=self.min_bytes, max_length=self.max_bytes)
        return core_schema.no_info_after_validator_function(self.unpack, wire)


def packed_numbers(least: int, most: int) -> Packed:
    """A field of `least` to `most` numbers below 2^32, little-endian."""
    return _array("I", _unpack, least, most)


def packed_longs(least: int, most: int) -> Packed:
    """A field of `least` to `most` numbers below 2^64, little-endian."""
    return _array("Q", _unpack, least, most)


def packed_reals(least: int, most: int) -> Packed:
    """A field of `least` to `most` finite single-precision numbers, little-endian."""
    return _array("f", _unpack_reals, least, most)


def packed_names(size: int, least: int, most: int) -> Packed:
    """A field of `least` to `most` names of `size` bytes each, concatenated."""
    return Packed(b"".join, partial(_unpack_names, size), least * size, most * size)


def _array(kind: str, unpack: Callable[[str, bytes], tuple[Any, ...]], least: int, most: int) -> Packed:
    """A field of numbers of a kind of `struct`."""
    size = struct.calcsize(f"<{kind}")
    return Packed(partial(_pack, kind), partial(unpack, kind), least * size, most * size)


def _pack(kind: str, numbers: tuple[Any, ...]) -> bytes:
    return struct.pack(f"<{len(numbers)}{kind}", *numbers)


def _unpack(kind: str, data: bytes) -> tuple[Any, ...]:
    size = struct.calcsize(f"<{kind}")
    if len(data) % size:
        raise ValueError(f"{len(data)} bytes are not numbers of {size} bytes each")
    return struct.unpack(f"<{len(data) // size}{kind}", data)


def _unpack_reals(kind: str, data: bytes) -> tuple[float, ...]:
    numbers = _unpack(kind, data)
    if not all(map(math.isfinite, numbers)):
        raise ValueError("a number that is not finite")
    return numbers


def _unpack_names(size: int, data: bytes) -> tuple[bytes, ...]:
    if len(data) % size:
        raise ValueError(f"{len(data)} bytes are not names of {size} bytes each")
    return tuple(data[start : start + size] for start in range(0, len(data), size))
