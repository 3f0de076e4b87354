"""Large pages for what `malloc` gives, where the system gives none unasked: activations are there, and a core looks up
fewer pages. glibc (2.35 and later) is asked by a variable that it reads when a program starts."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

_TUNABLE = "glibc.malloc.hugetlb"


def with_large_pages(environ: Mapping[str, str]) -> dict[str, str]:
    """These variables, by which `malloc` asks for large pages unless they already say whether it does."""
    tunables = environ.get("GLIBC_TUNABLES", "")
    if _TUNABLE in tunables:
        return dict(environ)
    return {**environ, "GLIBC_TUNABLES": f"{tunables}:{_TUNABLE}=1".removeprefix(":")}


def restart_with_large_pages() -> None:
    """Start this program again, in this process, with the variables of `with_large_pages`, unless it has them."""
    environment = with_large_pages(os.environ)
    if sys.platform == "linux" and environment != dict(os.environ):
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment)  # noqa: S606 (it is this program)
