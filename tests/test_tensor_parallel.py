"""Layers split over 2 and 3 ranks: the logits and tokens of the whole model, and each row's own bits in every batch."""

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from adapters import random_pairs, write_peft
from conftest import llama_config, neox_config, randomized
from crew import crew
from families import FAMILIES
from torch import Tensor

from generate.base import generate
from lit_gen.checkpoint import load_model
from lit_gen.cut import cuts_of
from lit_gen.export import save_lit
from lit_gen.interrupt import Interrupted, Interrupts
from lit_gen.kernels import load_kernels
from lit_gen.lora import LIT_LORA, LoRAConfig, add_lora, load_lora, merge_lora, save_lora
from lit_gen.model import GPT
from lit_gen.pack import pack_model
from lit_gen.utils import UserError

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


@pytest.mark.parametrize("name", ["llama-wide-bias-tied", "gemma2", "qwen3_moe", "olmo2"])
def test_without_kernels_ranks_give_what_the_whole_model_gives(name: str, split: Callable, family: Callable) -> None:
    assert_split_is_whole(split, 2, family(name).folder, pack=False)


@pytest.mark.skipif(load_kernels() is None, reason="there is no C++ compiler, or LIT_GEN_KERNELS=0")
@pytest.mark.parametrize("how", [{"dtype": torch.bfloat16}, {"quantize": "int8"}, {"quantize": "int4"}])
def test_rows_have_their_own_bits_in_other_formats_too(how: dict, split: Callable, tmp_path: Path) -> None:
    save_lit(randomized(llama_config(n_head=6, n_query_groups=3, tie_embeddings=True)), tmp_path / "model", tmp_path)
    with split(3, tmp_path / "model", **how) as model:
        together = answers(model, PROMPTS, max_new_tokens=4)
        alone = [answers(model, [prompt], max_new_tokens=4) for prompt in PROMPTS]
    whole = load_model(tmp_path / "model", how.get("dtype", torch.float32), CPU)
    _, logits = answers(pack_model(whole, how.get("quantize")), PROMPTS, max_new_tokens=1)
    for row, (_, [own]) in enumerate(alone):
        assert torch.equal(together[1][row], own)
        bound = 0.3 if "int4" in how.values() else 0.05  # what is rounded in groups has other groups
        assert (own[0] - logits[row][0]).norm() < bound * logits[row][0].norm()


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_lora_is_added_to_each_part_with_the_bits_of_the_whole(ranks: int, split: Callable, tmp_path: Path) -> None:
    config = llama_config(vocab_size=301)
    save_lit(randomized(config), tmp_path / "model", tmp_path)
    trained = add_lora(randomized(config), LoRAConfig(r=3, targets=("all", "lm_head")))
    generator = torch.Generator().manual_seed(3)
    for name, parameter in trained.named_parameters():
        if name.endswith(".b.weight"):
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    save_lora(trained, tmp_path / LIT_LORA)
    model = load_model(tmp_path / "model", torch.float32, CPU)
    whole = merge_lora(model, load_lora(tmp_path / LIT_LORA, config))
    with split(ranks, tmp_path / "model", lora=tmp_path / LIT_LORA, pack=False) as part:
        for name, cut in cuts_of(config, 0, ranks).items():
            if name.endswith("weight") and "wte" not in name:
                expected = cut.of(whole.get_parameter(name))
                assert torch.equal(part.get_parameter(name)[: len(expected)], expected), name
        tokens = answers(part, PROMPTS, max_new_tokens=4)[0]
    assert tokens == answers(whole, PROMPTS, max_new_tokens=4)[0]


def test_a_lora_of_experts_is_split(split: Callable, family: Callable, tmp_path: Path) -> None:
    folder = family("qwen3_moe").folder
    shapes = {f"model.layers.0.mlp.experts.{e}.{x}_proj": (32, 64) for e in (0, 5) for x in ("gate", "up")}
    shapes |= {"model.layers.0.mlp.experts.5.down_proj": (64, 32), "model.layers.0.self_attn.k_proj": (32, 64)}
    write_peft(tmp_path / "lora", random_pairs(shapes, std=0.3), target_modules=[name[6:] for name in shapes])
    model = load_model(folder, torch.float32, CPU)
    before = answers(model, PROMPTS, max_new_tokens=4)[1]
    tokens, logits = answers(merge_lora(model, load_lora(tmp_path / "lora", model.config)), PROMPTS, max_new_tokens=4)
    assert any((a[0] - b[0]).abs().max() > 0.1 for a, b in zip(before, logits, strict=True))
    with split(2, folder, lora=tmp_path / "lora") as part:
        found, parts = answers(part, PROMPTS, max_new_tokens=4)
    assert found == tokens
    assert all((a - b).abs().max() <= 1e-5 * b.abs().max() for a, b in zip(parts, logits, strict=True))


def test_a_rank_without_memory_for_the_cache_halves_the_batch_of_all(split: Callable, tmp_path: Path, capsys) -> None:
    """A cache row has 2 * 2 layers * 1 head * 16 * 4 bytes = 256 bytes a column on a rank: 16 MiB of 65,536 columns."""
    save_lit(randomized(llama_config(block_size=2**17)), tmp_path / "model", tmp_path)
    prompts, columns = [[i, i + 1, i + 2] for i in range(8)], 2**16 - 2
    settings = {"max_new_tokens": columns, "stop": [[token] for token in range(0, 512, 3)]}  # so rows are short
    tokens = answers(load_model(tmp_path / "model", torch.float32, CPU), prompts, **settings)[0]
    with split(2, tmp_path / "model", room=80 * 2**20) as model:
        assert answers(model, prompts, **settings)[0] == tokens
    err = capsys.readouterr().err
    assert "out of memory (another rank has no memory): going on with 4 rows" in err


def test_a_signal_at_any_rank_ends_the_job_after_the_step(split: Callable, family: Callable) -> None:
    steps = []

    def step() -> None:
        steps.append(0)
        if len(steps) == 3:
            os.kill(split.processes[0].pid, signal.SIGINT)
        interrupts.check()

    with split(2, family("llama").folder) as model, Interrupts() as interrupts:
        with pytest.raises(Interrupted, match="SIGINT"):
            list(generate(model, PROMPTS, max_new_tokens=100, on_step=step))
    assert len(steps) <= 5


def test_prompts_are_refused_as_ever_and_the_ranks_go_on(split: Callable, family: Callable) -> None:
    with split(2, family("llama").folder) as model:
        with pytest.raises(UserError, match="token 128"):
            generate(model, [[1, 128]], max_new_tokens=2)
        assert len(answers(model, PROMPTS, max_new_tokens=2, speculate=3)[0]) == 4
