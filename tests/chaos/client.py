"""A client of a gateway process that keeps what it was told, streaming or not."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import aiohttp


@dataclass
class Outcome:
    """What a client got."""

    status: int
    tokens: list[str] = field(default_factory=list)
    reason: str | None = None
    usage: dict[str, int] = field(default_factory=dict)
    error: str = ""


async def ask(session: aiohttp.ClientSession, url: str, request: dict[str, Any]) -> Outcome:
    """One request, to its end."""
    request = {name: value for name, value in request.items() if value is not None}
    async with session.post(f"{url}/v1/completions", json=request) as response:
        outcome = Outcome(response.status)
        if response.status != 200:
            outcome.error = await response.text()
        elif request.get("stream"):
            async for line in response.content:
                if line.startswith(b"data: ") and line.strip() != b"data: [DONE]":
                    _take(outcome, json.loads(line[6:]))
        else:
            _take(outcome, await response.json())
    return outcome


def _take(outcome: Outcome, chunk: dict[str, Any]) -> None:
    if "error" in chunk:
        outcome.error = json.dumps(chunk["error"])
        return
    for choice in chunk["choices"]:
        outcome.tokens += choice["logprobs"]["tokens"] if choice["logprobs"] else []
        outcome.reason = choice["finish_reason"] or outcome.reason
    for name, number in (chunk.get("usage") or {}).items():
        if isinstance(number, int):  # what was cached depends on where it was computed
            outcome.usage[name] = number
