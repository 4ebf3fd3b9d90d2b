"""What `--prompts` accepts (a list, a text, a .txt or .jsonl file, a pipe, `-` for stdin), line by line, down to ids.

`prompt_lines.py` reads one line of a .jsonl file, `openai_batch.py` one in OpenAI's batch format.
"""

import codecs
import hashlib
import json
import os
import stat
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import BinaryIO

from lit_gen import openai_batch, prompt_lines
from lit_gen.prompt_lines import Prompt
from lit_gen.tokenizer import Tokenizer
from lit_gen.utils import UserError

ENDINGS = (".txt", ".jsonl")


def read_prompts(prompts: str | list[str]) -> Iterator[Prompt]:
    """Reads the value of `--prompts`, a line only when it is asked for.

    - a list: a prompt each; the empty text is a prompt
    - `-`: stdin, as a .jsonl file if its first line that is not blank begins with `{`, else as a .txt file
    - a path that ends in .txt: a prompt a line. The line break is no part of it, and blank lines are skipped
    - a path that ends in .jsonl: an object a line, with `"prompt"` (a text or a list of token ids) or `"messages"`
      (`[{"role": "...", "content": "..."}]`), and if you like with an `"id"` and with settings by name; or a request in
      OpenAI's batch format (openai_batch.py). null as a setting means not given. Blank lines are skipped
    - a pipe, such as `<(...)` of a shell: as its ending says, or else as stdin
    - any other text that is not the name of a file: one prompt

    Files are UTF-8; a byte order mark and Windows line breaks are accepted. What is wrong with a line is its prompt's
    `error`, and nothing is raised. Memory does not grow with the file, but for a digest of each id, about 84 bytes.

    Raises:
        UserError: at once if the file cannot be read; at the end if there was no prompt.
    """
    if isinstance(prompts, list):
        return _some(_read_list(prompts), "the list")
    if prompts == "-":
        if sys.stdin is None:
            raise UserError("stdin is closed: give the prompts in another way")
        return _some(_read_file(nullcontext(sys.stdin.buffer), "stdin", jsonl=None), "stdin")
    if _is_path(prompts):
        source = prompts if prompts.isprintable() else ascii(prompts)
        jsonl = prompts.endswith(".jsonl") if prompts.endswith(ENDINGS) else None
        return _some(_read_file(_open(prompts), source, jsonl), source)
    if prompts.lstrip().startswith('["'):
        raise UserError(f"--prompts looks like a JSON list of texts but is none: {prompts[:60]!r}")
    return _read_list([prompts])


def digest_read(prompts: list[Prompt]) -> tuple[str, int]:
    """A sha256 of prompts that can be read only once, and how many there are."""
    return hashlib.sha256(repr(prompts).encode()).hexdigest(), len(prompts)


def digest_prompts(prompts: str | list[str]) -> tuple[str, int]:
    """The sha256 of all prompts (of a file its bytes, else those of the list as JSON), and how many there are.

    Raises:
        UserError: the file cannot be read.
    """
    assert not is_stream(prompts), "stdin and pipes can be read only once"
    if isinstance(prompts, list) or not _is_path(prompts):
        texts = prompts if isinstance(prompts, list) else [prompts]
        return hashlib.sha256(json.dumps(texts).encode()).hexdigest(), len(texts)
    digest, count = hashlib.sha256(), 0
    with _open(prompts) as file:
        for number, line in enumerate(file, start=1):
            digest.update(line)
            count += not _is_blank(_content(line, number))
    return digest.hexdigest(), count


def is_stream(prompts: str | list[str]) -> bool:
    """Whether this can be read only once: stdin or a pipe."""
    return prompts == "-" or (isinstance(prompts, str) and stat.S_ISFIFO(_mode(prompts)))


def _mode(path: str) -> int:
    """What kind of file this is, for the `stat` module; 0 if there is none."""
    try:
        return os.stat(path).st_mode
    except (OSError, ValueError):  # ValueError: a text that cannot be a path
        return 0


def _is_path(prompts: str) -> bool:
    """Whether this names a file of prompts; UserError if it is one of another kind, and hardly a prompt."""
    mode = _mode(prompts)
    if prompts.endswith(ENDINGS) or stat.S_ISFIFO(mode):
        return True
    if mode and not stat.S_ISDIR(mode):
        remedy = 'let its name end in .txt or .jsonl, or read it from stdin: --prompts - < FILE (a prompt is ["..."])'
        raise UserError(f"--prompts is the file {prompts!r}, but its name does not say how to read it: {remedy}")
    return False


def _open(path: str) -> BinaryIO:
    if (mode := _mode(path)) and not (stat.S_ISREG(mode) or stat.S_ISFIFO(mode) or stat.S_ISDIR(mode)):
        raise UserError(f"the prompts file {path!r} is a device or a socket: give a file, a pipe or - for stdin")
    try:
        return Path(path).open("rb")
    except OSError as err:
        raise UserError(
            f'cannot read the prompts file {path!r}: {err.strerror} (if it is a prompt, write ["..."])'
        ) from err


def _some(prompts: Iterator[Prompt], source: str) -> Iterator[Prompt]:
    """The same prompts; UserError at the end if there was none."""
    found = False
    for prompt in prompts:
        found = True
        yield prompt
    if not found:
        raise UserError(f"no prompt in {source}: give at least one")


def _read_list(texts: list[str]) -> Iterator[Prompt]:
    for index, text in enumerate(texts):
        where = f"prompt {index}"
        try:  # what Python makes of an argument that is not UTF-8
            prompt_lines.check_unicode(text)
        except UserError as err:
            yield Prompt(where=where, index=index, error=f"{where}: {err}")
        else:
            yield Prompt(text=text, where=where, index=index)


def _read_file(opened: AbstractContextManager[BinaryIO], source: str, jsonl: bool | None) -> Iterator[Prompt]:
    """A prompt per line that is not blank; `jsonl=None` lets the first of them decide the format."""
    index, seen = 0, set()
    with opened as file:
        for number, raw in enumerate(file, start=1):
            line, where = _content(raw, number), f"line {number} of {source}"
            if _is_blank(line):
                continue
            if jsonl is None:
                jsonl = line.lstrip().startswith(b"{")
            prompt = (_parse_json if jsonl else _parse_text)(line, where, index)
            if prompt.id is not None:
                name = hashlib.blake2b(repr(prompt.id).encode(), digest_size=8).digest()
                key = int.from_bytes(name, "big")
                if key in seen and prompt.error is None:
                    prompt = _failed(prompt, f"an earlier line has the id {prompt.id!r:.40} too: ids must differ")
                seen.add(key)
            yield prompt
            index += 1


def _content(line: bytes, number: int) -> bytes:
    """A line, counted from 1, without its line break, and without the mark that may begin a file."""
    line = line.removesuffix(b"\n").removesuffix(b"\r")
    return line.removeprefix(codecs.BOM_UTF8) if number == 1 else line


def _is_blank(line: bytes) -> bool:
    return not line.decode(errors="replace").strip()


def _parse_text(line: bytes, where: str, index: int) -> Prompt:
    """One line of a .txt file."""
    prompt = Prompt(where=where, index=index)
    try:
        prompt.text = line.decode()
    except UnicodeDecodeError as err:
        return _failed(prompt, prompt_lines.not_utf8(err))
    return prompt


def _parse_json(line: bytes, where: str, index: int) -> Prompt:
    """One line of a .jsonl file."""
    prompt = Prompt(where=where, index=index)
    try:
        data, problem = prompt_lines.load_object(line)
        is_openai = "custom_id" in data
        prompt.id = prompt_lines.as_name(data.get("custom_id" if is_openai else "id"))
        if is_openai:
            prompt.openai = openai_batch.identify(data)
        if problem:
            raise UserError(problem)
        prompt_lines.check_unicode(data)
        (openai_batch.fill if is_openai else prompt_lines.fill)(prompt, data)
    except UserError as err:
        return _failed(prompt, err)
    return prompt


def _failed(prompt: Prompt, error: UserError | str) -> Prompt:
    """What is left of a prompt that cannot be run: its names and the reason."""
    names = {"id": prompt.id, "where": prompt.where, "index": prompt.index, "openai": prompt.openai}
    return Prompt(**names, error=f"{prompt.where}: {error}")


def encode_prompt(prompt: Prompt, tokenizer: Tokenizer, *, chat: bool) -> list[int]:
    """Token ids of a prompt; one without any becomes the BOS token, or the EOS token if there is no BOS.

    Args:
        prompt: one without error. Token ids that the user gave are used as they are.
        tokenizer: of the model.
        chat: render texts with the chat template, as one message of the user; messages always are, and texts for
            OpenAI's /v1/completions never.

    Raises:
        UserError: names the prompt that cannot be encoded.
    """
    assert prompt.error is None, f"a prompt with an error cannot be run: {prompt.error}"
    if prompt.ids is not None:
        return prompt.ids
    try:
        if prompt.messages is not None:
            ids = tokenizer.encode_chat(prompt.messages).tolist()
        elif chat and prompt.openai is None:
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
    return ids
