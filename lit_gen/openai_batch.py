"""OpenAI's batch format: a request a line in, a response a line out, as vLLM's `run-batch` reads and writes it too.

    {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": [...], "max_tokens": 9}}
    {"id": "batch_req_0", "custom_id": "a", "response": {"status_code": 200, "body": {...}, ...}, "error": null}

Every key of a request's body has its effect or is refused by name. One that is left out, or null, takes the setting of
the job, not OpenAI's default. Responses hold no clock and no random id: the same job writes the same bytes.
"""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from lit_gen.prompt_lines import OpenAIRequest, Prompt, as_name, check_settings, fill_content, is_whole
from lit_gen.stopping import Row
from lit_gen.tokenizer import Tokenizer
from lit_gen.tokenizer_backends import BYTE_TOKEN
from lit_gen.utils import UserError

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
# min_p, repetition_penalty and top_k are vLLM's additions.
SAME_NAME = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
SAME_NAME += ("logit_bias", "stop", "seed", "n")
WITHOUT_EFFECT = ("user", "metadata", "store")
BODY_KEYS = {*SAME_NAME, *WITHOUT_EFFECT, "model", "max_tokens", "max_completion_tokens", "top_k", "logprobs", "stream"}
MAX_TOP_LOGPROBS = 20
MOST_TOKENS = 2**16  # whose text and bytes are remembered, some 20 MB: a row with 20 alternatives repeats thousands
LEAST_LOGPROB = -9999.0  # what OpenAI and vLLM write for a token that cannot be; JSON has no -inf
NAN = "the model gave a number that is not finite, so no next token could be chosen"


def identify(data: Mapping[str, Any]) -> OpenAIRequest | None:
    """What a response to this line repeats, even if the rest of it is wrong; None if custom_id names nothing."""
    if not isinstance(as_name(data["custom_id"]), str):
        return None
    body = data.get("body")
    model = as_name(body.get("model")) if isinstance(body, dict) else None
    return OpenAIRequest(data["custom_id"], data.get("url") != COMPLETIONS, model if isinstance(model, str) else "")


def fill(prompt: Prompt, data: Mapping[str, Any]) -> None:
    """Puts what a request asks for into `prompt`; UserError if one of its keys is wrong or would have no effect."""
    if prompt.openai is None:
        raise UserError(f"custom_id is {data['custom_id']!r:.40}, but must be a string")
    unknown = sorted(data.keys() - {"custom_id", "method", "url", "body"})
    if unknown:
        raise UserError(f"unknown key {unknown[0]!r:.40}: an OpenAI batch line has custom_id, method, url and body")
    if data.get("method", "POST") != "POST":
        raise UserError(f"method is {data['method']!r:.40}, but must be POST")
    url = data.get("url")
    if url not in (CHAT, COMPLETIONS):
        raise UserError(f"url is {url!r:.40}, but must be {CHAT} or {COMPLETIONS}")
    body = data.get("body")
    if not isinstance(body, dict):
        raise UserError(f"body is {body!r:.40}, but must be an object")
    content = "messages" if url == CHAT else "prompt"
    unknown = sorted(body.keys() - BODY_KEYS - ({content, "top_logprobs"} if url == CHAT else {content}))
    if unknown:
        raise UserError(f"the key {unknown[0]!r:.40} of body is not supported for {url}: leave it out")
    if content not in body:
        raise UserError(f"body must have the key {content}")
    fill_content(prompt, body)
    given = {key: value for key, value in body.items() if value is not None}
    if not isinstance(given.get("model", ""), str):
        raise UserError(f"model is {given['model']!r:.40}, but must be a string")
    if given.get("stream", False) is not False:
        raise UserError("stream must be false: a batch gives whole answers")
    prompt.settings = check_settings(_settings(given) | _logprobs(given, chat=url == CHAT))


def _settings(given: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of a body under the names of our settings."""
    settings = {name: given[name] for name in SAME_NAME if name in given}
    limits = [given[name] for name in ("max_tokens", "max_completion_tokens") if name in given]
    if len(limits) == 2:
        raise UserError("give either max_tokens or max_completion_tokens")
    if limits:
        settings["max_new_tokens"] = limits[0]
    if "top_k" in given:
        off = is_whole(given["top_k"]) and given["top_k"] in (-1, 0)  # as in vLLM
        settings["top_k"] = None if off else given["top_k"]
    return settings


def _logprobs(given: Mapping[str, Any], *, chat: bool) -> dict[str, Any]:
    """Chat has a switch and a number of alternatives, completions the number alone."""
    if not chat:
        return {"logprobs": given["logprobs"]} if "logprobs" in given else {}
    switch, top = given.get("logprobs"), given.get("top_logprobs", 0)
    if not isinstance(switch, bool | None):
        raise UserError(f"logprobs is {switch!r:.40}, but must be true or false for {CHAT}")
    if not is_whole(top) or not 0 <= top <= MAX_TOP_LOGPROBS:
        raise UserError(f"top_logprobs is {top!r:.40}, but must be a whole number from 0 to {MAX_TOP_LOGPROBS}")
    if top and not switch:
        raise UserError("top_logprobs has no effect without logprobs: true")
    return {} if switch is None else {"logprobs": top if switch else None}


def render(prompt: Prompt, rows: Sequence[Row], tokenizer: Tokenizer) -> dict[str, Any]:
    """The response to a request: all its rows (samples) in one line.

    OpenAI reports a request that failed in the body of the response, with `error` null, vLLM in `error`; both set the
    status code. Here the reason is in both places, for clients of either: 400 for a request that cannot be run,
    500 if the model's numbers broke down (finish reason "nan"), in any one of the rows.
    """
    assert prompt.openai is not None and (rows or prompt.error), "an OpenAI prompt with rows or an error"
    failed = next((row for row in rows if row.finish_reason in ("nan", "error")), None)
    if prompt.error is not None:
        return _response(prompt, 400, _error("invalid_request_error", prompt.error))
    if failed is not None and failed.finish_reason == "nan":
        return _response(prompt, 500, _error("server_error", failed.error or NAN))
    if failed is not None:
        return _response(prompt, 400, _error("invalid_request_error", failed.error))
    n_prompt, n_new = len(rows[0].prompt), sum(len(row.tokens) for row in rows)
    chat = prompt.openai.chat
    body = {
        "id": f"{'chatcmpl' if chat else 'cmpl'}-{prompt.index}",
        "object": "chat.completion" if chat else "text_completion",
        "created": 0,
        "model": prompt.openai.model,
        "choices": [_choice(row, tokenizer, chat) for row in sorted(rows, key=lambda row: row.sample)],
        "usage": {"prompt_tokens": n_prompt, "completion_tokens": n_new, "total_tokens": n_prompt + n_new},
    }
    return _response(prompt, 200, body)


def _response(prompt: Prompt, status: int, body: dict[str, Any]) -> dict[str, Any]:
    failure = body.get("error")
    return {
        "id": f"batch_req_{prompt.index}",
        "custom_id": prompt.openai.custom_id,
        "response": {"status_code": status, "request_id": f"req_{prompt.index}", "body": body},
        "error": failure and {"code": failure["code"], "message": failure["message"]},
    }


def _error(kind: str, message: str) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": None, "code": kind}}


def _choice(row: Row, tokenizer: Tokenizer, chat: bool) -> dict[str, Any]:
    content = {"message": {"role": "assistant", "content": row.text}} if chat else {"text": row.text}
    logprobs = None
    if row.logprobs is not None:
        logprobs = (_chat_logprobs if chat else _completion_logprobs)(row, tokenizer)
    return {"index": row.sample, **content, "logprobs": logprobs, "finish_reason": row.finish_reason}


def _chat_logprobs(row: Row, tokenizer: Tokenizer) -> dict[str, Any]:
    def entry(token: int, logprob: float) -> dict[str, Any]:
        text = token_text(tokenizer, token)
        spelled = list(token_bytes(tokenizer, token))
        return {"token": text, "logprob": max(LEAST_LOGPROB, logprob), "bytes": spelled}

    pairs = zip(row.tokens, row.logprobs, strict=True)
    tokens = [entry(token, chosen) | {"top_logprobs": [entry(*pair) for pair in top]} for token, (chosen, top) in pairs]
    return {"content": tokens}


def _completion_logprobs(row: Row, tokenizer: Tokenizer) -> dict[str, Any]:
    """Alternatives are named by text here: of two with the same text the better one is given."""
    stream, offset, offsets, alternatives = tokenizer.stream(), 0, [], []
    for token, (chosen, top) in zip(row.tokens, row.logprobs, strict=True):
        offsets.append(offset)
        offset += len(stream.push(token))
        best = sorted([*top, (token, chosen)], key=lambda pair: -max(LEAST_LOGPROB, pair[1]))
        texts: dict[str, float] = {}
        for candidate, logprob in best:
            texts.setdefault(token_text(tokenizer, candidate), max(LEAST_LOGPROB, logprob))
        alternatives.append(texts)
    return {
        "tokens": [token_text(tokenizer, token) for token in row.tokens],
        "token_logprobs": [max(LEAST_LOGPROB, chosen) for chosen, _ in row.logprobs],
        "top_logprobs": alternatives,
        "text_offset": offsets,
    }


@lru_cache(maxsize=MOST_TOKENS)
def token_text(tokenizer: Tokenizer, token: int) -> str:
    """Text of a token as it stands after a letter: alone, some tokenizers drop the space that a word begins with."""
    letter, before = _letter(tokenizer)
    return tokenizer.decode([*letter, token], skip_special_tokens=False)[len(before) :]


@lru_cache(maxsize=1)
def _letter(tokenizer: Tokenizer) -> tuple[list[int], str]:
    """Tokens of a letter, and what they decode to."""
    letter = tokenizer.encode("a", add_special_tokens=False).tolist()
    return letter, tokenizer.decode(letter, skip_special_tokens=False)


@lru_cache(maxsize=MOST_TOKENS)
def token_bytes(tokenizer: Tokenizer, token: int) -> bytes:
    """UTF-8 of a token. A part of a character is that part, so that the bytes of a row add up to its text."""
    backend, piece = tokenizer.backend, tokenizer.backend.token_of(token)
    if piece is not None and BYTE_TOKEN.fullmatch(piece) and backend.holds(token):
        return bytes([int(piece[3:5], 16)])
    if piece is not None and getattr(backend, "byte_level", False):
        return backend.token_bytes(token)
    return token_text(tokenizer, token).encode()
