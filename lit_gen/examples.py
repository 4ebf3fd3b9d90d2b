"""What a model is fine-tuned on: lines of a .jsonl file, as token ids of which only the response is to be learnt."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lit_gen.cache import rectangle
from lit_gen.tokenizer import Tokenizer
from lit_gen.utils import UserError, say

WANTED = '{"prompt": "...", "response": "..."} or {"messages": [..., {"role": "assistant", "content": "..."}]}'


class Example(NamedTuple):
    """A text, and where in it the response begins.

    Attributes:
        tokens: (T,) ids of the prompt, the response and the end token.
        start: how many of them are the prompt's, at least 1.
    """

    tokens: list[int]
    start: int


def read_examples(file: Path, tokenizer: Tokenizer, max_length: int, chat: bool | None = None) -> list[Example]:
    """Reads all lines of a file; those of more than `max_length` tokens are left out.

    Args:
        chat: put prompts and responses into the chat template, as `messages` always are; None does so if there is one.

    Raises:
        UserError: the file cannot be read, a line is not as WANTED says, or no line is short enough.
    """
    chat = tokenizer.chat_template is not None if chat is None else chat
    if tokenizer.eos_id is None:
        raise UserError("the tokenizer has no end token, which responses are to end with: name eos_token in its config")
    try:
        lines = file.read_bytes().splitlines()
    except OSError as error:
        raise UserError(f"cannot read {file}: {error.strerror}") from None
    examples = []
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                examples.append(_encode(*_texts(_parse(line), tokenizer, chat), tokenizer))
            except UserError as error:
                raise UserError(f"{file}, line {number}: {error}") from None
    short = [example for example in examples if len(example.tokens) <= max_length]
    if not short:
        longest = f"has more than {max_length} tokens: raise --max_length" if examples else "is there"
        raise UserError(f"{file}: {'every line' if examples else 'no line'} {longest}")
    if left_out := len(examples) - len(short):
        say(f"{left_out} of {len(examples)} rows have more than {max_length} tokens and are left out")
    return short


def _parse(line: bytes) -> dict[str, Any]:
    try:
        row = json.loads(line.decode("utf-8-sig"))
    except (ValueError, RecursionError):
        raise UserError(f"it is not JSON in UTF-8; wanted is {WANTED}") from None
    if not isinstance(row, dict):
        raise UserError(f"it is no object; wanted is {WANTED}")
    return row


def _texts(row: dict[str, Any], tokenizer: Tokenizer, chat: bool) -> tuple[str, str, bool]:
    """The prompt as the model will get it, the response, and whether they are in the chat template."""
    if "messages" in row:
        messages = row["messages"]
        last = messages[-1] if isinstance(messages, list) and len(messages) > 1 else None
        if not isinstance(last, dict) or last.get("role") != "assistant" or not _is_text(last.get("content")):
            raise UserError('"messages" must be a list that ends with what the assistant is to say')
    elif not isinstance(row.get("prompt"), str) or not _is_text(row.get("response")):
        raise UserError(f"it has no prompt, or no response that is a text and not empty; wanted is {WANTED}")
    elif not chat:
        return row["prompt"], row["response"], False
    else:
        roles = {"user": row["prompt"], "assistant": row["response"]}
        messages = [{"role": role, "content": content} for role, content in roles.items()]
    prompt = tokenizer.render_chat(messages[:-1])
    whole = tokenizer.render_chat(messages, add_generation_prompt=False)
    if not whole.startswith(prompt):
        raise UserError(
            "the chat template writes another prompt when the answer is there; use --chat false, and prompts"
        )
    return prompt, whole[len(prompt) :], True


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and value.strip() != ""


def _encode(prompt: str, response: str, in_template: bool, tokenizer: Tokenizer) -> Example:
    """The prompt's ids are those it has alone; the response's as in the whole text, if it begins with the prompt's."""

    def encode(text: str) -> list[int]:
        ids = tokenizer.encode(text, add_special_tokens=not in_template).tolist()
        twice = in_template and tokenizer.bos_id is not None and ids[:2] == [tokenizer.bos_id] * 2
        return ids[twice:]

    ids, whole = encode(prompt), encode(prompt + response)
    ids = ids or [tokenizer.eos_id if tokenizer.bos_id is None else tokenizer.bos_id]  # as `encode_prompt` has it
    same = whole[: len(ids)] == ids and len(whole) > len(ids)
    answer = whole[len(ids) :] if same else tokenizer.encode(response, add_special_tokens=False).tolist()
    end = next((i for i, token in enumerate(answer) if token in tokenizer.stop_ids), len(answer))
    answer = answer[: end + 1] if end < len(answer) else [*answer, tokenizer.eos_id]
    return Example(ids + answer, len(ids))


def collate(examples: Sequence[Example]) -> tuple[Tensor, Tensor]:
    """A rectangle, padded on the right: idx (B, T) and the token that is to follow each, (B, T), or -100 for none."""
    idx, input_pos, _ = rectangle([example.tokens for example in examples], "right")  # (B, T) each
    start = torch.tensor([[example.start] for example in examples])  # (B, 1)
    target = idx.masked_fill(input_pos < start, -100).roll(-1, 1)  # padding has position -1
    target[:, -1] = -100
    return idx, target


class Batches:
    """Batches of examples in an order that the seed decides, another one in each epoch.

    Lightning keeps its state in a checkpoint, so that a job that is resumed gets the batches it would have got.
    """

    def __init__(self, examples: Sequence[Example], batch_size: int, seed: int) -> None:
        self.examples, self.batch_size, self.seed = examples, batch_size, seed
        self.epoch = self.done = 0

    def __len__(self) -> int:
        return -(-len(self.examples) // self.batch_size)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        batches = torch.randperm(len(self.examples), generator=generator).split(self.batch_size)
        for batch in batches[self.done :]:
            self.done += 1
            if self.done == len(self):  # now, since nobody may ask what comes after the last
                self.epoch, self.done = self.epoch + 1, 0
            yield collate([self.examples[i] for i in batch.tolist()])

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "done": self.done}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch, self.done = state["epoch"], state["done"]
