"""LangChain's `ChatOpenAI`, and its `OpenAI` for completions."""

from __future__ import annotations

from typing import Any, Literal

import openai
import pytest
from langchain_core.exceptions import ContextOverflowError
from langchain_core.messages import AIMessageChunk, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel, Field
from questions import ANSWER, FREQUENCY_PENALTY, PROMPT, QUESTION, TOO_LONG, TOOL_RESULT


@tool
def look_up(name: Literal["Mira", "Otto"]) -> str:
    """What is known of somebody."""
    return TOOL_RESULT


class Code(BaseModel):
    """A code of four digits."""

    code: str = Field(pattern="^[0-9]{4}$")


@pytest.fixture
def common(base_url: str, model: str) -> dict[str, Any]:
    return {"base_url": base_url, "model": model, "api_key": "any", "temperature": 0, "max_retries": 0}


@pytest.fixture
def chat(common: dict[str, Any]) -> ChatOpenAI:
    return ChatOpenAI(**common)


@pytest.fixture
def forced(common: dict[str, Any]) -> ChatOpenAI:
    return ChatOpenAI(**common, frequency_penalty=FREQUENCY_PENALTY, max_tokens=300)


def test_invoke(chat: ChatOpenAI, model: str) -> None:
    answer = chat.invoke(PROMPT)
    assert answer.content == ANSWER
    assert answer.usage_metadata["output_tokens"] == len(ANSWER) + 1
    assert answer.response_metadata["model_name"] == model
    assert answer.response_metadata["finish_reason"] == "stop"
    several = chat.batch([PROMPT, PROMPT.replace("of Mira?", "of Otto?")])
    assert [each.content for each in several] == [ANSWER, "2093"]


def test_stream(chat: ChatOpenAI) -> None:
    whole = AIMessageChunk(content="")
    chunks = list(chat.stream(PROMPT, stream_usage=True))
    for chunk in chunks:
        whole += chunk
    assert whole.content == ANSWER
    assert sum(bool(chunk.content) for chunk in chunks) > 1
    assert whole.usage_metadata["output_tokens"] == len(ANSWER) + 1


async def test_asynchronously(chat: ChatOpenAI) -> None:
    assert (await chat.ainvoke(PROMPT)).content == ANSWER
    assert "".join([chunk.content async for chunk in chat.astream(PROMPT)]) == ANSWER


def test_a_stream_that_is_left(common: dict[str, Any], in_flight: Any) -> None:
    """`base_url` waits until nothing is left of it."""
    endless = ChatOpenAI(**common, max_tokens=2000, extra_body={"ignore_eos": True})
    stream = endless.stream(PROMPT)
    next(stream)
    assert in_flight() == 1
    stream.close()


@pytest.mark.parametrize("streamed", [False, True])
def test_bind_tools(chat: ChatOpenAI, forced: ChatOpenAI, streamed: bool) -> None:
    """A call and its result, as an agent has them."""
    calling = forced.bind_tools([look_up], tool_choice="any", strict=True)
    asked = HumanMessage(QUESTION)
    if streamed:
        message = AIMessageChunk(content="")
        for chunk in calling.stream([asked]):
            message += chunk
    else:
        message = calling.invoke([asked])
    (call,) = message.tool_calls
    assert call["name"] == "look_up"
    result = look_up.invoke(call)
    assert isinstance(result, ToolMessage)
    answer = chat.bind_tools([look_up]).invoke([asked, message, result])
    assert (answer.content, answer.tool_calls) == (ANSWER, [])


def test_a_call_by_name(chat: ChatOpenAI, forced: ChatOpenAI) -> None:
    answer = forced.bind_tools([look_up], tool_choice="look_up", parallel_tool_calls=False).invoke(QUESTION)
    assert [call["name"] for call in answer.tool_calls] == ["look_up"]
    none = chat.bind_tools([look_up], tool_choice="none").invoke(PROMPT)
    assert (none.content, none.tool_calls) == (ANSWER, [])


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_with_structured_output(forced: ChatOpenAI, method: Any) -> None:
    answer = forced.with_structured_output(Code, method=method).invoke(PROMPT)
    assert isinstance(answer, Code)


def test_fields_of_a_request(common: dict[str, Any]) -> None:
    cut = ChatOpenAI(**common, max_tokens=2, reasoning_effort="low", verbosity="low").invoke(PROMPT)
    assert (cut.content, cut.response_metadata["finish_reason"]) == (ANSWER[:2], "length")
    assert ChatOpenAI(**common, stop=["1"]).invoke(PROMPT).content == ANSWER[:2]
    logged = ChatOpenAI(**common, logprobs=True, top_logprobs=2, seed=1).invoke(PROMPT)
    assert len(logged.response_metadata["logprobs"]["content"]) == len(ANSWER) + 1


def test_completions(common: dict[str, Any]) -> None:
    completions = OpenAI(**common, max_tokens=8)
    assert completions.invoke(PROMPT).strip() == ANSWER
    assert "".join(completions.stream(PROMPT)).strip() == ANSWER


def test_errors_are_its_own(common: dict[str, Any], chat: ChatOpenAI) -> None:
    with pytest.raises(openai.NotFoundError):
        ChatOpenAI(**common | {"model": "other"}).invoke(PROMPT)
    with pytest.raises(openai.BadRequestError, match="top_p"):
        ChatOpenAI(**common, top_p=2).invoke(PROMPT)
    with pytest.raises(ContextOverflowError):
        chat.invoke(TOO_LONG)
