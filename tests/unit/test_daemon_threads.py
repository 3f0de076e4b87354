"""Work that cannot be stopped holds up neither the end of the process nor what was cancelled behind it."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest

from common.runtime.daemon_threads import DaemonThreads


@pytest.mark.processes
def test_a_process_that_ends_does_not_wait_for_daemon_threads() -> None:
    program = """
import threading
from common.runtime.daemon_threads import DaemonThreads
threads = DaemonThreads(2, "t")
assert threads.submit(lambda: 6 * 7).result() == 42
begun = threading.Event()
for _ in range(3):
    threads.submit(lambda: (begun.set(), threading.Event().wait()))
begun.wait()
"""
    done = subprocess.run([sys.executable, "-c", program], timeout=60, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_thread_that_cannot_start_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """There may be no memory for its stack now. With another thread the work is done all the same."""

    def fails(thread: threading.Thread) -> None:
        raise RuntimeError("can't start")

    threads = DaemonThreads(2, "t", 2**20)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", fails)
        with pytest.raises(RuntimeError, match="can't start"):
            threads.submit(lambda: pytest.fail("its submitter was told that it failed"))
    assert threads.submit(lambda: 42).result(60) == 42
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", fails)
        assert threads.submit(lambda: 43).result(60) == 43
    assert threading.stack_size() == 0, "other threads have the usual stack"
    threads.close()


def test_daemon_threads_pass_errors_on_and_leave_out_what_was_cancelled() -> None:
    threads, go = DaemonThreads(1, "t"), threading.Event()
    held = threads.submit(go.wait)
    left_out = threads.submit(lambda: pytest.fail("it was cancelled"))
    broken = threads.submit(lambda: 1 // 0)
    assert left_out.cancel()
    go.set()
    with pytest.raises(ZeroDivisionError):
        broken.result(60)
    assert held.result(60)
