"""What a client may send to do harm, as tables: the bytes, and the statuses that are a clean answer to them."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import bad_fields
from bad_fields import nested

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
BAD: Final = frozenset({400})
FINE: Final = frozenset({200})
EITHER: Final = frozenset({200, 400})
CLOSED: Final = frozenset[int]()
MAX_BODY_BYTES = 2**20
"""Of the server that these are made for."""


@dataclass(frozen=True)
class Hostile:
    """One input."""

    name: str
    data: bytes
    expected: frozenset[int]
    """What an answer's status may be; empty where the connection is just closed. It is always closed in the end."""
    may_close: bool = False
    """Whether closing without an answer is as good."""
    num_answers: int = 1
    """Most answers on the connection."""
    half_close: bool = False
    """Whether the client says that it sends nothing more."""
    keyed: bool = False
    """Whether it goes to where keys are asked for."""


def head(method: str, path: str, *lines: str, host: str = "Host: x") -> bytes:
    """The head of a request after which the connection is closed."""
    return "\r\n".join([f"{method} {path} HTTP/1.1", host, "Connection: close", *lines, "", ""]).encode("latin-1")


def post(path: str, body: bytes, *lines: str) -> bytes:
    """A whole request."""
    return head("POST", path, f"Content-Length: {len(body)}", *lines) + body


def _json(value: object) -> bytes:
    return value if isinstance(value, bytes) else json.dumps(value).encode()


def _completion(**fields: Any) -> dict[str, Any]:
    return {"prompt": "hello", "max_tokens": 4} | fields


def _chat(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4} | fields


def _schema_of_depth(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


_FIELDS: Final[dict[str, tuple[object, ...]]] = {
    "prompt": ([[5]] * 2049, [[[5]]], [1.5], ["ok", "\udfff"], "x" * 500_000, "\0" * 10_000),
    "model": ("x" * 10_000, [], "../../etc/passwd", "owner/tiny\0", "\ud800", {}),
    "max_tokens": (2**63, 10**100, 1.5, "4", True, [], {}),
    "n": (10**6, 2**63),
    "stop": (["a"] * 90_000, [None]),
    "stop_token_ids": ([5] * 90_000, ["x"] * 90_000, [1.5]),
    "logit_bias": ({"1e3": 1}, {str(token): 1 for token in range(50_000)}),
    "service_tier": ("x" * 10_000,),
    "response_format": (
        {"type": "json_schema", "json_schema": {"schema": {"$ref": "file:///etc/passwd"}}},
        {"type": "json_schema", "json_schema": {"schema": {"enum": ["x" * 70_000]}}},
        {"type": "json_schema", "json_schema": {"schema": {"pattern": "(?=a)"}}},
        {"type": "json_schema", "json_schema": {"schema": {"minLength": 2**62, "type": "string"}}},
        {"type": "json_schema", "json_schema": {"schema": {"multipleOf": 0, "type": "number"}}},
        {"type": "json_schema", "json_schema": {"schema": {"pattern": "[" * 20_000 + "|" * 40_000}}},
    ),
    "guided_regex": (
        "((((((((((a{9}){9}){9}){9}){9}){9}){9}){9}){9}){9}",
        r"\1",
        "(?x)a",
        "[" * 65_536,
        "[" * 65_535 + "\\",
        "(?" * 32_000,
        "{1" * 32_000,
        r"\p{" * 21_000,
    ),
    "guided_choice": ([1] * 90_000,),
    "guided_grammar": (
        "",
        "start: /(/",
        "x" * 70_000,
        "(" * 50_000,
        'start: "' + r"\"" * 32_000,
        "start: /" + r"\/" * 32_000,
        "\n" * 65_536,
        "root ::= a\na ::= b\n" * 3000,
    ),
    "guided_json": ("[" * 10_000,),
    "prompt_logprobs": (-1, 21, 2**63),
}
"""Values of a completion's fields that are larger or stranger than those of `bad_fields`; each is refused."""

_MESSAGES: Final[dict[str, object]] = {
    "an object": {"role": "user", "content": "x"},
    "of null": [None],
    "of 45000 empty objects": [{}] * 45_000,
    "of 90000 nulls": [None] * 90_000,
    "of 20000 turns": [{"role": "user", "content": "x"}] * 20_000,
    "an empty role": [{"role": "", "content": "x"}],
    "a long role": [{"role": "x" * 300, "content": "x"}],
    "an unknown role": [{"role": "root", "content": "x"}],
    "a role that is markup": [{"role": "{{ 7 * 7 }}", "content": "x"}],
    "a number as content": [{"role": "user", "content": 1}],
    "an image": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://127.0.0.1:1/x"}}]}],
    "a part without text": [{"role": "user", "content": [{"type": "text"}]}],
    "a part that is none": [{"role": "user", "content": [1]}],
    "45000 parts that are none": [{"role": "user", "content": [{}] * 45_000}],
    "half a surrogate pair": [{"role": "user", "content": "\ud83d"}],
    "half a surrogate pair in a part": [{"role": "user", "content": [{"type": "text", "text": "\ude00"}]}],
    "half a surrogate pair in a name": [{"role": "user", "name": "\ud83d", "content": "x"}],
}

_FINE: Final[dict[str, tuple[str, object]]] = {
    "a BOM": (COMPLETIONS, b"\xef\xbb\xbf" + _json(_completion())),
    "UTF-16": (COMPLETIONS, json.dumps(_completion()).encode("utf-16")),
    "UTF-32": (COMPLETIONS, json.dumps(_completion()).encode("utf-32")),
    "a field twice": (COMPLETIONS, b'{"prompt": "a", "prompt": "hello", "max_tokens": 9, "max_tokens": 4}'),
    "special tokens spelt out": (COMPLETIONS, _completion(prompt="<s></s><s>")),
    "null bytes escaped": (COMPLETIONS, _completion(prompt="a\0b")),
    "control characters": (COMPLETIONS, _completion(prompt="\x01\x1b[31m\x7f\u202e\ufeff\uffff")),
    "10000 unknown fields": (COMPLETIONS, _completion(**{f"field{i}": i for i in range(10_000)})),
    "a field's name of 500000 characters": (COMPLETIONS, _completion(**{"x" * 500_000: 1})),
    "a lone surrogate as a field's name": (COMPLETIONS, _completion(**{"\ud800": 1})),
    "deep values of an unknown field": (COMPLETIONS, b'{"prompt": "a", "x": ' + nested("[", "", "]", 500) + b"}"),
    "a template in a message": (CHAT, _chat(messages=[{"role": "user", "content": "{{ [].__class__ }}{% for %}"}])),
    "internal fields": (
        CHAT,
        _chat(
            request_id="x", attempt=9, lease=1, source="p:1", kv_transfer_params={"remote_block_ids": [1]},
            kv_ids=[1], worker="d:1", tenant="other", tier="interactive", budget_s=1e9, cached=[1], forced_prefix=[5],
            priority=-1, trial=True, incarnation="0" * 32, fingerprint={}, __class__="x", __proto__={"admin": True},
        ),
    ),
    "many logit biases": (COMPLETIONS, _completion(logit_bias={str(t): -100 for t in range(390)})),
    "a schema that is deep": (
        CHAT, _chat(response_format={"type": "json_schema", "json_schema": {"schema": _schema_of_depth(30)}})
    ),
}  # fmt: skip

_BOMBS: Final[dict[str, dict[str, Any]]] = {
    "a schema that refers to itself": {"guided_json": {"$ref": "#"}},
    "a schema of 200 levels": {"guided_json": _schema_of_depth(200)},
    "a schema of 1000 properties": {
        "guided_json": {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(1000)}}
    },
    "a schema that doubles": {
        "guided_json": {
            "$defs": {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(40)} | {"d40": {}},
            "$ref": "#/$defs/d0",
        }
    },
    "a schema of many items": {"guided_json": {"type": "array", "items": {}, "minItems": 100_000}},
    "an expression that repeats": {"guided_regex": "a{1000000000}"},
    "a grammar of nothing": {"guided_grammar": "start: start start"},
    "an expression that backtracks": {"guided_regex": "(a+)+$"},
    "an expression that repeats repetitions": {"guided_regex": "((a{1,100}){1,100}){1,100}"},
    "an expression of 1000 choices": {"guided_regex": "|".join(f"(x{{{i}}})" for i in range(1000))},
    "an expression with classes": {"guided_regex": r"[\w\W]{0,5000}x" * 3},
    "a grammar without end": {"guided_grammar": 'start: "a" start'},
    "an ambiguous grammar": {"guided_grammar": 'start: start start | "a" | '},
    "a grammar of 1000 rules": {
        "guided_grammar": "start: r0\n" + "\n".join(f'r{i}: "a" r{i + 1} | "b"' for i in range(1000)) + '\nr1000: "c"'
    },
    "a grammar of 4500 rules that lead on": {
        "guided_grammar": "start: r0\n" + "\n".join(f"r{i}: r{i + 1}" for i in range(4500)) + '\nr4500: "a"'
    },
    "a schema of 1500 that lead on": {
        "guided_json": {
            "$defs": {f"{i}": {"items": {"$ref": f"#/$defs/{i + 1}"}} for i in range(1500)} | {"1500": {}},
            "$ref": "#/$defs/0",
        }
    },
    "1024 choices": {"guided_choice": ["a" * 60] * 1024},
}


def _bodies() -> Iterator[Hostile]:
    for name, body in bad_fields.NOT_JSON.items():
        yield Hostile(f"no JSON object: {name}", post(COMPLETIONS, body), BAD)
    for field, values in _FIELDS.items():
        expected = frozenset({400, 404}) if field == "model" else BAD
        for index, value in enumerate(values):
            body = _json(_completion(**{field: value}))
            yield Hostile(f"{field} {index}: {str(value)[:30]!r}", post(COMPLETIONS, body), expected)
    for path, fine, cases in (
        (COMPLETIONS, _completion(), bad_fields.COMMON + bad_fields.COMPLETION),
        (CHAT, _chat(), bad_fields.COMMON + bad_fields.CHAT),
    ):
        for index, (fields, param) in enumerate(cases):
            yield Hostile(f"{path} {index}: {param}", post(path, _json(fine | fields)), BAD)
    for name, messages in _MESSAGES.items():
        yield Hostile(f"messages: {name}", post(CHAT, _json(_chat(messages=messages))), BAD)
    for name, (path, given) in _FINE.items():
        yield Hostile(f"harmless: {name}", post(path, _json(given)), FINE)
    for name, fields in _BOMBS.items():
        yield Hostile(
            f"bomb: {name}", post(COMPLETIONS, _json(_completion(**fields))), EITHER | {429}
        )  # many at once wait for each other
    for path, bad in [
        ("/tokenize", [{}, {"prompt": "a", "messages": []}, {"messages": [{}] * 45_000}]),
        ("/detokenize", [{}, {"tokens": [2**70]}, {"tokens": ["x"] * 90_000}]),
    ]:
        for index, value in enumerate(bad):
            yield Hostile(f"{path} {index}", post(path, _json(value)), BAD)


def _sizes() -> Iterator[Hostile]:
    fine = _json(_completion())
    for name, body in (
        ("500000 brackets", b"[" * 500_000),
        ("100000 nested objects", b'{"a":' * 100_001),
        ("150000 nulls", _json({"messages": [None] * 150_000})),
        ("200000 commas in a text", _json(_completion(prompt="," * 200_000))),
    ):
        yield Hostile(name, post(COMPLETIONS, body), frozenset({413}))
    large = b'{"prompt": "' + b"x" * MAX_BODY_BYTES + b'"}'
    bomb = gzip.compress(b" " * 2**26)
    too_large = frozenset({413})
    yield Hostile("a body that is too large", post(COMPLETIONS, large), too_large)
    yield Hostile("a body said to be of an exabyte", head("POST", COMPLETIONS, f"Content-Length: {10**18}"), too_large)
    for name, packed, encoding, expected in [
        ("gzip", gzip.compress(fine), "gzip", frozenset({415})),
        ("a gzip bomb", bomb, "gzip", frozenset({415})),
        ("brotli", fine, "br", frozenset({415})),
        ("an unknown encoding", fine, "rot13", frozenset({415})),
        ("several encodings", gzip.compress(fine), "gzip, gzip", frozenset({415})),
        ("the identity", fine, "identity", FINE),
    ]:
        yield Hostile(f"body: {name}", post(COMPLETIONS, packed, f"Content-Encoding: {encoding}"), expected)


def _chunks(*chunks: bytes, end: bytes = b"0\r\n\r\n") -> bytes:
    return b"".join(b"%x\r\n%s\r\n" % (len(chunk), chunk) for chunk in chunks) + end


def _framing() -> Iterator[Hostile]:
    """Where a request ends, and where the next one begins."""
    fine = _json(_completion())
    start = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n".encode()
    chunked = start + b"Transfer-Encoding: chunked\r\n\r\n"
    smuggled = b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n"
    length = b"Content-Length: %d\r\n" % len(fine)
    for name, data, expected in [
        ("chunks", chunked + _chunks(fine[:5], fine[5:]), FINE),
        ("a chunk for each byte", chunked + _chunks(*(fine[i : i + 1] for i in range(len(fine)))), FINE),
        ("chunks of nothing", chunked + _chunks(), BAD),
        ("chunks with extensions", chunked + b"%x;a=b\r\n%s\r\n0\r\n\r\n" % (len(fine), fine), EITHER),
        ("chunks with a long extension", chunked + b"5;" + b"a" * 100_000 + b"\r\nhello\r\n0\r\n\r\n", BAD),
        ("chunks with trailers", chunked + _chunks(fine, end=b"0\r\nX: y\r\n\r\n"), EITHER),
        ("chunks with 1000 trailers", chunked + _chunks(fine, end=b"0\r\n" + b"X: y\r\n" * 1000 + b"\r\n"), EITHER),
        ("a chunk of a negative size", chunked + b"-5\r\nhello\r\n0\r\n\r\n", BAD),
        ("a chunk of no size", chunked + b"\r\nhello\r\n0\r\n\r\n", BAD),
        ("a chunk's size that is no number", chunked + b"zz\r\nhello\r\n0\r\n\r\n", BAD),
        ("a chunk's size with 0x", chunked + b"0x5\r\nhello\r\n0\r\n\r\n", BAD),
        ("a chunk's size that overflows", chunked + b"f" * 17 + b"\r\nhello\r\n0\r\n\r\n", BAD),
        ("a chunk's size that is large", chunked + b"7fffffffffffffff\r\nhello", frozenset({400, 408})),
        ("a chunk longer than it says", chunked + b"3\r\nhello\r\n0\r\n\r\n", BAD),
        ("a chunk without its line's end", chunked + b"5\nhello\n0\n\n", BAD),
        ("chunks that are too large", chunked + _chunks(*[b"x" * 2**16] * 20), frozenset({413})),
        ("both lengths", start + length + b"Transfer-Encoding: chunked\r\n\r\n" + _chunks(fine), BAD),
        (
            "both lengths, turned round",
            start + b"Transfer-Encoding: chunked\r\n" + length + b"\r\n" + _chunks(fine),
            BAD,
        ),
        (
            "smuggled behind both",
            start + b"Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n" + smuggled,
            BAD,
        ),
        ("two lengths", start + length + b"Content-Length: 1\r\n\r\n" + fine, BAD),
        ("one length twice", start + length + length + b"\r\n" + fine, BAD),
        ("a list of lengths", start + b"Content-Length: 5, 5\r\n\r\nhello", BAD),
        ("a negative length", start + b"Content-Length: -1\r\n\r\n" + fine, BAD),
        ("a length with a sign", start + b"Content-Length: +5\r\n\r\nhello", BAD),
        ("a length that is no number", start + b"Content-Length: abc\r\n\r\n" + fine, BAD),
        ("a length in hex", start + b"Content-Length: 0x5\r\n\r\nhello", BAD),
        ("a length that overflows", start + b"Content-Length: " + b"9" * 30 + b"\r\n\r\nhello", BAD),
        ("a length of other digits", start + "Content-Length: ٥\r\n\r\nhello".encode(), BAD),
        ("an empty length", start + b"Content-Length: \r\n\r\nhello", BAD),
        ("a length that is too short", start + b"Content-Length: 5\r\n\r\n" + fine, BAD),
        ("no length", start + b"\r\n" + fine, BAD),
        ("a transfer encoding twice", start + b"Transfer-Encoding: chunked\r\n" * 2 + b"\r\n" + _chunks(fine), BAD),
        ("an unknown transfer encoding", start + b"Transfer-Encoding: rot13\r\n\r\n" + _chunks(fine), BAD),
        ("chunked and not last", start + b"Transfer-Encoding: chunked, gzip\r\n\r\n" + _chunks(fine), BAD),
        ("chunked with a tab", start + b"Transfer-Encoding:\tchunked\r\n\r\n" + _chunks(fine), EITHER),
        ("chunked with a control character", start + b"Transfer-Encoding: \x0bchunked\r\n\r\n" + _chunks(fine), BAD),
        ("chunked with a space before the colon", start + b"Transfer-Encoding : chunked\r\n\r\n" + _chunks(fine), BAD),
    ]:
        yield Hostile(f"framing: {name}", data, expected, may_close=expected != FINE, num_answers=2)


def _heads() -> Iterator[Hostile]:
    refused = frozenset({400, 404, 405, 431})
    for method in [
        "GET",
        "PUT",
        "DELETE",
        "PATCH",
        "HEAD",
        "OPTIONS",
        "TRACE",
        "CONNECT",
        "PROPFIND",
        "PURGE",
        "M-SEARCH",
    ]:
        yield Hostile(f"method {method}", head(method, COMPLETIONS), refused)
    for method in ["get", "GE T", "", "\0GET", "X" * 10_000, "GET\t", "FOO", "PRI", "G\u00cbT"]:
        yield Hostile(f"method {method[:20]!r}", head(method, "/health"), refused)
    for path in [
        "/../../etc/passwd",
        "/..%2f..%2fetc%2fpasswd",
        "/%2e%2e/%2e%2e/etc/passwd",
        "/v1/models/../../../etc/passwd",
        "/v1/models/%00",
        "/v1/models/%ff%fe",
        "/v1/models/%",
        "/v1/models/%zz",
        "/v1/models/" + "a" * 5000,
        "//evil.net/v1/models",
        "/v1//models",
        "/V1/MODELS",
        "/health/",
        "/health;x=1",
        "/metrics/../v1/chat/completions",
        "/\\..\\..\\windows",
        "/<script>alert(1)</script>",
        "/" + "a/" * 3000,
        "/?" + "a=b&" * 2000,
        "/%0d%0aX-Injected:%20yes",
        "*",
        "health",
        "http://",
        "http://[::1",
        "/\u00ff",
        "/\x7f",
    ]:
        yield Hostile(f"path {path[:40]!r}", head("GET", path), refused, may_close=True)
    yield Hostile("a path that is too long", head("GET", "/" + "a" * 100_000), frozenset({431}))
    for name, data, expected in [
        ("an absolute URI", head("GET", "http://evil.net/health"), FINE),
        ("an absolute URI of a file", head("GET", "file:///etc/passwd"), refused),
        ("a fragment", head("GET", "/health#x"), frozenset({200, 400})),
        ("HTTP/1.0", b"GET /health HTTP/1.0\r\n\r\n", FINE),
        ("HTTP/0.9", b"GET /health\r\n\r\n", refused | FINE),
        ("HTTP/2's preface", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", refused),
        ("HTTP/9.9", b"GET /health HTTP/9.9\r\nHost: x\r\n\r\n", refused),
        ("HTTP/1.1.1", b"GET /health HTTP/1.1.1\r\nHost: x\r\n\r\n", refused),
        ("HTTX", b"GET /health HTTX/1.1\r\nHost: x\r\n\r\n", refused),
        ("no host", b"GET /health HTTP/1.1\r\nConnection: close\r\n\r\n", refused),
        ("two hosts", head("GET", "/health", "Host: y"), refused),
        ("a strange host", head("GET", "/health", host="Host: \x01[::1"), frozenset({200, 400})),
        ("TLS", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(500), refused),
        ("SSH", b"SSH-2.0-OpenSSH_9.9\r\n", refused),
        ("SMTP", b"EHLO evil.net\r\nMAIL FROM:<a@b>\r\n", refused),
        ("redis", b"*1\r\n$8\r\nFLUSHALL\r\n", refused),
        ("random bytes", random.Random(2).randbytes(4000), refused),
        ("null bytes", bytes(4000), refused),
        ("line feeds alone", b"GET /health HTTP/1.1\nHost: x\nConnection: close\n\n", frozenset({200, 400})),
        ("carriage returns alone", b"GET /health HTTP/1.1\rHost: x\r\r", refused),
        ("a null byte in a header", head("GET", "/health", "X: a\0b"), refused),
        ("a carriage return in a header", head("GET", "/health", "X: a\rb"), refused),
        ("a header without a colon", head("GET", "/health", "nonsense"), refused),
        ("a header without a name", head("GET", "/health", ": x"), refused),
        ("a space in a header's name", head("GET", "/health", "X Y: z"), refused),
        ("a folded header", head("GET", "/health", "X: a", " b"), refused),
        ("a header that is not ASCII", head("GET", "/health", "X: \u00e9\u00ff"), FINE),
        ("a header's name that is not ASCII", head("GET", "/health", "X\u00e9: y"), refused),
        ("1000 headers", head("GET", "/health", *(f"X-{i}: y" for i in range(1000))), refused),
        ("a header 1000 times", head("GET", "/health", *["X: y"] * 1000), refused),
        ("a header of 100000 bytes", head("GET", "/health", "X: " + "y" * 100_000), frozenset({431})),
        ("a header's name of 100000 bytes", head("GET", "/health", "X" * 100_000 + ": y"), frozenset({400, 431})),
        ("headers of a megabyte", head("GET", "/health", *[f"X: {'y' * 8000}"] * 120), refused | FINE),
        ("headers without end", b"GET /health HTTP/1.1\r\n" + b"X: y\r\n" * 200_000, refused),
        ("blank lines without end", b"\r\n" * 200_000, refused),
        ("an unknown expectation", post(COMPLETIONS, b"{}", "Expect: miracles"), frozenset({417})),
        ("a websocket", head("GET", "/v1/models", "Upgrade: websocket", "Sec-WebSocket-Key: x"), FINE),
        ("an upgrade to HTTP/2", head("GET", "/v1/models", "Upgrade: h2c", "HTTP2-Settings: x"), FINE),
        ("a body of a GET", head("GET", "/v1/models", "Content-Length: 5") + b"hello", FINE),
        ("internal headers", post(
            COMPLETIONS, _json(_completion()), "X-Baton-Tenant: a", "X-Baton-Lease: 1", "X-Baton-Attempt: 9",
            "X-Baton-Worker: 10.0.0.1:7001", "X-Forwarded-For: 127.0.0.1", "X-HTTP-Method-Override: DELETE",
            "X-Original-URL: /admin", "Proxy-Connection: keep-alive", "Forwarded: for=127.0.0.1",
        ), FINE),
    ]:  # fmt: skip
        bad = expected != FINE
        yield Hostile(f"head: {name}", data, expected, may_close=bad, num_answers=2, half_close=bad)


def _keys() -> Iterator[Hostile]:
    for authorization in [
        None,
        "",
        "Bearer",
        "Bearer ",
        "bearer",
        "Basic azpr",
        "Bearer wrong",
        "Bearer " + "k" * 8000,
        "Bearer k k",
        "Bearer\u00a0k",
        "Bearer \u00e9\u00ff",
        "Bearer ' OR '1'='1",
        "Bearer null",
        "Bearer *",
        "Bearer 8254c329a92850f6d539dd376f4816ee2764517da5e0235514af433164480d7a",
        "Digest username=k",
        "k",
        "Negotiate YII=",
    ]:
        lines = [] if authorization is None else [f"Authorization: {authorization}"]
        data = post(COMPLETIONS, _json(_completion()), *lines)
        yield Hostile(f"key {str(authorization)[:30]!r}", data, frozenset({401}), keyed=True)
    for name, lines in {
        "in two headers": ["Authorization: Bearer k", "Authorization: Bearer x"],
        "of nobody in another header": ["X-Api-Key: x"],
        "in two headers that differ": ["Authorization: Bearer k", "X-Api-Key: x"],
        "in a cookie": ["Cookie: key=k"],
    }.items():
        data = post(COMPLETIONS, _json(_completion()), *lines)
        yield Hostile(f"key {name}", data, frozenset({400, 401}), keyed=True)
    yield Hostile(
        "key in the query", post(COMPLETIONS + "?api_key=k", _json(_completion())), frozenset({401}), keyed=True
    )
    yield Hostile(
        "key too long", post(COMPLETIONS, b"{}", "Authorization: Bearer " + "k" * 10**5), frozenset({431}), keyed=True
    )


TABLES: Final[dict[str, tuple[Hostile, ...]]] = {
    "bodies": tuple(_bodies()),
    "sizes": tuple(_sizes()),
    "framing": tuple(_framing()),
    "heads": tuple(_heads()),
    "keys": tuple(_keys()),
}
