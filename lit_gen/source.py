"""A model that is not loaded yet: its checkpoint, what was trained on it, and how it is to run."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.fabric import Fabric

from lit_gen.adapter import load_adapter, open_adapter
from lit_gen.adapter_v2 import load_adapter_v2, open_adapter_v2
from lit_gen.checkpoint import load_config, weight_format
from lit_gen.config import Config
from lit_gen.fabric import Quantize, parameter_dtype
from lit_gen.lora import load_lora, merge_lora
from lit_gen.lora_parts import digest
from lit_gen.lora_rows import check_use
from lit_gen.model import GPT
from lit_gen.prepare import prepare_model
from lit_gen.quantize import Format
from lit_gen.utils import UserError
from lit_gen.wheel import sha256_of


@dataclass(frozen=True)
class Source:
    """What `open_source` has checked.

    Attributes:
        path: of the checkpoint.
        load: makes the model, ready to run.
        format: what weights are quantised to, if not by Fabric.
        about: what its numbers depend on beside the checkpoint, as plain JSON.
    """

    path: Path
    load: Callable[[], GPT]
    config: Config
    dtype: torch.dtype
    device: torch.device
    format: Format | None
    about: dict[str, str | None]


def open_source(
    path: Path,
    fabric: Fabric,
    *,
    quantize: Quantize | None = None,
    batch_invariant: bool | Literal["auto"] = "auto",
    lora: Path | None = None,
    adapter: Path | None = None,
    adapter_v2: Path | None = None,
) -> Source:
    """Checks a checkpoint and one LoRA or adapter that may go with it.

    Args:
        quantize, batch_invariant: see `prepare.prepare_model`.
        lora, adapter, adapter_v2: files or folders of which one may be given; a LoRA is added to the weights.

    Raises:
        UserError: something is not there, is wrong, or does not fit.
    """
    config, precision = load_config(path), fabric.strategy.precision.precision
    format = weight_format(path, quantize, precision)
    load, part = _with_part(path, config, lora, adapter, adapter_v2)
    return Source(
        path,
        lambda: prepare_model(fabric, load, format, batch_invariant),
        config,
        parameter_dtype(fabric),
        fabric.device,
        format,
        {"precision": precision, "quantize": format or quantize, "part": part},
    )


def _with_part(
    path: Path, config: Config, lora: Path | None, adapter: Path | None, adapter_v2: Path | None
) -> tuple[Callable[..., GPT], str | None]:
    """How to load a checkpoint with what was trained on it, and a digest of that."""
    if sum(part is not None for part in (lora, adapter, adapter_v2)) > 1:
        raise UserError("give only one of --lora_path, --adapter_path and --adapter_v2_path")

    def load(*how: Any) -> GPT:
        return GPT.from_checkpoint(path, *how)

    if lora is not None:
        if format := weight_format(path, None, "32-true"):
            raise UserError(f"{path} has {format} weights, to which no LoRA can be added: take the original")
        updates = load_lora(lora, config, path)
        check_use(config, {lora.name: updates}, merge=True)
        return lambda *how: merge_lora(load(*how), updates), digest(updates)
    if adapter is not None:
        file = open_adapter(adapter, config).file
        return lambda *how: load_adapter(load(*how), file), sha256_of(file)
    if adapter_v2 is not None:
        file = open_adapter_v2(adapter_v2, config).file
        return lambda *how: load_adapter_v2(load(*how), file), sha256_of(file)
    return load, None
