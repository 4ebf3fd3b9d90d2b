"""Claims of lit_gen/requests.py: which prompts can be run, with which settings, and as which rows."""

import itertools

import numpy as np
import pytest
import torch
from conftest import llama_config
from hypothesis import given, settings
from hypothesis import strategies as st

from lit_gen.requests import Limits, make_batch, make_rows, with_settings
from lit_gen.sampling import row_stream
from lit_gen.settings import ALL, MOST_SAMPLES, Request, Settings
from lit_gen.stopping import Row
from lit_gen.utils import UserError

CONFIG = llama_config(vocab_size=50, block_size=256)


class Letters:
    """A tokenizer, as far as a row needs it."""

    def stream(self) -> "Letters":
        return Letters()


def rows_of(prompts, **settings) -> list[Row]:
    """All rows of a job, which does not run."""
    return list(make_batch(prompts, CONFIG, **{"max_new_tokens": 1, **settings}).waiting)


def summary(rows: list[Row]) -> list[tuple[int, int, int]]:
    return [(row.index, row.prompt_index, row.sample) for row in rows]


@pytest.mark.parametrize(("length", "new"), [(255, 1), (256, 1), (255, 2), (1, 256)])
def test_prompt_that_fits(length, new):
    """The last new token is never fed back: T + n - 1 cache columns."""
    rows = rows_of([[1] * length, [2]], max_new_tokens=new)
    assert [row.prompt for row in rows] == [[1] * length, [2]] and rows[0].columns == length + new - 1


@pytest.mark.parametrize(
    ("length", "new", "remedy"),
    [
        (256, 2, "set max_new_tokens to 1 or shorten it to 255"),
        (250, 20, "set max_new_tokens to 7 or shorten it to 237"),
        (257, 1, "shorten it to 256"),
        (1, 257, "set max_new_tokens to 256"),
        (257, 257, "shorten it, and lower max_new_tokens"),
        (3, 10**400, "set max_new_tokens to 254"),
    ],
)
def test_prompt_that_is_too_long_is_named(length, new, remedy):
    long, good = [1] * length, Request([2] * 10, {"max_new_tokens": 1})
    for prompts, where in (([long, good], "prompt 0"), ([good, long], "prompt 1")):
        with pytest.raises(UserError) as error:
            rows_of(prompts, max_new_tokens=new)
        assert str(error.value) == (
            f"{where} has {length} tokens and {new} new ones are wanted, "
            f"which exceeds the model's context of 256: {remedy}"
        )


def test_token_beyond_the_embedding_is_named():
    rows_of([[1], [49]])
    for token in (50, -1, 2**40):
        with pytest.raises(UserError, match=f"^prompt 1 has the token {token}, but the model has only 50"):
            rows_of([[1], [3, token, 4]])


def test_logit_bias_beyond_the_vocabulary_is_named():
    assert rows_of([[1], [2]], logit_bias={"49": 1})[1].settings.logit_bias == {49: 1.0}
    with pytest.raises(UserError, match="^prompt 0 has a logit_bias for token 50, but the model has only 50"):
        rows_of([[1], [2]], logit_bias={49: 1, 50: -1})
    with pytest.raises(UserError, match="^prompt 1 has a logit_bias for token 10000"):
        rows_of([[1], Request([2], {"logit_bias": {10**400: 1}})])


def test_more_logprobs_than_tokens_are_refused():
    assert rows_of([[1]], logprobs=50)[0].settings.logprobs == 50
    with pytest.raises(UserError, match="^prompt 0 asks for 51 logprobs, but the model has only 50 tokens$"):
        rows_of([[1]], logprobs=51)


def test_prompts_of_any_kind_of_integers():
    kinds = [[1, 2], (1, 2), torch.tensor([1, 2]), np.array([1, 2], dtype=np.uint8), range(1, 3), Request((1, 2))]
    rows = rows_of(kinds)
    assert [row.prompt for row in rows] == [[1, 2]] * len(kinds)
    assert all(type(token) is int for row in rows for token in row.prompt)
    assert [row.prompt for row in rows_of(torch.tensor([[1, 2], [3, 4]]))] == [[1, 2], [3, 4]]
    for wrong in (["ab"], "ab", [[1.0]], [torch.tensor([1.5])], [[[1]]], [1], [None], torch.ones(2, 2, 2).long()):
        with pytest.raises(UserError, match="^prompts must be a list with the token ids of each prompt"):
            rows_of(wrong)


def test_empty_prompt_and_empty_list_are_refused():
    with pytest.raises(UserError, match="^prompt 1 has no tokens"):
        rows_of([[1], []])
    for nothing in ([], (), torch.ones(0, 3).long()):
        with pytest.raises(UserError, match="^there is no prompt"):
            rows_of(nothing)
    assert rows_of(iter([])) == []


def test_truncate_left_keeps_the_end():
    prompt = [i % 50 for i in range(300)]
    for new in (1, 7, 256):
        row = rows_of([prompt], truncate="left", max_new_tokens=new)[0]
        assert row.prompt == prompt[300 - (257 - new) :] and row.columns == 256
    assert rows_of([prompt[:256]], truncate="left")[0].prompt == prompt[:256]
    with pytest.raises(UserError, match="set max_new_tokens to 256$"):  # there is no room for any prompt
        rows_of([[1]], truncate="left", max_new_tokens=257)
    with pytest.raises(UserError, match="^truncate is 'right'"):
        rows_of([[1]], truncate="right")


@pytest.mark.parametrize("kind", [list, tuple, np.array])
def test_lists_of_settings_have_one_for_each_prompt(kind):
    """Also beside an own setting of a request, which wins."""
    prompts = [[1], [2, 2], Request([3], {"temperature": 2.0})]
    rows = rows_of(prompts, temperature=kind([0.0, 0.5, 1.0]), max_new_tokens=kind([4, 5, 6]), seed=9)
    assert [row.settings.temperature for row in rows] == [0.0, 0.5, 2.0]
    assert [row.settings.max_new_tokens for row in rows] == [4, 5, 6]
    assert [row.settings.seed for row in rows] == [9] * 3


def test_list_of_settings_of_another_length_is_refused():
    for values in ([0.5], [0.5] * 3, [], np.array([0.5])):
        with pytest.raises(UserError, match="^temperature is .*, but must be one value, or a list with one for each"):
            rows_of([[1], [2]], temperature=values)
    with pytest.raises(UserError, match="one for each prompt"):  # nobody knows how many there will be
        rows_of(iter([[1], [2]]), temperature=[0.5, 0.5])
    with pytest.raises(UserError, match="^top_p is 7"):
        rows_of([[1], [2]], top_p=[0.5, 7])


def test_stop_and_logit_bias_are_lists_of_their_own():
    rows = rows_of([[1], [2]], stop=[[1, 2], [3]], logit_bias={1: 2})
    assert [row.stop_sequences for row in rows] == [[[1, 2], [3]]] * 2
    with pytest.raises(UserError, match="^logit_bias is"):
        rows_of([[1], [2]], logit_bias=[{1: 2}, {1: 2}])


def test_request_has_settings_of_its_own():
    changes = {"max_new_tokens": 9, "stop": ["x"], "n": 2, "logit_bias": {"3": -1}}
    rows = rows_of([[1], Request([2], changes), [3]], temperature=0.5, tokenizer=Letters())
    assert [row.settings.max_new_tokens for row in rows] == [1, 9, 9, 1]
    assert rows[1].settings == rows[2].settings == Settings(temperature=0.5, **changes)
    assert [row.stop_strings for row in rows] == [[], ["x"], ["x"], []]
    with pytest.raises(UserError, match="^line 7 of in.jsonl: top_k is 0"):
        rows_of([[1], Request([2], {"top_k": 0}, name="line 7 of in.jsonl")])
    with pytest.raises(UserError, match="^prompt 1: there is no setting 'temprature'"):
        rows_of([[1], Request([2], {"temprature": 0})])


def test_names_of_requests_are_in_the_errors():
    with pytest.raises(UserError, match="^line 2 has 300 tokens"):
        rows_of([[1], Request([1] * 300, name="line 2")])
    with pytest.raises(UserError, match="^prompt 17 has no tokens"):
        rows_of([[1], Request([], place=17)])


def test_text_stops_need_the_text():
    for prompts in ([Request([1], {"stop": ["a"]})], iter([Request([1], {"stop": [[5], "a"]})])):
        with pytest.raises(UserError, match="^stop texts need the text of a row: pass tokenizer=$"):
            rows_of(prompts)
    assert rows_of([[1]], stop=[[5]])[0].stream is None
    first, second = rows_of([[1], [2]], stop=["a"], tokenizer=Letters())
    assert first.stream is not None and first.stream is not second.stream


def test_bad_prompt_is_found_before_any_work_or_becomes_a_row():
    good, bad = [1], [1] * 300
    with pytest.raises(UserError, match="^prompt 2 has 300"):
        make_batch([good, good, bad], CONFIG, max_new_tokens=1)
    batch = make_batch([good, bad, Request(good, error="line 3: not JSON"), good], CONFIG, strict=False, num_samples=2)
    rows = list(batch.waiting)
    assert summary(rows) == [(0, 0, 0), (1, 0, 1), (2, 1, 0), (3, 2, 0), (4, 3, 0), (5, 3, 1)]
    assert [row.finish_reason for row in rows] == [None, None, "error", "error", None, None]
    assert rows[2].error.startswith("prompt 1 has 300 tokens") and rows[3].error == "line 3: not JSON"
    assert rows[2].prompt == rows[3].tokens == []
    with pytest.raises(UserError, match="^line 3: not JSON$"):
        make_batch([good, Request(good, error="line 3: not JSON")], CONFIG)


def test_prompts_of_an_iterator_are_taken_when_a_row_is():
    taken = []

    def prompts():
        for i in itertools.count():
            taken.append(i)
            yield [1] * (i + 1) if i != 3 else []

    rows = make_batch(prompts(), CONFIG, num_samples=2, max_new_tokens=1).waiting
    assert taken == []
    seen = [(len(row.prompt), row.sample, len(taken)) for row in itertools.islice(rows, 5)]
    assert seen == [(1, 0, 1), (1, 1, 1), (2, 0, 2), (2, 1, 2), (3, 0, 3)]
    next(rows)
    with pytest.raises(UserError, match="^prompt 3 has no tokens"):
        next(rows)
    rows = make_batch(prompts(), CONFIG, strict=False, max_new_tokens=1).waiting
    assert [row.error is None for row in itertools.islice(rows, 6)] == [True, True, True, False, True, True]


def test_settings_are_checked_before_an_iterator_is_touched():
    def never():
        raise AssertionError("was read")
        yield

    with pytest.raises(UserError, match="^top_k is 0"):
        make_batch(never(), CONFIG, top_k=0)
    make_batch(never(), CONFIG)


@pytest.mark.parametrize("name", ["num_samples", "max_batch_size", "prefill_budget", "max_cache_columns"])
def test_counts_of_a_job_are_checked_by_name(name):
    for wrong in (0, -1, 1.5, True, "1"):
        with pytest.raises(UserError, match=f"^{name} is .*, but must be a whole number >= 1$"):
            make_batch([[1]], CONFIG, **{name: wrong})
    make_batch([[1]], CONFIG, **{name: np.int64(3)})


def test_samples_of_a_prompt_are_bounded():
    with pytest.raises(UserError, match="^n is 1000000000, but must be a whole number from 1 to 10000$"):
        make_batch([[1]], CONFIG, num_samples=10**9)
    assert MOST_SAMPLES == 10_000


def test_batch_has_the_limits_of_the_job():
    batch = make_batch([[1]], CONFIG, max_batch_size=7, max_cache_columns=900, prefill_budget=33, padding_side="left")
    assert (batch.max_rows, batch.max_columns, batch.budget, batch.padding_side) == (7, 900, 33, "left")
    with pytest.raises(UserError, match="^padding_side is 'middle'"):
        make_batch([[1]], CONFIG, padding_side="middle")


def test_ends_of_the_model_are_ignored_on_demand_but_not_stops():
    kept, ignored = (rows_of([[1]], stop_ids={4}, stop=[[5]], ignore_eos=flag)[0] for flag in (False, True))
    assert 4 in kept.stop_ids and not ignored.stop_ids and ignored.stop_sequences == [[5]]


def test_samples_are_numbered_and_have_numbers_of_their_own():
    rows = rows_of([[1], [2], [1]], num_samples=3, temperature=1.0, max_new_tokens=4, seed=5)
    assert summary(rows) == [(3 * p + s, p, s) for p in range(3) for s in range(3)]
    occurrence = {0: 0, 1: 0, 2: 1}
    for row in rows:
        expected = row_stream(5, row.prompt, occurrence[row.prompt_index], row.sample).random(4)
        assert row.noise.tolist() == expected.tolist()
    assert len({number for row in rows for number in row.noise}) == 9 * 4


def test_only_sampled_prompts_before_count():
    """A greedy one in between, one that cannot be run, and what is cut to the same prompt."""
    sampled = {"temperature": 1.0}
    requests = [
        [1],
        Request([1], sampled),
        Request([1], {"top_k": 0}),
        [1],
        Request([1], sampled),
        Request([2], sampled),
    ]
    rows = rows_of(requests, strict=False)
    assert [row._occurrence for row in rows] == [0, 0, 0, 0, 1, 0]
    rows = rows_of([[2] * 256, [3] + [2] * 256], truncate="left", temperature=1.0)
    assert rows[0].prompt == rows[1].prompt and [row._occurrence for row in rows] == [0, 1]


PROMPT = st.tuples(st.sampled_from([(1,), (2,), (1, 2), ()]), st.sampled_from([0.0, 1.0]), st.integers(1, 3))


@given(st.lists(PROMPT, max_size=10), st.data())
@settings(max_examples=150, deadline=None, derandomize=True)
def test_what_is_done_already_changes_no_other_row(prompts, data):
    """Rows of a resumed job, or of one part of it, sample as in the whole job; `done` of any kind."""
    whole, parts = [], []
    for place, (prompt, temperature, n) in enumerate(prompts):
        own = {"temperature": temperature, "n": n}
        done = data.draw(st.sampled_from([(), {0}, {1}, {0, 2}, range(3), ALL]), label="done")
        whole.append(Request(prompt, own))
        parts.append(Request(prompt, own, done=done, place=place))
        if done == ALL and temperature == 0.0:
            parts.pop()  # what is not sampled need not even come along

    def noise(requests):
        asked = with_settings(iter(requests), max_new_tokens=3)
        rows = list(make_rows(asked, Limits(CONFIG), strict=False))
        assert [row.index for row in rows] == list(range(len(rows)))
        numbers = {(row.prompt_index, row.sample): None if row.noise is None else tuple(row.noise) for row in rows}
        assert len(numbers) == len(rows)
        return numbers

    expected, got = noise(whole), noise(parts)
    assert got.items() <= expected.items()
    left = set()
    for request in parts:
        samples = range(request.settings["n"] if request.prompt else 1)  # one error for all of them
        left |= {(request.place, sample) for sample in samples if sample not in request.done}
    assert got.keys() == left
