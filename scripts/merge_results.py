"""Puts the output files of a job's shards together, in input order.

torchrun --nproc-per-node 2 generate/base.py --prompts in.jsonl --out out.jsonl    # or each part by itself:
python generate/base.py --prompts in.jsonl --out out.jsonl --shard 0/2    # and 1/2, perhaps on another machine
python scripts/merge_results.py --out out.jsonl
"""

import filecmp
import heapq
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO

if __name__ == "__main__":  # from a bare clone, and from any folder
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from lit_gen.durable import open_locked, partial_path, publish
from lit_gen.job import SHARD, Job, differences, job_path, read_job, write_job
from lit_gen.rows import Key, key_of, parse_line
from lit_gen.shard import find_shards
from lit_gen.utils import UserError, run_cli


def read_jobs(shards: list[Path]) -> list[Job]:
    """The job of each shard, all finished and but for the shard the same; UserError names the one that is not."""
    jobs = []
    for path in shards:
        job = read_job(path)
        if job is None:
            raise UserError(f"{path} has no side file {job_path(path)}: copy it there too, or run that shard again")
        if not job.finished:
            raise UserError(f"{path} is not finished: run the command of that shard again")
        job.fingerprint.pop(SHARD, None)
        if jobs and (changes := "; ".join(differences(jobs[0].fingerprint, job.fingerprint))):
            raise UserError(f"{path} is of another job than {shards[0]}, with another {changes}: run one of them again")
        jobs.append(job)
    return jobs


def read_rows(path: Path, lines: int) -> Iterator[tuple[Key, bytes, Path]]:
    """Each row of a finished shard, in order; UserError if the file has changed since it was finished."""
    remedy = "run the command of that shard again"
    number, previous = 0, (-1, 0)
    with path.open("rb") as file:
        for number, data in enumerate(file, start=1):
            try:
                key = key_of(parse_line(data))
            except ValueError:
                key = None
            if key is None or not data.endswith(b"\n"):
                raise UserError(f"line {number} of {path} is damaged: {remedy}")
            if key <= previous:
                twice = "is there twice" if key == previous else "is out of order"
                raise UserError(f"line {number} of {path}: row {key[0]}, sample {key[1]} {twice}: {remedy}")
            yield key, data, path
            previous = key
    if number != lines:
        raise UserError(f"{path} has {number} rows, but had {lines} when it was finished: {remedy}")


def write_rows(shards: list[Path], jobs: list[Job], file: BinaryIO) -> None:
    """Writes the rows of all shards in input order, holding one row of each."""
    rows = [read_rows(path, job.lines) for path, job in zip(shards, jobs, strict=True)]
    previous, other, following = None, None, 0
    for key, data, path in heapq.merge(*rows, key=lambda row: row[0]):
        if key == previous:
            raise UserError(
                f"row {key[0]}, sample {key[1]} is in {other} and in {path}: run one of the two shards again"
            )
        if key[0] > following:  # every prompt has a row, if only one with an error
            raise UserError(f"prompt {following} has no row in any of the shards: run the command again")
        file.write(data)
        previous, other, following = key, path, key[0] + 1
    file.flush()
    os.fsync(file.fileno())


def main(out: Path, overwrite: bool = False) -> None:
    """Merges out-00000-of-00002.jsonl, ... into out.jsonl, as a job without shards would have written it.

    The shards stay. Merging again, also after a crash, does no harm.

    Args:
        out: The output file of the whole job, as it was given to each shard.
        overwrite: Replace `out` if it exists with other contents.
    """
    shards = find_shards(out)
    jobs = read_jobs(shards)
    job = Job(jobs[0].fingerprint, finished=True, lines=sum(job.lines for job in jobs))
    target = Path(os.path.realpath(out))  # replacing a link would not change the file that it points to
    partial = partial_path(target)
    with ExitStack() as stack:
        if target.exists():  # then it may be a job's that is still running
            stack.callback(os.close, open_locked(target))
        file = stack.enter_context(open(open_locked(partial), "wb"))
        try:
            file.truncate(0)
            write_rows(shards, jobs, file)
            if not (target.exists() and filecmp.cmp(partial, target, shallow=False)):
                if target.exists() and not overwrite:
                    raise UserError(f"{out} exists with other contents: give another --out, or --overwrite true")
                job_path(target).unlink(missing_ok=True)  # never beside rows that it is not about
                publish(partial, target)
        finally:
            partial.unlink(missing_ok=True)
        if not job_path(target).exists() or read_job(target) != job:
            write_job(target, job)
    print(f"{out} has the {job.lines} rows of {len(shards)} shards", file=sys.stderr)


if __name__ == "__main__":
    run_cli(main)
