"""Tiny random models of every supported family, made by transformers: the independent reference of many tests.

Every parameter is random, norms and biases too, and large enough (std 0.2) that logits are no ties.
"""

import json
import os
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel

BASE = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4}
BASE |= {
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MHA = {"num_key_value_heads": 4}
WIDE_HEAD = {"head_dim": 24}  # n_head * head_size != n_embd
HALF_SLIDING = {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 8}


def rope(**values: object) -> dict:
    return {"rope_parameters": {"rope_theta": 10000.0, **values}}


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 64}
LONGROPE = {"rope_type": "longrope", "short_factor": [1.0 + 0.1 * i for i in range(8)]}
LONGROPE |= {"long_factor": [1.0 + 0.5 * i for i in range(8)], "original_max_position_embeddings": 32}
GRANITE = {"embedding_multiplier": 3.0, "attention_multiplier": 0.2, "residual_multiplier": 0.3, "logits_scaling": 4.0}
BIASES = {"attention_bias": True, "mlp_bias": True}
GEMMA = {"head_dim": 16, "query_pre_attn_scalar": 20}
PLAIN = {"rope_theta": 10000.0, "rope_type": "default"}
OLMO3_YARN = {"rope_parameters": {"full_attention": PLAIN | YARN, "sliding_attention": PLAIN}}
MOE = {"num_experts": 8, "num_local_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
OLD_FALCON = {"new_decoder_architecture": False, "num_kv_heads": 4}

# name of the case -> (model_type, fields of its config that differ from BASE)
FAMILIES: dict[str, tuple[str, dict]] = {
    "llama": ("llama", {}),
    "llama-wide-bias-tied": ("llama", WIDE_HEAD | BIASES | {"tie_word_embeddings": True}),
    "llama-mqa": ("llama", {"num_key_value_heads": 1}),
    "llama3": ("llama", rope(**LLAMA3)),
    "llama-linear": ("llama", rope(rope_type="linear", factor=4.0)),
    "llama-dynamic": ("llama", rope(rope_type="dynamic", factor=2.0)),
    "llama-yarn": ("llama", rope(**YARN) | {"head_dim": 32}),
    "llama-yarn-mscale": ("llama", rope(**YARN, mscale=1.0, mscale_all_dim=0.5, truncate=False) | {"head_dim": 32}),
    "mistral-window": ("mistral", {"sliding_window": 8}),
    "ministral": ("ministral", HALF_SLIDING | {"head_dim": 16}),
    "mixtral": ("mixtral", MOE | {"sliding_window": None}),
    "qwen2": ("qwen2", {}),
    "qwen2-window": ("qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2}),
    "qwen3": ("qwen3", WIDE_HEAD),
    "qwen3_moe": ("qwen3_moe", MOE | {"head_dim": 16, "norm_topk_prob": True, "mlp_only_layers": [1]}),
    "qwen3_moe-plain-weights": ("qwen3_moe", MOE | {"head_dim": 16, "norm_topk_prob": False, "decoder_sparse_step": 2}),
    "gemma": ("gemma", {"head_dim": 16}),
    "gemma2": ("gemma2", GEMMA | {"sliding_window": 8, "attn_logit_softcapping": 5.0}),
    "gemma3_text": ("gemma3_text", HALF_SLIDING | GEMMA),
    "phi": ("phi", MHA),
    "phi-qk-norm": ("phi", {"qk_layernorm": True}),
    "phi3": ("phi3", {"sliding_window": 8}),
    "phi3-longrope": ("phi3", {"original_max_position_embeddings": 32, **rope(**LONGROPE)}),
    "gpt_neox": ("gpt_neox", MHA),
    "gpt_neox-sequential": ("gpt_neox", MHA | {"use_parallel_residual": False}),
    "falcon-7b-like": ("falcon", OLD_FALCON | {"multi_query": True, "bias": True, "tie_word_embeddings": False}),
    "falcon-mha-sequential": ("falcon", OLD_FALCON | {"multi_query": False, "parallel_attn": False}),
    "falcon-40b-like": ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "falcon-11b-like": ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1}),
    "stablelm": ("stablelm", {}),
    "stablelm-parallel": ("stablelm", {"use_parallel_residual": True, "qk_layernorm": True, "use_qkv_bias": True}),
    "olmo": ("olmo", {"clip_qkv": 0.5}),
    "olmo2": ("olmo2", {}),
    "olmo3": ("olmo3", HALF_SLIDING),
    "olmo3-yarn": ("olmo3", HALF_SLIDING | OLMO3_YARN),
    "smollm3": ("smollm3", {}),
    "granite": ("granite", GRANITE),
    "starcoder2": ("starcoder2", {"sliding_window": 8}),
}  # fmt: skip


def make_hf_model(name: str, seed: int = 0) -> PreTrainedModel:
    model_type, fields = FAMILIES[name]
    config = CONFIG_MAPPING[model_type](**{**BASE, **fields})
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval().float()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for key, p in model.named_parameters():
            p.copy_(
                torch.randn(p.shape, generator=generator) * 0.2
                + (1.0 if ("norm" in key or "ln_" in key) and "bias" not in key else 0.0)
            )
    model.tie_weights()
    return model


def save_hf_model(model: PreTrainedModel, folder: Path) -> Path:
    model.save_pretrained(folder)
    return folder


def hub_era(config: dict) -> dict:
    """The same config.json in the layout that almost every file on the hub has (transformers before 5)."""
    config = dict(config)
    values = config.pop("rope_parameters")
    if "full_attention" in values:
        config["rope_theta"] = values["full_attention"]["rope_theta"]
        if config["model_type"].startswith("gemma3"):
            config["rope_local_base_freq"] = values["sliding_attention"]["rope_theta"]
        values = {k: v for k, v in values["full_attention"].items() if k != "rope_theta"}
    else:
        values = dict(values)
        config["rope_theta"] = values.pop("rope_theta")
        partial = values.pop("partial_rotary_factor", None)
        if partial is not None:
            config["rotary_pct" if config["model_type"] == "gpt_neox" else "partial_rotary_factor"] = partial
    if values.get("rope_type", "default") != "default":
        values["type"] = values.pop("rope_type")
        config["rope_scaling"] = values
    return config


def read_config(folder: Path) -> dict:
    return json.loads((folder / "config.json").read_text())
