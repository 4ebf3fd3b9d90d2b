"""How one prompt is to be continued: the settings that `generate` takes, and that one prompt may override."""

import math
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from numbers import Integral, Real
from typing import Any

from lit_gen.utils import UserError

MOST_SAMPLES = 10_000  # rows of one prompt; a slip of the finger must not make millions


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of one prompt; raises UserError that names the setting if one is out of range.

    Attributes:
        max_new_tokens: most new tokens, >= 1.
        temperature: 0 takes the best token; higher is more varied.
        top_k: sample from so many best tokens only.
        top_p: sample from the fewest best tokens whose probabilities reach this sum.
        min_p: sample from tokens only that are at least this fraction as probable as the best.
        repetition_penalty: logits of tokens in the prompt or the new text are divided by it if positive, else
            multiplied (Keskar et al., CTRL, 2019, section 4.1). 1 changes nothing.
        presence_penalty: subtracted from the logit of each token in the new text.
        frequency_penalty: subtracted as often as the token is in the new text.
        logit_bias: added to the logits, by token id.
        stop: texts and sequences of ids that end a row.
        seed: a sampled row depends on it, on its prompt and its number, never on its neighbours.
        n: rows (samples) of this prompt, up to 10,000.
        logprobs: report the log-probability of each new token, and those of so many best ones; None reports nothing.
        lora: name of the adapter, of those that were loaded by name; "base" is none of them.
    """

    max_new_tokens: int = 128
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    stop: Sequence[str | Sequence[int]] = ()
    seed: int = 1234
    n: int = 1
    logprobs: int | None = None
    lora: str | None = None

    def __post_init__(self) -> None:
        check_count("max_new_tokens", self.max_new_tokens)
        _check("n", self.n, _is_whole, lambda x: 1 <= x <= MOST_SAMPLES, f"a whole number from 1 to {MOST_SAMPLES}")
        number = "a finite number >= 0 (0 takes the best token)"
        _check("temperature", self.temperature, is_number, lambda x: x >= 0, number)
        if self.top_k is not None:
            _check("top_k", self.top_k, _is_whole, lambda x: x >= 1, "a whole number >= 1 (leave it out to keep all)")
        for name in ("top_p", "min_p"):
            if getattr(self, name) is not None:
                _check(name, getattr(self, name), is_number, lambda x: 0 <= x <= 1, "a number from 0 to 1")
        _check("repetition_penalty", self.repetition_penalty, is_number, lambda x: x > 0, "a finite number > 0")
        for name in ("presence_penalty", "frequency_penalty"):
            _check(name, getattr(self, name), is_number, lambda x: True, "a finite number")
        _check("seed", self.seed, _is_whole, lambda x: True, "a whole number")
        if self.logprobs is not None:
            _check("logprobs", self.logprobs, _is_whole, lambda x: x >= 0, "a whole number >= 0")
        if self.lora is not None and not isinstance(self.lora, str):
            raise UserError(f"lora is {self.lora!r:.40}, but must be the name of an adapter")
        if self.logit_bias is not None:
            if not isinstance(self.logit_bias, Mapping):
                raise UserError(f"logit_bias is {self.logit_bias!r:.40}, but must map token ids to numbers")
            bias = {_token_id(token): _bias(token, value) for token, value in self.logit_bias.items()}
            if len(bias) < len(self.logit_bias):
                raise UserError("logit_bias names a token twice, in two spellings: keep one of them")
            object.__setattr__(self, "logit_bias", bias or None)
        object.__setattr__(self, "stop", check_stops(self.stop))

    def override(self, changes: Mapping[str, Any]) -> "Settings":
        """These settings with some of them changed; UserError for a name that is none of them."""
        check_names(changes)
        return replace(self, **changes)

    @property
    def penalised(self) -> bool:
        """Whether the choice of a token depends on those before it."""
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1.0, 0.0, 0.0)


def check_names(settings: Any) -> None:
    """Raises UserError for what is no mapping, and for a name that is none of the settings'."""
    known = [field.name for field in fields(Settings)]
    if not isinstance(settings, Mapping):
        raise UserError(f"settings are {settings!r:.40}, but must be given by name: {', '.join(known)}")
    for name in settings:
        if name not in known:
            raise UserError(f"there is no setting {name!r:.40}: use {', '.join(known)}")


def check_count(name: str, value: Any) -> None:
    """Raises UserError unless this is a whole number >= 1."""
    _check(name, value, _is_whole, lambda x: x >= 1, "a whole number >= 1")


def _check(name: str, value: Any, kind: Callable, good: Callable[[Any], bool], wanted: str) -> None:
    if not (kind(value) and good(value)):
        raise UserError(f"{name} is {value!r:.40}, but must be {wanted}")


def _is_whole(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def is_number(value: object) -> bool:
    """Whether this is a finite number that fits into a float, and no truth value."""
    try:
        return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:  # an integer of hundreds of digits
        return False


def _token_id(token: Any) -> int:
    """A key of logit_bias; in JSON keys are text."""
    if isinstance(token, str) and token.isascii() and token.isdigit() and len(token) < 10:
        return int(token)
    if not _is_whole(token) or token < 0:
        raise UserError(f"logit_bias has the key {token!r:.40}, but its keys must be token ids")
    return int(token)


def _bias(token: Any, value: Any) -> float:
    _check(f"logit_bias of token {token}", value, is_number, lambda x: True, "a finite number")
    return float(value)


def check_stops(stops: Any) -> tuple[str | tuple[int, ...], ...]:
    """Stops as tuples; UserError for what is no list of texts and id sequences, and for an empty one."""
    if not isinstance(stops, list | tuple):
        raise UserError(f"stop is {stops!r:.40}, but must be a list of texts or of lists of token ids")
    for i, stop in enumerate(stops):
        ids = isinstance(stop, list | tuple) and all(map(_is_whole, stop))
        if not isinstance(stop, str) and not ids:
            raise UserError(f"stop {i} is {stop!r:.40}, but must be a text or a list of token ids")
        if len(stop) == 0:
            raise UserError(f"stop {i} is empty: leave it out")
    return tuple(stop if isinstance(stop, str) else tuple(map(int, stop)) for stop in stops)


ALL = range(2**31)  # every sample of a prompt


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt with settings of its own.

    Attributes:
        prompt: token ids, (T,).
        settings: what differs from the settings of the job, by name.
        name: what to call it in a message, such as "line 7 of in.jsonl"; by default "prompt 6".
        error: why it cannot be run; it then ends at once with that message, and harms no other.
        done: its samples that are not to be run again.
        place: which prompt of the input it is; by default how many came before.
    """

    prompt: Sequence[int]
    settings: Mapping[str, Any] | None = None
    name: str | None = None
    error: str | None = None
    done: Container[int] = ()
    place: int | None = None
