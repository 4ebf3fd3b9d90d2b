"""Speed and memory of a run: what is counted, and what is made of it.

Only tokens that the user keeps count, and bytes count once per step, not once per token: a step reads the weights once,
however many rows share it.
"""

import sys
from dataclasses import asdict, dataclass
from typing import Any

import torch


@dataclass
class Stats:
    """Counters of one run; the caller measures seconds, after the device has finished (``torch.cuda.synchronize``).

    Attributes:
        model: name of the checkpoint.
        dtype: of the weights, such as "bfloat16".
        device: such as "cpu" or "cuda:0".
        load_seconds: time to load the model.
        prompt_tokens: tokens that were prefilled.
        prefill_seconds: time in prefills; they also choose the first token of each row.
        time_to_first_token: seconds from the start of generation to the first token of any row; None before that.
        rows: finished rows.
        new_tokens: tokens kept by finished rows: no stop, nothing after it.
        first_tokens: those of ``new_tokens`` that a prefill chose (one per row that keeps any).
        steps: decode steps.
        decode_seconds: time in decode steps.
        live_rows: running rows, summed over the decode steps.
        bytes_read: bytes that the decode steps had to read: per step the weights once (of an embedding table that is not also
            the head only the rows looked up) and the cache columns up to each row's position.
        cache_bytes: memory of the key/value cache.
        peak_memory: bytes, as ``peak_memory`` gives it.
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
    bytes_read: int = 0
    cache_bytes: int = 0
    peak_memory: int = 0

    def add_prefill(self, prompt_tokens: int, seconds: float) -> None:
        """Counts a prefill of one or more rows."""
        self.prompt_tokens += prompt_tokens
        self.prefill_seconds += seconds

    def add_step(self, live_rows: int, bytes_read: int, seconds: float) -> None:
        """Counts one decode step of ``live_rows`` running rows."""
        self.steps += 1
        self.live_rows += live_rows
        self.bytes_read += bytes_read
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
    def mean_occupancy(self) -> float:
        """Running rows per decode step."""
        return _rate(self.live_rows, self.steps)

    @property
    def gigabytes_per_second(self) -> float:
        """Bytes read per step times steps per second, in 10**9 bytes."""
        return _rate(self.bytes_read, self.decode_seconds) / 1e9

    def report(self) -> str:
        """A few lines for stderr."""
        first = "" if self.time_to_first_token is None else f", first token after {self.time_to_first_token:.2f} s"
        return "\n".join(
            [
                f"{self.model} ({self.dtype}, {self.device}), loaded in {self.load_seconds:.2f} s",
                f"prefill: {self.prompt_tokens} tokens in {self.prefill_seconds:.2f} s, "
                f"{self.prefill_tokens_per_second:.1f} tokens/s{first}",
                f"decode: {self.decode_tokens_per_second:.1f} kept tokens/s, {self.steps} steps in {self.decode_seconds:.2f} s "
                f"({self.steps_per_second:.2f}/s), {self.mean_occupancy:.1f} rows per step, {self.gigabytes_per_second:.1f} GB/s",
                f"{self.rows} rows, {self.new_tokens} new tokens kept; "
                f"cache {self.cache_bytes / 1e9:.2f} GB, peak memory {self.peak_memory / 1e9:.2f} GB",
            ]
        )

    def to_json(self) -> dict[str, Any]:
        """All counters and rates, by name."""
        rates = [name for name, value in vars(type(self)).items() if isinstance(value, property)]
        return asdict(self) | {name: getattr(self, name) for name in rates}


def _rate(amount: float, per: float) -> float:
    """``amount / per``; 0 where nothing was measured."""
    return amount / per if per > 0 else 0.0


def peak_memory(device: torch.device) -> int:
    """Most bytes in use so far: by this process on a CPU, by PyTorch's allocator on a GPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    import resource  # not on Windows

    unit = 1 if sys.platform == "darwin" else 1024  # getrusage counts bytes on macOS, KiB on Linux
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
