"""Rows that come and go: each as it is alone, in any order, with settings of its own, and after memory ran out."""

import random
from collections.abc import Callable

import pytest
import torch
from conftest import Family, llama_config, neox_config, randomized
from families import FAMILIES
from test_generate_base import some_prompts
from transformers import LogitsProcessorList, MinPLogitsWarper, NoRepeatNGramLogitsProcessor

from generate.base import generate
from lit_gen.model import GPT
from lit_gen.settings import Request
from lit_gen.stats import Stats
from lit_gen.stopping import Row

Make = Callable[[str], Family]


def run(model: GPT, requests: list[Request], **how: object) -> list[Row]:
    return sorted(generate(model, requests, **how), key=lambda row: row.index)


def mixed_requests(n: int, vocab: int, seed: int = 0) -> list[Request]:
    """Rows of 1 to 60 prompt tokens and 1 to 40 new ones, each with other settings."""
    rng = random.Random(seed)
    kinds = [
        {},
        {"temperature": 0.8, "top_p": 0.95},
        {"temperature": 1.2, "top_k": 20, "seed": 3},
        {"repetition_penalty": 1.3, "frequency_penalty": 0.2},
        {"temperature": 1.0, "min_p": 0.02, "presence_penalty": 0.5},
        {"logit_bias": {5: 4.0, 9: -50.0}, "stop": [[7, 8], [11]]},
    ]
    prompts = some_prompts(n, vocab=vocab, seed=seed)
    return [Request(p, kinds[i % len(kinds)] | {"max_new_tokens": rng.randint(1, 40)}) for i, p in enumerate(prompts)]


def alone(model: GPT, requests: list[Request]) -> list[list[int]]:
    return [next(generate(model, [request])).tokens for request in requests]


def test_rows_with_settings_of_their_own_come_and_go_as_if_alone(tiny: GPT) -> None:
    requests = mixed_requests(18, 512)
    expected = alone(tiny, requests)
    assert len({len(tokens) for tokens in expected}) > 9
    for slots, budget in ((1, 2048), (3, 2048), (16, 2048), (3, 1), (5, 40)):
        order = random.Random(slots + budget).sample(range(18), 18)
        rows = run(tiny, [requests[i] for i in order], max_batch_size=slots, prefill_budget=budget)
        assert [row.tokens for row in rows] == [expected[i] for i in order]


@pytest.mark.parametrize("name", FAMILIES)
def test_prompts_in_pieces_are_as_in_one(family: Make, name: str) -> None:
    """Windows, chunks, tables by row length, experts: pieces of 7 tokens between the steps of the others."""
    model, requests = family(name).model, mixed_requests(5, 128)
    expected = alone(model, requests)
    for how in ({"prefill_budget": 7}, {"max_batch_size": 3}, {"prefill_budget": 7, "padding_side": "left"}):
        assert [row.tokens for row in run(model, requests, **how)] == expected


def test_a_cache_that_is_small_holds_fewer_rows_and_changes_none(tiny_llama: GPT) -> None:
    """Rows of 20 and of 200 columns share 256: the long ones run alone, the short ones four at a time."""
    sizes = [(10, 10), (150, 50), (12, 8), (9, 9), (3, 17), (140, 60), (5, 5), (6, 6)]
    rng = random.Random(0)
    requests = [Request([rng.randrange(512) for _ in range(T)], {"max_new_tokens": n}) for T, n in sizes]
    stats = Stats()
    rows = run(tiny_llama, requests, max_cache_columns=256, stats=stats)
    assert [row.tokens for row in rows] == alone(tiny_llama, requests)
    assert stats.cache_bytes <= 256 * 2 * 2 * 2 * 16 * 4  # columns, k and v, layers, ng, hs, float32


def test_an_iterator_is_read_as_there_is_room(tiny_llama: GPT) -> None:
    taken = []

    def arriving():
        for i, prompt in enumerate(some_prompts(20)):
            taken.append(i)
            yield prompt

    rows = generate(tiny_llama, arriving(), max_new_tokens=5, max_batch_size=4)
    assert next(rows).index < 4 and len(taken) <= 5
    assert len(list(rows)) == 19 and len(taken) == 20


@pytest.mark.parametrize("config", [llama_config, neox_config])
def test_out_of_memory_halves_the_batch_and_changes_no_row(config, capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    model, requests = randomized(config()), mixed_requests(24, 512, seed=5)
    expected = alone(model, requests)
    forward, calls = GPT.forward, 0

    def scarce(self: GPT, idx: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if len(idx) > 3 or calls in (2, 40):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return forward(self, idx, *args, **kwargs)

    monkeypatch.setattr(GPT, "forward", scarce)
    assert [row.tokens for row in run(model, requests, max_batch_size=16)] == expected
    assert "going on with" in capsys.readouterr().err


def test_texts_come_in_pieces_that_add_up(stories) -> None:
    from lit_gen.tokenizer import Tokenizer

    model, tokenizer = GPT.from_checkpoint(stories), Tokenizer(stories)
    texts = ["Once upon a time", "The cat", "One day, a girl named Lily", "Tom had a big red ball."]
    requests = [Request(tokenizer.encode(text), {"max_new_tokens": 20 + 9 * i}) for i, text in enumerate(texts)]
    requests.append(Request(tokenizer.encode("Once upon a time"), {"stop": ["a little girl", "little gi", " named L"]}))
    pieces: dict[int, list[str]] = {}
    seen = {}

    def on_text(row: Row, piece: str) -> None:
        assert piece
        pieces.setdefault(row.index, []).append(piece)
        seen[row.index] = row.finish_reason

    rows = run(model, requests, tokenizer=tokenizer, on_text=on_text, max_batch_size=3)
    for row, request in zip(rows, requests, strict=True):
        assert "".join(pieces.get(row.index, [])) == row.text
        one = next(generate(model, [request], tokenizer=tokenizer))
        assert (one.text, one.tokens, one.finish_reason) == (row.text, row.tokens, row.finish_reason)
        if row.index < 4:
            assert row.text == tokenizer.decode(row.tokens)
    assert rows[4].finish_reason == "stop" and "little" not in rows[4].text.split("a ")[-1]


def test_logits_processors_of_transformers_see_their_own_row(tiny_llama: GPT) -> None:
    prompts = some_prompts(6, longest=20)
    theirs = LogitsProcessorList([NoRepeatNGramLogitsProcessor(2), MinPLogitsWarper(0.5)])
    rows = run(tiny_llama, prompts, processors=[theirs], max_new_tokens=30, max_batch_size=4)
    one = [next(generate(tiny_llama, [p], processors=[theirs], max_new_tokens=30)).tokens for p in prompts]
    assert [row.tokens for row in rows] == one
    for row in rows:
        pairs = list(zip([*row.prompt, *row.tokens], [*row.prompt, *row.tokens][1:], strict=False))
        new = pairs[len(row.prompt) - 1 :]
        assert len(set(new)) == len(new) and not set(new) & set(pairs[: len(row.prompt) - 1])


def test_logprobs_are_those_of_the_training_forward(tiny: GPT) -> None:
    prompts = some_prompts(7)
    asked = [Request(p, {"logprobs": i % 4, "temperature": i % 2}) for i, p in enumerate(prompts)]
    for row in run(tiny, [*asked, Request(prompts[0])], max_new_tokens=9, max_batch_size=3):
        if row.settings.logprobs is None:
            assert row.logprobs is None
            continue
        text = torch.tensor([[*row.prompt, *row.tokens]])
        expected = tiny(text)[0].double().log_softmax(-1)[len(row.prompt) - 1 : -1]  # (new, V)
        assert len(row.logprobs) == len(row.tokens) == 9
        for step, (token, (logprob, best)) in enumerate(zip(row.tokens, row.logprobs, strict=True)):
            assert logprob == pytest.approx(expected[step, token].item(), abs=1e-4)
            top = expected[step].topk(row.settings.logprobs)
            assert [i for i, _ in best] == top.indices.tolist()
            assert [value for _, value in best] == pytest.approx(top.values.tolist(), abs=1e-4)


def test_a_bad_prompt_is_one_row_and_harms_no_other(tiny_llama: GPT) -> None:
    good = some_prompts(5)
    bad = [
        Request([]),
        [600],
        [1] * 300,
        Request([1], {"top_p": 3}),
        Request([1], {"colour": 1}),
        Request([], error="x"),
    ]
    mixed = [prompt for pair in zip(good, bad[:5], strict=True) for prompt in pair] + bad[5:]
    rows = run(tiny_llama, mixed, strict=False, max_new_tokens=6, max_batch_size=2)
    assert [row.tokens for row in rows[:10:2]] == alone(tiny_llama, [Request(p, {"max_new_tokens": 6}) for p in good])
    messages = ["no tokens", "token 600", "context of 256", "top_p is 3", "no setting 'colour'", "x"]
    for row, message in zip([*rows[1:10:2], rows[10]], messages, strict=True):
        assert row.finish_reason == "error" and message in row.error and row.tokens == []


def test_a_row_with_nan_leaves_nothing_behind_in_its_place(tiny_llama: GPT) -> None:
    """0 times NaN is NaN: what stands in masked columns must be finite."""
    prompts = some_prompts(12, longest=30)
    expected = alone(tiny_llama, [Request(p, {"max_new_tokens": 8}) for p in prompts])
    used = {token for row in [*prompts, *expected] for token in row}
    poison = next(token for token in range(512) if token not in used)
    tiny_llama.wte.weight[poison] = float("nan")
    poisoned = [[1, poison], *prompts[:6], [poison] * 20, [3, 4, poison, 5], *prompts[6:]]
    rows = run(tiny_llama, poisoned, max_new_tokens=8, max_batch_size=2, prefill_budget=9)
    assert [row.tokens for row in rows if row.finish_reason != "nan"] == expected
    assert [row.index for row in rows if row.finish_reason == "nan"] == [0, 7, 8]
    assert all("not numbers" in row.error for row in rows if row.finish_reason == "nan")
