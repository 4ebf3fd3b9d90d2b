"""Layers spread over several devices: which is where, and how a call passes through them.

    cuda:0  embedding, layers 0-7    cuda:1  layers 8-15    cuda:2  layers 16-22    cuda:3  layers 23-29, norm, head

Activations cross each border once in a call, with the masks, angles and cache columns that all layers share; caches
never move. Work is queued on GPUs and not waited for, so calls for different rows that are made one after the other
run at the same time, each on another device: `prefill` makes one for each prompt, and `GPT.group_rows` cuts steps.
"""

import os
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from math import prod

import torch
from torch import Tensor

from lit_gen.cache import Step
from lit_gen.config import Config
from lit_gen.kernels import Kernels
from lit_gen.lora_parts import shapes
from lit_gen.model import GPT
from lit_gen.tape import Tape
from lit_gen.utils import UserError

Where = tuple[list[tuple[Tensor, Tensor]], dict[str, Tensor | None], Step | None]  # CausalSelfAttention.forward


def split_layers(layers: Sequence[int], n_devices: int) -> list[int]:
    """How many of the layers, in their order, each device gets: at least one, and the most bytes are as few as can be.

    Among these splits the second most are as few as can be, and so on; of equal ones that with more layers in front. 30
    equal layers on 4 devices: 8, 8, 7, 7.

    Args:
        layers: bytes of each.

    Raises:
        UserError: there are more devices than layers.
    """
    n = len(layers)
    if not 1 <= n_devices <= n:
        raise UserError(f"{n_devices} devices cannot share {n} layers: give from 1 to {n} devices")
    before = [0, *accumulate(layers)]
    # stop -> (bytes of devices, most first; layers of each, negative) of the best way to put layers[:stop] on so many
    best = {0: ((), ())}
    for device in range(n_devices):
        found = {}
        for start, (loads, counts) in best.items():
            for stop in range(start + 1, n - (n_devices - 1 - device) + 1):
                load = before[stop] - before[start]
                way = tuple(sorted((*loads, load), reverse=True)), (*counts, start - stop)
                found[stop] = min(way, found.get(stop, way))
        best = found
    return [-count for count in best[n][1]]


def parse_devices(devices: int | str | Sequence[str]) -> list[torch.device]:
    """The devices that an option names: a number of GPUs, "auto" for all of them (or the CPU), or a list.

    Of several processes on a machine (torchrun, srun) each takes GPUs of its own.

    Raises:
        UserError: one is unknown, or not there.
    """
    n_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    a_list = 'a list such as ["cpu", "cpu"]'
    if devices == "auto" and n_gpus == 0:
        return [torch.device("cpu")]
    if isinstance(devices, Sequence) and not isinstance(devices, str) and devices:
        return [_device(name, n_gpus) for name in devices]
    if devices != "auto" and (type(devices) is not int or devices < 1):
        raise UserError(f"--devices is {devices!r:.40}: give a number of GPUs, auto, or {a_list}")
    rank = int(os.environ.get("LOCAL_RANK") or os.environ.get("SLURM_LOCALID") or 0)
    n_ranks = int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("SLURM_NTASKS_PER_NODE") or 1)
    count = max(1, n_gpus // n_ranks) if devices == "auto" else devices
    if (rank + 1) * count > n_gpus:
        needed = f"{count} GPUs" if rank == 0 else f"{count} GPUs for each of at least {rank + 1} processes"
        raise UserError(f"--devices needs {needed}, but there are {n_gpus}: give fewer, or {a_list}")
    return [torch.device("cuda", rank * count + i) for i in range(count)]


def _device(name: str, n_gpus: int) -> torch.device:
    gpus = [f"cuda:{i}" for i in range(n_gpus)]
    if name not in ("cpu", *gpus):
        there = f"there is cpu{', ' * (n_gpus > 0)}{', '.join(gpus)}"
        raise UserError(f"--devices names {name!r:.40}, but {there}")
    return torch.device(name)


@dataclass(frozen=True)
class Spread:
    """Where the layers of a model are: `counts[i]` of them, one after the other, on `devices[i]`."""

    devices: tuple[torch.device, ...]
    counts: tuple[int, ...]

    @classmethod
    def of(cls, config: Config, devices: Sequence[torch.device]) -> "Spread":
        """Balanced by the bytes of layers, counted as if all weights had one dtype.

        The embedding comes on top on the first device, last norm and head on the last one: were they counted, a model
        with a large vocabulary would have hardly a layer there, and the devices between would do all the work.
        """
        layers = [0] * config.n_layer
        for name, shape in shapes(config).items():
            part, _, rest = name.partition(".")
            if part == "h":
                layers[int(rest.partition(".")[0])] += prod(shape)
        return cls(tuple(devices), tuple(split_layers(layers, len(devices))))

    def __str__(self) -> str:
        parts = (f"{n} on {device}" for n, device in zip(self.counts, self.devices, strict=True))
        return f"layers: {', '.join(parts)}"

    @property
    def layers(self) -> list[range]:
        """The layers of each device."""
        stops = list(accumulate(self.counts))
        return [range(stop - n, stop) for n, stop in zip(self.counts, stops, strict=True)]

    def stage(self, name: str) -> int:
        """Which device a parameter or module of the model, such as h.3.attn.qkv.weight, is on."""
        part, _, rest = name.partition(".")
        if part != "h":
            return 0 if part == "wte" else len(self.devices) - 1
        layer = int(rest.partition(".")[0])
        return next(i for i, layers in enumerate(self.layers) if layer in layers)

    @property
    def places(self) -> list[tuple[str, torch.device]]:
        """The modules of a model, by name, and where each belongs."""
        blocks = (f"h.{layer}" for layer in range(sum(self.counts)))
        return [(name, self.devices[self.stage(name)]) for name in ("wte", *blocks, "ln_f", "lm_head")]


class Stages:
    """Runs the blocks of a model whose layers are on several devices; on CPUs with a `Tape` for each if it is packed.

    Args:
        kernels: of a packed model.
    """

    def __init__(self, model: GPT, spread: Spread, kernels: Kernels | None = None) -> None:
        self.model, self.spread, self.kernels = weakref.ref(model), spread, kernels
        layers = spread.layers
        self.runs = [Tape(model, kernels, some) if kernels else partial(self._run, some) for some in layers]

    def __reduce__(self) -> tuple:
        return Stages, (self.model(), self.spread, self.kernels)

    def __call__(self, x: Tensor, *where: object) -> Tensor:
        """x (B, T, C) through all blocks: (B, T, C), on the last device."""
        loras = self.model().loras
        for device, run in zip(self.spread.devices, self.runs, strict=True):
            if x.device != device:
                x, where = x.to(device), moved(where, device)
                if loras is not None:
                    loras.move(device)
            x = run(x, *where)
        return x

    def _run(self, layers: range, x: Tensor, *where: object) -> Tensor:
        for layer in layers:
            x = self.model().h[layer](x, *where)
        return x


def moved(where: Where, device: torch.device) -> Where:
    """What all layers share, on another device."""
    ropes, masks, step = where
    ropes = [(cos.to(device), sin.to(device)) for cos, sin in ropes]
    masks = {kind: None if mask is None else mask.to(device) for kind, mask in masks.items()}
    if step is not None:
        step = replace(step, **{k: v.to(device) for k, v in vars(step).items() if isinstance(v, Tensor)})
    return ropes, masks, step
