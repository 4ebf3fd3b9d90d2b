"""Claims of scripts/benchmark*.py and scripts/peers: what is compared, and that workers do it."""

import json
import sys
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lit_gen.limits import Limits, save_limits
from lit_gen.utils import UserError
from scripts.benchmark import main
from scripts.benchmark_jobs import Sizes, random_jobs, read_jobs
from scripts.benchmark_tasks import alternate, fit
from scripts.peers.client import Failed, Missing, Worker
from scripts.peers.worker import Job, Settings, batches, run_static

LIMITS = Limits(1, {2**20: 1e9}, {"float32": 1e9, "bfloat16": 1e9})


class Counter:
    """An engine whose k-th token is the prompt's length plus k."""

    continuous, equal_lengths, about = False, False, {}

    def __init__(self) -> None:
        self.calls = []

    def run(self, jobs, slots, at_once):
        self.calls.append((slots, [job.new for job in jobs]))
        timeline = [(float(k), len(jobs)) for k in range(1, jobs[0].new)]  # a prefill chooses the first token
        return [[len(job.ids) + k for k in range(job.new)] for job in jobs], {"timeline": timeline}


def test_static_batches_are_sorted_by_total_length():
    jobs = [Job([1] * T, new) for T, new in ((3, 1), (10, 5), (1, 30), (2, 2), (4, 4))]
    assert batches(jobs, 2) == [[2, 1], [4, 3], [0]]
    assert batches(jobs, 9) == [[2, 1, 4, 3, 0]]


def test_engine_that_needs_equal_lengths_gets_them():
    jobs = [Job([1] * T, 5) for T in (3, 7, 3, 3, 7)]
    assert batches(jobs, 2, equal_lengths=True) == [[1, 4], [0, 2], [3]]


def test_static_batch_runs_to_its_longest_row_and_gives_what_was_asked_for():
    engine = Counter()
    jobs = [Job([1] * 9, 2), Job([1] * 8, 4), Job([1], 3)]
    tokens, extra = run_static(engine, jobs, 2)
    assert engine.calls == [(2, [4, 4]), (1, [3])]
    assert tokens == [[9, 10], [8, 9, 10, 11], [1, 2, 3]]
    # rows that somebody waits for in the steps, which choose the second token and those after it
    assert [rows for _, rows in extra["timeline"]] == [2, 1, 1, 1, 1]


def test_runs_alternate_after_one_warm_up_and_an_engine_that_cannot_is_dropped():
    order = []

    def bad():
        order.append("bad")
        raise Failed("no such thing")

    answers, errors = alternate({"a": lambda: order.append("a"), "bad": bad, "b": lambda: order.append("b")}, 2)
    assert order == ["a", "bad", "b", "a", "b", "a", "b"]
    assert answers.keys() == {"a", "b"} and errors == {"bad": "no such thing"}
    with pytest.raises(UserError, match="lit_gen static 4: no such thing"):
        alternate({"lit_gen static 4": bad}, 1)


def test_fit_finds_the_coefficients_and_no_quadratic_term_where_there_is_none():
    sizes = [(B, S) for B in (1, 4, 16, 64) for S in (128, 512, 2048, 4096)]
    found = fit({(B, S): 0.02 + 3e-4 * B + 1e-6 * B * S for B, S in sizes})
    assert found["seconds"] == pytest.approx(0.02, rel=1e-3)
    assert found["seconds_per_row"] == pytest.approx(3e-4, rel=1e-3)
    assert found["seconds_per_row_and_column"] == pytest.approx(1e-6, rel=1e-3)
    assert found["residual_max"] == found["quadratic_share_at_largest"] == 0.0
    quadratic = fit({(B, S): 0.02 + 1e-6 * B * S + 1e-9 * B * S * S for B, S in sizes})
    true_share = 1e-9 * 64 * 4096**2 / (0.02 + 1e-6 * 64 * 4096 + 1e-9 * 64 * 4096**2)
    assert quadratic["quadratic_share_at_largest"] == pytest.approx(true_share, abs=2e-3)
    assert quadratic["residual_rms"] > 0.05 > quadratic["residual_rms_with_quadratic"] == 0.0


def test_jobs_come_from_requests_a_trace_or_a_distribution(tmp_path):
    requests, trace = tmp_path / "r.json", tmp_path / "t.csv"
    requests.write_text('[{"ids": [5, 6], "max_new": 9}, {"ids": [7], "max_new": 1, "text": "x"}]')
    assert read_jobs(Sizes(requests=requests), 10) == [Job([5, 6], 9), Job([7], 1)]
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\na,4,3\nb,4000,7\nc,5,2\nd,5,0\n")
    jobs = read_jobs(Sizes(trace=trace, longest=100), 50)
    assert sorted((len(job.ids), job.new) for job in jobs) == [(4, 3), (5, 2)]
    made = read_jobs(Sizes(n=20, longest=200), 50)
    assert len(made) == 20 and all(len(job.ids) + job.new <= 200 and max(job.ids) < 50 for job in made)
    assert read_jobs(Sizes(n=20, longest=200), 50) == made
    assert len({tuple(job.ids) for job in random_jobs(5, 8, 3, 1000)}) == 5


@pytest.mark.parametrize("entry", [3, {}, {"ids": [], "max_new": 1}, {"ids": [10], "max_new": 1}, {"ids": [1]}])
def test_bad_request_is_refused(entry, tmp_path):
    (tmp_path / "r.json").write_text(json.dumps([entry]))
    with pytest.raises(UserError, match="r.json must hold objects such as"):
        read_jobs(Sizes(requests=tmp_path / "r.json"), 10)


@pytest.mark.parametrize("text", ["a,b\n1,2\n", "ContextTokens,GeneratedTokens\n1,x\n", "ContextTokens\n"])
def test_bad_trace_is_refused(text, tmp_path):
    (tmp_path / "t.csv").write_text(text)
    with pytest.raises(UserError, match="t.csv"):
        read_jobs(Sizes(trace=tmp_path / "t.csv"), 10)


@pytest.mark.parametrize("sizes", [{"batch": [0]}, {"new": 1}, {"repeats": 0}, {"slots": [2, -1]}, {"n": 1.5}])
def test_bad_size_is_refused(sizes):
    with pytest.raises(UserError, match=next(iter(sizes))):
        Sizes(**sizes)


@pytest.fixture
def settings(family, tmp_path) -> Settings:
    folder = str(family("llama").folder)
    return Settings("lit_gen", folder, folder, str(tmp_path / "made"), "tiny", "float32", 1)


@pytest.fixture
def worker(settings) -> Iterator[Worker]:
    with closing(Worker(settings)) as worker:
        yield worker


def test_worker_has_the_tokens_of_the_model_says_what_is_wrong_and_outlives_it(worker, family):
    jobs = [Job([5, 9, 11, 2], 3), Job([7, 30], 6), Job([8], 2)]
    expected = []
    for job in jobs:
        ids = torch.tensor([job.ids])
        for _ in range(job.new):
            ids = torch.cat([ids, family("llama").hf(ids).logits[:, -1:].argmax(-1)], 1)
        expected.append(ids[0, len(job.ids) :].tolist())
    continuous, static = worker.ask(jobs, 2, static=False), worker.ask(jobs, 2)
    assert continuous["tokens"] == static["tokens"] == expected
    assert continuous["seconds"] > 0 and continuous["extra"]["stats"]["steps"] > 0
    assert worker.about["threads"] == 1 and worker.laps.keys() == {"import", "load", "pack"}
    with pytest.raises(Failed, match="UserError: .*max_new_tokens"):
        worker.ask([Job([5], 0)], 1)
    assert all(seconds > 0 for seconds in worker.step(2, 64, 3))
    worker.process.kill()
    with pytest.raises(Failed, match="ended with status -9"):
        worker.ask(jobs, 2)


def test_engine_that_is_not_installed_or_cannot_load_is_missing(settings, tmp_path):
    bare = tmp_path / "python"  # an interpreter that sees no installed package
    bare.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S "$@"\n')
    bare.chmod(0o755)
    with pytest.raises(Missing, match="litgpt is left out: .*python has no litgpt"):
        Worker(replace(settings, name="litgpt"), str(bare))
    with pytest.raises(Missing, match="hf is left out: it ended with status 1: .*nowhere"):
        Worker(replace(settings, name="hf", hf="/nowhere"))


def test_benchmark_compares_with_transformers_and_draws(family, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("lit_gen.limits.limits_file", lambda: tmp_path / "limits.json")
    save_limits(LIMITS)
    picture = tmp_path / "speed.png"
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        picture = None
    tasks = ["decode", "prefill", "ragged", "context"]
    sizes = {
        "batch": [3],
        "prompt": 5,
        "new": 4,
        "prefill": [6],
        "n": 4,
        "longest": 40,
        "slots": [2],
        "static_batch": [2],
    }
    sizes |= {"context_batch": [1, 2], "context": [16, 32, 64], "repeats": 1}
    where = {"work": tmp_path / "work", "out": tmp_path / "lines.jsonl", "plot": picture}
    main(checkpoint_dir=family("llama").folder, tasks=tasks, precision=["float32"], threads=1, **where, **sizes)
    out = capsys.readouterr().out
    assert (tmp_path / "lines.jsonl").read_text() == out
    about, kinds, decode, prefill, *rest = map(json.loads, out.splitlines())
    assert about["limits"] == LIMITS.describe() and kinds["about"].keys() == {"lit_gen", "hf"}
    assert decode["rows_with_equal_tokens"] == {"hf": "3/3"} and prefill["rows_with_equal_tokens"] == {"hf": "1/1"}
    assert decode["ratio"]["hf"] == pytest.approx(decode["ratios"]["hf"][0])
    share = decode["tokens_per_second"]["lit_gen"] / decode["limit"]
    assert decode["share"]["lit_gen"] == pytest.approx(share, rel=1e-2, abs=2e-3)  # both are rounded
    ragged = [line for line in rest if line["task"] == "ragged"]
    assert [line["engine"] for line in ragged] == ["lit_gen continuous 2", "lit_gen static 2", "hf static 2"]
    assert [line.get("rows_with_equal_tokens") for line in ragged] == [None, "4/4", "4/4"]
    assert max(rows for _, rows in ragged[0]["timeline"]) == 2
    assert len([line for line in rest if "ms_per_step" in line]) == 6 and "fit" in rest[-1]
    assert picture is None or picture.read_bytes().startswith(b"\x89PNG")


def test_unknown_engine_is_refused():
    with pytest.raises(UserError, match="there is no engine 'vllm': use lit_gen, hf"):
        main(vs=["vllm"])


def test_missing_matplotlib_is_one_line(tmp_path, monkeypatch):
    from scripts.benchmark_plot import draw

    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(UserError, match="pip install"):
        draw([], LIMITS, "float32", Path(tmp_path / "x.png"))
