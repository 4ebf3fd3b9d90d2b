"""Layers split over 2 and 3 ranks: the logits and tokens of the whole model, and each row's own bits in every batch."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from conftest import llama_config, neox_config, randomized
from crew import crew
from families import FAMILIES
from torch import Tensor

from generate.base import generate
from lit_gen.checkpoint import load_model
from lit_gen.export import save_lit
from lit_gen.model import GPT
from lit_gen.pack import pack_model

CPU = torch.device("cpu")
PROMPTS = [[5], [1, 2, 3, 4, 5, 6, 7], list(range(20, 61)), list(range(100, 70, -2))]
MOE = {"n_expert": 8, "n_expert_per_token": 3, "moe_intermediate_size": 32, "moe_layers": [True, False]}
NINE = {"n_head": 9, "n_query_groups": 3, "head_size": 8, "n_embd": 72}  # SmolLM2's heads
LAYER = {"norm": "layer", "norm_bias": True}
THIRDS = {
    "smol": llama_config(**NINE, tie_embeddings=True),
    "untied, bias of the head": llama_config(**NINE, lm_head_bias=True, vocab_size=500),
    "neox": neox_config(n_head=6),
    "all biases": neox_config(**NINE, gated=True, parallel_residual=False, lm_head_bias=True, vocab_size=499),
    "experts": llama_config(**NINE, **MOE),
    "fewer groups": llama_config(n_head=6, n_query_groups=1),
    "norm over all heads": llama_config(n_head=6, n_query_groups=1, qk_norm="full"),
    "norm over all heads, in groups": llama_config(**NINE, qk_norm="full", clip_qkv=2.0, **LAYER),
    "norms of each head": llama_config(**NINE, qk_norm="per_head", **LAYER),
    "post norms, softcaps": llama_config(**NINE, post_norm=True, attn_softcap=5.0, final_softcap=10.0, act="gelu"),
    "two words": llama_config(**NINE, vocab_size=104),
}


@pytest.fixture(scope="module")
def split(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable]:
    with crew(3, tmp_path_factory.mktemp("crew")) as load:
        yield load


def answers(model: GPT, prompts: list[list[int]], **settings: object) -> tuple[list[list[int]], list[Tensor]]:
    """Tokens of each row, and the logits (steps, V) that they were chosen from."""
    seen: dict[tuple[int, ...], list[Tensor]] = {tuple(prompt): [] for prompt in prompts}

    def note(tokens: Tensor, logits: Tensor) -> Tensor:
        key = next(p for p in sorted(seen, key=len, reverse=True) if tuple(tokens[0, : len(p)].tolist()) == p)
        seen[key].append(logits[0].clone())
        return logits

    rows = sorted(generate(model, prompts, processors=[note], **settings), key=lambda row: row.index)
    return [row.tokens for row in rows], [torch.stack(seen[tuple(prompt)]) for prompt in prompts]


def assert_split_is_whole(load: Callable, ranks: int, folder: Path, **how: object) -> None:
    lengths = {"max_new_tokens": [6, 2, 5, 1]}  # rows end at different steps
    tokens, logits = answers(pack_model(load_model(folder, torch.float32, CPU)), PROMPTS, **lengths)
    with load(ranks, folder, **how) as model:
        split_tokens, split_logits = answers(model, PROMPTS, max_batch_size=3, **lengths)
        alone = answers(model, PROMPTS[:1], max_new_tokens=6) if model.by_token else None
    assert split_tokens == tokens
    for split, whole in zip(split_logits, logits, strict=True):
        assert split.shape == whole.shape
        assert (split - whole).abs().max() <= 1e-5 * whole.abs().max()
    assert alone is None or torch.equal(alone[1][0], split_logits[0])  # bit for bit


@pytest.mark.parametrize("name", FAMILIES)
def test_two_ranks_give_what_every_family_gives_whole(name: str, split: Callable, family: Callable) -> None:
    assert_split_is_whole(split, 2, family(name).folder)


@pytest.mark.parametrize("name", THIRDS)
def test_three_ranks_give_what_the_whole_model_gives(name: str, split: Callable, tmp_path: Path) -> None:
    save_lit(randomized(THIRDS[name]), tmp_path / "model", tmp_path)
    assert_split_is_whole(split, 3, tmp_path / "model")
