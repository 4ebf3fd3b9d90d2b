"""What changes a row's logits before a token is chosen: biases, penalties for repetition, and functions of the user."""

from collections import Counter
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lit_gen.settings import Settings
from lit_gen.utils import UserError

Processor = Callable[[Tensor, Tensor], Tensor]  # tokens (1, T), logits (1, V) -> logits (1, V)
FLOAT32 = torch.finfo(torch.float32)


class Penalties:
    """logit_bias, penalties and processors of a fixed set of rows, and what these rows have said so far.

    They apply in this order: logit_bias is added; then tokens of the prompt and the new text have their logits divided
    by repetition_penalty if positive, else multiplied (Keskar et al., CTRL, 2019, section 4.1), each token once; then
    those of the new text lose frequency_penalty times their number, and presence_penalty (OpenAI's definition); last
    come the processors, one after the other. Only a row's own numbers are looked at, each on its own, so it gets the
    bits that it would get alone.

    A penalised row keeps the tokens that it has seen, and for each how often it is in the new text. The same token may
    be there twice, then both places say the same: so rows with fewer tokens are filled up with their first.

        prompt 7 5 7, new text 5 9 5       ids    7 5 9        prompt 4, no new text       ids    4 4 4
                                           count  0 2 1                                    count  0 0 0
    """

    def __init__(
        self,
        settings: Sequence[Settings],
        prompts: Sequence[Sequence[int]],
        tokens: Sequence[Sequence[int]],
        device: torch.device | str,
        processors: Sequence[Processor] = (),
    ) -> None:
        """Takes the settings, prompt ids and new ids of each row, and processors as Hugging Face has them."""
        self.processors = processors
        self._bias = _biases(settings, device)
        rows = [b for b, row in enumerate(settings) if row.penalised]
        self._rows = torch.tensor(rows, device=device)[:, None] if rows else None  # (P, 1)
        if rows:
            self._ids, self._count = _histories([prompts[b] for b in rows], [tokens[b] for b in rows], device)  # (P, W)
            names = ("repetition_penalty", "frequency_penalty", "presence_penalty")
            table = [[float(getattr(settings[b], name)) for b in rows] for name in names]
            amounts = _in_range(torch.tensor(table, dtype=torch.float64, device=device))[..., None]  # (3, P, 1)
            amounts[0].clamp_(min=FLOAT32.tiny)
            self._amounts = amounts
        texts = zip(prompts, tokens, strict=True) if processors else ()
        self._texts = [torch.tensor([[*prompt, *new]], device=device) for prompt, new in texts]  # (1, T) each

    def apply(self, logits: Tensor) -> Tensor:
        """The changed logits (B, V), at least float32 and a copy; `logits` itself if no row wants a change.

        Raises:
            UserError: a processor returned anything but logits (1, V).
        """
        if self._bias is None and self._rows is None and not self.processors:
            return logits
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32), copy=True)  # (B, V)
        if self._bias is not None:
            rows, ids, values = self._bias
            logits[rows, ids] += values.to(logits.dtype)
        if self._rows is not None:
            repetition, frequency, presence = self._amounts.to(logits.dtype)  # (P, 1) each
            x = logits[self._rows, self._ids]  # (P, W)
            x = torch.where(x < 0, x * repetition, x / repetition)
            logits[self._rows, self._ids] = x - frequency * self._count - presence * (self._count > 0)
        for row, text in zip(logits.split(1), self._texts, strict=True) if self.processors else ():
            for processor in self.processors:
                row.copy_(_checked(processor(text, row), row))
        return logits

    def append(self, tokens: Tensor) -> None:
        """Takes the tokens (B,) that were chosen; -1 is none and leaves its row as it was."""
        if self._rows is not None:
            token = tokens[self._rows]  # (P, 1)
            counts = token >= 0
            token = torch.where(counts, token, self._ids[:, :1])
            same = self._ids == token  # (P, W)
            self._count += same & counts
            count = torch.maximum((self._count * same).amax(1, keepdim=True), counts.long())  # (P, 1)
            self._ids, self._count = torch.cat([self._ids, token], 1), torch.cat([self._count, count], 1)
        if self.processors:
            chosen = tokens[:, None, None].unbind()  # (1, 1) each
            grown = zip(self._texts, chosen, tokens.tolist(), strict=True)
            self._texts = [torch.cat([text, new], 1) if token >= 0 else text for text, new, token in grown]


def _biases(settings: Sequence[Settings], device: torch.device | str) -> tuple[Tensor, Tensor, Tensor] | None:
    """Row, token id and amount of every bias, (n,) each; no pair of row and id is there twice."""
    biases = [(b, *bias) for b, row in enumerate(settings) for bias in (row.logit_bias or {}).items()]
    if not biases:
        return None
    rows, ids, values = zip(*biases, strict=True)
    amounts = _in_range(torch.tensor(values, dtype=torch.float64, device=device))
    return torch.tensor(rows, device=device), torch.tensor(ids, device=device), amounts


def _in_range(amounts: Tensor) -> Tensor:
    """Amounts that are finite in float32 too: 1e300 would become inf, and inf times a count of 0 is NaN."""
    return amounts.clamp_(FLOAT32.min, FLOAT32.max)


def _histories(
    prompts: Sequence[Sequence[int]], tokens: Sequence[Sequence[int]], device: torch.device | str
) -> tuple[Tensor, Tensor]:
    """Ids that each row has seen (P, W), and how often each is among its new tokens (P, W)."""
    seen = [list(dict.fromkeys([*prompt, *new])) for prompt, new in zip(prompts, tokens, strict=True)]
    assert all(seen), "a row has at least one token"
    width = max(map(len, seen))
    ids = [row + row[:1] * (width - len(row)) for row in seen]
    counts = [Counter(new) for new in tokens]
    count = [[counter[token] for token in row] for counter, row in zip(counts, ids, strict=True)]
    return torch.tensor(ids, device=device), torch.tensor(count, device=device)


def _checked(changed: Tensor, row: Tensor) -> Tensor:
    if not isinstance(changed, Tensor) or changed.shape != row.shape:
        found = f"logits {tuple(changed.shape)}" if isinstance(changed, Tensor) else type(changed).__name__
        raise UserError(f"a logits processor returned {found}, but must return logits {tuple(row.shape)}")
    return changed
