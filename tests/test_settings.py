"""Claims of lit_gen/settings.py: what each setting may be, and what is said when it is not."""

import json
from fractions import Fraction

import numpy as np
import pytest
import torch

from lit_gen.settings import MOST_SAMPLES, Settings, check_count, check_stops, is_number
from lit_gen.utils import UserError

HUGE = 10**400  # no float can hold it
NAN, INF = float("nan"), float("inf")
WHOLE = ["max_new_tokens", "top_k", "seed", "n", "logprobs"]
REAL = ["temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"]


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("max_new_tokens", [1, 5, HUGE], [0, -1, 1.0, None]),  # the model's context bounds it: see test_requests.py
        ("temperature", [0, 0.0, 1e-9, 2, 1e308], [-1e-9, -1, NAN, INF, None, HUGE]),
        ("top_k", [None, 1, 50, HUGE], [0, -1, 2.0]),
        ("top_p", [None, 0, 0.5, 1], [-0.1, 1.0001, NAN, HUGE]),
        ("min_p", [None, 0, 0.5, 1], [-0.1, 1.0001, NAN, HUGE]),
        ("repetition_penalty", [1, 0.1, 1e-30, 1e30], [0, -1.0, NAN, INF, None, HUGE]),
        ("presence_penalty", [0, -2.0, 2, 1e30], [NAN, -INF, None, HUGE, -HUGE]),
        ("frequency_penalty", [0, -2.0, 2, 1e30], [NAN, -INF, None, HUGE, -HUGE]),
        ("seed", [0, -1, 2**64, HUGE], [1.0, None]),
        ("n", [1, MOST_SAMPLES], [0, -1, MOST_SAMPLES + 1, HUGE, 2.0, None]),
        ("logprobs", [None, 0, 5], [-1, 1.0]),
    ],
)
def test_each_setting_has_its_range(name, good, bad):
    for value in good:
        assert getattr(Settings(**{name: value}), name) == value
    for value in [*bad, "1", [1], True, False]:
        with pytest.raises(UserError) as error:
            Settings(**{name: value})
        message = str(error.value)
        assert message.startswith(f"{name} is {value!r:.40}, but must be ") and len(message.splitlines()) == 1
        assert len(message) < 140


def test_numpy_numbers_are_numbers():
    for name in WHOLE:
        for kind in (np.int8, np.int64, np.uint16):
            assert getattr(Settings(**{name: kind(3)}), name) == 3
    for name in REAL:
        for kind in (np.float32, np.float64, np.float16):
            assert getattr(Settings(**{name: kind(0.5)}), name) == 0.5
        with pytest.raises(UserError, match=name):
            Settings(**{name: np.float32("nan")})
    for name in WHOLE + REAL:
        for wrong in (np.bool_(True), np.array([1]), torch.tensor(1)):
            with pytest.raises(UserError, match=f"^{name} is "):
                Settings(**{name: wrong})


def test_number_is_finite_and_no_truth_value():
    assert all(map(is_number, (0, 1.5, -1, Fraction(1, 3), np.float32(2), 10**300)))
    assert not any(map(is_number, (True, "1", None, 1j, NAN, INF, HUGE, -HUGE, Fraction(HUGE))))


def test_count_is_a_whole_number_from_1_on():
    check_count("rows", 1)
    check_count("rows", np.int64(7))
    for wrong in (0, -1, True, 1.0, "1", None):
        with pytest.raises(UserError, match="^rows is .*, but must be a whole number >= 1$"):
            check_count("rows", wrong)


def test_logit_bias_has_token_ids_also_as_json_writes_them():
    bias = json.loads('{"5": 1, "007": -2.5, "0": 100}')
    assert Settings(logit_bias=bias).logit_bias == {5: 1.0, 7: -2.5, 0: 100.0}
    kept = Settings(logit_bias={np.int64(3): np.float32(0.5), 4: 1}).logit_bias
    assert kept == {3: 0.5, 4: 1.0} and {type(x) for pair in kept.items() for x in pair} == {int, float}
    assert Settings(logit_bias={}).logit_bias is None
    own = {1: 2.0}
    Settings(logit_bias=own)
    assert own == {1: 2.0}


@pytest.mark.parametrize(
    ("bias", "message"),
    [
        ({"1": 1, "01": 2}, "logit_bias names a token twice"),
        ({"1": 1, 1: 1}, "logit_bias names a token twice"),
        ({-1: 1}, "the key -1"),
        ({"-1": 1}, "the key '-1'"),
        ({"a": 1}, "the key 'a'"),
        ({"": 1}, "the key ''"),
        ({"1.0": 1}, "the key '1.0'"),
        ({"\u0663": 1}, "the key"),  # an Arabic digit, which int() would take
        ({"\u00b2": 1}, "the key"),  # isdigit, but int() fails
        ({"9" * 5000: 1}, "the key '999"),
        ({1.0: 1}, "the key 1.0"),
        ({True: 1}, "the key True"),
        ({None: 1}, "the key None"),
        ({5: None}, "logit_bias of token 5 is None"),
        ({5: "1"}, "logit_bias of token 5 is '1'"),
        ({5: NAN}, "logit_bias of token 5 is nan"),
        ({5: -INF}, "logit_bias of token 5 is -inf"),
        ({5: True}, "logit_bias of token 5 is True"),
        ({5: HUGE}, "logit_bias of token 5 is 1000"),
        ([1, 2], "logit_bias is [1, 2], but must map"),
        ("x", "logit_bias is 'x', but must map"),
    ],
)
def test_logit_bias_that_means_nothing_is_refused(bias, message):
    with pytest.raises(UserError) as error:
        Settings(logit_bias=bias)
    assert message in str(error.value) and len(str(error.value)) < 140


def test_stops_are_texts_and_id_sequences():
    assert Settings().stop == () and Settings(stop=[]).stop == ()
    mixed = Settings(stop=["\n\n", [1, 2], (3,), [np.int64(4)]]).stop
    assert mixed == ("\n\n", (1, 2), (3,), (4,)) and type(mixed[3][0]) is int
    assert check_stops(("a",)) == ("a",)


@pytest.mark.parametrize(
    ("stop", "message"),
    [
        ("END", "stop is 'END', but must be a list"),
        (None, "stop is None"),
        (5, "stop is 5"),
        ({"a": 1}, "stop is {'a': 1}"),
        ({"a"}, "stop is {'a'}"),
        (iter(["a"]), "stop is <"),
        ([1, 2], "stop 0 is 1"),
        (["a", None], "stop 1 is None"),
        (["a", [1, "b"]], "stop 1 is [1, 'b']"),
        (["a", [True]], "stop 1 is [True]"),
        (["a", [1.0]], "stop 1 is [1.0]"),
        (["a", [[1]]], "stop 1 is [[1]]"),
        ([b"a"], "stop 0 is b'a'"),
        (["a", ""], "stop 1 is empty"),
        (["a", [1], []], "stop 2 is empty"),
    ],
)
def test_stop_of_another_shape_is_refused(stop, message):
    with pytest.raises(UserError) as error:
        Settings(stop=stop)
    assert str(error.value).startswith(message)


def test_override_changes_what_it_names_and_checks_it():
    base = Settings(temperature=0.5, logit_bias={"3": 1}, stop=["a"], seed=7)
    own = base.override({"temperature": 2, "n": 3, "stop": [[1]], "logit_bias": {"4": 2}})
    assert (own.temperature, own.n, own.stop, own.logit_bias, own.seed) == (2, 3, ((1,),), {4: 2.0}, 7)
    assert (base.temperature, base.n, base.stop, base.logit_bias) == (0.5, 1, ("a",), {3: 1.0})
    assert base.override({}) == base
    with pytest.raises(UserError, match="^top_p is 2"):
        base.override({"top_p": 2})


@pytest.mark.parametrize("name", ["temprature", "", "max_batch_size", "penalised", "override"])
def test_override_of_an_unknown_name_lists_the_known_ones(name):
    with pytest.raises(UserError) as error:
        Settings().override({"temperature": 1, name: 1})
    expected = (
        f"there is no setting {name!r}: use max_new_tokens, temperature, top_k, top_p, min_p, repetition_penalty, "
    )
    assert str(error.value).startswith(expected) and str(error.value).endswith(", seed, n, logprobs, lora")


def test_penalised_is_a_row_whose_history_counts():
    assert not Settings(logit_bias={1: 1.0}, temperature=1.0).penalised
    for changes in ({"repetition_penalty": 1.1}, {"presence_penalty": -0.1}, {"frequency_penalty": 0.5}):
        assert Settings(**changes).penalised
