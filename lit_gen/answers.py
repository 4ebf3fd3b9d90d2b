"""The two ends of a job: prompts on their way in; rows on their way out, to stdout or to a file that can be resumed."""

import errno
import os
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from tqdm import tqdm

from lit_gen.checkpoint import load_config
from lit_gen.handout import is_handed_out, join_handout
from lit_gen.interrupt import Interrupted, Interrupts
from lit_gen.job import fingerprint_job, refuse_overlap
from lit_gen.plan import OUT_OF_MEMORY
from lit_gen.prompts import digest_prompts, digest_read, is_stream, read_prompts
from lit_gen.requests import make_batch
from lit_gen.result_lines import result_lines
from lit_gen.results import Results
from lit_gen.settings import Request
from lit_gen.shard import shard_of, shard_path
from lit_gen.stopping import Row
from lit_gen.todo import Todo
from lit_gen.tokenizer import Tokenizer
from lit_gen.utils import UserError, printable, say


class Answers:
    """Reads the prompts of a job, checks them before the model is loaded, and takes its rows.

    Without `out` all prompts are read at once, and the texts are printed in their order. With it a file is read as rows
    are wanted, rows that are in `out` already are left out, and every finished row becomes a line there. `out` stays
    locked until the end of `with`, or until nothing is left to do. Processes of a torchrun have a file each, and take
    prompts as they have room (handout.py).

    Args:
        prompts: what `read_prompts` accepts.
        checkpoint_dir: of the model, whose weights are not read here.
        settings: the other keywords of `generate`.
        precision, device: how and where the model computes; parts of the fingerprint of the job.
        chat: put texts into the chat template; None does so if there is one.
        out: the output file.
        shard: what `shard_of` accepts.
        strict: raise for a prompt that cannot be run; None does so only without `out`.
        stream: print the text of the only row as it comes.
        stats_json: will be written at the end, and so must be none of this job's files.

    Attributes:
        config, tokenizer, strict: for `generate`.
        longest, n_rows, cache_rows: columns of a row, rows to come and what they take, as far as is known so early; of
            prompts that are handed out an equal part.
        stats_json: where the numbers go; shards have a file each.
        finished: whether nothing is left to do.
        interrupts: note signals while they are entered.
    """

    def __init__(
        self,
        prompts: str | list[str],
        checkpoint_dir: Path,
        settings: dict[str, Any],
        precision: str,
        device: torch.device,
        *,
        chat: bool | None = None,
        out: os.PathLike | None = None,
        shard: str | None = None,
        strict: bool | None = None,
        stream: bool = False,
        stats_json: os.PathLike | None = None,
    ) -> None:
        self.shard = shard_of(shard, os.environ)
        handed_out = is_handed_out(shard, out, prompts, os.environ)
        path = None if out is None else shard_path(Path(out), *self.shard)
        self.stats_json = stats_json and shard_path(Path(stats_json), *self.shard)
        refuse_overlap(self.stats_json, prompts, path)
        self.config, self.tokenizer, self.stream = load_config(checkpoint_dir), Tokenizer(checkpoint_dir), stream
        self.chat = self.tokenizer.chat_template is not None if chat is None else chat
        self.strict = out is None if strict is None else strict
        self._open: dict[int, list] = {}  # place -> [prompt, rows that will come, rows that wait for them]
        self._waiting: dict[int, Row] = {}  # rows to print after others
        self._printed, self.failed, self._unfit = 0, 0, 0
        self._results, self.interrupts = None, Interrupts()
        batch = partial(make_batch, config=self.config, tokenizer=self.tokenizer, **settings)
        self._width = batch(iter(())).width  # names a wrong setting before any work
        once, self._n_prompts = is_stream(prompts), 0
        self._prompts = prompts if path and isinstance(prompts, str) and not once else list(read_prompts(prompts))
        if path is not None:
            self._digest, self._n_prompts = digest_read(self._prompts) if once else digest_prompts(prompts)
            versions = {"precision": precision, "device": device.type, "torch": torch.__version__}
            options = {"chat": self.chat, **settings, **versions}
            job = fingerprint_job(self._digest, checkpoint_dir, options, self.shard, handed_out)
            self._results = Results.open(path, job)
        try:
            self._handout = join_handout(*self.shard) if handed_out else None
            where = (self.shard, self._results, self._handout)
            self._todo = Todo(self._prompts, self.tokenizer, self.chat, settings, batch, *where)
            self.finished = self._is_finished()
        except BaseException:
            if self._results is not None:
                self._results.discard()
            raise
        if self.finished:
            self._close()
            if stats_json is not None:
                say(f"nothing was run, so {self.stats_json} is not written")

    def _is_finished(self) -> bool:
        """Whether nothing is left to do; what is left is checked and counted."""
        if self._todo.finished:
            self._todo.report()
            return True
        self._todo.look_ahead(self.strict, self._n_prompts)
        left, processes = self._todo.n_rows, 1 if self._handout is None else self._handout.size
        self.longest, self.n_rows = self._todo.longest, -(-left // processes)
        self.cache_rows = self.n_rows * self._width  # more than one to a row in a search (see beams.py)
        if self.stream and left != 1:
            raise UserError(f"--stream shows a single row, but there are {left}: leave it out")
        if not left:  # an empty shard, or the job was killed between its last row and the sorting
            self._finish()
        elif self._results is not None and self._results.finished:
            self._results.reopen()
        return not left

    def _finish(self) -> None:
        """Marks the file as finished, if its rows are all there and all of the same prompts."""
        if isinstance(self._prompts, str) and digest_prompts(self._prompts)[0] != self._digest:
            what = f"the prompts in {self._prompts} changed while the job ran"
            raise UserError(f"{what}: {self._results.path} may have rows of both; give another --out")
        if self._results is not None and not self._unfit:
            self._results.finish()

    def requests(self) -> Iterator[Request]:
        """What `generate` is to answer."""
        for prompt, left, request in self._todo.read():
            if left:
                self._open[prompt.index] = [prompt, left, []]
            yield request

    def show(self, row: Row, text: str) -> None:
        """Prints a piece of text as it comes."""
        print(printable(text) if sys.stdout.isatty() else text, end="", flush=True)

    def take(self, row: Row) -> None:
        """Writes or prints a row that has ended."""
        self.bar.update()
        prompt, left, rows = entry = self._open[row.prompt_index]
        if self._results is not None and row.error == OUT_OF_MEMORY:
            self._unfit += 1
        elif row.error is not None:
            self.failed += 1
            if not row.error.startswith(prompt.where):
                row.error = f"{prompt.where}: {row.error}"
        if self._results is None:
            return self._print(row)
        if self.stream:
            print(flush=True)
        rows.append(row)
        left = left - 1 if row.prompt else 0  # a prompt that cannot be run ends in one row, whatever its n
        if prompt.openai is None or left == 0:
            if all(row.error != OUT_OF_MEMORY for row in rows):  # else the same command tries them again
                for line in result_lines(prompt, rows, self.tokenizer):
                    self._results.write(line)
            rows.clear()
        entry[1] = left
        if left == 0:
            del self._open[row.prompt_index]

    def _print(self, row: Row) -> None:
        self._waiting[row.index] = row
        while (row := self._waiting.pop(self._printed, None)) is not None:
            self._printed += 1
            if row.error is not None:
                say(f"error: {row.error}")
            self.show(row, ("" if self.stream else row.text) + "\n")

    def step(self) -> None:
        """To be called between steps: makes rows durable while no other ends, and raises if a signal has come."""
        if self._results is not None:
            self._results.sync_if_due()
        self.interrupts.check()

    def _close(self) -> None:
        if self._results is not None:
            self._results.close()

    def __enter__(self) -> "Answers":
        shown = self.n_rows > 1 and (self._handout is None or self._handout.rank == 0)
        self.bar = tqdm(total=self.n_rows, unit="row", disable=None if shown else True, file=sys.stderr)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.bar.close()
        if self._results is None:
            return
        try:
            if kind is None:
                assert not self._open, f"{len(self._open)} prompts got no answer"
                self._finish()
        finally:
            self._close()
        if kind is None and self._handout is not None:
            self._handout.leave()
        if isinstance(error, Interrupted | KeyboardInterrupt):
            say(f"{len(self._results.done)} rows are in {self._results.path}; the same command goes on")
        elif kind is None and self.failed:
            say(f"{self.failed} rows ended with an error: see {self._results.path}")
        if kind is None and self._unfit:
            raise OSError(
                errno.ENOMEM, f"{self._unfit} rows did not fit into memory: the same command tries them again"
            )
