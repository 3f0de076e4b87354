"""The choices that decode workers generate, by the handles in `StepTokens`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

from common.contract.ids import Handle
from common.contract.messages.worker import StepTokens, Tokens
from common.contract.sampling import MAX_CHOICES
from gateway.dispatch.open_request import ClientMailbox, OpenRequest
from gateway.serving.attempt import Attempt
from gateway.serving.choice import Choice
from gateway.serving.generation import Delta
from gateway.serving.waterfall import Leg

_MANY_UNREAD: Final = 64
"""Unread items of a client from which on its tokens are joined."""
_JOINED_TOKENS: Final = 64
"""Most tokens that are joined."""


@dataclass(slots=True, eq=False)
class _Row:
    """What a token of a choice leads to."""

    address: str
    attempt: Attempt
    choice: Choice
    leg: Leg
    mailbox: ClientMailbox
    shortcut: Callable[[Delta], bool] | None


class TokenRows:
    """Handle → choice, of the decode workers' assignments that are not over."""

    def __init__(self) -> None:
        self._rows: dict[Handle, _Row] = {}
        self.num_stale = 0
        """Tokens of choices that had ended."""

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, request: OpenRequest, attempt: Attempt) -> None:
        """Expect tokens of an attempt, which has begun in the waterfall."""
        decode, generation, mailbox = attempt.decode, attempt.generation, request.mailbox
        for handle, choice in zip(decode.handles, attempt.choices.values(), strict=True):
            leg = generation.waterfall.leg(attempt.key, choice.index)
            self._rows[handle] = _Row(decode.life.address, attempt, choice, leg, mailbox, generation.shortcut)

    def remove(self, handles: Iterable[Handle]) -> None:
        """Expect no more tokens with these handles."""
        for handle in handles:
            self._rows.pop(handle, None)

    def deliver(self, address: str, message: StepTokens, now: float) -> list[Tokens]:
        """Give each client the token of its sequence. Most tokens need nothing else; the others are returned, for the
        flows to decide. The tokens of one sequence, of which a step with a draft may have several, follow each
        other."""
        rows, rest = self._rows, []
        before: Handle | None = None
        for handle, position, token_id in zip(message.handles, message.positions, message.token_ids, strict=True):
            joined, before = handle == before, handle
            row = rows.get(handle)
            if row is None or row.address != address:
                self.num_stale += 1
                continue
            choice, leg = row.choice, row.leg
            if leg.first_at is not None and row.attempt.take(choice, position, token_id):
                leg.last_at = now
                delta = Delta(choice.index, (token_id,), joined=joined)
                if row.shortcut is None or not row.mailbox.waited_for or not row.shortcut(delta):
                    _put(row.mailbox, delta)
                continue
            request, attempt = row.attempt.key
            token_ids = (token_id,)
            rest.append(
                Tokens(request=request, attempt=attempt, choice=choice.index, position=position, token_ids=token_ids)
            )
        return rest


def _put(mailbox: ClientMailbox, delta: Delta) -> None:
    """Put a plain token's delta. If the client lags behind, add the token to its choice's newest delta instead, since a
    delta for each token takes several times the memory."""
    if len(mailbox) >= _MANY_UNREAD:
        for item in mailbox.newest(MAX_CHOICES):
            if isinstance(item, Delta) and item.choice == delta.choice:
                if len(item.token_ids) < _JOINED_TOKENS and item.logprobs is None and item.finish_reason is None:
                    item.token_ids += delta.token_ids
                    item.joined &= delta.joined
                    return
                break
    mailbox.put(delta)
