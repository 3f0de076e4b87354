"""Pages that may call the API from a browser, and those that may not."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

import aiohttp
import pytest
from gateway_fixtures import COMPLETION, COMPLETIONS_PATH, ScriptedGenerator, assert_error, serve, settings

from common.contract.errors import OperatorError
from common.runtime.config import GatewaySettings, load
from gateway.access.api_keys import Keyring
from gateway.access.hosts import called_by

PAGE = "https://chat.example.org"
PREFLIGHT = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,content-type"}


def _allowed(headers: Mapping[str, str]) -> list[str]:
    return sorted(name for name in headers if name.lower().startswith("access-control-"))


async def test_by_default_no_page_may() -> None:
    async with serve(ScriptedGenerator()) as server, aiohttp.ClientSession() as session:
        headers = {"Origin": PAGE}
        async with session.options(server.url + COMPLETIONS_PATH, headers=headers | PREFLIGHT) as response:
            assert response.status == 405
            assert_error(await response.json(), None, "method_not_allowed")
            assert not _allowed(response.headers)
        async with session.get(server.url + "/v1/models", headers=headers) as response:
            assert response.status == 200
            assert not _allowed(response.headers)
            assert "Vary" not in response.headers


async def test_a_page_of_another_site_cannot_make_a_browser_generate() -> None:
    """Text goes without a preflight, and the answer, which the page may not read, would have cost what it costs."""
    generator = ScriptedGenerator()
    text = {"Content-Type": "text/plain", "Origin": PAGE}
    async with serve(generator) as server, aiohttp.ClientSession() as session:
        for site, status in (("cross-site", 403), ("same-site", 403), ("same-origin", 200), ("none", 200)):
            headers = text | {"Sec-Fetch-Site": site}
            body = json.dumps(COMPLETION)
            async with session.post(server.url + COMPLETIONS_PATH, data=body, headers=headers) as response:
                assert response.status == status
                if status == 403:
                    assert_error(await response.json(), None, "foreign_origin")
    assert len(generator.generations) == 2
    async with serve(ScriptedGenerator(), dataclasses.replace(settings(), cors_origins=(PAGE,))) as server:
        async with aiohttp.ClientSession() as session:
            headers = text | {"Sec-Fetch-Site": "cross-site"}
            async with session.post(server.url + COMPLETIONS_PATH, json=COMPLETION, headers=headers) as response:
                assert response.status == 200
                assert "x-baton-route" in response.headers["Access-Control-Expose-Headers"]


@pytest.mark.parametrize(
    ("headers", "taken"),
    [
        ({"Content-Type": "text/plain", "Origin": PAGE}, False),
        ({"Content-Type": "application/json", "Origin": PAGE}, False),
        ({"Content-Type": "text/plain", "Origin": "null"}, False),
        ({"Content-Type": "text/plain", "Origin": "http://127.0.0.1:1"}, False),
        ({"Content-Type": "application/json", "Origin": "http://HOST"}, True),
        ({"Content-Type": "text/plain", "Origin": "http://HOST"}, True),
        ({"Content-Type": "text/plain", "Referer": PAGE}, False),
        ({"Content-Type": "application/x-www-form-urlencoded", "User-Agent": "Mozilla/5.0 (X11)"}, False),
        ({"Content-Type": "application/json", "User-Agent": "Mozilla/5.0 (X11)"}, True),
        ({"Content-Type": "application/x-www-form-urlencoded", "User-Agent": "curl/8.5.0"}, True),
        ({"Content-Type": "application/json"}, True),
    ],
)
async def test_a_browser_that_does_not_say_what_site_a_page_is_of(headers: dict[str, str], taken: bool) -> None:
    """`Sec-Fetch-Site` is not sent over plain HTTP but to `localhost`, nor by old browsers."""
    generator = ScriptedGenerator()
    async with serve(generator) as server, aiohttp.ClientSession() as session:
        host = server.url.removeprefix("http://")
        headers = {name: value.replace("HOST", host) for name, value in headers.items()}
        body = json.dumps(COMPLETION)
        async with session.post(server.url + COMPLETIONS_PATH, data=body, headers=headers) as response:
            assert response.status == (200 if taken else 403)
            if not taken:
                assert_error(await response.json(), None, "foreign_origin")
    assert len(generator.generations) == taken


@pytest.mark.parametrize(
    ("names", "host", "has_keys", "called", "taken"),
    [
        ((), "127.0.0.1", False, "127.0.0.1:8000", True),
        ((), "127.0.0.1", False, "localhost:8000", True),
        ((), "127.0.0.1", False, "LOCALHOST", True),
        ((), "localhost", False, "baton.localhost", True),
        ((), "127.0.0.1", False, "[::1]:8000", True),
        ((), "127.0.0.1", False, "host.docker.internal:8000", True),
        ((), "127.0.0.1", False, "evil.example:8000", False),
        ((), "127.0.0.1", False, "127.0.0.1.evil.example", False),
        ((), "127.0.0.1", False, "localhost.evil.example", False),
        ((), "127.0.0.1", False, "evil.example.", False),
        ((), "127.0.0.1", False, "", False),
        ((), "::1", False, "evil.example", False),
        ((), "127.0.0.1", True, "anything.example", True),
        ((), "0.0.0.0", False, "anything.example", True),
        (("Chat.example.org",), "127.0.0.1", False, "chat.example.org", True),
        (("chat.example.org",), "127.0.0.1", False, "evil.example", False),
        (("chat.example.org",), "0.0.0.0", True, "evil.example", False),
        (("*",), "127.0.0.1", False, "anything.example", True),
    ],
)
async def test_a_name_that_a_page_has_made_mean_this_machine(
    names: tuple[str, ...], host: str, has_keys: bool, called: str, taken: bool
) -> None:
    """For posts, and for what is open to read."""
    allowed = called_by(names, host=host, has_keys=has_keys)
    api_settings = dataclasses.replace(settings(), allowed_hosts=allowed)
    async with serve(ScriptedGenerator(), api_settings) as server, aiohttp.ClientSession() as session:
        headers = {"Host": called}
        async with session.post(server.url + COMPLETIONS_PATH, json=COMPLETION, headers=headers) as response:
            assert response.status == (200 if taken else 403)
            if not taken:
                assert_error(await response.json(), None, "foreign_host")
        async with session.get(server.url + "/metrics", headers=headers) as response:
            assert response.status == (200 if taken else 403)


def test_names_of_hosts_are_given_without_ports() -> None:
    given = load(GatewaySettings, "baton gateway", ["--allowed-hosts", "a.example, b.example"])
    assert given.allowed_hosts == ("a.example", "b.example")
    with pytest.raises(OperatorError, match="allowed-hosts"):
        load(GatewaySettings, "baton gateway", ["--allowed-hosts", "https://a.example"])


@pytest.mark.parametrize("origins", [(PAGE, "http://localhost:3000"), ("*",)])
async def test_a_page_that_may(origins: tuple[str, ...], tmp_path: Path) -> None:
    """Asked beforehand, without a key; then a stream, and errors, which the page can read."""
    keys = tmp_path / "keys.toml"
    keys.write_text(f'[[keys]]\nname = "a"\nsha256 = "{hashlib.sha256(b"k").hexdigest()}"\nrequests_per_minute = 1')
    api_settings = dataclasses.replace(settings(), cors_origins=origins)
    told = "*" if origins == ("*",) else PAGE
    async with serve(ScriptedGenerator(), api_settings, keyring=Keyring(keys)) as server:
        async with aiohttp.ClientSession(headers={"Origin": PAGE}) as session:
            async with session.options(server.url + COMPLETIONS_PATH, headers=PREFLIGHT) as response:
                assert response.status == 204
                assert await response.read() == b""
                assert response.headers["Access-Control-Allow-Origin"] == told
                assert response.headers["Access-Control-Allow-Methods"] == "GET, POST, OPTIONS"
                assert response.headers["Access-Control-Allow-Headers"] == "authorization,content-type"
                assert "Access-Control-Allow-Credentials" not in response.headers
            for key, stream, status in [("k", True, 200), ("k", False, 429), ("wrong", False, 401)]:
                async with session.post(
                    server.url + COMPLETIONS_PATH,
                    json=COMPLETION | {"stream": stream},
                    headers={"Authorization": f"Bearer {key}"},
                ) as response:
                    assert response.status == status
                    assert response.headers["Access-Control-Allow-Origin"] == told
                    assert response.headers["Vary"] == "Origin"
                    exposed = response.headers["Access-Control-Expose-Headers"]
                    shown = {name for name in response.headers if name.lower().startswith(("retry", "x-rate"))}
                    assert shown <= set(exposed.split(", "))
            async with session.get(server.url + "/nowhere", headers={"Authorization": "Bearer k"}) as response:
                assert response.status == 404
                assert response.headers["Access-Control-Allow-Origin"] == told
        assert (
            server.metrics.registry.get_sample_value(
                "baton_gateway_requests_total", {"endpoint": "unknown", "code": "204"}
            )
            == 1
        )


@pytest.mark.parametrize(
    "origin",
    [
        "https://chat.example.org.evil.net",
        "https://evil.net",
        "http://chat.example.org",
        "https://chat.example.org:8443",
        "HTTPS://CHAT.EXAMPLE.ORG",
        "null",
        "*",
        "",
        PAGE + "/",
        PAGE + ", https://evil.net",
    ],
)
async def test_pages_of_other_origins(origin: str) -> None:
    api_settings = dataclasses.replace(settings(), cors_origins=(PAGE,))
    async with serve(ScriptedGenerator(), api_settings) as server, aiohttp.ClientSession() as session:
        headers = {"Origin": origin}
        async with session.options(server.url + COMPLETIONS_PATH, headers=headers | PREFLIGHT) as response:
            assert response.status == 405
            assert not _allowed(response.headers)
        async with session.post(server.url + COMPLETIONS_PATH, json=COMPLETION, headers=headers) as response:
            assert not _allowed(response.headers)
            assert response.headers["Vary"] == "Origin"


@pytest.mark.parametrize("wanted", ["", "a b", "x" * 65, ",".join(["x"] * 33), "x-\u00e9", "x;y", ","])
async def test_header_names_that_are_none_are_not_repeated(wanted: str) -> None:
    api_settings = dataclasses.replace(settings(), cors_origins=(PAGE,))
    headers = {"Origin": PAGE} | PREFLIGHT | {"Access-Control-Request-Headers": wanted}
    async with serve(ScriptedGenerator(), api_settings) as server, aiohttp.ClientSession() as session:
        async with session.options(server.url + COMPLETIONS_PATH, headers=headers) as response:
            assert response.status == 204
            assert "Access-Control-Allow-Headers" not in response.headers


async def test_options_that_is_no_preflight() -> None:
    api_settings = dataclasses.replace(settings(), cors_origins=(PAGE,))
    async with serve(ScriptedGenerator(), api_settings) as server, aiohttp.ClientSession() as session:
        for headers in [{"Origin": PAGE}, PREFLIGHT]:
            async with session.options(server.url + COMPLETIONS_PATH, headers=headers) as response:
                assert response.status == 405


def test_origins_are_given_as_browsers_write_them() -> None:
    given = "https://chat.example.org, http://localhost:3000,https://10.0.0.1:8443,http://[::1]:80"
    assert load(GatewaySettings, "baton", ["--cors-origins", given]).cors_origins == tuple(
        given.replace(" ", "").split(",")
    )
    assert load(GatewaySettings, "baton", ["--cors-origins", "*"]).cors_origins == ("*",)
    for wrong in [
        "chat.example.org",
        "https://x/",
        "https://x/y",
        "ftp://x",
        "https://X",
        "https://*.x",
        "null",
        "https://",
    ]:
        with pytest.raises(OperatorError, match="cors-origins"):
            load(GatewaySettings, "baton", ["--cors-origins", wrong])
