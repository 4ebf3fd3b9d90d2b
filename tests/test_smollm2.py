"""The real model: 280 prompts in batches against each alone. Some hours: pytest -m long -s tests/test_smollm2.py

Tokens and log-probabilities of the two best tokens are compared bit for bit. LIT_GEN_ROWS=40 takes so many of the
prompts only; LIT_GEN_COMPILE=1 goes through torch.compile, OMP_NUM_THREADS says how many threads there are.
"""

import json
import os
import random
from pathlib import Path

import pytest
import torch

from generate.base import generate
from lit_gen.compiled import compile_model
from lit_gen.download import fetch_default_model
from lit_gen.model import GPT
from lit_gen.pack import pack_model
from lit_gen.settings import Request
from lit_gen.stats import Stats
from lit_gen.tokenizer import Tokenizer

NEW = 64
CASES = [(None, 25, True), ("left", 25, False), ("right", 64, True), ("left", 8, True), ("right", 8, False)]
CASES += [("left", 64, False), ("right", 25, True), (None, 64, False), ("left", 2, True), ("right", 2, False)]
CASES += [(None, 8, True), (None, 2, False)]  # padding side, batch size, shuffled


def read_prompts(shared: Path, tokenizer: Tokenizer) -> list[list[int]]:
    """80 questions through the chat template and 200 beginnings of HellaSwag, 12 to 400 tokens."""
    questions = (shared / "data/prompts/mt_bench_question.jsonl").read_text().splitlines()
    queries = (shared / "data/eval/hellaswag_val_1000.jsonl").read_text().splitlines()[:200]
    chats = [[{"role": "user", "content": json.loads(line)["turns"][0]}] for line in questions]
    prompts = [tokenizer.encode_chat(chat).tolist() for chat in chats]
    return prompts + [tokenizer.encode(json.loads(line)["query"]).tolist() for line in queries]


def load(dtype: torch.dtype) -> GPT:
    model = pack_model(GPT.from_checkpoint(fetch_default_model(), dtype))
    if not model.by_token:
        pytest.skip("no C++ compiler: rows have the same tokens in float32, but not the same bits")
    return compile_model(model) if os.environ.get("LIT_GEN_COMPILE") else model


def run(model: GPT, requests: list[Request], **how: object) -> list[tuple]:
    rows = sorted(generate(model, requests, **how), key=lambda row: row.index)
    return [(row.tokens, row.logprobs) for row in rows]


@pytest.mark.long
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@torch.no_grad()
def test_no_row_differs_from_the_row_alone(shared: Path, dtype: torch.dtype) -> None:
    model, prompts = load(dtype), read_prompts(shared, Tokenizer(fetch_default_model()))
    assert len(prompts) == 280
    prompts = random.Random(0).sample(prompts, int(os.environ.get("LIT_GEN_ROWS", 280)))
    requests = [Request(prompt, {"max_new_tokens": NEW, "logprobs": 2}) for prompt in prompts]
    alone = run(model, requests, max_batch_size=1)
    differ = {}
    for side, batch, shuffled in CASES:
        order = random.Random(batch).sample(range(len(prompts)), len(prompts)) if shuffled else range(len(prompts))
        found = run(model, [requests[i] for i in order], max_batch_size=batch, padding_side=side)
        name = f"{dtype}, batch {batch}, padding {side}, {'shuffled' if shuffled else 'file order'}"
        differ[name] = sum(row != alone[i] for i, row in zip(order, found, strict=True))
        print(f"{name}: {differ[name]} of {len(found)} rows differ", flush=True)
    assert not any(differ.values()), differ


@pytest.mark.long
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_guesses_change_no_row(shared: Path, dtype: torch.dtype) -> None:
    """Speculation on all prompts, greedy and sampled."""
    model, prompts = load(dtype), read_prompts(shared, Tokenizer(fetch_default_model()))
    prompts = random.Random(2).sample(prompts, int(os.environ.get("LIT_GEN_ROWS", 280)))
    for settings in ({}, {"temperature": 0.8, "top_p": 0.95}):
        requests = [Request(prompt, settings | {"max_new_tokens": NEW, "logprobs": 2}) for prompt in prompts]
        plain = run(model, requests, max_batch_size=16)
        for batch, most in ((1, 4), (8, 8)):
            found = run(model, requests, max_batch_size=batch, speculate=most)
            differ = sum(a != b for a, b in zip(plain, found, strict=True))
            print(
                f"{dtype}, {settings}, batch {batch}, {most} guesses: {differ} of {len(found)} rows differ", flush=True
            )
            assert differ == 0


@pytest.mark.long
@pytest.mark.parametrize("settings", [{}, {"temperature": 0.8, "top_p": 0.95}], ids=["greedy", "sampled"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_no_row_of_a_continuous_batch_differs_from_the_row_alone(
    shared: Path, dtype: torch.dtype, settings: dict
) -> None:
    """Rows of 1 to 128 new tokens come and go in 4 to 64 slots, in another order each time."""
    model, rng = load(dtype), random.Random(1)
    prompts = read_prompts(shared, Tokenizer(fetch_default_model()))
    prompts = rng.sample(prompts, int(os.environ.get("LIT_GEN_ROWS", len(prompts))))
    settings = settings | {"logprobs": 2}
    requests = [Request(prompt, settings | {"max_new_tokens": rng.randint(1, 128)}) for prompt in prompts]
    alone = [run(model, [request])[0] for request in requests]
    differ = {}
    for slots, budget in ((64, 2048), (16, 300), (4, 2048), (37, 64)):
        order = rng.sample(range(len(requests)), len(requests))
        arriving = (requests[i] for i in order)
        stats = Stats()
        rows = generate(model, arriving, max_batch_size=slots, prefill_budget=budget, stats=stats)
        found = {order[row.index]: (row.tokens, row.logprobs) for row in rows}
        differ[slots] = sum(found[i] != row for i, row in enumerate(alone))
        kind = "sampled" if "top_p" in settings else "greedy"
        print(
            f"{dtype}, {kind}, {slots} slots, prefill budget {budget}: {differ[slots]} of "
            f"{len(found)} rows differ; occupancy before the tail {stats.occupancy_before_tail:.3f}",
            flush=True,
        )
    assert not any(differ.values()), differ
