"""Random runs of the search's world, with more going wrong than a search can cover: the workers' own cores, too."""

from __future__ import annotations

from random import Random

import pytest
from handoff_bounds import BLOCK_SIZE, NUM_BLOCKS, Bounds
from handoff_search import playing
from handoff_worker import _REGION, FACTS, PREFILL
from handoff_world import World

from common.contract.block_hashes import block_hashes
from common.contract.ids import Incarnation, RequestId
from common.contract.messages.handoff import AttachPrefix, BlocksReady, Detach
from common.worker.events import HelloReceived, Received
from kv_transfer.events import Send
from prefill_worker.core import PrefillCore

NUM_RUNS = 150
KINDS = frozenset({"lose", "repeat", "replay", "silence", "crash", "expire", "abort", "refuse", "fail_read", "revoke"})
MANY = Bounds(decode_workers=2, chunks=2, output_tokens=4, disturbances=5, kinds=KINDS | {"move"})
AHEAD = Bounds(decode_workers=2, chunks=2, output_tokens=6, disturbances=5, kinds=KINDS | {"move"}, runs_ahead=True)


def walk(bounds: Bounds, seed: int) -> int:
    """One run to its end; how many disturbances it had."""
    draw = Random(seed)
    with playing():
        world = World(bounds)
        world.begin()
        while True:
            progress, disturbances = world.progress(), world.disturbances()
            if disturbances and (not progress or draw.random() < 0.2):
                world.disturb(draw.choice(disturbances))
            elif progress or world.timers():
                world.apply(draw.choice(progress or world.timers()))
            else:
                world.check_final()
                return bounds.disturbances - world.left


@pytest.mark.parametrize("bounds", [MANY, AHEAD], ids=["one step at a time", "steps are planned ahead"])
def test_every_promise_is_kept_in_long_runs(bounds: Bounds) -> None:
    disturbances = 0
    for seed in range(NUM_RUNS):
        try:
            disturbances += walk(bounds, seed)
        except Exception as error:
            raise AssertionError(f"seed {seed}: {error!r}") from error
    assert disturbances > 2 * NUM_RUNS, "the runs show little"


def test_a_prefix_that_is_lent_is_not_evicted_while_it_is_read() -> None:
    """The world has no prefix cache; without this pin the sink would read, and settle, the blocks of others."""
    settings = PREFILL[1].model_copy(update={"prefix_cache": True})
    core = PrefillCore(settings, Incarnation("p0"), FACTS, _REGION)  # type: ignore[arg-type]
    names = block_hashes(range(NUM_BLOCKS * BLOCK_SIZE), BLOCK_SIZE)
    blocks = core.pool.allocate(NUM_BLOCKS)
    core.pool.name(blocks, names)
    core.pool.release(blocks)
    assert core.pool.num_free == NUM_BLOCKS, "cached, and anybody's who needs them"
    sink, request = Incarnation("d0"), RequestId("r")
    core.handle(HelloReceived(sink, ()), 0.0)
    actions = core.handle(Received(sink, AttachPrefix(request=request, attempt=1, block_hashes=tuple(names))), 0.0)
    [offer] = [each.message for each in actions if isinstance(each, Send) and isinstance(each.message, BlocksReady)]
    assert (list(offer.block_ids), core.pool.num_free) == (blocks, 0)
    core.handle(Received(sink, Detach(request=request, attempt=1)), 0.0)
    assert core.pool.num_free == NUM_BLOCKS
