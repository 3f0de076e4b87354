"""Prefixes that another worker holds: decides whether to pull one instead of computing it, and keeps the pulls under
way.

In a conversation the KV of the last answer was computed by a decode worker. If that is pulled, the prefill worker
computes only the new text of the turn. A pull is a sink's pull like any other (`kv_transfer.pull`), under a request id
of its own. Until it has settled, none of its blocks are offered, and no later token is computed. Pure state.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Literal

from common.contract.errors import Cause
from common.contract.ids import Incarnation, RequestKey, new_request_id
from common.contract.messages.fields import MAX_PREFIX_BLOCKS
from common.contract.messages.gateway import Source
from common.contract.messages.handoff import AttachPrefix
from common.contract.messages.session import PULL_LATENCY_S
from common.scheduling.costs import Costs
from kv_transfer.pull import Pull
from prefill_worker.request import PrefillRequest, PromptState

log = logging.getLogger(__name__)

_FIRST_GUESS_BYTES_PER_S, _FIRST_GUESS_ON_GPU = 1e9, 1e10
"""Too good a guess costs a few pulls that take longer than computing; too bad a one costs hundreds of prompts that are
computed, until it is forgotten. On a GPU a prompt is computed so fast that the first of them would forbid pulls."""
_MOST_BYTES_PER_S = 1e12
"""No block is taken to be faster, however short pulls are: else many of them would make pulls look free, and as many
slow ones would be needed to show that they are not."""
_OBSERVATION_WEIGHT = 0.2
_MAX_RATIO = 4.0
"""Largest factor by which an observation may differ from the estimate; a larger one is clipped. The first read from a
worker opens connections, and so is slow."""
_FORGETTING = 0.99
"""Factor on an estimate each time that it forbids a pull: sooner or later one is tried again, which corrects it."""
_UNREACHABLE = (Cause.WORKER_LOST, Cause.FINGERPRINT, Cause.TRANSFER)
"""Causes of a failed pull that tell of the source, or of the way to it."""
_FIRST_PAUSE_S = 10.0
"""Seconds for which nothing is pulled from a source after such a failure. They double with each further one."""
_LONGEST_PAUSE_S = 320.0
_MEMORY_S = 60.0
"""Seconds for which a pause is remembered after its end. A failure after that begins a first pause."""
When = Literal["cost", "always", "never"]
"""When to pull what another worker holds: if that is cheaper than computing it, always, never."""
MAX_PULLS = 64
"""Most prefixes pulled at once; beyond that, prompts are computed."""


@dataclass(slots=True, eq=False)
class PrefixPull:
    """A pull, and the prompt that waits for it.

    `began` is in monotonic seconds.
    """

    pull: Pull
    request: PrefillRequest
    began: float
    expected_by: float
    """Monotonic seconds from which it is taken to hang: nothing more is pulled from its source until it and its reads
    have ended, it does not count among the pulls that share the network with one that begins later, and its prompt no
    longer keeps others from being put on hold."""
    until: float
    """Monotonic seconds at which the pull is given up and the prompt computed."""
    num_blocks: int = 0
    """Number of blocks that the source offered."""
    num_at_once: int = 1
    """Number of pulls that shared the network when it was offered its blocks, itself included."""


class PrefixPulls:
    """The pulls under way, by their own request ids.

    A pull is expected within `patience_s` seconds, or within twice the time that computing would take, if that is
    longer. After that it is taken to hang. A prompt waits for its pull for `patience_s` seconds, or for twice the time
    that computing would take, times the number of pulls under way that do not hang, if that is longer.
    """

    def __init__(
        self,
        me: Incarnation,
        block_size: int,
        block_bytes: int,
        costs: Costs,
        when: When,
        patience_s: float,
        *,
        on_gpu: bool = False,
    ) -> None:
        self._me = me
        self._patience_s = patience_s
        self._block_size = block_size
        self._when = when
        self._costs = costs
        self._s_per_block = block_bytes / (_FIRST_GUESS_ON_GPU if on_gpu else _FIRST_GUESS_BYTES_PER_S)
        self._least_s_per_block = block_bytes / _MOST_BYTES_PER_S
        self._pulls: dict[RequestKey, PrefixPull] = {}
        self._lingering: list[PrefixPull] = []
        """Pulls that were given up while a read was under way, and perhaps still is."""
        self._pauses: dict[Incarnation, tuple[float, float]] = {}
        """Source from which the last pull failed → (seconds for which nothing is pulled from it, when they end)."""
        self.num_tokens_pulled = 0
        """Prompt tokens that were pulled instead of computed."""
        self.ended = {"pulled": 0, "gave_up": 0}
        """Number of pulls by how they ended."""

    def __len__(self) -> int:
        return len(self._pulls)

    @property
    def token_s(self) -> float:
        """Estimated seconds to pull a token. If nothing is pulled, the seconds to compute one."""
        if self._when == "never":
            return self._costs.prompt_s_per_token
        return self._s_per_block / self._block_size

    def expected(self, request: PrefillRequest, num_here: int, now: float) -> int:
        """Leading tokens of the prompt that are here after a pull, if `choose` is expected to begin one at `now`; else
        0. Before it, `num_here` tokens are here, in full blocks.

        If prompts that are admitted at the same time begin the last of `MAX_PULLS`, this one is computed after all. It
        keeps the deadline that it was given, as if the pull brought its part."""
        if len(self._pulls) >= MAX_PULLS:
            return 0
        num_new = self._num_new(request, num_here, now)
        pays = self._when == "always" or self._pull_s(num_new) < self._compute_s(num_here, num_new)
        return num_here + num_new * self._block_size if num_new and pays else 0

    def choose(self, request: PrefillRequest, now: float) -> PrefixPull | None:
        """Choose once, for a request that has its blocks, whether to pull. Returns the pull, which counts as under way
        and which the caller begins. Returns None if no other worker holds more of the prompt than this one, if the
        pull is not expected to be faster than computing (the setting may override that), or if the last pull from that
        worker has just failed or one hangs."""
        if len(self._pulls) >= MAX_PULLS:
            return None
        hint, num_new = request.work.prefix, self._num_new(request, request.num_computed, now)
        request.prefix_tried = True
        if hint is None or not num_new:
            return None
        compute_s = self._compute_s(request.num_computed, num_new)
        if self._when == "cost" and self._pull_s(num_new) >= compute_s:
            if compute_s > PULL_LATENCY_S:  # else it is too short at any speed
                self._s_per_block = max(self._least_s_per_block, self._s_per_block * _FORGETTING)
            return None
        hashes = tuple(request.block_hashes[: request.num_computed // self._block_size + num_new])
        pull = Pull(hint.source, AttachPrefix(request=new_request_id(), attempt=1, block_hashes=hashes))
        num_at_once = 1 + sum(now < each.expected_by for each in self._pulls.values())
        expected_by, until = (now + max(self._patience_s, 2 * compute_s * num) for num in (1, num_at_once))
        prefix = self._pulls[pull.key] = PrefixPull(pull, request, now, expected_by, until)
        return prefix

    def _num_new(self, request: PrefillRequest, num_here: int, now: float) -> int:
        """Number of blocks that a pull could bring beyond the `num_here` tokens that are here; 0 if nothing is to be
        pulled from there, or was decided before."""
        hint = request.work.prefix
        if self._when == "never" or hint is None or hint.source.incarnation == self._me or request.prefix_tried:
            return 0
        incarnation = hint.source.incarnation
        if now < self._pauses.get(incarnation, (0.0, 0.0))[1]:
            return 0
        self._lingering = [each for each in self._lingering if not each.pull.over]
        late = (each for each in (*self._pulls.values(), *self._lingering) if each.expected_by <= now)
        if any(each.pull.source.incarnation == incarnation for each in late):
            return 0
        # The last token is always computed, for its logits.
        end = min(hint.num_tokens, len(request.work.token_ids) - 1) // self._block_size
        return max(0, min(end, MAX_PREFIX_BLOCKS) - num_here // self._block_size)

    def _pull_s(self, num_blocks: int) -> float:
        return PULL_LATENCY_S + num_blocks * self._s_per_block

    def _compute_s(self, num_here: int, num_blocks: int) -> float:
        """Seconds to compute `num_blocks` blocks after the first `num_here` tokens of a prompt."""
        return self._costs.prompt_s(num_here, num_here + num_blocks * self._block_size)

    def find(self, pull: Pull) -> PrefixPull:
        """The pull under way whose sink is `pull`."""
        return self._pulls[pull.key]

    def of(self, request: PrefillRequest) -> PrefixPull | None:
        """The pull that a request waits for; None if there is none."""
        return next((prefix for prefix in self._pulls.values() if prefix.request is request), None)

    def offered(self, pull: Pull, num_blocks: int, now: float) -> None:
        """The source offers so many blocks: they are read from now on."""
        prefix = self._pulls[pull.key]
        prefix.num_blocks, prefix.num_at_once = num_blocks, self._num_reading(now) + 1

    def _num_reading(self, at: float) -> int:
        """Number of pulls under way that take their part of the network: they were offered blocks, and did not hang at
        the time `at`."""
        return sum(each.num_blocks > 0 and at < each.expected_by for each in self._pulls.values())

    def pulled(self, pull: Pull, now: float) -> PrefixPull:
        """The pull has settled: update the estimate of seconds per block from its duration."""
        prefix = self._end(pull, now)
        self._pauses.pop(pull.source.incarnation, None)
        num_read = prefix.num_blocks - prefix.request.num_computed // self._block_size
        self._observe(self._seen_s_per_block(prefix, num_read, now))
        self.num_tokens_pulled += num_read * self._block_size
        self.ended["pulled"] += 1
        return prefix

    def gave_up(self, pull: Pull, cause: Cause | None, now: float) -> PrefixPull:
        """The pull has ended without valid blocks. It counts if the prompt is still wanted, and so computed. If its
        source could not be reached or read, or has offered nothing in time, nothing is pulled from there for a while.
        Else, if its time was up, it would have taken longer, which raises the estimate."""
        prefix = self._end(pull, now)
        if pull.quarantined:
            self._lingering.append(prefix)
        self.ended["gave_up"] += prefix.request.state is not PromptState.ENDED
        if cause in _UNREACHABLE or (cause is Cause.DEADLINE and not prefix.num_blocks):
            self._pause(pull.source, now)
        elif now >= prefix.until:
            num_new = len(pull.block_hashes or ()) - prefix.request.num_computed // self._block_size
            self._observe(max(self._s_per_block, self._seen_s_per_block(prefix, num_new, now)))
        return prefix

    def _seen_s_per_block(self, prefix: PrefixPull, num_blocks: int, now: float) -> float:
        """Seconds that a block of a pull that has just ended would have taken alone. Pulls share the network; how many
        do is looked at when the pull is offered its blocks and when it ends. Those that began to hang meanwhile count:
        where many share a slow network, all of them take long."""
        num_at_once = max(prefix.num_at_once, self._num_reading(prefix.began) + 1)
        return max(0.0, now - prefix.began - PULL_LATENCY_S) / max(1, num_blocks) / num_at_once

    def _pause(self, source: Source, now: float) -> None:
        """Pull nothing from `source` for a while, unless it is paused already and the pull had begun before."""
        self._pauses = {each: pause for each, pause in self._pauses.items() if now < pause[1] + _MEMORY_S}
        length_s, until = self._pauses.get(source.incarnation, (_FIRST_PAUSE_S / 2, now))
        if now >= until:
            length_s = min(2 * length_s, _LONGEST_PAUSE_S)
            self._pauses[source.incarnation] = (length_s, now + length_s)
            log.warning("%s cannot be read from: pulling no prefix from there for %.0f s", source, length_s)

    def _observe(self, s_per_block: float) -> None:
        old = self._s_per_block
        seen = min(max(s_per_block, old / _MAX_RATIO, self._least_s_per_block), old * _MAX_RATIO)
        self._s_per_block = old + _OBSERVATION_WEIGHT * (seen - old)

    def _end(self, pull: Pull, now: float) -> PrefixPull:
        prefix = self._pulls.pop(pull.key)
        prefix.request.held_s += now - prefix.began
        return prefix

    def overdue(self, now: float) -> list[PrefixPull]:
        """Pulls whose patience has run out."""
        return [prefix for prefix in self._pulls.values() if prefix.until <= now]
