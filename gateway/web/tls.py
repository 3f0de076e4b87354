"""TLS for the API, with a certificate that may be replaced while the gateway runs."""

from __future__ import annotations

import ssl
from collections.abc import Callable
from pathlib import Path

from common.contract.errors import OperatorError
from common.runtime.clock import Clock, monotonic
from gateway.web.watched_files import WatchedFiles


class ServerTls:
    """The server's certificate and key. Changed files take effect at the next handshake."""

    def __init__(
        self,
        certificate: Path,
        key: Path,
        *,
        clock: Clock = monotonic,
        reloaded: Callable[[bool], None] = lambda good: None,
    ) -> None:
        """`certificate` contains the chain, the server's own certificate first; the rest is as in `WatchedFiles`.
        Raises `OperatorError`."""
        files = [certificate, key]
        self._files = WatchedFiles("the TLS files", files, lambda: _load(*files), clock=clock, reloaded=reloaded)
        self.context = _load(certificate, key)
        """The context to listen with."""
        self.context.sni_callback = self._choose

    def _choose(self, connection: ssl.SSLObject, server_name: str | None, context: ssl.SSLContext) -> None:
        """Called in every handshake after the client's first message, whether or not it names a server."""
        connection.context = self._files.current()


def _load(certificate: Path, key: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    try:
        for path in (certificate, key):
            path.open("rb").close()  # OpenSSL does not say which one it lacks
        context.load_cert_chain(certificate, key, password=_no_password)
    except (ssl.SSLError, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        raise OperatorError(f"{certificate} and {key} are no certificate and its unencrypted key: {reason}") from error
    except OSError as error:
        raise OperatorError(f"cannot read the TLS files: {error}") from error
    return context


def _no_password() -> str:
    """Refuse to give a password. Without this, OpenSSL would ask for one on the terminal."""
    raise ValueError("the key is encrypted")
