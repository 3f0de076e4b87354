"""Vercel's AI SDK (`ai`, `@ai-sdk/openai-compatible`) under Node: what `vercel_ai.mjs` is told to ask."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from questions import ANSWER, CODE_SCHEMA, FREQUENCY_PENALTY, PROMPT, QUESTION, TOO_LONG, TOOL, TOOL_RESULT

SCRIPT = Path(__file__).with_name("vercel_ai.mjs")
GIVEN = {
    "prompt": PROMPT,
    "question": QUESTION,
    "tool": TOOL,
    "tool_result": TOOL_RESULT,
    "schema": CODE_SCHEMA,
    "frequency_penalty": FREQUENCY_PENALTY,
    "too_long": TOO_LONG,
}
pytestmark = pytest.mark.node

Run = Callable[[str], Any]


@pytest.fixture
def run(base_url: str, model: str) -> Run:
    """Runs a case of the script."""

    def case(name: str) -> Any:
        command = ["node", str(SCRIPT), base_url, model, name]
        given = json.dumps(GIVEN)
        done = subprocess.run(command, input=given, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return case


def test_generate_text(run: Run) -> None:
    answer = run("generateText")
    assert (answer["text"], answer["finishReason"]) == (ANSWER, "stop")
    assert answer["usage"]["outputTokens"] == len(ANSWER) + 1
    assert answer["usage"]["totalTokens"] == answer["usage"]["inputTokens"] + len(ANSWER) + 1


def test_stream_text(run: Run) -> None:
    answer = run("streamText")
    assert ("".join(answer["parts"]), answer["finishReason"]) == (ANSWER, "stop")
    assert len(answer["parts"]) > 1
    assert answer["usage"]["outputTokens"] == len(ANSWER) + 1


def test_a_completion(run: Run) -> None:
    assert run("completion")["text"].strip()


@pytest.mark.parametrize("case", ["tools", "streamTools"])
def test_a_call_and_its_result(run: Run, case: str) -> None:
    answer = run(case)
    first, second = answer["calls"]
    assert [call["toolName"] for call in first] == ["look_up"]
    assert first[0]["input"]["name"] in ("Mira", "Otto")
    assert second == []
    assert answer["text"] == ANSWER
    if case == "streamTools":
        assert {"tool-input-start", "tool-input-delta", "tool-call", "tool-result"} <= set(answer["kinds"])
        assert "error" not in answer["kinds"]
    else:
        assert answer["reasons"] == ["tool-calls", "stop"]


@pytest.mark.parametrize("case", ["generateObject", "streamObject"])
def test_an_object(run: Run, case: str) -> None:
    code = run(case)["object"]["code"]
    assert len(code) == 4
    assert code.isdigit()


def test_a_record(run: Run) -> None:
    """zod writes `propertyNames` for one."""
    assert run("record")["error"] in (None, "AI_NoObjectGeneratedError")


def test_fields_of_a_request(run: Run) -> None:
    cut, stopped = run("fields")
    assert cut == {"text": ANSWER[:2], "finishReason": "length"}
    assert stopped == {"text": ANSWER[:2], "finishReason": "stop"}


def test_a_stream_that_is_left(run: Run) -> None:
    """`base_url` waits until nothing is left of it."""
    kinds = run("abort")["kinds"]
    assert "text-delta" in kinds
    assert kinds[-1] == "abort"


def test_errors_are_its_own(run: Run) -> None:
    unknown, wrong, long = run("errors")
    assert {each["name"] for each in (unknown, wrong, long)} == {"AI_APICallError"}
    assert (unknown["statusCode"], unknown["code"]) == (404, "model_not_found")
    assert (wrong["statusCode"], wrong["code"]) == (400, "invalid_value")
    assert "top_p" in wrong["message"]
    assert (long["statusCode"], long["code"]) == (400, "context_length_exceeded")
    assert not any(each["isRetryable"] for each in (unknown, wrong, long))
