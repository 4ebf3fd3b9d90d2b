"""The rotary fields of a Hugging Face config.json -> `Rope`s, and which layer uses which.

Two layouts are read: the hub's (`rope_theta`, `rope_scaling`, `partial_rotary_factor`, `rope_local_base_freq`, ...) and
that of transformers 5 (`rope_parameters`, flat or one for each layer type).
"""

from typing import Any

from lit_gen.config import Rope
from lit_gen.utils import UserError

KINDS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope", "factors")
SYNONYMS = {"su": "longrope", "mrope": "default"}  # mrope, the kind of vision models, is the plain one on text
PARTIAL = {
    "phi": 0.5,
    "phi3": 1.0,
    "gpt_neox": 0.25,
    "stablelm": 0.25,
}  # share of a head that is rotated if no field says so
NEEDED = {"linear": ("factor",), "llama3": ("factor", "low_freq_factor", "high_freq_factor")}
NEEDED |= {"longrope": ("short_factor", "long_factor"), "factors": ("factors",)}
COPIED = ("attention_factor", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "mscale")
COPIED += ("mscale_all_dim", "truncate", "short_factor", "long_factor", "factors")


def rope_fields(model_type: str, hf: dict[str, Any], head_size: int, layer_types: list[str]) -> dict[str, Any]:
    """`ropes` and `rope_layers` of `Config`."""
    parameters, scaling = hf.get("rope_parameters") or {}, hf.get("rope_scaling") or {}
    if "full_attention" in parameters or "sliding_attention" in parameters:
        kinds = [parameters.get("full_attention") or {}, parameters.get("sliding_attention") or {}]
    elif model_type == "gemma3_text":
        kinds = [parameters or scaling, {"rope_theta": hf["rope_local_base_freq"]}]
    elif model_type == "olmo3":  # a longer context is for layers that see all of it; a window needs none
        kinds = [parameters or scaling, {"rope_theta": parameters.get("rope_theta", hf["rope_theta"])}]
    else:
        kinds = [parameters or scaling]
    layers = [1 if len(kinds) > 1 and kind == "sliding" else 0 for kind in layer_types]
    if model_type == "smollm3":
        layers = [0 if uses else -1 for uses in positions_used(hf, len(layers))]
    return {"ropes": [_rope(model_type, hf, kind, head_size) for kind in kinds], "rope_layers": layers}


def positions_used(hf: dict[str, Any], n_layer: int) -> list[bool]:
    """Which layers of SmolLM3 have rotary positions: in spite of its name no_rope_layers is 1 for those."""
    interval = hf["no_rope_layer_interval"]
    return [bool(uses) for uses in hf.get("no_rope_layers", [(i + 1) % interval for i in range(n_layer)])]


def _rope(model_type: str, hf: dict[str, Any], values: dict[str, Any], head_size: int) -> Rope:
    values = {key: value for key, value in values.items() if value is not None}
    kind = values.get("rope_type", values.get("type", "default"))
    kind = SYNONYMS.get(kind, kind)
    if kind not in KINDS:
        raise UserError(f"rope_type {kind!r} is not supported; supported: {', '.join(KINDS)}")
    if missing := [name for name in NEEDED.get(kind, ()) if name not in values]:
        raise UserError(f"the rope_scaling of type {kind!r} in config.json has no {missing[0]!r}")
    partial = 1.0
    if model_type in PARTIAL:  # the other families do not read these fields
        partial = hf.get("partial_rotary_factor", hf.get("rotary_pct", PARTIAL[model_type]))
        partial = values.get("partial_rotary_factor", partial)
    base = values.get("rope_theta", hf.get("rope_theta", hf.get("rotary_emb_base", 10000.0)))
    context, original = hf["max_position_embeddings"], None
    if kind != "default":
        own = values.get("original_max_position_embeddings", context)
        original = hf.get("original_max_position_embeddings", own)
    n_elem = int(head_size * partial)
    for name in ("short_factor", "long_factor", "factors"):
        if name in values and len(values[name]) != n_elem // 2:
            raise UserError(
                f"{name} of the rope_scaling in config.json has {len(values[name])} numbers, not {n_elem // 2}"
            )
    return Rope(
        base=float(base),
        n_elem=n_elem,
        kind=kind,
        factor=float(values.get("factor", context / (original or context))),
        original_max_seq_len=original,
        **{name: values[name] for name in COPIED if name in values},
    )
