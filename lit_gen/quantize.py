"""Weights of 8 or 4 bits: how they are rounded, kept, stored and multiplied. Activations stay what they are.

    int8  w[n, k] = q * factor[n]                   q in -127..127, one factor for each output
    int4  w[n, k] = q * factor[n, g] + least[n, g]  q in 0..15, one factor and one least value for each group g of 32
                                                    inputs: 5 bits a weight in all

All linear layers become so but the router of a mixture of experts, which is small, and where a small error chooses
another expert; embeddings and norms stay too. The head becomes int8 in either format: in int4 it alone raised the
perplexity of SmolLM2-135M from 34.6 to 36.6, for 11 of 95 MB that a step reads. If it is tied to the embedding it
becomes a layer of its own, and the embedding is kept beside it: 57 MB of 16 bits, of which a step reads a few rows.
"""

from collections.abc import Callable
from typing import Literal, NamedTuple, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lit_gen.layers import MoE, swap
from lit_gen.lora_layers import LowRank
from lit_gen.model import GPT
from lit_gen.utils import UserError

Format = Literal["int8", "int4"]
GROUP = 32  # inputs that share a factor and a least value; csrc/linear.cpp knows it too
CHUNK = 2**22  # weights that are rounded, or made floats, at a time
BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16}


class Quantized(NamedTuple):
    """A weight (N, K) as it is kept.

    Attributes:
        weight: (N, K) int8; or (N, ceil(K / 2)) uint8, inputs 2i in the low and 2i + 1 in the high half of byte i.
        factor: (N,) float32; or (N, ceil(K / 32)) bfloat16.
        least: None; or (N, ceil(K / 32)) bfloat16.
    """

    weight: Tensor
    factor: Tensor
    least: Tensor | None


def empty(weight: Tensor, format: Format, name: str = "") -> Quantized:
    """Room for what `quantize` makes of a weight (N, K); on the default device."""
    N, K = weight.shape
    if format == "int8":
        return Quantized(torch.empty(N, K, dtype=torch.int8), torch.empty(N, dtype=torch.float32), None)
    factor, least = (torch.empty(N, -(-K // GROUP), dtype=torch.bfloat16) for _ in range(2))
    return Quantized(torch.empty(N, -(-K // 2), dtype=torch.uint8), factor, least)


def quantize(weight: Tensor, format: Format, name: str = "a weight") -> Quantized:
    """Rounds a weight (N, K) of any float dtype.

    Raises:
        UserError: it holds numbers that are not finite, or too large for a bfloat16 factor.
    """
    with weight.device:
        kept = empty(weight, format)
    round_rows, rows = _int8 if format == "int8" else _int4, max(1, CHUNK // weight.size(1))
    for start in range(0, len(weight), rows):
        for target, values in zip(kept, round_rows(weight[start : start + rows].float()), strict=True):
            if target is not None:
                target[start : start + rows] = values
    if not all(scale.isfinite().all() for scale in kept[1:] if scale is not None):
        raise UserError(f"{name} has numbers that are not finite, so it cannot be {format}; use a sound checkpoint")
    return kept


def _int8(w: Tensor) -> Quantized:  # (n, K) float32
    factor = w.abs().amax(1) / 127
    return Quantized((w / _divisor(factor)[:, None]).round_().clamp_(-127, 127).to(torch.int8), factor, None)


def _int4(w: Tensor) -> Quantized:  # (n, K) float32
    """The whole range of a group, and nine tenths of it, each refined twice by least squares: the best of these six.

    Of normally distributed weights the error (root mean square) is 7.2 %, and 7.8 % with the range alone.
    """
    n, K = w.shape
    groups = F.pad(w, (0, -K % GROUP), mode="replicate").view(n, -1, GROUP)  # (n, G, 32)
    low, high = groups.aminmax(dim=-1, keepdim=True)  # (n, G, 1) each
    mean, best = groups.mean(-1, keepdim=True), None
    for cut in (0.0, 0.05):
        factor, least = (1 - 2 * cut) * (high - low) / 15, low + cut * (high - low)
        for _ in range(3):
            factor, least = factor.bfloat16().float(), least.bfloat16().float()  # first, so that q is right for them
            q = ((groups - least) / _divisor(factor)).round_().clamp_(0, 15)
            error = (q * factor + least - groups).square_().sum(-1, keepdim=True)
            found = (error, q, factor, least)
            better = None if best is None else error < best[0]
            best = found if best is None else [torch.where(better, *pair) for pair in zip(found, best, strict=True)]
            middle = q.mean(-1, keepdim=True)
            off = q - middle
            factor = (off * (groups - mean)).sum(-1, keepdim=True) / _divisor(off.square().sum(-1, keepdim=True))
            least = mean - factor * middle
    _, q, factor, least = best
    q = F.pad(q.view(n, -1)[:, :K].byte(), (0, K % 2))
    return Quantized(q[:, ::2] | q[:, 1::2] << 4, factor[..., 0].bfloat16(), least[..., 0].bfloat16())


def _divisor(x: Tensor) -> Tensor:  # x >= 0; it is 0 where all weights are the same
    return torch.where(x == 0, 1.0, x)


def unpack_int4(weight: Tensor, K: int) -> Tensor:
    """The numbers 0..15, (N, K) uint8, that lie in pairs in (N, ceil(K / 2))."""
    return torch.stack((weight & 15, weight >> 4), dim=-1).flatten(1)[:, :K]


def dequantize(kept: Quantized, K: int) -> Tensor:
    """(N, K) float32."""
    weight, factor, least = kept
    if least is None:
        return weight * factor[:, None]
    factor, least = (scale.float().repeat_interleave(GROUP, dim=1)[:, :K] for scale in (factor, least))
    return unpack_int4(weight, K) * factor + least


class QuantizedLinear(nn.Module):
    """nn.Linear with a quantised weight, in plain PyTorch: part by part it is made float32, which is slow."""

    def __init__(self, kept: Quantized, in_features: int, bias: nn.Parameter | None) -> None:
        super().__init__()
        self.out_features, self.in_features, self.bias = len(kept.weight), in_features, bias
        self.register_buffer("weight", kept.weight)
        for name, scale in zip(("factor", "least"), kept[1:], strict=True):
            # as integers: casting the model, which Fabric does too, must not cast them
            self.register_buffer(f"_{name}", None if scale is None else scale.view(BITS[scale.dtype]))

    @property
    def format(self) -> Format:
        return "int8" if self._least is None else "int4"

    @property
    def kept(self) -> Quantized:
        """The weight, not a copy."""
        if self._least is None:
            return Quantized(self.weight, self._factor.view(torch.float32), None)
        return Quantized(self.weight, *(scale.view(torch.bfloat16) for scale in (self._factor, self._least)))

    @property
    def nbytes(self) -> int:
        return sum(buffer.nbytes for buffer in self.buffers())

    def forward(self, x: Tensor) -> Tensor:  # (..., in_features) -> (..., out_features)
        rows, y = max(1, CHUNK // self.in_features), []
        for start in range(0, self.out_features, rows):
            part = Quantized(*(None if t is None else t[start : start + rows] for t in self.kept))
            y.append(F.linear(x.float(), dequantize(part, self.in_features)))
        y = torch.cat(y, dim=-1)
        return (y if self.bias is None else y + self.bias.float()).to(x.dtype)


def quantize_model(model: GPT, format: Format, make: Callable[[Tensor, Format, str], Quantized] = quantize) -> GPT:
    """Swaps the linear layers for quantised ones, one by one; returns the same model. `make` may be `empty`."""
    if already := model_format(model):
        raise UserError(f"the weights are {already} already; quantise the checkpoint that they were made from")
    split_experts(model)
    for name, module in list(model.named_modules()):
        parent, _, child = name.rpartition(".")
        parent = model.get_submodule(parent)
        small = isinstance(parent, MoE | LowRank)  # a router (experts are in lists of their own), or a LoRA
        if isinstance(module, nn.Linear) and not small:
            head = name.startswith("lm_head")
            kept = make(module.weight.detach(), "int8" if head else format, f"{name}.weight")
            swap(parent, child, QuantizedLinear(kept, module.in_features, module.bias))
    return model


def split_experts(model: GPT) -> None:
    """Makes a linear layer of each expert's weights."""
    for moe in [module for module in model.modules() if isinstance(module, MoE)]:
        for name in ("fc", "proj"):
            weights = getattr(moe, name)
            if not isinstance(weights, nn.ModuleList):
                delattr(moe, name)
                setattr(moe, name, nn.ModuleList(_linear(weight) for weight in weights.detach()))


def _linear(weight: Tensor) -> nn.Linear:
    linear = nn.Linear(weight.size(1), weight.size(0), bias=False, device="meta")
    linear.weight = nn.Parameter(weight, requires_grad=False)
    return linear


def model_format(model: nn.Module) -> Format | None:
    """What a model's weights are quantised to, unless `pack_model` has laid them out already."""
    return next((module.format for module in model.modules() if isinstance(module, QuantizedLinear)), None)


def stored_tensors(model: GPT) -> dict[str, Tensor]:
    """What a lit folder keeps of a model, by name: its parameters, and the parts of its quantised weights."""
    tensors = dict(model.named_parameters())  # a tied head is listed once, as wte
    for name, module in model.named_modules():
        if isinstance(module, QuantizedLinear):
            parts = zip(Quantized._fields, module.kept, strict=True)
            tensors |= {f"{name}.{part}": tensor for part, tensor in parts if tensor is not None}
    return tensors


def metadata_of(model: GPT) -> dict[str, str]:
    """What the file says about its weights, if they are quantised."""
    format = model_format(model)
    return {"int8": {"quantize": "int8"}, "int4": {"quantize": "int4", "group_size": str(GROUP)}}.get(format, {})


def format_of(metadata: dict[str, str], file: object) -> Format | None:
    """What the weights of a file with this metadata are quantised to.

    Raises:
        UserError: it is a format, or a size of groups, that is not known.
    """
    format, group = metadata.get("quantize"), metadata.get("group_size", str(GROUP))
    if format is None:
        return None
    if format not in get_args(Format) or group != str(GROUP):
        known = f"known are int8, and int4 in groups of {GROUP}"
        raise UserError(f"{file} has weights of format {format!a:.40} in groups of {group!a:.20}; {known}")
    return format
