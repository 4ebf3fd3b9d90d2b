"""From prompts to the rows of a job: settings of their own, whether they fit, and how many there are of each."""

import hashlib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence, Sized
from dataclasses import dataclass
from itertools import repeat
from operator import index
from typing import Any, Literal

import numpy as np

from lit_gen.batch import Batch
from lit_gen.beams import BeamBatch, Beams, EarlyStopping
from lit_gen.cache import Side
from lit_gen.config import Config
from lit_gen.penalties import Processor
from lit_gen.settings import Request, Settings, check_count, check_names
from lit_gen.stopping import Row
from lit_gen.tokenizer import Tokenizer
from lit_gen.utils import UserError

Prompt = Sequence[int] | Request
Asked = tuple[Request, Settings]  # what a prompt wants itself, and what it has in common with all others
Truncate = Literal["left"] | None


def make_batch(
    prompts: Iterable[Prompt],
    config: Config,
    *,
    num_samples: int = 1,
    truncate: Truncate = None,
    strict: bool = True,
    max_batch_size: int = 64,
    max_cache_columns: int | None = None,
    prefill_budget: int = 2048,
    padding_side: Side = None,
    speculate: int = 0,
    num_beams: int = 1,
    length_penalty: float = 1.0,
    early_stopping: EarlyStopping = False,
    ignore_eos: bool = False,
    loras: Collection[str] = (),
    stop_ids: Collection[int] = frozenset(),
    tokenizer: Tokenizer | None = None,
    processors: Sequence[Processor] = (),
    on_text: Callable[[Row, str], None] | None = None,
    on_step: Callable[[], None] | None = None,
    **settings: Any,
) -> Batch:
    """The rows of a job, ready to start.

    Args:
        num_samples: Rows per prompt (`n` in a request); with num_beams the best texts, best first.
        truncate: left cuts the beginning of a prompt that is too long for the context; by default it is an error.
        strict: One bad prompt ends everything; else it becomes a row with `finish_reason` "error".
        max_batch_size: Rows that run at a time.
        max_cache_columns: Cache columns of all rows together, rows times the longest; by default without limit.
        prefill_budget: Prompt tokens between two steps of the running rows; longer prompts are cut into such pieces.
        padding_side: Prefill prompts as one padded rectangle, not each alone at its own length.
        speculate: Check up to so many guesses of each row in a step, taken from its own text, where that pays.
        num_beams: Search for the most probable texts with so many rows of each prompt; 1 takes token by token.
        length_penalty: A text's score in the search is its log-probability / length ** length_penalty.
        early_stopping: true ends a search at num_beams texts; false when it looks unlikely, never when it is impossible
            for a better one to come.
        ignore_eos: Go on after the model's end tokens, to measure speed.
        loras: names of adapters that prompts may ask for.
        processors: f(tokens (1, T), logits (1, V)) -> logits, called for each row before its token is chosen.
        on_text: called with a row and the next piece of its text.
        on_step: called between two steps; what it raises ends the job.

    Raises:
        UserError: a setting is out of range; if strict and `prompts` has a length also for a prompt that cannot be run.
    """
    counts = {"max_batch_size": max_batch_size, "prefill_budget": prefill_budget, "num_samples": num_samples}
    if speculate != 0:
        counts["speculate"] = speculate
    _check_options(truncate, padding_side, stop_ids, processors, counts | {"max_cache_columns": max_cache_columns})
    beams = Beams(num_beams, length_penalty, early_stopping)
    beams.refuse(padding_side=padding_side, speculate=speculate, processors=processors)
    asked = with_settings(prompts, n=num_samples, **settings)
    beams.check(Settings(**{k: v for k, v in {"n": num_samples, **settings}.items() if not _is_list(v)}))
    limits = Limits(config, tokenizer is not None, truncate, loras, beams)
    if isinstance(asked, list):
        if not asked:
            raise UserError("there is no prompt: give at least one")
        for place, (request, common) in enumerate(asked if strict else []):
            resolve(request, place, common, limits)
    ends = frozenset() if ignore_eos else stop_ids
    rows = make_rows(asked, limits, stop_ids=ends, tokenizer=tokenizer, strict=strict)
    how = {"padding_side": padding_side, "processors": processors, "on_text": on_text, "on_step": on_step}
    how["speculate"] = speculate
    if num_beams > 1:
        return BeamBatch(rows, beams, max_batch_size, max_cache_columns, prefill_budget, **how)
    return Batch(rows, max_batch_size, max_cache_columns, prefill_budget, **how)


def _check_options(truncate: Any, padding_side: Any, stop_ids: Any, processors: Any, counts: dict[str, Any]) -> None:
    if truncate not in (None, "left"):
        raise UserError(f"truncate is {truncate!r:.40}, but must be left or left out")
    if padding_side not in (None, "left", "right"):
        raise UserError(f"padding_side is {padding_side!r:.40}, but must be left, right or left out")
    for name, value in (("stop_ids", stop_ids), ("processors", processors)):
        if not isinstance(value, Collection) or isinstance(value, str):
            raise UserError(f"{name} is {value!r:.40}, but must be a list")
    for name, value in counts.items():
        if not (name == "max_cache_columns" and value is None) and not (name == "num_samples" and _is_list(value)):
            check_count(name, value)


def with_settings(prompts: Iterable[Prompt], **settings: Any) -> Iterable[Asked]:
    """Every prompt as a request beside the settings of the job; a list if `prompts` has a length, else made on demand.

    Args:
        prompts: token ids, (T,) each, or requests.
        settings: those of `Settings`. In place of a number there may be a list, with one for each prompt.
    """
    check_names(settings)
    lists = {k: v for k, v in settings.items() if k not in ("stop", "logit_bias") and _is_list(v)}
    if not lists:
        pairs = zip(map(_request, prompts), repeat(Settings(**settings)))
        return list(pairs) if isinstance(prompts, Sized) else pairs
    for name, values in lists.items():
        if not isinstance(prompts, Sized) or len(values) != len(prompts):
            raise UserError(f"{name} is {values!r:.40}, but must be one value, or a list with one for each prompt")
    own = (settings | {name: values[i] for name, values in lists.items()} for i in range(len(prompts)))
    return [(_request(prompt), Settings(**one)) for prompt, one in zip(prompts, own, strict=True)]


def _is_list(value: Any) -> bool:
    return isinstance(value, list | tuple | np.ndarray) and getattr(value, "ndim", 1) == 1


def _request(prompt: Prompt) -> Request:
    return prompt if isinstance(prompt, Request) else Request(prompt)


@dataclass(frozen=True)
class Limits:
    """What a prompt has to keep to."""

    config: Config
    texts: bool = True  # whether rows will have a text, which stops may need
    truncate: Truncate = None
    loras: Collection[str] = ()
    beams: Beams = Beams()


def resolve(request: Request, place: int, settings: Settings, limits: Limits) -> tuple[list[int], Settings]:
    """Token ids and settings of a request.

    T tokens and n new ones take T + n - 1 cache columns: the last new token is never fed back.

    Raises:
        UserError: names the prompt (its `name`, else its place) and what is wrong with it.
    """
    if request.error is not None:
        raise UserError(request.error)
    where = request.name or f"prompt {place if request.place is None else request.place}"
    try:
        own = settings.override(request.settings) if request.settings else settings
        limits.beams.check(own)
    except UserError as error:
        raise UserError(f"{where}: {error}") from None
    if not limits.texts and any(isinstance(stop, str) for stop in own.stop):
        raise UserError("stop texts need the text of a row: pass tokenizer=")
    if own.lora is not None and own.lora not in limits.loras:
        there = f"there is {', '.join(limits.loras):.200}" if limits.loras else "none was loaded by name"
        raise UserError(f"{where} asks for the adapter {own.lora!r:.40}, but {there}")
    prompt = _token_ids(request.prompt)
    if not prompt:
        raise UserError(f"{where} has no tokens: give it at least one, such as the tokenizer's bos_id")
    V, context = limits.config.vocab_size, limits.config.block_size
    for what, tokens in (("the token", prompt), ("a logit_bias for token", own.logit_bias or ())):
        if unknown := [token for token in tokens if not 0 <= token < V]:
            raise UserError(f"{where} has {what} {unknown[0]}, but the model has only {V} of them: take it out")
    if own.logprobs is not None and own.logprobs > V:
        raise UserError(f"{where} asks for {own.logprobs} logprobs, but the model has only {V} tokens")
    T, n = len(prompt), own.max_new_tokens
    room = context + 1 - n  # for the prompt
    if T > room > 0 and limits.truncate == "left":
        return prompt[T - room :], own
    if T > room:
        left = context + 1 - T  # for new tokens
        remedies = [f"set max_new_tokens to {left}"] * (left > 0) + [f"shorten it to {room}"] * (room > 0)
        remedy = " or ".join(remedies) or "shorten it, and lower max_new_tokens"
        raise UserError(
            f"{where} has {T} tokens and {n} new ones are wanted, "
            f"which exceeds the model's context of {context}: {remedy}"
        )
    return prompt, own


def _token_ids(prompt: Iterable[int]) -> list[int]:
    """A prompt as Python integers: it may be a tensor, an array or a tuple, but not text or fractions."""
    try:
        return [index(token) for token in prompt]
    except TypeError as error:
        raise UserError(f"prompts must be a list with the token ids of each prompt ({error})") from None


def make_rows(
    asked: Iterable[Asked],
    limits: Limits,
    *,
    stop_ids: Collection[int] = frozenset(),
    tokenizer: Tokenizer | None = None,
    strict: bool = True,
) -> Iterator[Row]:
    """The rows of a job, made as they are asked for: `n` for each prompt, one after the other.

    A sampled row has random numbers of its own. Equal prompts differ by how many sampled ones came before.

    Args:
        strict: raise for a prompt that cannot be run; else it becomes one row that has ended with an error.
    """
    before: Counter[bytes] = Counter()  # how often a prompt was sampled already, by its digest
    count = 0
    for place, (request, settings) in enumerate(asked):
        place = place if request.place is None else request.place
        try:
            prompt, chosen = resolve(request, place, settings, limits)
        except UserError as error:
            if 0 in request.done:
                continue
            if strict:
                raise
            row = Row(count, [], Settings(), prompt_index=place)
            row.fail(str(error))
            yield row
            count += 1
            continue
        occurrence = 0
        if chosen.temperature > 0:
            digest = hashlib.blake2b(np.asarray(prompt, dtype="<i8").tobytes(), digest_size=8).digest()
            occurrence = before[digest]
            before[digest] += 1
        for sample in range(chosen.n):
            if sample in request.done:
                continue
            where = {"prompt_index": place, "sample": sample, "occurrence": occurrence}
            stream = None if tokenizer is None else tokenizer.stream()
            yield Row(count, prompt, chosen, stop_ids=stop_ids, stream=stream, **where)
            count += 1
