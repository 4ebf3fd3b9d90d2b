"""The C++ kernels: within a stated error of float64; the same bits beside any other rows, on any number of threads."""

import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lit_gen import kernels as module
from lit_gen.kernels import Kernels, load_kernels
from lit_gen.linear import HugePages
from lit_gen.pack import KernelLinear, packed_bytes

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
UNIT = 2.0**-24  # what one rounding of a float32 changes at most, relatively
ROUNDING = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}  # of a result to its dtype
TINY = {torch.float32: 1e-37, torch.bfloat16: 1e-37, torch.float16: 2.0**-25}  # the same among the smallest numbers
TOKENS = [(2, 511), (0, 3), (1, -1), (0, 4), (3, 0), (2, 512), (1, 700), (2, 513), (0, -1), (4, 1500), (0, 5), (3, 30)]
ATTENTION = [  # nh, ng, hs, rotated elements, kind, window, softcap
    (1, 1, 8, 8, "full", None, None),
    (2, 1, 16, 4, "full", None, None),
    (9, 3, 64, 64, "full", None, None),
    (4, 4, 64, 32, "full", None, 5.0),
    (7, 1, 80, 32, "sliding", 100, None),
    (5, 1, 96, 0, "full", None, None),
    (8, 2, 96, 96, "chunked", 512, None),
    (4, 1, 128, 128, "sliding", 513, 20.0),
    (12, 1, 128, 64, "chunked", 100, None),
    (6, 2, 256, 256, "full", None, 1.0),
    (3, 1, 256, 128, "sliding", 1, None),
]


@pytest.fixture(scope="module")
def kernels() -> Kernels:
    found = load_kernels()
    if found is None:
        pytest.skip("there is no C++ compiler, or LIT_GEN_KERNELS=0")
    return found


@pytest.fixture
def threads():
    """Sets the number of threads, for this test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def assert_close(y: Tensor, exact: Tensor, error: Tensor | float) -> None:
    """|y - exact| <= error + one rounding of the result to its dtype."""
    assert y.shape == exact.shape and y.isfinite().all()
    allowed = error + ROUNDING[y.dtype] * (exact.abs() + error) + TINY[y.dtype]
    assert ((y.double() - exact).abs() <= allowed).all(), float(((y.double() - exact).abs() / allowed).max())


# linear


def packed_linear(kernels: Kernels, N: int, K: int, bias: bool, dtype: torch.dtype) -> tuple[nn.Linear, KernelLinear]:
    torch.manual_seed(N + K)
    linear = nn.Linear(K, N, bias=bias).to(dtype).requires_grad_(False)
    return linear, KernelLinear(linear, kernels, HugePages(packed_bytes(N, K, dtype)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("N", "K", "bias"),
    [(1, 1, True), (33, 1, False), (70, 33, True), (96, 576, False), (576, 70, True), (31, 64, False)],
)
def test_product_is_as_exact_as_float32_sums_and_the_same_bits_beside_any_rows(
    kernels: Kernels, threads: Callable, N: int, K: int, bias: bool, dtype: torch.dtype
) -> None:
    """A float32 sum of K products is wrong by at most (K + 1) * 2**-24 of the sum of their absolute values."""
    linear, packed = packed_linear(kernels, N, K, bias, dtype)
    x = torch.randn(400, K).to(dtype)
    whole = packed(x)
    assert whole.dtype == dtype
    exact = F.linear(x.double(), linear.weight.double(), linear.bias.double() if bias else None)
    most = F.linear(x.double().abs(), linear.weight.double().abs(), linear.bias.double().abs() if bias else None)
    assert_close(whole, exact, (K + 1) * UNIT * most)
    for n_threads in (1, 2, 3):
        threads(n_threads)
        for M in [*range(1, 27), 47, 48, 49, 96, 97, 193, 400] if n_threads == 1 else [1, 2, 6, 7, 12, 25, 49, 193]:
            offset = 400 - M if M % 2 else (400 - M) // 3
            assert torch.equal(packed(x[offset : offset + M]), whole[offset : offset + M]), (n_threads, M)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("M", [1, 5, 40])
def test_what_is_not_finite_stays_in_its_row_of_a_product(kernels: Kernels, M: int, dtype: torch.dtype) -> None:
    _, packed = packed_linear(kernels, 70, 33, True, dtype)
    x = torch.randn(M + 2, 33).to(dtype)
    expected = packed(x)
    x[1, 5], x[-1, 32] = math.nan, math.inf
    y = packed(x)
    assert y[1].isnan().all() and not y[-1].isfinite().any()
    others = [0, *range(2, M + 1)]
    assert torch.equal(y[others], expected[others])


def test_shapes_of_a_product(kernels: Kernels) -> None:
    _, packed = packed_linear(kernels, 70, 33, False, torch.float32)
    x = torch.randn(3, 4, 66)[..., ::2]  # not contiguous
    assert torch.equal(packed(x), packed(x.reshape(12, 33)).view(3, 4, 70))
    assert packed(x[:0]).shape == (0, 4, 70)


# attention


def inputs(nh: int, ng: int, hs: int, n_elem: int, dtype: torch.dtype, tokens: list = TOKENS, S: int = 1501) -> tuple:
    """q, k, v, rope, cache, row, position; q, k and v are parts of one tensor, as in the model."""
    torch.manual_seed(nh * hs)
    N, rows = len(tokens), max(row for row, _ in tokens) + 1
    q, k, v = torch.randn(N, nh + 2 * ng, hs).to(dtype).split((nh, ng, ng), dim=1)
    angles = torch.rand(N, n_elem) * 6
    rope = (angles.cos().to(dtype), angles.sin().to(dtype)) if n_elem else None
    row, position = torch.tensor(tokens).T.contiguous()
    return q, k, v, rope, torch.randn(2, rows, ng, S, hs).to(dtype), row, position


def attend(kernels: Kernels, given: tuple, part: slice | list = slice(None), **settings) -> tuple[Tensor, Tensor]:
    """The result for some of the tokens, and what the cache holds then."""
    q, k, v, rope, cache, row, position = given
    cache = cache.clone()
    rope = rope and (rope[0][part], rope[1][part])
    y = kernels.attend(q[part], k[part], v[part], rope, tuple(cache), row[part], position[part], **settings)
    return y, cache


def rotated(x: Tensor, rope: tuple[Tensor, Tensor] | None) -> Tensor:
    """x (N, heads, hs) float64; `rope` has the sign of the first half in its sines."""
    if rope is None:
        return x
    cos, sin = (table.double()[:, None] for table in rope)
    turned, rest = x[..., : cos.size(-1)], x[..., cos.size(-1) :]
    return torch.cat((turned * cos + turned.roll(turned.size(-1) // 2, -1) * sin, rest), dim=-1)


def seen(position: int, kind: str, window: int | None) -> list[int]:
    columns = range(position + 1)
    if kind == "sliding":
        return [c for c in columns if position - c < window]
    return [c for c in columns if kind == "full" or c // window == position // window]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("nh", "ng", "hs", "n_elem", "kind", "window", "softcap"), ATTENTION)
def test_attention_is_softmax_of_scores_over_what_a_token_sees(
    kernels: Kernels,
    nh: int,
    ng: int,
    hs: int,
    n_elem: int,
    kind: str,
    window: int | None,
    softcap: float | None,
    dtype,
) -> None:
    given = inputs(nh, ng, hs, n_elem, dtype)
    q, k, v, rope, before, row, position = given
    scale = hs**-0.5
    y, cache = attend(kernels, given, scale=scale, kind=kind, window=window, softcap=softcap)
    assert y.dtype == dtype and y.shape == (len(TOKENS), nh * hs)
    key, query = rotated(k.double(), rope), rotated(q.double(), rope)
    real = position >= 0
    assert_close(cache[0][row[real], :, position[real]], key[real], 4 * UNIT * key[real].abs().max())
    assert torch.equal(cache[1][row[real], :, position[real]], v[real])
    cache_before = before.clone()
    cache_before[:, row[real], :, position[real]] = cache[:, row[real], :, position[real]]
    assert torch.equal(cache, cache_before)  # nothing else is written
    for n, (r, p) in enumerate(TOKENS):
        if p < 0:
            assert (y[n] == 0).all()
            continue
        keys, values = cache[:, r, :, seen(p, kind, window)].double().repeat_interleave(nh // ng, dim=1)  # (nh, S, hs)
        scores = torch.einsum("hd,hsd->hs", query[n], keys) * scale
        scores = scores if softcap is None else torch.tanh(scores / softcap) * softcap
        exact = torch.einsum("hs,hsd->hd", scores.softmax(-1), values)
        assert_close(y[n].view(nh, hs), exact, 100 * UNIT * values.abs().amax(1))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("nh", "ng", "hs", "n_elem", "kind", "window", "softcap"), ATTENTION)
def test_a_token_has_the_bits_that_it_has_alone(
    kernels: Kernels, threads: Callable, nh: int, ng: int, hs: int, n_elem: int, kind: str, window, softcap, dtype
) -> None:
    given, settings = inputs(nh, ng, hs, n_elem, dtype), dict(kind=kind, window=window, softcap=softcap, scale=0.1)
    q, k, v, rope, cache, row, position = given
    together, after = attend(kernels, given, **settings)
    for n_threads in (1, 3):
        threads(n_threads)
        alone = torch.empty_like(together)
        own_cache = cache.clone()
        for n in range(len(TOKENS)):
            one = slice(n, n + 1)
            own_rope = rope and (rope[0][one], rope[1][one])
            where = own_rope, tuple(own_cache), row[one], position[one]
            alone[one] = kernels.attend(q[one], k[one], v[one], *where, **settings)
        assert torch.equal(alone, together) and torch.equal(own_cache, after)
        backwards = attend(kernels, given, list(range(len(TOKENS)))[::-1], **settings)[0].flip(0)
        assert torch.equal(backwards, together)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("nh", "ng", "hs", "n_elem", "kind", "window", "softcap"), ATTENTION)
def test_neighbours_in_a_prompt_share_columns_and_have_the_bits_that_each_has_alone(
    kernels: Kernels, threads: Callable, nh: int, ng: int, hs: int, n_elem: int, kind: str, window, softcap, dtype
) -> None:
    tokens = [(0, p) for p in range(37)] + [(1, -1)] * 2 + [(1, 0)] + [(2, p) for p in range(505, 530)] + [(0, 37)]
    tokens += [(1, p) for p in range(1, 4)] + [(3, p) for p in range(1040, 1011, -1)]
    given, settings = inputs(nh, ng, hs, n_elem, dtype, tokens, 1100), dict(kind=kind, window=window, softcap=softcap)
    q, k, v, rope, cache, row, position = given
    threads(2)
    together, after = attend(kernels, given, scale=0.1, **settings)
    for n in range(len(tokens)):
        one = slice(n, n + 1)
        where = rope and (rope[0][one], rope[1][one]), tuple(after.clone()), row[one], position[one]
        assert torch.equal(kernels.attend(q[one], k[one], v[one], *where, scale=0.1, **settings), together[one]), n
    k[36], v[36] = math.nan, math.inf  # no token before the last one of this prompt sees it
    again, _ = attend(kernels, given, scale=0.1, **settings)
    seen = (row == 0) & (position >= 36)
    assert torch.equal(again[~seen], together[~seen]) and again[36].isnan().all()


def test_a_prompt_has_the_same_bits_whole_and_in_pieces(kernels: Kernels, threads: Callable) -> None:
    """1400 tokens with 12 heads of 256 are more than the kernel keeps at a time."""
    threads(2)
    given = inputs(12, 1, 256, 64, torch.float32, tokens=[(0, p) for p in range(1400)], S=1400)
    whole, _ = attend(kernels, given, scale=0.05)
    q, k, v, rope, cache, row, position = given
    pieces = []
    for part in (slice(0, 1), slice(1, 600), slice(600, 1400)):
        where = (rope[0][part], rope[1][part]), tuple(cache), row[part], position[part]
        pieces.append(kernels.attend(q[part], k[part], v[part], *where, scale=0.05))
    assert torch.equal(torch.cat(pieces), whole)


@pytest.mark.parametrize("dtype", DTYPES)
def test_columns_behind_a_token_are_never_seen(kernels: Kernels, dtype: torch.dtype) -> None:
    given = inputs(4, 2, 80, 16, dtype)
    expected, _ = attend(kernels, given, scale=0.1)
    cache, row, position = given[4:]
    for r in range(cache.size(1)):
        cache[:, r, :, max(int(position[row == r].max()), 0) + 1 :] = math.nan
    assert torch.equal(attend(kernels, given, scale=0.1)[0], expected)
    window, _ = attend(kernels, given, scale=0.1, kind="sliding", window=7)
    cache[:, 4, :, :1494] = math.nan  # token 9 is at 1500 and sees 7 columns
    cache[:, 2, :, :505] = math.nan
    assert torch.equal(attend(kernels, given, scale=0.1, kind="sliding", window=7)[0], window)
    cache[:, 4, :, 1494] = math.nan
    assert attend(kernels, given, scale=0.1, kind="sliding", window=7)[0][9].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("where", "hit"),  # tokens 0, 5 and 7 are in row 2, at columns 511, 512 and 513
    [
        (("key", 0), [0, 5, 7]),
        (("value", 100), [0, 5, 7]),
        (("key", 511), []),
        (("query", 9), [9]),
        (("new", 5), [5, 7]),
    ],
)
def test_nan_stays_in_its_row_and_is_not_hidden_there(kernels: Kernels, where: tuple, hit: list, dtype) -> None:
    given = inputs(4, 2, 64, 16, dtype)
    expected, _ = attend(kernels, given, scale=0.1)
    q, k, _, _, cache, *_ = given
    kind, place = where
    if kind in ("key", "value"):
        cache[int(kind == "value"), 2, :, place] = math.nan  # token 0 writes over column 511
    else:
        (q if kind == "query" else k)[place, :, 3] = math.nan
    y, _ = attend(kernels, given, scale=0.1)
    assert y[hit].isnan().all()
    others = [n for n in range(len(TOKENS)) if n not in hit]
    assert torch.equal(y[others], expected[others])


def test_large_scores_are_no_nan(kernels: Kernels) -> None:
    """e**score alone would be infinite or 0: the largest is subtracted, also that of another chunk of columns."""
    q, k, v, rope, cache, row, position = inputs(2, 1, 16, 0, torch.float32)
    for largest in (3, 600, 1499):
        cache[0, 4] = -20.0
        cache[0, 4, :, largest] = 20.0
        q.fill_(10.0)
        y = kernels.attend(q, k, v, rope, tuple(cache), row, position, scale=1.0)
        assert torch.equal(y[9].view(2, 16), cache[1, 4, :, largest].expand(2, 16))
    cache[0, 4] = k[9] = -20.0  # all are equally low: nothing is added where 1501 columns end within a vector
    y = kernels.attend(q, k, v, rope, tuple(cache), row, position, scale=1.0)
    assert_close(y[9].view(2, 16), cache[1, 4].double().mean(1).expand(2, 16), 100 * UNIT)


def test_tensors_of_another_dtype_are_refused(kernels: Kernels) -> None:
    q, k, v, rope, cache, row, position = inputs(2, 1, 16, 4, torch.float32)
    with pytest.raises(AssertionError, match="one dtype"):
        kernels.attend(q, k, v, rope, tuple(cache.bfloat16()), row, position, scale=1.0)


# rows


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 7, 16, 33, 576])
@pytest.mark.parametrize(("offset", "weighted"), [(0.0, True), (1.0, True), (0.0, False)])
def test_rms_norm_is_exact_and_the_same_bits_beside_any_rows(
    kernels: Kernels, threads: Callable, size: int, offset: float, weighted: bool, dtype: torch.dtype
) -> None:
    torch.manual_seed(size)
    x = (torch.randn(70, size) * torch.logspace(-2, 2, 70)[:, None]).to(dtype)
    weight = torch.randn(size).to(dtype) if weighted else None
    y = kernels.rms_norm(x, weight, offset, 1e-5)
    exact = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-5).sqrt()
    exact = exact * (weight.double() + offset) if weighted else exact
    assert y.dtype == dtype
    assert_close(y, exact, (size / 32 + 16) * UNIT * exact.abs())
    for n_threads in (1, 3):
        threads(n_threads)
        for rows in (slice(0, 1), slice(3, 9), slice(69, 70), slice(0, 70, 2)):
            assert torch.equal(kernels.rms_norm(x[rows], weight, offset, 1e-5), y[rows])
    x[3] = math.nan
    again = kernels.rms_norm(x, weight, offset, 1e-5)
    assert again[3].isnan().all() and torch.equal(again[4:], y[4:]) and torch.equal(again[:3], y[:3])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 7, 16, 33, 576])
@pytest.mark.parametrize(("weighted", "biased"), [(True, True), (True, False), (False, False)])
def test_layer_norm_is_exact_and_the_same_bits_beside_any_rows(
    kernels: Kernels, threads: Callable, size: int, weighted: bool, biased: bool, dtype: torch.dtype
) -> None:
    torch.manual_seed(size)
    x = (torch.randn(70, size) * torch.logspace(-1, 2, 70)[:, None] + torch.randn(70, 1)).to(dtype)
    weight, bias = torch.randn(size).to(dtype) if weighted else None, torch.randn(size).to(dtype) if biased else None
    y = kernels.layer_norm(x, weight, bias, 1e-5)
    exact = F.layer_norm(x.double(), (size,), *(t if t is None else t.double() for t in (weight, bias)), 1e-5)
    assert y.dtype == dtype
    scale = x.double().abs().amax(-1, keepdim=True) / (x.double().var(-1, correction=0, keepdim=True) + 1e-5).sqrt()
    weights = 1.0 if weight is None else weight.double().abs()
    assert_close(y, exact, (size / 16 + 16) * UNIT * ((scale + 1) * weights + exact.abs() + 1))
    for n_threads in (1, 3):
        threads(n_threads)
        for rows in (slice(0, 1), slice(3, 9), slice(69, 70), slice(0, 70, 2)):
            assert torch.equal(kernels.layer_norm(x[rows], weight, bias, 1e-5), y[rows])
    x[3] = math.nan
    again = kernels.layer_norm(x, weight, bias, 1e-5)
    assert again[3].isnan().all() and torch.equal(again[4:], y[4:]) and torch.equal(again[:3], y[:3])


@pytest.mark.parametrize("dtype", DTYPES)
def test_norms_read_the_heads_of_a_token_where_they_lie(kernels: Kernels, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    qkv = torch.randn(1, 5, 7, 24).to(dtype)
    weight, bias = torch.randn(24).to(dtype), torch.randn(24).to(dtype)
    for part in (qkv[:, :, :4], qkv[:, :, 4:6], qkv[:, :, 2:3], qkv[0, :, 3:], qkv[:, :, ::2], qkv.transpose(1, 2)):
        whole = part.contiguous()
        y, z = kernels.rms_norm(part, weight, 1.0, 1e-6), kernels.layer_norm(part, weight, bias, 1e-6)
        assert torch.equal(y, kernels.rms_norm(whole, weight, 1.0, 1e-6)) and y.is_contiguous()
        assert torch.equal(z, kernels.layer_norm(whole, weight, bias, 1e-6)) and z.is_contiguous()
    flat = qkv[:, :, 1:4].flatten(2)  # (1, 5, 72), rows apart
    assert torch.equal(kernels.rms_norm(flat, None, 0.0, 1e-6), kernels.rms_norm(flat.contiguous(), None, 0.0, 1e-6))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [1.0, 0.22, 1.5])
def test_residual_sums_have_the_bits_of_pytorch(kernels: Kernels, scale: float, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    for shape in ((1, 1, 5), (3, 70), (40, 577)):
        x, y = torch.randn(shape).to(dtype), (torch.randn(shape) * 3).to(dtype)
        expected = x + y if scale == 1.0 else x + y * scale
        assert torch.equal(kernels.add(x, y, scale), expected)


EXACT = {
    "silu": lambda x: x * torch.sigmoid(x),
    "gelu": lambda x: x * torch.special.ndtr(x),
    "gelu_tanh": lambda x: x * torch.sigmoid(2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)),
    "relu": lambda x: x.clamp(min=0),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("act", EXACT)
def test_activations_are_exact_and_the_same_bits_beside_any_rows(
    kernels: Kernels, threads: Callable, act: str, gated: bool, dtype: torch.dtype
) -> None:
    torch.manual_seed(1)
    for size in (1, 15, 33, 1000):
        x = (torch.randn(40, 2 * size if gated else size) * 4).to(dtype)
        y = kernels.activate(x, act, gated)
        gate, up = x.double().chunk(2, dim=-1) if gated else (x.double(), torch.ones(()).double())
        assert y.dtype == dtype
        assert_close(y, EXACT[act](gate) * up, 8 * UNIT * (gate * up).abs())
        for n_threads in (1, 3):
            threads(n_threads)
            for rows in (slice(0, 1), slice(3, 9), slice(39, 40), slice(0, 40, 2)):
                assert torch.equal(kernels.activate(x[rows], act, gated), y[rows])


@pytest.mark.parametrize("dtype", DTYPES)
def test_results_are_rounded_to_the_nearest_and_ties_to_even(kernels: Kernels, dtype: torch.dtype) -> None:
    """Products of two 16-bit numbers are exact in float32; many lie in the middle between two 16-bit numbers."""
    torch.manual_seed(2)
    gate, up = torch.rand(300, 200).to(dtype), torch.randn(300, 200).to(dtype)
    y = kernels.activate(torch.cat((gate, up), dim=-1), "relu", True)
    assert torch.equal(y, (gate.float() * up.float()).to(dtype))


@pytest.mark.parametrize("act", EXACT)
def test_activations_of_extreme_numbers(kernels: Kernels, act: str) -> None:
    large = [1e4, 100.0, 3e38, math.inf]
    x = torch.tensor([*large, *(-value for value in large[:3]), 0.0, -0.0, math.nan])
    y = kernels.activate(x, act, False)
    assert y[:4].tolist() == x[:4].tolist() and y[9].isnan() and y[7:9].abs().tolist() == [0.0, 0.0]
    assert (y[4:7].abs() < 1e-35).all()
    low = kernels.activate(torch.tensor([-math.inf]), act, False)
    assert low.item() == 0 if act == "relu" else low.isnan().all()  # as in PyTorch: -inf * 0


def test_the_exponential_is_good_to_two_units_in_the_last_place(kernels: Kernels) -> None:
    """Of silu(x) = x / (1 + e**-x) little but the exponential is left at large -x; two roundings come on top of it."""
    for low, high in ((-87.0, -17.0), (-17.0, 0.0), (0.0, 88.0)):
        x = torch.linspace(low, high, 1_000_003)
        exact = EXACT["silu"](x.double())
        unit = 2.0 ** (exact.abs().clamp(min=2.0**-126).log2().floor() - 23)
        assert ((kernels.activate(x, "silu", False).double() - exact).abs() / unit).max() <= 3.0


# how they are built


@pytest.fixture
def build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Small sources in the place of csrc, an empty cache folder, and a compiler that keeps a list of its runs."""
    if load_kernels() is None:
        pytest.skip("there is no C++ compiler, or LIT_GEN_KERNELS=0")
    source = tmp_path / "csrc"
    source.mkdir()
    for name in module.SOURCES:
        (source / name).write_text("")
    (source / "calls.cpp").write_text('extern "C" int lit_run() { return 7; }\n')
    compiler = tmp_path / "compiler"
    compiler.write_text(f'#!/bin/sh\necho run >> {tmp_path}/runs\nexec {os.environ.get("CXX", "c++")} "$@"\n')
    compiler.chmod(0o755)
    monkeypatch.setattr(module, "CSRC", source)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("LIT_GEN_KERNELS", raising=False)
    load_kernels.cache_clear()
    yield tmp_path
    load_kernels.cache_clear()


def runs(folder: Path) -> int:
    return len((folder / "runs").read_text().splitlines())


def process(folder: Path) -> subprocess.Popen:
    code = "import sys; from pathlib import Path; from lit_gen import kernels; kernels.CSRC = Path(sys.argv[1])\n"
    code += "print(kernels.load_kernels() is not None)"
    root = Path(__file__).parents[1]
    command = [sys.executable, "-c", code, str(folder / "csrc")]
    return subprocess.Popen(command, cwd=root, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_one_process_compiles_and_others_use_it_also_at_the_same_time(build: Path) -> None:
    both = [process(build) for _ in range(2)]
    for child in both:
        out, err = child.communicate()
        assert out == "True\n" and set(err.splitlines()) <= {
            "compiling lit_gen/csrc, once for this machine (some seconds)"
        }
    compiled = runs(build)
    assert compiled in (1, 2)
    assert [path.suffix for path in (build / "cache/lit_gen").iterdir()] == [".so"]  # and nothing half-done
    assert load_kernels() is not None and runs(build) == compiled


def test_other_sources_are_compiled_again(build: Path) -> None:
    module._build()
    with (build / "csrc/linear.cpp").open("a") as file:
        file.write("// changed\n")
    module._build()
    assert runs(build) == 2


def test_compiler_with_arguments(build: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", f"{os.environ['CXX']} -DSOME=1")
    assert load_kernels() is not None and runs(build) == 1


def test_without_a_compiler_there_is_one_line(build: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", str(build))
    assert load_kernels() is None and load_kernels() is None
    reason = "no C++ compiler (g++ or clang++) is on the PATH"
    assert capsys.readouterr() == ("", f"no C++ kernels, so plain PyTorch, which is slower: {reason}\n")


@pytest.mark.parametrize("kind", ["missing", "fails", "source", "silent", "nothing"])
def test_a_compiler_that_fails_costs_one_line_of_reason(build: Path, kind: str, monkeypatch, capsys) -> None:
    wanted = {
        "missing": "No such file",
        "fails": "error: out of luck",
        "source": "error",
        "silent": "compiler ended with status 3",
    }
    wanted["nothing"] = "No such file"
    scripts = {"fails": "echo note >&2; echo 'error: out of luck' >&2; exit 1", "silent": "exit 3", "nothing": "exit 0"}
    if kind == "missing":
        monkeypatch.setenv("CXX", str(build / "none"))
    elif kind == "source":
        (build / "csrc/linear.cpp").write_text("this is no C++\n")
    else:
        (build / "compiler").write_text(f"#!/bin/sh\n{scripts[kind]}\n")
    assert load_kernels() is None
    out, err = capsys.readouterr()
    first, second = err.splitlines()
    assert (
        out == "" and first.startswith("compiling") and second.startswith("no C++ kernels") and wanted[kind] in second
    )
    assert list((build / "cache/lit_gen").iterdir()) == []


@pytest.mark.parametrize("kind", ["a file", "no home", "no library"])
def test_a_cache_folder_that_cannot_be_used_costs_one_line(build: Path, kind: str, monkeypatch, capsys) -> None:
    if kind == "a file":
        (build / "cache").write_text("")
    elif kind == "no home":
        monkeypatch.delenv("XDG_CACHE_HOME")
        monkeypatch.delenv("HOME", raising=False)
        monkeypatch.setattr("os.path.expanduser", lambda path: path)  # what it does for users without an entry
    else:
        library = module._build()
        library.write_bytes(b"\x7fELF, cut off")
        capsys.readouterr()
    assert load_kernels() is None
    assert len(capsys.readouterr().err.splitlines()) == 1


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_cache_folder_costs_one_line(build: Path, capsys) -> None:
    (build / "cache").mkdir(mode=0o500)
    assert load_kernels() is None
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_kernels_can_be_left_out(build: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setenv("LIT_GEN_KERNELS", "0")
    assert load_kernels() is None and capsys.readouterr() == ("", "") and not (build / "runs").exists()


def test_too_little_memory_is_an_error_of_python(kernels: Kernels) -> None:
    """A C++ exception that leaves a library ends the process; `is_out_of_memory` wants one that can be caught."""
    code = """
import resource, torch
from lit_gen.kernels import load_kernels
kernels = load_kernels()
x, weight = torch.zeros(2**20, 64, dtype=torch.bfloat16), torch.zeros(2, 64, 16, 2, dtype=torch.bfloat16)
kernels.linear(x[:9], weight, None, 1)
used = next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmSize")) * 1024
resource.setrlimit(resource.RLIMIT_AS, (used + 2**26, used + 2**26))
try:
    kernels.linear(x, weight, None, 1)  # wants 2**28 bytes
except MemoryError as error:
    print(error)
"""
    if not sys.platform.startswith("linux"):
        pytest.skip("the limit is Linux's")
    done = subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[1], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "no memory for the intermediate results of a kernel\n"), done.stderr
