"""What is around a search of transformers: its options, prompts on their way in, texts on their way out."""

import sys
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from tqdm import tqdm

from lit_gen.cache import rectangle
from lit_gen.checkpoint import load_config
from lit_gen.config import Config
from lit_gen.prompts import encode_prompt, read_prompts
from lit_gen.settings import check_count
from lit_gen.tokenizer import Tokenizer
from lit_gen.utils import UserError, read_json

if TYPE_CHECKING:  # transformers is an extra
    from transformers import GenerationConfig

MORE = ("return_dict_in_generate", "output_scores", "output_logits", "output_attentions", "output_hidden_states")
MORE += ("cache_implementation", "stop_strings", "max_length", "use_mtp", "assistant_early_exit", "token_healing")


def checkpoint_options(path: Path, tokenizer: Tokenizer) -> "GenerationConfig":
    """What the checkpoint's generation_config.json says, with the ids that its tokenizer's files add to it."""
    from transformers import GenerationConfig

    file = path / "generation_config.json"
    options = read_json(file) if file.is_file() else {}
    try:
        config = GenerationConfig.from_dict(options)
    except (ValueError, TypeError, AttributeError) as error:
        raise UserError(f"transformers does not accept {file}: {_one_line(error)}") from None
    ids = {"eos": sorted(tokenizer.stop_ids) or None, "bos": tokenizer.bos_id, "pad": tokenizer.pad_id}
    for name, value in ids.items():
        if getattr(config, f"{name}_token_id") is None:
            setattr(config, f"{name}_token_id", value)
    return config


def search_options(
    *,
    max_new_tokens: int = 128,
    min_new_tokens: int | None = None,
    num_beams: int | None = None,
    num_return_sequences: int | None = None,
    length_penalty: float | None = None,
    early_stopping: bool | Literal["never"] | None = None,
    do_sample: bool | None = None,
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    repetition_penalty: float | None = None,
    no_repeat_ngram_size: int | None = None,
    prompt_lookup_num_tokens: int | None = None,
    generation_config: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Options of transformers' `generate` by name, those that were given.

    Args:
        max_new_tokens: Most new tokens of each row.
        min_new_tokens: Fewest new tokens of each row.
        num_beams: Search with so many beams.
        num_return_sequences: Rows of each prompt.
        length_penalty: The score of a beam is divided by its length to this power.
        early_stopping: true ends a search when there are num_beams that have ended.
        do_sample: Sample; else the best token, or the best beams.
        temperature: Of sampling.
        top_k: Sample from so many best tokens only; 0 is all.
        top_p: Sample from the fewest best tokens whose probabilities reach this sum.
        min_p: Sample from tokens only that are at least this fraction as probable as the best.
        repetition_penalty: Logits of tokens that occurred are divided by it if positive, else multiplied.
        no_repeat_ngram_size: No sequence of so many tokens comes twice.
        prompt_lookup_num_tokens: Guess so many tokens from the row's own text; a prompt at a time.
        generation_config: Any other options of transformers' GenerationConfig, as JSON.

    Raises:
        UserError: there is no such option, or transformers does not accept its value.
    """
    given = {name: value for name, value in locals().items() if value is not None}
    from transformers import GenerationConfig

    for name in {"max_new_tokens", "num_beams", "num_return_sequences", "prompt_lookup_num_tokens"} & given.keys():
        check_count(name, given[name])
    more = given.pop("generation_config", {})
    known = set(vars(GenerationConfig())) - set(MORE)
    for name in more:
        if name not in known or name.startswith("_"):
            raise UserError(f"generation_config has {name!r:.40}, which is no option of transformers' that works here")
        if name in given:
            raise UserError(f"{name} is given twice: leave it out of generation_config")
    try:
        GenerationConfig(**given, **more)
    except (ValueError, TypeError) as error:
        raise UserError(f"transformers does not accept these options: {_one_line(error)}") from None
    return given | more


def rows_at_a_time(asked: int | None, options: dict[str, Any], assistant: Path | None, config: Config) -> int:
    """Prompts that run together; UserError if transformers cannot do that, or `assistant` has another vocabulary."""
    guesses = assistant is not None or "prompt_lookup_num_tokens" in options
    size = (1 if guesses else 16) if asked is None else asked
    check_count("max_batch_size", size)
    if guesses and size > 1:
        raise UserError("transformers guesses tokens for a single prompt at a time: leave --max_batch_size out")
    if assistant is not None and load_config(assistant).vocab_size != config.vocab_size:
        raise UserError(f"{assistant} cannot guess tokens of a vocabulary of {config.vocab_size}: it has another one")
    return size


def read_ids(
    prompts: str | list[str],
    tokenizer: Tokenizer,
    config: Config,
    chat: bool | None,
    new_tokens: int,
    cache_length: int | None = None,
) -> list[list[int]]:
    """Token ids of each prompt of `--prompts`.

    Raises:
        UserError: one that cannot be read, does not fit into the context, or asks for settings of its own.
    """
    room, what = config.block_size, "the model's context"
    if cache_length is not None and cache_length < room:
        room, what = cache_length, "--cache_length"
    chat, found = tokenizer.chat_template is not None if chat is None else chat, []
    for prompt in read_prompts(prompts):
        if prompt.error is not None:
            raise UserError(prompt.error)
        if prompt.settings or prompt.openai is not None:
            raise UserError(
                f"{prompt.where} has settings of its own, which base.py takes: here options are for all rows"
            )
        ids = encode_prompt(prompt, tokenizer, chat=chat)
        if not 0 <= min(ids) <= max(ids) < config.vocab_size:
            raise UserError(f"{prompt.where} has ids outside of the model's vocabulary of {config.vocab_size}")
        if len(ids) + new_tokens - 1 > room:
            raise UserError(
                f"{prompt.where} has {len(ids)} tokens and {new_tokens} new ones are wanted, which exceeds "
                f"{what} of {room}: shorten it, or lower max_new_tokens"
            )
        found.append(ids)
    return found


class StopTexts:
    """A stopping criterion of transformers: ends rows whose text from column `start` on holds one of `stops`."""

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str], start: int) -> None:
        self.tokenizer, self.stops, self.start = tokenizer, stops, start

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:  # (B, T) -> (B,) bool
        texts = [self.tokenizer.decode(row[self.start :]) for row in input_ids]
        return torch.tensor([any(stop in text for stop in self.stops) for text in texts], device=input_ids.device)


def search_texts(
    model: Any, tokenizer: Tokenizer, prompts: Sequence[list[int]], size: int, stops: Sequence[str], **options: Any
) -> Iterator[str]:
    """The texts of all rows, prompt by prompt; stops are no part of them.

    Args:
        model: a model of transformers.
        prompts: token ids, of which `size` run at a time.
        stops: texts that end a row.
        options: of the model's `generate`.
    """
    ends = _as_list(options.get("eos_token_id", model.generation_config.eos_token_id))
    options["pad_token_id"] = ends[0] if ends else tokenizer.pad_id  # what follows the end of a row
    for first in tqdm(range(0, len(prompts), size), unit="batch", disable=None, file=sys.stderr):
        idx, input_pos, _ = (t.to(model.device) for t in rectangle(prompts[first : first + size], "left"))
        T = idx.size(1)
        if stops:
            options["stopping_criteria"] = [StopTexts(tokenizer, stops, T)]
        try:
            rows = model.generate(fill_padding(idx, input_pos), attention_mask=(input_pos >= 0).long(), **options)
        except ValueError as error:  # it looks at some options only when it uses them
            raise UserError(_one_line(error)) from error
        for row in rows[:, T:].tolist():
            yield text_of(row, tokenizer, ends, stops)


def fill_padding(idx: Tensor, input_pos: Tensor) -> Tensor:
    """idx (B, T), left-padded, with each row's own first token as its padding.

    transformers' repetition penalty also counts what stands in the padding; this token it counts in any case.
    """
    first = idx.gather(1, (input_pos < 0).sum(1, keepdim=True))  # (B, 1)
    return torch.where(input_pos < 0, first, idx)


def text_of(tokens: list[int], tokenizer: Tokenizer, ends: Collection[int], stops: Sequence[str]) -> str:
    """The text of new tokens before the first id of `ends` and the first of `stops`."""
    length = next((i for i, token in enumerate(tokens) if token in ends), len(tokens))
    text = tokenizer.decode(tokens[:length])
    return text[: min([text.find(stop) for stop in stops if stop in text], default=len(text))]


def _as_list(ids: int | list[int] | None) -> list[int]:
    return [] if ids is None else [ids] if isinstance(ids, int) else ids


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
