"""Lightning Fabric: the device and the precision that a script runs with."""

import os
from datetime import timedelta
from typing import Literal, get_args

import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from lightning.fabric.plugins import BitsandbytesPrecision
from lightning.fabric.plugins.environments import LightningEnvironment, TorchElasticEnvironment
from lightning.fabric.strategies import ModelParallelStrategy

from lit_gen.settings import check_count
from lit_gen.utils import UserError, say

Precision = Literal["32-true", "bf16-true", "16-true", "bf16-mixed", "16-mixed"]
Bitsandbytes = Literal["nf4", "bnb-int8"]
Quantize = Literal["int8", "int4", "nf4", "bnb-int8"]


def setup_fabric(precision: Precision | None, quantize: Quantize | None = None) -> Fabric:
    """One device, the best there is. Without a precision a CPU computes in float32 and a GPU in 16 bits.

    Several processes, of torchrun or srun, share the prompts and never talk: each takes the GPU of its number on this
    machine, and Fabric is kept from connecting them.

    Args:
        quantize: nf4 and bnb-int8 are bitsandbytes' formats, for GPUs; the others are none of Fabric's business.
    """
    devices = 1
    if torch.cuda.is_available():
        local_rank = os.environ.get("LOCAL_RANK") or os.environ.get("SLURM_LOCALID") or "0"
        devices = [int(local_rank) % torch.cuda.device_count()]
    if quantize in get_args(Bitsandbytes):
        plugins = [LightningEnvironment(), _bitsandbytes(quantize, precision)]
        fabric = Fabric(devices=devices, plugins=plugins)
    else:
        fabric = Fabric(devices=devices, precision=precision or _best_precision(), plugins=[LightningEnvironment()])
    fabric.launch()
    return fabric


def setup_ranks(precision: Precision | None, devices: int | Literal["auto"], timeout: int) -> Fabric:
    """Several processes on each machine, each with a device, that are connected: those of torchrun, or started here.

    Started here, the other processes run the same command again; what this function is called before they do as well.

    Args:
        devices: how many on this machine; "auto": as torchrun says, or all GPUs.
        timeout: seconds that a process may wait for another one's part of a result.

    Raises:
        UserError: there are not so many devices, or torchrun started another number of processes.
    """
    check_count("timeout", timeout)
    if precision == "16-mixed":
        raise UserError("--precision 16-mixed does not go with several ranks: take bf16-mixed or 16-true")
    n_gpus, machines, environment = torch.cuda.device_count(), 1, LightningEnvironment()
    if TorchElasticEnvironment.detect():
        here = int(os.environ["LOCAL_WORLD_SIZE"])
        if devices not in ("auto", here):
            raise UserError(f"--devices is {devices}, but torchrun started {here} processes: leave --devices out")
        devices, machines, environment = here, int(os.environ["WORLD_SIZE"]) // here, TorchElasticEnvironment()
    elif devices == "auto" and n_gpus == 0:
        raise UserError("there is no GPU: say with --devices over how many processes to split the model")
    devices = n_gpus if devices == "auto" else devices
    check_count("devices", devices)
    if 0 < n_gpus < devices:
        raise UserError(f"{devices} processes need a GPU each, and there are {n_gpus}: lower --devices")
    strategy = ModelParallelStrategy(lambda model, mesh: model, timeout=timedelta(seconds=timeout))
    where = {"accelerator": "cuda" if n_gpus else "cpu", "devices": devices, "num_nodes": machines}
    fabric = Fabric(**where, precision=precision or _best_precision(), strategy=strategy, plugins=[environment])
    fabric.launch()
    return fabric


def ranks_here() -> int:
    """How many processes on this machine hold a model together; 1 unless they are connected."""
    if not dist.is_initialized():
        return 1
    return int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))


def _best_precision() -> Precision:
    if not torch.cuda.is_available():
        return "32-true"
    return "bf16-true" if torch.cuda.is_bf16_supported() else "16-true"


def _bitsandbytes(quantize: Bitsandbytes, precision: Precision | None) -> BitsandbytesPrecision:
    """Fabric's plugin for weights in bitsandbytes' formats. Not run yet: no GPU was at hand."""
    if not torch.cuda.is_available():
        raise UserError(f"--quantize {quantize} needs an NVIDIA GPU; on a CPU take int8 or int4")
    dtypes = {None: None, "16-true": torch.float16}  # None: the plugin chooses
    if quantize == "nf4":
        dtypes["bf16-true"] = torch.bfloat16
    if precision not in dtypes:
        raise UserError(f"--quantize {quantize} does not go with --precision {precision}: leave that out")
    try:
        plugin = BitsandbytesPrecision(quantize.removeprefix("bnb-"), dtypes[precision])
    except ModuleNotFoundError:
        raise UserError(f"--quantize {quantize} needs a package: pip install bitsandbytes") from None
    if quantize == "bnb-int8":
        say("bnb-int8 looks for outliers in the whole batch: rows do not come out as they would alone")
    return plugin


def uses_bitsandbytes(fabric: Fabric) -> bool:
    """Whether Fabric swaps the linear layers; weights are then to be loaded on the CPU, and rounded on their way."""
    return isinstance(fabric.strategy.precision, BitsandbytesPrecision)


def parameter_dtype(fabric: Fabric) -> torch.dtype:
    """The dtype of the weights, or of those that are not quantised: mixed precision keeps them in float32."""
    precision = fabric.strategy.precision
    if uses_bitsandbytes(fabric):
        return precision.dtype
    return {"bf16-true": torch.bfloat16, "16-true": torch.float16}.get(precision.precision, torch.float32)
