"""HTTPS: what is offered, certificates that change, and what an operator may have got wrong."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import logging
import os
import socket
import ssl
from pathlib import Path

import aiohttp
import pytest
import trustme
from cryptography import x509
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    load_pem_private_key,
)
from gateway_fixtures import COMPLETION, COMPLETIONS_PATH, ScriptedGenerator, serve
from test_connections import HEALTH, TIMEOUT_S
from waiting import StandingClock

from common.contract.errors import OperatorError
from common.runtime.config import GatewaySettings, load
from gateway.access.connections import ConnectionBounds
from gateway.web.tls import ServerTls


class Certificate:
    """A certificate for 127.0.0.1, in files, and whoever trusts it."""

    def __init__(self, folder: Path) -> None:
        self.authority = trustme.CA()
        self.chain, self.key = folder / "cert.pem", folder / "key.pem"
        self.renew()

    def renew(self) -> None:
        issued = self.authority.issue_cert("127.0.0.1")
        self.chain.write_bytes(b"".join(blob.bytes() for blob in issued.cert_chain_pems))
        self.key.write_bytes(issued.private_key_pem.bytes())
        self.serial = x509.load_pem_x509_certificate(issued.cert_chain_pems[0].bytes()).serial_number

    def client(self) -> ssl.SSLContext:
        context = ssl.create_default_context()
        self.authority.configure_trust(context)
        return context


@pytest.fixture
def certificate(tmp_path: Path) -> Certificate:
    return Certificate(tmp_path)


async def _serial(port: int, context: ssl.SSLContext) -> int:
    """The serial number of the certificate that a new connection is shown."""
    _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
    shown = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    writer.close()
    return x509.load_der_x509_certificate(shown).serial_number


def _port(url: str) -> int:
    return int(url.rpartition(":")[2])


async def test_requests_over_tls(certificate: Certificate) -> None:
    tls = ServerTls(certificate.chain, certificate.key)
    async with serve(ScriptedGenerator(), tls=tls.context) as server:
        assert server.url.startswith("https://")
        connector = aiohttp.TCPConnector(ssl=certificate.client())
        async with aiohttp.ClientSession(connector=connector) as session:
            for stream in (False, True):
                async with session.post(
                    server.url + COMPLETIONS_PATH, json=COMPLETION | {"stream": stream}
                ) as response:
                    assert response.status == 200
                    assert "world" in await response.text()


async def test_connections_are_closed_once_and_without_errors(
    certificate: Certificate, caplog: pytest.LogCaptureFixture
) -> None:
    """A transport over TLS is of no use after a second `close`."""
    tls = ServerTls(certificate.chain, certificate.key)
    async with serve(ScriptedGenerator(), tls=tls.context) as server, asyncio.timeout(TIMEOUT_S):
        port, trusting = _port(server.url), certificate.client()
        idle, one = await asyncio.open_connection("127.0.0.1", port, ssl=trusting)
        one.write(HEALTH)
        await idle.readuntil(b"}")
        closed, other = await asyncio.open_connection("127.0.0.1", port, ssl=trusting)
        other.write(HEALTH.replace(b"Host:", b"Connection: close\r\nHost:"))
        assert (await closed.read()).endswith(b"}")
    async with asyncio.timeout(TIMEOUT_S):
        assert await idle.read() == b""
    one.close()
    other.close()
    gc.collect()  # an exception of a task is logged when the task is collected
    assert [each.getMessage() for each in caplog.records if each.levelno >= logging.ERROR] == []


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1, ssl.TLSVersion.TLSv1_1])
async def test_old_versions_are_refused(certificate: Certificate, version: ssl.TLSVersion) -> None:
    context = certificate.client()
    with pytest.warns(DeprecationWarning, match="deprecated"):
        context.minimum_version = context.maximum_version = version
    context.set_ciphers("ALL:@SECLEVEL=0")
    async with serve(ScriptedGenerator(), tls=ServerTls(certificate.chain, certificate.key).context) as server:
        with pytest.raises((ssl.SSLError, ConnectionError)):
            await asyncio.open_connection("127.0.0.1", _port(server.url), ssl=context)
        refused = ("baton_gateway_connections_refused_total", {"reason": "handshake"})
        assert server.metrics.registry.get_sample_value(*refused) == 1, "it is the server that refuses"


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
async def test_a_certificate_that_is_renewed_is_shown_to_the_next(
    certificate: Certificate, version: ssl.TLSVersion
) -> None:
    time = StandingClock()
    reloads: list[bool] = []
    tls = ServerTls(certificate.chain, certificate.key, clock=time, reloaded=reloads.append)
    context = certificate.client()
    context.minimum_version = context.maximum_version = version
    async with serve(ScriptedGenerator(), tls=tls.context) as server:
        first = certificate.serial
        assert await _serial(_port(server.url), context) == first
        certificate.renew()
        assert await _serial(_port(server.url), context) == first, "looked at no more than once a second"
        time.now += 1
        assert await _serial(_port(server.url), context) == certificate.serial != first
        assert reloads == [True]


def test_files_that_cannot_be_opened_for_a_while_are_read_when_they_can(
    certificate: Certificate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing of the files changes when their reader has descriptors again."""
    time = StandingClock()
    reloads: list[bool] = []
    tls = ServerTls(certificate.chain, certificate.key, clock=time, reloaded=reloads.append)
    held = tls._files.current()
    certificate.renew()
    with monkeypatch.context() as scarce:
        scarce.setattr(ssl.SSLContext, "load_cert_chain", _no_descriptors)
        for _ in range(3):
            time.now += 1
            assert tls._files.current() is held
    assert reloads == [False]
    time.now += 1
    assert tls._files.current() is not held
    time.now += 1
    tls._files.current()
    assert reloads == [False, True]


def _no_descriptors(*_: object, **__: object) -> None:
    raise OSError(errno.EMFILE, "too many open files")


async def test_files_that_cannot_be_used_change_nothing(
    certificate: Certificate, caplog: pytest.LogCaptureFixture
) -> None:
    time = StandingClock()
    reloads: list[bool] = []
    tls = ServerTls(certificate.chain, certificate.key, clock=time, reloaded=reloads.append)
    async with serve(ScriptedGenerator(), tls=tls.context) as server:
        serial, key = certificate.serial, certificate.key.read_bytes()
        certificate.renew()
        renewed = certificate.key.read_bytes()
        certificate.key.write_bytes(key)
        time.now += 1
        assert await _serial(_port(server.url), certificate.client()) == serial, "a new certificate with the old key"
        assert reloads == [False]
        assert "stay as they were" in caplog.text
        certificate.key.write_bytes(renewed)
        time.now += 1
        assert await _serial(_port(server.url), certificate.client()) == certificate.serial
        certificate.chain.unlink()
        time.now += 1
        assert await _serial(_port(server.url), certificate.client()) == certificate.serial
        assert reloads == [False, True, False]


async def test_what_is_no_tls_is_cut_off_and_the_next_is_served(certificate: Certificate) -> None:
    tls = ServerTls(certificate.chain, certificate.key)
    async with serve(ScriptedGenerator(), tls=tls.context, bounds=ConnectionBounds(header_timeout_s=0.2)) as server:
        for sent in [b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n", b"\x16\x03\x01", b"", os.urandom(500)]:
            reader, writer = await asyncio.open_connection("127.0.0.1", _port(server.url))
            writer.write(sent)
            with contextlib.suppress(ConnectionResetError):
                assert b"HTTP/1.1" not in await asyncio.wait_for(reader.read(), 10)
            writer.close()
        registry = server.metrics.registry
        async with asyncio.timeout(10):
            while registry.get_sample_value("baton_gateway_connections_refused_total", {"reason": "handshake"}) != 4:
                await asyncio.sleep(0.01)
        assert registry.get_sample_value("baton_gateway_connections") == 0
        async with asyncio.timeout(30):
            while True:  # a busy machine may need longer than the time that a handshake has here
                with contextlib.suppress(OSError):
                    await _serial(_port(server.url), certificate.client())
                    break


async def test_handshakes_count_as_connections(certificate: Certificate) -> None:
    tls = ServerTls(certificate.chain, certificate.key)
    async with serve(ScriptedGenerator(), tls=tls.context, bounds=ConnectionBounds(max_connections=2)) as server:
        place = ("127.0.0.1", _port(server.url))
        silent = [socket.create_connection(place) for _ in range(2)]
        with pytest.raises((ssl.SSLError, ConnectionError)):
            await asyncio.open_connection(*place, ssl=certificate.client())
        for connection in silent:
            connection.close()
        async with asyncio.timeout(10):
            while server.metrics.registry.get_sample_value("baton_gateway_connections"):
                await asyncio.sleep(0.01)
        await _serial(place[1], certificate.client())


def test_what_the_operator_got_wrong(certificate: Certificate, tmp_path: Path) -> None:
    other = Certificate(tmp_path / "..").key
    missing, text, locked = tmp_path / "missing", tmp_path / "text", tmp_path / "locked"
    text.write_text("no PEM")
    key = load_pem_private_key(certificate.key.read_bytes(), None)
    locked.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"secret")))
    for chain, private, said in [
        (missing, certificate.key, "cannot read the TLS files.*missing"),
        (certificate.chain, missing, "cannot read the TLS files.*missing"),
        (tmp_path, certificate.key, "cannot read the TLS files"),
        (text, certificate.key, "no certificate and its unencrypted key"),
        (certificate.chain, text, "no certificate and its unencrypted key"),
        (certificate.chain, other, "no certificate and its unencrypted key"),
        (certificate.chain, locked, "no certificate and its unencrypted key"),
        (certificate.key, certificate.chain, "no certificate and its unencrypted key"),
    ]:
        with pytest.raises(OperatorError, match=said):
            ServerTls(chain, private)


@pytest.mark.parametrize("option", ["--tls-cert", "--tls-key"])
def test_one_without_the_other(option: str) -> None:
    with pytest.raises(OperatorError, match="go together"):
        load(GatewaySettings, "baton gateway", [option, "x.pem"])
