"""What the API is told of an operator's settings and of the model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from common.contract.errors import OperatorError
from common.runtime.config import DecodeSettings, GatewaySettings, PrefillSettings, load
from gateway.__main__ import api_settings_of
from gateway.api_settings import ApiSettings

CONTEXT = 512


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    config = {"vocab_size": 100, "max_position_embeddings": CONTEXT}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


def told(folder: Path, *options: str) -> ApiSettings:
    return api_settings_of(load(GatewaySettings, "baton gateway", ["--model", str(folder), *options]), folder)


def test_what_an_operator_gets_by_default_punishes_nobody(folder: Path) -> None:
    """A day for an answer, and a closed loop of a thousand clients in flight."""
    limits = told(folder).limits
    assert limits.default_budget_s == 86400
    assert limits.max_in_flight >= 1024
    settings = load(GatewaySettings, "baton gateway", ["--model", str(folder)])
    assert (settings.standard_limit_s, settings.batch_limit_s, settings.silence_s) == (0, 0, 1800)
    assert load(DecodeSettings, "baton decode", ["--model", str(folder)]).max_waiting >= 1024
    assert load(PrefillSettings, "baton prefill", ["--model", str(folder)]).max_waiting >= 1024


def test_the_model_has_its_own_name_or_those_that_it_is_given(folder: Path) -> None:
    assert told(folder).names == (str(folder),)
    assert told(folder, "--served-model-name", "demo").names == ("demo",)
    several = told(folder, "--served-model-name", "demo, gpt-4o,demo,tiny")
    assert several.model_name == "demo"
    assert several.names == ("demo", "gpt-4o", "tiny")


def test_the_context_may_be_less_than_the_models_and_not_more(folder: Path) -> None:
    assert told(folder).limits.max_sequence_tokens == CONTEXT
    assert told(folder, "--max-model-len", "100").limits.max_sequence_tokens == 100
    assert told(folder, "--max-model-len", str(CONTEXT)).limits.max_sequence_tokens == CONTEXT
    with pytest.raises(OperatorError, match=f"--max-model-len: {CONTEXT + 1}"):
        told(folder, "--max-model-len", str(CONTEXT + 1))


def test_the_fingerprint_is_the_configurations(folder: Path) -> None:
    first = told(folder).system_fingerprint
    assert told(folder, "--served-model-name", "demo").system_fingerprint == first
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"rope_theta": 5.0}))
    assert told(folder).system_fingerprint != first
