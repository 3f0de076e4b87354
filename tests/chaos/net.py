"""Several hosts on this machine: a network namespace for each worker, on one bridge, whose wires a test can cut.

Needs root and iproute2. Everything is named after this process and removed at the end.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

_numbers = itertools.count()


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)


@dataclass(slots=True)
class Host:
    """One namespace."""

    name: str
    """Of the namespace; empty for the one that the tests run in."""
    address: str
    wire: str
    """The end of its cable that is plugged into the bridge."""
    gateway: str
    """Address of the host that the gateways are on: this process's."""
    cuts: list[tuple[str, ...]] = field(default_factory=list)
    """What mends what was cut."""

    def cut(self) -> None:
        """Nothing gets in or out, and nobody is told: the bridge drops what comes."""
        _run("bridge", "link", "set", "dev", self.wire, "state", "0")
        self.cuts.append(("bridge", "link", "set", "dev", self.wire, "state", "3"))

    def cut_out(self) -> None:
        """What it sends to the gateway is dropped; what the gateway sends arrives."""
        _run("ip", "-n", self.name, "route", "add", "blackhole", f"{self.gateway}/32")
        self.cuts.append(("ip", "-n", self.name, "route", "del", "blackhole", f"{self.gateway}/32"))

    def cut_in(self) -> None:
        """What the gateway sends to it is dropped; what it sends arrives."""
        _run("ip", "route", "add", "blackhole", f"{self.address}/32")
        self.cuts.append(("ip", "route", "del", "blackhole", f"{self.address}/32"))

    def cut_from(self, other: Host) -> None:
        """What it sends to another host is dropped; whatever else is sent arrives."""
        _run("ip", "-n", self.name, "route", "add", "blackhole", f"{other.address}/32")
        self.cuts.append(("ip", "-n", self.name, "route", "del", "blackhole", f"{other.address}/32"))

    def reaches(self, other: Host) -> bool:
        """Whether it has a route to another host."""
        asked = subprocess.run(("ip", "-n", self.name, "route", "get", other.address), capture_output=True, check=False)
        return asked.returncode == 0

    def reset(self, *which: str) -> int:
        """Every TCP connection of it breaks, or those that `ss` finds by `which`; new ones can be made. How many there
        were."""
        where = ("-N", self.name) if self.name else ()
        chosen = (*where, "state", "established", *which)
        listed = subprocess.run(["ss", "-Htn", *chosen], capture_output=True, text=True, check=True)
        subprocess.run(["ss", "-K", *chosen], capture_output=True, check=False)
        return len(listed.stdout.splitlines())

    def heal(self) -> None:
        """Mend everything."""
        while self.cuts:
            _run(*self.cuts.pop())


HERE = Host("", "127.0.0.1", "", "")
"""The host that the tests run on."""


@contextmanager
def hosts(number: int) -> Iterator[list[Host]]:
    """So many hosts, and this one, on one bridge."""
    # Another name and subnet each time: what was removed may not be gone yet.
    number_of_these = next(_numbers)
    tag = f"bt{os.getpid() % 100000}x{number_of_these}"
    subnet = f"10.{77 + os.getpid() % 100}.{(os.getpid() // 100 + number_of_these) % 250}"
    made = [Host(f"{tag}n{i}", f"{subnet}.{i + 1}", f"{tag}v{i}", f"{subnet}.254") for i in range(number)]
    try:
        _run("ip", "link", "add", tag, "type", "bridge")
        _run("ip", "address", "add", f"{subnet}.254/24", "dev", tag)
        _run("ip", "link", "set", tag, "up")
        for host in made:
            _run("ip", "netns", "add", host.name)
            _run("ip", "link", "add", host.wire, "type", "veth", "peer", "name", "eth0", "netns", host.name)
            _run("ip", "link", "set", host.wire, "master", tag, "up")
            _run("ip", "-n", host.name, "address", "add", f"{host.address}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                _run("ip", "-n", host.name, "link", "set", device, "up")
        yield made
    finally:
        for host in made:
            with contextlib.suppress(subprocess.CalledProcessError):
                host.heal()
            subprocess.run(["ip", "netns", "del", host.name], capture_output=True, check=False)
        subprocess.run(["ip", "link", "del", tag], capture_output=True, check=False)
