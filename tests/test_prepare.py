"""The options that change how a model is made ready reach it, and what cannot be had is refused."""

import json
from pathlib import Path

import pytest
import torch
from conftest import llama_config, randomized
from test_generate_base import checkpoint, cli  # noqa: F401 (a fixture)

from lit_gen.fabric import setup_fabric
from lit_gen.model import GPT
from lit_gen.pack import weight_bytes
from lit_gen.prepare import prepare_model
from lit_gen.quantize import model_format
from lit_gen.utils import UserError


def make(dtype: torch.dtype, device: torch.device) -> GPT:
    return randomized(llama_config()).to(device, dtype)


@pytest.mark.parametrize("format", ["int8", "int4"])
def test_quantize_makes_the_weights_smaller(format: str) -> None:
    fabric = setup_fabric("bf16-true")
    plain, small = prepare_model(fabric, make), prepare_model(fabric, make, format)
    embedding = plain.wte.weight.nbytes
    assert weight_bytes(small) - embedding < 0.8 * (weight_bytes(plain) - embedding)
    assert model_format(prepare_model(fabric, make)) is None


def test_the_script_generates_with_quantised_weights(checkpoint: Path, capsys, tmp_path: Path) -> None:  # noqa: F811
    """Its numbers tell what a step reads."""
    read = {}
    for format in (None, "int8"):
        more = [] if format is None else ["--quantize", format]
        where = ["--checkpoint_dir", str(checkpoint), "--stats_json", str(tmp_path / "stats.json")]
        status, _, err = cli(capsys, *where, "--prompts", '["a", "bcd"]', *more)
        assert status == 0, err
        stats = json.loads((tmp_path / "stats.json").read_text())
        read[format] = stats["bytes_read"] / stats["steps"]
    assert read["int8"] < 0.6 * read[None]


def test_the_proof_is_made_when_it_is_asked_for(checkpoint: Path, capsys, monkeypatch) -> None:  # noqa: F811
    monkeypatch.setattr("lit_gen.invariance._holds", lambda layer, model: False)
    where = ["--checkpoint_dir", str(checkpoint), "--prompts", '["a"]', "--max_new_tokens", "2"]
    status, out, err = cli(capsys, *where, "--batch_invariant", "true")
    assert (status, out) == (2, "") and "rows would not get the same bits" in err.splitlines()[-1]
    assert cli(capsys, *where, "--batch_invariant", "false")[0] == 0


def test_mixed_precision_proves_nothing_and_is_refused_before_the_model_is_made() -> None:
    with pytest.raises(UserError, match="batch_invariant true"):
        prepare_model(setup_fabric("bf16-mixed"), lambda *_: pytest.fail("made the model"), batch_invariant=True)
