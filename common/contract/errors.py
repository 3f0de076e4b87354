"""The errors that cross a boundary: towards operators (one line, exit), peers and clients (a cause on the wire)."""

from __future__ import annotations

from enum import StrEnum


class BatonError(Exception):
    """Base of every error that Baton raises on purpose."""


class OperatorError(BatonError):
    """Something that the operator must change; a process that meets it at start prints the message and exits 2."""


class ModelNotSupportedError(OperatorError):
    """The checkpoint's architecture (named in the message) is not one that the engine implements."""


class FingerprintMismatchError(OperatorError):
    """Two processes do not serve the same model in the same KV layout; the message carries both values."""


class ProtocolError(BatonError):
    """A peer sent something that the protocol does not allow."""


class TransferError(BatonError):
    """A transport could not start, or finish, moving blocks."""


class Cause(StrEnum):
    """Why a request ended without finishing. The value travels on the wire and labels metrics."""

    CANCELLED = "cancelled"
    """The client left, or the gateway withdrew the request."""
    INVALID = "invalid"
    """The request is not one that this model can run (a token beyond its vocabulary, say)."""
    CAPACITY = "capacity"
    """The worker's queue is full; another worker, or a later moment, may do."""
    TOO_LARGE = "too_large"
    """The request can never fit into this worker's KV cache."""
    DEADLINE = "deadline"
    """The request's own budget ran out; the message names the state in which it did."""
    DRAINING = "draining"
    """The worker takes no new work."""
    WORKER_LOST = "worker_lost"
    """A worker that held the request died, restarted or fell silent."""
    LEASE_LOST = "lease_lost"
    """The source could not prove that what was read was valid; nothing was decoded from it."""
    TRANSFER = "transfer"
    """The blocks could not be moved."""
    FINGERPRINT = "fingerprint"
    """The two workers do not serve the same model in the same KV layout."""
    SUPERSEDED = "superseded"
    """A newer attempt at the same request arrived."""
    POISON = "poison"
    """Workers have crashed while they had this request, the last one while it was alone on trial."""
    INTERNAL = "internal"
    """A bug or a failing machine; the worker's log has the details."""
