"""The grammar of an answer that must call a function, or may; it writes calls in the model's own format.

    answer      [reasoning gap] (calls | what `response_format` or an equivalent field asks for)
    reasoning   free text up to the closing tag
    gap         up to two line ends, which `ReasoningSplitter` leaves out; just two if what follows may begin with one
    calls       calls of the given functions, with arguments that follow the schema of their parameters

Tags that are single tokens are named by their ids, so it does not matter whether the tokenizer marks them as special.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from gateway.intake.grammar_checks import checked
from gateway.intake.schemas import ChatRequest
from gateway.intake.structured_output import (
    ANY_OBJECT,
    grammar_of,
    guarded,
    json_grammar,
    may_begin_with,
    refuse_contradictions,
    validated,
)
from gateway.intake.tool_schemas import AllowedToolChoice, NamedToolChoice, Tool
from gateway.text import reasoning
from gateway.text.dialect import Dialect, ToolFormat
from gateway.text.tool_parsers import HermesParser, MistralParser
from gateway.web.http_errors import invalid

_THOUGHT: Final = r"THOUGHT: /(?s:.*)/ & ~/(?s:.*)<\/think>(?s:.*)/"
"""Any text that does not close the reasoning."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerGrammar:
    """The parts of an answer. Equal specifications have the same grammar."""

    functions: tuple[tuple[str, str], ...] = ()
    """Name of each function that may be called, and the JSON schema of its parameters."""
    tool_format: ToolFormat | None = None
    several: bool = False
    """Whether more than one call is allowed."""
    answer: str | None = None
    """The grammar of an answer without calls; None if a call is required."""
    reasons: bool = False
    """Whether the model may reason first."""
    opened: bool = False
    """Whether the prompt has opened the reasoning, which must then be closed."""
    tags: tuple[tuple[str, int], ...] = ()
    """Tags that are single tokens, with their ids."""
    named_calls: bool = False
    """Mistral's format with names: each call is a name, then `[ARGS]` and its arguments."""
    call_ids: bool = False
    """Mistral's format with ids: each call also has an id after its name."""


async def chat_grammar(form: ChatRequest, dialect: Dialect, prompt: str) -> str | None:
    """The grammar of an answer to `form`, whose conversation was rendered as `prompt`; None if unconstrained.

    Raises `ApiError`: a 400 that names the field at fault, or a 429.
    """
    answer = await grammar_of(form)
    forced = _forced_tools(form)
    if forced and answer is not None:
        raise invalid("tool_choice", "tool_choice: the answer has a format, so it cannot have to be a call")
    if forced and dialect.tool_format is None:
        raise invalid("tool_choice", "tool_choice: this gateway does not know how this model calls (--tool-parser)")
    tools = (forced or usable_tools(form)) if dialect.tool_format is not None else ()
    if not forced and (answer is None or not (tools or dialect.may_reason(prompt))):
        return answer
    if forced:
        refuse_contradictions(form, "tool_choice")
    template = dialect.tokenizer.chat_template(with_tools=True)
    spec = AnswerGrammar(
        functions=tuple((tool.function.name, json.dumps(_schema(tool), ensure_ascii=False)) for tool in tools),
        tool_format=dialect.tool_format if tools else None,
        several=form.parallel_tool_calls is not False and not isinstance(form.tool_choice, NamedToolChoice),
        answer=answer,
        reasons=dialect.may_reason(prompt),
        opened=dialect.opens_reasoning(prompt, form.continued),
        tags=dialect.tags(),
        named_calls="[ARGS]" in template,
        call_ids="[CALL_ID]" in template,
    )
    return await checked("tools" if tools else "response_format", compile_answer, spec)


def usable_tools(form: ChatRequest) -> Sequence[Tool]:
    """The functions that the model is told about; none if it may not call any.

    Raises `ApiError`, a 400, if `tool_choice` requires functions that the request does not have.
    """
    tools, choice = form.tools or (), form.tool_choice
    if choice in (None, "auto"):
        return tools
    if choice == "none":
        return ()
    if not tools:
        raise invalid("tool_choice", "tool_choice needs tools")
    known, named = {tool.function.name for tool in tools}, _names(choice)
    for name in named:
        if name not in known:
            raise invalid("tool_choice", f"tool_choice: no function of tools is called {name[:64]!r}")
    return [tool for tool in tools if tool.function.name in named] if isinstance(choice, AllowedToolChoice) else tools


def _forced_tools(form: ChatRequest) -> Sequence[Tool]:
    """The functions of which the model must call one; empty if no call is required."""
    choice = form.tool_choice
    if isinstance(choice, NamedToolChoice):
        return [tool for tool in form.tools or () if tool.function.name == choice.function.name]
    must = choice.allowed_tools.mode if isinstance(choice, AllowedToolChoice) else choice
    return usable_tools(form) if must == "required" else ()


def _names(choice: str | NamedToolChoice | AllowedToolChoice | None) -> frozenset[str]:
    """The function names in a `tool_choice`."""
    match choice:
        case NamedToolChoice():
            return frozenset({choice.function.name})
        case AllowedToolChoice():
            return frozenset(each.function.name for each in choice.allowed_tools.tools)
    return frozenset()


def compile_answer(spec: AnswerGrammar) -> tuple[str, str]:
    """The grammar of an answer, and an error message or "". Where no call is required, arguments follow their schemas
    as far as these can be enforced: each by itself, and all of them together."""
    grammar, error = guarded(lambda: validated(_compose(spec)))
    if error and spec.answer is not None:
        free = replace(spec, functions=tuple((name, ANY_OBJECT) for name, _ in spec.functions))
        return guarded(lambda: validated(_compose(free)))
    return grammar, error


def _schema(tool: Tool) -> dict[str, Any]:
    """The schema of a call's arguments. A function without parameters takes none."""
    parameters = tool.function.parameters
    if parameters is None:
        return {"type": "object", "additionalProperties": False}
    return {"type": "object"} | parameters


def _compose(spec: AnswerGrammar) -> str:
    parts: list[dict[str, Any]] = []
    bodies = []
    rules = []
    if spec.tool_format is not None:
        bodies.append("calls")
        rules += _RULES[spec.tool_format](spec)
        free = spec.answer is not None
        parts += [_named(f"args_{i}", _arguments(*function, free=free)) for i, function in enumerate(spec.functions)]
    if spec.answer is not None:
        bodies.append("@answer")
        parts.append(_named("answer", spec.answer))
    rules.append("body: " + " | ".join(bodies))
    if spec.reasons:
        rules += _reasoning_rules(spec)
    starts = ["reasoning body"] if spec.reasons else []
    if not spec.opened:
        starts.append("body")
    rules.append("start: " + " | ".join(starts))
    return json.dumps({"grammars": [{"lark_grammar": "\n".join(rules)}, *parts]}, ensure_ascii=False)


def _arguments(name: str, schema: str, *, free: bool) -> str:
    """The grammar of a call's arguments, checked by itself, because the check of the whole grammar may not reach it. If
    the schema cannot be enforced, it is that of any object if the arguments are `free`, else a `ValueError`."""
    grammar, error = guarded(lambda: validated(json_grammar(schema)))
    if error and not free:
        raise ValueError(f"{name}: {error}")
    return json_grammar(ANY_OBJECT) if error else grammar


def _named(name: str, grammar: str) -> dict[str, Any]:
    """A grammar as a named part of another one, which refers to it by `name`."""
    part = json.loads(grammar)["grammars"][0] if grammar.startswith("{") else {"lark_grammar": grammar}
    return part | {"name": name}


def _reasoning_rules(spec: AnswerGrammar) -> list[str]:
    opening = "" if spec.opened else _tag(spec, reasoning.OPENING) + " "
    if reasoning.CLOSING in dict(spec.tags):
        thought = ["thought: THOUGHT " + _tag(spec, reasoning.CLOSING), _THOUGHT]
    else:
        thought = [f'thought[suffix="{reasoning.CLOSING}"]: /(?s:.*)/']
    ambiguous = spec.answer is not None and may_begin_with("\n", spec.answer)
    least = reasoning.GAP_LINE_ENDS if ambiguous else 0
    gap = rf"GAP: /\n{{{least},{reasoning.GAP_LINE_ENDS}}}/"
    return [f"reasoning: {opening}thought GAP", gap, *thought]


def _hermes(spec: AnswerGrammar) -> list[str]:
    opening, closing = (_tag(spec, tag) for tag in HermesParser.markers)
    more = ' ("\\n" call)*' if spec.several else ""
    return [f"calls: call{more}", f'call: {opening} "\\n" object "\\n" {closing}', _objects(spec, "arguments")]


def _llama3(spec: AnswerGrammar) -> list[str]:
    """One call only: the templates of these models allow no more in one message."""
    return ["calls: object", _objects(spec, "parameters")]


def _mistral(spec: AnswerGrammar) -> list[str]:
    opening, arguments, call_id = (_tag(spec, tag) for tag in MistralParser.markers)
    if not spec.named_calls:
        more = ' (", " object)*' if spec.several else ""
        return [f'calls: {opening} " [" object{more} "]"', _objects(spec, "arguments")]
    between = f"{call_id} CALL_ID {arguments}" if spec.call_ids else arguments
    calls = [f"{opening} {json.dumps(name)} {between} @args_{i}" for i, (name, _) in enumerate(spec.functions)]
    rules = ["calls: call" + ("+" if spec.several else ""), "call: " + " | ".join(calls)]
    return [*rules, "CALL_ID: /[a-zA-Z0-9]{9}/"] if spec.call_ids else rules


def _objects(spec: AnswerGrammar, arguments: str) -> str:
    """The rule of a call written as a JSON object."""
    calls = []
    for i, (name, _) in enumerate(spec.functions):
        head = json.dumps(f'{{"name": "{name}", "{arguments}": ')
        calls.append(f'{head} @args_{i} "}}"')
    return "object: " + " | ".join(calls)


def _tag(spec: AnswerGrammar, tag: str) -> str:
    token = dict(spec.tags).get(tag)
    return json.dumps(tag) if token is None else f"<[{token}]>"


_RULES: Final[Mapping[ToolFormat, Callable[[AnswerGrammar], list[str]]]] = {
    "hermes": _hermes,
    "llama3": _llama3,
    "mistral": _mistral,
}
"""Writers of the rule `calls` and of the rules that it needs, by format."""
