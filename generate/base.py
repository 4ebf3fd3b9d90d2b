"""Generates text for a list of prompts of any lengths, each row exactly as it would come out alone.

    python generate/base.py --prompts '["What food do llamas eat?", "Write one sentence about the sea."]'

Read it from top to bottom: next_token, prefill, generate, decode (the loop), run (prompts in, answers out), main.
"""

import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

if __name__ == "__main__":  # from a bare clone, and from any folder
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from lightning.fabric import Fabric
from torch import Tensor

from lit_gen import GPT, Tokenizer
from lit_gen.answers import Answers
from lit_gen.batch import Batch
from lit_gen.cache import span_of
from lit_gen.checkpoint import weight_format
from lit_gen.download import fetch_default_model
from lit_gen.fabric import Precision, Quantize, devices_of, parameter_dtype, setup_fabric
from lit_gen.forward import check, prefill
from lit_gen.logprobs import row_logprobs
from lit_gen.plan import Plan, is_out_of_memory, plan_batch
from lit_gen.prepare import prepare_model
from lit_gen.requests import Prompt, make_batch
from lit_gen.sampling import Sampler
from lit_gen.stats import Stats
from lit_gen.stopping import Row, sampler_of
from lit_gen.utils import run_cli


def next_token(model: GPT, idx: Tensor, input_pos: Tensor, span: int, sampler: Sampler) -> tuple[Tensor, Tensor]:
    """One step of every row: logits (B, V) and tokens (B,) that follow idx (B, 1), which stand at input_pos (B, 1)."""
    logits = model(idx, input_pos, torch.zeros_like(idx[:, 0]), span=span)  # (B, V)
    return logits, sampler(logits)


def generate(
    model: GPT,
    prompts: Iterable[Prompt],
    *,
    stop_ids: Collection[int] = frozenset(),
    tokenizer: Tokenizer | None = None,
    stats: Stats | None = None,
    **settings: Any,
) -> Iterator[Row]:
    """Goes on from every prompt, and yields each row as it ends: `row.index`, `row.tokens`, `row.finish_reason`.

    Args:
        model: its cache is set up here and dropped at the end.
        prompts: token ids, (T,), or a `Request` each; a list is checked before any work, an iterator read bit by bit.
        stop_ids: ids that end a row, such as `tokenizer.stop_ids`.
        tokenizer: if given, rows have `row.text`; stops that are texts need it.
        stats: is filled in.
        settings: those of `make_batch` (how many rows run at a time, ...) and of `Settings` (temperature, ...).
    """
    batch = make_batch(prompts, model.config, loras=model.adapters, stop_ids=stop_ids, tokenizer=tokenizer, **settings)
    return decode(model, batch, Stats() if stats is None else stats)


@torch.inference_mode()
def decode(model: GPT, batch: Batch, stats: Stats) -> Iterator[Row]:
    """The loop: rows come in when there is room, run together, and leave when they end."""
    (device, end), epoch, sampler = model.devices, None, None
    try:
        while batch.admit():
            try:
                if pieces := batch.pieces:
                    epoch, start = batch.arrange(model, epoch), time.perf_counter()
                    rows = [piece.row for piece in pieces if piece.ends]
                    logits = prefill(model, pieces, batch.padding_side)  # (B, V)
                    tokens = sampler_of(rows, end, batch.processors)(logits)  # (B,)
                    batch.push_pieces(tokens.tolist(), row_logprobs(rows, logits, tokens))
                    stats.add_prefill(model, sum(len(p.tokens) for p in pieces), len(rows), time.perf_counter() - start)
                if rows := batch.decoding:
                    epoch, start = batch.arrange(model, epoch), time.perf_counter()
                    columns, guesses = [row.filled for row in rows], batch.speculation.guess(rows)
                    if any(guesses):
                        check(model, batch, guesses)
                        batch.changed = True
                    else:
                        if batch.changed:
                            sampler, batch.changed = sampler_of(rows, end, batch.processors), False
                        fed = [[row.next_input] for row in rows], [[column] for column in columns]
                        idx, input_pos = torch.tensor(fed, device=device)  # (B, 1) each
                        logits, tokens = next_token(model, idx, input_pos, span_of(columns, batch.shape[1]), sampler)
                        batch.push(rows, tokens.tolist(), row_logprobs(rows, logits, tokens))
                    stats.add_step(columns, seconds := time.perf_counter() - start, batch.slots, batch.more)
                    batch.speculation.learn(guesses, seconds)
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                batch.halve(error)
            for row in batch.retire():
                stats.add_row(len(row.tokens))
                yield row
    finally:
        if model.cache_epoch == epoch:  # else it is another job's by now
            model.clear_kv_cache()


def run(
    fabric: Fabric,
    checkpoint_dir: Path,
    load: Callable[[torch.dtype, torch.device], GPT],
    prompts: str | list[str],
    *,
    out: Path | None = None,
    chat: bool | None = None,
    stream: bool = False,
    strict: bool | None = None,
    shard: str | None = None,
    max_batch_size: int | None = None,
    stats_json: Path | None = None,
    quantize: Quantize | None = None,
    batch_invariant: bool | Literal["auto"] = "auto",
    compile: bool = False,
    adapters: Mapping[str, str] | None = None,
    **settings: Any,
) -> None:
    """Answers prompts: texts go to stdout in the order of the prompts, or lines to a file; numbers to stderr.

    Args:
        out: A .jsonl file that gets a line per row. The same command goes on where it was interrupted.
        chat: Put prompts into the checkpoint's chat template; by default if there is one.
        stream: Show the text of a single prompt as it comes.
        strict: One bad prompt ends everything; by default only without --out, else it becomes a line with an error.
        shard: i/n: only the prompts i, i + n, ...; by default torchrun hands them out, and SLURM says i and n.
        max_batch_size: Rows that run at a time; by default as many as fit into memory.
        stats_json: File to write the numbers to.
        batch_invariant: true proves that rows get the same bits in every batch or ends; false does not look.
        compile: Use torch.compile, which pays for long jobs on a GPU.
        adapters: what is loaded beside the checkpoint, by the names that rows may give: a digest of each.
    """
    devices, dtype, precision = devices_of(fabric), parameter_dtype(fabric), fabric.strategy.precision.precision
    options = {"chat": chat, "out": out, "shard": shard, "strict": strict, "stream": stream, "stats_json": stats_json}
    format = weight_format(checkpoint_dir, quantize, precision)  # None: not quantised, or by Fabric
    kind = f"{precision} {format or quantize or ''}".strip()
    own = {"loras": adapters} if adapters else {}
    answers = Answers(prompts, checkpoint_dir, settings | own, kind, devices[0], **options)
    if answers.finished:
        return
    with answers:
        plan = plan_batch(answers.config, dtype, devices, answers.longest, answers.cache_rows, max_batch_size, format)
        print(plan, file=sys.stderr)
        start, model = time.perf_counter(), prepare_model(fabric, load, format, batch_invariant, compile)
        stats = Stats(checkpoint_dir.name, str(dtype), str(devices[0]), time.perf_counter() - start)
        answer(model, answers, plan, stats, **settings)
    stats.publish(devices, answers.stats_json)


def answer(model: GPT, answers: Answers, plan: Plan, stats: Stats, **settings: Any) -> None:
    """Takes prompts from `answers` as there is room, and hands it their rows."""
    with answers.interrupts:
        for row in generate(
            model,
            answers.requests(),
            stop_ids=answers.tokenizer.stop_ids,
            tokenizer=answers.tokenizer,
            processors=(),
            on_text=answers.show if answers.stream else None,
            on_step=answers.step,
            stats=stats,
            strict=answers.strict,
            max_batch_size=plan.rows,
            max_cache_columns=plan.rows * plan.columns,
            **settings,
        ):
            answers.take(row)


def main(
    prompts: str | list[str] = "What food do llamas eat?",
    *,
    checkpoint_dir: Path | None = None,
    precision: Precision | None = None,
    quantize: Quantize | None = None,
    **kwargs: Any,
) -> None:
    """Generates text for a list of prompts of any lengths, each row exactly as it would come out alone.

    Args:
        prompts: A text, a JSON list of texts, a .txt file (a prompt a line), a .jsonl file (objects), or - for stdin.
        checkpoint_dir: A Hugging Face folder, a lit folder or a .gguf file; by default SmolLM2-135M-Instruct, fetched.
        precision: By default 32-true on a CPU, and 16 bits on a GPU.
        quantize: Keep the weights of linear layers in 8 or 4 bits; nf4 and bnb-int8 are for GPUs.
    """
    path, fabric = checkpoint_dir or fetch_default_model(), setup_fabric(precision, quantize)
    run(fabric, path, lambda *how: GPT.from_checkpoint(path, *how), prompts, quantize=quantize, adapters=None, **kwargs)


if __name__ == "__main__":
    run_cli(main)
