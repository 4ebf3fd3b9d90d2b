"""Measures generation against other engines: same weights, same prompts, runs in turn, medians, ratios.

    python scripts/benchmark.py --limits true                                  # what this machine can do, kept
    python scripts/benchmark.py --precision '["float32"]' --batch '[1, 8, 64]'
    python scripts/benchmark.py --tasks '["ragged"]' --requests jobs.json --slots '[64]' --static_batch '[16, 32]'
    python scripts/benchmark.py --vs '["hf", "openvino", "llamacpp", "litgpt"]' --python '{"openvino": "ov/bin/python"}'
    python scripts/benchmark.py --vs '["lit_gen 8"]' --options '{"lit_gen 8": {"quantize": "int8"}}'
    python scripts/benchmark.py --tasks '["copy"]' --vs '["lit_gen 8"]' --options '{"lit_gen 8": {"speculate": "8"}}'
    python scripts/benchmark.py --tasks '["decode", "ragged", "context"]' --plot speed.png

Each engine is a process of its own (`peers/`), in this interpreter or in another; one computes while the others sleep.
Absolute figures of a shared machine are noise; the ratios of runs that alternate are not. `benchmark_tasks.py` says
what is measured. Nothing stops at an end token.
"""

import hashlib
import json
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

if __name__ == "__main__":  # from a bare clone, and from any folder
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    # Before torch starts: unbound, threads at times share a core, and each parallel region then takes milliseconds.
    os.environ.setdefault("OMP_PROC_BIND", "true")
    os.environ.setdefault("OMP_PLACES", "cores")
    if hasattr(os, "sched_getaffinity"):  # bound threads hand their one core down to the engines' processes
        os.environ["BENCHMARK_CPUS"] = ",".join(map(str, os.sched_getaffinity(0)))

import torch
from tqdm import tqdm

from lit_gen.checkpoint import load_model
from lit_gen.config import Config
from lit_gen.download import fetch_default_model
from lit_gen.export import save_hf
from lit_gen.limits import Limits, cached_limits, cpu_name, limits_file, measure_limits, save_limits
from lit_gen.plan import free_memory
from lit_gen.settings import check_count
from lit_gen.utils import UserError, run_cli, say
from scripts.benchmark_jobs import Sizes, copy_jobs, random_jobs, read_jobs
from scripts.benchmark_plot import draw
from scripts.benchmark_tasks import OURS, Line, context, decode, prefill, ragged, startup
from scripts.peers.client import Missing, Worker
from scripts.peers.worker import Settings

PEERS = (OURS, "hf", "openvino", "llamacpp", "litgpt")
CPU = torch.device("cpu")
Task = Literal["decode", "copy", "prefill", "ragged", "context", "startup"]


def refresh_limits(threads: int) -> Limits:
    """Measures and keeps them, for one thread too."""
    for n in sorted({1, threads}):
        save_limits(limits := measure_limits(n))
    return limits


def hf_folder(checkpoint_dir: Path, dtype: str, work: Path) -> tuple[Path, Config]:
    """The checkpoint as a Hugging Face folder in this dtype, which every engine reads or converts; made once."""
    files = sorted(checkpoint_dir.iterdir()) if checkpoint_dir.is_dir() else [checkpoint_dir]
    state = [(str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    key = hashlib.sha256(repr(state).encode()).hexdigest()[:8]
    folder = work / f"{checkpoint_dir.stem if checkpoint_dir.is_file() else checkpoint_dir.name}-{key}-{dtype}" / "hf"
    model = load_model(checkpoint_dir, getattr(torch, dtype), CPU)
    if not folder.exists():
        unfinished = folder.with_name("hf.partial")
        shutil.rmtree(unfinished, ignore_errors=True)
        save_hf(model, unfinished, checkpoint_dir)
        unfinished.rename(folder)
    return folder, model.config


class Engines:
    """Starts engines on one checkpoint in one dtype; those that are not installed are left out from then on."""

    def __init__(self, names: list[str], settings: Settings, work: Path, python: dict, options: dict) -> None:
        self.names, self.settings, self.work = [OURS, *names], settings, work
        self.python, self.options = python, options

    def start(self, name: str) -> Worker:
        kind = name.split()[0]  # what follows tells variants apart
        how = {"name": kind, "made": str(self.work / kind), "options": self.options.get(name, {})}
        return Worker(replace(self.settings, **how), self.python.get(kind))

    def start_all(self) -> dict[str, Worker]:
        workers: dict[str, Worker] = {}
        for name in self.names:
            try:
                workers[name] = self.start(name)
            except Missing as error:
                if name == OURS:
                    raise UserError(str(error)) from None
                say(str(error))
        self.names = list(workers)
        return workers


def measure(engines: Engines, tasks: list[Task], sizes: Sizes, limits: Limits, config: Config) -> Iterator[Line]:
    """The lines of all tasks on one checkpoint in one dtype."""
    V, repeats = config.vocab_size, sizes.repeats
    with ExitStack() as stack:
        workers = engines.start_all()
        for worker in workers.values():
            stack.callback(worker.close)
        yield {"about": {name: worker.about for name, worker in workers.items()}}
        if "decode" in tasks:
            for B in sizes.batch:
                yield decode(workers, random_jobs(B, sizes.prompt, sizes.new, V), repeats, limits)
        if "copy" in tasks:
            for B in sizes.batch:
                jobs = copy_jobs(B, sizes.new, Path(engines.settings.hf))
                yield decode(workers, jobs, repeats, limits) | {"task": "copy"}
        if "prefill" in tasks:
            for T in sizes.prefill:
                yield prefill(workers, random_jobs(1, T, 1, V)[0], repeats, limits)
        if "ragged" in tasks:
            yield from ragged(workers, read_jobs(sizes, V), sizes.slots, sizes.static_batch, repeats)
        if "context" in tasks:
            column = 2 * config.n_layer * config.n_query_groups * config.head_size * torch.float32.itemsize
            most = int(free_memory(CPU) * 0.8) // column
            yield from context(workers[OURS], sizes.context_batch, sizes.context, repeats, most)
    if "startup" in tasks:
        yield startup({name: partial(engines.start, name) for name in engines.names}, repeats, V)


def main(
    *,
    checkpoint_dir: Path | None = None,
    tasks: list[Task] = ["decode", "prefill"],  # noqa: B006 (a CLI default)
    vs: list[str] = ["hf"],  # noqa: B006
    python: dict[str, str] = {},  # noqa: B006
    options: dict[str, dict[str, str]] = {},  # noqa: B006
    precision: list[Literal["float32", "bfloat16", "float16"]] = ["float32", "bfloat16"],  # noqa: B006
    threads: int | None = None,
    limits: bool = False,
    plot: Path | None = None,
    out: Path | None = None,
    work: Path | None = None,
    **kwargs: Any,
) -> None:
    """Measures generation on this CPU against other engines and prints a JSON line for each measurement.

    Args:
        checkpoint_dir: By default SmolLM2-135M-Instruct.
        tasks: What to measure.
        vs: hf, openvino, llamacpp, litgpt (if installed), or variants with options of their own, such as "lit_gen 8".
        python: Interpreters of engines that are installed elsewhere, such as {"openvino": "ov/bin/python"}.
        options: Options of engines, such as {"openvino": {"kv": "u8"}}; `scripts/peers/` lists them.
        precision: Dtypes to measure.
        threads: Of each engine; by default one for each core.
        limits: Only measure what the machine can do, again.
        plot: Picture to draw from the lines of the last dtype (needs matplotlib).
        out: File to append the lines to.
        work: Folder for the model in each engine's own format, kept; by default in the user's cache folder.
    """
    sizes, threads, lines = Sizes(**kwargs), threads or torch.get_num_threads(), []
    check_count("threads", threads)
    for name in {*vs, *options}:
        if name.partition(" ")[0] not in PEERS:
            raise UserError(f"there is no engine {name!r}: use {', '.join(PEERS)}")
    found = refresh_limits(threads) if limits else cached_limits(threads) or refresh_limits(threads)
    emit({"cpu": cpu_name(), "torch": torch.__version__, "limits": found.describe(), "repeats": sizes.repeats}, out)
    if limits:
        return
    checkpoint_dir = checkpoint_dir or fetch_default_model()
    for dtype in precision:
        folder, config = hf_folder(checkpoint_dir, dtype, work or limits_file().parent / "benchmark")
        model = checkpoint_dir.stem if checkpoint_dir.is_file() else checkpoint_dir.name
        settings = Settings("", str(checkpoint_dir.resolve()), str(folder), "", model, dtype, threads)
        engines, lines = Engines(vs, settings, folder.parent, python, options), []
        for line in tqdm(measure(engines, tasks, sizes, found, config), unit="line", disable=None):
            emit({"precision": dtype} | line, out)
            lines.append(line)
    if plot is not None:
        draw(lines, found, precision[-1], plot)


def emit(line: Line, out: Path | None) -> None:
    print(json.dumps(line), flush=True)
    if out is not None:
        with out.open("a") as file:
            file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    run_cli(main)
