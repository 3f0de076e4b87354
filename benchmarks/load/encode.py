"""Encodes the bodies of requests as bytes before the run, so that sending one costs almost no time."""

from __future__ import annotations

import json
from collections.abc import Sequence

from benchmarks.load.plan import PlannedTurn
from benchmarks.load.settings import LoadSettings


class BodyEncoder:
    """Encodes turns for one endpoint."""

    def __init__(self, settings: LoadSettings, model: str) -> None:
        self._chat = settings.api == "chat"
        self._common = {
            "model": model,
            "stream": True,
            "stream_options": {"include_usage": True},
            "temperature": 0.0,
            **({"ignore_eos": True} if settings.ignore_eos else {}),
            **settings.extra_body,
        }

    @property
    def path(self) -> str:
        """The path of the API that receives the requests."""
        return "/v1/chat/completions" if self._chat else "/v1/completions"

    def encode(self, turns: Sequence[PlannedTurn]) -> list[TurnBody]:
        """The bodies of a conversation's turns."""
        return [self._turn(turn) for turn in turns]

    def _turn(self, turn: PlannedTurn) -> TurnBody:
        fields = json.dumps(self._common | {"max_tokens": turn.output_tokens}, separators=(",", ":"))
        if not self._chat:
            return TurnBody(f'{fields[:-1]},"prompt":'.encode(), turn.prompt.encode(), b"}")
        message = f'{{"role":"user","content":{turn.prompt}}}'
        return TurnBody(f'{fields[:-1]},"messages":['.encode(), message.encode(), b"]}")


class TurnBody:
    """A body in which only the model's earlier answers are missing."""

    __slots__ = ("_after", "_before", "new")

    def __init__(self, before: bytes, new: bytes, after: bytes) -> None:
        self._before = before
        self.new = new
        """The part that this turn adds: the prompt, or the user's message."""
        self._after = after

    def bytes(self, said: Sequence[bytes] = ()) -> bytes:
        """The complete body, with the model's answers `said` in earlier turns."""
        return self._before + b",".join([*said, self.new]) + self._after


def answer_message(text: str) -> bytes:
    """The model's answer as a message in the body of the next turn."""
    return json.dumps({"role": "assistant", "content": text}, separators=(",", ":")).encode()
