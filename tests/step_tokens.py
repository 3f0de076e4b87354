"""The tokens of a step as the messages that they stand for."""

from __future__ import annotations

from common.contract.ids import Handle, new_handle
from common.contract.messages.fields import Message
from common.contract.messages.gateway import Decode
from common.contract.messages.worker import StepTokens, Tokens


def handles(num_choices: int = 1) -> tuple[Handle, ...]:
    """One for each choice of a Decode, never used before."""
    return tuple(new_handle() for _ in range(num_choices))


class Reader:
    """Reads what one worker says, and knows what it was sent."""

    def __init__(self) -> None:
        self._choices: dict[Handle, tuple[Decode, int]] = {}

    def sent(self, message: Message) -> None:
        """Something was sent to the worker."""
        if isinstance(message, Decode):
            for handle, choice in zip(message.handles, message.choices, strict=True):
                self._choices[handle] = message, choice

    def read(self, message: Message) -> list[Message]:
        """What the message says, without StepTokens."""
        if not isinstance(message, StepTokens):
            return [message]
        columns = zip(message.handles, message.positions, message.token_ids, strict=True)
        return [self._tokens(*self._choices[handle], position, token_id) for handle, position, token_id in columns]

    def _tokens(self, work: Decode, choice: int, position: int, token_id: int) -> Tokens:
        return Tokens(
            request=work.request, attempt=work.attempt, choice=choice, position=position, token_ids=(token_id,)
        )
