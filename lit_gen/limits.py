"""What this machine can do at most, measured once and kept in the user's cache folder, and the work that a model is.

Whatever the program, a decode step cannot end before its bytes are read, nor before its products are formed. The share
of the limit is that least time over the time that was needed: the roofline model (Williams, Waterman, Patterson, 2009).
"""

import json
import math
import os
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lit_gen.config import Config
from lit_gen.layers import MoE
from lit_gen.linear import HugePages
from lit_gen.model import GPT

WORKING_SETS = (2**24, 2**26, 2**28, 2**30)  # bytes: caches serve the smaller ones, as they serve a small model
DTYPES = ("float32", "bfloat16")
SHAPES = ((2048, 2048, 2048), (512, 2048, 1024), (512, 1024, 2048))  # rows, inputs, outputs of a linear layer


@dataclass(frozen=True)
class Limits:
    """What so many threads of this machine reach.

    Attributes:
        threads: PyTorch's threads.
        read: bytes per second, by the bytes that are read again and again.
        flops: floating-point operations per second of matrix products, by dtype.
    """

    threads: int
    read: dict[int, float]
    flops: dict[str, float]

    def bandwidth(self, nbytes: float) -> float:
        """Bytes per second of the working set that is nearest to this one (as a ratio)."""
        return self.read[min(self.read, key=lambda size: abs(math.log(size / max(nbytes, 1))))]

    def peak(self, dtype: str) -> float:
        """Operations per second. 16-bit numbers can be multiplied in float32 too, which on older CPUs is faster."""
        return max(self.flops.get(dtype, 0.0), self.flops["float32"])

    def seconds(self, nbytes: float, flops: float, dtype: str) -> float:
        """The least time of a step that reads these bytes and does these operations."""
        return max(nbytes / self.bandwidth(nbytes), flops / self.peak(dtype))

    def describe(self) -> dict[str, Any]:
        """As printed: GB/s by MB read, and GFLOP/s."""
        return {
            "threads": self.threads,
            "read_gb_per_s": {f"{size >> 20} MB": round(rate / 1e9, 1) for size, rate in self.read.items()},
            "gflop_per_s": {dtype: round(rate / 1e9, 1) for dtype, rate in self.flops.items()},
        }


def measure_limits(threads: int) -> Limits:
    """Measures for a few seconds; PyTorch's number of threads is afterwards what it was."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        read = {size: _read_rate(size) for size in WORKING_SETS}
        flops = {name: max(_product_rate(getattr(torch, name), *shape) for shape in SHAPES) for name in DTYPES}
        return Limits(threads, read, flops)
    finally:
        torch.set_num_threads(before)


def _read_rate(nbytes: int) -> float:
    """Bytes per second of whichever reduction is fastest; in huge pages, as packed weights are."""
    a = HugePages(nbytes).copy(torch.ones(nbytes // 4))
    rows, x = a.view(-1, 4096), torch.ones(4096)
    repeats = max(5, min(50, 2**28 // nbytes))
    return nbytes / min(_best(run, repeats) for run in (a.sum, lambda: rows @ x, lambda: torch.dot(a, a)))


def _product_rate(dtype: torch.dtype, M: int, K: int, N: int) -> float:
    x, w = torch.ones(M, K, dtype=dtype), torch.ones(N, K, dtype=dtype)
    return 2 * M * K * N / _best(lambda: nn.functional.linear(x, w), 5)


def _best(run: Callable[[], object], repeats: int) -> float:
    """Seconds of the fastest of so many runs: a limit is what is possible, and everything else makes it slower."""
    times = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times[1:])


# ---- the file ----


def limits_file() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lit_gen" / "limits.json"


def save_limits(limits: Limits) -> None:
    """Keeps a measurement for this CPU, version of PyTorch and number of threads."""
    file = limits_file()
    file.parent.mkdir(parents=True, exist_ok=True)
    entry = {"read": {str(size): rate for size, rate in limits.read.items()}, "flops": limits.flops}
    text = json.dumps(_entries() | {_key(limits.threads): entry}, indent=2)
    partial = file.with_suffix(f".{os.getpid()}")  # another process may write too
    partial.write_text(text + "\n")
    partial.replace(file)


def cached_limits(threads: int) -> Limits | None:
    """The measurement of this machine, if there is one; a file that makes no sense is none."""
    entry = _entries().get(_key(threads))
    try:
        read = {int(size): float(rate) for size, rate in entry["read"].items()}
        flops = {dtype: float(entry["flops"][dtype]) for dtype in DTYPES}
    except (TypeError, KeyError, ValueError, AttributeError):
        return None
    numbers = [*read, *read.values(), *flops.values()]
    return Limits(threads, read, flops) if read and all(0 < x < math.inf for x in numbers) else None


def _entries() -> dict[str, Any]:
    try:
        entries = json.loads(limits_file().read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return entries if isinstance(entries, dict) else {}


def _key(threads: int) -> str:
    return f"{cpu_name()}, torch {torch.__version__}, {threads} threads"


def cpu_name() -> str:
    """The processor as its maker calls it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []  # not Linux
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, "") or platform.processor() or platform.machine()


# ---- the work of a model ----


@dataclass(frozen=True)
class Work:
    """Floating-point operations of a model, two for each product that is added.

    Attributes:
        token: of the linear layers of all blocks, for a token; of experts only the chosen ones.
        head: of the head, for a token whose logits are wanted.
        column: of attention, for each cache column that a token sees in a layer.
    """

    token: int
    head: int
    column: int

    @classmethod
    def of(cls, config: Config) -> "Work":
        with torch.device("meta"):
            model = GPT(config)
        weights = sum(m.weight.numel() for m in model.h.modules() if isinstance(m, nn.Linear))
        experts = sum(m.fc[0].numel() + m.proj[0].numel() for m in model.modules() if isinstance(m, MoE))
        token = 2 * (weights + experts * config.n_expert_per_token)
        return cls(token, 2 * model.lm_head.weight.numel(), 4 * config.n_head * config.head_size)
