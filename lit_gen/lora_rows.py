"""Several LoRA beside the weights of one model, so that each row of a batch may have another."""

from collections.abc import Mapping

import torch
from torch import nn

from lit_gen.config import Config
from lit_gen.layers import MoE
from lit_gen.lora_layers import BASE, LoRALinear, LowRank, RowLoRA
from lit_gen.lora_parts import LoRA, Part
from lit_gen.model import GPT
from lit_gen.utils import UserError

TIED = "the LoRA updates the head, whose weight is that of the embedding, too: use it with --merge false"


def check_use(config: Config, loras: Mapping[str, LoRA], merge: bool) -> None:
    """Raises, before the model is loaded, for adapters that cannot be used merged, or cannot otherwise."""
    for name, lora in loras.items():
        moe = [param for param in lora for i, moe in enumerate(config.moe_layers) if moe and f"h.{i}.mlp." in param]
        if merge and config.tie_embeddings and "lm_head.weight" in lora:
            raise UserError(f"{TIED} (adapter {name})")
        if moe and not merge:
            raise UserError(f"{moe[0]} is part of a mixture of experts: adapter {name} has to be merged")


def attach_loras(model: GPT, loras: Mapping[str, LoRA], default: str | None = None) -> GPT:
    """Puts adapters beside the weights, one for each row of a batch (the setting `lora`); "base" is no adapter.

    To be called before `pack_model`. Each token passes through all adapters: a step costs by the sum of their ranks.

    Args:
        default: for rows that name none; without it the only adapter, and "base" if there are several.

    Raises:
        UserError: an adapter is for what has no layer of its own, such as experts; nothing was changed.
    """
    names = list(loras)
    if BASE in names:
        raise UserError(f'an adapter cannot be called "{BASE}", which is the model without one; give another name')
    rows = RowLoRA(names, default or (names[0] if len(names) == 1 else BASE))
    made = {}
    for param in dict.fromkeys(param for lora in loras.values() for param in lora):
        name = param.removesuffix(".weight")
        linear = linear_at(model, name)
        where = {"dtype": model.wte.weight.dtype, "device": linear.weight.device}
        updates = _updates([loras[adapter].get(param, []) for adapter in names], name, **where)
        made[name] = LoRALinear(linear, updates, adapters=rows, head=name == "lm_head")
    for name, layer in made.items():
        model.set_submodule(name, layer.eval())
    model.loras = rows
    return model


def linear_at(model: GPT, name: str) -> nn.Module:
    """A layer that can get updates beside it."""
    stem, _, last = name.rpartition(".")
    try:
        parent = model.get_submodule(stem)
        linear = getattr(parent, last)
    except AttributeError:
        raise UserError(f"the LoRA has {name}, and the model has not: it is for another model") from None
    if isinstance(parent, MoE) or isinstance(linear, LoRALinear) or not hasattr(linear, "in_features"):
        what = "part of a mixture of experts" if isinstance(parent, MoE) else "no plain linear layer"
        raise UserError(f"{name} is {what}: a LoRA for it has to be merged")
    return linear


def _updates(adapters: list[list[Part]], name: str, dtype: torch.dtype, device: torch.device) -> list[LowRank]:
    """One update for each set of rows, with the parts of all adapters in the order of their numbers."""
    found = []
    for start, stop in dict.fromkeys((part.rows.start, part.rows.stop) for parts in adapters for part in parts):
        rows = slice(start, stop)
        parts = [(i, part) for i, own in enumerate(adapters, start=1) for part in own if part.rows == rows]
        owner = torch.tensor([i for i, part in parts for _ in part.a])  # (R,)
        used = torch.arange(len(adapters) + 1)[:, None] == owner  # (adapters + 1, R)
        a, b = (
            torch.cat([part.a for _, part in parts]),
            torch.cat([part.b.double() * part.scale for _, part in parts], dim=1),
        )
        a, b = a.to(device, dtype), b.to(device, dtype)
        if not (a.isfinite().all() and b.isfinite().all()):
            raise UserError(f"the LoRA of {name} exceeds the range of {dtype}; take bfloat16 or float32")
        found.append(LowRank(rows, a, b, used=used.to(device)))
    return found
