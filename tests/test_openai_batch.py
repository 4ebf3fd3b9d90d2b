"""Claims of lit_gen/openai_batch.py: which requests are understood, which are refused by name, and what is answered."""

import json
from pathlib import Path

import pytest
import sentencepiece
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from lit_gen.openai_batch import render, token_bytes, token_text
from lit_gen.prompt_lines import OpenAIRequest, Prompt
from lit_gen.prompts import read_prompts
from lit_gen.result_lines import result_lines
from lit_gen.settings import Settings
from lit_gen.stopping import Row
from lit_gen.tokenizer import Tokenizer

CHAT = {"messages": [{"role": "user", "content": "Hi"}]}
TEXT = {"prompt": "Hi"}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Tokenizer:
    """Byte-level without merges: the ids of "a" and " " are those of the table below; </s> is special."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    lib = tokenizers.Tokenizer(models.BPE(vocab={character: i for i, character in enumerate(alphabet)}, merges=[]))
    lib.pre_tokenizer, lib.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    lib.add_special_tokens(["</s>"])
    folder = tmp_path_factory.mktemp("tokenizer")
    lib.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    return Tokenizer(folder)


def write(folder: Path, *lines) -> str:
    """A .jsonl file of these objects; bytes stand as they are."""
    path = folder / "in.jsonl"
    encoded = [line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines]
    path.write_bytes(b"\n".join(encoded))
    return str(path)


def request(body: dict, /, **changes) -> dict:
    url = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    return {"custom_id": "r", "method": "POST", "url": url, "body": body} | changes


def parse(folder: Path, line) -> Prompt:
    [prompt] = read_prompts(write(folder, line))
    return prompt


def row(prompt: list[int], tokens: list[int], text: str, sample: int = 0, **changes) -> Row:
    """A finished row with this text."""
    made = Row(0, prompt, Settings(), sample=sample)
    made.tokens, made._shown, made.finish_reason = tokens, [text], "stop"
    for name, value in changes.items():
        setattr(made, name, value)
    return made


def strict_json(line: dict) -> str:
    text = json.dumps(line, ensure_ascii=False, allow_nan=False)
    text.encode()
    return text


def test_requests_become_prompts(tmp_path):
    chat = request(CHAT | {"model": "m", "max_completion_tokens": 5, "temperature": 0.7})
    text = request({"prompt": "a", "max_tokens": 6}, custom_id="s")
    ids = {"custom_id": "t", "url": "/v1/completions", "body": {"prompt": [3, 1]}}
    path = write(tmp_path, chat, {"prompt": "own format"}, text, ids)
    assert list(read_prompts(path)) == [
        Prompt(
            messages=CHAT["messages"],
            id="r",
            where=f"line 1 of {path}",
            index=0,
            settings={"temperature": 0.7, "max_new_tokens": 5},
            openai=OpenAIRequest("r", True, "m"),
        ),
        Prompt(text="own format", where=f"line 2 of {path}", index=1),
        Prompt(
            text="a",
            id="s",
            where=f"line 3 of {path}",
            index=2,
            settings={"max_new_tokens": 6},
            openai=OpenAIRequest("s", False, ""),
        ),
        Prompt(ids=[3, 1], id="t", where=f"line 4 of {path}", index=3, openai=OpenAIRequest("t", False, "")),
    ]


@pytest.mark.parametrize(
    ("body", "settings"),
    [
        (
            TEXT | {"temperature": 0, "top_p": 0.5, "seed": 3, "n": 2},
            {"temperature": 0, "top_p": 0.5, "seed": 3, "n": 2},
        ),
        (TEXT | {"presence_penalty": 1, "frequency_penalty": -2}, {"presence_penalty": 1, "frequency_penalty": -2}),
        (TEXT | {"min_p": 0.1, "repetition_penalty": 1.2}, {"min_p": 0.1, "repetition_penalty": 1.2}),
        (TEXT | {"logit_bias": {"5": -100}, "stop": "x"}, {"logit_bias": {"5": -100}, "stop": ["x"]}),
        (CHAT | {"stop": ["x", "y"], "max_tokens": 1}, {"stop": ["x", "y"], "max_new_tokens": 1}),
        (TEXT | {"top_k": 5}, {"top_k": 5}),
        (TEXT | {"top_k": -1}, {"top_k": None}),
        (TEXT | {"top_k": 0}, {"top_k": None}),
        (TEXT | {"logprobs": 0}, {"logprobs": 0}),
        (TEXT | {"logprobs": 3}, {"logprobs": 3}),
        (CHAT | {"logprobs": True}, {"logprobs": 0}),
        (CHAT | {"logprobs": True, "top_logprobs": 20}, {"logprobs": 20}),
        (CHAT | {"logprobs": False, "top_logprobs": 0}, {"logprobs": None}),
        (CHAT | {"logprobs": None, "top_logprobs": None, "stop": None, "max_tokens": None, "top_k": None}, {}),
        (CHAT | {"user": "me", "metadata": {"a": 1}, "store": True, "stream": False, "model": None}, {}),
    ],
)
def test_settings_of_a_request(tmp_path, body, settings):
    prompt = parse(tmp_path, request(body))
    assert prompt.error is None and prompt.settings == settings


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (request(CHAT, method="GET"), "method is 'GET'"),
        (request(CHAT, method=None), "method is None"),
        (request(CHAT, url="/v1/embeddings"), "must be /v1/chat/completions or /v1/completions"),
        (request(CHAT, url=["/v1/completions"]), "must be /v1/chat/completions or /v1/completions"),
        ({"custom_id": "r", "body": CHAT}, "url is None"),
        ({"custom_id": "r", "url": "/v1/completions"}, "body is None"),
        (request(CHAT, body=[CHAT]), "body is ["),
        (request(CHAT, prompt="a"), "unknown key 'prompt'"),
        ({"custom_id": "r", "prompt": "a"}, "unknown key 'prompt'"),
        (request(CHAT | {"tools": []}), "the key 'tools' of body is not supported"),
        (request(CHAT | {"response_format": None}), "the key 'response_format' of body"),
        (request(CHAT | {"best_of": 2}), "the key 'best_of' of body"),
        (request(CHAT | {"prompt": "a"}), "the key 'prompt' of body is not supported for /v1/chat/completions"),
        (request(TEXT, url="/v1/chat/completions"), "the key 'prompt' of body"),
        (request(CHAT, url="/v1/completions"), "the key 'messages' of body"),
        (request(TEXT | {"top_logprobs": 2}), "the key 'top_logprobs' of body"),
        (request(TEXT | {"suffix": "x"}), "the key 'suffix' of body"),
        (request(TEXT | {"echo": False}), "the key 'echo' of body"),
        (request({"model": "m"}), "body must have the key prompt"),
        (request({"messages": []}), "at least one message"),
        (request({"prompt": ["a", "b"]}), "prompt is ['a', 'b']"),
        (request({"prompt": []}), "prompt is []"),
        (request(TEXT | {"model": 5}), "model is 5"),
        (request(TEXT | {"stream": True}), "stream must be false"),
        (request(TEXT | {"stream": 0}), "stream must be false"),
        (request(TEXT | {"max_tokens": 5, "max_completion_tokens": 5}), "either max_tokens or max_completion_tokens"),
        (request(TEXT | {"max_tokens": 0}), "max_new_tokens is 0"),
        (request(TEXT | {"max_tokens": True}), "max_new_tokens is True"),
        (request(TEXT | {"top_k": -2}), "top_k is -2"),
        (request(TEXT | {"top_k": False}), "top_k is False"),
        (request(TEXT | {"logprobs": True}), "logprobs is True"),
        (request(CHAT | {"logprobs": 1}), "logprobs is 1"),
        (request(CHAT | {"logprobs": 1.0}), "logprobs is 1.0"),
        (request(CHAT | {"top_logprobs": 2}), "no effect without logprobs"),
        (request(CHAT | {"logprobs": False, "top_logprobs": 2}), "no effect without logprobs"),
        (request(CHAT | {"logprobs": True, "top_logprobs": 21}), "top_logprobs is 21"),
        (request(CHAT | {"logprobs": True, "top_logprobs": True}), "top_logprobs is True"),
        (request(TEXT | {"stop": [""]}), "stop 0 is empty"),
        (request(TEXT | {"model": "\ud800"}), "half of a surrogate pair"),
        (b'{"custom_id": "r", "url": "/v1/completions", "body": {"prompt": "a", "top_p": NaN}}', "the number NaN"),
        (b'{"custom_id": "r", "url": "/v1/completions", "body": {"n": 1, "n": 2}}', "two keys of an object are 'n'"),
    ],
)
def test_bad_request_is_an_error_line_under_its_custom_id(tmp_path, tokenizer, line, message):
    good, bad, last = read_prompts(write(tmp_path, request(TEXT, custom_id="a"), line, request(CHAT, custom_id="b")))
    assert good.error is None and last.error is None
    assert message in bad.error and bad.error.startswith("line 2 of ") and "\n" not in bad.error
    [out] = result_lines(bad, [], tokenizer)
    strict_json(out)
    assert (out["custom_id"], out["id"], out["response"]["status_code"]) == ("r", "batch_req_1", 400)
    assert out["error"] == {"code": "invalid_request_error", "message": bad.error}
    assert out["response"]["body"]["error"]["message"] == bad.error


@pytest.mark.parametrize("custom_id", [5, None, True, ["r"], "\ud800"])
def test_custom_id_that_names_nothing(tmp_path, tokenizer, custom_id):
    """There is nothing to answer to, so the answer is an error line of our own format."""
    prompt = parse(tmp_path, request(TEXT, custom_id=custom_id))
    assert prompt.error is not None and prompt.openai is None
    [out] = result_lines(prompt, [], tokenizer)
    assert out["finish_reason"] == "error" and strict_json(out)


def test_custom_id_given_twice(tmp_path):
    lines = [request(TEXT, custom_id="x"), {"prompt": "a", "id": "x"}, request(TEXT, custom_id="y")]
    assert [prompt.error is None for prompt in read_prompts(write(tmp_path, *lines))] == [True, False, True]


def test_file_goes_round(tmp_path, tokenizer):
    """The whole of both responses, in the words of OpenAI's API reference."""
    lines = [
        request(CHAT | {"model": "m", "n": 2}, custom_id="chat"),
        request(TEXT | {"model": "m"}, custom_id="é", method="POST"),
    ]
    chat, text = read_prompts(write(tmp_path, *lines))
    rows = [row([1, 2, 3], [4], "B", sample=1, finish_reason="length"), row([1, 2, 3], [4, 5], "A", sample=0)]
    assert result_lines(chat, rows, tokenizer) == [
        {
            "id": "batch_req_0",
            "custom_id": "chat",
            "response": {
                "status_code": 200,
                "request_id": "req_0",
                "body": {
                    "id": "chatcmpl-0",
                    "object": "chat.completion",
                    "created": 0,
                    "model": "m",
                    "choices": [
                        {
                            "index": 0,
                            "message": {"role": "assistant", "content": "A"},
                            "logprobs": None,
                            "finish_reason": "stop",
                        },
                        {
                            "index": 1,
                            "message": {"role": "assistant", "content": "B"},
                            "logprobs": None,
                            "finish_reason": "length",
                        },
                    ],
                    "usage": {"prompt_tokens": 3, "completion_tokens": 3, "total_tokens": 6},
                },
            },
            "error": None,
        }
    ]
    [answer] = result_lines(text, [row([7], [], "")], tokenizer)
    assert strict_json(answer) == (
        '{"id": "batch_req_1", "custom_id": "é", "response": {"status_code": 200, "request_id": "req_1", "body": '
        '{"id": "cmpl-1", "object": "text_completion", "created": 0, "model": "m", "choices": [{"index": 0, '
        '"text": "", "logprobs": null, "finish_reason": "stop"}], "usage": {"prompt_tokens": 1, '
        '"completion_tokens": 0, "total_tokens": 1}}}, "error": null}'
    )


@pytest.mark.parametrize(
    ("reason", "error", "status", "code", "message"),
    [
        ("error", "too long", 400, "invalid_request_error", "too long"),
        ("nan", None, 500, "server_error", "not finite"),
        ("nan", "row broke", 500, "server_error", "row broke"),
    ],
)
def test_one_bad_sample_makes_an_error_line(tmp_path, tokenizer, reason, error, status, code, message):
    prompt = parse(tmp_path, request(TEXT))
    out = render(prompt, [row([1], [2], "a"), row([1], [], "", sample=1, finish_reason=reason, error=error)], tokenizer)
    assert out["response"]["status_code"] == status and out["error"]["code"] == code
    assert message in out["error"]["message"] and "choices" not in out["response"]["body"]
    body = {"message": out["error"]["message"], "type": code, "param": None, "code": code}
    assert out["response"]["body"] == {"error": body}


def test_logprobs_of_chat(tmp_path, tokenizer):
    a, b, first, second = (tokenizer.backend.id_of(character) for character in "abÃ©")  # bytes 61 62 c3 a9
    logprobs = [(-0.25, [(a, -0.25), (b, -1.5)]), (-1.0, [(256, -0.5)]), (-2.0, [(b, float("-inf"))])]
    [prompt] = read_prompts(write(tmp_path, request(CHAT | {"logprobs": True, "top_logprobs": 2})))
    out = render(prompt, [row([1], [a, first, second], "aé", logprobs=logprobs)], tokenizer)
    strict_json(out)
    alternative = {"token": "b", "logprob": -1.5, "bytes": [98]}
    entry = {"token": "a", "logprob": -0.25, "bytes": [97]}
    assert out["response"]["body"]["choices"][0]["logprobs"] == {
        "content": [
            entry | {"top_logprobs": [entry, alternative]},
            {"token": "\ufffd", "logprob": -1.0, "bytes": [0xC3]}
            | {"top_logprobs": [{"token": "</s>", "logprob": -0.5, "bytes": [60, 47, 115, 62]}]},
            {"token": "\ufffd", "logprob": -2.0, "bytes": [0xA9]}
            | {"top_logprobs": [{"token": "b", "logprob": -9999.0, "bytes": [98]}]},
        ]
    }


def test_logprobs_of_completions(tmp_path, tokenizer):
    a, b, first, second = (tokenizer.backend.id_of(character) for character in "abÃ©")
    logprobs = [(-1.5, [(b, -0.25)]), (-1.0, [(second, -0.5)]), (-2.0, []), (-0.5, [(a, -0.5)])]
    prompt = parse(tmp_path, request(TEXT | {"logprobs": 1}))
    out = render(prompt, [row([1], [a, first, second, a], "aéa", logprobs=logprobs)], tokenizer)
    strict_json(out)
    assert out["response"]["body"]["choices"][0]["logprobs"] == {
        "tokens": ["a", "\ufffd", "\ufffd", "a"],
        "token_logprobs": [-1.5, -1.0, -2.0, -0.5],
        "top_logprobs": [{"b": -0.25, "a": -1.5}, {"\ufffd": -0.5}, {"\ufffd": -2.0}, {"a": -0.5}],
        "text_offset": [0, 1, 1, 2],
    }


def test_text_of_a_token_is_looked_up_once(tmp_path, tokenizer):
    """200 tokens with 20 alternatives each, all of them among 40 different ones; and another tokenizer has its own."""
    token_text.cache_clear()
    token_bytes.cache_clear()
    logprobs = [(-1.0, [((step + i) % 40, -2.0) for i in range(20)]) for step in range(200)]
    finished = row([1], [step % 40 for step in range(200)], "", logprobs=logprobs)
    render(parse(tmp_path, request(CHAT | {"logprobs": True, "top_logprobs": 20})), [finished], tokenizer)
    render(parse(tmp_path, request(TEXT | {"logprobs": 20})), [finished], tokenizer)
    assert token_text.cache_info().misses == token_bytes.cache_info().misses == 40
    lib = tokenizers.Tokenizer(models.BPE(vocab={"a": 0, "zz": 1}, merges=[]))
    lib.save(str(tmp_path / "tokenizer.json"))
    other = Tokenizer(tmp_path)
    assert token_text(other, 1) == token_text(other, 1) != token_text(tokenizer, 1)


def test_tokens_of_a_row_add_up_to_its_text(tokenizer):
    text = "é漢 \U0001f600\n a"
    tokens = tokenizer.encode(text).tolist()
    assert b"".join(token_bytes(tokenizer, token) for token in tokens).decode() == text
    assert token_text(tokenizer, tokenizer.backend.id_of("Ġ")) == " "
    unknown = 100_000  # a row of the model that no token has
    assert token_text(tokenizer, unknown) == "" and token_bytes(tokenizer, unknown) == b""


def test_sentencepiece_tokens_keep_their_space_and_bytes(tmp_path):
    """Alone, such a tokenizer drops the space of "▁world"; a byte token is a part of a character."""
    (tmp_path / "corpus.txt").write_text("hello world\nworld hello\nhello hello\n")
    options = {"model_type": "bpe", "vocab_size": 280, "byte_fallback": True, "hard_vocab_limit": False}
    sentencepiece.SentencePieceTrainer.train(
        input=str(tmp_path / "corpus.txt"), model_prefix=str(tmp_path / "tokenizer"), minloglevel=2, **options
    )
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"add_bos_token": False}))
    tokenizer = Tokenizer(tmp_path)
    tokens = tokenizer.encode("hello world é").tolist()
    spelled = b"".join(token_bytes(tokenizer, token) for token in tokens)
    assert spelled.decode() == " hello world é"
    assert [token_bytes(tokenizer, token) for token in tokens[-2:]] == [b"\xc3", b"\xa9"]
    world = tokenizer.backend.id_of("▁world")
    assert tokenizer.decode([world]) == "world" and token_text(tokenizer, world) == " world"
