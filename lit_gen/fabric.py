"""Lightning Fabric: the device and the precision that a script runs with."""

import os
from typing import Literal

import torch
from lightning.fabric import Fabric
from lightning.fabric.plugins.environments import LightningEnvironment

Precision = Literal["32-true", "bf16-true", "16-true", "bf16-mixed", "16-mixed"]


def setup_fabric(precision: Precision | None) -> Fabric:
    """One device, the best there is. Without a precision a CPU computes in float32 and a GPU in 16 bits.

    Several processes, of torchrun or srun, share the prompts and never talk: each takes the GPU of its number on this
    machine, and Fabric is kept from connecting them.
    """
    devices = 1
    if torch.cuda.is_available():
        local_rank = os.environ.get("LOCAL_RANK") or os.environ.get("SLURM_LOCALID") or "0"
        devices = [int(local_rank) % torch.cuda.device_count()]
    if precision is None:
        precision = "32-true"
        if torch.cuda.is_available():
            precision = "bf16-true" if torch.cuda.is_bf16_supported() else "16-true"
    fabric = Fabric(devices=devices, precision=precision, plugins=[LightningEnvironment()])
    fabric.launch()
    return fabric


def parameter_dtype(fabric: Fabric) -> torch.dtype:
    """The dtype of the weights: mixed precision keeps them in float32."""
    return {"bf16-true": torch.bfloat16, "16-true": torch.float16}.get(
        fabric.strategy.precision.precision, torch.float32
    )
