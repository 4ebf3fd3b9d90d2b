"""Claims of lit_gen/logprobs.py: log-softmax of each row, its best tokens, and that rows do not touch each other."""

import math

import pytest
import torch

from lit_gen.logprobs import log_probabilities, row_logprobs
from lit_gen.settings import Settings
from lit_gen.stopping import Row

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def random_logits(rows: int, V: int, dtype: torch.dtype, spread: float = 4.0) -> torch.Tensor:
    return (torch.randn(rows, V, generator=torch.Generator().manual_seed(rows)) * spread).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("V", "spread"), [(7, 4.0), (1001, 0.0), (1001, 0.1), (49152, 4.0), (49152, 0.0)])
def test_log_probabilities_are_the_log_softmax_in_float64(dtype, V, spread):
    """To a unit in the last place of float32, flat rows with 49,152 equal tokens too."""
    logits = random_logits(25, V, dtype, spread)  # 49,152 logits: 21 rows are handled at once
    tokens = torch.arange(25) * (V // 25)
    chosen, values, ids = log_probabilities(logits, tokens, 5)
    exact = torch.log_softmax(logits.double(), -1)
    torch.testing.assert_close(chosen, exact[torch.arange(25), tokens].float(), rtol=1.2e-7, atol=1e-11)
    torch.testing.assert_close(values, exact.gather(1, ids).float(), rtol=1.2e-7, atol=1e-11)
    assert chosen.dtype == values.dtype == torch.float32 and ids.dtype == torch.int64
    order = [sorted(range(V), key=lambda i: (-row[i], i))[:5] for row in logits[:3].float().tolist()]
    assert ids[:3].tolist() == order


def test_lower_id_of_equals_comes_first():
    logits = torch.tensor([[0.0, 2.0, 1.0, 2.0, 2.0, -0.0], [-0.0, 0.0, -1.0, 0.0, -5.0, -0.0]])
    _, values, ids = log_probabilities(logits, torch.tensor([0, 0]), 6)
    assert ids.tolist() == [[1, 3, 4, 2, 0, 5], [0, 1, 3, 5, 2, 4]]
    assert values[0, 0] == values[0, 1] == values[0, 2]


def test_literal_probabilities():
    """0.5, 0.25 and 0.25; what is impossible has a logarithm of -inf."""
    logits = torch.tensor([[math.log(2), -math.inf, 0.0, 0.0]])
    chosen, values, ids = log_probabilities(logits, torch.tensor([2]), 4)
    assert chosen.tolist() == pytest.approx([math.log(0.25)], rel=1e-6)
    assert values[0].exp().tolist() == pytest.approx([0.5, 0.25, 0.25, 0.0], rel=1e-6)
    assert ids.tolist() == [[0, 2, 3, 1]]


@pytest.mark.parametrize(("k", "width"), [(0, 0), (1, 1), (7, 7), (100, 7)])
def test_no_more_tokens_come_back_than_there_are(k, width):
    logits = random_logits(3, 7, torch.float32)
    chosen, values, ids = log_probabilities(logits, torch.tensor([6, 0, 3]), k)
    assert chosen.shape == (3,) and values.shape == ids.shape == (3, width)


@pytest.mark.parametrize("dtype", DTYPES)
def test_row_of_a_batch_has_the_bits_of_the_row_alone(dtype):
    logits, tokens = random_logits(30, 49152, dtype), torch.arange(30) * 1000
    together = log_probabilities(logits, tokens, 3)
    for b in range(0, 30, 7):
        alone = log_probabilities(logits[b : b + 1], tokens[b : b + 1], 3)
        assert all(torch.equal(one[0], all_rows[b]) for one, all_rows in zip(alone, together, strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
def test_broken_row_gives_nan_and_harms_no_other(dtype):
    good = random_logits(5, 1000, dtype)
    logits = good.clone()
    logits[0, 999], logits[2, 3], logits[3] = math.nan, math.inf, -math.inf
    tokens = torch.tensor([5, 6, 7, -1, -1])
    chosen, values, ids = log_probabilities(logits, tokens, 4)
    expected = log_probabilities(good, tokens.clamp(min=0), 4)
    assert chosen[[0, 2, 3, 4]].isnan().all() and values[[0, 2, 3]].isnan().all()
    assert chosen[1] == expected[0][1] and torch.equal(values[[1, 4]], expected[1][[1, 4]])
    assert torch.equal(ids[[1, 4]], expected[2][[1, 4]]) and ((ids >= 0) & (ids < 1000)).all()


def test_logits_are_not_changed():
    for dtype in DTYPES:
        logits = random_logits(3, 100, dtype)
        before = logits.clone()
        log_probabilities(logits, torch.tensor([1, 2, -1]), 3)
        assert torch.equal(logits, before)


@pytest.mark.parametrize("asked", [[None] * 5, [None, 3, None, None, 0], [0] * 5, [2, 0, 7, None, 2]])
def test_rows_get_what_they_ask_for(asked):
    """What log_probabilities says of the row alone; broken logits of a row that does not ask are not looked at."""
    logits, tokens = random_logits(5, 50, torch.float32), torch.tensor([3, 1, 49, 7, 0])
    logits[3] = math.nan
    rows = [Row(b, [1], Settings(logprobs=k)) for b, k in enumerate(asked)]
    for k, b, found in zip(asked, range(5), row_logprobs(rows, logits, tokens), strict=True):
        if k is None:
            assert found is None
        else:
            chosen, values, ids = log_probabilities(logits[b : b + 1], tokens[b : b + 1], 7)
            best = list(zip(ids[0, :k].tolist(), values[0, :k].tolist(), strict=True))
            assert str(found) == str((chosen.item(), best))  # text: a NaN equals itself
