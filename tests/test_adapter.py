"""LLaMA-Adapter v1: the formula, nothing before training, the latest weights in every generation, rows alone, files."""

import copy
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import llama_config, neox_config, randomized
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from test_generate_base import some_prompts, tokens
from test_pack import alone, assert_every_way_gives_the_same_bits
from torch import Tensor

from lit_gen.adapter import FILE, AdapterConfig, add_adapter, load_adapter, save_adapter
from lit_gen.kernels import load_kernels
from lit_gen.model import GPT
from lit_gen.pack import pack_model
from lit_gen.rope import apply_rope
from lit_gen.utils import UserError

needs_kernels = pytest.mark.skipif(load_kernels() is None, reason="no C++ compiler, or LIT_GEN_KERNELS=0")
# families with something of their own in attention: GQA, wide heads and biases, windows and softcap, layers without
# rope, norms of q and k of each kind, clipping, old rope pairs, parallel residuals
NAMES = ["llama-wide-bias-tied", "gemma2", "smollm3", "qwen3", "olmo2", "olmo", "stablelm-parallel", "phi3-longrope"]
NAMES += ["gpt_neox", "falcon-7b-like", "mixtral", "granite"]


def trained(model: GPT, seed: int = 0, **numbers: int) -> GPT:
    """A copy with an adapter whose parameters are all random."""
    model = add_adapter(copy.deepcopy(model), AdapterConfig(**{"length": 5, "start_layer": 1, **numbers}))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for block in model.h:
            if block.attn.prefix is not None:
                for p in block.attn.prefix.parameters():
                    p.copy_(torch.randn(p.shape, generator=generator))
    return model.requires_grad_(False)


@pytest.mark.parametrize("make", [llama_config, neox_config])
def test_an_untrained_adapter_changes_no_bit(make: Callable) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        base = randomized(make()).to(dtype)
        model, idx = add_adapter(copy.deepcopy(base), AdapterConfig(4, 0)), torch.randint(0, 512, (3, 9))
        assert torch.equal(model(idx), base(idx))
        prompts = some_prompts(5)
        assert tokens(model, prompts) == tokens(base, prompts)
        assert [torch.equal(alone(pack_model(m), 2), alone(pack_model(base), 2)) for m in (model,)] == [True]


def test_only_the_adapter_is_trained_and_only_where_it_begins() -> None:
    model = add_adapter(randomized(llama_config(n_layer=4)), AdapterConfig(3, 2))
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    assert names == [f"h.{layer}.attn.prefix.{name}" for layer in (2, 3) for name in ("weight", "gate")]
    model(torch.tensor([[1, 2, 3]])).square().sum().backward()
    assert all(block.attn.prefix.gate.grad.abs().min() > 0 for block in model.h[2:])


def explicit(model: GPT, layer: int, x: Tensor) -> Tensor:
    """What the prefix adds to the attention of one head after the other, in float64, written out: (T, nh, hs)."""
    attn, config = model.h[layer].attn, model.config
    rows, hs, per_group = config.qkv_rows, config.head_size, config.n_head // config.n_query_groups
    prefix, out = attn.prefix.weight, []
    cos, sin = model._rope_rows(torch.arange(x.size(1))[None], None, None)[attn.rope]
    for head in range(config.n_head):
        q, k, v = (attn.qkv.weight[rows[part]].view(-1, hs, config.n_embd) for part in "qkv")
        query = apply_rope((x @ q[head].T)[:, :, None], cos.double(), sin.double())[0, :, 0]  # (T, hs)
        scores = query @ (prefix @ k[head // per_group].T).T * hs**-0.5  # (T, L)
        out.append(scores.softmax(-1) @ (prefix @ v[head // per_group].T) * attn.prefix.gate[head])
    return torch.stack(out, dim=1)


def test_it_is_the_formula_of_the_paper() -> None:
    """One layer, so that the difference of the attention's output is the prefix's part alone."""
    base = randomized(llama_config(n_layer=1)).double()
    model, idx = trained(base, start_layer=0), torch.randint(0, 512, (1, 7), generator=torch.Generator().manual_seed(0))
    seen: dict[GPT, Tensor] = {}
    for m in (base, model):
        m.h[0].attn.proj.register_forward_hook(lambda _, x, y, m=m: seen.update({m: x[0]}))
        m(idx)
    x = model.h[0].norm_1(model.wte(idx))
    torch.testing.assert_close((seen[model] - seen[base]).view(7, 4, 16), explicit(model, 0, x), rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_generation_is_the_training_forward_in_every_family(family: Callable, name: str) -> None:
    """With the cache, in pieces, padded and packed: the same logits, and other ones than the base's."""
    base = family(name).model
    model = trained(base)
    for n in (0, 2):
        text = torch.tensor([[5], list(range(20, 61))][n > 0])[None]
        expected = model(text)[0]
        assert n == 0 or (expected - base(text)[0]).abs().max() > 1e-2
        for m in (model, pack_model(copy.deepcopy(model))):
            with torch.no_grad():
                got = alone(m, n)[: text.size(1)]
            torch.testing.assert_close(got, expected, rtol=0, atol=2e-4)


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["llama-wide-bias-tied", "gemma2", "smollm3", "qwen3", "mixtral"])
def test_a_row_has_its_own_bits_beside_any_others(family: Callable, name: str, dtype: torch.dtype) -> None:
    with torch.no_grad():
        assert_every_way_gives_the_same_bits(pack_model(trained(family(name).model).to(dtype)))


def test_rows_are_as_alone_without_kernels_too(tiny: GPT) -> None:
    model, prompts = trained(tiny), some_prompts(9)
    expected = [tokens(model, [prompt])[0] for prompt in prompts]
    assert expected != [tokens(tiny, [prompt])[0] for prompt in prompts]
    for side in (None, "left", "right"):
        assert tokens(model, prompts, padding_side=side, max_batch_size=4) == expected


@pytest.mark.parametrize("packed", [True, False])
def test_weights_trained_in_between_are_seen_by_the_next_generation(tiny_llama: GPT, packed: bool) -> None:
    """litgpt#1287: keys and values of the first use were kept for good."""
    first, second = trained(tiny_llama), trained(tiny_llama, seed=1)
    model = pack_model(copy.deepcopy(first)) if packed else copy.deepcopy(first)
    prompts = some_prompts(4)
    assert tokens(model, prompts) == tokens(first, prompts) != tokens(second, prompts)
    for block, other in zip(model.h, second.h, strict=True):
        if block.attn.prefix is not None:
            block.attn.prefix.load_state_dict(other.attn.prefix.state_dict())
    assert tokens(model, prompts) == tokens(second, prompts)
    model.set_kv_cache(1, 64)  # the same memory, set up again
    idx = torch.tensor([[1, 2, 3]])
    before = model(idx, rows=slice(0, 1))
    model.h[1].attn.prefix.weight.mul_(-1)
    model.set_kv_cache(1, 64)
    assert not torch.equal(model(idx, rows=slice(0, 1)), before)


def test_training_computes_the_prefix_at_every_step(tiny_llama: GPT) -> None:
    """Also with a generation between two steps, or one that was begun and left."""
    idx = torch.randint(0, 512, (2, 12))
    losses: list[list[float]] = []
    for between in (None, "finish", "leave"):
        torch.manual_seed(0)
        model = add_adapter(copy.deepcopy(tiny_llama), AdapterConfig(4, 0)).train()
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0)
        losses.append([])
        for _ in range(4):
            loss = torch.nn.functional.cross_entropy(model(idx)[:, :-1].flatten(0, 1), idx[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses[-1].append(loss.item())
            if between == "finish":
                tokens(model, some_prompts(3))
            elif between == "leave":
                model.set_kv_cache(1, 16)
                with torch.inference_mode():
                    model(torch.tensor([[1, 2]]), rows=slice(0, 1))
                assert not any(t.is_inference() for t in model.h[0].attn.kv_cache.prefix)
    assert losses[0] == losses[1] == losses[2] and losses[0][-1] < losses[0][0]
    assert all(block.attn.prefix.weight.grad.abs().sum() > 0 for block in model.h)


@pytest.mark.parametrize("autocast", [torch.bfloat16, torch.float16])
def test_mixed_precision_trains_and_generates(tiny_llama: GPT, autocast: torch.dtype) -> None:
    model = trained(tiny_llama)
    expected = alone(copy.deepcopy(model).double(), 1)
    for m in (model, pack_model(copy.deepcopy(model))):
        with torch.autocast("cpu", autocast), torch.no_grad():
            assert (alone(m, 1) - expected).norm() < 0.05 * expected.norm()
    model.requires_grad_(True)
    with torch.autocast("cpu", autocast):
        model(torch.tensor([[1, 2, 3]])).float().square().mean().backward()
    assert model.h[1].attn.prefix.weight.grad.abs().sum() > 0


@needs_kernels
def test_a_compiled_model_gives_the_same_tokens_after_training_went_on(tiny_llama: GPT) -> None:
    from lit_gen.compiled import compile_model

    torch._dynamo.reset()
    eager = pack_model(trained(tiny_llama))
    compiled, prompts = compile_model(pack_model(trained(tiny_llama))), some_prompts(4)
    for seed in (0, 1):
        for m in (eager, compiled):
            m.h[1].attn.prefix.weight.copy_(torch.randn(5, 64, generator=torch.Generator().manual_seed(seed)))
        assert tokens(compiled, prompts, max_new_tokens=6) == tokens(eager, prompts, max_new_tokens=6)


# Files


@pytest.mark.parametrize("folder", [True, False])
def test_a_file_gives_the_adapter_back(tiny_llama: GPT, tmp_path: Path, folder: bool) -> None:
    model = trained(tiny_llama)
    save_adapter(model, tmp_path / FILE)
    assert [path.name for path in tmp_path.iterdir()] == [FILE]
    loaded = load_adapter(copy.deepcopy(tiny_llama), tmp_path if folder else tmp_path / FILE)
    idx = torch.tensor([[1, 2, 3]])
    assert torch.equal(loaded(idx), model(idx)) and not torch.equal(loaded(idx), tiny_llama(idx))
    assert not any(p.requires_grad for p in loaded.parameters()) and not loaded.training
    with safe_open(tmp_path / FILE, "pt") as file:
        assert {"method": "adapter", "length": "5", "start_layer": "1"}.items() <= file.metadata().items()


def changed(tmp_path: Path, metadata: dict | None = None, tensors: dict | None = None) -> Path:
    """A copy of the file with other metadata or tensors; None takes one out."""
    with safe_open(tmp_path / FILE, "pt") as file:
        data, kept = file.metadata() | (metadata or {}), load_file(tmp_path / FILE) | (tensors or {})
    path = tmp_path / "changed.safetensors"
    save_file({k: v for k, v in kept.items() if v is not None}, path, {k: v for k, v in data.items() if v is not None})
    return path


GATE = "h.1.attn.prefix.gate"


@pytest.mark.parametrize(
    ("metadata", "tensors", "message"),
    [
        ({"method": "adapter_v2"}, {}, "no file of method adapter, but of 'adapter_v2'"),
        ({"method": None}, {}, "no file of method adapter"),
        ({"length": "many"}, {}, "does not say what it was made for"),
        ({"length": "-1"}, {}, "an adapter of length -1"),
        ({"length": "9" * 30}, {}, "up to 256"),
        ({"start_layer": "2"}, {}, "would change nothing in a model of 2 layers"),
        ({"start_layer": None}, {}, "does not say what it was made for"),
        ({"base": "[" * 100_000}, {}, "does not say for which model it is"),
        ({"base": "3"}, {}, "does not say for which model it is"),
        ({"base": json.dumps({"model_type": "llama"})}, {}, "vocab_size is None there, 512 here"),
        ({}, {GATE: None}, f"lacks '{GATE}'"),
        ({}, {"extra": torch.zeros(1)}, "has a surplus tensor 'extra'"),
        ({}, {GATE: torch.zeros(3, 1)}, r"has shape \(3, 1\) where \(4, 1\) is needed"),
        ({}, {GATE: torch.zeros(4, 1, dtype=torch.int8)}, "stored as torch.int8"),
        ({}, {GATE: torch.tensor([[0.0], [1.0], [float("nan")], [0.0]])}, f"{GATE} has numbers that are not finite"),
    ],
)
def test_a_wrong_file_is_named_and_nothing_half_applied(
    tiny_llama: GPT, tmp_path: Path, metadata: dict, tensors: dict, message: str
) -> None:
    save_adapter(trained(tiny_llama), tmp_path / FILE)
    with pytest.raises(UserError, match=message) as error:
        load_adapter(tiny_llama, changed(tmp_path, metadata, tensors))
    assert "\n" not in str(error.value)
    assert all(block.attn.prefix is None for block in tiny_llama.h)


def test_a_file_for_another_base_missing_or_cut_is_named(tiny_llama: GPT, tiny_neox: GPT, tmp_path: Path) -> None:
    save_adapter(trained(tiny_llama), tmp_path / FILE)
    with pytest.raises(UserError, match="model_type is 'llama' there, gpt_neox here"):
        load_adapter(tiny_neox, tmp_path)
    with pytest.raises(UserError, match="n_layer is 2 there, 3 here"):
        load_adapter(randomized(llama_config(n_layer=3)), tmp_path)
    with pytest.raises(UserError, match="there is no adapter at"):
        load_adapter(tiny_llama, tmp_path / "none")
    with pytest.raises(UserError, match="there is no adapter at x{200}:"):
        load_adapter(tiny_llama, Path("x" * 5000))
    (tmp_path / "cut.safetensors").write_bytes((tmp_path / FILE).read_bytes()[:-100])
    with pytest.raises(UserError, match="not a whole safetensors file"):
        load_adapter(tiny_llama, tmp_path / "cut.safetensors")
    with pytest.raises(UserError, match="would change nothing"):
        add_adapter(tiny_llama, AdapterConfig(length=0))
