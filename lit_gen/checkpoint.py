"""Checkpoints: a Hugging Face folder as downloaded, a lit folder, or a GGUF file -> a model, strictly and frugally.

Tensors are read a few rows at a time, straight into their place in our fused parameters, so that a load needs little
more memory than the model. Nothing is left random: a missing, surplus, truncated or misshapen tensor is an error.
"""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from lit_gen.config import Config
from lit_gen.gguf import GGUFCheckpoint
from lit_gen.hf_weights import Placement, canonical, export_tensors, placements, ungroup
from lit_gen.model import GPT
from lit_gen.shards import BinReader, Reader, SafetensorsReader
from lit_gen.tokenizer_files import unpack_gguf_tokenizer
from lit_gen.utils import UserError, read_json

LIT_CONFIG, LIT_MODEL = "lit_config.json", "lit_model.safetensors"
KEPT = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")
KEPT += ("added_tokens.json", "vocab.json", "merges.txt")
SHARD_BYTES = 2 * 2**30
CHUNK_BYTES = 8 * 2**20  # read at a time


def gguf_file(path: Path) -> Path | None:
    """The GGUF file that `path` is, or that is the only model in that folder."""
    if path.is_file() and path.suffix == ".gguf":
        return path
    files = sorted(path.glob("*.gguf")) if path.is_dir() else []
    if len(files) > 1:
        raise UserError(f"{path} holds {len(files)} .gguf files; give the path of one, such as {files[0]}")
    return files[0] if files else None


def check_checkpoint(path: Path) -> None:
    """Raises unless `path` looks like a checkpoint; says what is there and what is needed."""
    needed = "a Hugging Face folder (config.json and *.safetensors or *.bin), a lit folder, or a .gguf file"
    if not path.exists():
        near = sorted(p.name for p in path.parent.iterdir() if p.is_dir())[:5] if path.parent.is_dir() else []
        hint = f"; in {path.parent} there is: {', '.join(near)}" if near else ""
        raise UserError(f"checkpoint {path} does not exist{hint}; --checkpoint_dir takes {needed}")
    if (path / LIT_CONFIG).is_file() or (path / "config.json").is_file() or gguf_file(path):
        return
    raise UserError(f"{path} is no checkpoint: it has neither config.json nor {LIT_CONFIG}; needed is {needed}")


def load_config(path: Path) -> Config:
    """The architecture of a checkpoint, without its weights."""
    check_checkpoint(path)
    if (path / LIT_CONFIG).is_file():
        return Config.from_json(path / LIT_CONFIG)
    if (path / "config.json").is_file():
        return Config.from_hf(path)
    return Config.from_hf(GGUFCheckpoint(gguf_file(path)).config)


def _weight_files(path: Path) -> list[Path]:
    """The shards of a Hugging Face folder: by its index if there is one, safetensors before .bin."""
    for stem, suffix in (("model", "safetensors"), ("pytorch_model", "bin")):
        index = path / f"{stem}.{suffix}.index.json"
        if index.is_file():
            table = read_json(index)
            if not isinstance(table, dict) or not isinstance(table.get("weight_map"), dict):
                raise UserError(f"{index} has no weight_map; download it again")
            files = sorted({path / str(name) for name in table["weight_map"].values()})
            if outside := [file for file in files if file.parent != path]:
                raise UserError(f"{index} points outside its folder, at {outside[0]}")
        elif (path / f"{stem}.{suffix}").is_file():
            files = [path / f"{stem}.{suffix}"]
        else:
            files = sorted(path.glob(f"{stem}-*-of-*.{suffix}")) or sorted(path.glob(f"*.{suffix}"))
            files = [] if suffix == "bin" else files  # other .bin files are optimizer states and the like
        if missing := [file.name for file in files if not file.is_file()]:
            raise UserError(f"{path} lacks {missing[0]} ({len(missing)} of {len(files)} shards); download it again")
        if files:
            return files
    raise UserError(f"{path} has a config.json but no weights (*.safetensors, pytorch_model*.bin); download them")


def _open_hf(path: Path) -> Reader:
    if not (path / "config.json").is_file() and (file := gguf_file(path)):
        return GGUFCheckpoint(file)
    files = _weight_files(path)
    return (SafetensorsReader if files[0].suffix == ".safetensors" else BinReader)(files)


def _stored_dtype(reader: Reader, name: str) -> torch.dtype:
    """The dtype to compute in when none is asked for: the file's own."""
    if isinstance(reader, GGUFCheckpoint):
        return torch.float32
    dtype = reader.read(name, 0, 1).dtype
    if not dtype.is_floating_point or dtype.itemsize < 2:
        raise UserError(f"{name} is stored as {dtype}: quantized weights are not supported; load a float checkpoint")
    return dtype


def load_model(path: Path, dtype: torch.dtype | None, device: torch.device) -> GPT:
    """The model of a checkpoint; see `GPT.from_checkpoint`."""
    config = load_config(path)
    lit = (path / LIT_CONFIG).is_file()
    if lit and not (path / LIT_MODEL).is_file():
        raise UserError(f"{path} has a {LIT_CONFIG} but no {LIT_MODEL}; convert the checkpoint again")
    reader = SafetensorsReader([path / LIT_MODEL]) if lit else _open_hf(path)
    with torch.device("meta"):
        model = GPT(config)
    plan = _plan(model, reader, lit)
    dtype = dtype or _stored_dtype(reader, next(name for name, place in plan if place.param == "wte.weight"))
    model = model.to(dtype).to_empty(device=device)
    if config.tie_embeddings:
        model.lm_head.weight = model.wte.weight
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name, place in plan:
            parameter = parameters[place.param]
            _copy(reader, name, parameter[place.at] if place.at else parameter, config if place.grouped else None)
    _check_tied_head(model, reader, lit)
    return model.requires_grad_(False).eval()


def _plan(model: GPT, reader: Reader, lit: bool) -> list[tuple[str, Placement]]:
    """Which tensor of the file goes where; raises if the two do not match exactly."""
    parameters = dict(model.named_parameters())  # a tied head is listed once, as wte
    found = {name if lit else canonical(name): name for name in reader.shapes}
    found.pop(None, None)
    if lit:
        expected = {name: Placement(name) for name in parameters}
    else:
        expected = placements(model.config, any(name.endswith("experts.gate_up_proj") for name in found))
    if model.config.tie_embeddings:
        found.pop("lm_head.weight", None)
        found.pop("embed_out.weight", None)
    if missing := sorted(expected.keys() - found.keys()):
        raise UserError(
            f"the checkpoint lacks {missing[0]}{_and_more(missing)}; it is incomplete or of another architecture"
        )
    if surplus := sorted(found.keys() - expected.keys()):
        raise UserError(
            f"the checkpoint has {found[surplus[0]]}{_and_more(surplus)}, which {model.config.model_type} has not"
        )
    plan = []
    for name, place in expected.items():
        parameter = parameters[place.param]
        wanted, shape = tuple((parameter[place.at] if place.at else parameter).shape), reader.shapes[found[name]]
        if shape != wanted:
            raise UserError(f"{found[name]} has shape {shape} in the file where config.json implies {wanted}")
        plan.append((found[name], place))
    return plan


def _and_more(names: list[str]) -> str:
    return f" and {len(names) - 1} more tensors" if len(names) > 1 else ""


def _chunks(shape: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    rows = max(1, CHUNK_BYTES // (4 * max(1, torch.Size(shape[1:]).numel())))
    for start in range(0, shape[0], rows):
        yield start, min(start + rows, shape[0])


def _copy(reader: Reader, name: str, target: Tensor, grouped: Config | None) -> None:
    if grouped is not None:
        target.copy_(ungroup(reader.read(name), grouped))
        return
    for start, stop in _chunks(tuple(target.shape)):
        target[start:stop].copy_(reader.read(name, start, stop))


def _check_tied_head(model: GPT, reader: Reader, lit: bool) -> None:
    """A file may carry the tied head as well; if it differs, the config and the file contradict each other."""
    if lit or not model.config.tie_embeddings:
        return
    for name, shape in reader.shapes.items():
        if canonical(name) not in ("lm_head.weight", "embed_out.weight"):
            continue
        weight = model.wte.weight
        same = shape == tuple(weight.shape) and all(
            torch.equal(weight[start:stop].cpu(), reader.read(name, start, stop).to(weight.dtype))
            for start, stop in _chunks(shape)
        )
        if not same:
            raise UserError(
                f"{name} differs from the embedding although config.json ties them (tie_word_embeddings); correct one"
            )


def save_lit(model: GPT, folder: Path, source: Path) -> None:
    """Writes a lit folder; a tied head is not stored twice. Tokenizer and config files come along from `source`."""
    copy_files(source, folder)
    save_file({name: p.contiguous() for name, p in model.named_parameters()}, folder / LIT_MODEL)
    model.config.to_json(folder / LIT_CONFIG)


def save_hf(model: GPT, folder: Path, source: Path) -> None:
    """Writes a Hugging Face folder in shards of SHARD_BYTES, with the config.json that `source` was made from."""
    copy_files(source, folder)
    if not (folder / "config.json").is_file():
        raise UserError(f"{source} has no config.json to give the Hugging Face folder; put the original one there")
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
