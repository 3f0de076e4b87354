"""Refuses JSON schemas that the grammar library accepts but does not enforce, or that cost it unbounded work; and takes
out of them what restricts nothing, but which the library would refuse."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

from gateway.intake.expanded_length import MAX_EXPANDED, expanded_length

_MAX_MULTIPLE = 10_000
"""The library enumerates all remainders of a division at once."""
_CONTROL = re.compile("[\x00-\x07\x0b\x0e-\x1f\x7f]")
"""Characters that JSON writes only as numeric escapes, if at all. The grammar of a schema allows none of them in a
string."""
_NAMED = frozenset({"properties", "patternProperties", "$defs", "definitions"})
"""Keywords whose value maps names to schemas."""
_LITERAL = frozenset({"enum", "const", "default", "examples"})
"""Keywords whose values are not schemas."""
_FORMATS = frozenset({"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"})
"""Formats of strings that the library knows, and enforces."""
_REGEX_PART = re.compile(
    r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|[xuU]\{([0-9a-fA-F]{1,8})\}|([av])|.)", re.DOTALL
)
"""An escape of a regular expression. Groups 1 to 4 capture a character's number, group 5 the letter of a control
character."""
_SET = re.compile(r"\[(?:\^(?:[^\[\]&~-]|-(?!-))+|(?!\^)(?:[^\[\]&~-]|-(?!-)){2,})\]")
"""A set in a regular expression without escapes: a negated set, or a set of several characters."""


def refuse_unenforceable(schema: dict[str, Any]) -> None:
    """Raise `ValueError` if an answer could follow the library's grammar and still violate `schema`, or if the grammar
    would be too expensive."""
    multiples = []
    for part in _parts(schema):
        least, required = part.get("minProperties"), part.get("required")
        num_required = len({str(each) for each in required}) if isinstance(required, list) else 0
        if isinstance(least, int) and least > num_required + 1:
            raise ValueError(f"minProperties: {least}, at most one more than is required, as other names may repeat")
        if part.get("type") != "integer" and _loses_bound(part):
            raise ValueError("exclusiveMinimum, exclusiveMaximum: a whole number, and the other bound less than 1 away")
        if "additionalItems" in part and "prefixItems" in part:
            raise ValueError("additionalItems and prefixItems are of different versions of JSON Schema")
        if _CONTROL.search("".join(_texts([part.get("enum"), part.get("const")]))):
            raise ValueError("enum, const: a control character other than \\b, \\t, \\n, \\f and \\r cannot be written")
        if isinstance(part.get("minLength"), int | float) and part["minLength"] > MAX_EXPANDED:
            raise ValueError(f"minLength: more than {MAX_EXPANDED} characters")
        patterns = part.get("patternProperties")
        for pattern in [part.get("pattern"), *(patterns if isinstance(patterns, dict) else ())]:
            if isinstance(pattern, str) and expanded_length(pattern) > MAX_EXPANDED:
                raise ValueError(f"pattern: written out it has more than {MAX_EXPANDED} characters")
            if isinstance(pattern, str) and _needs_control(pattern):
                raise ValueError("pattern: a control character other than \\t, \\n, \\f and \\r cannot be written")
        multiples.append(part.get("multipleOf"))
    if _common_multiple(multiples) > _MAX_MULTIPLE:
        raise ValueError(f"multipleOf: all of them together have multiples of more than {_MAX_MULTIPLE}")


def without_what_restricts_nothing(schema: dict[str, Any], text: str) -> str:
    """The `text` of a schema, which was read as `schema`, without keywords that the library would refuse although they
    restrict nothing: formats that it does not know, which only describe strings, as JSON Schema has it; `propertyNames`
    that are any strings; and `uniqueItems: false`. Changes `schema`."""
    idle = [
        (part, key)
        for part in _parts(schema, with_literals=False)
        for key in ("format", "propertyNames", "uniqueItems")
        if key in part and _restricts_nothing(key, part[key])
    ]
    for part, key in idle:
        del part[key]
    return json.dumps(schema, ensure_ascii=False) if idle else text


def _restricts_nothing(key: str, value: Any) -> bool:
    match key:
        case "format":
            return isinstance(value, str) and value not in _FORMATS
        case "propertyNames":
            return value is True or value in ({}, {"type": "string"})
    return value is False


def _parts(schema: dict[str, Any], *, with_literals: bool = True) -> Iterator[dict[str, Any]]:
    """The schema and all schemas in it, including every place that a `$ref` can name. If there is one, what looks like
    a schema within a literal is taken for one, too, unless `with_literals` is false."""
    left: list[Any] = [schema]
    literals: list[Any] = []
    refers = False
    while left or (with_literals and refers and literals):
        part = (left or literals).pop()
        if isinstance(part, list):
            left += part
        elif isinstance(part, dict):
            yield part
            refers |= "$ref" in part
            for key, value in part.items():
                if key in _NAMED and isinstance(value, dict):
                    left += value.values()
                else:
                    (literals if key in _LITERAL else left).append(value)


def _texts(value: Any) -> Iterator[str]:
    """The strings in a value. Member names are left out, because they can always be written."""
    left = [value]
    while left:
        part = left.pop()
        if isinstance(part, str):
            yield part
        elif isinstance(part, list | dict):
            left += part if isinstance(part, list) else part.values()


def _loses_bound(part: dict[str, Any]) -> bool:
    """Whether the library would wrongly admit an exclusive numeric bound itself as a value."""

    def bounds(*names: str) -> list[float]:
        values = [part[name] for name in names if type(part.get(name)) in (int, float)]
        return [value for value in values if abs(value) < 2**53]

    low = bounds("minimum" if part.get("exclusiveMinimum") is True else "exclusiveMinimum")
    high = bounds("maximum" if part.get("exclusiveMaximum") is True else "exclusiveMaximum")
    pairs = [(bound, other - bound) for bound in low for other in bounds("maximum", "exclusiveMaximum")]
    pairs += [(bound, bound - other) for bound in high for other in bounds("minimum", "exclusiveMinimum")]
    return any(bound == int(bound) and 0 < distance < 1 for bound, distance in pairs)


def _needs_control(pattern: str) -> bool:
    """Whether a regular expression requires a control character. One among the alternatives of a set is not
    required."""

    def plain(escape: re.Match[str]) -> str:
        digits = next((group for group in escape.groups()[:4] if group is not None), None)
        return "\0" if escape[5] or (digits and _is_control(int(digits, 16))) else "x"

    return bool(_CONTROL.search(_SET.sub("", _REGEX_PART.sub(plain, pattern))))


def _is_control(code: int) -> bool:
    return code < 128 and _CONTROL.match(chr(code)) is not None


def _common_multiple(values: list[Any]) -> int:
    """Least common multiple of the numbers in `values`, in units of their last decimal place, without trailing
    zeros."""
    numbers = [Decimal(str(value)) for value in values if type(value) in (int, float) and 0 < value < math.inf]
    places = max([0, *(-int(number.as_tuple().exponent) for number in numbers)])
    common = math.lcm(*(int(number * 10**places) for number in numbers))
    while common and common % 10 == 0:
        common //= 10
    return common
