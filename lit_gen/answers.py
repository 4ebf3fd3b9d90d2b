"""The two ends of a job: prompts on their way in; rows on their way out, to stdout or to a file that can be resumed."""

import errno
import os
import sys
from collections.abc import Container, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from tqdm import tqdm

from lit_gen.checkpoint import load_config
from lit_gen.interrupt import Interrupted, Interrupts
from lit_gen.job import fingerprint_job, refuse_overlap
from lit_gen.plan import OUT_OF_MEMORY
from lit_gen.prompt_lines import Prompt
from lit_gen.prompts import digest_prompts, digest_read, encode_prompt, is_stream, read_prompts
from lit_gen.requests import make_batch
from lit_gen.result_lines import result_lines
from lit_gen.results import Results
from lit_gen.settings import ALL, Request
from lit_gen.shard import shard_of, shard_path
from lit_gen.stopping import Row
from lit_gen.tokenizer import Tokenizer
from lit_gen.utils import UserError, printable, say

AHEAD = 1000  # prompts that are looked at before the model is loaded, to plan memory by the longest of them


class Answers:
    """Reads the prompts of a job, checks them before the model is loaded, and takes its rows.

    Without `out` all prompts are read at once, and the texts are printed in their order. With it a file is read as rows
    are wanted, rows that are in `out` already are left out, and every finished row becomes a line there. `out` stays
    locked until the end of `with`, or until nothing is left to do.

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
        longest, n_rows, cache_rows: columns of a row, rows to come and what they take, as far as is known so early.
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
        path = None if out is None else shard_path(Path(out), *self.shard)
        refuse_overlap(stats_json, prompts, path)
        self.config, self.tokenizer, self.stream = load_config(checkpoint_dir), Tokenizer(checkpoint_dir), stream
        self.chat = self.tokenizer.chat_template is not None if chat is None else chat
        self.strict = out is None if strict is None else strict
        self.n_samples, self.temperature = settings.get("num_samples", 1), settings.get("temperature", 0)
        self._open: dict[int, list] = {}  # place -> [prompt, rows that will come, rows that wait for them]
        self._results: Results | None = None
        self._waiting: dict[int, Row] = {}  # rows to print after others
        self._printed, self.failed, self._unfit, self.interrupts = 0, 0, 0, Interrupts()
        self._make_batch = partial(make_batch, config=self.config, tokenizer=self.tokenizer, **settings)
        self._width = self._make_batch(iter(())).width  # names a wrong setting before any work
        once = is_stream(prompts)
        self._prompts = prompts if path and isinstance(prompts, str) and not once else list(read_prompts(prompts))
        if path is not None:
            self._digest, self._n_prompts = digest_read(self._prompts) if once else digest_prompts(prompts)
            where = {"precision": precision, "device": device.type, "torch": torch.__version__}
            options = {"chat": self.chat, **settings, **where}
            self._results = Results.open(path, fingerprint_job(self._digest, checkpoint_dir, options, self.shard))
        try:
            self.finished = self._is_finished()
        except BaseException:
            if self._results is not None:
                self._results.discard()
            raise
        if self.finished:
            self._close()
            if stats_json is not None:
                say(f"nothing was run, so {stats_json} is not written")

    def _is_finished(self) -> bool:
        """Whether nothing is left to do; what is left is checked and counted."""
        if self._results is not None and self._results.finished:
            say(f"resumed: {len(self._results.done)} done, 0 left")
            return True
        self._look_ahead()
        if not self.n_rows:  # an empty shard, or the job was killed between its last row and the sorting
            self._finish()
        return not self.n_rows

    def _finish(self) -> None:
        """Marks the file as finished, if its rows are all there and all of the same prompts."""
        if isinstance(self._prompts, str) and digest_prompts(self._prompts)[0] != self._digest:
            what = f"the prompts in {self._prompts} changed while the job ran"
            raise UserError(f"{what}: {self._results.path} may have rows of both; give another --out")
        if self._results is not None and not self._unfit:
            self._results.finish()

    def _look_ahead(self) -> None:
        """Checks the prompts (all of them if strict), and finds out how long and how many rows there are."""
        rows = self._make_batch((request for _, _, request in self._read()), strict=self.strict).rows
        seen = rows if self.strict else islice(rows, AHEAD)
        self.longest = max((row.columns for row in seen if row.error is None), default=1)
        done, dropped = (0, 0) if self._results is None else (len(self._results.done), self._results.dropped)
        if done or isinstance(self._prompts, list) or self._n_prompts <= AHEAD:
            self.n_rows = sum(n for _, n, _ in self._read(encode=False))
        else:  # not worth another reading
            self.n_rows = len(range(self.shard[0], self._n_prompts, self.shard[1])) * self.n_samples
        self.cache_rows = self.n_rows * self._width  # more than one to a row in a search (see beams.py)
        if done or dropped:
            damage = f"; {dropped} damaged line{'s' * (dropped > 1)} dropped" if dropped else ""
            say(f"resumed: {done} done, {self.n_rows} left{damage}")
        if self.stream and self.n_rows != 1:
            raise UserError(f"--stream shows a single row, but there are {self.n_rows}: leave it out")

    def _read(self, encode: bool = True) -> Iterator[tuple[Prompt, int, Request]]:
        """This shard's prompts with something left to do, how many rows will come of each, and what to ask for.

        Others come along, with 0 rows, if they are sampled: a later prompt may be the same.
        """
        index, count = self.shard
        for prompt in self._prompts if isinstance(self._prompts, list) else read_prompts(self._prompts):
            n = 1 if prompt.error else prompt.settings.get("n", self.n_samples)
            done = self._done(prompt, n) if prompt.index % count == index else ALL
            left = sum(sample not in done for sample in range(n))
            begun = 0 < left < n
            if left == 0 and not (prompt.settings.get("temperature", self.temperature) > 0 and prompt.error is None):
                continue
            ids, error = [], prompt.error
            if (encode or begun) and error is None:
                try:
                    ids = encode_prompt(prompt, self.tokenizer, chat=self.chat)
                except UserError as problem:
                    error = str(problem)
            request = Request(ids, prompt.settings, prompt.where, error, done, prompt.index)
            if begun:  # or is it one that cannot be run, whose only row is there?
                left = sum(1 for _ in self._make_batch(iter([request]), strict=False).rows)
            yield prompt, left, request

    def _done(self, prompt: Prompt, n: int) -> Container[int]:
        """Samples that are in the file already; a line in OpenAI's format has all of them."""
        if self._results is None or not self._results.done:
            return ()
        if prompt.openai is not None:
            return ALL if (prompt.index, 0) in self._results.done else ()
        return {sample for sample in range(n) if (prompt.index, sample) in self._results.done}

    def requests(self) -> Iterator[Request]:
        """What `generate` is to answer."""
        for prompt, left, request in self._read():
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
        self.bar = tqdm(total=self.n_rows, unit="row", disable=None if self.n_rows > 1 else True, file=sys.stderr)
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
        if isinstance(error, Interrupted | KeyboardInterrupt):
            say(f"{len(self._results.done)} rows are in {self._results.path}; the same command goes on")
        elif kind is None and self.failed:
            say(f"{self.failed} rows ended with an error: see {self._results.path}")
        if kind is None and self._unfit:
            raise OSError(
                errno.ENOMEM, f"{self._unfit} rows did not fit into memory: the same command tries them again"
            )
