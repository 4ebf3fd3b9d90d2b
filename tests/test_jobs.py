"""Whole jobs, `--prompts in.jsonl --out out.jsonl`: whatever kills or disturbs one, its rows end up the same.

Most jobs run in forked processes, which are killed like any other but need not import PyTorch again.
"""

import json
import multiprocessing
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
import tty
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from conftest import llama_config, randomized, save_byte_tokenizer

from generate import base
from lit_gen import answers, todo
from lit_gen.export import save_lit
from lit_gen.model import GPT
from lit_gen.prompts import read_prompts
from lit_gen.results import Results
from lit_gen.utils import run_cli
from scripts.merge_results import main as merge

SAMPLED = {"temperature": 0.8, "top_p": 0.95}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A lit folder with a random model and a byte-level tokenizer with a chat template, made here."""
    folder = tmp_path_factory.mktemp("lit")
    template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    save_byte_tokenizer(folder / "source", 300, Path(__file__).read_text(), chat_template=template)
    save_lit(randomized(llama_config(vocab_size=300, n_layer=1)), folder / "model", folder / "source")
    return folder / "model"


class Ran(NamedTuple):
    status: int  # as multiprocessing gives it: negative after a signal that killed
    out: str
    err: str


class Job:
    """base.py with these arguments in a process of its own; `before` is called there first, to disturb it.

    stdout and stderr go to files in `folder`, or stdout to `terminal`, an open descriptor.
    """

    def __init__(
        self,
        folder: Path,
        *arguments: Any,
        before: Callable[[], None] | None = None,
        terminal: int | None = None,
    ) -> None:
        def child() -> None:
            os.environ["TOKENIZERS_PARALLELISM"] = "false"  # its threads were not forked
            torch.set_num_threads(1)  # nor were those of PyTorch
            sys.stdout = open(self.logs[0] if terminal is None else terminal, "w", newline="")
            sys.stderr = open(self.logs[1], "w", buffering=1)
            sys.argv = ["base.py", *map(str, arguments)]
            if before is not None:
                before()
            run_cli(base.main)

        name = f"log{time.monotonic_ns()}"
        self.logs = (folder / f"{name}.out", folder / f"{name}.err")
        self.process = multiprocessing.get_context("fork").Process(target=child, daemon=True)
        self.process.start()

    def end(self) -> Ran:
        self.process.join()
        return Ran(self.process.exitcode, *(log.read_bytes().decode() if log.exists() else "" for log in self.logs))


def run(folder: Path, *arguments: Any, **how: Any) -> Ran:
    return Job(folder, *arguments, **how).end()


def write_lines(path: Path, lines: Iterable[Any]) -> Path:
    """A .jsonl file; bytes stand for themselves."""
    path.write_bytes(b"".join((x if isinstance(x, bytes) else json.dumps(x).encode()) + b"\n" for x in lines))
    return path


def mixed_lines(n: int, longest: int, context: int, seed: int = 0) -> list[Any]:
    """Everything that a job may meet: greedy and sampled, repeated, two samples, OpenAI's, malformed, too long."""
    rng, words = random.Random(seed), "Once upon a time there was a little dog named Max who saw big red balls".split()
    lines: list[Any] = []
    for i in range(n):
        text = " ".join(rng.choice(words) for _ in range(rng.randint(0, 12)))[: rng.randint(1, 50)]
        line = {"prompt": text, "max_new_tokens": rng.randint(1, longest)}
        if i % 3 == 1:
            line |= SAMPLED
        if i % 6 == 1:
            line |= {"n": 2}
        if i % 9 == 4:
            line |= {"prompt": "Once upon", "max_new_tokens": longest}  # the same again and again
        if i % 10 == 5:
            body = {"prompt": text, "max_tokens": rng.randint(1, longest), "n": 2, "temperature": 0.7}
            line = {"custom_id": f"job-{i}", "url": "/v1/completions", "body": body}
        if i % 25 == 8:
            line = [b'{"prompt": "torn', b"\xff\xfe", b"[]", b'{"prompt": "x", "n": 0}'][i // 25 % 4]
        if i % 25 == 16:
            line = {"prompt": [5] * context, "n": 2, "temperature": i % 2}
        lines.append(line)
    return lines


def rows_in(out: Path) -> list[dict[str, Any]]:
    """The rows of a file that holds nothing but whole ones."""
    content = out.read_bytes()
    assert content == b"" or content.endswith(b"\n")
    return [json.loads(line) for line in content.splitlines()]


def wait_for_rows(job: Job, out: Path, n: int) -> None:
    while job.process.is_alive() and (not out.exists() or out.read_bytes().count(b"\n") < n):
        time.sleep(0.002)
    assert job.process.is_alive(), job.end().err


@pytest.fixture(scope="module")
def small(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], bytes]:
    """A job of 60 prompts: its arguments but for --out, and the file that it writes if nothing disturbs it."""
    folder = tmp_path_factory.mktemp("small")
    prompts = write_lines(folder / "in.jsonl", mixed_lines(60, longest=30, context=256))
    arguments = ["--checkpoint_dir", checkpoint, "--chat", "false", "--max_batch_size", 8, "--prompts", prompts]
    arguments = list(map(str, arguments))
    ran = run(folder, *arguments, "--out", folder / "out.jsonl")
    assert ran.status == 0 and ran.out == "", ran.err
    content = (folder / "out.jsonl").read_bytes()
    lines = rows_in(folder / "out.jsonl")
    assert len({line.get("index", line.get("id")) for line in lines}) == 60
    assert len({line.get("text") for line in lines}) > 40  # so that rows that are mixed up would show
    assert sum("error" in line for line in lines if "index" in line) == 5
    return arguments, content


@pytest.fixture(scope="module")
def half(small: tuple[list[str], bytes], tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The files of that job when it was killed halfway."""
    folder = tmp_path_factory.mktemp("half")
    job = Job(folder, *small[0], "--out", folder / "out.jsonl")
    wait_for_rows(job, folder / "out.jsonl", 40)
    job.process.kill()
    assert job.end().status == -signal.SIGKILL
    content = (folder / "out.jsonl").read_bytes()
    side = (folder / "out.jsonl.job.json").read_bytes()
    return {"out.jsonl": content[: content.rindex(b"\n") + 1], "out.jsonl.job.json": side}


@pytest.fixture
def begun(small: tuple[list[str], bytes], half: dict[str, bytes], tmp_path: Path) -> tuple[list[str], bytes]:
    """The same in this folder: the command, and the rows that are there."""
    for name, content in half.items():
        (tmp_path / name).write_bytes(content)
    return [*small[0], "--out", str(tmp_path / "out.jsonl")], half["out.jsonl"]


# Killed at any moment


def die_at(call: int, torn: bool) -> Callable[[], None]:
    """Makes a process kill itself at its `call`-th change of a file, before or after it, or halfway through a write."""

    def before() -> None:
        left = call

        def wrap(name: str) -> None:
            original = getattr(os, name)

            def call_or_die(*arguments: Any, **keywords: Any) -> Any:
                nonlocal left
                left -= 1
                if left == 0 and torn:
                    if name == "write":
                        original(arguments[0], arguments[1][: len(arguments[1]) // 2])
                    os.kill(os.getpid(), signal.SIGKILL)
                result = original(*arguments, **keywords)
                if left == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                return result

            setattr(os, name, call_or_die)

        for name in ("write", "fsync", "replace", "ftruncate", "pread", "dup2", "open"):
            wrap(name)

    return before


class Kills(NamedTuple):
    early: int = 0  # before the first row was in the file
    between: int = 0
    late: int = 0  # all rows were there, but the job was not finished
    refused: int = 0  # second processes that were told to wait


def kill_often(folder: Path, arguments: list[str], expected: bytes, seconds: float, n_kills: int) -> Kills:
    """Runs the job again and again, killing it n_kills times; each time it gets through its file is the expected one.

    Args:
        seconds: that the undisturbed job takes.
    """
    rng, out, n_lines = random.Random(0), folder / "out.jsonl", expected.count(b"\n")
    early = between = late = refused = 0
    while early + between + late < n_kills:
        for file in (out, Path(f"{out}.job.json")):
            file.unlink(missing_ok=True)
        status = -signal.SIGKILL
        while status != 0:
            last = early + between + late >= n_kills
            how = rng.choice(["time", "time", "call", "late"]) if not last else "not at all"
            calls = {"call": rng.randint(1, n_lines), "late": rng.randint(n_lines, 3 * n_lines + 20)}
            before = die_at(calls[how], rng.random() < 0.5) if how in calls else None
            jobs = [Job(folder, *arguments, "--out", out, before=before)]
            if how == "time":
                jobs += [Job(folder, *arguments, "--out", out)] if rng.random() < 0.3 else []
                time.sleep(rng.uniform(0, seconds) * rng.choice([0.1, 0.5, 1]))
                os.kill(jobs[0].process.pid, signal.SIGKILL)
            endings = [job.end() for job in jobs]
            for ran in endings:
                busy = ran.status == 2 and "another process is writing" in ran.err
                assert ran.status in (0, -signal.SIGKILL) or busy, ran.err
                refused += busy
            status = 0 if any(ran.status == 0 for ran in endings) else -signal.SIGKILL
            if -signal.SIGKILL in [ran.status for ran in endings] and status != 0:
                n = out.read_bytes().count(b"\n") if out.exists() else 0
                early, between, late = early + (n == 0), between + (0 < n < n_lines), late + (n >= n_lines)
        assert out.read_bytes() == expected
        left = {file.name for file in folder.iterdir() if "log" not in file.name}
        assert left <= {"in.jsonl", out.name, f"{out.name}.job.json"}
    return Kills(early, between, late, refused)


def test_a_job_killed_at_any_moment_ends_up_with_the_same_bytes(small: tuple[list[str], bytes], tmp_path: Path) -> None:
    arguments, expected = small
    kills = kill_often(tmp_path, arguments, expected, seconds=1.0, n_kills=5)
    assert kills.between or kills.late


@pytest.mark.long
def test_100_kills_of_a_job_of_500_prompts(stories: Path, tmp_path: Path) -> None:
    prompts = write_lines(tmp_path / "in.jsonl", mixed_lines(500, longest=60, context=512))
    arguments = ["--checkpoint_dir", str(stories), "--prompts", str(prompts)]
    start = time.monotonic()
    assert run(tmp_path, *arguments, "--out", tmp_path / "out.jsonl").status == 0
    seconds, expected = time.monotonic() - start, (tmp_path / "out.jsonl").read_bytes()
    kills = kill_often(tmp_path, arguments, expected, seconds, n_kills=100)
    print(f"\n{len(expected.splitlines())} rows in {seconds:.1f} s undisturbed; {kills}")
    assert kills.between >= 30 and kills.late >= 5 and kills.early >= 5


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_job_with_its_rows_whole(small: tuple[list[str], bytes], tmp_path: Path, signum: int) -> None:
    arguments, expected = small
    out = tmp_path / "out.jsonl"
    job = Job(tmp_path, *arguments, "--out", out)
    wait_for_rows(job, out, 3)
    os.kill(job.process.pid, signum)
    ran = job.end()
    n = len(rows_in(out))
    assert ran.status == 128 + signum and 3 <= n < 60
    hint = f"{n} rows are in {out}; the same command goes on"
    assert ran.err.splitlines()[-2:] == [hint, f"error: interrupted by {signal.Signals(signum).name}"]
    ran = run(tmp_path, *arguments, "--out", out)
    assert ran.status == 0 and ran.err.startswith(f"resumed: {n} done, ") and out.read_bytes() == expected


def test_the_script_itself_ends_on_sigterm_and_goes_on(small: tuple[list[str], bytes], tmp_path: Path) -> None:
    arguments, expected = small
    out = tmp_path / "out.jsonl"
    command = [sys.executable, base.__file__, *arguments, "--out", "out.jsonl"]
    environ = os.environ | {"OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, cwd=tmp_path, env=environ, stderr=subprocess.PIPE, text=True)
    while process.poll() is None and (not out.exists() or out.read_bytes().count(b"\n") < 3):
        time.sleep(0.005)
    process.terminate()
    err = process.communicate()[1]
    assert process.returncode == 143 and 3 <= len(rows_in(out)) < 60, err
    assert err.count("the same command goes on") == 1 and "Traceback" not in err
    assert run(tmp_path, *arguments, "--out", out).status == 0 and out.read_bytes() == expected


# Disturbed


def test_a_full_disk_is_one_line_and_the_job_goes_on_when_there_is_room(small, tmp_path: Path) -> None:
    arguments, expected = small
    out, limit = tmp_path / "out.jsonl", len(expected) // 2

    def before() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))

    ran = run(tmp_path, *arguments, "--out", out, before=before)
    n = len(rows_in(out))
    assert ran.status == 1 and 10 < n < 60 and limit - 2000 < out.stat().st_size <= limit
    lines = [line for line in ran.err.splitlines() if line.startswith("error: ")]
    assert lines == [f"error: File too large: {n} rows are safe in {out}; mend this, and the same command goes on"]
    assert "Traceback" not in ran.err and "interrupted" not in ran.err
    assert run(tmp_path, *arguments, "--out", out).status == 0 and out.read_bytes() == expected


@pytest.mark.parametrize("tail", [b'{"index": 3, "te', b"\x00" * 5000, b'{"index": 3}\x00\n', b"\xff\n\n"])
def test_a_torn_end_of_the_file_is_dropped_and_done_again(small, begun, tmp_path: Path, tail: bytes) -> None:
    arguments, content = begun
    (tmp_path / "out.jsonl").write_bytes(content + tail)
    assert run(tmp_path, *arguments).status == 0 and (tmp_path / "out.jsonl").read_bytes() == small[1]


def fail_forward(when: Callable[[int, int, int], bool]) -> Callable[[], None]:
    """Makes calls of the model fail for want of memory: `when(number of the call, rows, tokens of each)`."""

    def before() -> None:
        original, calls = GPT.forward, 0

        def forward(self: GPT, idx: torch.Tensor, *arguments: Any, **keywords: Any) -> torch.Tensor:
            nonlocal calls
            calls += 1
            if when(calls, *idx.shape):
                raise torch.OutOfMemoryError("tried to allocate 9 GB")
            return original(self, idx, *arguments, **keywords)

        GPT.forward = forward

    return before


@pytest.mark.parametrize(
    ("when", "notices"),
    [
        (lambda call, rows, length: call == 40, 1),
        (lambda call, rows, length: rows > 3, 2),  # 8, 4, 2 rows
        (lambda call, rows, length: call in (1, 30, 90), 3),
    ],
)
def test_out_of_memory_leaves_all_rows_as_they_are(small, tmp_path: Path, when: Callable, notices: int) -> None:
    arguments, expected = small
    ran = run(tmp_path, *arguments, "--out", tmp_path / "out.jsonl", before=fail_forward(when))
    found = ran.err.count("out of memory (tried to allocate 9 GB): going on with ")
    assert (ran.status, found) == (0, notices), ran.err
    assert (tmp_path / "out.jsonl").read_bytes() == expected


def test_a_row_that_does_not_fit_harms_no_other_and_is_tried_again(checkpoint: Path, tmp_path: Path) -> None:
    lines = mixed_lines(9, longest=9, context=256)
    prompts = write_lines(tmp_path / "in.jsonl", [*lines[:2], {"prompt": [7] * 200, "max_new_tokens": 9}, *lines[2:]])
    arguments = ["--checkpoint_dir", checkpoint, "--prompts", prompts, "--out"]
    assert run(tmp_path, *arguments, tmp_path / "undisturbed.jsonl").status == 0
    never = fail_forward(lambda call, rows, length: length >= 200)
    ran = run(tmp_path, *arguments, tmp_path / "out.jsonl", before=never)
    last = "error: 1 rows did not fit into memory: the same command tries them again"
    assert ran.status == 1 and ran.err.splitlines()[-1] == last
    written, expected = rows_in(tmp_path / "out.jsonl"), rows_in(tmp_path / "undisturbed.jsonl")
    assert len(written) == len(expected) - 1 and all(line in expected for line in written)
    assert 2 not in [line.get("index") for line in written]
    assert run(tmp_path, *arguments, tmp_path / "out.jsonl").status == 0
    assert (tmp_path / "out.jsonl").read_bytes() == (tmp_path / "undisturbed.jsonl").read_bytes()


# Refused before any work


def no_model() -> None:
    """Fails the process if the model is loaded."""
    GPT.from_checkpoint = lambda *_: os._exit(99)


def refused(folder: Path, *arguments: Any, before: Callable[[], None] = no_model) -> str:
    """The one line on stderr of a command that is refused before the model is loaded."""
    ran = run(folder, *arguments, before=before)
    assert (ran.status, ran.out) == (2, "") and ran.err.startswith("error: ") and ran.err.count("\n") == 1, ran
    return ran.err


def test_strict_refuses_a_bad_line_before_any_work_and_leaves_the_file(small, begun, tmp_path: Path) -> None:
    arguments, content = begun
    line = refused(tmp_path, *arguments, "--strict", "true")
    assert re.match("error: line [0-9]+ of .*in.jsonl", line) and (tmp_path / "out.jsonl").read_bytes() == content
    line = refused(tmp_path, *arguments[:-1], tmp_path / "new.jsonl", "--strict", "true")
    assert line.startswith("error: line 9 of ") and "not valid JSON" in line
    assert run(tmp_path, *arguments).status == 0 and (tmp_path / "out.jsonl").read_bytes() == small[1]


def test_another_job_may_not_go_on_in_this_file(small, begun, checkpoint: Path, tmp_path: Path) -> None:
    arguments, content = begun
    other = tmp_path / "other.jsonl"
    other.write_bytes(Path(arguments[-3]).read_bytes() + b'{"prompt": "one more"}\n')
    model = Path(shutil.copytree(checkpoint, tmp_path / "model"))
    weights = bytearray((model / "lit_model.safetensors").read_bytes())
    weights[-1] ^= 1
    (model / "lit_model.safetensors").write_bytes(weights)
    for changes, part in (
        (["--temperature", "0.5"], "temperature (was 0.0, is 0.5)"),
        (["--stop", '["."]'], "stop (was "),
        (["--chat", "true"], "chat (was false, is true)"),
        (["--prompts", other], "prompts (was "),
        (["--checkpoint_dir", model], "model.lit_model.safetensors (was "),
        (["--precision", "bf16-true"], 'precision (was "32-true", is "bf16-true")'),
        (["--quantize", "int8"], 'precision (was "32-true", is "32-true int8")'),
    ):
        line = refused(tmp_path, *arguments, *changes)
        assert f"{tmp_path / 'out.jsonl'} was begun with another {part}" in line and "give another --out" in line
    assert (tmp_path / "out.jsonl").read_bytes() == content
    assert run(tmp_path, *arguments).status == 0 and (tmp_path / "out.jsonl").read_bytes() == small[1]


def test_a_finished_job_is_not_run_again(small, begun, tmp_path: Path) -> None:
    arguments, content = begun
    ran, total = run(tmp_path, *arguments), small[1].count(b"\n")
    assert ran.status == 0 and ran.err.startswith(f"resumed: {len(content.splitlines())} done, ")
    before = (tmp_path / "out.jsonl").stat()
    assert run(tmp_path, *arguments, before=no_model) == (0, "", f"resumed: {total} done, 0 left\n")
    after = (tmp_path / "out.jsonl").stat()
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


def test_a_job_killed_before_the_sorting_is_finished_without_the_model(small, tmp_path: Path) -> None:
    def before() -> None:
        Results.finish = lambda *_: os._exit(77)

    arguments, expected = small
    arguments = [*arguments, "--out", tmp_path / "out.jsonl"]
    assert run(tmp_path, *arguments, before=before).status == 77
    assert (tmp_path / "out.jsonl").read_bytes() != expected
    ran = run(tmp_path, *arguments, before=no_model)
    n = expected.count(b"\n")
    assert ran == (0, "", f"resumed: {n} done, 0 left\n") and (tmp_path / "out.jsonl").read_bytes() == expected


# Several processes, several formats


@pytest.mark.parametrize("launcher", [None, ("RANK", "WORLD_SIZE"), ("SLURM_PROCID", "SLURM_NTASKS")])
def test_merged_shards_are_the_undivided_job(small, tmp_path: Path, launcher: tuple[str, str] | None) -> None:
    arguments, expected = small
    out = tmp_path / "out.jsonl"
    for index in range(2):
        shard = ["--shard", f"{index}/2"] if launcher is None else []
        environ = dict(zip(launcher, (str(index), "2"), strict=True)) if launcher else {}
        ran = run(tmp_path, *arguments, *shard, "--out", out, before=lambda environ=environ: os.environ.update(environ))
        assert ran.status == 0, ran.err
    assert not out.exists() and (tmp_path / "out-00001-of-00002.jsonl").exists()
    merge(out)
    assert out.read_bytes() == expected
    assert run(tmp_path, *arguments, "--out", out, before=no_model).err.endswith("0 left\n")


def test_a_shard_without_prompts_needs_no_model(checkpoint: Path, tmp_path: Path) -> None:
    arguments = ["--checkpoint_dir", checkpoint, "--max_new_tokens", "3", "--prompts", '["a", "b"]']
    arguments += ["--out", tmp_path / "out.jsonl", "--shard"]
    for index, before in enumerate([None, None, no_model]):
        ran = run(tmp_path, *arguments, f"{index}/3", before=before)
        assert ran.status == 0, ran.err
    merge(tmp_path / "out.jsonl")
    assert [line["prompt"] for line in rows_in(tmp_path / "out.jsonl")] == ["a", "b"]


def test_openai_lines_and_ours_side_by_side_go_on_in_the_middle_of_a_group(checkpoint: Path, tmp_path: Path) -> None:
    def request(name: str, **body: Any) -> dict[str, Any]:
        return {"custom_id": name, "method": "POST", "url": "/v1/completions", "body": {"max_tokens": 30, **body}}

    chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
    lines = [
        request("first", prompt="a b", n=2, temperature=1.0),
        {"id": "ours", "prompt": "a b", "n": 2, "temperature": 1.0, "max_new_tokens": 30},
        {"custom_id": "chat", "url": "/v1/chat/completions", "body": {"model": "m", **chat}},
        request("bad", prompt="x", tools=[]),
        request("last", prompt="a b", n=2, temperature=1.0),
    ]
    prompts, out = write_lines(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    arguments = ["--checkpoint_dir", checkpoint, "--max_batch_size", 1, "--ignore_eos", "true", "--prompts", prompts]
    assert run(tmp_path, *arguments, "--out", out).status == 0
    expected, written = out.read_bytes(), rows_in(out)
    assert [line.get("custom_id", line.get("id")) for line in written] == "first ours ours chat bad last".split()
    assert [line.get("sample") for line in written] == [None, 0, 1, None, None, None]
    texts = [choice["text"] for i in (0, 5) for choice in written[i]["response"]["body"]["choices"]]
    texts += [line["text"] for line in written[1:3]]
    assert len(set(texts)) == 6  # six samples of one prompt, none the same
    assert written[0]["response"]["body"]["usage"]["completion_tokens"] == 60
    assert written[4]["response"]["status_code"] == 400 and "tools" in written[4]["error"]["message"]

    def die_after(n_rows: int) -> None:  # they run one after the other
        take, left = answers.Answers.take, n_rows

        def counting(self: answers.Answers, row: Any) -> None:
            nonlocal left
            take(self, row)
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

        answers.Answers.take = counting

    for n_rows, n_lines in ((1, 0), (3, 2), (7, 5)):
        out.unlink()
        ran = run(tmp_path, *arguments, "--out", out, before=partial(die_after, n_rows))
        assert ran.status == -signal.SIGKILL and len(rows_in(out)) == n_lines
        ran = run(tmp_path, *arguments, "--out", out)
        assert ran.status == 0 and out.read_bytes() == expected


# Where prompts come from and texts go to


def test_prompts_from_stdin_go_on_too_and_long_ones_are_cut(checkpoint: Path, tmp_path: Path) -> None:
    lines = [{"prompt": [5 + i % 250 for i in range(300)]}, {"prompt": "short"}, {"prompt": "x", "temperature": 1}]
    source, out = write_lines(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    arguments = ["--checkpoint_dir", checkpoint, "--max_new_tokens", 20, "--max_batch_size", 1, "--prompts", "-"]
    arguments += ["--truncate", "left", "--ignore_eos", "true", "--out", out]

    def before() -> None:
        sys.stdin = source.open()

    job = Job(tmp_path, *arguments, before=before)
    wait_for_rows(job, out, 1)
    job.process.terminate()
    job.end()
    assert run(tmp_path, *arguments, before=before).status == 0
    written = rows_in(out)
    assert [line["index"] for line in written] == [0, 1, 2] and not any("error" in line for line in written)
    cut = [{"prompt": lines[0]["prompt"][300 - 237 :]}, *lines[1:]]  # 237 + 20 - 1 columns
    write_lines(tmp_path / "cut.jsonl", cut)
    arguments[arguments.index("-")] = tmp_path / "cut.jsonl"
    assert run(tmp_path, *arguments[:-1], tmp_path / "out2.jsonl").status == 0
    assert [line["token_ids"] for line in rows_in(tmp_path / "out2.jsonl")] == [line["token_ids"] for line in written]
    write_lines(source, lines[::-1])
    arguments[arguments.index(tmp_path / "cut.jsonl")] = "-"
    assert "was begun with another prompts (was " in refused(
        tmp_path, *arguments, before=lambda: (before(), no_model())
    )


def test_a_list_and_a_text_go_to_a_file_too(checkpoint: Path, tmp_path: Path) -> None:
    arguments = ["--checkpoint_dir", checkpoint, "--max_new_tokens", 4, "--chat", "false"]
    ran = run(tmp_path, *arguments, "--prompts", '["one", "two"]', "--out", tmp_path / "list.jsonl")
    assert ran.status == 0, ran.err
    assert run(tmp_path, *arguments, "--prompts", "two", "--out", tmp_path / "text.jsonl").status == 0
    one, two = rows_in(tmp_path / "list.jsonl")
    (alone,) = rows_in(tmp_path / "text.jsonl")
    assert (one["prompt"], two["prompt"]) == ("one", "two") and two["token_ids"] == alone["token_ids"]
    assert one["text"] != two["text"]


def test_a_streamed_text_adds_up_and_is_harmless_on_a_terminal(checkpoint: Path, tmp_path: Path) -> None:
    arguments = ["--checkpoint_dir", checkpoint, "--temperature", 5, "--max_new_tokens", 200, "--prompts", "abc"]
    whole = run(tmp_path, *arguments)
    streamed = run(tmp_path, *arguments, "--stream", "true")
    assert streamed.status == 0 and streamed.out == whole.out
    assert any(ord(c) < 32 and c not in "\n\t" for c in whole.out)  # or the rest shows nothing
    master, slave = os.openpty()
    tty.setraw(slave)  # or it would turn \n into \r\n
    ran = run(tmp_path, *arguments, "--stream", "true", terminal=slave)
    shown = os.read(master, 1 << 16).decode()
    assert ran.status == 0 and not any(ord(c) < 32 and c not in "\n\t" for c in shown) and "\\x" in shown
    ran = run(tmp_path, *arguments, "--stream", "true", "--out", tmp_path / "out.jsonl")
    assert ran.out == whole.out and rows_in(tmp_path / "out.jsonl")[0]["text"] + "\n" == whole.out
    two = [*arguments[:-1], '["a", "b"]', "--stream", "true"]
    assert "--stream shows a single row, but there are 2: leave it out" in refused(tmp_path, *two)
    assert "there are 3" in refused(tmp_path, *arguments, "--num_samples", "3", "--stream", "true")


def test_a_bad_prompt_is_an_empty_line_on_stdout(checkpoint: Path, tmp_path: Path) -> None:
    lines = [{"prompt": "one"}, b"{", {"prompt": [5] * 300}, {"prompt": "two"}]
    arguments = ["--checkpoint_dir", checkpoint, "--max_new_tokens", 5, "--strict", "false", "--prompts"]
    ran = run(tmp_path, *arguments, write_lines(tmp_path / "bad.jsonl", lines))
    good = run(tmp_path, *arguments, write_lines(tmp_path / "good.jsonl", [lines[0], lines[3]])).out
    one = run(tmp_path, *arguments, write_lines(tmp_path / "one.jsonl", lines[:1])).out
    assert ran.status == 0 and good.startswith(one) and ran.out == one + "\n\n" + good[len(one) :]
    errors = [line for line in ran.err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 2 and "line 2 of" in errors[0] and "line 3 of" in errors[1] and "300 tokens" in errors[1]


# Memory


@pytest.mark.long
def test_memory_does_not_grow_with_the_number_of_prompts(stories: Path, tmp_path: Path) -> None:
    """20,000 prompts: after the first 1,000 rows less than 15 MB more, and no prompt is read long before its row."""
    n = 20_000
    lines = ({"prompt": f"Tim had {i} balls", "max_new_tokens": 1 + i % 6, "id": f"row {i}"} for i in range(n))
    prompts, log = write_lines(tmp_path / "in.jsonl", lines), tmp_path / "numbers"

    def before() -> None:
        take, n_read, n_taken, ahead, sizes = answers.Answers.take, 0, 0, 0, []

        def counting_read(source: str) -> Iterable[Any]:
            nonlocal n_read
            n_read = 0
            for prompt in read_prompts(source):
                n_read += 1
                yield prompt

        def counting_take(self: answers.Answers, row: Any) -> None:
            nonlocal n_taken, ahead
            take(self, row)
            n_taken, ahead = n_taken + 1, max(ahead, n_read - n_taken)
            if n_taken % 1000 == 0:
                sizes.append(int(Path("/proc/self/status").read_text().split("VmRSS:")[1].split()[0]) / 1024)
                log.write_text(json.dumps([ahead, sizes]))

        todo.read_prompts, answers.Answers.take = counting_read, counting_take

    arguments = ["--checkpoint_dir", stories, "--prompts", prompts, "--out", tmp_path / "out.jsonl"]
    assert run(tmp_path, *arguments, before=before).status == 0
    ahead, sizes = json.loads(log.read_text())
    print(f"\nMB after 1,000, 2,000, ... rows: {sizes}; prompts read ahead: {ahead}")
    assert len(rows_in(tmp_path / "out.jsonl")) == n == 1000 * len(sizes)
    assert max(sizes) - sizes[0] < 15 and ahead < 300
