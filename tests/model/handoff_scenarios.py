"""What is searched: in the test suite, and by `make model` with more happening at once.

Run as a script, this searches all, or those that it is given by name, and prints what each has visited.
"""

from __future__ import annotations

import sys
from typing import Any

from handoff_bounds import Bounds
from handoff_search import Violation, search


def only(kinds: str, **bounds: Any) -> Bounds:
    """Bounds with disturbances of these kinds alone."""
    return Bounds(kinds=frozenset(kinds.split()), **bounds)


TO_SOURCE = frozenset({"d0>p0"})
TO_DECODE = frozenset({"g>d0"})
MOVING = frozenset({"d1>d0"})
TWO = {"decode_workers": 2, "output_tokens": 4}
"""Enough tokens for a sequence to be cut: the step in flight, which ends before, must not be its last."""

SMALL = {
    "nothing goes wrong, chunk by chunk": only("", chunks=2, output_tokens=3),
    "a message is lost": only("lose"),
    "a message comes twice, or again later": only("repeat replay"),
    "the client leaves": only("abort"),
    "there is no room at first, and the client leaves": only("abort", busy=True),
    "the request's time is up": only("deadline"),
    "a lease without a sink expires": only("expire", decode_workers=2),
    "a worker refuses": only("refuse", decode_workers=2),
    "a reservation is taken back": only("revoke", chunks=2),
    "a reservation is taken back, and the client leaves": only("revoke abort", disturbances=2),
    "a read fails": only("fail_read", decode_workers=2, chunks=2),
    "a worker crashes": only("crash"),
    "steps are planned ahead, and the client leaves": only("abort", runs_ahead=True, chunks=2, output_tokens=3),
    "a session with the source ends": only("silence", links=TO_SOURCE),
    "a sequence moves": only("move", **TWO),
    "a sequence moves, and the client leaves": only("move abort", disturbances=2, **TWO),
    "a sequence moves while steps are planned ahead": only("move", runs_ahead=True, decode_workers=2, output_tokens=5),
}
LARGER = {
    "any session ends": only("silence"),
    "a worker crashes, chunk by chunk": only("crash", chunks=2),
    "a message is lost, chunk by chunk": only("lose repeat", chunks=2, output_tokens=3),
    "two messages are lost between workers": only("lose repeat", disturbances=2, links=TO_SOURCE, chunks=2),
    "a lost message, and the end of the time": only("lose deadline abort", disturbances=2, links=TO_SOURCE),
    "a lost message, and a lost offer": only("lose expire", disturbances=2, links=TO_SOURCE),
    "a refusal, and a lost message": only("refuse lose", disturbances=2, decode_workers=2, links=TO_SOURCE),
    "a refusal, and a crash": only("refuse crash", disturbances=2, decode_workers=2),
    "a reservation is taken back, and a lost message": only("revoke lose", disturbances=2, links=TO_SOURCE, chunks=2),
    "a reservation is taken back, and a crash": only("revoke crash", disturbances=2, decode_workers=2),
    "a failed read, and a late message": only("fail_read replay abort", disturbances=2, decode_workers=2),
    "a move, and the end of the time": only("move deadline", disturbances=2, **TWO),
    "a move, and a lost message": only("move lose repeat", disturbances=2, links=MOVING, **TWO),
    "a move, and a failed read": only("move fail_read", disturbances=2, **TWO),
    "a move, and then a crash": only("move crash", disturbances=2, first="move", **TWO),
    "a move, and then the end of a session": only("move silence", disturbances=2, first="move", links=MOVING, **TWO),
}


def main(names: list[str]) -> int:
    """Search those of these names, or all; 1 if a promise is broken."""
    total = 0
    fine = True
    scenarios = {**SMALL, **LARGER}
    for name in names or scenarios:
        bounds = scenarios[name]
        try:
            found = search(bounds)
        except Violation as violation:
            fine = False
            print(f"{name}: VIOLATED: {violation}", flush=True)
        else:
            total += found.states
            print(f"{name}: {found}", flush=True)
    print(f"{total} states in all; every promise kept" if fine else "a promise is broken, see above")
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
