"""Generates text for a list of prompts of any lengths, each row exactly as it would come out alone.

    python generate/base.py --prompts '["What food do llamas eat?", "Write one sentence about the sea."]'

Read it from top to bottom: next_token, prefill, generate, decode (the loop), run (text in, text out), main (loading).
"""

import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # from a bare clone, and from any folder
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from jsonargparse.typing import Path_fc
from lightning.fabric import Fabric
from torch import Tensor
from tqdm import tqdm

from lit_gen.batch import check_job, in_order, make_rows, push_tokens, sampling
from lit_gen.cache import Side, rectangle, span_of
from lit_gen.checkpoint import load_config
from lit_gen.download import fetch_default_model
from lit_gen.fabric import Precision, parameter_dtype, setup_fabric
from lit_gen.linear import pack_linears
from lit_gen.model import GPT
from lit_gen.prompts import encode_prompts, printable, read_prompts
from lit_gen.sampling import sample
from lit_gen.stats import Stats
from lit_gen.stopping import Row
from lit_gen.tokenizer import Tokenizer
from lit_gen.utils import run_cli


def next_token(model: GPT, idx: Tensor, input_pos: Tensor, span: int, **settings: Any) -> Tensor:
    """One step of every row: the tokens (B,) that follow idx (B, 1), which stand at input_pos (B, 1)."""
    last = torch.zeros(len(idx), dtype=torch.int64, device=idx.device)
    return sample(model(idx, input_pos, last, span=span), **settings)  # (B, V) -> (B,)


def prefill(model: GPT, prompts: Sequence[Sequence[int]], padding_side: Side = None) -> Tensor:
    """Runs prompts of any lengths into cache rows 0, 1, ... and returns the logits (B, V) that follow each.

    Each runs alone at its own length, so that not even the shape of a matrix product depends on its neighbours. With a
    `padding_side` they run as one rectangle, which can be faster for many short prompts and is exact up to rounding.
    """
    device = model.wte.weight.device
    if padding_side is not None:
        idx, input_pos, last = (t.to(device) for t in rectangle(prompts, padding_side))
        return model(idx, input_pos, last, span=idx.size(1))
    logits = []
    for row, prompt in enumerate(prompts):
        idx, last = torch.tensor([prompt], device=device), torch.tensor([len(prompt) - 1], device=device)
        logits.append(model(idx, last=last, rows=slice(row, row + 1)))  # (1, V)
    return torch.cat(logits)


def generate(
    model: GPT,
    prompts: Sequence[Sequence[int] | Tensor],
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 1234,
    num_samples: int = 1,
    stop_ids: Collection[int] = frozenset(),
    stop: Sequence[str | Sequence[int]] = (),
    tokenizer: Tokenizer | None = None,
    padding_side: Side = None,
    max_batch_size: int = 64,
    stats: Stats | None = None,
) -> Iterator[Row]:
    """Goes on from every prompt, and yields each row as it ends: `row.index`, `row.tokens`, `row.finish_reason`.

    Args:
        model: its cache is set up here and dropped at the end.
        prompts: token ids, (T,) each; T may differ.
        max_new_tokens: T + max_new_tokens - 1 may not exceed the model's block_size.
        temperature: 0 takes the best token; higher is more varied.
        top_k: sample from so many best tokens only.
        top_p: sample from the fewest best tokens whose probabilities reach this sum.
        seed: a sampled row depends on it, on its prompt and its number, never on its neighbours.
        num_samples: rows per prompt; row.index is the prompt's place times num_samples, plus the sample's.
        stop_ids: ids that end a row, such as `tokenizer.stop_ids`.
        stop: texts (these need a tokenizer) or sequences of ids that end a row. No stop is part of a row.
        tokenizer: if given, rows have `row.text`.
        padding_side: prefill a batch as one padded rectangle, not each prompt alone at its own length.
        max_batch_size: rows that run at a time.
        stats: is filled in.
    """
    settings = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "num_samples": num_samples, "stop": stop}
    limits = {"max_batch_size": max_batch_size, "padding_side": padding_side}
    prompts = check_job(prompts, model.config, max_new_tokens, settings | limits)
    rows = make_rows(prompts, max_new_tokens, **settings, seed=seed, stop_ids=stop_ids, tokenizer=tokenizer)
    batches = [rows[i : i + max_batch_size] for i in range(0, len(rows), max_batch_size)]
    return decode(model, batches, padding_side, Stats() if stats is None else stats)


@torch.no_grad()
def decode(model: GPT, batches: list[list[Row]], padding_side: Side, stats: Stats) -> Iterator[Row]:
    """The loop. A batch runs until its last row ends; a row that has ended is carried along and not looked at."""
    device, epoch = model.wte.weight.device, model.cache_epoch
    try:
        for rows in batches:
            needed, position = [row.columns for row in rows], [len(row.prompt) - 1 for row in rows]
            model.set_kv_cache(len(rows), max(needed), needed)
            stats.watch(model)
            epoch, start = model.cache_epoch, time.perf_counter()
            logits = prefill(model, [row.prompt for row in rows], padding_side)  # (B, V)
            tokens = sample(logits, **sampling(rows)).tolist()
            stats.add_prefill(sum(len(row.prompt) for row in rows), time.perf_counter() - start)
            while True:
                for row in push_tokens(rows, tokens):
                    stats.add_row(len(row.tokens))
                    yield row
                live = [row.finish_reason is None for row in rows]
                if not any(live):
                    break
                if model.cache_epoch != epoch:
                    raise RuntimeError("another job took over the model's cache: finish one generate() before the next")
                start, position = time.perf_counter(), [p + is_live for p, is_live in zip(position, live, strict=True)]
                fed = [max(token, 0) for token in tokens]  # -1 came from NaN; an ended row stays where it was
                idx, input_pos = (torch.tensor(x, device=device)[:, None] for x in (fed, position))  # (B, 1) each
                span = span_of(position, max(needed))
                tokens = next_token(model, idx, input_pos, span, **sampling(rows)).tolist()
                stats.add_step(sum(live), position, time.perf_counter() - start)
    finally:
        if model.cache_epoch == epoch:  # else it is another job's by now
            model.clear_kv_cache()


def run(
    fabric: Fabric,
    checkpoint_dir: Path,
    load: Callable[[torch.dtype, torch.device], GPT],
    prompts: str | list[str],
    *,
    max_new_tokens: int = 128,
    chat: bool | None = None,
    ignore_eos: bool = False,
    stats_json: Path_fc | None = None,
    **settings: Any,
) -> None:
    """Answers prompts: texts go to stdout in the order of the prompts, numbers to stderr.

    Args:
        load: makes the model; called when prompts and settings are known to be good.
        max_new_tokens: Most new tokens per row.
        chat: Put prompts into the checkpoint's chat template; by default if it has one.
        ignore_eos: Go on after the model's end tokens, to measure speed.
        stats_json: File to write the numbers to.
    """
    config, tokenizer, read = load_config(checkpoint_dir), Tokenizer(checkpoint_dir), read_prompts(prompts)
    chat = tokenizer.chat_template is not None if chat is None else chat
    encoded, names = encode_prompts(read, tokenizer, chat=chat), [prompt.where for prompt in read]
    check_job(encoded, config, max_new_tokens, settings, names)
    start = time.perf_counter()
    model = fabric.setup_module(pack_linears(load(parameter_dtype(fabric), fabric.device)), move_to_device=False)
    stats = Stats(checkpoint_dir.name, str(model.wte.weight.dtype), str(fabric.device), time.perf_counter() - start)
    ends = frozenset() if ignore_eos else tokenizer.stop_ids
    rows = generate(
        model, encoded, max_new_tokens=max_new_tokens, stop_ids=ends, tokenizer=tokenizer, stats=stats, **settings
    )
    bar = tqdm(rows, total=len(encoded) * settings.get("num_samples", 1), unit="row", disable=None)  # on a terminal
    for row in in_order(bar):
        print(printable(row.text) if sys.stdout.isatty() else row.text, flush=True)
    stats.publish(fabric.device, stats_json)


def main(
    prompts: str | list[str] = "What food do llamas eat?",
    *,
    checkpoint_dir: Path | None = None,
    precision: Precision | None = None,
    **kwargs: Any,
) -> None:
    """Generates text for a list of prompts of any lengths, each row exactly as it would come out alone.

    Args:
        prompts: A text, a JSON list of texts, a .txt file (a prompt a line), a .jsonl file (objects with "prompt" or
            "messages"), or - for stdin.
        checkpoint_dir: A Hugging Face folder, a lit folder or a .gguf file. By default SmolLM2-135M-Instruct, which is
            fetched on first use.
        precision: By default 32-true on a CPU, and 16 bits on a GPU.
    """
    fabric = setup_fabric(precision)
    checkpoint_dir = checkpoint_dir or fetch_default_model()
    run(fabric, checkpoint_dir, partial(GPT.from_checkpoint, checkpoint_dir), prompts, **kwargs)


if __name__ == "__main__":
    run_cli(main)
