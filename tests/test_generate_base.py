"""The loop and its command line: each row as it is alone, whatever stands beside it; errors of one line."""

import json
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import Family, llama_config, randomized, run_script, save_byte_tokenizer
from torch import Tensor

from generate import base
from generate.base import generate
from lit_gen.config import Config
from lit_gen.export import save_lit
from lit_gen.model import GPT
from lit_gen.stats import Stats
from lit_gen.tokenizer import Tokenizer
from lit_gen.utils import UserError

Make = Callable[[str], Family]


def some_prompts(n: int, longest: int = 60, vocab: int = 512, seed: int = 0) -> list[list[int]]:
    """Lengths from 1 to `longest`, contents with id 0 and whatever else padding may be."""
    rng = random.Random(seed)
    return [[rng.randrange(vocab) for _ in range(rng.randint(1, longest))] for _ in range(n)]


def tokens(model: GPT, prompts: list[list[int]], **settings: object) -> list[list[int]]:
    """New tokens of every prompt, in the order of the prompts."""
    rows = list(generate(model, prompts, **{"max_new_tokens": 8, **settings}))
    assert sorted(row.index for row in rows) == list(range(len(rows)))
    return [row.tokens for row in sorted(rows, key=lambda row: row.index)]


class Scripted(GPT):
    """A model whose logits are 10 for the token that a script has for this row and step, 0 elsewhere."""

    def __init__(self, script: list[list[int]], prompts: list[list[int]], vocab: int = 16) -> None:
        super().__init__(Config(n_layer=1, n_head=1, n_embd=8, vocab_size=vocab, block_size=64, intermediate_size=8))
        self.script, self.prompts, self.calls = script, prompts, 0
        self.owner: dict[int, int] = {}  # cache row -> prompt

    def move_kv_cache(self, source: int, target: int) -> None:
        self.owner[target] = self.owner.get(source, -1)

    def forward(self, idx: Tensor, input_pos: Tensor | None = None, last: Tensor | None = None, **where) -> Tensor:
        if input_pos is None:
            self.owner[where["rows"].start] = self.prompts.index(idx[0].tolist())
        first = where["rows"].start if where.get("rows") else 0
        logits = torch.zeros(len(idx), self.config.vocab_size)
        self.calls += input_pos is not None
        for b in range(len(idx)):
            i = self.owner[first + b]
            step = 0 if input_pos is None else int(input_pos[b]) - len(self.prompts[i]) + 1
            logits[b, self.script[i][min(step, len(self.script[i]) - 1)]] = 10
        return logits


# Row = alone


@pytest.mark.parametrize("side", [None, "left", "right"])
@pytest.mark.parametrize("batch", [2, 8, 25])
def test_row_is_the_row_alone(tiny: GPT, batch: int, side: str | None) -> None:
    prompts = some_prompts(25)
    alone = [tokens(tiny, [prompt])[0] for prompt in prompts]
    assert tokens(tiny, prompts, max_batch_size=batch, padding_side=side) == alone
    order = random.Random(batch).sample(range(25), 25)
    shuffled = tokens(tiny, [prompts[i] for i in order], max_batch_size=batch, padding_side=side)
    assert shuffled == [alone[i] for i in order]
    assert len(set(map(tuple, alone))) > 20  # the rows differ, so equality says something


def test_greedy_tokens_equal_transformers(family: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against transformers' own generate, one left-padded batch and alone."""
    hf, model, _ = family("qwen3")
    monkeypatch.setattr(hf.generation_config, "eos_token_id", None)  # the model is shared with other tests
    prompts = some_prompts(6, vocab=128)
    width = max(map(len, prompts))
    idx = torch.tensor([[0] * (width - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    greedy = {"max_new_tokens": 16, "do_sample": False, "pad_token_id": 0}
    expected = hf.generate(idx, attention_mask=mask, **greedy)[:, width:].tolist()
    assert tokens(model, prompts, max_new_tokens=16) == expected
    for prompt, row in zip(prompts, expected, strict=True):
        alone = torch.tensor([prompt])
        assert hf.generate(alone, attention_mask=torch.ones_like(alone), **greedy)[0, len(prompt) :].tolist() == row


def test_permuted_repeated_and_split_batches_give_the_same_rows(tiny: GPT) -> None:
    """bigcode-evaluation-harness#36: outputs matched to the wrong prompts."""
    prompts = some_prompts(5)
    expected = tokens(tiny, prompts)
    assert tokens(tiny, prompts[::-1]) == expected[::-1]
    assert tokens(tiny, [prompts[1], *prompts, prompts[1]]) == [expected[1], *expected, expected[1]]
    assert tokens(tiny, prompts[:2]) + tokens(tiny, prompts[2:]) == expected


@pytest.mark.parametrize("side", [None, "left", "right"])
def test_a_sampled_row_is_the_row_alone(tiny: GPT, side: str | None) -> None:
    prompts = some_prompts(8)
    settings = {"temperature": 1.5, "top_k": 50, "top_p": 0.95, "seed": 7, "max_new_tokens": 12}
    alone = [tokens(tiny, [prompt], **settings)[0] for prompt in prompts]
    assert tokens(tiny, prompts, padding_side=side, max_batch_size=3, **settings) == alone
    assert tokens(tiny, prompts[::-1], **settings) == alone[::-1]
    assert tokens(tiny, prompts, **(settings | {"seed": 8})) != alone
    assert tokens(tiny, prompts, max_new_tokens=12) != alone  # greedy


def test_samples_of_a_prompt_and_equal_prompts_differ(tiny: GPT) -> None:
    prompts = some_prompts(2)
    rows = tokens(tiny, [prompts[0], prompts[1], prompts[0]], num_samples=3, temperature=1.0, max_new_tokens=12)
    assert len(set(map(tuple, rows))) == 9
    one = tokens(tiny, [prompts[0]], num_samples=3, temperature=1.0, max_new_tokens=12)
    assert one == rows[:3]


def test_a_second_job_is_like_the_first_in_a_fresh_process(tiny: GPT) -> None:
    first, second = some_prompts(4), some_prompts(9, seed=1)
    before = tokens(tiny, first)
    assert tokens(tiny, second) == [tokens(tiny, [prompt])[0] for prompt in second]
    assert tokens(tiny, first) == before
    assert all(block.attn.kv_cache is None for block in tiny.h)


@pytest.mark.parametrize("name", ["gemma2", "phi3-longrope", "mixtral", "smollm3", "falcon-7b-like", "olmo3-yarn"])
def test_row_is_the_row_alone_in_families_with_more_to_go_wrong(family: Make, name: str) -> None:
    model, prompts = family(name).model, some_prompts(7, vocab=128)
    alone = [tokens(model, [prompt])[0] for prompt in prompts]
    for side in (None, "left", "right"):
        assert tokens(model, prompts, padding_side=side) == alone


def test_rows_survive_when_the_longest_ends_first(tiny_llama: GPT) -> None:
    """omlx#2172: once the only row without padding leaves, the others overwrote live keys."""
    rng = random.Random(0)
    prompts = [[rng.randrange(512) for _ in range(n)] for n in (9, 4, 2)]
    free = tokens(tiny_llama, prompts, max_new_tokens=12)
    stop = next(token for token in free[0] if token not in free[1] + free[2])
    expected = [free[0][: free[0].index(stop)], free[1], free[2]]
    assert len(expected[0]) <= 3
    for side in (None, "left", "right"):
        assert tokens(tiny_llama, prompts, max_new_tokens=12, stop_ids={stop}, padding_side=side) == expected


def test_tensors_and_numpy_integers_are_prompts_and_settings(tiny_llama: GPT) -> None:
    np = pytest.importorskip("numpy")
    expected = tokens(tiny_llama, [[5, 6, 7], [8]])
    assert tokens(tiny_llama, [torch.tensor([5, 6, 7]), np.array([8])], max_new_tokens=np.int64(8)) == expected
    assert tokens(tiny_llama, ((5, 6, 7), (8,)), temperature=np.float32(0), max_batch_size=np.int32(1)) == expected


def test_an_abandoned_job_leaves_nothing_and_two_at_once_are_refused(tiny_llama: GPT) -> None:
    prompts = some_prompts(3)
    first = generate(tiny_llama, prompts, max_new_tokens=8, stop_ids={tokens(tiny_llama, prompts)[0][1]})
    next(first)
    first.close()
    assert tiny_llama.cache_bytes == 0
    stop = tokens(tiny_llama, prompts)[0][1]
    first = generate(tiny_llama, prompts, max_new_tokens=8, stop_ids={stop})
    next(first)
    second = generate(tiny_llama, prompts, max_new_tokens=8, stop_ids={stop})
    next(second)
    with pytest.raises(RuntimeError, match="finish one generate"):
        list(first)
    rows = {row.index: row.tokens for row in second}  # it goes on: the first has not dropped its cache
    assert len(rows) == 2 and tiny_llama.cache_bytes == 0
    assert all(row == tokens(tiny_llama, [prompts[i]], stop_ids={stop})[0] for i, row in rows.items())


# Stops


def test_ended_rows_stay_silent_and_the_loop_stops_with_the_last(tiny_llama: GPT) -> None:
    """onnxruntime#13363: a finished flag was overwritten by the next token that was not EOS."""
    prompts = [[3], [4, 4], [5, 5, 5]]
    script = [[5, 2, 7, 7, 7, 7], [5, 6, 7, 8, 9, 2], [2]]
    model = Scripted(script, prompts)
    assert tokens(model, prompts, max_new_tokens=6, stop_ids={2}) == [[5], [5, 6, 7, 8, 9], []]
    assert model.calls == 5  # and the prefill makes 6
    script[1] = [5, 2, 7, 7, 7, 7]
    model = Scripted(script, prompts)
    assert tokens(model, prompts, max_new_tokens=6, stop_ids={2}) == [[5], [5], []]
    assert model.calls == 1


def test_all_stop_ids_count_and_stops_in_the_prompt_do_not() -> None:
    prompts = [[2, 7, 2], [1]]
    rows = list(generate(Scripted([[4, 7], [4, 2]], prompts), prompts, max_new_tokens=5, stop_ids={2, 7}))
    assert [(row.tokens, row.finish_reason) for row in rows] == [([4], "stop"), ([4], "stop")]


def test_stop_sequences_are_found_after_a_false_start() -> None:
    """litgpt misses the stop [1, 2] in 1, 1, 2."""
    prompts = [[9]]
    rows = list(generate(Scripted([[3, 1, 1, 2, 4]], prompts), prompts, max_new_tokens=5, stop=[[1, 2]]))
    assert (rows[0].tokens, rows[0].finish_reason) == ([3, 1], "stop")


def test_rows_come_as_they_end_and_say_why() -> None:
    prompts = [[3], [4]]
    rows = list(generate(Scripted([[5, 5, 5], [5, 2, 5]], prompts), prompts, max_new_tokens=3, stop_ids={2}))
    assert [(row.index, row.finish_reason) for row in rows] == [(1, "stop"), (0, "length")]


def test_a_row_with_nan_ends_and_harms_no_other(tiny_llama: GPT) -> None:
    prompts = some_prompts(4)
    expected = tokens(tiny_llama, prompts)
    poison = next(t for t in range(512) if all(t not in p for p in prompts) and all(t not in row for row in expected))
    tiny_llama.wte.weight[poison] = float("nan")
    rows = sorted(generate(tiny_llama, [*prompts, [poison, 1]], max_new_tokens=8), key=lambda row: row.index)
    assert [row.tokens for row in rows] == [*expected, []] and rows[4].finish_reason == "nan"


# Limits


def lengths(*sizes: int) -> list[list[int]]:
    return [[1 + i % 500 for i in range(size)] for size in sizes]


@pytest.mark.parametrize(("T", "new"), [(255, 1), (256, 1), (255, 2)])
def test_rows_may_fill_the_context_to_the_last_column(tiny_llama: GPT, T: int, new: int) -> None:
    (row,) = tokens(tiny_llama, lengths(T), max_new_tokens=new)
    assert len(row) == new


@pytest.mark.parametrize(("sizes", "new"), [((256,), 2), ((257,), 1), ((10, 250), 20)])
def test_what_does_not_fit_is_named_before_any_work(tiny_llama: GPT, sizes: tuple, new: int) -> None:
    """gpt-fast#53: a device-side assert. The last new token needs no column."""
    tiny_llama.register_forward_pre_hook(lambda *_: pytest.fail("ran"))
    which = len(sizes) - 1
    with pytest.raises(UserError, match=rf"prompt {which} has {sizes[-1]} tokens and {new} new .* context of 256"):
        generate(tiny_llama, lengths(*sizes), max_new_tokens=new)


def test_a_batch_that_fits_is_not_refused_because_of_rounding(tiny_llama: GPT) -> None:
    rows = tokens(tiny_llama, lengths(250, 10), max_new_tokens=6)
    assert [len(row) for row in rows] == [6, 6]


@pytest.mark.parametrize(
    ("prompts", "settings", "message"),
    [
        ([], {}, "there is no prompt"),
        ([[1], []], {}, "prompt 1 has no tokens"),
        ([[1], [5, 512]], {}, "prompt 1 has the token 512"),
        ([[-1]], {}, "prompt 0 has the token -1"),
        ([[1]], {"max_new_tokens": 0}, "max_new_tokens is 0"),
        ([[1]], {"max_new_tokens": True}, "max_new_tokens is True"),
        ([[1]], {"temperature": -1.0}, "temperature is -1.0"),
        ([[1]], {"temperature": float("nan")}, "temperature is nan"),
        ([[1]], {"top_k": 0}, "top_k is 0"),
        ([[1]], {"top_p": 1.5}, "top_p is 1.5"),
        ([[1]], {"num_samples": 0}, "num_samples is 0"),
        ([[1]], {"min_p": 2}, "min_p is 2"),
        ([[1]], {"repetition_penalty": 0}, "repetition_penalty is 0"),
        ([[1]], {"logit_bias": {600: 1.0}}, "prompt 0 has a logit_bias for token 600"),
        ([[1]], {"logprobs": -1}, "logprobs is -1"),
        ([[1]], {"prefill_budget": 0}, "prefill_budget is 0"),
        ([[1]], {"temperature": [0.5, 0.5]}, "one for each prompt"),
        ([[1]], {"truncate": "right"}, "truncate is 'right'"),
        ([[1]], {"max_batch_size": 0}, "max_batch_size is 0"),
        ([[1]], {"stop": [""]}, "stop 0 is empty"),
        ([[1]], {"stop": "END"}, "stop is 'END'"),
        ([[1]], {"stop": [5]}, "stop 0 is 5"),
        ([[1]], {"stop": None}, "stop is None"),
        ([[1]], {"stop": [["a"]]}, "stop 0 is"),
        ([[1]], {"padding_side": "middle"}, "padding_side is 'middle'"),
        ([[3.7]], {}, "token ids of each prompt"),
        ([1, 2], {}, "token ids of each prompt"),
        (["text"], {}, "token ids of each prompt"),
        ([[1]], {"stop": ["x"]}, "pass tokenizer="),
    ],
)
def test_bad_settings_and_prompts_are_refused_at_once(tiny_llama: GPT, prompts, settings, message) -> None:
    with pytest.raises(UserError, match=message):
        generate(tiny_llama, prompts, **{"max_new_tokens": 2, **settings})


def test_one_token_beside_a_long_row_meets_no_nan(tiny: GPT) -> None:
    prompts = lengths(1, 200)
    assert tokens(tiny, prompts) == [tokens(tiny, [prompt])[0] for prompt in prompts]


def test_stats_count_kept_tokens_and_bytes_per_step() -> None:
    prompts, stats = [[3], [4, 4]], Stats()
    model = Scripted([[5, 2, 7], [5, 6, 7]], prompts)
    tokens(model, prompts, max_new_tokens=3, stop_ids={2}, stats=stats)
    assert (stats.rows, stats.prompt_tokens, stats.new_tokens, stats.steps, stats.live_rows) == (2, 3, 4, 2, 3)
    assert stats.cache_bytes == 2 * 2 * 64 * 8 * 4  # k and v, rows, columns (whole pieces of 64), hs, float32
    columns = (2 + 3) + 4  # what rows at positions 1, 2 see, and then the one at 3, when the other has left
    head = sum(p.nbytes for p in model.parameters()) - model.wte.weight.nbytes
    assert stats.bytes_read == 2 * head + columns * 2 * 8 * 4


# The command line


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A lit folder with a random model and a byte-level tokenizer made here."""
    folder = tmp_path_factory.mktemp("lit")
    save_byte_tokenizer(folder / "source", 300, Path(__file__).read_text())
    save_lit(randomized(llama_config(vocab_size=300)), folder / "model", folder / "source")
    return folder / "model"


def cli(capsys: pytest.CaptureFixture, *args: str) -> tuple[int, str, str]:
    """Exit status, stdout and stderr of the script with these arguments."""
    return run_script(capsys, base.main, *args)


def test_stdout_has_the_texts_in_order_and_nothing_else(checkpoint: Path, tiny_llama: GPT, capsys, tmp_path) -> None:
    numbers = tmp_path / "stats.json"
    arguments = ["--checkpoint_dir", str(checkpoint), "--max_new_tokens", "5", "--ignore_eos", "true"]
    prompts = ["a b c", "", "def test_x():"]
    status, out, err = cli(capsys, *arguments, "--prompts", json.dumps(prompts), "--stats_json", str(numbers))
    model, tokenizer = GPT.from_checkpoint(checkpoint), Tokenizer(checkpoint)
    rows = tokens(model, [tokenizer.encode(p).tolist() for p in prompts], max_new_tokens=5)
    assert status == 0 and out == "".join(tokenizer.decode(row) + "\n" for row in rows)
    assert "decode:" in err and json.loads(numbers.read_text())["new_tokens"] == 15


def test_prompts_come_from_every_source(checkpoint: Path, capsys, tmp_path: Path, monkeypatch) -> None:
    arguments = ["--checkpoint_dir", str(checkpoint), "--max_new_tokens", "4"]
    expected = cli(capsys, *arguments, "--prompts", '["one", "two"]')[1]
    (tmp_path / "p.txt").write_text("one\r\n\ntwo\n")
    (tmp_path / "p.jsonl").write_text('{"prompt": "one", "id": 7}\n{"prompt": "two"}\n')
    for source in ("p.txt", "p.jsonl"):
        assert cli(capsys, *arguments, "--prompts", str(tmp_path / source))[1] == expected
        with (tmp_path / source).open() as stdin:
            monkeypatch.setattr("sys.stdin", stdin)
            assert cli(capsys, *arguments, "--prompts", "-")[1] == expected
    assert cli(capsys, *arguments, "--prompts", "one")[1] + cli(capsys, *arguments, "--prompts", "two")[1] == expected


@pytest.mark.parametrize("precision", ["32-true", "bf16-true", "16-true", "bf16-mixed", "16-mixed"])
def test_every_precision_generates(checkpoint: Path, capsys, precision: str) -> None:
    """lit-llama#468: died at validation, hours into a run, on a cache of another dtype."""
    status, out, err = cli(
        capsys, "--checkpoint_dir", str(checkpoint), "--precision", precision, "--prompts", '["a", "bcd"]'
    )
    assert status == 0 and out.count("\n") >= 2, err
    assert {"bf16-true": "bfloat16", "16-true": "float16"}.get(precision, "float32") in err


def test_texts_on_a_terminal_have_no_raw_control_characters(checkpoint: Path, capsys, monkeypatch) -> None:
    arguments = ["--checkpoint_dir", str(checkpoint), "--max_new_tokens", "200", "--temperature", "5"]
    raw = cli(capsys, *arguments)[1]
    assert any(ord(c) < 32 and c not in "\n\t" for c in raw)  # or the test shows nothing
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    shown = cli(capsys, *arguments)[1]
    assert not any(ord(c) < 32 and c not in "\n\t" for c in shown)


def test_bad_input_is_one_line_and_status_2_before_weights_are_read(checkpoint: Path, capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(GPT, "from_checkpoint", lambda *_: pytest.fail("read the weights"))
    (tmp_path / "bad.jsonl").write_text('{"prompt": "x"}\n{"prompt": \n')
    (tmp_path / "empty").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "other/config.json").write_text('{"model_type": "mamba"}')
    (tmp_path / "other/tokenizer.json").write_text((checkpoint / "tokenizer.json").read_text())
    model = ["--checkpoint_dir", str(checkpoint)]
    for arguments, message in (
        (["--checkpoint_dir", str(tmp_path / "nowhere")], "nowhere does not exist"),
        (["--checkpoint_dir", str(tmp_path / "empty")], "is no checkpoint"),
        (["--checkpoint_dir", str(tmp_path / "other")], "model_type 'mamba' is not supported; supported: "),
        ([*model, "--max_new_tokens", "300"], "exceeds the model's context of 256"),
        ([*model, "--prompts", "[]"], "no prompt"),
        ([*model, "--prompts", str(tmp_path / "none.txt")], "none.txt"),
        ([*model, "--prompts", str(tmp_path / "bad.jsonl")], "line 2 of"),
        ([*model, "--chat", "true"], "no chat template"),
        ([*model, "--top_k", "0"], "top_k is 0"),
        ([*model, "--temprature", "1"], "temprature"),
        ([*model, "--stats", "x"], "stats"),
        ([*model, "--stats_json", str(tmp_path / "none/x.json")], "none/x.json"),
        ([*model, "--prompts", '["a", 1]'], "looks like a JSON list"),
        (["--checkpoint_dir", "x" * 300], "cannot be opened"),
        ([*model, "--max_new_tokens", "many"], "max_new_tokens"),
        ([*model, "--precision", "64-true"], "precision"),
    ):
        status, out, err = cli(capsys, *arguments)
        assert (status, out) == (2, "") and message in err, (arguments, err)
        assert err.startswith("error: ") and err.count("\n") == 1, err


def test_help_lists_every_option(capsys: pytest.CaptureFixture) -> None:
    status, out, _ = cli(capsys, "-h")
    names = (
        "prompts max_new_tokens temperature top_k top_p num_samples seed stop chat padding_side ignore_eos precision"
    )
    assert status == 0 and all(f"--{name} " in out for name in [*names.split(), "max_batch_size", "checkpoint_dir"])
    assert not any(
        f"--{internal}" in out for internal in ("tokenizer", "stats ", "stop_ids", "model", "load", "fabric")
    )


def test_script_runs_from_another_folder_without_being_installed(checkpoint: Path, tmp_path: Path) -> None:
    script = Path(base.__file__)
    command = [sys.executable, str(script), "--checkpoint_dir", str(checkpoint), "--max_new_tokens", "3"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env={"PATH": ""})
    assert done.returncode == 0 and done.stdout, done.stderr


# Goldens of a trained model (float64 numpy and llama2.c)


def test_stories_greedy_tokens_alone_and_as_one_batch(stories: Path) -> None:
    model = GPT.from_checkpoint(stories)
    cases = json.loads((stories / "expected_greedy.json").read_text())["prompts"]
    prompts, expected = [case["ids"] for case in cases], [case["greedy"] for case in cases]
    assert len(cases) == 28
    assert tokens(model, prompts, max_new_tokens=64) == expected
    assert tokens(model, prompts, max_new_tokens=64, padding_side="left") == expected
    assert [tokens(model, [prompt], max_new_tokens=64)[0] for prompt in prompts] == expected


def test_stories_stop_at_the_end_token(stories: Path) -> None:
    cases = json.loads((stories / "expected_stop.json").read_text())["prompts"]
    prompts = [case["ids"] for case in cases]
    new = 513 - max(map(len, prompts))
    rows = tokens(GPT.from_checkpoint(stories), prompts, max_new_tokens=new, stop_ids={1})
    assert rows == [case["greedy"] for case in cases]
    assert len({len(row) for row in rows}) > 3


def test_stories_text_of_llama2c(stories: Path) -> None:
    expected = (stories / "expected_llama2c_200.txt").read_bytes().decode()
    tokenizer = Tokenizer(stories)
    rows = list(generate(GPT.from_checkpoint(stories), [[1]], max_new_tokens=200, tokenizer=tokenizer))
    assert rows[0].text == expected
