"""Sequences that move between decode workers, in any order of what can happen to them.

The workers, their pools, leases and pulls are real; the engine's memory says of each slot which tokens its KV was
computed from (`migration_bench`). A run is an interleaving: choices are generated, move, end, are aborted; workers
drain, resume, preempt and die; messages between them are lost, then a session opens again; one side takes the other for
lost; reads copy each block at a moment of its own, and fail; masks of sequences with a grammar come late, or never;
loans and leases outlive their time. Whatever the order:

* nothing is decoded from any KV but its own, and the client gets exactly the tokens that it would have got;
* a read writes to nobody's block;
* every worker ends every request it was given with one terminal: Finished, Failed, Cancelled, or Moved for each choice;
* no mask is awaited for a request that is over;
* once everything has ended, every block of every pool is free, and no offer, wait or loan is left.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from random import Random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from migration_bench import CountedMasks, Leg, Link, Site, World

from common.contract.messages.fields import Message
from common.contract.messages.session import Hello
from common.engine.grammar import GaveUp
from common.runtime.config import DecodeSettings
from kv_transfer.lender import LENT_TTL_S

Choose = Callable[[list[Any]], Any]
Act = Callable[[], None]
MAX_ASKS = 6
assert DecodeSettings.model_fields["max_waiting"].default > MAX_ASKS


class Play:
    """Chooses what happens next."""

    def __init__(self, choose: Choose) -> None:
        self.choose = choose
        self.world = World(
            ("d0", "d1", "d2"),
            num_blocks=choose([20, 24, 32]),
            num_host_blocks=choose([0, 8]),
            max_num_seqs=choose([2, 4, 8]),
            prefix_cache=choose([True, True, True, False]),
            run_ahead=choose(["on", "off"]),
        )
        self.masks = [CountedMasks(site) for site in self.world.sites.values()]
        self.calm: int = choose([10, 40, 150])
        """How often what leads on is chosen, compared with what disturbs."""

    def pick(self, options: Iterable[Any]) -> Any:
        return self.choose(list(options))

    @property
    def alive(self) -> list[Site]:
        return [site for site in self.world.sites.values() if site.alive]

    def steps(self) -> list[Act]:
        """What can happen now."""
        world = self.world
        onward: list[Act] = []
        disturbing: list[Act] = [self.wait, self.drain, self.drain]
        if len(world.gateway.asks) < MAX_ASKS:
            onward.append(self.ask)
        if len(self.alive) > 1:
            disturbing.append(self.kill)
        movable = self.movable()
        onward += [lambda: self.move(*self.pick(movable))] * (4 * bool(movable))
        onward += world.wires() * 2
        for site in self.alive:
            onward += [site.end_step] * (2 * site.in_step)
            onward += [lambda site=site: self.read(site)] * (2 * bool(site.reads.open))  # type: ignore[misc]
        for masks in self.masks:
            if masks.site.alive and masks.awaited:
                onward += [lambda masks=masks: self.give(masks)] * 2  # type: ignore[misc]
        for link, source, sink in self.links():
            if link.lossy:
                onward.append(lambda source=source, sink=sink: sink.links.greet(source.address))  # type: ignore[misc]
            disturbing += [lambda source=source, sink=sink: self.disturb(source, sink)] * 2  # type: ignore[misc]
        disturbing += [self.abort] if any(not leg.over and not leg.aborted for leg in world.gateway.legs) else []
        return onward * self.calm + disturbing

    def links(self) -> list[tuple[Link, Site, Site]]:
        """(link, its source, its sink)."""
        return [
            (link, self.world.site_at(address), sink)
            for sink in self.alive
            for address, link in sink.links.links.items()
        ]

    # --- the gateway's doing -------------------------------------------------------------------------------------

    def ask(self) -> None:
        start = self.pick([0, 100, 200])
        self.world.gateway.ask(
            self.pick(self.alive),
            range(start, start + self.pick(range(1, 9))),
            self.pick(range(4, 25)),
            self.pick([1, 1, 1, 2, 3]),
            logprobs=self.pick([False, True]),
            grammar=self.pick([None] * 5 + ["start: /x*/"]),
        )

    def movable(self) -> list[tuple[Leg, int, Site]]:
        """(leg, choice, where to) of what runs, as far as the gateway knows."""
        found = []
        for leg in self.world.gateway.legs:
            for choice in leg.choices.values():
                moves = any(
                    each.moving and not each.over and not each.aborted and choice.index in each.choices
                    for each in leg.ask.legs
                )
                if moves or choice.ended or leg.ask.ended or not leg.brings(choice) or choice.index not in leg.spoken:
                    continue
                busy = {each.site for each in leg.ask.legs if not each.over}
                found += [(leg, choice.index, site) for site in self.alive if site not in busy]
        return found

    def move(self, leg: Leg, choice: int, to: Site) -> None:
        self.world.gateway.move(leg, to, choice)

    def abort(self) -> None:
        """The client leaves, or the gateway has had enough of an attempt."""
        open_legs = [leg for leg in self.world.gateway.legs if not leg.over and not leg.aborted]
        leg = self.pick(open_legs)
        if self.pick([True, False]):
            self.world.gateway.end(leg.ask)
        else:
            self.world.gateway.abort(leg)
            self.world.gateway.look_after(leg.ask)

    # --- the workers' and the wires' -----------------------------------------------------------------------------

    def read(self, site: Site) -> None:
        read = self.pick(site.reads.open)
        if self.pick([False] * 15 + [True]):
            site.reads.end(read, "the connection broke")
            site.wake()
        else:
            self.world.go_on_reading(site, read)

    def give(self, masks: CountedMasks) -> None:
        """A mask is there, or its grammar has given up."""
        state = self.pick(masks.awaited)
        masks.give(self.pick([None] * 15 + [GaveUp("items", "too many")]), state)

    def drain(self) -> None:
        site = self.pick(self.alive)
        self.pick([site.drain, site.drain, site.resume])()

    def wait(self) -> None:
        self.world.now += self.pick([1.0, LENT_TTL_S + 1.0])
        self.pick(self.alive).tick()

    def kill(self) -> None:
        if self.pick([False] * 5 + [True]):
            self.world.kill(self.pick(self.alive))

    def disturb(self, source: Site, sink: Site) -> None:
        """Something happens to a link."""
        link = sink.links.links[source.address]
        what = self.pick(["lose", "lose", "lose", "greet", "greet", "source loses sink", "sink loses source"])
        if not source.alive:
            what = "sink loses source"
        if what == "lose":
            lossable: list[tuple[Any, Message]] = [
                (wire, message)
                for wire in (link.to_source, link.to_sink)
                for message in wire
                if isinstance(message, Message) and not isinstance(message, Hello)
            ]
            if lossable:
                wire, message = self.pick(lossable)
                wire.remove(message)
                link.lossy = True
        elif what == "greet":
            sink.links.greet(source.address)
        elif what == "source loses sink" and sink.name in source.sessions:
            source.lose_sink(sink.name)
            link.lossy = True
        elif what == "sink loses source":
            sink.links.lose(source.address, "silent")
            sink.wake()
            if self.pick([True, False]) and sink.name in source.sessions:
                source.lose_sink(sink.name)

    # --- the end -------------------------------------------------------------------------------------------------

    def settle_down(self) -> None:
        """Nothing is lost any more and nobody dies; time passes: everything must come to an end."""
        world = self.world
        for masks in self.masks:
            masks.at_once = True
            if masks.site.alive:
                masks.give()
        for _ in range(6):
            for site in self.alive:
                site.resume()
                for address in list(site.links.links):
                    if world.site_at(address).alive:
                        site.links.greet(address)
                    else:
                        site.links.lose(address, "no answer")
                for sink in list(site.sessions):
                    if site.address not in world.sites[sink].links.links:
                        site.lose_sink(sink)
            world.run()
            world.now += LENT_TTL_S + 1.0
            for site in self.alive:
                site.tick()
            world.deliver()
            for ask in world.gateway.asks:
                world.gateway.look_after(ask)
        world.run()
        world.check()
        world.check_end()


def play(choose: Choose, num_events: int) -> World:
    """A run to its end, with every promise checked after each event."""
    game = Play(choose)
    for _ in range(num_events):
        choose(game.steps())()
        game.world.check()
    game.settle_down()
    return game.world


@settings(
    deadline=None,
    max_examples=30,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(st.data(), st.integers(20, 120))
def test_a_sequence_goes_on_as_if_it_had_stayed(data: st.DataObject, num_events: int) -> None:
    play(lambda options: data.draw(st.sampled_from(options)), num_events)


@pytest.mark.long
def test_many_long_journeys() -> None:
    """Deeper than the runs that can be shrunk; a failure names the seed."""
    num_moved = num_begun_again = num_preempted = num_with_grammar = 0
    for seed in range(30):
        try:
            world = play(Random(seed).choice, 400)
        except Exception as error:
            raise AssertionError(f"seed {seed}: {error!r}") from error
        num_moved += world.gateway.num_moved
        num_with_grammar += sum(len(leg.moved) for leg in world.gateway.legs if leg.ask.sampling.grammar is not None)
        num_begun_again += world.gateway.num_begun_again
        schedulers = [site.core.scheduler for site in world.sites.values()]
        num_preempted += sum(
            scheduler.swap.num_swapped + scheduler.preemption.num_recomputed for scheduler in schedulers
        )
    assert num_moved > 30, f"only {num_moved} sequences have moved: the runs show nothing"
    assert num_with_grammar > 3, f"only {num_with_grammar} of them had a grammar"
    assert num_begun_again > 6, f"only {num_begun_again} were begun again"
    assert num_preempted > 3, f"only {num_preempted} were preempted"
