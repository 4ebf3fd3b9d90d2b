"""Linear layers for generation on a CPU: weights laid out once in the way that its kernels read fastest.

`pack_linears` is for inference: shapes and results stay what they are up to rounding, the weights are copied, not kept
twice. A model on a GPU is left alone.
"""

import mmap
import sys

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lit_gen.model import GPT


class HugePages:
    """Memory in pages of 2 MB where the system has them: reading 540 MB of weights took 10 to 20 % less time."""

    def __init__(self, nbytes: int) -> None:
        self.used, self.map = 0, None
        if hasattr(mmap, "MADV_HUGEPAGE"):  # Linux
            self.map = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            self.map.madvise(mmap.MADV_HUGEPAGE)

    def copy(self, tensor: Tensor) -> Tensor:
        """A contiguous copy of `tensor` in this memory."""
        if self.map is None:
            return tensor.contiguous().clone()
        flat = torch.frombuffer(self.map, dtype=tensor.dtype, count=tensor.numel(), offset=self.used)
        self.used += _aligned(tensor.nbytes)
        return flat.view(tensor.shape).copy_(tensor)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // 64) * 64


class Float32Linear(nn.Module):
    """nn.Linear with 16-bit inputs and outputs on a processor that cannot multiply 16 bits: the weight is in float32.

    Sums of 16-bit products are formed in float32 anyway, so that only their order differs. The linears of SmolLM2-135M
    with 1, 8 and 64 bfloat16 rows took 32, 60 and 152 ms on a CPU with AVX-512 alone, and before 26, 85 and 340 ms.
    """

    def __init__(self, linear: nn.Linear, memory: HugePages) -> None:
        super().__init__()
        self.weight = memory.copy(linear.weight.detach().float().t()).t()  # (out_features, in_features), by columns
        self.bias = None if linear.bias is None else linear.bias.detach().float()
        self.nbytes = self.weight.nbytes

    def forward(self, x: Tensor) -> Tensor:  # (..., in_features) -> (..., out_features)
        return F.linear(x.float(), self.weight, self.bias).to(x.dtype)


class PackedLinear(nn.Module):
    """nn.Linear with the weight in oneDNN's blocked layout, which the kernels for AMX and AVX512-BF16 read directly."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.bias, self.nbytes = linear.bias, linear.weight.nbytes
        self.weight = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), 8)  # opaque

    def forward(self, x: Tensor) -> Tensor:  # (..., in_features) -> (..., out_features)
        return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")


def weight_bytes(model: nn.Module) -> int:
    """Memory of a model's weights, packed or not, each counted once."""
    packed = [module.nbytes for module in model.modules() if isinstance(module, Float32Linear | PackedLinear)]
    return sum(packed) + sum(p.nbytes for p in model.parameters())


def multiplies(dtype: torch.dtype) -> bool:
    """Whether this CPU has instructions to multiply matrices of this dtype."""
    if dtype == torch.bfloat16:
        return torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported()
    return dtype != torch.float16 or torch.cpu._is_amx_fp16_supported()


def pack_linears(model: GPT) -> GPT:
    """Lays out the weights of all linear layers for the CPU that the model is on; returns the same model.

    float32: column by column, so that x @ w.T reads w as it lies, which pays when x has few rows. Measured on two cores
    with AVX-512, the linears of SmolLM2-135M with 1, 8, 32, 64 and 512 rows took 27, 51, 79, 128 and 662 ms, and before
    28, 83, 160, 130 and 674 ms. The head is left as it is, since an embedding is looked up by rows.
    """
    dtype = model.wte.weight.dtype
    if model.wte.weight.device.type != "cpu":
        return model
    if dtype == torch.float32:
        memory = HugePages(sum(_aligned(p.nbytes) for p in model.parameters()))
        for parent, name in linears(model.h):
            linear = getattr(parent, name)
            linear.weight.data = memory.copy(linear.weight.t()).t()
        return model
    native = multiplies(dtype)
    if not native:
        print(f"this CPU has no {dtype} arithmetic: weights are kept in float32, at twice the memory", file=sys.stderr)
        memory = HugePages(sum(2 * _aligned(p.nbytes) for p in model.parameters()))
    for parent, name in linears(model):  # one by one: the old weight goes before the next is copied
        linear = getattr(parent, name)
        setattr(parent, name, PackedLinear(linear) if native else Float32Linear(linear, memory))
    return model


def linears(model: nn.Module) -> list[tuple[nn.Module, str]]:
    """Where the linear layers are: the module that holds each, and its name there."""
    children = ((parent, *child) for parent in model.modules() for child in parent.named_children())
    return [(parent, name) for parent, name, child in children if isinstance(child, nn.Linear)]
