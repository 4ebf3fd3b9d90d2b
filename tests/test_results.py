"""The output file loses nothing, whatever ends the job: its final bytes are those of an undisturbed run."""

import errno
import itertools
import json
import multiprocessing
import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import lit_gen.durable
import lit_gen.results
from lit_gen.job import fingerprint_model, read_job
from lit_gen.results import Results
from lit_gen.utils import UserError

JOB = {"prompts": "ab" * 32, "settings": {"seed": 1, "stop": ["\n"]}}
Line = dict[str, Any]


def some_lines(count: int, samples: int = 1) -> list[Line]:
    """Lines of different lengths, in input order; with `samples` > 1 every row has that many."""
    keys = itertools.product(range(count), range(samples))
    return [
        {"index": i, **({"sample": s} if samples > 1 else {}), "text": "é\n\u2028 " * (i % 4) + str(s)} for i, s in keys
    ]


def as_bytes(lines: list[Line]) -> bytes:
    return b"".join(json.dumps(line, ensure_ascii=False).encode() + b"\n" for line in lines)


def run_job(out: Path, lines: list[Line], seed: int = 0) -> None:
    """The same command, always: the rows that are not done, in some order of completion, then the sorting."""
    with Results.open(out, JOB) as results:
        todo = [line for line in lines if (line["index"], line.get("sample", 0)) not in results.done]
        for line in random.Random(seed).sample(todo, len(todo)):
            results.write(line)
        results.finish()


def in_child(function: Callable[[], None]) -> multiprocessing.Process:
    child = multiprocessing.get_context("fork").Process(target=function, daemon=True)  # a failure leaves none
    child.start()
    return child


def state(out: Path) -> list[tuple[str, bytes, int, int]]:
    files = sorted(file for file in out.parent.iterdir() if file.is_file())
    return [(file.name, file.read_bytes(), file.stat().st_mtime_ns, file.stat().st_ino) for file in files]


@pytest.mark.parametrize("samples", [1, 3])
def test_rows_end_in_input_order_and_a_finished_file_is_not_touched(samples: int, tmp_path: Path) -> None:
    out, lines = tmp_path / "out.jsonl", some_lines(20, samples)
    out.touch(0o600)
    run_job(out, lines)
    assert out.read_bytes() == as_bytes(lines) and out.stat().st_mode & 0o777 == 0o600
    assert json.loads((tmp_path / "out.jsonl.job.json").read_text())["lines"] == len(lines)
    before = state(out)
    assert [name for name, *_ in before] == ["out.jsonl", "out.jsonl.job.json"]
    run_job(out, lines)
    with Results.open(out, JOB) as results:
        assert results.finished and len(results.done) == len(lines) and results.dropped == 0
    assert state(out) == before
    out.write_bytes(out.read_bytes() + b"damage\n")
    run_job(out, lines)
    assert out.read_bytes() == as_bytes(lines)


def test_rows_that_came_in_order_are_not_written_twice(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    for leftover in (".out.jsonl.partial", ".out.jsonl.job.json.partial"):
        (tmp_path / leftover).write_text("of a job that was killed and deleted")
    with Results.open(out, JOB) as results:
        assert [file.name for file in sorted(tmp_path.iterdir())] == ["out.jsonl", "out.jsonl.job.json"]
        for line in some_lines(5):
            results.write(line)
        inode = out.stat().st_ino
        results.finish()
    assert out.stat().st_ino == inode and out.read_bytes() == as_bytes(some_lines(5))


def test_a_finished_file_that_goes_on_is_unfinished_from_then_on(tmp_path: Path) -> None:
    """Also if the process then dies before it has written a row."""
    out, lines = tmp_path / "out.jsonl", some_lines(6)
    run_job(out, lines[3:])

    def reopen_and_die() -> None:
        results = Results.open(out, JOB)
        assert results.finished
        results.reopen()
        os._exit(0)

    in_child(reopen_and_die).join()
    with Results.open(out, JOB) as results:
        assert not results.finished and len(results.done) == 3
        for line in lines[:3]:
            results.write(line)
        results.finish()
    assert out.read_bytes() == as_bytes(lines) and read_job(out).finished


def test_lines_of_the_batch_format_are_known_by_their_number(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    lines = [{"id": f"batch_req_{i}", "custom_id": f"row \ud800 {9 - i}"} for i in range(12)]  # half a surrogate pair
    with Results.open(out, JOB) as results:
        for line in reversed(lines):
            results.write(line)
    with Results.open(out, JOB) as results:
        assert (11, 0) in results.done and (12, 0) not in results.done and len(results.done) == 12
        results.finish()
    assert [json.loads(line) for line in out.read_text().splitlines()] == lines


@pytest.mark.parametrize("tail", [b"", b"\0" * 9, b"\xff\xfe", b"\0\0\n{\n"])
def test_a_tail_torn_anywhere_is_made_again(tail: bytes, tmp_path: Path) -> None:
    out, lines = tmp_path / "out.jsonl", some_lines(4)
    with Results.open(out, JOB) as results:
        for line in (lines[3], lines[1], lines[2], lines[0]):
            results.write(line)
    whole = out.read_bytes()
    start = len(as_bytes([lines[3], lines[1]]))
    for cut in range(start, len(whole) + 1):
        out.write_bytes(whole[:cut] + tail)
        with Results.open(out, JOB) as results:
            assert out.read_bytes() == whole[: whole[:cut].rfind(b"\n") + 1]  # no sound line is lost
            assert results.dropped >= (cut < len(whole) and whole[cut - 1 : cut] != b"\n")
        run_job(out, lines)
        assert out.read_bytes() == as_bytes(lines)


def test_damage_between_rows_and_rows_there_twice_are_left_out(tmp_path: Path) -> None:
    out, lines = tmp_path / "out.jsonl", some_lines(6)
    run_job(out, lines)
    second = {"index": 1, "text": "another"}
    bad = [b"\0" * 30 + b"\n", b"[" * 100_000 + b"\n", b"9" * 5000 + b"\n", b"\n", as_bytes(lines[3:4])[9:]]
    out.write_bytes(as_bytes(lines[:3]) + b"".join(bad) + as_bytes([second, lines[4], lines[5]]))
    with Results.open(out, JOB) as results:
        assert results.dropped == 5 and not results.finished and len(results.done) == 5
    run_job(out, lines)
    assert out.read_bytes() == as_bytes(lines)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_any_order_with_any_cuts_ends_in_the_same_bytes(data: st.DataObject) -> None:
    lines = some_lines(data.draw(st.integers(0, 8)), data.draw(st.integers(1, 3)))
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "out.jsonl")
        for _ in range(data.draw(st.integers(0, 3))):
            with Results.open(out, JOB) as results:
                todo = [line for line in lines if (line["index"], line.get("sample", 0)) not in results.done]
                for line in data.draw(st.permutations(todo))[: data.draw(st.integers(0, len(todo)))]:
                    results.write(line)
            os.truncate(out, data.draw(st.integers(0, out.stat().st_size)))
        run_job(out, lines)
        assert out.read_bytes() == as_bytes(lines)


def test_a_kill_before_any_system_call_is_survived(tmp_path: Path) -> None:
    lines = some_lines(5)

    def run_and_die(out: Path, at: int) -> None:
        calls = itertools.count()

        def dying(real: Callable) -> Callable:
            def call(*args: Any, **kwargs: Any) -> Any:
                if next(calls) == at:
                    os.kill(os.getpid(), signal.SIGKILL)
                return real(*args, **kwargs)

            return call

        for name in ("open", "write", "fsync", "ftruncate", "replace", "dup2", "close", "unlink"):
            setattr(os, name, dying(getattr(os, name)))
        run_job(out, lines)

    for at in itertools.count():
        out = tmp_path / f"{at}.jsonl"
        child = in_child(lambda out=out, at=at: run_and_die(out, at))
        child.join()
        run_job(out, lines, seed=1)
        assert out.read_bytes() == as_bytes(lines)
        assert not [file.name for file in tmp_path.iterdir() if file.name.startswith(f".{at}.")]
        if child.exitcode == 0:
            break
        assert child.exitcode == -signal.SIGKILL
    assert at > 20  # 5 rows, the side file twice, the sorting


def test_kills_at_random_moments_lose_and_double_nothing(tmp_path: Path) -> None:
    out, lines, rng = tmp_path / "out.jsonl", some_lines(3000), random.Random(0)
    for kills in itertools.count():
        child = in_child(lambda seed=kills: run_job(out, lines, seed))
        goal = (out.stat().st_size if out.exists() else 0) + rng.randrange(len(as_bytes(lines)) // 5)
        while child.is_alive() and not (out.exists() and out.stat().st_size >= goal):
            time.sleep(0.0005)
        if kills < 8:
            child.kill()
        child.join()
        if child.exitcode == 0:
            break
    assert kills >= 3 and out.read_bytes() == as_bytes(lines)


def test_a_second_process_is_refused_and_touches_nothing(tmp_path: Path) -> None:
    out, lines = tmp_path / "out.jsonl", some_lines(3)
    ours, theirs = multiprocessing.Pipe()

    def hold() -> None:
        with Results.open(out, JOB) as results:
            for line in reversed(lines):
                results.write(line)
            theirs.send("written")
            theirs.recv()
            results.finish()
            theirs.send("sorted, so it is another file now")
            theirs.recv()

    child = in_child(hold)
    for _ in range(2):
        assert ours.poll(20) and ours.recv()
        before = state(out)
        with pytest.raises(UserError, match=r"another process is writing .*out\.jsonl"):
            Results.open(out, JOB)
        assert state(out) == before
        ours.send("go on")
    child.join()
    run_job(out, lines)
    assert out.read_bytes() == as_bytes(lines)


def test_a_file_replaced_while_it_is_being_locked_is_opened_anew(tmp_path: Path, monkeypatch) -> None:
    out, sorted_copy, real = tmp_path / "out.jsonl", tmp_path / "sorted", lit_gen.durable.lock
    sorted_copy.touch()

    def lock(fd: int, path: Path) -> None:
        if sorted_copy.exists():  # the other process ends between our opening and our locking
            sorted_copy.replace(out)
        real(fd, path)

    monkeypatch.setattr(lit_gen.durable, "lock", lock)
    fd = lit_gen.durable.open_locked(out)
    assert os.fstat(fd).st_ino == out.stat().st_ino
    os.close(fd)


FULL = """
import sys, subprocess
from pathlib import Path
from lit_gen.results import Results
from lit_gen.utils import run_cli
def job(out: Path) -> None:
    with Results.open(out, {}) as results:
        for index in range(99, -1, -1):
            if (index, 0) not in results.done:
                results.write({"index": index, "text": "x" * 1000})
        results.finish()
def grow(out: Path) -> None:
    for size in ("64k", "128k", "1m"):
        subprocess.run(["mount", "-o", f"remount,size={size}", out.parent], check=True)
        try:
            job(out)
        except OSError as error:
            lines = out.read_bytes().splitlines(keepends=True)
            sound = all(line.endswith(b'x"}\\n') for line in lines) and len(list(out.parent.iterdir())) == 2
            print(len(lines), sound, error.strerror)
    sys.stdout.write(out.read_text())
"""


def test_a_file_that_may_not_grow_ends_with_one_line(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    command = [sys.executable, "-c", FULL + "run_cli(job)", "--out", str(out)]
    limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))  # noqa: E731
    ran = subprocess.run(command, preexec_fn=limit, capture_output=True, text=True, cwd=Path(__file__).parents[1])
    rows = out.read_bytes().count(b"\n")
    assert ran.returncode == 1 and rows == 48 and out.read_bytes().endswith(b'x"}\n')
    assert ran.stderr == (
        f"error: File too large: {rows} rows are safe in {out}; mend this, and the same command goes on\n"
    )
    with Results.open(out, {}) as results:
        assert len(results.done) == rows and results.dropped == 0


def test_a_full_disk_stops_writing_and_sorting_with_all_rows_safe(tmp_path: Path) -> None:
    shell = f'mount -t tmpfs -o size=64k none "{tmp_path}"'
    if subprocess.run(["unshare", "-rm", "sh", "-c", shell], capture_output=True).returncode:
        pytest.skip("no small file system can be mounted here (unshare -rm and tmpfs)")
    code = FULL + f"grow(Path({str(tmp_path / 'out.jsonl')!r}))"
    ran = subprocess.run(
        ["unshare", "-rm", "sh", "-c", f'{shell} && exec "$@"', "sh", sys.executable, "-c", code],
        capture_output=True, text=True, cwd=Path(__file__).parents[1],
    )  # fmt: skip
    in_write, in_sort, *final = ran.stdout.splitlines(keepends=True)
    rows = int(in_write.split()[0])
    assert 40 < rows < 64 and in_write.split(" ", 2)[1:] == [
        "True", f"No space left on device: {rows} rows are safe in {tmp_path}/out.jsonl; mend this, and the same "
        "command goes on\n",
    ]  # fmt: skip
    assert in_sort.startswith("100 True No space left on device: 100 rows are safe in ")
    assert "".join(final).encode() == as_bytes([{"index": i, "text": "x" * 1000} for i in range(100)])


def test_parts_of_a_line_are_put_together_and_an_interrupt_between_them_is_cut_off(tmp_path, monkeypatch) -> None:
    out, lines, real = tmp_path / "out.jsonl", some_lines(4), os.write
    monkeypatch.setattr(os, "write", lambda fd, data: real(fd, data[:3]))
    with Results.open(out, JOB) as results:
        results.write(lines[3])
        assert out.read_bytes() == as_bytes([lines[3]])

        def interrupted(fd: int, data: bytes) -> int:
            if len(data) < 12:
                raise KeyboardInterrupt
            return real(fd, data[:3])

        monkeypatch.setattr(os, "write", interrupted)
        with pytest.raises(KeyboardInterrupt):
            results.write(lines[0])
        assert out.read_bytes() == as_bytes([lines[3]])
        monkeypatch.setattr(os, "write", real)
        for line in lines[:3]:
            results.write(line)
        with pytest.raises(ValueError, match="not JSON compliant"):
            results.write({"index": 9, "logprob": float("nan")})
        results.finish()
    assert out.read_bytes() == as_bytes(lines)


def test_rows_are_synced_in_time_and_those_that_were_not_are_made_again(tmp_path, monkeypatch) -> None:
    out, lines, now, synced, real = tmp_path / "out.jsonl", some_lines(4), [100.0], [], os.fsync
    monkeypatch.setattr(lit_gen.results.time, "monotonic", lambda: now[0])
    results = Results.open(out, JOB)
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append(os.fstat(fd).st_size) or real(fd))
    for line, seconds in zip(lines[:3], (104.9, 105.0, 109.9), strict=True):
        now[0] = seconds
        results.write(line)
    assert synced == [len(as_bytes(lines[:2]))]

    def broken(fd: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fsync", broken)
    with pytest.raises(OSError, match="Input/output error: 2 rows are safe in"):
        results.close()
    assert out.read_bytes() == as_bytes(lines[:2])
    monkeypatch.setattr(os, "fsync", real)
    run_job(out, lines)
    assert out.read_bytes() == as_bytes(lines)


def test_rows_are_synced_in_time_also_if_no_other_comes(tmp_path, monkeypatch) -> None:
    now, synced, real = [100.0], [], os.fsync
    monkeypatch.setattr(lit_gen.results.time, "monotonic", lambda: now[0])
    with Results.open(tmp_path / "out.jsonl", JOB) as results:
        monkeypatch.setattr(os, "fsync", lambda fd: synced.append(os.fstat(fd).st_size) or real(fd))
        now[0] = 105.0
        results.sync_if_due()
        assert synced == []  # nothing was written
        results.write(some_lines(1)[0])
        results.write({"index": 9})
        for seconds in (109.9, 110.0, 120.0):
            now[0] = seconds
            results.sync_if_due()
        assert synced == [len(as_bytes(some_lines(1))), len(as_bytes([*some_lines(1), {"index": 9}]))]


def test_an_empty_file_that_was_made_for_nothing_is_removed(tmp_path: Path) -> None:
    out, side = tmp_path / "out.jsonl", tmp_path / "out.jsonl.job.json"
    Results.open(out, JOB).discard()
    assert state(out) == []
    out.touch()
    Results.open(out, JOB).discard()
    assert [name for name, *_ in state(out)] == ["out.jsonl"]  # it was the user's
    with Results.open(out, JOB) as results:
        results.write({"index": 0})
    before = state(out)
    Results.open(out, JOB).discard()
    out.unlink()
    Results.open(out, JOB).discard()
    assert len(before) == 2 and side.exists() and not out.exists()
    results = Results.open(out, JOB)
    results.write({"index": 0})
    results.discard()
    assert out.read_bytes() == as_bytes([{"index": 0}])


def test_a_device_is_no_output_file_whatever_it_stands_for(tmp_path: Path) -> None:
    """/dev/stdout of `python ... > file` is that file, which the shell has emptied and others may write to."""
    (tmp_path / "link").symlink_to("/dev/stdout")
    (tmp_path / "chain").symlink_to("link")
    code = (
        "import sys; from pathlib import Path; from lit_gen.results import Results; Results.open(Path(sys.argv[1]), {})"
    )
    for name in ("/dev/stdout", "/dev/../dev/fd/1", "/proc/self/fd/1", "link", "chain"):
        with (tmp_path / "file").open("wb") as file:
            command = [sys.executable, "-c", code, str(tmp_path / name)]
            ran = subprocess.run(command, stdout=file, stderr=subprocess.PIPE, text=True, cwd=Path(__file__).parents[1])
        assert f"{tmp_path / name} is a device or a stream" in ran.stderr
    assert {file.name for file in tmp_path.iterdir()} == {"link", "chain", "file"}
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    with pytest.raises(UserError, match="symbolic links|File exists"):
        Results.open(tmp_path / "a", JOB)


def test_another_job_is_refused_by_what_differs(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    run_job(out, some_lines(3))
    before = state(out)
    other = {"prompts": "cd" * 32, "settings": {"seed": 2, "stop": ["\n"], "top_k": 5}}
    with pytest.raises(UserError) as error:
        Results.open(out, other)
    a, c = '"abababababababababababa...bababababab"', '"cdcdcdcdcdcdcdcdcdcdcdc...dcdcdcdcdcd"'
    assert str(error.value) == (
        f"{out} was begun with another prompts (was {a}, is {c}); settings.seed (was 1, is 2); settings.top_k "
        f"(was absent, is 5): give another --out, or delete {out} and {out}.job.json to begin anew"
    )
    for settings_ in ({"seed": 1}, {"seed": 1, "stop": ["\n"], "top_k": None}):
        with pytest.raises(UserError, match=r"another settings\.(stop|top_k) \("):
            Results.open(out, {**JOB, "settings": settings_})
    assert state(out) == before


def test_what_is_not_ours_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    out, side = tmp_path / "out.jsonl", tmp_path / "out.jsonl.job.json"
    out.write_bytes(b'{"index": 0}\n{"ind')
    with pytest.raises(UserError, match=r"exists but is not of such a job .*: give another --out"):
        Results.open(out, JOB)
    for damaged in (b"", b"{", b"[]", b'"x"', b'{"a": 1}', b'{"fingerprint": 1}', b"\xff", b"[" * 100_000):
        side.write_bytes(damaged)
        with pytest.raises(UserError, match=r"job\.json.*delete it and .*out\.jsonl to begin anew") as error:
            Results.open(out, JOB)
        assert "\n" not in str(error.value)
    assert out.read_bytes() == b'{"index": 0}\n{"ind'
    side.write_text(json.dumps({"fingerprint": JOB}))
    for stranger in (
        "7",
        '{"index": -1}',
        '{"index": true}',
        '{"index": 9223372036854775808}',
        '{"id": "batch_req_1"}',
    ):
        content = f'{{"index": 0}}\n{stranger}\n{{"ind'.encode()
        out.write_bytes(content)
        with pytest.raises(UserError, match="the line at byte 13 is not of this job; remove it"):
            Results.open(out, JOB)
        assert out.read_bytes() == content
    os.mkfifo(tmp_path / "fifo")
    for name, reason in (("fifo", "is no plain file"), (".", "Is a directory"), ("none/out.jsonl", "No such file")):
        with pytest.raises(UserError, match=reason):
            Results.open(tmp_path / name, JOB)


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    out, lines = tmp_path / "out.jsonl", some_lines(5)
    out.symlink_to(tmp_path / "there/file.jsonl")
    with Results.open(out, JOB) as results:
        for line in lines[:0:-1]:
            results.write(line)
    run_job(out, lines)
    assert out.is_symlink() and (tmp_path / "there/file.jsonl").read_bytes() == as_bytes(lines)


def test_the_fingerprint_of_a_model_is_that_of_the_files_that_matter(tmp_path: Path) -> None:
    matter = ["model.safetensors", "pytorch_model.bin", "config.json", "tokenizer.model", "merges.txt", "vocab.txt"]
    matter += ["chat_template.jinja", "additional_chat_templates/tool.jinja", "x.gguf"]
    (tmp_path / "additional_chat_templates").mkdir()
    for name in [*matter, "README.md", "LICENSE.txt", "out.jsonl", "out.jsonl.job.json", ".out.jsonl.job.json.partial"]:
        (tmp_path / name).write_text(name)
    listing = subprocess.run(["sha256sum", *matter], cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    assert fingerprint_model(tmp_path) == {name: digest for digest, name in map(str.split, listing.splitlines())}
    assert fingerprint_model(tmp_path / "x.gguf") == {"x.gguf": fingerprint_model(tmp_path)["x.gguf"]}
    with pytest.raises(UserError, match="cannot read .*none: No such file"):
        fingerprint_model(tmp_path / "none")
