"""Claims of lit_gen/prompts.py, prompt_lines.py and result_lines.py: what is read and when, what is refused and by
which name, what it is encoded to, and what is written about it."""

import hashlib
import io
import json
import os
import sys
import threading
from pathlib import Path
from random import Random

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from lit_gen.prompt_lines import OpenAIRequest, Prompt, load_object
from lit_gen.prompts import digest_prompts, encode_prompt, is_stream, read_prompts
from lit_gen.result_lines import result_lines
from lit_gen.settings import Settings
from lit_gen.stopping import Row
from lit_gen.tokenizer import Tokenizer
from lit_gen.utils import UserError, printable

CHATML = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]"


@pytest.fixture(scope="module")
def make_tokenizer(tmp_path_factory):
    """Writes a tiny byte-level tokenizer; config overrides entries of its tokenizer_config.json."""
    lib = tokenizers.Tokenizer(models.BPE())
    lib.pre_tokenizer, lib.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(special_tokens=["<s>", "</s>"], initial_alphabet=alphabet, show_progress=False)
    lib.train_from_iterator(["hello hello world world"], trainer)

    def make(**config) -> Tokenizer:
        folder = tmp_path_factory.mktemp("tokenizer")
        lib.save(str(folder / "tokenizer.json"))
        full = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": CHATML} | config
        entries = {key: value for key, value in full.items() if value is not None}
        (folder / "tokenizer_config.json").write_text(json.dumps(entries))
        return Tokenizer(folder)

    return make


@pytest.fixture(scope="module")
def tokenizer(make_tokenizer):
    return make_tokenizer()


def write(folder: Path, name: str, content: bytes | str) -> str:
    path = folder / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return str(path)


def read(prompts) -> list[Prompt]:
    """Prompts of which none may have an error."""
    found = list(read_prompts(prompts))
    if errors := [prompt.error for prompt in found if prompt.error is not None]:
        raise UserError(errors[0])
    return found


def read_line(folder: Path, line: bytes | str) -> Prompt:
    """The only prompt of a .jsonl file."""
    [prompt] = read_prompts(write(folder, "in.jsonl", line))
    return prompt


def texts(prompts: list[Prompt]) -> list[str | None]:
    return [prompt.text for prompt in prompts]


def encode(prompts, tokenizer, *, chat=False) -> list[list[int]]:
    return [encode_prompt(prompt, tokenizer, chat=chat) for prompt in read(prompts)]


def test_text_and_list_are_prompts():
    assert read("a") == read(["a"]) == [Prompt(text="a", where="prompt 0", index=0)]
    assert texts(read(["", "   ", "a\nb", "x.txt", "-"])) == ["", "   ", "a\nb", "x.txt", "-"]
    assert [(prompt.where, prompt.index) for prompt in read(["a", "b"])] == [("prompt 0", 0), ("prompt 1", 1)]
    assert texts(read("two\nlines")) == ["two\nlines"]
    with pytest.raises(UserError, match="looks like a JSON list"):
        read_prompts('["a", "b')


def test_text_file_is_a_prompt_a_line(tmp_path):
    path = write(tmp_path, "in.txt", "\ufeffone\r\n\n  two \u2028 \x0b\r same \t\n \u3000 \r\n{not json}\nlast")
    prompts = read(path)
    assert texts(prompts) == ["one", "  two \u2028 \x0b\r same \t", "{not json}", "last"]
    assert [prompt.where for prompt in prompts] == [f"line {n} of {path}" for n in (1, 3, 5, 6)]
    assert [prompt.index for prompt in prompts] == [0, 1, 2, 3]


def test_jsonl_file(tmp_path):
    messages = [{"role": "system", "content": "é"}, {"role": "user", "content": "Hi", "name": "x"}]
    lines = [{"prompt": "a\nb"}, {"prompt": "", "id": 7}, {"messages": messages, "id": "7"}, {"prompt": [5, 0, 5]}]
    content = "\ufeff" + "\r\n".join(json.dumps(line, ensure_ascii=False) for line in lines[:2])
    path = write(tmp_path, "in.jsonl", content + "\n\n  \n" + json.dumps(lines[2]) + "\n" + json.dumps(lines[3]))
    assert read(path) == [
        Prompt(text="a\nb", where=f"line 1 of {path}", index=0),
        Prompt(text="", id=7, where=f"line 2 of {path}", index=1),
        Prompt(messages=messages, id="7", where=f"line 5 of {path}", index=2),
        Prompt(ids=[5, 0, 5], where=f"line 6 of {path}", index=3),
    ]


def test_settings_of_a_line(tmp_path):
    """Every setting may stand in a line; null is as if it were left out, and a single stop becomes a list."""
    settings = {"max_new_tokens": 3, "temperature": 0.5, "top_k": 4, "top_p": 0.9, "min_p": 0.1, "seed": -1, "n": 2}
    settings |= {"repetition_penalty": 1.1, "presence_penalty": -0.5, "frequency_penalty": 1, "logprobs": 0}
    settings |= {"logit_bias": {"7": -100}, "stop": ["a", [1, 2]]}
    assert read_line(tmp_path, json.dumps({"prompt": "a"} | settings)).settings == settings
    assert read_line(tmp_path, '{"prompt": "a", "stop": "END"}').settings == {"stop": ["END"]}
    nulls = json.dumps({"prompt": "a"} | dict.fromkeys(settings) | {"n": 3})
    assert read_line(tmp_path, nulls).settings == {"n": 3}


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"one\n\ntwo {\n", [("one", "line 1 of stdin"), ("two {", "line 3 of stdin")]),
        (b'\n \n {"prompt": "one"}\n{"prompt": "two"}', [("one", "line 3 of stdin"), ("two", "line 4 of stdin")]),
        (b'\xef\xbb\xbf{"prompt": "one"}', [("one", "line 1 of stdin")]),
        (b'["one"]', [('["one"]', "line 1 of stdin")]),
    ],
)
def test_stdin_is_lines_or_jsonl(monkeypatch, content, expected):
    stdin = io.TextIOWrapper(io.BytesIO(content))
    monkeypatch.setattr(sys, "stdin", stdin)
    assert [(prompt.text, prompt.where) for prompt in read("-")] == expected
    assert not stdin.buffer.closed


def test_a_line_is_read_when_it_is_asked_for(tmp_path):
    """The writer of a pipe sends a line only when it is asked for, so reading ahead would find no third line."""
    path = str(tmp_path / "pipe.jsonl")
    os.mkfifo(path)
    asked = threading.Semaphore(0)

    def send() -> None:
        with open(path, "wb", buffering=0) as pipe:
            for line in (b'{"prompt": "one"}\n', b"broken\n", b'{"prompt": "two"}'):
                assert asked.acquire(timeout=5)
                pipe.write(line)

    writer = threading.Thread(target=send, daemon=True)
    writer.start()
    prompts, got = read_prompts(path), []
    for _ in range(3):
        asked.release()
        prompt = next(prompts)
        got.append((prompt.text, prompt.error is not None))
        assert writer.is_alive() or len(got) == 3
    writer.join()
    assert got == [("one", False), (None, True), ("two", False)] and list(prompts) == []


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"prompt": "a"', "not valid JSON: .* at column"),
        (b"hello", "not valid JSON"),
        (b"['a']", "not valid JSON"),
        (b'\xef\xbb\xbf{"prompt": "a"}', "not valid JSON: Unexpected UTF-8 BOM"),
        (b'{"prompt": "a"}{"prompt": "b"}', "not valid JSON: Extra data"),
        (b'{"prompt": "a\tb"}', "not valid JSON: Invalid control character"),
        (b'{"prompt": "\xff"}', r"not UTF-8 \(byte 13 of the line\)"),
        (b'{"prompt": "\xed\xa0\x80"}', r"not UTF-8 \(byte 13"),
        (b"[" * 100_000, "not acceptable JSON: brackets nest"),
        (b'{"prompt": ' + b"[" * 300 + b"]" * 300 + b"}", "not acceptable JSON: brackets nest"),
        (b'{"prompt": "a", "id": ' + b"1" * 5000 + b"}", "the number 1{20} is too large"),
        (b'{"prompt": "a", "temperature": 1e999}', "the number 1e999 is too large"),
        (b'{"prompt": "a", "temperature": 1' + b"0" * 400 + b"}", "the number 10{19} is too large"),
        (b'{"prompt": "a", "temperature": NaN}', "the number NaN is .*no number in JSON"),
        (b'{"messages": [{"role": "user", "content": "a", "x": -Infinity}]}', "the number -Infinity is"),
        (b'["a"]', "holds a list, but must be an object"),
        (b'"a"', "holds a str"),
        (b"null", "holds a NoneType"),
        (b"NaN", "holds a NoneType"),
        (b"{}", "must have either"),
        (b'{"id": 1}', "must have either"),
        (b'{"prompt": "a", "messages": [{"role": "user", "content": "a"}]}', "must have either"),
        (b'{"prompt": "a", "max_new_token": 3}', "unknown key 'max_new_token'"),
        (b'{"prompt": "a", "x\\ny": 3}', r"unknown key 'x\\ny'"),
        (b'{"prompt": "a", "prompt": "b"}', "two keys of an object are 'prompt'"),
        (b'{"messages": [{"role": "user", "x": 1, "content": "a", "x": 2}]}', "two keys of an object are 'x'"),
        (b'{"prompt": null}', "prompt is None"),
        (b'{"prompt": ["a"]}', r"prompt is \['a'\]"),
        (b'{"prompt": []}', r"prompt is \[\]"),
        (b'{"prompt": [1, true]}', r"prompt is \[1, True\]"),
        (b'{"prompt": [1, 2.0]}', r"prompt is \[1, 2.0\]"),
        (b'{"prompt": [1, -1]}', r"prompt is \[1, -1\]"),
        (b'{"prompt": 1}', "prompt is 1"),
        (b'{"prompt": "a", "id": 1.5}', "id is 1.5"),
        (b'{"prompt": "a", "id": true}', "id is True"),
        (b'{"prompt": "a", "id": null}', "id is None"),
        (b'{"prompt": "a \\ud800 b"}', "half of a surrogate pair"),
        (b'{"prompt": "a", "id": "\\udfff"}', "half of a surrogate pair"),
        (b'{"prompt": "a", "stop": "\\udfff"}', "half of a surrogate pair"),
        (b'{"messages": [{"role": "user", "content": "\\ud83d"}]}', "half of a surrogate pair"),
        (b'{"messages": []}', "at least one message"),
        (b'{"messages": null}', "must be a list"),
        (b'{"messages": "Hi"}', "must be a list"),
        (b'{"messages": ["Hi"]}', "message 0 must be an object"),
        (b'{"messages": [{"role": "user", "content": "a"}, {"role": "user"}]}', "message 1 must be"),
        (b'{"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}]}', "strings role and content"),
        (b'{"prompt": "a", "max_new_tokens": 0}', "max_new_tokens is 0"),
        (b'{"prompt": "a", "max_new_tokens": 2.5}', "max_new_tokens is 2.5"),
        (b'{"prompt": "a", "temperature": true}', "temperature is True"),
        (b'{"prompt": "a", "temperature": "hot"}', "temperature is 'hot'"),
        (b'{"prompt": "a", "top_p": 1.5}', "top_p is 1.5"),
        (b'{"prompt": "a", "stop": ["b", ""]}', "stop 1 is empty"),
        (b'{"prompt": "a", "stop": 5}', "stop is 5"),
        (b'{"prompt": "a", "logit_bias": {"x": 1}}', "logit_bias has the key 'x'"),
        (b'{"prompt": "a", "n": false}', "n is False"),
    ],
)
def test_malformed_line_is_one_error_and_harms_no_other(tmp_path, line, message):
    path = write(tmp_path, "in.jsonl", b'{"prompt": "good"}\n\n' + line + b'\n{"prompt": "good"}\n')
    first, bad, last = read_prompts(path)
    assert (first.text, first.error, last.text, last.error) == ("good", None, "good", None)
    assert bad.text is bad.messages is bad.ids is None and bad.settings == {} and bad.index == 1 and last.index == 2
    assert bad.error.startswith(f"line 3 of {path}: ")
    assert "\n" not in bad.error and bad.error.isprintable() and len(bad.error) < len(path) + 300
    with pytest.raises(UserError, match=message) as error:
        read(path)
    assert str(error.value) == bad.error


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ('{"prompt": "a", "id": "x", "n": 0}', "x"),
        ('{"prompt": "a", "id": 7, "top_p": NaN}', 7),
        ('{"prompt": "a", "prompt": "b", "id": 7}', 7),
        ('{"prompt": "\\ud800", "id": "x"}', "x"),
        ('{"prompt": "a", "id": "\\ud800"}', None),
        ('{"prompt": "a", "id": 1e999}', None),
        ('{"id": "x"', None),
    ],
)
def test_error_keeps_an_id_that_can_be_read(tmp_path, line, expected):
    prompt = read_line(tmp_path, line)
    assert prompt.error is not None and prompt.id == expected


def test_no_damage_to_a_line_raises(tokenizer, tmp_path):
    """Bytes changed, cut out and put in: each line is a prompt or an error, and both can be written as JSON."""
    random, lines = Random(0), []
    whole = [
        b'{"prompt": "a\\u00e9\\n", "id": "%d", "stop": ["b"], "temperature": 0.5, "n": 2, "logit_bias": {"3": 1}}',
        b'{"messages": [{"role": "user", "content": "\xc3\xa9"}], "id": %d, "seed": null, "logprobs": 3}',
        b'{"custom_id": "r%d", "url": "/v1/completions", "body": {"prompt": [1, 2], "top_k": -1, "max_tokens": 3}}',
    ]
    pieces = rb'" { ] , \ud800 e999 NaN true null - 0'.split() + [b"", b"\xff", b"\x00", b"\r", b"9" * 400]
    for number in range(3000):
        line = random.choice(whole) % number
        for _ in range(random.randint(1, 3)):
            start, length = random.randrange(len(line)), random.choice([0, 1, 1, 4])
            line = line[:start] + random.choice(pieces) + line[start + length :]
        lines.append(line)
    prompts = list(read_prompts(write(tmp_path, "in.jsonl", b"\n".join(lines))))
    assert [prompt.index for prompt in prompts] == list(range(3000))
    assert 100 < sum(prompt.error is None for prompt in prompts) < 2900
    for prompt in prompts:
        content = [value is not None for value in (prompt.text, prompt.messages, prompt.ids, prompt.error)]
        assert sum(content) == 1 and (prompt.error is None or prompt.error.isprintable())
        for line in dumped(result_lines(prompt, [row()], tokenizer)):
            line.encode()


def test_numbers_are_read_exactly(tmp_path):
    data, problem = load_object(b'{"a": 9007199254740993, "b": -12, "c": 0.1, "d": 1E2, "e": -0.0, "f": 1e-999}')
    assert repr(data) == "{'a': 9007199254740993, 'b': -12, 'c': 0.1, 'd': 100.0, 'e': -0.0, 'f': 0.0}"
    assert problem is None


def test_bytes_that_are_not_utf8_in_a_text_file(tmp_path):
    path = write(tmp_path, "in.txt", b"caf\xc3\xa9\nca\xe9\nlast\xff")
    first, second, third = read_prompts(path)
    assert first.text == "café" and second.text is third.text is None
    assert second.error == f"line 2 of {path}: not UTF-8 (byte 3 of the line): save the file as UTF-8"
    assert "(byte 5 of the line)" in third.error


def test_surrogate_of_an_argument_is_named():
    """What Python makes of an argument that is not UTF-8."""
    first, second, third = read_prompts(["a", b"caf\xe9".decode("utf-8", "surrogateescape"), "c"])
    assert (first.text, second.text, third.text) == ("a", None, "c")
    assert second.error == "prompt 1: holds half of a surrogate pair ('\\udce9'), which is no character"


def test_error_of_a_file_whose_name_is_no_text_is_text(tmp_path):
    path = os.fsdecode(os.fsencode(tmp_path) + b"/\xe9\n.jsonl")
    Path(path).write_bytes(b"{}")
    [prompt] = read_prompts(path)
    assert prompt.error.isprintable() and "\\udce9\\n.jsonl" in prompt.error


def test_id_given_twice(tmp_path):
    ids = ['"x"', "1", '"1"', '"x"', "1", '"y"']
    path = write(tmp_path, "in.jsonl", "\n".join(f'{{"prompt": "a", "id": {name}}}' for name in ids))
    prompts = list(read_prompts(path))
    assert [prompt.error is not None for prompt in prompts] == [False, False, False, True, True, False]
    assert prompts[3].error == f"line 4 of {path}: an earlier line has the id 'x' too: ids must differ"
    assert [prompt.id for prompt in prompts] == ["x", 1, "1", "x", 1, "y"]


def test_files_that_cannot_be_read(tmp_path):
    """At the call, not when the first prompt is asked for."""
    (tmp_path / "folder.jsonl").mkdir()
    cases = {"missing.txt": "No such file", "folder.jsonl": "Is a directory"}
    for name, reason in cases.items():
        for function in (read_prompts, digest_prompts):
            with pytest.raises(UserError, match=f"^cannot read the prompts file .*{reason}"):
                function(str(tmp_path / name))
    secret = write(tmp_path, "secret.txt", "a")
    os.chmod(secret, 0)
    if not os.access(secret, os.R_OK):  # root reads everything
        with pytest.raises(UserError, match="Permission denied"):
            read_prompts(secret)


def test_a_file_of_another_kind_is_no_prompt(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("in.json", "in.TXT", "notes"):
        write(tmp_path, name, "hello\n")
        for function in (read_prompts, digest_prompts):
            with pytest.raises(UserError, match=rf"--prompts is the file '{name}', .* end in \.txt or \.jsonl"):
                function(name)
    (tmp_path / "folder").mkdir()
    for text in ("folder", "in.json ", "x" * 9999, "a\0b", "\ud800"):
        assert len(list(read_prompts(text))) == digest_prompts(text)[1] == 1
    assert texts(read(["in.json"])) == ["in.json"]
    (tmp_path / "null.txt").symlink_to("/dev/null")
    for name in ("null.txt", "/dev/null"):
        with pytest.raises(UserError, match="is a device or a socket|is the file"):
            read_prompts(name)


@pytest.mark.parametrize(
    ("content", "expected"), [(b"one\n{two\n", ["one", "{two"]), (b'{"prompt": "one"}\n', ["one"])]
)
def test_a_pipe_of_any_name_is_read_once_as_stdin_is(content, expected):
    """Process substitution of a shell, <(...), gives such a name."""
    out, into = os.pipe()
    os.write(into, content)
    os.close(into)
    name = f"/dev/fd/{out}"
    assert is_stream(name) and is_stream("-") and not is_stream("one") and not is_stream([name])
    assert texts(read(name)) == expected
    os.close(out)


def test_no_prompt_at_all(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\n")))
    for prompts, source in (([], "the list"), ("-", "stdin"), (write(tmp_path, "in.txt", b"\n \r\n"), "in.txt")):
        found = read_prompts(prompts)
        with pytest.raises(UserError, match=f"no prompt in .*{source}: give at least one"):
            next(found)
    with pytest.raises(UserError, match="no prompt in .*empty.jsonl"):
        read(write(tmp_path, "empty.jsonl", b"\xef\xbb\xbf"))
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(UserError, match="stdin is closed"):
        read_prompts("-")


@pytest.mark.parametrize(
    "content",
    [b"", b"a", b"a\n\nb\n", b"\xef\xbb\xbf\n \r\n", "\u3000\n\x1c\n\xa0\nx".encode(), b"\xff\n\xff \n\n", b"{\n" * 9],
)
def test_digest_is_of_the_bytes_and_counts_what_is_read(tmp_path, content):
    for name in ("in.txt", "in.jsonl"):
        path = write(tmp_path, name, content)
        try:
            count = sum(1 for _ in read_prompts(path))
        except UserError:
            count = 0
        assert digest_prompts(path) == (hashlib.sha256(content).hexdigest(), count)


def test_digest_of_texts():
    """The sha256 of the JSON: of '["a", "b"]' by coreutils."""
    assert digest_prompts(["a", "b"]) == ("3554d2b8a1e34099053865de8576d1460b807430ec8c6b85315c9607ba93d308", 2)
    assert digest_prompts("a") == digest_prompts(["a"]) and digest_prompts("a")[1] == 1
    different = [["ab"], ["a", "b"], ["b", "a"], ["a", "b", ""], ["\udce9"], []]
    assert len({digest_prompts(texts) for texts in different}) == len(different)


def row(sample: int = 0, *, text: str = "é", **changes) -> Row:
    """A finished row with this text."""
    made = Row(0, [5, 6], Settings(), sample=sample)
    made.tokens, made._shown, made.finish_reason = [1, 2], [text], "stop"
    for name, value in changes.items():
        setattr(made, name, value)
    return made


def dumped(lines: list[dict]) -> list[str]:
    return [json.dumps(line, ensure_ascii=False, allow_nan=False) for line in lines]


def test_result_lines(tokenizer, tmp_path):
    plain = read(["Hi"])[0]
    assert dumped(result_lines(plain, [row()], tokenizer)) == [
        '{"index": 0, "id": 0, "prompt": "Hi", "text": "é", "token_ids": [1, 2], "finish_reason": "stop"}'
    ]
    ids = read_line(tmp_path, '{"prompt": [5, 6], "id": "x"}')
    broken = row(1, text="b", finish_reason="nan", settings=Settings(n=2))
    refused = row(0, text="a", finish_reason="error", tokens=[], error="no room", settings=Settings(n=2))
    rows = [broken, refused]
    assert dumped(result_lines(ids, rows, tokenizer)) == [
        '{"index": 0, "id": "x", "sample": 0, "prompt": [5, 6], "finish_reason": "error", "error": "no room"}',
        '{"index": 0, "id": "x", "sample": 1, "prompt": [5, 6], "text": "b", "token_ids": [1, 2], '
        '"finish_reason": "nan", "error": "the model gave a number that is not finite, so no next token could be '
        'chosen"}',
    ]
    messages = [{"role": "user", "content": ""}]
    conversation = read_line(tmp_path, json.dumps({"messages": messages}))
    assert result_lines(conversation, [row()], tokenizer)[0]["prompt"] == messages
    assert result_lines(read([""])[0], [row()], tokenizer)[0]["prompt"] == ""


def test_result_line_of_an_error(tokenizer, tmp_path):
    prompts = list(read_prompts(write(tmp_path, "in.jsonl", '{"prompt": "a"}\n{"prompt": "a", "id": "x", "n": 0}\n{')))
    assert dumped(result_lines(prompts[1], [row(finish_reason="error")], tokenizer)) == dumped(
        [{"index": 1, "id": "x", "finish_reason": "error", "error": prompts[1].error}]
    )
    assert result_lines(prompts[2], [], tokenizer)[0]["id"] == 2


def test_logprobs_of_a_result_line_are_json(tokenizer):
    """A token that cannot be has the log-probability -inf, which JSON does not have."""
    logprobs = [(-0.5, [(1, -0.5), (9, -1.5)]), (-2.0, [(3, float("-inf")), (4, float("nan"))])]
    [line] = result_lines(read(["a"])[0], [row(logprobs=logprobs)], tokenizer)
    assert dumped([line["logprobs"]]) == [
        '[{"id": 1, "logprob": -0.5, "top": [[1, -0.5], [9, -1.5]]}, '
        '{"id": 2, "logprob": -2.0, "top": [[3, -9999.0], [4, -9999.0]]}]'
    ]
    assert result_lines(read(["a"])[0], [row(tokens=[], logprobs=[])], tokenizer)[0]["logprobs"] == []


def test_given_ids_are_used_as_they_are(tokenizer, tmp_path):
    ids = [0, 0, 1, 999_999]
    path = write(tmp_path, "in.jsonl", json.dumps({"prompt": ids}))
    assert encode(path, tokenizer, chat=False) == encode(path, tokenizer, chat=True) == [ids]


def test_text_for_completions_is_never_rendered_as_chat(tokenizer):
    request = OpenAIRequest("x", chat=False, model="m")
    prompt = Prompt(text="hello", where="line 1 of x", index=0, openai=request)
    assert encode_prompt(prompt, tokenizer, chat=True) == tokenizer.encode("hello").tolist()


def test_prompts_become_ids(tokenizer):
    prompts = ["hello world", "x", "   "]
    encoded = encode(prompts, tokenizer)
    assert encoded == [tokenizer.encode(text).tolist() for text in prompts]
    assert all(type(token) is int for ids in encoded for token in ids)
    assert [tokenizer.decode(ids) for ids in encoded] == prompts


def test_chat_renders_texts_and_messages(tokenizer, tmp_path):
    """A text is one message of the user with chat, and stays as it is without; messages are always rendered."""
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    path = write(tmp_path, "in.jsonl", json.dumps({"prompt": "hello"}) + "\n" + json.dumps({"messages": messages}))
    rendered = {chat: [tokenizer.decode(ids) for ids in encode(path, tokenizer, chat=chat)] for chat in (False, True)}
    assert rendered[False] == ["hello", "[system]s[user]u[assistant]"]
    assert rendered[True] == ["[user]hello[assistant]", "[system]s[user]u[assistant]"]


def test_template_error_names_the_prompt(make_tokenizer):
    with pytest.raises(UserError, match="^prompt 0: this checkpoint has no chat template"):
        encode(["a"], make_tokenizer(chat_template=None), chat=True)
    template = "{% if messages[0].content == 'b' %}{{ raise_exception('no b') }}{% endif %}x"
    with pytest.raises(UserError, match="^prompt 1: .*no b"):
        encode(["a", "b"], make_tokenizer(chat_template=template), chat=True)


def test_empty_prompt_becomes_bos_or_eos(make_tokenizer):
    bos, eos = 0, 1
    hello = make_tokenizer().encode("hello").tolist()
    assert encode(["", "hello"], make_tokenizer()) == [[bos], hello]
    assert encode(["hello", ""], make_tokenizer(bos_token=None)) == [hello, [eos]]
    with pytest.raises(UserError, match="^prompt 1 has no tokens"):
        encode(["hello", ""], make_tokenizer(bos_token=None, eos_token=None))


def test_printable_leaves_nothing_that_steers_a_terminal():
    assert printable("a\n\tb \\ é 漢 \U0001f600 \ufffd") == "a\n\tb \\ é 漢 \U0001f600 \ufffd"
    assert printable("\x1b[31mred\x1b]0;title\x07\r\x00") == r"\x1b[31mred\x1b]0;title\x07\r\x00"
    assert printable("\x7f\x80\x9b\x9f\xa0") == "\\x7f\\x80\\x9b\\x9f\xa0"
    assert printable("\u202eabc\u2066\u2069\u200f\ud800") == r"\u202eabc\u2066\u2069\u200f\ud800"
    kept = [c for c in map(chr, range(0x300)) if printable(c) == c]
    assert kept == [c for c in map(chr, range(0x300)) if c in "\n\t" or ord(c) >= 0x20 and not 0x7F <= ord(c) <= 0x9F]
