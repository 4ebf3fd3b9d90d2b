"""Claims of lit_gen/stats.py, against numbers worked out by hand."""

import json
import resource
import sys

import pytest
import torch
from conftest import llama_config, randomized

from lit_gen.model import GPT
from lit_gen.stats import Stats, Traffic, peak_memory

# float32 numbers in the model of conftest.llama_config, whose heads are 4 for queries and 2 for keys and values, of 16
LAYER = 64 + (4 + 2 + 2) * 16 * 64 + 64 * 64 + 64 + 3 * 64 * 128  # norm, qkv, proj, norm, MLP
EMBEDDING = 512 * 64
COLUMN = 2 * 2 * 16  # key and value of one layer, for one token


def model_with_cache(rows: int, **changes) -> GPT:
    model = randomized(llama_config(**changes))
    model.set_kv_cache(rows, 100)
    return model


def test_bandwidth_is_bytes_times_steps_not_times_tokens():
    """25 rows, 9.35 GB a step and 21.55 steps/s are 201.5 GB/s, as they would be for one row; not 25 times that."""
    counts = {"steps": 431, "decode_seconds": 20.0, "live_rows": 25 * 431, "bytes_read": 431 * 9_350_000_000}
    stats = Stats(**counts)
    for _ in range(25):
        stats.add_row(432)  # one from the prefill, 431 from the steps
    assert stats.steps_per_second == pytest.approx(21.55)
    assert stats.gigabytes_per_second == pytest.approx(201.4925)
    assert stats.decode_tokens_per_second == pytest.approx(25 * 21.55)
    assert stats.mean_rows == 25


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_step_reads_the_weights_once_and_the_columns_of_each_row(dtype):
    """The embedding is looked up, the head is read; more rows add nothing but their columns."""
    model = randomized(llama_config()).to(dtype)
    model.set_kv_cache(25, 100)
    weights = 2 * LAYER + 64 + EMBEDDING  # two layers, the last norm, the head
    traffic = Traffic(model)
    assert traffic.step([0]) == dtype.itemsize * (weights + 2 * COLUMN)
    assert traffic.step([7]) == dtype.itemsize * (weights + 8 * 2 * COLUMN)
    positions = list(range(25))
    assert traffic.step(positions) == dtype.itemsize * (weights + 325 * 2 * COLUMN)  # 1 + 2 + ... + 25


def test_tied_embedding_is_read_as_the_head():
    assert Traffic(model_with_cache(1, tie_embeddings=True)).step([0]) == Traffic(model_with_cache(1)).step([0])


def test_sliding_layer_reads_its_window():
    whole = Traffic(model_with_cache(2))
    sliding = Traffic(model_with_cache(2, layer_types=["full", "sliding"], window=10))
    assert whole.step([9, 3]) == sliding.step([9, 3])
    assert whole.step([30, 3]) - sliding.step([30, 3]) == 4 * COLUMN * (31 - 10)


def test_experts_that_no_row_can_choose_are_not_read():
    moe = {"n_expert": 8, "n_expert_per_token": 2, "moe_intermediate_size": 32, "moe_layers": [False, True]}
    traffic = Traffic(model_with_cache(5, **moe))
    expert = 4 * 3 * 64 * 32
    steps = [traffic.step([0] * rows) - rows * 4 * 2 * COLUMN for rows in range(1, 6)]
    assert [b - a for a, b in zip(steps, steps[1:], strict=False)] == [2 * expert] * 3 + [0]


def test_only_kept_tokens_count():
    """Three rows, 4 steps of 0.5 s: kept are 5 tokens, 2 (then came a stop), and 0 (the first token was a stop)."""
    stats = Stats()
    stats.add_prefill(model_with_cache(3), prompt_tokens=7 + 3 + 11, first_tokens=3, seconds=0.25)
    for position in ([7, 3], [8, 4], [9], [10]):  # the second row's stop came with the second step
        stats.add_step(position, 0.5, slots=3, more=False)
    for kept in (0, 2, 5):
        stats.add_row(kept)
    assert (stats.rows, stats.new_tokens, stats.first_tokens, stats.steps) == (3, 7, 2, 4)
    assert stats.decode_tokens_per_second == (7 - 2) / 2.0  # 4 of the long row, 1 of the stopped one
    assert stats.prefill_tokens_per_second == 21 / 0.25
    assert stats.mean_rows == 6 / 4
    assert stats.bytes_read == 4 * (4 * (2 * LAYER + 64 + EMBEDDING) + (12 + 14 + 10 + 11) * 2 * COLUMN)
    assert stats.gigabytes_per_second == pytest.approx(stats.bytes_read / 2.0 / 1e9)


def test_occupancy_counts_rows_that_ran_among_those_that_could():
    """Room for 4: while rows wait 4, 4 and 3 run; in the tail 2, and then 1, with room for 8 short ones."""
    stats = Stats()
    stats.add_prefill(model_with_cache(4), 4, 1, 0.1)
    for rows, slots, more in ((4, 4, True), (4, 4, True), (3, 4, True), (2, 4, False), (1, 8, False)):
        stats.add_step([5] * rows, 0.1, slots, more)
    assert (stats.live_rows, stats.slots, stats.live_rows_before_tail, stats.slots_before_tail) == (14, 24, 11, 12)
    assert stats.mean_rows == 14 / 5 and stats.occupancy == 14 / 24 and stats.occupancy_before_tail == 11 / 12


def test_weights_are_measured_once_a_job_and_caches_at_each_prefill():
    stats, model = Stats(), model_with_cache(1)
    stats.add_prefill(model, 4, 1, 0.1)
    traffic = stats.traffic
    model.resize_kv_cache(6, 128)
    stats.add_prefill(model, 4, 1, 0.1)
    assert stats.traffic is traffic and stats.cache_bytes == 6 * 128 * 2 * COLUMN * 4


def test_time_to_first_token_counts_from_the_start_to_a_token_not_to_a_piece(monkeypatch):
    monkeypatch.setattr("lit_gen.stats.time.perf_counter", lambda: 107.5)
    stats = Stats(started=100.0)
    stats.add_prefill(model_with_cache(1), 10, 0, 3.0)  # a piece of a prompt
    assert stats.time_to_first_token is None
    stats.add_prefill(model_with_cache(1), 10, 1, 4.0)
    stats.add_prefill(model_with_cache(1), 10, 1, 4.0)
    assert (stats.time_to_first_token, stats.prefill_seconds) == (7.5, 11.0)


def test_largest_cache_is_reported():
    stats = Stats()
    for rows in (2, 5, 3):
        stats.add_prefill(model_with_cache(rows), 1, 1, 0.5)
    assert stats.cache_bytes == 5 * 100 * 2 * COLUMN * 4


def test_empty_run_divides_by_nothing():
    stats = Stats()
    numbers = stats.to_json()
    assert [numbers[name] for name in numbers if name.endswith("per_second")] == [0.0] * 4
    assert [numbers[name] for name in ("mean_rows", "occupancy", "occupancy_before_tail")] == [0.0] * 3
    assert numbers["time_to_first_token"] is None
    assert "first token" not in stats.report()


def test_published_are_a_report_and_every_counter_and_rate(tmp_path, capsys):
    counts = {
        "load_seconds": 1.5,
        "steps": 1,
        "decode_seconds": 1.0,
        "live_rows": 4,
        "bytes_read": 3_000_000_000,
        "slots": 5,
    }
    stats = Stats("tiny", "bfloat16", "cpu", **counts, cache_bytes=1_250_000_000)
    stats.add_prefill(model_with_cache(1), 300, 4, 2.0)
    for kept in (2, 2, 2, 1):
        stats.add_row(kept)
    stats.publish([torch.device("cpu")], tmp_path / "stats.json")
    out, report = capsys.readouterr()
    assert out == ""
    for shown in ("tiny (bfloat16, cpu)", "150.0 tokens/s", "first token after", "3.0 kept tokens/s", "1 steps"):
        assert shown in report
    for shown in (
        "4.0 rows per step (80% of those that could run)",
        "3.0 GB/s",
        "4 rows, 7 new tokens kept",
        "cache 1.25 GB",
        "peak memory",
    ):
        assert shown in report
    numbers = json.loads((tmp_path / "stats.json").read_text())
    assert numbers["model"] == "tiny" and numbers["load_seconds"] == 1.5 and numbers["time_to_first_token"] > 0
    assert numbers["prefill_tokens_per_second"] == 150.0 and numbers["peak_memory"] > 1e6
    rates = {"prefill_tokens_per_second", "decode_tokens_per_second", "steps_per_second"}
    rates |= {"mean_rows", "occupancy", "occupancy_before_tail", "gigabytes_per_second"}
    rates |= {"decode_share", "prefill_share"}
    assert numbers.keys() == (set(Stats.__dataclass_fields__) - {"started", "traffic"}) | rates


def test_peak_memory_is_in_bytes():
    block = torch.ones(50_000_000, dtype=torch.uint8)
    peak = peak_memory(torch.device("cpu"))
    unit = 1 if sys.platform == "darwin" else 1024
    assert peak > block.nbytes
    assert peak <= resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
