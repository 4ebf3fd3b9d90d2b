"""What the metadata and the tensor names of a GGUF file mean in Hugging Face's terms.

The facts are those of llama.cpp's converter and graphs. What a file does not say is a constant of its architecture.
"""

import math
from typing import Any

import numpy as np

from lit_gen.utils import UserError

SUPPORTED = ("llama", "qwen2", "qwen3", "qwen3moe", "gemma2", "gemma3")  # "llama" is also Mistral and Mixtral
IGNORED = ("vocab_size", "tensor_data_layout", "pooling_type", "rope.scaling.finetuned")  # change nothing we compute
Shapes = dict[str, tuple[int, ...]]


class Fields:
    """The architecture's own metadata: each field is typed, checked and taken out, so that what is left is unknown."""

    def __init__(self, metadata: dict[str, Any], arch: str) -> None:
        self.prefix = arch + "."
        self.left = {k.removeprefix(self.prefix): v for k, v in metadata.items() if k.startswith(self.prefix)}

    def take(self, name: str, kind: type, default: Any = ...) -> Any:
        value = self.left.pop(name, default)
        if value is ...:
            raise UserError(f"metadata key {self.prefix}{name} is missing")
        if isinstance(value, list) and value and value.count(value[0]) == len(value):  # one number per layer, all equal
            value = value[0]
        if value is default or (kind is str and isinstance(value, str)):
            return value
        if not isinstance(value, kind) or isinstance(value, bool) or not 0 < value < math.inf:
            raise UserError(f"metadata key {self.prefix}{name} is {str(value)[:40]!r}, not a positive {kind.__name__}")
        return float(str(np.float32(value))) if kind is float else value  # 1e-05, not the float32's 9.99999974e-06


def hf_config(metadata: dict[str, Any], shapes: Shapes) -> dict[str, Any]:
    """Returns what the model's config.json says, as far as the file and its architecture's constants tell.

    Args:
        metadata: all key-value pairs of the file.
        shapes: GGUF tensor name to shape, rows first.
    """
    arch = metadata.get("general.architecture")
    if arch not in SUPPORTED:
        raise UserError(f"architecture {str(arch)[:40]!r} is not supported; these are: {', '.join(SUPPORTED)}")
    if metadata.get("split.count", 1) not in (0, 1):
        raise UserError("is one part of a split model; join the parts with llama-gguf-split --merge")
    if len(shapes.get("token_embd.weight", ())) != 2:
        raise UserError("tensor token_embd.weight is missing or not a matrix")
    fields = Fields(metadata, arch)
    config = {"model_type": {"qwen3moe": "qwen3_moe", "gemma3": "gemma3_text"}.get(arch, arch), "hidden_act": "silu"}
    config |= sizes(fields, shapes)
    config |= {
        "rms_norm_eps": fields.take("attention.layer_norm_rms_epsilon", float),
        "rope_theta": fields.take("rope.freq_base", float, ... if arch == "gemma3" else 10000.0),
        "rope_scaling": rope_scaling(fields, config["max_position_embeddings"]),
        "tie_word_embeddings": "output.weight" not in shapes,
        "attention_bias": "blk.0.attn_q.bias" in shapes,
        "mlp_bias": "blk.0.ffn_up.bias" in shapes,
    }
    if arch == "qwen3moe" or (arch == "llama" and fields.left.get("expert_count")):
        config |= experts(fields, arch)
    if arch in ("gemma2", "gemma3"):
        config |= gemma(fields, arch, config)
    ignored = (*IGNORED, "expert_count", "expert_used_count") if arch == "llama" else IGNORED  # a dense llama may say 0
    if unknown := sorted(set(fields.left) - set(ignored)):
        raise UserError(f"metadata key {arch}.{unknown[0]} is not understood, and may change what the model computes")
    return config | special_ids(metadata)


def sizes(fields: Fields, shapes: Shapes) -> dict[str, Any]:
    n_layer, n_embd = fields.take("block_count", int), fields.take("embedding_length", int)
    if n_layer > len(shapes):  # before anything is made for each layer
        raise UserError(f"damaged: {n_layer} layers, but only {len(shapes)} tensors")
    n_head = fields.take("attention.head_count", int)
    n_kv_head = fields.take("attention.head_count_kv", int, n_head)
    head_dim = fields.take("attention.key_length", int, n_embd // n_head)
    if head_dim < 2 or head_dim % 2 or n_head % n_kv_head:
        raise UserError(f"damaged: {n_head} heads of size {head_dim}, {n_kv_head} key/value heads")
    for name in ("attention.value_length", "rope.dimension_count"):
        if (other := fields.take(name, int, head_dim)) != head_dim:
            raise UserError(f"metadata key {fields.prefix}{name} is {other}, but the heads have size {head_dim}")
    vocab_size, width = shapes["token_embd.weight"]
    if width != n_embd:
        raise UserError(f"tensor token_embd.weight has rows of {width}, but the embedding_length is {n_embd}")
    return {
        "num_hidden_layers": n_layer,
        "hidden_size": n_embd,
        "intermediate_size": fields.take("feed_forward_length", int),
        "num_attention_heads": n_head,
        "num_key_value_heads": n_kv_head,
        "head_dim": head_dim,
        "vocab_size": vocab_size,
        "max_position_embeddings": fields.take("context_length", int),
    }


def rope_scaling(fields: Fields, block_size: int) -> dict[str, Any] | None:
    """Linear and YaRN scaling. (Llama 3.1's is a tensor, see `gguf.add_rope_factors`.)"""
    kind = fields.take("rope.scaling.type", str, "linear")
    factor = fields.take("rope.scaling.factor", float, 1.0)
    if kind == "none" or (kind == "linear" and factor == 1.0):
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind != "yarn":
        raise UserError(f"{fields.prefix}rope.scaling.type {kind[:40]!r} is not supported; none, linear and yarn are")
    return {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": fields.take("rope.scaling.original_context_length", int, block_size),
        "beta_fast": fields.take("rope.scaling.yarn_beta_fast", float, 32.0),
        "beta_slow": fields.take("rope.scaling.yarn_beta_slow", float, 1.0),
        # llama.cpp multiplies the file's factor with the paper's 0.1 ln s + 1; Hugging Face has the product
        "attention_factor": fields.take("rope.scaling.attn_factor", float, 1.0) * (0.1 * math.log(factor) + 1.0),
    }


def experts(fields: Fields, arch: str) -> dict[str, Any]:
    n_expert, n_used = fields.take("expert_count", int), fields.take("expert_used_count", int)
    if n_used > n_expert:
        raise UserError(f"damaged: {n_used} of {n_expert} experts are used")
    if arch == "llama":
        return {"model_type": "mixtral", "num_local_experts": n_expert, "num_experts_per_tok": n_used}
    return {
        "num_experts": n_expert,
        "num_experts_per_tok": n_used,
        "moe_intermediate_size": fields.take("expert_feed_forward_length", int),
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def gemma(fields: Fields, arch: str, config: dict[str, Any]) -> dict[str, Any]:
    """What only Gemma 2 and 3 have. The 27B of both, known by its layers, scales queries by n_embd / n_head."""
    n_layer, is_27b = config["num_hidden_layers"], config["num_hidden_layers"] == {"gemma2": 46, "gemma3": 62}[arch]
    query_scalar = config["hidden_size"] // config["num_attention_heads"] if is_27b else config["head_dim"]
    period = fields.take("attention.sliding_window_pattern", int, {"gemma2": 2, "gemma3": 6}[arch])
    found = {
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": query_scalar,
        "sliding_window": fields.take("attention.sliding_window", int, 4096 if arch == "gemma2" else ...),
        "layer_types": ["full_attention" if (i + 1) % period == 0 else "sliding_attention" for i in range(n_layer)],
    }
    if arch == "gemma2":
        found["attn_logit_softcapping"] = fields.take("attn_logit_softcapping", float, 50.0)
        found["final_logit_softcapping"] = fields.take("final_logit_softcapping", float, 30.0)
    else:
        found["rope_local_base_freq"] = fields.take("rope.freq_base_swa", float, 10000.0)
        found["final_logit_softcapping"] = fields.take("final_logit_softcapping", float, None)
    return found


def special_ids(metadata: dict[str, Any]) -> dict[str, Any]:
    """The ids of bos, eos (a list where the end of a turn is another token) and pad; None where the file has none."""
    ids = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos", "eot", "padding")]
    if not all(i is None or (isinstance(i, int) and i >= 0) for i in ids):
        raise UserError(f"damaged: the ids of bos, eos, eot and padding are {str(ids)[:80]}")
    bos, eos, end_of_turn, pad = ids
    if end_of_turn not in (None, eos):
        eos = end_of_turn if eos is None else [eos, end_of_turn]
    return {"bos_token_id": bos, "eos_token_id": eos, "pad_token_id": pad}


def hf_names(config: dict[str, Any]) -> dict[str, str]:
    """Returns GGUF name to Hugging Face name for all tensors of a model; `{}` is the number of an expert in a stack."""
    kind = config["model_type"]
    layer = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "attn_output": "self_attn.o_proj"}
    layer |= {f"attn_{x}": f"self_attn.{x}_proj" for x in "qkv"}
    if kind == "mixtral":
        layer |= {"ffn_gate_inp": "block_sparse_moe.gate", "ffn_gate_exps": "block_sparse_moe.experts.{}.w1"}
        layer |= {"ffn_down_exps": "block_sparse_moe.experts.{}.w2", "ffn_up_exps": "block_sparse_moe.experts.{}.w3"}
    elif kind == "qwen3_moe":
        layer |= {"ffn_gate_inp": "mlp.gate"}
        layer |= {f"ffn_{x}_exps": f"mlp.experts.{{}}.{x}_proj" for x in ("gate", "up", "down")}
    else:
        layer |= {f"ffn_{x}": f"mlp.{x}_proj" for x in ("gate", "up", "down")}
    if kind in ("qwen3", "qwen3_moe", "gemma3_text"):
        layer |= {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
    if kind in ("gemma2", "gemma3_text"):
        layer |= {"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"}
        layer |= {"ffn_norm": "pre_feedforward_layernorm"}
    biased = ["attn_q", "attn_k", "attn_v"] if kind == "qwen2" or config["attention_bias"] else []
    biased += ["attn_output"] if kind != "qwen2" and config["attention_bias"] else []
    biased += ["ffn_gate", "ffn_up", "ffn_down"] if config["mlp_bias"] else []
    tails = [(x, "weight") for x in layer] + [(x, "bias") for x in biased]
    names = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
    if not config["tie_word_embeddings"]:
        names["output.weight"] = "lm_head.weight"
    for i in range(config["num_hidden_layers"]):
        names |= {f"blk.{i}.{x}.{tail}": f"model.layers.{i}.{layer[x]}.{tail}" for x, tail in tails}
    return names
