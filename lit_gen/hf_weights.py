"""Which Hugging Face tensor holds which rows of which of our parameters: the one table that loading and export share.

`placements(config)` lists every tensor a checkpoint of this architecture has, by its name without the family's prefix.
Loading is strict because the list is complete: what is not found is missing, what is not listed is surplus.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from lit_gen.config import Config

PREFIX = re.compile(
    r"^(model\.language_model\.|language_model\.model\.|language_model\.|model\.|transformer\.|gpt_neox\.)"
)
# Recomputed tables and causal masks that old files carry, and the vision side of composite checkpoints.
IGNORED = re.compile(
    r"(rotary_emb\.inv_freq|\.attention\.(masked_)?bias|\.masked_bias)$"
    r"|^(vision_tower|vision_model|multi_modal_projector|visual)\."
)
# Mixture-of-experts tensors have had several names; these are read as the first.
EXPERT_NAMES = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}


@dataclass(frozen=True)
class Placement:
    """Where one Hugging Face tensor lies in our parameters."""

    param: str
    at: tuple[int | slice, ...] = ()  # index into the parameter
    grouped: bool = False  # rows come as q..q k v for each group of heads, and we keep q | k | v


def export_prefix(config: Config) -> str:
    return {"gpt_neox": "gpt_neox.", "falcon": "transformer."}.get(config.model_type, "model.")


def canonical(name: str) -> str | None:
    """The name as `placements` has it, or None for a tensor that is no part of the language model."""
    name = PREFIX.sub("", name)
    if IGNORED.search(name):
        return None
    name = name.replace("block_sparse_moe.", "mlp.")
    return re.sub(r"(experts\.\d+)\.(w[123])\.", lambda m: f"{m[1]}.{EXPERT_NAMES[m[2]]}.", name)


def export_name(name: str, config: Config) -> str:
    """The name the family's own files use for a canonical name."""
    if config.model_type == "mixtral":
        for ours, theirs in (("gate_proj", "w1"), ("up_proj", "w3"), ("down_proj", "w2")):
            name = re.sub(rf"(experts\.\d+)\.{ours}\.", rf"\1.{theirs}.", name)
        name = name.replace(".mlp.", ".block_sparse_moe.")
    return name if name.startswith(("lm_head.", "embed_out.")) else export_prefix(config) + name


def placements(config: Config, fused_experts: bool = False) -> dict[str, Placement]:
    """Canonical Hugging Face name -> Placement, for every tensor of the architecture (the tied head excepted).

    Files have one tensor for each expert, or (`fused_experts`) stacks as transformers 5 holds them in memory.
    """
    kind = config.model_type
    top = {"gpt_neox": ("embed_in", "final_layer_norm", "embed_out"), "falcon": ("word_embeddings", "ln_f", "lm_head")}
    embedding, norm, head = top.get(kind, ("embed_tokens", "final_layernorm" if kind == "phi" else "norm", "lm_head"))
    found = {f"{embedding}.weight": Placement("wte.weight")}
    found |= _norm(config, norm, "ln_f")
    if not config.tie_embeddings:
        found[f"{head}.weight"] = Placement("lm_head.weight")
    if config.lm_head_bias:
        found[f"{head}.bias"] = Placement("lm_head.bias")
    for layer in range(config.n_layer):
        theirs, ours = f"{'h' if kind == 'falcon' else 'layers'}.{layer}.", f"h.{layer}."
        for parts in (_norms(config), _attention(config), _mlp(config, config.moe_layers[layer], fused_experts)):
            for name, place in parts.items():
                found[theirs + name] = Placement(ours + place.param, place.at, place.grouped)
    return found


def _norm(config: Config, theirs: str, ours: str, bias: bool | None = None) -> dict[str, Placement]:
    found = {f"{theirs}.weight": Placement(f"{ours}.weight")} if config.norm_affine else {}
    if config.norm_affine and (config.norm_bias if bias is None else bias):
        found[f"{theirs}.bias"] = Placement(f"{ours}.bias")
    return found


def _norms(config: Config) -> dict[str, Placement]:
    if config.post_norm and config.pre_norm:
        names = {"input_layernorm": "norm_1", "post_attention_layernorm": "post_attention_norm"}
        names |= {"pre_feedforward_layernorm": "norm_2", "post_feedforward_layernorm": "post_mlp_norm"}
    elif config.post_norm:
        names = {"post_attention_layernorm": "post_attention_norm", "post_feedforward_layernorm": "post_mlp_norm"}
    elif config.shared_norm:
        names = {"input_layernorm": "norm_1"}
    elif config.model_type == "falcon" and config.parallel_residual:
        names = {"ln_attn": "norm_1", "ln_mlp": "norm_2"}
    else:
        names = {"input_layernorm": "norm_1", "post_attention_layernorm": "norm_2"}
    return {k: v for theirs, ours in names.items() for k, v in _norm(config, theirs, ours).items()}


def _linear(
    theirs: str, ours: str, bias: bool, rows: slice | None = None, grouped: bool = False
) -> dict[str, Placement]:
    at = () if rows is None else (rows,)
    kinds = ("weight", "bias") if bias else ("weight",)
    return {f"{theirs}.{kind}": Placement(f"{ours}.{kind}", at, grouped) for kind in kinds}


def _attention(config: Config) -> dict[str, Placement]:
    kind = config.model_type
    if kind in ("gpt_neox", "falcon"):
        attn = "attention" if kind == "gpt_neox" else "self_attention"
        found = _linear(f"{attn}.query_key_value", "attn.qkv", config.qkv_bias, grouped=True)
        return found | _linear(f"{attn}.dense", "attn.proj", config.proj_bias)
    found = _linear("self_attn.dense" if kind == "phi" else "self_attn.o_proj", "attn.proj", config.proj_bias)
    if kind == "phi3":
        found |= _linear("self_attn.qkv_proj", "attn.qkv", config.qkv_bias)
    else:
        for part, rows in config.qkv_rows.items():
            found |= _linear(f"self_attn.{part}_proj", "attn.qkv", config.qkv_bias, rows)
    if config.qk_norm == "per_head":
        for part, heads in (("q", config.n_head), ("k", config.n_query_groups)):
            for i in range(heads):
                found[f"self_attn.{part}_layernorm.norms.{i}.weight"] = Placement(f"attn.norm_{part}.weight", (i,))
    elif config.qk_norm:
        name = "layernorm" if kind == "phi" else "norm"
        for part in ("q", "k"):
            found |= _norm(config, f"self_attn.{part}_{name}", f"attn.norm_{part}", config.qk_norm_bias)
    return found


def _mlp(config: Config, moe: bool, fused_experts: bool) -> dict[str, Placement]:
    size = config.moe_intermediate_size if moe else config.intermediate_size
    gate, up = slice(0, size), slice(size, 2 * size)
    if moe:
        found = {"mlp.gate.weight": Placement("mlp.gate.weight")}
        if fused_experts:
            stacks = {"mlp.experts.gate_up_proj": Placement("mlp.fc"), "mlp.experts.down_proj": Placement("mlp.proj")}
            return found | stacks
        for expert in range(config.n_expert):
            name = f"mlp.experts.{expert}"
            found[f"{name}.gate_proj.weight"] = Placement("mlp.fc", (expert, gate))
            found[f"{name}.up_proj.weight"] = Placement("mlp.fc", (expert, up))
            found[f"{name}.down_proj.weight"] = Placement("mlp.proj", (expert,))
        return found
    if config.model_type == "phi3":
        return _linear("mlp.gate_up_proj", "mlp.fc", False) | _linear("mlp.down_proj", "mlp.proj", False)
    if config.gated:
        found = _linear("mlp.gate_proj", "mlp.fc", config.mlp_bias, gate) | _linear(
            "mlp.up_proj", "mlp.fc", config.mlp_bias, up
        )
        return found | _linear("mlp.down_proj", "mlp.proj", config.mlp_bias)
    fc, proj = {"phi": ("fc1", "fc2"), "starcoder2": ("c_fc", "c_proj")}.get(
        config.model_type, ("dense_h_to_4h", "dense_4h_to_h")
    )
    return _linear(f"mlp.{fc}", "mlp.fc", config.mlp_bias) | _linear(f"mlp.{proj}", "mlp.proj", config.mlp_bias)


def ungroup(w: Tensor, config: Config) -> Tensor:
    """Rows q..q k v of each group of heads -> q | k | v; w is (rows, ...)."""
    ng, hs, per_group = config.n_query_groups, config.head_size, config.n_head // config.n_query_groups
    groups = w.view(ng, per_group + 2, hs, *w.shape[1:])
    return torch.cat([part.reshape(-1, *w.shape[1:]) for part in groups.split((per_group, 1, 1), dim=1)])


def group(w: Tensor, config: Config) -> Tensor:
    """The inverse of `ungroup`."""
    ng, hs = config.n_query_groups, config.head_size
    parts = [w[rows].view(ng, -1, hs, *w.shape[1:]) for rows in config.qkv_rows.values()]
    return torch.cat(parts, dim=1).reshape(w.shape)


def export_tensors(state: dict[str, Tensor], config: Config) -> Iterator[tuple[str, Tensor]]:
    """Our parameters -> (Hugging Face name, tensor), as views where the layouts agree."""
    for name, place in placements(config).items():
        tensor = state[place.param][place.at] if place.at else state[place.param]
        yield export_name(name, config), group(tensor, config) if place.grouped else tensor
