"""generate/adapter.py and generate/adapter_v2.py: base.py's options and answers, with the adapter's weights."""

import copy
import json
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import test_adapter
import test_adapter_v2
from conftest import llama_config, randomized, run_script, save_byte_tokenizer
from test_generate_base import tokens

from generate import adapter, adapter_v2, base
from lit_gen.adapter import FILE as V1
from lit_gen.adapter import save_adapter
from lit_gen.adapter_v2 import FILE as V2
from lit_gen.adapter_v2 import fold_adapter_v2, save_adapter_v2
from lit_gen.export import save_lit
from lit_gen.model import GPT
from lit_gen.tokenizer import Tokenizer

SCRIPTS = {
    adapter: (V1, test_adapter.trained, save_adapter),
    adapter_v2: (V2, test_adapter_v2.trained, save_adapter_v2),
}
PROMPTS = ["a b c", "", "def test_x():", "import torch"]
both = pytest.mark.parametrize("script", SCRIPTS, ids=["adapter", "adapter_v2"])


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A lit folder with a random model and a byte-level tokenizer made here."""
    folder = tmp_path_factory.mktemp("lit")
    save_byte_tokenizer(folder / "source", 300, Path(__file__).read_text())
    save_lit(randomized(llama_config(vocab_size=300)), folder / "model", folder / "source")
    return folder / "model"


def cli(capsys: pytest.CaptureFixture, script: ModuleType, *args: object) -> tuple[int, str, str]:
    """Exit status, stdout and stderr of a script with these arguments."""
    return run_script(capsys, script.main, *args)


def train(script: ModuleType, base_folder: Path, folder: Path, **how: int) -> GPT:
    """A model with a random adapter, which is then in the folder."""
    file, make, save = SCRIPTS[script]
    folder.mkdir(exist_ok=True)
    model = make(GPT.from_checkpoint(base_folder), **how)
    save(model, folder / file)
    return model


@both
def test_every_option_of_base_is_there_in_a_short_script(capsys: pytest.CaptureFixture, script: ModuleType) -> None:
    options = [set(re.findall(r"^  (?:-h, )?(--\w+)", cli(capsys, s, "-h")[1], re.MULTILINE)) for s in (base, script)]
    assert len(options[0]) > 25 and options[1] == options[0] | {"--adapter_path"}
    assert len(Path(script.__file__).read_text().splitlines()) < 100


@both
@pytest.mark.parametrize("precision", ["32-true", "bf16-true", "bf16-mixed"])
def test_texts_are_those_of_the_model_with_its_adapter(
    checkpoint: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture,
    script: ModuleType,
    precision: str,
) -> None:
    model, tokenizer = train(script, checkpoint, tmp_path), Tokenizer(checkpoint)
    args = ["--checkpoint_dir", checkpoint, "--prompts", json.dumps(PROMPTS), "--max_new_tokens", 5]
    args += ["--ignore_eos", "true", "--precision", precision]
    plain = cli(capsys, base, *args)[1]
    status, out, err = cli(capsys, script, *args, "--adapter_path", tmp_path / SCRIPTS[script][0])
    assert status == 0 and out and out != plain, err
    if precision == "32-true":
        rows = tokens(model, [tokenizer.encode(p).tolist() for p in PROMPTS], max_new_tokens=5)
        assert out == "".join(tokenizer.decode(row) + "\n" for row in rows)
    alone = ""
    for prompt in PROMPTS if precision != "bf16-mixed" else []:
        args[3] = json.dumps([prompt])
        alone += cli(capsys, script, *args, "--adapter_path", tmp_path)[1]
    assert precision == "bf16-mixed" or alone == out


@both
@pytest.mark.parametrize("quantize", ["int8", "int4"])
def test_a_quantised_base_takes_an_adapter(
    checkpoint: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture,
    script: ModuleType,
    quantize: str,
) -> None:
    train(script, checkpoint, tmp_path)
    args = ["--checkpoint_dir", checkpoint, "--adapter_path", tmp_path, "--quantize", quantize, "--max_new_tokens", 4]
    status, out, err = cli(capsys, script, *args)
    assert status == 0 and out, err


@both
def test_a_job_goes_on_with_the_same_adapter_only(
    checkpoint: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture,
    script: ModuleType,
) -> None:
    train(script, checkpoint, tmp_path)
    out = tmp_path / "out.jsonl"
    args = ["--checkpoint_dir", checkpoint, "--prompts", json.dumps(PROMPTS), "--out", out, "--max_new_tokens", 4]
    assert cli(capsys, script, *args, "--adapter_path", tmp_path)[0] == 0
    rows = out.read_text()
    status, _, err = cli(capsys, script, *args, "--adapter_path", tmp_path)
    assert status == 0 and "resumed: 4 done, 0 left" in err
    status, _, err = cli(capsys, base, *args)
    assert status == 2 and "adapter" in err and err.count("\n") == 1
    train(script, checkpoint, tmp_path, seed=1)
    status, _, err = cli(capsys, script, *args, "--adapter_path", tmp_path)
    assert status == 2 and SCRIPTS[script][0] in err and err.count("\n") == 1
    assert out.read_text() == rows


@both
def test_a_wrong_adapter_is_one_line_before_weights_are_read(
    checkpoint: Path,
    tmp_path: Path,
    capsys,
    monkeypatch,
    script: ModuleType,
) -> None:
    file, make, save = SCRIPTS[script]
    for name, model in (("other", randomized(llama_config(vocab_size=301))), ("fine", GPT.from_checkpoint(checkpoint))):
        (tmp_path / name).mkdir()
        save(make(model), tmp_path / name / file)
    cut = tmp_path / "cut.safetensors"
    cut.write_bytes((tmp_path / "fine" / file).read_bytes()[:-1])
    other = [path for path in SCRIPTS if path is not script][0]
    train(other, checkpoint, tmp_path / "fine")
    monkeypatch.setattr(GPT, "from_checkpoint", lambda *_: pytest.fail("read the weights"))
    for path, message in (
        (tmp_path, "there is no adapter at"),
        (tmp_path / "other", "vocab_size is 301 there, 300 here"),
        (cut, "not a whole safetensors file"),
        (tmp_path / "fine" / SCRIPTS[other][0], "no file of method"),
        (checkpoint / "lit_model.safetensors", "no file of method"),
    ):
        status, out, err = cli(capsys, script, "--checkpoint_dir", checkpoint, "--adapter_path", path)
        assert (status, out) == (2, "") and message in err and err.count("\n") == 1, err
    status, out, err = cli(capsys, script, "--checkpoint_dir", checkpoint)
    assert status == 2 and "adapter_path" in err and err.count("\n") == 1


def test_a_folded_adapter_gives_base_py_the_same_texts(checkpoint: Path, tmp_path: Path, capsys) -> None:
    model = train(adapter_v2, checkpoint, tmp_path, length=0)
    args = ["--prompts", json.dumps(PROMPTS), "--max_new_tokens", 8, "--ignore_eos", "true"]
    expected = cli(capsys, adapter_v2, *args, "--checkpoint_dir", checkpoint, "--adapter_path", tmp_path)[1]
    save_lit(fold_adapter_v2(copy.deepcopy(model)), tmp_path / "folded", checkpoint)
    status, out, err = cli(capsys, base, *args, "--checkpoint_dir", tmp_path / "folded")
    assert status == 0 and out == expected, err


@both
def test_script_runs_from_another_folder_without_being_installed(
    checkpoint: Path,
    tmp_path: Path,
    script: ModuleType,
) -> None:
    train(script, checkpoint, tmp_path)
    command = [sys.executable, script.__file__, "--checkpoint_dir", checkpoint, "--adapter_path", tmp_path]
    command += ["--max_new_tokens", "3"]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, cwd=tmp_path, env={"PATH": ""})
    assert done.returncode == 0 and done.stdout, done.stderr
