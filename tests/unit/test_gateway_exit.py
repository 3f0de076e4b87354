"""The gateway's process ends once it has closed everything, also after an error."""

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
    print("closed", flush=True)
    if settings.tenant_header == "x-fails":
        raise RuntimeError("a link has died of a bug")

program.serve, program.resolve_model = serve, lambda *arguments, **options: Path(".")
program.main()
"""


@pytest.mark.processes
@pytest.mark.parametrize("fails", [False, True])
def test_it_does_not_wait_for_a_thread_that_is_busy(fails: bool) -> None:
    """A thread cannot be interrupted while it tokenises a text of many megabytes."""
    command = [sys.executable, "-c", PROGRAM, "--model", "m", "--decode-workers", "localhost:1"]
    command += ["--tenant-header", "x-fails"] if fails else []
    done = subprocess.run(command, timeout=60, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (int(fails), "closed\n"), done.stderr
    assert ("RuntimeError: a link has died of a bug" in done.stderr) == fails
