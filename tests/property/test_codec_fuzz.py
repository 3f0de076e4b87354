"""Any message survives the wire; any bytes are either a frame or a `ProtocolError`, and what is let in is stable."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import hypothesis
import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.contract.block_hashes import HASH_BYTES, SHORT_NAME_BYTES
from common.contract.codec import MESSAGES, decode, encode
from common.contract.errors import Cause, ProtocolError
from common.contract.ids import Handle, Incarnation, RequestId, RequestKey
from common.contract.kv_layout import Fingerprint, KVLayout
from common.contract.messages.fields import FinishReason, Message
from common.contract.messages.gateway import (
    Abort,
    Ack,
    Decode,
    Drain,
    Prefill,
    PrefixHint,
    Resend,
    Resume,
    Source,
    Suspicion,
)
from common.contract.messages.handoff import (
    Attach,
    AttachPrefix,
    AttachSequence,
    BlocksReady,
    Detach,
    OfferWithdrawn,
    PrefillDone,
    Settle,
    Settled,
)
from common.contract.messages.session import (
    Goodbye,
    Heartbeat,
    HeartbeatEcho,
    Hello,
    HelloRefused,
    HelloRequired,
    Phase,
    Profile,
    Role,
    Welcome,
)
from common.contract.messages.worker import (
    CacheEvents,
    Cancelled,
    Cut,
    DecodeTimes,
    Failed,
    Finished,
    Moved,
    PromptLogprobs,
    PromptTimes,
    StepTokens,
    Timings,
    TokenLogprobs,
    Tokens,
    TokenScores,
    Trial,
)
from common.contract.sampling import MAX_CHOICES, MAX_LOGPROBS, MAX_SEED, SamplingParams
from common.contract.tiers import Tier

SENDER = Incarnation("0123456789ab")

# --- messages ----------------------------------------------------------------------------------------------------

handles = st.text(st.characters(codec="utf-8"), min_size=1, max_size=64)
words = st.text(st.characters(codec="utf-8"), min_size=1, max_size=64)
addresses = st.builds("{}:{}".format, st.sampled_from(["127.0.0.1", "[::1]", "pod-0.pool"]), st.integers(1, 65535))
names = st.text(st.characters(codec="utf-8"), max_size=256)
texts = st.text(st.characters(codec="utf-8"), max_size=300)
counts = st.integers(0, 2**62) | st.integers(0, 300)
attempts = st.integers(1, 2**31)
reals = st.floats(allow_nan=False, allow_infinity=False)
choices = st.integers(0, MAX_CHOICES - 1)
causes = st.sampled_from(Cause)
roles = st.sampled_from(Role)
finish_reasons: st.SearchStrategy[FinishReason | None] = st.sampled_from(["stop", "length", None])
numbers = st.integers(0, 2**32 - 1) | st.integers(0, 300)
long_numbers = st.integers(0, 2**64 - 1).map(Handle) | st.integers(0, 300).map(Handle)
token_ids = st.lists(numbers, max_size=20).map(tuple)
keys = st.builds(RequestKey, handles, attempts)
open_requests = st.lists(keys, max_size=5).map(tuple)
positive = st.integers(1, 2**40)
layouts = st.builds(
    KVLayout,
    num_layers=positive,
    num_kv_heads=positive,
    head_dim=positive,
    block_size=positive,
    dtype=st.sampled_from(["float32", "float16", "bfloat16"]),
)
fingerprints = st.builds(
    Fingerprint, protocol_version=st.integers(0, 9), config_hash=texts, weights_hash=handles, layout=layouts
).filter(lambda fingerprint: len(fingerprint.config_hash) <= 256)
samplings = st.builds(
    SamplingParams,
    max_tokens=st.integers(1, 2**20),
    min_tokens=st.integers(0, 2**20),
    temperature=st.floats(0, 100),
    top_k=st.integers(0, 2**20),
    top_p=st.floats(0, 1, exclude_min=True),
    min_p=st.floats(0, 1),
    repetition_penalty=st.floats(0.01, 100),
    presence_penalty=st.floats(-2, 2),
    frequency_penalty=st.floats(-2, 2),
    logit_bias=st.lists(
        st.tuples(st.integers(0, 2**31), st.floats(-100, 100)), max_size=4, unique_by=lambda pair: pair[0]
    ).map(tuple),
    grammar=st.none() | words,
    seed=st.integers(0, MAX_SEED),
    stop_token_ids=st.lists(st.integers(0, 2**31), max_size=4).map(tuple),
    ignore_eos=st.booleans(),
    logprobs=st.none() | st.integers(0, MAX_LOGPROBS),
)
logprobs = st.builds(
    TokenLogprobs, logprob=reals, top=st.lists(st.tuples(counts, reals), max_size=MAX_LOGPROBS).map(tuple)
)
seconds = st.floats(0, 10**6)
prompt_times = st.builds(
    PromptTimes, queue_s=seconds, prefix_pull_s=seconds, prefill_s=seconds, num_cached=st.integers(0, 2**20)
)
decode_times = st.builds(
    DecodeTimes,
    wait_s=seconds,
    reserve_s=seconds,
    pull_s=seconds,
    settle_s=seconds,
    queue_s=seconds,
    decode_s=seconds,
    preempted_s=seconds,
    read_s=seconds,
    hidden_read_s=seconds,
    pull_bytes=counts,
    num_drafted=st.integers(2**20, 2**62),
    num_accepted=st.integers(0, 2**20),
)
about = {"request": handles, "attempt": attempts}
lease = {"lease": handles, "epoch": counts}


@st.composite
def some_tokens(draw: st.DrawFn, most: int) -> Tokens:
    """`Tokens` with as many log probabilities as tokens, or none."""
    taken = draw(st.lists(numbers, min_size=1, max_size=most))
    reports = draw(st.none() | st.lists(logprobs, min_size=len(taken), max_size=len(taken)))
    return Tokens(
        request=RequestId(draw(handles)),
        attempt=draw(attempts),
        choice=draw(choices),
        position=draw(counts),
        token_ids=tuple(taken),
        logprobs=None if reports is None else tuple(reports),
        finish_reason=draw(finish_reasons),
    )


prompts = st.lists(numbers, min_size=1, max_size=20).map(tuple)
sources = st.builds(Source, address=addresses, incarnation=handles)
hints = st.builds(PrefixHint, source=sources, num_tokens=st.integers(1, 2**62))
block_hashes = st.lists(st.binary(min_size=HASH_BYTES, max_size=HASH_BYTES), min_size=1, max_size=6).map(tuple)


@st.composite
def prompt_logprobs(draw: st.DrawFn) -> PromptLogprobs:
    """Of some tokens, with as many alternatives for each."""
    num, num_top = draw(st.integers(1, 4)), draw(st.integers(0, MAX_LOGPROBS))
    singles = st.floats(allow_nan=False, allow_infinity=False, width=32)

    def of(each: st.SearchStrategy[Any], size: int) -> tuple[Any, ...]:
        return tuple(draw(st.lists(each, min_size=size, max_size=size)))

    scores = TokenScores(
        logprobs=of(singles, num),
        ranks=of(numbers, num),
        top_token_ids=of(numbers, num * num_top),
        top_logprobs=of(singles, num * num_top),
    )
    return PromptLogprobs(
        request=RequestId(draw(handles)), attempt=draw(attempts), position=draw(st.integers(1, 2**62)), scores=scores
    )


@st.composite
def works(draw: st.DrawFn, /, cls: type[Prefill | Decode], **more: st.SearchStrategy[Any]) -> Prefill | Decode:
    """A `Prefill` or `Decode` that makes sense."""
    prompt = draw(prompts)
    fields: dict[str, Any] = {name: draw(strategy) for name, strategy in more.items()}
    wanted = tuple(draw(st.lists(choices, min_size=1, max_size=MAX_CHOICES, unique=True)))
    if cls is Decode:
        fields["handles"] = tuple(draw(long_numbers) for _ in wanted)
        fields["prediction"] = tuple(draw(st.lists(numbers, max_size=9)))
    scored = fields.get("prefix") is None and draw(st.booleans())
    return cls(
        request=RequestId(draw(handles)),
        attempt=draw(attempts),
        token_ids=prompt,
        prompt_len=len(prompt) if scored else draw(st.integers(1, len(prompt))),
        prompt_logprobs=draw(st.integers(0, MAX_LOGPROBS)) if scored else None,
        choices=wanted,
        sampling=draw(samplings),
        budget_s=draw(st.floats(0, 10**6, exclude_min=True)),
        tier=draw(st.sampled_from(Tier)),
        tenant=draw(names),
        cache_salt=draw(names),
        admitted=draw(st.booleans()),
        suspicion=draw(st.sampled_from(Suspicion)),
        **fields,
    )


@st.composite
def decodes(draw: st.DrawFn) -> Message:
    """A `Decode` with a source, or without; one choice of it may be moving."""
    work = draw(works(Decode, source=st.none()))
    assert isinstance(work, Decode)
    if draw(st.booleans()):
        return work
    work = dataclasses.replace(work, source=draw(sources), offered=draw(keys), prompt_logprobs=None)
    if draw(st.booleans()):
        work = dataclasses.replace(work, choices=work.choices[:1], handles=work.handles[:1], moving=True)
    return work


@st.composite
def step_tokens(draw: st.DrawFn) -> StepTokens:
    """Columns of equal length."""
    rows = draw(st.lists(st.tuples(long_numbers, numbers, numbers), min_size=1, max_size=9))
    handles, positions, token_ids = zip(*rows, strict=True)
    return StepTokens(handles=handles, positions=positions, token_ids=token_ids)


short_names = st.lists(st.binary(min_size=SHORT_NAME_BYTES, max_size=SHORT_NAME_BYTES), max_size=4).map(b"".join)


BY_KIND: dict[type[Message], st.SearchStrategy[Message]] = {
    Hello: st.builds(
        Hello, number=counts, role=roles, fingerprint=st.none() | fingerprints, open_requests=open_requests
    ),
    Welcome: st.builds(
        Welcome,
        number=counts,
        role=roles,
        fingerprint=fingerprints,
        max_sequence_tokens=counts,
        transport=words,
        transport_metadata=st.binary(max_size=200),
        open_requests=open_requests,
        phase=st.sampled_from(Phase),
        profile=st.sampled_from(Profile),
    ),
    HelloRefused: st.builds(HelloRefused, cause=causes, message=texts),
    HelloRequired: st.builds(HelloRequired),
    Goodbye: st.builds(Goodbye),
    Heartbeat: st.builds(
        Heartbeat,
        number=counts,
        sent=counts,
        steps=counts,
        running=counts,
        waiting=counts,
        blocks_used=counts,
        blocks_total=counts,
        phase=st.sampled_from(Phase),
        queued_tokens=st.tuples(counts, counts, counts),
        sequences=st.tuples(counts, counts, counts),
        places=counts,
        token_s=seconds,
        pulled_token_s=seconds,
        sequence_s=seconds,
        itl_s=seconds,
        prompt_tokens=counts,
        output_tokens=counts,
        received=counts,
        echoed=counts,
    ),
    CacheEvents: st.builds(CacheEvents, begins=st.booleans(), stored=short_names, removed=short_names),
    HeartbeatEcho: st.builds(HeartbeatEcho, number=counts, sent=counts),
    Prefill: works(Prefill, prefix=st.none() | hints),
    Drain: st.builds(Drain),
    Resume: st.builds(Resume),
    Decode: decodes(),
    Abort: st.builds(Abort, **about, choice=st.none() | choices),
    Resend: st.builds(Resend, **about, choice=choices, position=counts),
    Ack: st.builds(Ack, **about),
    Timings: st.builds(
        Timings, **about, choice=st.none() | choices, prompt=st.none() | prompt_times, decode=st.none() | decode_times
    ),
    PromptLogprobs: prompt_logprobs(),
    Tokens: some_tokens(6),
    StepTokens: step_tokens(),
    Finished: st.builds(Finished, **about),
    Failed: st.builds(Failed, **about, cause=causes, message=texts),
    Cancelled: st.builds(Cancelled, **about),
    Cut: st.builds(Cut, **about, choice=choices, position=counts),
    Moved: st.builds(Moved, **about, choice=choices),
    Trial: st.builds(Trial, num_requests=st.integers(5, 2**62), requests=open_requests),
    Attach: st.builds(Attach, **about, offered=attempts),
    AttachSequence: st.builds(AttachSequence, **about, sequence=keys, choice=choices, position=st.integers(1, 2**62)),
    AttachPrefix: st.builds(AttachPrefix, **about, block_hashes=block_hashes),
    Settle: st.builds(Settle, **about, **lease),
    Detach: st.builds(Detach, **about),
    BlocksReady: st.builds(
        BlocksReady,
        **about,
        **lease,
        start=counts,
        block_ids=token_ids,
        num_blocks=counts,
        checksums=st.none() | token_ids,
    ),
    PrefillDone: st.builds(
        PrefillDone,
        **about,
        **lease,
        first_tokens=st.lists(some_tokens(1), min_size=1, max_size=3).map(tuple),
        times=st.none() | prompt_times,
    ),
    Settled: st.builds(Settled, **about, **lease, valid=st.booleans()),
    OfferWithdrawn: st.builds(OfferWithdrawn, **about, cause=causes, message=texts),
}
messages = st.one_of(*BY_KIND.values())

values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.binary(max_size=20)
    | st.text(st.characters(codec="utf-8"), max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(handles, inner, max_size=4),
    max_leaves=12,
)


def test_every_kind_of_message_is_tried() -> None:
    assert set(BY_KIND) == set(MESSAGES)


def parts(value: object) -> Iterator[Any]:
    """The dataclasses in a value, itself included."""
    if isinstance(value, tuple):
        for each in value:
            yield from parts(each)
    elif dataclasses.is_dataclass(value):
        yield value
        for field in dataclasses.fields(value):
            yield from parts(getattr(value, field.name))


@pytest.mark.parametrize("kind", MESSAGES, ids=lambda kind: kind.__name__)
def test_every_field_is_tried_with_other_values_than_its_default(kind: type[Message]) -> None:
    """Those of the message and of what is in it: also a field that is added one day, and not here."""
    found: dict[tuple[str, str], bool] = {}

    @settings(derandomize=True, database=None, deadline=None, max_examples=25, phases=[hypothesis.Phase.generate])
    @given(BY_KIND[kind])
    def draw(message: Message) -> None:
        for part in parts(message):
            for field in dataclasses.fields(part):
                name = type(part).__name__, field.name
                found[name] = found.get(name, False) or getattr(part, field.name) != field.default

    draw()
    assert [name for name, differs in found.items() if not differs] == []


@pytest.mark.parametrize("kind", MESSAGES, ids=lambda kind: kind.__name__)
@settings(deadline=None, max_examples=25)
@given(data=st.data())
def test_a_message_arrives_as_it_was(kind: type[Message], data: st.DataObject) -> None:
    message = data.draw(BY_KIND[kind])
    sender, arrived = decode(encode(SENDER, [message]))
    assert sender == SENDER
    assert arrived == [message]
    assert type(arrived[0]) is kind
    assert encode(SENDER, arrived) == encode(SENDER, [message])


@settings(deadline=None, max_examples=50)
@given(st.lists(messages, max_size=6))
def test_a_frame_arrives_in_order(sent: list[Message]) -> None:
    assert decode(encode(SENDER, sent)) == (SENDER, sent)


# --- rubbish -----------------------------------------------------------------------------------------------------


def decode_or_refuse(frame: bytes) -> None:
    """Nothing but a `ProtocolError` may come out, and what is let in means one thing."""
    try:
        sender, arrived = decode(frame)
    except ProtocolError:
        return
    assert decode(encode(sender, arrived)) == (sender, arrived)


@settings(deadline=None, max_examples=300)
@given(st.binary(max_size=200))
def test_any_bytes(frame: bytes) -> None:
    decode_or_refuse(frame)


@settings(deadline=None, max_examples=150)
@given(values)
def test_any_object(value: object) -> None:
    decode_or_refuse(msgpack.packb(value))


@settings(deadline=None, max_examples=150)
@given(st.sampled_from([cls.__name__ for cls in MESSAGES]), st.dictionaries(handles, values, max_size=4))
def test_any_fields(kind: str, fields: dict[str, object]) -> None:
    decode_or_refuse(msgpack.packb([SENDER, [[kind, fields]]]))


@settings(deadline=None, max_examples=400)
@given(messages, st.data())
def test_a_frame_with_other_bytes_in_it(message: Message, data: st.DataObject) -> None:
    frame = bytearray(encode(SENDER, [message]))
    for _ in range(data.draw(st.integers(1, 4))):
        start = data.draw(st.integers(0, len(frame)))
        end = data.draw(st.integers(start, min(len(frame), start + 3)))
        frame[start:end] = data.draw(st.binary(max_size=4))
    decode_or_refuse(bytes(frame))


@settings(deadline=None, max_examples=400)
@given(messages, st.data())
def test_a_message_with_another_value_in_it(message: Message, data: st.DataObject) -> None:
    """The form of the frame is kept, so that what is tried is the validation of fields."""
    frame = msgpack.unpackb(encode(SENDER, [message]))
    fields = frame[1][0][1]
    path: list[Any] = []
    inner: Any = fields
    while isinstance(inner, dict | list) and inner and (not path or data.draw(st.booleans())):
        step = data.draw(st.sampled_from(list(inner) if isinstance(inner, dict) else list(range(len(inner)))))
        path.append(step)
        inner = inner[step]
    if not path:
        fields["extra"] = data.draw(values)
    else:
        target = fields
        for step in path[:-1]:
            target = target[step]
        if isinstance(target, dict) and data.draw(st.booleans()):
            del target[path[-1]]
        else:
            target[path[-1]] = data.draw(values)
    decode_or_refuse(msgpack.packb(frame))
