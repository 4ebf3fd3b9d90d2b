"""Rotary position embeddings: the frequencies of every kind we know, the tables made from them, and the rotation.

Su et al. 2021, https://arxiv.org/abs/2104.09864. Angles are float32 whatever the model's dtype: bfloat16 cannot tell
position 256 from 257, and float16 none above 2048.
"""

import math

import torch
from torch import Tensor

from lit_gen.config import Rope


def rope_frequencies(rope: Rope, device: torch.device | None = None) -> tuple[list[Tensor], float]:
    """Angles per position of each pair of elements.

    Returns:
        One tensor (n_elem / 2,), float32, for each table the kind has (two for longrope: rows up to the pre-training
        context, and longer ones), and the factor that multiplies cos and sin.
    """
    n, original = rope.n_elem, rope.original_max_seq_len or 0
    power = rope.base ** (torch.arange(0, n, 2, dtype=torch.float32, device=device) / n)  # (n_elem / 2,)
    frequency = 1.0 / power
    if rope.kind in (
        "default",
        "dynamic",
    ):  # dynamic NTK only departs from default beyond block_size, which is the limit
        return [frequency], 1.0
    if rope.kind == "linear":
        return [frequency / rope.factor], 1.0
    if rope.kind == "factors":
        return [frequency / _divisors(rope.factors, frequency)], 1.0
    if rope.kind == "llama3":
        return [_llama3(rope, frequency)], 1.0
    if rope.kind == "yarn":
        return [_yarn(rope, power)], _yarn_attention_factor(rope)
    assert rope.kind == "longrope", rope.kind
    attention = rope.attention_factor
    if attention is None:  # https://arxiv.org/abs/2402.13753
        attention = 1.0 if rope.factor <= 1.0 else math.sqrt(1 + math.log(rope.factor) / math.log(original))
    return [1.0 / (_divisors(f, power) * power) for f in (rope.short_factor, rope.long_factor)], attention


def _divisors(values: list[float] | None, like: Tensor) -> Tensor:
    assert values is not None and len(values) == len(like), "Config checks the number of rope factors"
    return torch.tensor(values, dtype=torch.float32, device=like.device)


def _llama3(rope: Rope, frequency: Tensor) -> Tensor:
    """Llama 3.1: long wavelengths are interpolated, short ones kept, those between blended."""
    assert rope.low_freq_factor and rope.high_freq_factor and rope.original_max_seq_len
    wavelengths = rope.original_max_seq_len * frequency / (2 * math.pi)  # that fit in the pre-training context
    keep = (wavelengths - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    keep = keep.clamp(0, 1)
    return (1 - keep) * frequency / rope.factor + keep * frequency


def _yarn(rope: Rope, power: Tensor) -> Tensor:
    """YaRN, https://arxiv.org/abs/2309.00071 §3.2: fast pairs keep their frequency, slow ones are interpolated."""
    n, original = rope.n_elem, rope.original_max_seq_len or 0

    def pair_that_turns(rotations: float) -> float:
        """Index of the pair that makes so many full turns within the pre-training context."""
        return n * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(rope.base))

    low, high = pair_that_turns(rope.beta_fast), pair_that_turns(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, n - 1)
    width = (high - low) or 0.001  # the two ends may fall together
    interpolate = ((torch.arange(n // 2, dtype=torch.float32, device=power.device) - low) / width).clamp(0, 1)
    return interpolate / (rope.factor * power) + (1 - interpolate) / power


def _yarn_attention_factor(rope: Rope) -> float:
    def mscale(m: float) -> float:
        return 1.0 if rope.factor <= 1 else 0.1 * m * math.log(rope.factor) + 1.0

    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return mscale(rope.mscale) / mscale(rope.mscale_all_dim)
    return mscale(1.0)


def rope_table(rope: Rope, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos and sin of positions 0 .. length - 1, (K, length, n_elem) float32 each; K tables as in `rope_frequencies`."""
    frequencies, attention = rope_frequencies(rope, device)
    position = torch.arange(length, dtype=torch.float32, device=device)
    angles = torch.stack([torch.outer(position, f).repeat(1, 2) for f in frequencies])  # (K, length, n_elem)
    return angles.cos() * attention, angles.sin() * attention


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates the leading n_elem elements of each head: x (B, T, heads, hs); cos, sin (B or 1, T, 1, n_elem).

    The pairs are (i, i + n_elem / 2), and `sin` comes with its first half negated (`signed_sin`), which saves a pass.
    """
    n = cos.size(-1)
    if n == x.size(-1):
        return torch.addcmul(x * cos, x.roll(n // 2, -1), sin)
    head = x[..., :n]
    return torch.cat((torch.addcmul(head * cos, head.roll(n // 2, -1), sin), x[..., n:]), dim=-1)


def signed_sin(sin: Tensor) -> Tensor:
    half = sin.size(-1) // 2
    return torch.cat((-sin[..., :half], sin[..., half:]), dim=-1)
