"""The limits of a job, and the rows that come of it."""

import pytest
from conftest import llama_config

from lit_gen.batch import check_job
from lit_gen.utils import UserError

CONFIG = llama_config(vocab_size=50, block_size=256)


@pytest.mark.parametrize(("length", "new"), [(255, 1), (256, 1), (255, 2), (1, 256)])
def test_prompt_that_fits(length, new):
    """The last new token is never fed back: T + n - 1 cache columns."""
    check_job([[1] * length, [2]], CONFIG, new, {})


@pytest.mark.parametrize(
    ("length", "new", "remedy"),
    [
        (256, 2, "set max_new_tokens to 1 or shorten it"),
        (250, 20, "set max_new_tokens to 7 or shorten it"),
        (257, 1, "shorten it to 256"),
    ],
)
def test_prompt_that_is_too_long_is_named(length, new, remedy):
    for prompts, where in (([[1] * length, [2] * 10], "prompt 0"), ([[2] * 10, [1] * length], "prompt 1")):
        with pytest.raises(UserError) as error:
            check_job(prompts, CONFIG, new, {})
        assert str(error.value) == (
            f"{where} has {length} tokens and {new} new ones are wanted, "
            f"which exceeds the model's context of 256: {remedy}"
        )


def test_all_prompts_that_are_too_long_are_counted():
    prompts = [[1] * n for n in (1, 300, 20, 257, 400)]
    with pytest.raises(UserError, match=r"^line 2 has 300 tokens.* \(2 more prompts are too long\)$"):
        check_job(prompts, CONFIG, 1, {}, [f"line {i}" for i in range(1, 6)])


def test_token_beyond_the_embedding_is_named():
    check_job([[1], [49]], CONFIG, 1, {})
    for token in (50, -1, 2**40):
        with pytest.raises(UserError, match=f"^prompt 1 has the token {token}, but the model has only 50"):
            check_job([[1], [3, token, 4]], CONFIG, 1, {})
