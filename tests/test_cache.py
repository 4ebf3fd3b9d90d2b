"""Masks, padded rectangles and cache writes, by literal matrices and properties."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lit_gen.cache import KVCache, Step, additive, masked_value, positions, rectangle, span_of, visible

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def picture(see: torch.Tensor) -> list[str]:
    return ["".join(".x"[int(v)] for v in row) for row in see]


def test_masks_of_a_ragged_batch_are_what_one_would_draw() -> None:
    # Row 0 has two tokens after one of padding; row 1 goes on at column 3.
    see = visible(torch.tensor([[-1, 0, 1], [3, 4, 5]]), span=6)
    assert see.shape == (2, 1, 3, 6)
    assert picture(see[0, 0]) == ["......", "x.....", "xx...."]
    assert picture(see[1, 0]) == ["xxxx..", "xxxxx.", "xxxxxx"]


@pytest.mark.parametrize("shift", [0, 3])
def test_a_window_of_4_sees_4_columns_the_query_included(shift: int) -> None:
    """vllm#3385: one key more or less at the edge of the window. Left padding of 3 uses up no room."""
    position = torch.cat((torch.full((shift,), -1), torch.arange(16)))[None]
    see = visible(position, 16, "sliding", 4)[0, 0, shift:]
    assert picture(see)[:6] == [
        "x" + 15 * ".",
        "xx" + 14 * ".",
        "xxx" + 13 * ".",
        "xxxx" + 12 * ".",
        ".xxxx" + 11 * ".",
        "..xxxx" + 10 * ".",
    ]
    assert all(int(row.sum()) == min(p + 1, 4) for p, row in enumerate(see))


def test_chunks_see_their_own_columns_only() -> None:
    assert picture(visible(torch.arange(6)[None], 6, "chunked", 3)[0, 0]) == [
        "x.....", "xx....", "xxx...", "...x..", "...xx.", "...xxx"]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_additive_mask_has_two_finite_values_and_room_for_scores(dtype: torch.dtype) -> None:
    """transformers#27114: two minima added make -inf, and a row that sees nothing NaN."""
    mask = additive(visible(torch.tensor([[-1, 0, 1, 2, 3], [-1, -1, -1, 0, 1]]), 5), dtype)
    assert mask.dtype == dtype and mask.isfinite().all()
    assert set(mask.unique().tolist()) == {masked_value(dtype), 0.0}
    scores = torch.full_like(mask, -1000.0)
    assert ((scores + mask) * 1.4426950408889634).isfinite().all()  # some kernels scale by log2(e)
    assert (torch.tensor([1000.0, masked_value(dtype) + 1000.0], dtype=dtype).softmax(0) == torch.tensor([1, 0])).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_query_that_sees_nothing_is_finite_in_attention(dtype: torch.dtype) -> None:
    q, k = torch.randn(1, 2, 3, 8).to(dtype), torch.randn(1, 2, 5, 8).to(dtype)
    mask = additive(visible(torch.tensor([[-1, 0, 1]]), 5), dtype)
    y = torch.nn.functional.scaled_dot_product_attention(q, k, k, attn_mask=mask)
    assert y.isfinite().all()
    assert torch.allclose(y[:, :, 1], k[:, :, 0])  # sees column 0 alone


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.sampled_from(["left", "right"]))
@settings(max_examples=50, deadline=None)
def test_a_rectangle_holds_every_prompt_at_its_positions(sizes: list[int], side: str) -> None:
    prompts = [[10 * b + i for i in range(n)] for b, n in enumerate(sizes)]
    idx, input_pos, last = rectangle(prompts, side)
    assert idx.shape == input_pos.shape == (len(sizes), max(sizes))
    for b, prompt in enumerate(prompts):
        real = input_pos[b] >= 0
        assert idx[b][real].tolist() == prompt and input_pos[b][real].tolist() == list(range(len(prompt)))
        assert real.nonzero()[-1] == last[b] and idx[b, last[b]] == prompt[-1]
        assert bool(real[0 if side == "right" else -1])
    assert torch.equal(positions(input_pos >= 0), input_pos)


def test_positions_come_from_the_attention_mask_not_from_ids() -> None:
    mask = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1], [1, 1, 0, 0]])
    assert positions(mask).tolist() == [[-1, -1, 0, 1], [0, 1, 2, 3], [0, 1, -1, -1]]


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_writes_reach_their_own_columns_and_no_other(data: st.DataObject) -> None:
    """Against a plain loop, with padding anywhere, in a slice of the cache's rows."""
    B, T, ng, S, hs = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 4)), 2, 6, 3
    position = torch.tensor([data.draw(st.permutations(range(S)))[:T] for _ in range(B)])
    pads = data.draw(st.lists(st.booleans(), min_size=B * T, max_size=B * T))
    position = torch.where(torch.tensor(pads).view(B, T), -1, position)
    cache = KVCache(5, ng, S, hs)
    cache.k.copy_(torch.randn_like(cache.k))
    cache.v.copy_(torch.randn_like(cache.v))
    first = data.draw(st.integers(0, 5 - B))
    k, v = torch.randn(B, T, ng, hs), torch.randn(B, T, ng, hs)
    expected_k, expected_v = cache.k.clone(), cache.v.clone()
    for b in range(B):
        for t in range(T):
            if position[b, t] >= 0:
                expected_k[first + b, :, position[b, t]] = k[b, t]
                expected_v[first + b, :, position[b, t]] = v[b, t]
    seen_k, seen_v = cache.update(k, v, Step.at(position, slice(first, first + B), 4, cache))
    assert torch.equal(cache.k, expected_k) and torch.equal(cache.v, expected_v)
    assert torch.equal(seen_k, expected_k[first : first + B, :, :4]) and seen_v.shape == (B, ng, 4, hs)


@pytest.mark.parametrize("shape", [(3, 4), (5, 4), (2, 4), (3, 9), (3, 2), (6, 7), (1, 1)])
def test_resized_cache_keeps_what_fits_and_is_zero_elsewhere(shape: tuple[int, int]) -> None:
    rows, columns = shape
    cache = KVCache(3, 2, 4, 5, dtype=torch.bfloat16)
    cache.k.copy_(torch.randn(cache.k.shape))
    cache.v.copy_(torch.randn(cache.v.shape))
    old_k, old_v = cache.k.clone(), cache.v.clone()
    cache.resize(rows, columns)
    for new, old in ((cache.k, old_k), (cache.v, old_v)):
        assert new.shape == (rows, 2, columns, 5) and new.dtype == torch.bfloat16 and new.is_contiguous()
        for r in range(rows):
            for c in range(columns):
                kept = r < 3 and c < 4
                assert torch.equal(new[r, :, c], old[r, :, c] if kept else torch.zeros(2, 5, dtype=torch.bfloat16))


def test_cache_of_the_wanted_size_is_not_copied() -> None:
    cache = KVCache(3, 2, 4, 5)
    places = cache.k.data_ptr(), cache.v.data_ptr()
    cache.resize(3, 4)
    assert (cache.k.data_ptr(), cache.v.data_ptr()) == places
    assert not cache.state_dict()  # and a cache is no weight, before and after
    cache.resize(4, 4)
    assert not cache.state_dict() and dict(cache.named_buffers()).keys() == {"k", "v"}


def test_moved_row_is_a_copy_and_minus_one_clears() -> None:
    cache = KVCache(4, 2, 3, 5)
    cache.k.copy_(torch.randn(cache.k.shape))
    cache.v.copy_(torch.randn(cache.v.shape))
    old_k, old_v = cache.k.clone(), cache.v.clone()
    cache.move(3, 1)
    cache.v[3, 1, 2] = float("nan")
    cache.move(-1, 3)
    for new, old in ((cache.k, old_k), (cache.v, old_v)):
        assert torch.equal(new, torch.stack([old[0], old[3], old[2], torch.zeros_like(old[0])]))


def test_pieces_of_prompts_begin_where_they_are_told() -> None:
    idx, input_pos, last = rectangle([[5, 6, 7], [8]], "right", [4, 0])
    assert idx[0].tolist() == [5, 6, 7] and int(idx[1, 0]) == 8
    assert input_pos.tolist() == [[4, 5, 6], [0, -1, -1]] and last.tolist() == [2, 0]
    idx, input_pos, last = rectangle([[5, 6, 7], [8]], "left", [0, 9])
    assert input_pos.tolist() == [[0, 1, 2], [-1, -1, 9]] and last.tolist() == [2, 2] and int(idx[1, 2]) == 8


@pytest.mark.parametrize(("position", "span"), [([0], 64), ([63], 64), ([64, 3], 128), ([3, 190], 192), ([199], 200)])
def test_step_looks_at_whole_pieces_of_64_columns(position: list[int], span: int) -> None:
    assert span_of(position, 200) == span
