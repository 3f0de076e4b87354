"""Kernels in C for CPUs: compiled once for each machine, kept in the user's cache, done without where they cannot be.

A machine needs a C compiler (`cc`) and about two seconds, the first time. Where there is none, or it fails, the engine
computes with torch alone and says so.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch

log = logging.getLogger(__name__)

_SOURCE = Path(__file__).with_name("kernels.c")
_FLAGS = ("-O2", "-march=native", "-ffp-contract=fast", "-fopenmp", "-shared", "-fPIC")
_COMPILE_TIMEOUT_S = 120.0
PANEL = 16
"""Outputs of a panel of packed weights."""


class Kernels:
    """The compiled functions. They release the interpreter's lock while they run."""

    def __init__(self, library: ctypes.CDLL) -> None:
        pointer, size, number = ctypes.c_void_p, ctypes.c_long, ctypes.c_int
        self._linear, self._decode = {}, {}
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            name = str(dtype).removeprefix("torch.")
            linear = self._linear[dtype] = getattr(library, f"baton_linear_{name}")
            linear.argtypes = [pointer, size, size, pointer, pointer, pointer, size, number]
            linear.restype = None
            decode = self._decode[dtype] = getattr(library, f"baton_decode_{name}")
            decode.argtypes = [pointer, pointer, size, pointer, size, pointer, *[size] * 6, ctypes.c_float]
            decode.argtypes += [pointer, number]
            decode.restype = number

    def linear(
        self, x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None, out_features: int
    ) -> torch.Tensor:
        """`x @ weight.T + bias`: `[rows, in]` of float32 to `[rows, out]` of float32, with a weight from `pack`.

        Products are exact and summed in float32, in the order of the input features, whatever the number of rows.
        """
        x = x.contiguous()
        rows, in_features = x.shape
        assert x.dtype == torch.float32, x.dtype
        assert packed.shape[1] == in_features, (packed.shape, x.shape)
        out = torch.empty(rows, out_features, dtype=torch.float32)
        self._linear[packed.dtype](
            x.data_ptr(),
            rows,
            in_features,
            packed.data_ptr(),
            None if bias is None else bias.data_ptr(),
            out.data_ptr(),
            out_features,
            torch.get_num_threads(),
        )
        return out

    def attend_decode(
        self,
        q_NHD: torch.Tensor,
        kv_layer: torch.Tensor,
        tables_NM: torch.Tensor,
        lens_N: torch.Tensor,
        window: int | None,
        scale: float,
    ) -> torch.Tensor:
        """Attention of N tokens, each the last of `lens_N` tokens of its sequence, to the blocks of `tables_NM`.

        `q_NHD` is float32 and so is what comes back; `kv_layer` is `[num_blocks, 2, K, block_size, D]`, a block
        contiguous, D a multiple of 8; tables and lengths are int64. A row's result depends on that row alone.
        """
        q_NHD = q_NHD.contiguous()
        _, _, num_kv_heads, block_size, head_dim = kv_layer.shape
        assert head_dim % 8 == 0, head_dim
        assert kv_layer[0].is_contiguous()
        assert (q_NHD.dtype, tables_NM.dtype, lens_N.dtype) == (torch.float32, torch.int64, torch.int64)
        assert tables_NM.stride(1) == 1
        out_NHD = torch.empty_like(q_NHD)
        failed = self._decode[kv_layer.dtype](
            q_NHD.data_ptr(),
            kv_layer.data_ptr(),
            kv_layer.stride(0) * kv_layer.element_size(),
            tables_NM.data_ptr(),
            tables_NM.stride(0),
            lens_N.data_ptr(),
            q_NHD.shape[0],
            num_kv_heads,
            q_NHD.shape[1] // num_kv_heads,
            block_size,
            head_dim,
            window or 0,
            scale,
            out_NHD.data_ptr(),
            torch.get_num_threads(),
        )
        if failed:
            raise MemoryError("no memory for attention scores")
        return out_NHD


def pack(weight: torch.Tensor) -> torch.Tensor:
    """A weight `[out, in]` as the kernels read it: `[panels, in, 16]`, in its own type, padded with zeros."""
    out_features, in_features = weight.shape
    panels = -(-out_features // PANEL)
    packed = torch.zeros(panels, in_features, PANEL, dtype=weight.dtype)
    full = out_features // PANEL
    packed[:full] = weight[: full * PANEL].view(full, PANEL, in_features).transpose(1, 2)
    if full < panels:
        packed[full, :, : out_features - full * PANEL] = weight[full * PANEL :].T
    return packed


@functools.cache
def kernels() -> Kernels | None:
    """The kernels, compiled if need be; None, and a line in the log, where that fails."""
    try:
        return _load()
    except (OSError, AttributeError, subprocess.SubprocessError) as error:
        detail = error.stderr[-500:] if isinstance(error, subprocess.CalledProcessError) else error
        log.warning("no C kernels, so that the CPU computes more slowly: %s", detail)
        return None


def _load() -> Kernels:
    """From the cache, or compiled into it. Without a cache: compiled for this process alone, and nothing is left."""
    compiler = shutil.which(os.environ.get("CC", "cc"))
    if compiler is None:
        raise OSError("there is no C compiler (cc)")
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True, timeout=10).stdout  # noqa: S603
    identity = hashlib.sha256(b"\0".join((_SOURCE.read_bytes(), " ".join(_FLAGS).encode(), version.encode(), _cpu())))
    cache = _cache_folder()
    library = cache / f"kernels-{identity.hexdigest()[:32]}.so" if cache is not None else None
    if library is not None and library.exists():
        return Kernels(ctypes.CDLL(str(library)))
    # Under a name of its own first: another process may be compiling, or loading, the same.
    with tempfile.TemporaryDirectory(prefix="baton-", dir=cache) as scratch:
        made = Path(scratch) / "kernels.so"
        command = [compiler, *_FLAGS, "-o", str(made), str(_SOURCE)]
        subprocess.run(command, capture_output=True, text=True, check=True, timeout=_COMPILE_TIMEOUT_S)  # noqa: S603
        kernels = Kernels(ctypes.CDLL(str(made)))
        if library is not None:
            made.replace(library)
        return kernels


def _cache_folder() -> Path | None:
    """Nobody else's to write to, as what is loaded from there is run; None where there is no such folder."""
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


def _cpu() -> bytes:
    """What the compiler's `native` depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_bytes().splitlines()
    except OSError:
        return b""
    return b"\n".join(sorted({line for line in lines if line.startswith((b"model name", b"flags", b"Features"))}))
