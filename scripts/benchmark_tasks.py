"""The measurements of benchmark.py: each runs engines in turn and returns lines of numbers.

decode   tokens/s = B * (new - 1) / (T(new) - T(1)), where T(n) is the time for n new tokens of each of B rows
copy     the same for prompts that hold a text twice: most of an answer can be guessed from its prompt
prefill  tokens/s = prompt / T(1), one row
ragged   a job of many lengths: seconds, and tokens that were asked for per second
context  lit_gen's seconds per decode step against rows and columns, fitted as a + b * rows + c * rows * columns
startup  from the start of the interpreter to the first token of a prompt of 16, from a Hugging Face folder
"""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from typing import Any

import torch

from lit_gen.limits import Limits
from lit_gen.utils import UserError
from scripts.benchmark_jobs import random_jobs
from scripts.peers.client import Failed, Worker
from scripts.peers.worker import Job

Answer = Line = dict[str, Any]  # of a worker; to be printed
OURS = "lit_gen"


def alternate(runs: dict[str, Callable[[], list[Answer]]], repeats: int) -> tuple[dict[str, list], dict[str, str]]:
    """Each run once to warm up and then `repeats` times in turn: all answers, that of the warm-up first; and errors."""
    answers: dict[str, list] = {name: [] for name in runs}
    errors: dict[str, str] = {}
    for _ in range(repeats + 1):
        for name, run in runs.items():
            if name in errors:
                continue
            try:
                answers[name].append(run())
            except Failed as error:  # this engine cannot do this task
                if name.startswith(OURS):
                    raise UserError(f"{name}: {error}") from None
                errors[name] = str(error)
    return {name: found for name, found in answers.items() if name not in errors}, errors


def decode(workers: dict[str, Worker], jobs: list[Job], repeats: int, limits: Limits) -> Line:
    """Decode speed of a batch of prompts that all want as many new tokens."""
    B, new, first = len(jobs), jobs[0].new, [Job(job.ids, 1) for job in jobs]

    def run(worker: Worker) -> list[Answer]:
        return [worker.ask(first, B), worker.ask(jobs, B)]

    answers, errors = alternate({name: lambda w=w: run(w) for name, w in workers.items()}, repeats)
    rates = {}
    for name, found in answers.items():
        rates[name] = [B * (new - 1) / max(last["seconds"] - one["seconds"], 1e-9) for one, last in found[1:]]
    bound = {}  # of lit_gen and its variants, which may read fewer bytes or take fewer steps
    for name, found in answers.items():
        if stats := found[-1][1]["extra"].get("stats"):
            per_step = stats["bytes_read"] / stats["steps"], stats["flops"] / stats["steps"]
            least = stats["steps"] * limits.seconds(*per_step, stats["dtype"])
            bound[name] = B * (new - 1) / least, *map(round, per_step)
    line = {"task": "decode", "batch": B, "prompt": len(jobs[0].ids), "new": new}
    line |= _compare(rates, {name: limit for name, (limit, *_) in bound.items()})
    line |= dict(zip(("bytes_per_step", "flops_per_step"), bound[OURS][1:], strict=True))
    return line | _equal({name: found[0][1]["tokens"] for name, found in answers.items()}) | _trouble(answers, errors)


def prefill(workers: dict[str, Worker], job: Job, repeats: int, limits: Limits) -> Line:
    """Speed of reading one prompt and choosing the token after it."""
    jobs = [Job(job.ids, 1)]
    answers, errors = alternate({name: lambda w=w: [w.ask(jobs, 1)] for name, w in workers.items()}, repeats)
    rates = {name: [len(job.ids) / one["seconds"] for (one,) in found[1:]] for name, found in answers.items()}
    extra = answers[OURS][-1][0]["extra"]
    limit = len(job.ids) / limits.seconds(0, extra["prefill_flops"], extra["stats"]["dtype"])
    line = {"task": "prefill", "batch": 1, "prompt": len(job.ids)} | _compare(rates, {OURS: limit})
    return line | _equal({name: found[0][0]["tokens"] for name, found in answers.items()}) | _trouble(answers, errors)


def ragged(
    workers: dict[str, Worker], jobs: list[Job], slots: Sequence[int], static: Sequence[int], repeats: int
) -> Iterator[Line]:
    """A line for each engine and number of rows, beside the first; static batches are sorted by total length."""
    runs: dict[str, Callable[[], list[Answer]]] = {}
    for name, worker in workers.items():
        if worker.continuous:
            runs |= {f"{name} continuous {n}": lambda w=worker, n=n: [w.ask(jobs, n, static=False)] for n in slots}
        if name.split()[0] == OURS or not worker.continuous:
            runs |= {f"{name} static {n}": lambda w=worker, n=n: [w.ask(jobs, n)] for n in static}
    answers, errors = alternate(runs, repeats)
    useful, base = sum(job.new for job in jobs), next(iter(answers))
    equal = _equal({name: found[0][0]["tokens"] for name, found in answers.items()})["rows_with_equal_tokens"]
    times = {name: [one["seconds"] for (one,) in found[1:]] for name, found in answers.items()}
    for name, seconds in times.items():
        ratios = [b / a for a, b in zip(times[base], seconds, strict=True)]
        rate = round(useful / statistics.median(seconds), 1)
        line = {"task": "ragged", "engine": name, "requests": len(jobs), "seconds": _round(statistics.median(seconds))}
        line |= {"useful_tokens_per_second": rate, "times_as_slow_as_the_first": _round(statistics.median(ratios))}
        line["ratios"] = [_round(x) for x in ratios]
        line |= {"rows_with_equal_tokens": equal[name]} if name in equal else {}
        extra = answers[name][-1][0]["extra"]
        if " continuous " in name and "stats" in extra:
            line |= {key: _round(extra["stats"][key]) for key in ("occupancy", "occupancy_before_tail")}
        if timeline := extra.get("timeline"):
            line["timeline"] = timeline[:: -(-len(timeline) // 300)]  # (seconds, rows that somebody waits for)
        yield line
    yield from ({"task": "ragged", "engine": name, "error": error} for name, error in errors.items())


def context(worker: Worker, rows: Sequence[int], columns: Sequence[int], repeats: int, most: int) -> Iterator[Line]:
    """Seconds per step for every number of rows and columns, in turn, and what fits them; `most` cells of cache fit."""
    points = [(B, S) for B in rows for S in columns if B * S <= most]
    if left_out := [(B, S) for B in rows for S in columns if B * S > most]:
        yield {"task": "context", "left_out": left_out, "error": "their caches would not fit into memory"}
    times: dict[tuple[int, int], list[float]] = {point: [] for point in points}
    for _ in range(repeats):
        for B, S in points:
            times[B, S].append(statistics.median(worker.step(B, S, 3)))
    medians = {point: statistics.median(found) for point, found in times.items()}
    for (B, S), seconds in medians.items():
        yield {"task": "context", "batch": B, "context": S, "ms_per_step": _round(seconds * 1e3)}
    if len(points) > 4:
        yield {"task": "context", "fit": fit(medians)}


def fit(times: dict[tuple[int, int], float]) -> Line:
    """Fits seconds per step as a + b * rows + c * rows * columns, and again with d * rows * columns**2 beside them.

    Relative errors are minimised, since times differ by orders of magnitude.
    """
    points = torch.tensor(list(times), dtype=torch.float64)  # (n, 2)
    t = torch.tensor(list(times.values()), dtype=torch.float64)  # (n,)
    B, S = points.unbind(1)
    terms = torch.stack([torch.ones_like(B), B, B * S, B * S * S], 1)  # (n, 4)

    def solve(A: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # (n, k) -> coefficients (k,), residuals (n,)
        scale = A.abs().amax(0)
        x = torch.linalg.lstsq(A / scale / t[:, None], torch.ones_like(t)[:, None]).solution[:, 0] / scale
        return x, (A @ x - t) / t

    (linear, residual), (quadratic, better) = solve(terms[:, :3]), solve(terms)
    largest = terms[:, 2].argmax()
    names = ("seconds", "seconds_per_row", "seconds_per_row_and_column")
    return {
        **{name: float(f"{x:.4g}") for name, x in zip(names, linear.tolist(), strict=True)},
        "residual_rms": _round(residual.square().mean().sqrt().item()),
        "residual_max": _round(residual.abs().max().item()),
        "quadratic_share_at_largest": _round((quadratic[3] * terms[largest, 3] / t[largest]).item()),
        "residual_rms_with_quadratic": _round(better.square().mean().sqrt().item()),
    }


def startup(start: dict[str, Callable[[], Worker]], repeats: int, vocab_size: int) -> Line:
    """Seconds from the start of the interpreter to a first token, and their parts, of each engine alone in memory."""
    parts: dict[str, list[dict[str, float]]] = {name: [] for name in start}
    for _ in range(repeats + 1):
        for name, make in start.items():
            with closing(make()) as worker:
                asked = time.perf_counter()
                worker.ask(random_jobs(1, 16, 1, vocab_size), 1)
                end = time.perf_counter()
            found = {"interpreter": worker.ready - worker.started - sum(worker.laps.values()), **worker.laps}
            found["first token"] = end - asked
            parts[name].append(found | {"all": sum(found.values())})
    medians = {}
    for name, runs in parts.items():
        medians[name] = {part: _round(statistics.median(run[part] for run in runs[1:])) for part in runs[0]}
    return {"task": "startup", "seconds": {name: found.pop("all") for name, found in medians.items()}, "parts": medians}


def _compare(rates: dict[str, list[float]], limit: dict[str, float]) -> Line:
    """Medians, our speed over each other engine's in the same round, and the share of its own limit or of ours."""
    medians = {name: statistics.median(found) for name, found in rates.items()}
    ratios = {
        name: [a / b for a, b in zip(rates[OURS], found, strict=True)] for name, found in rates.items() if name != OURS
    }
    return {
        "tokens_per_second": {name: round(x, 1) for name, x in medians.items()},
        "ratio": {name: _round(statistics.median(found)) for name, found in ratios.items()},
        "ratios": {name: [_round(x) for x in found] for name, found in ratios.items()},
        "limit": round(limit[OURS], 1),
        "share": {name: _round(x / limit.get(name, limit[OURS])) for name, x in medians.items()},
    }


def _equal(tokens: dict[str, list[list[int]]]) -> Line:
    """How many rows of each engine have the tokens of the first."""
    first = next(iter(tokens.values()))
    found = {name: sum(a == b for a, b in zip(first, rows, strict=True)) for name, rows in tokens.items()}
    return {"rows_with_equal_tokens": {n: f"{x}/{len(first)}" for n, x in list(found.items())[1:]}}


def _trouble(answers: dict[str, list], errors: dict[str, str]) -> Line:
    """CPU seconds that an engine used, at most, while others were timed; and what engines could not do."""
    idle = max(one["idle_cpu"] for found in answers.values() for run in found for one in run)
    return {"most_idle_cpu_seconds": _round(idle)} | ({"errors": errors} if errors else {})


def _round(x: float) -> float:
    return round(x, 3)
