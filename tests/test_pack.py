"""`pack_model`: what the plain model computes, as exactly, and for each row the same bits however its tokens come."""

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from conftest import llama_config, neox_config, randomized
from families import FAMILIES
from torch import Tensor

from generate.base import generate
from lit_gen.cache import packed, rectangle
from lit_gen.kernels import load_kernels
from lit_gen.linear import multiplies
from lit_gen.model import GPT
from lit_gen.pack import KernelLinear, TiedEmbedding, pack_model, weight_bytes
from lit_gen.stats import Stats, Traffic

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
MOE = {"n_expert": 8, "n_expert_per_token": 5, "moe_intermediate_size": 32, "moe_layers": [True, False]}
PROMPTS = [[5], [1, 2, 3, 4, 5, 6, 7], list(range(20, 61)), list(range(100, 70, -2))]
NEW = [[7, 9, 11], [3, 3, 3], [100, 2, 50], [64, 32, 16]]  # what the rows go on with
COLUMNS = 64


@pytest.fixture(autouse=True)
def without_gradients():
    with torch.no_grad():
        yield


@pytest.fixture
def needs_kernels() -> None:
    if load_kernels() is None:
        pytest.skip("there is no C++ compiler, or LIT_GEN_KERNELS=0")


def set_cache(model: GPT, n_rows: int, prompts: list[int]) -> None:
    """`prompts` says which prompt will be in each row; the others stay empty."""
    model.set_kv_cache(n_rows, COLUMNS)
    model.set_row_length([len(PROMPTS[p]) + len(NEW[p]) for p in prompts])


def alone(model: GPT, p: int) -> Tensor:
    """Logits (len(prompt) + len(new), V) of a prompt by itself, first whole, then token by token."""
    set_cache(model, 1, [p])
    rows = [model(torch.tensor([PROMPTS[p]]), rows=slice(0, 1))[0]]
    for i, token in enumerate(NEW[p]):
        rows.append(model(torch.tensor([[token]]), torch.tensor([[len(PROMPTS[p]) + i]]))[0])
    return torch.cat(rows)


def decoded(model: GPT, prompts: list[int]) -> Tensor:
    """Logits (B, 3, V) of decode steps of all rows, whose prompts are in the cache."""
    steps = []
    for i in range(3):
        idx = torch.tensor([[NEW[p][i]] for p in prompts])
        input_pos = torch.tensor([[len(PROMPTS[p]) + i] for p in prompts])
        steps.append(model(idx, input_pos, torch.zeros(len(prompts), dtype=torch.int64), span=COLUMNS))
    return torch.stack(steps, dim=1)


def assert_equal_rows(model: GPT, first: Tensor, prompts: list[int], expected: list[Tensor]) -> None:
    """`first` (B, V) follow the prompts, which are in the cache; `expected` is what each gives alone."""
    later = decoded(model, prompts)
    for b, p in enumerate(prompts):
        n = len(PROMPTS[p])
        assert torch.equal(first[b], expected[p][n - 1]), f"prompt {p}"
        assert torch.equal(later[b], expected[p][n:]), f"steps after prompt {p}"


def assert_every_way_gives_the_same_bits(model: GPT) -> None:
    expected, order = [alone(model, p) for p in range(len(PROMPTS))], [2, 0, 3, 1]
    texts = [PROMPTS[p] for p in order]
    for side in ("left", "right"):
        set_cache(model, 4, order)
        idx, input_pos, last = rectangle(texts, side)
        assert_equal_rows(model, model(idx, input_pos, last), order, expected)
    set_cache(model, 4, order)  # fresh: the cache is written but not read
    idx, _, last = rectangle(texts, "right")
    assert_equal_rows(model, model(idx, None, last, rows=slice(0, 4)), order, expected)

    set_cache(model, 4, order)
    idx, input_pos, rows, last = packed([PROMPTS[p] for p in (1, 2, 0, 3)], [0] * 4, [3, 0, 1, 2])
    first = model(idx, input_pos, last, rows=rows)
    assert_equal_rows(model, first[[1, 2, 3, 0]], order, expected)

    set_cache(model, 4, order)  # in pieces
    halves = [[text[: len(text) // 2], text[len(text) // 2 :]] for text in texts]
    some = [0, 2, 3]  # the first half of one token is empty
    idx, input_pos, rows, last = packed([halves[b][0] for b in some], [0] * 3, some)
    model(idx, input_pos, last, rows=rows)
    idx, input_pos, rows, last = packed([half for _, half in halves], [len(half) for half, _ in halves], range(4))
    assert_equal_rows(model, model(idx, input_pos, last, rows=rows), order, expected)


@pytest.mark.usefixtures("needs_kernels")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_is_as_exact_as_unpacked_and_each_row_has_its_own_bits(
    name: str, dtype: torch.dtype, family: Callable
) -> None:
    """Errors against float64 with the same weights; the median of them, since rounding can choose other experts."""
    model = copy.deepcopy(family(name).model).to(dtype)
    double = copy.deepcopy(model).double()
    exact = torch.cat([alone(double, p) for p in range(4)])

    def error(model: GPT) -> float:
        logits = torch.cat([alone(model, p) for p in range(4)])
        assert logits.dtype == dtype
        return float((logits - exact).norm(dim=-1).median() / exact.norm(dim=-1).median())

    before = error(model)
    assert error(pack_model(model)) <= 1.5 * before
    if not multiplies(dtype) or dtype == torch.float32:
        assert all(isinstance(block.attn.qkv, KernelLinear) for block in model.h)
        assert_every_way_gives_the_same_bits(model)


@pytest.mark.usefixtures("needs_kernels")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("norm_topk", [True, False])
def test_bits_of_a_row_do_not_depend_on_what_its_experts_do_for_others(norm_topk: bool, dtype: torch.dtype) -> None:
    assert_every_way_gives_the_same_bits(pack_model(randomized(llama_config(**MOE, norm_topk=norm_topk)).to(dtype)))


@pytest.mark.usefixtures("needs_kernels")
@pytest.mark.parametrize("fields", [{}, {"qk_norm": "head"}, MOE, {"norm": "layer"}])
@pytest.mark.parametrize("autocast", DTYPES[1:])
def test_mixed_precision_takes_the_dtype_of_autocast(fields: dict, autocast: torch.dtype) -> None:
    """Weights are float32, cache, products and attention 16-bit: kernels that took one for the other would crash."""
    model = randomized(llama_config(**fields))
    plain = copy.deepcopy(model)
    pack_model(model)
    with torch.autocast("cpu", autocast):
        expected, got = (torch.cat([alone(m, p) for p in range(4)]) for m in (plain, model))
        assert got.dtype == expected.dtype == autocast and model.h[0].attn.kv_cache.k.dtype == autocast
        error = (got.double() - expected.double()).norm(dim=-1).median() / expected.double().norm(dim=-1).median()
        assert error < (0.1 if autocast == torch.bfloat16 else 0.02)
        assert_every_way_gives_the_same_bits(model)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("make", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
@pytest.mark.parametrize("fields", [{"tie_embeddings": True}, MOE])
def test_a_packed_model_can_be_copied(make: Callable, fields: dict, dtype: torch.dtype) -> None:
    model = pack_model(randomized(llama_config(**fields)).to(dtype))
    expected = [alone(model, p) for p in range(4)]
    other = make(model)
    for child in model.modules():
        if isinstance(child, KernelLinear):
            child.weight.zero_()  # the copy has weights of its own
    assert all(torch.equal(alone(other, p), expected[p]) for p in range(4))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.usefixtures("needs_kernels")
def test_weights_are_not_kept_twice(tied: bool, dtype: torch.dtype) -> None:
    """Sizes of this model are multiples of 64, so nothing is padded. float16 is kept, and multiplied, as float32."""
    if dtype != torch.float32 and multiplies(dtype):
        pytest.skip(f"this CPU multiplies {dtype}: PyTorch does it")
    model = randomized(llama_config(tie_embeddings=tied, vocab_size=512)).to(dtype)
    norms = 5 * 64
    linears = sum(p.numel() for p in model.h.parameters()) - norms + 64 + 512 * 64
    pack_model(model)
    embedding = 0 if tied and dtype != torch.float16 else 512 * 64 * dtype.itemsize
    size = 2 if dtype == torch.bfloat16 else 4
    expected = linears * size + norms * dtype.itemsize + embedding
    assert weight_bytes(model) == expected
    assert isinstance(model.wte, TiedEmbedding) == (tied and dtype != torch.float16)
    storages = {}  # all that is reachable, also what is no parameter
    for module in model.modules():
        for value in [*vars(module).values(), *module.parameters(recurse=False)]:
            if isinstance(value, Tensor):
                storages[value.data_ptr()] = value.nbytes
    assert sum(storages.values()) == expected


@pytest.mark.usefixtures("needs_kernels")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab_size", [512, 70, 33])
def test_a_tied_embedding_gives_the_rows_of_the_weight(vocab_size: int, dtype: torch.dtype) -> None:
    model = randomized(llama_config(tie_embeddings=True, vocab_size=vocab_size)).to(dtype)
    weight = model.wte.weight.detach().clone()
    embedding = pack_model(model).wte
    idx = torch.arange(vocab_size).flip(0).view(1, -1)
    assert torch.equal(embedding(idx), weight[idx])
    for wrong in (vocab_size, -1):
        with pytest.raises(IndexError):
            embedding(torch.tensor([[0, wrong]]))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_packed_model_reports_the_weights_that_a_step_reads(dtype: torch.dtype) -> None:
    model = randomized(llama_config()).to(dtype)
    others = ("wte", "norm", "ln_f")
    blocks = sum(p.numel() for name, p in model.named_parameters() if not any(part in name for part in others))
    pack_model(model).set_kv_cache(1, 4)
    native = dtype == torch.bfloat16 and load_kernels() is not None  # kernels read it as it is
    size = dtype.itemsize if multiplies(dtype) or native else 4
    norms = 5 * 64 * dtype.itemsize
    assert Traffic(model).step([0]) == blocks * size + norms + 2 * 2 * 2 * 16 * dtype.itemsize  # k and v of one column


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("config", [llama_config(), neox_config(), llama_config(**MOE)])
def test_rows_of_a_packed_model_generate_what_they_generate_alone(config, dtype: torch.dtype) -> None:
    model = pack_model(randomized(config).to(dtype))
    prompts = [[1, 2, 3], [4], list(range(40, 90)), [7] * 9]
    batch = [row.tokens for row in sorted(generate(model, prompts, max_new_tokens=8), key=lambda row: row.index)]
    solo = [next(generate(model, [prompt], max_new_tokens=8)).tokens for prompt in prompts]
    assert all(len(row) == 8 for row in batch)
    exact = dtype == torch.float32 or isinstance(model.lm_head, KernelLinear)
    assert batch == solo or not exact


def test_without_kernels_everything_works_in_plain_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIT_GEN_KERNELS", "0")
    load_kernels.cache_clear()
    try:
        for dtype in DTYPES:
            model = randomized(llama_config(**MOE)).to(dtype)
            expected = alone(copy.deepcopy(model).double(), 1)
            assert pack_model(model) is model and not model.by_token
            assert not any(isinstance(child, KernelLinear) for child in model.modules())
            assert (alone(model, 1) - expected).norm() < 0.1 * expected.norm()
            rows = list(generate(model, [[1, 2, 3], [4]], max_new_tokens=4, stats=Stats()))
            assert sorted(len(row.tokens) for row in rows) == [4, 4]
    finally:
        load_kernels.cache_clear()


@pytest.mark.usefixtures("needs_kernels")
@pytest.mark.parametrize(
    "call",
    [
        lambda model, one: model(one, one, rows=torch.tensor([2])),  # of two rows
        lambda model, one: model(one, one, rows=torch.tensor([-1])),
        lambda model, one: model(one, one + COLUMNS - 1, rows=torch.tensor([0])),
        lambda model, one: model(one, one, rows=torch.tensor([0, 1])),
    ],
)
def test_tokens_outside_of_the_cache_are_refused(call: Callable) -> None:
    """C++ would write over other memory."""
    model = pack_model(randomized(llama_config()))
    model.set_kv_cache(2, COLUMNS)
    with pytest.raises(ValueError, match="row|column"):
        call(model, torch.ones(1, 1, dtype=torch.int64))
