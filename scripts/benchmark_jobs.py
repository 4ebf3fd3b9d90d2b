"""How large benchmarks are, and their prompts: of random ids, or from a file or a trace of requests."""

import csv
import random
from dataclasses import dataclass, field, fields
from pathlib import Path

from lit_gen import Tokenizer
from lit_gen.settings import check_count
from lit_gen.utils import UserError, read_json
from scripts.peers.worker import Job


def _list(*sizes: int) -> list[int]:
    return field(default_factory=lambda: list(sizes))


@dataclass
class Sizes:
    """How large each task is; raises UserError unless all are whole numbers >= 1 (`new` >= 2).

    Args:
        batch: Batch sizes of the decode task.
        prompt: Tokens of each of its prompts.
        new: Its new tokens.
        prefill: Prompt lengths of the prefill task, one row each.
        requests: Of the ragged task: a JSON file with a list of {"ids", "max_new"}.
        trace: Or a CSV file with the columns ContextTokens and GeneratedTokens; prompts are random ids.
        n: So many requests of the trace, or made up.
        longest: Most tokens of a request of the trace, prompt and new ones.
        slots: Rows that run at a time in continuous batching.
        static_batch: Sizes of static batches.
        context_batch: Batch sizes of the context task.
        context: Its context lengths.
        repeats: Measured runs of each, in turn, after a warm-up.
    """

    batch: list[int] = _list(1, 8, 32, 64)
    prompt: int = 128
    new: int = 32
    prefill: list[int] = _list(512, 2048)
    requests: Path | None = None
    trace: Path | None = None
    n: int = 64
    longest: int = 1024
    slots: list[int] = _list(64)
    static_batch: list[int] = _list(16)
    context_batch: list[int] = _list(1, 4, 16, 64)
    context: list[int] = _list(128, 256, 512, 1024, 2048, 4096)
    repeats: int = 5

    def __post_init__(self) -> None:
        for name in (f.name for f in fields(self) if f.name not in ("requests", "trace")):
            value = getattr(self, name)
            for size in value if isinstance(value, list) else [value]:
                check_count(name, size)
        if self.new < 2:
            raise UserError("new is 1, but decode needs --new >= 2")


def random_jobs(B: int, T: int, new: int, vocab_size: int) -> list[Job]:
    """B prompts of T ids, each another text."""
    rng = random.Random(B * T)
    return [Job([rng.randrange(3, vocab_size) for _ in range(T)], new) for _ in range(B)]


def copy_jobs(B: int, new: int, checkpoint_dir: Path) -> list[Job]:
    """Lines of code that stand there twice, others in each prompt, so that the model writes them a third time."""
    tokenizer = Tokenizer(checkpoint_dir)
    lines = (Path(__file__).parents[1] / "lit_gen" / "model.py").read_text().splitlines()
    starts = [15 * b % (len(lines) - 20) for b in range(B)]
    texts = ["\n".join(lines[start : start + 10 + b % 5]) + "\n\n" for b, start in enumerate(starts)]
    return [Job(tokenizer.encode(2 * text).tolist(), new) for text in texts]


def read_jobs(sizes: Sizes, vocab_size: int) -> list[Job]:
    """The ragged task: the requests of a file, or random ids with the lengths of a trace, or with log-normal lengths.

    Raises:
        UserError: the file is no list of {"ids", "max_new"} that the model can take, or no such table.
    """
    requests, trace, n, longest = sizes.requests, sizes.trace, sizes.n, sizes.longest
    if requests is not None:
        return [_job(requests, entry, vocab_size) for entry in _entries(requests)]
    rng = random.Random(0)
    if trace is not None:
        short = [pair for pair in _lengths(trace) if sum(pair) <= longest]
        if not short:
            raise UserError(f"{trace} has no request of at most {longest} tokens: raise --longest")
        lengths = rng.sample(short, min(n, len(short)))
    else:
        new = [rng.randint(16, 128) for _ in range(n)]
        lengths = [(max(1, min(longest - count, 400, int(rng.lognormvariate(4, 1)) + 8)), count) for count in new]
    return [Job([rng.randrange(3, vocab_size) for _ in range(T)], count) for T, count in lengths]


def _entries(file: Path) -> list:
    entries = read_json(file)
    if not isinstance(entries, list) or not entries:
        raise UserError(f'{file} must be a list of objects such as {{"ids": [5, 6], "max_new": 9}}')
    return entries


def _job(file: Path, entry: object, vocab_size: int) -> Job:
    ids, new = (entry.get("ids"), entry.get("max_new")) if isinstance(entry, dict) else (None, None)
    good = isinstance(ids, list) and ids and all(type(i) is int and 0 <= i < vocab_size for i in ids)
    if not good or type(new) is not int or new < 1:
        raise UserError(
            f'{file} must hold objects such as {{"ids": [5, 6], "max_new": 9}}, ids below {vocab_size}; '
            f"one is {entry!r:.40}"
        )
    return Job(ids, new)


def _lengths(trace: Path) -> list[tuple[int, int]]:
    """Prompt and new tokens of each request of the trace."""
    with trace.open(newline="") as file:
        try:
            table = [(int(row["ContextTokens"]), int(row["GeneratedTokens"])) for row in csv.DictReader(file)]
        except (KeyError, TypeError, ValueError):
            raise UserError(f"{trace} must have the columns ContextTokens and GeneratedTokens") from None
    return [pair for pair in table if min(pair) >= 1]
