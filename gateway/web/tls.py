"""TLS for the API, with a certificate that may be replaced while the gateway runs."""

from __future__ import annotations

import logging
import ssl
import time
from collections.abc import Callable
from pathlib import Path

from common.contract.errors import OperatorError
from gateway.web.watched_files import WatchedFiles

_LOG = logging.getLogger(__name__)


class ServerTls:
    """The server's certificate and key. Changed files take effect at the next handshake; if they are invalid, the error
    is logged and the previous ones stay in use."""

    def __init__(
        self,
        certificate: Path,
        key: Path,
        *,
        clock: Callable[[], float] = time.monotonic,
        reloaded: Callable[[bool], None] = lambda good: None,
    ) -> None:
        """`certificate` contains the chain, the server's own certificate first. `reloaded` is called with the outcome
        of each attempt to read the files again. Raises `OperatorError`."""
        self._certificate = certificate
        self._key = key
        self._reloaded = reloaded
        self._files = WatchedFiles([certificate, key], clock)
        self._current = _load(certificate, key)
        self.context = _load(certificate, key)
        """The context to listen with."""
        self.context.sni_callback = self._choose

    def refresh(self, *, at_once: bool = False) -> None:
        """Read the files again if they have changed. `at_once` ignores the minimum interval between two checks."""
        if not self._files.changed(at_once=at_once):
            return
        try:
            self._current = _load(self._certificate, self._key)
        except OperatorError as error:
            _LOG.error("the TLS certificate stays as it was: %s", error)
            self._reloaded(False)
        else:
            _LOG.info("TLS certificate read from %s", self._certificate)
            self._reloaded(True)

    def _choose(self, connection: ssl.SSLObject, server_name: str | None, context: ssl.SSLContext) -> None:
        """Called in every handshake after the client's first message, whether or not it names a server."""
        self.refresh()
        connection.context = self._current


def _load(certificate: Path, key: Path) -> ssl.SSLContext:
    for path in (certificate, key):
        try:
            path.open("rb").close()
        except OSError as error:
            raise OperatorError(f"cannot read the TLS files: {error}") from error
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    try:
        context.load_cert_chain(certificate, key, password=_no_password)
    except (ssl.SSLError, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        raise OperatorError(f"{certificate} and {key} are no certificate and its unencrypted key: {reason}") from error
    return context


def _no_password() -> str:
    """Refuse to give a password. Without this, OpenSSL would ask for one on the terminal."""
    raise ValueError("the key is encrypted")
