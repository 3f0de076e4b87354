"""An open request: a flow, and the client task that reads what comes of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from common.contract.block_hashes import BlockChain, BlockHash
from common.contract.ids import RequestKey
from common.contract.kv_layout import Fingerprint
from common.runtime.logs import about
from gateway.dispatch.mailbox import Mailbox
from gateway.dispatch.router import Cached, Expected
from gateway.serving.flow import Flow
from gateway.serving.flow_actions import Done
from gateway.serving.generation import Delta, Fail, PromptDelta

ClientMailbox = Mailbox[Delta | PromptDelta | Done | Fail]


@dataclass(slots=True, eq=False)
class OpenRequest:
    """A flow, and the client task that waits for it. When what happened is in the generation's waterfall."""

    flow: Flow
    came_at: float
    """Monotonic seconds at which the dispatcher received it."""
    block_size: int = 0
    """That of the workers; if none was usable when the request came, 0 until it is placed."""
    block_hashes: Sequence[BlockHash] = ()
    """Hashes of the full blocks of the prompt without its last token, which is computed in any case; none without
    a block size."""
    fingerprint: Fingerprint | None = None
    """Fingerprint of the workers that the request began on; it continues only on workers with the same one, unless
    nothing of it is left (`unbind`)."""
    cached: Cached = field(default_factory=dict)
    """Leading prompt tokens that each worker had cached when the request was last placed."""
    expected: Expected | None = None
    """Times expected when the request was accepted; None after its first token."""
    addresses: set[str] = field(default_factory=set)
    """Workers that had any of it."""
    timer: asyncio.TimerHandle | None = None
    """Timer for the earliest moment at which its time may be over."""
    mailbox: ClientMailbox = field(default_factory=Mailbox)
    """Events for the client, bounded by the request: deltas of at most its tokens, and one end."""

    def hash_prompt(self, block_size: int) -> None:
        """Hash the prompt's blocks of this size, unless they are hashed already."""
        if self.block_size == block_size:
            return
        generation = self.flow.generation
        chain = BlockChain(block_size, generation.cache_salt)
        # The last token is computed in any case, because its logits are needed.
        chain.extend(generation.token_ids, len(generation.token_ids) - 1)
        self.block_size, self.block_hashes = block_size, chain.hashes

    def unbind(self) -> None:
        """Let workers of any fingerprint begin the request anew, if nothing of it is left from the ones before: no
        attempt, no offered KV, and nothing that the client has been told."""
        flow = self.flow
        if not (self.told or flow.attempts or any(want.offer is not None for want in flow.wants)):
            self.fingerprint = None

    @property
    def told(self) -> bool:
        """Whether the client has been told of tokens, or of log probabilities of the prompt."""
        flow = self.flow
        prompt_len = len(flow.generation.token_ids)
        return flow.report.next_position > 1 or any(choice.next_position > prompt_len for choice in flow.choices)

    @property
    def deadline(self) -> float:
        """Monotonic seconds at which the request's budget ends."""
        began_at = self.flow.generation.admittance.opened_at
        assert began_at is not None
        return began_at + self.flow.generation.budget_s

    def budget_s(self, now: float) -> float:
        """Seconds that are left of its budget, for a worker: more than 0."""
        return max(0.001, self.deadline - now)

    def about(
        self, event: str, key: RequestKey, more: Callable[[], Mapping[str, object]] = dict, /, **fields: object
    ) -> dict[str, Any]:
        """Extra fields of a log line about an attempt. `id` is the request's id as the client knows it."""
        request_id = self.flow.generation.waterfall.request_id
        return about(event, more, id=request_id, request=key.request, attempt=key.attempt, **fields)
