"""Claims of lit_gen/plan.py, against numbers worked out by hand."""

from pathlib import Path

import psutil
import pytest
import torch
from conftest import llama_config

from lit_gen import plan
from lit_gen.kernels import load_kernels
from lit_gen.model import GPT
from lit_gen.pack import pack_model, weight_bytes
from lit_gen.plan import Plan, free_memory, is_out_of_memory, plan_batch
from lit_gen.utils import UserError

CPU = torch.device("cpu")
CONFIG = llama_config()  # 2 layers, 4 heads (2 for keys and values) of 16, width 64, MLP 128, 512 tokens
LAYER = 64 + (4 + 2 + 2) * 16 * 64 + 64 * 64 + 64 + 3 * 64 * 128  # norm, qkv, proj, norm, MLP
WEIGHTS = 2 * LAYER + 64 + 2 * 512 * 64  # the last norm, embedding and head
COLUMN = 2 * 2 * 2 * 16  # keys and values of two layers, two heads of 16


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch):
    """Sets how much memory is free."""
    return lambda size: monkeypatch.setattr(plan, "free_memory", lambda device: size)


def test_plan_of_a_tiny_model_by_hand(free, monkeypatch):
    """200 columns become 256 (4 x 64); in float32 a row is 256 x 128 x 4 = 131,072 bytes."""
    free(4 * WEIGHTS + 10 * 131_072 * 10 // 8)  # 10 rows and a fifth of the room for activations
    got = plan_batch(CONFIG, torch.float32, CPU, longest=200, n_rows=1000, max_batch_size=None)
    assert got == Plan(10, 256, 10 * 131_072, 4 * WEIGHTS, 4 * WEIGHTS + 1_638_400)
    free(4 * WEIGHTS + 10 * 131_072 * 10 // 8 - 2)
    assert plan_batch(CONFIG, torch.float32, CPU, 200, 1000, None).rows == 9
    monkeypatch.setattr(plan, "multiplies", lambda dtype: True)
    free(2 * WEIGHTS + 1_638_400)
    half = plan_batch(CONFIG, torch.bfloat16, CPU, 200, 1000, None)
    assert (half.rows, half.cache_bytes, half.weight_bytes) == (20, 20 * 65_536, 2 * WEIGHTS)


def test_loaded_weights_need_no_room_again(free):
    free(1_638_400)
    assert plan_batch(CONFIG, torch.float32, CPU, 200, 1000, None, loaded=True).rows == 10
    assert plan_batch(CONFIG, torch.float32, CPU, 200, 1000, None).rows < 10


@pytest.mark.parametrize("kernels", ["1", "0"])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_planned_bytes_are_those_that_the_model_takes(free, dtype, tied, kernels, monkeypatch):
    free(10**9)
    monkeypatch.setenv("LIT_GEN_KERNELS", kernels)
    load_kernels.cache_clear()
    try:
        config = llama_config(tie_embeddings=tied)
        got = plan_batch(config, dtype, CPU, longest=65, n_rows=3, max_batch_size=None)
        model = pack_model(GPT(config).to(dtype))
        model.set_kv_cache(got.rows, got.columns)
    finally:
        load_kernels.cache_clear()
    assert (got.rows, got.columns) == (3, 128) and got.cache_bytes == model.cache_bytes
    assert got.weight_bytes == pytest.approx(weight_bytes(model), rel=0.02)


@pytest.mark.parametrize(("longest", "columns"), [(1, 64), (64, 64), (65, 128), (256, 256)])
def test_columns_are_whole_pieces_of_64(free, longest, columns):
    free(10**9)
    assert plan_batch(CONFIG, torch.float32, CPU, longest, 2, None).columns == columns


def test_tied_weights_count_once(free):
    free(10**9)
    tied = plan_batch(llama_config(tie_embeddings=True), torch.float32, CPU, 10, 1, None)
    assert tied.weight_bytes == 4 * (WEIGHTS - 512 * 64)


@pytest.mark.parametrize("size", [0, 1, 4 * WEIGHTS - 1, 4 * WEIGHTS, 4 * WEIGHTS + 131_072])
def test_there_is_always_one_row(free, size):
    """Also when nothing seems to be free: it may be wrong, and the error of the allocation is the better message."""
    free(size)
    assert plan_batch(CONFIG, torch.float32, CPU, 200, 50, None).rows == 1
    assert plan_batch(CONFIG, torch.float32, CPU, 200, 0, 7).rows == 1


@pytest.mark.parametrize(
    ("n_rows", "max_batch_size", "rows"),
    [(1000, None, 64), (1000, 100, 100), (1000, 1, 1), (5, 100, 5), (5, None, 5), (1000, 2, 2), (63, 64, 63)],
)
def test_no_more_rows_than_wanted_or_there(free, n_rows, max_batch_size, rows):
    free(10**12)
    assert plan_batch(CONFIG, torch.float32, CPU, 200, n_rows, max_batch_size).rows == rows


def test_gpu_takes_more_rows_than_a_cpu(free):
    free(10**12)
    assert plan_batch(CONFIG, torch.float32, torch.device("cuda"), 200, 1000, None).rows == 256
    assert plan_batch(CONFIG, torch.float32, torch.device("mps"), 200, 1000, None).rows == 64


@pytest.mark.parametrize("wrong", [0, -3, True, 1.5])
def test_max_batch_size_that_is_no_count_is_refused(wrong):
    with pytest.raises(UserError, match="^max_batch_size is .*, but must be a whole number >= 1$"):
        plan_batch(CONFIG, torch.float32, CPU, 200, 10, wrong)


def test_plan_in_words():
    text = str(Plan(12, 256, 1_500_000_000, 270_000_000, 8_000_000_000))
    assert text == "12 rows x 256 columns, 1.50 GB cache beside 0.27 GB of weights; 8.0 GB are free"


def control_group(folder: Path, limit: str | None, used: str | None, stat: str | None = "anon 9\n") -> list[str]:
    """The files of a control group; None leaves one out."""
    folder.mkdir(parents=True)
    for name, content in (("limit", limit), ("used", used), ("stat", stat)):
        if content is not None:
            (folder / name).write_text(content)
    return [str(folder / name) for name in ("limit", "used", "stat")]


@pytest.mark.parametrize(
    ("groups", "free"),
    [
        ([("1000\n", "300\n")], 700),
        ([("max\n", "300\n")], None),  # version 2 without a limit
        ([("9223372036854771712\n", "300\n")], None),  # version 1 without a limit
        ([("1000\n", "1500\n")], 0),  # over the limit for a moment
        ([(None, None), ("1000\n", "300\n")], 700),
        ([("1000\n", None)], None),
        ([("1000\n", "300\n"), ("500\n", "100\n")], 400),
        ([("", "300\n")], None),
        ([("1000\n", "900\n", "anon 150\ninactive_file 700\nactive_file 50\n")], 800),  # cached files can go
        ([("1000\n", "900\n", "inactive_file 5\ntotal_inactive_file 600\n")], 105),
        ([("1000\n", "300\n", None)], None),
    ],
)
def test_limit_of_the_container_counts(groups, free, tmp_path, monkeypatch):
    files = [control_group(tmp_path / str(i), *group) for i, group in enumerate(groups)]
    monkeypatch.setattr(plan, "CONTAINER", files)
    available = psutil.virtual_memory().available
    got = free_memory(CPU)
    if free is None:
        assert got == pytest.approx(available, rel=0.5)
    else:
        assert got == free


def test_processes_that_share_a_machine_share_what_is_free(tmp_path, monkeypatch):
    monkeypatch.setattr(plan, "CONTAINER", [control_group(tmp_path / "group", "1000\n", "300\n")])
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert free_memory(CPU) == 175
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1000, 2000))
    for gpus, free in ((1, 250), (2, 500), (3, 500), (4, 1000), (8, 1000)):
        monkeypatch.setattr(torch.cuda, "device_count", lambda gpus=gpus: gpus)
        assert free_memory(torch.device("cuda:0")) == free


def test_real_errors_of_pytorch_are_told_apart():
    with pytest.raises(RuntimeError) as error:
        torch.empty(2**60)
    assert is_out_of_memory(error.value)
    for wrong in (lambda: torch.ones(2) @ torch.ones(3), lambda: torch.empty(-1), lambda: torch.ones(2).view(3)):
        with pytest.raises(RuntimeError) as error:
            wrong()
        assert not is_out_of_memory(error.value)
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory"))


def test_a_row_that_may_not_fit_is_said(free, capsys):
    free(1000)
    plan_batch(CONFIG, torch.float32, CPU, 200, 50, None)
    assert capsys.readouterr().err.startswith("a row of 256 columns may not fit: it needs 0.0 GB")
