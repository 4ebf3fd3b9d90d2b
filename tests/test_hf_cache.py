"""Caches that belong to the caller: rows go on from what they hold, reordered, chosen, cropped or padded."""

from collections.abc import Callable

import pytest
import torch
from conftest import llama_config, randomized
from test_generate_base import some_prompts
from torch import Tensor

from lit_gen.cache import rectangle
from lit_gen.hf_cache import CallerCache, padded_logits
from lit_gen.model import GPT
from lit_gen.pack import pack_model
from lit_gen.utils import UserError

pytestmark = pytest.mark.usefixtures("no_grad")


@pytest.fixture
def no_grad():
    with torch.no_grad():
        yield


@pytest.fixture(params=["plain", "packed"])
def model(request: pytest.FixtureRequest) -> GPT:
    kinds = {"layer_types": ["sliding", "full"], "window": 8}
    model = randomized(llama_config(**kinds))
    return pack_model(model) if request.param == "packed" else model


def alone(model: GPT, row: list[int]) -> Tensor:
    """The logits (T, V) of a row by the forward without a cache."""
    return model(torch.tensor([row]))[0]


@pytest.mark.parametrize(
    "change",
    [
        lambda cache: cache.reorder_cache(torch.tensor([1, 1, 0, 2])) or [1, 1, 0, 2],
        lambda cache: cache.reorder_cache(torch.arange(4)) or [0, 1, 2, 3],
        lambda cache: cache.batch_select_indices(torch.tensor([3, 0])) or [3, 0],
        lambda cache: cache.batch_repeat_interleave(2) or [0, 0, 1, 1, 2, 2, 3, 3],
    ],
    ids=["reordered", "as they were", "chosen", "repeated"],
)
def test_rows_go_on_from_the_row_that_they_became(model: GPT, change: Callable) -> None:
    texts, cache = some_prompts(4, 20), CallerCache()
    idx, input_pos, _ = rectangle(texts, "left")
    padded_logits(model, idx, input_pos >= 0, cache)
    rows = [texts[source] for source in change(cache)]
    more, mask = torch.randint(0, 512, (len(rows), 3)), rectangle(rows, "left")[1] >= 0
    mask = torch.nn.functional.pad(mask, (idx.size(1) - mask.size(1), 3), value=True)
    mask[:, : idx.size(1) - max(map(len, rows))] = False
    logits = padded_logits(model, more, mask, cache)
    for row, new, b in zip(rows, more.tolist(), range(len(rows)), strict=True):
        torch.testing.assert_close(logits[b], alone(model, row + new)[-3:], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("multiple", [1, 16])
def test_padding_may_stand_anywhere_with_and_without_a_cache(model: GPT, multiple: int) -> None:
    """Left, right and in the middle; all logits, the last ones, and those of the last token."""
    texts, mask = some_prompts(3, 12, seed=2), torch.zeros(3, 14, dtype=torch.long)
    mask[0, 14 - len(texts[0]) :], mask[1, : len(texts[1])] = 1, 1
    mask[2, torch.randperm(14, generator=torch.Generator().manual_seed(0))[: len(texts[2])]] = 1
    idx = torch.full_like(mask, 7)
    for row, text, real in zip(idx, texts, mask.bool(), strict=True):
        row[real] = torch.tensor(text)
    for cache in (None, CallerCache(), CallerCache(20, fixed=True)):
        if cache is not None:
            cache.reset()
        logits = padded_logits(model, idx, mask, cache, multiple=multiple)
        for b, text in enumerate(texts):
            torch.testing.assert_close(logits[b, mask[b].bool()], alone(model, text), rtol=1e-4, atol=1e-4)
    last = padded_logits(model, idx, mask, None, keep=1, multiple=multiple)[:, 0]
    for b, text in enumerate(texts):
        torch.testing.assert_close(last[b], alone(model, text)[-1], rtol=1e-4, atol=1e-4)
    assert padded_logits(model, idx, mask, None, keep=4).shape == (3, 4, 512)
    positions = torch.where(mask > 0, mask.cumsum(1) - 1, 0)
    padded_logits(model, idx, mask, None, position_ids=positions)
    with pytest.raises(UserError, match="position_ids"):
        padded_logits(model, idx, mask, None, position_ids=torch.arange(14)[None])


def test_it_grows_is_cropped_and_is_the_models_during_a_call_only(model: GPT) -> None:
    row, cache = some_prompts(1, 2, seed=1)[0], CallerCache(columns=2)
    model.set_kv_cache(3, 10)
    own = [block.attn.kv_cache for block in model.h]
    for step in range(140):
        new = row if step == 0 else [step % 500]
        row = new if step == 0 else row + new
        logits = padded_logits(model, torch.tensor([new]), None, cache)
    assert cache.get_seq_length() == len(row) and cache.max_length >= len(row)
    torch.testing.assert_close(logits[0, -1], alone(model, row)[-1], rtol=1e-4, atol=1e-4)
    cache.crop(-100)
    row = row[:-100] + [9, 8]
    logits = padded_logits(model, torch.tensor([[9, 8]]), None, cache)
    torch.testing.assert_close(logits[0], alone(model, row)[-2:], rtol=1e-4, atol=1e-4)
    with pytest.raises(ValueError, match="below 0"):
        cache.crop(5)
    assert [block.attn.kv_cache for block in model.h] == own


def test_a_call_that_fails_takes_no_columns_and_gives_the_models_caches_back(model: GPT) -> None:
    cache = CallerCache(6, fixed=True)
    padded_logits(model, torch.tensor([[1, 2, 3]]), None, cache)
    with pytest.raises(UserError, match="cache_length"):
        padded_logits(model, torch.tensor([[1, 2, 3, 4]]), None, cache)
    with pytest.raises(IndexError):
        padded_logits(model, torch.tensor([[600]]), None, cache)
    assert all(block.attn.kv_cache is None for block in model.h)
    logits = padded_logits(model, torch.tensor([[4]]), None, cache)
    torch.testing.assert_close(logits[0], alone(model, [1, 2, 3, 4])[-1:], rtol=1e-4, atol=1e-4)
