"""The two ends of a job: prompts on their way in; rows on their way out, to stdout or to a file that can be resumed."""

import hashlib
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
from lit_gen.interrupt import Interrupted
from lit_gen.job import SHARD, fingerprint_model
from lit_gen.prompt_lines import Prompt
from lit_gen.prompts import digest_prompts, encode_prompt, printable, read_prompts
from lit_gen.requests import make_batch
from lit_gen.result_lines import result_lines
from lit_gen.results import Results
from lit_gen.settings import ALL, Request
from lit_gen.shard import shard_of, shard_path
from lit_gen.stopping import Row
from lit_gen.tokenizer import Tokenizer
from lit_gen.utils import UserError

AHEAD = 1000  # prompts that are looked at before the model is loaded, to plan memory by the longest of them


class Answers:
    """Reads the prompts of a job, checks them before the model is loaded, and takes its rows.

    Without `out` all prompts are read at once, and the texts are printed in their order. With it a file is read as rows
    are wanted, rows that are in `out` already are left out, and every finished row becomes a line there. `out` is open,
    and locked, until the end of `with`; at once closed again if there is nothing left to do or something is wrong.

    Args:
        prompts: what `read_prompts` accepts.
        checkpoint_dir: of the model, whose weights are not read here.
        settings: the other keywords of `generate`.
        dtype, device: of the model; parts of the fingerprint of the job.
        chat: put texts into the chat template; None does so if there is one.
        out: the output file.
        shard: what `shard_of` accepts.
        strict: raise for a prompt that cannot be run; None does so only without `out`.
        stream: print the text of the only row as it comes.

    Attributes:
        config, tokenizer: of the checkpoint.
        strict: for `generate`.
        longest: cache columns that a row may need, of the first prompts.
        n_rows: rows to come, as far as is known without reading all prompts.
        finished: whether nothing is left to do.
    """

    def __init__(
        self,
        prompts: str | list[str],
        checkpoint_dir: Path,
        settings: dict[str, Any],
        dtype: torch.dtype,
        device: torch.device,
        *,
        chat: bool | None = None,
        out: os.PathLike | None = None,
        shard: str | None = None,
        strict: bool | None = None,
        stream: bool = False,
    ) -> None:
        self.config, self.tokenizer, self.stream = load_config(checkpoint_dir), Tokenizer(checkpoint_dir), stream
        self.chat = self.tokenizer.chat_template is not None if chat is None else chat
        self.strict = out is None if strict is None else strict
        self.shard = shard_of(shard, os.environ)
        self.n_samples, self.temperature = settings.get("num_samples", 1), settings.get("temperature", 0)
        self._open: dict[int, list] = {}  # place -> [prompt, rows that will come, rows that wait for them]
        self._results: Results | None = None
        self._waiting: dict[int, Row] = {}  # rows to print after others
        self._printed, self.failed = 0, 0
        self._make_batch = partial(make_batch, config=self.config, tokenizer=self.tokenizer, **settings)
        self._make_batch(iter(()))  # names a wrong setting before any work
        again = out is not None and isinstance(prompts, str) and prompts != "-"  # it can be read again
        self._prompts = prompts if again else list(read_prompts(prompts))
        if out is not None:
            where = {"dtype": str(dtype), "device": device.type, "torch": torch.__version__}
            self._open_results(Path(out), prompts, checkpoint_dir, {"chat": self.chat, **settings, **where})
        try:
            self.finished = self._is_finished()
        except BaseException:
            self._close()
            raise
        if self.finished:
            self._close()

    def _open_results(self, out: Path, prompts: str | list[str], checkpoint: Path, options: dict[str, Any]) -> None:
        """Opens the file of this job and of no other."""
        if prompts == "-":
            digest, self._n_prompts = hashlib.sha256(repr(self._prompts).encode()).hexdigest(), len(self._prompts)
        else:
            digest, self._n_prompts = digest_prompts(prompts)
        index, count = self.shard
        fingerprint = {"prompts": digest, "model": fingerprint_model(checkpoint), **options}
        if count > 1:  # a merged file has no such part, and is the undivided job's
            fingerprint[SHARD] = f"{index}/{count}"
        self._results = Results.open(shard_path(out, index, count), fingerprint)

    def _is_finished(self) -> bool:
        """Whether nothing is left to do; what is left is checked and counted."""
        if self._results is not None and self._results.finished:
            print(f"resumed: {len(self._results.done)} done, 0 left", file=sys.stderr)
            return True
        self._look_ahead()
        if self.n_rows:
            return False
        if self._results is not None:  # an empty shard, or the job was killed between its last row and the sorting
            self._results.finish()
        return True

    def _look_ahead(self) -> None:
        """Checks the prompts (all of them if strict), and finds out how long and how many rows there are."""
        rows = self._make_batch((request for _, _, request in self._read()), strict=self.strict).waiting
        seen = rows if self.strict else islice(rows, AHEAD)
        self.longest = max((row.columns for row in seen if row.error is None), default=1)
        done = 0 if self._results is None else len(self._results.done)
        if done or isinstance(self._prompts, list) or self._n_prompts <= AHEAD:
            self.n_rows = sum(n for _, n, _ in self._read(encode=False))
        else:  # not worth another reading
            index, count = self.shard
            self.n_rows = len(range(index, self._n_prompts, count)) * self.n_samples
        if done:
            print(f"resumed: {done} done, {self.n_rows} left", file=sys.stderr)
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
                left = sum(1 for _ in self._make_batch(iter([request]), strict=False).waiting)
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
        self.failed += row.error is not None
        self.bar.update()
        if self._results is None:
            self._print(row)
            return
        if self.stream:
            print(flush=True)
        entry = self._open[row.prompt_index]
        prompt, left, rows = entry
        rows.append(row)
        left = left - 1 if row.prompt else 0  # a prompt that cannot be run ends in one row, whatever its n
        if prompt.openai is None or left == 0:
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
                print(f"error: {row.error}", file=sys.stderr)
            text = "" if self.stream else row.text
            print(printable(text) if sys.stdout.isatty() else text, flush=True)

    def _close(self) -> None:
        if self._results is not None:
            self._results.close()

    def __enter__(self) -> "Answers":
        quiet = None if self.n_rows > 1 else True  # None: only on a terminal
        self.bar = tqdm(total=self.n_rows, unit="row", disable=quiet, file=sys.stderr)
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
                self._results.finish()
        finally:
            self._close()
        if isinstance(error, Interrupted | KeyboardInterrupt):
            n, path = len(self._results.done), self._results.path
            print(f"{n} rows are in {path}; the same command goes on", file=sys.stderr)
        elif kind is None and self.failed:
            print(f"{self.failed} rows ended with an error: see {self._results.path}", file=sys.stderr)
