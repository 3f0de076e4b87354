"""What becomes of a want whose offer still stands."""

from __future__ import annotations

from dispatcher_bench import D2, Bench, D, P, heartbeat, text

from common.contract.messages.session import Phase


async def test_an_offer_that_stands_is_no_prompt_to_place_again() -> None:
    """Its worker takes no new prompts meanwhile. A new route would let the decode worker compute the prompt."""
    bench = Bench((P,), (D, D2))
    key, task = await bench.request()
    bench.tokens(P, key, 0, 10)
    bench.say(P, heartbeat(Phase.DRAINING))
    bench.lose(D)
    newest, work = bench.newest(key)
    assert set(work) == {D2}
    assert bench.decode(D2).offered == key
    assert bench.counted("local_prefills_total", reason="no_prefill_worker") == 0
    bench.tokens(D2, newest, 0, 10, 11, reason="stop")
    assert await text(task) == [10, 11]
    await bench.close()
