"""Keys for the control channel (ZeroMQ's CURVE): they encrypt it, and a peer without them gets no answer.

All processes of a deployment share one pair. A peer that does not know its public key cannot even start a handshake
with a worker, so the whole file is a secret.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import zmq

from common.contract.errors import OperatorError


@dataclass(frozen=True, slots=True)
class CurveKeys:
    """One pair of keys, encoded in Z85."""

    public: bytes
    secret: bytes

    @classmethod
    def load(cls, path: str | None) -> CurveKeys | None:
        """Read the file that `baton keys` has written; None if `path` is None. Raises `OperatorError`."""
        if path is None:
            return None
        try:
            stored = json.loads(Path(path).read_text())
            keys = cls(stored["public"].encode("ascii"), stored["secret"].encode("ascii"))
            belong_together = zmq.curve_public(keys.secret) == keys.public
        except OSError as error:
            raise OperatorError(f"cannot read the CURVE keys: {error}") from error
        except (ValueError, KeyError, TypeError, AttributeError, zmq.ZMQError) as error:
            what = type(error).__name__  # its text may hold the secret key
            raise OperatorError(f"{path} holds no pair of CURVE keys, as `baton keys` makes one: {what}") from None
        if not belong_together:
            raise OperatorError(f"{path} holds two CURVE keys that do not belong together")
        return keys

    def server(self, socket: zmq.Socket[Any]) -> None:
        """Make `socket` accept only clients that know the public key; call this before `bind`."""
        socket.curve_secretkey = self.secret
        socket.curve_publickey = self.public
        socket.curve_server = True

    def client(self, socket: zmq.Socket[Any]) -> None:
        """Make `socket` connect to a server with the same keys; call this before `connect`."""
        socket.curve_serverkey = self.public
        socket.curve_publickey = self.public
        socket.curve_secretkey = self.secret


def main() -> None:
    """`baton keys FILE`: write a new pair to a file that only its owner can read."""
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        print("usage: baton keys FILE", file=sys.stderr)
        sys.exit(0 if sys.argv[1:] in (["-h"], ["--help"]) else 2)
    public, secret = zmq.curve_keypair()
    try:
        file = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except OSError as error:
        print(f"error: cannot write {sys.argv[1]}: {error.strerror}", file=sys.stderr)
        sys.exit(2)
    with os.fdopen(file, "w") as stream:
        json.dump({"public": public.decode(), "secret": secret.decode()}, stream)
