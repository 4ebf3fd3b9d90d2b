"""Hugging Face config.json -> the fields of `Config`. One table of family switches, one function per group of fields.

A value whose maths the model would not honour is refused by name.
"""

from typing import Any

from lit_gen.hf_rope import positions_used, rope_fields
from lit_gen.utils import UserError

LAYER_NORM = {"norm": "layer", "norm_bias": True}
POST_NORM_ONLY = {"pre_norm": False, "post_norm": True, "qk_norm": "full"}
GEMMA = {"norm_offset": True, "act": "gelu_tanh"}

# What is fixed for a family and not written in its config.json.
SWITCHES: dict[str, dict[str, Any]] = {
    "llama": {},
    "code_llama": {},
    "mistral": {},
    "ministral": {},
    "mixtral": {},
    "qwen2": {"qkv_bias": True},
    "qwen3": {"qk_norm": "head"},
    "qwen3_moe": {"qk_norm": "head"},
    "gemma": GEMMA,
    "gemma2": GEMMA | {"post_norm": True},
    "gemma3_text": GEMMA | {"post_norm": True, "qk_norm": "head"},
    "phi": LAYER_NORM | {"gated": False, "parallel_residual": True, "shared_norm": True, "lm_head_bias": True},
    "phi3": {},
    "gpt_neox": LAYER_NORM | {"gated": False},
    "falcon": LAYER_NORM | {"gated": False},
    "stablelm": LAYER_NORM,
    "olmo": {"norm": "layer", "norm_affine": False, "norm_eps": 1e-5},
    "olmo2": POST_NORM_ONLY,
    "olmo3": POST_NORM_ONLY,
    "smollm3": {},
    "granite": {},
    "starcoder2": LAYER_NORM | {"gated": False},
}
COMPOSITE = ("gemma3", "mistral3")  # vision and text: the text model is used

# Values that files leave out because they are the class's own defaults; anything else that is missing is an error.
DEFAULTS: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": 4096, "num_key_value_heads": 8},
    "ministral": {"sliding_window": 4096, "num_key_value_heads": 8},
    "mixtral": {"rope_theta": 1e6, "rms_norm_eps": 1e-5, "num_key_value_heads": 8, "num_local_experts": 8}
    | {"num_experts_per_tok": 2},
    "qwen3": {"head_dim": 128},
    "qwen3_moe": {"num_key_value_heads": 4, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768},
    "gemma": {"head_dim": 256},
    "gemma2": {"head_dim": 256, "num_key_value_heads": 4, "query_pre_attn_scalar": 256, "sliding_window": 4096}
    | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    "gemma3_text": {"vocab_size": 262208, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26}
    | {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256}
    | {"query_pre_attn_scalar": 256, "sliding_window": 4096, "rope_theta": 1e6, "rope_local_base_freq": 1e4},
    "phi": {"hidden_act": "gelu_new"},
    "gpt_neox": {"hidden_act": "gelu", "use_parallel_residual": True, "attention_bias": True},
    "falcon": {"activation": "gelu", "multi_query": True, "parallel_attn": True},
    "olmo3": {"sliding_window": 4096, "rope_theta": 5e5},
    "smollm3": {"rope_theta": 2e6, "num_key_value_heads": 4, "no_rope_layer_interval": 4},
    "starcoder2": {"hidden_act": "gelu_pytorch_tanh", "use_bias": True, "num_key_value_heads": 2},
}
CONTEXT = {
    "mistral": 131072,
    "ministral": 131072,
    "mixtral": 131072,
    "qwen2": 32768,
    "qwen3": 32768,
    "qwen3_moe": 32768,
}
CONTEXT |= {"gemma": 8192, "gemma2": 8192, "gemma3_text": 131072, "phi3": 4096, "stablelm": 4096, "smollm3": 32768}
CONTEXT |= {"starcoder2": 4096}  # max_position_embeddings; 2048 for the others
NORM_EPS_1E5 = ("mixtral", "phi3", "olmo2", "olmo3")  # RMSNorm families whose default is not 1e-6
TIED_BY_DEFAULT = ("gemma", "gemma2", "gemma3_text", "falcon", "smollm3", "starcoder2")
ALWAYS_WINDOWED = ("mistral", "ministral", "mixtral", "phi3", "starcoder2")
LAYERED = ("ministral", "qwen2", "qwen3", "gemma2", "gemma3_text", "olmo3", "smollm3")  # these read layer_types
WINDOW_PATTERN = {"gemma2": 2, "gemma3_text": 6, "olmo3": 4}  # every n-th layer sees everything
ACTIVATIONS = {"silu": "silu", "swish": "silu", "relu": "relu", "gelu": "gelu", "gelu_new": "gelu_tanh"}
ACTIVATIONS |= {"gelu_pytorch_tanh": "gelu_tanh", "gelu_fast": "gelu_tanh"}
LAYER_TYPES = {"full_attention": "full", "sliding_attention": "sliding"}


def config_from_hf(hf: dict[str, Any]) -> dict[str, Any]:
    """The fields of `Config`, by name, from the dict of a config.json."""
    hf = _text_config(hf)
    model_type = hf["model_type"]
    defaults = {"max_position_embeddings": CONTEXT.get(model_type, 2048)} | DEFAULTS.get(model_type, {})
    hf = {key: value for key, value in (defaults | hf).items() if value is not None}  # null is not a default: it is off
    _refuse(hf)
    for name in ("num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size", "max_position_embeddings"):
        if not isinstance(hf.get(name), int) or hf[name] < 1:
            raise UserError(f"config.json of model_type {model_type!r} has {name}={hf.get(name)!r}, not a size")
    n_head, n_embd = hf["num_attention_heads"], hf["hidden_size"]
    layer_norm = SWITCHES[model_type].get("norm") == "layer"
    default_eps = 1e-5 if layer_norm or model_type in NORM_EPS_1E5 else 1e-6
    eps = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon")
    fields = {
        "model_type": model_type,
        "block_size": hf["max_position_embeddings"],
        "vocab_size": hf["vocab_size"],
        "n_layer": hf["num_hidden_layers"],
        "n_embd": n_embd,
        "n_head": n_head,
        "n_query_groups": hf.get("num_key_value_heads", n_head),
        "head_size": hf.get("head_dim", n_embd // n_head),
        "intermediate_size": hf.get("intermediate_size", 4 * n_embd),
        "norm_eps": next((hf[name] for name in eps if name in hf), default_eps),
        "act": _activation(hf.get("hidden_act", hf.get("hidden_activation", "silu"))),
        "tie_embeddings": bool(hf.get("tie_word_embeddings", model_type in TIED_BY_DEFAULT)),
        "qkv_bias": bool(hf.get("attention_bias", False)),
        "proj_bias": bool(hf.get("attention_bias", False)),
        "mlp_bias": bool(hf.get("mlp_bias", False)),
    }
    fields |= SWITCHES[model_type] | _family_fields(model_type, hf) | _expert_fields(hf, fields["n_layer"])
    fields |= _window_fields(model_type, hf, fields["n_layer"])
    return fields | rope_fields(model_type, hf, fields["head_size"], fields["layer_types"])


def _text_config(hf: dict[str, Any]) -> dict[str, Any]:
    """The part of a composite (vision and text) config that describes the language model."""
    if not isinstance(hf, dict) or not isinstance(hf.get("model_type"), str):
        raise UserError("config.json has no model_type; is this the config of a Hugging Face model?")
    outer = hf["model_type"]
    if isinstance(hf.get("text_config"), dict):
        tied = {"tie_word_embeddings": hf["tie_word_embeddings"]} if "tie_word_embeddings" in hf else {}
        inner = {"gemma3": "gemma3_text", "mistral3": "mistral"}.get(outer, outer)
        hf = {"model_type": inner} | tied | hf["text_config"]
    supported = sorted([*SWITCHES, *COMPOSITE])
    if hf["model_type"] not in SWITCHES:
        raise UserError(f"model_type {hf['model_type']!r} is not supported; supported: {', '.join(supported)}")
    return hf


def _refuse(hf: dict[str, Any]) -> None:
    """Raises for fields that would change the maths in a way that the model does not implement."""
    refused = {
        "quantization_config": "load a checkpoint that is not quantized, or a .gguf file",
        "alibi": "only rotary position embeddings are supported",
        "use_bidirectional_attention": "only causal attention is supported",
        "add_cross_attention": "only decoder-only models are supported",
        "is_encoder_decoder": "only decoder-only models are supported",
    }
    for name, remedy in refused.items():
        if hf.get(name):
            raise UserError(f"config.json sets {name}={str(hf[name])[:60]}, which is not supported: {remedy}")


def _activation(name: str) -> str:
    if name not in ACTIVATIONS:
        raise UserError(f"activation {name!r} is not supported; supported: {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


def _family_fields(model_type: str, hf: dict[str, Any]) -> dict[str, Any]:
    """What the field map cannot say because a field means something else, or exists only, in this family."""
    if model_type == "qwen2":  # q, k and v always have biases, whatever attention_bias says
        return {"proj_bias": False}
    if model_type == "phi":
        norm = {"qk_norm": "head", "qk_norm_bias": True} if hf.get("qk_layernorm") else {}
        return dict.fromkeys(("qkv_bias", "proj_bias", "mlp_bias"), True) | norm
    if model_type == "gpt_neox":
        heads = {"n_query_groups": hf["num_attention_heads"], "mlp_bias": True}
        return heads | {"parallel_residual": bool(hf["use_parallel_residual"])}
    if model_type == "falcon":
        return _falcon_fields(hf)
    if model_type == "stablelm":
        parallel = bool(hf.get("use_parallel_residual", False))
        norm = {"qk_norm": "per_head"} if hf.get("qk_layernorm") else {}
        residual = {"parallel_residual": parallel, "shared_norm": parallel}
        return residual | norm | {"qkv_bias": bool(hf.get("use_qkv_bias", False)), "proj_bias": False}
    if model_type == "starcoder2":
        return dict.fromkeys(("qkv_bias", "proj_bias", "mlp_bias"), bool(hf["use_bias"]))
    if model_type == "olmo":
        return {"clip_qkv": hf.get("clip_qkv")}
    if model_type == "granite":
        scales = {
            "embedding_scale": hf.get("embedding_multiplier", 1.0),
            "attn_scale": hf.get("attention_multiplier", 1.0),
        }
        scales["logit_scale"] = 1 / hf.get("logits_scaling", 1.0)
        return scales | {"residual_scale": hf.get("residual_multiplier", 1.0)}
    if model_type.startswith("gemma"):
        fields = {"embedding_scale": hf["hidden_size"] ** 0.5}
        if model_type != "gemma":  # gemma's hidden_act says gelu where it was trained with the tanh approximation
            fields["act"] = _activation(hf.get("hidden_activation", "gelu_pytorch_tanh"))
            fields["attn_scale"] = hf["query_pre_attn_scalar"] ** -0.5
            fields["attn_softcap"] = hf.get("attn_logit_softcapping")
            fields["final_softcap"] = hf.get("final_logit_softcapping")
        return fields
    return {}


def _falcon_fields(hf: dict[str, Any]) -> dict[str, Any]:
    new, n_head = bool(hf.get("new_decoder_architecture")), hf["num_attention_heads"]
    groups = hf.get("num_kv_heads", n_head) if new else (1 if hf["multi_query"] else n_head)
    parallel = new or bool(hf["parallel_attn"])
    two_norms = new and hf.get("num_ln_in_parallel_attn", 2) == 2
    fields = dict.fromkeys(("qkv_bias", "proj_bias", "mlp_bias"), bool(hf.get("bias", False)))
    fields |= {"n_query_groups": groups, "parallel_residual": parallel, "shared_norm": parallel and not two_norms}
    return fields | {
        "intermediate_size": hf.get("ffn_hidden_size", 4 * hf["hidden_size"]),
        "act": _activation(hf["activation"]),
    }


def _expert_fields(hf: dict[str, Any], n_layer: int) -> dict[str, Any]:
    n_expert = hf.get("num_local_experts", hf.get("num_experts", 0)) if "num_experts_per_tok" in hf else 0
    if not n_expert:
        return {}
    step, dense = hf.get("decoder_sparse_step", 1), hf.get("mlp_only_layers", [])
    return {
        "n_expert": n_expert,
        "n_expert_per_token": hf["num_experts_per_tok"],
        "moe_intermediate_size": hf["intermediate_size" if hf["model_type"] == "mixtral" else "moe_intermediate_size"],
        "moe_layers": [i not in dense and (i + 1) % step == 0 for i in range(n_layer)],
        "norm_topk": bool(hf.get("norm_topk_prob", hf["model_type"] == "mixtral")),
    }


def _window_fields(model_type: str, hf: dict[str, Any], n_layer: int) -> dict[str, Any]:
    """Which layers see a window only. A window may be written but off (Qwen), or on for every layer (Mistral)."""
    window = hf.get("sliding_window") or None
    if hf.get("use_sliding_window", True) is False and model_type not in ALWAYS_WINDOWED:
        window = None
    types = hf.get("layer_types") if model_type in LAYERED else None
    if types is not None:
        if unknown := [kind for kind in types if kind not in LAYER_TYPES]:
            raise UserError(f"layer_types has {unknown[0]!r}, which is not supported; supported: {list(LAYER_TYPES)}")
        if len(types) != n_layer:
            raise UserError(f"config.json lists {len(types)} layer_types for {n_layer} layers")
        types = [LAYER_TYPES[kind] for kind in types]
    elif model_type in WINDOW_PATTERN:
        n = hf.get("sliding_window_pattern", hf.get("_sliding_window_pattern", WINDOW_PATTERN[model_type]))
        types = ["sliding" if (i + 1) % n else "full" for i in range(n_layer)]
    elif model_type in ALWAYS_WINDOWED:
        types = ["sliding"] * n_layer
    elif model_type.startswith("qwen") and hf.get("use_sliding_window"):
        first = 0 if model_type == "qwen3_moe" else hf.get("max_window_layers", 28)
        types = ["sliding" if i >= first else "full" for i in range(n_layer)]
    elif model_type == "smollm3" and hf.get("use_sliding_window"):
        types = ["full" if uses else "sliding" for uses in positions_used(hf, n_layer)]
    if window is None or types is None:
        types = ["full"] * n_layer
    return {"window": window if "sliding" in types else None, "layer_types": types}
