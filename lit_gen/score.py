"""How probable a model finds continuations of contexts, for many of them at a time.

A token's cache column is its position in its text, and a query sees no column behind its own. So texts that begin alike
run one after the other in one cache row, each from where it differs from the one before: the choices of a question
share its context, and questions with the same examples before them share those.

    context a b c    choices d e f, d g, h        fed to the row        column of the first
                                                  a b c d e             0
                                                  d                     3
                                                  c                     2, whose logits are wanted

A row has the bits it would have alone wherever a batch's rows have them (see README).
"""

import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from lit_gen.config import Config
from lit_gen.forward import feed
from lit_gen.model import GPT
from lit_gen.plan import is_out_of_memory
from lit_gen.sampling import CHUNK
from lit_gen.settings import check_count
from lit_gen.utils import UserError, say

Pair = tuple[Sequence[int], Sequence[int]]  # ids of a context (not empty) and of its continuation
TOKENS = 2048  # in a call of the model; more are no faster
LOGITS = 2**25  # in a call: 128 MB of float32
FAMILY = 16  # so many texts that begin alike stay in one row, though others be empty


class Score(NamedTuple):
    """Of a continuation: the sum of its tokens' log-probabilities, and whether each is the most probable one."""

    logprob: float
    greedy: bool


@dataclass
class Text:
    """What is fed for one or more pairs: context and continuation, but for the last token.

    Attributes:
        tokens: (T,)
        first: logits are wanted from this column on.
        ends: of each pair its place, the column whose logits say how probable its first token is, and its last token.
        kind: which tables a longrope model takes for a text of this length.
    """

    tokens: list[int]
    first: int
    ends: list[tuple[int, int, int]]
    kind: list[bool]
    done: bool = False

    def begins_like(self, other: "Text") -> int:
        """How many first tokens have the same keys and values as those of another text."""
        if self.kind != other.kind:
            return 0
        pairs = zip(self.tokens, other.tokens, strict=False)
        return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(self.tokens), len(other.tokens)))


@dataclass
class CacheRow:
    """The text that is in a cache row, up to column `filled`, those that follow, and what was found so far."""

    run: deque[Text] = field(default_factory=deque)
    text: Text | None = None
    filled: int = 0
    found: list[tuple[float, bool]] = field(default_factory=list)  # of the tokens after columns first, first + 1, ...

    @property
    def left(self) -> int:
        """Tokens of the text that are still to be fed."""
        return 0 if self.text is None else len(self.text.tokens) - self.filled

    def advance(self, runs: deque[deque[Text]]) -> None:
        """Goes on to the next text once this one is through."""
        if self.left > 0:
            return
        if not self.run and runs:
            self.run = runs.popleft()
        if self.run:
            old, self.text = self.text, self.run.popleft()
            self.filled, self.found = min(self.text.first, old.begins_like(self.text) if old else 0), []

    def stop(self, tokens: int, logits: int) -> int:
        """The end of the next piece, if so many tokens may be fed and so many logits computed."""
        return min(self.filled + min(self.left, tokens), max(self.filled, self.text.first) + logits)

    def next_tokens(self, stop: int) -> list[list[int]]:
        """What is asked after each column whose logits the piece gives: the next token, or the pairs' last ones."""
        tokens = self.text.tokens
        ends = [[last for *_, last in self.text.ends]] if stop == len(tokens) else []
        start = max(self.filled, self.text.first)
        return [[token] for token in tokens[start + 1 : stop + 1]] + ends

    def scores(self) -> Iterator[tuple[int, Score]]:
        """Place and score of each pair, once the text is through."""
        n = len(self.text.tokens) - 1 - self.text.first
        for (place, begin, _), end in zip(self.text.ends, self.found[n:], strict=True):
            logprobs, hits = zip(*self.found[begin - self.text.first : n], end, strict=True)
            yield place, Score(math.fsum(logprobs), all(hits))


@torch.inference_mode()
def score(
    model: GPT, pairs: Sequence[Pair], max_batch_size: int = 64, max_length: int | None = None
) -> Iterator[tuple[int, Score]]:
    """Yields the place of each pair and its score as they are found, the longest first.

    Args:
        model: its cache is set up here and dropped at the end.
        pairs: equal ones are computed once. A continuation without tokens has log-probability 0.
        max_batch_size: cache rows, which is how many texts run at a time.
        max_length: most tokens of a text, by default the model's context. What is longer (its last token, which is
            never fed, does not count) is cut at the beginning.

    Raises:
        UserError: a pair cannot be scored; before any work.
    """
    check_count("max_batch_size", max_batch_size)
    yield from ((place, Score(0.0, True)) for place, (_, continuation) in enumerate(pairs) if not len(continuation))
    texts = make_texts(pairs, model.config, max_length or model.config.block_size)
    while texts:
        try:
            yield from run(model, texts, max_batch_size)
        except (RuntimeError, MemoryError) as error:
            if max_batch_size == 1 or not is_out_of_memory(error):
                raise
            max_batch_size = -(-min(max_batch_size, len(texts)) // 2)
            say(f"out of memory ({' '.join(str(error).split()):.150}): going on with {max_batch_size} texts at a time")
        texts = [text for text in texts if not text.done]


def run(model: GPT, texts: list[Text], max_batch_size: int) -> Iterator[tuple[int, Score]]:
    """Yields the place and the score of each pair of the texts, which are sorted."""
    runs = deque(make_runs(texts, max_batch_size))
    rows, columns = [CacheRow() for _ in range(min(max_batch_size, len(runs)))], max(len(text.tokens) for text in texts)
    model.set_kv_cache(len(rows), columns)
    epoch, several = model.cache_epoch, any(rope.kind == "longrope" for rope in model.config.ropes)
    try:
        while True:
            for row in rows:
                row.advance(runs)
            if not any(row.left for row in rows):
                return
            if several:
                model.set_row_length([len(row.text.tokens) if row.text else 0 for row in rows])
            yield from step(model, rows, columns)
    finally:
        if model.cache_epoch == epoch:  # else it is another job's by now
            model.clear_kv_cache()


def make_texts(pairs: Sequence[Pair], config: Config, max_length: int) -> list[Text]:
    """The texts to feed, each once, sorted so that those that begin alike follow each other."""
    ropes = [rope for rope in config.ropes if rope.kind == "longrope"]
    texts: dict[tuple[int, ...], Text] = {}
    for place, (context, continuation) in enumerate(pairs):
        n = len(continuation)
        if n == 0:
            continue
        if not len(context):
            raise UserError(f"pair {place} has no context: give it at least one token, such as the tokenizer's bos_id")
        if n > max_length:
            raise UserError(
                f"pair {place} has a continuation of {n} tokens, but the model takes {max_length}: shorten it"
            )
        *tokens, last = [*context, *continuation][-(max_length + 1) :]
        if unknown := [token for token in (*tokens, last) if not 0 <= token < config.vocab_size]:
            raise UserError(f"pair {place} has the token {unknown[0]}, but the model has only {config.vocab_size}")
        kind, begin = [len(tokens) > rope.original_max_seq_len for rope in ropes], len(tokens) - n
        text = texts.setdefault(tuple(tokens), Text(tokens, begin, [], kind))
        text.first = min(text.first, begin)
        text.ends.append((place, begin, last))
    return sorted(texts.values(), key=lambda text: (text.kind, text.tokens))


def make_runs(texts: list[Text], max_batch_size: int) -> list[deque[Text]]:
    """Texts that run one after the other in a row, the longest first: what shares a context, or at least its half."""
    most = max(FAMILY, -(-len(texts) // max_batch_size))
    runs: list[deque[Text]] = []
    for text in texts:
        alike = runs[-1][-1].begins_like(text) if runs else 0
        related = alike > text.first or 2 * alike >= len(text.tokens)
        if alike and related and len(runs[-1]) < most:
            runs[-1].append(text)
        else:
            runs.append(deque([text]))
    return sorted(runs, key=lambda run: -max(len(text.tokens) for text in run))


def step(model: GPT, rows: Sequence[CacheRow], columns: int) -> Iterator[tuple[int, Score]]:
    """One call of the model: the next piece of each row that there is room for."""
    stops, tokens, logits = [], TOKENS, max(1, LOGITS // model.config.vocab_size)
    if not model.by_token:  # a rectangle: no row may be longer than the others' share, and it has all logits or none
        tokens, logits = (max(1, n // len(rows)) for n in (tokens, logits))
        contexts = any(row.left and row.filled < row.text.first for row in rows)
    for row in rows:
        stop = row.stop(tokens, logits) if row.left else row.filled
        if model.by_token:
            tokens, logits = tokens - (stop - row.filled), logits - max(0, stop - max(row.filled, row.text.first))
        elif contexts:
            stop = max(row.filled, min(stop, row.text.first)) if row.left else stop
        stops.append(stop)
    pieces = [row.text.tokens[row.filled : stop] if row.left else [] for row, stop in zip(rows, stops, strict=True)]
    starts = [row.filled for row in rows]
    skip = [max(0, row.text.first - row.filled) if row.text else 0 for row in rows]
    asked = [row.next_tokens(stop) if p else [] for row, stop, p in zip(rows, stops, pieces, strict=True)]
    found = iter(look_up(feed(model, pieces, starts, columns, skip), [token for row in asked for token in row]))
    for place, (row, stop) in enumerate(zip(rows, stops, strict=True)):
        for following in asked[place]:
            row.found += [next(found) for _ in following]
        row.filled = stop
        if not pieces[place] or row.left > 0:
            continue
        yield from row.scores()
        row.text.done = True
        if any(math.isnan(logprob) for logprob, _ in row.found):  # NaN is infectious: 0 times what is not seen
            model.move_kv_cache(-1, place)
            row.text = None


def look_up(logits: Tensor, tokens: Sequence[Sequence[int]]) -> list[tuple[float, bool]]:
    """For logits (n, V) and some tokens for each row: the log-probability of each, and whether it is the best one."""
    asked = [(i, token) for i, some in enumerate(tokens) for token in some]
    index, wanted = torch.tensor(asked, device=logits.device, dtype=torch.int64).view(-1, 2).T  # (k,) each
    found, n = [], max(1, CHUNK // logits.size(1))
    for start in range(0, len(logits), n):
        part = logits[start : start + n].float()
        here = (index >= start) & (index < start + n)
        i, token = index[here] - start, wanted[here]
        values, hits = part.log_softmax(-1)[i, token], part.argmax(-1)[i] == token
        found += zip(values.tolist(), hits.tolist(), strict=True)
    return found
