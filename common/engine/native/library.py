"""The library of the kernels in C: compiled once for each machine, and kept in the user's cache.

Compiling needs a C compiler (`cc`, or the command in `CC`), and takes some seconds.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import logging
import os
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

log = logging.getLogger(__name__)

_SOURCE = Path(__file__).with_name("kernels.c")
_HEADERS = ("crew.h", "pairs.h", "tiles.h", "gates.h", "paired_attention.h", "group.h", "layers.h")
_SOURCES = (_SOURCE, *(Path(__file__).with_name(name) for name in _HEADERS))
_FLAGS = (
    "-O2",
    "-ffp-contract=fast",
    "--param=avoid-fma-max-bits=0",
    "-fno-math-errno",
    "-pthread",
    "-shared",
    "-fPIC",
)
"""Every multiplication and addition is fused. Tuned for some CPUs, GCC would leave it out in some loops, and a number
would depend on the loop that computed it."""
_V3 = "avx2 fma f16c bmi1 bmi2 movbe abm"
_V4 = f"{_V3} avx512f avx512bw avx512cd avx512dq avx512vl"
_NARROWER = {
    **dict.fromkeys(("SSE41", "AVX"), ("ssse3 sse4_1 sse4_2 popcnt", "x86-64-v2")),
    **dict.fromkeys(("AVX2", "AVX2_VNNI", "AVX2_VNNI_2"), (_V3, "x86-64-v3")),
    **dict.fromkeys(("AVX512_CORE", "AVX512_CORE_VNNI"), (_V4, "x86-64-v4")),
    **dict.fromkeys(
        ("AVX512_CORE_BF16", "AVX512_CORE_FP16", "AVX10_1_512"), (f"{_V4} avx512_vnni avx512_bf16", "cooperlake")
    ),
}
"""Values of `ONEDNN_MAX_CPU_ISA` that allow no AMX → the CPU's flags without which they change nothing, since a virtual
machine may hide any of them, and GCC's name for a CPU with no other vector instructions than these."""
_COMPILE_TIMEOUT_S = 120.0


def load() -> ctypes.CDLL:
    """Load the library from the cache, or compile it into the cache. Without a cache, it is compiled for this process
    alone, and no file is left.

    Raises `OSError`, `ValueError` and `subprocess.SubprocessError`.
    """
    name, *options = shlex.split(os.environ.get("CC", "")) or ["cc"]
    compiler = shutil.which(name)
    if compiler is None:
        raise OSError(f"there is no C compiler ({name})")
    command = [compiler, *options, "--version"]
    version = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout  # noqa: S603
    sources = [each.read_bytes() for each in _SOURCES]
    flags = (*options, *_FLAGS, *_instructions())
    identity = hashlib.sha256(b"\0".join((*sources, " ".join(flags).encode(), version.encode(), _cpu())))
    cache = _cache_folder()
    library = cache / f"kernels-{identity.hexdigest()[:32]}.so" if cache is not None else None
    if library is not None and library.exists():
        with contextlib.suppress(OSError):  # a damaged library is compiled again
            return ctypes.CDLL(str(library))
    if library is not None:
        try:
            return _compile([compiler, *flags], library)
        except (OSError, subprocess.CalledProcessError) as error:
            log.info("no library can be made, or loaded, in %s: %s; it is compiled elsewhere", cache, error)
    return _compile([compiler, *flags], None)


def _compile(command: Sequence[str], library: Path | None) -> ctypes.CDLL:
    """Compile the library and load it; it is kept as `library`, if there is one."""
    folder = None if library is None else library.parent
    # Under a name of its own at first, because another process may be compiling, or loading, the same library.
    with tempfile.TemporaryDirectory(prefix="baton-", dir=folder) as scratch:
        made = Path(scratch) / "kernels.so"
        command = [*command, "-o", str(made), str(_SOURCE)]
        subprocess.run(command, capture_output=True, text=True, check=True, timeout=_COMPILE_TIMEOUT_S)  # noqa: S603
        loaded = ctypes.CDLL(str(made))
        if library is not None:
            with contextlib.suppress(OSError):  # the next process compiles them again
                made.replace(library)
        return loaded


def _cache_folder() -> Path | None:
    """The cache folder; None if there is none to which this user alone can write, because its libraries are
    executed."""
    try:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "baton"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
    except (OSError, RuntimeError) as error:  # RuntimeError: a user without a name and without HOME, as in a pod
        log.info("no cache folder: %s; the C kernels are compiled anew", error)
        return None
    if status.st_uid == os.getuid() and not status.st_mode & 0o022 and os.access(folder, os.W_OK):
        return folder
    log.info("%s is writable for others, or not for this user: the C kernels are compiled anew", folder)
    return None


def _instructions() -> tuple[str, ...]:
    """The compiler's flags for the instructions that the kernels may use: all that the CPU has or, as in oneDNN, none
    wider than `ONEDNN_MAX_CPU_ISA` names."""
    needed, narrower = _NARROWER.get(os.environ.get("ONEDNN_MAX_CPU_ISA", "").upper(), ("", ""))
    if needed and set(needed.split()) <= set(_cpu().decode(errors="replace").split()):
        return (f"-march={narrower}", "-mtune=native")
    return ("-march=native",)


def _cpu() -> bytes:
    """The properties of the CPU on which the compiler's `-march=native` depends."""
    try:
        lines = Path("/proc/cpuinfo").read_bytes().splitlines()
    except OSError:
        return b""
    return b"\n".join(sorted({line for line in lines if line.startswith((b"model name", b"flags", b"Features"))}))
