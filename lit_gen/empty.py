"""Models with room for weights that are about to be read: on one device, or spread over several."""

from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from lit_gen.config import Config
from lit_gen.model import GPT
from lit_gen.quantize import Format, empty, quantize_model
from lit_gen.spread import Spread, Stages
from lit_gen.utils import UserError


class _EmptyInit(TorchFunctionMode):
    """Modules are made without initial values: every parameter is about to be read.

    The meta device would serve as well, but on its first use PyTorch imports 80 MB of other modules.
    """

    def __torch_function__(self, func: Callable, types: object, args: tuple = (), kwargs: dict | None = None) -> object:
        if getattr(func, "__module__", None) == "torch.nn.init":
            return args[0] if args else kwargs["tensor"]
        return func(*args, **(kwargs or {}))


def empty_model(
    config: Config, dtype: torch.dtype, device: torch.device | Sequence[torch.device], format: Format | None
) -> GPT:
    """A model whose parameters, quantised to `format`, have their memory and no values yet.

    Args:
        device: one, or some that share the layers. A head that is tied to the embedding is on its device until
            `part_head`.
    """
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        if not isinstance(device, torch.device):
            return _spread(config, Spread.of(config, device), format)
        # On a CPU memory that is never touched is not taken: there is room for the layers that will be swapped.
        with _EmptyInit(), torch.device("cpu") if format else device:
            model = GPT(config)
            return model if format is None else quantize_model(model, format, make=empty).to(device)
    except RuntimeError as error:
        raise UserError(f"a model of this config does not fit into memory ({str(error).splitlines()[0]})") from None
    finally:
        torch.set_default_dtype(before)


def _spread(config: Config, spread: Spread, format: Format | None) -> GPT:
    with torch.device("meta"):
        model = GPT(config)
        model = model if format is None else quantize_model(model, format, make=empty)
    tied = model.lm_head.weight is model.wte.weight
    for name, device in spread.places:
        model.get_submodule(name).to_empty(device=device)
    if tied:
        model.lm_head.weight = model.wte.weight
    model.run_blocks = Stages(model, spread)
    return model


def part_head(model: GPT) -> None:
    """Gives a tied head that belongs on another device than the embedding a weight of its own there, a copy."""
    if isinstance(model.run_blocks, Stages) and model.lm_head.weight is model.wte.weight:
        device = model.run_blocks.spread.devices[-1]
        if device != model.wte.weight.device:
            model.lm_head.weight = nn.Parameter(model.wte.weight.to(device), requires_grad=False)
