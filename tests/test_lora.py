"""LoRA: the right rows by the right factor, merged or beside the weights, each row with its own; strict files."""

import copy
import json
from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest
import torch
from adapters import random_lora, random_pairs, write_peft
from conftest import llama_config, neox_config, randomized
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from generate.base import generate
from lit_gen.config import Config
from lit_gen.hf_weights import group
from lit_gen.kernels import load_kernels
from lit_gen.lora import LIT_LORA, LoRAConfig, add_lora, load_lora, merge_lora, save_lora
from lit_gen.lora_layers import LoRALinear
from lit_gen.lora_parts import LoRA, Part
from lit_gen.lora_rows import attach_loras
from lit_gen.model import GPT
from lit_gen.pack import pack_model
from lit_gen.quantize import quantize_model
from lit_gen.settings import Request
from lit_gen.utils import UserError

MOE = {"n_expert": 4, "n_expert_per_token": 2, "moe_intermediate_size": 32, "moe_layers": [False, True]}
IDX = torch.randint(0, 512, (2, 9), generator=torch.Generator().manual_seed(1))


def tiny_config(**changes: object) -> Config:
    return llama_config(n_layer=1, n_head=4, n_query_groups=2, head_size=1, n_embd=4, vocab_size=8, **changes)


# Rows and factors


@pytest.mark.parametrize("model_type", ["llama", "falcon"])
def test_updates_of_q_and_v_reach_their_rows(model_type: str, tmp_path: Path) -> None:
    """Lightning-AI/litgpt#900: of 4 query heads in 2 groups; files of falcon have the heads group by group."""
    biased = {} if model_type == "llama" else {"gated": False, "act": "gelu", "norm": "layer", "norm_bias": True}
    config = tiny_config(model_type=model_type, **biased)
    rows = torch.tensor([1.0, 1, 1, 1, 0, 0, 3, 3])
    interleaved = torch.tensor([1.0, 1, 0, 3, 1, 1, 0, 3])
    assert torch.equal(group(rows, config), interleaved)
    a = torch.ones(1, 4)
    if model_type == "llama":
        q, v = torch.ones(4, 1), torch.full((2, 1), 3.0)
        pairs = {"model.layers.0.self_attn.q_proj": (a, q), "model.layers.0.self_attn.v_proj": (a, v)}
    else:
        pairs = {"transformer.h.0.self_attention.query_key_value": (a, interleaved[:, None])}
    lora = load_lora(write_peft(tmp_path, pairs, r=1, lora_alpha=1), config)
    model = randomized(config)
    before = model.h[0].attn.qkv.weight.clone()
    merge_lora(model, lora)
    torch.testing.assert_close(model.h[0].attn.qkv.weight - before, rows[:, None].expand(8, 4))


def test_factor_is_alpha_by_rank_of_the_file_in_both_formats(tmp_path: Path) -> None:
    """Blaizzy/mlx-vlm#986: r 8 and alpha 16 make 2.0, so that ones make entries of 2 * 8."""
    config = tiny_config()
    pairs = {"model.layers.0.self_attn.o_proj": (torch.ones(8, 4), torch.ones(4, 8))}
    peft = load_lora(write_peft(tmp_path / "peft", pairs, r=8, lora_alpha=16), config)
    trained = add_lora(randomized(config), LoRAConfig(r=8, alpha=16, targets=("proj",)))
    for parameter in trained.parameters():
        if parameter.requires_grad:
            parameter.data.fill_(1.0)
    save_lora(trained, tmp_path / LIT_LORA)
    lit = load_lora(tmp_path, config)
    logits = []
    for lora in (peft, lit):
        (part,) = lora["h.0.attn.proj.weight"]
        assert part.scale == 2.0 and lora.keys() == {"h.0.attn.proj.weight"}
        model = randomized(config)
        before = model.h[0].attn.proj.weight.clone()
        merge_lora(model, lora)
        assert (model.h[0].attn.proj.weight - before - 16).abs().max() < 1e-5
        logits.append(model(IDX % 8))
    assert torch.equal(*logits)


# Merged = unmerged


CASES = {"gqa": llama_config(), "mqa": llama_config(n_query_groups=1), "wide": llama_config(head_size=24)}
CASES |= {
    "wide bias": llama_config(head_size=24, qkv_bias=True, qk_norm="head"),
    "tied": llama_config(tie_embeddings=True),
}
PATTERNS = [
    tuple(p for p, on in zip("qkv", bits, strict=True) if on) for bits in product((0, 1), repeat=3) if any(bits)
]


@pytest.mark.parametrize("parts", PATTERNS, ids="".join)
@pytest.mark.parametrize("case", CASES)
def test_merged_equals_unmerged(case: str, parts: tuple[str, ...]) -> None:
    """All 7 patterns of q, k and v; and the sum is right, against weights made in float64 with the rows by hand."""
    config = CASES[case]
    base = randomized(config)
    lora = random_lora(base, {f"{part}_proj" for part in parts})
    q, kv = config.n_head * config.head_size, config.n_query_groups * config.head_size
    start = {"q": 0, "k": q, "v": q + kv}
    exact = copy.deepcopy(base).double()
    for layer in range(2):
        made = lora[f"h.{layer}.attn.qkv.weight"]
        for name, part in zip(sorted(parts, key="qkv".index), made, strict=True):
            rows = slice(start[name], start[name] + (q if name == "q" else kv))
            exact.h[layer].attn.qkv.weight[rows] += part.scale * part.b.double() @ part.a.double()
    merged = merge_lora(copy.deepcopy(base), lora)(IDX)
    beside = attach_loras(copy.deepcopy(base), {"a": lora})(IDX)
    assert (merged - beside).abs().max() <= 1e-5
    assert (merged - exact(IDX)).abs().max() <= 1e-5
    assert (merged - base(IDX)).abs().max() > 0.01


@pytest.mark.parametrize("make", [llama_config, neox_config, lambda: llama_config(tie_embeddings=True)])
def test_every_linear_layer_trained_saved_loaded_and_merged_gives_the_same_logits(make: Callable, tmp_path) -> None:
    base = randomized(make())
    names = ("all",) if base.config.tie_embeddings else ("all", "lm_head")
    trained = add_lora(copy.deepcopy(base), LoRAConfig(r=3, alpha=5, targets=names))
    assert torch.equal(trained(IDX), base(IDX))  # b is 0 at first
    for name, parameter in trained.named_parameters():
        assert parameter.requires_grad == (".updates." in name), name
        if name.endswith(".b.weight"):
            parameter.data.normal_(std=0.1)
    save_lora(trained, tmp_path / LIT_LORA)
    expected, lora = trained(IDX), load_lora(tmp_path / LIT_LORA, base.config)
    assert (expected - base(IDX)).abs().max() > 0.1
    for model in (merge_lora(copy.deepcopy(base), lora), attach_loras(copy.deepcopy(base), {"a": lora})):
        torch.testing.assert_close(model(IDX), expected, atol=2e-5, rtol=1e-5)
    assert [file.name for file in tmp_path.iterdir()] == [LIT_LORA]


def test_only_the_updates_learn_and_dropout_is_off_in_eval_mode() -> None:
    model = add_lora(randomized(llama_config()), LoRAConfig(r=2, dropout=0.5, targets=("q", "fc"))).train()
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        model(IDX).square().mean().backward()
        optimizer.step()
    changed = {name for name, parameter in model.named_parameters() if not torch.equal(parameter, before[name])}
    linears = [f"h.{i}.{name}" for i in range(2) for name in ("attn.qkv", "mlp.fc")]
    assert changed == {f"{linear}.updates.0.{x}.weight" for linear in linears for x in "ab"}
    assert not torch.equal(model(IDX), model(IDX))
    model.eval()
    assert torch.equal(model(IDX), model(IDX))


@pytest.mark.parametrize("format", ["int8", "int4"])
def test_updates_go_beside_quantised_weights_and_stay_exact(format: str) -> None:
    base = randomized(llama_config())
    lora = random_lora(base, {"q_proj", "down_proj", "lm_head"})
    quantised = quantize_model(copy.deepcopy(base), format)
    with pytest.raises(UserError, match="quantised"):
        merge_lora(quantised, lora)
    expected = attach_loras(copy.deepcopy(quantised), {"a": lora})
    before = attach_loras(copy.deepcopy(base), {"a": lora})
    pack_model(before, format)  # quantised after
    assert (expected(IDX) - before(IDX)).abs().max() < 1e-4
    assert (expected(IDX) - quantised(IDX)).abs().max() > 0.1
    layer = quantize_model(attach_loras(copy.deepcopy(base), {"a": lora}), format).h[0].attn.qkv.updates[0]
    assert torch.equal(layer.a.weight, lora["h.0.attn.qkv.weight"][0].a)


# Merging


@pytest.mark.parametrize("base", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("adapter", [torch.float16, torch.bfloat16, torch.float32])
def test_merging_rounds_once_to_the_dtype_of_the_weights(base: torch.dtype, adapter: torch.dtype, tmp_path) -> None:
    """Lightning-AI/litgpt#1224: a float16 model and a bfloat16 adapter."""
    model = randomized(llama_config()).to(base)
    pairs = random_pairs({f"model.layers.{i}.self_attn.q_proj": (64, 64) for i in range(2)})
    pairs = {module: (a.to(adapter), b.to(adapter)) for module, (a, b) in pairs.items()}
    before = model.h[1].attn.qkv.weight[:64].double()
    merge_lora(model, load_lora(write_peft(tmp_path, pairs), model.config))
    a, b = pairs["model.layers.1.self_attn.q_proj"]
    delta = 2.0 * b.double() @ a.double()
    exact, got = before + delta, model.h[1].attn.qkv.weight[:64]
    once = torch.finfo(base).eps / 2 * exact.abs()
    slack = 4 * torch.finfo(torch.float32).eps * (before.abs() + 2.0 * b.double().abs() @ a.double().abs())
    tiny = torch.finfo(base).smallest_normal * torch.finfo(base).eps
    assert got.dtype == base and ((got.double() - exact).abs() <= once + slack + tiny).all()


def test_the_same_lora_is_never_merged_twice_but_another_is() -> None:
    """Lightning-AI/litgpt#513."""
    model = randomized(llama_config())
    one, two = random_lora(model, {"q_proj"}, seed=1), random_lora(model, {"q_proj"}, seed=2)
    merge_lora(model, one)
    first = model.h[0].attn.qkv.weight.clone()
    merge_lora(copy.deepcopy(model), one)
    merge_lora(model, {name: list(parts) for name, parts in one.items()})
    assert torch.equal(model.h[0].attn.qkv.weight, first)
    merge_lora(model, two)
    assert not torch.equal(model.h[0].attn.qkv.weight, first)


def test_what_cannot_be_merged_is_refused_and_nothing_is_changed() -> None:
    base = randomized(llama_config(tie_embeddings=True))
    good = random_lora(base, {"q_proj"})
    for model, lora, message in (
        (base, good | random_lora(base, {"lm_head"}), "head, whose weight is that of the embedding"),
        (base, good | {"h.7.attn.qkv.weight": good["h.0.attn.qkv.weight"]}, "h.7.attn.qkv.weight"),
        (copy.deepcopy(base).half(), good | huge(random_lora(base, {"up_proj"})), "range of float16"),
        (pack_model(copy.deepcopy(base)), good, "laid out for kernels"),
        (attach_loras(copy.deepcopy(base), {"a": good}), good, "beside it already"),
    ):
        if model.by_token or "kernels" not in message:
            before = [p.clone() for p in model.parameters()]
            with pytest.raises(UserError, match=message):
                merge_lora(model, lora)
            assert all(map(torch.equal, before, model.parameters())) and not model.merged


def huge(lora: LoRA) -> LoRA:
    return {k: [Part(p.rows, p.a * 1e5, p.b * 1e5, p.scale) for p in parts] for k, parts in lora.items()}


def test_experts_are_merged_one_by_one_and_refused_beside(tmp_path: Path) -> None:
    base = randomized(llama_config(**MOE))
    shapes = {"model.layers.1.mlp.experts.2.up_proj": (32, 64), "model.layers.1.mlp.experts.3.down_proj": (64, 32)}
    shapes |= {"model.layers.1.mlp.gate": (4, 64), "model.layers.1.mlp.experts.0.gate_proj": (32, 64)}
    pairs = random_pairs(shapes)
    expected = copy.deepcopy(base)
    delta = {name.removeprefix("model.layers.1.mlp."): 2.0 * b @ a for name, (a, b) in pairs.items()}
    expected.h[1].mlp.fc[2, 32:] += delta["experts.2.up_proj"]
    expected.h[1].mlp.fc[0, :32] += delta["experts.0.gate_proj"]
    expected.h[1].mlp.proj[3] += delta["experts.3.down_proj"]
    expected.h[1].mlp.gate.weight += delta["gate"]
    lora = load_lora(write_peft(tmp_path, pairs, target_modules=r".*layers\.1\.mlp\..*"), base.config)
    merged = merge_lora(copy.deepcopy(base), lora)
    for (name, one), other in zip(merged.named_parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(one, other, msg=name)
    with pytest.raises(UserError, match="h.1.mlp.* has to be merged"):
        attach_loras(base, {"a": lora})
    with pytest.raises(UserError, match="layer 1 is a mixture of experts"):
        add_lora(base, LoRAConfig(targets=("fc",)))


# Several adapters in a batch


PROMPTS = [[5], [1, 2, 3, 4, 5, 6, 7], list(range(20, 61)), list(range(100, 70, -2)), [9, 9], [3, 1, 4, 1, 5]]
WANTED = ["a", None, "b", "base", "a", "c"]


def adapters_of(model: GPT) -> dict[str, LoRA]:
    head = {"lm_head"} if model.config.model_type == "llama" else {"embed_out"}
    parts = (
        {"q_proj", "v_proj", "query_key_value"},
        {"k_proj", "o_proj", "dense", "down_proj", *head},
        {"up_proj", "4h"},
    )
    return {
        name: random_lora(model, own, seed, r=2 + seed)
        for seed, (name, own) in enumerate(zip("abc", parts, strict=True))
    }


def rows_of(model: GPT, which: list[int], **settings: object) -> list[tuple]:
    """Tokens and log-probabilities, to the last bit, of some prompts with their adapters."""
    requests = [Request(PROMPTS[i], {"lora": WANTED[i]} if WANTED[i] else None) for i in which]
    rows = generate(model, requests, **{"max_new_tokens": 6, "logprobs": 3, **settings})
    return [(row.tokens, row.logprobs) for row in sorted(rows, key=lambda row: row.index)]


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("make", [llama_config, neox_config])
def test_each_row_is_the_row_alone_with_its_adapter_merged(make: Callable, dtype: torch.dtype, packed: bool) -> None:
    base = randomized(make()).to(dtype)
    loras = adapters_of(base)
    model = attach_loras(copy.deepcopy(base), loras)
    if packed:
        pack_model(model)
    alone = [rows_of(model, [i])[0] for i in range(6)]
    for how in ({}, {"padding_side": "left"}, {"padding_side": "right"}, {"prefill_budget": 5}, {"max_batch_size": 3}):
        order = [4, 2, 0, 5, 3, 1]
        got = rows_of(model, order, **how)
        if packed and load_kernels() is not None:
            assert got == [alone[i] for i in order], how
        assert dtype != torch.float32 or [row[0] for row in got] == [alone[i][0] for i in order], how
    guessed = [row[0] for row in rows_of(model, list(range(6)), speculate=3, max_new_tokens=12, logprobs=None)]
    assert dtype != torch.float32 or [row[:6] for row in guessed] == [row[0] for row in alone]
    if dtype == torch.float32:
        for i, name in enumerate(WANTED):
            merged = merge_lora(copy.deepcopy(base), loras[name]) if name in loras else base
            (row,) = generate(merged, [PROMPTS[i]], max_new_tokens=6)
            assert row.tokens == alone[i][0], name
    assert len({str(row) for row in alone}) == 6


def test_the_adapter_decides_and_the_default_is_the_only_one_or_none() -> None:
    base = randomized(llama_config())
    loras = adapters_of(base)

    def first(model: GPT, name: str | None) -> tuple:
        (row,) = generate(model, [Request([7, 8, 9], {"lora": name})], max_new_tokens=6, logprobs=2)
        return row.tokens, row.logprobs

    several, single = attach_loras(copy.deepcopy(base), loras), attach_loras(copy.deepcopy(base), {"a": loras["a"]})
    named = attach_loras(copy.deepcopy(base), loras, default="b")
    results = {name: first(several, name) for name in ("base", "a", "b", "c")}
    assert len({str(result) for result in results.values()}) == 4
    assert first(several, None) == results["base"]
    assert first(single, None) == first(single, "a") != first(single, "base")
    assert first(named, None) == first(named, "b")
    single.set_kv_cache(2, 16)  # nothing stays behind of the last job, whose row had none
    assert torch.equal(single(IDX, rows=slice(0, 2)), attach_loras(copy.deepcopy(base), {"a": loras["a"]})(IDX))


def test_an_adapter_that_overflows_harms_no_other_row() -> None:
    base = randomized(llama_config())
    bad = {k: [Part(p.rows, p.a * 1e38, p.b, 1.0) for p in v] for k, v in random_lora(base, {"q_proj"}).items()}
    model = attach_loras(copy.deepcopy(base), {"bad": bad, "good": random_lora(base, {"q_proj"}, seed=5)})
    requests = [Request(PROMPTS[2], {"lora": name}) for name in ("good", "bad", "base")]
    good, broken, none = sorted(generate(model, requests, max_new_tokens=4), key=lambda row: row.index)
    assert broken.finish_reason == "nan"
    (alone,) = generate(base, [PROMPTS[2]], max_new_tokens=4)
    assert none.tokens == alone.tokens and good.finish_reason == "length"


def test_unknown_names_are_errors_before_work_or_of_their_row() -> None:
    base = randomized(llama_config())
    model = attach_loras(copy.deepcopy(base), {"a": random_lora(base, {"q_proj"})})
    asked = [Request([1, 2], {"lora": "a"}), Request([1, 2], {"lora": "x"}), [3]]
    with pytest.raises(UserError, match="prompt 1 asks for the adapter 'x', but there is base, a"):
        generate(model, asked)
    with pytest.raises(UserError, match="'a', but none was loaded by name"):
        generate(base, asked)
    rows = sorted(generate(model, asked, strict=False, max_new_tokens=2), key=lambda row: row.index)
    assert [row.finish_reason for row in rows] == ["length", "error", "length"]
    with pytest.raises(UserError, match="lora is 3"):
        generate(model, [Request([1], {"lora": 3})])
    with pytest.raises(UserError, match='called "base"'):
        attach_loras(base, {"base": {}})


# Our own files


def written(tmp_path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    model = add_lora(randomized(llama_config()), LoRAConfig(r=2, targets=("q", "v")))
    save_lora(model, tmp_path / LIT_LORA)
    with safe_open(tmp_path / LIT_LORA, "pt") as file:
        return load_file(tmp_path / LIT_LORA), file.metadata()


def test_what_is_wrong_in_a_file_is_named(tmp_path: Path) -> None:
    tensors, said = written(tmp_path)
    q = "h.0.attn.qkv.q.lora_a"
    other = json.dumps(json.loads(said["base"]) | {"n_layer": 7})
    for changed, metadata, message in (
        ({}, {"alpha": None}, "no r and alpha"),
        ({}, {"alpha": "nan"}, "no r and alpha"),
        ({}, {"r": None}, "no r and alpha"),
        ({}, {"r": "4"}, "h.0.attn.qkv.q of .* has rank 2, and its metadata says 4"),
        ({}, {"method": None}, "does not say that it holds a LoRA"),
        ({}, {"base": None}, "for which model"),
        ({}, {"base": other}, "another model: n_layer is 7 there, 2 here"),
        ({"h.0.attn.qkv.q.lora_c": tensors[q].clone()}, {}, "h.0.attn.qkv.q.lora_c"),
        ({"h.9.attn.qkv.q.lora_a": tensors[q].clone()}, {}, "h.9.attn.qkv.q.lora_a"),
        ({q: None}, {}, "lacks h.0.attn.qkv.q.lora_a"),
        ({q: torch.ones(2, 63)}, {}, r"h.0.attn.qkv.q.lora_a .*\(2, 63\)"),
        ({q: torch.full((2, 64), torch.inf)}, {}, "not finite"),
        ({q: torch.ones(2, 64, dtype=torch.int32)}, {}, "int32"),
        (dict.fromkeys(tensors), {}, "lacks all tensors"),
    ):
        both = [
            {k: v for k, v in {**old, **new}.items() if v is not None}
            for old, new in ((tensors, changed), (said, metadata))
        ]
        save_file(both[0], tmp_path / LIT_LORA, both[1])
        with pytest.raises(UserError, match=message) as error:
            load_lora(tmp_path, llama_config())
        assert "\n" not in str(error.value)
    save_file(tensors, tmp_path / LIT_LORA, said)
    assert len(load_lora(tmp_path, llama_config())) == 2
    (tmp_path / LIT_LORA).write_bytes((tmp_path / LIT_LORA).read_bytes()[:-9])
    with pytest.raises(UserError, match="not a whole safetensors file"):
        load_lora(tmp_path, llama_config())
    for path in (tmp_path / "none", tmp_path / "empty"):
        path == tmp_path / "empty" and path.mkdir()
        with pytest.raises(UserError, match=r"(none does not exist|empty is no LoRA): give a PEFT folder"):
            load_lora(path, llama_config())


def test_settings_of_training_are_checked() -> None:
    for fields, message in (
        ({"r": 0}, "rank >= 1"),
        ({"alpha": float("inf")}, "finite alpha"),
        ({"dropout": 1.0}, "dropout is 1.0"),
        ({"targets": ("q", "w")}, "unknown: 'w'"),
        ({"targets": ()}, "none"),
    ):
        with pytest.raises(UserError, match=message):
            LoRAConfig(**fields)
    with pytest.raises(UserError, match="no LoRA that could be saved"):
        save_lora(randomized(llama_config()), Path("none"))
    layer = add_lora(randomized(llama_config()), LoRAConfig(targets=("v",))).h[0].attn.qkv
    assert isinstance(layer, LoRALinear) and [update.rows for update in layer.updates] == [slice(96, 128)]
