"""How many rows fit into memory, worked out before the model is loaded."""

from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from lit_gen.cache import SPAN
from lit_gen.config import Config
from lit_gen.model import GPT

SHARE = 0.8  # of the free memory; the rest is for activations
MOST_ROWS = {"cpu": 64, "cuda": 256}  # more hardly pay: the step is then bound by arithmetic, and the tail gets longer

# What a control group may use and does use: version 2, and version 1.
CONTAINER = [
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
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
    config: Config, dtype: torch.dtype, device: torch.device, longest: int, n_rows: int, max_batch_size: int | None
) -> Plan:
    """Plans a batch whose cache and weights fit into the memory that is free now.

    Args:
        longest: cache columns that a row may need.
        n_rows: rows that there are.
        max_batch_size: at most so many rows; None takes as many as fit, up to 64 on a CPU and 256 on a GPU.
    """
    columns = -(-longest // SPAN) * SPAN
    column_bytes = 2 * config.n_layer * config.n_query_groups * config.head_size * dtype.itemsize
    with torch.device("meta"):
        weights = sum(p.numel() for p in GPT(config).parameters()) * dtype.itemsize
    free = free_memory(device)
    fit = int((free - weights) * SHARE) // (columns * column_bytes)
    rows = max(1, min(fit, n_rows, max_batch_size or MOST_ROWS.get(device.type, 64)))
    return Plan(rows, columns, rows * columns * column_bytes, weights, free)


def free_memory(device: torch.device) -> int:
    """Bytes that this process could still take; on a CPU without swapping, and within the limit of its container."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    free = psutil.virtual_memory().available
    for limit, used in CONTAINER:
        try:
            room = int(Path(limit).read_text()) - int(Path(used).read_text())
        except (OSError, ValueError):  # no such control group, or no limit ("max")
            continue
        free = min(free, room)
    return max(free, 0)


def is_out_of_memory(error: RuntimeError) -> bool:
    """Whether PyTorch had no memory left, on whichever device."""
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)
