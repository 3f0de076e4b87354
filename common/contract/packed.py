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

_NUMBER = struct.Struct("<I")
_REAL_BYTES = 4
_LONG_BYTES = 8


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
    return Packed(_pack_numbers, _unpack_numbers, least * _NUMBER.size, most * _NUMBER.size)


def packed_longs(least: int, most: int) -> Packed:
    """A field of `least` to `most` numbers below 2^64, little-endian."""
    return Packed(_pack_longs, _unpack_longs, least * _LONG_BYTES, most * _LONG_BYTES)


def packed_reals(least: int, most: int) -> Packed:
    """A field of `least` to `most` finite single-precision numbers, little-endian."""
    return Packed(_pack_reals, _unpack_reals, least * _REAL_BYTES, most * _REAL_BYTES)


def packed_names(size: int, least: int, most: int) -> Packed:
    """A field of `least` to `most` names of `size` bytes each, concatenated."""
    return Packed(b"".join, partial(_unpack_names, size), least * size, most * size)


def _pack_numbers(numbers: tuple[int, ...]) -> bytes:
    if len(numbers) == 1:  # the common case: one token of one sequence in each step
        return _NUMBER.pack(numbers[0])
    return struct.pack(f"<{len(numbers)}I", *numbers)


def _unpack_numbers(data: bytes) -> tuple[int, ...]:
    if len(data) == _NUMBER.size:
        return _NUMBER.unpack(data)
    if len(data) % _NUMBER.size:
        raise ValueError(f"{len(data)} bytes are not numbers of {_NUMBER.size} bytes each")
    return struct.unpack(f"<{len(data) // _NUMBER.size}I", data)


def _pack_longs(numbers: tuple[int, ...]) -> bytes:
    return struct.pack(f"<{len(numbers)}Q", *numbers)


def _unpack_longs(data: bytes) -> tuple[int, ...]:
    if len(data) % _LONG_BYTES:
        raise ValueError(f"{len(data)} bytes are not numbers of {_LONG_BYTES} bytes each")
    return struct.unpack(f"<{len(data) // _LONG_BYTES}Q", data)


def _pack_reals(numbers: tuple[float, ...]) -> bytes:
    return struct.pack(f"<{len(numbers)}f", *numbers)


def _unpack_reals(data: bytes) -> tuple[float, ...]:
    if len(data) % _REAL_BYTES:
        raise ValueError(f"{len(data)} bytes are not numbers of {_REAL_BYTES} bytes each")
    numbers = struct.unpack(f"<{len(data) // _REAL_BYTES}f", data)
    if not all(map(math.isfinite, numbers)):
        raise ValueError("a number that is not finite")
    return numbers


def _unpack_names(size: int, data: bytes) -> tuple[bytes, ...]:
    if len(data) % size:
        raise ValueError(f"{len(data)} bytes are not names of {size} bytes each")
    return tuple(data[start : start + size] for start in range(0, len(data), size))
