"""Generation in the middle of a training job: what it needs for itself, and how nothing of it stays behind."""

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import nn

from lit_gen.model import GPT


@contextmanager
def undisturbed(model: GPT) -> Iterator[None]:
    """Within, the model is in eval mode; afterwards all is as it was, also when an exception comes out.

    That is: train or eval mode of each module, caches (those of a generation that is under way, too) and what belongs
    to them, and the random states of PyTorch (all devices), NumPy and Python.
    """
    cpu, devices = torch.get_rng_state(), torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    states = np.random.get_state(), random.getstate()
    try:
        with without_caches(model), in_eval_mode(model):
            yield
    finally:
        torch.set_rng_state(cpu)
        if devices:
            torch.cuda.set_rng_state_all(devices)
        np.random.set_state(states[0])
        random.setstate(states[1])


@contextmanager
def without_caches(model: GPT) -> Iterator[None]:
    """Within, the model has no caches; afterwards those that it had before, and what belongs to them."""
    caches = [(block.attn, block.attn.kv_cache) for block in model.h]
    kept = [(model, name, getattr(model, name)) for name in ("mask_cache", "row_length", "cache_epoch")]
    kept += [(model.loras, "rows", model.loras.rows)] if model.loras is not None else []
    try:
        for attn, _ in caches:
            attn.kv_cache = None
        if model.loras is not None:
            model.loras.set_rows(None)
        yield
    finally:
        for attn, cache in caches:
            attn.kv_cache = cache
        for owner, name, value in kept:
            setattr(owner, name, value)


@contextmanager
def in_eval_mode(module: nn.Module) -> Iterator[None]:
    """Within, a module and all its parts are in eval mode; afterwards each is in the mode that it was in."""
    modes = [(part, part.training) for part in module.modules()]
    try:
        module.eval()
        yield
    finally:
        for part, training in modes:
            part.training = training
