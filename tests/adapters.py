"""Adapters for tests: PEFT folders written by hand, with updates that are known."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from lit_gen.lora_parts import LoRA, Part, linear_places
from lit_gen.model import GPT

Pairs = dict[str, tuple[Tensor, Tensor]]  # module -> a (r, in), b (n, r)
FIELDS = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "bias": "none", "fan_in_fan_out": False, "r": 4}
FIELDS |= {"lora_alpha": 8, "rank_pattern": {}, "alpha_pattern": {}, "use_rslora": False, "modules_to_save": None}


def random_pairs(shapes: dict[str, tuple[int, int]], r: int = 4, seed: int = 0, std: float = 0.2) -> Pairs:
    """For weights (n, in); `std` is the size of the update's entries, before the scale."""
    generator = torch.Generator().manual_seed(seed)
    std = (std / r**0.5) ** 0.5
    return {
        module: (torch.randn(r, K, generator=generator) * std, torch.randn(N, r, generator=generator) * std)
        for module, (N, K) in shapes.items()
    }


def write_peft(folder: Path, pairs: Pairs, **fields: object) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    targets = {"target_modules": sorted({module.rpartition(".")[2] for module in pairs})}
    (folder / "adapter_config.json").write_text(json.dumps({**FIELDS, **targets, **fields}))
    tensors = {}
    for module, (a, b) in pairs.items():
        tensors[f"base_model.model.{module}.lora_A.weight"] = a.clone().contiguous()
        tensors[f"base_model.model.{module}.lora_B.weight"] = b.clone().contiguous()
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def random_lora(model: GPT, parts: set[str], seed: int = 0, r: int = 3) -> LoRA:
    """Updates of every linear layer whose Hugging Face name ends so, such as q_proj."""
    lora: LoRA = {}
    places = {n: p for n, p in linear_places(model.config).items() if n.removesuffix(".weight").endswith(tuple(parts))}
    shapes = {name: (place.rows.stop - place.rows.start, place.in_features) for name, place in places.items()}
    for name, (a, b) in random_pairs(shapes, r, seed).items():
        lora.setdefault(places[name].param, []).append(Part(places[name].rows, a, b, 1.5))
    return lora
