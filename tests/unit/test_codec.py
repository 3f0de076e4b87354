"""Frames: what is sent arrives as it was, and whatever is not a well-formed frame is a `ProtocolError`."""

from __future__ import annotations

import dataclasses
import struct
import tracemalloc
from typing import Any, TypeVar

import msgpack
import pytest
from pydantic import ValidationError

from common.contract import codec
from common.contract.block_hashes import HASH_BYTES, BlockHash, block_hashes
from common.contract.codec import MAX_MESSAGES_PER_FRAME, MESSAGES, decode, encode
from common.contract.errors import Cause, ProtocolError
from common.contract.ids import Handle, Incarnation, LeaseId, RequestId, RequestKey
from common.contract.kv_layout import Fingerprint, KVLayout
from common.contract.messages.fields import (
    MAX_CACHE_EVENTS,
    MAX_OPEN_REQUESTS,
    MAX_PREFIX_BLOCKS,
    MAX_STEP_TOKENS,
    MAX_TOKENS,
    MAX_TOLD_TOKENS,
    LinkMessage,
    Message,
    RequestMessage,
)
from common.contract.messages.gateway import Abort, Decode, Prefill, PrefixHint, Source
from common.contract.messages.handoff import AttachPrefix, AttachSequence, BlocksReady, PrefillDone, Settle
from common.contract.messages.session import Goodbye, Heartbeat, Hello, Phase, Role, Welcome
from common.contract.messages.worker import Failed, PromptLogprobs, StepTokens, Timings, TokenLogprobs, Tokens
from common.contract.sampling import (
    MAX_CHOICES,
    MAX_GRAMMAR_CHARS,
    MAX_LOGIT_BIAS,
    MAX_LOGPROBS,
    MAX_SEED,
    MAX_STOP_TOKEN_IDS,
    SamplingParams,
)
from common.contract.tiers import Tier

M = TypeVar("M", bound=Message)
ME = Incarnation("0123456789abcdef")
REQUEST = RequestId("r1")
FINGERPRINT = Fingerprint(
    config_hash="c",
    weights_hash="w",
    layout=KVLayout(num_layers=2, num_kv_heads=1, head_dim=8, block_size=4, dtype="float32"),
)


def u32(*numbers: int) -> bytes:
    """Numbers as they travel."""
    return struct.pack(f"<{len(numbers)}I", *numbers)


def u64(*numbers: int) -> bytes:
    """Long numbers as they travel."""
    return struct.pack(f"<{len(numbers)}Q", *numbers)


WORK: dict[str, Any] = {
    "request": "r1",
    "attempt": 1,
    "token_ids": u32(5, 6, 7),
    "prompt_len": 3,
    "choices": [0],
    "sampling": {"max_tokens": 4},
    "budget_s": 30.0,
}
DECODE: dict[str, Any] = {**WORK, "handles": u64(1)}
TOKENS: dict[str, Any] = {"request": "r1", "attempt": 1, "choice": 0, "position": 3, "token_ids": u32(9)}
STEP: dict[str, Any] = {"handles": u64(8, 2**64 - 1), "positions": u32(3, 7), "token_ids": u32(5, 6)}
SCORES: dict[str, Any] = {
    "logprobs": struct.pack("<2f", -0.5, -1.5),
    "ranks": u32(1, 9),
    "top_token_ids": u32(7, 8, 7, 8),
    "top_logprobs": struct.pack("<4f", -0.5, -2.0, -0.25, -4.0),
}
SCORED: dict[str, Any] = {"request": "r1", "attempt": 1, "position": 1, "scores": SCORES}
SETTLE: dict[str, Any] = {"request": "r1", "attempt": 1, "lease": "l1", "epoch": 1}
DONE: dict[str, Any] = {**SETTLE, "first_tokens": [TOKENS]}
SOURCE: dict[str, Any] = {"address": "h:1", "incarnation": "i"}
OFFERED: dict[str, Any] = {"source": SOURCE, "offered": ["r1", 1]}
NAME = bytes(range(HASH_BYTES))
ATTACH_PREFIX: dict[str, Any] = {"request": "r1", "attempt": 1, "block_hashes": NAME}
ATTACH_SEQUENCE: dict[str, Any] = {"request": "r1", "attempt": 2, "sequence": ["r1", 1], "choice": 0, "position": 3}
OFFER: dict[str, Any] = {**SETTLE, "start": 0, "block_ids": u32(4), "num_blocks": 1}
HELLO: dict[str, Any] = {"role": "gateway", "fingerprint": None, "open_requests": [["r1", 1]]}


def frame_of(kind: str, fields: object) -> bytes:
    """A frame with one message that nobody has checked."""
    frame: bytes = msgpack.packb([ME, [[kind, fields]]])
    return frame


def received(kind: type[M], fields: object) -> M:
    """The message as a receiver has it."""
    message = received_by_name(kind.__name__, fields)
    assert isinstance(message, kind)
    return message


def received_by_name(kind: str, fields: object) -> Message:
    """As `received`, of the kind with this name."""
    _, [message] = decode(frame_of(kind, fields))
    return message


def refused(kind: str, fields: object) -> str:
    """Why a receiver will not have the message."""
    with pytest.raises(ProtocolError) as caught:
        decode(frame_of(kind, fields))
    return str(caught.value)


# --- well-formed frames ------------------------------------------------------------------------------------------


def test_messages_arrive_in_order_and_as_they_were() -> None:
    scored = TokenLogprobs(logprob=-0.25, top=((1, -0.25), (7, -1.5)))
    tokens = Tokens(
        request=REQUEST,
        attempt=2,
        choice=1,
        position=12,
        token_ids=(1, 2**32 - 1),
        logprobs=(scored, TokenLogprobs(logprob=-3.0, top=())),
        finish_reason="stop",
    )
    first = dataclasses.replace(tokens, token_ids=(1,), logprobs=(scored,))
    messages: list[Message] = [
        Hello(role=Role.DECODE, fingerprint=FINGERPRINT, open_requests=(RequestKey(REQUEST, 2),)),
        Decode(
            request=REQUEST,
            attempt=2,
            token_ids=(1, 2, 3),
            prompt_len=2,
            choices=(0, 3),
            handles=(Handle(5), Handle(2**64 - 1)),
            sampling=SamplingParams(max_tokens=7, temperature=0.5, stop_token_ids=(4,), logprobs=2),
            budget_s=1.5,
            tier=Tier.BATCH,
            tenant="é",
            cache_salt="pepper",
            source=Source(address="host:1", incarnation=Incarnation("i1")),
            offered=RequestKey(REQUEST, 1),
        ),
        tokens,
        PrefillDone(request=REQUEST, attempt=2, lease=LeaseId("l"), epoch=3, first_tokens=(first,)),
        Failed(request=REQUEST, attempt=2, cause=Cause.LEASE_LOST, message="é 日本 \n"),
        Welcome(
            role=Role.PREFILL,
            fingerprint=FINGERPRINT,
            max_sequence_tokens=9,
            transport="zmq",
            transport_metadata=b"\x00\xff",
            open_requests=(),
        ),
        AttachPrefix(request=REQUEST, attempt=1, block_hashes=tuple(block_hashes(range(12), block_size=4))),
        Goodbye(),
    ]
    sender, arrived = decode(encode(ME, messages))
    assert sender == ME
    assert arrived == messages
    assert [type(message) for message in arrived] == [type(message) for message in messages]
    hello, work, told, _, failed, _, prefix, _ = arrived
    assert isinstance(hello, Hello)
    assert isinstance(hello.open_requests[0], RequestKey)
    assert isinstance(hello.role, Role)
    assert isinstance(work, Decode)
    assert isinstance(work.tier, Tier)
    assert isinstance(work.offered, RequestKey)
    assert isinstance(told, Tokens)
    assert told.key == RequestKey(REQUEST, 2)
    assert isinstance(failed, Failed)
    assert isinstance(failed.cause, Cause)
    assert isinstance(prefix, AttachPrefix)
    assert [len(name) for name in prefix.block_hashes] == [HASH_BYTES] * 3


def test_a_frame_may_be_empty_and_a_view() -> None:
    assert decode(memoryview(encode(ME, []))) == (ME, [])


def test_the_tokens_of_a_step_travel_in_columns() -> None:
    step = StepTokens(handles=(Handle(8), Handle(2**64 - 1)), positions=(3, 7), token_ids=(5, 6))
    assert received(StepTokens, STEP) == step
    assert decode(encode(ME, [step])) == (ME, [step])


def test_log_probabilities_of_a_prompt_travel_in_columns() -> None:
    message = received(PromptLogprobs, SCORED)
    assert (message.position, len(message.scores), message.scores.num_alternatives) == (1, 2, 2)
    first, second = message.scores.each()
    assert first == TokenLogprobs(logprob=-0.5, top=((7, -0.5), (8, -2.0)))
    assert second == TokenLogprobs(logprob=-1.5, top=((7, -0.25), (8, -4.0)))
    assert message.scores.part(1).each() == [second]
    assert message.scores.part(0, 1).ranks == (1,)
    assert message.scores.part(0, 9) == message.scores
    assert received(Prefill, {**WORK, "prompt_logprobs": 20}).prompt_logprobs == 20
    assert received(Decode, {**DECODE, "source": None, "prompt_logprobs": 0}).prompt_logprobs == 0
    assert received(Prefill, WORK).prompt_logprobs is None


def test_absent_fields_take_their_defaults() -> None:
    message = received(Tokens, TOKENS)
    assert message == Tokens(request=REQUEST, attempt=1, choice=0, position=3, token_ids=(9,))


def test_work_is_of_the_middle_tier_and_of_nobody_in_particular() -> None:
    """What a gateway leaves out."""
    for work in (received(Prefill, WORK), received(Decode, {**DECODE, "source": None})):
        assert (work.tier, work.tenant, work.cache_salt) == (Tier.STANDARD, "", "")
    assert received(Prefill, WORK).prefix is None


@pytest.mark.parametrize("kind", ["Prefill", "Decode"])
@pytest.mark.parametrize("tier", Tier)
def test_tier_tenant_and_salt_arrive_with_the_work(kind: str, tier: Tier) -> None:
    source = {} if kind == "Prefill" else {**OFFERED, "handles": u64(1)}
    labels = {"tier": tier.value, "tenant": "t" * 256, "cache_salt": "s" * 256}
    work = received_by_name(kind, {**WORK, **source, **labels})
    assert isinstance(work, Prefill | Decode)
    assert (work.tier, work.tenant, work.cache_salt) == (tier, "t" * 256, "s" * 256)
    assert isinstance(work.tier, Tier)


def test_a_decode_names_its_source_or_computes_its_prompt() -> None:
    assert received(Decode, {**DECODE, "source": None}).source is None
    source = Source(address="h:1", incarnation=Incarnation("i"))
    work = received(Decode, {**DECODE, **OFFERED})
    assert (work.source, work.offered, work.moving) == (source, RequestKey(REQUEST, 1), False)


def test_a_decode_may_come_with_a_prediction() -> None:
    work = {**DECODE, "source": None}
    assert received(Decode, work).prediction == ()
    assert received(Decode, {**work, "prediction": b""}).prediction == ()
    assert received(Decode, {**work, "prediction": u32(0, 2**32 - 1)}).prediction == (0, 2**32 - 1)
    for wrong in (b"abc", [1], None, bytes(4 * (MAX_TOKENS + 1))):
        assert "prediction" in refused("Decode", {**work, "prediction": wrong})
    assert "prediction" in refused("Prefill", {**WORK, "prediction": b""})


def test_a_decode_may_be_of_a_running_choice() -> None:
    work = received(Decode, {**DECODE, **OFFERED, "choices": [3], "moving": True})
    assert (work.choices, work.moving) == ((3,), True)


def test_a_sequence_is_named_as_its_worker_knows_it() -> None:
    message = received(AttachSequence, ATTACH_SEQUENCE)
    assert message == AttachSequence(request=REQUEST, attempt=2, sequence=RequestKey(REQUEST, 1), choice=0, position=3)
    assert isinstance(message.sequence, RequestKey)


@pytest.mark.parametrize("phase", Phase)
def test_a_worker_says_whether_it_takes_work(phase: Phase) -> None:
    load = dict.fromkeys(("steps", "running", "waiting", "blocks_used", "blocks_total"), 0)
    heartbeat = received(Heartbeat, {"number": 7, "sent": 0, **load, "phase": phase.value, "echoed": 6})
    assert (heartbeat.phase, heartbeat.echoed) == (phase, 6)
    assert isinstance(heartbeat.phase, Phase)
    assert "phase" in refused("Heartbeat", {"number": 7, "sent": 0, **load})


def test_a_prefill_may_be_told_of_a_prefix() -> None:
    hint = PrefixHint(source=Source(address="h:1", incarnation=Incarnation("i")), num_tokens=32)
    assert received(Prefill, {**WORK, "prefix": {"source": SOURCE, "num_tokens": 32}}).prefix == hint
    assert received(Prefill, {**WORK, "prefix": None}).prefix is None


def test_names_of_blocks_are_bytes_in_their_order() -> None:
    names = tuple(BlockHash(bytes([first]) * HASH_BYTES) for first in (255, 0, 128))
    assert received(AttachPrefix, {**ATTACH_PREFIX, "block_hashes": b"".join(names)}) == AttachPrefix(
        request=REQUEST, attempt=1, block_hashes=names
    )


def test_whole_numbers_are_real_numbers_too() -> None:
    """A budget of 30 s leaves another implementation as an integer."""
    assert received(Prefill, {**WORK, "budget_s": 30}).budget_s == 30.0


def test_what_arrives_cannot_be_changed() -> None:
    for cls in MESSAGES:
        assert dataclasses.is_dataclass(cls)
        assert vars(cls)["__dataclass_params__"].frozen, cls
        assert not hasattr(cls, "__dict__") or "__slots__" in vars(cls), cls
    message = received(Abort, {"request": "r1", "attempt": 1})
    with pytest.raises(dataclasses.FrozenInstanceError):
        message.attempt = 2  # type: ignore[misc]


def test_kinds_have_distinct_names() -> None:
    assert len({cls.__name__ for cls in MESSAGES}) == len(MESSAGES)


# --- what is not a frame -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "frame",
    [
        pytest.param(b"", id="empty"),
        pytest.param(b"\xc1", id="a byte that MessagePack never uses"),
        pytest.param(b"\x80\x04\x95K\x00.", id="a pickle"),
        pytest.param(msgpack.packb(None), id="nil"),
        pytest.param(msgpack.packb([]), id="nothing in it"),
        pytest.param(msgpack.packb([ME]), id="no messages"),
        pytest.param(msgpack.packb([ME, [], []]), id="three parts"),
        pytest.param(msgpack.packb({"sender": ME}), id="a map"),
        pytest.param(msgpack.packb([ME, {}]), id="messages in a map"),
        pytest.param(msgpack.packb([ME, "Goodbye"]), id="messages in a string"),
        pytest.param(msgpack.packb([b"me", []]), id="a sender of bytes"),
        pytest.param(msgpack.packb([7, []]), id="a sender that is a number"),
        pytest.param(msgpack.packb(["", []]), id="no sender"),
        pytest.param(msgpack.packb(["x" * 65, []]), id="a long sender"),
        pytest.param(msgpack.packb([ME, [["Goodbye", {}], 3]]), id="a number for a message"),
        pytest.param(msgpack.packb([ME, [["Goodbye"]]]), id="a message without fields"),
        pytest.param(msgpack.packb([ME, [["Goodbye", {}, {}]]]), id="a message of three parts"),
        pytest.param(msgpack.packb([ME, [["Goodbye", []]]]), id="fields in an array"),
        pytest.param(msgpack.packb([ME, [["Goodbye", None]]]), id="fields that are nil"),
        pytest.param(msgpack.packb([ME, [[b"Goodbye", {}]]]), id="a kind of bytes"),
        pytest.param(msgpack.packb([ME, [[["Goodbye"], {}]]]), id="a kind that is an array"),
        pytest.param(msgpack.packb([ME, [["Message", {}]]]), id="an abstract kind"),
        pytest.param(msgpack.packb([ME, [["__class__", {}]]]), id="an internal name"),
        pytest.param(msgpack.packb([ME, [["goodbye", {}]]]), id="a kind in another case"),
        pytest.param(msgpack.packb([ME, []]) + b"\x00", id="a byte too many"),
        pytest.param(msgpack.packb([ME, [["Goodbye", {1: 2}]]], strict_types=False), id="a key that is a number"),
        pytest.param(msgpack.packb([ME, [["Goodbye", {b"a": 2}]]]), id="a key of bytes"),
        pytest.param(msgpack.packb([ME, [msgpack.ExtType(5, b"code")]]), id="an extension"),
        pytest.param(msgpack.packb([ME, [msgpack.Timestamp(1, 2)]]), id="a timestamp"),
        pytest.param(b"\x92\xa1s\xd4\xff\x00", id="a broken timestamp"),
        pytest.param(b"\x92\xa1s\xc7\x00\xff", id="an empty timestamp"),
        pytest.param(b"\x92\xa2\xff\xfe\x90", id="a sender that is not UTF-8"),
        pytest.param(b"\x92\xa1s\xdd\xff\xff\xff\xff", id="four billion messages announced"),
        pytest.param(b"\x91" * 100_000, id="nested a hundred thousand deep"),
        pytest.param(b"\x81\xa1k" * 50_000, id="maps nested fifty thousand deep"),
        pytest.param(msgpack.packb([ME, [["Goodbye", {str(i): i for i in range(65)}]]]), id="a map of 65 keys"),
    ],
)
def test_what_is_not_a_frame_is_refused(frame: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode(frame)


def test_every_truncation_of_a_frame_is_refused() -> None:
    frame = encode(
        ME, [Abort(request=REQUEST, attempt=1), Settle(request=REQUEST, attempt=1, lease=LeaseId("l"), epoch=1)]
    )
    for length in range(len(frame)):
        with pytest.raises(ProtocolError):
            decode(frame[:length])


def test_too_many_messages_are_refused_by_both_ends() -> None:
    goodbyes = [Goodbye()] * (MAX_MESSAGES_PER_FRAME + 1)
    assert len(decode(encode(ME, goodbyes[1:]))[1]) == MAX_MESSAGES_PER_FRAME
    with pytest.raises(ProtocolError, match=str(len(goodbyes))):
        encode(ME, goodbyes)
    with pytest.raises(ProtocolError):
        decode(msgpack.packb([ME, [["Goodbye", {}]] * len(goodbyes)]))


def test_an_oversized_frame_is_refused_by_both_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    big = Failed(request=REQUEST, attempt=1, cause=Cause.INTERNAL, message="x" * 4000)
    frame = encode(ME, [big])
    monkeypatch.setattr(codec, "MAX_FRAME_BYTES", 1000)
    with pytest.raises(ProtocolError, match=r"bytes, at most 1000"):
        encode(ME, [big])
    with pytest.raises(ProtocolError, match=r"bytes, at most 1000"):
        decode(frame)


# --- what is not a message ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "fields", "names"),
    [
        pytest.param("Abort", {"request": "r1"}, "attempt", id="a missing field"),
        pytest.param("Abort", {"request": "r1", "attempt": 1, "why": "x"}, "why", id="an extra field"),
        pytest.param("Abort", {"request": "r1", "attempt": "1"}, "attempt", id="text for a number"),
        pytest.param("Abort", {"request": "r1", "attempt": 1.0}, "attempt", id="a real for a whole number"),
        pytest.param("Abort", {"request": "r1", "attempt": True}, "attempt", id="a flag for a number"),
        pytest.param("Abort", {"request": "r1", "attempt": 0}, "attempt", id="attempt zero"),
        pytest.param("Abort", {"request": "r1", "attempt": 2**31 + 1}, "attempt", id="an attempt out of bounds"),
        pytest.param("Abort", {"request": 5, "attempt": 1}, "request", id="a number for an id"),
        pytest.param("Abort", {"request": None, "attempt": 1}, "request", id="nil for an id"),
        pytest.param("Prefill", {**WORK, "token_ids": b""}, "token_ids", id="an empty prompt"),
        pytest.param("Prefill", {**WORK, "token_ids": [5, 6, 7]}, "token_ids", id="a list of tokens"),
        pytest.param("Prefill", {**WORK, "token_ids": "5678"}, "token_ids", id="text for tokens"),
        pytest.param("Prefill", {**WORK, "token_ids": b"56789"}, "token_ids", id="a token and a quarter"),
        pytest.param("Prefill", {**WORK, "choices": []}, "choices", id="no choice"),
        pytest.param("Prefill", {**WORK, "choices": [16]}, "choices", id="a choice out of bounds"),
        pytest.param("Prefill", {**WORK, "choices": list(range(17))}, "choices", id="too many choices"),
        pytest.param("Prefill", {**WORK, "prompt_len": 0}, "prompt_len", id="no prompt"),
        pytest.param("Prefill", {**WORK, "budget_s": 0}, "budget_s", id="no time"),
        pytest.param("Prefill", {**WORK, "budget_s": float("inf")}, "budget_s", id="all the time"),
        pytest.param("Prefill", {**WORK, "budget_s": float("nan")}, "budget_s", id="a time that is no number"),
        pytest.param("Prefill", {**WORK, "sampling": {}}, "max_tokens", id="sampling without a length"),
        pytest.param("Prefill", {**WORK, "sampling": None}, "sampling", id="no sampling"),
        pytest.param("Prefill", {**WORK, "sampling": {"max_tokens": 4, "x": 1}}, "x", id="an extra field inside"),
        pytest.param("Prefill", {**WORK, "tier": "royal"}, "tier", id="an unknown tier"),
        pytest.param("Prefill", {**WORK, "tier": "BATCH"}, "tier", id="a tier in another case"),
        pytest.param("Prefill", {**WORK, "tier": 2}, "tier", id="a number for a tier"),
        pytest.param("Decode", {**DECODE, "source": None, "tier": None}, "tier", id="no tier"),
        pytest.param("Prefill", {**WORK, "tenant": "t" * 257}, "tenant", id="a tenant with a long name"),
        pytest.param("Prefill", {**WORK, "tenant": b"t"}, "tenant", id="a tenant of bytes"),
        pytest.param("Decode", {**DECODE, "source": None, "tenant": None}, "tenant", id="no tenant"),
        pytest.param("Prefill", {**WORK, "cache_salt": "s" * 257}, "cache_salt", id="a long salt"),
        pytest.param("Prefill", {**WORK, "cache_salt": b"s"}, "cache_salt", id="a salt of bytes"),
        pytest.param("Decode", {**DECODE, "source": None, "cache_salt": 5}, "cache_salt", id="a number for a salt"),
        pytest.param("Decode", DECODE, "source", id="a decode that does not say whether there is a source"),
        pytest.param("Decode", {**DECODE, "source": {}}, "source", id="an empty source"),
        pytest.param("Decode", {**DECODE, "source": SOURCE}, "offered", id="a source without an offer"),
        pytest.param("Decode", {**DECODE, "source": None, "offered": ["r1", 1]}, "offered", id="an offer of nobody"),
        pytest.param("Decode", {**DECODE, **OFFERED, "offered": ["r1", 0]}, "offered", id="an offer of attempt zero"),
        pytest.param("Decode", {**DECODE, **OFFERED, "moving": 1}, "moving", id="a number for a flag"),
        pytest.param("Decode", {**DECODE, "source": None, "moving": True}, "source", id="moving from nowhere"),
        pytest.param(
            "Decode",
            {**DECODE, **OFFERED, "choices": [0, 1], "handles": u64(1, 2), "moving": True},
            "one choice",
            id="two choices that move",
        ),
        pytest.param("Decode", {**WORK, "source": None}, "handles", id="a choice without a handle"),
        pytest.param("Decode", {**DECODE, "source": None, "handles": u64(1, 2)}, "2 handles", id="a handle of nobody"),
        pytest.param("Decode", {**DECODE, "source": None, "handles": u64(1)[1:]}, "handles", id="most of a handle"),
        pytest.param("StepTokens", {**STEP, "positions": u32(3)}, "1 positions", id="a token at no position"),
        pytest.param("StepTokens", {**STEP, "token_ids": u32(1, 2, 3)}, "3 tokens", id="a token of nobody"),
        pytest.param("StepTokens", {**STEP, "handles": u64(8)}, "1 handles", id="a token without a handle"),
        pytest.param("StepTokens", {**STEP, "handles": u64(8, 9)[:12]}, "handles", id="a handle and a half"),
        pytest.param("StepTokens", dict.fromkeys(STEP, b""), "handles", id="a step of nobody"),
        pytest.param("Attach", {"request": "r1", "attempt": 1}, "offered", id="an attach for no Prefill"),
        pytest.param("Attach", {"request": "r1", "attempt": 1, "offered": 0}, "offered", id="Prefill zero"),
        pytest.param("AttachSequence", {**ATTACH_SEQUENCE, "sequence": ["r1"]}, "sequence", id="half a sequence"),
        pytest.param("AttachSequence", {**ATTACH_SEQUENCE, "position": 0}, "position", id="a sequence of no tokens"),
        pytest.param("AttachSequence", {**ATTACH_SEQUENCE, "choice": 16}, "choice", id="a sequence out of bounds"),
        pytest.param("Cut", {"request": "r1", "attempt": 1, "choice": 0}, "position", id="a cut nowhere"),
        pytest.param("Moved", {"request": "r1", "attempt": 1}, "choice", id="nothing that has moved"),
        pytest.param("Moved", {"request": "r1", "attempt": 1, "choice": 0, "x": 1}, "x", id="an extra field"),
        pytest.param("Decode", {**DECODE, "source": None, "prefix": None}, "prefix", id="a hint for a decode worker"),
        pytest.param("Prefill", {**WORK, "source": None}, "source", id="a source for a prefill worker"),
        pytest.param("Prefill", {**WORK, "prefix": {"num_tokens": 16}}, "source", id="a prefix that nobody has"),
        pytest.param("Prefill", {**WORK, "prefix": {"source": SOURCE}}, "num_tokens", id="a prefix of unknown length"),
        pytest.param(
            "Prefill", {**WORK, "prefix": {"source": None, "num_tokens": 16}}, "source", id="a prefix without a source"
        ),
        pytest.param(
            "Prefill", {**WORK, "prefix": {"source": SOURCE, "num_tokens": 0}}, "num_tokens", id="an empty prefix"
        ),
        pytest.param(
            "Prefill",
            {**WORK, "prefix": {"source": SOURCE, "num_tokens": 16, "x": 1}},
            "x",
            id="an extra field in a hint",
        ),
        pytest.param(
            "Prefill",
            {**WORK, "prefix": {"source": {**SOURCE, "address": "h"}, "num_tokens": 16}},
            "address",
            id="a hint at a host without a port",
        ),
        pytest.param("Prefill", {**WORK, "prompt_logprobs": 21}, "prompt_logprobs", id="many alternatives"),
        pytest.param("Prefill", {**WORK, "prompt_logprobs": True}, "prompt_logprobs", id="a flag for alternatives"),
        pytest.param(
            "Prefill", {**WORK, "prompt_len": 2, "prompt_logprobs": 0}, "prompt_logprobs", id="a prompt that was told"
        ),
        pytest.param(
            "Prefill",
            {**WORK, "prompt_logprobs": 0, "prefix": {"source": SOURCE, "num_tokens": 16}},
            "prompt_logprobs",
            id="a prompt of which a part is pulled",
        ),
        pytest.param(
            "Decode", {**DECODE, **OFFERED, "prompt_logprobs": 0}, "prompt_logprobs", id="a prompt that is pulled"
        ),
        pytest.param("PromptLogprobs", {**SCORED, "position": 0}, "position", id="the first token's"),
        pytest.param(
            "PromptLogprobs",
            {**SCORED, "scores": dict.fromkeys(SCORES, b"")},
            "of no token",
            id="log probabilities of nothing",
        ),
        *[
            pytest.param("PromptLogprobs", {**SCORED, "scores": {**SCORES, name: value}}, names, id=what)
            for name, value, names, what in (
                ("logprobs", struct.pack("<2f", -1.0, float("nan")), "finite", "a log probability that is no number"),
                ("top_logprobs", struct.pack("<4f", 0, 0, 0, -float("inf")), "finite", "one that is infinite"),
                ("logprobs", [-1.0, -1.0], "logprobs", "a list of them"),
                ("logprobs", b"12345", "5 bytes", "one and a quarter"),
                ("ranks", u32(1), "1 ranks for 2", "a rank too few"),
                ("ranks", u32(1, 2, 3), "3 ranks for 2", "a rank too many"),
                ("top_token_ids", u32(7, 8, 7), "3 alternatives with 4", "an alternative without a value"),
                ("logprobs", bytes(4 * (MAX_TOLD_TOKENS + 1)), "logprobs", "more tokens than a message tells of"),
            )
        ],
        pytest.param(
            "PromptLogprobs",
            {**SCORED, "scores": {**SCORES, "top_token_ids": u32(7, 8, 7), "top_logprobs": bytes(12)}},
            "3 alternatives",
            id="alternatives that do not come out even",
        ),
        pytest.param(
            "PromptLogprobs",
            {**SCORED, "scores": {**SCORES, "top_token_ids": bytes(4 * 42), "top_logprobs": bytes(4 * 42)}},
            "21 alternatives",
            id="21 alternatives of a prompt's token",
        ),
        pytest.param("AttachPrefix", {"request": "r1", "attempt": 1}, "block_hashes", id="no names"),
        pytest.param("AttachPrefix", {**ATTACH_PREFIX, "block_hashes": b""}, "block_hashes", id="names of no block"),
        pytest.param("AttachPrefix", {**ATTACH_PREFIX, "block_hashes": [NAME]}, "block_hashes", id="a list of names"),
        pytest.param("AttachPrefix", {**ATTACH_PREFIX, "block_hashes": NAME[1:]}, "block_hashes", id="31 bytes"),
        pytest.param("AttachPrefix", {**ATTACH_PREFIX, "block_hashes": NAME + b"x"}, "block_hashes", id="33 bytes"),
        pytest.param("AttachPrefix", {**ATTACH_PREFIX, "block_hashes": "x" * 32}, "block_hashes", id="name of text"),
        pytest.param("AttachPrefix", {**ATTACH_PREFIX, "block_hashes": 7}, "block_hashes", id="a number for a name"),
        pytest.param("AttachPrefix", {**ATTACH_PREFIX, "lease": "l1"}, "lease", id="a lease before it is given"),
        pytest.param("Decode", {**DECODE, "source": {"address": "", "incarnation": "i"}}, "address", id="no address"),
        pytest.param("Tokens", {**TOKENS, "finish_reason": "bored"}, "finish_reason", id="an unknown reason"),
        pytest.param("Tokens", {**TOKENS, "logprobs": [{"logprob": float("-inf"), "top": []}]}, "logprob", id="-inf"),
        pytest.param("Tokens", {**TOKENS, "logprobs": [{"logprob": 0.0, "top": [[1]]}]}, "top", id="half a pair"),
        pytest.param(
            "Tokens", {**TOKENS, "logprobs": [{"logprob": 0.0, "top": [[1, 0.0]] * 21}]}, "top", id="21 alternatives"
        ),
        pytest.param("Failed", {"request": "r1", "attempt": 1, "cause": "x", "message": ""}, "cause", id="a cause"),
        pytest.param(
            "Failed",
            {"request": "r1", "attempt": 1, "cause": "internal", "message": "x" * 4097},
            "message",
            id="a novel",
        ),
        pytest.param("Settled", {**SETTLE, "valid": 1}, "valid", id="a number for a flag"),
        pytest.param("Settled", {**SETTLE, "valid": "true"}, "valid", id="text for a flag"),
        pytest.param("Settle", {**SETTLE, "epoch": -1}, "epoch", id="a negative epoch"),
        pytest.param("Settle", {**SETTLE, "epoch": 2**62 + 1}, "epoch", id="an epoch out of bounds"),
        pytest.param("BlocksReady", {**OFFER, "block_ids": [4]}, "block_ids", id="a list of blocks"),
        pytest.param("BlocksReady", {**OFFER, "checksums": 1.5}, "checksums", id="a real for checksums"),
        pytest.param("PrefillDone", {**DONE, "first_tokens": [TOKENS] * 17}, "first_tokens", id="17 first tokens"),
        pytest.param("PrefillDone", {**DONE, "first_tokens": [{}]}, "first_tokens", id="a first token without fields"),
        pytest.param("Hello", {**HELLO, "role": "king"}, "role", id="an unknown role"),
        pytest.param("Hello", {**HELLO, "fingerprint": {}}, "fingerprint", id="an empty fingerprint"),
        pytest.param("Hello", {**HELLO, "open_requests": [["r1"]]}, "open_requests", id="half a request key"),
        pytest.param("Hello", {**HELLO, "open_requests": [["r1", 1, 1]]}, "open_requests", id="three in a key"),
    ],
)
def test_what_is_not_a_message_is_refused_by_name(kind: str, fields: dict[str, Any], names: str) -> None:
    why = refused(kind, fields)
    assert kind in why
    assert names in why


LAYOUT = dataclasses.asdict(FINGERPRINT.layout)
PRINT: dict[str, Any] = {"protocol_version": 99, "config_hash": "c", "weights_hash": "w", "layout": LAYOUT}
WELCOME: dict[str, Any] = {
    "role": "decode",
    "fingerprint": PRINT,
    "max_sequence_tokens": 1,
    "transport": "zmq",
    "transport_metadata": b"",
    "open_requests": [],
}
BEAT: dict[str, Any] = dict.fromkeys(("number", "steps", "running", "waiting", "blocks_used", "blocks_total"), 1)
LINK_MESSAGES: dict[str, dict[str, Any]] = {
    "Hello": {**HELLO, "fingerprint": PRINT},
    "Welcome": WELCOME,
    "HelloRefused": {"cause": "fingerprint", "message": "why"},
    "HelloRequired": {},
    "Goodbye": {},
    "Heartbeat": {**BEAT, "phase": "serving"},
    "HeartbeatEcho": {"number": 1, "sent": 0},
    "CacheEvents": {"begins": False, "stored": b"", "removed": b""},
    "Trial": {"num_requests": 0, "requests": []},
    "Drain": {},
    "Resume": {},
}


def test_what_a_later_version_says_on_the_link_can_be_read() -> None:
    """Else an earlier one could not tell why the two do not fit. It would take the other for silent."""
    assert LINK_MESSAGES.keys() == {cls.__name__ for cls in MESSAGES if issubclass(cls, LinkMessage)}
    for kind, fields in LINK_MESSAGES.items():
        later = {**fields, "later": [1]}
        if "fingerprint" in fields:
            later["fingerprint"] = {**PRINT, "later": 1, "layout": {**LAYOUT, "later": 1}}
        assert received_by_name(kind, later) == received_by_name(kind, fields)


PROMPT_TIMES: dict[str, Any] = {"queue_s": 0, "prefix_pull_s": 0.0, "prefill_s": 1.5}
TIMINGS: dict[str, Any] = {"request": "r1", "attempt": 1, "choice": None, "prompt": PROMPT_TIMES, "decode": None}


DECODE_TIMES: dict[str, Any] = {
    **dict.fromkeys(("wait_s", "reserve_s", "pull_s", "settle_s", "queue_s", "decode_s", "preempted_s"), 1.0),
    "read_s": 1.0,
    "hidden_read_s": 0.5,
    "pull_bytes": 7,
}


@pytest.mark.parametrize("name", ["num_drafted", "num_accepted"])
@pytest.mark.parametrize("number", [-1, 2**63, 1.5, True, "1", None])
def test_drafted_tokens_are_numbers_of_tokens(name: str, number: object) -> None:
    plain = received(Timings, {**TIMINGS, "decode": DECODE_TIMES}).decode
    assert plain is not None
    assert (plain.num_drafted, plain.num_accepted) == (0, 0)
    told = {**DECODE_TIMES, "num_drafted": 6, "num_accepted": 5}
    drafted = received(Timings, {**TIMINGS, "decode": told}).decode
    assert drafted is not None
    assert (drafted.num_drafted, drafted.num_accepted) == (6, 5)
    assert name in refused("Timings", {**TIMINGS, "decode": {**told, name: number}})
    assert "num_accepted" in refused("Timings", {**TIMINGS, "decode": {**told, "num_drafted": 4}})


@pytest.mark.parametrize("number", [-1, 2**63, 1.5, True, "1", None])
def test_cached_tokens_are_a_number_of_tokens(number: object) -> None:
    plain = received(Timings, TIMINGS).prompt
    assert plain is not None
    assert plain.num_cached == 0
    cached = received(Timings, {**TIMINGS, "prompt": {**PROMPT_TIMES, "num_cached": 16}}).prompt
    assert cached is not None
    assert cached.num_cached == 16
    assert "num_cached" in refused("Timings", {**TIMINGS, "prompt": {**PROMPT_TIMES, "num_cached": number}})


@pytest.mark.parametrize("seconds", [-1e-9, 10.0**6 + 1, float("inf"), float("nan"), "1", None])
def test_durations_are_bounded(seconds: object) -> None:
    for times in (received(Timings, TIMINGS).prompt, received(PrefillDone, {**DONE, "times": PROMPT_TIMES}).times):
        assert times is not None
        assert times.prefill_s == 1.5
    assert "prefill_s" in refused("Timings", {**TIMINGS, "prompt": {**PROMPT_TIMES, "prefill_s": seconds}})
    assert "prefill_s" in refused("PrefillDone", {**DONE, "times": {**PROMPT_TIMES, "prefill_s": seconds}})
    assert "queue" in refused("Timings", {**TIMINGS, "prompt": {**PROMPT_TIMES, "queue": 0.0}})


REQUEST_MESSAGES: dict[str, dict[str, Any]] = {
    cls.__name__: {"request": "r1", "attempt": 1} for cls in MESSAGES if issubclass(cls, RequestMessage)
} | {
    "Prefill": WORK,
    "Decode": {**DECODE, **OFFERED},
    "Attach": {"request": "r1", "attempt": 1, "offered": 1},
    "AttachPrefix": ATTACH_PREFIX,
    "AttachSequence": ATTACH_SEQUENCE,
    "Cut": {"request": "r1", "attempt": 1, "choice": 0, "position": 0},
    "Moved": {"request": "r1", "attempt": 1, "choice": 0},
    "Timings": TIMINGS,
    "PromptLogprobs": SCORED,
    "Tokens": TOKENS,
    "Settle": SETTLE,
    "Settled": {**SETTLE, "valid": True},
    "PrefillDone": DONE,
    "BlocksReady": OFFER,
    "Resend": {"request": "r1", "attempt": 1, "choice": 0, "position": 0},
    "Failed": {"request": "r1", "attempt": 1, "cause": "internal", "message": ""},
    "OfferWithdrawn": {"request": "r1", "attempt": 1, "cause": "internal", "message": ""},
}


@pytest.mark.parametrize("handle", ["", "x" * 65, b"r1", 5], ids=["empty", "too long", "of bytes", "a number"])
def test_request_ids_are_bounded_text(handle: object) -> None:
    for kind, fields in REQUEST_MESSAGES.items():
        assert isinstance(received_by_name(kind, fields), RequestMessage)
        assert "request" in refused(kind, {**fields, "request": handle})


@pytest.mark.parametrize("handle", ["", "x" * 65, b"l1"], ids=["empty", "too long", "of bytes"])
def test_lease_ids_and_incarnations_are_bounded_text(handle: object) -> None:
    for kind, fields in (("Settle", SETTLE), ("BlocksReady", OFFER), ("PrefillDone", DONE)):
        assert "lease" in refused(kind, {**fields, "lease": handle})
    source = {**SOURCE, "incarnation": handle}
    assert "incarnation" in refused("Decode", {**DECODE, **OFFERED, "source": source})
    assert "incarnation" in refused("Prefill", {**DECODE, "prefix": {"source": source, "num_tokens": 16}})


BAD_KEYS = {
    "an empty id": ["", 1],
    "a long id": ["x" * 65, 1],
    "an id of bytes": [b"r1", 1],
    "attempt zero": ["r1", 0],
    "an attempt out of bounds": ["r1", 2**40],
    "text for an attempt": ["r1", "1"],
    "a real for an attempt": ["r1", 1.0],
    "a flag for an attempt": ["r1", True],
}


@pytest.mark.parametrize("key", BAD_KEYS.values(), ids=BAD_KEYS.keys())
def test_request_keys_are_validated_like_the_fields_of_a_message(key: list[object]) -> None:
    assert "open_requests" in refused("Hello", {**HELLO, "open_requests": [key]})
    assert "offered" in refused("Decode", {**DECODE, **OFFERED, "offered": key})
    assert "sequence" in refused("AttachSequence", {**ATTACH_SEQUENCE, "sequence": key})


@pytest.mark.parametrize("value", ["30", b"30", True], ids=["text", "bytes", "flag"])
def test_real_numbers_are_not_made_of_something_else(value: object) -> None:
    assert "budget_s" in refused("Prefill", {**WORK, "budget_s": value})
    assert "logprob" in refused("Tokens", {**TOKENS, "logprobs": [{"logprob": value, "top": []}]})
    assert "top" in refused("Tokens", {**TOKENS, "logprobs": [{"logprob": 0.0, "top": [[1, value]]}]})


def test_a_prompt_is_no_longer_than_its_tokens() -> None:
    """The decode worker asserts it when the request is admitted."""
    assert "prompt_len" in refused("Prefill", {**WORK, "prompt_len": 4})


def test_a_choice_is_asked_for_once() -> None:
    assert "choices" in refused("Prefill", {**WORK, "choices": [0, 0]})


def test_a_prefill_is_done_with_a_first_token() -> None:
    """Without one, "every first token ended its choice" holds of none of them, and the sink gives up silently."""
    assert "first_tokens" in refused("PrefillDone", {**DONE, "first_tokens": []})


def test_a_first_token_is_a_token() -> None:
    """The sink takes `token_ids[0]`."""
    assert "first_tokens" in refused("PrefillDone", {**DONE, "first_tokens": [{**TOKENS, "token_ids": b""}]})


def test_an_offer_has_a_block() -> None:
    assert received(BlocksReady, {**OFFER, "block_ids": b"", "num_blocks": 1}) == BlocksReady(
        request=REQUEST, attempt=1, lease=LeaseId("l1"), epoch=1, start=0, block_ids=(), num_blocks=1
    )


# --- the largest messages ----------------------------------------------------------------------------------------

LONG_KEY = ["r" * 64, 2**31]
LONG_LOGPROBS = {"logprob": -0.1, "top": [[2**62, -0.1]] * MAX_LOGPROBS}
LONG_SAMPLING = {
    "max_tokens": MAX_SEED,
    "logit_bias": [[MAX_SEED - index, -0.1] for index in range(MAX_LOGIT_BIAS)],
    "stop_token_ids": [MAX_SEED] * MAX_STOP_TOKEN_IDS,
    "grammar": "\U0001f600" * MAX_GRAMMAR_CHARS,
}
LONG_WORK = {**WORK, "token_ids": bytes(4 * MAX_TOKENS), "sampling": LONG_SAMPLING, "tenant": "\U0001f600" * 256}
LONG_SCORES = {
    "logprobs": bytes(4 * MAX_TOLD_TOKENS),
    "ranks": bytes(4 * MAX_TOLD_TOKENS),
    "top_token_ids": bytes(4 * MAX_TOLD_TOKENS * MAX_LOGPROBS),
    "top_logprobs": bytes(4 * MAX_TOLD_TOKENS * MAX_LOGPROBS),
}
LONG_TOKENS = {**TOKENS, "token_ids": bytes(4 * MAX_TOLD_TOKENS), "logprobs": [LONG_LOGPROBS] * MAX_TOLD_TOKENS}
LARGEST: dict[str, dict[str, Any]] = {
    "Hello": {**HELLO, "open_requests": [LONG_KEY] * MAX_OPEN_REQUESTS},
    "Welcome": {
        "role": "decode",
        "fingerprint": dataclasses.asdict(FINGERPRINT),
        "max_sequence_tokens": 1,
        "transport": "zmq",
        "transport_metadata": bytes(2**20),
        "open_requests": [LONG_KEY] * MAX_OPEN_REQUESTS,
    },
    "CacheEvents": {"begins": True, "stored": bytes(8 * MAX_CACHE_EVENTS), "removed": bytes(8 * MAX_CACHE_EVENTS)},
    "Prefill": LONG_WORK,
    "Decode": {
        **LONG_WORK,
        **OFFERED,
        "choices": list(range(MAX_CHOICES)),
        "handles": bytes(8 * MAX_CHOICES),
        "prediction": bytes(4 * MAX_TOKENS),
    },
    "StepTokens": {
        "handles": bytes(8 * MAX_STEP_TOKENS),
        "positions": bytes(4 * MAX_STEP_TOKENS),
        "token_ids": bytes(4 * MAX_STEP_TOKENS),
    },
    "PromptLogprobs": {**SCORED, "scores": LONG_SCORES},
    "Tokens": LONG_TOKENS,
    "AttachPrefix": {**ATTACH_PREFIX, "block_hashes": bytes(HASH_BYTES * MAX_PREFIX_BLOCKS)},
    "BlocksReady": {**OFFER, "block_ids": bytes(4 * MAX_TOKENS), "checksums": bytes(4 * MAX_TOKENS)},
    "PrefillDone": {**DONE, "first_tokens": [LONG_TOKENS]},
}


@pytest.mark.parametrize("kind", LARGEST)
def test_a_message_at_its_bounds_travels(kind: str) -> None:
    message = received_by_name(kind, LARGEST[kind])
    assert decode(encode(ME, [message])) == (ME, [message])


# --- the price of a refusal --------------------------------------------------------------------------------------


def test_a_long_list_of_rubbish_is_refused_at_the_first_of_it() -> None:
    """Thousands of errors, each with its own dictionary, hold the event loop up: no heartbeat leaves."""
    for kind, fields in (
        ("Tokens", {**TOKENS, "token_ids": u32(*range(2000)), "logprobs": ["x"] * 2000}),
        ("Hello", {**HELLO, "open_requests": ["x"] * 20_000}),
    ):
        with pytest.raises(ProtocolError) as caught:
            decode(frame_of(kind, fields))
        cause = caught.value.__cause__
        assert isinstance(cause, ValidationError)
        assert cause.error_count() < 100


def peak_bytes_of_refusal(frame: bytes) -> int:
    tracemalloc.start()
    try:
        with pytest.raises(ProtocolError):
            decode(frame)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def array(num_items: int, item: bytes) -> bytes:
    return b"\xdd" + num_items.to_bytes(4, "big") + item * num_items


EXPENSIVE = {
    "arrays within arrays, announced only": (b"\xdd\x00\x01\x00\x00" * 1000, 2**20),
    "arrays within arrays, above a gathered frame": (b"\xdd\x00\x01\x00\x00" * 2**18, 4 * 2**20),
    "millions of numbers, one byte each": (array(40, array(2**16, b"\x01")), 16 * 2**20),
    "millions of empty maps": (array(40, array(2**16, b"\x80")), 16 * 2**20),
    "millions of numbers in one message": (
        msgpack.packb([ME, [["Prefill", {**WORK, "stop": [[1] * 2**16] * 100}]]]),
        16 * 2**20,
    ),
    "thousands of messages in a large frame": (
        msgpack.packb([ME, [["Failed", {"request": "r1", "attempt": 1, "cause": "x", "message": "x" * 4000}]] * 4000]),
        2 * codec.MAX_FRAME_BYTES,
    ),
}


@pytest.mark.parametrize(("frame", "most"), EXPENSIVE.values(), ids=EXPENSIVE.keys())
def test_what_a_frame_costs_is_known_before_it_is_unpacked(frame: bytes, most: int) -> None:
    """By the bytes that are allocated, msgpack's own copy of the frame included."""
    assert peak_bytes_of_refusal(frame) <= most


@pytest.mark.parametrize("num_bytes", [0, 1, 2**20, 2**21])
def test_a_large_frame_that_is_cut_off_is_refused(num_bytes: int) -> None:
    prefill = Prefill(
        request=REQUEST,
        attempt=1,
        token_ids=tuple(range(2**20)),
        prompt_len=1,
        choices=(0,),
        sampling=SamplingParams(max_tokens=1),
        budget_s=1.0,
    )
    frame = encode(ME, [prefill])
    assert decode(frame) == (ME, [prefill])
    refusal = "not MessagePack"
    with pytest.raises(ProtocolError, match=refusal):
        decode(frame[: len(frame) - num_bytes - 1])
    with pytest.raises(ProtocolError, match=refusal):
        decode(frame + bytes(num_bytes + 1))


def test_several_messages_share_a_frame_up_to_its_size_and_a_larger_one_goes_alone() -> None:
    prompts = (2**16, 2**16, 2**17, 2**18, 1, 1)
    works = [
        Prefill(
            request=REQUEST,
            attempt=1,
            token_ids=(7,) * num_tokens,
            prompt_len=1,
            choices=(0,),
            sampling=SamplingParams(max_tokens=1),
            budget_s=1.0,
        )
        for num_tokens in prompts
    ]
    frames = []
    rest = works
    while rest:
        frame, count = codec.encode_some(ME, rest)
        assert decode(frame) == (ME, rest[:count])
        assert count == 1 or len(frame) <= codec.GATHERED_FRAME_BYTES
        frames.append(count)
        rest = rest[count:]
    assert frames == [2, 1, 1, 2]
    with pytest.raises(ProtocolError, match="6 messages in one frame"):
        encode(ME, works)


def test_the_words_of_a_refusal_are_bounded() -> None:
    """They go into the log, once for each bad frame."""
    assert len(refused("Abort", {"k" * 10**6: 1})) < 2000


PROMPT = "the secret prompt"


@pytest.mark.parametrize(
    "frame",
    [
        pytest.param(msgpack.packb([ME, [PROMPT * 1000]]) + b"\0", id="a byte too many"),
        pytest.param(msgpack.packb({PROMPT: PROMPT}) * 2, id="two at once"),
        pytest.param(msgpack.packb([ME, [["Tokens", {"text": PROMPT}]]])[:-1] + b"\xff", id="not UTF-8"),
        pytest.param(msgpack.packb([ME, [["Tokens", {"x": PROMPT}]]]), id="text for a field"),
    ],
)
def test_a_refusal_does_not_repeat_what_was_sent(frame: bytes) -> None:
    with pytest.raises(ProtocolError) as caught:
        decode(frame)
    assert PROMPT not in str(caught.value)
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("name", ["x\n2026-01-01 CRITICAL forged", "x\r\x1b[2J", "x\u2028y", "x\x85y", "\x00"])
def test_a_field_name_cannot_forge_a_line(name: str) -> None:
    why = refused("Abort", {"request": "r1", "attempt": 1, name: 1})
    assert why.isprintable()
    assert len(why.splitlines()) == 1


# --- what cannot be sent -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "message",
    [
        pytest.param(
            Prefill(
                request=REQUEST,
                attempt=1,
                token_ids=(1,),
                prompt_len=1,
                choices=(0,),
                sampling=SamplingParams(max_tokens=1, top_k=2**64),
                budget_s=1.0,
            ),
            id="a number beyond 64 bits",
        ),
        pytest.param(
            Failed(request=REQUEST, attempt=1, cause=Cause.INTERNAL, message="\udcff"), id="half a surrogate pair"
        ),
    ],
)
def test_what_cannot_travel_is_a_protocol_error(message: Message) -> None:
    with pytest.raises(ProtocolError):
        encode(ME, [message])
