"""Speed and memory of a run: what is counted, and what is made of it.

Only tokens that the user keeps count, and bytes count once per step, not once per token: a step reads the weights once,
however many rows share it.
"""

import json
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from os import PathLike
from pathlib import Path
from typing import Any

import torch

from lit_gen.layers import MoE
from lit_gen.limits import Work, cached_limits
from lit_gen.model import GPT
from lit_gen.pack import weight_bytes


@dataclass
class Stats:
    """Counters of one run; the caller measures seconds, after the device has finished (`torch.cuda.synchronize`).

    Attributes:
        model: name of the checkpoint.
        dtype: of the weights, such as "bfloat16".
        device: such as "cpu" or "cuda:0".
        load_seconds: time to load the model.
        prompt_tokens: tokens that were prefilled.
        prefill_seconds: time in prefills; they also choose the first token of each row.
        time_to_first_token: seconds from when this was made to the first token of any row; None before that.
        rows: finished rows.
        new_tokens: tokens kept by finished rows: no stop, nothing after it.
        first_tokens: those of `new_tokens` that a prefill chose (one per row that keeps any).
        steps: decode steps.
        decode_seconds: time in decode steps.
        live_rows: running rows, summed over the decode steps.
        slots: rows that could have run, summed likewise.
        live_rows_before_tail, slots_before_tail: the same, of the steps during which more rows waited.
        bytes_read: bytes that the decode steps had to read: per step the weights once (of an embedding table that is
            not also the head only the rows looked up) and the cache columns up to each row's position.
        flops: floating-point operations of the decode steps.
        prefill_flops: those of the prefills, without attention, whose part grows with the prompts.
        cache_bytes: memory of the key/value cache.
        peak_memory: bytes, as `peak_memory` gives it.
    """

    model: str = ""
    dtype: str = ""
    device: str = "cpu"
    load_seconds: float = 0.0
    prompt_tokens: int = 0
    prefill_seconds: float = 0.0
    time_to_first_token: float | None = None
    rows: int = 0
    new_tokens: int = 0
    first_tokens: int = 0
    steps: int = 0
    decode_seconds: float = 0.0
    live_rows: int = 0
    slots: int = 0
    live_rows_before_tail: int = 0
    slots_before_tail: int = 0
    bytes_read: int = 0
    flops: int = 0
    prefill_flops: int = 0
    cache_bytes: int = 0
    peak_memory: int = 0
    started: float = field(default_factory=time.perf_counter, repr=False)
    traffic: "Traffic | None" = field(default=None, repr=False)

    def add_prefill(self, model: GPT, prompt_tokens: int, first_tokens: int, seconds: float) -> None:
        """Counts a prefill of (pieces of) prompts, which also chose so many first tokens; measures the cache."""
        if first_tokens and self.time_to_first_token is None:
            self.time_to_first_token = time.perf_counter() - self.started
        self.cache_bytes = max(self.cache_bytes, model.cache_bytes)
        if self.traffic is None:
            self.traffic = Traffic(model)
        self.prompt_tokens += prompt_tokens
        self.prefill_flops += prompt_tokens * self.traffic.work.token + first_tokens * self.traffic.work.head
        self.prefill_seconds += seconds

    def add_step(self, position: Sequence[int], seconds: float, slots: int, more: bool) -> None:
        """Counts a decode step of rows at these positions, (B,), of `slots` that could have run; `more` rows waited."""
        self.steps += 1
        self.live_rows += len(position)
        self.slots += slots
        if more:
            self.live_rows_before_tail += len(position)
            self.slots_before_tail += slots
        self.bytes_read += self.traffic.step(position)
        self.flops += self.traffic.flops(position)
        self.decode_seconds += seconds

    def add_row(self, kept_tokens: int) -> None:
        """Counts a finished row."""
        self.rows += 1
        self.new_tokens += kept_tokens
        self.first_tokens += kept_tokens > 0

    @property
    def prefill_tokens_per_second(self) -> float:
        """Prompt tokens per second of prefill."""
        return _rate(self.prompt_tokens, self.prefill_seconds)

    @property
    def decode_tokens_per_second(self) -> float:
        """Kept tokens that decode steps chose, per second of decoding: a row's first token is the prefill's."""
        return _rate(self.new_tokens - self.first_tokens, self.decode_seconds)

    @property
    def steps_per_second(self) -> float:
        """Decode steps per second."""
        return _rate(self.steps, self.decode_seconds)

    @property
    def mean_rows(self) -> float:
        """Running rows per decode step."""
        return _rate(self.live_rows, self.steps)

    @property
    def occupancy(self) -> float:
        """Part of the rows that could have run which did."""
        return _rate(self.live_rows, self.slots)

    @property
    def occupancy_before_tail(self) -> float:
        """The same, as long as more rows waited."""
        return _rate(self.live_rows_before_tail, self.slots_before_tail)

    @property
    def gigabytes_per_second(self) -> float:
        """Bytes read per step times steps per second, in 10**9 bytes."""
        return _rate(self.bytes_read, self.decode_seconds) / 1e9

    @property
    def decode_share(self) -> float | None:
        """The least time that this machine needs for the decode steps, over that of this run; None if not measured."""
        limits = None if self.device != "cpu" else cached_limits(torch.get_num_threads())
        if limits is None or not self.steps:
            return None
        least = limits.seconds(self.bytes_read / self.steps, self.flops / self.steps, self._dtype)
        return _rate(least, self.decode_seconds / self.steps)

    @property
    def prefill_share(self) -> float | None:
        """The same for the products of the prefills."""
        limits = None if self.device != "cpu" else cached_limits(torch.get_num_threads())
        return None if limits is None else _rate(self.prefill_flops / limits.peak(self._dtype), self.prefill_seconds)

    @property
    def _dtype(self) -> str:
        return self.dtype.removeprefix("torch.")

    def report(self) -> str:
        """A few lines for stderr; shares are of what `scripts/benchmark.py --limits true` measured on this machine."""
        first = "" if self.time_to_first_token is None else f", first token after {self.time_to_first_token:.2f} s"
        return (
            f"{self.model} ({self.dtype}, {self.device}), loaded in {self.load_seconds:.2f} s\n"
            f"prefill: {self.prompt_tokens} tokens in {self.prefill_seconds:.2f} s, "
            f"{self.prefill_tokens_per_second:.1f} tokens/s{_percent(self.prefill_share)}{first}\n"
            f"decode: {self.decode_tokens_per_second:.1f} kept tokens/s, {self.steps} steps in "
            f"{self.decode_seconds:.2f} s ({self.steps_per_second:.2f}/s), {self.mean_rows:.1f} rows per step "
            f"({self.occupancy:.0%} of those that could run), {self.gigabytes_per_second:.1f} GB/s"
            f"{_percent(self.decode_share)}\n"
            f"{self.rows} rows, {self.new_tokens} new tokens kept; "
            f"cache {self.cache_bytes / 1e9:.2f} GB, peak memory {self.peak_memory / 1e9:.2f} GB"
        )

    def to_json(self) -> dict[str, Any]:
        """All counters and rates, by name."""
        rates = [name for name, value in vars(Stats).items() if isinstance(value, property) and name[0] != "_"]
        counters = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("started", "traffic")}
        return counters | {name: getattr(self, name) for name in rates}

    def publish(self, devices: Sequence[torch.device], file: PathLike | None) -> None:
        """Reports to stderr, and to a JSON file if one is named."""
        self.peak_memory = sum(peak_memory(device) for device in set(devices))
        print(self.report(), file=sys.stderr)
        if file is not None:
            Path(file).write_text(json.dumps(self.to_json(), indent=2) + "\n")


class Traffic:
    """How many bytes a decode step of a model has to read, and its operations; the model's caches must be set up.

    The weights count once, whatever the number of rows: of an embedding that is not also the head only the rows looked
    up, and of a mixture of experts no more experts than all rows together can choose.
    """

    def __init__(self, model: GPT) -> None:
        config = model.config
        self.weights = weight_bytes(model)
        if model.lm_head.weight is not model.wte.weight:
            self.weights -= model.wte.weight.nbytes
        self.expert = sum(m.fc[0].nbytes + m.proj[0].nbytes for m in model.modules() if isinstance(m, MoE))  # one each
        self.n_expert, self.n_chosen = config.n_expert, config.n_expert_per_token
        caches = [block.attn.kv_cache for block in model.h]
        sizes = [2 * c.k.size(1) * c.k.size(3) * c.k.element_size() for c in caches if c is not None]
        self.layers, self.window = Counter(config.layer_types), config.window  # kind -> layers of it
        self.column_bytes = max(sizes)  # of one layer; they are alike
        self.work = Work.of(config)

    def step(self, position: Sequence[int]) -> int:
        """Bytes of a step whose rows stand at these positions: weights, and the cache columns that each row sees."""
        idle = max(0, self.n_expert - self.n_chosen * len(position)) * self.expert
        return self.weights - idle + self.seen(position) * self.column_bytes

    def flops(self, position: Sequence[int]) -> int:
        """Floating-point operations of that step."""
        return len(position) * (self.work.token + self.work.head) + self.seen(position) * self.work.column

    def seen(self, position: Sequence[int]) -> int:
        """Cache columns that tokens at these positions see, summed over the layers."""
        seen = 0
        for kind, n_layer in self.layers.items():
            if kind == "full":
                seen += n_layer * sum(p + 1 for p in position)
            elif kind == "sliding":
                seen += n_layer * sum(min(p + 1, self.window) for p in position)
            else:
                seen += n_layer * sum(p % self.window + 1 for p in position)
        return seen


def _rate(amount: float, per: float) -> float:
    """`amount / per`; 0 where nothing was measured."""
    return amount / per if per > 0 else 0.0


def _percent(share: float | None) -> str:
    return "" if share is None else f" ({share:.0%} of this machine's limit)"


def peak_memory(device: torch.device) -> int:
    """Most bytes in use so far: by this process on a CPU, by PyTorch's allocator on a GPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    import resource  # not on Windows

    unit = 1 if sys.platform == "darwin" else 1024  # getrusage counts bytes on macOS, KiB on Linux
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
