"""Reads a LoRA as the PEFT library saves it: adapter_config.json beside adapter_model.safetensors (or .bin).

Names are matched as PEFT matches them (`tuners_utils.check_target_module_exists` and `other.get_pattern_key` of its
version 0.21). What would not come out as PEFT has it is refused by name.
"""

import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Tensor

from lit_gen.config import Config
from lit_gen.hf_weights import PREFIX, canonical, export_prefix, ungroup
from lit_gen.lora_parts import LoRA, Part, Place, linear_places, read_pair
from lit_gen.settings import is_number
from lit_gen.shards import BinReader, Reader, SafetensorsReader
from lit_gen.utils import UserError, read_json

CONFIG = "adapter_config.json"
# Fields that decide nothing here: names, and how the adapter was begun and trained.
HARMLESS = {"auto_mapping", "base_model_name_or_path", "corda_config", "eva_config", "inference_mode", "loftq_config"}
HARMLESS |= {"lora_dropout", "lora_ga_config", "megatron_core", "peft_version", "qalora_group_size", "revision"}
HARMLESS |= {"runtime_config"}
READ = {"r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora", "target_modules", "exclude_modules"}
READ |= {"layers_to_transform", "layers_pattern", "peft_type", "task_type", "bias", "init_lora_weights"}
# Other ways to begin change the weights of the base model, too.
BEGINNINGS = (None, True, False, "gaussian", "eva", "orthogonal")


def base_name(folder: Path) -> str | None:
    """The last part of the name of the model that the adapter was trained on, if it says so."""
    fields = read_json(folder / CONFIG)
    name = fields.get("base_model_name_or_path") if isinstance(fields, dict) else None
    return (re.split(r"[/\\]", name.rstrip("/\\"))[-1] or None) if isinstance(name, str) else None


def read_peft(folder: Path, config: Config) -> LoRA:
    """The parts of a PEFT folder, by our parameters' names.

    Raises:
        UserError: a field that is not supported, a tensor that is unknown, missing or misshapen; each is named.
    """
    fields = read_json(folder / CONFIG)
    _check_fields(fields, folder / CONFIG)
    reader = _open(folder)
    modules = _modules(reader, folder)
    places = linear_places(config)
    selected = set(_selected(fields, modules, places, config))
    lora: LoRA = {}
    for module, (a_key, b_key) in modules.items():
        place = places.get(canonical(f"{module}.weight"))
        if place is None:
            raise UserError(f"{folder} is for another model: it has {module}, and this {config.model_type} has not")
        if module not in selected:
            raise UserError(f"{folder} has {module}, which target_modules in its {CONFIG} leaves out; correct one")
        if any(part.rows == place.rows for part in lora.get(place.param, [])):
            raise UserError(f"{folder} has {module} twice, under two names; save the adapter again")
        a, b = read_pair(reader, folder, a_key, b_key, place)
        lora.setdefault(place.param, []).append(_part(fields, folder, module, a, b, place, config))
    if missing := sorted(selected - modules.keys()):
        raise UserError(f"{folder} lacks {missing[0]} ({len(missing)} in all), which its {CONFIG} names; save it again")
    return lora


def _check_fields(fields: Any, file: Path) -> None:
    if not isinstance(fields, dict):
        raise UserError(f"{file} is no JSON object; save the adapter again")
    if fields.get("peft_type") != "LORA":
        raise UserError(f"{file} has peft_type {fields.get('peft_type')!r:.40}, but only LORA can be read")
    for name, value in fields.items():
        if name not in HARMLESS | READ and value not in (None, False, "", [], {}):
            raise UserError(f"{file} has {name} = {value!r:.40}, which is not supported: merge the adapter with PEFT")
    fixed = {"task_type": (None, "CAUSAL_LM"), "bias": (None, "none"), "init_lora_weights": BEGINNINGS}
    for name, allowed in fixed.items():
        if not any(fields.get(name) is value or fields.get(name) == value for value in allowed):
            value = f"{fields[name]!r:.40}"
            raise UserError(f"{file} has {name} = {value}, which is not supported: merge the adapter with PEFT")
    patterns = [{} if fields.get(name) is None else fields[name] for name in ("rank_pattern", "alpha_pattern")]
    kinds = {"target_modules": str | list, "exclude_modules": str | list, "layers_to_transform": int | list}
    kinds |= {"layers_pattern": str | list, "use_rslora": bool}
    wrong = [
        name for name, kind in kinds.items() if fields.get(name) is not None and not isinstance(fields[name], kind)
    ]
    wrong += [] if fields.get("target_modules") else ["target_modules"]
    wrong += [] if all(isinstance(pattern, dict) for pattern in patterns) else ["rank_pattern or alpha_pattern"]
    for name in ("r", "lora_alpha"):
        wrong += [] if is_number(fields.get(name)) and (name == "lora_alpha" or fields[name] > 0) else [name]
    if not wrong and not all(is_number(value) for pattern in patterns for value in pattern.values()):
        wrong += ["rank_pattern or alpha_pattern"]
    if wrong:
        raise UserError(f"{file} has no {wrong[0]} that makes sense; save the adapter again")


def _open(folder: Path) -> Reader:
    for name, kind in (("adapter_model.safetensors", SafetensorsReader), ("adapter_model.bin", BinReader)):
        if (folder / name).is_file():
            return kind([folder / name])
    raise UserError(f"{folder} has a {CONFIG} but no adapter_model.safetensors; download it again")


def _modules(reader: Reader, folder: Path) -> dict[str, tuple[str, str]]:
    """The names of A and B of each module."""
    found: dict[str, dict[str, str]] = {}
    for key in reader.shapes:
        match = re.fullmatch(r"base_model\.model\.(.+)\.lora_([AB])\.weight", key)
        if match is None:
            kinds = {"lora_embedding_": "a trained embedding", "lora_magnitude": "DoRA", "bias": "a trained bias"}
            what = next((kind for part, kind in kinds.items() if part in key), "no part of a plain LoRA")
            raise UserError(f"{folder} has the tensor {key}, {what}, which is not supported: merge it with PEFT")
        found.setdefault(match[1], {})[match[2]] = key
    for module, pair in found.items():
        if len(pair) < 2:
            lacking = "B" if "A" in pair else "A"
            raise UserError(f"{folder} has no lora_{lacking} of {module}; save the adapter again")
    if not found:
        raise UserError(f"{folder} has no tensors; save the adapter again")
    return {module: (pair["A"], pair["B"]) for module, pair in found.items()}


def _selected(
    fields: dict[str, Any], modules: dict[str, Any], places: dict[str, Place], config: Config
) -> Iterator[str]:
    """The modules that target_modules selects: of the model's linear layers, and of those in the file.

    The names' prefix is that of the model that was trained, which the file shows. Experts need not be there: newer
    versions of transformers have no module for each.
    """
    prefix = next((match[0] for module in modules if (match := PREFIX.match(module))), export_prefix(config))
    dense = [name for name in places if not any(name.startswith(f"layers.{i}.mlp.") for i in _moe(config))]
    bare = [name.removesuffix(".weight") for name in dense]
    names = [name if name in ("lm_head", "embed_out") else prefix + name for name in bare]
    for name in dict.fromkeys([*names, *modules]):
        if _is_target(name, fields):
            yield name


def _moe(config: Config) -> list[int]:
    return [layer for layer, moe in enumerate(config.moe_layers) if moe]


def _is_target(name: str, fields: dict[str, Any]) -> bool:
    """Whether PEFT gives this module an adapter."""
    targets, excluded = fields["target_modules"], fields.get("exclude_modules")
    if excluded and _matches(name, excluded):
        return False
    if isinstance(targets, str):
        if targets.lower() == "all-linear":
            return name.rpartition(".")[2] not in ("lm_head", "embed_out")
        return _matches(name, targets)
    if not _matches(name, targets):
        return False
    layers, patterns = fields.get("layers_to_transform"), fields.get("layers_pattern")
    if layers is None or layers == []:
        return True
    patterns = [patterns] if isinstance(patterns, str) and patterns else patterns
    forms = [rf"(?:^|.*?\.){pattern}\.(\d+)\." for pattern in patterns] if patterns else [r".*?\.[^.]*\.(\d+)\."]
    match = next((match for form in forms if (match := _match(form, name))), None)
    return match is not None and int(match[1]) in ([layers] if isinstance(layers, int) else layers)


def _matches(name: str, wanted: str | list[str]) -> bool:
    """A text is a regular expression for the whole name, a list has names and their last parts."""
    if isinstance(wanted, str):
        return _match(rf"(?:{wanted})\Z", name) is not None
    return any(name == one or name.endswith(f".{one}") for one in wanted)


def _match(pattern: str, name: str) -> re.Match | None:
    try:
        return re.match(pattern, name)
    except (re.error, RecursionError, OverflowError) as error:
        raise UserError(f"a pattern in {CONFIG} is no regular expression: {pattern!r:.60} ({error})") from None


def _by_pattern(patterns: dict[str, float] | None, name: str, default: float) -> float:
    """The first pattern that matches the end of the name, at a dot."""
    found = (value for pattern, value in (patterns or {}).items() if _match(rf"(.*\.)?({pattern})$", name))
    return next(found, default)


def _part(
    fields: dict[str, Any], folder: Path, module: str, a: Tensor, b: Tensor, place: Place, config: Config
) -> Part:
    r = _by_pattern(fields.get("rank_pattern"), module, fields["r"])
    alpha = _by_pattern(fields.get("alpha_pattern"), module, fields["lora_alpha"])
    if r != len(a):
        raise UserError(f"{folder} has {module} of rank {len(a)}, and its {CONFIG} says {r}; save the adapter again")
    scale = alpha / (math.sqrt(r) if fields.get("use_rslora") else r)
    return Part(place.rows, a, ungroup(b, config) if place.grouped else b, scale)
