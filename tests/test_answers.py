"""Prompts on their way in, rows on their way out: order, what is left to do, and how much; without a model."""

import json
import os
import random
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import save_byte_tokenizer

from lit_gen import todo as module
from lit_gen.answers import Answers
from lit_gen.config import Config
from lit_gen.interrupt import Interrupted
from lit_gen.job import job_path
from lit_gen.plan import OUT_OF_MEMORY
from lit_gen.prompts import read_prompts
from lit_gen.requests import make_batch
from lit_gen.results import FSYNC_SECONDS
from lit_gen.shard import shard_path
from lit_gen.stopping import Row
from lit_gen.todo import AHEAD
from lit_gen.tokenizer import Tokenizer
from lit_gen.utils import UserError

CONFIG = Config(n_layer=1, n_head=1, n_embd=8, vocab_size=258, block_size=64, intermediate_size=8)
LAUNCHERS = ("RANK", "WORLD_SIZE", "SLURM_PROCID", "SLURM_NTASKS")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint without weights, in which each byte is a token."""
    folder = tmp_path_factory.mktemp("checkpoint")
    save_byte_tokenizer(folder, 258)
    CONFIG.to_json(folder / "lit_config.json")
    return folder


class Job:
    """An `Answers`, and its rows as `generate` would make them; a row's text is its prompt's index and its sample."""

    def __init__(self, folder: Path, prompts: Any, out: Path | None = None, settings: Any = None, **options: Any):
        self.tokenizer = Tokenizer(folder)
        self.settings = {"max_new_tokens": 3, **(settings or {})}
        where = ("32-true", torch.device("cpu"))
        self.answers = Answers(prompts, folder, self.settings, *where, out=out, **options)

    def rows(self) -> list[Row]:
        how = {"tokenizer": self.tokenizer, "strict": self.answers.strict, **self.settings}
        return list(make_batch(self.answers.requests(), CONFIG, **how).waiting)

    def end(self, row: Row) -> Row:
        """Gives a row its text, if it has no error."""
        if row.error is None:
            for token in self.tokenizer.encode(f"{row.prompt_index % 10}-{row.sample}", add_special_tokens=False):
                row.push(int(token))
            assert row.finish_reason == "length"
        return row

    def run(self, order: random.Random | None = None, until: int | None = None) -> list[Row]:
        """Takes the rows in some order, all or the first `until`, which then ends with an interrupt; the rows."""
        rows = self.rows()
        taken = order.sample(rows, len(rows)) if order else rows
        with self.answers:
            for row in taken[:until]:
                self.answers.take(self.end(row))
            if until is not None:
                raise Interrupted(15)
        return rows


def write_lines(path: Path, lines: Iterable[Any]) -> Path:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in LAUNCHERS:
        monkeypatch.delenv(name, raising=False)


# To stdout


@pytest.mark.parametrize("seed", range(5))
def test_texts_are_printed_in_input_order_each_as_early_as_can_be(folder: Path, capsys, seed: int) -> None:
    job = Job(folder, [f"prompt {i}" for i in range(5)], settings={"num_samples": 2, "temperature": 1.0})
    expected = [f"{i}-{sample}" for i in range(5) for sample in range(2)]
    assert job.answers.n_rows == 10
    rows, ended = job.rows(), set()
    with job.answers:
        for row in random.Random(seed).sample(rows, 10):
            job.answers.take(job.end(row))
            ended.add(row.index)
            ready = next(i for i in range(11) if i not in ended)
            printed = capsys.readouterr().out.splitlines()
            assert printed == expected[:ready][len(expected[:ready]) - len(printed) :]
            expected_so_far = ready
    assert expected_so_far == 10


def test_a_bad_prompt_is_an_empty_line_and_its_error_goes_to_stderr(folder: Path, capsys, tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", [{"prompt": "a"}, "{", {"prompt": "x" * 99, "n": 2}, {"prompt": "b"}])
    Job(folder, str(source), strict=False).run(random.Random(1))
    out, err = capsys.readouterr()
    assert out == "0-0\n\n\n3-0\n"
    first, second = err.splitlines()
    assert first.startswith("error: line 2 of ") and second.startswith("error: line 3 of ") and "99" not in first
    with pytest.raises(UserError, match="line 2 of"):
        Job(folder, str(source))


def test_a_streamed_row_is_printed_once_and_ends_its_line(folder: Path, capsys, tmp_path: Path) -> None:
    for out in (None, tmp_path / "out.jsonl"):
        job = Job(folder, "a", out, stream=True)
        (row,) = job.rows()
        with job.answers:
            for piece in ("0", "-\x1b", "0"):
                job.answers.show(row, piece)
            job.answers.take(job.end(row))
        assert capsys.readouterr().out == "0-\x1b0\n"


# To a file


@pytest.mark.parametrize("seed", range(3))
def test_rows_become_lines_as_they_end_and_are_sorted_at_the_end(folder: Path, tmp_path: Path, seed: int) -> None:
    body = {"prompt": "c", "n": 3}
    lines = [{"prompt": "a", "id": "x"}, {"custom_id": "y", "url": "/v1/completions", "body": body}]
    lines += ["[]", {"prompt": "b", "n": 2}, {"prompt": "d" * 99, "n": 2}, {"prompt": "e"}]
    out, source = tmp_path / "out.jsonl", write_lines(tmp_path / "in.jsonl", lines)
    job = Job(folder, str(source), out)
    rows, n_lines, openai = job.rows(), 0, 0
    assert (job.answers.n_rows, len(rows)) == (10, 9)  # of the one that is too long two were wanted
    with job.answers:
        for row in random.Random(seed).sample(rows, len(rows)):
            job.answers.take(job.end(row))
            openai += row.prompt_index == 1
            n_lines += row.prompt_index != 1 or openai == 3
            assert len(read_lines(out)) == n_lines
    written = read_lines(out)
    assert [(line.get("index"), line.get("sample"), line.get("text")) for line in written if "index" in line] == [
        *[(0, None, "0-0"), (2, None, None), (3, 0, "3-0"), (3, 1, "3-1"), (4, None, None), (5, None, "5-0")]
    ]
    assert [choice["text"] for choice in written[1]["response"]["body"]["choices"]] == ["1-0", "1-1", "1-2"]
    assert [line["id"] for line in written] == ["x", "batch_req_1", 2, 3, 3, 4, 5]
    assert [line["finish_reason"] for line in written[2:]] == ["error", "length", "length", "error", "length"]


LINES = [
    {"prompt": "twice", "temperature": 1.0},
    {"prompt": "two", "n": 2, "temperature": 1.0},
    "{",
    {"prompt": "y" * 99, "n": 3},  # too long
    {"prompt": "four"},
    {"custom_id": "y", "url": "/v1/completions", "body": {"prompt": "two", "n": 2, "temperature": 1.0}},
    {"prompt": "twice", "temperature": 1.0},
    {"prompt": "greedy"},
]


def names(rows: Iterable[Row]) -> list[tuple[int, int]]:
    return [(row.prompt_index, row.sample) for row in rows]


def noises(rows: Iterable[Row]) -> dict[tuple[int, int], list[float] | None]:
    """The random numbers of each row."""
    return {(r.prompt_index, r.sample): None if r.noise is None else r.noise.tolist() for r in rows}


@pytest.mark.parametrize("until", range(11))
def test_a_resumed_job_does_what_is_left_as_it_would_have_been(
    folder: Path, tmp_path: Path, capsys, until: int
) -> None:
    """Whatever was done before, the rest has the same random numbers, and all of it is counted."""
    source, out = write_lines(tmp_path / "in.jsonl", LINES), tmp_path / "out.jsonl"
    whole = Job(folder, str(source), strict=False).rows()
    assert len(whole) == 10
    job = Job(folder, str(source), out)
    with pytest.raises(Interrupted):
        job.run(random.Random(until), until)
    written = len(read_lines(out))
    hint = f"{written} rows are in {out}; the same command goes on\n"
    assert capsys.readouterr().err == hint
    done = [(line["index"], line.get("sample", 0)) for line in read_lines(out) if "index" in line]
    done += [(5, 0), (5, 1)] if any("custom_id" in line for line in read_lines(out)) else []
    left = [row for row in whole if (row.prompt_index, row.sample) not in done]
    resumed = Job(folder, str(source), out)
    if not left:
        assert capsys.readouterr().err == f"resumed: {written} done, 0 left\n" and resumed.answers.finished
    else:
        n_left = len(left) + 2 * ((3, 0) not in done)  # of the one that is too long three were wanted
        assert resumed.answers.n_rows == n_left and not resumed.answers.finished
        assert capsys.readouterr().err == (f"resumed: {written} done, {n_left} left\n" if written else "")
        rows = resumed.run(random.Random(0))
        assert names(rows) == names(left) and noises(rows) == noises(left)
    Job(folder, str(source), tmp_path / "undisturbed.jsonl").run()
    assert out.read_bytes() == (tmp_path / "undisturbed.jsonl").read_bytes()
    capsys.readouterr()
    assert Job(folder, str(source), out).answers.finished
    assert capsys.readouterr().err == "resumed: 9 done, 0 left\n"


def test_equal_prompts_differ_but_not_between_shards_and_the_undivided_job(folder: Path, tmp_path: Path) -> None:
    source, out = write_lines(tmp_path / "in.jsonl", LINES), tmp_path / "out.jsonl"
    whole = Job(folder, str(source), strict=False).rows()
    expected = noises(whole)
    sampled = [tuple(noise) for noise in expected.values() if noise is not None]
    assert len(sampled) == 6 and len(set(sampled)) == 6
    for count in (2, 3, 9):
        found = {}
        for index in range(count):
            job = Job(folder, str(source), out, shard=f"{index}/{count}")
            mine = [row for row in whole if row.prompt_index % count == index]
            assert job.answers.n_rows == len(mine) + 2 * (3 % count == index)
            assert job.answers.finished == (not mine)
            rows = [] if job.answers.finished else job.run()
            assert names(rows) == names(mine)
            found |= noises(rows)
            assert Job(folder, str(source), out, shard=f"{index}/{count}").answers.finished
            n_lines = len(mine) - (5 % count == index)  # OpenAI's two are in one
            assert len(read_lines(shard_path(out, index, count))) == n_lines
        assert found == expected


def test_the_shard_comes_from_the_launcher_and_holds_for_stdout_too(folder: Path, capsys, monkeypatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    Job(folder, ["a", "b", "c", "d", "e"]).run(random.Random(0))
    assert capsys.readouterr() == ("1-0\n3-0\n", "shard 1/2 (from RANK and WORLD_SIZE; --shard 0/1 takes all)\n")
    monkeypatch.setenv("RANK", "2")
    with pytest.raises(UserError, match="RANK is '2' and WORLD_SIZE is '2'"):
        Job(folder, ["a"])


# What the plan of memory needs


def test_the_longest_and_the_number_of_rows_are_those_of_prompts_that_can_run(folder: Path, tmp_path: Path) -> None:
    lines = [{"prompt": "abc", "n": 4}, {"prompt": "ab", "max_new_tokens": 9}, "{", {"prompt": "x" * 99}]
    source = str(write_lines(tmp_path / "in.jsonl", lines))
    for out in (None, tmp_path / "out.jsonl"):
        answers = Job(folder, source, out, strict=False).answers
        assert (answers.longest, answers.n_rows) == (3 + 9 - 1, 7)  # BOS and 2 bytes
    answers = Job(folder, ["x" * 99], strict=False).answers
    assert (answers.longest, answers.n_rows) == (1, 1)


def test_a_long_file_is_read_only_as_rows_are_wanted(folder: Path, tmp_path: Path, monkeypatch) -> None:
    n_read, n = 0, AHEAD + 500

    def counting(source: str) -> Iterable[Any]:
        nonlocal n_read
        for prompt in read_prompts(source):
            n_read += 1
            yield prompt

    monkeypatch.setattr(module, "read_prompts", counting)
    source = str(write_lines(tmp_path / "in.jsonl", ({"prompt": "a" * (1 + i // AHEAD)} for i in range(n))))
    job = Job(folder, source, tmp_path / "out.jsonl", {"num_samples": 2})
    assert (n_read, job.answers.longest, job.answers.n_rows) == (AHEAD // 2, 2 + 3 - 1, 2 * n)
    n_read, requests = 0, job.answers.requests()
    for place in range(20):
        assert next(requests).place == place and n_read == place + 1
    job.answers._close()
    n_read = 0
    assert Job(folder, source, tmp_path / "strict.jsonl", strict=True).answers.longest == 3 + 3 - 1 and n_read == n


# What must not happen


def test_a_wrong_job_leaves_neither_lock_nor_rows_and_the_right_one_runs(folder: Path, tmp_path: Path) -> None:
    source, out = str(write_lines(tmp_path / "in.jsonl", ["{", {"prompt": "a"}])), tmp_path / "out.jsonl"
    kept = []
    for options, message in (
        ({"strict": True}, "line 1 of"),
        ({"stream": True}, "--stream shows a single row, but there are 2: leave it out"),
        ({"settings": {"top_k": 0}}, "top_k is 0"),
        ({"shard": "2/2"}, "counted from 0"),
    ):
        with pytest.raises(UserError, match=message) as error:
            Job(folder, source, out, **options)
        kept.append(error)  # as a notebook does, with all that the frames hold
    Job(folder, source, out).run()
    assert [line["index"] for line in read_lines(out)] == [0, 1]
    for _ in range(3):
        assert Job(folder, source, out).answers.finished


def test_a_refused_job_leaves_no_empty_files(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    for lines, options, message in ((["{"], {"strict": True}, "line 1 of"), ([], {}, "no prompt in")):
        source = str(write_lines(tmp_path / "in.jsonl", lines))
        with pytest.raises(UserError, match=message):
            Job(folder, source, out, **options)
        assert [file.name for file in tmp_path.iterdir()] == ["in.jsonl"]


@pytest.mark.parametrize("change", ["appended", "rewritten", "removed"])
def test_prompts_that_change_during_the_job_leave_it_unfinished(folder: Path, tmp_path: Path, change: str) -> None:
    source, out = write_lines(tmp_path / "in.jsonl", [{"prompt": "a"}, {"prompt": "b"}]), tmp_path / "out.jsonl"
    job = Job(folder, str(source), out)
    rows = job.rows()
    message = f"^the prompts in {source} changed while the job ran: {out} may have rows of both; give another --out$"
    with pytest.raises(UserError, match="No such file" if change == "removed" else message), job.answers:
        for row in rows:
            job.answers.take(job.end(row))
        if change == "removed":
            source.unlink()
        else:
            added = [{"prompt": "c"}] if change == "appended" else []
            write_lines(source, [{"prompt": "a"}, {"prompt": "b" if added else "B"}, *added])
    assert not json.loads(job_path(out).read_text())["finished"]
    if change != "removed":
        with pytest.raises(UserError, match="was begun with another prompts"):
            Job(folder, str(source), out)


def test_statistics_may_not_overwrite_what_the_job_reads_or_writes(folder: Path, tmp_path: Path, capsys) -> None:
    source, out = write_lines(tmp_path / "in.jsonl", [{"prompt": "a"}]), tmp_path / "out.jsonl"
    (tmp_path / "link.json").symlink_to(source)
    for stats, shard in (
        *[(name, None) for name in (source, tmp_path / "link.json", out, job_path(out))],
        (out, "0/2"),
    ):
        own = stats if shard is None else shard_path(stats, 0, 2)
        with pytest.raises(UserError, match=f"^--stats_json {own} would overwrite .*: give another one$"):
            Job(folder, str(source), out, shard=shard, stats_json=stats)
    with pytest.raises(UserError, match="would overwrite"):
        Job(folder, str(source), stats_json=source)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["in.jsonl", "link.json"]
    Job(folder, str(source), out, stats_json=tmp_path / "stats.json").run()
    capsys.readouterr()
    assert Job(folder, str(source), out, stats_json=tmp_path / "stats.json").answers.finished
    line = f"nothing was run, so {tmp_path / 'stats.json'} is not written"
    assert capsys.readouterr().err.splitlines() == ["resumed: 1 done, 0 left", line]


def test_a_pipe_is_read_once_and_the_same_command_goes_on(folder: Path, tmp_path: Path) -> None:
    """As process substitution gives it: with a name that says nothing."""
    fifo, out = tmp_path / "pipe", tmp_path / "out.jsonl"
    os.mkfifo(fifo)

    def job() -> Job:
        writer = threading.Thread(target=fifo.write_text, args=('{"prompt": "a"}\n{"prompt": "b"}\n',), daemon=True)
        writer.start()
        return Job(folder, str(fifo), out)

    with pytest.raises(Interrupted):
        job().run(until=1)
    assert names(job().run()) == [(1, 0)]
    assert [line["prompt"] for line in read_lines(out)] == ["a", "b"] and job().answers.finished


def test_rows_without_memory_are_tried_again(folder: Path, tmp_path: Path, capsys) -> None:
    body = {"prompt": "c", "n": 2}
    lines = [{"prompt": "a"}, {"custom_id": "y", "url": "/v1/completions", "body": body}, {"prompt": "b", "n": 2}]
    source, out = write_lines(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    job = Job(folder, str(source), out)
    rows = job.rows()
    with pytest.raises(OSError, match="2 rows did not fit into memory: the same command tries them again"), job.answers:
        for row in rows:
            if (row.prompt_index, row.sample) in ((1, 0), (2, 1)):
                row.fail(OUT_OF_MEMORY)
            job.answers.take(job.end(row))
    assert [(line["index"], line.get("sample")) for line in read_lines(out)] == [(0, None), (2, 0)]
    assert "ended with an error" not in capsys.readouterr().err
    assert not json.loads(job_path(out).read_text())["finished"]
    assert names(Job(folder, str(source), out).run()) == [(1, 0), (1, 1), (2, 1)]
    Job(folder, str(source), tmp_path / "undisturbed.jsonl").run()
    assert out.read_bytes() == (tmp_path / "undisturbed.jsonl").read_bytes()
    capsys.readouterr()
    job = Job(folder, ["a", "b"])  # to stdout there is nothing to go on with
    first, second = job.rows()
    second.fail(OUT_OF_MEMORY)
    with job.answers:
        job.answers.take(job.end(first))
        job.answers.take(second)
    assert capsys.readouterr() == ("0-0\n\n", f"error: prompt 1: {OUT_OF_MEMORY}\n")


def test_an_error_that_came_while_running_names_its_prompt(folder: Path, tmp_path: Path, capsys) -> None:
    source, out = write_lines(tmp_path / "in.jsonl", [{"prompt": "a"}, {"prompt": "x" * 99}]), tmp_path / "out.jsonl"
    for path in (None, out):
        job = Job(folder, str(source), path, strict=False)
        broken, too_long = job.rows()
        broken.push(-1)
        with job.answers:
            job.answers.take(broken)
            job.answers.take(too_long)
        err = capsys.readouterr().err.splitlines()
        if path is None:
            assert err[0] == f"error: line 1 of {source}: the logits of new token 0 are not numbers"
            assert err[1].startswith(f"error: line 2 of {source} has 100 tokens")
    first, second = read_lines(out)
    assert first["error"] == f"line 1 of {source}: the logits of new token 0 are not numbers"
    assert list(second) == ["index", "id", "prompt", "finish_reason", "error"]
    assert second["error"].startswith(f"line 2 of {source} has 100 tokens")


def test_an_error_cannot_steer_the_terminal(folder: Path, tmp_path: Path, capsys) -> None:
    job = Job(folder, ["a"])
    (row,) = job.rows()
    row.fail("template: \x1b]0;title\x07\nerror: x")
    with job.answers:
        job.answers.take(row)
    assert capsys.readouterr().err == "error: prompt 0: template: \\x1b]0;title\\x07\\nerror: x\n"


def test_damaged_lines_are_counted_when_a_job_goes_on(folder: Path, tmp_path: Path, capsys) -> None:
    out = tmp_path / "out.jsonl"
    with pytest.raises(Interrupted):
        Job(folder, ["a", "b", "c"], out).run(until=2)
    for content, n_done, damage in (
        (out.read_bytes() + b'{"index', 2, "1 damaged line dropped"),
        (b"\0\n" + out.read_bytes() + b"{\n", 2, "2 damaged lines dropped"),
        (b"\0\n", 0, "1 damaged line dropped"),
    ):
        out.write_bytes(content)
        capsys.readouterr()
        Job(folder, ["a", "b", "c"], out).answers._close()
        assert capsys.readouterr().err == f"resumed: {n_done} done, {3 - n_done} left; {damage}\n"


def test_rows_are_kept_between_steps_too(folder: Path, tmp_path: Path, monkeypatch) -> None:
    job, synced, now = Job(folder, ["a", "b"], tmp_path / "out.jsonl"), [], time.monotonic()
    first, second = job.rows()
    with job.answers:
        job.answers.take(job.end(first))
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", synced.append)
            job.answers.step()
            assert synced == []
            patch.setattr(time, "monotonic", lambda: now + 2 * FSYNC_SECONDS)
            job.answers.step()
            assert len(synced) == 1
        job.answers.take(job.end(second))
    Job(folder, ["a"]).answers.step()  # stdout keeps itself


def test_a_job_that_is_not_answered_in_full_is_not_marked_as_finished(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    job = Job(folder, ["a", "b"], out)
    first, _ = job.rows()
    with pytest.raises(AssertionError, match="1 prompts got no answer"), job.answers:
        job.answers.take(job.end(first))
    assert not json.loads(job_path(out).read_text())["finished"]
    resumed = Job(folder, ["a", "b"], out)
    assert names(resumed.run()) == [(1, 0)] and len(read_lines(out)) == 2


def test_another_job_is_refused_and_the_part_is_named(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    with pytest.raises(Interrupted):
        Job(folder, ["a", "b"], out).run(until=1)
    content = out.read_bytes()
    for prompts, settings, options, part in (
        (["a", "c"], {}, {}, "prompts"),
        (["a", "b"], {"seed": 2}, {}, "seed (was absent, is 2)"),
        (["a", "b"], {"max_new_tokens": 4}, {}, "max_new_tokens (was 3, is 4)"),
        (["a", "b"], {}, {"chat": True}, "chat (was false, is true)"),
    ):
        with pytest.raises(UserError) as error:
            Job(folder, prompts, out, settings, **options)
        assert f"{out} was begun with another {part}" in str(error.value)
    assert out.read_bytes() == content


def test_errors_are_counted_at_the_end(folder: Path, tmp_path: Path, capsys) -> None:
    source, out = write_lines(tmp_path / "in.jsonl", ["{", {"prompt": "a"}, "["]), tmp_path / "out.jsonl"
    Job(folder, str(source), out).run()
    assert capsys.readouterr() == ("", f"2 rows ended with an error: see {os.path.realpath(out)}\n")
