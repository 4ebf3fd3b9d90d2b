"""Claims of lit_gen/batch.py, against a model without tensors whose next token depends on what its cache holds."""

import random
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lit_gen.batch import Batch, Piece
from lit_gen.plan import OUT_OF_MEMORY
from lit_gen.settings import Settings
from lit_gen.stopping import Row

STOP, WORDS, BROKEN = 0, range(1, 9), 255  # the stop id, other ids, and the id that makes a text's logits NaN at times


def follow(text: Sequence[int]) -> int:
    """The token after a text, about every ninth the stop; -1 for NaN."""
    digest = zlib.crc32(bytes(text))
    return -1 if text[0] == BROKEN and digest % 5 == 0 else digest % 9


def alone(prompt: list[int], limit: int, budget: int) -> tuple[list[int], str]:
    """Tokens and finish reason of a row that has everything to itself."""
    ends = [*range(budget, len(prompt), budget), len(prompt)]
    if any(follow(prompt[:end]) == -1 for end in ends):
        return [], "nan"
    tokens: list[int] = []
    while len(tokens) < limit:
        token = follow(prompt + tokens)
        if token in (-1, STOP):
            return tokens, "nan" if token == -1 else "stop"
        tokens.append(token)
    return tokens, "length"


class OutOfMemory(Exception):
    pass


class FakeModel:
    """Cache rows are lists of token ids, and whether a row holds NaN anywhere, which then spoils whoever looks at it.

    Args:
        failures: numbers of the calls that find no memory.
        memory: so many columns in all rows fit.
    """

    def __init__(self, failures: Sequence[int] = (), memory: int | None = None) -> None:
        self.cells: list[list[int]] = []
        self.nan: list[bool] = []
        self.cache_epoch = self.calls = 0
        self.failures, self.memory, self.loras = set(failures), memory, None

    def call(self) -> None:
        self.calls += 1
        if self.calls in self.failures:
            raise OutOfMemory("no memory")

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.cells), len(self.cells[0]) if self.cells else 0

    def set_kv_cache(self, rows: int, columns: int) -> None:
        self.cells, self.nan = [], []
        self.resize_kv_cache(rows, columns)
        self.cache_epoch += 1

    def resize_kv_cache(self, rows: int, columns: int) -> None:
        if self.shape == (rows, columns):
            return
        if self.memory is not None and rows * columns > self.memory:
            raise OutOfMemory("too large")
        self.call()
        kept = [(row + [-1] * columns)[:columns] for row in self.cells[:rows]]
        self.cells = kept + [[-1] * columns for _ in range(rows - len(kept))]
        self.nan = (self.nan + [False] * rows)[:rows]

    def move_kv_cache(self, source: int, target: int) -> None:
        self.cells[target] = list(self.cells[source]) if source >= 0 else [-1] * len(self.cells[target])
        self.nan[target] = source >= 0 and self.nan[source]

    def set_row_length(self, length: list[int]) -> None:
        self.row_length = length

    def run(self, cache_row: int, start: int, tokens: Sequence[int]) -> int:
        """Writes tokens from column `start` on and returns the one that follows."""
        self.cells[cache_row][start : start + len(tokens)] = tokens
        text = self.cells[cache_row][: start + len(tokens)]
        assert len(self.cells[cache_row]) == self.shape[1], "a write beyond the last column"
        token = -1 if self.nan[cache_row] else follow(text)
        self.nan[cache_row] |= token == -1
        return token


@dataclass
class Job:
    """A job, what has happened to it, and what must hold all the time."""

    rows: list[Row]
    batch: Batch
    model: FakeModel
    max_rows: int
    max_columns: int | None
    taken: list[Row] = field(default_factory=list)  # from the iterator
    started: list[Row] = field(default_factory=list)
    finished: list[Row] = field(default_factory=list)
    cuts: dict[int, set[int]] = field(default_factory=dict)  # where each row's prompt was cut
    most: int = 0  # rows that ran together

    def check_admission(self) -> None:
        """First come, first served; nothing is read too early, and nothing waits without need."""
        batch, running = self.batch, self.batch.running
        new = [row for row in running if not any(row is old for old in self.started)]
        if new:
            old = [row for row in self.started if row.finish_reason is None]
            assert all(any(row is other for other in running) for row in old), "a new row before one that had started"
        self.started += new
        assert [row.index for row in self.started] == sorted(row.index for row in self.started)
        errors = [row for row in self.taken if not row.prompt]
        held = batch.max_columns is not None  # a row must be seen to know whether its columns fit
        assert len(self.taken) <= len(self.started) + len(errors) + held
        assert len(running) <= min(self.max_rows, batch.max_rows)
        self.most = max(self.most, len(running))
        spent = sum(piece.stop - piece.start for piece in batch.pieces)
        spent += sum(not row.prompt for row in batch.finished)
        if batch.more and spent < batch.budget and len(running) < batch.max_rows:
            rows = [*running, batch.again[0]]
            columns = -(-max(len(row.prompt) + row.settings.max_new_tokens - 1 for row in rows) // 64) * 64
            room = batch.max_rows if batch.max_columns is None else batch.max_columns // columns
            assert len(rows) > min(room, batch.max_rows), "a row waits although there is room"

    def check_places(self, decoding: list[Row]) -> None:
        """Rows that decode are cache rows 0, 1, ...; the others follow; the cache has room; old columns are right."""
        batch, running = self.batch, self.batch.running
        rows, columns = self.model.shape
        assert (rows, columns) == batch.shape and rows >= len(running)
        assert self.model.row_length == [row.columns for row in running]
        assert columns >= max(len(row.prompt) + row.settings.max_new_tokens - 1 for row in running)
        assert rows <= self.max_rows
        assert rows == 1 or self.max_columns is None or rows * columns <= self.max_columns
        assert running[: len(decoding)] == decoding and not any(row.prefilled for row in running[len(decoding) :])
        for cache_row, row in enumerate(running):
            text = (row.prompt + row.tokens)[: row.filled]
            assert self.model.cells[cache_row][: row.filled] == text, f"row {row.index} lost its text"

    def prefill(self, piece: Piece) -> int:
        row = piece.row
        assert self.batch.running[piece.cache_row] is row and piece.start == row.filled
        assert piece.tokens and piece.tokens == row.prompt[piece.start : piece.stop]
        self.cuts.setdefault(row.index, set()).update((piece.start, piece.stop))
        self.model.call()
        return self.model.run(piece.cache_row, piece.start, piece.tokens)

    def step(self, cache_row: int, row: Row) -> int:
        assert row.next_input == (row.prompt + row.tokens)[row.filled]
        self.model.call()
        return self.model.run(cache_row, row.filled, [row.next_input])

    def run(self) -> "Job":
        """The loop of generate.base.decode."""
        batch, model, epoch, rounds = self.batch, self.model, None, 0
        decoded: list[Row] = []
        while batch.admit():
            rounds += 1
            assert rounds < 20_000, "no end"
            self.check_admission()
            try:
                if batch.pieces:
                    epoch = batch.arrange(model, epoch)
                    self.check_places([row for row in batch.running if row.prefilled])
                    places = [piece.cache_row for piece in batch.pieces]
                    assert places == list(range(len(batch.decoding), len(batch.running)))
                    tokens = [self.prefill(piece) for piece in batch.pieces]
                    model.call()  # choosing tokens takes memory too
                    ends = [token for token, piece in zip(tokens, batch.pieces, strict=True) if piece.ends]
                    batch.push_pieces(ends, [None] * len(ends))
                if rows := batch.decoding:
                    epoch = batch.arrange(model, epoch)
                    assert all(row is batch.running[i] for i, row in enumerate(rows))
                    assert batch.changed or rows == decoded  # else the sampler would be that of other rows
                    if batch.changed:
                        batch.changed, decoded = False, list(rows)
                    else:
                        assert all(row.filled == len(row.prompt) + len(row.tokens) - 1 for row in rows)
                    before = [(row, row.filled) for row in rows]
                    self.check_places(rows)
                    tokens = [self.step(i, row) for i, row in enumerate(rows)]
                    model.call()
                    batch.push(rows, tokens, [None] * len(tokens))
                    assert all(row.filled == filled + 1 for row, filled in before)
            except OutOfMemory as error:
                batch.halve(error)
            self.finished += batch.retire()
            assert len(self.finished) <= len(self.rows), "a row ended twice"
        return self

    def check_results(self) -> None:
        """Every row ended once, and as it would have alone."""
        assert sorted(row.index for row in self.finished) == list(range(len(self.rows)))
        for row in self.finished:
            tokens, reason = (
                alone(row.prompt, row.settings.max_new_tokens, self.batch.budget) if row.prompt else ([], "")
            )
            if row.finish_reason == "error":  # a bad prompt, or a row that found no memory even alone
                assert not row.prompt or row.tokens == tokens[: len(row.tokens)]
            else:
                assert (row.tokens, row.finish_reason) == (tokens, reason)
            places = self.cuts.get(row.index, set())
            if row.finish_reason != "error":
                assert places == {*range(0, len(row.prompt), self.batch.budget), len(row.prompt)}


def make_job(
    prompts: Sequence[tuple[list[int], int]],
    max_rows: int = 8,
    max_columns: int | None = None,
    budget: int = 2048,
    **memory,
) -> Job:
    """A job of prompts with their max_new_tokens; an empty prompt is a row that has failed before it starts."""
    rows = []
    for index, (prompt, limit) in enumerate(prompts):
        row = Row(index, prompt, Settings(max_new_tokens=limit), stop_ids={STOP})
        if not prompt:
            row.fail("bad prompt")
        rows.append(row)

    def lazily() -> Iterator[Row]:
        for row in rows:
            job.taken.append(row)
            yield row

    job = Job(rows, Batch(lazily(), max_rows, max_columns, budget), FakeModel(**memory), max_rows, max_columns)
    return job


def texts(seed: int, n: int, kinds: Sequence[str] = ("plain",) * 6 + ("broken", "error", "long")) -> list:
    """Random prompts of 1 to 40 tokens, or up to 150 for a long one, and how many new ones each may get, 1 to 20."""
    rng, prompts = random.Random(seed), []
    for _ in range(n):
        kind = rng.choice(kinds)
        prompt = [rng.choice(WORDS) for _ in range(rng.randint(41, 150) if kind == "long" else rng.randint(1, 40))]
        if kind == "broken":
            prompt[0] = BROKEN
        prompts.append(([] if kind == "error" else prompt, rng.randint(1, 20)))
    return prompts


SIZES = {
    "max_rows": st.integers(1, 9),
    "max_columns": st.none() | st.integers(1, 1200),
    "budget": st.integers(1, 60) | st.just(2048),
}
JOBS = {"seed": st.integers(0, 2**32), "n": st.integers(1, 30), **SIZES}


@given(**JOBS)
@settings(max_examples=200, deadline=None, derandomize=True)
def test_random_arrivals_run_as_if_alone(seed, n, **sizes):
    job = make_job(texts(seed, n), **sizes).run()
    job.check_results()
    assert all(row.prompt == [] for row in job.finished if row.finish_reason == "error")


@given(failures=st.sets(st.integers(1, 300), max_size=8), **JOBS)
@settings(max_examples=200, deadline=None, derandomize=True)
def test_out_of_memory_at_any_moment_changes_no_token(failures, seed, n, **sizes):
    """In setting up, growing, prefill and step: rows start again, or fail when they have all the memory."""
    job = make_job(texts(seed, n), **sizes, failures=failures).run()
    job.check_results()


@given(memory=st.integers(192, 900), **JOBS)
@settings(max_examples=100, deadline=None, derandomize=True)
def test_row_that_fits_alone_never_fails(memory, seed, n, **sizes):
    """However greedy the plan is: each row needs at most 192 columns, and so many there are."""
    job = make_job(texts(seed, n, ["plain", "long"]), **sizes, memory=memory).run()
    job.check_results()
    assert all(row.finish_reason != "error" for row in job.finished)


def test_the_random_jobs_meet_what_they_are_for():
    """Stops at once, NaN, errors, full lengths, pieces, rows that start again: none of the above is about nothing."""
    jobs = [make_job(texts(seed, 30), 5, 700, 16, failures=range(40, 400, 60)).run() for seed in range(10)]
    rows = [row for job in jobs for row in job.finished]
    reasons = [row.finish_reason for row in rows]
    assert all(reasons.count(reason) >= 15 for reason in ("stop", "nan", "error", "length"))
    assert sum(row.finish_reason == "stop" and not row.tokens for row in rows) >= 15
    assert sum(len(places) > 3 for job in jobs for places in job.cuts.values()) >= 15
    assert sum(job.most > job.batch.max_rows for job in jobs) >= 5  # else the last row to be halved failed alone


def started(batch: Batch, model: FakeModel, epoch: int | None = None) -> int:
    """One round without an end of any row: prefills what is planned."""
    epoch = batch.arrange(model, epoch)
    for piece in batch.pieces:
        model.run(piece.cache_row, piece.start, piece.tokens)
    ends = sum(piece.ends for piece in batch.pieces)
    batch.push_pieces([1] * ends, [None] * ends)
    return epoch


def simple_rows(n: int, prompt: int = 3, limit: int = 9) -> list[Row]:
    return [Row(i, [i + 1] * prompt, Settings(max_new_tokens=limit), stop_ids={STOP}) for i in range(n)]


def test_last_row_takes_the_place_of_one_that_ends():
    """A B C D, B ends: A D C; E comes: A D C E."""
    model, batch = FakeModel(), Batch(simple_rows(6), 4, None, 2048)
    batch.admit()
    epoch = started(batch, model)
    batch.push(batch.decoding, [1, STOP, 1, 1], [None] * 4)
    assert [row.index for row in batch.running] == [0, 3, 2] and batch.moves == [(3, 1)]
    assert [row.index for row in batch.retire()] == [1] and batch.retire() == []
    batch.admit()
    batch.arrange(model, epoch)
    assert [row.index for row in batch.running] == [0, 3, 2, 4]
    assert [cells[0] for cells in model.cells[:3]] == [1, 4, 3] and batch.moves == []


def test_prompt_in_pieces_stays_behind_and_the_others_go_on():
    rows = [*simple_rows(3), Row(3, [7] * 10, Settings(max_new_tokens=5)), Row(4, [5] * 3, Settings(max_new_tokens=9))]
    model, batch = FakeModel(), Batch(rows, 8, None, 4)
    epoch, seen = None, []
    for _ in range(5):
        batch.admit()
        seen.append([(piece.row.index, piece.cache_row, piece.start, piece.stop) for piece in batch.pieces])
        epoch = started(batch, model, epoch)
        assert [row.index for row in batch.decoding] == list(range(len(batch.decoding)))
        batch.push(batch.decoding, [1] * len(batch.decoding), [None] * len(batch.decoding))
    assert seen == [
        [(0, 0, 0, 3), (1, 1, 0, 3)],  # row 1 although only 1 of 4 is left: prompts are cut by the whole budget
        [(2, 2, 0, 3), (3, 3, 0, 4)],
        [(3, 3, 4, 8)],
        [(3, 3, 8, 10), (4, 4, 0, 3)],
        [],
    ]


def test_file_full_of_errors_is_not_read_at_once():
    rows = simple_rows(100)
    for row in rows:
        row.fail("bad")
    batch = Batch(iter(rows), 4, None, 10)
    assert batch.admit() and [row.index for row in batch.retire()] == list(range(10))
    assert not batch.running and batch.pieces == []
    ended = [row.index for _ in range(9) if batch.admit() for row in batch.retire()]
    assert ended == list(range(10, 100)) and not batch.admit() and not batch.more


def test_cache_grows_by_doubling_and_only_as_far_as_allowed():
    rows = [*simple_rows(9), Row(9, [1] * 100, Settings(max_new_tokens=29)), Row(10, [1] * 100, Settings())]
    batch, shapes = Batch(rows, 20, 12 * 64, 3), []
    for _ in range(9):
        batch.admit()
        shapes.append(batch.shape)
        batch.push_pieces([1], [None])
    assert shapes == [(1, 64), (2, 64), (4, 64), (4, 64), *[(8, 64)] * 4, (12, 64)]
    batch.admit()
    assert len(batch.running) == 9  # the tenth needs 128 columns, and then only 6 rows fit
    for row in batch.running[4:]:
        row.fail("gone")
    batch.admit()
    assert [row.index for row in batch.running] == [0, 1, 2, 3, 9] and batch.shape == (6, 128)


def test_out_of_memory_keeps_half_and_says_so(capsys):
    model, batch = FakeModel(), Batch(simple_rows(7), 5, None, 2048)
    batch.admit()
    epoch = started(batch, model)
    batch.halve(RuntimeError("tried 9 GB\nmore"))
    assert capsys.readouterr().err == "out of memory (tried 9 GB more): going on with 2 rows at a time\n"
    assert [row.index for row in batch.running] == [0, 1] and batch.shape == (2, 64) and batch.retire() == []
    batch.admit()
    batch.arrange(model, epoch)
    assert model.shape == (2, 64) and batch.pieces == [] and batch.max_columns == 128
    batch.push(batch.decoding, [STOP, 1], [None] * 2)
    batch.admit()
    assert [row.index for row in batch.running] == [1, 2]  # those that started already come first
    assert batch.running[1].tokens == [1] and batch.running[1].filled == 0
    assert batch.pieces == [Piece(batch.running[1], 1, 0, 3)]


def test_row_without_memory_even_alone_fails_and_the_next_gets_a_cache_of_its_own_size():
    long = Row(0, [1] * 500, Settings(max_new_tokens=5), stop_ids={STOP})
    job = make_job([([1] * 500, 5), ([1] * 9, 5), ([2] * 500, 5), ([3] * 7, 3)], 1, memory=128).run()
    assert [row.finish_reason == "error" for row in job.finished] == [True, False, True, False]
    assert job.finished[0].error == OUT_OF_MEMORY and long.columns > 128
    assert job.model.shape == (1, 64)
    job.check_results()


def test_single_row_gives_up_the_cache_of_others_before_it_fails():
    """64 columns for four rows are free again when the last row comes, which needs as many for itself."""
    prompts = [([5 + i] * 3, 3) for i in range(4)] + [([1] * 200, 9)]
    job = make_job(prompts, 4, memory=300).run()
    job.check_results()
    assert job.finished[-1].index == 4 and job.finished[-1].error is None and job.model.shape == (1, 256)


@pytest.mark.parametrize("end", ["nan", "no memory for a piece", "no memory for a step"])
def test_row_with_nan_leaves_zeros_behind(end):
    """A masked column has weight 0, and 0 times NaN is NaN. Out of memory may end a row before its NaN is noticed."""
    model, batch = FakeModel(), Batch([Row(0, [9] * 8, Settings(max_new_tokens=9)), *simple_rows(1)], 1, None, 4)
    batch.admit()
    epoch = started(batch, model)
    assert batch.retire() == []
    batch.admit()
    if end != "no memory for a piece":
        batch.push_pieces([-1 if end == "nan" else 1], [None])
    model.nan[0] = True
    if end != "nan":
        batch.halve(MemoryError())
    assert [row.finish_reason for row in batch.retire()] == ["nan" if end == "nan" else "error"]
    batch.admit()
    batch.arrange(model, epoch)
    assert len(batch.running) == 1 and model.nan == [False] and model.cells[0] == [-1] * 64


def test_cache_that_another_job_took_is_refused():
    model, batch = FakeModel(), Batch(simple_rows(2), 2, None, 2048)
    batch.admit()
    epoch = started(batch, model)
    model.set_kv_cache(1, 64)
    with pytest.raises(RuntimeError, match="another job took over"):
        batch.arrange(model, epoch)


def test_on_step_and_on_text_are_called():
    class Words:
        def push(self, token: int) -> str:
            return f"<{token}>"

        def flush(self) -> str:
            return ""

    steps, shown = [], []
    rows = [Row(i, [i + 1], Settings(max_new_tokens=3), stop_ids={STOP}, stream=Words()) for i in range(2)]
    hooks = {"on_text": lambda row, text: shown.append((row.index, text)), "on_step": lambda: steps.append(len(shown))}
    batch = Batch(rows, 2, None, 2048, **hooks)
    batch.admit()
    batch.push_pieces([1, 2], [None] * 2)
    batch.push(batch.decoding, [3, STOP], [None] * 2)
    batch.admit()
    assert shown == [(0, "<1>"), (1, "<2>"), (0, "<3>")] and steps == [0, 3]


def test_rows_after_one_that_fits_in_no_memory_run_together_again():
    """A row of 500 columns never fits; those behind it are not slowed down for good."""
    rows = [*simple_rows(2), Row(2, [1] * 490, Settings(max_new_tokens=11)), *simple_rows(5)[2:]]
    batch = Batch(rows, 4, None, 2048)
    while batch.admit():
        if any(len(row.prompt) == 490 for row in batch.running):
            batch.halve(MemoryError())
        elif batch.pieces:
            ends = sum(piece.ends for piece in batch.pieces)
            batch.push_pieces([1] * ends, [None] * ends)
        else:
            most = len(batch.decoding)
            batch.push(batch.decoding, [STOP] * most, [None] * most)
        for row in batch.retire():
            assert (row.finish_reason == "error") == (len(row.prompt) == 490)
    assert most == 3 and (batch.max_rows, batch.max_columns) == (4, None)
