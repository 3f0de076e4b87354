"""What two processes agree on: sizes of KV blocks, fingerprints, ids, sampling parameters."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import pytest
from pydantic import TypeAdapter, ValidationError

from common.contract.errors import FingerprintMismatchError, OperatorError
from common.contract.ids import HANDLE, RequestKey, new_incarnation, new_lease_id, new_request_id
from common.contract.kv_layout import DTYPE_BYTES, PROTOCOL_VERSION, Fingerprint, KVLayout
from common.contract.sampling import MAX_LOGPROBS, MAX_SEED, MAX_STOP_TOKEN_IDS, SamplingParams
from common.contract.tiers import Tier

KIB = 1024
LLAMA_2_7B = KVLayout(num_layers=32, num_kv_heads=32, head_dim=128, block_size=16, dtype="float16")
LLAMA_3_8B = KVLayout(num_layers=32, num_kv_heads=8, head_dim=128, block_size=16, dtype="bfloat16")
QWEN_2_5_HALF_B = KVLayout(num_layers=24, num_kv_heads=2, head_dim=64, block_size=16, dtype="bfloat16")
FINGERPRINT = Fingerprint(config_hash="c0ffee", weights_hash="decaf", layout=LLAMA_2_7B)
SAMPLING = TypeAdapter(SamplingParams)


# --- the KV layout -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layout", "token_bytes"),
    [
        pytest.param(LLAMA_2_7B, 512 * KIB, id="Llama-2-7B"),
        pytest.param(LLAMA_3_8B, 128 * KIB, id="Llama-3-8B"),
        pytest.param(QWEN_2_5_HALF_B, 12 * KIB, id="Qwen2.5-0.5B"),
        pytest.param(dataclasses.replace(LLAMA_2_7B, dtype="float32"), 1024 * KIB, id="Llama-2-7B in float32"),
    ],
)
def test_known_models_have_known_sizes(layout: KVLayout, token_bytes: int) -> None:
    assert layout.token_bytes == token_bytes
    assert layout.block_bytes == 16 * token_bytes


def test_both_half_precisions_weigh_the_same() -> None:
    assert DTYPE_BYTES["float16"] == DTYPE_BYTES["bfloat16"] == 2
    assert DTYPE_BYTES["float32"] == 4


@pytest.mark.parametrize(("num_tokens", "num_blocks"), [(0, 0), (1, 1), (15, 1), (16, 1), (17, 2), (32, 2), (33, 3)])
def test_a_block_holds_block_size_tokens(num_tokens: int, num_blocks: int) -> None:
    assert LLAMA_2_7B.blocks_for(num_tokens) == num_blocks


# --- fingerprints ------------------------------------------------------------------------------------------------


def test_equal_fingerprints_pass() -> None:
    FINGERPRINT.require_equal(dataclasses.replace(FINGERPRINT), "mine", "theirs")


@pytest.mark.parametrize(
    ("other", "field", "mine", "theirs"),
    [
        (dataclasses.replace(FINGERPRINT, config_hash="tea"), "config_hash", "c0ffee", "tea"),
        (dataclasses.replace(FINGERPRINT, weights_hash="mate"), "weights_hash", "decaf", "mate"),
        (dataclasses.replace(FINGERPRINT, protocol_version=99), "protocol_version", str(PROTOCOL_VERSION), "99"),
        (dataclasses.replace(FINGERPRINT, protocol_version=1), "protocol_version", str(PROTOCOL_VERSION), "1"),
        (
            dataclasses.replace(FINGERPRINT, layout=dataclasses.replace(LLAMA_2_7B, block_size=32)),
            "layout.block_size",
            "16",
            "32",
        ),
        (
            dataclasses.replace(FINGERPRINT, layout=dataclasses.replace(LLAMA_2_7B, dtype="float32")),
            "layout.dtype",
            "float16",
            "float32",
        ),
    ],
)
def test_a_mismatch_names_the_field_and_both_values(other: Fingerprint, field: str, mine: str, theirs: str) -> None:
    with pytest.raises(FingerprintMismatchError) as caught:
        FINGERPRINT.require_equal(other, "this decode worker", "the peer at h:1")
    message = str(caught.value)
    assert f"{field}: {mine} at this decode worker, {theirs} at the peer at h:1" in message
    assert message.count(" at this decode worker") == 1, "only what differs is named"
    assert "\n" not in message
    assert isinstance(caught.value, OperatorError)


def test_a_mismatch_in_two_fields_names_both() -> None:
    with pytest.raises(FingerprintMismatchError) as caught:
        FINGERPRINT.require_equal(dataclasses.replace(FINGERPRINT, config_hash="x", weights_hash="y"), "a", "b")
    assert "config_hash: c0ffee at a, x at b" in str(caught.value)
    assert "weights_hash: decaf at a, y at b" in str(caught.value)


def test_every_field_of_a_fingerprint_is_compared() -> None:
    names = {field.name for field in dataclasses.fields(Fingerprint)} - {"layout"}
    changed: dict[str, Any] = {
        name: PROTOCOL_VERSION + 1 if name == "protocol_version" else "changed" for name in names
    }
    for name, value in changed.items():
        with pytest.raises(FingerprintMismatchError, match=name):
            FINGERPRINT.require_equal(dataclasses.replace(FINGERPRINT, **{name: value}), "a", "b")
    for field in dataclasses.fields(KVLayout):
        change: dict[str, Any] = {field.name: "changed" if field.name == "dtype" else 1}
        other = dataclasses.replace(FINGERPRINT, layout=dataclasses.replace(LLAMA_2_7B, **change))
        with pytest.raises(FingerprintMismatchError, match=f"layout.{field.name}"):
            FINGERPRINT.require_equal(other, "a", "b")


def test_the_document_of_the_protocol_names_its_version() -> None:
    text = (Path(__file__).resolve().parents[2] / "docs" / "protocol.md").read_text()
    assert text.startswith(f"# The control protocol\n\nVersion {PROTOCOL_VERSION}. ")
    assert re.findall(r"^\| (\d+) \|", text.partition("## Version history")[2], re.MULTILINE)[-1] == str(
        PROTOCOL_VERSION
    )


# --- ids ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("draw", [new_request_id, new_incarnation, new_lease_id])
def test_ids_are_distinct_long_and_fit_the_wire(draw: Callable[[], str]) -> None:
    drawn = [draw() for _ in range(1000)]
    assert len(set(drawn)) == 1000
    assert min(len(each) for each in drawn) >= 24, "96 bits at least"
    handles = TypeAdapter(Annotated[str, HANDLE])
    assert [handles.validate_python(each) for each in drawn] == drawn


def test_a_request_key_is_a_pair() -> None:
    request, attempt = RequestKey(new_request_id(), 3)
    assert attempt == 3
    assert RequestKey(request, 2) < RequestKey(request, 3)


# --- tiers -------------------------------------------------------------------------------------------------------


def test_tiers_are_ranked_the_most_urgent_first() -> None:
    assert [tier.rank for tier in (Tier.INTERACTIVE, Tier.STANDARD, Tier.BATCH)] == [0, 1, 2]
    assert len(Tier) == 3


# --- sampling parameters -----------------------------------------------------------------------------------------


def sampling(**fields: object) -> SamplingParams:
    """Validated, as on receipt."""
    return SAMPLING.validate_python({"max_tokens": 4} | fields)


@pytest.mark.parametrize(
    ("field", "inside", "outside"),
    [
        ("max_tokens", [1, 2**20], [0, -1]),
        ("min_tokens", [0, 5], [-1]),
        ("temperature", [0.0, 0, 2.5, 100], [-0.1, 100.1, float("nan"), float("inf")]),
        ("top_k", [0, 1, 10**6], [-1]),
        ("top_p", [1e-9, 1], [0, -0.5, 1.01, float("nan")]),
        ("min_p", [0, 1.0], [-0.01, 1.01]),
        ("repetition_penalty", [0.5, 2, 100], [0, -1, 101, float("inf")]),
        ("presence_penalty", [-2, 2], [-2.1, 2.1]),
        ("frequency_penalty", [-2, 2], [-2.1, 2.1]),
        ("seed", [0, MAX_SEED], [-1, MAX_SEED + 1]),
        (
            "stop_token_ids",
            [(), (0, 1), tuple(range(MAX_STOP_TOKEN_IDS))],
            [(-1,), tuple(range(MAX_STOP_TOKEN_IDS + 1))],
        ),
        ("logprobs", [None, 0, MAX_LOGPROBS], [-1, MAX_LOGPROBS + 1]),
    ],
)
def test_bounds_of_sampling_parameters(field: str, inside: list[object], outside: list[object]) -> None:
    for value in inside:
        assert getattr(sampling(**{field: value}), field) == value
    for value in outside:
        with pytest.raises(ValidationError, match=field):
            sampling(**{field: value})


@pytest.mark.parametrize("fields", [{"max_tokens": 1.0}, {"max_tokens": "1"}, {"max_tokens": True}, {"ignore_eos": 1}])
def test_sampling_parameters_are_not_converted(fields: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        sampling(**fields)


@pytest.mark.parametrize("value", ["0.5", b"0.5", True], ids=["text", "bytes", "flag"])
def test_real_sampling_parameters_are_not_converted(value: object) -> None:
    for field in ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"):
        with pytest.raises(ValidationError):
            sampling(**{field: value})


@pytest.mark.parametrize("field", ["max_tokens", "min_tokens", "top_k", "stop_token_ids"])
def test_whole_sampling_parameters_fit_the_wire(field: str) -> None:
    """MessagePack's integers end at 2**64: what the gateway lets in must be able to leave it."""
    value = 2**64
    with pytest.raises(ValidationError):
        sampling(**{field: (value,) if field == "stop_token_ids" else value})


def test_unknown_sampling_parameters_are_refused() -> None:
    with pytest.raises(ValidationError):
        sampling(beam_width=4)


def test_greedy_is_temperature_zero() -> None:
    assert sampling(temperature=0).greedy
    assert not sampling(temperature=1e-9).greedy
