"""The file of API keys, what is wrong with it, and who is let in."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from gateway_fixtures import (
    CHAT,
    CHAT_PATH,
    COMPLETION,
    COMPLETIONS_PATH,
    ScriptedGenerator,
    assert_error,
    serve,
    settings,
)
from multidict import CIMultiDict
from waiting import StandingClock

from common.contract.errors import OperatorError
from gateway.access.api_keys import MAX_KEYS, Keyring, draw_key, main, read_keys
from gateway.serving.generation import Readiness

KEY = "baton-" + "k" * 43


def digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def entry(name: str, key: str, *more: str) -> str:
    return "\n".join(["[[keys]]", f'name = "{name}"', f'sha256 = "{digest(key)}"', *more, ""])


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "keys.toml"
    path.write_text(entry("alice", KEY))
    return path


def test_an_entry_with_everything(file: Path) -> None:
    more = [
        "requests_per_minute = 600",
        "tokens_per_minute = 100_000",
        "max_concurrency = 8",
        'tenant = "team a"',
        "tenant_from_header = true",
        'tiers = ["standard", "batch"]',
    ]
    file.write_text(entry("alice", KEY, *more) + entry("bob", "other"))
    alice, bob = read_keys(file)
    assert (alice.requests_per_minute, alice.tokens_per_minute, alice.max_concurrency) == (600, 100_000, 8)
    assert (alice.tenant, alice.tenant_from_header, alice.tiers) == ("team a", True, ["standard", "batch"])
    assert (bob.requests_per_minute, bob.tokens_per_minute, bob.max_concurrency, bob.tiers) == (None,) * 4
    assert (bob.tenant, bob.tenant_from_header) == (None, False)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", r"keys: Field required"),
        ("keys = []", r"keys: .*at least 1"),
        ("[[keys]]\nname = 'a'\nsha256 = abc\n", r"line 3"),
        ("\xff", r"keys.toml"),
        ("[[keys]]\nname = 'a'", r"keys\[0\]\.sha256: Field required"),
        (entry("a", KEY, "colour = 1"), r"keys\[0\]\.colour: Extra"),
        (entry("a", KEY) + "[other]", r"other: Extra"),
        (entry("a b", KEY), r"keys\[0\]\.name"),
        (entry("", KEY), r"keys\[0\]\.name"),
        (entry("a" * 65, KEY), r"keys\[0\]\.name"),
        ("[[keys]]\nname = 'a'\nsha256 = 'abc'", r"keys\[0\]\.sha256"),
        (f"[[keys]]\nname = 'a'\nsha256 = '{digest(KEY).upper()}'", r"keys\[0\]\.sha256"),
        (entry("a", KEY, "requests_per_minute = 0"), r"keys\[0\]\.requests_per_minute"),
        (entry("a", KEY, "requests_per_minute = '5'"), r"keys\[0\]\.requests_per_minute"),
        (entry("a", KEY, "tokens_per_minute = 1.5"), r"keys\[0\]\.tokens_per_minute"),
        (entry("a", KEY, "max_concurrency = -1"), r"keys\[0\]\.max_concurrency"),
        (entry("a", KEY, "tenant = ''"), r"keys\[0\]\.tenant"),
        (entry("a", KEY, 'tenant = "\\n"'), r"keys\[0\]\.tenant: .*printable"),
        (entry("a", KEY, "tiers = []"), r"keys\[0\]\.tiers"),
        (entry("a", KEY, "tiers = ['gold']"), r"keys\[0\]\.tiers\[0\]"),
        (entry("a", KEY, "tenant_from_header = 1"), r"keys\[0\]\.tenant_from_header"),
        (entry("a", KEY) + entry("a", "other"), r"keys\[1\]\.name: a comes twice"),
        (entry("a", KEY) + entry("b", KEY), r"keys\[1\]\.sha256: .* comes twice"),
        ("".join(entry(f"k{i}", str(i)) for i in range(MAX_KEYS + 1)), r"keys: .*at most 4096"),
        ("#" * (4 * 2**20 + 1), r"larger than"),
    ],
)
def test_what_is_wrong_is_named(file: Path, text: str, said: str) -> None:
    file.write_bytes(text.encode("latin-1"))
    with pytest.raises(OperatorError, match=said):
        Keyring(file)


def test_no_file() -> None:
    with pytest.raises(OperatorError, match="cannot read the API keys"):
        Keyring(Path("/nowhere/keys.toml"))


def test_keys_are_found_by_themselves_alone(file: Path) -> None:
    file.write_text("".join(entry(f"k{i}", f"key {i}") for i in range(50)))
    keyring = Keyring(file)
    assert [keyring.find(f"key {i}").name for i in range(50)] == [f"k{i}" for i in range(50)]  # type: ignore[union-attr]
    for wrong in ["", "key", "key 50", "key 1 ", digest("key 1"), "\udcff", "ключ"]:
        assert keyring.find(wrong) is None


def test_a_key_is_found_with_the_same_work_among_many_as_alone(file: Path) -> None:
    def work(num_keys: int) -> int:
        """Calls that a right and a wrong key cost: a measure that no clock disturbs."""
        file.write_text("".join(entry(f"k{i}", f"key {i}") for i in range(num_keys)))
        keyring = Keyring(file, clock=StandingClock())
        num_calls = 0

        def count(frame: object, event: str, arg: object) -> None:
            nonlocal num_calls
            num_calls += event in ("call", "c_call")

        before = sys.getprofile()
        sys.setprofile(count)
        try:
            found = keyring.find("key 0"), keyring.find("wrong")
        finally:
            sys.setprofile(before)
        assert [each and each.name for each in found] == ["k0", None]
        return num_calls

    assert work(MAX_KEYS) == work(1)


def test_a_file_that_changes_is_read_again(file: Path) -> None:
    time = StandingClock()
    reloads: list[bool] = []
    keyring = Keyring(file, clock=time, reloaded=reloads.append)
    file.write_text(entry("bob", "other"))
    assert keyring.find(KEY) is not None, "looked at no more than once a second"
    time.now += 1
    assert keyring.find(KEY) is None
    assert keyring.find("other").name == "bob"  # type: ignore[union-attr]
    time.now += 1
    keyring.find("other")
    assert reloads == [True]


@pytest.mark.parametrize("bad", ["[[keys", entry("a", KEY, "colour = 1"), ""])
def test_what_cannot_be_used_changes_nothing_and_is_logged_once(
    file: Path, bad: str, caplog: pytest.LogCaptureFixture
) -> None:
    time = StandingClock()
    reloads: list[bool] = []
    keyring = Keyring(file, clock=time, reloaded=reloads.append)
    file.write_text(bad)
    for _ in range(3):
        time.now += 1
        assert keyring.find(KEY) is not None
    assert reloads == [False]
    (line,) = [record.getMessage() for record in caplog.records]
    assert "stay as they were" in line
    assert KEY not in line
    file.unlink()
    time.now += 1
    assert keyring.find(KEY) is not None
    file.write_text(entry("bob", "other"))
    time.now += 1
    assert keyring.find(KEY) is None
    assert reloads == [False, False, True]


def test_a_mounted_secret_changes_by_a_link(tmp_path: Path) -> None:
    """As Kubernetes does it: the file is a link through a folder that is exchanged."""
    for version, name in [("1", "alice"), ("2", "bob")]:
        (tmp_path / version).mkdir()
        (tmp_path / version / "keys.toml").write_text(entry(name, KEY))
        os.utime(tmp_path / version / "keys.toml", (0, 0))
    (tmp_path / "data").symlink_to("1")
    (tmp_path / "keys.toml").symlink_to("data/keys.toml")
    time = StandingClock()
    keyring = Keyring(tmp_path / "keys.toml", clock=time)
    (tmp_path / "next").symlink_to("2")
    (tmp_path / "next").rename(tmp_path / "data")
    time.now += 1
    assert [key.name for key in keyring.keys] == ["bob"]


def test_a_drawn_key_is_its_digest_and_another_each_time() -> None:
    drawn = [draw_key() for _ in range(100)]
    assert len(set(drawn)) == 100
    for key, sha256 in drawn:
        assert key.startswith("baton-")
        assert len(key) == len("baton-") + 43
        assert sha256 == digest(key)


@pytest.mark.processes
def test_the_command_prints_a_key_and_an_entry_that_belong_together(file: Path) -> None:
    command = [sys.executable, "-m", "common.runtime.cli", "api-key", "team-a.1@x"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    (key,) = [line for line in done.stdout.splitlines() if line.startswith("baton-")]
    printed = done.stdout[done.stdout.index("[[keys]]") :]
    assert tomllib.loads(printed)["keys"][0].keys() == {"name", "sha256"}
    file.write_text(printed)
    assert Keyring(file).find(key).name == "team-a.1@x"  # type: ignore[union-attr]


@pytest.mark.parametrize("arguments", [(), ("a", "b"), ("-x",), ('a"',), ("a b",), ("",)])
def test_the_command_refuses_what_is_no_name(
    arguments: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["baton api-key", *arguments])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 2
    printed = capsys.readouterr()
    assert not printed.out
    assert len(printed.err.splitlines()) == 1


async def test_a_key_is_asked_for(file: Path) -> None:
    file.write_text(entry("first", "first") + entry("second", "sécond"))
    async with serve(ScriptedGenerator(), keyring=Keyring(file)) as server, aiohttp.ClientSession() as session:
        for authorization in [
            None,
            "",
            "Bearer",
            "Bearer ",
            "Bearer wrong",
            "Bearer " + "x" * 8000,
            "Bearer " + digest("first"),
            "Basic first",
            "first",
            "Bearer first2",
            "Bearer first second",
        ]:
            headers = {} if authorization is None else {"Authorization": authorization}
            for path in [COMPLETIONS_PATH, CHAT_PATH, "/tokenize", "/v1/nowhere"]:
                async with session.post(server.url + path, json=COMPLETION, headers=headers) as response:
                    assert response.status == 401
                    assert response.headers["WWW-Authenticate"] == "Bearer"
                    assert_error(await response.json(), None, "invalid_api_key")
        for authorization in ["Bearer first", "bearer sécond", "Bearer  first"]:
            headers = {"Authorization": authorization}
            async with session.post(server.url + COMPLETIONS_PATH, json=COMPLETION, headers=headers) as response:
                assert response.status == 200
        cases: list[tuple[Mapping[str, str], int]] = [
            ({"x-api-key": "first"}, 200),
            ({"X-API-Key": "sécond"}, 200),
            ({"x-api-key": "first", "Authorization": "Bearer first"}, 200),
            ({"x-api-key": "wrong"}, 401),
            ({"x-api-key": ""}, 401),
            ({"x-api-key": "Bearer first"}, 401),
            ({"x-api-key": "first", "Authorization": "Bearer sécond"}, 401),
            ({"x-api-key": "first", "Authorization": "Basic first"}, 401),
            (CIMultiDict([("x-api-key", "first"), ("x-api-key", "first")]), 401),
        ]
        for given, status in cases:
            async with session.post(server.url + COMPLETIONS_PATH, json=COMPLETION, headers=given) as response:
                assert response.status == status, given
        for path in ["/health", "/ready", "/metrics"]:
            async with session.get(server.url + path) as response:
                assert response.status == 200
        async with session.get(server.url + "/v1/models") as response:
            assert response.status == 401


async def test_who_has_no_valid_key_is_told_whether_the_gateway_is_ready_and_no_more(file: Path) -> None:
    workers = {"workers": [{"id": "10.0.0.1:7001"}]}
    cases: list[tuple[dict[str, str], dict[str, Any]]] = [
        ({}, {}),
        ({"x-api-key": "wrong"}, {}),
        ({"x-api-key": KEY}, workers),
        ({"Authorization": f"Bearer {KEY}"}, workers),
    ]
    generator = ScriptedGenerator()
    async with serve(generator, keyring=Keyring(file)) as server, aiohttp.ClientSession() as session:
        for ready, status in [(True, 200), (False, 503)]:
            generator.readiness = Readiness(ready=ready, reason="as told", details=lambda: workers)
            for headers, details in cases:
                async with session.get(server.url + "/ready", headers=headers) as response:
                    assert response.status == status
                    assert await response.json() == {"ready": ready, "reason": "as told", "details": details}


async def _tenants(keyring: Keyring | None, header: str | None, *asked: tuple[str, str | None]) -> list[str]:
    """The tenants of requests, each with a key and what it says in the header X-Tenant."""
    generator = ScriptedGenerator()
    named = dataclasses.replace(settings(), tenant_header=header)
    async with serve(generator, named, keyring=keyring) as server, aiohttp.ClientSession() as session:
        for key, tenant in asked:
            headers = {"Authorization": f"Bearer {key}"} | ({} if tenant is None else {"X-Tenant": tenant})
            async with session.post(server.url + CHAT_PATH, json=CHAT, headers=headers) as response:
                assert response.status == 200, await response.text()
    return [generation.tenant for generation in generator.generations]


async def test_the_tenant_is_the_keys_whatever_a_header_says(file: Path) -> None:
    file.write_text(
        entry("plain", "1")
        + entry("named", "2", 'tenant = "team"')
        + entry("trusted", "3", 'tenant = "own"', "tenant_from_header = true")
    )
    asked = [("1", "x"), ("1", None), ("2", "x"), ("2", None), ("3", "x"), ("3", None), ("3", "")]
    assert await _tenants(Keyring(file), "X-Tenant", *asked) == ["plain", "plain", "team", "team", "x", "own", "own"]
    assert await _tenants(Keyring(file), None, ("1", "x"), ("3", "x")) == ["plain", "own"]
    assert await _tenants(None, "X-Tenant", ("1", "x"), ("1", None)) == ["x", ""]


async def test_keys_of_two_tenants_share_no_cached_prefixes(file: Path) -> None:
    file.write_text(entry("a", "1") + entry("b", "2") + entry("c", "3", 'tenant = "a"'))
    generator = ScriptedGenerator()
    async with serve(generator, keyring=Keyring(file)) as server, aiohttp.ClientSession() as session:
        for key in "123":
            async with session.post(
                server.url + CHAT_PATH, json=CHAT, headers={"Authorization": f"Bearer {key}"}
            ) as response:
                assert response.status == 200
    a, b, c = [generation.cache_salt for generation in generator.generations]
    assert a == c != b


@pytest.mark.parametrize(
    ("tier", "status"), [("batch", 200), ("flex", 200), ("interactive", 403), (None, 403), ("auto", 403)]
)
@pytest.mark.parametrize(("path", "body"), [(CHAT_PATH, CHAT), (COMPLETIONS_PATH, COMPLETION)])
async def test_tiers_that_a_key_may_use(
    file: Path, path: str, body: dict[str, Any], tier: str | None, status: int
) -> None:
    file.write_text(entry("a", KEY, 'tiers = ["batch"]'))
    headers = {"Authorization": f"Bearer {KEY}"}
    async with serve(ScriptedGenerator(), keyring=Keyring(file)) as server, aiohttp.ClientSession() as session:
        async with session.post(server.url + path, json=body | {"service_tier": tier}, headers=headers) as response:
            assert response.status == status
            if status == 403:
                answer = await response.json()
                assert_error(answer, "service_tier", "tier_not_allowed")
                assert answer["error"]["type"] == "permission_error"
                assert "batch" in answer["error"]["message"]
