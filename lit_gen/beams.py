"""Beam search: follows the most probable beginnings of a prompt's text side by side, and hands out the best texts.

    step 1   "a" -0.5   "b" -1.2             3 beams: the best beginnings so far, and the sums of the log-probabilities
    step 2   "ac" -0.9  "ad" -1.4  "bc" -1.5     of their tokens; each is a row of the batch. Here "a" was good enough
    step 3   ...                                 for two: keys and values of its new tokens are copied for one of them.

What ends and when is as in transformers (`GenerationMixin._beam_search`): of the best tokens of all beams, those that
end a text count only among the first `num_beams`; others go on. A text's score is the sum over its new tokens, its stop
token included, divided by length ** length_penalty. Nothing is added to a text that has ended.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from lit_gen.batch import Batch
from lit_gen.settings import Settings, check_count, is_number
from lit_gen.stopping import LogProb, Row
from lit_gen.utils import UserError

MOST_BEAMS = 1000  # a slip of the finger must not ask for a cache of millions of rows
EarlyStopping = bool | Literal["never"]


@dataclass(frozen=True)
class Beams:
    """How to search; raises UserError for what cannot be. With one beam there is no search."""

    n: int = 1
    length_penalty: float = 1.0
    early_stopping: EarlyStopping = False

    def __post_init__(self) -> None:
        check_count("num_beams", self.n)
        if self.n > MOST_BEAMS:
            raise UserError(f"num_beams is {self.n}, but must be at most {MOST_BEAMS}")
        if not is_number(self.length_penalty) or abs(self.length_penalty) > 20:
            raise UserError(f"length_penalty is {self.length_penalty!r:.40}, but must be a number from -20 to 20")
        if not isinstance(self.early_stopping, bool) and self.early_stopping != "never":
            raise UserError(f"early_stopping is {self.early_stopping!r:.40}, but must be true, false or never")
        if self.n == 1 and (self.length_penalty, self.early_stopping) != (1.0, False):
            raise UserError("length_penalty and early_stopping are for a search: give num_beams above 1 with them")

    def check(self, settings: Settings) -> None:
        """Raises UserError for a setting that would have no effect in the search, and for more texts than beams."""
        if self.n == 1:
            return
        if settings.temperature > 0:
            raise UserError(f"temperature is {settings.temperature}, but a search with num_beams samples nothing")
        if settings.penalised or settings.logit_bias:
            raise UserError("penalties and logit_bias do not go with num_beams: leave out one or the other")
        if settings.n > self.n:
            raise UserError(f"{settings.n} texts of a prompt are wanted, but num_beams is {self.n}: raise it")

    def refuse(self, **options: Any) -> None:
        """Raises UserError for options that do not go with a search."""
        for name, value in options.items():
            if self.n > 1 and value:
                raise UserError(f"{name} does not go with num_beams: leave out one or the other")


class Search:
    """The beams of one prompt: those that run, in as many seats of the batch, and those that have ended.

    Args:
        wanted: rows of this prompt; the i-th best text is for the one whose sample is i.
        how: to search.
    """

    def __init__(self, wanted: list[Row], how: Beams) -> None:
        self.wanted, self.how = wanted, how
        self.n_best = max(2, 1 + len(wanted[0].stop_ids)) * how.n  # so many that some go on after all stops
        self.sums: list[float] = []  # of each seat; -inf where nothing is followed
        self.ended: list[Row] = []  # best first

    def begin(self) -> list[Row]:
        """The rows of the batch. Only the first has a prompt to prefill; the others copy what came of it."""
        first = self.wanted[0].fork()
        first.search = self
        # `row_logprobs` brings what `step` needs
        first.settings = replace(first.settings, logprobs=max(self.n_best, first.settings.logprobs or 0))
        self.sums, self.ended = [0.0] * self.how.n, []
        seats = [first, *(first.fork() for _ in range(self.how.n - 1))]
        for seat, row in enumerate(seats):
            self.name(row, seat)
        return seats

    def name(self, row: Row, seat: int) -> None:
        """Each seat stands for one of the rows that are wanted; those that are left over for none."""
        row.index, row.sample = -1, -1
        if seat < len(self.wanted):
            row.index, row.sample = self.wanted[seat].index, self.wanted[seat].sample

    def step(self, rows: Sequence[Row], best: Sequence[LogProb]) -> list[tuple[float, int, Row]]:
        """Takes the best next tokens of the rows in its seats.

        Returns:
            What goes on, best first: the sum, the seat it comes from, and the row; as many as there are seats, or
            nothing if the search is over.
        """
        asked = self.wanted[0].settings.logprobs
        found = [
            (self.sums[seat] + value, seat, token, (value, top[:asked]))
            for seat, (_, top) in enumerate(best)
            for token, value in top[: self.n_best]
            if self.sums[seat] + value > -math.inf
        ]
        found.sort(key=lambda candidate: -candidate[0])
        length, going = len(rows[0].tokens) + 1, []
        for place, (total, seat, token, logprob) in enumerate(found[: self.n_best]):
            if len(going) == self.how.n and place >= self.how.n:
                break
            row = rows[seat].fork()
            row.push(token, logprob)
            if row.finish_reason is None:
                going.append((total, seat, row))
            elif place < self.how.n:
                row.score = total / length**self.how.length_penalty
                self.ended.append(row)
        self.ended.sort(key=lambda row: -row.score)
        del self.ended[self.how.n :], going[self.how.n :]
        if self._is_over(going, length):
            return []
        _, seat, row = going[0]
        return going + [(-math.inf, seat, row.fork()) for _ in range(self.how.n - len(going))]

    def _is_over(self, going: list[tuple[float, int, Row]], length: int) -> bool:
        """Whether nothing goes on, or nothing that does can be expected to beat what has ended."""
        if not going or len(self.ended) < self.how.n:
            return not going
        if self.how.early_stopping == "never" and self.how.length_penalty > 0:  # the best it could still become
            length = self.wanted[0].settings.max_new_tokens
        hope = going[0][0] / length**self.how.length_penalty
        return self.how.early_stopping is True or hope <= self.ended[-1].score

    def results(self, seats: list[Row]) -> list[Row]:
        """The rows that are wanted, followed by what is in the other seats; all have ended."""
        found = []
        for wanted in self.wanted:
            if wanted.sample < len(self.ended):
                found.append(self.ended[wanted.sample])
            else:
                found.append(wanted.fork())
                found[-1].fail(f"the search found only {len(self.ended)} texts: ask for no more of them")
        for row in seats[len(found) :]:
            row.finish_reason = "length"
            found.append(row)
        for seat, row in enumerate(found):
            self.name(row, seat)
            row.settings, row.search = self.wanted[0].settings, None
        return found


class BeamBatch(Batch):
    """A batch in which each prompt has `beams.n` rows, which stand side by side and end together.

    Args:
        rows: those of a prompt follow each other.
        beams: how to search.
        others: of `Batch`.
    """

    def __init__(self, rows: Iterable[Row], beams: Beams, *others: Any, **named: Any) -> None:
        super().__init__(rows, *others, **named)
        self.beams, self.width = beams, beams.n
        self.waiting = self._first_rows()

    def _first_rows(self) -> Iterator[Row]:
        """The first row of each prompt, with a search that knows them all. Reads on no further than it must."""
        after: Row | None = None
        while (row := after or next(self.rows, None)) is not None:
            wanted, after = [row], None
            while wanted[-1].sample < row.settings.n - 1 and (after := next(self.rows, None)) is not None:
                if after.prompt_index != row.prompt_index:
                    break
                wanted.append(after)
                after = None
            row.search = Search(wanted, self.beams)
            yield row

    def _plan(self, row: Row, cache_row: int) -> int:
        return 0 if cache_row % self.width else super()._plan(row, cache_row)

    def _push(self, rows: Sequence[Row], tokens: Sequence[int], logprobs: Iterable[LogProb | None]) -> None:
        found = dict(zip(rows, zip(tokens, logprobs, strict=True), strict=True))
        for start in range(0, len(self.running), self.width):
            seats = self.running[start : start + self.width]
            if seats[0] in found:  # else its prompt is not through
                self._step(start, seats, [found[row] for row in seats if row in found])
        self.compact()

    def _step(self, start: int, seats: list[Row], found: list[tuple[int, LogProb]]) -> None:
        """Goes on from the rows of one prompt, which are in cache rows `start`, ..."""
        search = seats[0].search
        broken = [row for row, (token, _) in zip(seats, found, strict=False) if token < 0]
        if broken:
            broken[0].push(-1)
            search.ended, seats = ([broken[0].fork() for _ in seats] for _ in range(2))
            going = []
        else:
            going = search.step(seats, [logprob for _, logprob in found])
        if not going:
            self.running[start : start + self.width] = search.results(seats)
            return
        free = [seat for seat in range(self.width) if seat not in {seat for _, seat, _ in going}]
        taken = set()
        for total, source, row in going:
            seat = source
            if source in taken:
                seat = free.pop(0)
                shared = len(row.prompt) if seats[seat].prefilled else 0  # what is there already
                self.moves.append((start + source, start + seat, slice(shared, row.filled)))
            taken.add(source)
            search.name(row, seat)
            search.sums[seat], self.running[start + seat] = total, row

    def retire(self) -> list[Row]:
        """As in `Batch`: of a search the rows that are wanted."""
        rows = [row for row in super().retire() if row.index >= 0]
        for row in rows:
            if row.text and self.on_text is not None:
                self.on_text(row, row.text)
        return rows
