"""Linear layers for generation on a CPU: weights laid out once as the processor multiplies them fastest."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn


class PackedLinear(nn.Module):
    """nn.Linear for inference, its weight in oneDNN's blocked layout.

    Attributes:
        packed: the (out_features, in_features) weight, opaque.
        nbytes: its size.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        weight = linear.weight.detach()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.nbytes, self.dtype = weight.nbytes, weight.dtype
        self.bias = linear.bias
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight, 16)

    def forward(self, x: Tensor) -> Tensor:  # (..., in_features) -> (..., out_features)
        return torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")


def pack_linears(model: nn.Module) -> nn.Module:
    return model


def weights(model: nn.Module) -> Iterator[Tensor | PackedLinear]:
    """Everything with weights that a step reads; each has `nbytes`. A tied head comes once."""
    yield from model.parameters()
    yield from (module for module in model.modules() if isinstance(module, PackedLinear))
