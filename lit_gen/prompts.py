"""What `--prompts` accepts (a list, a text, a .txt or .jsonl file, `-` for stdin), down to token ids."""

import json
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from lit_gen.tokenizer import Tokenizer
from lit_gen.utils import UserError


@dataclass
class Prompt:
    """One prompt: a text or a conversation.

    Attributes:
        text: what to go on with, or None.
        messages: `[{"role": ..., "content": ...}, ...]`, or None.
        id: the user's own name for it, repeated in the output, or None.
        where: its name in error messages, such as "prompt 3" (counted from 0) or "line 7 of in.jsonl" (from 1).
    """

    text: str | None
    messages: list[dict[str, Any]] | None
    id: str | int | None
    where: str


def read_prompts(prompts: str | list[str]) -> list[Prompt]:
    """Reads the value of `--prompts`.

    - a list: a prompt each; the empty text is a prompt
    - `-`: stdin, as a .jsonl file if its first line that is not blank begins with `{`, else as a .txt file
    - a path that ends in .txt: a prompt a line. The line break is no part of it, and blank lines are skipped
    - a path that ends in .jsonl: an object a line, either `{"prompt": "..."}` or
      `{"messages": [{"role": "...", "content": "..."}]}`, with an `"id"` if you like. Blank lines are skipped
    - any other text: one prompt

    Files are UTF-8; a byte order mark and Windows line breaks are accepted.

    Raises:
        UserError: the file cannot be read, there is no prompt, or one is malformed (names the line).
    """
    if isinstance(prompts, list):
        found = [Prompt(text, None, None, f"prompt {i}") for i, text in enumerate(prompts)]
        source = "the list"
    elif prompts == "-":
        source = "stdin"
        if sys.stdin is None:
            raise UserError("stdin is closed: give the prompts in another way")
        found = _read_lines(sys.stdin.buffer, source, jsonl=None)
    elif prompts.endswith((".txt", ".jsonl")):
        source = prompts
        try:
            with Path(prompts).open("rb") as file:
                found = _read_lines(file, source, jsonl=prompts.endswith(".jsonl"))
        except OSError as err:
            raise UserError(
                f'cannot read the prompts file {prompts!r}: {err.strerror} (if it is a prompt, write ["..."])'
            ) from err
    elif prompts.lstrip().startswith('["'):
        raise UserError(f"--prompts looks like a JSON list of texts but is none: {prompts[:60]!r}")
    else:
        source, found = "the text", [Prompt(prompts, None, None, "prompt 0")]
    if not found:
        raise UserError(f"no prompt in {source}: give at least one")
    _check(found)
    return found


def _read_lines(file: BinaryIO, source: str, jsonl: bool | None) -> list[Prompt]:
    """A prompt per line that is not blank; `jsonl=None` lets the first of them decide the format."""
    found = []
    for number, line in enumerate(file, start=1):
        where = f"line {number} of {source}"
        try:
            text = line.removesuffix(b"\n").removesuffix(b"\r").decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as err:
            raise UserError(f"{where} is not UTF-8 (byte {err.start + 1} of the line): save the file as UTF-8") from err
        if not text.strip():
            continue
        if jsonl is None:
            jsonl = text.lstrip().startswith("{")
        found.append(_parse_line(text, where) if jsonl else Prompt(text, None, None, where))
    return found


def _parse_line(text: str, where: str) -> Prompt:
    """One line of a .jsonl file."""
    try:
        data = json.loads(text, object_pairs_hook=_object)
    except UserError as err:
        raise UserError(f"{where}: {err}") from err
    except json.JSONDecodeError as err:
        raise UserError(f"{where} is not valid JSON: {err.msg} at column {err.colno}") from err
    except (ValueError, RecursionError) as err:  # a number of more than 4300 digits; brackets nested too deep
        raise UserError(f"{where} is not acceptable JSON: {err}") from err
    if not isinstance(data, dict):
        raise UserError(f'{where} holds a {type(data).__name__}, but must be an object such as {{"prompt": "..."}}')
    unknown = sorted(data.keys() - {"prompt", "messages", "id"})
    if unknown:
        raise UserError(f"{where} has the unknown key {unknown[0]!r}: only prompt, messages and id are read")
    if ("prompt" in data) == ("messages" in data):
        raise UserError(f"{where} must have either the key prompt or the key messages")
    if "prompt" in data and not isinstance(data["prompt"], str):
        raise UserError(f"{where}: prompt is {data['prompt']!r:.40}, but must be a string")
    if "messages" in data:
        _check_messages(data["messages"], where)
    if "id" in data and (not isinstance(data["id"], str | int) or isinstance(data["id"], bool)):
        raise UserError(f"{where}: id is {data['id']!r:.40}, but must be a string or an integer")
    return Prompt(data.get("prompt"), data.get("messages"), data.get("id"), where)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object; of two equal keys Python would silently drop the first."""
    data = dict(pairs)
    if len(data) != len(pairs):
        raise UserError(f"an object has two keys of the same name among {', '.join(key for key, _ in pairs):.80}")
    return data


def _check_messages(messages: Any, where: str) -> None:
    """Messages are role and content; other keys are the chat template's to read."""
    if not isinstance(messages, list) or not messages:
        raise UserError(f"{where}: messages must be a list with at least one message")
    for i, message in enumerate(messages):
        if not isinstance(message, dict) or not all(isinstance(message.get(key), str) for key in ("role", "content")):
            raise UserError(f"{where}: message {i} must be an object with the strings role and content")


def _check(prompts: Iterable[Prompt]) -> None:
    """Refuses ids given twice, and text that no UTF-8 file can hold."""
    seen: dict[str | int, str] = {}
    for prompt in prompts:
        try:
            json.dumps([prompt.text, prompt.messages, prompt.id], ensure_ascii=False).encode()
        except UnicodeEncodeError as err:
            raise UserError(
                f"{prompt.where} holds half of a surrogate pair ({err.object[err.start]!r}), which is no character"
            ) from err
        if prompt.id is not None:
            if prompt.id in seen:
                raise UserError(
                    f"{prompt.where} has the id {prompt.id!r:.40}, as {seen[prompt.id]} has: ids must differ"
                )
            seen[prompt.id] = prompt.where


def encode_prompts(prompts: list[Prompt], tokenizer: Tokenizer, *, chat: bool) -> list[list[int]]:
    """Token ids of every prompt; one without any becomes the BOS token, or the EOS token if there is no BOS.

    Args:
        prompts: what `read_prompts` gives.
        tokenizer: of the model.
        chat: render texts with the chat template, as one message of the user; messages always are.

    Raises:
        UserError: names the prompt that cannot be encoded.
    """
    encoded = []
    for prompt in prompts:
        try:
            if prompt.messages is not None:
                ids = tokenizer.encode_chat(prompt.messages).tolist()
            elif chat:
                ids = tokenizer.encode_chat([{"role": "user", "content": prompt.text}]).tolist()
            else:
                ids = tokenizer.encode(prompt.text).tolist()
        except UserError as err:
            raise UserError(f"{prompt.where}: {err}") from err
        if not ids:
            first = tokenizer.eos_id if tokenizer.bos_id is None else tokenizer.bos_id
            if first is None:
                raise UserError(f"{prompt.where} has no tokens, and there is no BOS or EOS token to start from")
            ids = [first]
        encoded.append(ids)
    return encoded


def printable(text: str) -> str:
    r"""`text` for a terminal: control characters other than line break and tab become visible, such as `\x1b`.

    Model output may hold escape sequences, and marks that reverse the direction of writing. Works piece by piece.
    """
    unsafe = r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
    return re.sub(unsafe, lambda match: ascii(match.group())[1:-1], text)
