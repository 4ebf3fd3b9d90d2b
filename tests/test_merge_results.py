"""Shards are told apart, and merged they are the file of a job without shards."""

import json
import os
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest

import scripts.merge_results
from lit_gen.durable import open_locked
from lit_gen.job import Job
from lit_gen.results import Results
from lit_gen.shard import shard_of, shard_path
from lit_gen.utils import UserError
from scripts.merge_results import main as merge

JOB = {"prompts": "sha", "seed": 1}
LINES = [{"index": i, "sample": s, "text": "x" * (i % 5)} for i in range(11) for s in range(2)]
WHOLE = b"".join(json.dumps(line).encode() + b"\n" for line in LINES)


def run_shards(out: Path, count: int, lines: list[dict] = LINES) -> list[Path]:
    """Prompt i goes to shard i % count; rows finish in some order."""
    for index in range(count):
        mine = [line for line in lines if line["index"] % count == index]
        with Results.open(shard_path(out, index, count), {**JOB, "shard": f"{index}/{count}"}) as results:
            for line in random.Random(index).sample(mine, len(mine)):
                results.write(line)
            results.finish()
    return [shard_path(out, index, count) for index in range(count)]


def names(folder: Path) -> set[str]:
    return {file.name for file in folder.iterdir()}


@pytest.mark.parametrize("count", [2, 3, 13])
def test_merged_shards_are_the_file_of_one_job(count: int, tmp_path: Path) -> None:
    out = tmp_path / "a.b-00000-of-00002.jsonl"  # a name that looks like a shard's itself
    shards = run_shards(out, count)  # of 13 shards two are empty
    before = names(tmp_path)
    merge(out)
    assert out.read_bytes() == WHOLE and names(tmp_path) == before | {out.name, out.name + ".job.json"}
    assert all(path.exists() for path in shards)
    written = out.stat()
    merge(out)
    assert (out.stat().st_ino, out.stat().st_mtime_ns) == (written.st_ino, written.st_mtime_ns)
    with Results.open(out, JOB) as results:  # the command without shards finds its work done
        assert results.finished and len(results.done) == len(LINES)


def test_the_script_runs_from_another_folder_and_refuses_in_one_line(tmp_path: Path) -> None:
    script = str(Path(__file__).parents[1] / "scripts/merge_results.py")
    run_shards(tmp_path / "out.jsonl", 2)
    ran = subprocess.run([sys.executable, script, "--out", "out.jsonl"], cwd=tmp_path, capture_output=True, text=True)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "", "out.jsonl has the 22 rows of 2 shards\n")
    assert (tmp_path / "out.jsonl").read_bytes() == WHOLE
    ran = subprocess.run([sys.executable, script, "--out", "no.jsonl"], cwd=tmp_path, capture_output=True, text=True)
    assert ran.returncode == 2 and ran.stderr.startswith("error: there is no shard such as no-00000-of-00002.jsonl")


def refused(out: Path, reason: str) -> None:
    before = {file: file.read_bytes() for file in out.parent.iterdir()}
    with pytest.raises(UserError, match=reason) as error:
        merge(out)
    assert "\n" not in str(error.value)
    assert {file: file.read_bytes() for file in out.parent.iterdir()} == before


def test_shards_that_are_missing_unfinished_or_of_another_job_are_named(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    first, second, third = run_shards(out, 3)
    second.rename(tmp_path / "kept")
    refused(out, r"the shard .*out-00001-of-00003\.jsonl is missing")
    (tmp_path / "kept").rename(second)
    run_shards(out, 2)
    refused(out, r"beside .*out\.jsonl lie shards of 2 and of 3")
    for path in tmp_path.glob("*-of-00002*"):
        path.unlink()
    side = Path(f"{third}.job.json")
    content = side.read_text()
    side.unlink()
    refused(out, r"out-00002-of-00003\.jsonl has no side file")
    side.write_text(content.replace("true", "false"))
    refused(out, r"out-00002-of-00003\.jsonl is not finished")
    side.write_text(content.replace('"seed": 1', '"seed": 2'))
    refused(out, r"-00002-of-.* is of another job than .*-00000-of-.*, with another seed \(was 1, is 2\)")
    side.write_text(content)
    merge(out)
    assert out.read_bytes() == WHOLE


def test_rows_that_are_double_lost_or_damaged_are_named(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    first, second = run_shards(out, 2)
    good = second.read_bytes()
    lines = good.splitlines(keepends=True)
    with_first = b"".join([first.read_bytes().splitlines(keepends=True)[0], *lines[1:]])
    for content, reason in (
        (with_first, r"row 0, sample 0 is in .*-00000-of-00002\.jsonl and in .*-00001-of-00002\.jsonl"),
        (b"".join([lines[0], *lines[:-1]]), r"line 2 of .*-00001-.*: row 1, sample 0 is there twice"),
        (b"".join([lines[1], lines[0], *lines[2:]]), r"line 2 of .*: row 1, sample 0 is out of order"),
        (good[:-1], rf"line {len(lines)} of .*-00001-of-00002\.jsonl is damaged"),
        (good[:-4] + b"\xff" + good[-3:], rf"line {len(lines)} of .* is damaged"),
        (good + b"7\n", rf"line {len(lines) + 1} of .* is damaged"),
        (b"".join(lines[:-1]), rf"has {len(lines) - 1} rows, but had {len(lines)} when it was finished"),
        (b"", rf"has 0 rows, but had {len(lines)} when"),
    ):
        second.write_bytes(content)
        refused(out, reason)


def test_a_prompt_without_a_row_is_named(tmp_path: Path) -> None:
    run_shards(tmp_path / "out.jsonl", 2, [line for line in LINES if line["index"] != 4])
    refused(tmp_path / "out.jsonl", "^prompt 4 has no row in any of the shards: run the command again$")


def test_another_file_is_replaced_only_if_told_to_and_never_under_a_running_job(tmp_path: Path, monkeypatch) -> None:
    out = tmp_path / "out.jsonl"
    run_shards(out, 2)
    out.write_bytes(WHOLE[:-1])
    refused(out, r"out\.jsonl exists with other contents: .*--overwrite true")
    for locked in (out, tmp_path / ".out.jsonl.partial"):
        fd = open_locked(locked)
        with pytest.raises(UserError, match=f"another process is writing {re.escape(str(locked))}"):
            merge(out, overwrite=True)
        os.close(fd)
    side = tmp_path / "out.jsonl.job.json"
    side.write_text("of the other file")

    def killed(out: Path, job: Job) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(scripts.merge_results, "write_job", killed)
        merge(out, overwrite=True)
    assert out.read_bytes() == WHOLE and not side.exists()
    (tmp_path / ".out.jsonl.partial").write_bytes(b"of a merge that was killed")
    merge(out)
    assert out.read_bytes() == WHOLE and side.exists() and not (tmp_path / ".out.jsonl.partial").exists()
    out.unlink()
    (tmp_path / ".out.jsonl.partial").write_bytes(b"of a merge that was killed")
    merge(out)
    assert out.read_bytes() == WHOLE


def test_a_link_stays_and_the_file_that_it_points_to_is_merged(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    out, target = tmp_path / "out.jsonl", tmp_path / "elsewhere/real.jsonl"
    out.symlink_to(target)
    run_shards(out, 2)
    merge(out)
    assert out.is_symlink() and target.read_bytes() == WHOLE
    assert names(tmp_path / "elsewhere") == {"real.jsonl", "real.jsonl.job.json"}
    with Results.open(out, JOB) as results:  # which looks for the side file there too
        assert results.finished


@pytest.mark.parametrize(
    ("shard", "environ", "expected"),
    [
        (None, {}, (0, 1)),
        ("3/8", {"RANK": "0", "WORLD_SIZE": "2"}, (3, 8)),
        (None, {"RANK": "1", "WORLD_SIZE": "2", "SLURM_PROCID": "0", "SLURM_NTASKS": "1"}, (1, 2)),
        (None, {"SLURM_PROCID": "6", "SLURM_NTASKS": "7"}, (6, 7)),
        (None, {"SLURM_NTASKS": "7"}, (0, 1)),  # an interactive allocation
        ("8/8", {}, "--shard is '8/8', but shards are counted from 0"),
        ("0/0", {}, "counted from 0"),
        *[(bad, {}, "must be two whole numbers: write it as i/n") for bad in ("", "1", "1/", "-1/2", "1/2/3", "a/b")],
        *[(bad, {}, "must be two whole numbers") for bad in ("1/2\n", "1.0/2", "1 / 2", "²/3", "1/" + "9" * 5000)],
        (None, {"RANK": "1"}, "RANK is '1' and WORLD_SIZE is ''"),
        (None, {"WORLD_SIZE": "2"}, "RANK is '' and WORLD_SIZE is '2'.*set or unset both, or give --shard"),
        (None, {"RANK": "2", "WORLD_SIZE": "2"}, "the number must be less than the count"),
        (None, {"SLURM_PROCID": "1"}, "SLURM_NTASKS is ''"),
    ],
)
def test_the_shard_is_the_given_one_or_the_launchers(shard: str | None, environ: dict, expected: tuple | str) -> None:
    if isinstance(expected, tuple):
        assert shard_of(shard, environ) == expected
        return
    with pytest.raises(UserError, match=expected) as error:
        shard_of(shard, environ)
    assert len(str(error.value)) < 200 and "\n" not in str(error.value)


def test_files_of_shards_are_numbered() -> None:
    assert shard_path(Path("a/out.b.jsonl"), 3, 8) == Path("a/out.b-00003-of-00008.jsonl")
    assert shard_path(Path("out"), 0, 2) == Path("out-00000-of-00002")
    assert shard_path(Path("out.jsonl"), 0, 1) == Path("out.jsonl")


def test_a_shard_from_the_environment_is_said(capsys) -> None:
    assert shard_of(None, {"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}) == (0, 4)
    assert capsys.readouterr().err == "shard 0/4 (from SLURM_PROCID and SLURM_NTASKS; --shard 0/1 takes all)\n"
    assert shard_of(None, {"RANK": "1", "WORLD_SIZE": "2"}) == (1, 2)
    assert capsys.readouterr().err == "shard 1/2 (from RANK and WORLD_SIZE; --shard 0/1 takes all)\n"
    for shard, environ in ((None, {"RANK": "0", "WORLD_SIZE": "1"}), ("0/1", {"RANK": "1", "WORLD_SIZE": "2"})):
        assert shard_of(shard, environ) == (0, 1) and capsys.readouterr().err == ""
