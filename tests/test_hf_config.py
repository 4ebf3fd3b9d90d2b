"""config.json -> Config: both layouts, files that leave fields out, and refusal of what we would compute wrongly."""

import json
from pathlib import Path

import pytest
from families import FAMILIES, hub_era, make_hf_model, read_config

from lit_gen.config import Config
from lit_gen.utils import UserError

LLAMA = {"model_type": "llama", "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}


@pytest.mark.parametrize("name", FAMILIES)
def test_both_layouts_of_the_rotary_fields_are_read_alike(name: str, tmp_path: Path) -> None:
    make_hf_model(name).config.save_pretrained(tmp_path)
    config = read_config(tmp_path)
    assert "rope_parameters" in config and "rope_theta" not in config
    assert Config.from_hf(hub_era(config)) == Config.from_hf(config)


@pytest.mark.parametrize("name", FAMILIES)
def test_json_round_trip(name: str, tmp_path: Path) -> None:
    make_hf_model(name).config.save_pretrained(tmp_path)
    config = Config.from_hf(tmp_path)
    config.to_json(tmp_path / "lit_config.json")
    assert Config.from_json(tmp_path / "lit_config.json") == config


def test_fields_that_equal_the_class_default_may_be_missing(tmp_path: Path) -> None:
    """A composite file leaves out what equals transformers' defaults; those are asked from transformers itself."""
    from transformers import CONFIG_MAPPING

    kept = ("model_type", "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
    for model_type in sorted({kind for kind, _ in FAMILIES.values()}):
        full = json.loads(CONFIG_MAPPING[model_type]().to_json_string(use_diff=False))
        bare = {key: full[key] for key in kept if key in full}
        assert Config.from_hf(bare) == Config.from_hf(full), model_type


def test_text_config_of_a_vision_model_is_used() -> None:
    inner = {key: value for key, value in LLAMA.items() if key != "model_type"} | {"num_key_value_heads": 2}
    config = Config.from_hf({"model_type": "mistral3", "text_config": inner, "vision_config": {}})
    assert (config.model_type, config.n_layer, config.window) == ("mistral", 2, 4096)
    nested = {"model_type": "gemma3", "tie_word_embeddings": False, "text_config": {"model_type": "gemma3_text"}}
    assert not Config.from_hf(nested).tie_embeddings


def test_null_switches_off_what_the_class_has_by_default() -> None:
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    for model_type in ("mistral", "gemma2"):
        by_default = Config.from_hf({"model_type": model_type, "vocab_size": 9, **sizes})
        off = {"sliding_window": None, "attn_logit_softcapping": None, "head_dim": None}
        config = Config.from_hf({"model_type": model_type, "vocab_size": 9, **sizes, **off})
        assert by_default.window == 4096 and "sliding" in by_default.layer_types
        assert config.window is None and set(config.layer_types) == {"full"}
        assert config.attn_softcap is None and config.head_size == 8


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "mamba"}, "model_type 'mamba' is not supported; supported: .*llama.*qwen3"),
        ({"model_type": None}, "has no model_type"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config=.*not quantized"),
        ({"model_type": "falcon", "alibi": True}, "alibi=True.*rotary"),
        ({"model_type": "gemma3_text", "use_bidirectional_attention": True}, "use_bidirectional_attention.*causal"),
        ({"hidden_act": "xielu"}, "activation 'xielu' is not supported; supported: silu"),
        ({"rope_scaling": {"type": "fancy", "factor": 2.0}}, "rope_type 'fancy' is not supported; supported: default"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "llama3.*has no 'low_freq_factor'"),
        ({"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}}, "1 numbers, not 4"),
        (
            {"model_type": "qwen2", "layer_types": ["full_attention", "linear_attention"]},
            "'linear_attention', which is not supported",
        ),
        ({"model_type": "qwen2", "layer_types": ["full_attention"]}, "lists 1 layer_types for 2 layers"),
        ({"num_key_value_heads": 3}, "4 query heads cannot share 3"),
        ({"num_hidden_layers": None}, "has num_hidden_layers=None"),
        ({"vocab_size": -5}, "vocab_size=-5"),
        ({"num_attention_heads": "four"}, "num_attention_heads='four'"),
    ],
)
def test_what_would_be_computed_wrongly_is_refused_by_name(changes: dict, message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        Config.from_hf(LLAMA | changes)
    assert "\n" not in str(error.value)


WRONG_TYPES = {"head_dim": "x", "hidden_act": 5, "intermediate_size": 1.5, "rms_norm_eps": "x", "rope_theta": "x"}
WRONG_TYPES |= {"num_key_value_heads": [2], "rope_scaling": 5, "rope_parameters": [1], "tie_word_embeddings": {}}
WRONG_TYPES |= {"max_position_embeddings": 1e30, "hidden_size": True}


@pytest.mark.parametrize("field", WRONG_TYPES)
def test_fields_of_a_wrong_type_are_one_clear_line(field: str) -> None:
    if field == "tie_word_embeddings":
        assert not Config.from_hf(LLAMA | {field: {}}).tie_embeddings
        return
    with pytest.raises(UserError) as error:
        Config.from_hf(LLAMA | {field: WRONG_TYPES[field]})
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "linear", "factor": 0},
        {"rope_type": "yarn", "factor": -1.0},
        {"rope_type": ["linear"]},
        {"rope_type": "factors", "factors": [0.0] * 4},
        {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": 5},
        {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [1.0] * 4, "factor": 2.0}
        | {"original_max_position_embeddings": 1},
        {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 4.0},
    ],
)
def test_rotary_numbers_that_make_no_sense_are_refused(scaling: dict) -> None:
    with pytest.raises(UserError):
        Config.from_hf(LLAMA | {"rope_scaling": scaling})


def test_lit_config_that_was_edited_badly_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "lit_config.json"
    Config.from_hf(LLAMA).to_json(file)
    good = json.loads(file.read_text())
    changes = [{"act": "tanh"}, {"clip_qkv": "x"}, {"ropes": []}, {"norm": 5}, {"rope_layers": [1, 1]}, {"extra": 1}]
    changes += [{"layer_types": ["ring", "full"]}, {"n_expert": 2, "n_expert_per_token": 3, "moe_layers": [True, True]}]
    for content in (5, None, "x", [], *(good | change for change in changes)):
        file.write_text(json.dumps(content))
        with pytest.raises(UserError):
            Config.from_json(file)


def test_fields_that_a_family_does_not_read_change_nothing() -> None:
    ignored = {"layer_types": ["sliding_attention"] * 2, "sliding_window": 4, "use_sliding_window": True}
    assert Config.from_hf(LLAMA | ignored | {"partial_rotary_factor": 0.5}) == Config.from_hf(LLAMA)


def test_smollm3_slides_where_it_has_no_positions() -> None:
    config = Config.from_hf(LLAMA | {"model_type": "smollm3", "num_hidden_layers": 4, "num_key_value_heads": 2}
                            | {"use_sliding_window": True, "sliding_window": 8})  # fmt: skip
    assert config.layer_types == ["full"] * 3 + ["sliding"] and config.rope_layers == [0, 0, 0, -1]


def test_trailing_commas_are_forgiven_and_damage_is_not(tmp_path: Path) -> None:
    text = json.dumps(LLAMA)[:-1] + ",\n}"
    (tmp_path / "config.json").write_text(text)
    assert Config.from_hf(tmp_path).n_layer == 2
    (tmp_path / "config.json").write_text(text[:-2])
    with pytest.raises(UserError, match=r"config\.json is not JSON"):
        Config.from_hf(tmp_path)


def test_no_model_name_decides_anything() -> None:
    """litgpt chose the architecture by the folder's name; a renamed fine-tune converted wrongly."""
    assert Config.from_hf(LLAMA | {"_name_or_path": "google/gemma-2b"}) == Config.from_hf(LLAMA)
