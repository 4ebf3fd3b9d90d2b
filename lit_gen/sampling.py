"""From logits to the next token of every row: settings of its own, and random numbers that belong to one row.

A row of a batch gets the token that it would get alone, bit for bit. Floating-point sums cannot promise that: their
rounding changes with the shape, and on CUDA that of `cumsum` from run to run. So probabilities are held as integers,
whose sums are exact in any order. That also leaves every short cut below free to look at the whole batch.
"""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from lit_gen.penalties import Penalties, Processor, RowHistory
from lit_gen.settings import Settings

ONE = 2.0**44  # weight of a row's best token; 2**18 tokens as good as the best still add up to less than 2**63
CHUNK = 2**20  # logits handled at once: 64 rows of 49,152 took 17 ms like this and 37 ms in one piece (page faults)
NUCLEUS = 1024  # top_p looks at so many best tokens first: 24 ms for 64 rows of 49,152, a full sort takes 190 ms
STEPS = 64  # random numbers of each row that go to the device at once


class Sampler:
    """Chooses the next token of a fixed set of rows, step after step; made anew when the set changes.

    The order is Hugging Face's: logit_bias, penalties and processors (see `Penalties`), then temperature, top_k, top_p
    on what is left of the probability, and min_p. top_k keeps exactly k tokens, top_p the fewest best tokens whose
    probabilities reach p, min_p those at least so many times as probable as the best; of equal logits the lower id is
    kept first. At least one token is kept. A temperature of 0 takes the best one, the lowest id of equals. Tokens below
    2**-44 of the best one's probability count as impossible.

    Args:
        settings: of each row; ids in logit_bias must be below V.
        prompts: token ids of each row's prompt, (T,) each and not empty.
        tokens: its new token ids so far.
        noise: its numbers in [0, 1), float64, from its first new token on: `row_stream(...).random(max_new_tokens)`.
            None for a row with temperature 0. The row's t-th new token is where the running sum of the kept
            probabilities, in vocabulary order, passes `noise[t]`.
        device: of the logits.
        processors: functions of (tokens (1, T), logits (1, V)) that return logits (1, V), such as Hugging Face's; each
            is called for one row at a time, on its prompt and new tokens.
        histories: of the rows, each made once for its row, so that a new sampler does not read whole texts again; by
            default made here. A row is in one sampler at a time.
    """

    def __init__(
        self,
        settings: Sequence[Settings],
        prompts: Sequence[Sequence[int]],
        tokens: Sequence[Sequence[int]],
        noise: Sequence[np.ndarray | None],
        device: torch.device | str,
        processors: Sequence[Processor] = (),
        histories: Sequence[RowHistory] | None = None,
    ) -> None:
        self._settings, self._device = settings, device
        self._penalties = Penalties(settings, prompts, tokens, device, processors, histories)
        self._rest = {b: noise[b][len(tokens[b]) :] for b, row in enumerate(settings) if row.temperature > 0}
        self._step = 0
        self._groups: list[Group] | None = None  # made by the first call, which tells V

    def __call__(self, logits: Tensor) -> Tensor:
        """One step of every row.

        Args:
            logits: (B, V), any floating dtype; they are not changed.

        Returns:
            (B,) int64 token ids; -1 for a row that (after penalties and processors) holds NaN or +inf, or nothing above
            -inf. Such a row harms no other.
        """
        if self._groups is None:
            self._groups = group_rows(self._settings, logits.size(1), logits.device)
        if self._groups and self._step % STEPS == 0:
            self._noise = self._next_noise()
        assert not self._groups or self._step % STEPS < len(self._noise), f"no row has noise for step {self._step}"
        uniform = self._noise[self._step % STEPS] if self._groups else None  # (B, 1)
        token = sample(self._penalties.apply(logits), uniform, self._groups)
        self._penalties.append(token)
        self._step += 1
        return token

    def _next_noise(self) -> Tensor:
        """Random numbers for the next steps, (steps, B, 1) float64; 0 where a row, which ends earlier, has none."""
        numbers = {b: row[self._step : self._step + STEPS] for b, row in self._rest.items()}
        table = np.zeros((max(map(len, numbers.values())), len(self._settings), 1))
        for b, row in numbers.items():
            table[: len(row), b, 0] = row
        return torch.from_numpy(table).to(self._device)


@dataclass(frozen=True, slots=True)
class Group:
    """Sampled rows that are handled at once, few enough for CHUNK, and their settings as tensors."""

    rows: Tensor  # (n,) int64
    temperature: Tensor  # (n, 1) float64
    top_k: Tensor  # (n, 1) int64, V where it is not set
    top_p: Tensor  # (n, 1) float64, 1 where it is not set
    least: Tensor | None  # (n, 1) int64, the smallest weight that min_p keeps; None if no row has a min_p
    width: int | None  # so many best tokens are sorted at first; None if no row has top_k or top_p
    endless: bool  # some row has no top_k: its top_p is a part of the whole vocabulary


def group_rows(settings: Sequence[Settings], V: int, device: torch.device | str) -> list[Group]:
    """The rows with a temperature above 0, those with top_k or top_p apart from the others."""
    kinds: tuple[list[int], list[int]] = [], []
    for b, row in enumerate(settings):
        if row.temperature > 0:
            kinds[(row.top_k or V) < V or row.top_p not in (None, 1)].append(b)
    n = max(1, CHUNK // V)
    chunks = [rows[i : i + n] for rows in kinds for i in range(0, len(rows), n)]
    return [_group(rows, [settings[b] for b in rows], V, device) for rows in chunks]


def _group(rows: list[int], settings: list[Settings], V: int, device: torch.device | str) -> Group:
    def column(values: list, dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=device)[:, None]  # (n, 1)

    k = [min(int(row.top_k or V), V) for row in settings]
    p = [1.0 if row.top_p is None else float(row.top_p) for row in settings]
    least = [math.ceil(float(row.min_p or 0) * ONE) for row in settings]  # exact, as ONE is a power of 2
    limits = [limit for limit in k if limit < V]
    endless = len(limits) < len(k)
    width = max([min(NUCLEUS, V) if endless else 1, *limits]) if limits or min(p) < 1 else None
    return Group(
        rows=torch.tensor(rows, device=device),
        temperature=column([float(row.temperature) for row in settings], torch.float64),
        top_k=column(k, torch.int64),
        top_p=column(p, torch.float64),
        least=column(least, torch.int64) if any(least) else None,
        width=width,
        endless=endless,
    )


def sample(logits: Tensor, uniform: Tensor | None, groups: Sequence[Group]) -> Tensor:
    """Chooses one token per row, as `Sampler` says, from the logits (B, V) after penalties and processors.

    `uniform` (B, 1) float64 is not looked at in rows that are in none of the groups: these take the best token.
    """
    best, token = _argmax(logits)  # (B, 1), (B, 1)
    for group in groups:
        ids, weights = _kept(logits[group.rows], best[group.rows], group)
        token[group.rows] = _draw(ids, weights, uniform[group.rows])
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


def relative_weights(logits: Tensor, best: Tensor, temperature: Tensor) -> Tensor:
    """Probabilities relative to the best token's as integers from 0 to 2**44, the shape of `logits`."""
    return logits.to(torch.float64, copy=True).sub_(best).div_(temperature).exp_().mul_(ONE).long()


def _kept(logits: Tensor, best: Tensor, group: Group) -> tuple[Tensor | None, Tensor]:
    """Ids (n, m) in ascending order, None for all, and their weights (n, m), 0 where a filter does not keep a token."""
    if group.width is None:
        ids, weights = None, relative_weights(logits, best, group.temperature)  # (n, V)
    else:
        ids, weights = _best_tokens(logits, best, group)
    if group.least is not None:
        weights.masked_fill_(weights < group.least, 0)
    return ids, weights


def _best_tokens(logits: Tensor, best: Tensor, group: Group) -> tuple[Tensor, Tensor]:
    """Applies top_k and top_p: ids (n, m) in ascending order and their weights (n, m), 0 where a token is not kept."""
    V, width, limit = logits.size(1), group.width, group.top_k
    whole = relative_weights(logits, best, group.temperature).sum(-1, keepdim=True) if group.endless else None  # (n, 1)
    keys = sort_keys(logits)  # (n, V)
    while True:
        ids = V - 1 - (keys.topk(width).values & 0xFFFFFFFF)  # (n, width), best first
        weights = relative_weights(logits.gather(1, ids), best, group.temperature)
        weights.masked_fill_(torch.arange(width, device=logits.device) >= limit, 0)
        total = weights.sum(-1, keepdim=True)  # (n, 1)
        if whole is not None:
            total = torch.where(limit == V, whole, total)
        keep = weights.cumsum(-1) - weights < group.top_p * total  # what lies before a token has not reached p yet
        keep[:, 0] = True
        if not group.endless or width == V or not (keep[:, -1:] & (limit > width)).any():
            break
        width = min(8 * width, V)  # flat distributions: some row has not reached p within its `width` best tokens
    ids, order = ids.sort(-1)
    return ids, weights.mul_(keep).gather(1, order)


def sort_keys(logits: Tensor) -> Tensor:
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
