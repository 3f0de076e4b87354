"""Which connection gives way to a new one: every case, without connections."""

from __future__ import annotations

import random

import pytest

from gateway.access.giving_way import Use, first_to_go

USES = {"i": Use.IDLE, "u": Use.UNSERVED, "a": Use.ARRIVING, "s": Use.SERVING}
SEED = 7


def goes(connections: str, client: str) -> int | None:
    """The place of the connection that gives way. Each is written by its address and its use, the oldest first."""
    held = dict(enumerate(connections.split()))
    return first_to_go({place: each[0] for place, each in held.items()}, client, lambda place: USES[held[place][1]])


@pytest.mark.parametrize(
    ("connections", "client", "expected"),
    [
        ("As Ai Bi Ai", "C", 1),  # the oldest idle one of who has most
        ("Bi Ai As", "C", 1),
        ("As Au Ai", "C", 1),  # of who has more than the new one, the oldest on which nothing is served
        ("Bi As Aa As", "C", 0),  # an idle one of somebody else before one that is arriving
        ("Bs As Aa As", "C", 2),
        ("Bi Ai", "C", 0),  # all have as many
        ("Bs Ai", "C", 1),
        ("Bu Au", "C", None),
        ("Ba Aa", "C", None),
        ("Bs As", "C", None),
        ("Bi As Ai", "A", 2),  # the new one's own address has most
        ("Bi As As", "A", 0),
        ("Au Au", "A", None),
        ("Aa Aa", "A", None),
        ("Bu Bu Au", "A", None),  # it would have as many as the other
        ("Bu Bu Bu Au", "A", 0),
        ("Ba Ba Ba As", "A", 0),
    ],
)
def test_who_gives_way(connections: str, client: str, expected: int | None) -> None:
    assert goes(connections, client) == expected


def test_while_anything_is_idle_something_that_is_not_served_gives_way() -> None:
    print("seed", SEED)
    source = random.Random(SEED)
    for _ in range(2000):
        held = [source.choice("ABC") + source.choice("iuas") for _ in range(source.randint(1, 8))]
        found = goes(" ".join(held), "C")
        if any(each[1] == "i" for each in held):
            assert found is not None
            assert held[found][1] in "iu"
        if found is not None:
            assert held[found][1] != "s"
            if held[found][1] != "i":
                num = [sum(each[0] == address for each in held) for address in (held[found][0], "C")]
                assert num[0] > num[1] + 1, "from who has more than the new one's address would have"


def test_each_connection_is_asked_once_at_most() -> None:
    """There may be thousands, and it is asked for each new one that is turned away."""
    for clients in ("A", "AB", "ABC"):
        held = {place: clients[place % len(clients)] for place in range(60)}
        asked: list[int] = []

        def use_of(place: int, asked: list[int] = asked) -> Use:
            asked.append(place)
            return Use.SERVING

        assert first_to_go(held, "C", use_of) is None
        assert asked == list(range(60))


def test_among_idle_connections_of_one_address_the_first_is_asked_alone() -> None:
    """A pool of a client may hold all connections there are, and each new one takes the place of one of them."""
    asked: list[int] = []

    def use_of(place: int) -> Use:
        asked.append(place)
        return Use.IDLE

    assert first_to_go(dict.fromkeys(range(60), "A"), "A", use_of) == 0
    assert asked == [0]
