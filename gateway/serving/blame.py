"""What a failure says of the choices that it concerns, and whether it ends their request. Pure state."""

from __future__ import annotations

from collections.abc import Sequence

from common.contract.errors import Cause
from gateway.serving.attempt import Broken
from gateway.serving.choice import Choice
from gateway.serving.generation import Fail
from gateway.serving.suspicion import MAX_CRASHES, Share

MAX_FAILURES = 6
"""Attempts at a choice that may fail without a decode worker's token in between; one more fails the request."""
MAX_BUGS = 2
"""Like `MAX_FAILURES`, but for failures that a worker reported as its own fault."""
_FINAL = frozenset({Cause.INVALID, Cause.DEADLINE})
"""Causes that would fail at every worker."""


def count_failure(wanting: Sequence[Choice], held: Sequence[Choice], broken: Broken, share: Share) -> Fail | None:
    """Count a failure for the choices `wanting`, which nothing generates any more, and blame its workers. The worker
    that failed had the choices `held`. Returns the end of the request if it is one failure too many."""
    for choice in wanting:
        choice.num_failures += share not in (Share.STOOD_BY, Share.IN_GROUP)  # others have probably crashed it
        choice.num_bugs += broken.cause is Cause.INTERNAL
        choice.num_transfers += broken.cause is Cause.TRANSFER
        choice.avoid |= {assignment.life for assignment in broken.blame}
    end = count_crash(wanting, held, broken.message, share)
    exhausted = any(choice.num_failures > MAX_FAILURES or choice.num_bugs > MAX_BUGS for choice in wanting)
    if end is None and (exhausted or broken.cause in _FINAL):
        end = Fail(broken.cause, broken.message)
    return end


def note_refusal(choices: Sequence[Choice], broken: Broken, *, admitted: bool) -> Fail | None:
    """Note for the choices that a worker was asked for that it has refused them, so that it is not asked again. Returns
    the end of the request if nobody else takes it. None for a refusal that may pass: a draining worker may be asked
    again, and so may a full one by an `admitted` request."""
    too_large = broken.cause is Cause.TOO_LARGE
    if broken.cause is Cause.DRAINING or (admitted and not too_large):
        return None
    for choice in choices:
        (choice.too_small if too_large else choice.avoid).update(assignment.life for assignment in broken.blame)
    return Fail(broken.cause, broken.message)


def count_crash(wanting: Sequence[Choice], held: Sequence[Choice], message: str, share: Share) -> Fail | None:
    """Suspect the choices `held`, which a worker had that has crashed; inert if it has not. Returns the end of the
    request if it is convicted."""
    proven = share is Share.ALONE and any(choice.suspected for choice in wanting)
    for choice in held:
        choice.suspect(share)
    if proven:
        why = "workers have crashed with this request, the last one while it computed nothing else"
        return Fail(Cause.POISON, f"{why}: {message}")
    if any(choice.num_crashes > MAX_CRASHES for choice in wanting):
        return Fail(Cause.POISON, f"{MAX_CRASHES + 1} workers have crashed with this request: {message}")
    return None
