"""Gets a model ready for generation on a CPU: `pack_model` swaps its layers for the C++ kernels where these are best.

It is for inference: results stay what they are up to rounding, the weights are copied, not kept twice. A model that
is on a GPU, even in part, is left alone.
"""

import sys

import torch
from torch import Tensor, nn

from lit_gen.kernels import Kernels, load_kernels
from lit_gen.layers import Activation, Norm, Residual, swap
from lit_gen.linear import Float32Linear, HugePages, PackedLinear, aligned, lay_out_linears, multiplies
from lit_gen.model import GPT
from lit_gen.quantize import GROUP, Format, QuantizedLinear, model_format, quantize_model, split_experts, unpack_int4
from lit_gen.spread import Stages
from lit_gen.tape import Tape

PANEL = 64  # output columns are padded to whole numbers of two panels of 32, see csrc/linear.cpp


def pack_model(model: GPT, quantize: Format | None = None) -> GPT:
    """Swaps layers for those that this machine computes fastest; returns the same model.

    Products of 16-bit numbers go to PyTorch where the CPU has instructions for them, and to our kernels elsewhere;
    those with quantised weights always to our kernels.

    Args:
        quantize: weights are rounded to it (see quantize.py), unless they were loaded so; None leaves them as loaded.
    """
    if quantize is not None and quantize != model_format(model):
        quantize_model(model, quantize)
    dtype, kernels = model.wte.weight.dtype, load_kernels() if model.on_cpu else None
    if kernels is None:
        if format := model_format(model):
            print(f"no kernels for {format} weights here: they are made floats at every use, slowly", file=sys.stderr)
        elif model.on_cpu:
            lay_out_linears(model)
        return model
    for block in model.h:
        block.attn.kernels = kernels
    spread = isinstance(model.run_blocks, Stages)
    model.run_blocks = Stages(model, model.run_blocks.spread, kernels) if spread else Tape(model, kernels)
    for parent, name, child in _children(model):
        if isinstance(child, Norm) and (child.weight is None or child.weight.dim() == 1):
            swap(parent, name, KernelNorm(child, kernels))
        elif isinstance(child, Activation):
            swap(parent, name, KernelActivation(child, kernels))
        elif isinstance(child, Residual):
            swap(parent, name, KernelResidual(child, kernels))
    split_experts(model)
    if dtype != torch.float32 and multiplies(dtype):
        _pack_linears(model, kernels, QuantizedLinear)
        lay_out_linears(model)
    else:
        _pack_linears(model, kernels, nn.Linear | QuantizedLinear)
    return model


def _pack_linears(model: GPT, kernels: Kernels, kinds: type) -> None:
    dtype, tied = model.wte.weight.dtype, model.lm_head.weight is model.wte.weight
    todo = [(parent, name) for parent, name, child in _children(model) if isinstance(child, kinds)]
    sizes = []
    for linear in (getattr(parent, name) for parent, name in todo):
        format = linear.format if isinstance(linear, QuantizedLinear) else dtype
        sizes.append(packed_bytes(linear.out_features, linear.in_features, format))
    memory = HugePages(sum(map(aligned, sizes))) if todo else None
    for parent, name in todo:  # one by one: the old weight goes before the next is copied
        swap(parent, name, KernelLinear(getattr(parent, name), kernels, memory))
    if tied and dtype != torch.float16 and isinstance(model.lm_head, KernelLinear):
        swap(model, "wte", TiedEmbedding(model.lm_head))


def _children(model: nn.Module) -> list[tuple[nn.Module, str, nn.Module]]:
    return [(parent, *child) for parent in model.modules() for child in parent.named_children()]


def packed_bytes(N: int, K: int, format: torch.dtype | Format) -> int:
    """Memory of a packed weight (N, K), with its factors."""
    columns = -(-N // PANEL) * PANEL
    if format == "int4":
        return columns * K // 2 + columns * -(-K // GROUP) * 4
    if format == "int8":
        return columns * K + N * 4
    return columns * K * (2 if format == torch.bfloat16 else 4)


def weight_bytes(model: nn.Module) -> int:
    """Memory of a model's weights, packed or not, each counted once."""
    kinds = Float32Linear | PackedLinear | KernelLinear | QuantizedLinear
    packed = [m.nbytes for m in model.modules() if isinstance(m, kinds)]
    return sum(packed) + sum(p.nbytes for p in model.parameters())


class KernelLinear(nn.Module):
    """nn.Linear by the C++ kernels: a row gets the same bits beside any number of others.

    bfloat16, int8 and int4 weights are read as they are, all others as float32; sums are formed in float32.
    """

    def __init__(self, linear: nn.Linear | QuantizedLinear, kernels: Kernels, memory: HugePages) -> None:
        super().__init__()
        self.out_features, self.in_features = linear.out_features, linear.in_features
        self.weight, self._scales = (None if t is None else memory.copy(t) for t in lay_out(linear))
        self._factor = linear.kept.factor.clone() if self.weight.dtype == torch.int8 else None
        self.bias = None if linear.bias is None else linear.bias.detach().float()
        self.nbytes = sum(t.nbytes for t in (self.weight, self._scales, self._factor) if t is not None)
        self._kernels = kernels

    def forward(self, x: Tensor) -> Tensor:  # (..., in_features) -> (..., out_features)
        if torch.is_autocast_enabled("cpu"):
            x = x.to(torch.get_autocast_dtype("cpu"))
        scales = {"factor": self._factor, "scales": self._scales}
        return self._kernels.linear(x, self.weight, self.bias, self.out_features, **scales)

    def rows(self, index: Tensor) -> Tensor:
        """Rows of the weight, such as of an embedding that is also the head: (...) int64 -> (..., in_features)."""
        if not torch.compiler.is_compiling():  # behind the last row there may be padding, which is no row
            low, high = index.aminmax()
            if low < 0 or high >= self.out_features:
                raise IndexError(f"tokens {low.item()} to {high.item()} of a vocabulary of {self.out_features}")
        panel, column = index // 32, index % 32
        if self.weight.dtype == torch.float32:
            return self.weight[panel, :, column]
        return self.weight[panel, :, column % 16, column // 16]


def lay_out(linear: nn.Linear | QuantizedLinear) -> tuple[Tensor, Tensor | None]:
    """A layer's weight, and the scales of int4, as csrc/linear.cpp reads them: see `Kernels.linear`."""
    if not isinstance(linear, QuantizedLinear):
        weight = linear.weight.detach()
        return _panels(weight if weight.dtype == torch.bfloat16 else weight.float()), None
    weight, factor, least = linear.kept
    if least is None:
        return _panels(weight), None
    halves = _panels(unpack_int4(weight, linear.in_features))  # (panels, K, 32)
    scales = torch.stack([_panels(scale) for scale in (factor, least)], dim=2)  # (panels, K / 32, 2, 16, 2)
    return halves[..., :16] | halves[..., 16:] << 4, scales


def _panels(weight: Tensor) -> Tensor:
    """(N, K) -> panels of 32 columns, (N / 32, K, 32); bfloat16 as pairs of columns j, 16 + j, (N / 32, K, 16, 2)."""
    N, K = weight.shape
    padded = torch.cat([weight, weight.new_zeros(-N % PANEL, K)]) if N % PANEL else weight
    if weight.dtype != torch.bfloat16:
        return padded.view(-1, 32, K).transpose(1, 2)
    return padded.view(-1, 2, 16, K).permute(0, 3, 2, 1)


class TiedEmbedding(nn.Module):
    """The embedding of a model whose head is packed and has the same weight, which is not kept twice."""

    def __init__(self, head: KernelLinear) -> None:
        super().__init__()
        self._head = [head]  # in a list: it is the model's child, not this module's

    @property
    def weight(self) -> Tensor:
        return self._head[0].weight

    def forward(self, idx: Tensor) -> Tensor:  # (B, T) -> (B, T, C)
        return self._head[0].rows(idx)


class KernelNorm(nn.Module):
    """RMSNorm or LayerNorm by the C++ kernels."""

    def __init__(self, norm: Norm, kernels: Kernels) -> None:
        super().__init__()
        self.weight, self.bias, self._layer, self._kernels = norm.weight, norm.bias, norm.layer, kernels
        self._offset, self._eps = float(norm.offset), float(norm.eps)

    def forward(self, x: Tensor) -> Tensor:  # (..., size)
        weight, bias = (t if t is None else t.to(x.dtype) for t in (self.weight, self.bias))  # they differ in autocast
        if self._layer:
            return self._kernels.layer_norm(x, weight, bias, self._eps)
        return self._kernels.rms_norm(x, weight, self._offset, self._eps)


class KernelResidual(nn.Module):
    """The residual sum by the C++ kernels."""

    def __init__(self, residual: Residual, kernels: Kernels) -> None:
        super().__init__()
        self._scale, self._kernels = float(residual.scale), kernels

    def forward(self, x: Tensor, y: Tensor) -> Tensor:  # (..., C) each
        return self._kernels.add(x, y, self._scale)


class KernelActivation(nn.Module):
    """The MLP's activation by the C++ kernels."""

    def __init__(self, activation: Activation, kernels: Kernels) -> None:
        super().__init__()
        self._act, self._gated, self._kernels = activation.act, activation.gated, kernels

    def forward(self, x: Tensor) -> Tensor:  # (..., size or 2 * size) -> (..., size)
        return self._kernels.activate(x, self._act, self._gated)
