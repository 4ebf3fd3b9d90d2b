"""A model that is not loaded yet: its checkpoint, what was trained on it, and how it is to run."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.fabric import Fabric

from lit_gen import adapter as adapter_v1
from lit_gen import adapter_v2
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
    **trained: Any,
) -> Source:
    """Checks a checkpoint and one LoRA or adapter that may go with it.

    Args:
        quantize, batch_invariant: see `prepare.prepare_model`.
        trained: lora, adapter and check_base of `open_trained`.

    Raises:
        UserError: something is not there, is wrong, or does not fit.
    """
    config, precision = load_config(path), fabric.strategy.precision.precision
    format, part = weight_format(path, quantize, precision), open_trained(path, config, precision, **trained)
    return Source(
        path,
        lambda: prepare_model(fabric, lambda *how: part.add(GPT.from_checkpoint(path, *how)), format, batch_invariant),
        config,
        parameter_dtype(fabric),
        fabric.device,
        format,
        {"precision": precision, "quantize": format or quantize, "part": part.digest},
    )


@dataclass(frozen=True)
class Trained:
    """What was trained on a model, or nothing.

    Attributes:
        add: brings it into a model that was just loaded, each tensor to the device of its layer.
        name: what results call it.
    """

    add: Callable[[GPT], GPT] = lambda model: model
    name: str | None = None
    digest: str | None = None


def open_trained(
    path: Path,
    config: Config,
    precision: str,
    *,
    lora: Path | None = None,
    adapter: Path | None = None,
    check_base: bool = True,
) -> Trained:
    """Checks what is to be added to the checkpoint at `path`, of which it reads no weight.

    Args:
        precision: Fabric's name for it.
        lora: a PEFT folder or a lit_model_lora.safetensors, which is added to the weights.
        adapter: an adapter's file of either version, or the folder that holds it.
        check_base: refuse a LoRA whose config names another model than the path of the checkpoint does.

    Raises:
        UserError: both are given; it is not there, is wrong, or does not fit.
    """
    if lora is not None and adapter is not None:
        raise UserError("--lora_path and --adapter_path do not go together: give one")
    if lora is not None:
        if format := weight_format(path, None, precision):
            raise UserError(f"{path} has {format} weights, to which no LoRA can be added: take the original weights")
        updates = load_lora(lora, config, path if check_base else None)
        check_use(config, {"(merged)": updates}, merge=True)
        return Trained(lambda model: merge_lora(model, updates), "(merged)", digest(updates))
    if adapter is None:
        return Trained()
    open_file, load = adapter_v1.open_adapter, adapter_v1.load_adapter
    if adapter.name == adapter_v2.FILE or (adapter / adapter_v2.FILE).is_file():
        open_file, load = adapter_v2.open_adapter_v2, adapter_v2.load_adapter_v2
    file = open_file(adapter, config).file
    return Trained(lambda model: load(model, file), f"({file.name})", sha256_of(file))
