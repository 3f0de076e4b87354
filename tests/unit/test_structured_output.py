"""What the gateway makes a grammar of, what it refuses, and how long it lets anybody wait for either."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jsonschema
import pytest
from llguidance import LLMatcher, LLTokenizer

from common.runtime.grammar_limits import grammar_limits
from gateway.intake import grammar_checks
from gateway.intake.grammar_checks import checked
from gateway.intake.schemas import CompletionRequest, parse
from gateway.intake.structured_output import compile_grammar, grammar_of
from gateway.web.http_errors import ApiError

A = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
NAMES = {"type": "object", "additionalProperties": {"type": "integer"}}


def takes(schema: dict[str, Any], text: str) -> bool:
    """Whether the text, byte after byte, is a whole answer that follows the schema."""
    grammar, error = compile_grammar("json_schema", json.dumps(schema))
    assert not error
    matcher = LLMatcher(LLTokenizer("byte"), grammar, log_level=0, limits=grammar_limits())
    return matcher.consume_tokens(list(text.encode())) and matcher.is_accepting()


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        (A, r'{"a":1,"\u0061":"x"}'),
        (A, '{"a":1,"a":"x"}'),
        (A | {"additionalProperties": {"type": "string"}}, r'{"a":1,"\u0061":"x"}'),
        (A | {"patternProperties": {"^b": {"type": "string"}}}, r'{"a":1,"\u0061":"x"}'),
        (A | {"patternProperties": {"^b": {"type": "string"}}}, r'{"a":1,"\u0062":5}'),
        (A | {"patternProperties": {"^a": {}}}, '{"a":1,"a":"x"}'),
        (A | {"x-guidance": {"whitespace_pattern": "x"}}, '{x"a":1}'),
        (A | {"x-guidance": {"key_separator": "="}}, '{"a"=1}'),
        (A | {"x-guidance": {"item_separator": ";"}}, '{"a":1;"b":2}'),
        (A | {"x-guidance": {"json_allowed_escapes": 'u"\\'}}, r'{"a":1,"\u0061":"x"}'),
        (A | {"x-guidance": {"json_allow_general_unicode_escapes": True}}, r'{"a":1,"\u0061":"x"}'),
    ],
)
def test_what_does_not_validate_is_not_taken(schema: dict[str, Any], text: str) -> None:
    try:
        wrong = not jsonschema.Draft202012Validator(schema).is_valid(json.loads(text))
    except ValueError:
        wrong = True
    assert wrong
    assert not takes(schema, text)


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        (A, '{"a": 1,\n  "é\\"\\\\u0061 b": {"日": "\\n\\u00e9"}}'.replace("\\u00e9", "é")),
        (NAMES | {"minProperties": 1}, '{"a":1}'),
        (A | {"minProperties": 2}, '{"a":1,"b":2}'),
        ({"type": "number", "exclusiveMinimum": 0, "maximum": 1}, "0.5"),
        ({"type": "integer", "exclusiveMinimum": 0, "maximum": 1.5}, "1"),
        ({"const": "a\b\f\n\r\tb"}, r'"a\b\f\n\r\tb"'),
        ({"type": "object", "properties": {"\x01\x7f": {"const": 5}}}, '{"\\u0001\x7f":5}'),
        ({"type": "string", "pattern": r"^[^\x00-\x1f\\]+\\x01$"}, '"é\\\\x01"'),
        ({"type": "object", "properties": {"enum": {"const": "\n"}, "const": {}}}, r'{"enum":"\n","const":["a"]}'),
        ({"oneOf": [{"type": "integer", "multipleOf": 100_000}, {"type": "string"}]}, "300000"),
        ({"type": "string", "format": "password"}, '"x"'),
        ({"type": "string", "format": "json-pointer", "pattern": "^a+$"}, '"aa"'),
        ({"type": "object", "properties": {"format": {"format": "regex"}}, "required": ["format"]}, '{"format":"é"}'),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"enum": [{"format": "no such"}]}}}, '{"format":"no such"}'),
        (NAMES | {"propertyNames": {"type": "string"}}, '{"a":1}'),
        ({"items": NAMES | {"propertyNames": {}}, "propertyNames": True}, '[{"a":1}]'),
        ({"type": "object", "properties": {"propertyNames": {"const": {}}}}, '{"propertyNames":{}}'),
        ({"type": "array", "uniqueItems": False}, "[1,1]"),
    ],
)
def test_what_validates_is_taken(schema: dict[str, Any], text: str) -> None:
    jsonschema.validate(json.loads(text), schema)
    assert takes(schema, text)


@pytest.mark.parametrize(
    "name", ["date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"]
)
def test_formats_that_the_library_knows_are_kept(name: str) -> None:
    """A string of another kind is not taken, whatever stands beside it."""
    assert not takes({"type": "string", "format": name}, '"<no such thing>"')
    assert not takes({"items": {"type": "string", "format": name}, "x": {"format": "password"}}, '["<no such thing>"]')


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"type": "object", "minProperties": 2}, "minProperties"),
        (A | {"minProperties": 3}, "minProperties"),
        ({"$ref": "#/default", "default": NAMES | {"minProperties": 2}}, "minProperties"),
        ({"items": {"$ref": "#/examples/0"}, "examples": [NAMES | {"minProperties": 2}]}, "minProperties"),
        ({"type": "array", "items": {"anyOf": [NAMES | {"minProperties": 2}]}}, "minProperties"),
        ({"type": "object", "properties": {"enum": NAMES | {"minProperties": 2}}}, "minProperties"),
        ({"$ref": "#/mine", "mine": NAMES | {"minProperties": 2}}, "minProperties"),
        (A | {"x-guidance": {"lenient": True}, "dependentRequired": {"a": ["b"]}}, "dependentRequired"),
        ({"x-guidance": {"coerce_one_of": True}, "oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf"),
        (NAMES | {"propertyNames": {"pattern": "^a"}}, "propertyNames"),
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"const": "a\x01b"}, "control character"),
        ({"enum": ["c", {"b": ["a\x7fb"]}]}, "control character"),
        ({"type": "string", "pattern": r"^a\x01b$"}, "control character"),
        ({"type": "string", "pattern": "^a\x01b$"}, "control character"),
        ({"type": "string", "pattern": r"^a[\x{1}]b$"}, "control character"),
        ({"type": "object", "patternProperties": {r"^\ab": {}}}, "control character"),
        ({"type": "array", "prefixItems": [{"type": "integer"}], "items": {}, "additionalItems": False}, "versions"),
        ({"type": "number", "exclusiveMinimum": 0, "maximum": 0.5}, "exclusiveMinimum"),
        ({"type": ["number", "null"], "minimum": -1.5, "maximum": -1, "exclusiveMaximum": True}, "exclusiveMaximum"),
        ({"type": "number", "minimum": 10**400, "exclusiveMaximum": 1.5, "exclusiveMinimum": 2}, "number"),
        ({"type": "integer", "multipleOf": 9_999_991}, "multipleOf"),
        ({"allOf": [{"multipleOf": 997}, {"multipleOf": 991}], "type": "integer"}, "multipleOf"),
        ({"type": "number", "multipleOf": 1.00003}, "multipleOf"),
        ({"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(600)}}, "nothing can follow"),
        ({"type": "string", "pattern": r"^[\x00-\x03]+$"}, "nothing can follow"),
        (
            {"allOf": [{"anyOf": [A | {"properties": {f"a{i}{j}": A}} for j in range(4)]} for i in range(6)]},
            "too big",
        ),
    ],
)
def test_what_could_not_be_kept_is_refused(schema: dict[str, Any], reason: str) -> None:
    _, error = compile_grammar("json_schema", json.dumps(schema))
    assert reason in error


CHAINS = """
def schema(link):
    defs, text = {"0": {"type": "string"}}, ""
    while len(text) < 64_000:
        for _ in range(1 if len(str(link({}))) > 500 else 20):
            defs[str(len(defs))] = link({"$ref": f"#/$defs/{len(defs) - 1}"})
        text = json.dumps({"$defs": defs, "$ref": f"#/$defs/{len(defs) - 1}"}, separators=(",", ":"))
    return "json_schema", text

def nested(ref, key):
    for _ in range(90 if key == "items" else 50):  # the library reads 127 levels of brackets
        ref = {key: ref if key == "items" else [ref]}
    return ref

def rules(name):
    lines = ["start: " + name(0)]
    while sum(map(len, lines)) + len(lines) < 64_000:
        lines.append(f"{name(len(lines) - 1)}: {name(len(lines))}")
    return "grammar", "\\n".join([*lines, name(len(lines) - 1) + ': "a"'])

CHAINS = {
    "items": lambda: schema(lambda ref: {"items": ref}),
    "oneOf": lambda: schema(lambda ref: {"oneOf": [ref]}),
    "allOf": lambda: schema(lambda ref: {"allOf": [ref]}),
    "anyOf": lambda: schema(lambda ref: {"anyOf": [ref, {}]}),
    "properties": lambda: schema(lambda ref: {"properties": {"a": ref}}),
    "additionalProperties": lambda: schema(lambda ref: {"additionalProperties": ref}),
    "prefixItems": lambda: schema(lambda ref: {"prefixItems": [ref]}),
    "nested items": lambda: schema(lambda ref: nested(ref, "items")),
    "nested anyOf": lambda: schema(lambda ref: nested(ref, "anyOf")),
    "nested allOf": lambda: schema(lambda ref: nested(ref, "allOf")),
    "rules": lambda: rules(lambda number: f"r{number}"),
    "terminals": lambda: rules(lambda number: f"R{number}"),
}
"""
"""A program's part: chains of references as long as a request may have."""


@pytest.fixture(scope="module")
def ends_of_chains() -> dict[str, tuple[int, str]]:
    """For each chain how a process ended that followed it, and what it said."""
    program = """
import asyncio, json, os, sys, tempfile, traceback
from llguidance import LLTokenizer
from common.engine.grammar import Grammars, GrammarState
from common.engine.masks import Masks
from gateway.intake import grammar_checks, structured_output
"""
    program += CHAINS
    program += """
async def follow(chain):
    kind, text = CHAINS[chain]()
    assert 60_000 < len(text) < 65_536, len(text)
    grammar, error = await asyncio.wrap_future(
        grammar_checks._THREADS.submit(lambda: structured_output.compile_grammar(kind, text))
    )
    print("refused" if error else "taken", error[:200], file=sys.stderr)
    if not error:
        told = asyncio.get_running_loop().create_future()
        Masks(Grammars(LLTokenizer("byte"))).ask(grammar, GrammarState(), [], 0, told.set_result)
        print(await told, file=sys.stderr)

def end(chain):
    with tempfile.TemporaryFile("w+") as said:
        if (child := os.fork()) == 0:
            os.dup2(said.fileno(), 2)
            code = 1
            try:
                asyncio.run(follow(chain))
                code = 0
            except BaseException:
                traceback.print_exc()
            sys.stderr.flush()
            os._exit(code)
        _, status = os.waitpid(child, 0)
        said.seek(0)
        return os.waitstatus_to_exitcode(status), said.read()[-500:]

print(json.dumps({chain: end(chain) for chain in CHAINS}))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=240, check=True)
    ends: dict[str, tuple[int, str]] = json.loads(done.stdout)
    return ends


@pytest.mark.processes
@pytest.mark.parametrize("chain", re.findall(r'"([\w ]+)": lambda: ', CHAINS))
def test_a_long_chain_of_references_ends_no_process(chain: str, ends_of_chains: dict[str, tuple[int, str]]) -> None:
    """The library follows one by recursion, in the gateway and in workers."""
    code, said = ends_of_chains[chain]
    assert code == 0, (code, said)


async def test_a_json_object_may_have_a_schema() -> None:
    """In the way of llama.cpp, Fireworks and others."""

    async def grammar(**fields: Any) -> str | None:
        return await grammar_of(parse(CompletionRequest, {"prompt": "a"} | fields))

    formatted: dict[str, Any] = {"type": "json_object"}
    empty: list[dict[str, Any] | None] = [None, {}]
    for schema in (A, json.dumps(A)):
        assert await grammar(response_format=formatted | {"schema": schema}) == await grammar(guided_json=A)
    for nothing in empty:
        assert await grammar(response_format=formatted | {"schema": nothing}) == await grammar(
            response_format=formatted
        )
    for other in ({"type": "text"}, {"type": "json_schema", "json_schema": {"name": "a", "schema": A}}):
        with pytest.raises(ApiError) as refused:
            await grammar(response_format=other | {"schema": A})
        assert refused.value.param == "response_format.schema"


def test_a_schema_within_a_grammar_has_the_bounds_of_others() -> None:
    _, error = compile_grammar("grammar", 'start: "x" | %json {"type": "integer", "multipleOf": 9999991}')
    assert "multipleOf" in error
    assert compile_grammar("grammar", 'start: "x" | %json {"type": "integer", "multipleOf": 7}')[1] == ""


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (
            "json_schema",
            json.dumps({"type": "object", "properties": {f"p{i}": A for i in range(400)}}),
        ),
        ("json_schema", json.dumps({"enum": [f"value {i}" for i in range(4000)]})),
        ("choice", json.dumps(["a\x7fb", "c"])),
        ("choice", json.dumps(["x" * 60_000])),
        ("grammar", "start: <|im_start|> <[151657]> /[a-z]+/"),
        ("grammar", '?start: select\n\n?select: "SELECT " name " FROM " name\n\nname: /[a-z]+/\n'),
        ("grammar", 'start[capture]: "a"'),
    ],
    ids=["properties", "values", "delete", "long", "tokens", "inlined start", "captured start"],
)
def test_what_is_large_or_odd_and_can_be_followed(kind: str, text: str) -> None:
    assert compile_grammar(kind, text)[1] == ""


class Slow:
    """A compilation that takes until it is let go, if need be, of whatever text it is given."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.num_begun = 0

    def __call__(self, number: int) -> tuple[str, str]:
        self.num_begun += 1
        assert self.go.wait(60)
        return "grammar", ""


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Any:
    """With threads of its own, as nobody else's may be busy afterwards."""
    work = Slow()
    with ThreadPoolExecutor(2) as threads:
        monkeypatch.setattr(grammar_checks, "_THREADS", threads)
        monkeypatch.setattr(grammar_checks, "_checks", {})
        yield work
        work.go.set()


async def until_begun(work: Slow, count: int) -> None:
    async with asyncio.timeout(30):
        while work.num_begun < count:
            await asyncio.sleep(0.01)


def check(work: Slow, number: int) -> asyncio.Task[str]:
    return asyncio.create_task(checked("guided_json", work, number))


async def refusal(work: Slow, number: int) -> ApiError:
    with pytest.raises(ApiError) as caught:
        await checked("guided_json", work, number)
    return caught.value


async def test_what_takes_too_long_to_check_may_come_back(slow: Slow, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that does something else takes longer for the same: that is no fault of the request."""
    monkeypatch.setattr(grammar_checks, "COMPILE_TIMEOUT_S", 0.05)
    error = await refusal(slow, 0)
    assert (error.status, error.code, error.param) == (429, "capacity", "guided_json")
    assert "0.05 s" in error.message
    assert error.response().headers["Retry-After"] == "1"
    monkeypatch.setattr(grammar_checks, "COMPILE_TIMEOUT_S", 60)
    again = check(slow, 0)
    slow.go.set()
    assert await again == "grammar"
    assert slow.num_begun == 1, "what took too long went on, and nobody did it again"


async def test_the_time_to_check_begins_with_the_check(slow: Slow, monkeypatch: pytest.MonkeyPatch) -> None:
    """However long those before it take."""
    monkeypatch.setattr(grammar_checks, "MAX_WAIT_S", 60)
    monkeypatch.setattr(grammar_checks, "COMPILE_TIMEOUT_S", 1)
    before = [asyncio.create_task(refusal(slow, number)) for number in range(2)]
    await until_begun(slow, 2)
    waiting = asyncio.create_task(grammar_of(parse(CompletionRequest, {"prompt": "a", "guided_regex": "[0-9]"})))
    assert [error.status for error in await asyncio.gather(*before)] == [429, 429]
    assert not waiting.done()
    slow.go.set()
    assert await asyncio.wait_for(waiting, 30)


async def test_who_waits_in_vain_may_come_back(slow: Slow, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_checks, "COMPILE_TIMEOUT_S", 60)
    monkeypatch.setattr(grammar_checks, "MAX_WAIT_S", 60)
    before = [check(slow, number) for number in range(2)]
    await until_begun(slow, 2)
    monkeypatch.setattr(grammar_checks, "MAX_WAIT_S", 0.05)
    error = await refusal(slow, 2)
    assert (error.status, error.code) == (429, "capacity")
    assert error.response().headers["Retry-After"] == "1"
    monkeypatch.setattr(grammar_checks, "MAX_WAIT_S", 60)
    slow.go.set()
    assert await asyncio.gather(*before) == ["grammar", "grammar"]
    assert await checked("guided_json", slow, 3) == "grammar"
    assert slow.num_begun == 3, "nobody does the work of those that have left"


async def test_only_so_many_wait(slow: Slow, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_checks, "MAX_WAITING", 5)
    monkeypatch.setattr(grammar_checks, "COMPILE_TIMEOUT_S", 60)
    monkeypatch.setattr(grammar_checks, "MAX_WAIT_S", 60)
    running = [check(slow, number) for number in range(2)]
    await until_begun(slow, 2)
    waiting = [check(slow, number) for number in range(2, 7)]
    await asyncio.sleep(0)
    assert (await refusal(slow, 7)).status == 429
    waiting[0].cancel()
    await asyncio.gather(waiting[0], return_exceptions=True)
    running.append(check(slow, 7))
    await asyncio.sleep(0)
    assert not running[-1].done()
    slow.go.set()
    assert await asyncio.gather(*running, *waiting[1:]) == ["grammar"] * 7
    assert slow.num_begun == 7


async def test_one_text_is_checked_once_for_however_many(slow: Slow, monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch job sends hundreds of requests with one schema, and all connections may be read in one turn."""
    monkeypatch.setattr(grammar_checks, "MAX_WAITING", 1)
    monkeypatch.setattr(grammar_checks, "COMPILE_TIMEOUT_S", 60)
    monkeypatch.setattr(grammar_checks, "MAX_WAIT_S", 60)
    at_once = [check(slow, 0) for _ in range(200)]
    await until_begun(slow, 1)
    at_once[0].cancel()
    slow.go.set()
    _, *others = await asyncio.gather(*at_once, return_exceptions=True)
    assert others == ["grammar"] * 199
    assert await asyncio.gather(*(checked("guided_json", slow, 0) for _ in range(200))) == ["grammar"] * 200
    assert slow.num_begun == 1


async def test_what_failed_by_no_fault_of_the_text_is_checked_again() -> None:
    errors = [MemoryError("no memory")]

    def compile_it(number: int) -> tuple[str, str]:
        if errors:
            raise errors.pop()
        return "grammar", ""

    with pytest.raises(MemoryError):
        await checked("guided_json", compile_it, 0)
    assert await checked("guided_json", compile_it, 0) == "grammar"


async def test_what_failed_while_nobody_waited_is_checked_again(slow: Slow, monkeypatch: pytest.MonkeyPatch) -> None:
    errors = [MemoryError("no memory")]

    def compile_it(number: int) -> tuple[str, str]:
        slow(number)
        if errors:
            raise errors.pop()
        return "grammar", ""

    monkeypatch.setattr(grammar_checks, "COMPILE_TIMEOUT_S", 0.05)
    with pytest.raises(ApiError):
        await checked("guided_json", compile_it, 0)
    (failing,) = grammar_checks._checks.values()
    slow.go.set()
    with pytest.raises(MemoryError):
        await failing.ended
    monkeypatch.setattr(grammar_checks, "COMPILE_TIMEOUT_S", 60)
    assert await checked("guided_json", compile_it, 0) == "grammar"


async def test_only_the_last_outcomes_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_checks, "_MAX_KEPT", 3)
    monkeypatch.setattr(grammar_checks, "_checks", {})
    made: list[int] = []

    def compile_it(number: int) -> tuple[str, str]:
        made.append(number)
        return f"grammar {number}", ""

    for number in (0, 1, 2, 0, 3, 0, 1):
        assert await checked("guided_json", compile_it, number) == f"grammar {number}"
    assert made == [0, 1, 2, 3, 1], "what was asked for long ago is made again"
