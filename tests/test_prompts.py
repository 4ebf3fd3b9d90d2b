"""Claims of lit_gen/prompts.py: what is read, what is refused and by which name, and what it is encoded to."""

import io
import json
import os
import sys
from pathlib import Path

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from lit_gen.prompts import Prompt, encode_prompts, printable, read_prompts
from lit_gen.tokenizer import Tokenizer
from lit_gen.utils import UserError

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


def texts(prompts: list[Prompt]) -> list[str | None]:
    return [prompt.text for prompt in prompts]


def encode(prompts, tokenizer, *, chat=False) -> list[list[int]]:
    return encode_prompts(read_prompts(prompts), tokenizer, chat=chat)


def test_text_and_list_are_prompts():
    assert read_prompts("a") == read_prompts(["a"]) == [Prompt("a", None, None, "prompt 0")]
    assert texts(read_prompts(["", "   ", "a\nb", "x.txt", "-"])) == ["", "   ", "a\nb", "x.txt", "-"]
    assert [prompt.where for prompt in read_prompts(["a", "b"])] == ["prompt 0", "prompt 1"]
    assert texts(read_prompts("two\nlines")) == ["two\nlines"]


def test_text_file_is_a_prompt_a_line(tmp_path):
    path = write(tmp_path, "in.txt", "\ufeffone\r\n\n  two \u2028 \x0b\r same \t\n   \r\n{not json}\nlast")
    prompts = read_prompts(path)
    assert texts(prompts) == ["one", "  two \u2028 \x0b\r same \t", "{not json}", "last"]
    assert [prompt.where for prompt in prompts] == [f"line {n} of {path}" for n in (1, 3, 5, 6)]


def test_jsonl_file(tmp_path):
    messages = [{"role": "system", "content": "é"}, {"role": "user", "content": "Hi", "name": "x"}]
    lines = [{"prompt": "a\nb"}, {"prompt": "", "id": 7}, {"messages": messages, "id": "7"}]
    content = "\ufeff" + "\r\n".join(json.dumps(line, ensure_ascii=False) for line in lines[:2])
    path = write(tmp_path, "in.jsonl", content + "\n\n  \n" + json.dumps(lines[2]))
    assert read_prompts(path) == [
        Prompt("a\nb", None, None, f"line 1 of {path}"),
        Prompt("", None, 7, f"line 2 of {path}"),
        Prompt(None, messages, "7", f"line 5 of {path}"),
    ]


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
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))
    assert [(prompt.text, prompt.where) for prompt in read_prompts("-")] == expected


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"prompt": "a"', "is not valid JSON: .* at column"),
        (b"hello", "is not valid JSON"),
        (b"['a']", "is not valid JSON"),
        (b'{"prompt": "\xff"}', r"is not UTF-8 \(byte 13 of the line\)"),
        (b"[" * 100_000, "is not acceptable JSON"),
        (b'{"prompt": "a", "id": ' + b"1" * 5000 + b"}", "is not acceptable JSON"),
        (b'["a"]', "holds a list, but must be an object"),
        (b'"a"', "holds a str"),
        (b"null", "holds a NoneType"),
        (b"{}", "must have either"),
        (b'{"id": 1}', "must have either"),
        (b'{"prompt": "a", "messages": [{"role": "user", "content": "a"}]}', "must have either"),
        (b'{"prompt": "a", "max_new_token": 3}', "unknown key 'max_new_token'"),
        (b'{"prompt": "a", "prompt": "b"}', "two keys of the same name among prompt, prompt"),
        (b'{"prompt": null}', "prompt is None"),
        (b'{"prompt": ["a"]}', r"prompt is \['a'\]"),
        (b'{"prompt": "a", "id": 1.5}', "id is 1.5"),
        (b'{"prompt": "a", "id": true}', "id is True"),
        (b'{"prompt": "a", "id": null}', "id is None"),
        (b'{"prompt": "a \\ud800 b"}', "half of a surrogate pair"),
        (b'{"prompt": "a", "id": "\\udfff"}', "half of a surrogate pair"),
        (b'{"messages": [{"role": "user", "content": "\\ud83d"}]}', "half of a surrogate pair"),
        (b'{"messages": []}', "at least one message"),
        (b'{"messages": "Hi"}', "must be a list"),
        (b'{"messages": ["Hi"]}', "message 0 must be an object"),
        (b'{"messages": [{"role": "user", "content": "a"}, {"role": "user"}]}', "message 1 must be"),
        (b'{"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}]}', "strings role and content"),
    ],
)
def test_malformed_line_is_named_by_number(tmp_path, line, message):
    path = write(tmp_path, "in.jsonl", b'{"prompt": "good"}\n\n' + line + b'\n{"prompt": "good"}\n')
    with pytest.raises(UserError, match=message) as error:
        read_prompts(path)
    assert str(error.value).startswith(f"line 3 of {path}")
    assert "\n" not in str(error.value) and len(str(error.value)) < len(path) + 250


def test_bytes_that_are_not_utf8_in_a_text_file(tmp_path):
    with pytest.raises(UserError, match=r"line 2 of .*in.txt is not UTF-8 \(byte 3 of the line\)"):
        read_prompts(write(tmp_path, "in.txt", b"caf\xc3\xa9\nca\xe9\n"))


def test_surrogate_of_an_argument_is_named():
    """What Python makes of an argument that is not UTF-8."""
    with pytest.raises(UserError, match="^prompt 1 holds half of a surrogate pair"):
        read_prompts(["a", b"caf\xe9".decode("utf-8", "surrogateescape")])


def test_id_given_twice(tmp_path):
    path = write(tmp_path, "in.jsonl", '{"prompt":"a","id":"x"}\n{"prompt":"a","id":1}\n\n{"prompt":"b","id":"x"}')
    with pytest.raises(UserError) as error:
        read_prompts(path)
    assert str(error.value) == f"line 4 of {path} has the id 'x', as line 1 of {path} has: ids must differ"


def test_files_that_cannot_be_read(tmp_path):
    (tmp_path / "folder.jsonl").mkdir()
    cases = {"missing.txt": "No such file", "folder.jsonl": "Is a directory"}
    for name, reason in cases.items():
        with pytest.raises(UserError, match=f"^cannot read the prompts file .*{reason}"):
            read_prompts(str(tmp_path / name))
    secret = write(tmp_path, "secret.txt", "a")
    os.chmod(secret, 0)
    if not os.access(secret, os.R_OK):  # root reads everything
        with pytest.raises(UserError, match="Permission denied"):
            read_prompts(secret)


def test_no_prompt_at_all(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\n")))
    for prompts, source in (([], "the list"), ("-", "stdin"), (write(tmp_path, "in.txt", b"\n \r\n"), "in.txt")):
        with pytest.raises(UserError, match=f"no prompt in .*{source}: give at least one"):
            read_prompts(prompts)
    with pytest.raises(UserError, match="no prompt in .*empty.jsonl"):
        read_prompts(write(tmp_path, "empty.jsonl", b"\xef\xbb\xbf"))


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
