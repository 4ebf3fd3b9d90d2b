"""Training rows: the ids that a prompt will have, the response and its end to be learnt, batches that can go on."""

import json
from itertools import islice
from pathlib import Path

import pytest
import torch
from conftest import save_byte_tokenizer

from lit_gen.examples import Batches, Example, collate, read_examples
from lit_gen.tokenizer import Tokenizer
from lit_gen.utils import UserError

TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def make(folder: Path, template: str | None = None, text: str = "", **config: str) -> Tokenizer:
    save_byte_tokenizer(folder, 300, text or Path(__file__).read_text(), **config)
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return Tokenizer(folder)


def write(folder: Path, *rows: object) -> Path:
    file = folder / "rows.jsonl"
    file.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return file


def test_the_response_and_the_end_token_are_learnt_and_nothing_else(tmp_path: Path) -> None:
    tokenizer = make(tmp_path)
    rows = [{"prompt": "ab", "response": "cde"}, {"prompt": "a longer prompt", "response": "x", "category": "other"}]
    examples = read_examples(write(tmp_path, rows[0], "", rows[1]), tokenizer, 100)
    for row, (tokens, start) in zip(rows, examples, strict=True):
        assert tokens[:start] == tokenizer.encode(row["prompt"]).tolist()  # with BOS, as at generation
        assert tokenizer.decode(tokens[start:-1]) == row["response"] and tokens[-1] == tokenizer.eos_id
    idx, target = collate(examples)
    assert idx.shape == target.shape == (2, max(len(e.tokens) for e in examples))
    for (tokens, start), x, y in zip(examples, idx.tolist(), target.tolist(), strict=True):
        n = len(tokens)
        assert x[:n] == tokens and y == [-100] * (start - 1) + tokens[start:] + [-100] * (len(y) - n + 1)


def test_by_hand() -> None:
    idx, target = collate([Example([5, 6, 7, 2], 2), Example([9, 2], 1)])
    assert idx[0].tolist() == [5, 6, 7, 2] and idx[1, :2].tolist() == [9, 2]
    assert target.tolist() == [[-100, 7, 2, -100], [2, -100, -100, -100]]


def test_a_prompt_keeps_its_ids_where_the_whole_text_would_merge_across_the_border(tmp_path: Path) -> None:
    tokenizer = make(tmp_path, text="th " * 50)
    assert len(tokenizer.encode("th").tolist()) == 2  # BOS, th
    (example,) = read_examples(write(tmp_path, {"prompt": "t", "response": "h"}), tokenizer, 100)
    assert example.tokens[: example.start] == tokenizer.encode("t").tolist() and example.start == 2
    assert tokenizer.decode(example.tokens[2:-1]) == "h"


@pytest.mark.parametrize("chat", [None, True, False])
def test_prompts_are_put_into_the_chat_template(tmp_path: Path, chat: bool | None) -> None:
    tokenizer = make(tmp_path, TEMPLATE)
    file = write(tmp_path, {"prompt": "hi", "response": "you"})
    (example,) = read_examples(file, tokenizer, 100, chat)
    plain = tokenizer.encode("hi").tolist()
    in_chat = tokenizer.encode_chat([{"role": "user", "content": "hi"}]).tolist()
    assert example.tokens[: example.start] == (plain if chat is False else in_chat)
    assert tokenizer.decode(example.tokens[example.start : -1]) == "you"
    assert example.tokens[-1] == tokenizer.eos_id and example.tokens[example.start :].count(tokenizer.eos_id) == 1


def test_messages_may_have_several_turns_of_which_the_last_is_learnt(tmp_path: Path) -> None:
    tokenizer = make(tmp_path, TEMPLATE)
    messages = [{"role": role, "content": f"{role} {i}"} for i, role in enumerate(("system", "user", "assistant"))]
    messages += [{"role": "user", "content": "and?"}, {"role": "assistant", "content": "so it is"}]
    (example,) = read_examples(write(tmp_path, {"messages": messages}), tokenizer, 200)
    assert example.tokens[: example.start] == tokenizer.encode_chat(messages[:-1]).tolist()
    assert tokenizer.decode(example.tokens[example.start :]) == "so it is"


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("{", "line 2: it is not JSON"),
        ("[" * 100_000, "line 2: it is not JSON"),
        ('"text"', "line 2: it is no object"),
        ({"prompt": "a"}, "line 2: it has no prompt, or no response"),
        ({"prompt": "a", "response": " "}, "no response that is a text and not empty"),
        ({"prompt": 3, "response": "b"}, "it has no prompt"),
        ({"prompt": "a", "response": ["b"]}, "no response that is a text"),
        ({"prompt": "\ud800", "response": "b"}, "not valid Unicode"),
        ({"messages": [{"role": "assistant", "content": "b"}]}, "must be a list that ends with"),
        ({"messages": [{"role": "user", "content": "b"}] * 2}, "must be a list that ends with"),
        ({"messages": "hello"}, "must be a list that ends with"),
        ({"messages": [3, {"role": "assistant", "content": "b"}]}, "messages must be a list like"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, row: object, message: str) -> None:
    tokenizer = make(tmp_path, TEMPLATE)
    with pytest.raises(UserError, match=message) as error:
        read_examples(write(tmp_path, {"prompt": "a", "response": "b"}, row), tokenizer, 100)
    assert "\n" not in str(error.value) and len(str(error.value)) < 400


def test_messages_need_a_template_that_only_adds(tmp_path: Path) -> None:
    messages = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    with pytest.raises(UserError, match="line 1: this checkpoint has no chat template"):
        read_examples(write(tmp_path, messages), make(tmp_path), 100)
    with pytest.raises(UserError, match="line 1: the chat template writes another prompt"):
        read_examples(write(tmp_path, messages), make(tmp_path, "{{ messages | length }}" + TEMPLATE), 100)


def test_long_rows_are_left_out_and_counted(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    tokenizer = make(tmp_path)
    file = write(tmp_path, *({"prompt": "a", "response": "z" * n} for n in (1, 40, 2)))
    assert len(read_examples(file, tokenizer, 30)) == 2
    assert "1 of 3 rows have more than 30 tokens" in capsys.readouterr().err
    with pytest.raises(UserError, match="every line has more than 3 tokens: raise --max_length"):
        read_examples(file, tokenizer, 3)
    for content in ("", "\n \n"):
        file.write_text(content)
        with pytest.raises(UserError, match="no line is there"):
            read_examples(file, tokenizer, 3)
    with pytest.raises(UserError, match="cannot read .*none.jsonl"):
        read_examples(tmp_path / "none.jsonl", tokenizer, 3)


def test_batches_are_all_rows_in_another_order_in_each_epoch_and_go_on() -> None:
    examples = [Example([i + 1, 2], 1) for i in range(11)]

    def rows(batches: Batches) -> list[list[int]]:
        return [idx[:, 0].tolist() for idx, _ in batches]

    batches = Batches(examples, 4, seed=3)
    first, second = rows(batches), rows(batches)
    assert [len(batch) for batch in first] == [4, 4, 3] and len(batches) == 3
    assert sorted(sum(first, [])) == sorted(sum(second, [])) == list(range(1, 12)) and first != second
    assert rows(Batches(examples, 4, seed=3)) == first != rows(Batches(examples, 4, seed=4))
    unfinished = Batches(examples, 4, seed=3)  # as Lightning does, which knows how many there are
    assert [[idx[:, 0].tolist() for idx, _ in islice(unfinished, 3)] for _ in range(2)] == [first, second]
    interrupted = Batches(examples, 4, seed=3)
    rows(interrupted)
    some = iter(interrupted)
    assert next(some)[0][:, 0].tolist() == second[0]
    resumed = Batches(examples, 4, seed=3)
    resumed.load_state_dict(json.loads(json.dumps(interrupted.state_dict())))
    assert rows(resumed) == second[1:] and rows(resumed) != second
    assert torch.equal(collate(examples[:2])[1], torch.tensor([[2, -100], [2, -100]]))
