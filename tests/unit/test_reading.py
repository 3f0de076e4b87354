"""Clients that read, stall, or take too long, with a transport and a kernel that a test plays."""

from __future__ import annotations

import asyncio
import struct

import pytest
from test_connections import Time

from gateway.access.reading import Reading


class PlayedTransport(asyncio.Transport):
    """A transport, and its own socket."""

    def __init__(self, *, tls: bool) -> None:
        super().__init__({"sslcontext": object(), "socket": self} if tls else {})
        self.num_waiting = 0
        """Bytes in its buffer."""
        self.num_unsent = 0
        """Bytes in the kernel's."""
        self.num_in_flight = 0
        """Segments on their way to the client."""
        self.num_acknowledged = 0
        self.high: int | None = None
        self.num_aborted = 0

    def get_write_buffer_size(self) -> int:
        return self.num_waiting

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self.high = high

    def getsockopt(self, level: int, option: int, num_bytes: int) -> bytes:
        return struct.pack("=24xI92xQ16xI", self.num_in_flight, self.num_acknowledged, self.num_unsent)[:num_bytes]

    def is_closing(self) -> bool:
        return False

    def abort(self) -> None:
        self.num_aborted += 1


def reading_of(transport: PlayedTransport, refused: list[str], reading_timeout_s: float = 1800) -> Reading:
    return Reading(transport, stall_timeout_s=60, reading_timeout_s=reading_timeout_s, refused=refused.append)


@pytest.mark.parametrize("tls", [False, True], ids=["http", "https"])
async def test_who_reads_a_little_now_and_then_is_kept_and_who_stops_is_not(tls: bool) -> None:
    """Over TLS all of the answer is below the buffer that the transport counts, in sight of nobody but the kernel."""
    transport, refused = PlayedTransport(tls=tls), list[str]()
    reading = reading_of(transport, refused)
    transport.num_unsent, transport.num_waiting = (10**6, 0) if tls else (0, 10**6)
    with Time() as time:
        reading.watch()
        for _ in range(100):
            await time.advance(50)
            if tls:
                transport.num_acknowledged += 1
            else:
                transport.num_waiting -= 1
        assert refused == []
        assert not reading.is_done
        for _ in range(12):
            await time.advance(5.1)
        assert refused == []
        for _ in range(2):
            await time.advance(5.1)
    assert (refused, transport.num_aborted) == (["stalled"], 1)


async def test_who_has_read_all_and_does_not_end_tls_is_let_go_without_blame() -> None:
    transport, refused = PlayedTransport(tls=True), list[str]()
    reading = reading_of(transport, refused)
    transport.num_unsent, transport.num_in_flight = 100, 1
    with Time() as time:
        reading.watch()
        await time.advance(50)
        transport.num_unsent = 0
        assert not reading.is_done, "the last of it is on its way"
        transport.num_in_flight, transport.num_acknowledged = 0, 100
        assert reading.is_done
        await time.advance(5.1)
        assert transport.num_aborted == 0
        await time.advance(5.1)
    assert (refused, transport.num_aborted) == ([], 1)


async def test_a_pause_without_a_break_ends_and_each_other_one_has_its_own_time() -> None:
    transport, refused = PlayedTransport(tls=False), list[str]()
    reading = reading_of(transport, refused, reading_timeout_s=100)
    with Time() as time:
        for _ in range(3):
            transport.num_waiting = 10**5
            reading.pause()
            for _ in range(9):
                await time.advance(10)
                transport.num_waiting -= 1
            reading.resume()
        reading.pause()
        for _ in range(9):
            await time.advance(10)
            transport.num_waiting -= 1
        assert refused == []
        await time.advance(10.1)
    assert (refused, transport.num_aborted) == (["slow_reader"], 1)


async def test_who_is_cut_off_is_counted_once() -> None:
    """Timers that are due together run together."""
    transport, refused = PlayedTransport(tls=False), list[str]()
    reading = reading_of(transport, refused, reading_timeout_s=60)
    transport.num_waiting = 10**5
    with Time() as time:
        reading.pause()
        await time.advance(60.1)
        reading.cut_off("slow_reader")
        reading.watch()
        await time.advance(100)
    assert (len(refused), transport.num_aborted) == (1, 1)


@pytest.mark.parametrize("num_bytes", [0, 104])
async def test_a_kernel_that_does_not_count_is_as_one_that_was_not_asked(
    num_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    transport = PlayedTransport(tls=True)
    monkeypatch.setattr(transport, "getsockopt", lambda *_: bytes(num_bytes))
    reading = reading_of(transport, [])
    assert reading.is_done
    transport.num_waiting = 1
    assert not reading.is_done
    assert transport.high == 2**14
