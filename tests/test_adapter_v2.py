"""LLaMA-Adapter v2: nothing before training, the formula, rows as alone, folded as unfolded, files, refusals."""

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import llama_config, randomized
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from test_adapter import NAMES, needs_kernels
from test_generate_base import some_prompts, tokens
from test_pack import MOE, alone, assert_every_way_gives_the_same_bits
from torch import nn

from lit_gen.adapter import AdapterConfig
from lit_gen.adapter_v2 import FILE, add_adapter_v2, fold_adapter_v2, load_adapter_v2, save_adapter_v2
from lit_gen.checkpoint import load_model
from lit_gen.export import save_lit
from lit_gen.layers import Norm
from lit_gen.linear import linears
from lit_gen.model import GPT
from lit_gen.pack import KernelLinear, pack_model
from lit_gen.quantize import quantize_model
from lit_gen.utils import UserError


def trained(model: GPT, seed: int = 0, length: int = 5, start_layer: int = 1) -> GPT:
    """A copy with an adapter whose parameters are all random, the norms' too."""
    model = add_adapter_v2(copy.deepcopy(model), AdapterConfig(length, start_layer))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.requires_grad:
                one = "scale" in name or "norm" in name or "ln_f" in name
                p.copy_(torch.randn(p.shape, generator=generator) * (0.3 if one else 0.5) + one)
    return model.requires_grad_(False)


def close_to(logits: torch.Tensor) -> dict[str, float]:
    """Up to 1e-5, or that part of the largest of them if they are larger than 1, as float32 has it."""
    return {"rtol": 0, "atol": 1e-5 * max(1.0, logits.abs().max().item())}


@pytest.mark.parametrize("length", [4, 0])
def test_an_untrained_adapter_changes_no_bit(tiny: GPT, length: int) -> None:
    model, idx = add_adapter_v2(copy.deepcopy(tiny), AdapterConfig(length, 0)), torch.randint(0, 512, (3, 9))
    assert torch.equal(model(idx), tiny(idx))
    assert tokens(model, some_prompts(5)) == tokens(tiny, some_prompts(5))


def test_what_is_trained() -> None:
    """Every scale, bias, norm, and the prefix; no weight, no expert, no router."""
    model = add_adapter_v2(randomized(llama_config(tie_embeddings=True, qk_norm="head", **MOE)), AdapterConfig(3, 1))
    got = {name for name, p in model.named_parameters() if p.requires_grad}
    expected = {f"h.1.attn.prefix.{part}" for part in ("weight", "gate")} | {"ln_f.weight"}
    for layer in (0, 1):
        norms = ("norm_1", "norm_2", "attn.norm_q", "attn.norm_k")
        expected |= {f"h.{layer}.{name}.weight" for name in norms}
    wrapped = [
        "lm_head",
        "h.0.attn.qkv",
        "h.0.attn.proj",
        "h.1.attn.qkv",
        "h.1.attn.proj",
        "h.1.mlp.fc",
        "h.1.mlp.proj",
    ]
    expected |= {f"{name}.adapter_{part}" for name in wrapped for part in ("scale", "bias")}
    assert got == expected
    torch.nn.init.ones_(model.h[1].attn.prefix.gate)
    model(torch.tensor([[1, 2, 3, 4]])).square().sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters() if p.requires_grad)


def test_it_is_the_formula_of_the_paper(tiny: GPT) -> None:
    """The same by hooks on the linears of the base, whose norms are set by hand."""
    model, base, idx = trained(tiny, length=0), copy.deepcopy(tiny), torch.randint(0, 512, (2, 7))
    own = dict(model.named_parameters())
    for name, module in base.named_modules():
        if isinstance(module, nn.Linear):
            scale, bias = own[f"{name}.adapter_scale"], own[f"{name}.adapter_bias"]
            module.register_forward_hook(lambda _, x, y, scale=scale, bias=bias: scale * (y + bias))
        elif isinstance(module, Norm):
            module.load_state_dict({k: own[f"{name}.{k}"] for k in module.state_dict()})
    torch.testing.assert_close(model(idx), base(idx), rtol=0, atol=1e-6)
    assert (model(idx) - tiny(idx)).abs().max() > 0.1


@pytest.mark.parametrize("name", NAMES)
def test_folded_is_unfolded_in_every_family(family: Callable, name: str, tmp_path: Path) -> None:
    """Float32 logits up to 1e-5 of their size; and the folded model is a checkpoint like any other."""
    _, base, folder = family(name)
    model, idx = trained(base, length=0), torch.tensor([list(range(30, 50)), [5] * 20])
    expected = model(idx)
    assert (expected - base(idx)).abs().max() > 0.1
    folded = fold_adapter_v2(model)
    torch.testing.assert_close(folded(idx), expected, **close_to(expected))
    save_lit(folded, tmp_path / "folded", folder)
    loaded = load_model(tmp_path / "folded", None, torch.device("cpu"))
    assert torch.equal(loaded(idx), folded(idx))
    assert base.config == load_model(folder, None, torch.device("cpu")).config  # a copy's config was changed


def test_gates_that_are_zero_fold_away_and_others_are_refused(tiny_llama: GPT) -> None:
    model, idx = trained(tiny_llama), torch.tensor([[1, 2, 3, 4]])
    before = model(idx)
    with pytest.raises(UserError, match="cannot be folded .* generate/adapter_v2.py, or train with --adapter.length 0"):
        fold_adapter_v2(model)
    assert torch.equal(model(idx), before)
    model.h[1].attn.prefix.gate.zero_()
    before = model(idx)
    torch.testing.assert_close(fold_adapter_v2(model)(idx), before, **close_to(before))
    assert not any("adapter" in name or "prefix" in name for name, _ in model.named_parameters())


def test_16_bit_weights_are_folded_in_float32_and_rounded_once(tiny_llama: GPT) -> None:
    model = trained(tiny_llama.bfloat16(), length=0)
    own = {name: p.float() for name, p in model.named_parameters()}
    folded = fold_adapter_v2(model).h[0].mlp.fc
    scale, bias = own["h.0.mlp.fc.adapter_scale"], own["h.0.mlp.fc.adapter_bias"]
    exact = own["h.0.mlp.fc.linear.weight"] * scale[:, None]
    assert folded.weight.dtype == torch.bfloat16
    assert torch.equal(folded.weight, exact.bfloat16()) and torch.equal(folded.bias, (bias * scale).bfloat16())


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["llama-wide-bias-tied", "gemma2", "qwen3", "mixtral"])
def test_a_row_has_its_own_bits_beside_any_others(family: Callable, name: str, dtype: torch.dtype) -> None:
    model = trained(family(name).model)
    with torch.no_grad():
        expected = alone(model, 2)
        packed = pack_model(copy.deepcopy(model).to(dtype))
        if dtype == torch.float32:
            assert isinstance(packed.h[0].attn.qkv.linear, KernelLinear)
            torch.testing.assert_close(alone(packed, 2), expected, rtol=0, atol=3e-5 * expected.abs().max().item())
        assert_every_way_gives_the_same_bits(packed)


def test_rows_are_as_alone_without_kernels_and_the_latest_weights_are_used(tiny: GPT) -> None:
    model, prompts = trained(tiny), some_prompts(9)
    expected = [tokens(model, [prompt])[0] for prompt in prompts]
    for side in (None, "left", "right"):
        assert tokens(model, prompts, padding_side=side, max_batch_size=4) == expected
    model.load_state_dict(trained(tiny, seed=1).state_dict())
    assert tokens(model, prompts) == tokens(trained(tiny, seed=1), prompts) != expected


@pytest.mark.parametrize("format", ["int8", "int4"])
def test_the_base_may_be_quantised_but_then_not_folded(tiny_llama: GPT, format: str, tmp_path: Path) -> None:
    """Wrapped and then quantised, or the other way round: the same weights, the head in 8 bits."""
    model, idx = trained(tiny_llama, length=0), torch.tensor([[1, 2, 3, 4]])
    save_adapter_v2(model, tmp_path / FILE)
    expected = load_adapter_v2(quantize_model(copy.deepcopy(tiny_llama), format), tmp_path)
    quantize_model(model, format)
    assert torch.equal(model(idx), expected(idx)) and model.lm_head.linear.format == "int8"
    with torch.no_grad():
        torch.testing.assert_close(alone(pack_model(copy.deepcopy(model)), 1), alone(model, 1), rtol=1e-4, atol=1e-3)
    with pytest.raises(UserError, match="is quantised"):
        fold_adapter_v2(model)
    assert torch.equal(model(idx), expected(idx))


def test_a_file_gives_the_adapter_back(tiny: GPT, tmp_path: Path) -> None:
    model, idx = trained(tiny), torch.tensor([[1, 2, 3]])
    save_adapter_v2(model, tmp_path / FILE)
    loaded = load_adapter_v2(copy.deepcopy(tiny), tmp_path)
    assert torch.equal(loaded(idx), model(idx)) and not any(p.requires_grad for p in loaded.parameters())
    assert not any("linear" in name for name in load_file(tmp_path / FILE))  # nothing of the base is in it


@pytest.mark.parametrize("name", ["lm_head.adapter_scale", "h.0.norm_1.weight", "h.1.attn.prefix.gate"])
@pytest.mark.parametrize("wrong", ["lacks", "has shape", "surplus"])
def test_a_wrong_file_is_named_and_nothing_half_applied(tiny_llama: GPT, tmp_path: Path, name: str, wrong: str) -> None:
    save_adapter_v2(trained(tiny_llama), tmp_path / FILE)
    tensors, before = load_file(tmp_path / FILE), copy.deepcopy(tiny_llama.state_dict())
    with safe_open(tmp_path / FILE, "pt") as file:
        metadata = file.metadata()
    if wrong == "lacks":
        del tensors[name]
    else:
        tensors[f"{name}.more" if wrong == "surplus" else name] = torch.zeros(7)
    save_file(tensors, tmp_path / FILE, metadata)
    with pytest.raises(UserError, match=f"{wrong}.*{name}" if wrong != "has shape" else f"{name} {wrong}"):
        load_adapter_v2(tiny_llama, tmp_path)
    assert tiny_llama.state_dict().keys() == before.keys() and len(linears(tiny_llama)) == 9
    assert all(torch.equal(t, before[k]) for k, t in tiny_llama.state_dict().items())
