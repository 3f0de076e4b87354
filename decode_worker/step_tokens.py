"""Tokens of a step that go to gateways as columns, one message to each gateway."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from common.contract.ids import Handle, Incarnation
from common.contract.messages.fields import MAX_STEP_TOKENS, Message
from common.contract.messages.worker import StepTokens


@dataclass(slots=True)
class _Columns:
    handles: list[Handle] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)


class StepReport:
    """Collects tokens until `send_all`."""

    def __init__(self) -> None:
        self._by_gateway: dict[Incarnation, _Columns] = {}

    def add(self, gateway: Incarnation, handle: Handle, position: int, token_id: int) -> None:
        """Add the token at `position` of the sequence that the gateway calls `handle`."""
        self.add_all(gateway, (handle,), (position,), (token_id,))

    def add_all(
        self, gateway: Incarnation, handles: Sequence[Handle], positions: Sequence[int], token_ids: Sequence[int]
    ) -> None:
        """Add tokens of some sequences of one gateway, as `add` does."""
        columns = self._by_gateway.get(gateway)
        if columns is None:
            columns = self._by_gateway[gateway] = _Columns()
        columns.handles += handles
        columns.positions += positions
        columns.token_ids += token_ids

    def send_all(self, send: Callable[[Incarnation, Message], None]) -> None:
        """Send what was added, and begin anew."""
        by_gateway, self._by_gateway = self._by_gateway, {}
        for gateway, columns in by_gateway.items():
            for start in range(0, len(columns.handles), MAX_STEP_TOKENS):
                part = slice(start, start + MAX_STEP_TOKENS)
                message = StepTokens(
                    handles=tuple(columns.handles[part]),
                    positions=tuple(columns.positions[part]),
                    token_ids=tuple(columns.token_ids[part]),
                )
                send(gateway, message)
