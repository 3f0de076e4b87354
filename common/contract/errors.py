"""The errors that cross a boundary: to operators (one line, then exit), to peers and clients (a cause in a message)."""

from __future__ import annotations

from enum import StrEnum


class BatonError(Exception):
    """Base of every error that Baton raises on purpose."""


class OperatorError(BatonError):
    """Something that the operator must change; a process in which it is raised at start prints it and exits with 2."""


class ModelNotSupportedError(OperatorError):
    """The checkpoint's architecture (named in the message) is not one that the engine implements."""


class FingerprintMismatchError(OperatorError):
    """Two processes do not serve the same model in the same KV layout; the message carries both values."""


class ProtocolError(BatonError):
    """A peer sent something that the protocol does not allow."""


class TransferError(BatonError):
    """A transport could not start, or could not finish moving blocks."""


class Cause(StrEnum):
    """Why a request ended without finishing. The value travels on the wire and labels metrics."""

    CANCELLED = "cancelled"
    """The client left, or the gateway withdrew the request."""
    INVALID = "invalid"
    """This model cannot run the request (for example, a token is beyond its vocabulary)."""
    CAPACITY = "capacity"
    """The worker's queue is full; another worker, or a later attempt, may succeed."""
    TOO_LARGE = "too_large"
    """The request can never fit into this worker's KV cache."""
    DEADLINE = "deadline"
    """The request's time budget ran out; the message names the state in which that happened."""
    DRAINING = "draining"
    """The worker accepts no new work."""
    WORKER_LOST = "worker_lost"
    """A worker that held the request died, restarted or fell silent."""
    LEASE_LOST = "lease_lost"
    """The source could not prove that the blocks that were read were valid, or has nothing (more) to offer; nothing was
    decoded from them."""
    TRANSFER = "transfer"
    """The blocks could not be moved."""
    FINGERPRINT = "fingerprint"
    """The two workers do not serve the same model in the same KV layout."""
    SUPERSEDED = "superseded"
    """A newer attempt at the same request arrived."""
    POISON = "poison"
    """Workers crashed while they held this request; the last one crashed while this request was on trial alone."""
    INTERNAL = "internal"
    """A bug or a failing machine; the worker's log has the details."""
