"""lit_gen as an engine of the benchmarks.

Options: quantize (int8, int4), compile (1), speculate (guesses of a row), kernels (0: plain PyTorch, whose rows do not
have the same bits in every batch).
"""

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .worker import Job, Laps, Settings


def prepare(settings: Settings) -> None:
    """It reads the Hugging Face folder."""


class Engine:
    continuous, equal_lengths = True, False

    def __init__(self, settings: Settings, lap: Laps) -> None:
        os.environ["LIT_GEN_KERNELS"] = settings.options.get("kernels", "1")
        import torch

        from generate.base import generate, next_token
        from lit_gen.checkpoint import load_model
        from lit_gen.pack import pack_model
        from lit_gen.stats import Stats

        lap("import")
        torch.set_num_threads(settings.threads)
        self.torch, self.generate, self.next_token, self.Stats = torch, generate, next_token, Stats
        model = load_model(Path(settings.hf), getattr(torch, settings.dtype), torch.device("cpu"))
        lap("load")
        self.model, self.dtype = pack_model(model, settings.options.get("quantize")), settings.dtype
        if settings.options.get("compile") == "1":
            from lit_gen.compiled import compile_model

            compile_model(self.model)
        self.settings = {"speculate": int(settings.options.get("speculate", 0))}
        lap("pack")
        self.about = {"torch": torch.__version__, "threads": torch.get_num_threads()}
        self.about |= {"capability": torch.backends.cpu.get_cpu_capability(), "kernels": self.model.by_token}

    def run(self, jobs: list[Job], slots: int, at_once: bool) -> tuple[list[list[int]], dict[str, Any]]:
        from lit_gen.settings import Request

        stats, timeline = self.Stats(dtype=self.dtype), []
        add_step = stats.add_step

        def record(position: Sequence[int], *rest: Any) -> None:
            add_step(position, *rest)
            timeline.append((time.perf_counter(), len(position)))

        stats.add_step = record
        requests = [Request(job.ids, {"max_new_tokens": job.new}) for job in jobs]
        how = self.settings | ({"prefill_budget": sum(len(job.ids) for job in jobs)} if at_once else {})
        rows = sorted(
            self.generate(self.model, requests, max_batch_size=slots, stats=stats, **how), key=lambda row: row.index
        )
        attention = sum(stats.traffic.seen(range(len(job.ids))) for job in jobs) * stats.traffic.work.column
        extra = {"stats": stats.to_json(), "timeline": timeline, "prefill_flops": stats.prefill_flops + attention}
        return [row.tokens for row in rows], extra

    def step(self, rows: int, columns: int, repeats: int) -> list[float]:
        """Seconds of decode steps at the end of a cache of zeros: what it holds makes no difference to the time."""
        from lit_gen.cache import span_of

        torch, seconds = self.torch, []
        self.model.set_kv_cache(rows, columns)
        idx, input_pos = torch.full((rows, 1), 5), torch.full((rows, 1), columns - 1)
        span = span_of([columns - 1], columns)
        with torch.no_grad():
            for _ in range(repeats + 1):  # the first warms up
                start = time.perf_counter()
                self.next_token(self.model, idx, input_pos, span, lambda logits: logits.argmax(-1))
                seconds.append(time.perf_counter() - start)
        self.model.clear_kv_cache()
        return seconds[1:]


load = Engine
