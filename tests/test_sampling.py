"""Claims of lit_gen/sampling.py: what is kept, what is drawn, and that a row of a batch is the row alone."""

import math
from functools import lru_cache

import numpy as np
import pytest
import torch
from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from lit_gen.penalties import RowHistory
from lit_gen.sampling import STEPS, Sampler, row_stream
from lit_gen.settings import Settings
from lit_gen.utils import UserError

LOGITS = torch.tensor([[0.5, -1.2, 3.1, 0.8, -0.3, 2.7, -0.9, 1.4]])
V = 49152
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@lru_cache
def settings_of(temperature: float, top_k: int | None, top_p: float | None, min_p: float | None) -> Settings:
    return Settings(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)


def sample(logits: torch.Tensor, uniform, temperature, top_k=None, top_p=None, min_p=None) -> torch.Tensor:
    """The first step of rows with these settings, one entry per row, at these numbers."""
    B = len(logits)
    columns = (temperature, *(column or [None] * B for column in (top_k, top_p, min_p)))
    noise = np.asarray(uniform, dtype=np.float64)[:, None]
    sampler = Sampler([settings_of(*row) for row in zip(*columns, strict=True)], [[0]] * B, [[]] * B, noise, "cpu")
    return sampler(logits)


def evenly(n: int) -> np.ndarray:
    """n numbers that lie evenly in [0, 1): every token of more than 1/n probability is hit."""
    return (np.arange(n) + 0.5) / n


def draws(logits: torch.Tensor, temperature: float, top_k=None, top_p=None, min_p=None, n: int = 1000) -> list[int]:
    """Tokens of one row (1, V) at n evenly spaced numbers."""
    settings = ([x] * n for x in (temperature, top_k, top_p, min_p))
    return sample(logits.expand(n, -1), evenly(n), *settings).tolist()


def p_value(counts: torch.Tensor, p: torch.Tensor) -> float:
    """How often counts come out at least so far from what p expects (chi-squared test), if p is true."""
    expected = counts.sum() * p[p > 0]
    assert counts[p == 0].sum() == 0 and expected.min() > 5
    distance = ((counts[p > 0] - expected) ** 2 / expected).sum()
    return torch.special.gammaincc((len(expected) - 1) / torch.tensor(2.0).double(), distance / 2).item()


def random_logits(rows: int, dtype: torch.dtype, vocabulary: int = V, spread: float = 3.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rows)
    return (torch.randn(rows, vocabulary, generator=generator) * spread).to(dtype)


SETTINGS = [(0.0, None, None, None), (1.0, None, None, None), (0.7, 50, None, None), (0.7, None, 0.9, None)]
SETTINGS += [(1.3, 1000, 0.5, None), (0.0, 5, 0.5, 0.5), (0.5, 3000, 0.999, None), (1.0, 1, None, None)]
SETTINGS += [(1.0, None, 0.0, None), (1e-300, None, None, None), (3.0, None, 0.98, None), (1.0, V + 1, 1.0, None)]
SETTINGS += [(1.0, None, None, 0.05), (2.0, 70, None, 0.001), (1.5, 700, 0.97, 0.01)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocabulary", [V, 1001])
def test_row_of_a_batch_is_the_row_alone(dtype, vocabulary):
    """64 different rows with 15 kinds of settings side by side; every row alone, and the batch backwards."""
    B = 64
    logits = random_logits(B, dtype, vocabulary)
    uniform = np.random.default_rng(0).random(B)
    columns = list(zip(*(SETTINGS[i % len(SETTINGS)] for i in range(B)), strict=True))
    together = sample(logits, uniform, *columns)
    for b in range(0, B, 1 if vocabulary < V else 5):
        one = slice(b, b + 1)
        alone = sample(logits[one].clone(), uniform[one], *(column[one] for column in columns))
        assert alone.tolist() == [together[b].item()], (b, SETTINGS[b % len(SETTINGS)])
    backwards = sample(logits.flip(0), uniform[::-1].copy(), *(column[::-1] for column in columns))
    assert torch.equal(backwards.flip(0), together)
    assert together.dtype == torch.int64 and together.shape == (B,)


def test_logits_are_not_changed():
    for dtype in (torch.float64, *DTYPES):
        logits = random_logits(3, dtype, 100)
        before = logits.clone()
        sample(logits, [0.5] * 3, [0.0, 1.0, 2.0], [None, 5, None], [None, None, 0.5], [0.5, None, 0.1])
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


def test_min_p_is_relative_to_the_best_token():
    logits = torch.tensor([[0.4, 0.3, 0.1, 0.1, 0.05, 0.05]], dtype=torch.float64).log()
    assert set(draws(logits, 1.0, min_p=0)) == set(range(6))
    assert set(draws(logits, 1.0, min_p=1e-300)) == set(range(6))
    assert set(draws(logits, 1.0, min_p=0.12)) == {0, 1, 2, 3, 4, 5}
    assert set(draws(logits, 1.0, min_p=0.13)) == {0, 1, 2, 3}
    assert set(draws(logits, 1.0, min_p=0.74)) == {0, 1}
    assert set(draws(logits, 1.0, min_p=0.76)) == {0}
    assert set(draws(torch.tensor([[0.0, 1.0, 0.999999, 1.0]]), 1.0, min_p=1)) == {1, 3}  # equals are all kept


def test_min_p_keeps_what_reaches_it_exactly():
    """At a temperature of 1 / log(2) a logit of -n is a probability of 2**-n of the best one's."""
    logits = -torch.arange(8.0)[None]
    temperature = 1 / math.log(2)
    for n in range(1, 7):
        share = math.floor(math.exp(-n / temperature) * 2**44) * 2.0**-44  # what the weights make of 2**-n
        assert share == pytest.approx(2.0**-n, rel=1e-12)
        assert set(draws(logits, temperature, min_p=share)) == set(range(n + 1))
        assert set(draws(logits, temperature, min_p=share + 2.0**-44)) == set(range(n))


def test_order_is_temperature_top_p_min_p():
    logits = torch.tensor([[0.4, 0.3, 0.1, 0.1, 0.1]], dtype=torch.float64).log()
    # min_p leaves 0.4 and 0.3; of their own sum the best has 0.57, and then top_p would keep it alone
    assert set(draws(logits, 1.0, None, 0.5, 0.5)) == {0, 1}
    assert set(draws(logits, 2.0, None, None, 0.49)) == {0, 1, 2, 3, 4}  # sqrt(0.1 / 0.4) = 0.5


def test_temperature_comes_before_top_p():
    assert set(draws(LOGITS, 1.0, None, 0.72)) == {2, 5}
    assert set(draws(LOGITS, 3.0, None, 0.72)) == {2, 5, 7, 3, 0}


@pytest.mark.parametrize("spread", [0.1, 2.0, 5.0])
@pytest.mark.parametrize(
    "setting",
    [
        (1.0, 7, None, None),
        (0.6, None, 0.8, None),
        (1.7, 40, 0.9, None),
        (2.5, 250, 0.3, None),
        (0.3, None, 0.05, None),
        (1.0, None, None, 0.05),
        (1.5, 100, None, 0.002),
        (1.3, None, 0.95, 0.02),
        (2.0, 60, 0.9, 0.1),
    ],
)
def test_kept_tokens_are_those_of_transformers(setting, spread):
    """Sets that float32 leaves in doubt are left out: a sum within 1e-5 of top_p, a token within 1e-5 of min_p."""
    temperature, top_k, top_p, min_p = setting
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
        if min_p is not None:
            relative = (theirs.double() - theirs.max()).exp()
            if (relative / min_p - 1).abs().min() < 1e-5:
                doubtful += 1
                continue
            theirs = MinPLogitsWarper(min_p)(None, theirs)
        p = torch.softmax(theirs[0].double(), -1)
        middle = (p.cumsum(-1) - p / 2)[p > 0]  # the middle of a kept token's share draws just that token
        n = len(middle)
        ours = sample(row.expand(n, -1), middle, *([x] * n for x in setting))
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


# temperature, top_k, top_p, min_p, and the ids they keep of LOGITS
KEPT = [
    ((1.0, None, None, None), range(8)),
    ((0.7, None, None, None), range(8)),
    ((1.5, 4, None, None), (2, 5, 7, 3)),
    ((1.5, 5, 0.85, None), (2, 5, 7, 3)),
    ((2.0, None, 0.75, None), (2, 5, 7, 3)),
    ((1.0, None, None, 0.1), (2, 5, 7, 3)),
    ((3.0, 6, 0.9, 0.35), (2, 5, 7, 3, 0)),
]


@pytest.mark.parametrize(("setting", "kept"), KEPT)
def test_draws_follow_the_distribution(setting, kept):
    """Chi-squared test of 20,000 draws at the level of 0.1 %: of good samplers with other seeds one in 1,000 fails."""
    n = 20_000
    u = row_stream(1, [1, 2], 0, 0).random(n)
    tokens = sample(LOGITS.expand(n, -1), u, *([x] * n for x in setting))
    p = torch.zeros(8, dtype=torch.float64)
    p[list(kept)] = torch.softmax(LOGITS[0, list(kept)].double() / setting[0], -1)
    assert p_value(torch.bincount(tokens, minlength=8), p) > 1e-3


@pytest.mark.parametrize(
    "streams",
    [
        pytest.param([(7, [1, 2, 3], 0, 0), (7, [1, 2], 0, 0)], id="one seed, two prompts"),
        pytest.param([(7, [1, 2, 3], 0, 0), (7, [1, 2, 3], 0, 1)], id="two samples of one prompt"),
        pytest.param([(7, [1, 2, 3], 0, 0), (7, [1, 2, 3], 1, 0)], id="one prompt twice"),
        pytest.param([(7, [1, 2, 3], 0, 0), (8, [1, 2, 3], 0, 0)], id="two seeds"),
    ],
)
def test_two_rows_are_independent(streams):
    """Chi-squared test of the pairs that two rows draw in 2,500 steps, at the level of 0.1 %; so of one row's steps."""
    n, settings = 2500, Settings(temperature=2.0, top_k=5)
    noise = [row_stream(*stream).random(n) for stream in streams]
    sampler = Sampler([settings] * 2, [[1]] * 2, [[]] * 2, noise, "cpu")
    first, second = torch.stack([sampler(LOGITS.expand(2, -1)) for _ in range(n)]).T
    p = torch.softmax(torch.where(LOGITS[0] >= 0.5, LOGITS[0].double() / 2, -math.inf), -1)
    joint = (p[:, None] * p).flatten()
    assert p_value(torch.bincount(8 * first + second, minlength=64), joint) > 1e-3
    assert p_value(torch.bincount(8 * first[0::2] + first[1::2], minlength=64), joint) > 1e-3


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
    cases = [(0.0, None, None), (1.0, None, None), (1.0, 20, None), (1.0, None, 0.9), (1.0, 20, 0.9)]
    for setting in [*cases, (1.0, None, None, 0.1), (1.0, 20, 0.9, 0.1)]:
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


@pytest.mark.parametrize("value", [-0.1, math.nan, math.inf, True])
def test_temperature_out_of_range_is_named(value):
    with pytest.raises(UserError, match="^temperature is "):
        Settings(temperature=value)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("value", [0, -1, 2.5, True])
def test_top_k_out_of_range_is_named(value, temperature):
    with pytest.raises(UserError, match="^top_k is "):
        Settings(temperature=temperature, top_k=value)


@pytest.mark.parametrize("name", ["top_p", "min_p"])
@pytest.mark.parametrize("value", [-0.1, 1.1, math.nan])
def test_top_p_and_min_p_out_of_range_are_named(name, value):
    with pytest.raises(UserError, match=f"^{name} is "):
        Settings(temperature=1.0, **{name: value})


@pytest.mark.parametrize("setting", [(0, None, None, 0), (0.0, 1, 0, 1), (2.5, 10**6, 1, 0.5), (1e-3, None, 0.5, None)])
def test_settings_in_range_are_accepted(setting):
    assert set(draws(LOGITS, *setting)) <= set(range(8))


def mixed_rows() -> list[tuple[Settings, list[int]]]:
    """12 rows: settings of all kinds with prompts of many lengths, two of them the same."""
    kinds = [
        {},
        {"repetition_penalty": 1.4},
        {"temperature": 1.0},
        {"temperature": 0.8, "top_k": 20, "frequency_penalty": 0.6},
        {"temperature": 1.2, "top_p": 0.9, "repetition_penalty": 0.8, "presence_penalty": -0.4},
        {"temperature": 1.5, "min_p": 0.02, "logit_bias": {3: 2.0, 90: -1.5}},
        {"logit_bias": {1: 4.0}, "presence_penalty": 1.1},
        {"temperature": 2.0, "top_k": 50, "top_p": 0.8, "min_p": 0.01, "repetition_penalty": 1.2},
    ]
    rows = [(Settings(**kinds[i % 8]), [(7 * i + 3 * j) % 101 for j in range(1 + 5 * i % 13)]) for i in range(12)]
    return [*rows[:-1], (rows[2][0], rows[2][1])]


def continued(
    rows: list[tuple[Settings, list[int]]], steps: int, rebuilt_at: tuple[int, ...] = (), keep: bool = False
) -> list[list[int]]:
    """New tokens of rows whose logits depend on the last token and the length; `keep` keeps the rows' histories."""
    generator = torch.Generator().manual_seed(5)
    table = torch.randn(101, 101, generator=generator) * 2  # (last token, V)
    prompts = [prompt for _, prompt in rows]
    noise = [row_stream(9, prompt, 0, 0).random(steps) if row.temperature else None for row, prompt in rows]
    tokens: list[list[int]] = [[] for _ in rows]
    histories = [RowHistory(prompt, row) for row, prompt in rows] if keep else None
    for step in range(steps):
        if step == 0 or step in rebuilt_at:
            given = [list(new) for new in tokens]
            sampler = Sampler([row for row, _ in rows], prompts, given, noise, "cpu", (), histories)
        logits = torch.stack(
            [table[[*p, *new][-1]].roll(len(p) + step) for p, new in zip(prompts, tokens, strict=True)]
        )
        for new, token in zip(tokens, sampler(logits).tolist(), strict=True):
            new.append(token)
    return tokens


def test_row_of_a_mixed_batch_is_the_row_alone_step_after_step():
    rows = mixed_rows()
    together = continued(rows, 12)
    assert [continued([row], 12)[0] for row in rows] == together
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0)).tolist()
    assert continued([rows[i] for i in order], 12) == [together[i] for i in order]
    assert together[2] == together[11] and len({tuple(new) for new in together}) == 11


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("rebuilt_at", [(1,), (5,), tuple(range(12))])
def test_sampler_made_anew_midway_goes_on_as_before(rebuilt_at, keep):
    assert continued(mixed_rows(), 12, rebuilt_at, keep) == continued(mixed_rows(), 12)


def test_each_step_has_its_own_number_however_many_steps_a_row_runs():
    """Rows that end before, at and after a border between blocks of numbers, one from its 50th token on."""
    lengths, done = (STEPS - 1, STEPS, 2 * STEPS + 9, 2 * STEPS + 50), (0, 0, 0, 50)
    noise = [row_stream(1, [i], 0, 0).random(n) for i, n in enumerate(lengths)]
    tokens = [[0] * n for n in done]
    sampler = Sampler([Settings(temperature=1.0)] * 4, [[1]] * 4, tokens, noise, "cpu")
    logits = random_logits(4, torch.float32, 300)
    drawn = torch.stack([sampler(logits) for _ in range(2 * STEPS + 9)]).T.tolist()
    for b, (u, first) in enumerate(zip(noise, done, strict=True)):
        u = u[first : first + 2 * STEPS + 9]
        alone = sample(logits[b : b + 1].expand(len(u), -1), u, [1.0] * len(u)).tolist()
        assert drawn[b][: len(u)] == alone, b
    with pytest.raises(AssertionError):
        sampler(logits)


def test_rows_may_have_random_numbers_for_different_numbers_of_steps():
    settings, logits = Settings(temperature=1.0), LOGITS.expand(3, -1)
    noise = [row_stream(1, [i], 0, 0).random(n) for i, n in enumerate((2, 6, 4))]
    sampler = Sampler([settings] * 3, [[1]] * 3, [[], [4, 4], []], noise, "cpu")
    drawn = torch.stack([sampler(logits) for _ in range(4)]).T.tolist()
    alone = [sample(LOGITS.expand(len(u), -1), u, [1.0] * len(u)).tolist() for u in noise]
    assert drawn[0][:2] == alone[0] and drawn[1] == alone[1][2:] and drawn[2] == alone[2]
