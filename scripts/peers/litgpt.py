"""litgpt's own generate and batched generate as an engine of the benchmarks; its batches need prompts of one length."""

import shutil
from pathlib import Path
from typing import Any

from .worker import Job, Laps, Settings


def prepare(settings: Settings) -> None:
    from litgpt.scripts.convert_hf_checkpoint import convert_hf_checkpoint

    partial = Path(settings.made).with_suffix(".partial")
    shutil.rmtree(partial, ignore_errors=True)
    shutil.copytree(settings.hf, partial)
    convert_hf_checkpoint(partial, model_name=settings.model, dtype=settings.dtype)
    partial.rename(settings.made)


class Engine:
    continuous, equal_lengths = False, True

    def __init__(self, settings: Settings, lap: Laps) -> None:
        import litgpt.generate.base as base
        import torch
        from litgpt import GPT, Config

        lap("import")
        torch.set_num_threads(settings.threads)
        self.torch, self.base, self.dtype = torch, base, getattr(torch, settings.dtype)
        made = Path(settings.made)
        with torch.device("meta"):
            self.model = GPT(Config.from_file(made / "model_config.yaml"))
        weights = torch.load(made / "lit_model.pth", weights_only=True)
        self.model.load_state_dict(weights, assign=True)
        self.model = self.model.to(self.dtype).eval()
        self.shape = (0, 0)
        lap("load")
        self.about = {"litgpt": _version(), "torch": torch.__version__, "threads": torch.get_num_threads()}

    def run(self, jobs: list[Job], slots: int, at_once: bool) -> tuple[list[list[int]], dict[str, Any]]:
        torch, T, new = self.torch, len(jobs[0].ids), max(job.new for job in jobs)
        self._open(len(jobs), T + new)
        idx = torch.tensor([job.ids for job in jobs])
        greedy = {"temperature": 0.0, "top_p": 0.0}
        if len(jobs) == 1:
            return [self.base.generate(self.model, idx[0], T + new, include_prompt=False, **greedy).tolist()], {}
        how = {"sample_args": greedy, "include_prompt": False, "include_eos": False}
        steps = list(self.base.batched_generate_fn(self.model, idx, T + new, **how))
        return [[int(token) for token in row] for row in zip(*steps, strict=True)], {}

    def _open(self, rows: int, columns: int) -> None:
        """A cache of this shape; the last one is kept if it has it."""
        if self.shape == (rows, columns):
            return
        model, cpu = self.model, self.torch.device("cpu")
        model.clear_kv_cache()
        model.max_seq_length = columns
        if model.cos.device.type == "meta":
            model.cos, model.sin = model.rope_cache(device=cpu)
        model.set_kv_cache(batch_size=rows, device=cpu, dtype=self.dtype)
        self.shape = (rows, columns)


def _version() -> str:
    from importlib.metadata import version

    return version("litgpt")


load = Engine
