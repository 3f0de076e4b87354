"""Settings: defaults, precedence, and one line for the operator about whatever is wrong."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from common.contract.errors import OperatorError
from common.runtime.config import (
    DEFAULTS_BY_DEVICE,
    DecodeSettings,
    DeviceType,
    GatewaySettings,
    PrefillSettings,
    ProcessSettings,
    ServeSettings,
    load,
)

ROLES: dict[str, type[ProcessSettings]] = {
    "prefill": PrefillSettings,
    "decode": DecodeSettings,
    "gateway": GatewaySettings,
    "serve": ServeSettings,
}
every_role = pytest.mark.parametrize("role", ROLES)


@every_role
def test_defaults_load_and_are_valid(role: str) -> None:
    settings = load(ROLES[role], f"baton {role}", [])
    assert settings == ROLES[role].model_validate(settings.model_dump())
    assert settings.model == "demo"
    assert (settings.pulse.interval_s, settings.pulse.timeout_s) == (0.25, 1.5)


@every_role
def test_every_option_says_what_it_is_for(role: str) -> None:
    assert [name for name, field in ROLES[role].model_fields.items() if not field.description] == []


@every_role
def test_every_default_can_be_given_on_the_command_line_and_as_a_variable(
    role: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    defaults = load(ROLES[role], "baton", [])
    given = {n: v for n, v in defaults.model_dump().items() if v not in (None, ()) and not isinstance(v, bool)}
    arguments = [part for name, value in given.items() for part in (f"--{name.replace('_', '-')}", str(value))]
    assert load(ROLES[role], "baton", arguments) == defaults
    for name, value in given.items():
        monkeypatch.setenv(f"BATON_{name.upper()}", str(value))
    assert load(ROLES[role], "baton", []) == defaults


@every_role
@pytest.mark.parametrize("arguments", [["--no-such-option", "1"], ["--no-such-option=1"], ["--no-such-option"]])
def test_an_unknown_option_is_named(role: str, arguments: list[str]) -> None:
    with pytest.raises(OperatorError, match="no-such-option"):
        load(ROLES[role], "baton", arguments)


@every_role
def test_a_stray_word_is_named(role: str) -> None:
    with pytest.raises(OperatorError, match="stray"):
        load(ROLES[role], "baton", ["stray"])


def test_an_option_without_its_value_is_named() -> None:
    with pytest.raises(OperatorError, match="log-level"):
        load(GatewaySettings, "baton", ["--log-level"])


@every_role
def test_an_option_of_another_role_is_unknown(role: str) -> None:
    option = "--max-num-seqs" if role != "decode" else "--chunk-size"
    with pytest.raises(OperatorError, match=option[2:]):
        load(ROLES[role], "baton", [option, "1"])


@every_role
def test_options_cannot_be_abbreviated(role: str) -> None:
    with pytest.raises(OperatorError, match="log-lev"):
        load(ROLES[role], "baton", ["--log-lev", "debug"])


@every_role
def test_an_unknown_variable_is_named(role: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATON_NO_SUCH_OPTION", "1")
    with pytest.raises(OperatorError, match="BATON_NO_SUCH_OPTION"):
        load(ROLES[role], "baton", [])


@every_role
def test_a_variable_of_another_role_is_no_error(role: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATON_CHUNK_SIZE", "7")
    monkeypatch.setenv("BATON_MAX_NUM_SEQS", "7")
    monkeypatch.setenv("BATON_PREFILL_WORKERS", "a:1")
    load(ROLES[role], "baton", [])


def test_variables_that_kubernetes_sets_for_a_service_of_our_name_are_no_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in {
        "BATON_GATEWAY_SERVICE_HOST": "10.0.0.1",
        "BATON_GATEWAY_SERVICE_PORT": "8000",
        "BATON_GATEWAY_PORT": "tcp://10.0.0.1:8000",
        "BATON_GATEWAY_PORT_8000_TCP": "tcp://10.0.0.1:8000",
        "BATON_GATEWAY_PORT_8000_TCP_ADDR": "10.0.0.1",
        "BATON_GATEWAY_PORT_8000_TCP_PORT": "8000",
        "BATON_GATEWAY_PORT_8000_TCP_PROTO": "tcp",
        "BATON_GATEWAY_SERVICE_PORT_HTTP": "8000",
        "BATON_GATEWAY_SERVICE_PORT_ADMIN_PORT": "8001",
    }.items():
        monkeypatch.setenv(name, value)
    load(DecodeSettings, "baton decode", [])


@every_role
def test_variables_of_a_service_that_have_the_name_of_a_setting_are_no_error(
    role: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Services `baton`, `baton-admin`, `baton-http` and `baton-control` in the same namespace."""
    for name in ("BATON", "BATON_ADMIN", "BATON_HTTP", "BATON_CONTROL"):
        monkeypatch.setenv(f"{name}_SERVICE_HOST", "10.0.0.1")
        monkeypatch.setenv(f"{name}_SERVICE_PORT", "8000")
        monkeypatch.setenv(f"{name}_PORT", "tcp://10.0.0.1:8000")
        monkeypatch.setenv(f"{name}_PORT_8000_TCP", "tcp://10.0.0.1:8000")
        monkeypatch.setenv(f"{name}_PORT_8000_TCP_PORT", "8000")
    load(ROLES[role], "baton", [])


@pytest.mark.parametrize(
    ("named", "why"),
    [
        ("[fd00::1]:7001", "a name or an IPv4 address"),
        ("a..b:7001", "a name or an IPv4 address"),
        ("-x:7001", "a name or an IPv4 address"),
        (".x:7001", "a name or an IPv4 address"),
        (f"{'x' * 64}:7001", "a name or an IPv4 address"),
        ("x", "not host:port"),
        ("x:0", "not host:port"),
        ("x:65536", "not host:port"),
    ],
)
def test_a_worker_at_an_address_that_nobody_can_connect_to_is_an_error(named: str, why: str) -> None:
    with pytest.raises(OperatorError, match=why):
        load(GatewaySettings, "baton gateway", ["--decode-workers", f"10.0.0.1:1,{named}"])


def test_names_of_workers_may_be_of_any_kind_that_resolves() -> None:
    named = "d0:1,my_worker:2,d-0.decode.ns.svc.cluster.local:3,10.1.2.3:4,host.:5"
    assert load(GatewaySettings, "baton gateway", ["--decode-workers", named]).decode_workers == tuple(named.split(","))


def test_a_misspelt_port_is_none_of_kubernetes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATON_CONTROLL_PORT", "7000")
    with pytest.raises(OperatorError, match="unknown environment variable BATON_CONTROLL_PORT"):
        load(DecodeSettings, "baton decode", [])


BAD = [
    ("prefill", "log-level", "loud"),
    ("prefill", "heartbeat-interval-s", "0"),
    ("prefill", "heartbeat-interval-s", "nan"),
    ("prefill", "heartbeat-timeout-s", "-1"),
    ("prefill", "heartbeat-timeout-s", "inf"),
    ("prefill", "control-port", "65536"),
    ("prefill", "control-port", "-1"),
    ("prefill", "control-port", "many"),
    ("prefill", "device", "tpu"),
    ("prefill", "dtype", "float8"),
    ("prefill", "block-size", "-1"),
    ("prefill", "block-size", "257"),
    ("prefill", "block-size", "1.5"),
    ("prefill", "kv-cache-bytes", "0"),
    ("prefill", "transport", "pigeon"),
    ("prefill", "max-waiting", "0"),
    ("prefill", "chunk-size", "-1"),
    ("prefill", "token-budget", ""),
    ("prefill", "unattached-ttl-s", "0"),
    ("prefill", "drain-grace-s", "-1"),
    ("decode", "drain-grace-s", "86401"),
    ("decode", "max-num-seqs", "0"),
    ("decode", "quarantine-bound-s", "nan"),
    ("gateway", "port", "65536"),
    ("gateway", "max-body-bytes", "1023"),
    ("gateway", "request-budget-s", "0"),
    ("gateway", "request-budget-s", "86401"),
    ("gateway", "silence-s", "0"),
    ("gateway", "shutdown-grace-s", "-1"),
    ("gateway", "tenant-header", "X Tenant"),
    ("gateway", "tenant-header", "X-Tenant\n"),
    ("gateway", "local-prefill-tokens", "-1"),
    ("gateway", "prefix-index-names", "1023"),
    ("gateway", "interactive-limit-s", "-1"),
    ("serve", "prefill", "-1"),
    ("serve", "decode", "65"),
    ("serve", "grace-s", "0"),
]


@pytest.mark.parametrize(("role", "option", "value"), BAD, ids=[f"{option}={value}" for _, option, value in BAD])
@pytest.mark.parametrize("by", ["option", "variable"])
def test_a_bad_value_is_named(role: str, option: str, value: str, by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = []
    if by == "option":
        arguments = [f"--{option}={value}"]
    else:
        monkeypatch.setenv("BATON_" + option.replace("-", "_").upper(), value)
    with pytest.raises(OperatorError, match=option):
        load(ROLES[role], f"baton {role}", arguments)


def test_a_stack_may_have_no_prefill_workers_and_must_have_decode_workers() -> None:
    assert load(ServeSettings, "baton serve", ["--prefill=0"]).prefill == 0
    with pytest.raises(OperatorError, match="--decode"):
        load(ServeSettings, "baton serve", ["--decode=0"])


def test_every_bad_value_is_named_at_once() -> None:
    with pytest.raises(OperatorError) as refusal:
        load(PrefillSettings, "baton prefill", ["--block-size=-1", "--chunk-size=x"])
    for part in ("baton prefill", "--block-size", "--chunk-size"):
        assert part in str(refusal.value)


def test_a_timeout_shorter_than_three_heartbeats_is_refused() -> None:
    with pytest.raises(OperatorError, match="heartbeat"):
        load(DecodeSettings, "baton decode", ["--heartbeat-interval-s=10", "--heartbeat-timeout-s=29"])
    load(DecodeSettings, "baton decode", ["--heartbeat-interval-s=10", "--heartbeat-timeout-s=30"])


def test_the_command_line_goes_before_variables_and_these_before_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATON_PORT", "1111")
    monkeypatch.setenv("BATON_HOST", "0.0.0.0")
    settings = load(GatewaySettings, "baton gateway", ["--port", "2222"])
    assert (settings.port, settings.host) == (2222, "0.0.0.0")
    assert settings.log_level == "info"
    assert load(GatewaySettings, "baton gateway", []).port == 1111


def test_the_process_arguments_are_not_read_behind_the_callers_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["baton", "--port", "3333"])
    assert load(GatewaySettings, "baton gateway", []).port == 8000


def test_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not load(PrefillSettings, "baton", []).checksums
    assert load(PrefillSettings, "baton", ["--checksums"]).checksums
    monkeypatch.setenv("BATON_CHECKSUMS", "true")
    assert load(PrefillSettings, "baton", []).checksums
    assert not load(PrefillSettings, "baton", ["--no-checksums"]).checksums


# --- defaults by device ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("device", "sizes"), [("cpu", (32, 512, 1024, 1024)), ("cuda", (64, 2048, 4096, 4096))])
def test_sizes_are_those_of_the_device_where_none_are_given(
    device: DeviceType, sizes: tuple[int, int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    prefill, decode = load(PrefillSettings, "baton", []).on(device), load(DecodeSettings, "baton", []).on(device)
    assert (prefill.block_size, prefill.chunk_size, prefill.token_budget, decode.token_budget) == sizes
    assert (decode.block_size, decode.device, prefill.device) == (prefill.block_size, device, device)
    monkeypatch.setenv("BATON_TOKEN_BUDGET", "300")
    given = load(PrefillSettings, "baton", ["--block-size=8", "--chunk-size=64"]).on(device)
    assert (given.block_size, given.chunk_size, given.token_budget) == (8, 64, 300)
    assert load(DecodeSettings, "baton", []).on(device).token_budget == 300
    assert given.on(device) == given


def test_a_token_budget_by_default_holds_the_batch() -> None:
    large = load(DecodeSettings, "baton", ["--max-num-seqs=2000"])
    assert (large.on("cpu").token_budget, large.on("cuda").token_budget) == (2128, 4096)
    with pytest.raises(OperatorError, match="at least 2128, for max_num_seqs"):
        load(DecodeSettings, "baton", ["--max-num-seqs=2000", "--token-budget=2127", "--prefill-tokens=128"])
    with pytest.raises(OperatorError, match="at least 2016, for max_num_seqs"):
        load(DecodeSettings, "baton", ["--max-num-seqs=2000", "--token-budget=2015"])


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_help_and_the_documents_tell_the_defaults_by_device(role: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        load(ROLES[role], f"baton {role}", ["--help"])
    told = " ".join(capsys.readouterr().out.split())
    rows = (Path(__file__).parents[2] / "docs" / "operations" / "settings.md").read_text().splitlines()
    for name in DEFAULTS_BY_DEVICE["cpu"].keys() & ROLES[role].model_fields.keys():
        on_cpu, on_gpu = (DEFAULTS_BY_DEVICE[device][name] for device in ("cpu", "cuda"))
        assert re.search(rf"\(0: {on_cpu} on a CPU, {on_gpu} on a GPU", told), name
        found = [row for row in rows if row.startswith(f"| `--{name.replace('_', '-')}` | 0 |")]
        assert found, name
        assert all(f"{on_cpu} on a CPU" in row and f"{on_gpu} on a GPU" in row for row in found), found


# --- addresses -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "addresses"),
    [
        ("", ()),
        ("a:1", ("a:1",)),
        ("a:1,b:65535", ("a:1", "b:65535")),
        (" a:1 , b:2 ,", ("a:1", "b:2")),
        ("worker-0.workers.default.svc:7000", ("worker-0.workers.default.svc:7000",)),
    ],
)
@pytest.mark.parametrize("by", ["option", "variable"])
def test_addresses(text: str, addresses: tuple[str, ...], by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = []
    if by == "option":
        arguments = [f"--prefill-workers={text}"]
    else:
        monkeypatch.setenv("BATON_PREFILL_WORKERS", text)
    assert load(GatewaySettings, "baton gateway", arguments).prefill_workers == addresses


@pytest.mark.parametrize(
    "text", ["a", ":1", "a:", "a:0", "a:65536", "a:-1", "a:x", "a:1,b", "a:1;b:2", "a:²", "a:٣", "tcp://a:1", "a b:1"]
)
@pytest.mark.parametrize("by", ["option", "variable"])
def test_what_is_no_address_is_named(text: str, by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = []
    if by == "option":
        arguments = [f"--decode-workers={text}"]
    else:
        monkeypatch.setenv("BATON_DECODE_WORKERS", text)
    with pytest.raises(OperatorError, match="decode-workers"):
        load(GatewaySettings, "baton gateway", arguments)


# --- help ------------------------------------------------------------------------------------------------------------


@every_role
def test_help_names_every_option_and_exits_0(role: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as leaving:
        load(ROLES[role], f"baton {role}", ["--help"])
    assert leaving.value.code == 0
    text = capsys.readouterr().out
    assert f"baton {role}" in text
    for name in ROLES[role].model_fields:
        assert f"--{name.replace('_', '-')}" in text


@pytest.mark.processes
@pytest.mark.parametrize(("arguments", "code"), [(["--help"], 0), (["-h"], 0), ([], 2), (["no-such-role"], 2)], ids=str)
def test_the_command_itself(arguments: list[str], code: int) -> None:
    command = [sys.executable, "-m", "common.runtime.cli", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == code
    assert "Traceback" not in done.stderr
    if arguments == ["no-such-role"]:
        assert "no-such-role" in done.stderr
