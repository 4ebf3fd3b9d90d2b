"""How probable the model itself finds the tokens of each row, exact in the same way as sampling."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from lit_gen.sampling import CHUNK, ONE, relative_weights, sort_keys
from lit_gen.stopping import LogProb, Row


def log_probabilities(logits: Tensor, tokens: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """How probable the model itself finds tokens, before any setting: log-softmax of its logits.

    Args:
        logits: (B, V), any floating dtype.
        tokens: (B,) int64 ids; -1 gives NaN.
        k: so many best tokens; no more than V come back.

    Returns:
        Natural logarithms of the probabilities of `tokens` (B,) and of the k best tokens (B, k), float32, and the ids
        of these (B, k), best first and the lower of equals first. NaN in a row with NaN or +inf, or nothing above -inf.
    """
    B, V = logits.shape
    k, n, parts = min(k, V), max(1, CHUNK // V), []
    for part, token in zip(logits.split(n), tokens[:, None].split(n), strict=True):
        best = part.amax(-1, keepdim=True)  # (n, 1)
        total = relative_weights(part, best, torch.ones_like(best, dtype=torch.float64)).sum(-1, keepdim=True)  # (n, 1)
        ids = token[:, :0]  # (n, 0)
        if k > 0:
            ids = V - 1 - (sort_keys(part).topk(k).values & 0xFFFFFFFF)  # (n, k)
        values = part.gather(1, torch.cat([token.clamp(min=0), ids], 1)).double()  # (n, 1 + k)
        values = values - best - (total.double() / ONE).log()
        values.masked_fill_(~best.isfinite(), math.nan)  # what a NaN is as an integer weight differs by device
        values[:, :1].masked_fill_(token < 0, math.nan)
        parts.append((values[:, 0].float(), values[:, 1:].float(), ids))
    chosen, values, ids = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
    return chosen, values, ids


def row_logprobs(rows: Sequence[Row], logits: Tensor, tokens: Tensor) -> Sequence[LogProb | None]:
    """What `Row.push` takes beside a token, for logits (B, V) and tokens (B,); None for rows that do not ask for it."""
    wanted: dict[bool, list[int]] = {}  # rows that ask for the chosen token alone, and for the best ones too
    for b, row in enumerate(rows):
        if row.settings.logprobs is not None:
            wanted.setdefault(row.settings.logprobs > 0, []).append(b)
    found: list[LogProb | None] = [None] * len(rows)
    for places in wanted.values():
        index = torch.tensor(places, device=logits.device)
        counts = [rows[b].settings.logprobs for b in places]
        chosen, values, ids = log_probabilities(logits.index_select(0, index), tokens[index], max(counts))
        table = zip(places, counts, chosen.tolist(), ids.tolist(), values.tolist(), strict=True)
        for b, k, logprob, i, v in table:
            found[b] = logprob, list(zip(i[:k], v[:k], strict=True))
    return found
