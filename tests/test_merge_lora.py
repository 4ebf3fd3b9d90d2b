"""scripts/merge_lora.py: a checkpoint that base.py loads and that writes what lora.py writes."""

import json
from pathlib import Path

import pytest
import torch
from adapters import random_pairs, write_peft
from conftest import llama_config, randomized, run_script, save_byte_tokenizer

from generate import base, lora
from lit_gen.export import save_lit
from lit_gen.lora import load_lora, merge_lora
from lit_gen.model import GPT
from lit_gen.quantize import quantize_model
from lit_gen.tokenizer import Tokenizer
from scripts import merge_lora as script


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("merge")
    save_byte_tokenizer(folder / "source", 300, Path(__file__).read_text())
    save_lit(randomized(llama_config(vocab_size=300, tie_embeddings=True)), folder / "model", folder / "source")
    shapes = {f"model.layers.{i}.self_attn.{x}_proj": (n, 64) for i in range(2) for x, n in (("q", 64), ("v", 32))}
    write_peft(folder / "adapter", random_pairs(shapes, std=0.3))
    return folder


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_the_folder_gives_what_the_adapter_gives(dtype: str | None, folder: Path, tmp_path: Path, capsys) -> None:
    source = ("--checkpoint_dir", folder / "model", "--lora_path", folder / "adapter")
    kind = () if dtype is None else ("--dtype", dtype)
    status, out, err = run_script(capsys, script.main, *source, "--out_dir", tmp_path / "out", *kind)
    assert (status, out) == (0, "") and "with" in err, err
    how = ("--prompts", '["a b c", "x"]', "--max_new_tokens", "8", "--ignore_eos", "true")
    how += ("--precision", "32-true" if dtype is None else "bf16-true")
    _, merged, _ = run_script(capsys, base.main, "--checkpoint_dir", tmp_path / "out", *how)
    _, expected, _ = run_script(capsys, lora.main, *source, *how)
    _, plain, _ = run_script(capsys, base.main, "--checkpoint_dir", folder / "model", *how)
    assert merged == expected != plain
    model = GPT.from_checkpoint(tmp_path / "out")
    assert model.wte.weight.dtype == (torch.float32 if dtype is None else torch.bfloat16)
    assert model.lm_head.weight is model.wte.weight and Tokenizer(tmp_path / "out").encode("a b c") is not None


def test_a_folder_remembers_what_was_merged(folder: Path, tmp_path: Path, capsys) -> None:
    for source, out in ((folder / "model", "once"), (tmp_path / "once", "twice")):
        where = ("--checkpoint_dir", source, "--out_dir", tmp_path / out)
        assert run_script(capsys, script.main, *where, "--lora_path", folder / "adapter")[0] == 0
    once, twice = (GPT.from_checkpoint(tmp_path / name) for name in ("once", "twice"))
    assert all(map(torch.equal, once.parameters(), twice.parameters()))
    original = GPT.from_checkpoint(folder / "model")
    assert not torch.equal(original.h[0].attn.qkv.weight, once.h[0].attn.qkv.weight)
    assert torch.equal(original.h[0].attn.proj.weight, once.h[0].attn.proj.weight)
    merge_lora(original, load_lora(folder / "adapter", original.config))
    assert torch.equal(original.h[0].attn.qkv.weight, once.h[0].attn.qkv.weight)


def test_errors_are_one_line_and_leave_no_folder(folder: Path, tmp_path: Path, capsys) -> None:
    quantised = quantize_model(GPT.from_checkpoint(folder / "model"), "int8")
    save_lit(quantised, tmp_path / "int8", folder / "model")
    head = write_peft(tmp_path / "head", random_pairs({"lm_head": (300, 64)}))
    foreign = write_peft(tmp_path / "foreign", random_pairs({"model.layers.9.self_attn.q_proj": (64, 64)}))
    named = write_peft(
        tmp_path / "named", random_pairs({"model.layers.0.self_attn.q_proj": (64, 64)}), base_model_name_or_path="a/b7"
    )
    for source, adapter, message in (
        (tmp_path / "int8", folder / "adapter", "int8 weights, to which no LoRA can be added"),
        (folder / "model", head, "the head, whose weight is that of the embedding"),
        (folder / "model", foreign, "model.layers.9.self_attn.q_proj"),
        (folder / "model", named, "was made for b7"),
        (folder / "model", tmp_path, "is no LoRA"),
    ):
        where = ("--checkpoint_dir", source, "--lora_path", adapter, "--out_dir", tmp_path / "out")
        status, out, err = run_script(capsys, script.main, *where)
        assert (status, out) == (2, "") and message in err and err.count("\n") == 1, err
        assert not (tmp_path / "out").exists()
    arguments = ("--checkpoint_dir", folder / "model", "--lora_path", folder / "adapter", "--out_dir", folder / "model")
    status, _, err = run_script(capsys, script.main, *arguments)
    assert status == 2 and "give another one" in err


def test_stories_merged_to_a_folder_give_the_expected_tokens(stories: Path, tmp_path: Path, capsys) -> None:
    for name in ("patterns", "qkvo_rslora_r16"):
        adapter = stories.with_name("stories260K-lora") / name
        where = ("--checkpoint_dir", stories, "--lora_path", adapter, "--out_dir", tmp_path / name)
        assert run_script(capsys, script.main, *where)[0] == 0
        cases = json.loads((adapter / "expected_greedy.json").read_text())["prompts"]
        rows = base.generate(GPT.from_checkpoint(tmp_path / name), [case["ids"] for case in cases], max_new_tokens=48)
        assert {row.index: row.tokens for row in rows} == dict(enumerate(case["greedy"] for case in cases))
