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
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from torch import Tensor

CSRC = Path(__file__).parent / "csrc"
SOURCES = ("linear.cpp", "attention.cpp", "rowwise.cpp")
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
ACTS = {"silu": 0, "gelu_tanh": 1, "gelu": 2, "relu": 3}
FORMATS = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2, torch.uint8: 3}  # uint8: pairs of int4
SIZES = ctypes.c_int64 * 11  # what `lit_attend` of csrc/attention.cpp calls `sizes`
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


def _check_memory(failed: int, *_: object) -> None:
    if failed:
        raise MemoryError("no memory for the intermediate results of a kernel")


class Kernels:
    """The functions of `csrc`, on tensors. Tensors are contiguous, on the CPU, and all of one dtype unless said."""

    def __init__(self, library: ctypes.CDLL) -> None:
        pointer, integer, number, code = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float, ctypes.c_int
        self._linear, self._attend = library.lit_linear, library.lit_attend
        self._rms_norm, self._activate = library.lit_rms_norm, library.lit_activate
        self._linear.argtypes = [code, pointer, integer, code, *[pointer] * 4, integer, integer, pointer]
        self._attend.argtypes = [code, pointer, number, number, *[pointer] * 10]
        self._rms_norm.argtypes = [code, pointer, integer, integer, pointer, number, number, pointer]
        self._activate.argtypes = [code, code, pointer, integer, integer, code, pointer]
        for function in (self._rms_norm, self._activate):
            function.restype = None
        for function in (self._linear, self._attend):
            function.restype, function.errcheck = code, _check_memory

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
        # The names of the tensors stay bound: the caller may hold no other reference.
        more = [None if t is None else t.data_ptr() for t in (scales, factor, bias)]
        what = (DTYPES[x.dtype], x.data_ptr(), x.numel() // K, FORMATS[weight.dtype], weight.data_ptr())
        self._linear(*what, *more, N, K, out.data_ptr())
        return out

    def rms_norm(self, x: Tensor, weight: Tensor | None, offset: float, eps: float) -> Tensor:
        """x (..., C), divided by its root mean square over C and times (weight + offset)."""
        if torch.compiler.is_compiling():
            return torch.ops.lit_gen.rms_norm(x, weight, offset, eps)
        x, C = x.contiguous(), x.size(-1)
        out, w = torch.empty_like(x), None if weight is None else weight.data_ptr()
        self._rms_norm(DTYPES[x.dtype], x.data_ptr(), x.numel() // C, C, w, offset, eps, out.data_ptr())
        return out

    def activate(self, x: Tensor, act: str, gated: bool) -> Tensor:
        """act(x); or, if gated, x (..., 2 * size) = gate | up -> act(gate) * up (..., size)."""
        if torch.compiler.is_compiling():
            return torch.ops.lit_gen.activate(x, act, gated)
        x = x.contiguous()
        size = x.size(-1) // 2 if gated else x.size(-1)
        out = x.new_empty(*x.shape[:-1], size)
        rows = x.numel() // x.size(-1)
        self._activate(DTYPES[x.dtype], ACTS[act], x.data_ptr(), rows, size, gated, out.data_ptr())
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
        sizes = SIZES(N, nh, k_cache.size(1), hs, k_cache.size(2), n_elem, *strides, KINDS[kind], window or 1)
        out = q.new_empty(N, nh * hs)
        tensors = (row, position, q, k, v, cos, sin, k_cache, v_cache, out)
        self._attend(
            DTYPES[dtype], sizes, scale, softcap or 0.0, *[None if x is None else x.data_ptr() for x in tensors]
        )
        return out
