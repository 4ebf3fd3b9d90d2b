"""One line of a .jsonl file of prompts: JSON read strictly, its keys checked, and what it asks for."""

import json
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

from lit_gen.settings import Settings
from lit_gen.utils import UserError

SETTINGS = tuple(setting.name for setting in fields(Settings))
MAX_DEPTH = 100  # what nests deeper could not be written again, from deeper in the call stack than it was read


class OpenAIRequest(NamedTuple):
    """What the output line of an OpenAI batch line repeats. `chat`: of /v1/chat/completions, else /v1/completions."""

    custom_id: str
    chat: bool
    model: str


@dataclass(slots=True, kw_only=True)
class Prompt:
    """One prompt. Of `text`, `messages` and `ids` one is given, or none if there is an `error`.

    Attributes:
        text: what to go on with.
        messages: `[{"role": ..., "content": ...}, ...]`.
        ids: token ids, (T,), T >= 1. Whether the model has them is not checked here.
        id: the user's own name for it, repeated in the output, or None.
        where: its name in error messages, such as "prompt 3" (counted from 0) or "line 7 of in.jsonl" (from 1).
        index: its place among the prompts, from 0; blank lines are not counted, lines with an error are.
        settings: by name (those of `Settings`), what differs from the settings of the job. Each is in range.
        error: why it cannot be run, in one line that begins with `where`; or None.
        openai: for a line in OpenAI's batch format, else None.
    """

    text: str | None = None
    messages: list[dict[str, Any]] | None = None
    ids: list[int] | None = None
    id: str | int | None = None
    where: str
    index: int
    settings: dict[str, Any] = field(default_factory=dict)
    error: str | None = None
    openai: OpenAIRequest | None = None


def load_object(line: bytes) -> tuple[dict[str, Any], str | None]:
    """Reads a JSON object and says what is wrong with it although Python would read it, or None.

    That is: two keys of the same name (Python drops the first), a number beyond float64 such as 1e999 (Python's inf),
    NaN and Infinity (no JSON). The object is given nevertheless, so that an error can be reported under its id.

    Raises:
        UserError: no object can be read.
    """
    problems = []

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        data = dict(pairs)
        if len(data) != len(pairs):
            problems.append(f"two keys of an object are {Counter(key for key, _ in pairs).most_common(1)[0][0]!r:.40}")
        return data

    def number(text: str) -> int | float | None:
        value = float(text)
        if not math.isfinite(value):
            problems.append(f"the number {text:.20} is too large, or no number in JSON")
            return None
        return int(text) if text.removeprefix("-").isdigit() else value

    hooks = {"object_pairs_hook": unique, "parse_int": number, "parse_float": number, "parse_constant": number}
    try:
        data = json.loads(line.decode(), **hooks)
        if _depth(data) > MAX_DEPTH:
            raise RecursionError
    except UnicodeDecodeError as err:
        raise not_utf8(err) from err
    except json.JSONDecodeError as err:
        raise UserError(f"not valid JSON: {err.msg} at column {err.colno}") from err
    except RecursionError as err:
        raise UserError(f"not acceptable JSON: brackets nest more than {MAX_DEPTH} deep") from err
    if not isinstance(data, dict):
        raise UserError(f'holds a {type(data).__name__}, but must be an object such as {{"prompt": "..."}}')
    return data, problems[0] if problems else None


def _depth(value: Any) -> int:
    """How deep lists and objects nest; a plain value has 0."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    return 0 if inner is None else 1 + max(map(_depth, inner), default=0)


def not_utf8(err: UnicodeDecodeError) -> UserError:
    """What to say about a line of bytes that are no text."""
    return UserError(f"not UTF-8 (byte {err.start + 1} of the line): save the file as UTF-8")


def check_unicode(data: Any) -> None:
    """Refuses text that no UTF-8 file can hold: JSON can spell half of a surrogate pair, "\\ud800"."""
    try:
        json.dumps(data, ensure_ascii=False).encode()
    except UnicodeEncodeError as err:
        raise UserError(f"holds half of a surrogate pair ({err.object[err.start]!r}), which is no character") from err


def as_name(value: Any) -> str | int | None:
    """`value` if it can name a prompt in the output: an integer or a text without half surrogate pairs; else None."""
    if isinstance(value, str):
        return None if any("\ud800" <= character <= "\udfff" for character in value) else value
    return value if is_whole(value) else None


def is_whole(value: Any) -> bool:
    """Whether this is an integer of JSON; Python's truth values are integers too."""
    return isinstance(value, int) and not isinstance(value, bool)


def fill(prompt: Prompt, data: Mapping[str, Any]) -> None:
    """Puts what an object of our own format asks for into `prompt`; UserError if one of its keys is wrong."""
    unknown = sorted(data.keys() - {"prompt", "messages", "id", *SETTINGS})
    if unknown:
        raise UserError(f"unknown key {unknown[0]!r:.40}: give prompt or messages, id, and {', '.join(SETTINGS)}")
    if ("prompt" in data) == ("messages" in data):
        raise UserError("must have either the key prompt or the key messages")
    if "id" in data and as_name(data["id"]) is None:
        raise UserError(f"id is {data['id']!r:.40}, but must be a string or an integer")
    fill_content(prompt, data)
    prompt.settings = check_settings({name: data[name] for name in SETTINGS if data.get(name) is not None})


def fill_content(prompt: Prompt, data: Mapping[str, Any]) -> None:
    """The key messages or the key prompt, which is a text or a list of token ids.

    A message is role and content; other keys are the chat template's to read.
    """
    if "messages" in data:
        messages = data["messages"]
        if not isinstance(messages, list) or not messages:
            raise UserError("messages must be a list with at least one message")
        for i, message in enumerate(messages):
            good = isinstance(message, dict) and all(isinstance(message.get(key), str) for key in ("role", "content"))
            if not good:
                raise UserError(f"message {i} must be an object with the strings role and content")
        prompt.messages = messages
    elif isinstance(data["prompt"], str):
        prompt.text = data["prompt"]
    else:
        ids = data["prompt"]
        if not isinstance(ids, list) or not ids or not all(is_whole(token) and token >= 0 for token in ids):
            raise UserError(f"prompt is {ids!r:.40}, but must be a string, or a list of at least one token id")
        prompt.ids = ids


def check_settings(settings: dict[str, Any]) -> dict[str, Any]:
    """`settings` with a single stop as a list; UserError if one is out of range."""
    if isinstance(settings.get("stop"), str):
        settings = settings | {"stop": [settings["stop"]]}
    Settings().override(settings)
    return settings
