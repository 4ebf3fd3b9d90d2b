"""Claims of lit_gen/stats.py, against numbers worked out by hand."""

import json
import resource
import sys

import pytest
import torch

from lit_gen.stats import Stats, peak_memory


def test_bandwidth_is_bytes_times_steps_not_times_tokens():
    """Style guide's arithmetic: 25 rows, 9.35 GB a step, 21.55 steps/s are 201.5 GB/s, as for one row; not 25 times that."""
    stats = Stats()
    for _ in range(431):
        stats.add_step(live_rows=25, bytes_read=9_350_000_000, seconds=20 / 431)
    for _ in range(25):
        stats.add_row(432)  # one from the prefill, 431 from the steps
    assert stats.steps_per_second == pytest.approx(21.55)
    assert stats.gigabytes_per_second == pytest.approx(201.4925)
    assert stats.decode_tokens_per_second == pytest.approx(25 * 21.55)
    assert stats.mean_occupancy == 25


def test_only_kept_tokens_count():
    """Three rows of one batch, 4 steps of 0.5 s: kept 5 (to the end), 2 (then a stop), 0 (the first token was a stop)."""
    stats = Stats()
    stats.add_prefill(prompt_tokens=7 + 3 + 11, seconds=0.25)
    for live in (2, 2, 1, 1):  # the second row's stop came with the second step
        stats.add_step(live_rows=live, bytes_read=100, seconds=0.5)
    for kept in (0, 2, 5):
        stats.add_row(kept)
    assert (stats.rows, stats.new_tokens, stats.first_tokens) == (3, 7, 2)
    assert stats.decode_tokens_per_second == (7 - 2) / 2.0  # 4 of the long row, 1 of the stopped one
    assert stats.prefill_tokens_per_second == 21 / 0.25
    assert stats.mean_occupancy == 6 / 4
    assert stats.gigabytes_per_second == 400 / 2.0 / 1e9


def test_empty_run_divides_by_nothing():
    stats = Stats()
    numbers = stats.to_json()
    assert [numbers[name] for name in numbers if name.endswith("per_second")] == [0.0] * 4
    assert numbers["mean_occupancy"] == 0.0
    assert numbers["time_to_first_token"] is None
    assert "first token" not in stats.report()


def test_json_holds_every_counter_and_rate():
    stats = Stats("tiny", "bfloat16", "cpu", load_seconds=1.5, time_to_first_token=0.125)
    stats.add_prefill(10, 2.0)
    numbers = json.loads(json.dumps(stats.to_json()))
    assert numbers["model"] == "tiny" and numbers["load_seconds"] == 1.5 and numbers["time_to_first_token"] == 0.125
    assert numbers["prefill_tokens_per_second"] == 5.0
    assert numbers.keys() == set(Stats.__dataclass_fields__) | {
        "prefill_tokens_per_second",
        "decode_tokens_per_second",
        "steps_per_second",
        "mean_occupancy",
        "gigabytes_per_second",
    }


def test_report_shows_the_numbers():
    stats = Stats("tiny", "float32", "cpu", cache_bytes=1_250_000_000, peak_memory=2_500_000_000, time_to_first_token=0.5)
    stats.add_prefill(300, 2.0)
    stats.add_step(4, 3_000_000_000, 1.0)
    for kept in (2, 2, 2, 1):
        stats.add_row(kept)
    report = stats.report()
    for shown in ("tiny (float32, cpu)", "150.0 tokens/s", "first token after 0.50 s", "3.0 kept tokens/s", "1 steps"):
        assert shown in report
    for shown in ("4.0 rows per step", "3.0 GB/s", "4 rows, 7 new tokens kept", "cache 1.25 GB", "peak memory 2.50 GB"):
        assert shown in report


def test_peak_memory_is_in_bytes():
    block = torch.ones(50_000_000, dtype=torch.uint8)
    peak = peak_memory(torch.device("cpu"))
    unit = 1 if sys.platform == "darwin" else 1024
    assert peak > block.nbytes
    assert peak <= resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
