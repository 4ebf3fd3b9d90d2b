"""Claims of lit_gen/sampling.py: what is kept, what is drawn, and that a row of a batch is the row alone."""

import math

import numpy as np
import pytest
import torch
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from lit_gen.sampling import check_sampling, row_stream, sample
from lit_gen.utils import UserError

LOGITS = torch.tensor([[0.5, -1.2, 3.1, 0.8, -0.3, 2.7, -0.9, 1.4]])
V = 49152
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def evenly(n: int) -> np.ndarray:
    """n numbers that lie evenly in [0, 1): every token of more than 1/n probability is hit."""
    return (np.arange(n) + 0.5) / n


def draws(logits: torch.Tensor, temperature: float, top_k=None, top_p=None, n: int = 1000) -> list[int]:
    """Tokens of one row (1, V) at n evenly spaced numbers."""
    return sample(logits.expand(n, -1), evenly(n), [temperature] * n, [top_k] * n, [top_p] * n).tolist()


def random_logits(rows: int, dtype: torch.dtype, vocabulary: int = V, spread: float = 3.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rows)
    return (torch.randn(rows, vocabulary, generator=generator) * spread).to(dtype)


SETTINGS = [(0.0, None, None), (1.0, None, None), (0.7, 50, None), (0.7, None, 0.9), (1.3, 1000, 0.5)]
SETTINGS += [(0.0, 5, 0.5), (0.5, 3000, 0.999), (1.0, 1, None), (1.0, None, 0.0), (1e-300, None, None)]
SETTINGS += [(3.0, None, 0.98), (1.0, V + 1, 1.0)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocabulary", [V, 1001])
def test_row_of_a_batch_is_the_row_alone(dtype, vocabulary):
    """64 different rows with 12 kinds of settings side by side; every row alone, and the batch backwards."""
    B = 64
    logits = random_logits(B, dtype, vocabulary)
    uniform = np.random.default_rng(0).random(B)
    temperature, top_k, top_p = zip(*(SETTINGS[i % len(SETTINGS)] for i in range(B)), strict=True)
    together = sample(logits, uniform, temperature, top_k, top_p)
    for b in range(0, B, 1 if vocabulary < V else 5):
        one = slice(b, b + 1)
        alone = sample(logits[one].clone(), uniform[one], temperature[one], top_k[one], top_p[one])
        assert alone.tolist() == [together[b].item()], (b, SETTINGS[b % len(SETTINGS)])
    backwards = sample(logits.flip(0), uniform[::-1].copy(), temperature[::-1], top_k[::-1], top_p[::-1])
    assert torch.equal(backwards.flip(0), together)
    assert together.dtype == torch.int64 and together.shape == (B,)


def test_logits_are_not_changed():
    for dtype in (torch.float64, *DTYPES):
        logits = random_logits(3, dtype, 100)
        before = logits.clone()
        sample(logits, [0.5] * 3, [0.0, 1.0, 2.0], [None, 5, None], [None, None, 0.5])
        assert torch.equal(logits, before)


@pytest.mark.parametrize("top_k", [None, 1, 50])
@pytest.mark.parametrize("top_p", [None, 0.0, 0.5, 1.0])
def test_temperature_0_is_the_best_token_whatever_else_is_set(top_k, top_p):
    assert set(draws(LOGITS, 0.0, top_k, top_p)) == {2}
    assert set(draws(torch.tensor([[10.0, 10.000001]]), 0.0, top_k, top_p)) == {1}


def test_greedy_and_sampled_rows_mix():
    logits = LOGITS.repeat(4, 1)
    assert sample(logits, [0.999] * 4, [0.0, 1.0, 0.0, 1.0]).tolist() == [2, 7, 2, 7]


@pytest.mark.parametrize("dtype", [torch.float64, *DTYPES])
@pytest.mark.parametrize("vocabulary", [1, 2, 7, 256, 1000, 50257, V])
def test_greedy_takes_the_lowest_of_equal_ids(dtype, vocabulary):
    rows = random_logits(5, dtype, vocabulary)
    rows[1, vocabulary // 3 :] = 60.0
    rows[2, [vocabulary - 1, vocabulary // 2]] = 60.0
    rows[3] = -7.0
    rows[4, : vocabulary // 2] = -math.inf
    expected = [row.index(max(row)) for row in rows.tolist()]
    assert sample(rows, [0.0] * 5, [0.0] * 5).tolist() == expected


def test_tiny_temperature_is_no_division_by_zero():
    assert set(draws(LOGITS, 5e-324)) == {2}
    assert set(draws(LOGITS, 1e-30, 3, 0.9)) == {2}
    assert set(draws(LOGITS, 1e300)) == set(range(8))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_top_k_of_the_whole_vocabulary_is_no_filter(temperature):
    expected = draws(LOGITS, temperature)
    for top_k in (8, 9, 10**6):
        assert draws(LOGITS, temperature, top_k) == expected
        assert draws(LOGITS, temperature, top_k, 1.0) == expected
    assert len(set(expected)) == (8 if temperature else 1)


def test_top_k_keeps_exactly_k_and_the_lower_of_equal_ids():
    logits = torch.tensor([[1.0, 1.0, 1.0, 0.0]])
    assert set(draws(logits, 1.0, 1)) == {0}
    assert set(draws(logits, 1.0, 2)) == {0, 1}
    assert set(draws(logits, 1.0, 3)) == {0, 1, 2}
    zeros = torch.tensor([[0.0, -0.0, 0.0, -1.0, -0.0]])
    assert set(draws(zeros, 1.0, 2)) == {0, 1}
    assert set(draws(zeros, 1.0, 3)) == {0, 1, 2}
    assert set(draws(torch.tensor([[-3.0, -1.0, -2.0, -1.0]]), 1.0, 3)) == {1, 2, 3}


@pytest.mark.parametrize(
    ("top_p", "kept"), [(0, {0}), (0.3, {0}), (0.5, {0, 1}), (0.7, {0, 1, 2}), (1.0, {0, 1, 2, 3, 4})]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_top_p_is_each_rows_own(top_p, kept, dtype):
    """Three rows with the same probabilities in different places, each against its own order."""
    orders = torch.tensor([[0, 1, 2, 3, 4], [3, 0, 4, 2, 1], [4, 2, 1, 0, 3]])  # which probability lies where
    logits = torch.tensor([0.3, 0.25, 0.2, 0.15, 0.1], dtype=torch.float64).log().to(dtype)[orders]
    seen = [set(), set(), set()]
    for u in evenly(200):
        for row, token in enumerate(sample(logits, [u] * 3, [1.0] * 3, None, [top_p] * 3).tolist()):
            seen[row].add(orders[row, token].item())
    assert seen == [kept] * 3


def test_one_token_above_top_p_is_kept():
    assert set(draws(torch.tensor([[0.01, 0.95, 0.04]]).log(), 1.0, None, 0.9)) == {1}


def test_top_p_looks_at_what_top_k_left():
    """The best token has 0.4778 of the whole and all of what top_k = 1 leaves."""
    assert torch.softmax(LOGITS, -1).max().item() == pytest.approx(0.4778, abs=1e-4)
    assert set(draws(LOGITS, 1.0, 1, 0.8)) == {2}
    # the best three have 0.4778, 0.3203, 0.0873; of their own sum 0.54, 0.36, 0.10, and then two of them reach 0.85
    assert set(draws(LOGITS, 1.0, 3, 0.85)) == {2, 5}
    assert set(draws(LOGITS, 1.0, None, 0.85)) == {2, 5, 7}


def test_temperature_comes_before_top_p():
    assert set(draws(LOGITS, 1.0, None, 0.72)) == {2, 5}
    assert set(draws(LOGITS, 3.0, None, 0.72)) == {2, 5, 7, 3, 0}


@pytest.mark.parametrize("spread", [0.1, 2.0, 5.0])
@pytest.mark.parametrize(
    "setting", [(1.0, 7, None), (0.6, None, 0.8), (1.7, 40, 0.9), (2.5, 250, 0.3), (0.3, None, 0.05)]
)
def test_kept_tokens_are_those_of_transformers(setting, spread):
    """Sets that float32 leaves in doubt (a cumulative sum within 1e-5 of top_p) are left out; there are few."""
    temperature, top_k, top_p = setting
    logits = random_logits(20, torch.float32, 300, spread)
    doubtful = 0
    for row in logits.split(1):
        theirs = TemperatureLogitsWarper(temperature)(None, row)
        if top_k is not None:
            theirs = TopKLogitsWarper(top_k)(None, theirs)
        if top_p is not None:
            sums = torch.softmax(theirs.double(), -1).sort(descending=True).values.cumsum(-1)
            if (sums - top_p).abs().min() < 1e-5:
                doubtful += 1
                continue
            theirs = TopPLogitsWarper(top_p)(None, theirs)
        p = torch.softmax(theirs[0].double(), -1)
        middle = (p.cumsum(-1) - p / 2)[p > 0]  # the middle of a kept token's share draws just that token
        n = len(middle)
        ours = sample(row.expand(n, -1), middle, [temperature] * n, [top_k] * n, [top_p] * n)
        assert ours.tolist() == p.nonzero().squeeze(1).tolist()
    assert doubtful <= 3


def test_flat_rows_look_beyond_the_best_1024():
    """top_p of a flat distribution keeps most of it; next to a row that needs one token, and one with a large top_k."""
    flat = torch.zeros(V)
    steep = random_logits(1, torch.float32, spread=30.0)[0]
    falling = -torch.arange(V) / 10000.0
    logits = torch.stack([flat, steep, falling, flat])
    kept = math.ceil(0.75 * V)
    u = np.random.default_rng(1).random(12)
    tokens = [sample(logits, [x] * 4, [1.0] * 4, [None, None, None, 3000], [0.75, 0.5, 0.5, 0.5]) for x in u]
    first, second, third, fourth = torch.stack(tokens).T
    assert first.tolist() == [math.floor(x * kept) for x in u]  # all alike: the lower ids are kept
    assert set(second.tolist()) == {steep.argmax().item()}
    p = torch.softmax(falling.double(), -1)
    p = torch.where(p.cumsum(-1) - p < 0.5, p, 0)
    assert third.tolist() == [(p.cumsum(-1) / p.sum() > x).nonzero()[0].item() for x in u]
    assert fourth.tolist() == [math.floor(x * 1500) for x in u]


def test_large_top_k_beside_a_top_p_that_needs_few():
    logits = torch.stack([torch.zeros(V), random_logits(1, torch.float32, spread=30.0)[0]])
    for u in (0.1, 0.9999):
        tokens = sample(logits, [u] * 2, [1.0] * 2, [3000, None], [0.5, 0.5])
        assert tokens.tolist() == [math.floor(u * 1500), logits[1].argmax().item()]


def test_rare_tokens_have_their_share():
    """A token of 2**-30 of the best one's probability, then one of 2**-40."""
    logits = torch.tensor([[0.0, -30 * math.log(2), -40 * math.log(2)]])
    shares = {0: 0.5, 1: 1 - 2**-31, 2: 1 - 2**-42}
    for token, u in shares.items():
        assert (
            sample(logits, [u], [1.0]).tolist()
            == sample(logits, [u], [1.0], [3], [0.99999999999999]).tolist()
            == [token]
        )


def test_draws_follow_the_distribution():
    """Chi-square of 20,000 draws with a fixed seed; 99.9 % of good samplers stay below the bound."""
    n, bound = 20_000, {7: 24.32, 3: 16.27}  # degrees of freedom: quantile
    u = row_stream(1, [1, 2], 0, 0).random(n)
    cases = ((1.0, None, None, 7), (0.7, None, None, 7), (1.5, 4, None, 3), (1.5, 5, 0.85, 3))
    for temperature, top_k, top_p, degrees in cases:
        tokens = sample(LOGITS.expand(n, -1), u, [temperature] * n, [top_k] * n, [top_p] * n)
        p = torch.softmax(LOGITS[0].double() / temperature, -1)
        if degrees == 3:
            p[p < p.sort(descending=True).values[3]] = 0
            p /= p.sum()
        counts = torch.bincount(tokens, minlength=8).double()
        assert counts[p == 0].sum() == 0
        assert (((counts - n * p) ** 2 / (n * p))[p > 0]).sum() < bound[degrees]


@pytest.mark.parametrize("u", [0.0, 5e-324, 1e-17, 0.5, 1 - 2**-53, 1.0])
def test_impossible_tokens_are_never_drawn(u):
    """-inf at both ends and between; 1.0 stands for numbers that rounding lifts out of [0, 1)."""
    logits = torch.tensor([[-math.inf, 1.0, -math.inf, 2.0, -1e30, 0.5, -math.inf, -math.inf]])
    for top_k, top_p in ((None, None), (7, None), (None, 0.9999999), (2, None), (None, 0.7), (7, 0.9999999)):
        (token,) = sample(logits, [u], [1.0], [top_k], [top_p]).tolist()
        assert token == {0.0: 1, 5e-324: 1, 1e-17: 1, 0.5: 3}.get(u, 3 if top_k == 2 or top_p == 0.7 else 5)


@pytest.mark.parametrize("top_p", [None, 0.9999999, 1 - 2**-53])
def test_near_uniform_vocabulary_ends_at_its_last_id(top_p):
    """Sums of 50,000 probabilities that round must not lead to an id outside the vocabulary."""
    logits = random_logits(1, torch.float32, 50_000, 1e-3)
    for u in (1 - 2**-53, 1 - 1e-9):
        assert sample(logits, [u], [1.0], None, [top_p]).tolist() == [49_999]
    assert sample(logits, [0.0], [1.0], None, [top_p]).tolist() == [0]


def test_sums_do_not_overflow_with_a_large_vocabulary():
    u = evenly(7)
    tokens = sample(torch.zeros(7, 262_208), u, [1.0] * 7)
    assert tokens.tolist() == [math.floor(x * 262_208) for x in u]


@pytest.mark.parametrize("dtype", DTYPES)
def test_broken_row_is_marked_and_harms_no_other(dtype):
    good = random_logits(3, dtype, 1000)
    broken = random_logits(4, dtype, 1000)
    broken[0, 999], broken[1, 3], broken[2] = math.nan, math.inf, -math.inf
    broken[3], broken[3, 0] = -math.inf, math.nan
    logits = torch.stack([good[0], broken[0], broken[1], good[1], broken[2], broken[3], good[2]])
    places = [0, 3, 6]
    uniform = evenly(7)
    for setting in ((0.0, None, None), (1.0, None, None), (1.0, 20, None), (1.0, None, 0.9), (1.0, 20, 0.9)):
        columns = [[x] * 7 for x in setting]
        tokens = sample(logits, uniform, *columns).tolist()
        expected = sample(good, uniform[places], *[column[:3] for column in columns]).tolist()
        assert [tokens[i] for i in places] == expected
        assert [tokens[i] for i in (1, 2, 4, 5)] == [-1] * 4


def test_row_stream_depends_on_all_four_and_on_nothing_else():
    base = (1234, [5, 6, 7], 0, 0)
    others = [(1235, [5, 6, 7], 0, 0), (1234, [5, 6], 0, 0), (1234, [5, 6, 7, 0], 0, 0), (1234, [7, 6, 5], 0, 0)]
    others += [(1234, [5, 6, 7], 1, 0), (1234, [5, 6, 7], 0, 1), (0, [5, 6, 7], 0, 0), (-1234, [5, 6, 7], 0, 0)]
    others += [(1234, [], 0, 0), (1, [2], 3, 4), (12, [2], 3, 4), (1, [2], 34, 4), (2**100, [2], 3, 4)]
    others += [(2**100 + 1, [2], 3, 4), (13, [2], 4, 4)]  # not a mere row of digits: 1, 34, 4 and 13, 4, 4
    streams = [tuple(row_stream(*key).random(4)) for key in [base, *others]]
    assert len(set(streams)) == len(streams)
    stream = row_stream(1234, torch.tensor([5, 6, 7]), 0, 0)
    assert tuple(stream.random() for _ in range(4)) == streams[0]  # one at a time: step t uses the t-th number


def test_row_stream_is_the_same_on_every_machine():
    """A change of these numbers changes what every seed gives, and breaks runs that are resumed."""
    numbers = row_stream(1234, [5, 6, 7], 0, 0).random(3).tolist()
    assert numbers == [0.708460908945149, 0.7961070129362773, 0.26166404923553954]


@pytest.mark.parametrize(
    ("setting", "name"),
    [
        ((-0.1, None, None), "temperature"),
        ((math.nan, None, None), "temperature"),
        ((math.inf, None, None), "temperature"),
        ((True, None, None), "temperature"),
        ((1.0, 0, None), "top_k"),
        ((1.0, -1, None), "top_k"),
        ((0.0, 0, None), "top_k"),
        ((1.0, 2.5, None), "top_k"),
        ((1.0, True, None), "top_k"),
        ((1.0, None, -0.1), "top_p"),
        ((1.0, None, 1.1), "top_p"),
        ((1.0, None, math.nan), "top_p"),
    ],
)
def test_settings_out_of_range_are_named(setting, name):
    with pytest.raises(UserError, match=f"^{name} is "):
        check_sampling(*setting)


@pytest.mark.parametrize("setting", [(0, None, None), (0.0, 1, 0), (2.5, 10**6, 1), (1e-3, None, 0.5)])
def test_settings_in_range_are_accepted(setting):
    check_sampling(*setting)
