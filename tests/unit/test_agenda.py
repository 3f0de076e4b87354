"""One inbox, and a core that is not called while it decides."""

from __future__ import annotations

from typing import cast

import pytest
from migration_bench import GATEWAY, World

from common.contract.ids import Incarnation
from common.contract.messages.fields import Message
from common.contract.messages.gateway import Abort, Drain
from common.contract.messages.worker import Cancelled, Tokens
from common.worker.agenda import Agenda, Inbox, PlanWanted
from common.worker.events import Event, Ticked
from kv_transfer.events import Consequence, Released, Send, Serve


def test_what_comes_while_an_item_is_handled_waits_its_turn_and_is_handled_before_put_returns() -> None:
    told: list[str] = []

    def handle(item: str) -> None:
        told.append(f"{item} begins")
        if item == "a":
            inbox.put("b")
            inbox.put("c")
        told.append(f"{item} ends")

    inbox = Inbox(handle)
    inbox.put("a")
    assert told == ["a begins", "a ends", "b begins", "b ends", "c begins", "c ends"]


def test_an_error_leaves_an_inbox_that_goes_on() -> None:
    handled: list[int] = []

    def handle(item: int) -> None:
        if item == 0:
            raise ZeroDivisionError
        handled.append(item)

    inbox = Inbox(handle)
    with pytest.raises(ZeroDivisionError):
        inbox.put(0)
    inbox.put(1)
    assert handled == [1]


def test_consequences_are_settled_in_order_before_the_actions_are_returned() -> None:
    told: list[object] = []

    def decide(event: Event | Consequence) -> None:
        told.append(event)
        if isinstance(event, Ticked):
            agenda.emit(Released((1,)))
            agenda.emit(Serve(serving=True))
            agenda.emit(Released((2,)))
            assert told == [Ticked()], "settled before the part that emitted it has returned"
        elif event == Released((1,)):
            agenda.emit(Released((3,)))

    agenda = Agenda(decide)
    assert agenda.handle(Ticked(), 5.0) == [Serve(serving=True)]
    assert told == [Ticked(), Released((1,)), Released((2,)), Released((3,))]
    assert agenda.clock() == 5.0
    told.clear()
    assert agenda.handle(Serving, 6.0) == [], "actions are returned once"


Serving = cast("Event", "an event from which nothing follows")


def test_the_conclusion_comes_last_and_what_follows_from_it_is_settled_too() -> None:
    told: list[object] = []

    def conclude() -> None:
        told.append("conclusion")
        if told.count("conclusion") == 1:
            agenda.emit(Released((1,)))

    agenda = Agenda(told.append, conclude=conclude)
    agenda.handle(Ticked(), 0.0)
    assert told == [Ticked(), "conclusion", Released((1,)), "conclusion"]


def test_what_comes_last_waits_for_the_conclusion_and_for_all_that_follows() -> None:
    told: list[object] = []

    def decide(event: Event | Consequence) -> None:
        told.append(event)
        if isinstance(event, Ticked):
            agenda.emit_last(PlanWanted(None))
            agenda.emit(Released((1,)))
        elif event == Released((1,)):
            agenda.emit(Released((2,)))

    agenda = Agenda(decide, conclude=lambda: told.append("conclusion"))
    agenda.handle(Ticked(), 0.0)
    assert told == [Ticked(), Released((1,)), Released((2,)), "conclusion", PlanWanted(None), "conclusion"]


def test_a_core_that_is_called_while_it_decides_fails() -> None:
    def decide(event: Event | Consequence) -> None:
        agenda.handle(Ticked(), 0.0)

    agenda = Agenda(decide)
    with pytest.raises(AssertionError, match="while the core decides"):
        agenda.handle(Ticked(), 0.0)


def test_a_message_that_an_action_brings_about_waits_until_the_other_actions_are_carried_out() -> None:
    """The gateway answers its first token, from within `send`, with an abort."""
    world = World(("d0",))
    [site] = world.sites.values()
    leg = world.gateway.ask(site, [1, 2, 3], 20)
    sent: list[str] = []
    send = site.send

    def answering(peer: Incarnation, message: Message) -> None:
        sent.append(type(message).__name__)
        send(peer, message)
        if isinstance(message, Tokens) and not leg.aborted:
            leg.aborted = leg.ask.ended = True
            site.worker.on_message(GATEWAY, Abort(request=leg.key.request, attempt=leg.key.attempt))
            assert leg.key.request in site.core.book.requests, "the core was called in the middle of its actions"

    site.send = answering  # type: ignore[method-assign]
    world.run()
    assert sent == ["Timings", "Tokens", "Cancelled"]
    assert [type(end) for end in leg.ends] == [Cancelled]
    world.check_end()


def test_a_send_is_an_action() -> None:
    agenda = Agenda(lambda event: agenda.send(GATEWAY, Drain()))
    assert agenda.handle(Ticked(), 0.0) == [Send(GATEWAY, Drain())]
