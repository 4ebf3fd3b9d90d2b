"""Linear layers by PyTorch's own kernels on a CPU: weights laid out once as these read them fastest."""

import mmap
import sys

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lit_gen.layers import swap
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
        self.used += aligned(tensor.nbytes)
        return flat.view(tensor.shape).copy_(tensor)


def aligned(nbytes: int) -> int:
    return -(-nbytes // 64) * 64


class Float32Linear(nn.Module):
    """nn.Linear with 16-bit inputs and outputs on a processor that cannot multiply 16 bits: the weight is in float32.

    Sums of 16-bit products are formed in float32 anyway, so that only their order differs. The linears of SmolLM2-135M
    with 1, 8 and 64 bfloat16 rows took 32, 60 and 152 ms on a CPU with AVX-512 alone, and before 26, 85 and 340 ms.
    """

    def __init__(self, linear: nn.Linear, memory: HugePages) -> None:
        super().__init__()
        self.out_features, self.in_features = linear.weight.shape
        self.weight = memory.copy(linear.weight.detach().float().t()).t()  # (out_features, in_features), by columns
        self.bias = None if linear.bias is None else linear.bias.detach().float()
        self.nbytes = self.weight.nbytes

    def forward(self, x: Tensor) -> Tensor:  # (..., in_features) -> (..., out_features)
        return F.linear(x.float(), self.weight, self.bias).to(x.dtype)


PRODUCT = "mkldnn::_linear_pointwise"


def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x (..., K) @ w.T + bias, with w (N, K) in oneDNN's layout: (..., N)."""
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


class PackedLinear(nn.Module):
    """nn.Linear with the weight in oneDNN's blocked layout, which the kernels for AMX and AVX512-BF16 read directly.

    Attributes:
        rows_at_once: no more rows go into one call; more may get other bits (see `invariance.py`).
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.out_features, self.in_features = self.shape = tuple(linear.weight.shape)
        self.bias, self.nbytes = linear.bias, linear.weight.nbytes
        self.weight = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), 8)  # opaque
        self.rows_at_once: int | None = None
        self.number: int | None = None  # what compiled code knows this layer by (`compile_model`)

    def forward(self, x: Tensor) -> Tensor:  # (..., in_features) -> (..., out_features)
        if torch.compiler.is_compiling():  # which cannot look into the weight
            return torch.ops.lit_gen.packed_linear(x, self.number, self.out_features)
        if self.rows_at_once is None:
            return product(x, self.weight, self.bias)
        rows = x.reshape(-1, self.in_features).split(self.rows_at_once)
        return torch.cat([product(some, self.weight, self.bias) for some in rows]).view(
            *x.shape[:-1], self.out_features
        )


def multiplies(dtype: torch.dtype) -> bool:
    """Whether this CPU has instructions to multiply matrices of this dtype."""
    if dtype == torch.bfloat16:
        return torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported()
    return dtype != torch.float16 or torch.cpu._is_amx_fp16_supported()


def lay_out_linears(model: GPT) -> None:
    """Lays out the weights of all linear layers for PyTorch's own kernels on this CPU.

    float32: column by column, so that x @ w.T reads w as it lies, which pays when x has few rows. Measured on two cores
    with AVX-512, the linears of SmolLM2-135M with 1, 8, 32, 64 and 512 rows took 27, 51, 79, 128 and 662 ms, and before
    28, 83, 160, 130 and 674 ms. The head is left as it is, since an embedding is looked up by rows.
    """
    dtype = model.wte.weight.dtype
    if dtype == torch.float32:
        memory = HugePages(sum(aligned(p.nbytes) for p in model.parameters()))
        for parent, name in linears(model.h):
            linear = getattr(parent, name)
            linear.weight.data = memory.copy(linear.weight.t()).t()
        return
    native = multiplies(dtype)
    if not native:
        print(f"this CPU has no {dtype} arithmetic: weights are kept in float32, at twice the memory", file=sys.stderr)
        memory = HugePages(sum(2 * aligned(p.nbytes) for p in model.parameters()))
    for parent, name in linears(model):  # one by one: the old weight goes before the next is copied
        linear = getattr(parent, name)
        swap(parent, name, PackedLinear(linear) if native else Float32Linear(linear, memory))


def linears(model: nn.Module) -> list[tuple[nn.Module, str]]:
    """Where the linear layers are: the module that holds each, and its name there."""
    children = ((parent, *child) for parent in model.modules() for child in parent.named_children())
    return [(parent, name) for parent, name, child in children if isinstance(child, nn.Linear)]
