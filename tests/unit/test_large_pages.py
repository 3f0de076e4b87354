"""How `malloc` is asked for large pages."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping

import pytest

from common.runtime.large_pages import with_large_pages

SHOWS = """
import os, sys
from common.runtime.large_pages import restart_with_large_pages
print("began", os.getpid(), flush=True)
restart_with_large_pages()
print("goes on", os.getpid(), sys.argv[1], os.environ["GLIBC_TUNABLES"])
"""


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({}, "glibc.malloc.hugetlb=1"),
        ({"GLIBC_TUNABLES": "glibc.malloc.arena_max=2"}, "glibc.malloc.arena_max=2:glibc.malloc.hugetlb=1"),
        ({"GLIBC_TUNABLES": "glibc.malloc.hugetlb=0"}, "glibc.malloc.hugetlb=0"),
    ],
)
def test_what_the_operator_says_stays(before: Mapping[str, str], after: str) -> None:
    assert with_large_pages({"A": "b", **before}) == {"A": "b", "GLIBC_TUNABLES": after}


def test_a_program_starts_again_once_with_its_arguments() -> None:
    done = subprocess.run([sys.executable, "-c", SHOWS, "it"], env={}, capture_output=True, text=True, check=True)
    first, second, third = done.stdout.splitlines()
    number = first.removeprefix("began ")
    assert second == first
    assert third == f"goes on {number} it glibc.malloc.hugetlb=1"
