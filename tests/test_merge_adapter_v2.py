"""scripts/merge_adapter_v2.py: what can be folded, what is refused before weights are read, and what comes after."""

from pathlib import Path

import pytest
import torch
from test_adapter_v2 import trained
from test_finetune import checkpoint, cli, data  # noqa: F401 (fixtures)

from lit_gen.adapter_v2 import FILE, save_adapter_v2
from lit_gen.checkpoint import load_model
from lit_gen.export import save_lit
from lit_gen.model import GPT
from lit_gen.quantize import quantize_model
from scripts import convert_lit_checkpoint, merge_adapter_v2


@pytest.fixture
def base(checkpoint: Path) -> Path:  # noqa: F811
    return checkpoint


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_a_folded_checkpoint_computes_the_same(base: Path, tmp_path: Path, capsys, dtype: str | None) -> None:
    model, idx = trained(GPT.from_checkpoint(base), length=0), torch.tensor([[1, 2, 3, 4, 5]])
    save_adapter_v2(model, tmp_path / FILE)
    options = {"checkpoint_dir": base, "adapter_path": tmp_path, "out_dir": tmp_path / "out"}
    status, out, err = cli(capsys, merge_adapter_v2, **options, **({"dtype": dtype} if dtype else {}))
    assert (status, out) == (0, "")
    folded = load_model(tmp_path / "out", None, torch.device("cpu"))
    assert folded.wte.weight.dtype == (getattr(torch, dtype) if dtype else torch.float32)
    error = (folded(idx).float() - model(idx)).abs().max() / model(idx).abs().max()
    assert error < (0.05 if dtype else 1e-5)
    status, _, err = cli(capsys, convert_lit_checkpoint, checkpoint_dir=tmp_path / "out", out_dir=tmp_path / "hf")
    assert status == 2 and err.count("\n") == 1


def test_what_cannot_be_folded_is_refused_before_weights_are_read(
    base: Path, tmp_path: Path, capsys, monkeypatch
) -> None:
    model = GPT.from_checkpoint(base)
    save_adapter_v2(trained(model), tmp_path / FILE)
    save_lit(quantize_model(model, "int8"), tmp_path / "int8", base)
    monkeypatch.setattr(merge_adapter_v2, "load_model", lambda *_: pytest.fail("read the weights"))
    fine = {"checkpoint_dir": base, "adapter_path": tmp_path, "out_dir": tmp_path / "out"}
    for wrong, message in (
        (
            {},
            "folded into a checkpoint: generate with generate/adapter_v2.py, or train with --adapter.length 0",
        ),
        ({"adapter_path": tmp_path / "none"}, "there is no adapter at"),
        ({"checkpoint_dir": tmp_path / "int8"}, "has int8 weights, into which no adapter can be folded"),
    ):
        status, out, err = cli(capsys, merge_adapter_v2, **(fine | wrong))
        assert (status, out) == (2, "") and message in err and err.count("\n") == 1, err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["llama", "llama-wide-bias-tied", "gemma2"])
def test_a_folded_model_never_becomes_a_hugging_face_folder(family, name: str, tmp_path: Path, capsys) -> None:
    """transformers would leave out the biases that its config does not know, and say so in a warning at most."""
    _, model, folder = family(name)
    save_adapter_v2(trained(model, length=0), tmp_path / FILE)
    options = {"checkpoint_dir": folder, "adapter_path": tmp_path, "out_dir": tmp_path / "out"}
    assert cli(capsys, merge_adapter_v2, **options)[0] == 0
    status, _, err = cli(capsys, convert_lit_checkpoint, checkpoint_dir=tmp_path / "out", out_dir=tmp_path / "hf")
    assert status == 2 and "describes another model than its weights" in err and err.count("\n") == 1
    assert not list((tmp_path / "hf").glob("*.safetensors"))
