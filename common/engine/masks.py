"""Computes which tokens may come next in texts that have a grammar, on threads that delay neither the engine nor the
event loop.

A text asks for its mask when it has got a token, and takes part in no step before it has the mask. Grammars take turns,
and one grammar has one thread at a time. A turn ends after `_TURN_S`, but the mask that is being computed is finished;
the library's own bounds limit its cost. The time that a mask takes changes no answer: a mask that takes long is late,
and only a bound ends the text.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from llguidance import LLMatcher

from common.contract.errors import Cause
from common.engine.grammar import GaveUp, Grammars, GrammarState, Unread
from common.runtime.daemon_threads import DaemonThreads
from common.runtime.grammar_limits import STACK_BYTES

_log = logging.getLogger(__name__)

GRACE_S = 0.01
"""Most time that a step waits for masks. It does not wait for a text whose last mask was late."""
_MAX_KEPT = 32
"""Most compiled grammars that are kept for later requests."""
_NUM_THREADS = 2
_TURN_S = 0.002

Tell = Callable[[GaveUp | None], None]
"""Called with None when the mask is there, or with the reason why it will never be."""


class _PanicError(Exception):
    """The library could not compile a grammar that it has accepted before."""


@dataclass(slots=True, eq=False)
class _Job:
    """A mask that a text waits for."""

    state: GrammarState
    token_ids: Sequence[int]
    """Must not change before the mask is there."""
    prompt_len: int
    asked: float
    tell: Tell
    alone: bool = False
    """Whether it needs a matcher that shares nothing."""
    dropped: bool = False
    result: bytes | Unread | GaveUp = Unread.TIME


class Masks:
    """The masks of one worker. Every method is called on the event loop's thread."""

    def __init__(self, grammars: Grammars | None) -> None:
        """If `grammars` is None, `ask` must not be called."""
        self._grammars = grammars
        self._threads = DaemonThreads(_NUM_THREADS, "mask", STACK_BYTES)
        self._turns = asyncio.Semaphore(_NUM_THREADS)
        self._compiler = DaemonThreads(1, "grammar", STACK_BYTES)
        """It has a thread of its own, because compiling a grammar takes longer than any mask."""
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()
        self._lines: dict[str, deque[_Job]] = {}
        """Grammar → jobs that wait for their masks."""
        self._servers: set[asyncio.Task[None]] = set()
        """One task for each line."""
        self._jobs: dict[GrammarState, _Job] = {}
        self._expected: dict[GrammarState, None] = {}
        """Texts for whose masks a step waits."""
        self._all_here = asyncio.Event()
        self.num_made = 0
        self.num_late = 0
        """Masks for which a step has waited in vain."""
        self.given_up: dict[str, int] = {}
        """Bound → texts that could not go on because they reached it."""

    def ask(self, grammar: str, state: GrammarState, token_ids: Sequence[int], prompt_len: int, tell: Tell) -> None:
        """Compute which tokens may follow `token_ids`, whose output begins at `prompt_len`. `state` gets the mask, then
        `tell` is called, in a later turn of the loop."""
        assert state not in self._jobs, "it waits for one already"
        state.allowed = None
        job = self._jobs[state] = _Job(state, token_ids, prompt_len, time.perf_counter(), tell)
        if not state.late:
            self._expected[state] = None
        if grammar in self._lines:
            self._lines[grammar].append(job)
            return
        line = self._lines[grammar] = deque([job])
        server = asyncio.get_running_loop().create_task(self._serve(grammar, line))
        self._servers.add(server)
        server.add_done_callback(self._servers.discard)

    def forget(self, state: GrammarState) -> None:
        """Drop the job of `state`, whose mask is not needed any more. Inert if it waits for none."""
        job = self._jobs.pop(state, None)
        if job is not None:
            job.dropped = True
            self._is_here(job.state)

    async def wait_for_expected(self) -> None:
        """Wait, for at most `GRACE_S`, for the masks that are expected at once. Masks that are missed count as late."""
        if not self._expected:
            return
        self._all_here.clear()
        try:
            async with asyncio.timeout(GRACE_S):
                await self._all_here.wait()
        except TimeoutError:
            self.num_late += len(self._expected)
            for state in self._expected:
                state.late = True
            self._expected.clear()

    async def _serve(self, grammar: str, line: deque[_Job]) -> None:
        """Serve the jobs of one grammar, turn after turn, until none is left."""
        try:
            while line:
                if line[0].dropped:
                    line.popleft()
                    continue
                try:
                    compiled = await self._compiled_for(grammar, line[0])
                except _PanicError:
                    self._done(line.popleft(), GaveUp("none", "the grammar cannot be compiled"))
                    continue
                async with self._turns:
                    jobs = [job for job in line if job.state.matcher is not None or not (job.alone or compiled is None)]
                    num_done = await asyncio.wrap_future(self._threads.submit(partial(self._turn, compiled, jobs)))
                for job in jobs[:num_done]:
                    line.remove(job)
                    if job.dropped:
                        continue
                    if job.result is Unread.FULL:
                        self._leave_full(grammar, job)
                    if isinstance(job.result, Unread):
                        line.append(job)
                    else:
                        self._done(job, job.result)
        except asyncio.CancelledError:
            raise
        except Exception:  # noqa: BLE001 (whatever it is, nobody may wait for ever)
            _log.exception("no masks can be made of a grammar")
            for job in line:
                self._done(job, GaveUp("none", "this worker cannot follow the grammar", Cause.INTERNAL))
        finally:
            del self._lines[grammar]

    async def _compiled_for(self, grammar: str, job: _Job) -> LLMatcher | None:
        """The matcher that matchers of a grammar are copied from. It is compiled if `job` needs it; otherwise it may be
        None.

        If `job` needs a matcher that shares nothing, a new one is compiled for it alone.
        """
        assert self._grammars is not None, "nobody has refused the request"
        compiled = self._compiled.get(grammar)
        if job.state.matcher is None and (compiled is None or job.alone):
            matcher = await asyncio.wrap_future(self._compiler.submit(partial(self._compile, grammar)))
            if job.alone:
                job.state.matcher, job.state.shared, job.state.num_read = matcher, None, 0
                return compiled
            compiled = self._compiled[grammar] = matcher
            while len(self._compiled) > _MAX_KEPT:
                self._compiled.popitem(last=False)
        if compiled is not None:
            self._compiled.move_to_end(grammar)
        return compiled

    def _leave_full(self, grammar: str, job: _Job) -> None:
        """`job` needs a matcher of its own, and no later request copies the one that it has shared. That may be gone
        already, or another may be kept in its place by now."""
        job.alone = True
        if job.state.shared is not None and self._compiled.get(grammar) is job.state.shared:
            del self._compiled[grammar]

    def _compile(self, grammar: str) -> LLMatcher:
        """On the compiler's thread. Raises `_PanicError`."""
        assert self._grammars is not None
        try:
            return self._grammars.compile(grammar)
        except BaseException as error:
            _log.exception("a grammar could not be compiled")
            raise _PanicError from error

    def _turn(self, compiled: LLMatcher | None, jobs: Sequence[_Job]) -> int:
        """On a mask thread: compute masks of `jobs`, in order, until the turn's time is over, but at least one. Returns
        how many jobs were processed."""
        assert self._grammars is not None
        end = time.perf_counter() + _TURN_S
        for number, job in enumerate(jobs, 1):
            if not job.dropped:
                try:
                    job.result = self._grammars.read(
                        compiled, job.state, job.token_ids, job.prompt_len, lambda: time.perf_counter() > end
                    )
                except BaseException:  # noqa: BLE001 (a panic of the library is none of Python's own exceptions)
                    _log.exception("a grammar could not be followed")
                    job.result = GaveUp("none", "the grammar cannot be followed") if job.alone else Unread.FULL
                    if job.state.matcher is None:  # the copy has failed
                        job.state.shared = compiled
                    job.state.matcher = None  # what it has shared with others may be the worse for it, too
            if time.perf_counter() > end:
                return number
        return len(jobs)

    def _done(self, job: _Job, result: bytes | GaveUp) -> None:
        if job.dropped:
            return
        state = job.state
        del self._jobs[state]
        if isinstance(result, GaveUp):
            self.given_up[result.bound] = self.given_up.get(result.bound, 0) + 1
            job.tell(result)
        else:
            self.num_made += 1
            state.allowed = result
            state.late = time.perf_counter() - job.asked > GRACE_S
            job.tell(None)
        self._is_here(state)

    def _is_here(self, state: GrammarState) -> None:
        self._expected.pop(state, None)
        if not self._expected:
            self._all_here.set()
