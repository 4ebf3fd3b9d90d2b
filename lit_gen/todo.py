"""The prompts of a job that are left to do: read as they are wanted, counted before the model is loaded."""

from collections.abc import Callable, Container, Iterator, Mapping
from itertools import islice
from typing import Any

from lit_gen.batch import Batch
from lit_gen.handout import Handout
from lit_gen.prompt_lines import Prompt
from lit_gen.prompts import encode_prompt, read_prompts
from lit_gen.results import Results
from lit_gen.rows import Keys
from lit_gen.settings import ALL, Request
from lit_gen.tokenizer import Tokenizer
from lit_gen.utils import UserError, say

AHEAD = 1000  # prompts that are looked at before the model is loaded, to plan memory by the longest of them


class Todo:
    """This process's part of what is left of a list or a file of prompts.

    Args:
        prompts: a list, or what `read_prompts` accepts and can be read again and again.
        tokenizer: of the model.
        chat: put texts into the chat template.
        settings: of the job; a prompt may have others.
        make_batch: makes a batch of requests.
        shard: number of this process and of all; only the prompts i, i + n, ... are its own.
        results: has the rows that are done.
        handout: hands prompts out instead, so that any may become this process's.

    Attributes:
        finished: every file was finished when this was made.
        longest: cache columns of a row, as far as is known without reading all prompts.
        n_rows: rows that are left for all that share these prompts, likewise.
    """

    def __init__(
        self,
        prompts: str | list[Prompt],
        tokenizer: Tokenizer,
        chat: bool,
        settings: Mapping[str, Any],
        make_batch: Callable[..., Batch],
        shard: tuple[int, int],
        results: Results | None,
        handout: Handout | None,
    ) -> None:
        self.prompts, self.tokenizer, self.chat = prompts, tokenizer, chat
        self.n_samples, self.temperature = settings.get("num_samples", 1), settings.get("temperature", 0)
        self.make_batch, self.shard, self.results, self.handout = make_batch, shard, results, handout
        self.finished, self.n_rows = results is not None and results.finished, 0
        self.done: list[Keys] = [] if results is None else [results.done]
        if handout is not None:
            elsewhere, self.finished = handout.compare(results)
            self.done.append(elsewhere)

    def read(self, ahead: bool = False, encode: bool = True) -> Iterator[tuple[Prompt, int, Request]]:
        """Prompts with something left to do, how many rows will come of each, and what to ask for.

        Others come along, with 0 rows, if they are sampled: a later prompt may be the same.

        Args:
            ahead: only look: of prompts that are handed out take none, and see all.
        """
        for prompt in self.prompts if isinstance(self.prompts, list) else read_prompts(self.prompts):
            n = 1 if prompt.error else prompt.settings.get("n", self.n_samples)
            done = self._done(prompt, n)
            left = sum(sample not in done for sample in range(n))
            if left and not self._is_mine(prompt, ahead):
                done, left = ALL, 0
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
                left = sum(1 for _ in self.make_batch(iter([request]), strict=False).rows)
            yield prompt, left, request

    def _is_mine(self, prompt: Prompt, ahead: bool) -> bool:
        if self.handout is not None:
            return ahead or self.handout.takes_next()
        return prompt.index % self.shard[1] == self.shard[0]

    def _done(self, prompt: Prompt, n: int) -> Container[int]:
        """Samples that are in a file already; a line in OpenAI's format has all of them."""
        if prompt.openai is not None:
            return ALL if any((prompt.index, 0) in keys for keys in self.done) else ()
        return {sample for sample in range(n) if any((prompt.index, sample) in keys for keys in self.done)}

    def look_ahead(self, strict: bool, n_prompts: int) -> None:
        """Finds out how long and how many rows there are; if strict checks all prompts, of which there are so many."""
        rows = self.make_batch((request for _, _, request in self.read(ahead=True)), strict=strict).rows
        seen = rows if strict else islice(rows, AHEAD)
        self.longest = max((row.columns for row in seen if row.error is None), default=1)
        if any(map(len, self.done)) or isinstance(self.prompts, list) or n_prompts <= AHEAD:
            self.n_rows = sum(n for _, n, _ in self.read(ahead=True, encode=False))
        else:  # not worth another reading
            index, count = self.shard if self.handout is None else (0, 1)
            self.n_rows = len(range(index, n_prompts, count)) * self.n_samples
        self.report()

    def report(self) -> None:
        """Says how far the job has come, once for all that share it, and what was wrong with this process's file."""
        done, dropped = sum(map(len, self.done)), 0 if self.results is None else self.results.dropped
        speaks = self.handout is None or self.handout.rank == 0
        if dropped or (speaks and (done or self.finished)):
            damage = f"; {dropped} damaged line{'s' * (dropped > 1)} dropped" if dropped else ""
            say(f"resumed: {done} done, {self.n_rows} left{damage}")
