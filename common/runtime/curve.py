"""Keys for the control channel: encrypted, and nobody without them gets an answer (ZeroMQ's CURVE).

All processes of a deployment share one pair. Whoever does not know its public key cannot even begin to talk to a
worker, so the file is a secret as a whole.
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
    """One pair, in Z85."""

    public: bytes
    secret: bytes

    @classmethod
    def load(cls, path: str | None) -> CurveKeys | None:
        """Read the file that `baton keys` has written, if there is one. Raises `OperatorError`."""
        if path is None:
            return None
        try:
            stored = json.loads(Path(path).read_text())
            keys = cls(stored["public"].encode("ascii"), stored["secret"].encode("ascii"))
            if zmq.curve_public(keys.secret) != keys.public:
                raise ValueError("the two keys do not belong together")
        except OSError as error:
            raise OperatorError(f"cannot read the CURVE keys: {error}") from error
        except (ValueError, KeyError, TypeError, AttributeError, zmq.ZMQError) as error:
            raise OperatorError(f"{path} holds no pair of CURVE keys, as `baton keys` makes one: {error!r}") from error
        return keys

    def server(self, socket: zmq.Socket[Any]) -> None:
        """Let only those in who know the public key; before `bind`."""
        socket.curve_secretkey = self.secret
        socket.curve_publickey = self.public
        socket.curve_server = True

    def client(self, socket: zmq.Socket[Any]) -> None:
        """Talk to such a server; before `connect`."""
        socket.curve_serverkey = self.public
        socket.curve_publickey = self.public
        socket.curve_secretkey = self.secret


def main() -> None:
    """`baton keys FILE`: write a new pair, readable by its owner alone."""
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
