"""The child process of a benchmark: holds one engine in its own interpreter and answers jobs, a JSON line each.

It needs nothing but the standard library and the engine, so that any interpreter can run it:

    python -m peers.worker prepare '{...}'     converts the model to the engine's own format, once
    python -m peers.worker serve '{...}'       loads it, says what it is, and answers what comes on stdin

Each engine is a module of this folder with `prepare(settings)` and `load(settings, lap) -> Engine`.
"""

import importlib
import json
import os
import sys
import time
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol


class Job(NamedTuple):  # a prompt's ids (T,), and how many new tokens it wants
    ids: list[int]
    new: int


@dataclass(frozen=True)
class Settings:
    """What an engine is started with.

    Attributes:
        name: of the module, which is also how the engine is called.
        source: the checkpoint as the user gave it, such as a folder with a .gguf file.
        hf: the same as a Hugging Face folder, in this dtype.
        made: where `prepare` puts the engine's own format.
        model: name of the checkpoint.
        dtype: float32, bfloat16 or float16.
        threads: of a computation.
        options: of this engine alone, such as {"kv": "u8"}.
    """

    name: str
    source: str
    hf: str
    made: str
    model: str
    dtype: str
    threads: int
    options: dict[str, str] = field(default_factory=dict)


class Engine(Protocol):
    """What `load` returns.

    Attributes:
        continuous: whether a row that ends makes room for the next; else jobs come in static batches.
        equal_lengths: whether the prompts of a batch must have one length.
        about: versions and the like, for the record.
    """

    continuous: bool
    equal_lengths: bool
    about: dict[str, Any]

    def run(self, jobs: list[Job], slots: int, at_once: bool) -> tuple[list[list[int]], dict[str, Any]]:
        """The greedy tokens of each job, none stopped early, and what else there is to know.

        At most `slots` rows run at a time; `at_once` wants all of them to start together.
        """
        ...


class Laps:
    """Seconds between calls, by name."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def __call__(self, name: str) -> None:
        now = time.perf_counter()
        self.seconds[name], self._last = now - self._last, now


def batches(jobs: list[Job], size: int, equal_lengths: bool = False) -> list[list[int]]:
    """Places of the jobs of each static batch, the longest jobs first."""
    order = sorted(range(len(jobs)), key=lambda i: (-len(jobs[i].ids) - jobs[i].new, len(jobs[i].ids)))
    groups: list[list[int]] = []
    for i in order:
        fits = groups and len(groups[-1]) < size
        if fits and not (equal_lengths and len(jobs[groups[-1][0]].ids) != len(jobs[i].ids)):
            groups[-1].append(i)
        else:
            groups.append([i])
    return groups


def run_static(engine: Engine, jobs: list[Job], size: int) -> tuple[list[list[int]], dict[str, Any]]:
    """Batches that run until their longest row ends; tokens that were not asked for are dropped."""
    tokens: list[list[int]] = [[] for _ in jobs]
    timeline: list[tuple[float, int]] = []
    extra: dict[str, Any] = {}
    for places in batches(jobs, size, engine.equal_lengths):
        longest = max(jobs[i].new for i in places)
        found, extra = engine.run([Job(jobs[i].ids, longest) for i in places], len(places), True)
        for i, row in zip(places, found, strict=True):
            tokens[i] = row[: jobs[i].new]
        for step, (when, _) in enumerate(extra.get("timeline", []), start=1):
            timeline.append((when, sum(jobs[i].new > step for i in places)))  # rows that anybody waits for
    return tokens, extra | ({"timeline": timeline} if timeline else {})


def answer(engine: Engine, request: dict[str, Any]) -> dict[str, Any]:
    """Does what one line asks for, and times it."""
    if "step" in request:
        return {"seconds": engine.step(*request["step"])}
    jobs = [Job(*job) for job in request["jobs"]]
    start = time.perf_counter()
    if request["static"] or not engine.continuous:
        tokens, extra = run_static(engine, jobs, request["slots"])
    else:
        tokens, extra = engine.run(jobs, request["slots"], False)
    seconds = time.perf_counter() - start
    if "timeline" in extra:
        extra["timeline"] = [(round(when - start, 4), rows) for when, rows in extra["timeline"]]
    return {"seconds": seconds, "tokens": tokens, "extra": extra}


def serve(settings: Settings) -> None:
    laps, replies = Laps(), os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no reply

    def reply(line: dict[str, Any]) -> None:
        print(json.dumps(line), file=replies, flush=True)

    try:
        engine = importlib.import_module(f".{settings.name}", __package__).load(settings, laps)
    except ImportError as error:
        reply({"missing": error.name or str(error)})
        return
    reply({"about": engine.about, "continuous": engine.continuous, "laps": laps.seconds})
    busy = time.process_time()
    for line in sys.stdin:
        idle = time.process_time() - busy  # CPU seconds while another engine was at work: threads that spin
        try:
            reply(answer(engine, json.loads(line)) | {"idle_cpu": idle})
        except (RuntimeError, ValueError, MemoryError) as error:  # this engine cannot do it; the others can
            reply({"error": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"})
        busy = time.process_time()


if __name__ == "__main__":
    if cpus := os.environ.get("BENCHMARK_CPUS"):  # the parent's threads are bound, and this process would be as well
        os.sched_setaffinity(0, map(int, cpus.split(",")))
    what, settings = sys.argv[1], Settings(**json.loads(sys.argv[2]))
    if what == "prepare":
        try:
            importlib.import_module(f".{settings.name}", __package__).prepare(settings)
        except ImportError:
            pass  # `serve` says what is missing
    else:
        serve(settings)
