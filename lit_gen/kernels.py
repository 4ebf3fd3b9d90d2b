"""The C++ of `csrc/`, built once with this machine's compiler and called through ctypes.

It is optional: without a compiler everything runs in plain PyTorch, slower, and rows then have the same tokens in
float32 but not the same bits (see `invariance.py`). What it is for: a row's result depends on that row alone, and a
decode step consists of few large calls. It is for inference on a CPU; gradients do not flow through it.
"""

import ctypes
import functools
import hashlib
import os
import platform
import shlex
import shutil
import struct
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import torch
from torch import Tensor

CSRC = Path(__file__).parent / "csrc"
SOURCES = ("linear.cpp", "attention.cpp", "rowwise.cpp", "calls.cpp")
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
ACTS = {"silu": 0, "gelu_tanh": 1, "gelu": 2, "relu": 3}
FORMATS = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2, torch.uint8: 3}  # uint8: pairs of int4
CALL = ctypes.c_int64 * 25  # see csrc/calls.cpp
LINEAR, ATTEND, RMS_NORM, LAYER_NORM, ACTIVATE, ADD = range(6)
# Where a call says how many rows it has, and ATTEND how many columns the cache has.
N_ROWS, N_COLUMNS = {LINEAR: 3, ATTEND: 2, RMS_NORM: 3, LAYER_NORM: 3, ACTIVATE: 4, ADD: 4}, 6
KINDS = {"full": 0, "sliding": 1, "chunked": 2}


@functools.cache
def load_kernels() -> "Kernels | None":
    """The compiled kernels; None and a line on stderr where they cannot be built. LIT_GEN_KERNELS=0 leaves them out."""
    if os.environ.get("LIT_GEN_KERNELS", "1") == "0":
        return None
    try:
        return Kernels(ctypes.CDLL(str(_build())))
    except (OSError, RuntimeError) as error:  # RuntimeError: there is no home folder
        print(f"no C++ kernels, so plain PyTorch, which is slower: {str(error):.200}", file=sys.stderr)
        return None


def _build() -> Path:
    """Compiles csrc into the user's cache folder, unless this machine has done so before."""
    found = filter(None, map(shutil.which, ("g++", "clang++", "c++")))
    compiler = shlex.split(os.environ.get("CXX", "")) or list(found)[:1]
    if not compiler:
        raise OSError("no C++ compiler (g++ or clang++) is on the PATH")
    native = "-mcpu=native" if platform.machine() in ("aarch64", "arm64") else "-march=native"
    flags = ["-O3", native, "-fopenmp", "-ffp-contract=fast", "-std=c++17", "-shared", "-fPIC"]
    key = hashlib.sha256(" ".join([*compiler, *flags, _cpu()]).encode())
    for file in sorted(CSRC.iterdir()):
        key.update(file.read_bytes())
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lit_gen"
    library = folder / f"kernels-{key.hexdigest()[:16]}.so"
    if not library.exists():
        folder.mkdir(parents=True, exist_ok=True)
        print("compiling lit_gen/csrc, once for this machine (some seconds)", file=sys.stderr)
        with tempfile.TemporaryDirectory(dir=folder) as temporary:  # another process may be at it too
            made = Path(temporary) / library.name
            command = [*compiler, *flags, *(str(CSRC / name) for name in SOURCES), "-o", str(made)]
            done = subprocess.run(command, capture_output=True, text=True, errors="replace")
            if done.returncode:
                lines = done.stderr.splitlines() or [f"{compiler[0]} ended with status {done.returncode}"]
                raise OSError(next((line for line in lines if "error" in line), lines[0]))
            made.replace(library)
    return library


def _cpu() -> str:
    """What tells CPUs apart that need code of their own: a home folder may be shared by several machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.platform() + platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "") + platform.machine()


def as_integer(x: int | float | Tensor | None) -> int:
    """What csrc/calls.cpp takes for it: floats as their bits, tensors as addresses."""
    if type(x) is int:
        return x
    if x is None:
        return 0
    return _bits(x) if type(x) is float else x.data_ptr()


@functools.cache
def _bits(x: float) -> int:
    return int.from_bytes(struct.pack("<f", x), "little")


def _rows(x: Tensor) -> tuple[Tensor, int, int]:
    """x (..., C), how many rows lie one after the other, and the distance from one such group to the next.

    The queries of a token are such a group, which need not be copied out of q | k | v.
    """
    if not x.is_contiguous():
        shape, strides = x.squeeze(0).shape, x.squeeze(0).stride()
        if strides[-1] == 1 and (len(shape) == 2 or (len(shape) == 3 and strides[1] == shape[2])):
            return x, 1 if len(shape) == 2 else shape[1], strides[0]
        x = x.contiguous()
    return x, 1, x.size(-1)


class Kernels:
    """The functions of `csrc`, on tensors. Tensors are contiguous, on the CPU, and all of one dtype unless said."""

    def __init__(self, library: ctypes.CDLL) -> None:
        library.lit_run.argtypes, library.lit_run.restype = [ctypes.c_void_p, ctypes.c_int64], ctypes.c_int
        self._run, self.here = library.lit_run, threading.local()  # here.record: what is told of this thread's calls

    def run(self, calls: int, n: int) -> None:
        """Runs n calls, whose numbers lie at this address."""
        if self._run(calls, n):
            raise MemoryError("no memory for the intermediate results of a kernel")

    def _call(self, *what: int | float | Tensor | None) -> None:
        """One call. The caller holds the tensors: an address alone would not keep one."""
        if (record := getattr(self.here, "record", None)) is not None:
            record(what)
        self.run(CALL(*map(as_integer, what)), 1)

    def __reduce__(self) -> tuple:
        return load_kernels, ()  # a copy of a model, also in another process, calls the same library

    def linear(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        N: int,
        *,
        factor: Tensor | None = None,
        scales: Tensor | None = None,
    ) -> Tensor:
        """x (..., K) -> (..., N), with a weight of N columns that are padded to whole panels of 32.

        Args:
            weight: (panels, K, 32) float32 or int8, (panels, K, 16, 2) bfloat16, or (panels, K, 16) uint8, which is
                int4: column j in the low and 16 + j in the high half of a byte.
            bias: (N,) float32.
            factor: of int8: (N,) float32.
            scales: of int4: (panels, K / 32, 2, 16, 2) bfloat16, the factors and the least values (`pack.lay_out`).
        """
        if torch.compiler.is_compiling():
            return torch.ops.lit_gen.linear(x, weight, bias, N, factor, scales)
        x, K = x.contiguous(), x.size(-1)
        out = x.new_empty(*x.shape[:-1], N)
        what = (DTYPES[x.dtype], x, x.numel() // K, FORMATS[weight.dtype], weight, scales, factor, bias)
        self._call(LINEAR, *what, N, K, out)
        return out

    def rms_norm(self, x: Tensor, weight: Tensor | None, offset: float, eps: float) -> Tensor:
        """x (..., C), divided by its root mean square over C and times (weight + offset)."""
        if torch.compiler.is_compiling():
            return torch.ops.lit_gen.rms_norm(x, weight, offset, eps)
        x, heads, stride = _rows(x)
        out, C = torch.empty_like(x, memory_format=torch.contiguous_format), x.size(-1)
        self._call(RMS_NORM, DTYPES[x.dtype], x, x.numel() // C, C, heads, stride, weight, offset, eps, out)
        return out

    def layer_norm(self, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
        """x (..., C) less its mean and divided by its standard deviation over C, times weight and plus bias."""
        if torch.compiler.is_compiling():
            return torch.ops.lit_gen.layer_norm(x, weight, bias, eps)
        x, heads, stride = _rows(x)
        out, C = torch.empty_like(x, memory_format=torch.contiguous_format), x.size(-1)
        self._call(LAYER_NORM, DTYPES[x.dtype], x, x.numel() // C, C, heads, stride, weight, bias, eps, out)
        return out

    def activate(self, x: Tensor, act: str, gated: bool) -> Tensor:
        """act(x); or, if gated, x (..., 2 * size) = gate | up -> act(gate) * up (..., size)."""
        if torch.compiler.is_compiling():
            return torch.ops.lit_gen.activate(x, act, gated)
        x = x.contiguous()
        size = x.size(-1) // 2 if gated else x.size(-1)
        out = x.new_empty(*x.shape[:-1], size)
        rows = x.numel() // x.size(-1)
        self._call(ACTIVATE, DTYPES[x.dtype], ACTS[act], x, rows, size, int(gated), out)
        return out

    def add(self, x: Tensor, y: Tensor, scale: float) -> Tensor:
        """x + y * scale, (..., C) each."""
        if torch.compiler.is_compiling() or x.dtype is not y.dtype:  # they differ under autocast
            return x + y if scale == 1.0 else x + y * scale
        assert x.shape == y.shape, f"{x.shape} and {y.shape}"
        x, y = x.contiguous(), y.contiguous()
        out = torch.empty_like(x)
        self._call(ADD, DTYPES[x.dtype], x, y, x.numel() // x.size(-1), x.size(-1), scale, out)
        return out

    def attend(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        rope: tuple[Tensor, Tensor] | None,
        cache: tuple[Tensor, Tensor],
        row: Tensor,
        position: Tensor,
        *,
        scale: float,
        softcap: float | None = None,
        kind: str = "full",
        window: int | None = None,
    ) -> Tensor:
        """Rotates q and k, writes k and v to the cache, and attends: each of N tokens to its own row's columns.

        Args:
            q: (N, nh, hs), k and v (N, ng, hs); the elements of a token are contiguous. k and v may be None:
                then nothing is written, and each token sees what the cache holds.
            rope: cos and signed sin (`rope.signed_sin`), (N, n_elem) each; None: q and k are not rotated.
            cache: keys and values, (rows, ng, S, hs) each.
            row: (N,) int64 cache row of each token.
            position: (N,) int64 column of each token; -1 is padding, which writes nothing and gets zeros.

        Returns:
            (N, nh * hs).
        """
        if torch.compiler.is_compiling():
            cos, sin = rope or (None, None)
            return torch.ops.lit_gen.attend(q, k, v, cos, sin, *cache, row, position, scale, softcap, kind, window)
        (N, nh, hs), (cos, sin), (k_cache, v_cache), dtype = q.shape, rope or (q, q), cache, q.dtype
        for x in (k, v, cos, sin, k_cache, v_cache):  # what C++ takes for another dtype would run out of it
            assert x is None or x.dtype is dtype, f"one dtype is wanted, not {dtype} and {x.dtype}"
        n_elem, strides = cos.size(-1) if rope else 0, [0 if x is None else x.stride(0) for x in (q, k, v)]
        sizes = (N, nh, k_cache.size(1), hs, k_cache.size(2), n_elem, *strides, KINDS[kind], window or 1)
        out = q.new_empty(N, nh * hs)
        tensors = (row, position, q, k, v, cos, sin, k_cache, v_cache, out)
        self._call(ATTEND, DTYPES[dtype], *sizes, float(scale), float(softcap or 0.0), *tensors)
        return out
