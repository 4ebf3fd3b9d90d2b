"""`cut.py`: the ranks' parts make up the whole model, and are read from every kind of file as they were cut from it."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import llama_config, neox_config
from families import FAMILIES
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from lit_gen.checkpoint import load_model
from lit_gen.config import Config
from lit_gen.cut import WHOLE, Cut, check_ranks, cuts_of
from lit_gen.model import GPT
from lit_gen.utils import UserError

CPU = torch.device("cpu")


def part_of(folder: Path, rank: int, ranks: int) -> tuple[GPT, dict[str, Cut]]:
    """What a rank reads of a checkpoint."""
    cuts: dict[str, Cut] = {}

    def split(model: GPT) -> dict[str, Cut]:
        cuts.update(cuts_of(model.config, rank, ranks))
        for name, parameter in list(model.named_parameters()):
            parent, _, kind = name.rpartition(".")
            shape = cuts.get(name, WHOLE).shape(parameter.shape)
            part = None if 0 in shape else nn.Parameter(parameter.new_zeros(shape))
            setattr(model.get_submodule(parent), kind, part)
        if model.config.tie_embeddings:
            model.lm_head.weight = model.wte.weight
        return cuts

    return load_model(folder, torch.float32, CPU, split), cuts


def stacks(parameter: Tensor) -> Tensor:
    """(stacks, rows, columns)"""
    *_, N, K = parameter.shape if parameter.dim() > 1 else (*parameter.shape, 1)
    return parameter.detach().view(-1, N, K)


def assert_parts_are_of_the_whole(folder: Path, ranks: int) -> None:
    """Every element is in a part, at the place that `cuts_of` says; what is added up over ranks is in one only."""
    whole = dict(load_model(folder, torch.float32, CPU).named_parameters())
    seen = {name: torch.zeros_like(stacks(parameter)) for name, parameter in whole.items()}
    for rank in range(ranks):
        model, cuts = part_of(folder, rank, ranks)
        parts = dict(model.named_parameters())
        for name, parameter in whole.items():
            cut = cuts.get(name, WHOLE)
            rows = torch.arange(stacks(parameter).size(1)) if cut.rows is None else cut.rows
            if len(rows) == 0:
                assert name not in parts and name.endswith("proj.bias") and rank > 0
                continue
            columns = cut.columns or slice(None)
            assert torch.equal(stacks(parts[name])[:, : len(rows)], stacks(parameter)[:, rows, columns]), name
            assert not stacks(parts[name])[:, len(rows) :].any()
            seen[name][:, rows, columns] += 1
    once = ("attn.proj.weight", "mlp.proj.weight", "mlp.proj", "mlp.fc.weight", "mlp.fc", "proj.bias", "lm_head.weight")
    for name, times in seen.items():
        assert times.min() >= 1 and (not name.endswith(once) or times.max() == 1), name


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", FAMILIES)
def test_parts_make_up_the_whole_of_every_family(name: str, ranks: int, family: Callable) -> None:
    """Four ranks share the two key/value heads that most of these have."""
    assert_parts_are_of_the_whole(family(name).folder, ranks)


def test_parts_of_stacked_experts_and_of_bin_files(family: Callable, tmp_path: Path) -> None:
    folder = family("qwen3_moe").folder
    tensors = load_file(folder / "model.safetensors")
    for layer in {key.split(".")[2] for key in tensors if ".experts." in key}:
        prefix = f"model.layers.{layer}.mlp.experts."
        part = {x: [tensors.pop(f"{prefix}{e}.{x}_proj.weight") for e in range(8)] for x in ("gate", "up", "down")}
        tensors[f"{prefix}gate_up_proj"] = torch.cat((torch.stack(part["gate"]), torch.stack(part["up"])), dim=1)
        tensors[f"{prefix}down_proj"] = torch.stack(part["down"])
    for kind, save in (("model.safetensors", save_file), ("pytorch_model.bin", torch.save)):
        (tmp_path / kind).mkdir()
        (tmp_path / kind / "config.json").write_text((folder / "config.json").read_text())
        save(tensors, tmp_path / kind / kind)
        assert_parts_are_of_the_whole(tmp_path / kind, 4)


def test_a_stored_tied_head_is_checked_by_every_rank(family: Callable, tmp_path: Path) -> None:
    folder = family("llama-wide-bias-tied").folder
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, tmp_path / "model.safetensors")
    part_of(tmp_path, 1, 2)
    tensors["lm_head.weight"][100] += 1  # which is rank 1's
    save_file(tensors, tmp_path / "model.safetensors")
    part_of(tmp_path, 0, 2)
    with pytest.raises(UserError, match="lm_head.weight differs from the embedding"):
        part_of(tmp_path, 1, 2)


def test_heads_that_cannot_be_shared_are_named_with_the_world_size() -> None:
    smol = llama_config(n_head=9, n_query_groups=3, head_size=8, n_embd=72)
    with pytest.raises(UserError, match=r"n_query_groups 3 \(of n_head 9\).* a world size of 2: take one of 1, 3, 9$"):
        check_ranks(smol, 2)
    for config, sizes in ((smol, [1, 3, 9]), (neox_config(), [1, 2, 4]), (llama_config(n_query_groups=1), [1, 2, 4])):
        for ranks in range(1, 11):
            if ranks in sizes:
                check_ranks(config, ranks)
            else:
                with pytest.raises(UserError, match=f"n_query_groups .* world size of {ranks}: "):
                    check_ranks(config, ranks)
    with pytest.raises(UserError, match="intermediate_size 3 cannot be shared by a world size of 4"):
        check_ranks(llama_config(intermediate_size=3), 4)


def test_rows_of_q_k_and_v_are_those_of_the_ranks_heads() -> None:
    """By hand: 4 query heads, 2 key/value heads of 2 elements; q is rows 0 to 7, k 8 to 11, v 12 to 15."""
    config = Config(vocab_size=5, n_layer=1, n_embd=8, n_head=4, n_query_groups=2, head_size=2, intermediate_size=3)
    rows = [cuts_of(config, rank, 2)["h.0.attn.qkv.weight"].rows.tolist() for rank in range(2)]
    assert rows == [[0, 1, 2, 3, 8, 9, 12, 13], [4, 5, 6, 7, 10, 11, 14, 15]]
    rows = [cuts_of(config, rank, 4)["h.0.attn.qkv.weight"].rows.tolist() for rank in range(4)]
    assert rows[:2] == [[0, 1, 8, 9, 12, 13], [2, 3, 8, 9, 12, 13]]
    assert rows[2:] == [[4, 5, 10, 11, 14, 15], [6, 7, 10, 11, 14, 15]]
    cuts = cuts_of(config, 1, 2)
    assert cuts["h.0.mlp.fc.weight"].rows.tolist() == [1, 2, 4, 5]  # of gate 0 1 2 and up 3 4 5
    assert cuts["h.0.mlp.proj.weight"].columns == slice(1, 3) and cuts["h.0.attn.proj.weight"].columns == slice(4, 8)
    assert (cuts["wte.weight"].rows.tolist(), cuts["wte.weight"].size) == ([3, 4], 3)
