"""llama.cpp, through llama-cpp-python's bindings, as an engine of the benchmarks: continuous batching by our own loop.

The checkpoint must be, or hold, a .gguf file, which is converted to the dtype. Options: ubatch, extra_buffers (1).
"""

import ctypes
import heapq
import os
from collections import deque
from pathlib import Path
from typing import Any

from .worker import Job, Laps, Settings

FILE_TYPES = {"float32": 0, "float16": 1, "bfloat16": 32}  # llama_ftype
F32, F16 = 0, 1  # ggml_type, of the cache


def prepare(settings: Settings) -> None:
    import llama_cpp as lib

    source = Path(settings.source)
    file = source if source.suffix == ".gguf" else next(source.glob("*.gguf"), None)
    if file is None:
        raise FileNotFoundError(f"{source} holds no .gguf file")
    params = lib.llama_model_quantize_default_params()
    params.ftype, params.allow_requantize = FILE_TYPES[settings.dtype], True
    partial = settings.made + ".partial"
    if lib.llama_model_quantize(str(file).encode(), partial.encode(), ctypes.byref(params)):
        raise RuntimeError(f"llama.cpp could not convert {file}")
    os.replace(partial, settings.made)


class Engine:
    continuous, equal_lengths = True, False

    def __init__(self, settings: Settings, lap: Laps) -> None:
        import llama_cpp as lib
        import numpy as np

        lap("import")
        self.lib, self.np, self.settings = lib, np, settings
        self.context, self.shape = None, (0, 0, 0)
        lib.llama_backend_init()
        params = lib.llama_model_default_params()
        params.use_extra_bufts = settings.options.get("extra_buffers") == "1"  # with them quantized weights crashed
        self.model = lib.llama_model_load_from_file(settings.made.encode(), params)
        if not self.model:
            raise ImportError(f"model {settings.made} that it could read")
        self.vocab_size = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(self.model))
        lap("load")
        self.about = {"llama_cpp_python": lib.__version__, "threads": settings.threads}
        self.about |= {
            "system": lib.llama_print_system_info().decode(),
            "cache": "f32" if settings.dtype == "float32" else "f16",
        }

    def run(self, jobs: list[Job], slots: int, at_once: bool) -> tuple[list[list[int]], dict[str, Any]]:
        slots, longest = min(slots, len(jobs)), max(len(job.ids) for job in jobs)
        columns = -(-max(len(job.ids) + job.new for job in jobs) // 256) * 256
        self._open(slots, columns, sum(len(job.ids) for job in jobs) if at_once else max(2048, longest + slots))
        tokens: list[list[int]] = [[] for _ in jobs]
        waiting, free, live = deque(range(len(jobs))), list(range(slots)), {}  # live: slot -> job
        while waiting or live:
            # in the order of their slots, else llama.cpp cuts the batch into single rows
            feed = [(tokens[i][-1], len(jobs[i].ids) + len(tokens[i]) - 1, s, True) for s, i in sorted(live.items())]
            while waiting and free and len(feed) + len(jobs[waiting[0]].ids) <= self.shape[2]:
                i, slot = waiting.popleft(), heapq.heappop(free)
                live[slot], ids = i, jobs[i].ids
                feed += [(token, at, slot, at == len(ids) - 1) for at, token in enumerate(ids)]
            for slot, token in self._decode(feed):
                tokens[live[slot]].append(token)
                if len(tokens[live[slot]]) == jobs[live[slot]].new:
                    del live[slot]
                    heapq.heappush(free, slot)
                    self.lib.llama_memory_seq_rm(self.memory, slot, -1, -1)
        return tokens, {}

    def _open(self, slots: int, columns: int, batch: int) -> None:
        """A context of this shape; the last one is kept if it fits."""
        lib, shape = self.lib, (slots, columns, batch)
        if self.shape == shape:
            lib.llama_memory_clear(self.memory, True)
            return
        if self.context:
            lib.llama_batch_free(self.batch)
            lib.llama_free(self.context)
        params = lib.llama_context_default_params()
        params.n_ctx, params.n_seq_max, params.n_batch = slots * columns, slots, batch
        params.n_ubatch = min(batch, int(self.settings.options.get("ubatch", 512)))
        params.n_threads = params.n_threads_batch = self.settings.threads
        params.type_k = params.type_v = F32 if self.settings.dtype == "float32" else F16
        params.no_perf = True
        self.context, self.shape = lib.llama_init_from_model(self.model, params), shape
        if not self.context:
            self.shape = (0, 0, 0)
            raise MemoryError(f"llama.cpp made no context of {slots} x {columns}")
        self.memory, self.batch = lib.llama_get_memory(self.context), lib.llama_batch_init(batch, 0, 1)

    def _decode(self, feed: list[tuple[int, int, int, bool]]) -> list[tuple[int, int]]:
        """Feeds (token, position, slot, whether its logits are wanted); returns (slot, best token) of those wanted."""
        lib, batch = self.lib, self.batch
        batch.n_tokens = len(feed)
        for i, (token, position, slot, wanted) in enumerate(feed):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = token, position, 1, wanted
            batch.seq_id[i][0] = slot
        if status := lib.llama_decode(self.context, batch):
            raise RuntimeError(f"llama_decode returned {status}")
        found = []
        for i, (_, _, slot, wanted) in enumerate(feed):
            if wanted:
                logits = lib.llama_get_logits_ith(self.context, i)
                found.append((slot, int(self.np.ctypeslib.as_array(logits, shape=(self.vocab_size,)).argmax())))
        return found


load = Engine
