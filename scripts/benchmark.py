"""Measures generation against transformers: same weights, same prompts, one process, runs in turn, medians, ratios.

    python scripts/benchmark.py --precision '["float32", "bfloat16"]' --batch '[1, 8, 64]'
    python scripts/benchmark.py --limits true

Absolute figures of a shared machine are noise; the ratios of runs that alternate are not. Prefill is the time until
every row has its first token, decoding the time from there on. Neither engine stops at an end token.
"""

import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal, NamedTuple

if __name__ == "__main__":  # from a bare clone, and from any folder
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    # Before torch starts: unbound, threads at times share a core, and each parallel region then takes milliseconds.
    os.environ.setdefault("OMP_PROC_BIND", "true")
    os.environ.setdefault("OMP_PLACES", "cores")

import torch
from tqdm import tqdm

from generate.base import generate
from lit_gen.checkpoint import load_model
from lit_gen.download import fetch_default_model
from lit_gen.export import save_hf
from lit_gen.linear import pack_linears
from lit_gen.stats import Stats
from lit_gen.utils import UserError, run_cli

CPU = torch.device("cpu")


class Run(NamedTuple):
    tokens: list[list[int]]
    prefill: float  # seconds until every row has its first token
    decode: float  # seconds for the rest


Engine = Callable[[list[list[int]], int], Run]


def lit_gen(folder: Path, dtype: torch.dtype) -> Engine:
    model = pack_linears(load_model(folder, dtype, CPU))

    def run(prompts: list[list[int]], new: int) -> Run:
        stats, B = Stats(), len(prompts)
        together = {"max_batch_size": B, "prefill_budget": sum(map(len, prompts))}  # all prefills, then all steps
        rows = list(generate(model, prompts, max_new_tokens=new, stats=stats, **together))
        tokens = [row.tokens for row in sorted(rows, key=lambda row: row.index)]
        return Run(tokens, stats.prefill_seconds, stats.decode_seconds)

    return run


def transformers(folder: Path, dtype: torch.dtype) -> Engine:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    model.generation_config.eos_token_id = None

    def run(prompts: list[list[int]], new: int) -> Run:
        width, times = max(map(len, prompts)), []
        idx = torch.tensor([[0] * (width - len(p)) + p for p in prompts])
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])

        def clock(input_ids: torch.Tensor, scores: object, **_: object) -> torch.Tensor:
            times.append(time.perf_counter())  # called after each token
            return torch.zeros(len(input_ids), dtype=torch.bool)

        start = time.perf_counter()
        with torch.inference_mode():
            settings = {"max_new_tokens": new, "do_sample": False, "pad_token_id": 0, "stopping_criteria": [clock]}
            out = model.generate(idx, attention_mask=mask, **settings)
        return Run(out[:, width:].tolist(), times[0] - start, time.perf_counter() - times[0])

    return run


def random_prompts(B: int, T: int, vocab_size: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(B * T)
    return torch.randint(3, vocab_size, (B, T), generator=generator).tolist()


def compare(engines: dict[str, Engine], tasks: list[dict], repeats: int, vocab_size: int) -> Iterator[dict]:
    """Runs each task on every engine in turn, `repeats` times after one warm-up; yields a line for each task."""
    for task in tqdm(tasks, unit="task", disable=None):
        B, T, new = task["batch"], task["prompt"], task["new"]
        prompts, speeds = random_prompts(B, T, vocab_size), {name: [] for name in engines}
        tokens = [run(prompts, new).tokens for run in engines.values()]  # also warms up
        for _ in range(repeats):
            for name, run in engines.items():
                _, prefill, decode = run(prompts, new)
                speeds[name].append(B * T / prefill if task["task"] == "prefill" else B * (new - 1) / decode)
        ratios = [a / b for a, b in zip(*speeds.values(), strict=True)]
        yield task | {
            "tokens_per_second": {name: round(statistics.median(values), 1) for name, values in speeds.items()},
            "ratio": round(statistics.median(ratios), 3),
            "ratios": [round(ratio, 3) for ratio in ratios],
            "rows_with_equal_tokens": f"{sum(a == b for a, b in zip(*tokens, strict=True))}/{B}",
        }


def measure_limits() -> dict:
    """What this machine can do: read bandwidth in GB/s, matrix products in GFLOP/s."""
    a = torch.ones(2**27)  # 512 MB, far beyond the caches
    found = {"read_gb_per_s": a.nbytes / _best(lambda: a.sum()) / 1e9}
    for dtype in (torch.float32, torch.bfloat16):
        x, w = torch.ones(512, 2048, dtype=dtype), torch.ones(2048, 2048, dtype=dtype)
        flops = 2 * x.size(0) * w.numel()
        found[f"{str(dtype).removeprefix('torch.')}_gflop_per_s"] = flops / _best(lambda x=x, w=w: x @ w) / 1e9
    return {name: round(value, 1) for name, value in found.items()}


def _best(run: Callable[[], object], repeats: int = 7) -> float:
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times)


def main(
    *,
    checkpoint_dir: Path | None = None,
    precision: list[Literal["float32", "bfloat16", "float16"]] = ["float32", "bfloat16"],  # noqa: B006 (a CLI default)
    batch: list[int] = [1, 8, 64],  # noqa: B006
    prompt: int = 128,
    new: int = 32,
    prefill: list[int] = [512, 2048],  # noqa: B006
    repeats: int = 5,
    threads: int | None = None,
    limits: bool = False,
    out: Path | None = None,
) -> None:
    """Measures generation against transformers' generate on this CPU and prints a JSON line for each task.

    Args:
        checkpoint_dir: By default SmolLM2-135M-Instruct.
        precision: Dtypes to measure.
        batch: Batch sizes of the decoding tasks.
        prompt: Tokens of each prompt of the decoding tasks.
        new: New tokens of the decoding tasks.
        prefill: Prompt lengths of the prefill tasks, one row each.
        repeats: Measured runs of each, in turn, after a warm-up.
        threads: PyTorch's threads; by default one for each core.
        limits: Only print what the machine can do.
        out: File to append the lines to.
    """
    if repeats < 1 or new < 2 or prompt < 1:
        raise UserError("benchmark needs --repeats >= 1, --new >= 2 and --prompt >= 1")
    torch.set_num_threads(threads or torch.get_num_threads())
    settings = {"torch": torch.__version__, "threads": torch.get_num_threads(), "cpu": platform.processor()}
    settings |= {"capability": torch.backends.cpu.get_cpu_capability(), "limits": measure_limits(), "repeats": repeats}
    _emit(settings, out)
    if limits:
        return
    checkpoint_dir = checkpoint_dir or fetch_default_model()
    tasks = [{"task": "decode", "batch": B, "prompt": prompt, "new": new} for B in batch]
    tasks += [{"task": "prefill", "batch": 1, "prompt": T, "new": 1} for T in prefill]
    for name in precision:
        dtype = getattr(torch, name)
        with tempfile.TemporaryDirectory() as folder:
            model = load_model(checkpoint_dir, dtype, CPU)
            save_hf(model, Path(folder), checkpoint_dir)
            vocab_size = model.config.vocab_size
            del model
            engines = {"lit_gen": lit_gen(Path(folder), dtype), "transformers": transformers(Path(folder), dtype)}
        for line in compare(engines, tasks, repeats, vocab_size):
            _emit({"precision": name} | line, out)


def _emit(line: dict, out: Path | None) -> None:
    print(json.dumps(line), flush=True)
    if out is not None:
        with out.open("a") as file:
            file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    run_cli(main)
