"""From logits to the next token of every row: temperature, top-k, top-p, and random numbers that belong to one row.

A row of a batch gets the token that it would get alone, bit for bit. Floating-point sums cannot promise that: their
rounding changes with the shape, and on CUDA that of `cumsum` from run to run. So probabilities are held as integers,
whose sums are exact in any order. That also leaves every short cut below free to look at the whole batch.
"""

import hashlib
import math
from collections.abc import Sequence
from numbers import Integral, Real

import numpy as np
import torch
from torch import Tensor

from lit_gen.utils import UserError

ONE = 2.0**44  # weight of a row's best token; 2**18 tokens as good as the best still add up to less than 2**63
CHUNK = 2**20  # logits handled at once: 64 rows of 49,152 took 17 ms like this and 37 ms in one piece (page faults)
NUCLEUS = 1024  # top_p looks at so many best tokens first: 24 ms for 64 rows of 49,152, a full sort takes 190 ms


def sample(
    logits: Tensor,
    uniform: Sequence[float] | Tensor,
    temperature: Sequence[float],
    top_k: Sequence[int | None] | None = None,
    top_p: Sequence[float | None] | None = None,
) -> Tensor:
    """Chooses one token per row.

    The order is Hugging Face's: temperature, then top-k, then top-p on what is left of the probability. top_k keeps
    exactly k tokens, top_p the fewest best tokens whose probabilities reach p; of equal logits the lower id is kept
    first. At least one token is kept. The token is where the running sum of the kept probabilities, in vocabulary
    order, passes `uniform`. Tokens below 2**-44 of the best one's probability count as impossible.

    The settings are plain lists, one entry per row, so that finding out which rows are greedy waits for no GPU.

    Args:
        logits: (B, V), any floating dtype.
        uniform: (B,) float64 numbers in [0, 1), one per row; not looked at where the temperature is 0.
        temperature: (B,) numbers >= 0; 0 is argmax (the lowest id of equals), whatever else is set.
        top_k: (B,) integers >= 1; None, or k >= V: no such filter.
        top_p: (B,) numbers in [0, 1]; None, or 1: no such filter. 0 keeps the best token.

    Returns:
        (B,) int64 token ids; -1 for a row that holds NaN or +inf, or nothing above -inf. Such a row harms no other.
    """
    B, V = logits.shape
    best, token = _argmax(logits)  # (B, 1), (B, 1)
    k = [V if n is None else min(n, V) for n in top_k or [None] * B]
    p = [1.0 if x is None else x for x in top_p or [None] * B]
    sampled = [b for b in range(B) if temperature[b] > 0]
    whole = [b for b in sampled if k[b] == V and p[b] == 1]
    filtered = [b for b in sampled if k[b] < V or p[b] < 1]
    if sampled:
        uniform = torch.as_tensor(uniform, dtype=torch.float64, device=logits.device)[:, None]  # (B, 1)
    n = max(1, CHUNK // V)
    for group in (whole, filtered):
        for rows in (group[i : i + n] for i in range(0, len(group), n)):
            scale = torch.tensor([[temperature[b]] for b in rows], dtype=torch.float64, device=logits.device)  # (B, 1)
            if group is whole:
                ids, weights = None, _weights(logits[rows], best[rows], scale)  # (B, V)
            else:
                ids, weights = _filter(logits[rows], best[rows], scale, [k[b] for b in rows], [p[b] for b in rows])
            token[rows] = _draw(ids, weights, uniform[rows])
    return torch.where(best.isfinite(), token, -1).squeeze(1)


def _argmax(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Largest logit (B, 1) and the lowest id that has it (B, 1); a NaN counts as largest.

    The best block first, then the best inside it: 1.4 ms for bfloat16 (64, 49152), where `argmax` takes 10 ms, because
    only `amax` is vectorised. For an odd V the blocks have one element, and the second step does all the work.
    """
    blocks = logits.unflatten(1, (-1, math.gcd(logits.size(1), 256)))  # (B, V/256, 256)
    best, block = blocks.amax(-1).max(-1, keepdim=True)  # (B, 1)
    inside = blocks.take_along_dim(block[..., None], 1).argmax(-1)  # (B, 1)
    return best, block * blocks.size(-1) + inside


def _weights(logits: Tensor, best: Tensor, temperature: Tensor) -> Tensor:
    """Probabilities relative to the best token's as integers from 0 to 2**44, the shape of `logits`."""
    return logits.to(torch.float64, copy=True).sub_(best).div_(temperature).exp_().mul_(ONE).long()


def _filter(logits: Tensor, best: Tensor, temperature: Tensor, k: list[int], p: list[float]) -> tuple[Tensor, Tensor]:
    """Applies top-k and top-p: ids (B, n) in ascending order and their weights (B, n), 0 where a token was not kept."""
    B, V = logits.shape
    per_row = {"device": logits.device}
    limit = torch.tensor(k, **per_row)[:, None]  # (B, 1)
    mass = torch.tensor(p, dtype=torch.float64, **per_row)[:, None]  # (B, 1)
    whole = _weights(logits, best, temperature).sum(-1, keepdim=True) if max(k) == V else None  # (B, 1)
    keys = _sort_keys(logits)  # (B, V)
    width = max(k) if whole is None else min(V, max([NUCLEUS, *(n for n in k if n < V)]))
    while True:
        ids = V - 1 - (keys.topk(width).values & 0xFFFFFFFF)  # (B, width), best first
        weights = _weights(logits.gather(1, ids), best, temperature)
        weights.masked_fill_(torch.arange(width, **per_row) >= limit, 0)
        total = weights.sum(-1, keepdim=True)  # (B, 1)
        if whole is not None:
            total = torch.where(limit == V, whole, total)
        keep = weights.cumsum(-1) - weights < mass * total  # what lies before a token has not reached p yet
        keep[:, 0] = True
        if whole is None or width == V or not keep[:, -1].any():
            break
        width = min(8 * width, V)  # flat distributions: some row has not reached p within its `width` best tokens
    ids, order = ids.sort(-1)
    return ids, weights.mul_(keep).gather(1, order)


def _sort_keys(logits: Tensor) -> Tensor:
    """int64 keys (B, V) that order like (logit, lower id first): all different, so every algorithm sorts them alike."""
    bits = logits.to(torch.float32, copy=True).add_(0.0).view(torch.int32)  # adding 0 turns -0.0 into 0.0
    bits.bitwise_xor_((bits >> 31).bitwise_and_(0x7FFFFFFF))  # the bits of a float, read as an integer, in order
    V = logits.size(1)
    return bits.long().bitwise_left_shift_(32).add_(torch.arange(V - 1, -1, -1, device=logits.device))


def _draw(ids: Tensor | None, weights: Tensor, uniform: Tensor) -> Tensor:
    """The id (B, 1) where the running sum of `weights` (B, n) passes `uniform` (B, 1) of their total."""
    sums = weights.cumsum(-1)
    total = sums[:, -1:]
    target = torch.minimum((uniform * total).long(), total - 1)  # the product is rounded: it may reach the total
    place = torch.searchsorted(sums, target, right=True)  # the first sum > target: its own weight is not 0
    place.clamp_(max=sums.size(1) - 1)  # the sums of a row with NaN mean nothing; its token becomes -1
    return place if ids is None else ids.gather(1, place)


def row_stream(seed: int, prompt: Sequence[int], occurrence: int, sample_index: int) -> np.random.Generator:
    """The random numbers of one row: its step t uses the t-th `random()`, whatever runs beside it.

    Args:
        seed: of the whole run, any integer.
        prompt: (T,) token ids.
        occurrence: how many times the same prompt came before in the input.
        sample_index: which sample of this prompt.

    Returns:
        A counter-based generator (Philox; Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011), keyed
        by a 128-bit hash of all four.
    """
    key = f"{seed},{occurrence},{sample_index};".encode() + np.asarray(prompt, dtype="<i8").tobytes()
    digest = hashlib.blake2b(key, digest_size=16).digest()
    return np.random.Generator(np.random.Philox(key=int.from_bytes(digest, "little")))


def check_sampling(temperature: float, top_k: int | None, top_p: float | None) -> None:
    """Raises UserError that names the setting if one is out of range; `sample` itself trusts its input."""
    if not (_is_number(temperature) and temperature >= 0):
        raise UserError(f"temperature is {temperature!r}, but must be a finite number >= 0 (0 takes the best token)")
    if top_k is not None and not (isinstance(top_k, Integral) and not isinstance(top_k, bool) and top_k >= 1):
        raise UserError(f"top_k is {top_k!r}, but must be an integer >= 1 (leave it out to keep all tokens)")
    if top_p is not None and not (_is_number(top_p) and 0 <= top_p <= 1):
        raise UserError(f"top_p is {top_p!r}, but must be a number from 0 to 1 (leave it out to keep all tokens)")


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
