"""Grammars of calls that are required: whatever a model chooses among the tokens that remain is a valid call."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import pytest
from gateway_fixtures import EOS, MESSAGES, byte_level_backend, wrap
from llguidance import LLMatcher, LLTokenizer
from tool_models import TEMPLATES, TOOLS, WEATHER, backend, follows_weather, tool_tokenizer

from common.runtime.grammar_limits import grammar_limits
from gateway.intake.schemas import ChatRequest, parse
from gateway.intake.structured_output import compile_grammar
from gateway.intake.tool_grammar import chat_grammar, usable_tools
from gateway.serving.generation import Delta
from gateway.text.answer_parts import AnswerParts
from gateway.text.choice_text import ChoiceText
from gateway.text.dialect import Dialect, recognised
from gateway.text.stop_strings import StopTables
from gateway.web.http_errors import ApiError

NAMED = {"type": "function", "function": {"name": "get_weather"}}


@pytest.fixture(scope="module")
def library_tokenizer() -> LLTokenizer:
    return LLTokenizer(backend().to_str(), n_vocab=backend().get_vocab_size(), eos_token=[EOS])


def drawn(matcher: LLMatcher, seed: int, most: int = 1500) -> tuple[list[int], bool]:
    """Tokens chosen blindly among those that remain, and whether the grammar let them end."""
    draw, tokens = random.Random(seed), []
    for _ in range(most):
        bits = matcher.compute_bitmask()
        allowed = [token for token in range(backend().get_vocab_size()) if bits[token // 8] >> (token % 8) & 1]
        assert allowed, matcher.get_error()
        closing = [token for token in allowed if token in CLOSING] if draw.random() < 0.1 else []
        tokens.append(draw.choice(closing or allowed))
        if tokens[-1] == EOS:
            return tokens, True
        assert matcher.consume_token(tokens[-1]), matcher.get_error()
    return tokens, False


CLOSING = [backend().token_to_id("</think>")]
"""Tokens that are chosen now and then: among hundreds, chance would seldom hit on them."""


def answer_to(form: ChatRequest, dialect: Dialect, prompt: str, tokens: list[int]) -> tuple[str, str, list[Any], str]:
    """Reasoning, text, calls and the reason for the end, as the client gets them."""
    plan = dialect.plan(prompt, [tool.function.name for tool in usable_tools(form)], formatted=True)
    assert plan is not None
    parts = AnswerParts(ChoiceText(0, plan.decoder, StopTables(()), 0), plan)
    pieces = parts.pieces(Delta(choice=0, token_ids=tuple(tokens), logprobs=None, finish_reason="stop"))
    calls: list[Any] = []
    for piece in pieces:
        if piece.call is not None and piece.call.id is not None:
            calls.append([piece.call.name, ""])
        elif piece.call is not None:
            calls[-1][1] += piece.call.arguments
    reasoning, text = ("".join(getattr(piece, name) for piece in pieces) for name in ("reasoning", "text"))
    return reasoning, text, calls, pieces[-1].finish_reason or ""


async def walks(
    body: dict[str, Any], template: str, library: LLTokenizer, count: int = 25
) -> list[tuple[str, str, list[Any], str]]:
    dialect = Dialect.of(tool_tokenizer(template))
    form = parse(ChatRequest, {"messages": MESSAGES} | body)
    prompt = dialect.tokenizer.render_chat(MESSAGES)
    grammar = await chat_grammar(form, dialect, prompt)
    assert grammar is not None
    answers = []
    for seed in range(count):
        matcher = LLMatcher(library, grammar, log_level=0, limits=grammar_limits())
        assert not matcher.get_error()
        tokens, ended = drawn(matcher, seed)
        if ended:
            answers.append(answer_to(form, dialect, prompt, tokens))
    assert len(answers) > count * 0.7
    return answers


def check_call(name: str, arguments: str) -> None:
    parsed = json.loads(arguments)
    assert follows_weather(parsed) if name == "get_weather" else (name, parsed) == ("is-noon", {})


@pytest.mark.parametrize("template", [name for name in TEMPLATES if "thinking" not in name])
async def test_a_required_call_is_valid_in_each_format(template: str, library_tokenizer: LLTokenizer) -> None:
    """The reasoning that a model may write first is free."""
    counts = set()
    for _, text, calls, finish_reason in await walks(
        {"tools": TOOLS, "tool_choice": "required"}, template, library_tokenizer
    ):
        assert (text, finish_reason) == ("", "tool_calls")
        for name, arguments in calls:
            check_call(name, arguments)
        counts.add(len(calls))
    assert counts == {1} if template == "llama3" else max(counts) > 1, "a Llama says one call in a message"


@pytest.mark.parametrize("template", ["hermes", "llama3", "mistral", "mistral named"])
@pytest.mark.parametrize("named", [True, False])
async def test_one_call(template: str, named: bool, library_tokenizer: LLTokenizer) -> None:
    body: dict[str, Any] = {"tools": TOOLS, "tool_choice": NAMED if named else "required"}
    if not named:
        body["parallel_tool_calls"] = False
    for _, text, calls, finish_reason in await walks(body, template, library_tokenizer):
        assert (text, finish_reason, len(calls)) == ("", "tool_calls", 1)
        check_call(*calls[0])
        assert not named or calls[0][0] == "get_weather"


async def test_a_call_after_reasoning_that_the_prompt_has_opened(library_tokenizer: LLTokenizer) -> None:
    answers = await walks({"tools": [WEATHER], "tool_choice": "required"}, "hermes thinking", library_tokenizer)
    assert all(text == "" and calls for _, text, calls, _ in answers)
    assert any(reasoning for reasoning, *_ in answers)


@pytest.mark.parametrize("regex", ["[0-9]{4}", " [0-9]{4}", "\n [0-9]{4}", "\n{0,3}[0-9]{4}", " ?"])
async def test_a_format_of_the_answer_leaves_room_for_reasoning(regex: str, library_tokenizer: LLTokenizer) -> None:
    """And for line ends after it, which are not the answer's, whatever white space that begins with."""
    for template in ("hermes reasoning", "hermes thinking"):
        answers = await walks({"guided_regex": regex}, template, library_tokenizer)
        assert all(re.fullmatch(regex, text) for _, text, *_ in answers)
        assert any(reasoning for reasoning, *_ in answers)


@pytest.mark.parametrize(
    "asked",
    [
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"enum": [5, 6]}}}},
        {"guided_choice": ["5", "6"]},
        {"guided_grammar": 'root ::= "5" | "6"'},
        {"guided_regex": "[56]"},
    ],
    ids=lambda value: next(iter(value)),
)
async def test_a_format_of_the_answer_leaves_room_for_calls(
    asked: dict[str, Any], library_tokenizer: LLTokenizer
) -> None:
    answers = await walks({"tools": TOOLS} | asked, "mistral", library_tokenizer)
    assert all(calls or text.strip() in ("5", "6") for _, text, calls, _ in answers)
    assert {finish_reason for *_, finish_reason in answers} == {"stop", "tool_calls"}


async def test_a_format_leaves_room_for_reasoning_that_the_template_only_removes(
    library_tokenizer: LLTokenizer,
) -> None:
    """The model itself opens it."""
    dialect = Dialect.of(wrap(backend(), "{{ messages[0].content.split('</think>')[-1] }} assistant:"))
    form = parse(ChatRequest, {"messages": MESSAGES, "guided_regex": "[0-9]{4}"})
    grammar = await chat_grammar(form, dialect, dialect.tokenizer.render_chat(MESSAGES))
    assert grammar is not None
    for text in ("<think>well</think>\n\n1234", "1234"):
        matcher = LLMatcher(library_tokenizer, grammar, log_level=0, limits=grammar_limits())
        assert matcher.consume_tokens(backend().encode(text, add_special_tokens=False).ids), matcher.get_error()
        assert matcher.is_accepting()


async def test_tags_that_are_no_tokens(library_tokenizer: LLTokenizer) -> None:
    """Then the model spells them."""
    dialect = Dialect.of(wrap(byte_level_backend(), TEMPLATES["hermes thinking"]))
    form = parse(ChatRequest, {"messages": MESSAGES, "tools": TOOLS, "tool_choice": "required"})
    prompt = dialect.tokenizer.render_chat(MESSAGES)
    grammar = await chat_grammar(form, dialect, prompt)
    assert grammar is not None
    bare = byte_level_backend()
    matcher = LLMatcher(LLTokenizer(bare.to_str(), eos_token=[EOS]), grammar, log_level=0, limits=grammar_limits())
    text = 'well</think>\n\n<tool_call>\n{"name": "is-noon", "arguments": {}}\n</tool_call>'
    tokens = bare.encode(text, add_special_tokens=False).ids
    assert matcher.consume_tokens(tokens), matcher.get_error()
    assert matcher.is_accepting()
    assert answer_to(form, dialect, prompt, [*tokens, EOS]) == ("well", "", [["is-noon", "{}"]], "tool_calls")


async def test_what_needs_no_grammar_has_none() -> None:
    bodies: list[tuple[str, dict[str, Any]]] = [
        ("hermes", {"tools": TOOLS}),
        ("hermes", {"tools": TOOLS, "tool_choice": "auto"}),
        ("hermes", {"tools": [{"type": "function", "function": {"name": "f", "strict": True}}]}),
        ("hermes reasoning", {"tools": TOOLS, "tool_choice": "none"}),
        ("hermes thinking", {}),
    ]
    for template, body in bodies:
        dialect = Dialect.of(tool_tokenizer(template))
        form = parse(ChatRequest, {"messages": MESSAGES} | body)
        assert await chat_grammar(form, dialect, dialect.tokenizer.render_chat(MESSAGES)) is None


async def test_a_format_alone_is_what_it_was() -> None:
    form = parse(ChatRequest, {"messages": MESSAGES, "guided_regex": "[0-9]{4}"})
    for template, switches in [("hermes", {}), ("hermes reasoning", {"enable_thinking": False})]:
        dialect = Dialect.of(tool_tokenizer(template))
        grammar = await chat_grammar(form, dialect, dialect.tokenizer.render_chat(MESSAGES, (), switches))
        assert (grammar, "") == compile_grammar("regex", "[0-9]{4}")


@pytest.mark.parametrize(
    ("parameters", "reason"),
    [
        ({"properties": {"a": {"$ref": "http://localhost/s"}}}, "http://localhost/s"),
        ({"properties": {f"p{i}": {"type": "string"} for i in range(600)}}, "nothing can follow"),
        ({"minProperties": 2}, "minProperties"),
    ],
    ids=["reference", "large", "names"],
)
async def test_a_schema_that_cannot_be_followed(parameters: dict[str, Any], reason: str) -> None:
    """It is refused only where it is to be followed; otherwise it is the model's to read."""
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    dialect = Dialect.of(tool_tokenizer("hermes"))
    form = parse(ChatRequest, {"messages": MESSAGES, "tools": tools, "tool_choice": "required"})
    with pytest.raises(ApiError, match=f"tools: f: .*{reason}") as caught:
        await chat_grammar(form, dialect, dialect.tokenizer.render_chat(MESSAGES))
    assert caught.value.param == "tools"
    free = parse(ChatRequest, {"messages": MESSAGES, "tools": tools})
    assert await chat_grammar(free, dialect, dialect.tokenizer.render_chat(MESSAGES)) is None


ODD: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "odd", "parameters": {"properties": {"a": {"not": {}}}}}}
]
LARGE: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": f"f{i}",
            "parameters": {"properties": {f"p{j}": {"type": "string"} for j in range(60)}, "required": ["p0"]},
        },
    }
    for i in range(60)
]


@pytest.mark.parametrize(
    ("tools", "name", "enforced"),
    [([*TOOLS, *ODD], "odd", True), ([*TOOLS, *LARGE], "f9", False)],
    ids=["one that cannot be", "too many"],
)
async def test_a_format_of_the_answer_holds_calls_to_the_schemas_that_can_be_followed(
    tools: list[dict[str, Any]], name: str, enforced: bool, library_tokenizer: LLTokenizer
) -> None:
    dialect = Dialect.of(tool_tokenizer("hermes"))
    form = parse(ChatRequest, {"messages": MESSAGES, "tools": tools, "guided_regex": "[56]"})
    grammar = await chat_grammar(form, dialect, dialect.tokenizer.render_chat(MESSAGES))
    assert grammar is not None

    def takes(text: str) -> bool:
        matcher = LLMatcher(library_tokenizer, grammar, log_level=0, limits=grammar_limits())
        tokens = backend().encode(text, add_special_tokens=False).ids
        return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()

    call = '<tool_call>\n{"name": "%s", "arguments": %s}\n</tool_call>'
    assert takes("5")
    assert not takes("7")
    assert takes(call % (name, '{"a":1}'))
    assert takes(call % ("get_weather", '{"city":"Oslo","days":3}'))
    assert takes(call % ("get_weather", '{"days":"many"}')) != enforced


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (TEMPLATES["hermes"], "hermes"),
        (TEMPLATES["hermes thinking"], "hermes"),
        (TEMPLATES["llama3"], "llama3"),
        ("{{ tools }}<|python_tag|>", "llama3"),
        (TEMPLATES["mistral"], "mistral"),
        (TEMPLATES["mistral named"], "mistral"),
        ("{{ tools }} anything else", None),
        ("{{ tools }}<tool_call>\n<function=name>", None),
        ("{{ tools }}<tool_call>name\n<arg_key>", None),
        ("<tool_call> {{ toolsets }}", None),
        ("", None),
    ],
)
def test_formats_are_recognised_by_the_chat_template(template: str, expected: str | None) -> None:
    assert recognised(template) == expected


def test_a_model_with_several_templates() -> None:
    templates: Any = {"default": "{{ messages }}<think>", "tool_use": TEMPLATES["hermes"]}
    dialect = Dialect.of(wrap(byte_level_backend(), templates))
    assert dialect.takes_tools
    assert (dialect.tool_format, dialect.reasons) == ("hermes", True)
    assert "get_weather" in dialect.tokenizer.render_chat(MESSAGES, TOOLS)
    assert "<think>" in dialect.tokenizer.render_chat(MESSAGES)
    plain = Dialect.of(wrap(byte_level_backend(), None))
    assert not plain.takes_tools
    assert (plain.tool_format, plain.reasons) == (None, False)
    assert plain.plan("", []) is None


def test_what_the_operator_says_goes_before_the_chat_template() -> None:
    model = tool_tokenizer("hermes reasoning")
    assert Dialect.of(model, "llama3", "none").tool_format == "llama3"
    assert Dialect.of(model, "none").tool_format is None
    assert not Dialect.of(model, "auto", "none").reasons
    assert Dialect.of(tool_tokenizer("mistral"), "auto", "think").reasons


def test_answers_that_are_only_text_are_not_looked_through() -> None:
    dialect = Dialect.of(tool_tokenizer("hermes"))
    assert dialect.plan("assistant:", []) is None
    assert dialect.plan("assistant:", ["f"]) is not None
