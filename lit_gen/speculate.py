"""Guesses at a row's next tokens, taken from its own text (prompt lookup), and how many of them are worth checking.

Where the end of a text was seen before, what followed then is the guess. One forward checks the guesses of all rows;
a guess counts only if it is what the row would have got anyway, so no text depends on it.
"""

from collections.abc import Sequence
from weakref import WeakKeyDictionary

from lit_gen.stopping import Row

LENGTHS = (8, 5, 3, 2)  # so many tokens at the end of a text are looked for; more of them are less often by chance
PRIOR = 4.0  # judged guesses that the whole batch's rate counts as, in the rate of a row
FORGET = 0.97  # weight of what was learnt before, after each step
WORTH = 1.05  # how many times as many tokens per second a step with guesses has to promise
AGAIN = 32  # steps with guesses, then one without, to know what that takes
STRANGE = 2.0  # a step that takes so many times as long as expected was disturbed, unless the one before it was as well


class Lookup:
    """Where the last tokens of one row's text stood before."""

    def __init__(self, prompt: Sequence[int]) -> None:
        self.text = list(prompt)
        self.right, self.judged = 0.0, 0.0  # first guesses
        self._seen: dict[tuple[int, ...], int] = {}  # a few tokens -> place of the last of them
        self._read = 0
        self._match: int | None = None

    def guess(self, tokens: Sequence[int], prompt_length: int, n: int) -> list[int]:
        """Up to n tokens that may follow the prompt and these new tokens; [] if their end was not seen before."""
        self.text += tokens[len(self.text) - prompt_length :]
        for end in range(self._read, len(self.text)):
            self._match = None
            for length in LENGTHS:
                key = tuple(self.text[end + 1 - length : end + 1])
                if len(key) == length:
                    place = self._seen.get(key)
                    self._match = place if self._match is None else self._match
                    self._seen[key] = end
        self._read = len(self.text)
        if self._match is None:
            return []
        period = len(self.text) - 1 - self._match
        guessed: list[int] = []
        for i in range(n):  # behind the end of the text the guess repeats itself
            guessed.append(self.text[self._match + 1 + i] if i < period else guessed[i - period])
        return guessed


class Speculation:
    """Decides how many guesses of each row the next step checks, from what steps cost and how often guesses were right.

    A step without guesses is measured as it is. One with guesses, of N tokens in all, is taken to last a + b * N,
    fitted to those so far. The tokens that a step may bring, over its duration, are what is made large; so where texts
    never repeat themselves nothing is checked, and nothing lost.

    Args:
        most: guesses per row and step; with 0 there are none.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._lookups: WeakKeyDictionary[Row, Lookup] = WeakKeyDictionary()
        self._right, self._judged = 0.5, 1.0
        self._plain: tuple[float, int] | None = None  # seconds of a step without guesses, and its rows
        self._since = 0  # steps with guesses after it
        self._sums = [0.0] * 5  # of steps with guesses: of 1, N, N * N, seconds, N * seconds
        self._slope = 1 / 16  # b / a, until steps of different sizes were measured
        self._disturbed = False  # whether the last step with guesses was
        self._offered: list[tuple[Row, int, int]] = []  # a row, its first guess, and how many tokens it had

    def guess(self, rows: Sequence[Row]) -> list[list[int]]:
        """Guesses worth checking for each row, at most `most` and never beyond the row's last token."""
        found, self._offered = [], []
        if self.most == 0:
            return [[] for _ in rows]
        for row in rows:
            if row not in self._lookups:
                self._lookups[row] = Lookup(row.prompt)
            lookup = self._lookups[row]
            room = min(self.most, row.settings.max_new_tokens - len(row.tokens) - 1)
            starts_again = row.filled < len(row.prompt) + len(row.tokens) - 1  # after memory ran out: all is known yet
            found.append([] if starts_again else lookup.guess(row.tokens, len(row.prompt), room))
            if found[-1]:
                self._offered.append((row, found[-1][0], len(row.tokens)))
        return [guesses[:n] for guesses, n in zip(found, self._widths(rows, found), strict=True)]

    def _widths(self, rows: Sequence[Row], found: list[list[int]]) -> list[int]:
        """How many of the guesses found to check: the likeliest first, as long as each brings more than it costs."""
        if self._plain is None or self._since >= AGAIN:
            return [0] * len(rows)
        plain, a, b = self._cost(len(rows))
        mean = self._right / self._judged
        chances = []  # of a row's i-th guess, i from 1: all before it must be right too
        for r, (row, guesses) in enumerate(zip(rows, found, strict=True)):
            rate = (self._lookups[row].right + PRIOR * mean) / (self._lookups[row].judged + PRIOR)
            chances += [(rate ** (i + 1), r) for i in range(len(guesses))]
        widths, tokens, fed = [0] * len(rows), float(len(rows)), len(rows)
        for chance, r in sorted(chances, reverse=True):
            if chance * (a + b * fed) <= tokens * b:  # the rate tokens / seconds would fall
                break
            widths[r], tokens, fed = widths[r] + 1, tokens + chance, fed + 1
        return widths if tokens * plain > WORTH * len(rows) * (a + b * fed) else [0] * len(rows)

    def _cost(self, n_rows: int) -> tuple[float, float, float]:
        """Seconds of a step without guesses, and of one with guesses: at all, and for each of its tokens."""
        n, x, xx, y, xy = self._sums
        spread = n * xx - x * x
        if spread > 0.01 * n * n:  # else all steps were alike, and the last ratio stays
            b = max((n * xy - x * y) / spread, 0.0)
            self._slope = b / max((y - b * x) / n, 1e-9)
        seconds, measured = self._plain
        per_row = seconds / (1 + self._slope * measured)
        a = y / (n + self._slope * x) if n else per_row
        return per_row * (1 + self._slope * n_rows), a, a * self._slope

    def _is_strange(self, seconds: float, n_rows: int, fed: int) -> bool:
        if self._plain is None:
            return False
        _, a, b = self._cost(n_rows)
        return seconds > STRANGE * (a + b * fed)

    def learn(self, guesses: Sequence[Sequence[int]], seconds: float) -> None:
        """Takes what a step that checked these guesses took; the rows have their new tokens already."""
        fed = len(guesses) + sum(map(len, guesses))
        if fed > len(guesses):
            self._since += 1
            self._disturbed = not self._disturbed and self._is_strange(seconds, len(guesses), fed)
            if not self._disturbed:
                for i, value in enumerate((1.0, fed, fed * fed, seconds, fed * seconds)):
                    self._sums[i] = FORGET * self._sums[i] + value
        elif guesses:
            before = seconds if self._plain is None or self._plain[1] != fed else self._plain[0]
            self._plain, self._since = ((before + seconds) / 2, fed), 0
        for row, first, before in self._offered:  # also those that were not checked
            lookup, right = self._lookups[row], row.tokens[before : before + 1] == [first]
            lookup.right, lookup.judged = FORGET * lookup.right + right, FORGET * lookup.judged + 1
            self._right, self._judged = FORGET * self._right + right, FORGET * self._judged + 1
