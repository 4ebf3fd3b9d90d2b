"""generate/lora.py: base.py's rows of a model with a LoRA, several adapters in a batch, errors of one line."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from adapters import random_pairs, write_peft
from conftest import llama_config, randomized, run_script, save_byte_tokenizer

from generate import base, lora
from generate.base import generate
from lit_gen.export import save_lit
from lit_gen.lora import LIT_LORA, LoRAConfig, add_lora, load_lora, merge_lora, save_lora
from lit_gen.lora_rows import attach_loras
from lit_gen.model import GPT
from lit_gen.pack import pack_model
from lit_gen.quantize import quantize_model
from lit_gen.settings import Request
from lit_gen.tokenizer import Tokenizer

NAMES = ("all_linear_r4", "last_two_layers", "patterns", "qkvo_rslora_r16", "qv_r8")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A lit folder "model" with a byte-level tokenizer, an int8 one, and adapters "one", "two" (PEFT) and "ours"."""
    folder = tmp_path_factory.mktemp("lora")
    save_byte_tokenizer(folder / "source", 300, Path(__file__).read_text())
    model = randomized(llama_config(vocab_size=300))
    save_lit(model, folder / "model", folder / "source")
    shapes = {f"model.layers.{i}.self_attn.{x}_proj": (n, 64) for i in range(2) for x, n in (("q", 64), ("v", 32))}
    shapes |= {f"model.layers.{i}.mlp.down_proj": (64, 128) for i in range(2)}
    for seed, name in enumerate(("one", "two")):
        write_peft(folder / name, random_pairs(shapes, seed=seed, std=0.3), base_model_name_or_path="tiny/model")
    trained = add_lora(model, LoRAConfig(r=2, alpha=3, targets=("all",)))
    generator = torch.Generator().manual_seed(3)
    for name, parameter in trained.named_parameters():
        if name.endswith(".b.weight"):
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    (folder / "ours").mkdir()
    save_lora(trained, folder / "ours" / LIT_LORA)
    save_lit(quantize_model(randomized(llama_config(vocab_size=300)), "int8"), folder / "int8", folder / "source")
    return folder


def cli(capsys: pytest.CaptureFixture, *args: object, main=lora.main) -> tuple[int, str, str]:
    """Exit status, stdout and stderr of the script with these arguments."""
    return run_script(capsys, main, *args, repeated=("lora_path",))


def text_of(folder: Path, adapter: str | None, prompt: str) -> str:
    """What the model gives alone, with the adapter merged."""
    model, tokenizer = GPT.from_checkpoint(folder / "model"), Tokenizer(folder / "model")
    if adapter:
        merge_lora(model, load_lora(folder / adapter, model.config))
    (row,) = generate(model, [tokenizer.encode(prompt).tolist()], max_new_tokens=6)
    return tokenizer.decode(row.tokens)


def options(folder: Path, *more: object) -> list[object]:
    return ["--checkpoint_dir", folder / "model", "--max_new_tokens", 6, "--ignore_eos", "true", *more]


@pytest.mark.parametrize("merge", ["true", "false"])
@pytest.mark.parametrize("adapter", ["one", "ours"])
def test_texts_are_those_of_the_merged_model(adapter: str, merge: str, folder: Path, capsys) -> None:
    prompts = ["a b c", "def test_x():", "longer than the others, by some words"]
    expected = "".join(text_of(folder, adapter, prompt) + "\n" for prompt in prompts)
    for path in (folder / adapter, f"x={folder / adapter}"):
        where = ("--lora_path", path, "--merge", merge, "--prompts", json.dumps(prompts))
        status, out, err = cli(capsys, *options(folder, *where))
        assert (status, out) == (0, expected), err
    assert expected != "".join(text_of(folder, None, prompt) + "\n" for prompt in prompts)


@pytest.mark.parametrize("several", ["repeated", "json"])
def test_rows_of_a_file_name_their_adapters(several: str, folder: Path, tmp_path: Path, capsys) -> None:
    wanted = ["two", None, "one", "base", "ours", "two", "nix"]
    lines = [{"prompt": f"row {i} says", **({"lora": name} if name else {})} for i, name in enumerate(wanted)]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    paths = [f"{name}={folder / name}" for name in ("one", "two", "ours")]
    given = ["--lora_path", json.dumps(paths)] if several == "json" else [x for p in paths for x in ("--lora_path", p)]
    how = options(folder, *given, "--merge", "false", "--prompts", file)
    status, out, err = cli(capsys, *how, "--out", tmp_path / "out.jsonl")
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    names = [None if name == "base" else name for name in wanted[:-1]]
    texts = [text_of(folder, name, line["prompt"]) for name, line in zip(names, lines, strict=False)]
    assert status == 0 and [row["text"] for row in rows[:-1]] == texts, err
    assert len(set(texts)) == 6
    assert "line 7" in rows[-1]["error"] and "'nix', but there is base, one, two, ours" in rows[-1]["error"]
    status, out, err = cli(capsys, *how)  # strict
    assert (status, out) == (2, "") and "line 7" in err and "loaded" not in err


def test_rows_without_a_name_take_the_default(folder: Path, capsys) -> None:
    def out(*given: object) -> str:
        status, out, err = cli(capsys, *options(folder, *given, "--merge", "false", "--prompts", "a b c"))
        assert status == 0, err
        return out

    base_text, one, two = (text_of(folder, name, "a b c") + "\n" for name in (None, "one", "two"))
    both = ("--lora_path", f"one={folder / 'one'}", "--lora_path", f"two={folder / 'two'}")
    assert out(*both) == base_text
    assert out(*both, "--lora", "two") == two
    assert out("--lora_path", folder / "one", "--lora_path", f"two={folder / 'two'}") == one
    assert out("--lora_path", f"one={folder / 'one'}") == one
    assert out("--lora_path", f"one={folder / 'one'}", "--lora", "base") == base_text


def test_another_adapter_does_not_go_on_with_a_file(folder: Path, tmp_path: Path, capsys) -> None:
    where = ("--prompts", '["a", "b c"]', "--out", tmp_path / "out.jsonl")
    assert cli(capsys, *options(folder, *where, "--lora_path", folder / "one"))[0] == 0
    status, _, err = cli(capsys, *options(folder, *where, "--lora_path", folder / "one"))
    assert status == 0 and "2 done, 0 left" in err
    for other in (["--lora_path", folder / "two"], ["--lora_path", folder / "one", "--merge", "false"]):
        status, _, err = cli(capsys, *options(folder, *where, *other))
        assert status == 2 and "loras" in err, err
    status, _, err = cli(capsys, *options(folder, *where), main=base.main)
    assert status == 2 and "loras" in err, err


def test_quantised_models_take_a_lora_as_they_can(folder: Path, capsys) -> None:
    where = ("--lora_path", folder / "one", "--prompts", "a b c", "--max_new_tokens", "6", "--check_base", "false")
    status, _, err = cli(capsys, "--checkpoint_dir", folder / "int8", *where)
    assert status == 2 and "int8 weights, to which no LoRA can be added: give --merge false" in err
    status, beside, err = cli(capsys, "--checkpoint_dir", folder / "int8", *where, "--merge", "false")
    assert status == 0, err
    status, merged, err = cli(capsys, "--checkpoint_dir", folder / "model", *where, "--quantize", "int8")
    assert status == 0 and len(merged) > 1 and len(beside) > 1, err


def test_errors_are_one_line_and_come_before_the_model_is_loaded(folder: Path, tmp_path: Path, capsys) -> None:
    other = write_peft(tmp_path / "other", random_pairs({"model.layers.0.self_attn.q_proj": (48, 48)}))
    named = write_peft(tmp_path / "named", random_pairs({"model.layers.0.self_attn.q_proj": (64, 64)}))
    text = (named / "adapter_config.json").read_text().replace('"r"', '"base_model_name_or_path": "x/y-7B", "r"')
    (named / "adapter_config.json").write_text(text)
    dora = write_peft(tmp_path / "dora", {}, use_dora=True)
    one, two = f"a={folder / 'one'}", f"b={folder / 'two'}"
    for arguments, message in (
        ([], "lora_path"),
        (["--lora_path", tmp_path / "none"], "none does not exist"),
        (["--lora_path", f"x={tmp_path / 'none'}"], "none does not exist"),
        (["--lora_path", folder / "model"], "model is no LoRA: give a PEFT folder"),
        (["--lora_path", "x" * 300], "xx does not exist"),
        (["--lora_path", other], "is for another model"),
        (["--lora_path", named], "was made for y-7B"),
        (["--lora_path", dora], "use_dora"),
        (["--lora_path", one, "--lora_path", two], "2 adapters cannot all be in the weights: add --merge false"),
        (["--lora_path", one, "--lora_path", one, "--merge", "false"], "the adapter a is given twice"),
        (["--lora_path", f"base={folder / 'one'}", "--merge", "false"], '"base" is the model without'),
        (["--lora_path", "[]"], "names no adapter"),
        (["--lora_path", one, "--merge", "false", "--lora", "c"], "'c', but there is base, a"),
        (["--lora_path", one, "--lora", "3"], "'3'"),
        (["--lora_path", one, "--merge", "maybe"], "merge"),
    ):
        status, out, err = cli(capsys, *options(folder, *arguments))
        assert (status, out) == (2, "") and message in err, (arguments, err)
        assert err.startswith("error: ") and err.count("\n") == 1, err
    status, _, err = cli(capsys, *options(folder, "--lora_path", named, "--check_base", "false"))
    assert status == 2 and "lacks model.layers.1" in err  # checked all the same


def test_help_lists_every_option_of_base(capsys: pytest.CaptureFixture) -> None:
    (status, out, _), (_, of_base, _) = cli(capsys, "-h"), cli(capsys, "-h", main=base.main)
    wanted = {word.rstrip(",") for word in of_base.split() if word.startswith("--") and not word.endswith("+")}
    assert status == 0 and len(wanted) > 25 and wanted <= {word.rstrip(",") for word in out.split()}
    assert all(f"--{own} " in out for own in ("lora_path", "merge", "check_base", "lora"))
    assert "--adapters" not in out and "--loras" not in out + of_base


def test_script_runs_from_another_folder_without_being_installed(folder: Path, tmp_path: Path) -> None:
    command = [sys.executable, lora.__file__, *options(folder, "--merge", "false", "--prompts", "a b c")]
    for name in ("one", "two"):
        command += ["--lora_path", f"{name}={folder / name}"]
    done = subprocess.run(
        [*map(str, command), "--lora=two"], capture_output=True, text=True, cwd=tmp_path, env={"PATH": ""}
    )
    assert done.returncode == 0 and done.stdout == text_of(folder, "two", "a b c") + "\n", done.stderr


# Goldens (float64, weights merged)


def cases(folder: Path) -> list[tuple[list[int], list[int]]]:
    prompts = json.loads((folder / "expected_greedy.json").read_text())["prompts"]
    return [(case["ids"], case["greedy"]) for case in prompts]


def tokens(model: GPT, prompts: list, **settings: object) -> list[list[int]]:
    rows = generate(model, prompts, **{"max_new_tokens": 48, **settings})
    return [row.tokens for row in sorted(rows, key=lambda row: row.index)]


@pytest.mark.parametrize("packed", [True, False])
def test_stories_adapters_merged_unmerged_alone_and_mixed(packed: bool, stories: Path) -> None:
    loras, mixed = {}, [(ids, None, greedy[:48]) for ids, greedy in cases(stories)]
    base_model = GPT.from_checkpoint(stories)
    for name in NAMES:
        folder = stories.with_name("stories260K-lora") / name
        loras[name] = load_lora(folder, base_model.config, stories)
        merged = merge_lora(GPT.from_checkpoint(stories), loras[name])
        own = cases(folder)
        beside = attach_loras(GPT.from_checkpoint(stories), {name: loras[name]})
        for model in (merged, beside):
            pack_model(model) if packed else None
            assert len(own) == 8 and tokens(model, [ids for ids, _ in own]) == [greedy for _, greedy in own], name
        mixed += [(ids, name, greedy) for ids, greedy in own]
    mixed = [mixed[i] for i in torch.randperm(len(mixed), generator=torch.Generator().manual_seed(0))]
    model = attach_loras(GPT.from_checkpoint(stories), loras)
    pack_model(model) if packed else None
    requests = [Request(ids, {"lora": name} if name else None) for ids, name, _ in mixed]
    expected = [greedy for _, _, greedy in mixed]
    for how in ({}, {"prefill_budget": 7, "max_batch_size": 9}) if packed else ({"padding_side": "left"},):
        assert tokens(model, requests, **how) == expected, how
    alone = [tokens(model, [request], max_new_tokens=12)[0] for request in requests[::7]]
    assert alone == [greedy[:12] for greedy in expected[::7]]
