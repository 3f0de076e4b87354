"""The gateway's benchmark, for a moment: every token of every stream is an event, and has a time."""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.gateway import Streams, model_folder, serving, tokens_with_text
from benchmarks.scripted_workers import Script


async def test_every_token_is_an_event(tmp_path: Path) -> None:
    folder = model_folder(tmp_path)
    options = argparse.Namespace(core=None, gateway_options="--log-level warning")
    async with serving(folder, 2, Script(tokens_with_text(folder)), options) as (pool, gateway, port):
        streams = await Streams.open(pool, gateway, port, 5, seed=0)
        figures, taken = await streams.added(0.02, 1.0)
        assert len(taken) > 5
        assert min(taken) > 0
        assert figures["received_per_s"] > 0
        assert figures["cpu_us_per_token"] > 0
        await streams.measure(0.0002, 0.2)  # more than it can pass on: what is behind is joined, and nothing is lost
        await streams.caught_up()
        await streams.finish()
