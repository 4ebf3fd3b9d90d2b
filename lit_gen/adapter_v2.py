"""LLaMA-Adapter v2 (Gao et al. 2023, https://arxiv.org/abs/2304.15010): v1's prefix, and trained linears and norms.

    y = scale * (linear(x) + bias)        with a scale, 1 at first, and a bias, 0 at first, for each output

This is so for every linear layer but those of a mixture of experts: attention, dense MLPs and the head. Norms are
trained as they are. All but the prefix can be folded into an ordinary checkpoint.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from lit_gen.adapter import AdapterConfig, AdapterFile, add_prefixes, has_adapter, write_adapter
from lit_gen.adapter import adapter_parameters as prefix_parameters
from lit_gen.config import Config
from lit_gen.layers import MoE, Norm
from lit_gen.model import GPT
from lit_gen.quantize import QuantizedLinear
from lit_gen.utils import UserError

METHOD, FILE = "adapter_v2", "lit_model_adapter_v2.safetensors"
UNFOLDABLE = "the trained prefix of an adapter cannot be folded into a checkpoint"
UNFOLDABLE += ": generate with generate/adapter_v2.py, or train with --adapter.length 0"


class AdapterV2Linear(nn.Module):
    """A linear layer and what is trained of it; the layer itself may be packed, or quantised."""

    def __init__(self, linear: nn.Linear | QuantizedLinear, like: Tensor) -> None:
        super().__init__()
        factory = {"dtype": like.dtype, "device": linear.weight.device}
        self.linear = linear
        self.adapter_bias = nn.Parameter(torch.zeros(linear.out_features, **factory))
        self.adapter_scale = nn.Parameter(torch.ones(linear.out_features, **factory))

    @property
    def weight(self) -> Tensor:
        return self.linear.weight

    def forward(self, x: Tensor) -> Tensor:  # (..., in_features) -> (..., out_features)
        y = self.linear(x)
        return (self.adapter_scale * (y + self.adapter_bias)).to(y.dtype)  # they are more precise under autocast


def add_adapter_v2(model: GPT, config: AdapterConfig = AdapterConfig()) -> GPT:  # noqa: B008 (it is frozen)
    """Gives a model an untrained adapter, whose parameters are then the only ones with gradients; returns the model."""
    _check_new(model)
    prefixed = config.prefixed(model.config, METHOD)
    model.requires_grad_(False)
    _wrap(model, config.length, prefixed)
    for _, parameter in adapter_v2_parameters(model):
        parameter.requires_grad_(True)
    return model


def _check_new(model: GPT) -> None:
    assert not has_adapter(model) and not _wrapped(model), "the model has an adapter already"
    assert not model.by_token, "pack_model comes after the adapter: packed norms cannot be trained"


def _wrap(model: GPT, length: int, prefixed: range) -> None:
    add_prefixes(model, length, prefixed)
    for name, linear in _linears(model).items():
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, AdapterV2Linear(linear, model.wte.weight).train(model.training))


def _linears(model: GPT) -> dict[str, nn.Linear | QuantizedLinear]:
    experts = tuple(name for name, module in model.named_modules() if isinstance(module, MoE))
    kinds = nn.Linear | QuantizedLinear
    return {n: m for n, m in model.named_modules() if isinstance(m, kinds) and not n.startswith(experts)}


def _wrapped(model: GPT) -> dict[str, AdapterV2Linear]:
    return {name: module for name, module in model.named_modules() if isinstance(module, AdapterV2Linear)}


def _norm_parameters(model: GPT) -> Iterator[tuple[str, nn.Parameter]]:
    for name, module in model.named_modules():
        if isinstance(module, Norm):
            yield from module.named_parameters(name)


def adapter_v2_parameters(model: GPT) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters of an adapter, by the names that its file has."""
    yield from prefix_parameters(model)
    for name, module in _wrapped(model).items():
        yield from module.named_parameters(name, recurse=False)
    yield from _norm_parameters(model)


def save_adapter_v2(model: GPT, file: Path) -> None:
    """Writes the adapter of a model, and what it was made for; the file is there whole or not at all."""
    write_adapter(file, METHOD, dict(adapter_v2_parameters(model)), model.config)


def load_adapter_v2(model: GPT, path: Path) -> GPT:
    """Gives a model the adapter of a file, or of the folder that holds it, without gradients.

    Raises:
        UserError: the file is none, or is for another model; the model is then as it was.
    """
    _check_new(model)
    adapter = open_adapter_v2(path, model.config)
    _wrap(model, adapter.config.length, adapter.prefixed)
    adapter.copy(adapter_v2_parameters(model))
    return model.requires_grad_(False)


def open_adapter_v2(path: Path, config: Config) -> AdapterFile:
    """Checks a file, or the one in that folder, without the weights of the model; raises like `load_adapter_v2`."""
    adapter = AdapterFile(path, METHOD, FILE, config)
    with torch.device("meta"):
        model = GPT(config)
        _wrap(model, adapter.config.length, adapter.prefixed)
    adapter.check({name: tuple(p.shape) for name, p in adapter_v2_parameters(model)})
    return adapter


@torch.no_grad()
def fold_adapter_v2(model: GPT) -> GPT:
    """Makes an ordinary model of it, which computes the same: weight * scale and (bias + adapter_bias) * scale.

    Formed in float32 and rounded once. Every linear then has a bias, and a tied head a weight of its own; the model's
    config says so. Returns the same model.

    Raises:
        UserError: it has a prefix that does something, for which an ordinary model has no place, or quantised weights.
    """
    if any(block.attn.prefix is not None and block.attn.prefix.gate.any() for block in model.h):
        raise UserError(UNFOLDABLE)
    wrapped = _wrapped(model)
    assert wrapped and not model.by_token, "fold_adapter_v2 takes a model with an adapter v2 that is not packed"
    for name, module in wrapped.items():
        if isinstance(module.linear, QuantizedLinear):
            raise UserError(f"{name} is quantised, so an adapter cannot be folded into it: take the original weights")
    for name, module in wrapped.items():
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, _folded(module))
    for block in model.h:
        block.attn.prefix = None
    biases = dict.fromkeys(("qkv_bias", "proj_bias", "mlp_bias", "lm_head_bias"), True)
    model.config = replace(model.config, **biases, tie_embeddings=False)
    return model


def _folded(module: AdapterV2Linear) -> nn.Linear:
    linear, scale, bias = module.linear, module.adapter_scale.float(), module.adapter_bias.float()
    weight = linear.weight
    folded = nn.Linear(linear.in_features, linear.out_features, device="meta")
    folded.weight = nn.Parameter((weight.float() * scale[:, None]).to(weight.dtype), requires_grad=False)
    bias = bias if linear.bias is None else bias + linear.bias.float()
    folded.bias = nn.Parameter((bias * scale).to(weight.dtype), requires_grad=False)
    return folded.train(linear.training)
