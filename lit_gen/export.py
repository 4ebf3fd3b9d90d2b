"""Writing checkpoints: lit folders, and Hugging Face folders that equal bit for bit what they were converted from."""

import json
import shutil
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from lit_gen.checkpoint import LIT_CONFIG, LIT_MODEL, MERGED, gguf_file
from lit_gen.config import Config
from lit_gen.gguf import GGUFCheckpoint
from lit_gen.hf_weights import export_tensors
from lit_gen.model import GPT
from lit_gen.quantize import metadata_of, model_format, stored_tensors
from lit_gen.tokenizer_files import unpack_gguf_tokenizer
from lit_gen.utils import UserError

KEPT = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")
KEPT += ("added_tokens.json", "vocab.json", "merges.txt")
SHARD_BYTES = 2 * 2**30


def save_lit(model: GPT, folder: Path, source: Path) -> None:
    """Writes a lit folder; a tied head is not stored twice. Tokenizer and config files come along from `source`."""
    copy_files(source, folder)
    tensors = {name: tensor.contiguous() for name, tensor in stored_tensors(model).items()}
    merged = {MERGED: " ".join(sorted(model.merged))} if model.merged else {}
    save_file(tensors, folder / LIT_MODEL, metadata_of(model) | merged)
    model.config.to_json(folder / LIT_CONFIG)


def save_hf(model: GPT, folder: Path, source: Path) -> None:
    """Writes a Hugging Face folder in shards of SHARD_BYTES, with the config.json that `source` was made from."""
    if format := model_format(model):
        raise UserError(f"{source} has {format} weights, which cannot be converted back; convert what it was made from")
    copy_files(source, folder)
    if not (folder / "config.json").is_file():
        raise UserError(f"{source} has no config.json to give the Hugging Face folder; put the original one there")
    if Config.from_hf(folder) != model.config:  # as of an adapter v2 that was folded in: biases would be lost unnoticed
        raise UserError(f"{source}/config.json describes another model than its weights: it can only be a lit folder")
    shard: dict[str, Tensor] = {}
    shards = [shard]
    for name, tensor in export_tensors(dict(model.named_parameters()), model.config):
        if shard and sum(t.nbytes for t in shard.values()) + tensor.nbytes > SHARD_BYTES:
            shards.append(shard := {})
        shard[name] = tensor
    if len(shards) == 1:
        names = ["model.safetensors"]
    else:
        names = [f"model-{i:05}-of-{len(shards):05}.safetensors" for i in range(1, len(shards) + 1)]
        total = sum(t.nbytes for shard in shards for t in shard.values())
        weight_map = {tensor: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
    for name, shard in zip(names, shards, strict=True):
        # views of one fused parameter share memory, which the format refuses: a copy of one shard at a time
        save_file({key: t.clone() for key, t in shard.items()}, folder / name, metadata={"format": "pt"})


def copy_files(source: Path, folder: Path) -> None:
    """Copies what is no weight: configs, tokenizer, chat template. A .gguf file is unpacked into its config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    if source.is_dir():
        if folder.resolve() == source.resolve():
            raise UserError(f"{folder} is the folder to convert; give another one")
        for file in source.iterdir():
            if file.name in KEPT or file.suffix in (".jinja", ".model"):
                shutil.copy(file, folder)
    if not (source / "config.json").is_file() and (gguf := gguf_file(source)):
        (folder / "config.json").write_text(json.dumps(GGUFCheckpoint(gguf).config, indent=2) + "\n")
        unpack_gguf_tokenizer(gguf, folder)
