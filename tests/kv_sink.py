"""A sink outside the product: pulls a prompt's KV from a real prefill worker and shows what it is worth.

Run as a process, so that `UCX_TLS` can be chosen for it. It attaches to the offer over the real protocol, reads the
blocks with the real transport into its own engine's cache, and prints JSON: whether the bytes' checksums are those
that the source sent, how far they are from a cache that it computed itself, and the answers that its engine decodes
from the pulled blocks, intact and with each block in turn corrupted.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import torch
import zmq.asyncio
from stack import BLOCK_SIZE
from transformers import AutoTokenizer

from common.contract.errors import TransferError
from common.contract.ids import new_incarnation, new_request_id
from common.contract.kv_layout import Fingerprint
from common.contract.messages.fields import Message
from common.contract.messages.gateway import Prefill
from common.contract.messages.handoff import Attach, BlocksReady, OfferWithdrawn, PrefillDone, Settle, Settled
from common.contract.messages.session import Heartbeat, Hello, HelloRefused, Role, Welcome
from common.contract.messages.worker import Failed, Tokens
from common.contract.sampling import SamplingParams
from common.engine.batch import Sample, SampledToken, Slice
from common.engine.runner import ModelRunner, load_runner
from common.runtime.channel import ControlClient
from common.runtime.checkpoint import config_hash, weights_hash
from common.runtime.clock import Pulse, monotonic
from common.runtime.config import DecodeSettings
from common.worker.start import region_of
from kv_transfer.events import AddSource, Polled, ReadEnded, StartRead
from kv_transfer.mover import Mover
from kv_transfer.transport import ReadId
from kv_transfer.transports import transport_maker

NEW_TOKENS = 6


class Peer:
    """A link to the source that collects what it says."""

    def __init__(self, role: Role, fingerprint: Fingerprint | None) -> None:
        self.role = role
        self.fingerprint = fingerprint
        self.messages: asyncio.Queue[Message] = asyncio.Queue()
        self.welcome: asyncio.Future[Welcome] = asyncio.get_running_loop().create_future()

    def hello(self, link: ControlClient) -> Hello:
        return Hello(role=self.role, fingerprint=self.fingerprint, open_requests=())

    def on_open(self, link: ControlClient, welcome: Welcome) -> None:
        self.welcome.set_result(welcome)

    def on_resync(self, link: ControlClient, welcome: Welcome) -> None:
        raise AssertionError("messages were lost")

    def on_message(self, link: ControlClient, message: Message) -> None:
        if not isinstance(message, Heartbeat):
            self.messages.put_nowait(message)

    def on_lost(self, link: ControlClient, why: str, *, crashed: bool) -> None:
        raise AssertionError(why)

    def on_refused(self, link: ControlClient, refused: HelloRefused) -> None:
        raise AssertionError(refused.message)


def decode_from(runner: ModelRunner, tokens: list[int], table: list[int], first: int) -> list[int]:
    """Greedy tokens after `tokens`, whose KV is in `table`; the first one is given."""
    output = [first]
    params = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS)
    while len(output) < NEW_TOKENS:
        so_far = tokens + output
        sample = Sample(params=params, choice=0, position=len(so_far), token_ids=so_far, prompt_len=len(tokens))
        one = Slice(token_ids=so_far[-1:], start=len(so_far) - 1, block_table=table, samples=(sample,))
        ((sampled,),) = runner.step([one])
        assert isinstance(sampled, SampledToken)
        output.append(sampled.token_id)
        if sampled.token_id in runner.config.eos_token_ids:
            break
    return output


def prefill(runner: ModelRunner, tokens: list[int], table: list[int]) -> int:
    """Compute the prompt here, in one chunk; its first token."""
    params = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS)
    sample = Sample(params=params, choice=0, position=len(tokens), token_ids=tokens, prompt_len=len(tokens))
    ((sampled,),) = runner.step([Slice(token_ids=tokens, start=0, block_table=table, samples=(sample,))])
    assert isinstance(sampled, SampledToken)
    return sampled.token_id


async def pull(address: str, transport: str, runner: ModelRunner, folder: Path, tokens: list[int]) -> dict[str, Any]:
    """Ask for the prompt, as a gateway; pull it, as a sink."""
    me, request = new_incarnation(), new_request_id()
    cache = runner.cache
    region = region_of(cache)
    reads: dict[int, asyncio.Future[None]] = {}

    def on_event(event: ReadEnded | Polled) -> None:
        assert isinstance(event, ReadEnded), "nobody has asked for a poll"
        if event.error is None:
            reads[event.read_id].set_result(None)
        else:
            reads[event.read_id].set_exception(TransferError(event.error))

    def on_fatal(error: Exception) -> None:
        raise error

    settings = DecodeSettings.model_validate({"transport": transport})
    mover = Mover(region, transport_maker(settings, region, me, cache.synchronize), on_event, on_fatal)
    await mover.start()
    context = zmq.asyncio.Context()
    fingerprint = Fingerprint(config_hash=config_hash(folder), weights_hash=weights_hash(folder), layout=runner.layout)
    gateway, sink = Peer(Role.GATEWAY, None), Peer(Role.DECODE, fingerprint)
    ask = ControlClient(context, address, new_incarnation(), gateway, monotonic, Pulse(timeout_s=30))
    attach = ControlClient(context, address, me, sink, monotonic, Pulse(timeout_s=30))
    links = [asyncio.create_task(link.run()) for link in (ask, attach)]
    await gateway.welcome
    welcome = await sink.welcome
    assert attach.worker is not None
    mover.carry_out(AddSource(attach.worker, welcome.transport_metadata))
    sampling = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS)
    work: dict[str, Any] = {
        "token_ids": tuple(tokens),
        "prompt_len": len(tokens),
        "choices": (0,),
        "sampling": sampling,
        "budget_s": 60,
    }
    ask.send(Prefill(request=request, attempt=1, **work))
    attach.send(Attach(request=request, attempt=1, offered=1))
    source_blocks: list[int] = []
    checksums: list[int] = []
    offers = 0
    while True:
        message = await sink.messages.get()
        assert not isinstance(message, OfferWithdrawn | Failed), message
        if isinstance(message, BlocksReady):
            assert message.start == len(source_blocks)
            source_blocks += message.block_ids
            checksums += message.checksums or ()
            offers += bool(message.block_ids)
        if isinstance(message, PrefillDone):
            break
    table = list(range(10, 10 + len(source_blocks)))
    reads[0] = asyncio.get_running_loop().create_future()
    mover.carry_out(StartRead(ReadId(0), attach.worker, tuple(source_blocks), tuple(table), None))
    await reads[0]
    attach.send(Settle(request=request, attempt=1, lease=message.lease, epoch=message.epoch))
    settled = await sink.messages.get()
    assert isinstance(settled, Settled)
    first = await gateway.messages.get()
    while not isinstance(first, Tokens):  # of its cache and its time
        first = await gateway.messages.get()
    assert first.token_ids == message.first_tokens[0].token_ids
    pulled_sums = list(region.crc32(table))
    for link in links:
        link.cancel()
    await asyncio.gather(*links, return_exceptions=True)
    await mover.close()
    context.destroy(linger=0)
    return {
        "table": table,
        "first": first.token_ids[0],
        "valid": settled.valid,
        "offers": offers,
        "checksums_equal": checksums == pulled_sums and len(checksums) > 0,
    }


async def main(address: str, transport: str, folder: Path, prompt: str) -> None:
    """Pull, compare, decode, corrupt, decode again."""
    torch.set_num_threads(1)
    runner = load_runner(folder, kv_cache_bytes=32 * 2**20, block_size=BLOCK_SIZE)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    messages = [{"role": "user", "content": prompt}]
    tokens = list(tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"])
    result = await pull(address, transport, runner, folder, tokens)
    table = result.pop("table")
    mine = [block + 200 for block in table]
    my_first = prefill(runner, tokens, mine)
    layers = [runner.cache.layer(index) for index in range(runner.layout.num_layers)]
    size = runner.layout.block_size
    difference = 0.0
    for index, (theirs, own) in enumerate(zip(table, mine, strict=True)):
        filled = min(size, len(tokens) - index * size)
        for layer in layers:
            unlike = (layer[theirs][..., :filled, :] - layer[own][..., :filled, :]).abs().max()
            difference = max(difference, float(unlike))
    scratch = [block + 400 for block in table]

    def answer(corrupted_block: int | None) -> str:
        for theirs, copy in zip(table, scratch, strict=True):
            runner.copy_block(theirs, copy)
        if corrupted_block is not None:
            for layer in layers:
                layer[scratch[corrupted_block]].normal_()
        return text(decode_from(runner, tokens, scratch, result["first"]))

    def text(output: list[int]) -> str:
        return str(tokenizer.decode(output, skip_special_tokens=True)).strip()

    torch.manual_seed(0)
    result |= {
        "num_blocks": len(table),
        "difference": difference,
        "own": text(decode_from(runner, tokens, mine, my_first)),
        "pulled": answer(None),
        "corrupted": [answer(block) for block in range(len(table))],
    }
    print(json.dumps(result))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], Path(sys.argv[3]), sys.argv[4]))
