"""Claims of lit_gen/stopping.py: where a row ends, what is kept, and what is shown when."""

import itertools
from collections.abc import Collection, Sequence

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers

from lit_gen.sampling import row_stream
from lit_gen.settings import Settings
from lit_gen.stopping import Row
from lit_gen.tokenizer import Tokenizer
from lit_gen.tokenizer_backends import HuggingFace, TextStream, byte_level_alphabet

WORDS = ["be", "ta", " ga", "mma", "Paris", "DEF", "G", "HI", "J", "a", "b", "c", "d", "ab", "abc", "aa", "<end>", " x"]
BYTES = [
    b" \xe2\x80",
    b"\x9c",
    b"\xe2",
    b"\x80\x9d",
    b"\x80\x9dJ",
]  # " \u201c" in two, "\u201d" in two, the same and a J
SPECIAL = "<|quiet|>"


def make_backend() -> HuggingFace:
    """A byte-level tokenizer whose tokens are WORDS, BYTES and SPECIAL."""
    characters = {byte: char for char, byte in byte_level_alphabet().items()}
    pieces = [word.encode() for word in WORDS] + BYTES
    vocab = {"".join(characters[byte] for byte in piece): i for i, piece in enumerate(pieces)}
    lib = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    lib.pre_tokenizer, lib.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    lib.add_special_tokens([SPECIAL])
    return HuggingFace(lib)


BACKEND = make_backend()
LEFT, LEFT_END, RIGHT, RIGHT_END, RIGHT_END_J, QUIET = range(len(WORDS), len(WORDS) + 6)


def ids(*words: str) -> list[int]:
    return [WORDS.index(word) for word in words]


def make_row(
    index: int,
    prompt: list[int],
    limit: int,
    *,
    stop_ids: Collection[int] = (),
    stop_strings: Sequence[str] = (),
    stop_sequences: Sequence[Sequence[int]] = (),
    stream: TextStream | None = None,
    **changes,
) -> Row:
    stop = [*stop_strings, *stop_sequences]
    return Row(index, prompt, Settings(max_new_tokens=limit, stop=stop, **changes), stop_ids=stop_ids, stream=stream)


def run(tokens: list[int], limit: int = 100, **stops) -> tuple[Row, list[str]]:
    """Pushes tokens until the row is finished."""
    row = make_row(0, [], limit, stream=BACKEND.stream(), **stops)
    shown = []
    for token in tokens:
        if row.finish_reason is None:
            shown.append(row.push(token))
    return row, shown


def test_stop_id_ends_a_row_and_is_not_kept():
    rows = [make_row(i, [2, 2], 6, stop_ids={2, 9}) for i in range(2)]
    steps = list(zip([5, 2, 7, 7, 7, 7], [5, 6, 7, 8, 9, 2], strict=True))
    taken = [0, 0]
    for step in steps:
        for row, token in zip(rows, step, strict=True):
            if row.finish_reason is None:
                row.push(token)
                taken[row.index] += 1
    assert [row.tokens for row in rows] == [[5], [5, 6, 7, 8]]
    assert [row.finish_reason for row in rows] == ["stop", "stop"]
    assert taken == [2, 5]


def test_first_token_can_be_a_stop():
    for stops in ({"stop_ids": {0}}, {"stop_sequences": [(0,)]}, {"stop_strings": ["b"]}):
        row, shown = run(ids("be"), **stops)
        assert (row.tokens, row.text, row.finish_reason, shown) == ([], "", "stop", [""])


def test_length_ends_a_row():
    row, shown = run(ids("be", "ta", " ga"), limit=2)
    assert (row.tokens, row.text, row.finish_reason, shown) == (ids("be", "ta"), "beta", "length", ["be", "ta"])
    with pytest.raises(AssertionError, match="row 0 is finished"):
        row.push(1)


def test_a_single_token_can_be_all_that_is_wanted():
    row = make_row(3, [1], 1, stream=BACKEND.stream())
    assert (row.push(ids("be")[0]), row.finish_reason, row.tokens, row.text) == ("be", "length", ids("be"), "be")
    with pytest.raises(AssertionError, match="row 3 is finished"):
        row.push(1)


def test_stop_in_the_last_allowed_token_is_a_stop():
    assert run(ids("be", "a"), limit=2, stop_ids=ids("a"))[0].finish_reason == "stop"
    assert run(ids("be", "a", "b"), limit=3, stop_sequences=[ids("a", "b")])[0].finish_reason == "stop"
    assert run(ids("be", "ta", " ga"), limit=3, stop_strings=["ta ga"])[0].finish_reason == "stop"


def test_broken_row_ends_as_nan_and_keeps_what_it_had():
    row, shown = run([*ids("be", "ta"), -1], stop_strings=["ta ga"])
    assert (row.tokens, row.text, row.finish_reason) == (ids("be", "ta"), "beta", "nan")
    assert shown == ["be", "", "ta"]
    row = make_row(0, [1], 5)
    row.push(-1)
    assert (row.tokens, row.finish_reason, row.error) == ([], "nan", "the logits of new token 0 are not numbers")


def test_stop_sequence_after_a_false_start():
    """A single counter that goes back to 0 at a mismatch misses aab in aaab."""
    row, shown = run(ids("a", "a", "a", "b", "c"), stop_sequences=[ids("a", "a", "b")])
    assert (row.tokens, row.text, row.finish_reason) == (ids("a"), "a", "stop")
    assert shown == ["", "", "a", ""]


def test_unfinished_stop_sequence_is_released():
    row, shown = run(ids("a", "a", "c", "a"), limit=4, stop_sequences=[ids("a", "a", "b")])
    assert (row.tokens, row.text, row.finish_reason) == (ids("a", "a", "c", "a"), "aaca", "length")
    assert shown == ["", "", "aac", "a"]
    row, shown = run(ids("be", "a", "a", "ta"), stop_sequences=[ids("a", "a", "b")], stop_ids=ids("ta"))
    assert (row.text, shown) == ("beaa", ["be", "", "", "aa"])


def test_longest_of_sequences_that_end_together():
    row, _ = run(ids("c", "a", "b"), stop_sequences=[ids("b"), ids("a", "b")], stop_ids=ids("b"))
    assert (row.tokens, row.text) == (ids("c"), "c")


@given(
    st.lists(st.sampled_from(ids("a", "b", "c")), max_size=12),
    st.lists(st.sampled_from(ids("a", "b")), min_size=1, max_size=4),
)
@settings(max_examples=300, deadline=None)
def test_stop_sequence_equals_search_in_the_whole_row(tokens, stop):
    row, shown = run(tokens, stop_sequences=[stop])
    ends = [i for i in range(len(tokens)) if tokens[: i + 1][-len(stop) :] == stop]
    expected = tokens[: ends[0] + 1 - len(stop)] if ends else tokens
    assert row.tokens == expected
    assert row.finish_reason == ("stop" if ends else None)
    if ends:
        assert "".join(shown) == row.text == BACKEND.decode(expected)


def test_stop_string_across_token_borders():
    row, shown = run(ids("be", "ta", " ga", "mma"), stop_strings=["ta ga"])
    assert (row.text, row.tokens, row.finish_reason, shown) == ("be", ids("be"), "stop", ["be", "", ""])


def test_stop_string_with_a_decoder_that_adds_spaces():
    """Tokens that decode without their space when nothing stands before them (SentencePiece's way)."""
    words = ["\u2581be", "ta", "\u2581ga", "mma", "<0xE2>", "<0x80>", "<0x9C>"]
    lib = tokenizers.Tokenizer(
        models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[], byte_fallback=True)
    )
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    lib.decoder = decoders.Sequence(steps)
    backend = HuggingFace(lib)
    for tokens, stop, text, kept in (
        ([0, 1, 2, 3], "ta ga", "be", 1),
        ([0, 0, 2, 3], " ga", "be be", 2),
        ([0, 2, 2], " ga ga", "be", 1),
        ([0, 1, 4, 5, 6, 3], "\u201c", "beta", 2),  # bytes become text when something else follows
    ):
        row = make_row(0, [], 9, stop_strings=[stop], stream=backend.stream())
        shown = "".join(row.push(token) for token in tokens if row.finish_reason is None)
        assert (row.text, shown, row.tokens, row.finish_reason) == (text, text, tokens[:kept], "stop")


def test_stop_strings_with_the_default_models_tokenizer(shared):
    tokenizer = Tokenizer(shared / "data/tokenizers/smollm2")
    for tokens, stop, text, kept in (
        ([17565, 16439], "ta ga", "be", 0),
        ([38634], "Pari", "", 0),
        ([17565], "a", "bet", 0),
    ):
        row = make_row(0, [], 9, stop_strings=[stop], stream=tokenizer.stream())
        shown = "".join(row.push(token) for token in tokens if row.finish_reason is None)
        assert (row.text, shown, row.tokens, row.finish_reason) == (text, text, tokens[:kept], "stop")
    assert tokenizer.decode([17565, 16439]) == "beta gamma" and tokenizer.decode([38634]) == "Paris"


def test_stop_string_inside_a_token():
    row, shown = run(ids("Paris", "a"), stop_strings=["Pari"])
    assert (row.text, row.tokens, row.finish_reason, shown) == ("", [], "stop", [""])
    row, _ = run(ids("c", "Paris"), stop_strings=["ri"])
    assert (row.text, row.tokens) == ("cPa", ids("c"))  # the token holds the stop, the text before it stays


def test_nothing_of_a_stop_string_is_shown():
    row, shown = run(ids("be", "DEF", "G", "HI", "J"), stop_strings=["DEFGHIJ"])
    assert (row.text, shown) == ("be", ["be", "", "", "", ""])


def test_text_that_was_held_for_nothing_comes_out_complete():
    row, shown = run(ids("DEF", "G", "HI", "DEF", "G"), limit=5, stop_strings=["DEFGHIJ"])
    assert (row.text, row.finish_reason) == ("DEFGHIDEFG", "length")
    assert shown == ["", "", "", "DEFGHI", "DEFG"]


def test_stop_string_in_the_prompt_does_not_count():
    row = make_row(0, ids("be", "ta"), 3, stop_ids=ids("be"), stop_strings=["beta", "ta ga"], stream=BACKEND.stream())
    for token in ids(" ga", "mma", "G"):
        row.push(token)
    assert (row.text, row.finish_reason) == (" gammaG", "length")


def test_stop_that_is_complete_first_wins():
    assert run(ids("a", "b", "c", "d"), stop_strings=["abcd", "bc"])[0].text == "a"
    assert run(ids("abc", "d"), stop_strings=["abcd", "bc"])[0].text == "a"
    assert run(ids("abc"), stop_strings=["c", "bc", "abcd"])[0].text == "a"  # two end together: the longest
    assert run(ids("ab", "aa"), stop_strings=["a", "ab"])[0].text == ""
    assert run(ids("Paris"), stop_strings=["Pari", "a"])[0].text == "P"


def brute_force(text: str, stops: list[str]) -> tuple[str, bool]:
    """What is left of a text that grows by single characters."""
    for end in range(len(text) + 1):
        for start in range(end):
            if text[start:end] in stops:
                return text[:start], True
    return text, False


@given(
    st.lists(st.sampled_from(["a", "b", "c", "ab", "abc", "aa"]), max_size=10),
    st.lists(st.text("abc", min_size=1, max_size=5), max_size=3),
)
@settings(max_examples=500, deadline=None)
def test_borders_of_tokens_do_not_matter(words, stops):
    """The same as searching the whole text, and what has been shown is never taken back or late without need."""
    tokens = ids(*words)
    row = make_row(0, [], len(tokens) + 1, stop_strings=stops, stream=BACKEND.stream())
    text, shown = "", ""
    for word, token in zip(words, tokens, strict=True):
        text += word
        shown += row.push(token)
        expected, stopped = brute_force(text, stops)
        assert (row.text, row.finish_reason == "stop") == (expected, stopped)
        if stopped:
            break
        held = text[len(shown) :]
        assert text.startswith(shown)
        longest = max((n for n in range(len(text) + 1) for s in stops if s[:n] == text[len(text) - n :]), default=0)
        assert len(held) == longest
    if row.finish_reason:
        assert shown == row.text
        lengths = list(itertools.accumulate(map(len, words)))
        assert len(row.tokens) == sum(n <= len(row.text) for n in lengths)


def test_tokens_before_a_stop_string_end_in_whole_characters():
    """The first token ends in a part of the stop: its text does not lie before it."""
    row, shown = run([*ids("be"), LEFT, LEFT_END], stop_strings=["\u201c"])
    assert (row.text, row.tokens, row.finish_reason) == ("be ", ids("be"), "stop")
    assert "".join(shown) == "be "
    row, _ = run([*ids("be"), RIGHT, RIGHT_END], stop_strings=["\u201d"])
    assert (row.text, row.tokens) == ("be", ids("be"))
    row, _ = run([*ids("be"), RIGHT, RIGHT_END_J], stop_strings=["J"])
    assert (row.text, row.tokens) == ("be\u201d", ids("be"))  # the text stays, half a character is no token to keep


def test_token_without_text_before_a_stop_string_is_kept():
    row, _ = run([*ids("be"), QUIET, *ids("ta", " ga")], stop_strings=["ta ga"])
    assert (row.text, row.tokens) == ("be", [*ids("be"), QUIET])


def test_half_a_character_is_released_at_the_end_only():
    row, shown = run([*ids("be"), RIGHT], limit=2)
    assert (row.text, shown) == ("be\ufffd", ["be", "\ufffd"])
    row, shown = run([RIGHT, RIGHT_END, RIGHT], limit=3)
    assert shown == ["", "\u201d", "\ufffd"]


def test_stop_string_that_only_the_end_of_the_stream_completes():
    row, shown = run([*ids("be"), RIGHT], limit=2, stop_strings=["e\ufffd"])
    assert (row.text, row.tokens, row.finish_reason, shown) == ("b", [], "stop", ["b", ""])
    row, _ = run([*ids("be", "a"), RIGHT, *ids("d")], stop_strings=["\ufffd"], stop_ids=ids("d"))
    assert (row.text, row.tokens, row.finish_reason) == ("bea", ids("be", "a"), "stop")


def test_sequences_and_strings_together():
    """A stop string is found also when its tokens waited for a stop sequence that did not come."""
    stops = {"stop_sequences": [ids("ta", " ga", "J")], "stop_strings": ["ta"]}
    row, shown = run(ids("be", "ta", " ga", "G"), **stops)
    assert (row.text, row.tokens, row.finish_reason, "".join(shown)) == ("be", ids("be"), "stop", "be")
    row, _ = run(ids("be", "ta"), limit=2, **stops)
    assert (row.text, row.tokens, row.finish_reason) == ("be", ids("be"), "stop")


def test_what_waits_is_bounded_by_the_stops():
    """So the work per token does not grow with the row: each is decoded once, and a short end of the text searched."""
    row = make_row(
        0, [], 3000, stop_strings=["abab!"], stop_sequences=[ids("a", "b", "a", "c")], stream=BACKEND.stream()
    )
    pushed = []
    push, row.stream.push = row.stream.push, lambda token: pushed.append(token) or push(token)
    shown = 0
    for i, token in enumerate(ids("a", "b") * 1500, start=1):
        shown += len(row.push(token))
        assert i == 3000 or i - 7 <= shown < i  # 4 characters of the string, 3 tokens of the sequence
    assert pushed == row.tokens and shown == len(row.text) == 3000


def test_noise_is_the_stream_of_the_row():
    """The t-th number for the t-th token, drawn once: what has run so far, and a second start, change nothing."""
    numbers = {"prompt_index": 5, "sample": 3, "occurrence": 2}
    row = Row(7, [4, 9], Settings(max_new_tokens=6, temperature=0.5, seed=11), stop_ids={9}, **numbers)
    expected = row_stream(11, [4, 9], 2, 3).random(6)
    first = row.noise
    assert first.tolist() == expected.tolist() and first.dtype == np.float64
    row.push(1)
    row.filled = 0
    assert row.noise is first
    rest = [Row(0, [4, 9], row.settings, **{**numbers, name: 1}) for name in ("sample", "occurrence")]
    assert not any(set(expected) & set(other.noise) for other in [*rest, Row(0, [4, 8], row.settings, **numbers)])
    assert Row(0, [4, 9], row.settings, **{**numbers, "prompt_index": 1}).noise.tolist() == expected.tolist()


def test_greedy_row_has_no_noise():
    assert make_row(0, [1], 2).noise is None and make_row(0, [1], 2, temperature=0.1).noise.shape == (2,)


def test_columns_do_not_count_the_last_token():
    assert make_row(0, [1, 2, 3], 5).columns == 7 and make_row(0, [1], 1).columns == 1


def test_row_knows_what_of_it_is_in_the_cache():
    """Prompt 5 6 7 in two pieces, new tokens 8 9; then it starts again and both are fed once more."""
    row = make_row(0, [5, 6, 7], 9)
    assert not row.prefilled and not row.up_to_date
    row.filled = 2
    assert not row.prefilled and not row.up_to_date
    row.filled = 3
    assert row.prefilled and row.up_to_date
    row.push(8)
    assert row.next_input == 8 and not row.up_to_date
    row.filled = 4
    assert row.up_to_date
    row.push(9)
    fed = []
    for filled in (3, 4):
        row.filled = filled
        fed.append(row.next_input)
        assert not row.up_to_date
    row.filled = 5
    assert fed == [8, 9] and row.up_to_date


def test_logprobs_are_those_of_the_kept_tokens():
    row = make_row(0, [1], 9, stop_sequences=[ids("a", "b")], stop_strings=["ga"], stream=BACKEND.stream(), logprobs=1)
    for i, token in enumerate(ids("a", "be", "a", "b")):
        row.push(token, (-float(i), [(token, -0.5)]))
    assert row.tokens == ids("a", "be") and [entry[0] for entry in row.logprobs] == [0.0, -1.0]
    row = make_row(0, [1], 9, stop_strings=["ta ga"], stream=BACKEND.stream(), logprobs=0)
    for i, token in enumerate(ids("be", "ta", " ga")):
        row.push(token, (-float(i), []))
    assert row.tokens == ids("be") and row.logprobs == [(0.0, [])]
    assert make_row(0, [1], 9).logprobs is None


def test_failed_row_says_why():
    row = make_row(2, [1], 5)
    row.push(3)
    row.fail("out of memory")
    assert (row.finish_reason, row.error, row.tokens) == ("error", "out of memory", [3])
    with pytest.raises(AssertionError, match="row 2 is finished"):
        row.push(1)


def test_stop_string_without_text_is_refused():
    with pytest.raises(AssertionError, match="need the text"):
        make_row(0, [], 5, stop_strings=["a"])
