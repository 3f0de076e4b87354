"""Structured output: JSON schemas, regular expressions, choices and grammars, each compiled into one grammar for
workers.

The constraint comes from OpenAI's `response_format`, or from vLLM's equivalent `guided_*` and `structured_outputs`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable

from llguidance import LLMatcher, LLTokenizer
from llguidance.gbnf_to_lark import gbnf_to_lark

from common.contract.sampling import MAX_GRAMMAR_CHARS
from common.runtime.grammar_limits import grammar_limits
from gateway.intake.expanded_length import MAX_EXPANDED, expanded_grammar_length, expanded_length
from gateway.intake.field_types import MAX_TEXT_CHARS
from gateway.intake.grammar_checks import checked
from gateway.intake.json_schemas import refuse_unenforceable, without_what_restricts_nothing
from gateway.intake.schemas import SamplingFields, StructuredOutputs
from gateway.web.http_errors import invalid

_WHITESPACE = r"( |\n {0,32})"
"""White space between the parts of a JSON text: none, or enough to indent it. It is bounded, because some models would
generate white space without end."""
_ESCAPES = 'nrbtf\\"'
"""Escapes allowed in JSON strings. Numeric escapes are excluded, so that each name has one spelling and names that are
already used can be told from others."""
_BYTES = LLTokenizer("byte")
"""Sufficient to check whether a grammar can be followed."""
_NAMES_TOKENS = re.compile("unknown special token|Token range")
"""Errors that only the model's own tokenizer could avoid."""
_INLINE_SCHEMA = re.compile(r"%json\s*(?=\{)")
_LARK_BEGINNING = re.compile(r"^[^\S\n]*(?:%llguidance\b|[?!]?start\s*(?:\[[^\]\n]*\]\s*)?:)", re.MULTILINE)
"""Tells Lark's notation, in which every grammar has a rule `start`, from GBNF, in which none may have one."""
_GBNF_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|.)", re.DOTALL)
_MAX_GBNF_RULES = 500
"""The library's conversion takes time quadratic in the number of rules."""
ANY_OBJECT = '{"type": "object"}'
"""The JSON schema of any object."""


async def grammar_of(form: SamplingFields) -> str | None:
    """The grammar of an answer to `form`; None if unconstrained.

    Raises `ApiError`: a 400 that names the field, or a 429.
    """
    wanted = _wanted(form)
    if not wanted:
        return None
    (param, kind, text), *more = wanted
    if more:
        raise invalid(more[0][0], f"{param} and {more[0][0]}: an answer follows one of them")
    if len(text) > MAX_TEXT_CHARS:
        raise invalid(param, f"{param}: {len(text)} characters, at most {MAX_TEXT_CHARS}")
    refuse_contradictions(form, param)
    return await checked(param, compile_grammar, kind, text)


def refuse_contradictions(form: SamplingFields, param: str) -> None:
    """Raise `ApiError`, a 400, for fields that contradict a grammar about where an answer may end."""
    if form.min_tokens:
        raise invalid("min_tokens", f"min_tokens does not go together with {param}, which says where an answer may end")
    if form.ignore_eos:
        raise invalid("ignore_eos", f"ignore_eos does not go together with {param}, which says where an answer ends")


def _wanted(form: SamplingFields) -> list[tuple[str, str, str]]:
    """(field, kind of grammar, its text) for each constraint in the form."""
    wanted = []
    given = form.response_format
    if given is not None and given.schema_ is not None and given.type != "json_object":
        raise invalid("response_format.schema", "response_format.schema goes with the type json_object")
    if given is not None and given.json_schema is not None and given.type != "json_schema":
        raise invalid("response_format.json_schema", "response_format.json_schema goes with the type json_schema")
    if given is not None and given.type == "json_object":
        if given.schema_ is None or given.schema_ == "{}":
            wanted.append(("response_format", "json_schema", ANY_OBJECT))
        else:
            wanted.append(("response_format.schema", "json_schema", given.schema_))
    if given is not None and given.type == "json_schema":
        if given.json_schema is None or given.json_schema.schema_ is None:
            raise invalid(
                "response_format.json_schema", "response_format of type json_schema needs a json_schema.schema"
            )
        wanted.append(("response_format.json_schema", "json_schema", given.json_schema.schema_))
    vllm = form.structured_outputs or StructuredOutputs()
    if vllm.json_object:
        wanted.append(("structured_outputs.json_object", "json_schema", ANY_OBJECT))
    for param, kind, value in (
        ("guided_json", "json_schema", form.guided_json),
        ("guided_regex", "regex", form.guided_regex),
        ("guided_choice", "choice", form.guided_choice),
        ("guided_grammar", "grammar", form.guided_grammar),
        ("structured_outputs.json", "json_schema", vllm.json_schema),
        ("structured_outputs.regex", "regex", vllm.regex),
        ("structured_outputs.choice", "choice", vllm.choice),
        ("structured_outputs.grammar", "grammar", vllm.grammar),
    ):
        if value is not None:
            wanted.append((param, kind, value if isinstance(value, str) else json.dumps(value)))
    return wanted


def compile_grammar(kind: str, text: str) -> tuple[str, str]:
    """The grammar of a text, and an error message or "". `kind` is "json_schema", "regex", "choice" or "grammar"."""
    return guarded(lambda: _compile(kind, text))


def guarded(compile_it: Callable[[], tuple[str, str]]) -> tuple[str, str]:
    """Call `compile_it`; turn exceptions of the library into the error message that it returns."""
    try:
        return compile_it()
    except (ValueError, RecursionError) as error:
        return "", str(error)
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # the library's exception, which cannot be imported
            raise
        return "", "it cannot be checked"


def _compile(kind: str, text: str) -> tuple[str, str]:
    if kind == "choice":
        # JSON does not escape U+007F, but the library requires it escaped.
        names = [json.dumps(each, ensure_ascii=False).replace("\x7f", "\\u007f") for each in json.loads(text)]
        grammar = LLMatcher.grammar_from_lark("start: " + " | ".join(names))
    elif kind == "json_schema":
        grammar = json_grammar(text)
    elif kind == "regex":
        _refuse_long(expanded_length(text))
        grammar = LLMatcher.grammar_from_regex(text)
    else:
        grammar = LLMatcher.grammar_from_lark(_lark(text))
        _refuse_long(expanded_grammar_length(grammar))
        for inline in _INLINE_SCHEMA.finditer(grammar):
            refuse_unenforceable(json.JSONDecoder().raw_decode(grammar, inline.end())[0])
    return validated(grammar)


def _lark(text: str) -> str:
    """A grammar in Lark's notation, converted from GBNF if need be. Raises `ValueError`.

    The library's `grammar_from` does the same, but looks for Lark's notation in time quadratic in the blank lines.
    """
    if _LARK_BEGINNING.search(text):
        return text
    if text.count("::=") > _MAX_GBNF_RULES:
        raise ValueError(f"more than {_MAX_GBNF_RULES} rules in GBNF")
    try:
        return gbnf_to_lark(_GBNF_ESCAPE.sub(_plain, text))
    except Exception as error:
        raise ValueError(f"neither Lark's notation nor GBNF: {error}") from error


def _plain(escape: re.Match[str]) -> str:
    """A numeric escape of GBNF as its character, since the library's conversion loses leading zeros of them; other
    escapes as they are."""
    code = int(escape[1] or escape[2] or "d800", 16)
    if code > 0x10FFFF or 0xD800 <= code < 0xE000:
        return escape[0]
    return f"\\x{code:02x}" if code < 128 else chr(code)


def _refuse_long(length: int) -> None:
    if length > MAX_EXPANDED:
        raise ValueError(f"written out it has more than {MAX_EXPANDED} characters")


def json_grammar(schema: str) -> str:
    """The grammar of a JSON schema, which must be an object. Raises `ValueError`."""
    parsed = json.loads(schema)
    if not isinstance(parsed, dict):
        raise ValueError("a schema is a JSON object")
    refuse_unenforceable(parsed)
    return LLMatcher.grammar_from_json_schema(
        without_what_restricts_nothing(parsed, schema),
        overrides={  # every option that a schema could set under `x-guidance`
            "whitespace_pattern": _WHITESPACE,
            "item_separator": ",",
            "key_separator": ":",
            "coerce_one_of": False,
            "lenient": False,
            "json_allowed_escapes": _ESCAPES,
            "json_allow_general_unicode_escapes": False,
        },
    )


def validated(grammar: str) -> tuple[str, str]:
    """The grammar, and an error message or ""."""
    if len(grammar) > MAX_GRAMMAR_CHARS:
        return "", f"{len(grammar)} characters as a grammar, at most {MAX_GRAMMAR_CHARS}"
    is_error, messages = LLMatcher.validate_grammar_with_warnings(grammar, limits=grammar_limits())
    return grammar, messages[0] if is_error else _beginning_error(grammar)


def may_begin_with(char: str, grammar: str) -> bool:
    """Whether a text that follows a grammar may begin with an ASCII character. True also for a grammar that cannot be
    followed here, because it names tokens of the model."""
    matcher = LLMatcher(_BYTES, grammar, log_level=0, limits=grammar_limits())
    return matcher.is_error() or matcher.try_consume_tokens(_BYTES.tokenize_str(char)) == 1


def _beginning_error(grammar: str) -> str:
    """Why no text can follow the grammar, checked at its beginning and after all that it forces there; "" if one
    can."""
    matcher = LLMatcher(_BYTES, grammar, log_level=0, limits=grammar_limits())
    if _NAMES_TOKENS.search(matcher.get_error()):
        return ""  # the grammar names tokens of the model, which workers know
    matcher.compute_bitmask()
    matcher.consume_tokens(matcher.compute_ff_tokens())
    matcher.compute_bitmask()
    return f"nothing can follow it: {matcher.get_error().splitlines()[0]}" if matcher.is_error() else ""
