"""The gateway of the model: the product's `Flow` of one request, and what the dispatcher does around it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from handoff_bounds import DEADLINE, PROMPT, token
from handoff_links import Link
from handoff_worker import GATEWAY

from common.contract.errors import Cause
from common.contract.ids import Handle, Incarnation, RequestKey
from common.contract.messages.fields import Message, RequestMessage
from common.contract.messages.session import Role
from common.contract.messages.worker import StepTokens, Tokens
from common.contract.sampling import SamplingParams
from gateway.serving.attempt import Deliver, SendToWorker
from gateway.serving.flow import Flow
from gateway.serving.flow_actions import Done, FlowAction, Unwanted, Want
from gateway.serving.generation import Fail, Generation
from gateway.serving.suspicion import Crash
from gateway.workers.worker_life import WorkerLife

if TYPE_CHECKING:
    from handoff_world import World


class Gateway:
    """`gateway.dispatch.dispatcher.Dispatcher` for one request."""

    me = GATEWAY
    name = GATEWAY

    def __init__(self, world: World) -> None:
        self.world = world
        bounds = world.bounds
        self.flow = Flow(
            Generation(
                token_ids=PROMPT,
                num_choices=1,
                sampling=SamplingParams(max_tokens=bounds.output_tokens),
                budget_s=DEADLINE,
            )
        )
        self.num_drawn = 0
        self.waiting: list[Want] = []
        self.lives: dict[str, Incarnation] = {}
        """Workers with an open session."""
        self.num_tokens = len(PROMPT)
        self.num_attempts = 0
        """Attempts that have begun."""
        self.ends = 0
        self.excused = False
        """Whether the request may fail: its time was up."""

    def do(self, actions: Iterable[FlowAction]) -> None:
        """Carry out what the flow decided."""
        for action in actions:
            match action:
                case SendToWorker(part, message):
                    self.world.link(self.me, part.life.address).send_up(message)
                case Deliver(delta):
                    self.deliver(delta.token_ids)
                case Want():
                    self.waiting.append(action)
                    self.look_again()
                case Unwanted(want):
                    self.waiting = [each for each in self.waiting if each is not want]
                case Done() | Fail():
                    self.ends += 1
                    assert self.ends == 1, "two ends"

    def deliver(self, token_ids: Iterable[int]) -> None:
        """The client gets tokens."""
        for given in token_ids:
            assert given == token(self.num_tokens), "the client's tokens are not each once and in order"
            self.num_tokens += 1
        assert self.ends == 0, "a token after the end"

    def look_again(self) -> None:
        """Place what waits, as far as there are workers."""
        for want in list(self.waiting):
            if want not in self.waiting:
                continue
            if self.num_attempts == self.world.bounds.attempts:
                self.waiting.remove(want)
                self.excused = True
                self.do(self.flow.fail(Fail(Cause.WORKER_LOST, "tried often enough")))
            else:
                self.place(want)

    def place(self, want: Want) -> None:
        """As `gateway.dispatch.router` would, with no load anywhere."""
        decodes = self.usable(Role.DECODE)
        prefills = [life for life in self.usable(Role.PREFILL) if life not in want.avoid]
        if not decodes or not self.flow.running:
            return
        decode = next((life for life in decodes if life not in want.avoid), decodes[0])
        prefill = prefills[0] if prefills and want.offer is None else None
        self.waiting.remove(want)
        self.num_attempts += 1
        self.do(self.flow.go(want, decode, prefill, DEADLINE, now=0.0))

    def usable(self, role: Role) -> list[WorkerLife]:
        first = "p" if role is Role.PREFILL else "d"
        return [WorkerLife(f"{a}", self.lives[a]) for a in sorted(self.lives) if a.startswith(first)]

    def can_move(self, address: str) -> bool:
        """Whether another worker could take over what this one generates."""
        others = [life for life in self.usable(Role.DECODE) if life.address != address]
        return bool(others) and bool(self.flow.attempts.movable(address))

    def move(self, address: str) -> None:
        """A decode worker drains: others take over what it generates."""
        for attempt, choice in self.flow.attempts.movable(address):
            refuge = next(life for life in self.usable(Role.DECODE) if life.address != address)
            self.do(self.flow.move(attempt, choice, refuge, DEADLINE, now=0.0))

    def cancel(self) -> None:
        """The client leaves."""
        self.excused = True
        self.do(self.flow.cancel())
        self.waiting.clear()

    def hear(self, address: str, message: Message) -> None:
        """A message of a worker arrives."""
        if isinstance(message, StepTokens):
            for handle, position, token_id in zip(message.handles, message.positions, message.token_ids, strict=True):
                self.take(address, handle, position, token_id)
            return
        assert isinstance(message, RequestMessage)
        found = self.flow.attempts.find(message.key, address)
        if found is not None:
            self.do(self.flow.on_message(*found, message))
        elif (want := self.flow.wants.find(message.key, address)) is not None:
            self.do(self.flow.on_offer(want, message))

    def take(self, address: str, handle: Handle, position: int, token_id: int) -> None:
        """A token of a step: most need nothing else, the others are handled as if told by `Tokens`."""
        for attempt in self.flow.attempts:
            if attempt.decode.life.address == address and handle in attempt.decode.handles:
                [choice] = attempt.choices.values()
                if attempt.take(choice, position, token_id):
                    self.deliver([token_id])
                    return
                request, number = attempt.key
                tokens = Tokens(request=request, attempt=number, choice=0, position=position, token_ids=(token_id,))
                self.hear(address, tokens)
                return

    def listed(self, address: str) -> tuple[RequestKey, ...]:
        return tuple(self.flow.keys_at(address))

    def on_resync(self, link: Link, known: tuple[RequestKey, ...]) -> None:
        self.do(self.flow.on_resync(link.address, set(link.listed), set(known)))

    def on_lost(self, address: str, *, crashed: bool) -> None:
        self.lives.pop(address, None)
        self.do(self.flow.worker_lost(address, "lost", Crash(at=0.0) if crashed else None))

    def on_open(self, address: str, worker: Incarnation) -> None:
        self.lives[address] = worker
        self.look_again()
