"""Guessing from a row's own text: never another token, and no work where it does not pay."""

import random
from collections.abc import Callable

import pytest
import torch
from conftest import llama_config, randomized
from test_generate_continuous import mixed_requests, run

from lit_gen.kernels import load_kernels
from lit_gen.model import GPT
from lit_gen.pack import pack_model
from lit_gen.settings import Request, Settings
from lit_gen.speculate import Lookup, Speculation
from lit_gen.stats import Stats
from lit_gen.stopping import Row
from lit_gen.utils import UserError


def repeating_prompts(n: int, seed: int = 0) -> list[list[int]]:
    """Prompts of 3 to 60 tokens, most of which repeat a piece of themselves."""
    rng = random.Random(seed)
    pieces = [[rng.randrange(3, 64) for _ in range(rng.randint(2, 9))] for _ in range(n)]
    return [(piece * 20)[: rng.randint(3, 60)] for piece in pieces]


@pytest.fixture(scope="module", params=[torch.float32, torch.bfloat16], ids=str)
def packed(request: pytest.FixtureRequest) -> GPT:
    if load_kernels() is None:
        pytest.skip("no C++ compiler, so the last bits may differ")
    return pack_model(randomized(llama_config()).to(request.param))


def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every guess that is found is checked, whatever it costs."""
    monkeypatch.setattr(Speculation, "_widths", lambda self, rows, found: [len(guesses) for guesses in found])


@pytest.mark.parametrize("most", [1, 3, 8])
def test_guesses_change_no_token_and_no_bit(packed: GPT, monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    """Greedy and sampled rows, penalties, stops, rows that come and go: as without guesses; log-probabilities too."""
    requests = mixed_requests(12, 64, seed=most)
    prompts = repeating_prompts(12, seed=most)
    requests = [Request(p, r.settings | {"logprobs": 2}) for p, r in zip(prompts, requests, strict=True)]
    plain = run(packed, requests, max_batch_size=5)
    always(monkeypatch)
    guessed = run(packed, requests, max_batch_size=5, speculate=most, prefill_budget=40)
    assert [(row.tokens, row.finish_reason) for row in guessed] == [(row.tokens, row.finish_reason) for row in plain]
    assert [row.logprobs for row in guessed] == [row.logprobs for row in plain]


def test_right_guesses_save_steps(packed: GPT, monkeypatch: pytest.MonkeyPatch) -> None:
    """A text that repeats itself needs far fewer steps than tokens."""
    loops = [Request([5, 9, 13, 7] * 6, {"max_new_tokens": 60, "logit_bias": {t: 1e4 for t in (5, 9)}})]
    plain, stats = run(packed, loops), Stats()
    always(monkeypatch)  # what pays is measured, and a test may not depend on the clock
    guessed = run(packed, loops, speculate=8, stats=stats)
    assert guessed[0].tokens == plain[0].tokens
    assert stats.steps < 59


def test_guesses_hold_without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    model, prompts = randomized(llama_config()), repeating_prompts(6)
    requests = [Request(prompt, {"max_new_tokens": 9 + 5 * i}) for i, prompt in enumerate(prompts)]
    plain = run(model, requests)
    always(monkeypatch)
    assert [row.tokens for row in run(model, requests, speculate=5)] == [row.tokens for row in plain]


def test_a_guess_is_what_followed_the_same_end_before() -> None:
    lookup = Lookup([1, 2, 3, 4, 9, 9, 1, 2, 3])
    assert lookup.guess([], 9, 4) == [4, 9, 9, 1]
    assert lookup.guess([4], 9, 2) == [9, 9]
    assert lookup.guess([4, 8], 9, 3) == []  # never seen
    assert Lookup([7, 7, 7]).guess([], 3, 5) == [7] * 5  # goes on beyond the end
    assert Lookup([1, 2, 5, 1, 2, 6, 1, 2]).guess([], 8, 1) == [6]  # the last time counts
    assert Lookup([4]).guess([], 1, 3) == []


def test_the_longer_end_is_looked_for_first() -> None:
    assert Lookup([8, 1, 2, 5, 3, 1, 2, 6, 8, 1, 2]).guess([], 11, 1) == [5]


def test_guesses_stop_before_the_row_does() -> None:
    row = Row(0, [3, 4] * 5, Settings(max_new_tokens=4))
    row.filled = 10
    row.push(3)
    speculation = Speculation(8)
    assert len(speculation.guess([row])[0]) <= 2  # one of the three that are left comes of the last token itself


def test_wrong_guesses_are_given_up_and_right_ones_come_back() -> None:
    """What a row's text does is watched also while nothing is checked."""
    rng, speculation = random.Random(0), Speculation(4)
    row = Row(0, [rng.randrange(50) for _ in range(400)], Settings(max_new_tokens=10_000))
    row.filled = 400
    row.push(1)

    def go(tokens: list[int]) -> int:
        checked = 0
        for token in tokens:
            guesses = speculation.guess([row])
            checked += len(guesses[0])
            row.push(token)
            row.filled += 1
            speculation.learn(guesses, 1.0 + 0.3 * len(guesses[0]))
        return checked

    go([rng.randrange(50) for _ in range(300)])
    assert go([rng.randrange(50) for _ in range(200)]) <= 8
    assert go([2, 3, 4, 5, 6] * 60) > 60


def test_cheap_tokens_are_worth_wild_guesses_and_dear_ones_are_not() -> None:
    def checked(per_token: float) -> int:
        rng, speculation, total = random.Random(1), Speculation(8), 0
        rows = [Row(i, [i, 9] * 6, Settings(max_new_tokens=1000)) for i in range(4)]
        for row in rows:
            row.filled = 12
            row.push(row.index)
        speculation.learn([[]] * 4, 1.0 + per_token * 4)
        for _ in range(200):
            guesses = speculation.guess(rows)
            total += sum(map(len, guesses))
            for row in rows:
                guess = guesses[row.index]
                row.push(guess[0] if guess and rng.random() < 0.5 else rng.randrange(40))
                row.filled += 1
            speculation.learn(guesses, 1.0 + per_token * (4 + sum(map(len, guesses))))
        return total

    assert checked(0.001) > 2 * checked(0.5)


def test_checks_that_take_longer_than_they_bring_are_given_up() -> None:
    """A check costs two plain steps here, however few guesses it has, and all guesses are right."""

    def steps(overhead: float) -> tuple[int, int]:
        speculation, checks, plain = Speculation(1), 0, 0
        row = Row(0, [5, 6, 7] * 20, Settings(max_new_tokens=1000))
        row.filled = 60
        row.push(5)
        for i in range(1, 300):
            guesses = speculation.guess([row])
            checks, plain = checks + bool(guesses[0]), plain + (not guesses[0])
            row.push([5, 6, 7][i % 3])
            row.filled += 1
            speculation.learn(guesses, 1.0 + (overhead if guesses[0] else 0.0))
        return checks, plain

    assert steps(1.5)[0] < 10
    assert steps(0.2)[1] < 30  # some, to know what they take


def test_a_disturbed_step_does_not_end_the_checks() -> None:
    """One check in 40 takes 20 times as long as it should, which says nothing of the others; all do from some point."""

    def checks(strange: Callable[[int], bool]) -> int:
        speculation, done = Speculation(3), 0
        row = Row(0, [5, 6, 7] * 20, Settings(max_new_tokens=10_000))
        row.filled = 60
        row.push(5)
        place = 0
        for i in range(400):
            guesses = speculation.guess([row])
            done += bool(guesses[0])
            for _ in range(1 + len(guesses[0])):
                place += 1
                row.push([5, 6, 7][place % 3])
                row.filled += 1
            slow = 20 if guesses[0] and strange(i) else 1
            speculation.learn(guesses, slow * (1.0 + 0.1 * len(guesses[0])))
        return done

    assert checks(lambda i: i % 40 == 3) > 360
    assert checks(lambda i: i >= 40) < 80


@pytest.mark.parametrize("value", [-1, 1.5, True, "2"])
def test_a_wrong_number_of_guesses_is_named(tiny: GPT, value: object) -> None:
    with pytest.raises(UserError, match="speculate"):
        run(tiny, [Request([3, 4, 5], {})], speculate=value)
