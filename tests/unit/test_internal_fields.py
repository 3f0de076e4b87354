"""What a client sends under the names of the inside reaches no worker: neither in a field nor in a header."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import aiohttp
import pytest
from dispatcher_bench import Bench, D, P
from gateway_fixtures import CHAT, CHAT_PATH, COMPLETION, COMPLETIONS_PATH, serve

from common.contract.codec import MESSAGES, encode
from common.contract.ids import RequestId, new_incarnation
from common.contract.messages.fields import Message
from common.contract.messages.gateway import Decode, Prefill

FORGED = "forged4711"
NUMBER = 471147114711471
"""As conspicuous as the text."""
_CLIENTS_OWN = {"stop", "user", "logprobs", "prompt_logprobs", "echo", "token_ids", "prediction"}
"""Names on the wire that mean something in a request, too, or whose value has another form there."""


def internal_names() -> set[str]:
    """Every field of every message between gateway and workers, and what other servers call such things."""
    on_the_wire = {field.name for message in MESSAGES for field in dataclasses.fields(message)}
    others = {
        "lease", "source", "kv_ids", "block_ids", "remote_block_ids", "kv_transfer_params", "request_id", "attempt",
        "incarnation", "tenant", "tier", "budget_s", "priority", "fingerprint", "forced_prefix", "worker", "trial",
        "bootstrap_host", "bootstrap_room", "disagg_prefill_dp_rank", "__class__", "sampling_params",
    }  # fmt: skip
    return (on_the_wire | others) - _CLIENTS_OWN - {"cache_salt"}


def forged_headers() -> dict[str, str]:
    names = {name.replace("_", "-").strip("-") for name in internal_names()}
    return {f"X-Baton-{name}": FORGED for name in sorted(names)[:40]} | {
        "X-Tenant": FORGED,
        "X-Lease": str(NUMBER),
        "X-Worker": FORGED,
        "X-Forwarded-For": FORGED,
    }


class Served:
    """The dispatcher, as the tests' server wants its generator."""

    num_open = 0

    def __init__(self, bench: Bench) -> None:
        self.generate = bench.dispatcher.generate
        self.ready = bench.dispatcher.ready


async def _sent(path: str, body: dict[str, Any], headers: dict[str, str]) -> list[Message]:
    """What the workers are sent because of a request."""
    bench = Bench()
    try:
        async with serve(Served(bench)) as server, aiohttp.ClientSession() as session:  # type: ignore[arg-type]
            asked = asyncio.create_task(session.post(server.url + path, json=body, headers=headers))
            async with asyncio.timeout(20):
                while not bench.sent(D, Decode) and not asked.done():
                    await asyncio.sleep(0.01)
            assert not asked.done(), await (await asked).text()
            asked.cancel()
            await asyncio.gather(asked, return_exceptions=True)
            async with asyncio.timeout(20):
                while bench.dispatcher.ready().details()["in_flight"]:
                    await asyncio.sleep(0.01)
        return [message for address in (P, D) for message in bench.links[address].sent]
    finally:
        await bench.close()


@pytest.mark.parametrize("path", [COMPLETIONS_PATH, CHAT_PATH])
@pytest.mark.parametrize("value", [FORGED, NUMBER, [FORGED, NUMBER], {"id": FORGED, "epoch": NUMBER}])
async def test_workers_are_told_nothing_of_it(path: str, value: object) -> None:
    fields = {"max_tokens": 9, "seed": 3} | (COMPLETION if path == COMPLETIONS_PATH else CHAT)
    forged = {name: value for name in internal_names() if name not in fields}
    declared = {"sampling", "choices", "prompt_len", "offered", "moving", "epoch", "deadline", "remaining_s"}
    assert len(forged) > 40
    assert forged.keys() & declared, "the names are those of the messages"
    messages = await _sent(path, forged | fields, forged_headers())
    assert {type(message) for message in messages} >= {Prefill, Decode}
    for message in messages:
        frame = encode(new_incarnation(), [message])
        assert FORGED.encode() not in frame
        assert NUMBER.to_bytes(8, "big") not in frame
        assert str(NUMBER).encode() not in frame


async def test_and_what_they_are_told_is_what_they_would_be_without() -> None:
    fields = COMPLETION | {"max_tokens": 9, "seed": 3}
    forged = {name: FORGED for name in internal_names() if name not in fields}
    plain = await _sent(COMPLETIONS_PATH, fields, {})
    with_forged = await _sent(COMPLETIONS_PATH, forged | fields, forged_headers())

    def work(messages: list[Message]) -> list[Message]:
        return [
            dataclasses.replace(message, request=RequestId("0" * len(message.request)), budget_s=1.0)
            for message in messages
            if isinstance(message, Prefill | Decode)
        ]

    def told(messages: list[Message]) -> list[dict[str, Any]]:
        drawn = ("source", "offered", "handles")
        kept = [dataclasses.asdict(message) for message in work(messages)]
        return [{name: value for name, value in each.items() if name not in drawn} for each in kept]

    assert told(plain) == told(with_forged)
