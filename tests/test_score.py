"""Claims of lit_gen/score.py: log-likelihoods are those of the whole text alone, whatever is in the batch beside it."""

import copy
import json
import random

import pytest
import torch
from conftest import Family, llama_config, neox_config, randomized

from lit_gen import score as module
from lit_gen.config import Config
from lit_gen.model import GPT
from lit_gen.pack import pack_model
from lit_gen.score import Pair, Score, look_up, make_runs, make_texts, score
from lit_gen.tokenizer import Tokenizer
from lit_gen.utils import UserError

WINDOWS = {"layer_types": ["sliding", "full"], "window": 8}
CONFIGS = [llama_config(), neox_config(), llama_config(**WINDOWS)]
SIZES = (1, 2, 10, 25, 64)


def scores(model: GPT, pairs: list[Pair], *how: int) -> list[Score]:
    """In the order of the pairs, each exactly once."""
    found: list[Score | None] = [None] * len(pairs)
    for place, one in score(model, pairs, *how):
        assert found[place] is None
        found[place] = one
    assert None not in found
    return found


def alone(model: GPT, pair: Pair, max_length: int) -> Score:
    """From one forward over the whole text, without a cache, and a softmax in float64."""
    context, continuation = pair
    if not continuation:
        return Score(0.0, True)
    *fed, last = [*context, *continuation][-(max_length + 1) :]
    logprobs = model(torch.tensor([fed]))[0, -len(continuation) :].double().log_softmax(-1)
    tokens = torch.tensor([*fed, last][-len(continuation) :])
    return Score(logprobs[torch.arange(len(tokens)), tokens].sum().item(), bool((logprobs.argmax(-1) == tokens).all()))


def best(model: GPT, context: list[int], n: int) -> list[int]:
    ids = list(context)
    for _ in range(n):
        ids.append(int(model(torch.tensor([ids]))[0, -1].argmax()))
    return ids[len(context) :]


def ragged_pairs(model: GPT, seed: int = 0) -> list[Pair]:
    """Questions with 1 to 4 choices, examples that many share, single tokens, greedy ones, copies, too long ones."""
    rng, V = random.Random(seed), model.config.vocab_size

    def ids(low: int, high: int) -> list[int]:
        return [rng.randrange(V) for _ in range(rng.randint(low, high))]

    pairs: list[Pair] = []
    for _ in range(12):
        context = ids(1, 60)
        pairs += [(context, ids(1, 20)) for _ in range(rng.randint(1, 4))]
    examples, letters = ids(40, 40), ids(70, 70)
    pairs += [(examples + ids(3, 9), ids(1, 3)) for _ in range(30)]
    pairs += [(letters, [token]) for token in (3, 4, 5, 6)] + [(letters[:-1], [letters[-1], 4]), (letters, [4, 5])]
    pairs += [(context, best(model, context, 3)) for context in (ids(5, 5), letters, ids(30, 30))]
    pairs += [(ids(300, 300), ids(4, 4)), (ids(9, 9), ids(256, 256)), (ids(253, 253), ids(4, 4)), ([1], [])]
    pairs += [pairs[2]] * 5
    rng.shuffle(pairs)
    return pairs


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("config", CONFIGS, ids=["llama", "neox", "windows"])
def test_scores_are_those_of_the_whole_text_alone(config: Config, packed: bool) -> None:
    model = randomized(config)
    pairs = ragged_pairs(model)
    expected = [alone(model, pair, 256) for pair in pairs]
    assert sum(one.greedy for one in expected) >= 4 and sum(not one.greedy for one in expected) > 40
    if packed:
        model = pack_model(model)
    for size in (1, 7, 64):
        found = scores(model, pairs, size)
        assert [one.greedy for one in found] == [one.greedy for one in expected]
        torch.testing.assert_close([x.logprob for x in found], [x.logprob for x in expected], rtol=1e-6, atol=2e-5)
    assert model.h[0].attn.kv_cache is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_same_bits_in_every_batch_size_and_order(dtype: torch.dtype) -> None:
    model = pack_model(randomized(llama_config()).to(dtype))
    pairs = ragged_pairs(model)
    expected = scores(model, pairs, 1)
    for size in SIZES[1:]:
        assert scores(model, pairs, size) == expected
    order = random.Random(1).sample(range(len(pairs)), len(pairs))
    assert scores(model, [pairs[i] for i in order], 10) == [expected[i] for i in order]
    for some in ([3], [3, 50], [3, 7, 20, 21, 50]):
        assert scores(model, [pairs[i] for i in some], 25) == [expected[i] for i in some]


def test_copies_have_one_value() -> None:
    """EleutherAI/lm-evaluation-harness#704: four copies and five copies of a request had different values."""
    model = randomized(llama_config())
    pair = ([5, 6, 7, 8, 9, 10], [11, 12, 13])
    for n in (1, 4, 5):
        assert len({one.logprob for one in scores(model, [pair] * n, 4)}) == 1
    values = [scores(model, [pair] * n, 4)[0].logprob for n in (1, 4, 5)]
    torch.testing.assert_close(values, [alone(model, pair, 256).logprob] * 3, rtol=0, atol=1e-5)


@pytest.mark.parametrize("packed", [True, False])
def test_long_contexts_are_cut_at_the_beginning(packed: bool) -> None:
    """300 ids and 4 that are scored, in a context of 256: 253 of the 300 are read, and the 4 are scored."""
    model, rng = randomized(llama_config(block_size=256)), random.Random(0)
    context, continuation = [rng.randrange(512) for _ in range(300)], [7, 8, 9, 10]
    model = pack_model(model) if packed else model
    read: list[int] = []
    wte = model.wte.forward
    model.wte.forward = lambda idx: read.extend(idx.flatten().tolist()) or wte(idx)
    (found,) = scores(model, [(context, continuation)], 8)
    model.wte.forward = wte
    assert read == context[-253:] + continuation[:3]
    assert [found] == scores(model, [(context[47:], continuation)], 8)
    assert scores(model, [(context, continuation)], 8, 20) == scores(model, [(context[-17:], continuation)], 8)
    whole = ([1, 2], context[:256])
    assert scores(model, [whole], 8) == scores(model, [([2], context[:256])], 8)  # its first token is kept


def test_what_cannot_be_scored_is_refused_before_any_work() -> None:
    model = randomized(llama_config(block_size=256))
    for pairs, said in [
        ([([1], [2]), ([], [2])], "pair 1 has no context"),
        ([([1], [2] * 257)], "a continuation of 257 tokens, but the model takes 256"),
        ([([1], [512])], "token 512, but the model has only 512"),
        ([([-1], [2])], "token -1"),
    ]:
        with pytest.raises(UserError, match=said):
            scores(model, pairs)
    with pytest.raises(UserError, match="max_batch_size"):
        scores(model, [([1], [2])], 0)
    assert scores(model, []) == [] and scores(model, [([1], [])]) == [Score(0.0, True)]
    assert model.h[0].attn.kv_cache is None


@pytest.mark.parametrize("packed", [True, False])
def test_longrope_takes_the_table_of_each_texts_own_length(family, packed: bool) -> None:
    made: Family = family("phi3-longrope")  # another table from 33 tokens on
    model, rng = copy.deepcopy(made.model), random.Random(0)
    context = [rng.randrange(128) for _ in range(31)]
    pairs = [(context[:n], [rng.randrange(128) for _ in range(k)]) for n, k in [(31, 1), (31, 2), (31, 9), (20, 5)]]
    expected = []
    for context, continuation in pairs:  # transformers' own model, each text alone
        logits = made.hf(torch.tensor([[*context, *continuation[:-1]]])).logits[0, -len(continuation) :]
        chosen = logits.double().log_softmax(-1)[torch.arange(len(continuation)), continuation]
        expected.append(chosen.sum().item())
    model = pack_model(model) if packed else model
    for size in (1, 3):
        found = [one.logprob for one in scores(model, pairs, size)]
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("packed", [True, False])
def test_small_pieces_change_nothing(packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = randomized(llama_config())
    model = pack_model(model) if packed else model
    pairs = ragged_pairs(model)
    expected = scores(model, pairs, 10)
    for tokens, logits in [(64, 2**25), (2048, 512 * 10), (50, 512 * 3), (1, 1)]:
        monkeypatch.setattr(module, "TOKENS", tokens)
        monkeypatch.setattr(module, "LOGITS", logits)
        found = scores(model, pairs[: 8 if tokens == 1 else 40], 10)
        if packed:
            assert found == expected[: len(found)]
        for one, other in zip(found, expected, strict=False):
            assert abs(one.logprob - other.logprob) < 1e-4 and one.greedy == other.greedy


def test_no_call_computes_more_logits_than_its_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LOGITS", 512 * 20)
    for packed in (True, False):
        model = randomized(llama_config())
        head = (pack_model(model) if packed else model).lm_head
        rows: list[int] = []
        head.register_forward_hook(lambda _, x, y, rows=rows: rows.append(y.numel() // 512))
        scores(model, ragged_pairs(randomized(llama_config())), 10)
        assert max(rows) <= 20


def test_shared_beginnings_are_read_once() -> None:
    """Four choices of a question, and thirty questions behind the same forty tokens."""
    config = llama_config()
    question = [(list(range(1, 51)), [100 + c, 5, 6]) for c in range(4)]
    texts = make_texts(question, config, 256)
    (run,) = make_runs(texts, 64)
    assert len(run) == 4
    model, read = pack_model(randomized(config)), []
    wte = model.wte.forward
    model.wte.forward = lambda idx: read.append(idx.numel()) or wte(idx)
    scores(model, question, 64)
    assert sum(read) == 50 + 2 + 3 * 3  # the context's last token again, for its logits
    read.clear()
    scores(model, [(list(range(1, 41)) + [60 + i, 7], [8]) for i in range(32)], 2)
    assert sum(read) == 2 * 40 + 32 * 2  # in two rows


def test_out_of_memory_goes_on_with_fewer_rows(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    model = pack_model(randomized(llama_config()))
    pairs, calls = ragged_pairs(model), 0
    expected, set_kv_cache, forward = scores(model, pairs, 16), GPT.set_kv_cache, GPT.forward

    def scarce(self: GPT, rows: int, columns: int) -> None:
        if rows > 6:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        set_kv_cache(self, rows, columns)

    def fails_once(self: GPT, *args: object, **how: object) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls == 5:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return forward(self, *args, **how)

    monkeypatch.setattr(GPT, "set_kv_cache", scarce)
    monkeypatch.setattr(GPT, "forward", fails_once)
    assert scores(model, pairs, 16) == expected
    err = capsys.readouterr().err
    assert [f"with {n} texts" in err for n in (8, 4, 2)] == [True, True, True]
    calls = 4
    with pytest.raises(torch.OutOfMemoryError):
        scores(model, pairs, 1)


@pytest.mark.parametrize("packed", [True, False])
def test_broken_numbers_harm_no_other_text(packed: bool) -> None:
    model = randomized(llama_config(tie_embeddings=False))
    model.wte.weight[7] = torch.nan
    pairs = [([1, 2, 3], [4, 5]), ([1, 2, 3], [7, 6]), ([1, 2, 3], [8, 9]), ([7, 1], [2]), ([9, 9, 9, 9], [1, 2, 3])]
    expected = [alone(model, pair, 256).logprob for pair in pairs]
    assert [value != value for value in expected] == [False, True, False, True, False]
    model = pack_model(model) if packed else model
    found = [one.logprob for one in scores(model, pairs, 1)]
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-5, equal_nan=True)


def test_look_up_is_log_softmax_with_the_bits_of_the_row_alone() -> None:
    logits = torch.randn(50, 49152, generator=torch.Generator().manual_seed(0)) * 3  # 21 rows are handled at once
    tokens = [[i, int(logits[i].argmax()), 49151 - i][: i % 4] for i in range(50)]
    found = look_up(logits, tokens)
    for rows in (logits, logits.bfloat16()):  # in float32 whatever the logits are, of which 49,152 are added up
        exact = rows.double().log_softmax(-1)
        expected = [exact[i, token].item() for i, some in enumerate(tokens) for token in some]
        torch.testing.assert_close([value for value, _ in look_up(rows, tokens)], expected, rtol=1e-5, atol=1e-5)
    hits = [int(logits[i].argmax()) == token for i, some in enumerate(tokens) for token in some]
    assert [hit for _, hit in found] == hits and 0 < sum(hits) < len(hits)
    for rows in (logits, logits.bfloat16()):
        together = look_up(rows, tokens)
        assert together == [one for i, some in enumerate(tokens) for one in look_up(rows[i : i + 1], [some])]


def test_expected_log_likelihoods_of_a_trained_model(stories) -> None:
    """Twelve pairs whose sums were computed in float64, and what the tokenizer makes of them."""
    cases = json.loads((stories / "expected_loglikelihood.json").read_text())["pairs"]
    tokenizer, model = Tokenizer(stories), GPT.from_checkpoint(stories)
    pairs = [(case["context_ids"], case["continuation_ids"]) for case in cases]
    for case in cases:
        whole = tokenizer.encode(case["context"] + case["continuation"]).tolist()
        assert whole == case["context_ids"] + case["continuation_ids"]
    for prepared in (model, pack_model(GPT.from_checkpoint(stories))):
        for size in (1, 5, 64):
            found = scores(prepared, pairs, size)
            assert [one.greedy for one in found] == [case["is_greedy"] for case in cases]
            expected = [case["loglikelihood"] for case in cases]
            torch.testing.assert_close([one.logprob for one in found], expected, rtol=0, atol=2e-5)
    assert len(cases) == 12
