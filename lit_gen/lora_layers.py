"""Linear layers with low-rank updates (LoRA): of one adapter, as in training, or of several, each for rows of its own.

LoRA: Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", 2021. Shapes as in `model.py`; R is the sum of
the ranks of all adapters.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from lit_gen.cache import Step

BASE = "base"  # the name of no adapter


class RowLoRA:
    """Which adapter each token of a call gets: filled in by the model before its layers run, and read by them.

    Attributes:
        names: of the adapters, in the order of their numbers; number 0 is none, "base".
        default: number of the adapter of rows that name none.
        tokens: adapter numbers of the tokens, (B, T) or broadcast to it.
        ends: of the tokens that reach the head, (n,), or as `tokens` where all do.
    """

    def __init__(self, names: Sequence[str], default: str) -> None:
        self.names = [BASE, *names]
        self.default = self.names.index(default)
        self.rows: Tensor | None = None  # (cache rows,) adapter numbers; None: the default for all
        self.tokens = self.ends = torch.tensor([[self.default]])

    def set_rows(self, names: Sequence[str | None] | None, device: torch.device | None = None) -> None:
        """What cache rows 0, 1, ... asked for; `names` None: the default for all."""
        self.rows = None
        if names is not None:
            numbers = [self.default if name is None else self.names.index(name) for name in names]
            self.rows = torch.tensor(numbers, dtype=torch.int64, device=device)

    def move(self, device: torch.device) -> None:
        """Takes what `enter` looked up to the device of the next layers."""
        self.tokens, self.ends = self.tokens.to(device), self.ends.to(device)

    def enter(self, step: Step | None, last: Tensor | None) -> None:
        """Looks up the tokens of a call; `step` and `last` as `GPT.run_layers` gets them."""
        if step is None or self.rows is None:
            self.tokens = torch.tensor([[self.default]])  # (1, 1)
            self.ends = self.tokens if last is None else self.tokens[0]
        elif step.row is not None:
            self.tokens = self.rows[step.row][None]  # (1, N)
            self.ends = self.tokens if last is None else self.tokens[0, last]
        else:
            self.tokens = self.rows[step.rows][:, None]  # (B, 1)
            self.ends = self.tokens if last is None else self.tokens[:, 0]


class LowRank(nn.Module):
    """b(a(x)), what is added to some of the outputs of a linear layer.

    Of several adapters the rows of `a` lie one below the other, and the columns of `b` side by side. What `a` makes of
    a token is kept where it is of the token's own adapter, and is 0 elsewhere: each token goes through the same
    products, whatever its neighbours have, so that its bits do not depend on them.

        R      q of adapter 1  q of adapter 1  q of adapter 2
        used   1               1               0                a token with adapter 1
               0               0               0                a token with none

    Args:
        rows: outputs, n of them, of the layer.
        a, b: (R, in) and (n, R).
        scale: multiplies the result.
        used: (adapters + 1, R) bool, which adapter has which rows of `a`; None: there is one adapter, for all tokens.
    """

    def __init__(self, rows: slice, a: Tensor, b: Tensor, scale: float = 1.0, used: Tensor | None = None) -> None:
        super().__init__()
        self.rows, self.scale = rows, scale
        self.a, self.b = _linear(a), _linear(b)
        self.register_buffer("used", used, persistent=False)

    def forward(self, x: Tensor, adapter: Tensor | None) -> Tensor:  # (..., in) -> (..., n)
        low = self.a(x)  # (..., R)
        if self.used is not None:
            low = torch.where(self.used[adapter], low, 0.0)  # not a product: 0 times another's infinity is no number
        return self.b(low if self.scale == 1.0 else low * self.scale)


def _linear(weight: Tensor) -> nn.Linear:
    linear = nn.Linear(weight.size(1), weight.size(0), bias=False, device="meta")
    linear.weight = nn.Parameter(weight, requires_grad=False)
    return linear


class LoRALinear(nn.Module):
    """linear(x), and to some of its outputs are added low-rank updates of x.

    Args:
        linear: the layer, quantised or not.
        updates: `LowRank` each.
        dropout: probability that an input of the updates is 0 in training.
        adapters: where to look up the adapter of each token; None: there is one, for all.
        head: whether the layer sees only the tokens that reach the head.
    """

    def __init__(
        self,
        linear: nn.Module,
        updates: Sequence[LowRank],
        *,
        dropout: float = 0.0,
        adapters: RowLoRA | None = None,
        head: bool = False,
    ) -> None:
        super().__init__()
        self.linear, self.updates, self.dropout = linear, nn.ModuleList(updates), nn.Dropout(dropout)
        self._adapters, self._head = adapters, head

    @property
    def weight(self) -> Tensor:
        """Of the layer, without updates."""
        return self.linear.weight

    def forward(self, x: Tensor) -> Tensor:  # (..., in) -> (..., out)
        y, adapter = self.linear(x), None
        if self._adapters is not None:
            adapter = self._adapters.ends if self._head else self._adapters.tokens
        x = self.dropout(x)
        for update in self.updates:
            added = update(x, adapter)
            if added.size(-1) == y.size(-1):
                y = y + added
            else:
                y[..., update.rows] += added
        return y
