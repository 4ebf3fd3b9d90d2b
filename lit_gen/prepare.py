"""From a loaded model to one that generates as fast as this machine allows, with the promises that were asked for."""

from collections.abc import Callable
from typing import Literal

import torch
from lightning.fabric import Fabric

from lit_gen.fabric import parameter_dtype, uses_bitsandbytes
from lit_gen.invariance import prove_invariance
from lit_gen.model import GPT
from lit_gen.pack import pack_model
from lit_gen.quantize import Format
from lit_gen.utils import UserError


def prepare_model(
    fabric: Fabric,
    load: Callable[[torch.dtype, torch.device], GPT],
    quantize: Format | None = None,
    batch_invariant: bool | Literal["auto"] = "auto",
    compile: bool = False,
) -> GPT:
    """Loads, packs, proves and compiles a model, and hands it to Fabric.

    Args:
        load: makes the model.
        quantize: keep the weights of linear layers in 8 or 4 bits, if they are not already.
        batch_invariant: rows get the same bits in every batch. True proves it or raises; "auto" has it wherever it
            costs little, and says so where it has not; False does not look.
        compile: use torch.compile.

    Raises:
        UserError: what is asked for cannot be had; before the model is loaded where that is known.
    """
    own, mixed = not uses_bitsandbytes(fabric), fabric.strategy.precision.precision.endswith("mixed")
    if batch_invariant is True and (mixed or not own):
        raise UserError("--batch_invariant true needs weights in one dtype, such as bf16-true, and our own kernels")
    model = load(parameter_dtype(fabric), fabric.device if own else torch.device("cpu"))
    if own and not mixed:
        pack_model(model, quantize)
        prove_invariance(model, batch_invariant)
    if compile:
        from lit_gen.compiled import compile_model  # takes a second to import

        compile_model(model)
    return fabric.setup_module(model, move_to_device=not own)
