"""Linear layers laid out for PyTorch's own kernels: the same results, for every kind of processor, in every dtype."""

import copy
from collections.abc import Callable

import pytest
import torch
from conftest import llama_config, needs_onednn_bfloat16, neox_config, randomized
from torch import nn

from generate.base import generate
from lit_gen.linear import Float32Linear, HugePages, PackedLinear, lay_out_linears, linears, multiplies
from lit_gen.model import GPT
from lit_gen.stats import Stats, Traffic

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 0.02, torch.float16: 0.002}  # of the largest value: one rounding


def laid_out(model: GPT) -> GPT:
    lay_out_linears(model)
    return model


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("config", [llama_config(), neox_config(), llama_config(tie_embeddings=True)])
def test_the_layout_changes_no_logits(config, dtype: torch.dtype) -> None:
    model = randomized(config).to(dtype)
    idx = torch.arange(24).view(2, 12) * 17 % 512
    expected = model(idx)
    packed = laid_out(model)(idx)
    assert packed.dtype == dtype and (packed - expected).abs().max() <= TOLERANCE[dtype] * expected.abs().max()


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", [1, 7, 40])
@pytest.mark.parametrize(
    "packing",
    [lambda linear: Float32Linear(linear, HugePages(2**20)), pytest.param(PackedLinear, marks=needs_onednn_bfloat16)],
    ids=["float32", "onednn"],
)
def test_16_bit_layers_equal_the_plain_one_to_the_last_rounding(bias: bool, rows: int, packing: Callable) -> None:
    torch.manual_seed(rows)
    linear = nn.Linear(96, 80, bias=bias).bfloat16().requires_grad_(False)
    x = torch.randn(2, rows, 96).bfloat16()
    exact = x.double() @ linear.weight.double().T + (linear.bias.double() if bias else 0.0)
    y = packing(linear)(x)
    assert y.shape == (2, rows, 80) and y.dtype == torch.bfloat16
    assert (y.double() - exact).abs().max() <= exact.abs().max() / 128  # half a unit of bfloat16's last place


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_are_the_rows_alone_in_float32_and_run_in_all(dtype: torch.dtype) -> None:
    model = laid_out(randomized(llama_config()).to(dtype))
    prompts = [[1, 2, 3], [4], list(range(40, 90)), [7] * 9]
    batch = [row.tokens for row in sorted(generate(model, prompts, max_new_tokens=8), key=lambda row: row.index)]
    alone = [next(generate(model, [prompt], max_new_tokens=8)).tokens for prompt in prompts]
    assert all(len(row) == 8 for row in batch)
    assert batch == alone or dtype != torch.float32


@needs_onednn_bfloat16
@pytest.mark.parametrize("tied", [True, False])
def test_the_path_of_processors_that_multiply_bfloat16_generates_too(tied: bool, monkeypatch) -> None:
    """oneDNN's layout works, slowly, on any CPU with AVX-512; here it is taken on all of these."""
    monkeypatch.setattr("lit_gen.linear.multiplies", lambda dtype: True)
    model = randomized(llama_config(tie_embeddings=tied)).bfloat16()
    expected = copy.deepcopy(model)(torch.tensor([[1, 2, 3, 4]]))
    packed = laid_out(model)
    assert all(isinstance(block.mlp.fc, PackedLinear) for block in packed.h) and isinstance(
        packed.lm_head, PackedLinear
    )
    logits = packed(torch.tensor([[1, 2, 3, 4]]))
    assert (logits - expected).abs().max() <= TOLERANCE[torch.bfloat16] * expected.abs().max()
    rows = list(generate(packed, [[1, 2, 3], [4], list(range(40, 90))], max_new_tokens=8, stats=Stats()))
    assert [len(row.tokens) for row in rows] == [8, 8, 8]


def test_weights_are_not_kept_twice_and_ties_stay() -> None:
    model = randomized(llama_config(tie_embeddings=True))
    names = {name: p.shape for name, p in model.named_parameters()}
    packed = laid_out(model)
    assert packed is model and {name: p.shape for name, p in packed.named_parameters()} == names
    assert model.lm_head.weight is model.wte.weight
    restored = GPT(model.config)
    restored.load_state_dict(model.state_dict())  # such a model can still be saved
    assert torch.equal(restored.h[0].mlp.fc.weight, model.h[0].mlp.fc.weight)


def test_every_linear_layer_is_found_also_beside_experts() -> None:
    config = llama_config(n_expert=4, n_expert_per_token=2, moe_intermediate_size=32, moe_layers=[True, False])
    model = randomized(config)
    found = {id(getattr(parent, name)) for parent, name in linears(model)}
    assert found == {id(module) for module in model.modules() if isinstance(module, nn.Linear)}
    idx = torch.arange(12)[None]
    expected = copy.deepcopy(model)(idx)
    assert (laid_out(model)(idx) - expected).abs().max() <= 1e-4


def test_float32_is_multiplied_everywhere() -> None:
    assert multiplies(torch.float32) and isinstance(multiplies(torch.bfloat16), bool)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_model_reports_the_weights_that_a_step_reads(dtype: torch.dtype) -> None:
    model = randomized(llama_config()).to(dtype)
    blocks = sum(
        p.numel()
        for name, p in model.named_parameters()
        if "wte" not in name and "norm" not in name and "ln_f" not in name
    )
    laid_out(model).set_kv_cache(1, 4)
    size = dtype.itemsize if multiplies(dtype) else 4
    norms = 5 * 64 * dtype.itemsize
    assert Traffic(model).step([0]) == blocks * size + norms + 2 * 2 * 2 * 16 * dtype.itemsize  # k and v of one column
