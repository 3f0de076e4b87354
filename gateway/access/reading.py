"""Whether the client of a connection reads what is sent to it.

A transport counts the bytes that wait in its own buffer. The kernel holds up to megabytes below it, and takes no more
before a third of that has been read; over TLS, what is written at once waits in a buffer that event loops do not show.
So the kernel is asked too: it knows what the client's machine has acknowledged, and whether anything waits for that.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Callable
from contextlib import suppress
from typing import Final

_LOOK_S: Final = 5.0
"""Seconds between two looks at a client that is to read. A client that has read all has as long to end TLS."""
_TLS_HIGH_BYTES: Final = 2**14
"""Bytes that wait above TCP when writing pauses. 64 KiB wait below then; the event loops' own number is 512 KiB."""
_TCP_INFO: Final = struct.Struct("=24xI92xQ16xI")
"""What is used of Linux's `struct tcp_info`: `tcpi_unacked` (segments), `tcpi_bytes_acked`, `tcpi_notsent_bytes`."""


class Reading:
    """The reading of one connection's client, who is cut off if it stalls or takes too long."""

    def __init__(
        self,
        transport: asyncio.Transport,
        *,
        stall_timeout_s: float,
        reading_timeout_s: float,
        refused: Callable[[str], None],
    ) -> None:
        """`refused` is called with the reason when the client is cut off: `stalled` or `slow_reader`."""
        self.transport = transport
        self._stall_timeout_s = stall_timeout_s
        self._reading_timeout_s = reading_timeout_s
        self._refused = refused
        self.is_over = False
        """Whether the connection is lost, or its client has been cut off."""
        self._seen = (0, 0)
        """Bytes that waited in the transport, and bytes acknowledged, at the last look that found a change."""
        self._seen_s = 0.0
        """When that was; the loop's time."""
        self._look_timer: asyncio.TimerHandle | None = None
        self._pause_timer: asyncio.TimerHandle | None = None
        if transport.get_extra_info("sslcontext") is not None:
            transport.set_write_buffer_limits(high=_TLS_HIGH_BYTES)

    @property
    def is_done(self) -> bool:
        """Whether all that was written has been read, as far as this machine knows."""
        return not self.transport.get_write_buffer_size() and not self._kernel()[1]

    def watch(self) -> None:
        """From now on, cut the client off when it has read nothing for the stall timeout.

        The number of bytes that wait can also grow: a handler writes up to 64 KiB more before it waits for the client.
        """
        if not self.is_over:
            self._note()
            self._look_later()

    def pause(self) -> None:
        """Writing pauses until the client has read most of what waits."""
        loop = asyncio.get_running_loop()
        self._pause_timer = loop.call_later(self._reading_timeout_s, self.cut_off, "slow_reader")
        self.watch()

    def resume(self) -> None:
        """Writing goes on. On a connection that is being closed, the rest has to be read as well."""
        if self._pause_timer is not None:
            self._pause_timer.cancel()
        if self._look_timer is not None and not self.transport.is_closing():
            self._look_timer.cancel()

    def cut_off(self, reason: str) -> None:
        """Abort the connection because of its client."""
        if not self.is_over:
            self.stop()
            self._refused(reason)
            self.transport.abort()

    def stop(self) -> None:
        """Stop watching: the connection is lost."""
        self.is_over = True
        for timer in (self._look_timer, self._pause_timer):
            if timer is not None:
                timer.cancel()

    def _look_later(self) -> None:
        if self._look_timer is not None:
            self._look_timer.cancel()
        delay_s = min(_LOOK_S, self._stall_timeout_s)
        self._look_timer = asyncio.get_running_loop().call_later(delay_s, self._look)

    def _look(self) -> None:
        is_done = self.is_done
        if self._progress() != self._seen:
            self._note()
        passed_s = asyncio.get_running_loop().time() - self._seen_s
        if passed_s < (_LOOK_S if is_done else self._stall_timeout_s):
            self._look_later()
        elif is_done:
            self.transport.abort()  # the client does not answer the end of TLS
        else:
            self.cut_off("stalled")

    def _note(self) -> None:
        self._seen, self._seen_s = self._progress(), asyncio.get_running_loop().time()

    def _progress(self) -> tuple[int, int]:
        return self.transport.get_write_buffer_size(), self._kernel()[0]

    def _kernel(self) -> tuple[int, int]:
        """The number of bytes that the client's machine has acknowledged, and a number that is 0 if these are all that
        the kernel was given. Zeros on a lost connection, and if the kernel does not count."""
        below = self.transport.get_extra_info("socket")
        if below is not None:
            with suppress(OSError):
                info = below.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
                num_in_flight, num_acknowledged, num_unsent = _TCP_INFO.unpack(info.ljust(_TCP_INFO.size, b"\0"))
                return num_acknowledged, num_in_flight + num_unsent
        return 0, 0
