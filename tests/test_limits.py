"""Claims of lit_gen/limits.py, and of the shares that lit_gen/stats.py makes of it."""

import json

import pytest
import torch
from conftest import llama_config, randomized

from lit_gen import limits as module
from lit_gen.limits import Limits, Work, cached_limits, limits_file, measure_limits, save_limits
from lit_gen.stats import Stats, Traffic

LIMITS = Limits(2, {2**20: 80e9, 2**30: 10e9}, {"float32": 400e9, "bfloat16": 20e9})


@pytest.fixture(autouse=True)
def cache_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def test_bandwidth_is_that_of_the_nearest_working_set():
    sizes = (1, 2**20, 2**24, 2**26, 2**40)
    assert [LIMITS.bandwidth(size) for size in sizes] == [80e9, 80e9, 80e9, 10e9, 10e9]


def test_step_takes_the_longer_of_reading_and_computing():
    assert LIMITS.seconds(2**30, 4e9, "float32") == 2**30 / 10e9  # 0.107 s; computing takes 0.01 s
    assert LIMITS.seconds(2**20, 4e9, "float32") == 4e9 / 400e9


def test_16_bit_products_can_be_formed_in_float32_where_that_is_faster():
    assert LIMITS.peak("bfloat16") == LIMITS.peak("float16") == 400e9
    assert Limits(1, {1: 1.0}, {"float32": 1e9, "bfloat16": 5e9}).peak("bfloat16") == 5e9


def test_measurement_is_kept_for_this_number_of_threads_beside_others():
    save_limits(LIMITS)
    save_limits(Limits(1, {2**20: 1e9}, {"float32": 1e9, "bfloat16": 2e9}))
    assert cached_limits(2) == LIMITS
    assert cached_limits(1).flops["bfloat16"] == 2e9
    assert cached_limits(3) is None
    assert [file.name for file in limits_file().parent.iterdir()] == ["limits.json"]


def test_measurement_of_another_version_or_processor_does_not_count(monkeypatch):
    save_limits(LIMITS)
    with monkeypatch.context() as patch:
        patch.setattr(module, "cpu_name", lambda: "another")
        assert cached_limits(2) is None
    monkeypatch.setattr(torch, "__version__", "99.0")
    assert cached_limits(2) is None


@pytest.mark.parametrize("text", ["", "[]", "{", "7", '{"%s": 3}', '{"%s": {"read": {"x": 1}, "flops": {}}}'])
def test_damaged_file_is_no_measurement_and_can_be_replaced(text):
    limits_file().parent.mkdir(parents=True)
    limits_file().write_text(text.replace("%s", module._key(2)))
    assert cached_limits(2) is None
    save_limits(LIMITS)
    assert cached_limits(2) == LIMITS


@pytest.mark.parametrize("value", [0, -1, "NaN", None])
def test_numbers_that_make_no_sense_are_no_measurement(value):
    save_limits(LIMITS)
    entries = json.loads(limits_file().read_text())
    entries[module._key(2)]["flops"]["float32"] = value
    limits_file().write_text(json.dumps(entries))
    assert cached_limits(2) is None


def test_measured_are_positive_rates_and_threads_are_put_back(monkeypatch):
    monkeypatch.setattr(module, "WORKING_SETS", (2**16, 2**18))
    monkeypatch.setattr(module, "SHAPES", ((4, 8, 16),))
    before = torch.get_num_threads()
    found = measure_limits(before + 1)
    assert torch.get_num_threads() == before and found.threads == before + 1
    assert list(found.read) == [2**16, 2**18] and all(rate > 1e6 for rate in found.read.values())
    assert found.flops.keys() == {"float32", "bfloat16"} and all(rate > 1e3 for rate in found.flops.values())
    assert set(found.describe()) == {"threads", "read_gb_per_s", "gflop_per_s"}


def test_work_of_a_token_is_two_operations_for_each_weight():
    """The model of conftest: 2 layers, 64 wide, 4 query and 2 key/value heads of 16, MLP of 128, 512 ids."""
    layer = (4 + 2 + 2) * 16 * 64 + 64 * 64 + 3 * 64 * 128
    work = Work.of(llama_config())
    assert work == Work(token=2 * 2 * layer, head=2 * 512 * 64, column=4 * 4 * 16)
    moe = {"n_expert": 8, "n_expert_per_token": 2, "moe_intermediate_size": 32, "moe_layers": [False, True]}
    router, experts = 8 * 64, 2 * 3 * 64 * 32
    assert Work.of(llama_config(**moe)).token == 2 * (2 * layer - 3 * 64 * 128 + router + experts)


def test_attention_work_grows_with_the_columns_that_a_row_sees():
    model = randomized(llama_config())
    model.set_kv_cache(2, 100)
    traffic = Traffic(model)
    assert traffic.flops([0, 0]) == 2 * (traffic.work.token + traffic.work.head) + 2 * 2 * 4 * 4 * 16
    assert traffic.flops([9, 3]) - traffic.flops([0, 0]) == 2 * (9 + 3) * 4 * 4 * 16  # two layers


def test_report_says_which_share_of_the_limit_was_reached(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    counts = {"steps": 10, "decode_seconds": 2.0, "bytes_read": 10 * 2**30, "flops": 10**9, "prefill_flops": 10**11}
    stats = Stats("m", "torch.bfloat16", "cpu", **counts, prefill_seconds=1.0)
    assert stats.decode_share is None and "limit" not in stats.report()
    save_limits(LIMITS)
    assert stats.decode_share == pytest.approx(10 * 2**30 / 10e9 / 2.0)  # 54 %
    assert stats.prefill_share == pytest.approx(0.25)
    assert stats.report().count("of this machine's limit") == 2 and "(54% of this" in stats.report()
    assert Stats("m", "bfloat16", "cuda:0", **counts).decode_share is None
    assert Stats().decode_share is None and Stats().prefill_share == 0.0
