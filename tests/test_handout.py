"""Prompts handed out by torchrun's store: each to one process, whoever asks; whatever dies, the file is the same.

Most processes here are forks with torchrun's variables and a store of this one; `-m long` runs torchrun itself.
"""

import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch.distributed as dist
from test_jobs import Job, Ran, checkpoint, mixed_lines, rows_in, run, small, write_lines  # noqa: F401 (two fixtures)

from lit_gen import answers
from lit_gen.handout import Handout, is_handed_out, pack_keys, unpack_keys
from lit_gen.results import Results
from lit_gen.shard import processes_here, shard_path
from lit_gen.utils import UserError
from scripts.merge_results import main as merge

TORCHRUN = {"TORCHELASTIC_USE_AGENT_STORE": "True", "WORLD_SIZE": "2"}


def serve() -> "dist.Store":
    """Torchrun's part: a store that lives as long as this reference."""
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))


@pytest.fixture
def store() -> "dist.Store":
    return serve()


def together(calls: list[Callable[[], Any]]) -> list[Any]:
    """What each returns, or the error that it raises, if they wait for each other."""
    results: list[Any] = [None] * len(calls)

    def call(i: int) -> None:
        try:
            results[i] = calls[i]()
        except Exception as error:
            results[i] = error

    threads = [threading.Thread(target=call, args=(i,)) for i in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def meet(store: "dist.Store", size: int) -> list[Handout]:
    clients = [dist.TCPStore("127.0.0.1", store.port, timeout=timedelta(seconds=60)) for _ in range(size)]
    return together([lambda rank=rank: Handout(clients[rank], rank, size) for rank in range(size)])


def takes(process: Handout, n: int) -> Iterator[int]:
    """The prompts that a process takes, of n, when it is asked for the next."""
    return (i for i in range(n) if process.takes_next())


# What is handed out


def test_a_prompt_goes_to_whoever_asks_and_none_to_who_does_not(store) -> None:
    slow, fast, idle = (takes(process, 100) for process in meet(store, 3))
    assert (next(slow), next(fast), next(fast)) == (0, 1, 2)
    assert (next(slow), next(fast)) == (3, 4)
    assert list(fast) == list(range(5, 100))  # all that the slow one has no room for, but not what it has
    assert list(slow) == list(idle) == []


@pytest.mark.parametrize("seed", range(3))
def test_in_any_order_of_asking_each_prompt_is_taken_once(store, seed: int) -> None:
    rng, taken = random.Random(seed), []
    asking = [takes(process, 50) for process in meet(store, 4)]
    while asking:
        process = rng.choice(asking)
        taken.append(next(process, None))
        if taken[-1] is None:
            asking.remove(process)
    assert [i for i in taken if i is not None] == list(range(50))


def test_after_a_restart_nothing_of_the_earlier_attempt_counts(store) -> None:
    """The store of torchrun outlives the processes, and what they wrote there is not told from what is new by a key."""
    store.set("lit_gen/1", "dead")  # it came, and died before anybody else did
    first = meet(store, 3)
    assert list(takes(first[2], 10)) == list(range(10))
    store.set("lit_gen/2", "died too")
    for size in (3, 2):
        again = meet(store, size)
        assert together([lambda p=p: p.tell(b"%d" % p.rank) for p in again]) == [[b"0", b"1", b"2"][:size]] * size
        assert list(takes(again[1], 10)) == list(range(10)) and list(takes(again[0], 10)) == []


def test_what_is_told_may_be_larger_than_the_store_takes_at_once(store) -> None:
    told = [random.Random(0).randbytes(9_000_000), b""]
    with pytest.raises(dist.DistError):
        dist.TCPStore("127.0.0.1", store.port).set("key", told[0])
    assert together([lambda p=p: p.tell(told[p.rank]) for p in meet(store, 2)]) == [told, told]


def test_a_store_that_is_gone_is_one_line() -> None:
    store = serve()
    (process,) = meet(store, 1)
    del store
    with pytest.raises(OSError, match="torchrun or one of its processes is gone: the same command goes on"):
        process.takes_next()


@pytest.mark.parametrize("n", [0, 1, 5000])
def test_keys_are_packed_in_few_bytes(n: int) -> None:
    rng = random.Random(n)
    keys = rng.sample([(index, sample) for index in range(20_000) for sample in range(1 + index % 3)], n)
    data = pack_keys(np.array(keys, dtype=np.int64).reshape(-1, 2).T)
    assert sorted(unpack_keys(data)) == sorted(keys)
    assert len(data) < 100 + 3 * n


# When it is


def test_prompts_are_handed_out_by_torchrun_to_files_alone(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    assert is_handed_out(None, out, "in.jsonl", TORCHRUN)
    for shard, path, environ in (
        ("0/2", out, TORCHRUN),
        (None, None, TORCHRUN),
        (None, out, TORCHRUN | {"WORLD_SIZE": "1"}),
        (None, out, TORCHRUN | {"TORCHELASTIC_USE_AGENT_STORE": "False"}),
        (None, out, {"RANK": "0", "WORLD_SIZE": "2"}),  # some other launcher's, or left over
        (None, out, {"SLURM_PROCID": "0", "SLURM_NTASKS": "2"}),
    ):
        assert not is_handed_out(shard, path, "-", environ)
    with pytest.raises(UserError, match="^the 2 processes of torchrun cannot share stdin or a pipe: put the prompts"):
        is_handed_out(None, out, "-", TORCHRUN)
    shard_path(out, 3, 4).touch()
    with pytest.raises(UserError, match="out.jsonl lie files of 4 processes, but this is one of 2: go on with 4"):
        is_handed_out(None, out, "in.jsonl", TORCHRUN)


@pytest.mark.parametrize(
    ("environ", "n"),
    [
        ({}, 1),
        ({"LOCAL_WORLD_SIZE": "4", "WORLD_SIZE": "8", "SLURM_STEP_TASKS_PER_NODE": "1"}, 4),
        ({"SLURM_STEP_TASKS_PER_NODE": "8"}, 8),
        ({"SLURM_STEP_TASKS_PER_NODE": "3(x12),4"}, 4),
        ({"LOCAL_WORLD_SIZE": "x"}, 1),
    ],
)
def test_processes_on_this_machine_are_the_launchers(environ: dict[str, str], n: int) -> None:
    assert processes_here(environ) == n


def test_another_job_than_the_first_process_has_is_refused(store, tmp_path: Path) -> None:
    jobs = [{"prompts": "a", "shard": f"{rank}/2"} for rank in range(2)]
    for prompts, message in (("a", None), ("b", r'^process 1 has another prompts \(was "a", is "b"\)')):
        jobs[1]["prompts"] = prompts
        files = [Results.open(tmp_path / f"{prompts}{rank}.jsonl", job) for rank, job in enumerate(jobs)]
        files[0].write({"index": 3, "sample": 1})
        got = together([lambda p=p, files=files: p.compare(files[p.rank]) for p in meet(store, 2)])
        for file in files:
            file.close()
        if message is None:
            (first, _), (second, finished) = got
            assert len(first) == 0 and len(second) == 1 and (3, 1) in second and not finished
        else:
            assert all(re.match(message, str(error)) for error in got)


# Whole jobs


class Torchrun:
    """base.py in forks with the variables that torchrun sets; `before[rank]` is called in one of them first."""

    def __init__(self, store, folder: Path, size: int, *arguments: Any, before: dict[int, Callable] | None = None):
        self.folder, self.out = folder, folder / "out.jsonl"

        def environ(rank: int) -> None:
            os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)}
            os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
            os.environ |= {"TORCHELASTIC_USE_AGENT_STORE": "True"}
            (before or {}).get(rank, lambda: None)()

        arguments = [*arguments, "--out", self.out]
        self.jobs = [Job(folder, *arguments, before=lambda rank=rank: environ(rank)) for rank in range(size)]
        self.paths = [shard_path(self.out, rank, size) for rank in range(size)]

    def end(self) -> list[Ran]:
        """As torchrun does, ends the others when one fails."""
        processes = [job.process for job in self.jobs]
        while any(process.is_alive() for process in processes) and not any(process.exitcode for process in processes):
            time.sleep(0.02)
        for process in processes:
            process.terminate()
        return [job.end() for job in self.jobs]

    def kill(self, rank: int) -> list[Ran]:
        self.jobs[rank].process.kill()
        self.jobs[rank].process.join()
        return self.end()

    def rows(self) -> list[list[dict[str, Any]]]:
        """Of each process, those that are whole."""
        files = [path.read_bytes() if path.exists() else b"" for path in self.paths]
        return [[json.loads(line) for line in content.split(b"\n")[:-1]] for content in files]


def places(rows: list[dict[str, Any]]) -> list[int]:
    return [row["index"] if "index" in row else int(row["id"].removeprefix("batch_req_")) for row in rows]


@pytest.mark.parametrize("size", [2, 3])
def test_merged_files_are_the_undivided_job(store, small, tmp_path: Path, size: int) -> None:  # noqa: F811
    arguments, expected = small
    ranks = Torchrun(store, tmp_path, size, *arguments)
    assert [ran.status for ran in ranks.end()] == [0] * size, ranks.end()
    found = [set(places(rows)) for rows in ranks.rows()]
    assert sum(map(len, found)) == 60 == len(set().union(*found))  # each prompt in one file
    merge(tmp_path / "out.jsonl")
    assert (tmp_path / "out.jsonl").read_bytes() == expected
    again = Torchrun(store, tmp_path, size, *arguments).end()  # its store already had one job
    assert again[0].err.splitlines()[1:] == [
        f"prompts go to whichever of the {size} processes has room",
        f"resumed: {expected.count(10)} done, 0 left",
    ]
    assert [ran.status for ran in again] == [0] * size and "resumed" not in again[1].err


@pytest.mark.parametrize("n_rows", [0, 5, 20, 45])
def test_killed_and_run_again_is_the_undisturbed_job(store, small, tmp_path: Path, n_rows: int) -> None:  # noqa: F811
    arguments, expected = small
    ranks = Torchrun(store, tmp_path, 3, *arguments)
    while sum(map(len, ranks.rows())) < n_rows:
        time.sleep(0.002)
    assert ranks.kill(random.Random(n_rows).randrange(3))
    done = sum(map(len, ranks.rows()))
    again = Torchrun(store, tmp_path, 3, *arguments).end()
    assert [ran.status for ran in again] == [0] * 3, again
    if done:  # all that is left is counted, not only what the first will take; OpenAI's lines are of two rows
        left = int(re.search(rf"resumed: {done} done, (\d+) left", again[0].err)[1])
        assert done + left >= expected.count(10)
    merge(tmp_path / "out.jsonl")
    assert (tmp_path / "out.jsonl").read_bytes() == expected


def test_who_is_busy_leaves_the_rest_to_the_other_and_what_dies_with_it_is_done_again(
    store,
    small,  # noqa: F811
    tmp_path: Path,
) -> None:
    """A process stands still with its first rows until the other has no more to do; then it is killed."""
    arguments, expected = small
    held = tmp_path / "held"

    def stand_still() -> None:
        step = answers.Answers.step

        def waiting(self: answers.Answers) -> None:
            step(self)
            if self._open:
                held.write_text(json.dumps(list(self._open)))
                while True:
                    time.sleep(0.05)
                    step(self)  # raises when it is to end

        answers.Answers.step = waiting

    ranks = Torchrun(store, tmp_path, 2, *arguments, "--max_batch_size", 2, before={1: stand_still})
    side = tmp_path / "out-00000-of-00002.jsonl.job.json"
    while not side.exists() or not json.loads(side.read_text())["finished"]:
        time.sleep(0.01)
        assert all(job.process.is_alive() for job in ranks.jobs), ranks.end()
    done, busy = places(sum(ranks.rows(), [])), json.loads(held.read_text())
    assert 1 <= len(busy) <= 2  # as many as it has room for
    assert sorted({*done, *busy}) == list(range(60)) and not set(done) & set(busy)
    assert [ran.status for ran in ranks.kill(1)] == [-signal.SIGTERM, -signal.SIGKILL]
    with pytest.raises(UserError, match="out-00001-of-00002.jsonl is not finished"):
        merge(tmp_path / "out.jsonl")

    def let_the_other() -> None:
        requests = answers.Answers.requests

        def waiting(self: answers.Answers) -> Iterator[Any]:
            while len({*places(sum(ranks.rows(), []))}) < 60:
                time.sleep(0.05)
                self.interrupts.check()
            yield from requests(self)

        answers.Answers.requests = waiting

    # the file of the first goes on though it was finished
    ranks = Torchrun(store, tmp_path, 2, *arguments, before={1: let_the_other})
    assert [ran.status for ran in ranks.end()] == [0, 0], ranks.end()
    merge(tmp_path / "out.jsonl")
    assert (tmp_path / "out.jsonl").read_bytes() == expected


def test_more_processes_than_prompts(store, checkpoint: Path, tmp_path: Path) -> None:  # noqa: F811
    arguments = ["--checkpoint_dir", checkpoint, "--max_new_tokens", 3, "--prompts", '["a", "b"]']
    ranks = Torchrun(store, tmp_path, 4, *arguments, "--stats_json", tmp_path / "stats.json")
    assert [ran.status for ran in ranks.end()] == [0] * 4, ranks.end()
    merge(tmp_path / "out.jsonl")
    assert [line["prompt"] for line in rows_in(tmp_path / "out.jsonl")] == ["a", "b"]
    stats = [json.loads(shard_path(tmp_path / "stats.json", rank, 4).read_text()) for rank in range(4)]
    assert sum(numbers["rows"] for numbers in stats) == 2


def test_files_that_were_handed_out_do_not_go_on_as_shards(store, small, tmp_path: Path) -> None:  # noqa: F811
    arguments = [*small[0], "--prompts", '["a", "b", "c"]', "--max_new_tokens", 2]
    assert [ran.status for ran in Torchrun(store, tmp_path, 2, *arguments).end()] == [0, 0]
    for index, rows in enumerate(map(rows_in, [shard_path(tmp_path / "out.jsonl", i, 2) for i in range(2)])):
        ran = run(tmp_path, *arguments, "--out", tmp_path / "out.jsonl", "--shard", f"{index}/2")
        refused = f'another shard (was "{index}/2, handed out", is "{index}/2")' in ran.err
        assert (ran.status, refused) == ((2, True) if rows else (0, False))


# Torchrun itself


def start_torchrun(out: Path, arguments: list[Any], *options: str) -> subprocess.Popen:
    """torchrun of base.py; what it says goes to a file beside `out`."""
    command = [sys.executable, "-m", "torch.distributed.run", *options, Path(__file__).parents[1] / "generate/base.py"]
    with open(out.parent / f"log{time.monotonic_ns()}", "w") as log:
        command = list(map(str, [*command, *arguments, "--out", out]))
        return subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, env=os.environ | {"OMP_NUM_THREADS": "1"}
        )


def logs(out: Path) -> str:
    return "\n".join(file.read_text() for file in sorted(out.parent.glob("log*")))


def kill_after(n_rows: int, out: Path, rank: int, *torchruns: subprocess.Popen) -> None:
    """Kills the process of this number as soon as all together have written so many rows."""
    while sum(file.read_bytes().count(b"\n") for file in out.parent.glob("out-*.jsonl")) < n_rows:
        time.sleep(0.01)
        assert all(torchrun.poll() is None for torchrun in torchruns), logs(out)
    workers = [worker for torchrun in torchruns for worker in psutil.Process(torchrun.pid).children()]
    (victim,) = [worker for worker in workers if worker.environ().get("RANK") == str(rank)]
    victim.kill()


def merged(out: Path) -> bytes:
    merge(out)
    counts = [(file.name, file.read_bytes().count(b"\n")) for file in sorted(out.parent.glob("out-*.jsonl"))]
    print(f"\nrows in {', '.join(f'{name}: {count}' for name, count in counts)}")
    return out.read_bytes()


def test_torchrun_does_what_the_forks_do(small, tmp_path: Path) -> None:  # noqa: F811
    arguments, expected = small
    out = tmp_path / "out.jsonl"
    assert start_torchrun(out, arguments, "--nproc-per-node", "2").wait() == 0, logs(out)
    assert "prompts go to whichever of the 2 processes has room" in logs(out) and merged(out) == expected


@pytest.fixture(scope="module")
def thousand(stories: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Any], bytes]:
    """A job of 1,000 prompts of a trained model, and the file that one process makes of it."""
    folder = tmp_path_factory.mktemp("thousand")
    prompts = write_lines(folder / "in.jsonl", mixed_lines(1000, longest=150, context=512))
    arguments = ["--checkpoint_dir", stories, "--prompts", prompts, "--max_batch_size", 16]
    assert run(folder, *arguments, "--out", folder / "out.jsonl").status == 0
    return arguments, (folder / "out.jsonl").read_bytes()


@pytest.mark.long
@pytest.mark.parametrize(("n_rows", "rank"), [(None, 0), (1, 3), (300, 0), (700, 2)])
def test_four_processes_and_a_thousand_prompts(thousand, tmp_path: Path, n_rows: int | None, rank: int) -> None:
    arguments, expected = thousand
    out = tmp_path / "out.jsonl"
    torchrun = start_torchrun(out, arguments, "--nproc-per-node", "4")
    if n_rows is not None:
        kill_after(n_rows, out, rank, torchrun)
        assert torchrun.wait() == 1, logs(out)
        with pytest.raises(UserError, match="is not finished"):
            merge(out)
        torchrun = start_torchrun(out, arguments, "--nproc-per-node", "4")
    assert torchrun.wait() == 0, logs(out)
    assert merged(out) == expected


@pytest.mark.long
@pytest.mark.parametrize("kill", [False, True])
def test_two_machines(thousand, tmp_path: Path, kill: bool) -> None:
    """Both are this one. If a process dies torchrun starts all again, on both, and nothing else is to be done."""
    arguments, expected = thousand
    out, port = tmp_path / "out.jsonl", serve().port  # a free one, of a store that ends at once
    options = ["--nnodes", "2", "--nproc-per-node", "2"]
    if kill:
        options += ["--max-restarts", "1", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{port}"]
    else:
        options += ["--master-addr", "localhost", "--master-port", str(port)]
    torchruns = [start_torchrun(out, arguments, *options, "--node-rank", str(rank)) for rank in range(2)]
    if kill:
        kill_after(300, out, 3, *torchruns)
    assert [torchrun.wait() for torchrun in torchruns] == [0, 0], logs(out)
    assert merged(out) == expected
