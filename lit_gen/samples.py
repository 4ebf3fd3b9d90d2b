"""What a model that is being trained makes of some prompts: shared out to the ranks, gathered, and logged."""

import csv
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch

from lit_gen.model import GPT
from lit_gen.settings import ALL, Request
from lit_gen.tokenizer import Tokenizer
from lit_gen.utils import UserError

if TYPE_CHECKING:
    from lightning.pytorch.loggers import Logger


class Sample(NamedTuple):
    """A text that goes on from a prompt. With `num_samples` there are several of each, numbered by `sample`."""

    prompt_index: int
    sample: int
    prompt: str
    text: str
    finish_reason: str


def find_model(module: torch.nn.Module) -> GPT:
    """The model that a LightningModule holds."""
    models = [child for child in module.modules() if isinstance(child, GPT)]
    if len(models) != 1:
        raise UserError(f"samples can be generated of a LightningModule that holds one GPT, not {len(models)}")
    return models[0]


def share_out(
    prompts: Sequence[str | Sequence[int]], tokenizer: Tokenizer, rank: int = 0, world_size: int = 1
) -> list[Request]:
    """All prompts, texts or token ids; rank i is to answer the prompts i, i + n, ..., and finds the others done.

    So equal prompts that are sampled get the same texts on any number of ranks.
    """
    ids = [tokenizer.encode(prompt) if isinstance(prompt, str) else prompt for prompt in prompts]
    return [Request(one, done=() if i % world_size == rank else ALL) for i, one in enumerate(ids)]


def gather(own: list[Sample], error: Exception | None, world_size: int) -> list[Sample]:
    """The samples of all ranks in the order of the prompts, on every rank.

    Raises:
        RuntimeError: another rank had an error. (A rank with an error raises that itself, but has to come here before.)
    """
    told = [(own, error and f"{type(error).__name__}: {error}")]
    if world_size > 1:
        told = told * world_size
        torch.distributed.all_gather_object(told, told[0])
    if error is not None:
        raise error
    for rank, (_, message) in enumerate(told):
        if message:
            raise RuntimeError(f"rank {rank} could not generate: {message}")
    return sorted(sample for samples, _ in told for sample in samples)


def log_samples(
    loggers: Iterable["Logger"], samples: Sequence[Sample], values: dict[str, float], step: int, epoch: int
) -> None:
    """Numbers for all loggers; texts for TensorBoard, and as lines of samples.csv in the folder of a CSVLogger."""
    from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

    for logger in loggers:
        if values:
            logger.log_metrics(values, step)
        if isinstance(logger, TensorBoardLogger):
            for sample in samples:
                name = f"samples/{sample.prompt_index}" + f".{sample.sample}" * (sample.sample > 0)
                text = f"{sample.prompt}\n---\n{sample.text}".replace("\n", "\n    ")
                logger.experiment.add_text(name, f"    {text}", step)  # indented: it is shown as it is, not as Markdown
        elif isinstance(logger, CSVLogger):
            file = Path(logger.log_dir) / "samples.csv"
            file.parent.mkdir(parents=True, exist_ok=True)
            with file.open("a", newline="", encoding="utf-8", errors="backslashreplace") as lines:
                writer = csv.writer(lines)
                if not lines.tell():
                    writer.writerow(["step", "epoch", *Sample._fields])
                writer.writerows([step, epoch, *sample] for sample in samples)
