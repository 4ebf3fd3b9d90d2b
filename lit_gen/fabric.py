"""Lightning Fabric: the device and the precision that a script runs with."""

import os
from collections.abc import Sequence
from datetime import timedelta
from typing import Literal, get_args

import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from lightning.fabric.plugins import BitsandbytesPrecision
from lightning.fabric.plugins.environments import LightningEnvironment, TorchElasticEnvironment
from lightning.fabric.strategies import ModelParallelStrategy, SingleDeviceStrategy

from lit_gen.settings import check_count
from lit_gen.utils import UserError, say

Precision = Literal["32-true", "bf16-true", "16-true", "bf16-mixed", "16-mixed"]
Bitsandbytes = Literal["nf4", "bnb-int8"]
Quantize = Literal["int8", "int4", "nf4", "bnb-int8"]


class SpreadStrategy(SingleDeviceStrategy):
    """One process with the layers of a model on several devices; who loads the model puts them there."""

    def __init__(self, devices: Sequence[torch.device]) -> None:
        super().__init__(devices[0])
        self.devices = list(devices)


def setup_fabric(
    precision: Precision | None, quantize: Quantize | None = None, devices: Sequence[torch.device] | None = None
) -> Fabric:
    """The best device there is, or those given. Without a precision a CPU computes in float32 and a GPU in 16 bits.

    Several processes, of torchrun or srun, share the prompts and never talk: each takes the GPU of its number on this
    machine, and Fabric is kept from connecting them.

    Args:
        devices: share the layers of a model.
        quantize: nf4 and bnb-int8 are bitsandbytes' formats, for GPUs; the others are none of Fabric's business.
    """
    if devices is not None:
        return _setup_spread(precision, quantize, devices)
    devices = 1
    if torch.cuda.is_available():
        local_rank = os.environ.get("LOCAL_RANK") or os.environ.get("SLURM_LOCALID") or "0"
        devices = [int(local_rank) % torch.cuda.device_count()]
    if quantize in get_args(Bitsandbytes):
        plugins = [LightningEnvironment(), _bitsandbytes(quantize, precision)]
        fabric = Fabric(devices=devices, plugins=plugins)
    else:
        precision = precision or _default_precision("cuda" if torch.cuda.is_available() else "cpu")
        fabric = Fabric(devices=devices, precision=precision, plugins=[LightningEnvironment()])
    fabric.launch()
    return fabric


def _setup_spread(precision: Precision | None, quantize: Quantize | None, devices: Sequence[torch.device]) -> Fabric:
    kinds = {device.type for device in devices}
    if quantize in get_args(Bitsandbytes):
        raise UserError(f"--quantize {quantize} is for generate/base.py, on one device: take int8 or int4")
    if len(kinds) > 1 and precision in ("bf16-mixed", "16-mixed"):
        raise UserError(f"--precision {precision} goes with devices of one kind: take bf16-true or 32-true")
    precision = precision or _default_precision("cuda" if kinds == {"cuda"} else "cpu")
    plugins, accelerator = [LightningEnvironment()], devices[0].type
    number = [devices[0].index] if accelerator == "cuda" else 1
    strategy = SpreadStrategy(devices)
    how = {"strategy": strategy, "devices": number, "precision": precision, "plugins": plugins}
    fabric = Fabric(accelerator=accelerator, **how)
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
    precision = precision or _default_precision("cuda" if n_gpus else "cpu")
    strategy = ModelParallelStrategy(lambda model, mesh: model, timeout=timedelta(seconds=timeout))
    where = {"accelerator": "cuda" if n_gpus else "cpu", "devices": devices, "num_nodes": machines}
    fabric = Fabric(**where, precision=precision, strategy=strategy, plugins=[environment])
    fabric.launch()
    return fabric


def devices_of(fabric: Fabric) -> list[torch.device]:
    """The devices that share a model."""
    return getattr(fabric.strategy, "devices", [fabric.device])


def ranks_here() -> int:
    """How many processes on this machine hold a model together; 1 unless they are connected."""
    if not dist.is_initialized():
        return 1
    return int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))


def _default_precision(kind: str) -> Precision:
    if kind == "cpu":
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
