"""The control channel: one ROUTER at each worker, one DEALER at each of its clients (gateways and peer workers).

ZeroMQ drops messages silently: at its high-water mark, for a peer that it cannot route to, and across a reconnect. So
both ends count the messages of a session. Every heartbeat carries the number of messages that the worker has sent in
this session, and its echo the number that the client has sent. Messages arrive in FIFO order, so a receiver that has
received fewer knows that messages were lost, and the client sends Hello again. At each Hello both sides list the
requests that they hold open, and each gives up the requests that the other does not list.
"""

from common.runtime.channel.client import ClientHandler, ControlClient, LinkState
from common.runtime.channel.ends import MAX_OUTBOX_MESSAGES, MAX_SOCKETS, RECONNECT_S, Traffic, channel_context
from common.runtime.channel.server import MAX_SESSIONS, ControlServer, ServerHandler

__all__ = [
    "MAX_OUTBOX_MESSAGES",
    "MAX_SESSIONS",
    "MAX_SOCKETS",
    "RECONNECT_S",
    "ClientHandler",
    "ControlClient",
    "ControlServer",
    "LinkState",
    "ServerHandler",
    "Traffic",
    "channel_context",
]
