"""The decode worker of the model: `decode_worker.worker` with its intake, as far as handoff and migration see it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from common.contract.errors import Cause
from common.contract.ids import Incarnation, RequestId, RequestKey
from common.contract.messages import (
    Abort,
    Ack,
    AttachSequence,
    BlocksReady,
    Cancelled,
    Decode,
    Finished,
    Message,
    OfferWithdrawn,
    PrefillDone,
    Resend,
    Settled,
    Tokens,
)
from decode_worker.migration import Departures, pull_of
from decode_worker.request import Stage
from kv_transfer import sink as pulls
from kv_transfer.sink import Pull, PullState

if TYPE_CHECKING:
    from handoff_world import World
from handoff_workers import DEADLINE, NUM_BLOCKS, Content, Worker, content, tokens


@dataclass(eq=False)
class Read:
    """A read under way: its blocks may change at any moment until it ends."""

    pull: Pull
    start: int
    source_blocks: tuple[int, ...]
    sink_blocks: tuple[int, ...]


@dataclass(eq=False)
class Running:
    """One choice in the batch; what `decode_worker.request.Generation` is to the departures."""

    request: Job
    num_tokens: int
    first_position: int
    num_sent: int
    stage: Stage = Stage.RUNNING
    moved: bool = False
    ended: bool = False

    @property
    def sequence(self) -> Any:
        return self

    @property
    def choice(self) -> int:
        return 0

    def tokens(self, position: int) -> Tokens:
        position = min(max(position, self.first_position), self.num_tokens)
        return tokens(self.request.key, position, self.num_tokens - position, ended=self.ended)


@dataclass(eq=False)
class Job:
    """One attempt at the request in a decode worker."""

    world: World
    work: Decode
    num_tokens: int
    """Tokens whose KV is to come."""
    pull: Pull | None
    blocks: list[int] = field(default_factory=list)
    """Reserved before the pull asks, or computed here, or decoded from."""
    waits: bool = False
    """For room."""
    running: Running | None = None
    deadline: float = DEADLINE

    @property
    def key(self) -> RequestKey:
        return self.work.key

    @property
    def gateway(self) -> Incarnation:
        return self.world.gateway.me

    @property
    def generations(self) -> list[Running]:
        return [] if self.running is None else [self.running]


class DecodeShell(Worker):
    """`decode_worker.worker.DecodeWorker` with its intake, as far as handoff and migration see it."""

    def __init__(self, world: World, address: str, life: int) -> None:
        super().__init__(world, address, life)
        self.jobs: dict[RequestId, Job] = {}
        self.finished: dict[RequestId, Job] = {}
        self.pulls: dict[RequestId, Pull] = {}
        self.quarantine: list[Pull] = []
        self.reads: list[Read] = []
        self.others = self.pool.allocate(NUM_BLOCKS) if world.bounds.busy and life == 1 else []
        """Blocks of another sequence."""
        self.departures = Departures(self, self.pool, self, self.tell_anyone, None, 4)  # type: ignore[arg-type]

    def tell_anyone(self, peer: Incarnation, message: Message) -> None:
        """The departures send to sinks and gateways."""
        if peer == self.world.gateway.me:
            self.gateway(message)
        else:
            self.tell(peer, message)

    def hear(self, peer: Incarnation, message: Message) -> None:
        match message:
            case Decode():
                self.on_decode(message)
            case Abort():
                job = self.find(message.request)
                if job is None or job.key.attempt > message.attempt:
                    return
                ended = message.request in self.finished
                self.forget(job)
                if not ended:  # or it has been told its end
                    self.gateway(Cancelled(request=message.request, attempt=job.key.attempt))
            case Ack():
                job = self.finished.get(message.request)
                if job is not None and job.key == message.key:
                    del self.finished[message.request]
            case Resend():
                self.on_resend(message)
            case AttachSequence():
                job = self.jobs.get(message.sequence.request)
                running = job.running if job is not None and job.key == message.sequence else None
                self.departures.attach(peer, message, running)  # type: ignore[arg-type]
                self.look_again()
            case _:
                self.on_message(peer, message)

    def on_hello(self, peer: Incarnation, listed: Collection[RequestKey]) -> tuple[RequestKey, ...]:
        """A session (re)opens."""
        if peer == self.world.gateway.me:
            for job in (*self.jobs.values(), *self.finished.values()):
                if job.key not in listed:
                    self.forget(job)
            return tuple(job.key for job in (*self.jobs.values(), *self.finished.values()))
        self.sink_said_hello(peer, listed)
        return ()

    def on_peer_lost(self, peer: Incarnation) -> None:
        """A session is over."""
        self.on_hello(peer, ())

    # A job's life.

    def find(self, request: RequestId) -> Job | None:
        return self.jobs.get(request) or self.finished.get(request)

    def on_decode(self, work: Decode) -> None:
        if not self.fence.admits(work.key):
            return
        known = self.find(work.request)
        if known is not None:
            self.forget(known)
        if self.world.refusing or (work.moving and self.pool.num_free < NUM_BLOCKS):
            self.refuse(work.key, Cause.CAPACITY, "full")
            return
        if work.moving and len(work.token_ids) == work.prompt_len:
            self.refuse(work.key, Cause.INVALID, "a sequence moves only when it runs")
            return
        pull: Pull | None = None
        if work.moving:
            work = replace(work, token_ids=work.token_ids[:-1])  # the last one has no KV yet
            pull = pull_of(work)
        elif work.source is not None and work.offered is not None:
            pull = self.world.parts.pull(work.key, work.source, offered=work.offered.attempt)
        job = self.jobs[work.request] = Job(self.world, work, len(work.token_ids), pull)
        if pull is None:
            job.waits = True
            self.look_again()
            return
        if work.moving:
            job.blocks = self.pool.allocate(NUM_BLOCKS)
        self.pulls[work.request] = pull
        link = self.world.link_to_source(self, pull.source)
        if link.known and link.worker != pull.source.incarnation:
            self.give_up(pull, Cause.WORKER_LOST, "the source has restarted")
        elif link.known:
            self.act(pull, pull.attach())

    def look_again(self) -> None:
        """Let in what there is room for, cut what is wanted, and go on."""
        for job in list(self.jobs.values()):
            if job.waits and self.pool.num_free >= NUM_BLOCKS:
                job.waits = False
                blocks = self.pool.allocate(NUM_BLOCKS)
                if job.pull is None:
                    job.blocks = blocks
                else:
                    self.act(job.pull, job.pull.reserve(blocks))
        if self.step is None:
            self.departures.cut()
            batch = [job for job in self.jobs.values() if self.goes_on(job)]
            if batch:
                self.step = (self.pool.step_started(), [self.part_of_step(job) for job in batch])

    def revocable(self) -> list[Job]:
        """Those whose reservation could be taken back."""
        return [
            job for job in self.jobs.values() if job.pull is not None and job.pull.revocable and not job.work.moving
        ]

    def revoke(self, job: Job) -> None:
        """Somebody else has its blocks for a moment: it waits for room again."""
        assert job.pull is not None
        blocks = job.pull._sink_blocks
        job.pull.revoke()
        job.waits = True
        self.release(blocks)
        self.look_again()

    def goes_on(self, job: Job) -> bool:
        if job.running is None:
            return job.pull is None and not job.waits
        return job.running.stage is Stage.RUNNING

    def part_of_step(self, job: Job) -> tuple[Job, tuple[int, ...], int]:
        """The job, the blocks that the step writes, and how many tokens have their KV then."""
        return job, tuple(job.blocks), job.num_tokens if job.running is None else job.running.num_tokens

    def write(self, work: list[tuple[Job, tuple[int, ...], int]]) -> None:
        for _, blocks, num_computed in work:
            for block, held in zip(blocks, content(num_computed), strict=True):
                self.memory[block] = held

    def stepped(self, work: list[tuple[Job, tuple[int, ...], int]]) -> None:
        for job, _, _ in work:
            if self.jobs.get(job.key.request) is not job:
                continue
            if job.running is None:
                job.running = Running(job, job.num_tokens + 1, job.num_tokens, job.num_tokens)
            else:
                job.running.num_tokens += 1
            running = job.running
            running.ended = self.world.enough(running.num_tokens)
            self.gateway(running.tokens(running.num_sent))
            running.num_sent = running.num_tokens
            if running.ended:
                running.stage = Stage.ENDED
                self.finish_if_ended(job)

    def finish_if_ended(self, job: Job) -> None:
        assert job.running is not None
        if not (job.running.ended or job.running.moved):
            return
        self.drop(job)
        if not job.running.moved:
            self.finished[job.key.request] = job
            self.gateway(Finished(request=job.key.request, attempt=job.key.attempt))

    def on_resend(self, message: Resend) -> None:
        job = self.find(message.request)
        if job is None or job.key != message.key:
            return
        if job.running is not None and message.position < job.running.num_tokens:
            self.gateway(job.running.tokens(message.position))
        if job.running is not None and (job.running.ended or job.running.moved):
            self.gateway(Finished(request=job.key.request, attempt=job.key.attempt))

    def drop(self, job: Job) -> None:
        """Off the books."""
        del self.jobs[job.key.request]
        self.departures.forget(job)  # type: ignore[arg-type]
        if job.running is not None:
            job.running.stage = Stage.ENDED
        blocks, job.blocks = job.blocks, []
        if blocks:
            self.release(blocks)
        self.look_again()

    def forget(self, job: Job) -> None:
        """Give it up, without a word to the gateway."""
        self.finished.pop(job.key.request, None)
        if self.jobs.get(job.key.request) is job:
            self.drop(job)
            if job.pull is not None:
                self.give_up(job.pull, None, "given up")

    def leave(self, running: Running) -> list[int]:
        """As `DecodeScheduler.leave`: a running sequence is over here, but for its blocks."""
        assert running.stage is Stage.RUNNING
        assert self.step is None, "cut in mid-step"
        running.stage = Stage.ENDED
        blocks, running.request.blocks = running.request.blocks, []
        return blocks

    def on_unpinned(self, key: RequestKey, blocks: Sequence[int], settled: bool) -> None:
        job: Any = self.departures.unpinned(key, blocks, settled=settled)
        if job is not None and settled:
            self.finish_if_ended(job)
        elif job is not None:
            self.forget(job)
            self.refuse(job.key, Cause.LEASE_LOST, "a sequence was cut, and nobody has taken it over")
        self.wipe()
        self.look_again()

    def on_dropped(self, key: RequestKey, cause: Cause, message: str) -> None:
        pass

    # Pulls, as `kv_transfer.intake.Intake` carries them out.

    def open_pulls(self, address: str) -> tuple[RequestKey, ...]:
        """What a Hello to a source lists."""
        open_pulls = (*self.pulls.values(), *self.quarantine)
        return tuple(pull.key for pull in open_pulls if pull.source.address == address)

    def on_source_open(self, address: str, source: Incarnation) -> None:
        """Attach every pull from there, maybe again."""
        for pull in self.pulling_from(address):
            if pull.source.incarnation != source:
                self.give_up(pull, Cause.WORKER_LOST, "the source has restarted")
            else:
                self.act(pull, pull.attach())

    def on_source_lost(self, address: str) -> None:
        """Nothing from there can be settled any more."""
        for pull in self.pulling_from(address):
            self.give_up(pull, Cause.WORKER_LOST, "the source is lost")

    def pulling_from(self, address: str) -> list[Pull]:
        return [pull for pull in self.pulls.values() if pull.source.address == address]

    def from_source(self, message: Message, source: Incarnation) -> None:
        """A message about a pull."""
        pull = self.pulls.get(message.request)  # type: ignore[attr-defined]
        if pull is None or pull.key != message.key or pull.source.incarnation != source:  # type: ignore[attr-defined]
            return
        match message:
            case BlocksReady():
                self.act(pull, pull.blocks_ready(message))
            case PrefillDone():
                self.act(pull, pull.prefill_done(message))
            case Settled():
                self.act(pull, pull.settled(message))
            case OfferWithdrawn():
                self.act(pull, pull.withdrawn(message))
            case _:
                raise AssertionError(message)

    def end_read(self, index: int, memory: Sequence[Content | None] | None) -> None:
        """A read ends: it has brought what is there now, or it has failed."""
        read = self.reads.pop(index)
        if memory is not None:
            for source_block, sink_block in zip(read.source_blocks, read.sink_blocks, strict=True):
                self.memory[sink_block] = memory[source_block]
        self.act(read.pull, read.pull.read_done(read.start, None if memory is not None else "the connection broke"))

    def give_up(self, pull: Pull, cause: Cause | None, why: str) -> None:
        self.act(pull, pull.abandon(cause, why))

    def act(self, pull: Pull, actions: Iterable[pulls.Action]) -> None:
        """Carry out what a pull decided."""
        if pull.state in (PullState.SETTLED, PullState.ABANDONED) and self.pulls.get(pull.key.request) is pull:
            del self.pulls[pull.key.request]
        if pull.over:
            self.quarantine = [each for each in self.quarantine if each is not pull]
        elif pull.state is PullState.ABANDONED and pull not in self.quarantine:
            self.quarantine.append(pull)
        for action in actions:
            match action:
                case pulls.SendToSource(message):
                    self.world.link_to_source(self, pull.source).send_up(message)
                case pulls.StartRead(start, source_blocks, sink_blocks, _):
                    self.reads.append(Read(pull, start, source_blocks, sink_blocks))
                case pulls.WantBlocks(num_blocks):
                    self.want_blocks(pull, num_blocks)
                case pulls.Admit(block_ids, first_tokens):
                    self.admit(self.jobs[pull.key.request], block_ids, first_tokens)
                case pulls.Release(block_ids):
                    self.release(block_ids)
                case pulls.GaveUp(cause, message):
                    self.gave_up(pull, cause, message)

    def want_blocks(self, pull: Pull, num_blocks: int) -> None:
        assert num_blocks == NUM_BLOCKS
        job = self.jobs[pull.key.request]
        if job.blocks:
            blocks, job.blocks = job.blocks, []
            self.act(pull, pull.reserve(blocks))
        else:
            job.waits = True
            self.look_again()

    def admit(self, job: Job, block_ids: Sequence[int], first_tokens: Sequence[Tokens]) -> None:
        """The sequence's KV is here, proved valid, they say."""
        [first] = first_tokens
        assert first.position == job.num_tokens
        num_tokens = job.num_tokens + len(first.token_ids)
        held = [self.memory[block] for block in block_ids]
        assert held == content(num_tokens - 1), f"unverified KV: decodes from {held}"
        job.blocks = list(block_ids)
        job.running = Running(job, num_tokens, job.num_tokens, job.num_tokens)
        self.look_again()

    def gave_up(self, pull: Pull, cause: Cause | None, message: str) -> None:
        job = self.jobs.get(pull.key.request)
        if job is not None and job.pull is pull:
            self.drop(job)
            if cause is not None:
                self.refuse(job.key, cause, message)

    # What must hold.

    def check(self) -> None:
        """No block has two owners."""
        free = set(self.pool._free)
        owned = [block for job in self.jobs.values() for block in job.blocks]
        assert len(set(owned)) == len(owned), "two owners: two jobs"
        written = [block for read in self.reads for block in read.sink_blocks]
        assert len(set(written)) == len(written), "two owners: two reads write to one block"
        assert free.isdisjoint(written), "two owners: a read under way writes to a free block"
        assert set(owned).isdisjoint(written), "two owners: a read under way writes to a sequence's block"
        if self.step is not None:
            named = {block for _, blocks, _ in self.step[1] for block in blocks}
            assert named.isdisjoint(free), "two owners: a step in flight names a free block"
            assert named.isdisjoint(written), "two owners: a read writes to a block that a step in flight names"
        for pull in (*self.pulls.values(), *self.quarantine):
            pull.check_invariants()

    def check_idle(self) -> None:
        assert not self.jobs, f"leak: {self.address} has jobs"
        assert not self.finished, f"leak: {self.address} keeps finished requests"
        assert not self.pulls, f"leak: {self.address} pulls"
        assert not self.quarantine, f"leak: {self.address} has blocks in quarantine"
        assert not self.reads, f"leak: {self.address} reads"
