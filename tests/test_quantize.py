"""Claims of lit_gen/quantize.py and its scripts: rounding, products, folders, and that a row is still the row alone."""

import copy
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import Family, llama_config, neox_config, randomized, save_byte_tokenizer
from families import FAMILIES
from lightning.fabric import Fabric
from lightning.fabric.plugins.precision.bitsandbytes import _import_bitsandbytes
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from generate.base import generate
from lit_gen import pack
from lit_gen.cache import packed
from lit_gen.checkpoint import LIT_MODEL, load_model, weight_format
from lit_gen.export import save_hf, save_lit
from lit_gen.fabric import parameter_dtype, setup_fabric, uses_bitsandbytes
from lit_gen.kernels import load_kernels
from lit_gen.linear import HugePages
from lit_gen.model import GPT
from lit_gen.pack import KernelLinear, pack_model, weight_bytes
from lit_gen.plan import plan_batch
from lit_gen.quantize import QuantizedLinear, dequantize, model_format, quantize, quantize_model
from lit_gen.utils import UserError
from scripts import convert_lit_checkpoint, perplexity
from scripts import quantize as quantize_script

ROOT, CPU = Path(__file__).resolve().parents[1], torch.device("cpu")
FORMATS = ["int8", "int4"]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
EPS = {torch.float32: 2e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}  # of the largest sum of magnitudes
IDX = torch.arange(24)[None] * 5 % 128
MOE = {"n_expert": 4, "n_expert_per_token": 2, "moe_intermediate_size": 40, "moe_layers": [True, False]}
needs_kernels = pytest.mark.skipif(load_kernels() is None, reason="no C++ kernels here")


def by_hand(layer: QuantizedLinear) -> Tensor:
    """The weight (N, K) float64 of a layer's stored bytes, element by element."""
    N, K, w = layer.out_features, layer.in_features, torch.empty(layer.out_features, layer.in_features).double()
    weight, factor, least = layer.kept
    for n in range(N):
        for k in range(K):
            if least is None:
                w[n, k] = weight[n, k].item() * factor[n].item()
            else:
                q = weight[n, k // 2].item() >> 4 * (k % 2) & 15
                w[n, k] = q * factor[n, k // 32].item() + least[n, k // 32].item()
    return w


def layer_of(N: int, K: int, format: str, bias: bool = True) -> QuantizedLinear:
    torch.manual_seed(N * K)
    linear = nn.Linear(K, N, bias=bias).requires_grad_(False)
    return QuantizedLinear(quantize(linear.weight, format), K, linear.bias)


def kernel_layer(layer: QuantizedLinear) -> KernelLinear:
    return KernelLinear(layer, load_kernels(), HugePages(2**20))


@needs_kernels
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("N", "K"), [(1, 1), (33, 31), (64, 32), (70, 50), (128, 97)])  # whole and ragged groups
def test_products_equal_float64_with_the_stored_weights(N: int, K: int, dtype: torch.dtype, format: str) -> None:
    layer = layer_of(N, K, format, bias=N != 64)
    w, bias = by_hand(layer), 0.0 if layer.bias is None else layer.bias.double()
    x = torch.randn(2, 20, K).to(dtype)
    exact, magnitude = x.double() @ w.T + bias, (x.double().abs() @ w.abs().T).max() + 1
    for module in (layer, kernel_layer(layer)):
        y = module(x)
        assert y.shape == (2, 20, N) and y.dtype == dtype
        assert (y.double() - exact).abs().max() <= EPS[dtype] * magnitude


def test_int8_rounds_each_weight_to_the_nearest_of_255() -> None:
    w = torch.tensor([[127.0, -1.4, 0.6, -127.0], [0.0, 0.0, 0.0, 0.0], [-254.0, 3.0, 1.1, 100.0]])
    kept = quantize(w, "int8")
    assert kept.weight.tolist() == [[127, -1, 1, -127], [0, 0, 0, 0], [-127, 2, 1, 50]]
    assert kept.factor.tolist() == [1.0, 0.0, 2.0] and kept.least is None
    tiny = quantize(torch.tensor([[2.65e-43, -2.65e-43]]), "int8")  # a factor of few bits: nothing may wrap around
    assert tiny.weight[0, 0] > 0 > tiny.weight[0, 1]


def test_int4_keeps_weights_that_lie_on_its_grid_in_pairs() -> None:
    q = torch.tensor([[*range(16), *range(15, -1, -1), 3, 0, 15]])  # a whole group and a group of 3
    kept = quantize(q * 0.5 - 2.0, "int4")
    assert kept.factor.tolist() == [[0.5, 0.5]] and kept.least.tolist() == [[-2.0, -2.0]]
    expected = [16 * (2 * i + 1) + 2 * i for i in range(8)] + [16 * (14 - 2 * i) + 15 - 2 * i for i in range(8)]
    assert kept.weight.tolist() == [[*expected, 3, 15]]
    assert torch.equal(dequantize(kept, 35), q * 0.5 - 2.0)


def test_int4_finds_a_better_range_than_that_of_the_group() -> None:
    w = torch.randn(200, 320, generator=torch.Generator().manual_seed(0))
    groups = w.view(200, 10, 32)
    low, high = groups.aminmax(dim=-1, keepdim=True)
    step = (high - low) / 15
    plain = (((groups - low) / step).round() * step + low - groups).square().mean().sqrt()
    kept = quantize(w, "int4")
    assert (dequantize(kept, 320) - w).square().mean().sqrt() < 0.932 * plain
    constant = torch.full((2, 64), 0.75)
    assert torch.equal(dequantize(quantize(constant, "int4"), 64), constant)


def test_rounding_part_by_part_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    w = torch.randn(37, 50)
    for format in FORMATS:
        monkeypatch.undo()
        whole = quantize(w, format)
        layer = QuantizedLinear(whole, 50, None)
        y = layer(w)
        monkeypatch.setattr("lit_gen.quantize.CHUNK", 200)
        parts = quantize(w, format)
        assert all(a is b or torch.equal(a, b) for a, b in zip(whole, parts, strict=True))
        assert torch.allclose(layer(w), y, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -3.4e38])
def test_weights_that_no_factor_fits_are_refused_by_name(format: str, bad: float) -> None:
    model = randomized(llama_config())
    model.h[1].mlp.fc.weight[100, 40] = bad
    if format == "int8" and bad == -3.4e38:
        assert quantize_model(model, format) is model
        return
    if bad == -3.4e38:  # the range up to the other weights of the group is too large for float32
        model.h[1].mlp.fc.weight[100, 41] = -bad
    with pytest.raises(UserError, match=r"^h\.1\.mlp\.fc\.weight has numbers that are not finite"):
        quantize_model(model, format)


@needs_kernels
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_of_a_layer_has_the_same_bits_in_every_number_of_rows(dtype: torch.dtype, format: str) -> None:
    layer = kernel_layer(layer_of(150, 77, format))
    x = torch.randn(65, 77).to(dtype)
    x[3] *= 1000.0  # O39: nor does a row with large activations matter
    alone = torch.cat([layer(row[None]) for row in x])
    for n in (2, 3, 5, 6, 7, 8, 12, 13, 25, 64, 65):
        assert torch.equal(layer(x[:n]), alone[:n]) and torch.equal(layer(x[-n:]), alone[-n:])


@needs_kernels
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(
    ("config", "dtype"),
    [(llama_config(tie_embeddings=True), torch.bfloat16), (neox_config(), torch.bfloat16)]
    + [(llama_config(**MOE), dtype) for dtype in DTYPES],
)
def test_rows_are_the_rows_alone_bit_for_bit(config, dtype: torch.dtype, format: str) -> None:
    model = pack_model(randomized(config).to(dtype), format)
    prompts = [[1, 2, 3], [4], list(range(40, 90)), [7] * 9, [5, 4], list(range(300, 333)), [8] * 2, [9, 1, 1, 1]]

    def rows(prompts: list[list[int]], size: int) -> list[tuple]:
        found = generate(model, prompts, max_new_tokens=6, max_batch_size=size, logprobs=3)
        return [(row.tokens, row.logprobs) for row in sorted(found, key=lambda row: row.index)]

    alone = [rows([prompt], 1)[0] for prompt in prompts]
    assert all(len(tokens) == 6 for tokens, _ in alone)
    for size in (1, 2, 8):
        assert rows(prompts, size) == alone
    model.set_kv_cache(8, 64)
    idx, input_pos, where, last = packed(prompts, [0] * 8, range(8))
    together = model(idx, input_pos, last, rows=where)
    for row, prompt in enumerate(prompts):
        idx, input_pos, where, last = packed([prompt], [0], [row])
        assert torch.equal(model(idx, input_pos, last, rows=where)[0], together[row])


def with_floats(model: GPT) -> GPT:
    """The same model with linear layers, of the stored weights."""
    for name, module in list(model.named_modules()):
        if isinstance(module, QuantizedLinear):
            linear = nn.Linear(module.in_features, module.out_features, bias=False)
            linear.weight, linear.bias = nn.Parameter(dequantize(module.kept, module.in_features)), module.bias
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, linear)
    return model


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("format", FORMATS)
def test_every_family_is_quantised_stored_and_loaded(
    family: Callable[[str], Family], name: str, format: str, tmp_path: Path
) -> None:
    _, model, folder = family(name)
    original, at_load = model(IDX), quantize_model(copy.deepcopy(model), format)
    save_lit(at_load, tmp_path, folder)
    stored = load_model(tmp_path, None, CPU)
    assert model_format(stored) == format and stored.config == model.config
    assert stored.lm_head.format == "int8" and {block.attn.qkv.format for block in stored.h} == {format}
    routers = {f"h.{layer}.mlp.gate" for layer, moe in enumerate(model.config.moe_layers) if moe}
    assert {name for name, module in stored.named_modules() if isinstance(module, nn.Linear)} == routers
    expected = with_floats(copy.deepcopy(stored))(IDX)
    assert not torch.equal(expected, original)
    stored, at_load = pack_model(stored), pack_model(at_load)
    assert torch.equal(stored(IDX), at_load(IDX))
    assert (stored(IDX) - expected).abs().max() <= 2e-4 * expected.abs().max()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("format", FORMATS)
def test_quantised_once_is_quantised_at_every_load(dtype: torch.dtype, format: str, tmp_path: Path) -> None:
    model = randomized(llama_config(tie_embeddings=True, **MOE)).to(dtype)
    save_lit(model, tmp_path / "lit", tmp_path)
    save_lit(quantize_model(load_model(tmp_path / "lit", None, CPU), format), tmp_path / "quantised", tmp_path)
    once = load_model(tmp_path / "quantised", None, CPU)
    assert once.wte.weight.dtype == dtype and once.lm_head.weight is not once.wte.weight
    at_load = pack_model(load_model(tmp_path / "lit", dtype, CPU), format)
    assert torch.equal(pack_model(once, format)(IDX), at_load(IDX))  # asked for again: it has that already
    with safe_open(tmp_path / "quantised" / LIT_MODEL, "pt") as file:
        assert file.metadata() == {"quantize": format} | ({"group_size": "32"} if format == "int4" else {})
    small, large = ((tmp_path / name / LIT_MODEL).stat().st_size for name in ("quantised", "lit"))
    assert dtype != torch.float32 or small < large / 1.5


def test_a_model_of_another_format_is_refused(tmp_path: Path) -> None:
    model = quantize_model(randomized(llama_config()), "int4")
    with pytest.raises(UserError, match="are int4 already"):
        pack_model(model, "int8")
    with pytest.raises(UserError, match="int4 weights, which cannot be converted back"):
        save_hf(model, tmp_path / "hf", tmp_path)


def damaged(kind: str, file: Path) -> None:
    """Changes a file of int4 weights."""
    tensors, metadata = load_file(file), {"quantize": "int4", "group_size": "32"}
    if kind == "truncated":
        return file.write_bytes(file.read_bytes()[:-100]) and None
    if kind == "format":
        metadata["quantize"] = "int3\n"
    elif kind == "group":
        metadata["group_size"] = "64"
    elif kind == "no metadata":
        metadata = {}
    elif kind == "other format":
        metadata = {"quantize": "int8"}
    elif kind == "missing":
        del tensors["h.1.mlp.fc.least"]
    elif kind == "shape":
        tensors["h.0.attn.qkv.weight"] = tensors["h.0.attn.qkv.weight"][:, 1:].clone()
    elif kind == "dtype":
        tensors["h.0.attn.qkv.weight"] = tensors["h.0.attn.qkv.weight"].view(torch.int8)
    elif kind == "factor":
        tensors["h.0.attn.qkv.factor"] = tensors["h.0.attn.qkv.factor"].view(torch.int16)
    save_file(tensors, file, metadata)


DAMAGES = {
    "truncated": "is not a whole safetensors file",
    "format": r"weights of format 'int3\\n'",
    "group": "in groups of '64'",
    "no metadata": "has h.0.attn.proj.factor and",
    "other format": "has shape|has h.0.attn.proj.least and",
    "missing": "lacks h.1.mlp.fc.least",
    "shape": r"h.0.attn.qkv.weight has shape \(128, 31\)",
    "dtype": "h.0.attn.qkv.weight is stored as torch.int8 where torch.uint8",
    "factor": "h.0.attn.qkv.factor is stored as torch.int16",
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_a_damaged_folder_is_one_line(kind: str, tmp_path: Path) -> None:
    save_lit(quantize_model(randomized(llama_config()), "int4"), tmp_path / "lit", tmp_path)
    damaged(kind, tmp_path / "lit" / LIT_MODEL)
    with pytest.raises(UserError, match=DAMAGES[kind]) as caught:
        load_model(tmp_path / "lit", None, CPU)
    assert "\n" not in str(caught.value)


def test_what_is_asked_and_what_is_stored_must_agree(tmp_path: Path) -> None:
    save_lit(quantize_model(randomized(llama_config()), "int4"), tmp_path / "int4", tmp_path)
    save_lit(randomized(llama_config()), tmp_path / "floats", tmp_path)
    assert weight_format(tmp_path / "int4", None, "bf16-true") == "int4"
    assert weight_format(tmp_path / "int4", "int4", "32-true") == "int4"
    assert weight_format(tmp_path / "floats", None, "bf16-mixed") is None
    assert weight_format(tmp_path / "floats", "int8", "32-true") == "int8"
    assert weight_format(tmp_path / "floats", "nf4", "32-true") is None  # that is Fabric's
    assert weight_format(tmp_path / "none", None, "32-true") is None
    for asked in ("int8", "nf4"):
        with pytest.raises(UserError, match=f"has int4 weights, not {asked}"):
            weight_format(tmp_path / "int4", asked, "32-true")
    for folder, asked in (("int4", None), ("floats", "int8"), ("floats", "nf4")):
        with pytest.raises(UserError, match="do not go with --precision bf16-mixed"):
            weight_format(tmp_path / folder, asked, "bf16-mixed")


@pytest.mark.parametrize("format", FORMATS)
def test_without_kernels_the_same_numbers_and_one_line(
    format: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
) -> None:
    model = quantize_model(randomized(llama_config(**MOE)).bfloat16(), format)
    expected = pack_model(copy.deepcopy(model))(IDX)
    monkeypatch.setattr(pack, "load_kernels", lambda: None)
    capfd.readouterr()
    plain = pack_model(model)
    assert (
        capfd.readouterr().err == f"no kernels for {format} weights here: they are made floats at every use, slowly\n"
    )
    assert isinstance(plain.h[0].mlp.fc[3], QuantizedLinear)
    assert (plain(IDX) - expected).abs().max() <= 0.03 * expected.abs().max()
    prompts = [[1, 2, 3], [4], list(range(40, 90))]
    assert [len(row.tokens) for row in generate(plain, prompts, max_new_tokens=4)] == [4, 4, 4]


@needs_kernels
def test_processors_that_multiply_bfloat16_use_the_kernels_too(monkeypatch: pytest.MonkeyPatch) -> None:
    model = randomized(llama_config(**MOE)).bfloat16()
    expected = pack_model(copy.deepcopy(model), "int4")(IDX)
    monkeypatch.setattr(pack, "multiplies", lambda dtype: True)
    model = pack_model(model, "int4")
    layers = [model.h[0].mlp.fc[0], model.h[1].mlp.fc, model.h[0].attn.qkv, model.lm_head]
    assert all(isinstance(layer, KernelLinear) for layer in layers)
    assert (model(IDX) - expected).abs().max() <= 0.02 * expected.abs().max()  # the router is PyTorch's


@pytest.mark.parametrize("format", FORMATS)
def test_casting_a_model_does_not_cast_factors(format: str) -> None:
    model = quantize_model(randomized(llama_config()), format)
    before = [
        tuple(t.clone() for t in layer.kept if t is not None) for layer in model.modules() if _is_quantised(layer)
    ]
    for cast in (model.half, model.bfloat16, lambda: Fabric(precision="16-true").setup_module(model)):
        cast()
        layers = [layer for layer in model.modules() if _is_quantised(layer)]
        for layer, kept in zip(layers, before, strict=True):
            assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(layer.kept, kept, strict=False))
    assert model.wte.weight.dtype == torch.float16


def _is_quantised(module: nn.Module) -> bool:
    return isinstance(module, QuantizedLinear)


@needs_kernels
@pytest.mark.parametrize("format", FORMATS)
def test_bytes_are_counted_and_planned(format: str) -> None:
    """Layers have 128 + 64 + 256 + 64 outputs of 64 inputs, the last of 128. Norms and the embedding are in 16 bits."""
    config = llama_config(tie_embeddings=True)
    model = pack_model(randomized(config).bfloat16(), format)
    linears, outputs = 2 * (128 * 64 + 64 * 64 + 256 * 64 + 64 * 128), 2 * (128 + 64 + 256 + 64)
    floats, head = 2 * (512 * 64 + 5 * 64), 512 * (64 + 4)  # the head is int8 in either format
    by_hand = floats + head + (linears + 4 * outputs if format == "int8" else linears // 2 + linears // 32 * 4)
    assert weight_bytes(model) == by_hand
    assert plan_batch(config, torch.bfloat16, CPU, 64, 1, None, format).weight_bytes == by_hand
    assert plan_batch(config, torch.bfloat16, CPU, 64, 1, None).weight_bytes == floats + 2 * linears


def test_bitsandbytes_is_refused_in_one_line_where_it_cannot_be(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(quantize: str, precision: str | None, reason: str) -> None:
        with pytest.raises(UserError, match=reason) as caught:
            setup_fabric(precision, quantize)
        assert "\n" not in str(caught.value)

    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    refused("nf4", None, "--quantize nf4 needs an NVIDIA GPU; on a CPU take int8 or int4")
    refused("bnb-int8", None, "--quantize bnb-int8 needs an NVIDIA GPU")
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    for precision in ("32-true", "bf16-mixed"):
        refused("nf4", precision, f"nf4 does not go with --precision {precision}: leave that out")
    refused("bnb-int8", "bf16-true", "bnb-int8 does not go with --precision bf16-true")
    monkeypatch.setattr("lightning.fabric.plugins.precision.bitsandbytes._BITSANDBYTES_AVAILABLE", False)
    _import_bitsandbytes.cache_clear()
    refused("nf4", "bf16-true", "pip install bitsandbytes")


def test_fabric_leaves_other_formats_alone() -> None:
    for precision, dtype in (("bf16-true", torch.bfloat16), ("32-true", torch.float32)):
        fabric = setup_fabric(precision, "int4")
        assert parameter_dtype(fabric) == dtype and not uses_bitsandbytes(fabric)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A lit folder with a tokenizer of 258 tokens."""
    save_byte_tokenizer(tmp_path / "source", 258)
    save_lit(randomized(llama_config(vocab_size=258)), tmp_path / "lit", tmp_path / "source")
    return tmp_path / "lit"


def test_the_script_writes_a_folder_that_generates(checkpoint: Path, tmp_path: Path) -> None:
    quantize_script.main(checkpoint_dir=checkpoint, format="int4", out_dir=tmp_path / "int4", dtype="bfloat16")
    command = [sys.executable, ROOT / "scripts/perplexity.py", "--checkpoint_dir", tmp_path / "int4"]
    (tmp_path / "text.txt").write_text("The sea is wide, and blue." * 9)
    done = subprocess.run([*command, "--text", tmp_path / "text.txt"], capture_output=True, text=True)
    line = json.loads(done.stdout)
    assert done.returncode == 0 and line["tokens"] == 235 and line["perplexity"] > 1
    with pytest.raises(UserError, match="cannot be converted back"):
        convert_lit_checkpoint.main(checkpoint_dir=tmp_path / "int4", out_dir=tmp_path / "hf")


def test_perplexity_of_a_model_that_knows_nothing_is_the_vocabulary() -> None:
    model = randomized(llama_config())
    texts = [[1, 2, 3, 4, 5], [6, 7], [9] * 11]
    for text, scores in zip(texts, perplexity.log_probabilities(model, texts), strict=True):
        exact = model(torch.tensor([text]))[0].double().log_softmax(-1)[range(len(text) - 1), text[1:]]
        assert torch.allclose(scores.double(), exact, atol=1e-5)
    model.lm_head.weight.zero_()
    assert perplexity.perplexity(model, list(range(100)), 7) == pytest.approx(512)
    assert perplexity.perplexity(model, list(range(8)), 7) == pytest.approx(512)  # the last window has no more than 1


def test_accuracy_counts_the_answers_with_the_highest_score(checkpoint: Path) -> None:
    model, tokenizer = load_model(checkpoint, None, CPU), perplexity.Tokenizer(checkpoint)
    questions = []
    for number in range(12):
        question = {"query": f"Question {number}?", "choices": ["a", "bcd" * number + "!", "The third."], "gold": 0}
        scores = []
        for choice in question["choices"]:
            query = tokenizer.encode(question["query"]).tolist()
            ids = tokenizer.encode(f"{question['query']} {choice}").tolist()
            logp = model(torch.tensor([ids]))[0].log_softmax(-1)
            scores.append(sum(logp[i - 1, ids[i]].item() for i in range(len(query), len(ids))))
        best = scores.index(max(scores))
        per_character = [score / len(choice) for score, choice in zip(scores, question["choices"], strict=True)]
        question["gold"] = best if number % 3 else (best + 1) % 3  # a third of them is answered wrongly
        questions.append(question | {"norm": per_character.index(max(per_character)) == question["gold"]})
    found = perplexity.accuracy(model, tokenizer, questions)
    norm = sum(question["norm"] for question in questions) / 12
    assert found == {"questions": 12, "accuracy": round(8 / 12, 4), "accuracy_norm": round(norm, 4)}


@pytest.mark.parametrize(
    "line", ["", "[]", "{", '{"query": "a"}', '{"query": "a", "choices": ["b"], "gold": 1}', "[" * 10_000]
    + ['{"query": "", "choices": ["b"], "gold": 0}', '{"query": "a", "choices": [""], "gold": 0}']
    + ['{"query": "a", "choices": 3, "gold": 0}', '{"query": "a", "choices": ["b"], "gold": true}'],
)  # fmt: skip
def test_a_bad_question_is_one_line(line: str, tmp_path: Path) -> None:
    good = '{"query": "a", "choices": ["b", "c"], "gold": 1}\n'
    (tmp_path / "q.jsonl").write_text(good + line + "\n" + good)
    assert len(list(perplexity.read_questions(tmp_path / "q.jsonl", 1))) == 1
    with pytest.raises(UserError, match=r"q\.jsonl, line 2: ") as caught:
        list(perplexity.read_questions(tmp_path / "q.jsonl", 3))
    assert "\n" not in str(caught.value)
    with pytest.raises(UserError, match="cannot read"):
        list(perplexity.read_questions(tmp_path / "none.jsonl", 1))
