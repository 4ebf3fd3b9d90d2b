"""What fine-tuning is for Lightning's Trainer, and what of a model each method trains and writes."""

import math
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor

from lit_gen.adapter import AdapterConfig, add_adapter, save_adapter
from lit_gen.adapter_v2 import add_adapter_v2, save_adapter_v2
from lit_gen.checkpoint import LIT_MODEL
from lit_gen.config import Config
from lit_gen.export import save_lit
from lit_gen.lora import LoRAConfig, add_lora, save_lora
from lit_gen.model import GPT
from lit_gen.utils import UserError

Method = Literal["full", "lora", "adapter", "adapter_v2"]
FILES = {"full": LIT_MODEL} | {name: f"lit_model_{name}.safetensors" for name in ("lora", "adapter", "adapter_v2")}


class Finetune(LightningModule):
    """The loss, the optimizer, and what of a model belongs into a checkpoint of the Trainer: what is trained."""

    def __init__(self, model: GPT, learning_rate: float, warmup_steps: int, made_with: dict[str, str]) -> None:
        super().__init__()
        self.made_with = made_with  # see `check_checkpoint`
        self.model, self.learning_rate, self.warmup_steps = model, learning_rate, warmup_steps
        self.strict_loading = False  # what is not trained comes from the base

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Mean over the tokens of all responses, in float32."""
        idx, target = batch  # (B, T) each
        return F.cross_entropy(self.model(idx).flatten(0, 1).float(), target.flatten())

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        loss = self.loss(batch)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor]) -> None:
        n_tokens = int((batch[1] >= 0).sum())  # so that every token of the held-out rows counts the same
        self.log("val_loss", self.loss(batch), batch_size=n_tokens, prog_bar=True)

    def configure_optimizers(self) -> dict[str, Any]:
        optimizer = torch.optim.AdamW(
            [p for p in self.parameters() if p.requires_grad], self.learning_rate, weight_decay=0.0
        )
        warm_up = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / self.warmup_steps))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": warm_up, "interval": "step"}}

    def _trained(self) -> set[str]:
        return {name for name, p in self.named_parameters(remove_duplicate=False) if p.requires_grad}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["state_dict"] = {k: v for k, v in checkpoint["state_dict"].items() if k in self._trained()}
        checkpoint["random"] = torch.get_rng_state()  # for dropout
        checkpoint["made_with"] = self.made_with

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        torch.set_rng_state(checkpoint["random"])


def check_options(method: Method, lora: LoRAConfig, adapter: AdapterConfig, config: Config) -> None:
    """UserError for options of another method, and for numbers of an adapter that make no sense."""
    given = {"lora": lora != LoRAConfig(), "adapter": adapter != AdapterConfig()}
    for name, other in given.items():
        if other and not method.startswith(name):
            raise UserError(f"--{name} options do not go with --method {method}: leave them out")
    if method.startswith("adapter"):
        adapter.prefixed(config, method)


def prepare(model: GPT, method: Method, lora: LoRAConfig, adapter: AdapterConfig) -> GPT:
    """Makes the parameters trainable that the method trains, and puts the model into training mode."""
    if method == "full":
        return model.requires_grad_(True).train()
    if method == "lora":
        return add_lora(model, lora).train()
    add = add_adapter if method == "adapter" else add_adapter_v2
    return add(model, adapter).train()


def check_checkpoint(file: Path | None, made_with: dict[str, str], epochs: int) -> None:
    """UserError unless the Trainer wrote this file; it is read as plain tensors and numbers, never as code.

    Args:
        file: None if there is none to go on from.
        made_with: what the job depends on, by name: in the file it has to be the same.
        epochs: that the job is to have; the file may not be further.
    """
    if file is None:
        return
    try:
        kept = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
        fine = isinstance(kept["state_dict"], dict) and isinstance(kept["random"], Tensor)
        differ = [name for name, value in made_with.items() if kept["made_with"].get(name) != value]
        done = int(kept["epoch"])
    except Exception:  # whatever a damaged or hostile file provokes in the unpickler
        fine = False
    if not fine:
        raise UserError(f"{file} is damaged, or none of this script's: delete it, and train anew without --resume")
    if differ:
        there, here = (f"{said.get(differ[0])!a:.60}" for said in (kept["made_with"], made_with))
        raise UserError(f"{file} was made with {differ[0]} = {there}, not {here}: resume with what it was made with")
    if done >= epochs:
        raise UserError(f"{file} is in epoch {done + 1} already: resume with --epochs {done + 1} or more")


def save(model: GPT, method: Method, out_dir: Path, base: Path, loss: float | None) -> None:
    """Writes what was trained: a lit folder, or the file that generate/{method}.py loads beside the base.

    UserError, and nothing written, if weights or the loss on held-out rows (None: there are none) are not finite.
    """
    finite = all(p.isfinite().all() for p in model.parameters() if p.requires_grad)
    if not finite or not math.isfinite(loss or 0.0):
        raise UserError(f"the training diverged, so {out_dir} gets no weights: lower --learning_rate")
    if method == "full":
        return save_lit(model.requires_grad_(False), out_dir, base)
    write = {"lora": save_lora, "adapter": save_adapter, "adapter_v2": save_adapter_v2}[method]
    write(model, out_dir / FILES[method])
