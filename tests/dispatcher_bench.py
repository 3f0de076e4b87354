"""A dispatcher whose workers the test plays, with links that only keep what was sent, and time that the test makes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from common.contract.block_hashes import SHORT_NAME_BYTES, block_hashes
from common.contract.errors import Cause
from common.contract.ids import Incarnation, RequestKey, new_incarnation
from common.contract.kv_layout import Fingerprint, KVLayout
from common.contract.messages.fields import FinishReason, Message, RequestMessage
from common.contract.messages.gateway import Abort, Ack, Decode, Prefill, PrefixHint
from common.contract.messages.session import Heartbeat, Phase, Role, Welcome
from common.contract.messages.worker import CacheEvents, Failed, StepTokens, Tokens, Trial
from common.contract.sampling import SamplingParams
from common.contract.tiers import Tier
from common.runtime.channel import Traffic
from common.runtime.clock import Pulse, monotonic
from gateway.dispatch.dispatcher import Dispatcher
from gateway.serving.generation import Admittance, Delta, Generation, GenerationFailed, PromptDelta
from gateway.workers.registry import Registry

P, P2, D, D2, D3 = "p:1", "p:2", "d:1", "d:2", "d:3"
PROMPT = (7, 8, 9)
LAYOUT = KVLayout(num_layers=1, num_kv_heads=1, head_dim=1, block_size=16, dtype="float32")
FINGERPRINT = Fingerprint(config_hash="c", weights_hash="w", layout=LAYOUT)


def role_of(address: str) -> Role:
    return Role.PREFILL if address.startswith("p") else Role.DECODE


def welcome(
    role: Role, open_requests: Iterable[RequestKey] = (), weights_hash: str = "w", max_sequence_tokens: int = 10_000
) -> Welcome:
    return Welcome(
        role=role,
        fingerprint=replace(FINGERPRINT, weights_hash=weights_hash),
        max_sequence_tokens=max_sequence_tokens,
        transport="zmq",
        transport_metadata=b"",
        open_requests=tuple(open_requests),
    )


def heartbeat(phase: Phase = Phase.SERVING, *, used: int = 0, total: int = 100) -> Heartbeat:
    return Heartbeat(
        number=1,
        sent=0,
        steps=0,
        running=0,
        waiting=0,
        blocks_used=used,
        blocks_total=total,
        phase=phase,
    )


class Link:
    """Stands for a `ControlClient`: what was sent, and the worker's life."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.worker: Incarnation = new_incarnation()
        self.sent: list[Message] = []
        self.unsent_work: frozenset[RequestKey] = frozenset()
        self.traffic = Traffic()

    @property
    def num_sent(self) -> int:
        return len(self.sent)

    def send(self, message: Message) -> None:
        self.sent.append(message)


class Time:
    """The running loop's time stands still unless it is moved."""

    def __init__(self) -> None:
        self.now = 1000.0
        asyncio.get_running_loop().time = self  # type: ignore[method-assign]

    def __call__(self) -> float:
        return self.now

    async def advance(self, seconds: float) -> None:
        """Let what is due by then happen."""
        self.now += seconds
        await settle()


async def settle() -> None:
    """Let every task go on as far as it can."""
    for _ in range(5):
        await asyncio.sleep(0)


def forbid_calling_back(dispatcher: Any) -> None:
    """From now on it is an error if an action causes another one before it is carried out itself."""
    carry_out, current = dispatcher._carry_out, list[object]()

    def carry_out_one(request: object, action: object) -> None:
        assert not current, f"{action} in the middle of {current}"
        current.append(action)
        try:
            carry_out(request, action)
        finally:
            current.clear()

    dispatcher._carry_out = carry_out_one


class Bench:
    """A dispatcher and workers that the test plays: a prefill and a decode worker, unless told otherwise."""

    def __init__(
        self,
        prefill: tuple[str, ...] = (P,),
        decode: tuple[str, ...] = (D,),
        *,
        opened: bool = True,
        clock: Callable[[], float] = monotonic,
        **options: Any,
    ) -> None:
        self.clock = clock
        self.registry = Registry(prefill, decode, "c")
        self.dispatcher = Dispatcher(new_incarnation(), self.registry, clock, Pulse(), **options)
        forbid_calling_back(self.dispatcher)
        self.links = {address: Link(address) for address in (*prefill, *decode)}
        self.dispatcher.links._links.update(self.links)  # type: ignore[arg-type]
        for address in self.links if opened else ():
            self.open(address)
        self.tasks: list[asyncio.Task[list[Delta]]] = []
        self.told: list[PromptDelta] = []

    # --- workers -------------------------------------------------------------------------------------------------

    def open(self, address: str, *open_requests: RequestKey, restarted: bool = False, **says: Any) -> None:
        """A session opens; the worker still holds some requests."""
        if restarted:
            self.links[address].worker = new_incarnation()
        self.dispatcher.links.on_open(self.link(address), welcome(role_of(address), open_requests, **says))

    def lose(self, address: str, why: str = "silent", *, crashed: bool = False) -> None:
        """The session is over; a process that has crashed has done so half a second ago."""
        if crashed:
            assert isinstance(self.clock, Time), "only in the test's own time"
            self.clock.now += 0.5
        self.dispatcher.links.on_lost(self.link(address), why, crashed=crashed)

    def say(self, address: str, message: Message) -> None:
        self.dispatcher.links.on_message(self.link(address), message)

    def fail(self, address: str, key: RequestKey, cause: Cause) -> None:
        self.say(address, Failed(request=key.request, attempt=key.attempt, cause=cause, message="why"))

    def trial(self, address: str, *keys: RequestKey, beside: int = 0) -> None:
        """That worker computes nothing but these requests and so many of other gateways; with none, everybody's."""
        self.say(address, Trial(num_requests=len(keys) + beside, requests=keys))

    def link(self, address: str) -> Any:
        return self.links[address]

    def tokens(
        self,
        address: str,
        key: RequestKey,
        position: int,
        *ids: int,
        reason: FinishReason | None = None,
        choice: int = 0,
    ) -> None:
        """Output tokens, from `position` of the output: as columns where a decode worker may say it so."""
        (prompt_len,) = {work.prompt_len for work in self.work[key].values()}
        work = self.work[key].get(address)
        if isinstance(work, Decode) and len(ids) == 1 and reason is None and choice in work.choices:
            handle = work.handles[work.choices.index(choice)]
            self.say(address, StepTokens(handles=(handle,), positions=(prompt_len + position,), token_ids=ids))
            return
        self.say(
            address,
            Tokens(
                request=key.request,
                attempt=key.attempt,
                choice=choice,
                position=prompt_len + position,
                token_ids=ids,
                finish_reason=reason,
            ),
        )

    def holds(self, address: str, token_ids: Sequence[int], *, salt: str = "") -> None:
        """A worker tells that its cache holds the full blocks of a sequence."""
        names = block_hashes(token_ids, LAYOUT.block_size, salt)
        stored = b"".join(name[:SHORT_NAME_BYTES] for name in names)
        self.say(address, CacheEvents(begins=False, stored=stored, removed=b""))

    # --- clients -------------------------------------------------------------------------------------------------

    async def request(
        self,
        prompt: Sequence[int] = PROMPT,
        *,
        n: int = 1,
        max_tokens: int = 99,
        salt: str = "",
        budget_s: float = 30.0,
        tier: Tier = Tier.STANDARD,
        admittance: Admittance | None = None,
        prompt_logprobs: int | None = None,
        shortcut: Callable[[Delta], bool] | None = None,
    ) -> tuple[RequestKey, asyncio.Task[list[Delta]]]:
        """A client asks; its key, and what it is given. What it is told of the prompt comes into `told`."""

        async def collect() -> list[Delta]:
            deltas = []
            async for delta in self.dispatcher.generate(generation):
                if isinstance(delta, Delta):
                    deltas.append(delta)
                else:
                    assert not deltas, "the prompt comes first"
                    self.told.append(delta)
            return deltas

        sampling = SamplingParams(max_tokens=max_tokens)
        generation = Generation(
            token_ids=tuple(prompt),
            num_choices=n,
            sampling=sampling,
            budget_s=budget_s,
            cache_salt=salt,
            tier=tier,
            admittance=admittance or Admittance(),
            prompt_logprobs=prompt_logprobs,
            shortcut=shortcut,
        )
        known = set(self.work)
        task = asyncio.create_task(collect())
        self.tasks.append(task)
        while self.work.keys() == known:
            await asyncio.sleep(0)
            if task.done():
                task.result()
        (key,) = self.work.keys() - known
        return key, task

    async def whole(self, prompt: Sequence[int], output: Sequence[int], **options: Any) -> RequestKey:
        """A request from beginning to end, wherever it is sent."""
        key, task = await self.request(prompt, **options)
        *prefill, decode = self.work[key]
        for address in prefill:
            self.tokens(address, key, 0, output[0])
        self.tokens(decode, key, 0, *output, reason="stop")
        await task
        return key

    # --- what has come of it -------------------------------------------------------------------------------------

    @property
    def work(self) -> dict[RequestKey, dict[str, Prefill | Decode]]:
        """What each worker was given, by attempt, in the order in which the attempts began."""
        work: dict[RequestKey, dict[str, Prefill | Decode]] = {}
        for address, link in self.links.items():
            for message in link.sent:
                if isinstance(message, Prefill | Decode):
                    work.setdefault(message.key, {})[address] = message
        return work

    def newest(self, key: RequestKey) -> tuple[RequestKey, dict[str, Prefill | Decode]]:
        """The newest attempt at a request, and what it gave to whom."""
        newest = max(each for each in self.work if each.request == key.request)
        return newest, self.work[newest]

    def decode(self, address: str) -> Decode:
        """The last Decode that a worker was given."""
        work = self.sent(address, Decode)[-1]
        assert isinstance(work, Decode)
        return work

    def hint(self, key: RequestKey) -> PrefixHint | None:
        """What the prefill worker was told of the prompt's beginning."""
        prefill = self.work[key][P]
        assert isinstance(prefill, Prefill)
        return prefill.prefix

    def counted(self, name: str, **labels: str) -> float:
        """A metric's value."""
        return next(
            sample.value
            for metric in self.dispatcher.collect()
            for sample in metric.samples
            if sample.name == f"baton_gateway_{name}" and sample.labels == labels
        )

    def sent(self, address: str, kind: type[Message]) -> list[Message]:
        return [message for message in self.links[address].sent if isinstance(message, kind)]

    def goodbyes(self, address: str) -> list[RequestKey]:
        """What a worker was told to let go of."""
        messages = self.sent(address, RequestMessage)
        return [message.key for message in messages if isinstance(message, Abort | Ack)]

    def in_flight(self, *addresses: str) -> tuple[int, ...]:
        """Requests at each worker: the prefill and the decode worker, unless told otherwise."""
        return tuple(self.registry.workers[address].in_flight for address in addresses or (P, D))

    async def close(self) -> None:
        """Every client leaves; nothing may be left of any."""
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        assert self.dispatcher.ready().details()["in_flight"] == 0
        assert not self.dispatcher._by_id
        assert not self.dispatcher._at
        assert not self.dispatcher.placement.waiting
        for address in self.links:
            assert self.in_flight(address) == (0,), address
        self.dispatcher.links._context.destroy(linger=0)


async def failure(task: asyncio.Task[list[Delta]]) -> Cause:
    """The cause with which a request ends, now."""
    await settle()
    assert task.done(), "it has not ended"
    with pytest.raises(GenerationFailed) as caught:
        await task
    return caught.value.cause


async def text(task: asyncio.Task[list[Delta]], choice: int = 0) -> list[int]:
    """The tokens of a request that is complete by now."""
    await settle()
    assert task.done(), "it has not ended"
    return [token for delta in await task if delta.choice == choice for token in delta.token_ids]
