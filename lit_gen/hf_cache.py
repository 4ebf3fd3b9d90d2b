"""Caches that belong to whoever calls the model, as transformers wants them: reordered for beams, cropped, copied."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.nn.functional import pad

from lit_gen.cache import SPAN, KVCache, positions, span_of
from lit_gen.model import GPT
from lit_gen.settings import check_count
from lit_gen.undisturbed import without_caches
from lit_gen.utils import UserError


class CallerCache:
    """Keys and values of one batch. The model has them during a call only, so any number of them can be in use.

    transformers counts the columns of its rectangle of tokens, with padding, the same for all rows: `length`. Here a
    token lies at its position in its own text, which the attention mask of each call says; what `crop` cuts off is
    overwritten before anything could see it.

    Its methods are those of transformers' `Cache`, of which `generate/hf.py` makes a subclass.

    Args:
        columns: that will be needed, as far as is known. It grows beyond them, unless it is `fixed`.
    """

    def __init__(self, columns: int = 0, fixed: bool = False) -> None:
        self.layers: list = []  # transformers' own caches have one for each layer
        self.columns, self.fixed, self.length = columns, fixed, 0
        self.kv: list[KVCache] = []  # of each layer, (rows, ng, S, hs)
        self.row_length: Tensor | None = None  # (rows,) int64, see `GPT.row_length`

    @contextmanager
    def inside(self, model: GPT, attention_mask: Tensor) -> Iterator[None]:
        """Within, these are the model's caches; then the columns of `attention_mask` (B, length + T) are taken.

        Raises:
            UserError: they are `fixed` and too short.
        """
        B, needed = attention_mask.shape
        if self.kv and self.batch_size != B:
            raise UserError(f"{B} rows of tokens go on from a cache of {self.batch_size} rows")
        if self.fixed and needed > self.columns:
            raise UserError(f"{needed} tokens do not fit into a cache of {self.columns} columns: raise cache_length")
        with without_caches(model):
            if self.kv:
                for block, cache in zip(model.h, self.kv, strict=True):
                    block.attn.kv_cache = cache
                if needed > self.max_length:
                    model.resize_kv_cache(B, whole_pieces(max(needed, 2 * self.max_length)))
            else:
                columns = max(needed, self.columns)
                model.set_kv_cache(B, columns if self.fixed else whole_pieces(columns))
                self.kv = [block.attn.kv_cache for block in model.h]
                padding = needed - attention_mask.sum(-1)  # (B,)
                self.row_length = (self.columns - padding).clamp(min=0)
            model.row_length = self.row_length
            yield
            self.length = needed

    @property
    def max_length(self) -> int:
        """Columns that there are, S."""
        return self.kv[0].k.size(2)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.length

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return self.columns if self.fixed else -1

    def reset(self) -> None:
        self.length, self.kv = 0, []

    def crop(self, tokens_to_remove: int) -> None:
        """Forgets the last -tokens_to_remove columns of each row."""
        if tokens_to_remove > 0:  # what would be left, for transformers before 5
            raise ValueError(f"crop takes a number of columns below 0, not {tokens_to_remove}")
        self.length = max(self.length + tokens_to_remove, 0)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row i goes on from what row beam_idx[i] holds, (rows,) int64: only rows that change are written."""
        moved = (beam_idx != torch.arange(len(beam_idx), device=beam_idx.device)).nonzero()[:, 0]
        source = beam_idx[moved]
        if len(moved):
            self.row_length[moved] = self.row_length[source]
        for cache in self.kv if len(moved) else []:
            for x in (cache.k, cache.v):
                x[moved, :, : self.length] = x[source, :, : self.length]

    def batch_select_indices(self, indices: Tensor) -> None:
        """Row i becomes what row indices[i] holds, (rows,) int64: any number of rows."""
        for cache in self.kv:
            cache.k, cache.v = cache.k[indices], cache.v[indices]
        if self.kv:
            self.row_length = self.row_length[indices]

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.kv:
            rows = torch.arange(self.batch_size, device=self.kv[0].k.device)
            self.batch_select_indices(rows.repeat_interleave(repeats))

    @property
    def batch_size(self) -> int:
        return self.kv[0].k.size(0) if self.kv else -1

    @property
    def is_initialized(self) -> bool:
        return bool(self.kv)

    @property
    def is_linear(self) -> list[bool]:
        return [False]  # attention, whose length transformers has to look at

    is_compileable = False  # transformers would compile the whole call, and make masks that are not needed
    is_croppable = True


def check_shapes(pad_to_multiple: int, cache_length: int | None) -> None:
    """UserError unless both are whole numbers >= 1, or there is no length."""
    check_count("pad_to_multiple", pad_to_multiple)
    if cache_length is not None:
        check_count("cache_length", cache_length)


def whole_pieces(columns: int) -> int:
    """Columns in whole pieces of SPAN, so that there are few different shapes."""
    return -(-columns // SPAN) * SPAN


def padded_logits(
    model: GPT,
    idx: Tensor,
    mask: Tensor | None,
    cache: CallerCache | None,
    *,
    position_ids: Tensor | None = None,
    keep: int | Tensor = 0,
    multiple: int = 1,
) -> Tensor:
    """Logits (B, n, V) of a rectangle of tokens with padding.

    Args:
        idx: (B, T) int64.
        mask: (B, length + T), also of what the cache holds: 1 for tokens, 0 for padding on either side; None is all 1.
        cache: goes on; None computes without one, and records gradients.
        position_ids: (B or 1, T), no others than those that follow from the mask.
        keep: so many last columns, or these, (n,); 0 is all. 1 means each row's last token, also if padding follows.
        multiple: fill up more than one column to a multiple of so many.
    """
    past, last_only = 0 if cache is None else cache.length, isinstance(keep, int) and keep == 1
    columns = len(idx), past + idx.size(1)
    mask = idx.new_ones(columns) if mask is None else mask.long()
    if mask.shape != columns:
        raise UserError(f"the attention_mask is {tuple(mask.shape)}, but with what the cache holds there are {columns}")
    input_pos = positions(mask)[:, past:]  # (B, T)
    if position_ids is not None and (position_ids != input_pos)[input_pos >= 0].any():
        raise UserError("position_ids differ from those of the attention_mask, which alone counts: leave them out")
    where = idx, input_pos, last_only, multiple
    if cache is None:
        logits = _first(model, None, *where)
    else:
        with torch.no_grad(), cache.inside(model, mask):
            logits = (_next if past else _first)(model, cache, *where)
    return logits[:, slice(-keep, None) if isinstance(keep, int) else keep]


def _first(
    model: GPT, cache: CallerCache | None, idx: Tensor, input_pos: Tensor, last_only: bool, multiple: int
) -> Tensor:
    """Rows from their beginning. Padding moves behind the tokens, where causal attention never sees it."""
    order = (input_pos < 0).long().argsort(dim=1, stable=True)  # (B, T)
    idx = pad(idx.gather(1, order), (0, _missing(idx.size(1), cache, multiple)))
    rows = None if cache is None else slice(0, len(idx))
    if last_only:
        return model(idx, None, input_pos.amax(1).clamp(min=0), rows=rows)[:, None]  # (B, 1, V)
    logits = model(idx, rows=rows)
    return logits.gather(1, order.argsort(dim=1)[..., None].expand(-1, -1, logits.size(-1)))


def _next(model: GPT, cache: CallerCache, idx: Tensor, input_pos: Tensor, last_only: bool, multiple: int) -> Tensor:
    """Rows go on from what the cache holds."""
    T = idx.size(1)
    n = _missing(T, cache, multiple) if T > 1 else 0
    idx, input_pos = pad(idx, (n, 0)), pad(input_pos, (n, 0), value=-1)
    span = None if cache.fixed else span_of([cache.length + T - 1], cache.max_length)
    if last_only:
        return model(idx, input_pos, input_pos.argmax(1), span=span)[:, None]
    return model(idx, input_pos, span=span)[:, -T:]


def _missing(T: int, cache: CallerCache | None, multiple: int) -> int:
    """Columns that T lack to a multiple, or to all of the cache."""
    full = -(-T // multiple) * multiple
    return (full if cache is None else min(full, cache.max_length)) - T
