"""From the messages of a conversation to the text that the model reads."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, Final

from gateway.intake.schemas import ChatMessage, ChatRequest
from gateway.intake.tool_schemas import Tool
from gateway.text.dialect import Dialect
from gateway.text.tokenizer import ChatTemplateError, PromptEnding
from gateway.web.http_errors import invalid

_ROLES: Final = frozenset({"system", "developer", "user", "assistant", "tool"})
"""Roles of the API. They are passed on even if the template may leave them out under some condition; `tool` only if the
template that renders the conversation tells the model of functions."""
_MAX_OTHER_ROLES: Final = 8
_SHORT_MESSAGES: Final = 8
_SHORT_CHARS: Final = 2048
"""A conversation of at most so many messages and characters is short: it is rendered on the event loop's thread."""


async def rendered(
    dialect: Dialect,
    messages: Sequence[ChatMessage],
    tools: Sequence[Tool],
    switches: Mapping[str, Any],
    ending: PromptEnding = "answer",
) -> str:
    """The text of a conversation, for `ModelTokenizer.encode` without further special tokens.

    Raises `ApiError`, a 400, for what the template refuses or would leave out, and for variables and functions that it
    does not take.
    """
    tokenizer = dialect.tokenizer
    for name in switches:
        if not tokenizer.takes_switch(name):
            raise invalid("chat_template_kwargs", f"chat_template_kwargs: {name[:64]!r} is not a request's to set")
    if tools and not dialect.takes_tools:
        raise invalid("tools", "tools: this model's chat template does not tell the model of functions")

    def render() -> str:
        _refuse_lost_messages(dialect, messages, with_tools=bool(tools))
        return tokenizer.render_chat(_for_template(messages), [tool.for_template() for tool in tools], switches, ending)

    try:
        if _is_short(messages, tools, switches):
            return render()
        return await asyncio.get_running_loop().run_in_executor(tokenizer.threads, render)
    except ChatTemplateError as error:
        raise invalid("messages", str(error)) from error


def _refuse_lost_messages(dialect: Dialect, messages: Sequence[ChatMessage], *, with_tools: bool) -> None:
    """Raise for the first message that the template would leave out because it does not know its role: the answer would
    be to another conversation."""
    known = _ROLES if dialect.reads("tools", with_tools=with_tools) else _ROLES - {"tool"}
    seen: set[str] = set()
    for index, message in enumerate(messages):
        param, role = f"messages[{index}].role", message.role
        if role in known or role in seen:
            continue
        seen.add(role)
        if len(seen) > _MAX_OTHER_ROLES:
            raise invalid(param, f"{param}: more than {_MAX_OTHER_ROLES} roles besides {', '.join(sorted(known))}")
        if dialect.tokenizer.leaves_out(role, with_tools=with_tools):
            raise invalid(param, f"{param}: this model's chat template leaves out messages of the role {role!r}")


def _for_template(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """The messages as chat templates expect them. Some require a result to have the name of its function, which clients
    of OpenAI's API do not repeat beside the id of the call."""
    names: dict[str, str] = {}
    given = [message.for_template() for message in messages]
    for message, each in zip(messages, given, strict=True):
        names |= {call.id: call.function.name for call in message.tool_calls or ()}
        if each["role"] == "tool" and each["tool_call_id"] in names:
            each.setdefault("name", names[each["tool_call_id"]])
    return given


def ending_of(form: ChatRequest) -> PromptEnding:
    """What the conversation is left open for. Raises `ApiError`, a 400."""
    if not form.continue_final_message:
        return "nothing" if form.add_generation_prompt is False else "answer"
    if form.add_generation_prompt:
        raise invalid("add_generation_prompt", "add_generation_prompt contradicts continue_final_message")
    if form.messages[-1].tool_calls:
        raise invalid("continue_final_message", "continue_final_message: the last message ends with calls")
    return "message"


def _is_short(messages: Sequence[ChatMessage], tools: Sequence[Tool], switches: Mapping[str, Any]) -> bool:
    """Whether a conversation is rendered sooner than a thread is reached."""
    if tools or len(messages) > _SHORT_MESSAGES or not all(isinstance(value, bool) for value in switches.values()):
        return False
    plain = all(each.tool_calls is None and each.reasoning_content is each.reasoning is None for each in messages)
    return plain and sum(len(each.content or "") for each in messages) < _SHORT_CHARS
