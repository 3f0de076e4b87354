"""What a core has decided: actions to be carried out, and consequences that come first."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from common.contract.ids import Incarnation
from common.contract.messages.fields import Message
from common.worker.events import Action, Event, PlannedStep
from kv_transfer.events import Consequence, Send

_Item = TypeVar("_Item")


class Inbox(Generic[_Item]):
    """A queue that is emptied before the outermost `put` returns. A `put` from within only enqueues."""

    def __init__(self, handle: Callable[[_Item], None]) -> None:
        self._handle = handle
        self._items: deque[_Item] = deque()
        self._emptying = False

    def put(self, item: _Item) -> None:
        """Enqueue `item`. Unless items are being handled already, handle it and all that follow from it, in order."""
        self._items.append(item)
        if self._emptying:
            return
        self._emptying = True
        try:
            while self._items:
                self._handle(self._items.popleft())
        finally:
            self._emptying = False


@dataclass(frozen=True, slots=True)
class PlanWanted(Consequence):
    """A step is to be planned, now that everything else is decided: a prefill worker's next one, or a decode worker's
    once more, after a plan that was empty."""

    before: PlannedStep | None
    """The step that still runs; None if none does."""


class Agenda:
    """The decisions of one core while it handles an event.

    A core's parts call `emit`. A consequence is acted on after the part that emitted it has returned, and before the
    core returns its actions. So no part is called while it decides.
    """

    def __init__(
        self, decide: Callable[[Event | Consequence], None], conclude: Callable[[], None] = lambda: None
    ) -> None:
        """`decide` handles an event or a consequence. `conclude` is called when no consequence is left, and may emit
        new ones."""
        self.now = 0.0
        """Monotonic seconds of the event that is handled."""
        self._decide = decide
        self._conclude = conclude
        self._due: deque[Consequence] = deque()
        self._last: deque[Consequence] = deque()
        """Consequences that wait until no other is left."""
        self._actions: list[Action] = []
        self._deciding = False

    def clock(self) -> float:
        """`now`, for parts that want a clock."""
        return self.now

    def emit(self, decision: Action | Consequence) -> None:
        """Add an action or a consequence."""
        if isinstance(decision, Consequence):
            self._due.append(decision)
        else:
            self._actions.append(decision)

    def emit_last(self, consequence: Consequence) -> None:
        """Add a consequence that comes after all others, those included that follow from them or from the
        conclusion."""
        self._last.append(consequence)

    def send(self, peer: Incarnation, message: Message) -> None:
        """Add the action to send `message` to a client."""
        self._actions.append(Send(peer, message))

    def handle(self, event: Event, now: float) -> list[Action]:
        """Decide on an event and act on all its consequences; returns the actions, in order."""
        assert not self._deciding, f"{event} came while the core decides"
        self._deciding = True
        self.now = now
        try:
            self._decide(event)
            self._run_consequences()
        finally:
            self._deciding = False
        actions, self._actions = self._actions, []
        return actions

    def _run_consequences(self) -> None:
        while True:
            while self._due:
                self._decide(self._due.popleft())
            self._conclude()
            if self._due:
                continue
            if not self._last:
                return
            self._decide(self._last.popleft())
