"""Measures log-likelihood requests per second against lm-eval's own HFLM: same weights, same requests, runs in turn.

    python scripts/benchmark_eval.py --questions hellaswag.jsonl --limit 40 --batch_size '[1, 10, 25]'

A line of the questions is {"query": "...", "choices": ["...", ...], "gold": 0}; each choice, after a space, is a
request. A line of numbers comes for each dtype and batch size: medians, the ratio of runs that follow each other, and
how far the numbers of the two differ. (HFLM forms its log-softmax in the model's dtype, which in 16 bits costs digits.)
"""

import json
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal

if __name__ == "__main__":  # from a bare clone, and from any folder
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from lit_gen import Tokenizer
from lit_gen.download import fetch_default_model
from lit_gen.fabric import setup_fabric
from lit_gen.limits import limits_file
from lit_gen.settings import check_count
from lit_gen.source import open_source
from lit_gen.utils import UserError, run_cli
from scripts.benchmark import hf_folder
from scripts.perplexity import read_questions

PRECISION = {"float32": "32-true", "bfloat16": "bf16-true"}
Results = list[tuple[float, bool]]


def engines(folder: Path, dtype: str, requests: list[Any]) -> dict[str, Callable[[int], Results]]:
    """What answers the requests in batches of a size, for both models, which are loaded."""
    from lm_eval.models.huggingface import HFLM
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from scripts.evaluate_lm import LitGenLM

    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
    hflm = HFLM(pretrained=theirs, tokenizer=AutoTokenizer.from_pretrained(folder), device="cpu")
    ours = LitGenLM(open_source(folder, setup_fabric(PRECISION[dtype])), Tokenizer(folder))

    def run(lm: Any, name: str, size: int) -> Results:
        setattr(lm, name, size)
        return lm.loglikelihood(requests, disable_tqdm=True)

    return {"lit_gen": partial(run, ours, "batch_size"), "hflm": partial(run, hflm, "batch_size_per_gpu")}


def compare(runs: dict[str, Callable[[int], Results]], size: int, repeats: int) -> tuple[dict[str, Any], list[Results]]:
    """Requests per second of each, in turn after a warm-up, their ratio, and how far their numbers differ."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    results: list[Results] = []
    for _ in range(repeats + 1):
        results = []
        for name, run in runs.items():
            start = time.perf_counter()
            results.append(run(size))
            seconds[name].append(time.perf_counter() - start)
    ours, theirs = results
    ratios = [b / a for a, b in zip(seconds["lit_gen"][1:], seconds["hflm"][1:], strict=True)]
    rates = {name: round(len(ours) / statistics.median(found[1:]), 2) for name, found in seconds.items()}
    line = {"requests_per_second": rates, "ratio": round(statistics.median(ratios), 2)}
    line["ratios"] = [round(x, 2) for x in ratios]
    line["largest_difference"] = max(abs(a - b) for (a, _), (b, _) in zip(ours, theirs, strict=True))
    line["greedy_differs"] = sum(a != b for (_, a), (_, b) in zip(ours, theirs, strict=True))
    return line, results


def accuracy(results: Results, questions: list[dict[str, Any]]) -> float:
    """The share of questions whose right choice has the highest log-likelihood."""
    values, right = iter(results), 0
    for question in questions:
        own = [next(values)[0] for _ in question["choices"]]
        right += own.index(max(own)) == question["gold"]
    return round(right / len(questions), 4)


def main(
    questions: Path,
    *,
    checkpoint_dir: Path | None = None,
    precision: list[Literal["float32", "bfloat16"]] = ["float32", "bfloat16"],  # noqa: B006 (a CLI default)
    batch_size: list[int] = [1, 10, 25],  # noqa: B006
    limit: int = 40,
    repeats: int = 3,
    work: Path | None = None,
) -> None:
    """Measures log-likelihood requests per second against lm-eval's HFLM (needs the packages lm-eval and transformers).

    Args:
        questions: A .jsonl file.
        checkpoint_dir: A Hugging Face folder, a lit folder or a .gguf file; by default SmolLM2-135M-Instruct, fetched.
        precision: Dtypes to measure.
        batch_size: Requests that run at a time.
        limit: So many questions.
        repeats: Measured runs of each, in turn, after a warm-up.
        work: Folder for the model as transformers reads it, kept; by default in the user's cache folder.
    """
    for n in (limit, repeats, *batch_size):
        check_count("limit, repeats and batch_size", n)
    try:
        from lm_eval.api.instance import Instance
    except ImportError:
        raise UserError("this needs packages: pip install 'lm-eval[hf]>=0.4.12'") from None
    asked = list(read_questions(questions, limit))
    pairs = [(question["query"], f" {choice}") for question in asked for choice in question["choices"]]
    requests = [Instance("loglikelihood", {}, pair, i) for i, pair in enumerate(pairs)]
    work = work or limits_file().parent / "benchmark"
    for dtype in precision:
        folder, _ = hf_folder(checkpoint_dir or fetch_default_model(), dtype, work)
        runs = engines(folder, dtype, requests)
        for size in batch_size:
            line, results = compare(runs, size, repeats)
            line |= {f"accuracy_{name}": accuracy(found, asked) for name, found in zip(runs, results, strict=True)}
            print(json.dumps({"dtype": dtype, "batch": size, "requests": len(requests)} | line), flush=True)


if __name__ == "__main__":
    run_cli(main)
