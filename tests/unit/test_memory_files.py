"""Files in memory, also where Python was built for an old libc."""

from __future__ import annotations

import os

import pytest

from common.runtime.memory_files import memory_file


@pytest.fixture(autouse=True, params=["with memfd_create", "without"])
def python(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "without":
        monkeypatch.delattr(os, "memfd_create")


def test_a_file_is_made_written_and_read() -> None:
    file = memory_file("baton-test")
    try:
        assert os.readlink(f"/proc/self/fd/{file}") == "/memfd:baton-test (deleted)"
        assert not os.get_inheritable(file)
        os.ftruncate(file, 5)
        os.pwrite(file, b"ab", 1)
        assert os.pread(file, 9, 0) == b"\0ab\0\0"
    finally:
        os.close(file)


def test_what_the_system_refuses_is_told() -> None:
    with pytest.raises(OSError, match="Invalid argument"):
        memory_file("x" * 250)
