"""lm-eval's view of a model: texts in, log-likelihoods and generated texts out, in batches of any lengths.

What is computed is what lm-eval's own `HFLM` computes: its tokenisation, its cuts of long texts, its stops.
"""

import hashlib
import math
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tqdm import tqdm

from generate.base import generate
from lit_gen import GPT, Request, Tokenizer
from lit_gen.beams import Beams
from lit_gen.plan import Plan, plan_batch
from lit_gen.score import Pair, Score, score
from lit_gen.settings import check_count
from lit_gen.source import Source
from lit_gen.stopping import Row
from lit_gen.utils import UserError, say
from scripts.evaluate_settings import settings_of

Scored = tuple[float, bool]
TAG = "CONTINUE_THIS_MESSAGE "  # its space shows whether the template strips what is said


class LitGenLM(TemplateLM):
    """A model for `lm_eval.simple_evaluate(model=...)`; it is loaded when it is first needed.

    Args:
        batch_size: texts that run at a time; by default, and at most, what fits into memory.
        max_length: most tokens of a text, by default the model's context.
        seed: of sampled texts.
    """

    def __init__(
        self,
        source: Source,
        tokenizer: Tokenizer,
        batch_size: int | None = None,
        max_length: int | None = None,
        seed: int = 1234,
    ) -> None:
        super().__init__()
        context = source.config.block_size
        self.source, self.tokenizer, self.batch_size, self.seed = source, tokenizer, batch_size, seed
        self.max_length, self.max_gen_toks, self._device = max_length or context, 256, source.device
        if not 2 <= self.max_length <= context:
            raise UserError(f"max_length is {max_length}, but must be from 2 to the model's context of {context}")
        if batch_size is not None:
            check_count("batch_size", batch_size)

    @cached_property
    def model(self) -> GPT:
        return self.source.load()

    def plan(self, longest: int, n: int, width: int = 1) -> Plan:
        """How many rows may run at a time for n requests that take `width` each."""
        most = None if self.batch_size is None else self.batch_size * width
        source, limits = self.source, (longest, n * width, most)
        loaded = "model" in vars(self)
        plan = plan_batch(source.config, source.dtype, source.device, *limits, source.format, loaded)
        say(f"{n} requests, {plan}")
        return plan

    def get_model_info(self) -> dict[str, Any]:
        """What lm-eval writes into its results: on what the numbers depend beside the checkpoint."""
        return {"checkpoint": self.source.path.name, **self.source.about, "max_length": self.max_length}

    @property
    def tokenizer_name(self) -> str:
        """Names what prompts are made with, for lm-eval's cache of them."""
        template = hashlib.sha256((self.tokenizer.chat_template or "").encode()).hexdigest()
        return f"{self.source.path.resolve()}-{template[:12]}".replace("/", "__")

    @property
    def eot_token_id(self) -> int | None:
        return self.tokenizer.eos_id

    @property
    def prefix_token_id(self) -> int:
        """Stands before a text that has no context."""
        token = self.tokenizer.eos_id if self.tokenizer.bos_id is None else self.tokenizer.bos_id
        if token is None:
            raise UserError("this tokenizer has neither BOS nor EOS, one of which must stand before a text alone")
        return token

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        return self.tokenizer.encode(string, add_special_tokens=add_special_tokens is not False).tolist()

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """The template that prompts are put into, if they are."""
        return self.tokenizer.chat_template if chat_template else None

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """The text of a conversation; its last message is left open if no new one is to begin."""
        *before, last = chat_history
        if not add_generation_prompt:
            last = last | {"content": last["content"] + TAG}
        try:
            text = self.tokenizer.render_chat([*before, last], add_generation_prompt=add_generation_prompt)
        except UserError:
            others = [message for message in chat_history if message["role"] != "system"]
            if len(others) == len(chat_history):
                raise
            say("the chat template does not take a system message: it is left out")
            return self.apply_chat_template(others, add_generation_prompt)
        if add_generation_prompt:
            return text
        shown = text.rpartition(TAG.strip())[0]
        return shown if TAG in text else shown.rstrip()

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Log-likelihoods of whole texts; those longer than `max_length` in windows, each token once."""
        how = self.prefix_token_id, self.max_length, 1
        windows = [list(get_rolling_token_windows(self.tok_encode(*request.args), *how)) for request in requests]
        pairs = [make_disjoint_window(window) for own in windows for window in own]
        owners = [owner for owner, own in enumerate(windows) for _ in own]
        parts: list[list[float]] = [[] for _ in requests]

        def take(place: int, found: Score) -> None:
            owner = owners[place]
            parts[owner].append(found.logprob)
            if len(parts[owner]) == len(windows[owner]):
                self.cache_hook.add_partial("loglikelihood_rolling", requests[owner].args, math.fsum(parts[owner]))

        self._score(pairs, take, disable_tqdm)
        return [math.fsum(part) for part in parts]

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], list[int], list[int]]], disable_tqdm: bool = False, **kwargs: Any
    ) -> list[Scored]:
        results: list[Scored] = [(0.0, True)] * len(requests)

        def take(place: int, found: Score) -> None:
            results[place] = tuple(found)
            self.cache_hook.add_partial("loglikelihood", requests[place][0], results[place])

        self._score([(context, continuation) for _, context, continuation in requests], take, disable_tqdm)
        return results

    def _score(self, pairs: list[Pair], take: Callable[[int, Score], None], quiet: bool) -> None:
        lengths = [len(context) + len(continuation) - 1 for context, continuation in pairs]
        if long := sum(length > self.max_length for length in lengths):
            say(f"{long} of {len(pairs)} texts are longer than {self.max_length} tokens: they are cut at the beginning")
        rows = self.plan(min(max(lengths, default=1), self.max_length), len(pairs)).rows
        with tqdm(total=len(pairs), desc="log-likelihoods", disable=quiet or None) as bar:
            for place, found in score(self.model, pairs, rows, self.max_length):
                take(place, found)
                bar.update()

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Texts up to a stop, the longest contexts first; each request has settings of its own."""
        searches: dict[Beams, list[Request]] = {}  # a batch either searches, in one way, or does not
        for place, request in enumerate(requests):
            asked, beams = self._request(place, *request.args)
            searches.setdefault(beams, []).append(asked)
        results = [""] * len(requests)
        with tqdm(total=len(requests), desc="texts", disable=disable_tqdm or None) as bar:
            for beams, asked in searches.items():
                for row in self._generate(sorted(asked, key=lambda request: -len(request.prompt)), beams):
                    if row.error:
                        say(f"request {row.prompt_index}: {row.error}")
                    results[row.prompt_index] = row.text
                    self.cache_hook.add_partial("generate_until", requests[row.prompt_index].args, row.text)
                    bar.update()
        return results

    def _generate(self, asked: list[Request], beams: Beams) -> Iterator[Row]:
        longest = max(len(request.prompt) + request.settings["max_new_tokens"] - 1 for request in asked)
        plan = self.plan(longest, len(asked), beams.n)
        how = {"stop_ids": self.tokenizer.stop_ids, "tokenizer": self.tokenizer, "seed": self.seed}
        how |= {"max_batch_size": plan.rows, "max_cache_columns": plan.rows * plan.columns}
        how |= {"num_beams": beams.n, "length_penalty": beams.length_penalty, "early_stopping": beams.early_stopping}
        yield from generate(self.model, asked, **how)

    def _request(self, place: int, context: str, gen_kwargs: dict[str, Any]) -> tuple[Request, Beams]:
        """A context, cut at the beginning so that the new tokens fit; they are fewer if nothing of it would be left."""
        settings, beams = settings_of(gen_kwargs, self.max_gen_toks)
        ids, n, most = self.tok_encode(context) or [self.prefix_token_id], settings["max_new_tokens"], self.max_length
        if n >= most:
            ids = ids[-(most - 1) :]
            n = most - len(ids)
        settings["max_new_tokens"] = n
        return Request(ids[-(most - n) :], settings, name=f"request {place}", place=place), beams
