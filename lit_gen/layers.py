"""The parts of a block that see each token by itself: normalisation, activation, feed-forward layers, residual sums.

Shapes as in `model.py`.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lit_gen.config import Config

ACTIVATIONS = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
}


class Norm(nn.Module):
    """RMSNorm or LayerNorm over the last dimension; `heads` gives each head weights of its own (StableLM)."""

    def __init__(self, config: Config, size: int, bias: bool | None = None, heads: int | None = None) -> None:
        super().__init__()
        bias = config.norm_bias if bias is None else bias
        shape = (size,) if heads is None else (heads, size)
        self.size, self.eps, self.layer, self.offset = (
            (size,),
            config.norm_eps,
            config.norm == "layer",
            config.norm_offset,
        )
        self.weight = nn.Parameter(torch.ones(shape)) if config.norm_affine else None
        self.bias = nn.Parameter(torch.zeros(shape)) if bias and config.norm_affine else None

    def forward(self, x: Tensor) -> Tensor:  # (..., size)
        if self.layer:
            if self.weight is None or self.weight.dim() == 1:
                return F.layer_norm(x, self.size, self.weight, self.bias, self.eps)
            return F.layer_norm(x, self.size, None, None, self.eps) * self.weight
        if self.offset:  # 1 + weight is formed in float32: bfloat16 would lose the weight's last bits
            return (F.rms_norm(x.float(), self.size, None, self.eps) * (1.0 + self.weight.float())).type_as(x)
        return F.rms_norm(x, self.size, self.weight, self.eps)


class Activation(nn.Module):
    """act(x), or act(gate) * up of x = gate | up when gated."""

    def __init__(self, act: str, gated: bool) -> None:
        super().__init__()
        self.act, self.gated = act, gated

    def forward(self, x: Tensor) -> Tensor:  # (..., size or 2 * size) -> (..., size)
        if self.gated:
            gate, up = x.chunk(2, dim=-1)
            return ACTIVATIONS[self.act](gate) * up
        return ACTIVATIONS[self.act](x)


class MLP(nn.Module):
    """When gated, gate | up are the rows of one projection."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        size = config.intermediate_size
        self.fc = nn.Linear(config.n_embd, 2 * size if config.gated else size, bias=config.mlp_bias)
        self.proj = nn.Linear(size, config.n_embd, bias=config.mlp_bias)
        self.act = Activation(config.act, config.gated)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(self.act(self.fc(x)))


class MoE(nn.Module):
    """A mixture of experts, whose weights are stacked: each token goes through the n_expert_per_token best of them."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        E, size, C = config.n_expert, config.moe_intermediate_size, config.n_embd
        self.gate = nn.Linear(C, E, bias=False)
        self.fc = nn.Parameter(torch.empty(E, 2 * size, C))  # gate | up
        self.proj = nn.Parameter(torch.empty(E, C, size))
        self.n_expert_per_token, self.norm_topk = config.n_expert_per_token, config.norm_topk
        self.act = Activation(config.act, gated=True)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.reshape(-1, x.size(-1))  # (B * T, C)
        p = self.gate(tokens).softmax(-1, dtype=torch.float32)  # (B * T, E)
        p, chosen = p.topk(self.n_expert_per_token, dim=-1)  # (B * T, k)
        if self.norm_topk:
            p = p / p.sum(-1, keepdim=True)
        y = torch.zeros_like(tokens)
        for expert in chosen.unique().tolist():
            token, rank = torch.where(chosen == expert)
            out = self._product(self.act(self._product(tokens[token], self.fc, expert)), self.proj, expert)
            y.index_add_(0, token, (out * p[token, rank, None]).to(y.dtype))
        return y.view(x.shape)

    @staticmethod
    def _product(x: Tensor, weights: nn.Parameter | nn.ModuleList, expert: int) -> Tensor:
        packed = isinstance(weights, nn.ModuleList)  # see `pack_model`
        return weights[expert](x) if packed else F.linear(x, weights[expert])


def swap(parent: nn.Module, name: str, module: nn.Module) -> None:
    """Puts a module in the place of another, whose forward hooks it takes over."""
    old = getattr(parent, name)
    module._forward_hooks, module._forward_pre_hooks = old._forward_hooks, old._forward_pre_hooks
    setattr(parent, name, module)


class Residual(nn.Module):
    """x + y * scale: what a layer adds to the stream of activations."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = scale

    def forward(self, x: Tensor, y: Tensor) -> Tensor:  # (..., C) each
        return x + y if self.scale == 1.0 else x + y * self.scale
