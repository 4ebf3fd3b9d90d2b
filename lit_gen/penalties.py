"""What changes a row's logits before a token is chosen: biases, penalties for repetition, and functions of the user."""

from array import array
from collections.abc import Callable, Sequence
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from lit_gen.settings import Settings
from lit_gen.utils import UserError

Processor = Callable[[Tensor, Tensor], Tensor]  # tokens (1, T), logits (1, V) -> logits (1, V)
FLOAT32 = torch.finfo(torch.float32)
ROOM = 64  # entries per row that the table of seen tokens has room for at first


class RowHistory:
    """What a row has said so far, in the form that `Penalties` wants; kept as long as the row runs.

    The rows that run change at almost every step. With a history of each row, new `Penalties` join arrays: 64 rows with
    8,000 tokens take 3 ms, and 230 ms without. Nothing is done before the first `take`.

    Attributes:
        text: prompt and new tokens.
        ids: tokens that a penalty may change, each once: those of the prompt if there is a repetition penalty, and the
            new ones. With `counts`: how often each is in the new text.
        places: where a token is in `ids`.
    """

    def __init__(self, prompt: Sequence[int], settings: Settings) -> None:
        self.prompt, self.settings = prompt, settings
        self.text, self.ids, self.counts = array("q"), array("q"), array("q")
        self.places: dict[int, int] = {}

    def take(self, tokens: Sequence[int]) -> None:
        """Reads on in all of the row's new tokens, from where the last call ended."""
        if not self.text:
            self.text.extend(self.prompt)
            if self.settings.repetition_penalty != 1:
                self.ids.extend(dict.fromkeys(self.prompt))
                self.counts.extend([0] * len(self.ids))
                self.places = dict(zip(self.ids, range(len(self.ids)), strict=True))
        new = tokens[len(self.text) - len(self.prompt) :]
        self.text.extend(new)
        assert len(self.text) == len(self.prompt) + len(tokens), "a row that runs loses no token"
        for token in new if self.settings.penalised else ():
            place = self.places.setdefault(token, len(self.ids))
            if place == len(self.ids):
                self.ids.append(token)
                self.counts.append(0)
            self.counts[place] += 1

    @cached_property
    def bias(self) -> tuple[np.ndarray, np.ndarray]:
        """Token ids and amounts of logit_bias, (n,) each."""
        bias = self.settings.logit_bias or {}
        return np.array([*bias], dtype=np.int64), _in_range([*bias.values()])


class Penalties:
    """logit_bias, penalties and processors of a fixed set of rows, and what these rows have said so far.

    They apply in this order: logit_bias is added; then tokens of the prompt and the new text have their logits divided
    by repetition_penalty if positive, else multiplied (Keskar et al., CTRL, 2019, section 4.1), each token once; then
    those of the new text lose frequency_penalty times their number, and presence_penalty (OpenAI's definition); last
    come the processors, one after the other. Only a row's own numbers are looked at, each on its own, so it gets the
    bits that it would get alone.
    """

    def __init__(
        self,
        settings: Sequence[Settings],
        prompts: Sequence[Sequence[int]],
        tokens: Sequence[Sequence[int]],
        device: torch.device | str,
        processors: Sequence[Processor] = (),
        histories: Sequence[RowHistory] | None = None,
    ) -> None:
        """Takes the settings, prompt ids and new ids of each row, and processors as Hugging Face has them.

        `histories` are of these rows, in whatever earlier `Penalties` they were; made anew by default.
        """
        if histories is None:
            histories = [RowHistory(prompt, row) for prompt, row in zip(prompts, settings, strict=True)]
        self.processors = processors
        rows = [b for b, row in enumerate(settings) if row.penalised]
        for b in range(len(settings)) if processors else rows:
            histories[b].take(tokens[b])
        self._bias = _biases(histories, device)
        self._seen = SeenTokens(rows, histories, device) if rows else None
        texts = (np.array(history.text)[None] for history in histories) if processors else ()
        self._texts = [torch.from_numpy(text).to(device) for text in texts]  # (1, T) each

    def apply(self, logits: Tensor) -> Tensor:
        """The changed logits (B, V), at least float32 and a copy; `logits` itself if no row wants a change.

        Raises:
            UserError: a processor returned anything but logits (1, V).
        """
        if self._bias is None and self._seen is None and not self.processors:
            return logits
        dtype = torch.promote_types(logits.dtype, torch.float32)
        logits = logits.to(dtype, copy=True, memory_format=torch.contiguous_format)  # (B, V)
        if self._bias is not None:
            rows, ids, values = self._bias
            logits[rows, ids] += values.to(dtype)
        if self._seen is not None:
            self._seen.penalise(logits)
        for row, text in zip(logits.split(1), self._texts, strict=True) if self.processors else ():
            for processor in self.processors:
                row.copy_(_checked(processor(text, row), row))
        return logits

    def append(self, tokens: Tensor) -> None:
        """Takes the tokens (B,) that were chosen; -1 is none and leaves its row as it was."""
        if self._seen is None and not self.processors:
            return
        chosen = tokens.tolist()
        if self._seen is not None:
            self._seen.append(chosen)
        if self.processors:
            grown = zip(self._texts, tokens[:, None, None].unbind(), chosen, strict=True)  # (1, 1) each
            self._texts = [torch.cat([text, new], 1) if token >= 0 else text for text, new, token in grown]


class SeenTokens:
    """What penalised rows have seen: an entry for each row and token, so many as all texts need, not rows x longest.

    Entries stand row after row; those of tokens that come later stand at the end.

        row 0: prompt 7 5 7, new text 5 9 5     row    0 0 0 1           tokens 9 and 2     row    0 0 0 1 1
        row 1: prompt 4, no new text            id     7 5 9 4           are appended:      id     7 5 9 4 2
                                                count  0 2 1 0                              count  0 2 2 0 1
    """

    def __init__(self, rows: Sequence[int], histories: Sequence[RowHistory], device: torch.device | str) -> None:
        """Takes the numbers of the penalised rows, and the histories of all rows, up to date."""
        self._rows, self._histories = rows, histories
        own = [histories[b] for b in rows]
        self._sizes = [len(history.ids) for history in own]
        self._starts = np.cumsum([0, *self._sizes]).tolist()
        self._n = n = self._starts.pop()
        self._later: dict[tuple[int, int], int] = {}  # where a row's token is that came later
        table = np.empty((3, n + ROOM * len(rows)), dtype=np.int64)
        table[0, :n] = np.repeat(rows, self._sizes)
        np.concatenate([np.asarray(history.ids) for history in own], out=table[1, :n])
        np.concatenate([np.asarray(history.counts) for history in own], out=table[2, :n])
        self._entries = torch.from_numpy(table).to(device)  # (3, room): row, id, count
        settings = [history.settings for history in histories]
        table = [[row.repetition_penalty, row.frequency_penalty, row.presence_penalty] for row in settings]
        amounts = _in_range(table).T.copy()  # (3, B)
        self._repeats, self._counts = (amounts[0] != 1).any(), amounts[1:].any()
        amounts[0].clip(FLOAT32.tiny, out=amounts[0])
        self._amounts = torch.from_numpy(amounts).to(device)

    def penalise(self, logits: Tensor) -> None:
        """Changes logits (B, V), contiguous, in place."""
        row, ids, count = self._entries[:, : self._n]  # (n,) each
        repetition, frequency, presence = self._amounts.to(logits.dtype)  # (B,) each
        cells = torch.add(ids, row, alpha=logits.size(1))  # indexing with (row, ids) takes twice as long
        x = logits.view(-1).index_select(0, cells)
        if self._repeats:
            amount = repetition.index_select(0, row)
            x = torch.where(x < 0, x * amount, x / amount)
        if self._counts:
            x -= frequency.index_select(0, row).mul_(count)
            x -= presence.index_select(0, row).mul_(count > 0)
        logits.view(-1).index_copy_(0, cells, x)

    def append(self, tokens: Sequence[int]) -> None:
        """Takes the tokens (B,) that were chosen; -1 is none."""
        places, new = [], []  # of all tokens; entries to be made
        for b, size, start in zip(self._rows, self._sizes, self._starts, strict=True):
            token = tokens[b]
            if token < 0:
                continue
            place, end = self._histories[b].places.get(token, size), self._n + len(new)
            # The history may have read on for other `Penalties`: what lies beyond `size` came later.
            place = start + place if place < size else self._later.setdefault((b, token), end)
            if place == end:
                new.append((b, token, 0))
            places.append(place)
        first, self._n = self._n, self._n + len(new)
        while self._n > self._entries.size(1):
            self._entries = torch.cat([self._entries, torch.empty_like(self._entries)], 1)
        if new:
            self._entries[:, first : self._n] = torch.tensor(new).T
        index = torch.tensor(places, dtype=torch.int64, device=self._entries.device)
        self._entries[2].index_add_(0, index, torch.ones_like(index))


def _biases(histories: Sequence[RowHistory], device: torch.device | str) -> tuple[Tensor, Tensor, Tensor] | None:
    """Row, token id and amount of every bias, (n,) each; no pair of row and id is there twice."""
    rows = [b for b, history in enumerate(histories) if history.settings.logit_bias]
    if not rows:
        return None
    ids, amounts = zip(*(histories[b].bias for b in rows), strict=True)
    table = np.repeat(rows, list(map(len, ids))), np.concatenate(ids), np.concatenate(amounts)
    return tuple(torch.from_numpy(column).to(device) for column in table)


def _in_range(amounts: Sequence) -> np.ndarray:
    """Amounts that are finite in float32 too: 1e300 would become inf, and inf times a count of 0 is NaN."""
    return np.array(amounts, dtype=np.float64).clip(FLOAT32.min, FLOAT32.max)


def _checked(changed: Tensor, row: Tensor) -> Tensor:
    if not isinstance(changed, Tensor) or changed.shape != row.shape:
        found = f"logits {tuple(changed.shape)}" if isinstance(changed, Tensor) else type(changed).__name__
        raise UserError(f"a logits processor returned {found}, but must return logits {tuple(row.shape)}")
    return changed
