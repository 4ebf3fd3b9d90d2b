"""generate/tp.py: the rows of base.py from several processes, whatever launches, interrupts or kills them.

Most ranks are forked, with the environment that torchrun would give them, and need not import PyTorch again.
"""

import json
import multiprocessing
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
from adapters import random_pairs, write_peft
from conftest import llama_config, neox_config, randomized, run_script, save_byte_tokenizer

from generate import base, lora, tp
from lit_gen.export import save_lit
from lit_gen.utils import run_cli
from scripts.merge_results import main as merge

ROOT = Path(tp.__file__).parents[1]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Lit folders "llama" (9 heads in 3 groups), "neox" (4 heads) and an adapter "lora" for the latter; "in.jsonl"."""
    folder = tmp_path_factory.mktemp("tp")
    save_byte_tokenizer(folder / "source", 301, Path(__file__).read_text())
    smol = llama_config(vocab_size=301, n_head=9, n_query_groups=3, head_size=8, n_embd=72, tie_embeddings=True)
    save_lit(randomized(smol), folder / "llama", folder / "source")
    save_lit(randomized(neox_config(vocab_size=301)), folder / "neox", folder / "source")
    shapes = {f"gpt_neox.layers.{i}.attention.dense": (64, 64) for i in range(2)}
    shapes |= {f"gpt_neox.layers.{i}.mlp.dense_4h_to_h": (64, 128) for i in range(2)}
    write_peft(folder / "lora", random_pairs(shapes, std=0.3))
    rows = [{"prompt": "ab" * (1 + i % 5) + str(i), "max_new_tokens": 4 + 5 * i % 23} for i in range(30)]
    for i in range(0, 30, 3):
        rows[i] |= {"temperature": 0.8, "top_p": 0.9, "n": 2}
    rows[7] |= {"stop": ["a", "e"]}
    rows[8] |= {"max_new_tokens": 10_000}  # too long: an error line
    (folder / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def options(folder: Path, out: Path | None, model: str = "neox", *more: object) -> list[str]:
    words = ["--checkpoint_dir", folder / model, "--ignore_eos", "true", "--max_batch_size", 4, *more]
    words += ["--prompts", folder / "in.jsonl", "--out", out] if out else []
    return [str(word) for word in words]


@pytest.fixture(scope="module")
def expected(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """What base.py writes."""
    out = tmp_path_factory.mktemp("base") / "out.jsonl"
    base.main(str(folder / "in.jsonl"), checkpoint_dir=folder / "neox", out=out, ignore_eos=True, max_batch_size=4)
    assert out.read_bytes().count(b"\n") == 40
    return out.read_bytes()


def _rank(environ: dict[str, str], args: list[str], log: Path) -> None:
    os.environ.update(environ)
    torch.set_num_threads(1)
    for fd, kind in ((1, "out"), (2, "err")):
        os.dup2(os.open(f"{log}.{kind}", os.O_WRONLY | os.O_CREAT), fd)
    sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False, buffering=1)
    sys.argv = ["tp.py", *args]
    run_cli(tp.main)


class Torchrun:
    """tp.py with these arguments in `ranks` processes, as torchrun starts them on each of `machines`."""

    def __init__(self, folder: Path, args: list[str], ranks: int = 2, machines: int = 1) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port, size = free.getsockname()[1], ranks * machines
        common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": size, "TORCHELASTIC_RUN_ID": "x"}
        common |= {"LOCAL_WORLD_SIZE": ranks, "GROUP_WORLD_SIZE": machines}
        self.folder, self.processes = folder, []
        for rank in range(size):
            environ = common | {"RANK": rank, "LOCAL_RANK": rank % ranks, "GROUP_RANK": rank // ranks}
            environ = {name: str(value) for name, value in environ.items()}
            process = multiprocessing.get_context("fork").Process(
                target=_rank, args=(environ, args, folder / str(rank))
            )
            process.start()
            self.processes.append(process)

    def end(self) -> list[int]:
        """Exit statuses, once all have ended."""
        for process in self.processes:
            process.join(60)
        return [process.exitcode for process in self.processes]

    def read(self, kind: str) -> list[str]:
        return [(self.folder / f"{rank}.{kind}").read_text() for rank in range(len(self.processes))]


def wait_for_rows(out: Path, n: int) -> None:
    deadline = time.monotonic() + 300
    while not out.exists() or out.read_bytes().count(b"\n") < n:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_killed_job_and_an_interrupted_one_end_up_as_base_would_have(
    folder: Path, expected: bytes, tmp_path: Path
) -> None:
    out = tmp_path / "out.jsonl"
    args = options(folder, out, "neox", "--timeout", "60")
    job = Torchrun(tmp_path, args)
    wait_for_rows(out, 3)
    os.kill(job.processes[1].pid, signal.SIGKILL)
    start = time.monotonic()
    assert job.end() == [1, -signal.SIGKILL] and time.monotonic() - start < 30  # before the timeout
    assert "error: another rank has ended or does not answer" in job.read("err")[0]
    assert 3 <= out.read_bytes().count(b"\n") < 40

    job = Torchrun(tmp_path, args)
    wait_for_rows(out, out.read_bytes().count(b"\n") + 3)
    os.kill(job.processes[1].pid, signal.SIGINT)  # any of them
    assert job.end() == [130, 0]
    assert "resumed: " in job.read("err")[0] and "the same command goes on" in job.read("err")[0]
    assert out.read_bytes().count(b"\n") < 40

    job = Torchrun(tmp_path, args)
    assert job.end() == [0, 0]
    assert out.read_bytes() == expected
    assert job.read("out") == ["", ""] and "rows" not in job.read("err")[1]
    assert sorted(path.name for path in tmp_path.glob("out*")) == ["out.jsonl", "out.jsonl.job.json"]


def test_rank_0_killed_ends_the_others(folder: Path, tmp_path: Path) -> None:
    job = Torchrun(tmp_path, options(folder, tmp_path / "out.jsonl", "llama"), ranks=3)
    wait_for_rows(tmp_path / "out.jsonl", 3)
    os.kill(job.processes[0].pid, signal.SIGKILL)
    assert job.end() == [-signal.SIGKILL, 1, 1]
    assert all("error: another rank has ended" in err for err in job.read("err")[1:])


def test_a_rank_that_hangs_is_given_up_after_the_timeout(folder: Path, tmp_path: Path) -> None:
    job = Torchrun(tmp_path, options(folder, tmp_path / "out.jsonl", "neox", "--timeout", "2"))
    wait_for_rows(tmp_path / "out.jsonl", 3)
    os.kill(job.processes[1].pid, signal.SIGSTOP)
    job.processes[0].join(30)
    assert job.processes[0].exitcode == 1
    os.kill(job.processes[1].pid, signal.SIGKILL)
    job.end()


def test_machines_share_the_prompts_and_ranks_the_model(folder: Path, expected: bytes, tmp_path: Path) -> None:
    job = Torchrun(tmp_path, options(folder, tmp_path / "out.jsonl"), ranks=2, machines=2)
    assert job.end() == [0] * 4, job.read("err")
    assert len(list(tmp_path.glob("out-0000?-of-00002.jsonl"))) == 2
    merge(out=tmp_path / "out.jsonl")
    assert (tmp_path / "out.jsonl").read_bytes() == expected


def test_options_of_base_do_what_they_do_there(folder: Path, tmp_path: Path, capsys) -> None:
    settings = ["--prompts", '["a b c", "aaaa", "x"]', "--max_new_tokens", "9", "--speculate", "4", "--shard", "0/2"]
    args = options(folder, None, "neox", *settings, "--lora_path", folder / "lora", "--stats_json")
    status, out, _ = run_script(capsys, lora.main, *args, tmp_path / "base.json", repeated=("lora_path",))
    assert status == 0 and out.count("\n") == 2
    job = Torchrun(tmp_path, [*args, str(tmp_path / "tp.json")])
    assert job.end() == [0, 0], job.read("err")
    assert job.read("out") == [out, ""]
    files = (tmp_path / f"{name}-00000-of-00002.json" for name in ("base", "tp"))
    of_base, of_tp = (json.loads(file.read_text()) for file in files)
    assert of_tp["new_tokens"] == of_base["new_tokens"] and of_tp["cache_bytes"] * 2 == of_base["cache_bytes"]


def test_bad_input_is_one_line_of_rank_0_before_weights_are_read(folder: Path, tmp_path: Path, capsys) -> None:
    for args, what in (
        (["--compile", "true"], "--compile true does not go"),
        (["--quantize", "nf4"], "--quantize nf4 does not go"),
        (["--devices", "0"], "devices"),
        (["--timeout", "0"], "timeout"),
        (["--precision", "16-mixed"], "16-mixed does not go"),
    ):
        status, out, err = run_script(capsys, tp.main, *options(folder, None, "llama"), *args)
        assert (status, out) == (2, "") and what in err and err.count("\n") == 1
    if not torch.cuda.is_available():
        status, _, err = run_script(capsys, tp.main, *options(folder, None, "llama"))
        assert status == 2 and "say with --devices" in err
    weights = folder / "llama" / "lit_model.safetensors"
    weights.rename(folder / "gone")
    try:
        job = Torchrun(tmp_path, options(folder, tmp_path / "out.jsonl", "llama"))
        assert job.end() == [2, 0]
        (own, other), line = (
            job.read("err"),
            "error: n_query_groups 3 (of n_head 9) cannot be shared by a world size of 2",
        )
        assert line in own and "error" not in other and not (tmp_path / "out.jsonl").exists()
        job = Torchrun(tmp_path, options(folder, None, "llama", "--shard", "0/2"), ranks=1, machines=2)
        assert job.end() == [2, 2] and "--shard 0/2 would be that of each machine" in job.read("err")[0]
        job = Torchrun(tmp_path, options(folder, None, "llama", "--devices", 2), ranks=1)
        assert job.end() == [2] and "--devices is 2, but torchrun started 1" in job.read("err")[0]
    finally:
        (folder / "gone").rename(weights)


def test_help_lists_every_option_of_base(capsys: pytest.CaptureFixture) -> None:
    (status, out, _), (_, of_base, _) = run_script(capsys, tp.main, "-h"), run_script(capsys, base.main, "-h")
    wanted = {word.rstrip(",") for word in of_base.split() if word.startswith("--")}
    assert status == 0 and len(wanted) > 25 and wanted <= {word.rstrip(",") for word in out.split()}
    assert all(f"--{own} " in out for own in ("devices", "timeout", "lora_path", "check_base"))
    assert "--adapters" not in out and "--ranks" not in out


def start(*command: object) -> subprocess.Popen:
    """From a bare clone: nothing is installed."""
    environ = {"PATH": os.environ["PATH"], "HOME": os.environ["HOME"], "OMP_NUM_THREADS": "1"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([*map(str, command)], env=environ, **pipes)


def test_fabric_starts_the_other_ranks_itself(folder: Path, expected: bytes, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    command = [sys.executable, tp.__file__, "--devices", 2, *options(folder, out)]
    first = start(*command)
    wait_for_rows(out, 3)
    (child,) = [child for child in psutil.Process(first.pid).children() if "tp.py" in " ".join(child.cmdline())]
    child.kill()
    stdout, stderr = first.communicate(timeout=60)
    assert first.returncode != 0 and stdout == "", stderr
    second = start(*command)
    stdout, stderr = second.communicate(timeout=120)
    assert (second.returncode, stdout) == (0, ""), stderr
    assert out.read_bytes() == expected


@pytest.mark.long
def test_torchrun_itself(folder: Path, expected: bytes, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2, tp.__file__]
    first = start(*command, *options(folder, out))
    wait_for_rows(out, 3)
    ranks = [child for child in psutil.Process(first.pid).children() if "tp.py" in " ".join(child.cmdline())]
    ranks[1].kill()
    assert first.wait(60) != 0 and not any(rank.is_running() for rank in ranks)
    stdout, stderr = start(*command, *options(folder, out)).communicate(timeout=120)
    assert out.read_bytes() == expected and "resumed" in stderr


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
def test_two_gpus_give_what_base_gives(precision: str, folder: Path, tmp_path: Path, capsys) -> None:
    """Not run yet: there were no two GPUs. In float32 the same text; in 16 bit all rows are there."""
    settings = ["--prompts", '["a b c", "aaaa", "x"]', "--max_new_tokens", 9, "--precision", precision]
    args = options(folder, None, "neox", *settings)
    status, out, _ = run_script(capsys, base.main, *args)
    assert status == 0
    ran = start(sys.executable, tp.__file__, "--devices", 2, *args)
    found, err = ran.communicate(timeout=300)
    assert ran.returncode == 0, err
    assert found == out if precision == "32-true" else re.fullmatch("(?s)(.*\n){3,}", found)
