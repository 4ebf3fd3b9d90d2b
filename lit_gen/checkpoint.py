"""Checkpoints: a Hugging Face folder as downloaded, a lit folder, or a GGUF file -> a model, strictly and frugally.

Tensors are read a few rows at a time, straight into their place in our fused parameters, so that a load needs little
more memory than the model. Nothing is left random: a missing, surplus, truncated or misshapen tensor is an error.
"""

import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import get_args

import torch

from lit_gen.config import Config
from lit_gen.cut import WHOLE, Cut, copy_tensor, read_floats
from lit_gen.empty import empty_model, part_head
from lit_gen.gguf import GGUFCheckpoint
from lit_gen.hf_weights import Placement, canonical, placements
from lit_gen.model import GPT
from lit_gen.quantize import Format, format_of, stored_tensors
from lit_gen.shards import BinReader, Reader, SafetensorsReader
from lit_gen.utils import UserError, read_json

LIT_CONFIG, LIT_MODEL, MERGED = "lit_config.json", "lit_model.safetensors", "merged_lora"
CHECKED = 1024  # rows of a tied head that are compared at a time


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
    try:
        exists = path.exists()
    except OSError as error:  # a name that is too long, a folder that may not be read
        raise UserError(f"checkpoint {str(path)[:80]} cannot be opened: {error.strerror}") from None
    if not exists:
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


def weight_format(path: Path, asked: str | None, precision: str) -> Format | None:
    """What the weights of a job are quantised to: as a folder holds them, or as asked for (None: not, or by Fabric).

    Args:
        asked: as for `setup_fabric`.
        precision: Fabric's name, such as "bf16-true".

    Raises:
        UserError: both, and they differ; or the precision is mixed, which casts weights at every use.
    """
    file = path / LIT_MODEL
    stored = (
        format_of(SafetensorsReader([file]).metadata, file) if os.path.isfile(file) else None
    )  # False also for an impossible name
    if asked and stored and asked != stored:
        raise UserError(f"{path} has {stored} weights, not {asked}: leave --quantize out, or take the original")
    if (asked or stored) and precision.endswith("mixed"):
        raise UserError(f"{asked or stored} weights do not go with --precision {precision}: take bf16-true or 32-true")
    return stored or (asked if asked in get_args(Format) else None)


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


Split = Callable[[GPT], dict[str, Cut]]


def load_model(
    path: Path, dtype: torch.dtype | None, device: torch.device | Sequence[torch.device], split: Split | None = None
) -> GPT:
    """The model of a checkpoint; see `GPT.from_checkpoint`.

    Args:
        split: cuts the parameters of the empty model, which are then on `device`, and says by name what is left of
            each; nothing else is read of the file.
    """
    config = load_config(path)
    lit = (path / LIT_CONFIG).is_file()
    if lit and not (path / LIT_MODEL).is_file():
        raise UserError(f"{path} has a {LIT_CONFIG} but no {LIT_MODEL}; convert the checkpoint again")
    reader = SafetensorsReader([path / LIT_MODEL]) if lit else _open_hf(path)
    format = format_of(reader.metadata, path / LIT_MODEL) if lit else None
    if split and format:
        raise UserError(f"{path} has {format} weights, which cannot be split; take the original, and --quantize")
    model = empty_model(config, dtype or _stored_dtype(reader), torch.device("cpu") if split else device, format)
    plan, cuts = _plan(model, reader, lit), split(model) if split else {}
    targets = stored_tensors(model)
    with torch.no_grad():
        for name, place in plan:
            if place.param in targets:  # else another rank has it
                copy_tensor(reader, name, place, targets[place.param], cuts.get(place.param, WHOLE), config)
        _check_tied_head(model, reader, lit, cuts.get("wte.weight", WHOLE))
    part_head(model)
    model.merged = set(reader.metadata.get(MERGED, "").split()) if lit else set()
    return model.requires_grad_(False).eval()


def _stored_dtype(reader: Reader) -> torch.dtype:
    """The dtype to compute in when none is asked for: that of the file's largest tensor."""
    if isinstance(reader, GGUFCheckpoint):
        return torch.float32
    if "wte.weight" in reader.shapes:  # of a lit folder, which may be quantised: then larger ones are integers
        return read_floats(reader, "wte.weight", 0, 1).dtype
    largest = max(reader.shapes, key=lambda name: math.prod(reader.shapes[name]), default=None)
    return torch.float32 if largest is None else read_floats(reader, largest, 0, 1).dtype


def _plan(model: GPT, reader: Reader, lit: bool) -> list[tuple[str, Placement]]:
    """Which tensor of the file goes where; raises if the two do not match exactly."""
    parameters = stored_tensors(model)
    found = {name if lit else canonical(name): name for name in reader.shapes}
    found.pop(None, None)
    if lit:
        expected = {name: Placement(name) for name in parameters}
    else:
        expected = placements(model.config, any(name.endswith("experts.gate_up_proj") for name in found))
    if model.config.tie_embeddings and "lm_head.weight" not in expected:  # it is, if it is quantised
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


def _check_tied_head(model: GPT, reader: Reader, lit: bool, cut: Cut) -> None:
    """A file may carry the tied head as well; if it differs, the config and the file contradict each other."""
    if lit or not model.config.tie_embeddings:
        return
    for name, shape in reader.shapes.items():
        if canonical(name) not in ("lm_head.weight", "embed_out.weight"):
            continue
        weight, same = model.wte.weight, shape == (model.config.vocab_size, model.config.n_embd)
        if same:
            head = torch.empty_like(weight[:CHECKED])
            for start in range(0, len(rows := cut.flat_rows(shape)), CHECKED):
                some = rows[start : start + CHECKED]
                copy_tensor(reader, name, Placement(""), head, Cut(some), model.config)
                same = same and torch.equal(weight[start : start + len(some)], head[: len(some)])
        if not same:
            raise UserError(
                f"{name} differs from the embedding although config.json ties them (tie_word_embeddings); correct one"
            )
