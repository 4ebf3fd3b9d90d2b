"""Beam search: transformers' own texts and scores, the best of all texts, and each prompt as it is alone."""

import json
from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest
import torch
from conftest import Family, llama_config, neox_config, randomized, run_script, save_byte_tokenizer
from test_generate_base import some_prompts
from transformers import GPT2LMHeadModel

from generate import base
from generate.base import generate
from lit_gen.beams import Beams, Search
from lit_gen.config import Config
from lit_gen.export import save_lit
from lit_gen.model import GPT
from lit_gen.pack import pack_model
from lit_gen.requests import make_batch
from lit_gen.settings import Request, Settings
from lit_gen.stopping import Row
from lit_gen.tokenizer import Tokenizer
from lit_gen.utils import UserError

Make = Callable[[str], Family]


def search(model: GPT, prompts: list, **how: object) -> list[Row]:
    return sorted(generate(model, prompts, **{"num_beams": 4, "max_new_tokens": 9, **how}), key=lambda row: row.index)


def content(row: Row) -> tuple:
    return row.prompt_index, row.sample, row.tokens, row.finish_reason, row.score, row.logprobs


def by_transformers(hf, prompt: list[int], n: int, stops: list[int], **how: object) -> list[tuple[list[int], float]]:
    """The n best texts, without their stop, and their scores."""
    how |= {"num_beams": n, "num_return_sequences": n, "do_sample": False, "pad_token_id": 127}
    how |= {"return_dict_in_generate": True, "output_scores": True}
    with pytest.MonkeyPatch.context() as patch:  # the model is shared with other tests
        patch.setattr(hf.generation_config, "eos_token_id", stops or None)
        found = hf.generate(torch.tensor([prompt]), **how)
    texts = [text[len(prompt) :] for text in found.sequences.tolist()]
    ends = [next((i for i, token in enumerate(text) if token in stops), len(text)) for text in texts]
    return [(text[:end], score) for text, end, score in zip(texts, ends, found.sequences_scores.tolist(), strict=True)]


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3_text"])
def test_texts_and_scores_are_those_of_transformers(family: Make, name: str) -> None:
    hf, model, _ = family(name)
    prompts, kinds = some_prompts(3, longest=12, vocab=128, seed=3), set()
    likely = [next(generate(model, [prompt], max_new_tokens=1)).tokens[0] for prompt in prompts]  # an end at once
    cases = [(4, 1.0, False), (2, 1.0, "never"), (4, 0.0, True), (4, -1.0, "never"), (3, 2.0, False)]
    for place, (n, penalty, early) in enumerate([*cases, (4, 0.6, True), (2, 2.0, True)]):
        stops = [list(range(20)), [*likely, 3], []][place % 3]
        how = {"length_penalty": penalty, "early_stopping": early, "max_new_tokens": 7}
        rows = search(model, prompts, num_beams=n, num_samples=n, stop_ids=stops, **how)
        expected = [found for prompt in prompts for found in by_transformers(hf, prompt, n, stops, **how)]
        assert [row.tokens for row in rows] == [tokens for tokens, _ in expected]
        assert [row.score for row in rows] == pytest.approx([score for _, score in expected], rel=1e-5)
        kinds |= {(row.finish_reason, len(row.tokens)) for row in rows}
    assert ("stop", 0) in kinds and ("length", 7) in kinds and len(kinds) > 3


def test_all_beams_of_a_trained_model_are_those_of_float64(stories: Path) -> None:
    model, tokenizer = GPT.from_checkpoint(stories), Tokenizer(stories)
    cases = json.loads((stories / "expected_beam4.json").read_text())["prompts"]
    prompts, how = [case["ids"] for case in cases], {"length_penalty": 0.0, "max_new_tokens": 20, "max_batch_size": 10}
    rows = search(model, prompts, num_samples=4, tokenizer=tokenizer, **how)
    beams = [beam for case in cases for beam in case["beams"]]
    assert len(rows) == len(beams) == 32 and [row.tokens for row in rows] == [beam["ids"] for beam in beams]
    assert [row.score for row in rows] == pytest.approx([beam["score"] for beam in beams], abs=2e-5)
    assert all(row.text == tokenizer.decode(row.tokens) for row in rows)


class Gpt2(GPT):
    """transformers' GPT-2, which we do not have, behind our interface: each cache row holds a text."""

    def __init__(self, folder: Path) -> None:
        super().__init__(Config(n_layer=1, n_head=1, n_embd=8, vocab_size=1000, block_size=64, intermediate_size=8))
        self.inner, self.texts = [GPT2LMHeadModel.from_pretrained(folder).eval()], {}  # in a list: no child of ours

    def move_kv_cache(self, source: int, target: int, columns: slice = slice(None)) -> None:
        text = self.texts.setdefault(target, [0] * 64)
        text[columns] = self.texts.get(source, [0] * 64)[columns]

    def forward(self, idx: torch.Tensor, input_pos: torch.Tensor | None = None, *_: object, **where) -> torch.Tensor:
        first, read = where["rows"].start if where.get("rows") else 0, []
        for b, new in enumerate(idx.tolist()):
            text, start = self.texts.setdefault(first + b, [0] * 64), 0 if input_pos is None else int(input_pos[b, 0])
            text[start : start + len(new)] = new
            read.append(text[: start + len(new)])
        return torch.stack([self.inner[0](torch.tensor([text])).logits[0, -1] for text in read])


def test_published_beams_of_gpt2_are_found(shared: Path) -> None:
    folder = shared / "data/models/tiny-random-gpt2"
    case = json.loads((folder / "expected.json").read_text())["beam_search_4_max_length_20"]
    rows = search(Gpt2(folder), case["input_ids"], max_new_tokens=8, stop_ids=[98], max_batch_size=8)
    assert [row.prompt + row.tokens for row in rows] == case["expected"]


def test_with_beams_for_all_beginnings_the_best_of_all_texts_are_found() -> None:
    """36 beams hold every beginning of 3 tokens of 6, so that nothing is lost; 2 ends a text."""
    model, prompts = randomized(llama_config(vocab_size=6)), [[1, 4, 0, 3], [5], [0, 0, 4]]
    texts = list(product(range(6), repeat=3))
    for place, prompt in enumerate(prompts):
        logits = model(torch.tensor([[*prompt, *text] for text in texts]))[:, len(prompt) - 1 : -1].double()
        chosen = logits.log_softmax(-1).gather(2, torch.tensor(texts)[..., None])[..., 0].tolist()  # (216, 3)
        for penalty in (1.0, 0.3, 3.0):
            scores = {}
            for text, values in zip(texts, chosen, strict=True):
                end = text.index(2) + 1 if 2 in text else 3
                scores[text[:end]] = sum(values[:end]) / end**penalty
            best = sorted(scores, key=lambda text: -scores[text])[:5]
            how = {"length_penalty": penalty, "num_samples": 5, "max_new_tokens": 3, "stop_ids": [2]}
            mine = [row for row in search(model, prompts, num_beams=36, **how) if row.prompt_index == place]
            assert [row.tokens for row in mine] == [[token for token in text if token != 2] for text in best]
            assert [row.score for row in mine] == pytest.approx([scores[text] for text in best], rel=1e-5)


def test_a_search_is_over_when_no_better_text_can_be_expected() -> None:
    """4 tokens of at most 16; two texts have ended, with scores of -1 and -2; the best that goes on has this sum."""
    cases = [(1.0, False, -7.9, False), (1.0, False, -8.0, True), (2.0, False, -31.9, False), (2.0, False, -32.0, True)]
    cases += [(1.0, "never", -31.9, False), (1.0, "never", -32.0, True), (0.0, "never", -1.9, False)]
    cases += [(-1.0, "never", -0.49, False), (-1.0, "never", -0.5, True), (1.0, True, -0.1, True)]
    for penalty, early, total, over in cases:
        search = Search([Row(0, [5], Settings(max_new_tokens=16))], Beams(2, penalty, early))
        row = search.begin()[0]
        search.ended = [row.fork(), row.fork()]
        search.ended[0].score, search.ended[1].score = -1.0, -2.0
        assert search._is_over([(total, 0, row)], 4) is over
        search.ended.pop()
        assert search._is_over([(total, 0, row)], 4) is False and search._is_over([], 4)


def mixed_requests(n: int, vocab: int) -> list[Request]:
    kinds = [{}, {"n": 2, "logprobs": 3}, {"stop": [[7], [11, 3], [40]]}, {"n": 3}, {"logprobs": 0}]
    prompts = some_prompts(n, longest=40, vocab=vocab, seed=8)
    return [Request(prompt, kinds[i % 5] | {"max_new_tokens": 1 + 5 * i % 17}) for i, prompt in enumerate(prompts)]


STOPS = range(0, 512, 9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_prompt_gets_the_bits_that_it_gets_alone(dtype: torch.dtype) -> None:
    """Prompts come and go, in pieces too; texts, scores and log-probabilities are compared exactly."""
    model, requests = pack_model(randomized(llama_config()).to(dtype)), mixed_requests(11, 512)
    if not model.by_token:
        pytest.skip("no kernels: bits are not promised")
    how = {"num_beams": 3, "stop_ids": STOPS}
    alone = [search(model, [request], **how) for request in requests]
    expected = [(i, *content(row)[1:]) for i, rows in enumerate(alone) for row in rows]
    assert {row.finish_reason for rows in alone for row in rows} == {"stop", "length"}
    for more in (
        {"max_batch_size": 1},
        {"max_batch_size": 7},
        {"prefill_budget": 9, "max_batch_size": 10},
        {"max_cache_columns": 400},
    ):
        assert [content(row) for row in search(model, requests, **how, **more)] == expected


@pytest.mark.parametrize("config", [llama_config, neox_config])
def test_out_of_memory_changes_no_text(config, capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    model, requests = randomized(config()), mixed_requests(13, 512)
    expected = [content(row)[:4] for row in search(model, requests, stop_ids=STOPS, max_batch_size=4)]
    forward, calls = GPT.forward, 0

    def scarce(self: GPT, idx: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if len(idx) > 9 or calls in (3, 70):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return forward(self, idx, *args, **kwargs)

    monkeypatch.setattr(GPT, "forward", scarce)
    rows = search(model, requests, stop_ids=STOPS, max_batch_size=22)
    assert [content(row)[:4] for row in rows] == expected
    assert "going on with 8 rows" in capsys.readouterr().err
    for enough in (0, 4):  # for so many calls
        calls = -enough

        def ends(self: GPT, *args: object, **kwargs: object) -> torch.Tensor:
            nonlocal calls
            calls += 1
            if calls > 0:
                raise MemoryError
            return forward(self, *args, **kwargs)

        monkeypatch.setattr(GPT, "forward", ends)
        rows = search(model, [Request([5, 6], {"n": 2})])
        assert [(row.index, row.sample, row.finish_reason) for row in rows] == [(0, 0, "error"), (1, 1, "error")]


def test_a_prompt_with_broken_numbers_harms_no_other() -> None:
    """After some tokens the logits are NaN; a prompt that ends in one, or a beam that chose one, ends its search."""
    model, prompts = pack_model(randomized(llama_config())), some_prompts(12, longest=9, seed=2)
    prompts[4][-1] = 300
    forward = model.forward

    def broken(idx: torch.Tensor, input_pos: torch.Tensor, last: torch.Tensor, **where: object) -> torch.Tensor:
        logits = forward(idx, input_pos, last, **where)
        fed = idx[0, last] if idx.size(0) == 1 else idx[range(len(idx)), last]
        return logits.masked_fill((fed % 50 == 0)[:, None], torch.nan)

    model.forward = broken
    rows = search(model, prompts, max_batch_size=20)
    alone = [next(generate(model, [prompt], num_beams=4, max_new_tokens=9)) for prompt in prompts]
    assert [content(row)[2:] for row in rows] == [content(row)[2:] for row in alone]
    assert {row.finish_reason for row in rows} == {"nan", "length"}


def test_logprobs_add_up_to_the_score_and_only_asked_rows_have_them(tiny_llama: GPT) -> None:
    prompts = [Request([5, 9, 300], {"logprobs": 2}), [7] * 20]
    asked, other = search(tiny_llama, prompts, num_beams=3, length_penalty=0.5)
    assert asked.score == pytest.approx(sum(chosen for chosen, _ in asked.logprobs) / 9**0.5)
    assert [len(top) for _, top in asked.logprobs] == [2] * 9 and other.logprobs is None
    assert (asked.settings.logprobs, other.settings.logprobs) == (2, None)


def test_what_does_not_go_with_a_search_is_refused_in_a_line(tiny_llama: GPT) -> None:
    cases = [
        ({"num_beams": 0}, "num_beams is 0"),
        ({"num_beams": 10**9}, "at most 1000"),
        ({"length_penalty": float("nan")}, "length_penalty is nan"),
        ({"early_stopping": "soon"}, "must be true, false or never"),
        ({"num_beams": 1, "length_penalty": 2.0}, "give num_beams above 1"),
        ({"temperature": 0.5}, "samples nothing"),
        ({"repetition_penalty": 1.2}, "penalties and logit_bias"),
        ({"logit_bias": {3: 1.0}}, "penalties and logit_bias"),
        ({"num_samples": 5}, "5 texts of a prompt are wanted, but num_beams is 4"),
        ({"padding_side": "left"}, "padding_side does not go"),
        ({"speculate": 3}, "speculate does not go"),
        ({"processors": [lambda tokens, logits: logits]}, "processors does not go"),
    ]
    for how, message in cases:
        with pytest.raises(UserError, match=message) as caught:
            make_batch(iter(()), tiny_llama.config, **{"num_beams": 4, **how})
        assert "\n" not in str(caught.value)
    bad = [Request([5], {"n": 5}), Request([5], {"temperature": 1.0}), [6, 7]]
    with pytest.raises(UserError, match="prompt 1: temperature is 1.0"):
        generate(tiny_llama, bad[1:] and [[5], bad[1]], num_beams=4)
    rows = search(tiny_llama, bad, strict=False)
    assert [row.finish_reason for row in rows] == ["error", "error", "length"]
    assert rows[2].tokens == search(tiny_llama, [[6, 7]])[0].tokens
    small = randomized(Config(n_layer=1, n_head=1, n_embd=8, vocab_size=2, block_size=64, intermediate_size=8))
    few = search(small, [[1]], num_beams=3, num_samples=3, max_new_tokens=1)
    assert [row.error for row in few] == [None, None, "the search found only 2 texts: ask for no more of them"]


def test_prompts_are_read_as_there_is_room(tiny_llama: GPT) -> None:
    taken = []

    def arriving():
        for i, prompt in enumerate(some_prompts(9, longest=5)):
            taken.append(i)
            yield Request(prompt, {"n": 2})

    rows = generate(tiny_llama, arriving(), num_beams=3, max_batch_size=6, max_new_tokens=4)
    next(rows)
    assert len(taken) == 2, "two run, and no other is asked for before there is room"
    assert len(list(rows)) == 17


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lit")
    text = "the llama eats hay, and there is the sea; here are three more texts\n"
    save_byte_tokenizer(folder / "source", 300, text * 9)
    save_lit(randomized(llama_config(vocab_size=300, n_layer=1)), folder / "model", folder / "source")
    return folder / "model"


def test_a_job_writes_the_best_texts_and_goes_on(capsys, checkpoint: Path, tmp_path: Path) -> None:
    """Samples are the best texts, best first; a resumed job asks for the others of a prompt alone."""
    lines: list[dict] = [{"prompt": text} for text in ("llama", "a", "The sea is", "x = ")]
    lines[1] |= {"n": 1, "max_new_tokens": 3}
    body = {"prompt": "Hi", "n": 3, "logprobs": 0, "stop": []}
    lines.append({"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": body})
    lines.append({"prompt": "hot", "temperature": 0.7})
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    how = ["--checkpoint_dir", checkpoint, "--num_beams", 3, "--num_samples", 3, "--max_new_tokens", 8]
    how += ["--prompts", source, "--stop", '["e"]', "--early_stopping", "never"]
    assert run_script(capsys, base.main, *how, "--out", out)[0] == 0
    whole = out.read_bytes()
    *rows, response, wrong = [json.loads(line) for line in whole.splitlines()]
    places = [(prompt, sample) for prompt in (0, 2, 3) for sample in range(3)]
    assert [(row["index"], row.get("sample")) for row in rows] == sorted([*places, (1, None)], key=lambda key: key[0])
    tokenizer = Tokenizer(checkpoint)
    for row in rows:
        # A token that ends in a stop is left out, the text before the stop in it is not.
        assert row["text"].startswith(tokenizer.decode(row["token_ids"])) and "e" not in row["text"]
        assert row["score"] < 0
    assert rows[0]["score"] >= rows[1]["score"] >= rows[2]["score"] and rows[0]["text"] != rows[1]["text"]
    choices = response["response"]["body"]["choices"]
    sums = [sum(choice["logprobs"]["token_logprobs"]) for choice in choices]
    assert len(sums) == 3 and sums[0] > sums[1] > sums[2], "of the same length"
    assert wrong["finish_reason"] == "error" and "samples nothing" in wrong["error"]
    there = whole.splitlines(keepends=True)
    out.write_bytes(there[1] + there[3] + there[6] + there[7])  # of three prompts the second, third or first text
    assert run_script(capsys, base.main, *how, "--out", out)[0] == 0
    assert out.read_bytes() == whole
    status, printed, err = run_script(capsys, base.main, *how, "--strict", "true")
    assert (status, printed) == (2, "") and "line 6" in err
    source.write_text(json.dumps(lines[0]))
    status, printed, _ = run_script(capsys, base.main, *how, "--num_samples", 1, "--stream", "true")
    assert (status, printed) == (0, rows[0]["text"] + "\n")
