"""Loading and converting: strict, bit-equal, frugal, and clear about what is wrong with a checkpoint."""

import json
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import Family
from families import FAMILIES
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from lit_gen.checkpoint import load_config, load_model
from lit_gen.export import save_hf, save_lit
from lit_gen.model import GPT
from lit_gen.utils import UserError

Make = Callable[[str], Family]
CPU = torch.device("cpu")
IDX = torch.arange(24)[None] * 5 % 128


def rewritten(source: Path, folder: Path, change: Callable[[dict, dict], None]) -> Path:
    """A copy of a one-file Hugging Face folder whose config and tensors `change` has edited in place."""
    shutil.copytree(source, folder)
    config, tensors = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    change(config, tensors)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("name", FAMILIES)
def test_hf_to_lit_to_hf_is_bit_equal(family: Make, name: str, tmp_path: Path) -> None:
    hf, model, folder = family(name)
    save_lit(model, tmp_path / "lit", folder)
    lit = load_model(tmp_path / "lit", None, CPU)
    assert lit.config == model.config and torch.equal(lit(IDX), model(IDX))
    save_hf(lit, tmp_path / "hf", tmp_path / "lit")
    before, after = load_file(folder / "model.safetensors"), load_file(tmp_path / "hf/model.safetensors")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) and before[key].dtype == after[key].dtype for key in before)
    back = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    assert all(torch.equal(a, b) for a, b in zip(back.state_dict().values(), hf.state_dict().values(), strict=True))


def test_shards_and_single_files_and_bin_files_load_the_same(family: Make, tmp_path: Path) -> None:
    hf, model, _ = family("qwen2")
    hf.save_pretrained(tmp_path / "shards", max_shard_size="40KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 3
    shutil.copytree(tmp_path / "shards", tmp_path / "bin")
    tensors = {}
    for file in (tmp_path / "bin").glob("*.safetensors"):
        tensors |= load_file(file)
        file.unlink()
    (tmp_path / "bin/model.safetensors.index.json").unlink()
    for legacy in (False, True):  # the old format is no zip file and cannot be memory-mapped
        torch.save(tensors, tmp_path / "bin/pytorch_model.bin", _use_new_zipfile_serialization=not legacy)
        for folder in ("shards", "bin"):
            loaded = load_model(tmp_path / folder, None, CPU)
            assert torch.equal(loaded(IDX), model(IDX))


def test_export_in_shards_loads_in_transformers(family: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hf, model, folder = family("llama")
    monkeypatch.setattr("lit_gen.export.SHARD_BYTES", 100_000)
    save_hf(model, tmp_path, folder)
    assert len(list(tmp_path.glob("model-*-of-*.safetensors"))) > 3
    back = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert all(torch.equal(a, b) for a, b in zip(back.state_dict().values(), hf.state_dict().values(), strict=True))


def test_stacked_experts_load_as_single_ones(family: Make, tmp_path: Path) -> None:
    _, model, folder = family("qwen3_moe")

    def stack(_: dict, tensors: dict) -> None:
        for layer in {key.split(".")[2] for key in tensors if ".experts." in key}:
            prefix = f"model.layers.{layer}.mlp.experts."
            part = {x: [tensors.pop(f"{prefix}{e}.{x}_proj.weight") for e in range(8)] for x in ("gate", "up", "down")}
            tensors[f"{prefix}gate_up_proj"] = torch.cat((torch.stack(part["gate"]), torch.stack(part["up"])), dim=1)
            tensors[f"{prefix}down_proj"] = torch.stack(part["down"])

    assert torch.equal(load_model(rewritten(folder, tmp_path / "stacked", stack), None, CPU)(IDX), model(IDX))


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_the_text_model_of_a_vision_checkpoint_loads(family: Make, tmp_path: Path, prefix: str) -> None:
    _, model, folder = family("gemma3_text")

    def wrap(config: dict, tensors: dict) -> None:
        inner = {key: config.pop(key) for key in list(config) if key not in ("architectures", "dtype")}
        config |= {"model_type": "gemma3", "text_config": inner, "vision_config": {"hidden_size": 8}}
        for key in list(tensors):
            tensors[key.replace("model.", prefix, 1)] = tensors.pop(key)
        tensors["vision_tower.encoder.weight"] = torch.ones(2)
        tensors["multi_modal_projector.weight"] = torch.ones(2)

    assert torch.equal(load_model(rewritten(folder, tmp_path / "vision", wrap), None, CPU)(IDX), model(IDX))


def test_tied_head_is_the_embedding_itself(family: Make, tmp_path: Path) -> None:
    """torchtune#1122: files of tied models have no lm_head."""
    _, model, folder = family("llama-wide-bias-tied")
    assert "lm_head.weight" not in load_file(folder / "model.safetensors")
    assert model.lm_head.weight.data_ptr() == model.wte.weight.data_ptr()
    save_lit(model, tmp_path / "lit", folder)
    assert (tmp_path / "lit/lit_model.safetensors").stat().st_size < 1.05 * sum(p.nbytes for p in model.parameters())
    lit = load_model(tmp_path / "lit", torch.bfloat16, CPU)
    assert lit.lm_head.weight.data_ptr() == lit.wte.weight.data_ptr()


def test_head_of_an_untied_file_is_used_and_needed(family: Make, tmp_path: Path) -> None:
    _, model, folder = family("llama")
    assert not torch.equal(model.lm_head.weight, model.wte.weight)
    gone = rewritten(folder, tmp_path / "gone", lambda _, tensors: tensors.pop("lm_head.weight"))
    with pytest.raises(UserError, match=r"lacks lm_head\.weight"):
        load_model(gone, None, CPU)


def test_tied_head_that_is_stored_too_must_be_the_same(family: Make, tmp_path: Path) -> None:
    _, model, folder = family("llama-wide-bias-tied")
    both = lambda factor: lambda _, t: t.update({"lm_head.weight": t["model.embed_tokens.weight"] * factor})  # noqa: E731
    assert torch.equal(load_model(rewritten(folder, tmp_path / "same", both(1)), None, CPU)(IDX), model(IDX))
    with pytest.raises(UserError, match="lm_head.weight differs from the embedding"):
        load_model(rewritten(folder, tmp_path / "other", both(2)), None, CPU)


def test_rotary_layout_of_smollm2_and_neox_shapes(family: Make) -> None:
    """gpt-fast#190: 9 heads on 3 key/value heads, and q, k, v interleaved by head; text decays if either is misread."""
    from families import BASE, CONFIG_MAPPING

    for kind, sizes in (
        ("llama", {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 72}),
        ("gpt_neox", {}),
    ):
        torch.manual_seed(0)
        config = CONFIG_MAPPING[kind](**{**BASE, "num_key_value_heads": 4, **sizes}, initializer_range=0.2)
        hf = AutoModelForCausalLM.from_config(config).eval()
        import tempfile

        with tempfile.TemporaryDirectory() as folder:
            hf.save_pretrained(folder)
            model = GPT.from_checkpoint(folder)
        idx = torch.randint(0, 128, (1, 30))
        assert (model(idx) - hf(idx).logits).abs().max() <= 1e-4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_weights_are_cast_and_frozen(family: Make, dtype: torch.dtype) -> None:
    hf, _, folder = family("gemma")
    model = GPT.from_checkpoint(folder, dtype)
    assert not model.training and not any(p.requires_grad for p in model.parameters())
    assert torch.equal(model.wte.weight, hf.model.embed_tokens.weight.to(dtype))


def test_peak_memory_of_a_load_is_the_model_and_little_more(tmp_path: Path) -> None:
    """512 MB of float32 in shards, loaded in a process of its own; as bfloat16 the file is twice the model."""
    script = """
import resource, sys, torch
from pathlib import Path
from lit_gen.checkpoint import load_model
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
model = load_model(Path(sys.argv[1]), getattr(torch, sys.argv[2]), torch.device("cpu"))
used = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
print(used / sum(p.nbytes for p in model.parameters()))
"""
    from lit_gen.config import Config
    from lit_gen.hf_weights import export_tensors

    sizes = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 8, "num_attention_heads": 16}
    config = {"model_type": "llama", "vocab_size": 16384, "num_key_value_heads": 4, **sizes}
    model = GPT(Config.from_hf(config))
    for dtype, ratio in (("float32", 1.2), ("bfloat16", 1.2)):
        folder = tmp_path / dtype
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config))
        tensors = dict(export_tensors(dict(model.named_parameters()), model.config))
        save_file({name: t.detach().clone() for name, t in tensors.items()}, folder / "model.safetensors")
        command = [sys.executable, "-c", script, str(folder), dtype]
        out = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parents[1])
        assert float(out.stdout) <= ratio
        shutil.rmtree(folder)


class Payload:
    """Unpickled by a careless loader, it leaves a file behind."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple:
        return (self.trace.touch, ())


def broken(kind: str, folder: Path) -> str:
    """Damages a folder in place; returns a pattern that the error must match."""
    weights = folder / "model.safetensors"
    if kind == "truncated":
        weights.write_bytes(weights.read_bytes()[:-1000])
        return r"model\.safetensors \(\d+ bytes\) is not a whole safetensors file"
    if kind == "no weights":
        weights.unlink()
        return "no weights"
    if kind == "garbage":
        weights.write_bytes(b"<html>404</html>")
        return "not a whole safetensors file"
    if kind == "no config":
        (folder / "config.json").unlink()
        return "neither config.json nor"
    if kind == "config is no JSON":
        (folder / "config.json").write_text("{")
        return r"config\.json is not JSON"
    if kind == "pickle with code":
        weights.unlink()
        (folder / "pytorch_model.bin").write_bytes(pickle.dumps({"a": Payload(folder / "trace")}, protocol=2))
        return r"pytorch_model\.bin cannot be loaded as plain tensors"
    index = {"weight_map": {"lm_head.weight": "model-00002-of-00002.safetensors"}}
    if kind == "index outside":
        index["weight_map"]["lm_head.weight"] = "../other.safetensors"
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return r"lacks model-00002-of-00002\.safetensors" if kind == "missing shard" else "outside its folder"


KINDS = ["truncated", "no weights", "garbage", "no config", "config is no JSON", "pickle with code", "missing shard"]


@pytest.mark.parametrize("kind", [*KINDS, "index outside"])
def test_damaged_folder_is_one_clear_line(family: Make, tmp_path: Path, kind: str) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(family("llama").folder, folder)
    pattern = broken(kind, folder)
    with pytest.raises(UserError, match=pattern) as error:
        load_model(folder, None, CPU)
    assert "\n" not in str(error.value) and not (folder / "trace").exists()


def test_tensors_must_match_exactly(family: Make, tmp_path: Path) -> None:
    folder = family("llama").folder
    up = "model.layers.3.mlp.up_proj.weight"
    for name, change, pattern in (
        ("missing", lambda _, t: t.pop(up), r"lacks layers\.3\.mlp\.up_proj\.weight"),
        ("surplus", lambda _, t: t.update({"model.layers.4.extra": torch.ones(1)}), r"has model\.layers\.4\.extra"),
        (
            "shape",
            lambda _, t: t.update({up: t[up][:-1].clone()}),
            rf"{up} has shape \(95, 64\) in the file .* \(96, 64\)",
        ),
        (
            "integers",
            lambda _, t: t.update({"model.embed_tokens.weight": torch.ones(128, 64).char()}),
            "quantized format",
        ),
        ("vocabulary", lambda c, _: c.update(vocab_size=130), r"embed_tokens\.weight has shape \(128, 64\)"),
    ):
        with pytest.raises(UserError, match=pattern):
            load_model(rewritten(folder, tmp_path / name, change), None, CPU)


def test_missing_folder_names_what_is_there(tmp_path: Path) -> None:
    (tmp_path / "SmolLM2").mkdir()
    with pytest.raises(UserError, match="nowhere does not exist; .* there is: SmolLM2; --checkpoint_dir takes"):
        load_config(tmp_path / "nowhere")


def test_config_is_read_without_touching_the_weights(family: Make, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((family("llama").folder / "config.json").read_text())
    assert load_config(tmp_path) == family("llama").model.config
