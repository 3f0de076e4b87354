"""The control channel: one ROUTER at each worker, one DEALER at each of its clients (gateways and peer workers).

ZeroMQ drops silently: at its high-water mark, for a peer it cannot route to, across a reconnect. So a session counts.
Every heartbeat says how many messages the worker has sent in this session, its echo how many the client has; FIFO
order makes "fewer received" mean "lost", and the client says Hello again. At each Hello both sides name the requests
that they hold open, and each gives up what the other does not know.
"""

from common.runtime.channel.client import ClientHandler, ControlClient, LinkState
from common.runtime.channel.ends import MAX_OUTBOX_MESSAGES, RECONNECT_S, Traffic
from common.runtime.channel.server import MAX_SESSIONS, ControlServer, ServerHandler

__all__ = [
    "MAX_OUTBOX_MESSAGES",
    "MAX_SESSIONS",
    "RECONNECT_S",
    "ClientHandler",
    "ControlClient",
    "ControlServer",
    "LinkState",
    "ServerHandler",
    "Traffic",
]
