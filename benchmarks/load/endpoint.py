"""Identifies the measured server: it is asked once, before the run."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from typing import Any

import aiohttp

from benchmarks.load.chunk import error_text
from common.contract.errors import OperatorError

_PROBE_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """The server's description of itself."""

    url: str
    model: str
    server: str | None
    """The server's `Server` header."""
    model_card: dict[str, Any] | None
    """The model's entry in /v1/models."""

    def as_json(self) -> dict[str, Any]:
        """The JSON form for the results file."""
        return {"url": self.url, "model": self.model, "server": self.server, "model_card": self.model_card}


async def probe(session: aiohttp.ClientSession, url: str, model: str | None) -> Endpoint:
    """Ask /v1/models. Raises `OperatorError` if nothing answers, or if `model` is None and the answer names none."""
    try:
        async with asyncio.timeout(_PROBE_TIMEOUT_S):
            async with session.get(f"{url}/v1/models") as response:
                server, status, text = response.headers.get("Server"), response.status, await response.text()
    except TimeoutError:
        raise OperatorError(f"{url} does not answer within {_PROBE_TIMEOUT_S:g} s") from None
    except (aiohttp.ClientError, OSError, UnicodeDecodeError) as error:
        raise OperatorError(f"{url} cannot be reached: {error}") from error
    cards = _cards(text) if status == 200 else []
    if model is None:
        if not cards:
            raise OperatorError(f"{url}/v1/models names no model (HTTP {status}: {_excerpt(text)}); give --model")
        model = str(cards[0]["id"])
    card = next((card for card in cards if card["id"] == model), None)
    if cards and card is None:
        raise OperatorError(f"{url} serves {', '.join(str(each['id']) for each in cards)}, not {model}")
    return Endpoint(url=url, model=model, server=server, model_card=card)


def _cards(text: str) -> list[dict[str, Any]]:
    try:
        data = json.loads(text)["data"]
    except (ValueError, KeyError, TypeError):
        return []
    return [each for each in data if isinstance(each, dict) and "id" in each] if isinstance(data, list) else []


def _excerpt(text: str) -> str:
    try:
        return error_text(json.loads(text))
    except ValueError:
        return error_text(text)
