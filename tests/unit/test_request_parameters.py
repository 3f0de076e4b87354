"""Every parameter of the OpenAI API and of vLLM is supported, refused, or ignored on purpose; and what is ignored is
listed once."""

from __future__ import annotations

import json
import logging
from typing import Any, get_args, get_type_hints

import pytest
from openai.types import completion_create_params
from openai.types.chat import ChatCompletionStreamOptionsParam
from openai.types.chat import completion_create_params as chat_completion_create_params
from openai.types.shared_params import ResponseFormatJSONSchema
from openai.types.shared_params.response_format_json_schema import JSONSchema
from pydantic import BaseModel, ValidationError

from common.runtime.config import GatewaySettings, load
from common.runtime.logs import JsonFormatter, TextFormatter
from gateway.intake import schemas
from gateway.intake.field_types import TIERS
from gateway.intake.ignored_fields import IGNORED, IgnoredFields
from gateway.intake.schemas import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    JsonSchema,
    ResponseFormat,
    StreamOptions,
    TokenizeRequest,
    parse,
)
from gateway.web.http_errors import ApiError

CHAT = {"messages": [{"role": "user", "content": "hello"}]}
COMPLETION = {"prompt": "hello"}
OPENAI_CHAT = {
    *get_type_hints(chat_completion_create_params.CompletionCreateParamsBase),
    *get_type_hints(chat_completion_create_params.CompletionCreateParamsStreaming),
}
OPENAI_COMPLETION = {
    *get_type_hints(completion_create_params.CompletionCreateParamsBase),
    *get_type_hints(completion_create_params.CompletionCreateParamsStreaming),
}
# Of vLLM 0.32's ChatCompletionRequest and CompletionRequest, and of earlier versions.
_BOTH = """
    add_special_tokens allowed_token_ids bad_words cache_salt ec_transfer_params guided_choice guided_decoding_backend
    guided_grammar guided_json guided_regex guided_whitespace_pattern ignore_eos include_stop_str_in_output
    kv_transfer_params length_penalty logits_processors logprob_token_ids min_p min_tokens mm_payload priority
    prompt_logprobs repetition_detection repetition_penalty request_id response_format return_mm_kwargs
    return_token_ids return_token_offsets return_tokens_as_token_ids routed_experts_prompt_start session_id
    skip_special_tokens spaces_between_special_tokens stop_token_ids stream_interval structured_outputs
    thinking_token_budget top_k truncate_prompt_tokens truncation_side use_beam_search vllm_xargs watermarking
"""
_CHAT = """
    add_generation_prompt chat_template chat_template_kwargs continue_final_message documents echo include_reasoning
    media_io_kwargs mm_processor_kwargs parallel_tool_calls reasoning_effort return_prompt_text
"""
_TOKENIZE = """
    add_generation_prompt add_special_tokens chat_template chat_template_kwargs continue_final_message messages
    mm_processor_kwargs model prompt return_token_strs tools
"""
VLLM = set(_BOTH.split())
VLLM_CHAT = VLLM | set(_CHAT.split())
VLLM_COMPLETION = VLLM | {"prompt_embeds"}
VLLM_TOKENIZE = set(_TOKENIZE.split())
REFUSED: dict[str, list[Any]] = {
    "add_generation_prompt": [False, 1],
    "add_special_tokens": [True, 0, "false"],
    "allowed_token_ids": [[1]],
    "audio": [{"voice": "alloy"}],
    "bad_words": [["a"]],
    "best_of": [2, 0, 16, True],
    "chat_template": ["{{ messages }}"],
    "chat_template_kwargs": [{"enable_thinking": False}],
    "continue_final_message": [True],
    "documents": [[{"title": "a"}]],
    "echo": [True, 0],
    "function_call": [{"name": "f"}],
    "functions": [[{"name": "f"}]],
    "guided_whitespace_pattern": ["x"],
    "include_stop_str_in_output": [True],
    "logits_processors": [["x"]],
    "logprob_token_ids": [[1]],
    "modalities": [["text", "audio"]],
    "moderation": [{"model": "x"}],
    "prompt_embeds": ["x"],
    "prompt_logprobs": [0, 1],
    "repetition_detection": [{"max_pattern_size": 1}],
    "return_prompt_text": [True],
    "return_token_offsets": [True],
    "return_tokens_as_token_ids": [True],
    "suffix": ["x"],
    "thinking_token_budget": [1, 0, -2],
    "tool_choice": ["required", {"type": "function"}],
    "tools": [[{"type": "function"}]],
    "truncate_prompt_tokens": [1],
    "use_beam_search": [True],
    "vllm_xargs": [{"a": 1}],
    "watermarking": [{"key": 1}, True],
    "web_search_options": [{}],
}
"""What would change the answer, and is not implemented."""
FORBIDDING = ("allowed_token_ids", "bad_words")


def kinds(name: str, schema: type[ChatRequest] | type[CompletionRequest] | type[TokenizeRequest]) -> list[str]:
    """How the gateway treats a field."""
    if name in schema.model_fields:
        return ["supported"]
    return [kind for kind, names in (("refused", REFUSED), ("ignored", IGNORED)) if name in names]


def test_special_tokens_around_a_prompt_are_those_of_a_text_or_of_the_template() -> None:
    """A conversation has those that its template writes."""
    parse(ChatRequest, CHAT | {"add_special_tokens": False})
    with pytest.raises(ApiError, match="add_special_tokens"):
        parse(ChatRequest, CHAT | {"add_special_tokens": True})


def test_the_service_tiers_of_the_openai_client_are_known() -> None:
    hint = get_type_hints(chat_completion_create_params.CompletionCreateParamsBase)["service_tier"]
    names = {name for each in get_args(hint) for name in get_args(each)}
    assert {"auto", "default"} < names <= TIERS.keys()


def test_members_of_structured_outputs_that_ask_for_nothing_are_ignored() -> None:
    """As clients send them that write out vLLM's parameters."""
    nothing = {"structural_tag": None, "whitespace_pattern": None, "disable_fallback": False, "json_object": False}
    form = parse(CompletionRequest, COMPLETION | {"structured_outputs": nothing | {"regex": "a+"}})
    assert form.structured_outputs is not None
    assert form.structured_outputs.regex == "a+"
    for name in ("json", "regex", "choice", "grammar"):
        with pytest.raises(ApiError, match=name):
            parse(CompletionRequest, COMPLETION | {"structured_outputs": {name: False}})
    with pytest.raises(ApiError, match="disable_fallback"):
        parse(CompletionRequest, COMPLETION | {"structured_outputs": {"regex": "a+", "disable_fallback": True}})


def test_a_message_of_the_old_kind_is_refused_as_its_call_would_be_lost() -> None:
    messages = [{"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}}]
    with pytest.raises(ApiError, match="function_call"):
        parse(ChatRequest, {"messages": messages})
    parse(ChatRequest, {"messages": [{"role": "assistant", "content": "a", "function_call": None}]})


def test_a_prefix_is_refused_with_the_name_of_the_field_that_does_the_same() -> None:
    message = {"role": "assistant", "content": "a"}
    with pytest.raises(ApiError, match="continue_final_message"):
        parse(ChatRequest, {"messages": [message | {"prefix": True}]})
    for nothing in (None, False):
        (parsed,) = parse(ChatRequest, {"messages": [message | {"prefix": nothing}]}).messages
        assert parsed.for_template() == message


@pytest.mark.parametrize("name", sorted(VLLM_TOKENIZE))
def test_a_parameter_of_tokenize_is_treated_in_one_way(name: str) -> None:
    assert len(kinds(name, TokenizeRequest)) == 1


@pytest.mark.parametrize("name", sorted(OPENAI_CHAT | VLLM_CHAT))
def test_a_parameter_of_chats_is_treated_in_one_way(name: str) -> None:
    assert len(kinds(name, ChatRequest)) == 1


@pytest.mark.parametrize("name", sorted(OPENAI_COMPLETION | VLLM_COMPLETION))
def test_a_parameter_of_completions_is_treated_in_one_way(name: str) -> None:
    assert len(kinds(name, CompletionRequest)) == 1


def test_nothing_else_is_refused_or_ignored_by_name() -> None:
    known = OPENAI_CHAT | OPENAI_COMPLETION | VLLM_CHAT | VLLM_COMPLETION
    assert (REFUSED.keys() | IGNORED.keys()) <= known
    assert not REFUSED.keys() & IGNORED.keys()
    assert all(IGNORED.values())


def test_parts_of_parameters() -> None:
    """What the client can say in them, and what of it is not looked at: it only words the request, or the answer."""
    fields = {field.alias or name for name, field in JsonSchema.model_fields.items()}
    assert get_type_hints(JSONSchema).keys() - fields == {"name", "description", "strict"}
    fields = {field.alias or name for name, field in ResponseFormat.model_fields.items()}
    others = {"schema", "value", "response_schema"}
    assert get_type_hints(ResponseFormatJSONSchema).keys() == fields - others, "other servers have a schema there"
    assert get_type_hints(ChatCompletionStreamOptionsParam).keys() - StreamOptions.model_fields.keys() == {
        "include_obfuscation"
    }


BODIES: list[tuple[type[BaseModel], dict[str, Any]]] = [(ChatRequest, CHAT), (CompletionRequest, COMPLETION)]


@pytest.mark.parametrize(
    ("schema", "body", "name", "value"),
    [
        (schema, body, name, value)
        for schema, body in BODIES
        for name, values in REFUSED.items()
        for value in values
        if name not in schema.model_fields
    ],
)
def test_what_would_change_the_answer_is_refused(schema: Any, body: dict[str, Any], name: str, value: Any) -> None:
    with pytest.raises(ApiError) as refused:
        parse(schema, body | {name: value})
    error = refused.value
    assert (error.status, error.param, error.code) == (400, name, "unsupported_parameter")
    message, _, why = error.message.partition("; ")
    assert message == f"{name} is not supported"
    assert why.startswith("ignoring it could put what it forbids into the answer" if name in FORBIDDING else "")
    assert bool(why) == (name in FORBIDDING)
    parse(schema, body | {name: None})


@pytest.mark.parametrize(("schema", "body"), BODIES)
def test_as_many_candidates_as_choices_ask_for_nothing(schema: Any, body: dict[str, Any]) -> None:
    assert parse(schema, body | {"n": 2, "best_of": 2}) == parse(schema, body | {"n": 2})
    for n, best_of in ((2, 3), (None, 2), (1, True)):
        with pytest.raises(ApiError, match="best_of is not supported"):
            parse(schema, body | {"n": n, "best_of": best_of})


@pytest.mark.parametrize(
    ("schema", "body", "name"),
    [(schema, body, name) for schema, body in BODIES for name in IGNORED if name not in schema.model_fields],
)
def test_what_is_ignored_changes_nothing(schema: Any, body: dict[str, Any], name: str) -> None:
    assert parse(schema, body | {name: {"any": ["thing"]}}) == parse(schema, body)


@pytest.mark.parametrize(
    ("schema", "body"), [*BODIES, (TokenizeRequest, COMPLETION), (DetokenizeRequest, {"tokens": [5]})]
)
def test_an_empty_name_of_the_model_counts_as_absent(schema: Any, body: dict[str, Any]) -> None:
    """Clients of servers with one model send it."""
    assert parse(schema, body | {"model": ""}) == parse(schema, body)
    assert parse(schema, body | {"model": "tiny"}).model == "tiny"


def listed(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "ignored fields" in record.getMessage()]


def test_ignored_fields_are_listed_once_and_without_values(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(schemas, "IGNORED_FIELDS", IgnoredFields())
    caplog.set_level(logging.DEBUG, logger="gateway.intake.ignored_fields")
    parse(CompletionRequest, COMPLETION | {"store": "secret", "wizard": "secret", "n": 1, "best_of": 1})
    parse(CompletionRequest, COMPLETION | {"store": "secret", "wizard": "secret"})
    parse(ChatRequest, CHAT | {"wizard": "secret", "dragon\n": "secret"})
    assert listed(caplog) == ["ignored fields: ['store', 'wizard']", r"ignored fields: ['dragon\n']"]


def test_no_more_is_listed_than_a_client_should_be_able_to_write(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, logger="gateway.intake.ignored_fields")
    fields = IgnoredFields()
    for first in range(0, 1000, 100):
        fields.note(f"{number:03}{'x' * 1000}" for number in range(first, first + 100))
    text = "".join(listed(caplog))
    assert len(text) < 256 * (64 + 10)
    assert "255x" in text
    assert "256x" not in text
    assert len(listed(caplog)) == 3


def test_ignored_fields_are_listed_at_the_level_that_is_the_default(caplog: pytest.LogCaptureFixture) -> None:
    fields = IgnoredFields()
    caplog.set_level(logging.WARNING, logger="gateway.intake.ignored_fields")
    fields.note(["wizard"])
    assert not listed(caplog), "nor is it remembered"
    caplog.set_level(load(GatewaySettings, "baton gateway", []).log_level.upper(), "gateway.intake.ignored_fields")
    for _ in range(3):
        fields.note(["wizard"])
    assert listed(caplog) == ["ignored fields: ['wizard']"]


def test_a_client_with_ever_new_fields_does_not_flood_the_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="gateway.intake.ignored_fields")
    fields = IgnoredFields()
    for number in range(1000):
        fields.note([f"wizard{number}"])
    assert listed(caplog) == [f"ignored fields: ['wizard{number}']" for number in range(256)]
    assert [line for line in caplog.messages if line not in listed(caplog)] == [
        "no other field that is ignored will be named: 256 have been"
    ]
    names = iter(["dragon"])
    fields.note(names)
    assert next(names) == "dragon", "requests are not even looked through any more"


def test_what_is_listed_stays_on_its_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="gateway.intake.ignored_fields")
    IgnoredFields().note(["\n2026-01-01 ERROR\x1b[31m\u2028\ud800"])
    (record,) = caplog.records
    line = TextFormatter("baton gateway").format(record).partition(" baton gateway ")[2]
    assert line == r"ignored fields: ['\n2026-01-01 ERROR\x1b[31m\u2028\ud800']"
    assert json.loads(JsonFormatter("baton gateway").format(record))["message"] == line


@pytest.mark.parametrize(
    ("schema", "body"),
    [
        (ChatRequest, {"messages": [1] * 1000}),
        (ChatRequest, CHAT | {"stop": [1] * 1000}),
        (ChatRequest, CHAT | {"stop_token_ids": ["a"] * 1000}),
        (ChatRequest, CHAT | {"guided_choice": [1] * 1000}),
        (ChatRequest, CHAT | {"structured_outputs": {"choice": [1] * 1000}}),
        (ChatRequest, CHAT | {"structured_outputs": {f"k{i}": 1 for i in range(1000)}}),
        (ChatRequest, CHAT | {"structured_outputs": {"regex": "a"} | {f"k{i}": 1 for i in range(1000)}}),
        (ChatRequest, CHAT | {"logit_bias": {f"a{token}": 1 for token in range(10_000)}}),
        (ChatRequest, {"messages": [{"role": "user", "content": [1] * 1000}]}),
        (CompletionRequest, {"prompt": ["a"] * 3000}),
        (CompletionRequest, {"prompt": [[1, "a"]] * 1000}),
        (DetokenizeRequest, {"tokens": ["a"] * 1000}),
    ],
    ids=lambda value: repr(value)[:50],
)
def test_the_first_wrong_item_is_enough(schema: Any, body: dict[str, Any]) -> None:
    """An error object for each of the millions that fit into a body would hold the gateway up for many seconds."""
    with pytest.raises(ValidationError) as refused:
        schema.model_validate(body)
    assert refused.value.error_count() == 1
