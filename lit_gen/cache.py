"""Where a batch's tokens sit: positions, cache columns and masks. One idea: a token's cache column is its position.

    prompts  [5 6 7] [8]      prefill: T = 3          decode: each row goes on at its own column
    idx       5 6 7           input_pos 0 1 2         cache row 0   5 6 7 . .   next column 3
              8 x x                     0 1 2         cache row 1   8 x x . .   next column 1, over the first x

A query at position p sees the columns s <= p, so padding on the right lies beyond every real query until it is
overwritten. Padding on the left has position -1: it writes to no column that is in use and sees nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

SPAN = 64
Side = Literal["left", "right"] | None


def masked_value(dtype: torch.dtype) -> float:
    """What is added to a score that must not count: so low that its weight is 0, and finite.

    A quarter of the dtype's range leaves room for the score itself and for kernels that scale by log2(e): nothing can
    reach -inf, so a row that sees nothing gives finite numbers, never NaN.
    """
    return torch.finfo(dtype).min / 4


def visible(input_pos: Tensor, span: int, kind: str = "full", window: int | None = None) -> Tensor:
    """Which cache columns each query may see.

    Args:
        input_pos: (B, T) int64, the position of each query in its own row's text; -1 is padding.
        span: how many columns to consider, S.
        kind: "full": all s <= p; "sliding": the last `window` of them, p itself included; "chunked": those in the same
            chunk of `window` columns.

    Returns:
        (B, 1, T, S) bool.
    """
    position = input_pos[:, None, :, None]  # (B, 1, T, 1)
    column = torch.arange(span, device=input_pos.device)  # (S,)
    see = column <= position  # (B, 1, T, S)
    if kind != "full":
        assert window, f"a {kind} layer needs a window"
        same = column > position - window if kind == "sliding" else column // window == position // window
        see &= same
    return see


def additive(see: Tensor, dtype: torch.dtype) -> Tensor:
    """A mask to add to the scores: 0 where `see`, `masked_value` elsewhere."""
    return torch.zeros(see.shape, dtype=dtype, device=see.device).masked_fill_(~see, masked_value(dtype))


def rectangle(texts: Sequence[Sequence[int]], side: str, starts: Sequence[int] | None = None) -> tuple[Tensor, ...]:
    """Texts of any lengths as one rectangle, padded on the "left" or the "right"; text b begins at column starts[b].

    Returns:
        idx (B, T), input_pos (B, T) with -1 for padding, and last (B,), the column where each text ends; all int64.
    """
    T = max(map(len, texts))
    idx = torch.zeros(len(texts), T, dtype=torch.int64)  # what stands in the padding is never seen
    input_pos = torch.full_like(idx, -1)
    for row, (text, start) in enumerate(zip(texts, starts or [0] * len(texts), strict=True)):
        columns = slice(T - len(text), T) if side == "left" else slice(0, len(text))
        idx[row, columns], input_pos[row, columns] = torch.tensor(text), torch.arange(start, start + len(text))
    return idx, input_pos, input_pos.argmax(dim=1)


def packed(texts: Sequence[Sequence[int]], starts: Sequence[int], cache_rows: Sequence[int]) -> tuple[Tensor, ...]:
    """Texts of any lengths one after the other; text b begins at column starts[b] of cache row cache_rows[b].

    Returns:
        idx (1, N), input_pos (1, N), rows (N,), the cache row of each token, and last (B,), where each text ends in
        idx; all int64.
    """
    lengths = torch.tensor([len(text) for text in texts])
    idx = torch.tensor([token for text in texts for token in text])[None]
    input_pos = torch.cat([torch.arange(start, start + len(text)) for text, start in zip(texts, starts, strict=True)])
    return idx, input_pos[None], torch.tensor(list(cache_rows)).repeat_interleave(lengths), lengths.cumsum(0) - 1


def positions(attention_mask: Tensor) -> Tensor:
    """input_pos (B, T) of a padded rectangle, from its attention_mask (B, T): 1 or True for tokens, on either side."""
    mask = attention_mask.long()
    return torch.where(mask > 0, mask.cumsum(-1) - 1, -1)


def span_of(position: Sequence[int], n_columns: int) -> int:
    """How many columns a step has to look at: whole pieces of SPAN, so that kernels meet few different shapes."""
    return min(-(-(max(position) + 1) // SPAN) * SPAN, n_columns)


@dataclass
class Step:
    """Where the tokens of one forward call go in the cache; made once for each call and shared by all layers."""

    rows: slice | Tensor  # the cache rows of this call: of each row of the batch, or (T,) of each token of the only one
    span: int  # columns that are looked at, S
    fresh: bool = False  # every row starts at column 0 and sees nothing but its tokens in this call
    index: Tensor | None = None  # (B * T * ng,) int64 into the flat cache; None if fresh
    keep: Tensor | None = None  # (B * T * ng,) bool, False for padding, which is not written; None: no padding
    row: Tensor | None = None  # (B * T,) int64, each token's cache row, if kernels take tokens one by one
    position: Tensor | None = None  # (B * T,) int64, each token's column, likewise; -1 is padding

    @classmethod
    def at(cls, input_pos: Tensor, rows: slice, span: int, cache: "KVCache") -> "Step":
        """The step that writes each token to the column `input_pos` (B, T) says."""
        B, T = input_pos.shape
        _, ng, S, _ = cache.k.shape
        first = torch.arange(B * ng, device=input_pos.device).view(B, 1, ng) * S
        index = (first + input_pos.clamp(min=0)[..., None]).view(-1)  # (B * T * ng,)
        padding = input_pos < 0
        # A GPU would have to be waited for; there one-column calls take the path that is right either way.
        if (input_pos.device.type == "cpu" or T > 1) and not padding.any():
            return cls(rows, span, index=index)
        return cls(rows, span, index=index, keep=(~padding)[..., None].expand(B, T, ng).reshape(-1))

    @classmethod
    def of_tokens(cls, position: Tensor, rows: slice | Tensor, span: int, fresh: bool) -> "Step":
        """The step of kernels that take tokens one by one, at `position` (B, T)."""
        B, T = position.shape
        row = rows
        if isinstance(rows, slice):
            row = torch.arange(rows.start, rows.stop, rows.step).repeat_interleave(T)
        # Kernels read 64 bits each; a copy, so that it shares no memory with `rows`.
        return cls(
            rows, span, fresh, row=row.long().contiguous(), position=position.flatten().to(torch.int64, copy=True)
        )


class KVCache(nn.Module):
    """Keys and values of one layer, for n_query_groups heads (not expanded), on the layer's device."""

    def __init__(self, n_rows: int, n_query_groups: int, max_seq_length: int, head_size: int, **factory) -> None:
        super().__init__()
        self.prefix: tuple[Tensor, Tensor] | None = None  # see `adapter.Prefix`; it lasts as long as this generation
        shape = (n_rows, n_query_groups, max_seq_length, head_size)
        # zeros, not empty: a masked column has weight 0, and 0 times an old NaN would still be NaN
        self.register_buffer("k", torch.zeros(shape, **factory), persistent=False)  # (rows, ng, S, hs)
        self.register_buffer("v", torch.zeros(shape, **factory), persistent=False)

    def resize(self, n_rows: int, max_seq_length: int) -> None:
        """More or fewer rows and columns; what fits into the new shape is kept, the rest is zeros."""
        for name in ("k", "v"):  # one after the other: both would need twice the memory
            old = getattr(self, name)
            if old.shape[::2] == (n_rows, max_seq_length):
                continue
            rows, columns = min(n_rows, old.size(0)), min(max_seq_length, old.size(2))
            new = old.new_zeros(n_rows, old.size(1), max_seq_length, old.size(3))
            new[:rows, :, :columns] = old[:rows, :, :columns]
            setattr(self, name, new)

    def move(self, source: int, target: int, columns: slice = slice(None)) -> None:
        """Copies a row, or some columns of it; a source of -1 means zeros."""
        for cached in (self.k, self.v):
            cached[target, :, columns] = cached[source, :, columns] if source >= 0 else 0

    def update(self, k: Tensor, v: Tensor, step: Step) -> tuple[Tensor, Tensor]:
        """Writes k and v (B, T, ng, hs) and returns what the queries may look at: (B, ng, span, hs) each."""
        if k.dtype != self.k.dtype:  # under autocast the activations decide
            with torch.inference_mode(False):
                self.k, self.v = self.k.to(k.dtype), self.v.to(k.dtype)
        cached_k, cached_v = self.k[step.rows], self.v[step.rows]  # (B, ng, S, hs), views
        _write(cached_k, k, step)
        _write(cached_v, v, step)
        return cached_k[:, :, : step.span], cached_v[:, :, : step.span]


def _write(cached: Tensor, new: Tensor, step: Step) -> None:
    """One flat copy: a scatter_ on the 4-d cache would copy all of it on CPU (810 against 9 microseconds measured)."""
    if step.index is None:
        cached[:, :, : new.size(1)] = new.transpose(1, 2)
        return
    flat, values = cached.view(-1, cached.size(-1)), new.reshape(-1, new.size(-1))  # (B * ng * S, hs), (B * T * ng, hs)
    index, keep = step.index, step.keep
    if keep is not None and new.size(1) == 1:  # no two tokens of a row: padding puts back what is there
        values = torch.where(keep[:, None], values, flat[index])
    elif keep is not None:
        index, values = index[keep], values[keep]
    flat.index_copy_(0, index, values)
