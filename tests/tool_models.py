"""Tokenizers and chat templates of models that call functions and reason, each in the manner of a family."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any

from checkpoints import VOCAB_SIZE, make_checkpoint
from gateway_fixtures import byte_level_backend, settings, wrap
from tokenizers import AddedToken, Tokenizer
from transformers import PreTrainedTokenizerFast

from gateway.api_settings import ApiSettings
from gateway.text.tokenizer import ModelTokenizer

MARKERS = {
    "<tool_call>": False,
    "</tool_call>": False,
    "<think>": False,
    "</think>": False,
    "<|python_tag|>": True,
    "[TOOL_CALLS]": True,
    "[ARGS]": True,
}
"""Each is a token; whether it is a special one."""

_HERMES = """
{%- if tools %}system: You may call:
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}as <tool_call>
{"name": <name>, "arguments": <object>}
</tool_call>
{% endif %}
{%- for message in messages %}
{%- if message.role == "tool" %}tool: <tool_response>{{ message.content }}</tool_response>
{% else %}{{ message.role }}: {{ message.content or "" }}
{%- for call in message.tool_calls or [] %}{{ "\\n" }}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}
{% endif %}
{%- endfor %}assistant:"""
_REASONING = """
{%- if enable_thinking is defined and not enable_thinking %}<think>

</think>

{% endif %}"""
_LLAMA3 = """
{%- if tools %}system: Answer with {"name": function name, "parameters": dictionary of argument name and its value}.
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}{% endif %}
{%- for message in messages %}
{%- if message.tool_calls %}
{%- if message.tool_calls | length != 1 %}{{ raise_exception("This model only supports single tool-calls at once!") }}
{%- endif %}assistant: {"name": "{{ message.tool_calls[0].function.name }}", "parameters": {{
message.tool_calls[0].function.arguments | tojson }}}
{% elif message.role == "tool" %}<|start_header_id|>ipython: {{ message.content }}
{% else %}{{ message.role }}: {{ message.content }}
{% endif %}
{%- endfor %}assistant:"""
_MISTRAL = """
{%- for message in messages %}
{%- if message.role == "user" %}{% if tools and loop.first %}[AVAILABLE_TOOLS] {{ tools | tojson }}[/AVAILABLE_TOOLS]
{%- endif %}[INST] {{ message.content }}[/INST]
{%- elif message.tool_calls %}WRITE_CALLS
{%- elif message.role == "tool" %}
{%- if message.tool_call_id | length != 9 %}
{{- raise_exception("Tool call IDs should be alphanumeric strings with length 9!") }}
{%- endif %}[TOOL_RESULTS] {{ message.content }}[/TOOL_RESULTS]
{%- else %} {{ message.content }}</s>
{%- endif %}
{%- endfor %}"""
_ARRAY = """[TOOL_CALLS] [{% for call in message.tool_calls %}{"name": "{{ call.function.name }}", "arguments": {{
call.function.arguments | tojson }}, "id": "{{ call.id }}"}{% if not loop.last %}, {% endif %}{% endfor %}]</s>"""
_NAMED = """{% for call in message.tool_calls %}[TOOL_CALLS]{{ call.function.name }}[ARGS]{{
call.function.arguments | tojson }}{% endfor %}</s>"""

TEMPLATES: dict[str, str] = {
    "hermes": _HERMES,
    "hermes reasoning": _HERMES + _REASONING,
    "hermes thinking": _HERMES + "<think>\n",
    "llama3": _LLAMA3,
    "mistral": _MISTRAL.replace("WRITE_CALLS", _ARRAY),
    "mistral named": _MISTRAL.replace("WRITE_CALLS", _NAMED),
}

WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather somewhere",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"enum": ["Oslo", "Zürich"]},
                "days": {"type": "integer", "minimum": 1, "maximum": 9},
            },
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}
NOON: dict[str, Any] = {"type": "function", "function": {"name": "is-noon"}}
TOOLS: list[Any] = [WEATHER, NOON]


def add_markers(backend: Tokenizer) -> None:
    """Make each marker a token."""
    for marker, special in MARKERS.items():
        token = AddedToken(marker, special=special, normalized=False)
        if special:
            backend.add_special_tokens([token])
        else:
            backend.add_tokens([token])


@functools.cache
def backend() -> Tokenizer:
    """The tokenizer of the gateway's tests, with the markers."""
    made = byte_level_backend()
    add_markers(made)
    return made


@functools.cache
def tool_tokenizer(template: str) -> ModelTokenizer:
    """A tokenizer with one of the templates."""
    made = byte_level_backend()
    add_markers(made)
    return wrap(made, TEMPLATES[template])


def tool_settings(**changes: Any) -> ApiSettings:
    """Of the tests' server, for a model with such a tokenizer."""
    base = settings(max_sequence_tokens=4096)
    return dataclasses.replace(base, model_vocab_size=tool_tokenizer("hermes").vocab_size, **changes)


def tokens_of(text: str) -> list[int]:
    """As a model would generate it: each marker one token."""
    token_ids: list[int] = backend().encode(text, add_special_tokens=False).ids
    return token_ids


def follows_weather(arguments: Any) -> bool:
    """By hand, as the library that wrote the text should not be its judge."""
    return (
        isinstance(arguments, dict)
        and sorted(arguments) == ["city", "days"]
        and arguments["city"] in ("Oslo", "Zürich")
        and type(arguments["days"]) is int
        and 1 <= arguments["days"] <= 9
    )


def make_tool_checkpoint(family: str, template: str, folder: Path) -> Path:
    """A checkpoint with random weights whose tokenizer has the markers, and one of the templates."""
    make_checkpoint(family, folder, seed=7, vocab_size=VOCAB_SIZE + 16)
    made = PreTrainedTokenizerFast.from_pretrained(folder)
    add_markers(made.backend_tokenizer)
    made.chat_template = TEMPLATES[template]
    made.save_pretrained(folder)
    return folder
