"""Calls of the model for rows that are at different places: prompts, and guesses of different lengths."""

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from lit_gen.batch import Batch, Piece
from lit_gen.cache import Side, packed, rectangle, span_of
from lit_gen.logprobs import row_logprobs
from lit_gen.model import GPT
from lit_gen.stopping import sampler_of


def prefill(model: GPT, pieces: Sequence[Piece], padding_side: Side = None) -> Tensor:
    """Runs (pieces of) prompts into their cache rows and returns the logits (B, V) that follow those that are through.

    One after the other in one call where kernels take tokens one by one; else each alone at its own length, so that no
    shape depends on its neighbours; with a `padding_side` as a rectangle.
    """
    (device, end), ends = model.devices, [piece.ends for piece in pieces]
    if model.by_token and padding_side is None:
        starts, cache_rows = [piece.start for piece in pieces], [piece.cache_row for piece in pieces]
        idx, input_pos, rows, last = packed([piece.tokens for piece in pieces], starts, cache_rows)
        return model(idx, input_pos, last[ends], rows=rows)  # (B, V)
    calls, logits = [], []
    for group in [pieces] if padding_side else [[piece] for piece in pieces]:
        texts, starts = [piece.tokens for piece in group], [piece.start for piece in group]
        idx, input_pos, last = rectangle(texts, padding_side or "right", starts)
        fresh = padding_side is None and starts == [0]  # such a row needs no mask
        # All of them before the first call: a copy to a GPU waits for whatever that has to do.
        calls.append((group, idx.to(device), None if fresh else input_pos.to(device), last.to(end)))
    for group, idx, input_pos, last in calls:
        rows, span = slice(group[0].cache_row, group[-1].cache_row + 1), max(piece.stop for piece in group)
        logits.append(model(idx, input_pos, last, rows=rows, span=span))  # (B, V)
    return torch.cat(logits)[ends]


def feed(
    model: GPT, texts: Sequence[Sequence[int]], starts: Sequence[int], n_columns: int, skip: Sequence[int] | None = None
) -> Tensor:
    """Runs the next tokens of cache rows 0, 1, ..., any number of each: logits (N, V) that follow each token.

    Args:
        starts: the column of the first token of each, (B,).
        n_columns: of the cache.
        skip: so many first tokens of each are run without their logits, (B,).
    """
    device = model.wte.weight.device
    skip = skip or [0] * len(texts)
    if model.by_token:
        idx, input_pos, rows, _ = packed(texts, starts, range(len(texts)))
        wanted = [i >= n for text, n in zip(texts, skip, strict=True) for i in range(len(text))]
        return model(idx, input_pos, torch.tensor(wanted).nonzero()[:, 0], rows=rows)
    idx, input_pos, last = (t.to(device) for t in rectangle(texts, "right", starts))
    span = span_of([start + len(text) - 1 for start, text in zip(starts, texts, strict=True)], n_columns)
    if all(len(text) <= n for text, n in zip(texts, skip, strict=True)):
        return model(idx, input_pos, last, span=span)[:0]  # no logits are wanted: the head runs on one column per row
    logits = model(idx, input_pos, span=span)  # (B, T, V)
    return torch.cat([row[n : len(text)] for row, text, n in zip(logits, texts, skip, strict=True)])


def check(model: GPT, batch: Batch, guesses: Sequence[Sequence[int]]) -> None:
    """One step of every row and its guesses: a row goes on as long as the token it gets is the one that was guessed."""
    rows, i = batch.decoding, 0
    fed = [[row.next_input, *guess] for row, guess in zip(rows, guesses, strict=True)]
    logits = feed(model, fed, [row.filled for row in rows], batch.shape[1])  # (N, V)
    place = [0, *accumulate(map(len, fed))]
    going = list(range(len(rows)))
    while going:
        some, here = [rows[b] for b in going], logits[[place[b] + i for b in going]]
        tokens = sampler_of(some, logits.device, batch.processors)(here)  # (n,)
        chosen = tokens.tolist()
        batch.push(some, chosen, row_logprobs(some, here, tokens))
        right = [b for b, token in zip(going, chosen, strict=True) if guesses[b][i : i + 1] == [token]]
        going, i = [b for b in right if rows[b].finish_reason is None], i + 1
