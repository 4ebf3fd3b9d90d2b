"""When a row ends: stop tokens, sequences and strings, or its length; and which of its text may be shown already."""

from collections.abc import Collection, Sequence
from numbers import Integral
from typing import Literal

import numpy as np

from lit_gen.tokenizer_backends import TextStream
from lit_gen.utils import UserError

FinishReason = Literal["stop", "length", "nan"]


class Row:
    """One prompt on its way. Takes its tokens one by one and says when it is finished.

    The stop that is complete first ends the row; of those that are complete at the same place the longest. So the
    borders of tokens do not change where a text ends. Nothing of a stop is in `tokens` or `text`, nor was it ever
    shown: tokens that may begin a stop sequence, and text that may begin a stop string, wait until that is decided.

        stop string "ta ga"       push("be")    push("ta")   push(" ga")
        shown by push             "be"          ""           ""            finish_reason "stop", text "be"

    Only new tokens count: a stop in the prompt ends nothing. A stop string in tokens that wait for a stop sequence
    counts once they are known not to be one.

    Attributes:
        index: place of the prompt in the input.
        prompt: its token ids.
        tokens: new token ids. After a stop string, those whose text lies wholly before it.
        finish_reason: None while running; then "stop", "length" (max_new_tokens reached) or "nan" (no token to choose).
    """

    def __init__(
        self,
        index: int,
        prompt: list[int],
        max_new_tokens: int,
        *,
        stop_ids: Collection[int] = frozenset(),
        stop_sequences: Sequence[Sequence[int]] = (),
        stop_strings: Sequence[str] = (),
        stream: TextStream | None = None,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        random: np.random.Generator | None = None,
    ) -> None:
        assert all(stop_sequences) and all(stop_strings), "an empty stop would end every row"
        assert stream is not None or not stop_strings, "stop strings need the text"
        self.index = index
        self.prompt = prompt
        self.max_new_tokens = max_new_tokens
        self.stop_ids = stop_ids
        self.stop_sequences = [list(stop) for stop in stop_sequences]
        self.stop_strings = stop_strings
        self.stream = stream
        self.temperature, self.top_k, self.top_p = temperature, top_k, top_p
        self.random = random
        self.tokens: list[int] = []
        self.finish_reason: FinishReason | None = "length" if max_new_tokens == 0 else None
        self._decoded = 0  # so many tokens went into the stream
        self._shown: list[str] = []
        self._held = ""  # the end of the text that may begin a stop string

    @property
    def columns(self) -> int:
        """Cache columns that the row may need: its last token is never fed back."""
        return len(self.prompt) + self.max_new_tokens - 1

    def uniform(self) -> float:
        """The row's next random number, in [0, 1); it draws none when it is finished or has no generator."""
        return 0.0 if self.random is None or self.finish_reason is not None else self.random.random()

    @property
    def text(self) -> str:
        """The new text so far, without the stop; "" if no stream was given."""
        return "".join(self._shown) + self._held

    def push(self, token: int) -> str:
        """Takes the next token, -1 if the row's logits were broken, and returns the text that may be shown now."""
        assert self.finish_reason is None, f"row {self.index} is finished ({self.finish_reason}) and got a token"
        reason: FinishReason | None = None
        if token < 0:
            reason = "nan"
        else:
            self.tokens.append(token)
            ended = [len(stop) for stop in self.stop_sequences if self.tokens[-len(stop) :] == stop]
            if token in self.stop_ids or ended:
                del self.tokens[-max(ended, default=1) :]
                reason = "stop"
            elif len(self.tokens) == self.max_new_tokens:
                reason = "length"
        if self.stream is None:
            self.finish_reason = reason
            return ""
        return self._read(self.stream, reason)

    def _read(self, stream: TextStream, reason: FinishReason | None) -> str:
        """Decodes the tokens that no longer wait, and looks for stop strings; returns what may be shown."""
        waiting = 0 if reason else _overlap(self.tokens, self.stop_sequences)
        pieces = [stream.push(token) for token in self.tokens[self._decoded : len(self.tokens) - waiting]]
        self._decoded += len(pieces)
        self._held += "".join(pieces) + (stream.flush() if reason else "")
        start = _find(self._held, self.stop_strings)
        if start is not None:
            self._held, reason = self._held[:start], "stop"
            text = self.text
            while not text.startswith(stream.backend.decode(self.tokens)):
                self.tokens.pop()  # also one whose last byte is a part of the stop's first character
        self.finish_reason = reason
        free = len(self._held) - (0 if reason else _overlap(self._held, self.stop_strings))
        shown, self._held = self._held[:free], self._held[free:]
        self._shown.append(shown)
        return shown


def _find(text: str, stops: Sequence[str]) -> int | None:
    """Where the stop begins that is complete first in `text`; of those that end there the longest."""
    found = [(place + len(stop), place) for stop in stops if (place := text.find(stop)) >= 0]
    return min(found)[1] if found else None


def _overlap(text: Sequence, stops: Sequence[Sequence]) -> int:
    """Length of the longest end of `text` that a stop begins with. For text and for tokens."""
    longest = min(len(text), max(map(len, stops), default=1) - 1)
    for n in range(longest, 0, -1):
        tail = text[len(text) - n :]
        if any(tail == stop[:n] for stop in stops):
            return n
    return 0


def check_stops(stops: Sequence[str | Sequence[int]]) -> None:
    """Raises UserError for what is no list of texts and id sequences, and for an empty stop, which would end all."""
    if not isinstance(stops, list | tuple):
        raise UserError(f"stop is {stops!r:.40}, but must be a list of texts or of lists of token ids")
    for i, stop in enumerate(stops):
        ids = isinstance(stop, list | tuple) and all(isinstance(token, Integral) for token in stop)
        if not isinstance(stop, str) and not ids:
            raise UserError(f"stop {i} is {stop!r:.40}, but must be a text or a list of token ids")
        if len(stop) == 0:
            raise UserError(f"stop {i} is empty: leave it out")
