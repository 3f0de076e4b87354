"""Checks grammars in threads of its own: each text once, for all requests that send it at the same time or soon after.

Life cycle of a check:

    waiting ──► running ──► finished: kept while it is among the last `_MAX_KEPT` that were asked for
       │           └──────► failed by an error that is not the text's: forgotten
       └──► forgotten, because every request for it has left
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Hashable

from common.contract.errors import Cause
from common.runtime.daemon_threads import DaemonThreads
from common.runtime.grammar_limits import STACK_BYTES
from gateway.web.http_errors import ApiError, invalid

COMPILE_TIMEOUT_S = 2.0
"""Time limit of a check. A client whose check exceeds it may retry; the library's own bounds, which do not depend on
time, decide what is refused."""
MAX_WAIT_S = 5.0
"""Longest wait for a thread; after it the client may retry."""
MAX_WAITING = 64
"""Most checks that wait for a thread at once."""
_MAX_KEPT = 64
_BUSY = "too many grammars and schemas are being checked"
_MAX_ERROR_CHARS = 500
_THREADS = DaemonThreads(2, "grammar", STACK_BYTES)
"""Threads of this module only, so that long checks delay no other request's tokens."""


class _Check:
    """One check, for all requests that wait for it."""

    def __init__(self, compile_it: Callable[[], tuple[str, str]]) -> None:
        self.outcome: tuple[str, str] | None = None
        """(grammar, error message or "") once finished."""
        self.num_waiting = 0
        """Requests that wait for it."""
        self.begun = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[None] = self._loop.create_future()
        """Raises what the check has failed with."""
        self._compile_it = compile_it
        self._job = _THREADS.submit(self._work)

    @property
    def failed(self) -> bool:
        """Whether it has failed by an error that is not the text's."""
        return self.outcome is None and self.ended.done()

    def cancel(self) -> bool:
        """Prevent it from running; False if it has begun."""
        return self._job.cancel()

    def _work(self) -> None:
        self._loop.call_soon_threadsafe(self.begun.set)
        try:
            self.outcome = self._compile_it()
        except BaseException as error:
            self._loop.call_soon_threadsafe(self.ended.set_exception, error)
            raise
        self._loop.call_soon_threadsafe(self.ended.set_result, None)


_checks: dict[Hashable, _Check] = {}
"""What is checked → its check, last asked for last."""


async def checked(param: str, compile_it: Callable[..., tuple[str, str]], *args: Hashable) -> str:
    """The grammar that `compile_it(*args)` returns with an error message or "". It is called in a thread, and not at
    all if the outcome is known.

    Raises `ApiError`: a 400 for an error, or a 429 if it takes or would take too long.
    """
    grammar, error = await _outcome(param, (compile_it, *args), functools.partial(compile_it, *args))
    if error:
        raise invalid(param, f"{param}: {error[:_MAX_ERROR_CHARS]}")
    return grammar


async def _outcome(param: str, key: Hashable, compile_it: Callable[[], tuple[str, str]]) -> tuple[str, str]:
    check = _checks.pop(key, None)
    if check is None or check.failed:
        check = _new_check(compile_it)
    _checks[key] = check
    check.num_waiting += 1
    try:
        if check.outcome is None:
            await _in_time(check, param)
        assert check.outcome is not None
        return check.outcome
    finally:
        check.num_waiting -= 1
        given_up = check.outcome is None and not check.num_waiting and check.cancel()
        if (given_up or check.failed) and _checks.get(key) is check:
            del _checks[key]


def _new_check(compile_it: Callable[[], tuple[str, str]]) -> _Check:
    if sum(not check.begun.is_set() for check in _checks.values()) >= MAX_WAITING:
        raise ApiError(429, _BUSY, code=Cause.CAPACITY)
    if len(_checks) >= _MAX_KEPT:
        oldest = next((key for key, check in _checks.items() if check.outcome is not None or check.failed), None)
        _checks.pop(oldest, None)
    return _Check(compile_it)


async def _in_time(check: _Check, param: str) -> None:
    """Wait until a check has ended. Raises what it has failed with, or `ApiError`, a 429."""
    try:
        async with asyncio.timeout(MAX_WAIT_S):
            await check.begun.wait()
    except TimeoutError:
        raise ApiError(429, _BUSY, code=Cause.CAPACITY) from None
    try:
        async with asyncio.timeout(COMPILE_TIMEOUT_S):
            await asyncio.shield(check.ended)
    except TimeoutError:
        message = f"{param}: {_BUSY}, and this took more than {COMPILE_TIMEOUT_S:g} s"
        raise ApiError(429, message, param=param, code=Cause.CAPACITY) from None
