"""Generates from a model while it is trained, and leaves no trace: a callback for Lightning's Trainer, and a function.

Trainer(callbacks=[GenerateCallback(["Once upon", "The"], tokenizer, every_n_steps=100, max_new_tokens=32)])
generate_in_training(model, tokenizer, ["Once upon"], rank=fabric.global_rank, world_size=fabric.world_size)
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy

from generate.base import generate
from lit_gen import GPT, Tokenizer
from lit_gen.samples import Sample, find_model, gather, log_samples, share_out
from lit_gen.undisturbed import undisturbed
from lit_gen.utils import UserError, printable

Prompts = Sequence[str | Sequence[int]]


def generate_in_training(
    model: GPT, tokenizer: Tokenizer, prompts: Prompts, *, rank: int = 0, world_size: int = 1, **settings: Any
) -> list[Sample]:
    """Goes on from every prompt, a text or token ids; the model is afterwards as it was (see `undisturbed`).

    Args:
        model: the model itself, whole on each rank, not wrapped and not packed.
        rank, world_size: of torch.distributed; all ranks have to call this, share the prompts, and get all samples.
        settings: those of `generate`.
    """
    requests, own, error = share_out(prompts, tokenizer, rank, world_size), [], None
    try:
        with undisturbed(model):
            for row in generate(model, requests, tokenizer=tokenizer, **{"stop_ids": tokenizer.stop_ids, **settings}):
                prompt = tokenizer.decode(requests[row.prompt_index].prompt)
                own.append(Sample(row.prompt_index, row.sample, prompt, row.text, row.finish_reason))
    except Exception as problem:  # it is raised as soon as the ranks that wait for this one know of it
        error = problem
    return gather(own, error, world_size)


class GenerateCallback(Callback):
    """Shows what the model makes of some prompts: on the console, in TensorBoard, and in samples.csv of a CSVLogger.

    Args:
        prompts: texts, or token ids.
        every_n_steps: so many steps of the optimizer apart. every_n_epochs: at the end of epochs. Both may be given.
        metrics: name -> f(texts) -> number, called on every rank with all texts; logged, and there to be monitored.
        settings: those of `generate`.
    """

    def __init__(
        self,
        prompts: Prompts,
        tokenizer: Tokenizer,
        *,
        every_n_steps: int | None = None,
        every_n_epochs: int | None = None,
        metrics: Mapping[str, Callable[[list[str]], float]] | None = None,
        **settings: Any,
    ) -> None:
        given = [n for n in (every_n_steps, every_n_epochs) if n is not None]
        if not given or not all(type(n) is int and n > 0 for n in given):
            raise UserError("GenerateCallback needs every_n_steps or every_n_epochs, a whole number above 0")
        self.every_n_steps, self.every_n_epochs, self._last = every_n_steps, every_n_epochs, 0
        self.prompts, self.tokenizer, self.metrics, self.settings = prompts, tokenizer, metrics or {}, settings

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Finds the model, and what is wrong with prompts and settings before the first step."""
        if not isinstance(trainer.strategy, SingleDeviceStrategy | DDPStrategy):
            raise UserError("GenerateCallback needs the whole model on each rank: train on one device, or with DDP")
        self.model, how = find_model(pl_module), {"tokenizer": self.tokenizer, **self.settings}
        generate(self.model, share_out(self.prompts, self.tokenizer), **how)  # nothing runs yet

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._last = trainer.global_step  # not 0 if training goes on from a checkpoint

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        before, self._last, n = self._last, trainer.global_step, self.every_n_steps  # it may take batches to a step
        if n and before // n < self._last // n:
            self._generate(trainer, pl_module, on_step=True, on_epoch=False)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.every_n_epochs and (trainer.current_epoch + 1) % self.every_n_epochs == 0:
            self._generate(trainer, pl_module, on_step=False, on_epoch=True)

    def _generate(self, trainer: Trainer, pl_module: LightningModule, **when: bool) -> None:
        precision, ranks = trainer.precision_plugin, {"rank": trainer.global_rank, "world_size": trainer.world_size}
        with undisturbed(self.model):  # metrics may use random numbers
            with precision.forward_context() if isinstance(precision, MixedPrecision) else nullcontext():
                samples = generate_in_training(self.model, self.tokenizer, self.prompts, **ranks, **self.settings)
            values = {name: float(f([sample.text for sample in samples])) for name, f in self.metrics.items()}
        pl_module.log_dict(values, logger=False, sync_dist=trainer.world_size > 1, **when)
        if trainer.is_global_zero:
            log_samples(trainer.loggers, samples, values, trainer.global_step, trainer.current_epoch)
            for sample in samples:
                pl_module.print(printable(f"step {trainer.global_step}: {sample.prompt!r} -> {sample.text!r}"))
