"""What the API is told of an operator's settings and of the model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from gateway_fixtures import byte_level_backend, tokenizer, wrap
from test_local_stack import NotStarted

from common.contract.errors import OperatorError
from common.runtime.config import DecodeSettings, GatewaySettings, PrefillSettings, ServeSettings, load
from gateway.__main__ import api_settings_of, bounds_of, system_fingerprint_of
from gateway.access.connections import ConnectionBounds
from gateway.api_settings import ApiSettings, SamplingDefaults

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
    assert limits.request_budget_s == 86400
    assert limits.max_in_flight >= 1024
    settings = load(GatewaySettings, "baton gateway", ["--model", str(folder)])
    assert (settings.standard_limit_s, settings.batch_limit_s, settings.silence_s) == (0, 0, 1800)
    assert load(DecodeSettings, "baton decode", ["--model", str(folder)]).max_waiting >= 1024
    assert load(PrefillSettings, "baton prefill", ["--model", str(folder)]).max_waiting >= 1024


def test_how_long_connections_may_take_is_the_operators_to_say() -> None:
    options = {"--idle-timeout-s": "620", "--header-timeout-s": "20", "--max-connections": "100"}
    given = load(GatewaySettings, "baton gateway", [part for option in options.items() for part in option])
    assert bounds_of(given) == ConnectionBounds(idle_timeout_s=620, header_timeout_s=20, max_connections=100)
    assert bounds_of(load(GatewaySettings, "baton gateway", [])) == ConnectionBounds()
    for value in ("0", "86401"):
        with pytest.raises(OperatorError, match="--idle-timeout-s"):
            load(GatewaySettings, "baton gateway", ["--idle-timeout-s", value])


def test_the_model_has_its_own_name_or_those_that_it_is_given(folder: Path) -> None:
    assert told(folder).names == (str(folder),)
    assert told(folder, "--served-model-name", "demo").names == ("demo",)
    several = told(folder, "--served-model-name", "demo, gpt-4o,demo,tiny")
    assert several.model_name == "demo"
    assert several.names == ("demo", "gpt-4o", "tiny")


@pytest.mark.parametrize("by", ["option", "variable"])
async def test_a_stack_gives_its_gateway_the_chat_template(by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    options = ["--port", "0"]
    if by == "option":
        options += ["--chat-template", "a.jinja"]
    else:
        monkeypatch.setenv("BATON_CHAT_TEMPLATE", "a.jinja")
    stack = NotStarted(load(ServeSettings, "baton serve", options))
    await stack.start()
    monkeypatch.delenv("BATON_CHAT_TEMPLATE", raising=False)
    assert load(GatewaySettings, "baton gateway", stack.gateway.options).chat_template == "a.jinja"
    assert all("--chat-template" not in child.options for child in stack._children if child is not stack.gateway)
    await stack.stop()


def test_the_context_may_be_less_than_the_models_and_not_more(folder: Path) -> None:
    assert told(folder).limits.max_sequence_tokens == CONTEXT
    assert told(folder, "--max-model-len", "100").limits.max_sequence_tokens == 100
    assert told(folder, "--max-model-len", str(CONTEXT)).limits.max_sequence_tokens == CONTEXT
    with pytest.raises(OperatorError, match=f"--max-model-len: {CONTEXT + 1}"):
        told(folder, "--max-model-len", str(CONTEXT + 1))


@pytest.mark.parametrize(
    ("rope", "context"),
    [
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 400}}, 1600),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, 4 * CONTEXT),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2, "original_max_position_embeddings": 256}}, CONTEXT),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 1.5}, "original_max_position_embeddings": 1000}, 1500),
        ({"rope_scaling": {"rope_type": "linear", "factor": 4.0}}, CONTEXT),
        ({"rope_scaling": None, "rope_parameters": {"rope_type": "default"}}, CONTEXT),
    ],
    ids=str,
)
def test_yarn_stretches_the_context(folder: Path, rope: dict[str, object], context: int) -> None:
    """With linear scaling a file may state either context, and it is taken at its word."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | rope))
    assert told(folder).limits.max_sequence_tokens == context


@pytest.mark.parametrize("factor", [None, "four", [4], float("inf"), float("nan")], ids=str)
def test_a_factor_that_is_no_number_is_the_operators_to_mend(folder: Path, factor: object) -> None:
    config = {"vocab_size": 100, "max_position_embeddings": CONTEXT, "rope_scaling": {"type": "yarn", "factor": factor}}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(OperatorError, match="incomplete RoPE parameters"):
        told(folder)


def test_the_fingerprint_is_that_of_all_that_changes_answers_and_a_gateway_knows() -> None:
    first = system_fingerprint_of("hash", tokenizer(), SamplingDefaults())
    assert system_fingerprint_of("hash", tokenizer(), SamplingDefaults()) == first
    others = [
        system_fingerprint_of("other files", tokenizer(), SamplingDefaults()),
        system_fingerprint_of("hash", wrap(byte_level_backend(), "another template"), SamplingDefaults()),
        system_fingerprint_of("hash", tokenizer(), SamplingDefaults(temperature=0.5)),
    ]
    assert len({first, *others}) == 4
