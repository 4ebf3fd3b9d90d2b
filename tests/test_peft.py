"""PEFT folders: every family's modules reach the right rows, names match as PEFT matches them, the rest is refused."""

import copy
import json
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from adapters import FIELDS, Pairs, random_pairs, write_peft
from conftest import llama_config, randomized
from families import FAMILIES, make_hf_model
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from lit_gen.lora import load_lora, merge_lora
from lit_gen.lora_rows import attach_loras
from lit_gen.model import GPT
from lit_gen.utils import UserError

IDX = torch.randint(3, 128, (2, 11), generator=torch.Generator().manual_seed(1))
Q, V = "model.layers.{}.self_attn.q_proj", "model.layers.{}.self_attn.v_proj"


@pytest.fixture(autouse=True)
def without_gradients():
    with torch.no_grad():
        yield


def ways(model: GPT, folder: Path) -> list[Tensor]:
    """Logits with an adapter merged, and beside the weights."""
    lora = load_lora(folder, model.config)
    merged = merge_lora(copy.deepcopy(model), lora)
    return [merged(IDX), attach_loras(copy.deepcopy(model), {"a": lora})(IDX)]


def linears(hf: nn.Module) -> dict[str, tuple[int, int]]:
    shapes = {name: tuple(m.weight.shape) for name, m in hf.named_modules() if isinstance(m, nn.Linear)}
    return {name: shape for name, shape in shapes.items() if name not in ("lm_head", "embed_out")}


@pytest.mark.parametrize("name", FAMILIES)
def test_every_linear_layer_of_every_family(name: str, family: Callable, tmp_path: Path) -> None:
    """Against transformers, to whose weights the updates are added by hand; each module has a rank and an alpha."""
    made, pairs, ranks, alphas = family(name), {}, {}, {}
    experts = any(made.model.config.moe_layers)
    dtype = torch.float32 if experts else torch.float64  # in which transformers has no experts
    hf, model = copy.deepcopy(made.hf).to(dtype), copy.deepcopy(made.model).to(dtype)
    for i, (module, shape) in enumerate(linears(hf).items()):
        r, alpha = 1 + i % 5, 2 + i % 3
        pairs |= random_pairs({module: shape}, r, seed=i, std=0.1)
        ranks[module.replace(".", r"\.")], alphas[module] = r, alpha
        a, b = pairs[module]
        hf.get_submodule(module).weight += alpha / r**0.5 * b.to(dtype) @ a.to(dtype)
    write_peft(tmp_path, pairs, target_modules="all-linear", rank_pattern=ranks, alpha_pattern=alphas, use_rslora=True)
    expected = hf(IDX).logits
    assert (expected - model(IDX)).abs().max() > 0.1
    merged, beside = ways(model, tmp_path)
    assert (merged - beside).abs().max() <= (1e-4 if experts else 1e-9)
    assert (merged - expected).abs().max() <= 1e-4


CONFIGS = {
    "plain": {"target_modules": ["q_proj", "v_proj"]},
    "all-linear": {"target_modules": "all-linear", "use_rslora": True},
    "regex": {"target_modules": r".*\.(0|2)\..*(q_proj|down_proj)"},
    "layers": {"target_modules": ["k_proj", "up_proj"], "layers_to_transform": [1, 3]},
    "layer": {"target_modules": ["v_proj"], "layers_to_transform": 2, "layers_pattern": "layers"},
    "excluded": {"target_modules": ["q_proj", "o_proj"], "exclude_modules": ["layers.1.self_attn.o_proj"]},
    "exclude regex": {"target_modules": "all-linear", "exclude_modules": r".*mlp.*"},
    "full names": {"target_modules": [Q.format(1), V.format(0)]},
    "patterns": {
        "target_modules": ["q_proj", "v_proj", "down_proj"],
        "rank_pattern": {"layers.0.self_attn.q_proj": 7, "down_proj": 2, r"layers\.[12]\..*v_proj": 3, "_proj": 5},
        "alpha_pattern": {r"^model.layers.3.*": 11, "self_attn.v_proj": 5},
    },
}


@pytest.mark.parametrize("case", CONFIGS)
def test_folders_that_peft_itself_wrote(case: str, family: Callable, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    made = family("llama")
    with torch.enable_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fields = {"r": 4, "lora_alpha": 6, "task_type": "CAUSAL_LM", **CONFIGS[case]}
        theirs = peft.get_peft_model(copy.deepcopy(made.hf), peft.LoraConfig(**fields)).eval()
        generator = torch.Generator().manual_seed(3)
        for name, parameter in theirs.named_parameters():
            if "lora_" in name:
                parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
        theirs.save_pretrained(tmp_path)
    expected = theirs(IDX).logits
    assert (expected - made.model(IDX)).abs().max() > 0.1
    for logits in ways(made.model, tmp_path):
        assert (logits - expected).abs().max() <= 1e-4


@pytest.mark.parametrize("name", ["gpt_neox", "falcon-40b-like", "llama-wide-bias-tied", "phi3", "starcoder2"])
def test_folders_that_peft_wrote_for_fused_and_wide_layers(name: str, family: Callable, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    made = family(name)
    with torch.enable_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = peft.LoraConfig(r=4, lora_alpha=6, task_type="CAUSAL_LM", target_modules="all-linear")
        theirs = peft.get_peft_model(copy.deepcopy(made.hf), config).eval()
        for i, (key, parameter) in enumerate(theirs.named_parameters()):
            if "lora_" in key:
                draw = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(i))
                parameter.data.copy_(draw * 0.1)
        theirs.save_pretrained(tmp_path)
    expected = theirs(IDX).logits
    for logits in ways(made.model, tmp_path):
        assert (logits - expected).abs().max() <= 1e-4 * max(1.0, float(expected.abs().max()))


def test_prefixes_of_composite_models_and_bin_files(family: Callable, tmp_path: Path) -> None:
    model = family("llama").model
    pairs = random_pairs({Q.format(i): (64, 64) for i in range(4)})
    plain = load_lora(write_peft(tmp_path / "a", pairs), model.config)
    nested = {f"model.language_model.{name.removeprefix('model.')}": pair for name, pair in pairs.items()}
    write_peft(tmp_path / "b", nested)
    tensors = load_file(tmp_path / "b/adapter_model.safetensors")
    torch.save(tensors, tmp_path / "b/adapter_model.bin")
    (tmp_path / "b/adapter_model.safetensors").unlink()
    other = load_lora(tmp_path / "b", model.config)
    for name, parts in plain.items():
        assert torch.equal(parts[0].a, other[name][0].a) and parts[0].rows == other[name][0].rows == slice(0, 64)


class Evil:
    def __reduce__(self) -> tuple:
        return Path.touch, (Path("evil"),)


def test_a_bin_file_runs_no_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = write_peft(tmp_path / "a", random_pairs({Q.format(0): (64, 64)}))
    (folder / "adapter_model.safetensors").unlink()
    torch.save({"x": Evil()}, folder / "adapter_model.bin")
    with pytest.raises(UserError, match="plain tensors"):
        load_lora(folder, llama_config())
    assert not Path("evil").exists()


def good_pairs() -> Pairs:
    return random_pairs({Q.format(i): (64, 64) for i in range(2)})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"use_dora": True}, "use_dora = True"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"lora_bias": True}, "lora_bias"),
        ({"bias": "all"}, "bias = 'all'"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out"),
        ({"target_parameters": ["mlp.experts.gate_up_proj"]}, "target_parameters"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices"),
        ({"megatron_config": {"x": 1}}, "megatron_config"),
        ({"layer_replication": [[0, 2]]}, "layer_replication"),
        ({"alora_invocation_tokens": [5]}, "alora_invocation_tokens"),
        ({"use_qalora": True}, "use_qalora"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights = 'pissa'"),
        ({"from_the_future": 0.5}, "from_the_future"),
        ({"peft_type": "LOHA"}, "peft_type 'LOHA'"),
        ({"task_type": "SEQ_CLS"}, "task_type = 'SEQ_CLS'"),
        ({"r": None}, "no r that"),
        ({"r": 0}, "no r that"),
        ({"lora_alpha": None}, "no lora_alpha that"),
        ({"lora_alpha": "8"}, "no lora_alpha that"),
        ({"rank_pattern": {"q_proj": "x"}}, "rank_pattern"),
        ({"alpha_pattern": [1]}, "alpha_pattern"),
        ({"target_modules": None}, "target_modules"),
        ({"r": 5}, "model.layers.0.self_attn.q_proj of rank 4, and .* says 5"),
        ({"rank_pattern": {"layers.1.self_attn.q_proj": 3}}, "model.layers.1.self_attn.q_proj of rank 4"),
        ({"target_modules": ["k_proj"]}, "model.layers.0.self_attn.q_proj, which target_modules"),
        ({"target_modules": ["q_proj", "v_proj"]}, "lacks model.layers.0.self_attn.v_proj"),
        ({"layers_to_transform": [0]}, "model.layers.1.self_attn.q_proj, which target_modules"),
        ({"target_modules": "*q_proj"}, "no regular expression"),
    ],
)
def test_fields_that_would_go_wrong_are_named(fields: dict, message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message) as error:
        load_lora(write_peft(tmp_path, good_pairs(), **fields), llama_config())
    assert "\n" not in str(error.value) and str(tmp_path) in str(error.value) or "regular" in message


def test_fields_that_decide_nothing_are_accepted(tmp_path: Path) -> None:
    begun = {"init_lora_weights": "gaussian", "loftq_config": {}, "lora_dropout": 0.1, "peft_version": "0.99"}
    names = {"revision": "main", "auto_mapping": {"x": "y"}, "megatron_core": "megatron.core", "qalora_group_size": 16}
    later = {"some_new_switch": False, "some_new_table": {}, "eva_config": None, "inference_mode": False}
    assert len(load_lora(write_peft(tmp_path, good_pairs(), **begun, **names, **later), llama_config())) == 2


A = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
B = A.replace("lora_A", "lora_B")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({A: None}, "no lora_A of model.layers.0.self_attn.q_proj"),
        ({B: None}, "no lora_B of model.layers.0.self_attn.q_proj"),
        ({A: torch.ones(4, 32)}, r"another model: .*layers.0.self_attn.q_proj.lora_A.weight .* \(4, 32\)"),
        ({B: torch.ones(128, 4)}, r"another model: .*layers.0.self_attn.q_proj.lora_B.weight .*\(128, 4\)"),
        ({B: torch.ones(64, 3)}, r"\(64, 3\)"),
        ({A: torch.ones(())}, "shapes"),
        ({A: torch.full((4, 64), torch.nan)}, "q_proj.lora_A.weight of .* not finite"),
        ({A: torch.ones(4, 64, dtype=torch.int8)}, "int8"),
        ({A.replace("layers.0", "layers.8"): torch.ones(4, 64), B.replace("layers.0", "layers.8"): torch.ones(64, 4)},
         "another model: it has model.layers.8.self_attn.q_proj"),
        ({A.replace("q_proj", "qkv_proj"): torch.ones(4, 64), B.replace("q_proj", "qkv_proj"): torch.ones(64, 4)},
         "another model: it has model.layers.0.self_attn.qkv_proj"),
        ({A.replace("model.layers.0.self_attn", "visual.blocks.0"): torch.ones(4, 64),
          B.replace("model.layers.0.self_attn", "visual.blocks.0"): torch.ones(64, 4)}, "visual.blocks.0.q_proj"),
        ({"base_model.model.model.embed_tokens.lora_embedding_A": torch.ones(4, 9)}, "trained embedding"),
        ({"base_model.model.model.embed_tokens.weight": torch.ones(9, 4)}, "embed_tokens.weight, no part of a plain"),
        ({A.replace("lora_A.weight", "lora_magnitude_vector"): torch.ones(64)}, "DoRA"),
        ({B.replace("weight", "bias"): torch.ones(64)}, "a trained bias"),
        ({"unet.x": torch.ones(1)}, "unet.x"),
        ({A.replace("model.layers", "language_model.model.layers"): torch.ones(4, 64),
          B.replace("model.layers", "language_model.model.layers"): torch.ones(64, 4)}, "twice"),
    ],
)  # fmt: skip
def test_tensors_that_would_go_wrong_are_named(changes: dict, message: str, tmp_path: Path) -> None:
    file = write_peft(tmp_path, good_pairs()) / "adapter_model.safetensors"
    tensors = {name: tensor for name, tensor in {**load_file(file), **changes}.items() if tensor is not None}
    save_file(tensors, file)
    with pytest.raises(UserError, match=message) as error:
        load_lora(tmp_path, llama_config())
    assert "\n" not in str(error.value)


def test_broken_folders_are_one_line(tmp_path: Path) -> None:
    folder = write_peft(tmp_path, good_pairs())
    for name, content, message in (
        ("adapter_model.safetensors", b"\x10", "not a whole safetensors file"),
        ("adapter_config.json", b"[1]", "no JSON object"),
        ("adapter_config.json", b"{", "not JSON"),
    ):
        before = (folder / name).read_bytes()
        (folder / name).write_bytes(content)
        with pytest.raises(UserError, match=message):
            load_lora(folder, llama_config())
        (folder / name).write_bytes(before)
    (folder / "adapter_model.safetensors").unlink()
    with pytest.raises(UserError, match="no adapter_model.safetensors"):
        load_lora(folder, llama_config())


def test_an_adapter_that_names_another_base_is_refused(tmp_path: Path) -> None:
    (tmp_path / "SmolLM2-135M-Instruct.Q8_0").mkdir()
    (tmp_path / "other").mkdir()
    base, other, config = tmp_path / "SmolLM2-135M-Instruct.Q8_0", tmp_path / "other", llama_config()
    for name in ("HuggingFaceTB/SmolLM2-135M-Instruct", "C:\\models\\smollm2_135m_instruct\\", "", None):
        folder = write_peft(tmp_path / "a", good_pairs(), base_model_name_or_path=name)
        assert load_lora(folder, config, base)
        assert load_lora(folder, config)
        if name:
            with pytest.raises(UserError, match="made for (SmolLM2|smollm2)"):
                load_lora(folder, config, other)
    write_peft(tmp_path / "a", good_pairs(), base_model_name_or_path="org/wanted")
    (other / "config.json").write_text(json.dumps({"_name_or_path": "org/wanted"}))
    assert load_lora(tmp_path / "a", config, other)


def test_an_adapter_of_the_tied_head_goes_beside_it_only(tmp_path: Path) -> None:
    hf = make_hf_model("llama-wide-bias-tied")
    model = randomized(llama_config(vocab_size=128, tie_embeddings=True))
    a, b = pair = random_pairs({"lm_head": (128, 64)})["lm_head"]
    lora = load_lora(write_peft(tmp_path, {"lm_head": pair}), model.config)
    with pytest.raises(UserError, match="use it with --merge false"):
        merge_lora(model, lora)
    untied = copy.deepcopy(model)
    untied.lm_head.weight = nn.Parameter(model.wte.weight + 2.0 * b @ a)
    torch.testing.assert_close(attach_loras(copy.deepcopy(model), {"a": lora})(IDX), untied(IDX))
    assert hf.config.tie_word_embeddings and FIELDS["lora_alpha"] / FIELDS["r"] == 2.0
