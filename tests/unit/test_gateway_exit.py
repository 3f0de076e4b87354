"""The gateway's process ends once it has closed everything."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import asyncio, threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
import gateway.__main__ as program

threads = ThreadPoolExecutor(1)

async def serve(settings, folder, stop):
    begun = threading.Event()
    threads.submit(lambda: (begun.set(), threading.Event().wait()))
    begun.wait()
    print("closed")

program.serve, program.resolve_model = serve, lambda *arguments, **options: Path(".")
program.main()
"""


@pytest.mark.processes
def test_it_does_not_wait_for_a_thread_that_is_busy() -> None:
    """A thread cannot be interrupted while it tokenises a text of many megabytes."""
    command = [sys.executable, "-c", PROGRAM, "--model", "m", "--decode-workers", "localhost:1"]
    done = subprocess.run(command, timeout=60, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "closed\n"), done.stderr
