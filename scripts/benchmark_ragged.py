"""Measures a job of prompts of many lengths: continuous batching against static batches, ours and transformers'.

    python scripts/benchmark_ragged.py --precision bfloat16 --slots '[64, 32]' --static_batch '[16, 32]'
    python scripts/benchmark_ragged.py --requests requests.json     # [{"ids": [...], "max_new": 90}, ...]
    python scripts/benchmark_ragged.py --trace trace.csv            # columns ContextTokens and GeneratedTokens

Static batches are sorted by total length, and each runs until its longest row ends, as `transformers.generate` does.
Runs alternate: absolute figures of a shared machine are noise, ratios of runs in turn are not. Only tokens that are
asked for count, and nothing stops at an end token.
"""

import csv
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

if __name__ == "__main__":  # from a bare clone, and from any folder
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    # Before torch starts: unbound, threads at times share a core, and each parallel region then takes milliseconds.
    os.environ.setdefault("OMP_PROC_BIND", "true")
    os.environ.setdefault("OMP_PLACES", "cores")

import torch

from generate.base import generate
from lit_gen.checkpoint import load_model
from lit_gen.download import fetch_default_model
from lit_gen.export import save_hf
from lit_gen.linear import pack_linears
from lit_gen.model import GPT
from lit_gen.settings import Request, check_count
from lit_gen.stats import Stats
from lit_gen.utils import UserError, read_json, run_cli

CPU = torch.device("cpu")


class Job(NamedTuple):  # one request: prompt ids (T,) and how many new tokens it wants
    ids: list[int]
    new: int


Tokens = dict[int, list[int]]  # of each request, by its place
Engine = Callable[[Sequence[Job]], Tokens]


def continuous(model: GPT, slots: int, stats: list[Stats]) -> Engine:
    def run(jobs: Sequence[Job]) -> Tokens:
        stats.append(Stats())
        requests = [Request(job.ids, {"max_new_tokens": job.new}) for job in jobs]
        rows = generate(model, requests, max_batch_size=slots, stats=stats[-1])
        return {row.index: row.tokens for row in rows}

    return run


def batches(jobs: Sequence[Job], size: int) -> list[list[int]]:
    """Places of the jobs of each static batch, the longest jobs first."""
    order = sorted(range(len(jobs)), key=lambda i: -len(jobs[i].ids) - jobs[i].new)
    return [order[i : i + size] for i in range(0, len(order), size)]


def static(model: GPT, size: int) -> Engine:
    def run(jobs: Sequence[Job]) -> Tokens:
        tokens: Tokens = {}
        for places in batches(jobs, size):
            longest = max(jobs[i].new for i in places)
            prompts = [jobs[i].ids for i in places]
            for row in generate(model, prompts, max_new_tokens=longest, max_batch_size=size, prefill_budget=2**20):
                tokens[places[row.index]] = row.tokens[: jobs[places[row.index]].new]
        return tokens

    return run


def transformers(folder: Path, dtype: torch.dtype, size: int) -> Engine:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    model.generation_config.eos_token_id = None

    def run(jobs: Sequence[Job]) -> Tokens:
        tokens: Tokens = {}
        for places in batches(jobs, size):
            prompts, longest = [jobs[i].ids for i in places], max(jobs[i].new for i in places)
            width = max(map(len, prompts))
            idx = torch.tensor([[0] * (width - len(ids)) + ids for ids in prompts])
            mask = torch.tensor([[0] * (width - len(ids)) + [1] * len(ids) for ids in prompts])
            with torch.inference_mode():
                out = model.generate(idx, attention_mask=mask, max_new_tokens=longest, do_sample=False, pad_token_id=0)
            tokens |= {i: row[width:].tolist()[: jobs[i].new] for i, row in zip(places, out, strict=True)}
        return tokens

    return run


def read_jobs(requests: Path | None, trace: Path | None, n: int, longest: int, vocab_size: int) -> list[Job]:
    """Requests of a file; or of random ids, with the lengths of a trace, or with log-normal ones if there is none."""
    rng = random.Random(0)
    if requests is not None:
        try:
            return [Job(entry["ids"], entry["max_new"]) for entry in read_json(requests)]
        except (TypeError, KeyError):
            raise UserError(f'{requests} must be a list of objects such as {{"ids": [5, 6], "max_new": 9}}') from None
    if trace is not None:
        with trace.open(newline="") as file:
            try:
                table = [(int(row["ContextTokens"]), int(row["GeneratedTokens"])) for row in csv.DictReader(file)]
            except (KeyError, TypeError, ValueError):
                raise UserError(f"{trace} must have the columns ContextTokens and GeneratedTokens") from None
        lengths = rng.sample(short := [pair for pair in table if sum(pair) <= longest], min(n, len(short)))
    else:
        new = [rng.randint(16, 128) for _ in range(n)]
        lengths = [(min(longest - tokens, 400, int(rng.lognormvariate(4, 1)) + 8), tokens) for tokens in new]
    return [Job([rng.randrange(3, vocab_size) for _ in range(T)], new) for T, new in lengths]


def compare(engines: dict[str, Engine], jobs: Sequence[Job], repeats: int) -> tuple[dict[str, Tokens], dict]:
    """Tokens of every engine in a first run, which warms up, and its seconds in the runs that follow in turn."""
    first = {name: run(jobs) for name, run in engines.items()}
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    for _ in range(repeats):
        for name, run in engines.items():
            start = time.perf_counter()
            run(jobs)
            seconds[name].append(time.perf_counter() - start)
    return first, seconds


def report(jobs: Sequence[Job], first: dict[str, Tokens], seconds: dict, stats: dict[str, list[Stats]]) -> None:
    """A line for each engine, beside the first of them."""
    reference, base = next(iter(first.values())), next(iter(seconds.values()))
    useful = sum(job.new for job in jobs)
    for name, times in seconds.items():
        line = {
            "engine": name,
            "seconds": round(statistics.median(times), 2),
            "useful_tokens_per_second": round(useful / statistics.median(times), 1),
            "times_as_slow_as_the_first": round(statistics.median(b / a for a, b in zip(base, times, strict=True)), 3),
            "rows_with_equal_tokens": f"{sum(reference[i] == first[name][i] for i in reference)}/{len(jobs)}",
        }
        if name in stats:
            line["occupancy"] = round(stats[name][-1].occupancy, 3)
            line["occupancy_before_tail"] = round(stats[name][-1].occupancy_before_tail, 3)
        print(json.dumps(line), flush=True)


def main(
    *,
    checkpoint_dir: Path | None = None,
    requests: Path | None = None,
    trace: Path | None = None,
    n: int = 64,
    longest: int = 1024,
    precision: Literal["float32", "bfloat16", "float16"] = "bfloat16",
    slots: list[int] = [64],  # noqa: B006 (a CLI default)
    static_batch: list[int] = [16],  # noqa: B006
    repeats: int = 3,
) -> None:
    """Measures a job of requests of many lengths on this CPU and prints a JSON line for each engine.

    Args:
        checkpoint_dir: By default SmolLM2-135M-Instruct.
        requests: A JSON file with a list of {"ids", "max_new"}.
        trace: A CSV file with the columns ContextTokens and GeneratedTokens; prompts are random ids.
        n: So many requests of the trace, or made up.
        longest: Most tokens of a request of the trace, prompt and new ones.
        precision: Dtype of the weights.
        slots: Rows that run at a time in continuous batching.
        static_batch: Sizes of static batches.
        repeats: Measured runs of each, in turn, after a warm-up.
    """
    for name, value in (("repeats", repeats), ("n", n)):
        check_count(name, value)
    checkpoint_dir, dtype = checkpoint_dir or fetch_default_model(), getattr(torch, precision)
    stats: dict[str, list[Stats]] = {f"continuous {size}": [] for size in slots}
    with tempfile.TemporaryDirectory() as folder:
        model = load_model(checkpoint_dir, dtype, CPU)
        save_hf(model, Path(folder), checkpoint_dir)
        pack_linears(model)
        engines = {name: continuous(model, int(name.split()[1]), found) for name, found in stats.items()}
        engines |= {f"static {size}": static(model, size) for size in static_batch}
        engines |= {f"transformers {size}": transformers(Path(folder), dtype, size) for size in static_batch}
    jobs = read_jobs(requests, trace, n, longest, model.config.vocab_size)
    settings = {"torch": torch.__version__, "threads": torch.get_num_threads(), "precision": precision}
    lengths = {"prompt_tokens": sum(len(job.ids) for job in jobs), "new_tokens": sum(job.new for job in jobs)}
    print(json.dumps(settings | {"requests": len(jobs), **lengths, "repeats": repeats}), flush=True)
    report(jobs, *compare(engines, jobs, repeats), stats)


if __name__ == "__main__":
    run_cli(main)
