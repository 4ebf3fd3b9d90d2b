"""OpenVINO GenAI's continuous batching as an engine of the benchmarks.

Needs openvino-genai, and optimum-intel to convert; 16-bit weights are fp16, which holds bfloat16 weights of usual size
exactly. Options: hint (f32, bf16, f16: what is multiplied), kv (f32, bf16, f16, u8: the cache), cache_gb, batch_tokens
(of a step).
"""

import shutil
import subprocess
import sys
from collections import deque
from pathlib import Path
from typing import Any

from .worker import Job, Laps, Settings

SHORT = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}


def prepare(settings: Settings) -> None:
    partial = Path(settings.made).with_suffix(".partial")
    shutil.rmtree(partial, ignore_errors=True)
    weights = "fp32" if settings.dtype == "float32" else "fp16"
    how = ["--task", "text-generation-with-past", "--weight-format", weights]
    export = [sys.executable, "-m", "optimum.commands.optimum_cli", "export", "openvino", "--model", settings.hf]
    if status := subprocess.run([*export, *how, str(partial)]).returncode:
        sys.exit(status)  # it has said why
    partial.rename(settings.made)


class Engine:
    continuous, equal_lengths = True, False

    def __init__(self, settings: Settings, lap: Laps) -> None:
        import numpy as np
        import openvino as ov
        import openvino_genai as og

        lap("import")
        options, self.np, self.ov, self.og = settings.options, np, ov, og
        scheduler = og.SchedulerConfig()
        scheduler.cache_size, scheduler.max_num_seqs = int(options.get("cache_gb", 4)), 256
        scheduler.max_num_batched_tokens = int(options.get("batch_tokens", 512))
        properties = {"INFERENCE_NUM_THREADS": settings.threads}
        capabilities = ov.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
        native = "FP16" if settings.dtype == "float16" else "BF16"
        computed = "float32" if native not in capabilities else settings.dtype
        properties["INFERENCE_PRECISION_HINT"] = options.get("hint", SHORT[computed])
        properties["KV_CACHE_PRECISION"] = options.get(
            "kv", SHORT[settings.dtype if computed == settings.dtype else "float16"]
        )
        self.pipe = og.ContinuousBatchingPipeline(settings.made, scheduler, "CPU", properties)
        lap("load")
        self.about = {"openvino": ov.__version__, "openvino_genai": og.__version__, "capabilities": capabilities}
        self.about |= {**properties, "batch_tokens": scheduler.max_num_batched_tokens}

    def run(self, jobs: list[Job], slots: int, at_once: bool) -> tuple[list[list[int]], dict[str, Any]]:
        prompts = [self.ov.Tensor(self.np.array([job.ids], dtype=self.np.int64)) for job in jobs]
        configs = [self._config(job.new) for job in jobs]
        if len(jobs) <= slots:
            return [list(result.m_generation_ids[0]) for result in self.pipe.generate(prompts, configs)], {}
        tokens: list[list[int]] = [[] for _ in jobs]  # its own limit of rows is fixed when it is loaded
        waiting, live = deque(range(len(jobs))), {}
        while waiting or live:
            while waiting and len(live) < slots:
                i = waiting.popleft()
                live[i] = self.pipe.add_request(i, prompts[i], configs[i])
            self.pipe.step()
            for i in [i for i, handle in live.items() if handle.get_status() != self.og.GenerationStatus.RUNNING]:
                tokens[i] = list(live.pop(i).read_all()[0].generated_ids)
        return tokens, {}

    def _config(self, new: int) -> Any:
        config = self.og.GenerationConfig()
        config.max_new_tokens = config.min_new_tokens = new
        config.ignore_eos, config.do_sample = True, False
        return config


load = Engine
