"""LoRA: reading adapters, adding them to the weights, and layers to train them or to use several side by side.

    load_lora      a PEFT folder, or lit_model_lora.safetensors -> LoRA, low-rank updates by our parameters' names
    merge_lora     adds them to the weights; nothing is left of them that would cost time
    add_lora       new ones, to be trained; save_lora writes them

`lora_rows.attach_loras` keeps several beside the weights, for each row of a batch another.
Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", 2021: W + alpha / r * B @ A.
"""

import math
import os
import re
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from lit_gen.config import Config
from lit_gen.durable import partial_path, publish
from lit_gen.lora_layers import LoRALinear, LowRank
from lit_gen.lora_parts import LoRA, Part, Place, digest, read_pair, shapes
from lit_gen.lora_rows import TIED, linear_at
from lit_gen.made_for import check_base, shape_of
from lit_gen.model import GPT
from lit_gen.peft import CONFIG, base_name, read_peft
from lit_gen.settings import is_number
from lit_gen.shards import SafetensorsReader
from lit_gen.utils import UserError, read_json

LIT_LORA = "lit_model_lora.safetensors"
TARGETS = {"proj": "attn.proj", "fc": "mlp.fc", "mlp_proj": "mlp.proj"}  # q, k and v are rows of attn.qkv
ALL = ("q", "k", "v", *TARGETS)


def load_lora(path: Path, config: Config, base: Path | None = None) -> LoRA:
    """Reads a LoRA.

    Args:
        path: a PEFT folder, our lit_model_lora.safetensors, or the folder that holds it.
        config: of the model that it is for.
        base: the model's checkpoint; an adapter that names another is refused.

    Raises:
        UserError: names what is unknown, missing, misshapen, not supported, or of another model.
    """
    if os.path.isfile(path / CONFIG):  # False also for an impossible name
        if base is not None and (name := base_name(path)) and not _names(base, name):
            remedy = "take that one, or --check_base false if it is"
            raise UserError(f"{path} was made for {name}, and {base} does not look like it: {remedy}")
        return read_peft(path, config)
    file = path / LIT_LORA if os.path.isdir(path) else path
    if not os.path.isfile(file) or file.suffix != ".safetensors" or file.name == "adapter_model.safetensors":
        what = "is no LoRA" if os.path.exists(path) else "does not exist"
        raise UserError(f"{str(path)[:200]} {what}: give a PEFT folder with {CONFIG}, or a {LIT_LORA}")
    return _read_lit(file, config)


def _names(base: Path, name: str) -> bool:
    """Whether the path of a checkpoint has the name of a model, or its config.json knows itself by it."""
    known = [str(base.resolve())]
    if os.path.isfile(base / "config.json") and isinstance(fields := read_json(base / "config.json"), dict):
        known.append(str(fields.get("_name_or_path", "")))
    plain = [re.sub("[^a-z0-9]", "", text.lower()) for text in (name, *known)]
    return any(plain[0] in text for text in plain[1:])


def _read_lit(file: Path, config: Config) -> LoRA:
    reader = SafetensorsReader([file])
    said = reader.metadata
    if said.get("method") != "lora":
        raise UserError(f"{file} does not say that it holds a LoRA; write it with save_lora")
    check_base(file, said, config)
    try:
        r, alpha = int(said["r"]), float(said["alpha"])
        if r < 1 or not math.isfinite(alpha):
            raise ValueError(f"r is {r}, alpha {alpha}")
    except (KeyError, ValueError) as error:
        raise UserError(f"{file} has no r and alpha that make sense in its metadata ({error}); save it again") from None
    places, names = _lit_places(config), sorted(reader.shapes)
    stems = dict.fromkeys(name.removesuffix(".lora_a").removesuffix(".lora_b") for name in names)
    if unknown := [name for name in names if name[:-7] not in places or name[-7:] not in (".lora_a", ".lora_b")]:
        raise UserError(f"{file} has the tensor {unknown[0]}, which is no part of a LoRA for this model")
    if missing := [f"{stem}.lora_{x}" for stem in stems for x in "ab" if f"{stem}.lora_{x}" not in names] or not names:
        raise UserError(f"{file} lacks {missing[0] if names else 'all tensors'}; save it again")
    lora: LoRA = {}
    for stem in stems:
        a, b = read_pair(reader, file, f"{stem}.lora_a", f"{stem}.lora_b", places[stem])
        if len(a) != r:
            raise UserError(f"{stem} of {file} has rank {len(a)}, and its metadata says {r}; save it again")
        lora.setdefault(places[stem].param, []).append(Part(places[stem].rows, a, b, alpha / r))
    return lora


def _lit_places(config: Config) -> dict[str, Place]:
    """What our own files may update, by their names: h.0.attn.qkv.q, ..., h.0.attn.proj, ..., lm_head."""
    found = {}
    for param, (*_, N, K) in ((name, shape) for name, shape in shapes(config).items() if len(shape) == 2):
        name = param.removesuffix(".weight")
        if name.endswith("attn.qkv"):
            found |= {f"{name}.{part}": Place(param, rows, K) for part, rows in config.qkv_rows.items()}
        elif name == "lm_head" or name.endswith(tuple(TARGETS.values())):
            found[name] = Place(param, slice(0, N), K)
    return found


@torch.no_grad()
def merge_lora(model: GPT, lora: LoRA) -> GPT:
    """Adds a LoRA to the weights, in float32, rounded once to their dtype. The same one is never added twice.

    Raises:
        UserError: a weight is quantised, laid out for kernels, tied, not there, or would overflow; nothing was changed.
    """
    name = digest(lora)
    if name in model.merged:
        return model
    weights = {param: _weight(model, param) for param in lora}
    for param, parts in lora.items():
        if weights[param].dtype == torch.float16 and not all(_sum(weights[param], p).isfinite().all() for p in parts):
            raise UserError(f"{param} with the LoRA exceeds the range of float16; take bfloat16 or float32")
    for param, parts in lora.items():
        for part in parts:
            weights[param][part.rows].copy_(_sum(weights[param], part))
    model.merged |= {name}
    return model


def _sum(weight: Tensor, part: Part) -> Tensor:
    exact = torch.promote_types(weight.dtype, torch.float32)
    a, b = part.a.to(weight.device, exact), part.b.to(weight.device, exact)
    return (weight[part.rows].to(exact) + part.scale * (b @ a)).to(weight.dtype)


def _weight(model: GPT, param: str) -> Tensor:
    """A weight that can be changed, (rows, in)."""
    parent, _, kind = param.rpartition(".")
    try:
        module = model.get_submodule(parent)
        weight = getattr(module, kind)
    except AttributeError:
        raise UserError(f"the LoRA has {param}, and the model has not: it is for another model") from None
    if isinstance(module, LoRALinear):
        raise UserError(f"{param} has a LoRA beside it already: merge into a model without")
    if not isinstance(weight, nn.Parameter) or not weight.is_floating_point():
        raise UserError(f"{param} is quantised or laid out for kernels: merge into float weights, as they were loaded")
    if param == "lm_head.weight" and weight is model.wte.weight:
        raise UserError(TIED)
    return weight.view(-1, weight.size(-1))


@dataclass(frozen=True)
class LoRAConfig:
    """What to train.

    Attributes:
        r: rank of the updates.
        alpha: updates are scaled by alpha / r.
        dropout: probability that an input of the updates is 0 in training.
        targets: among q, k, v, proj (of attention), fc (gate and up of the MLP), mlp_proj and lm_head; "all" is all but
            lm_head.
    """

    r: int = 8
    alpha: float = 16
    dropout: float = 0.05
    targets: tuple[str, ...] = ("q", "v")

    def __post_init__(self) -> None:
        if not (isinstance(self.r, int) and self.r >= 1 and is_number(self.alpha)):
            raise UserError(
                f"LoRA needs a rank >= 1 and a finite alpha, not r={self.r!r:.20}, alpha={self.alpha!r:.20}"
            )
        if not (is_number(self.dropout) and 0 <= self.dropout < 1):
            raise UserError(f"dropout is {self.dropout!r:.20}, but must be a number from 0 to 1, 1 excluded")
        known = (*ALL, "lm_head", "all")
        if not self.targets or (unknown := [name for name in self.targets if name not in known]):
            what = f"unknown: {unknown[0]!r:.40}" if self.targets else "none"
            raise UserError(f"targets of LoRA are {what}; give some of {', '.join(known)}")

    @property
    def parts(self) -> set[str]:
        """The targets, with "all" spelt out."""
        return set(self.targets) - {"all"} | (set(ALL) if "all" in self.targets else set())


def add_lora(model: GPT, config: LoRAConfig) -> GPT:
    """Gives linear layers updates to be trained; nothing else in the model then asks for a gradient.

    At first they change nothing: b is 0. The weights below may be quantised.
    """
    found = {}  # linear layer -> rows to update
    for name, place in _lit_places(model.config).items():
        stem, _, last = name.rpartition(".")
        kind = next((key for key, linear in TARGETS.items() if name.endswith(linear)), last)
        if kind in config.parts:
            linear = place.param.removesuffix(".weight")
            found.setdefault(linear, (linear_at(model, linear), []))[1].append(place)
    if moe := [layer for layer, moe in enumerate(model.config.moe_layers) if moe and config.parts & {"fc", "mlp_proj"}]:
        raise UserError(f"layer {moe[0]} is a mixture of experts, which LoRA cannot train: leave fc and mlp_proj out")
    model.requires_grad_(False)
    like = model.wte.weight
    for name, (linear, places) in found.items():
        updates = []
        for place in places:
            a = torch.empty(config.r, place.in_features, dtype=like.dtype, device=like.device)
            nn.init.kaiming_uniform_(a, a=math.sqrt(5))  # as nn.Linear begins
            b = a.new_zeros(place.rows.stop - place.rows.start, config.r)
            updates.append(LowRank(place.rows, a, b, config.alpha / config.r).requires_grad_())
        model.set_submodule(name, LoRALinear(linear, updates, dropout=config.dropout).train(model.training))
    model.lora_config = config
    return model


def save_lora(model: GPT, file: Path) -> None:
    """Writes what `add_lora` added, such as to lit_model_lora.safetensors; the file is there whole or not at all."""
    config: LoRAConfig | None = getattr(model, "lora_config", None)
    if config is None:
        raise UserError("the model has no LoRA that could be saved: call add_lora first")
    said = {"method": "lora", "r": str(config.r), "alpha": repr(float(config.alpha)), "base": shape_of(model.config)}
    tensors = {}
    for name, place in _lit_places(model.config).items():
        layer = model.get_submodule(place.param.removesuffix(".weight"))
        for update in layer.updates if isinstance(layer, LoRALinear) else ():
            if update.rows == place.rows:
                tensors[f"{name}.lora_a"], tensors[f"{name}.lora_b"] = update.a.weight, update.b.weight
    partial = partial_path(file)
    save_file({name: tensor.detach().contiguous() for name, tensor in tensors.items()}, partial, said)
    publish(partial, file)
