"""The rows of a job, in plain Python: which prompts make which rows, whether they fit, and in what order they end."""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from numbers import Integral
from operator import index
from typing import Any

from lit_gen.config import Config
from lit_gen.sampling import check_sampling, row_stream
from lit_gen.stopping import Row, check_stops
from lit_gen.tokenizer import Tokenizer
from lit_gen.utils import UserError

MOST_ROWS = 1_000_000  # each is an object of its own


def token_lists(prompts: Iterable[Iterable[int]]) -> list[list[int]]:
    """Prompts as lists of Python integers: they may be tensors, arrays or tuples, but not text or fractions."""
    try:
        return [[index(token) for token in prompt] for prompt in prompts]
    except TypeError as error:
        raise UserError(f"prompts must be a list with the token ids of each prompt ({error})") from None


def check_job(
    prompts: Iterable[Iterable[int]],
    config: Config,
    max_new_tokens: int,
    settings: Mapping[str, Any],
    names: Sequence[str] | None = None,
) -> list[list[int]]:
    """Returns the prompts as lists; raises unless every id is known, every row fits, and every setting is in range.

    T tokens and n new ones take T + n - 1 cache columns: the last new token is never fed back.

    Args:
        prompts: token ids, (T,) each.
        settings: those of `generate`, by name; what is not given is not checked.
        names: what to call each prompt in an error.

    Raises:
        UserError: names the setting, or the first prompt that is wrong.
    """
    get = settings.get
    check_sampling(get("temperature", 0.0), get("top_k"), get("top_p"))
    check_stops(get("stop", ()))
    if get("padding_side") not in (None, "left", "right"):
        raise UserError(f"padding_side is {settings['padding_side']!r}, but must be left, right or left out")
    for name, value in (("num_samples", get("num_samples", 1)), ("max_batch_size", get("max_batch_size", 1))):
        _check_count(name, value)
    _check_count("max_new_tokens", max_new_tokens)
    prompts = token_lists(prompts)
    if not prompts:
        raise UserError("there is no prompt: give at least one")
    if len(prompts) * get("num_samples", 1) > MOST_ROWS:
        raise UserError(f"{len(prompts)} prompts with num_samples make more than {MOST_ROWS} rows: split the job")
    names = names or [f"prompt {i}" for i in range(len(prompts))]
    rows, context = config.vocab_size, config.block_size
    for prompt, name in zip(prompts, names, strict=True):
        if not prompt:
            raise UserError(f"{name} has no tokens: give it at least one, such as the tokenizer's bos_id")
        if unknown := [token for token in prompt if not 0 <= token < rows]:
            raise UserError(f"{name} has the token {unknown[0]}, but the model has only {rows} of them: take it out")
    long = [i for i, prompt in enumerate(prompts) if len(prompt) + max_new_tokens - 1 > context]
    if long:
        T, room = len(prompts[long[0]]), context + 1 - len(prompts[long[0]])
        remedy = f"set max_new_tokens to {room} or shorten it" if room > 0 else f"shorten it to {context}"
        more = f" ({len(long) - 1} more prompts are too long)" if len(long) > 1 else ""
        raise UserError(
            f"{names[long[0]]} has {T} tokens and {max_new_tokens} new ones are wanted, "
            f"which exceeds the model's context of {context}: {remedy}{more}"
        )
    return prompts


def _check_count(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, Integral) or value < 1:
        raise UserError(f"{name} is {value!r}, but must be a whole number >= 1")


def make_rows(
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    *,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    seed: int,
    num_samples: int,
    stop_ids: Collection[int],
    stop: Sequence[str | Sequence[int]],
    tokenizer: Tokenizer | None,
) -> list[Row]:
    """The rows of a job: `num_samples` for each prompt, one after the other, each with random numbers of its own."""
    strings = [s for s in stop if isinstance(s, str)]
    if strings and tokenizer is None:
        raise UserError("stop texts need the text of a row: pass tokenizer=")
    settings = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "stop_ids": stop_ids}
    settings |= {"stop_strings": strings, "stop_sequences": [list(s) for s in stop if not isinstance(s, str)]}
    rows: list[Row] = []
    before: Counter[tuple[int, ...]] = Counter()  # how often a prompt came before
    for prompt in map(list, prompts):
        for sample in range(num_samples):
            random = row_stream(seed, prompt, before[tuple(prompt)], sample) if temperature > 0 else None
            stream = None if tokenizer is None else tokenizer.stream()
            rows.append(Row(len(rows), prompt, max_new_tokens, stream=stream, random=random, **settings))
        before[tuple(prompt)] += 1
    return rows


def sampling(rows: Sequence[Row]) -> dict[str, list]:
    """The arguments of `sampling.sample` for these rows; draws each row's next random number."""
    settings = {name: [getattr(row, name) for row in rows] for name in ("temperature", "top_k", "top_p")}
    return {"uniform": [row.uniform() for row in rows]} | settings


def push_tokens(rows: Sequence[Row], tokens: Sequence[int]) -> list[Row]:
    """Gives every running row its next token; returns the rows that ended with it."""
    running = [(row, token) for row, token in zip(rows, tokens, strict=True) if row.finish_reason is None]
    for row, token in running:
        row.push(token)
    return [row for row, _ in running if row.finish_reason is not None]


def in_order(rows: Iterable[Row]) -> Iterator[Row]:
    """Rows by their index, each as early as those before it allow."""
    waiting: dict[int, Row] = {}
    following = 0
    for row in rows:
        waiting[row.index] = row
        while following in waiting:
            yield waiting.pop(following)
            following += 1
