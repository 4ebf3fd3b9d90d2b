"""A GGUF file gives the config and the tensors of the Hugging Face model that it was made from.

The models are tiny and random, made and saved by transformers. They are written to GGUF as llama.cpp's converter does
it: names from the gguf package's own map, rows of q and k permuted, Gemma's norms plus one.
"""

import json
import random
import re
import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from lit_gen.gguf import GGUFCheckpoint
from lit_gen.utils import UserError

SIZES = {
    "vocab_size": 50,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 7,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 40,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5000.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 3,
    "tie_word_embeddings": False,
}
GEMMA = {"head_dim": 32, "sliding_window": 5, "tie_word_embeddings": True}
FAMILIES = {
    "llama": {"tie_word_embeddings": True},
    "llama biases": {"model_type": "llama", "attention_bias": True, "mlp_bias": True},
    "llama linear": {"model_type": "llama", "rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    "mistral nemo": {"model_type": "llama", "head_dim": 32},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    "qwen2": {"use_sliding_window": False},
    "qwen2 yarn": {
        "model_type": "qwen2",
        "max_position_embeddings": 256,
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    },
    "qwen3": {"head_dim": 32},
    "qwen3_moe": {
        "head_dim": 32,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
    "gemma2": GEMMA | {"query_pre_attn_scalar": 32, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0},
    "gemma2 27B": GEMMA | {"model_type": "gemma2", "num_hidden_layers": 46, "query_pre_attn_scalar": 16},
    "gemma3_text": GEMMA | {"query_pre_attn_scalar": 32, "rope_local_base_freq": 10000.0},
    "gemma3_text linear": GEMMA
    | {
        "model_type": "gemma3_text",
        "query_pre_attn_scalar": 16,
        "num_hidden_layers": 62,
        "rope_local_base_freq": 10000.0,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    },
}
ARCHITECTURES = {"mixtral": "llama", "qwen3_moe": "qwen3moe", "gemma3_text": "gemma3"}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory):
    """A function that makes the Hugging Face model of a family: (hub-era config, tensors under hub names, model)."""
    made = {}

    def make(family: str):
        if family not in made:
            torch.manual_seed(len(made))
            config = SIZES | {"model_type": family} | FAMILIES[family]
            model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), attn_implementation="eager").eval()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.normal_(0, 0.3)
            folder = tmp_path_factory.mktemp("source")
            model.save_pretrained(folder)
            made[family] = (config, load_file(folder / "model.safetensors"), model)
        return made[family]

    return make


def permute(weight: np.ndarray, n_head: int) -> np.ndarray:
    """llama.cpp's order of the rows of q and k, as its converter has it."""
    halves = weight.reshape(n_head, 2, weight.shape[0] // n_head // 2, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def to_gguf_tensors(config: dict, tensors: dict[str, torch.Tensor]) -> dict[str, np.ndarray]:
    kind = config["model_type"]
    arch = {name: key for key, name in gguf.MODEL_ARCH_NAMES.items()}[ARCHITECTURES.get(kind, kind)]
    names = gguf.get_tensor_name_map(arch, config["num_hidden_layers"])
    out, stacks = {}, {}
    for name, tensor in tensors.items():
        array = tensor.float().numpy()
        if kind in ("llama", "mixtral") and ".q_proj." in name:
            array = permute(array, config["num_attention_heads"])
        if kind in ("llama", "mixtral") and ".k_proj." in name:
            array = permute(array, config["num_key_value_heads"])
        if kind.startswith("gemma") and name.endswith("norm.weight"):
            array = array + np.float32(1)
        if match := re.fullmatch(r"(.*experts)\.(\d+)\.(\w+\.weight)", name):
            stacks.setdefault(f"{match[1]}.{match[3]}", {})[int(match[2])] = array
        else:
            out[names.get_name(name, (".weight", ".bias"))] = array
    for name, experts in stacks.items():
        out[names.get_name(name, (".weight", ".bias"))] = np.stack([experts[e] for e in range(len(experts))])
    return out


def to_metadata(config: dict) -> dict:
    fields = {
        "block_count": config["num_hidden_layers"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": config.get("head_dim"),
        "attention.value_length": config.get("head_dim"),
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "attention.sliding_window": config.get("sliding_window"),
        "context_length": config["max_position_embeddings"],
        "rope.freq_base": config["rope_theta"],
        "expert_count": config.get("num_local_experts", config.get("num_experts")),
        "expert_used_count": config.get("num_experts_per_tok"),
        "expert_feed_forward_length": config.get("moe_intermediate_size"),
        "attn_logit_softcapping": config.get("attn_logit_softcapping"),
        "final_logit_softcapping": config.get("final_logit_softcapping"),
        "vocab_size": config["vocab_size"],
    }
    if scaling := config.get("rope_scaling"):
        fields |= {"rope.scaling.type": scaling["rope_type"], "rope.scaling.factor": scaling["factor"]}
        fields["rope.scaling.original_context_length"] = scaling.get("original_max_position_embeddings")
    arch = ARCHITECTURES.get(config["model_type"], config["model_type"])
    metadata = {f"{arch}.{key}": value for key, value in fields.items() if value is not None}
    metadata |= {f"tokenizer.ggml.{name}_token_id": i for name, i in (("bos", 1), ("eos", 2), ("padding", 3))}
    return {"general.architecture": arch, "tokenizer.ggml.tokens": ["a", "ä", ""]} | metadata


def write(path: Path, metadata: dict, tensors: dict[str, np.ndarray], kind: str = "F32") -> Path:
    """Writes a file with the gguf package's writer; matrices are quantised to `kind`, vectors stay float32."""
    writer = gguf.GGUFWriter(path, metadata["general.architecture"])
    for key, value in metadata.items():
        if isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value) if key != "general.architecture" else None
        else:
            writer.add_float32(key, value) if isinstance(value, float) else writer.add_uint32(key, value)
    for name, array in tensors.items():
        if array.dtype == np.float32 and array.ndim > 1 and kind != "F32":
            qtype = gguf.GGMLQuantizationType[kind]
            writer.add_tensor(name, gguf.quants.quantize(array, qtype), raw_dtype=qtype)
        else:
            writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def llama(source):
    """The metadata and the tensors of a small llama file, to be spoilt."""
    config, tensors, _ = source("llama biases")
    return to_metadata(config), to_gguf_tensors(config, tensors)


@pytest.mark.parametrize("family", FAMILIES)
def test_model_from_gguf_equals_the_one_it_was_made_from(family, source, tmp_path):
    config, tensors, model = source(family)
    path = write(tmp_path / "m.gguf", to_metadata(config), to_gguf_tensors(config, tensors))
    checkpoint = GGUFCheckpoint(path)
    assert checkpoint.shapes == {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    found = {name: checkpoint.read(name) for name in checkpoint.shapes}
    exact = 1e-6 if config["model_type"].startswith("gemma") else 0  # 1 + w rounds
    for name, tensor in tensors.items():
        torch.testing.assert_close(found[name], tensor, atol=exact, rtol=0, msg=name)
    for key in SIZES.keys() | FAMILIES[family].keys() - {"use_sliding_window", "rope_scaling"}:
        if config.get(key) is not None:
            assert checkpoint.config[key] == config[key], key

    folder = (
        tmp_path / "hf"
    )  # what a Hugging Face folder of it computes: the config is right in the fields not looked at
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(checkpoint.config))
    save_file(found, folder / "model.safetensors", metadata={"format": "pt"})
    again = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    idx = torch.randint(0, 50, (2, 33), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected, logits = model(idx).logits, again(idx).logits
    torch.testing.assert_close(logits, expected, atol=1e-4 * expected.abs().max().item(), rtol=0)


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0", "Q5_1", "MXFP4"])
@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_rows_of_quantised_tensors(kind, family, source, tmp_path):
    config, tensors, _ = source(family)
    path = write(tmp_path / "m.gguf", to_metadata(config), to_gguf_tensors(config, tensors), kind)
    checkpoint = GGUFCheckpoint(path)
    qtype = gguf.GGMLQuantizationType[kind]
    for name in checkpoint.shapes:
        if tensors[name].ndim == 1:
            expected = tensors[name]
        else:  # blocks lie within a row, so the order of rows does not touch them
            expected = torch.tensor(gguf.quants.dequantize(gguf.quants.quantize(tensors[name].numpy(), qtype), qtype))
        n_rows = expected.shape[0]
        for start, stop in ((0, None), (0, 1), (1, n_rows - 1), (n_rows - 1, n_rows)):
            found = checkpoint.read(name, start, stop)
            assert found.dtype == torch.float32
            assert torch.equal(found, expected[start:stop]), (name, start, stop)


def test_read_returns_a_tensor_of_its_own(llama, tmp_path):
    checkpoint = GGUFCheckpoint(write(tmp_path / "m.gguf", *llama))
    name = "model.layers.0.mlp.up_proj.weight"
    checkpoint.read(name).zero_()
    assert checkpoint.read(name).abs().sum() > 0


def test_llama_equals_transformers_own_gguf_reader(source, tmp_path):
    config, tensors, _ = source("llama")
    metadata = to_metadata(config) | {"tokenizer.ggml.model": "gpt2"}
    write(tmp_path / "m.gguf", metadata, to_gguf_tensors(config, tensors), "Q4_0")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="m.gguf", dtype=torch.float32).state_dict()
    checkpoint = GGUFCheckpoint(tmp_path / "m.gguf")
    assert theirs.keys() - checkpoint.shapes.keys() == {"lm_head.weight"}  # tied
    assert all(torch.equal(checkpoint.read(name), theirs[name]) for name in checkpoint.shapes)


def test_rope_freqs_become_factors(llama, tmp_path):
    metadata, tensors = llama
    factors = [1.0, 1.0, 1.25, 2.0, 4.5, 8.0, 8.0, 8.0]
    path = write(tmp_path / "m.gguf", metadata, tensors | {"rope_freqs.weight": np.array(factors, np.float32)})
    checkpoint = GGUFCheckpoint(path)
    assert checkpoint.config["rope_scaling"] == {"rope_type": "factors", "factors": factors}
    assert not any("rope" in name for name in checkpoint.shapes)


def test_ids_per_layer_fields_and_metadata(llama, tmp_path):
    metadata, tensors = llama
    metadata = metadata | {"tokenizer.ggml.eot_token_id": 7, "llama.attention.head_count_kv": [2] * 7}
    checkpoint = GGUFCheckpoint(write(tmp_path / "m.gguf", metadata, tensors))
    assert checkpoint.config["eos_token_id"] == [2, 7]
    assert checkpoint.config["bos_token_id"] == 1 and checkpoint.config["pad_token_id"] == 3
    assert checkpoint.config["num_key_value_heads"] == 2
    assert checkpoint.metadata["tokenizer.ggml.tokens"] == ["a", "ä", ""]


SPOILT = {  # metadata changes (None: the key is taken away) and tensor changes -> what the message must say
    "architecture": ({"general.architecture": "mamba"}, {}, "mamba.*not supported.*qwen3moe"),
    "missing key": ({"llama.block_count": None}, {}, "llama.block_count is missing"),
    "unknown key": ({"llama.attention.clamp_kqv": 8.0}, {}, "llama.attention.clamp_kqv is not understood"),
    "wrong type": ({"llama.context_length": "long"}, {}, "llama.context_length is 'long', not a positive int"),
    "zero heads": ({"llama.attention.head_count": 0}, {}, "head_count is '0', not a positive int"),
    "more heads than width": ({"llama.attention.head_count": 4000}, {}, "4000 heads of size 0"),
    "layers that differ": ({"llama.feed_forward_length": [96, 64]}, {}, r"feed_forward_length is '\[96, 64\]'"),
    "absurd layers": ({"llama.block_count": 2**32 - 1}, {}, "4294967295 layers, but only 115 tensors"),
    "one layer too few": ({"llama.block_count": 6}, {}, r"tensor blk.6.attn_k.bias is none"),
    "one layer too many": ({"llama.block_count": 8}, {}, "tensor blk.7.attn_norm.weight is missing"),
    "value length": ({"llama.attention.value_length": 8}, {}, "value_length is 8, but the heads have size 16"),
    "part of the rotary": ({"llama.rope.dimension_count": 8}, {}, "dimension_count is 8, but the heads have size 16"),
    "rope kind": ({"llama.rope.scaling.type": "longrope"}, {}, "'longrope' is not supported"),
    "split": ({"split.count": 3}, {}, "llama-gguf-split"),
    "id": ({"tokenizer.ggml.eos_token_id": "</s>"}, {}, "the ids of bos, eos"),
    "alignment": ({"general.alignment": 48}, {}, "general.alignment is 48"),
    "missing tensor": ({}, {"blk.3.ffn_up.weight": None}, "tensor blk.3.ffn_up.weight is missing"),
    "missing bias": ({}, {"blk.3.attn_k.bias": None}, "tensor blk.3.attn_k.bias is missing"),
    "no embedding": ({}, {"token_embd.weight": None}, "tensor token_embd.weight is missing"),
    "surplus tensor": ({}, {"blk.0.attn_sinks.weight": np.ones(4, np.float32)}, "blk.0.attn_sinks.weight is none"),
    "integer tensor": ({}, {"blk.0.ffn_up.bias": np.ones(96, np.int32)}, "blk.0.ffn_up.bias has type 26"),
    "rows": ({}, {"blk.0.attn_k.weight": np.ones((48, 64), np.float32)}, "attn_k.weight has shape.*2 heads of 16 rows"),
    "width": ({}, {"token_embd.weight": np.ones((50, 32), np.float32)}, "rows of 32, but the embedding_length is 64"),
    "rope_freqs length": ({}, {"rope_freqs.weight": np.ones(16, np.float32)}, "not 8 positive numbers"),
    "rope_freqs nan": ({}, {"rope_freqs.weight": np.full(8, np.nan, np.float32)}, "not 8 positive numbers"),
    "rope_freqs and scaling": (
        {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 2.0},
        {"rope_freqs.weight": np.ones(8, np.float32)},
        "both rope_freqs.weight and rope.scaling",
    ),
}


@pytest.mark.parametrize("case", SPOILT)
def test_wrong_content_is_one_line_that_names_the_file_and_the_thing(case, llama, tmp_path):
    changes, new_tensors, message = SPOILT[case]
    metadata = {k: v for k, v in (llama[0] | changes).items() if v is not None}
    tensors = {k: v for k, v in (llama[1] | new_tensors).items() if v is not None}
    path = write(tmp_path / "bad.gguf", metadata, tensors)
    with pytest.raises(UserError, match=message) as error:
        GGUFCheckpoint(path)
    assert str(error.value).startswith(f"{path}: ") and "\n" not in str(error.value)


def test_wrong_number_of_experts(source, tmp_path):
    config, tensors, _ = source("mixtral")
    metadata = to_metadata(config) | {"llama.expert_count": 3}
    with pytest.raises(UserError, match=r"ffn_gate_exps.weight has shape \(4, 96, 64\), not a stack of 3"):
        GGUFCheckpoint(write(tmp_path / "bad.gguf", metadata, to_gguf_tensors(config, tensors)))


@pytest.fixture
def small(llama, tmp_path) -> Path:
    return write(tmp_path / "small.gguf", *llama)


def test_files_that_cannot_be_gguf(small, tmp_path):
    head = small.read_bytes()
    bad = tmp_path / "bad.gguf"
    for content, message in (
        (b"", "cannot be read"),
        (b"GG", "not a GGUF file"),
        (b"PK\3\4" + head[4:], "not a GGUF file"),
        (head[:4] + struct.pack("<I", 1) + head[8:], "version 0x1 is not supported"),
        (head[:4] + struct.pack(">I", 3) + head[8:], "version 0x3000000 is not supported"),
    ):
        bad.write_bytes(content)
        with pytest.raises(UserError, match=message):
            GGUFCheckpoint(bad)
    for path in (tmp_path, tmp_path / "none.gguf"):
        with pytest.raises(UserError, match="cannot be read"):
            GGUFCheckpoint(path)


def test_a_file_that_was_replaced_is_read_anew(llama, small):
    """Its head is kept, since several readers follow each other; another file of the same name and size has its own."""
    metadata, tensors = llama
    before, size = GGUFCheckpoint(small), small.stat().st_size
    (key,) = [key for key in metadata if key.endswith(".rope.freq_base")]
    write(small, metadata | {key: 2 * metadata[key]}, tensors)
    assert small.stat().st_size == size
    assert GGUFCheckpoint(small).config["rope_theta"] == 2 * before.config["rope_theta"]


def test_file_cut_anywhere_is_an_error(small):
    content = small.read_bytes()
    for size in [*range(1, 8000, 61), *range(8000, len(content), 5003), len(content) - 1]:
        small.write_bytes(content[:size])
        with pytest.raises(UserError, match=re.escape(str(small))):
            GGUFCheckpoint(small)


@pytest.mark.parametrize("where", ["tensor count", "field count", "key", "array", "string"])
@pytest.mark.parametrize("value", [2**63, 2**40, 10**6])
def test_absurd_lengths_are_refused_before_anything_is_allocated(where, value, small):
    content = bytearray(small.read_bytes())
    array = content.index(b"tokenizer.ggml.tokens") + len("tokenizer.ggml.tokens") + 8  # after its two types
    offset = {"tensor count": 8, "field count": 16, "key": 24, "array": array, "string": array + 8}[where]
    content[offset : offset + 8] = struct.pack("<Q", value)
    small.write_bytes(content)
    with pytest.raises(UserError):
        GGUFCheckpoint(small)


def test_damaged_bytes_give_a_checkpoint_or_a_user_error(small):
    content = small.read_bytes()
    head = gguf.GGUFReader(small).data_offset
    rng = random.Random(0)
    refused = 0
    for _ in range(800):
        spoilt = bytearray(content)
        for _ in range(rng.choice((1, 1, 8))):
            spoilt[rng.randrange(head)] = rng.choice((0, 1, 9, 127, 255, rng.randrange(256)))
        small.write_bytes(spoilt)
        try:
            checkpoint = GGUFCheckpoint(small)
        except UserError as error:
            refused += 1
            assert "\n" not in str(error)
        else:
            checkpoint.read("model.embed_tokens.weight", 3, 5)
    assert refused > 400
