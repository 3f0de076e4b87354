"""A gateway's process that clients may reach: HTTPS, keys, and files that change while it runs."""

from __future__ import annotations

import asyncio
import hashlib
import signal
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import trustme
from stack import Workers, run_forked

FIRST, SECOND = "baton-first", "baton-second"
QUESTION = {"prompt": "who drops the baton", "max_tokens": 4}


@pytest.fixture
def alone(pool: Callable[..., Workers]) -> Workers:
    """One decode worker, which computes the prompts, too."""
    return pool("alone", prefill=0, decode=1, options=("--transport", "zmq"))


def _write_keys(file: Path, key: str, *more: str) -> None:
    digest = hashlib.sha256(key.encode()).hexdigest()
    file.write_text("\n".join(["[[keys]]", 'name = "alice"', f'sha256 = "{digest}"', *more]))


def _write_certificate(folder: Path, authority: trustme.CA) -> tuple[str, str]:
    issued = authority.issue_cert("127.0.0.1")
    chain, key = folder / "cert.pem", folder / "key.pem"
    chain.write_bytes(b"".join(blob.bytes() for blob in issued.cert_chain_pems))
    key.write_bytes(issued.private_key_pem.bytes())
    return str(chain), str(key)


async def _ask(url: str, context: ssl.SSLContext, key: str) -> tuple[int, Any]:
    """Over a connection of its own."""
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=context)) as session:
        headers = {"Authorization": f"Bearer {key}"}
        async with session.post(f"{url}/v1/completions", json=QUESTION, headers=headers) as response:
            return response.status, response.headers


async def _status(url: str, context: ssl.SSLContext, key: str) -> int | None:
    """None if the certificate is not one that the client trusts."""
    try:
        return (await _ask(url, context, key))[0]
    except aiohttp.ClientConnectorCertificateError:
        return None


async def test_keys_and_certificates_are_exchanged_without_a_pause(alone: Workers, tmp_path: Path) -> None:
    authority, keys = trustme.CA(), tmp_path / "keys.toml"
    context = ssl.create_default_context()
    authority.configure_trust(context)
    chain, private = _write_certificate(tmp_path, authority)
    _write_keys(keys, FIRST, "requests_per_minute = 600")
    options = ("--api-keys", str(keys), "--tls-cert", chain, "--tls-key", private)
    with alone.gateway(*options) as gateway:
        url = gateway.fact("url")
        assert url.startswith("https://")
        status, headers = await _ask(url, context, FIRST)
        assert status == 200
        assert headers["x-ratelimit-limit-requests"] == "600"
        assert (await _ask(url, context, SECOND))[0] == 401
        with pytest.raises(aiohttp.ClientConnectorCertificateError):
            await _ask(url, ssl.create_default_context(), FIRST)

        _write_keys(keys, SECOND)
        other = trustme.CA()
        _write_certificate(tmp_path, other)
        trusting_other = ssl.create_default_context()
        other.configure_trust(trusting_other)
        async with asyncio.timeout(60):
            while await _status(url, trusting_other, SECOND) != 200:
                await asyncio.sleep(0.05)
        assert (await _ask(url, trusting_other, FIRST))[0] == 401
        with pytest.raises(aiohttp.ClientConnectorCertificateError):
            await _ask(url, context, SECOND)

        keys.write_text("[[keys]]\nname = 1")
        async with asyncio.timeout(60):
            while not any("the API keys stay as they were" in line for line in gateway.log):
                assert (await _ask(url, trusting_other, SECOND))[0] == 200
                await asyncio.sleep(0.05)


async def test_a_hangup_changes_nothing(alone: Workers) -> None:
    with alone.gateway() as gateway:
        gateway.popen.send_signal(signal.SIGHUP)
        async with aiohttp.ClientSession() as session:
            for _ in range(5):
                async with session.post(f"{gateway.fact('url')}/v1/completions", json=QUESTION) as response:
                    assert response.status == 200
                await asyncio.sleep(0)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (("--api-keys", "nowhere.toml"), "cannot read the API keys"),
        (("--api-keys", "empty.toml"), "keys: Field required"),
        (("--tls-cert", "nowhere.pem", "--tls-key", "empty.toml"), "cannot read the TLS files"),
        (("--tls-cert", "empty.toml", "--tls-key", "empty.toml"), "no certificate and its unencrypted key"),
        (("--tls-cert", "empty.toml"), "tls_cert and tls_key go together"),
        (("--cors-origins", "example.org"), "no origin"),
        (("--max-connections", "0"), "--max-connections"),
        (("--header-timeout-s", "0"), "--header-timeout-s"),
    ],
)
def test_what_the_operator_got_wrong_is_one_line(tmp_path: Path, options: tuple[str, ...], expected: str) -> None:
    (tmp_path / "empty.toml").touch()
    given = [str(tmp_path / each) if each.endswith((".toml", ".pem")) else each for each in options]
    always = ["--log-level", "error", "--port", "0", "--decode-workers", "127.0.0.1:1"]
    done = run_forked("gateway", [*always, *given])
    assert done.returncode == 2, done.stderr
    (line,) = [line for line in done.stderr.splitlines() if line.strip()]
    assert line.startswith("error: ")
    assert expected in line
