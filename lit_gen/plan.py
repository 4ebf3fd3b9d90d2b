"""How many rows fit into memory, worked out before the model is loaded."""

import re
import sys
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
    device: torch.device,
    longest: int,
    n_rows: int,
    max_batch_size: int | None,
    format: Format | None = None,
) -> Plan:
    """Plans a batch whose cache and weights fit into the memory that is free now.

    Args:
        longest: cache columns that a row may need.
        n_rows: rows that there are.
        max_batch_size: at most so many rows; None takes as many as fit, up to 64 on a CPU and 256 on a GPU.
        format: what weights are quantised to.

    Raises:
        UserError: max_batch_size is no whole number >= 1.
    """
    if max_batch_size is not None:
        check_count("max_batch_size", max_batch_size)
    columns, n_groups = -(-longest // SPAN) * SPAN, max(config.n_query_groups, ranks_here())
    column_bytes = 2 * config.n_layer * n_groups * config.head_size * dtype.itemsize
    weights = _weight_bytes(config, dtype, device, format)
    free = free_memory(device)
    fit = int((free - weights) * SHARE) // (columns * column_bytes)
    if fit < 1:
        needed = (weights + columns * column_bytes) / 1e9
        print(f"a row of {columns} columns may not fit: it needs {needed:.1f} GB of {free / 1e9:.1f}", file=sys.stderr)
    rows = max(1, min(fit, n_rows, max_batch_size or MOST_ROWS.get(device.type, 64)))
    return Plan(rows, columns, rows * columns * column_bytes, weights, free)


def _weight_bytes(config: Config, dtype: torch.dtype, device: torch.device, format: Format | None) -> int:
    with torch.device("meta"):
        model = GPT(config).to(dtype)
        if format is not None:
            quantize_model(model, format, make=empty)
            return sum(tensor.nbytes for tensor in stored_tensors(model).values())
    packed_in_float32 = device.type == "cpu" and not multiplies(dtype)  # see linear.py and pack.py
    if dtype == torch.bfloat16 and load_kernels() is not None:
        packed_in_float32 = False
    n_weights, n_embedding = sum(p.numel() for p in model.parameters()), model.wte.weight.numel()
    if not packed_in_float32:
        return n_weights * dtype.itemsize
    # The embedding stays what it is; a head that was tied to it becomes a layer of its own.
    others = n_weights - (0 if config.tie_embeddings else n_embedding)
    return others * 4 + n_embedding * dtype.itemsize


def free_memory(device: torch.device) -> int:
    """Bytes that this process, and those that hold the model with it, could still take.

    On a CPU without swapping, and within the limit of its container.
    """
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0] * ranks_here()
    free = psutil.virtual_memory().available
    for files in CONTAINER:
        try:
            limit, used, stat = (Path(file).read_text() for file in files)
            cached = re.search(r"^(?:total_)?inactive_file (\d+)$", stat, re.MULTILINE)
            free = min(free, int(limit) - int(used) + int(cached[1] if cached else 0))
        except (OSError, ValueError):  # no such control group, or no limit ("max")
            continue
    return max(free, 0)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether there was no memory left, on whichever device and in whichever library."""
    texts = ("can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED")
    known = isinstance(error, torch.OutOfMemoryError | MemoryError)
    return known or (isinstance(error, RuntimeError) and any(text in str(error) for text in texts))
