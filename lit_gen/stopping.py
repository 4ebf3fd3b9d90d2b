"""When a row ends: stop tokens, sequences and strings, or its length; and which of its text may be shown already."""

from collections.abc import Collection, Sequence
from copy import copy
from typing import Any, Literal

import numpy as np
import torch

from lit_gen.penalties import Processor, RowHistory
from lit_gen.sampling import Sampler, row_stream
from lit_gen.settings import Settings
from lit_gen.tokenizer_backends import TextStream

FinishReason = Literal["stop", "length", "nan", "error"]
LogProb = tuple[float, list[tuple[int, float]]]  # of the token, and of the best tokens by id


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
        index: its place among the rows that are run, prompt by prompt.
        prompt: token ids of the prompt.
        settings: how to go on from it.
        prompt_index: place of the prompt in the input.
        sample: which of the prompt's `settings.n` rows this is.
        tokens: new token ids. After a stop string, those whose text lies wholly before it.
        logprobs: one entry per token, if `settings.logprobs` asks for them.
        finish_reason: None while running; then "stop", "length" (max_new_tokens reached), "nan" (no token to choose) or
            "error".
        error: what went wrong, after "nan" and "error".
        search: the search it is a beam of, and its score in the end; see beams.py.
        filled: cache columns that hold its tokens.
    """

    def __init__(
        self,
        index: int,
        prompt: list[int],
        settings: Settings,
        *,
        prompt_index: int = 0,
        sample: int = 0,
        occurrence: int = 0,
        stop_ids: Collection[int] = frozenset(),
        stream: TextStream | None = None,
    ) -> None:
        self.index, self.prompt_index, self.sample = index, prompt_index, sample
        self.prompt = prompt
        self.settings = settings
        self.stop_ids = stop_ids
        self.stop_strings = [stop for stop in settings.stop if isinstance(stop, str)]
        self.stop_sequences = [list(stop) for stop in settings.stop if not isinstance(stop, str)]
        assert stream is not None or not self.stop_strings, "stop strings need the text"
        self.stream = stream
        self.tokens: list[int] = []
        self.logprobs: list[LogProb] | None = None if settings.logprobs is None else []
        self.finish_reason: FinishReason | None = None
        self.error: str | None = None
        self.search: Any = None
        self.score: float | None = None
        self.filled = 0
        self._occurrence = occurrence
        self._noise: np.ndarray | None = None
        self.history = RowHistory(prompt, settings)
        self._decoded = 0  # so many tokens went into the stream
        self._shown: list[str] = []
        self._held = ""  # the end of the text that may begin a stop string

    @property
    def columns(self) -> int:
        """Cache columns that the row may need: its last token is never fed back."""
        return len(self.prompt) + self.settings.max_new_tokens - 1

    @property
    def noise(self) -> np.ndarray | None:
        """(max_new_tokens,) float64 random numbers in [0, 1), the t-th for its t-th token; None if it is greedy."""
        if self.settings.temperature > 0 and self._noise is None:
            stream = row_stream(self.settings.seed, self.prompt, self._occurrence, self.sample)
            self._noise = stream.random(self.settings.max_new_tokens)
        return self._noise

    @property
    def prefilled(self) -> bool:
        """Whether the whole prompt is in the cache."""
        return self.filled >= len(self.prompt)

    @property
    def up_to_date(self) -> bool:
        """Whether everything before the next token is in the cache; not so for a row that starts again."""
        return self.filled == len(self.prompt) + len(self.tokens)

    @property
    def next_input(self) -> int:
        """The token to feed at cache column `filled`."""
        return self.tokens[self.filled - len(self.prompt)]

    def fork(self) -> "Row":
        """Another row that has come just as far, and goes on by itself."""
        other = copy(self)
        other.tokens, other._shown = self.tokens.copy(), self._shown.copy()
        other.logprobs = None if self.logprobs is None else self.logprobs.copy()
        other.stream = None if self.stream is None else self.stream.fork()
        return other

    def fail(self, message: str) -> None:
        """Ends the row with an error."""
        self.finish_reason, self.error = "error", message

    @property
    def text(self) -> str:
        """The new text so far, without the stop; "" if no stream was given."""
        return "".join(self._shown) + self._held

    def push(self, token: int, logprob: LogProb | None = None) -> str:
        """Takes the next token, -1 if the row's logits were broken, and returns the text that may be shown now."""
        assert self.finish_reason is None, f"row {self.index} is finished ({self.finish_reason}) and got a token"
        reason: FinishReason | None = None
        if token < 0:
            reason = "nan"
        else:
            self.tokens.append(token)
            if self.logprobs is not None and logprob is not None:
                self.logprobs.append(logprob)
            ended = [len(stop) for stop in self.stop_sequences if self.tokens[-len(stop) :] == stop]
            if token in self.stop_ids or ended:
                del self.tokens[-max(ended, default=1) :]
                reason = "stop"
            elif len(self.tokens) == self.settings.max_new_tokens:
                reason = "length"
        shown = ""
        if self.stream is None:
            self.finish_reason = reason
        else:
            shown = self._read(self.stream, reason)
        if self.finish_reason == "nan":
            self.error = f"the logits of new token {len(self.tokens)} are not numbers"
        if self.finish_reason is not None and self.logprobs is not None:
            del self.logprobs[len(self.tokens) :]
        return shown

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


def sampler_of(rows: Sequence[Row], device: torch.device, processors: Sequence[Processor] = ()) -> Sampler:
    """Chooses the next tokens of these rows, from where each stands now."""
    settings, histories = [row.settings for row in rows], [row.history for row in rows]
    texts, noise = ([row.prompt for row in rows], [row.tokens for row in rows]), [row.noise for row in rows]
    return Sampler(settings, *texts, noise, device, processors, histories)
