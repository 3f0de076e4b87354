"""A gateway or a forwarder, pinned to a core, between clients and scripted streams: for `benchmarks.gateway`."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import AsyncIterator, Callable
from collections.abc import Sequence as Many
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from pathlib import Path

from tokenizers import Tokenizer

from benchmarks.process import Process
from benchmarks.scripted_batch import Script
from benchmarks.scripted_upstream import ScriptedUpstream, encoded_events
from benchmarks.scripted_workers import ScriptedPool
from common.contract.kv_layout import Fingerprint, KVLayout
from common.runtime.checkpoint import DEMO_FOLDER, config_hash
from common.runtime.clock import Pulse

PULSE = Pulse(timeout_s=60.0)
"""A long timeout: a gateway that gets more than it can forward must fall behind, and not lose its workers."""

Pool = ScriptedPool | ScriptedUpstream


Serving = AbstractAsyncContextManager[tuple[Pool, Process, int]]
Through = Callable[[Path, int, Script], Serving]
"""Model folder, number of batches, their script → a context with the pool, the process before it, and the process's
port."""


@asynccontextmanager
async def through_gateway(
    folder: Path, num_batches: int, script: Script, *, core: int | None = None, options: Many[str] = ()
) -> AsyncIterator[tuple[Pool, Process, int]]:
    """A context with a pool of workers and a gateway; see `Through`."""
    layout = KVLayout(num_layers=1, num_kv_heads=1, head_dim=1, block_size=16, dtype="float32")
    fingerprint = Fingerprint(config_hash=config_hash(folder), weights_hash="", layout=layout)
    pool = ScriptedPool(fingerprint, num_batches, script, PULSE)
    arguments = ["--model", str(folder), "--port", "0", "--prefill-workers", pool.prefill.bind()]
    arguments += ["--decode-workers", ",".join(worker.bind() for worker in pool.decode)]
    arguments += ["--heartbeat-timeout-s", str(PULSE.timeout_s), *options]
    async with _serving(pool, Process("gateway", arguments, core=core, log=folder / "gateway.log")) as served:
        yield served


@asynccontextmanager
async def through_forwarder(
    folder: Path, num_batches: int, script: Script, *, core: int | None = None
) -> AsyncIterator[tuple[Pool, Process, int]]:
    """A context with a server of scripted streams and a forwarder; see `Through`."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    events = encoded_events([tokenizer.decode([token]) for token in script.token_ids], str(folder))
    upstream = ScriptedUpstream(events, num_batches, script)
    arguments = ["--upstream", await upstream.bind()]
    process = Process("benchmarks.forwarder", arguments, core=core, log=folder / "forwarder.log")
    async with _serving(upstream, process) as served:
        yield served


@asynccontextmanager
async def _serving(pool: Pool, process: Process) -> AsyncIterator[tuple[Pool, Process, int]]:
    running = asyncio.create_task(pool.run())
    try:
        await asyncio.to_thread(process.start)
        yield pool, process, int(process.http.rpartition(":")[2])
    except BaseException:
        print(process.log_tail())
        raise
    finally:
        process.close()
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running


def model_folder(folder: Path) -> Path:
    """Write the files that a gateway reads: the demo model's tokenizer, and a configuration for long answers."""
    config = json.loads((DEMO_FOLDER / "config.json").read_text()) | {"max_position_embeddings": 2**20}
    (folder / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO_FOLDER / name, folder / name)
    return folder


def tokens_with_text(folder: Path) -> tuple[int, ...]:
    """The token ids that are complete text by themselves, so that each of them gives one event."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    texts = {token: tokenizer.decode([token]) for token in range(tokenizer.get_vocab_size())}
    return tuple(token for token, text in texts.items() if text and "\N{REPLACEMENT CHARACTER}" not in text)
