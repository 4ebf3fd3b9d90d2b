"""transformers' `generate`, with left padding, as an engine of the benchmarks. Options: attn (sdpa)."""

from typing import Any

from .worker import Job, Laps, Settings


def prepare(settings: Settings) -> None:
    """It reads the Hugging Face folder."""


class Engine:
    continuous, equal_lengths = False, False

    def __init__(self, settings: Settings, lap: Laps) -> None:
        import torch
        import transformers

        lap("import")
        torch.set_num_threads(settings.threads)
        how = {"dtype": getattr(torch, settings.dtype), "attn_implementation": settings.options.get("attn", "sdpa")}
        self.model = transformers.AutoModelForCausalLM.from_pretrained(settings.hf, **how).eval()
        self.model.generation_config.eos_token_id = None
        self.torch = torch
        lap("load")
        self.about = {"transformers": transformers.__version__, "torch": torch.__version__}
        self.about |= {"threads": torch.get_num_threads(), "attention": self.model.config._attn_implementation}

    def run(self, jobs: list[Job], slots: int, at_once: bool) -> tuple[list[list[int]], dict[str, Any]]:
        torch, width = self.torch, max(len(job.ids) for job in jobs)
        idx = torch.tensor([[0] * (width - len(job.ids)) + job.ids for job in jobs])
        mask = torch.tensor([[0] * (width - len(job.ids)) + [1] * len(job.ids) for job in jobs])
        settings = {"max_new_tokens": max(job.new for job in jobs), "do_sample": False, "pad_token_id": 0}
        with torch.inference_mode():
            out = self.model.generate(idx, attention_mask=mask, **settings)
        return out[:, width:].tolist(), {}


load = Engine
