"""Attention in plain PyTorch: one call for every mask, head layout and scale."""

import torch
import torch.nn.functional as F
from torch import Tensor

from lit_gen.cache import additive, visible


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, softcap: float | None = None) -> Tensor:
    """Attention of q (B, nh, T, hs) on k, v (B, ng, S, hs), which are never repeated for the query heads they serve.

    `mask` (B or 1, 1, T, S) is added to the scores; None means causal with S == T. Returns (B, nh, T, hs).
    """
    B, nh, T, hs = q.shape
    ng = k.size(1)
    if softcap is not None:
        return _attend_softcap(q, k, v, mask, scale, softcap)
    if T == 1 and mask is not None:
        # One query per row: the nh / ng queries of a group become its rows, which costs no copy of k and v.
        y = F.scaled_dot_product_attention(q.reshape(B, ng, nh // ng, hs), k, v, attn_mask=mask, scale=scale)
        return y.view(B, nh, 1, hs)
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=nh != ng
    )


def _attend_softcap(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, softcap: float) -> Tensor:
    """Scores are squashed to +-softcap before they are masked (Gemma 2); no fused kernel does that."""
    B, nh, T, hs = q.shape
    ng, S = k.size(1), k.size(2)
    if mask is None:
        mask = additive(visible(torch.arange(T, device=q.device)[None], S), q.dtype)
    scores = (q.reshape(B, ng, nh // ng, T, hs) @ k[:, :, None].mT) * scale  # (B, ng, nh / ng, T, S)
    scores = torch.tanh(scores / softcap) * softcap + mask[:, :, None]
    return (scores.softmax(-1, dtype=torch.float32).to(v.dtype) @ v[:, :, None]).view(B, nh, T, hs)
