"""The choice of workers as it is defined, one worker after the other: what `gateway.dispatch.router` must choose."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from common.contract.messages.gateway import PrefixHint
from common.contract.messages.session import Profile, Role
from common.contract.tiers import Target, Tier
from gateway.dispatch.ask import Ask
from gateway.dispatch.broken_paths import BrokenPaths
from gateway.dispatch.router import Expected, Handoff, Local, LocalPrefill, Rebind
from gateway.workers.registry import Registry
from gateway.workers.worker_life import WorkerLife
from gateway.workers.worker_view import WorkerView

Cached = Mapping[WorkerLife, int]


# --- times of one worker ---------------------------------------------------------------------------------------------


def token_s(worker: WorkerView) -> float:
    return 1e-3 if worker.load is None else worker.load.token_s


def queue_s(worker: WorkerView, tier: Tier, now: float) -> float:
    moment = worker.load_at
    now = min(now, worker.load_at + 0.5)
    queued_s = token_s(worker) * sum(worker.load.queued_tokens[: tier.rank + 1]) if worker.load is not None else 0.0
    for given in worker.unseen:
        if given.tier.rank <= tier.rank:
            at = min(given.at, now)
            queued_s = max(0.0, queued_s - max(0.0, at - moment)) + token_s(worker) * given.num_tokens
            moment = max(moment, at)
    return max(0.0, queued_s - max(0.0, now - moment))


def prompt_s(worker: WorkerView, num_tokens: int, num_here: int, num_elsewhere: int = 0) -> float:
    computing_s = token_s(worker) * (num_tokens - num_here)
    if num_elsewhere <= num_here or worker.load is None:
        return computing_s
    pulling_s = 0.005 + worker.load.pulled_token_s * (num_elsewhere - num_here)
    return min(computing_s, pulling_s + token_s(worker) * (num_tokens - num_elsewhere))


def room_s(worker: WorkerView, tier: Tier, num_sequences: int) -> float:
    places = 64 if worker.load is None else worker.load.places
    if not places:
        return 0.0
    excess = sum(worker.sequences[: tier.rank + 1]) + min(num_sequences, places) - places
    sequence_s = worker.load.sequence_s if worker.load is not None else 0.0
    return (sequence_s or 1.0) * max(0, excess) / places


def occupancy(worker: WorkerView) -> float:
    if worker.load is None:
        return float(len(worker.unseen) > 0)
    return worker.blocks_expected / max(1, worker.load.blocks_total)


def holds(worker: WorkerView, num_tokens: int) -> bool:
    return worker.welcome is not None and num_tokens <= worker.welcome.max_sequence_tokens


# --- workers that come into question ---------------------------------------------------------------------------------


def usable(registry: Registry, role: Role) -> list[WorkerView]:
    return [worker for worker in registry.workers.values() if worker.role is role and worker.usable]


def fitting(ask: Ask, workers: list[WorkerView]) -> list[WorkerView]:
    return [w for w in workers if ask.fingerprint is None or (w.welcome and w.welcome.fingerprint == ask.fingerprint)]


def beside(ask: Ask, workers: list[WorkerView]) -> list[WorkerView]:
    return [worker for worker in workers if worker.life in ask.beside] or workers


def able(ask: Ask, workers: list[WorkerView]) -> list[WorkerView]:
    workers = [worker for worker in fitting(ask, workers) if worker.life not in ask.too_small]
    workers = [worker for worker in workers if holds(worker, ask.most_tokens)] or workers
    return workers if ask.admitted else [worker for worker in workers if worker.life not in ask.avoid]


def connected(workers: list[WorkerView]) -> list[WorkerView]:
    return [worker for worker in workers if worker.broken_at is None] or workers


def decode_workers(ask: Ask, workers: list[WorkerView]) -> list[WorkerView]:
    workers = able(ask, workers)
    return beside(ask, connected([worker for worker in workers if worker.life not in ask.avoid] or workers))


def prefill_workers(ask: Ask, workers: list[WorkerView]) -> list[WorkerView]:
    shunned = ask.avoid | ask.too_small
    workers = fitting(ask, workers)
    if ask.admitted and sum(worker.life in ask.avoid for worker in workers) >= 3:
        return []
    workers = [worker for worker in workers if worker.life not in shunned]
    return beside(ask, connected([worker for worker in workers if holds(worker, ask.num_tokens)]))


def readers(source: WorkerLife, decode: list[WorkerView], paths: BrokenPaths, now: float) -> list[WorkerView]:
    return [worker for worker in decode if worker.life not in paths.avoided(source, now)]


def hope(registry: Registry, ask: Ask) -> bool:
    workers = [worker for worker in registry.workers.values() if worker.role is Role.DECODE]
    there = fitting(ask, [worker for worker in workers if worker.there and worker.refused is None])
    return len(able(ask._replace(fingerprint=None), there)) > 0


def has_room(workers: list[WorkerView], ask: Ask) -> bool:
    return any(worker.load is not None and room_s(worker, ask.tier, ask.num_choices) == 0.0 for worker in workers)


def coming_back_until(registry: Registry) -> float:
    workers = [worker for worker in registry.workers.values() if worker.role is Role.DECODE and worker.listed]
    opened_at = max((worker.opened_at for worker in workers if worker.usable), default=-math.inf)
    away = [worker for worker in workers if worker.incarnation is None and worker.lost_at < opened_at]
    return min(opened_at + 3.0, max((worker.lost_at for worker in away), default=-math.inf) + 600.0)


def of_profile(workers: list[WorkerView], tier: Tier, target: Target, wait_s: list[float]) -> list[WorkerView]:
    if len({worker.profile for worker in workers}) < 2:
        return workers
    interactive = tier is Tier.INTERACTIVE
    own = Profile.LATENCY if interactive else Profile.THROUGHPUT
    for most_s in (target.ttft_s / 4, target.ttft_s) if interactive else (target.ttft_s,):
        in_time = [
            worker
            for worker, seconds in zip(workers, wait_s, strict=True)
            if seconds <= most_s and (worker.load is None or worker.load.itl_s <= target.itl_s)
        ]
        if in_time:
            return [worker for worker in in_time if worker.profile is own] or in_time
    return workers


# --- the choice ------------------------------------------------------------------------------------------------------


def choose(
    registry: Registry,
    ask: Ask,
    cached: Cached,
    paths: BrokenPaths,
    *,
    local_prefill_tokens: int,
    targets: Mapping[Tier, Target],
) -> Handoff | Local | None:
    """Workers for a prompt."""
    prefill = prefill_workers(ask, usable(registry, Role.PREFILL))
    decode = decode_workers(ask, usable(registry, Role.DECODE))
    if not decode:
        return None
    takers = decode
    if not ask.least_wait:
        wait_s = [max(queue_s(w, ask.tier, ask.now), room_s(w, ask.tier, ask.num_choices)) for w in decode]
        decode = of_profile(decode, ask.tier, targets[ask.tier], wait_s)
    free = uncrowded(decode)
    near = [w for w in free if ask.num_tokens - cached.get(w.life, 0) <= local_prefill_tokens]
    if registry.colocated:
        return local(ask, free, cached, LocalPrefill.COLOCATED)
    if paths.sources():
        space_s = [room_s(worker, ask.tier, ask.num_choices) for worker in decode]
        soonest = [worker for worker, seconds in zip(decode, space_s, strict=True) if seconds == min(space_s)]
        ways = ((soonest, decode), (decode, decode), (takers, takers))
        open_ways = (
            ([each for each in prefill if readers(each.life, first, paths, ask.now)], then) for first, then in ways
        )
        prefill, takers = next((way for way in open_ways if way[0]), ([], takers))
    else:
        takers = decode
    if not prefill:
        refused = bool(usable(registry, Role.PREFILL))
        reason = LocalPrefill.REFUSED if refused else LocalPrefill.NO_PREFILL_WORKER
        route = local(ask, free, cached, reason)
        return route._replace(reason=LocalPrefill.SHORT) if route.decode in near else route
    best = handoff(ask, prefill, takers, cached, paths)
    if near:
        short = local(ask, near, cached, LocalPrefill.SHORT)
        if ask.least_wait:
            return short if short.expected.wait_s < best.expected.wait_s else best
        if short.expected.decode_s <= 1.1 * best.expected.decode_s + 0.02:
            return short
    return best


def rebind(
    source: WorkerLife,
    registry: Registry,
    ask: Ask,
    cached: Cached,
    paths: BrokenPaths,
    targets: Mapping[Tier, Target],
) -> Rebind | None:
    decode = decode_workers(ask, usable(registry, Role.DECODE))
    decode = readers(source, decode, paths, ask.now) or decode
    return Rebind(taker(decode, ask, cached, targets)) if decode else None


def taker(workers: list[WorkerView], ask: Ask, cached: Cached, targets: Mapping[Tier, Target]) -> WorkerView:
    space_s = [room_s(worker, ask.tier, ask.num_choices) for worker in workers]
    return least_loaded_decode(of_profile(workers, ask.tier, targets[ask.tier], space_s), ask, cached)


def least_loaded_decode(workers: list[WorkerView], ask: Ask, cached: Cached) -> WorkerView:
    seekable = uncrowded(workers)

    def key(worker: WorkerView) -> tuple[object, ...]:
        return (
            room_s(worker, ask.tier, ask.num_choices),
            int(occupancy(worker) / (1 / 16)),
            -cached.get(worker.life, 0) if worker in seekable else 0,
            worker.in_flight,
            worker.address,
        )

    return min(workers, key=key)


def handoff(
    ask: Ask, prefill: list[WorkerView], decode: list[WorkerView], cached: Cached, paths: BrokenPaths
) -> Handoff:
    holder = least([*prefill, *decode], lambda w: -cached.get(w.life, 0))
    most = cached.get(holder.life, 0)

    def own_s(worker: WorkerView) -> float:
        return prompt_s(worker, ask.num_tokens, cached.get(worker.life, 0), most)

    def ready_s(worker: WorkerView) -> float:
        return queue_s(worker, ask.tier, ask.now) + (0.0 if ask.least_wait else own_s(worker))

    chosen = least(soonest(prefill, ready_s), lambda w: -cached.get(w.life, 0))
    here = cached.get(chosen.life, 0)
    takes = least_loaded_decode(readers(chosen.life, decode, paths, ask.now), ask, cached)
    return Handoff(
        prefill=chosen,
        decode=takes,
        prefix=PrefixHint(source=holder.life.source, num_tokens=most) if most > here else None,
        num_cached=here,
        expected=Expected(
            queue_s=queue_s(chosen, ask.tier, ask.now),
            prompt_s=own_s(chosen),
            room_s=room_s(takes, ask.tier, ask.num_choices),
        ),
    )


def local(ask: Ask, decode: list[WorkerView], cached: Cached, reason: LocalPrefill) -> Local:
    def expected(worker: WorkerView) -> Expected:
        return Expected(
            queue_s=queue_s(worker, ask.tier, ask.now),
            prompt_s=prompt_s(worker, ask.num_tokens, cached.get(worker.life, 0)),
            room_s=room_s(worker, ask.tier, ask.num_choices),
        )

    def ready_s(worker: WorkerView) -> float:
        return expected(worker).wait_s if ask.least_wait else expected(worker).decode_s

    chosen = least_loaded_decode(soonest(decode, ready_s), ask, cached)
    return Local(decode=chosen, num_cached=cached.get(chosen.life, 0), expected=expected(chosen), reason=reason)


def uncrowded(decode: list[WorkerView]) -> list[WorkerView]:
    fewest = {
        profile: min(worker.in_flight for worker in decode if worker.profile is profile)
        for profile in {worker.profile for worker in decode}
    }
    return [worker for worker in decode if worker.in_flight <= 2 * fewest[worker.profile] + 4]


def soonest(workers: list[WorkerView], seconds: Callable[[WorkerView], float]) -> list[WorkerView]:
    expected = [seconds(worker) for worker in workers]
    most = min(expected) * 1.1 + 0.005
    return [worker for worker, each in zip(workers, expected, strict=True) if each <= most]


def least(workers: list[WorkerView], key: Callable[[WorkerView], float]) -> WorkerView:
    return min(workers, key=lambda worker: (key(worker), worker.in_flight, worker.address))
