"""Which rows run, and where: plain Python that decides; `generate` copies keys and values and calls the model.

Running rows fill cache rows 0, 1, 2, ... without a gap, so no step computes a row that has ended:

    running A B C D, waiting E F      B ends: A D C      E comes: A D C E

A prompt longer than the prefill budget runs in pieces, between the steps of the others; until it is through it stays
behind all rows that decode.
"""

import sys
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from lit_gen.cache import SPAN, Side
from lit_gen.model import GPT
from lit_gen.penalties import Processor
from lit_gen.plan import OUT_OF_MEMORY
from lit_gen.speculate import Speculation
from lit_gen.stopping import LogProb, Row


@dataclass(frozen=True)
class Piece:
    """A part of a prompt, which is prefilled in one call."""

    row: Row
    cache_row: int
    start: int
    stop: int  # columns start, ..., stop - 1

    @property
    def tokens(self) -> list[int]:
        return self.row.prompt[self.start : self.stop]

    @property
    def ends(self) -> bool:
        """Whether the prompt is through after it."""
        return self.stop == len(self.row.prompt)


class Batch:
    """The rows of a job: those that wait, those that run, and those that have ended and were not handed out yet.

    Args:
        rows: all rows, in the order in which they start; taken one by one, when there is room.
        max_rows: so many run at a time.
        max_columns: cache columns of all rows together, that is rows x columns of the longest; one row always fits.
        budget: prompt tokens to prefill between two steps.
        padding_side: prefill pieces as one rectangle.
        processors: are called for each row before its token is chosen.
        on_text: called with a row and the next piece of its text.
        on_step: called between two steps.
        speculate: check up to so many guesses of each row in a step.

    Attributes:
        width: cache rows of each prompt; with a search (see beams.py) more than one.
        running: the place in this list is the cache row.
        shape: rows and columns that the cache must have.
        moves: cache rows to copy, in this order: source (-1 means zeros), target and, if not all, which columns.
        pieces: of prompts, to be prefilled next; their cache rows follow each other.
        more: whether rows wait, as far as was asked.
        changed: whether the next step's rows differ from those of the last one.
    """

    def __init__(
        self,
        rows: Iterable[Row],
        max_rows: int,
        max_columns: int | None,
        budget: int,
        *,
        padding_side: Side = None,
        processors: Sequence[Processor] = (),
        on_text: Callable[[Row, str], None] | None = None,
        on_step: Callable[[], None] | None = None,
        speculate: int = 0,
    ) -> None:
        self.speculation = Speculation(speculate)
        self.rows = self.waiting = iter(rows)
        self.again: deque[Row] = deque()  # rows to start before those that wait
        self.max_rows, self.max_columns, self.budget, self.width = max_rows, max_columns, budget, 1
        self.padding_side, self.processors, self.on_text, self.on_step = padding_side, processors, on_text, on_step
        self.running: list[Row] = []
        self.finished: list[Row] = []
        self.shape, self.most = (0, 0), (max_rows, max_columns)
        self.moves: list[tuple] = []
        self.pieces: list[Piece] = []
        self.more = self.changed = True

    def admit(self) -> bool:
        """Lets waiting rows in and plans the next pieces of prompts; returns whether anything is left to do."""
        if self.on_step is not None:
            self.on_step()
        self.compact()
        self.pieces = []
        budget = self.budget
        for cache_row, row in enumerate(self.running):
            if not row.prefilled:
                budget -= self._plan(row, cache_row)
        while budget > 0 and len(self.running) < self.max_rows:  # else no row is asked for that cannot start
            row = self.again.popleft() if self.again else next(self.waiting, None)
            self.more = row is not None
            if row is None:
                break
            if row.finish_reason is not None:
                self.finished.append(row)
                budget -= 1  # so that a file full of errors is not read at once
            elif len(self.running) + self.width <= self._rows(self._columns([*self.running, row])):
                seats = [row] if row.search is None else row.search.begin()
                budget -= self._plan(seats[0], len(self.running))
                self.running += seats
                self.changed = True
            else:
                self.again.appendleft(row)
                break
        self._grow()
        return bool(self.running or self.finished)

    def _columns(self, rows: list[Row]) -> int:
        """Columns of a cache for these rows: whole pieces of SPAN, so that it rarely has to grow."""
        return -(-max(row.columns for row in rows) // SPAN) * SPAN

    def _rows(self, columns: int) -> int:
        room = self.max_rows if self.max_columns is None else self.max_columns // columns
        return max(self.width, min(self.max_rows, room))

    def _plan(self, row: Row, cache_row: int) -> int:
        """Plans the next piece of a prompt; returns its length.

        Prompts are cut at multiples of the whole budget, whatever else runs: where a prompt is cut may not depend on
        its neighbours. So the last piece of a round may exceed what is left.
        """
        stop = min(row.filled + self.budget, len(row.prompt))
        self.pieces.append(Piece(row, cache_row, row.filled, stop))
        return stop - row.filled

    def _grow(self) -> None:
        """A larger cache when the rows need one; as few columns and as many rows as then fit."""
        if not self.running:
            return
        rows, columns = len(self.running), self._columns(self.running)
        if rows > self.shape[0] or columns > self.shape[1]:
            room = self._rows(columns)
            self.shape = (min(room, max(rows, 2 * self.shape[0])), columns)

    def compact(self) -> None:
        """Takes rows that have ended out of `running`, and plans the moves that close the gaps."""
        ended = [row for row in self.running if row.finish_reason is not None]
        if not ended:
            return
        self.finished += ended
        self.changed = True
        kept = [cache_row for cache_row, row in enumerate(self.running) if row.finish_reason is None]
        ready = [cache_row for cache_row in kept if self.running[cache_row].prefilled]
        gaps = [cache_row for cache_row in range(len(ready)) if cache_row not in ready]
        behind = [cache_row for cache_row in ready if cache_row >= len(ready)]
        # NaN is infectious, and a row may hold it from its first piece on
        risky = [c for c, row in enumerate(self.running) if row.error is not None or not row.prefilled]
        moves = list(zip(behind, gaps, strict=True))
        moves += [(old, new) for new, old in enumerate(kept[len(ready) :], start=len(ready)) if old != new]
        for source, target in moves:
            self.running[target] = self.running[source]
        del self.running[len(kept) :]
        self.moves += moves + [(-1, cache_row) for cache_row in risky if cache_row >= len(kept)]

    @property
    def slots(self) -> int:
        """Rows that could run at a time, with the columns that the cache now has."""
        return self._rows(self.shape[1])

    @property
    def decoding(self) -> list[Row]:
        """The rows of the next step: those in cache rows 0, 1, ... whose prompt is through."""
        return [row for row in self.running if row.prefilled]

    def arrange(self, model: GPT, epoch: int | None) -> int:
        """Gives the model's cache the shape and the order of rows that are wanted.

        Args:
            epoch: what the last call returned, the number of the cache's set-up; None at first.

        Raises:
            RuntimeError: the model's cache was set up by somebody else since.
        """
        if epoch is None:
            model.set_kv_cache(*self.shape)
        elif model.cache_epoch != epoch:
            raise RuntimeError("another job took over the model's cache: finish one generate() before the next")
        while self.moves:
            model.move_kv_cache(*self.moves.pop(0))
        if self.changed:
            model.resize_kv_cache(*self.shape)
            model.set_row_length([row.columns for row in self.running])
            if model.loras is not None:
                model.loras.set_rows([row.settings.lora for row in self.running], model.wte.weight.device)
        return model.cache_epoch

    def push_pieces(self, tokens: Sequence[int], logprobs: Iterable[LogProb | None]) -> None:
        """The pieces are in the cache, and these tokens follow those that end a prompt, (B,)."""
        for piece in self.pieces:
            piece.row.filled = piece.stop
        ready = [piece.row for piece in self.pieces if piece.ends]
        self.changed |= bool(ready)  # they now take part in the steps
        self._push(ready, tokens, logprobs)

    def push(self, rows: Sequence[Row], tokens: Sequence[int], logprobs: Iterable[LogProb | None]) -> None:
        """One more column of these rows is in the cache, and these tokens follow, (B,)."""
        for row in rows:
            row.filled += 1
        self._push(rows, tokens, logprobs)

    def _push(self, rows: Sequence[Row], tokens: Sequence[int], logprobs: Iterable[LogProb | None]) -> None:
        for row, token, logprob in zip(rows, tokens, logprobs, strict=True):
            if not row.up_to_date:  # it starts again, and its next token is known
                self.changed = True  # a sampler draws for the next token at each step
                continue
            text = row.push(token, logprob)
            if text and self.on_text is not None:
                self.on_text(row, text)
        self.compact()

    def retire(self) -> list[Row]:
        """Rows that have ended since the last call."""
        self.compact()
        finished, self.finished = self.finished, []
        return finished

    def halve(self, error: BaseException) -> None:
        """Memory ran out: only half as many rows from now on. The last ones start again later; a single one fails.

        A single row that has a cache of several rows first gets one of its own size. If it fails nevertheless it was to
        blame itself, and those after it run together again.
        """
        self.pieces, self.changed = [], True
        if len(self.running) == self.shape[0] == self.width:
            for row in self.running:
                row.fail(OUT_OF_MEMORY)
            self.shape, (self.max_rows, self.max_columns) = (0, 0), self.most
            return
        self.max_rows = max(1, len(self.running) // self.width // 2) * self.width
        reason = " ".join(str(error).split()) or type(error).__name__
        print(f"out of memory ({reason:.150}): going on with {self.max_rows} rows at a time", file=sys.stderr)
        self.max_columns = self.max_rows * self._columns(self.running)
        for row in reversed(self.running[self.max_rows :: self.width]):
            row.filled = 0
            self.again.appendleft(row)
        del self.running[self.max_rows :]
        self.shape = (self.max_rows, self._columns(self.running))
