"""How many rows fit into memory, worked out before the model is loaded."""

import os
import re
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from lit_gen.cache import SPAN
from lit_gen.config import Config
from lit_gen.fabric import ranks_here
from lit_gen.kernels import load_kernels
from lit_gen.linear import multiplies
from lit_gen.model import GPT
from lit_gen.quantize import Format, empty, quantize_model, stored_tensors
from lit_gen.settings import check_count
from lit_gen.shard import processes_here
from lit_gen.spread import Spread

OUT_OF_MEMORY = "out of memory, even as the only row: free some, shorten the prompt or lower max_new_tokens"
SHARE = 0.8  # of the free memory; the rest is for activations
MOST_ROWS = {"cpu": 64, "cuda": 256}  # more hardly pay: the step is then bound by arithmetic, and the tail gets longer

# Control groups, version 2 and version 1: the limit, what is used, and what of that is file cache to be had back.
CONTAINER = [
    [f"/sys/fs/cgroup/memory.{name}" for name in ("max", "current", "stat")],
    [f"/sys/fs/cgroup/memory/memory.{name}" for name in ("limit_in_bytes", "usage_in_bytes", "stat")],
]


@dataclass(frozen=True)
class Plan:
    """Rows that run at a time, the cache columns of each, and the bytes that they take."""

    rows: int
    columns: int
    cache_bytes: int
    weight_bytes: int
    free_bytes: int

    def __str__(self) -> str:
        return (
            f"{self.rows} rows x {self.columns} columns, {self.cache_bytes / 1e9:.2f} GB cache beside "
            f"{self.weight_bytes / 1e9:.2f} GB of weights; {self.free_bytes / 1e9:.1f} GB are free"
        )


def plan_batch(
    config: Config,
    dtype: torch.dtype,
    device: torch.device | Sequence[torch.device],
    longest: int,
    n_rows: int,
    max_batch_size: int | None,
    format: Format | None = None,
    loaded: bool = False,
) -> Plan:
    """Plans a batch whose cache and weights fit into the memory that is free now.

    Args:
        device: of the model; several share its layers, and each has the caches of its own.
        longest: cache columns that a row may need.
        n_rows: rows that there are.
        max_batch_size: at most so many rows; None takes as many as fit, up to 64 on a CPU and 256 on a GPU.
        format: what weights are quantised to.
        loaded: the weights have their memory already.

    Raises:
        UserError: max_batch_size is no whole number >= 1.
    """
    if max_batch_size is not None:
        check_count("max_batch_size", max_batch_size)
    columns, n_groups = -(-longest // SPAN) * SPAN, max(config.n_query_groups, ranks_here())
    layer_bytes = columns * 2 * n_groups * config.head_size * dtype.itemsize  # of a row
    spread = Spread.of(config, [device] if isinstance(device, torch.device) else device)
    weights, caches, fits = _weight_bytes(config, dtype, spread, format), Counter(), []
    for place, count in zip(spread.devices, spread.counts, strict=True):
        caches[place] += count * layer_bytes
    free, to_load = {place: free_memory(place) for place in caches}, Counter() if loaded else weights
    for place, row in caches.items():
        fits.append(int((free[place] - to_load[place]) * SHARE) // row)
        if fits[-1] < 1:
            where = "" if len(caches) == 1 else f" on {place}"
            needed = f"{(to_load[place] + row) / 1e9:.1f} GB of {free[place] / 1e9:.1f}"
            print(f"a row of {columns} columns may not fit: it needs {needed}{where}", file=sys.stderr)
    most = max_batch_size or MOST_ROWS.get(spread.devices[0].type, 64)
    rows = max(1, min(*fits, n_rows, most))
    return Plan(rows, columns, rows * sum(caches.values()), sum(weights.values()), sum(free.values()))


def _weight_bytes(config: Config, dtype: torch.dtype, spread: Spread, format: Format | None) -> Counter[torch.device]:
    """Of the weights on each device."""
    with torch.device("meta"):
        model = GPT(config).to(dtype)
        if format is not None:
            quantize_model(model, format, make=empty)
    on_cpu = all(device.type == "cpu" for device in spread.devices)
    packed_in_float32 = on_cpu and format is None and not multiplies(dtype)  # see linear.py and pack.py
    if dtype == torch.bfloat16 and load_kernels() is not None:
        packed_in_float32 = False
    tensors, found = stored_tensors(model), Counter()
    if "lm_head.weight" not in tensors and (packed_in_float32 or spread.devices[0] != spread.devices[-1]):
        tensors["lm_head.weight"] = model.wte.weight  # a tied head becomes a layer of its own
    for name, tensor in tensors.items():
        in_float32 = packed_in_float32 and name != "wte.weight"
        found[spread.devices[spread.stage(name)]] += tensor.numel() * 4 if in_float32 else tensor.nbytes
    return found


def free_memory(device: torch.device) -> int:
    """Bytes that this process, and those that hold the model with it, could still take.

    On a CPU without swapping, and within the limit of its container. Other processes that were started together with it
    on this machine are taken to have models of their own, and to share what is free in equal parts.
    """
    processes, ranks = processes_here(os.environ), ranks_here()
    if device.type == "cuda":  # each has a GPU of its own, if there are enough
        return torch.cuda.mem_get_info(device)[0] * ranks // -(-processes // torch.cuda.device_count())
    free = psutil.virtual_memory().available
    for files in CONTAINER:
        try:
            limit, used, stat = (Path(file).read_text() for file in files)
            cached = re.search(r"^(?:total_)?inactive_file (\d+)$", stat, re.MULTILINE)
            free = min(free, int(limit) - int(used) + int(cached[1] if cached else 0))
        except (OSError, ValueError):  # no such control group, or no limit ("max")
            continue
    return max(free, 0) // max(1, processes // ranks)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether there was no memory left, on whichever device and in whichever library."""
    texts = ("can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED")
    known = isinstance(error, torch.OutOfMemoryError | MemoryError)
    return known or (isinstance(error, RuntimeError) and any(text in str(error) for text in texts))
