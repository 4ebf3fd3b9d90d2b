"""generate/sequentially.py: base.py's texts and files, with the layers on several devices; errors of one line."""

import json
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import test_adapter
import test_adapter_v2
from adapters import random_pairs, write_peft
from conftest import llama_config, randomized, run_script, save_byte_tokenizer

from generate import adapter, adapter_v2, base, lora, sequentially
from lit_gen.adapter import FILE as V1
from lit_gen.adapter import save_adapter
from lit_gen.adapter_v2 import FILE as V2
from lit_gen.adapter_v2 import save_adapter_v2
from lit_gen.export import save_lit
from lit_gen.kernels import load_kernels
from lit_gen.model import GPT
from lit_gen.quantize import quantize_model

PROMPTS = json.dumps(["a b c", "", "def test_x():", "longer than the others, by some words"])
TWO, THREE = '["cpu", "cpu"]', '["cpu","cpu","cpu"]'


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A lit folder "model" of 5 layers with a byte-level tokenizer, an int8 one, a LoRA and both kinds of adapters."""
    folder = tmp_path_factory.mktemp("sequentially")
    save_byte_tokenizer(folder / "source", 300, Path(__file__).read_text())
    config = llama_config(vocab_size=300, n_layer=5, tie_embeddings=True)
    save_lit(randomized(config), folder / "model", folder / "source")
    save_lit(quantize_model(randomized(config), "int8"), folder / "int8", folder / "source")
    shapes = {f"model.layers.{i}.self_attn.{x}_proj": (n, 64) for i in range(5) for x, n in (("q", 64), ("v", 32))}
    write_peft(folder / "lora", random_pairs(shapes, std=0.3))
    for name, module, write in ((V1, test_adapter, save_adapter), (V2, test_adapter_v2, save_adapter_v2)):
        (folder / name).mkdir()
        write(module.trained(GPT.from_checkpoint(folder / "model")), folder / name / name)
    return folder


def cli(capsys: pytest.CaptureFixture, script: ModuleType, folder: Path, *args: object) -> tuple[int, str, str]:
    """Exit status, stdout and stderr of a script with these arguments."""
    args = ["--max_new_tokens", 6, "--ignore_eos", "true", *args]
    args = args if "--checkpoint_dir" in args else ["--checkpoint_dir", folder / "model", *args]
    args = args if "--prompts" in args else [*args, "--prompts", PROMPTS]
    return run_script(capsys, script.main, *args, **({"repeated": ("lora_path",)} if script is lora else {}))


@pytest.mark.parametrize("devices", [TWO, THREE, "auto"])
def test_texts_are_those_of_base(devices: str, folder: Path, capsys: pytest.CaptureFixture) -> None:
    status, expected, err = cli(capsys, base, folder, "--precision", "bf16-true")
    assert status == 0 and len(expected) > 20, err
    status, out, err = cli(capsys, sequentially, folder, "--precision", "bf16-true", "--devices", devices)
    assert (status, out) == (0, expected), err
    split = {
        TWO: "layers: 3 on cpu, 2 on cpu",
        THREE: "layers: 2 on cpu, 2 on cpu, 1 on cpu",
        "auto": "layers: 5 on cpu",
    }
    assert split[devices] in err.splitlines() or devices == "auto"  # there may be GPUs


@pytest.mark.parametrize(
    "options",
    [
        ("--quantize", "int4"),
        ("--speculate", 3, "--group_rows", 1),
        ("--max_batch_size", 2, "--temperature", 0.8, "--top_p", 0.9, "--num_samples", 2, "--seed", 5),
        ("--padding_side", "left", "--batch_invariant", "true", "--group_rows", 2),
        ("--precision", "bf16-mixed"),
    ],
)
def test_options_of_base_do_what_they_do_there(options: tuple, folder: Path, capsys, monkeypatch) -> None:
    groups, whole = [], GPT._in_groups
    monkeypatch.setattr(GPT, "_in_groups", lambda self, idx, *rest: groups.append(len(idx)) or whole(self, idx, *rest))
    status, expected, err = cli(capsys, base, folder, *(options if "--group_rows" not in options else options[:-2]))
    assert status == 0, err
    assert groups == []
    status, out, err = cli(capsys, sequentially, folder, "--devices", THREE, *options)
    assert (status, out) == (0, expected), err
    assert bool(groups) == ("--group_rows" in options)


def test_without_kernels(folder: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIT_GEN_KERNELS", "0")
    load_kernels.cache_clear()
    try:
        expected = cli(capsys, base, folder)[1]
        status, out, err = cli(capsys, sequentially, folder, "--devices", THREE)
        assert (status, out) == (0, expected), err
    finally:
        load_kernels.cache_clear()


@pytest.mark.parametrize(
    ("script", "option", "name"),
    [(lora, "--lora_path", "lora"), (adapter, "--adapter_path", V1), (adapter_v2, "--adapter_path", V2)],
)
def test_lora_and_adapters(script: ModuleType, option: str, name: str, folder: Path, capsys) -> None:
    status, expected, err = cli(capsys, script, folder, option, folder / name)
    assert status == 0 and expected != cli(capsys, base, folder)[1], err
    path = folder / name if name == "lora" else folder / name / name
    for place in (folder / name, path):
        status, out, err = cli(capsys, sequentially, folder, "--devices", TWO, option, place)
        assert (status, out) == (0, expected), err


def test_a_file_is_the_same_and_is_gone_on_with(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    lines = [{"prompt": f"row {i} says", "max_new_tokens": 2 + i % 7, "temperature": i % 2} for i in range(12)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    how = ("--prompts", tmp_path / "rows.jsonl", "--max_batch_size", 3)
    files = [tmp_path / name for name in ("base.jsonl", "spread.jsonl")]
    assert cli(capsys, base, folder, *how, "--out", files[0])[0] == 0
    spread = (*how, "--devices", TWO, "--group_rows", 1, "--out", files[1])
    assert cli(capsys, sequentially, folder, *spread)[0] == 0
    assert files[1].read_bytes() == files[0].read_bytes()
    rows = files[1].read_bytes().splitlines(keepends=True)
    job = json.loads((side := tmp_path / "spread.jsonl.job.json").read_text())
    files[1].write_bytes(b"".join(rows[:5]) + rows[5][:9])  # killed while it wrote
    side.write_text(json.dumps(job | {"finished": False, "lines": 0}))
    status, _, err = cli(capsys, sequentially, folder, *spread)
    assert status == 0 and "resumed: 5 done, 7 left" in err and files[1].read_bytes() == files[0].read_bytes()
    status, _, err = cli(capsys, sequentially, folder, *spread, "--lora_path", folder / "lora")
    assert status == 2 and "loras" in err


def test_errors_are_one_line_and_come_before_the_model_is_loaded(folder: Path, capsys: pytest.CaptureFixture) -> None:
    both = ("--lora_path", folder / "lora", "--adapter_path", folder / V1)
    for arguments, message in (
        (("--devices", json.dumps(["cpu"] * 6)), "6 devices cannot share 5 layers: give from 1 to 5 devices"),
        (("--devices", 0), "--devices is 0: give a number of GPUs, auto, or a list"),
        (("--devices", "gpu"), "--devices is 'gpu'"),
        (("--devices", '["cpu", "cuda:99"]'), "--devices names 'cuda:99', but there is cpu"),
        (("--devices", 99), "--devices needs 99 GPUs, but there are"),
        (("--devices", TWO, "--group_rows", 0), "group_rows is 0"),
        (("--devices", TWO, "--compile", "true"), "--compile goes with one device, not with 2: leave it out"),
        (
            ("--devices", TWO, "--quantize", "nf4"),
            "--quantize nf4 is for generate/base.py, on one device: take int8 or int4",
        ),
        (("--devices", TWO, *both), "--lora_path and --adapter_path do not go together: give one"),
        (("--devices", TWO, "--lora_path", folder / "none"), "does not exist"),
        (("--devices", TWO, "--adapter_path", folder / "none"), "there is no adapter at"),
        (("--checkpoint_dir", folder / "int8", "--lora_path", folder / "lora"), "has int8 weights, to which no LoRA"),
    ):
        status, out, err = cli(capsys, sequentially, folder, *arguments)
        assert (status, out) == (2, "") and message in err, (arguments, err)
        assert err.startswith("error: ") and err.count("\n") == 1, err


def test_help_lists_every_option_of_base_in_a_short_script(capsys: pytest.CaptureFixture) -> None:
    helps = [run_script(capsys, script.main, "-h")[1] for script in (base, sequentially)]
    options = [set(re.findall(r"^  (?:-h, )?(--\w+)", text, re.MULTILINE)) for text in helps]
    own = {"--devices", "--group_rows", "--lora_path", "--adapter_path", "--check_base"}
    assert len(options[0]) > 25 and options[1] == options[0] | own
    assert len(Path(sequentially.__file__).read_text().splitlines()) < 120


def test_script_runs_from_another_folder_without_being_installed(folder: Path, tmp_path: Path, capsys) -> None:
    command = [sys.executable, sequentially.__file__, "--devices", TWO, "--checkpoint_dir", folder / "model"]
    command += ["--prompts", "a b c", "--max_new_tokens", 6, "--ignore_eos", "true"]
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, cwd=tmp_path, env={"PATH": ""})
    expected = cli(capsys, base, folder, "--prompts", "a b c")[1]
    assert done.returncode == 0 and done.stdout == expected, done.stderr
