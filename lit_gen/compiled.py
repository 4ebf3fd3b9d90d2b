"""The layers through `torch.compile`: for a GPU mostly, where a step is then one launch of a CUDA graph.

On a CPU with our kernels, which stay as they are, it takes Python out of the step, and one graph serves every number of
rows and every length. Elsewhere shapes are kept few: rows are padded to a power of two, columns come in pieces of SPAN.
"""

import os
import time
from collections.abc import Callable
from pathlib import Path
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch.fx.experimental import _config as fx_config

from lit_gen.cache import Step
from lit_gen.kernels import Kernels, load_kernels
from lit_gen.linear import PackedLinear
from lit_gen.model import GPT
from lit_gen.utils import say

LAYERS: WeakValueDictionary[int, PackedLinear] = WeakValueDictionary()  # an operator takes no layer, only its number


def compile_model(model: GPT) -> GPT:
    """Compiles what a step does after positions were looked up; compiled code is kept in the user's cache folder."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lit_gen" / "inductor"
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache))  # the default is in /tmp, and lost with it
    torch._dynamo.config.cache_size_limit = 64  # one for each pair of rows and span; beyond it would silently be slow
    eager, how = model.run_layers, {"dynamic": False}
    if model.by_token:
        torch._dynamo.config.force_parameter_static_shapes = False  # the caches' too, whose rows and columns change
        fx_config.use_duck_shape = False  # sizes that happen to be equal may differ the next time
        register_kernels(load_kernels())
        for layer in [module for module in model.modules() if isinstance(module, PackedLinear)]:
            layer.number = id(layer)
            LAYERS[layer.number] = layer
        how = {"dynamic": True, "fullgraph": True}
    elif model.wte.weight.device.type == "cuda":
        how = {"dynamic": False, "mode": "reduce-overhead"}
    compiled = torch.compile(eager, **how)

    def run_layers(idx: Tensor, ropes: list, masks: dict, step: Step | None, last: Tensor | None) -> Tensor:
        if last is None or last.numel() != idx.numel():  # a prompt; their lengths are of all kinds
            return eager(idx, ropes, masks, step, last)
        own = [(cos.clone(), sin.clone()) for cos, sin in ropes]  # of a view the compiler looks at the base, too
        graphs, start = counters["stats"]["unique_graphs"], time.perf_counter()
        logits = compiled(idx.clone(), own, masks, step, last)
        if counters["stats"]["unique_graphs"] > graphs:
            say(f"compiled in {time.perf_counter() - start:.1f} s, which are in the time of this step")
        return logits

    model.run_layers = run_layers
    return model


def register_kernels(kernels: Kernels) -> None:
    """Makes the kernels known to the compiler as operators, whose inside it does not look at."""
    if hasattr(torch.ops.lit_gen, "linear"):
        return

    def operator(name: str, fake: Callable, mutates: tuple[str, ...] = ()) -> Callable:
        def register(function: Callable) -> None:
            torch.library.custom_op(f"lit_gen::{name}", function, mutates_args=mutates).register_fake(fake)

        return register

    @operator("linear", lambda x, weight, bias, N, *rest: x.new_empty(*x.shape[:-1], N))
    def linear(
        x: Tensor, weight: Tensor, bias: Tensor | None, N: int, factor: Tensor | None, scales: Tensor | None
    ) -> Tensor:
        return kernels.linear(x, weight, bias, N, factor=factor, scales=scales)

    @operator("packed_linear", lambda x, number, N: x.new_empty(*x.shape[:-1], N))
    def packed_linear(x: Tensor, number: int, N: int) -> Tensor:
        return LAYERS[number](x)

    @operator("rms_norm", lambda x, *rest: torch.empty_like(x, memory_format=torch.contiguous_format))
    def rms_norm(x: Tensor, weight: Tensor | None, offset: float, eps: float) -> Tensor:
        return kernels.rms_norm(x, weight, offset, eps)

    @operator("layer_norm", lambda x, *rest: torch.empty_like(x, memory_format=torch.contiguous_format))
    def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
        return kernels.layer_norm(x, weight, bias, eps)

    @operator("activate", lambda x, act, gated: x.new_empty(*x.shape[:-1], x.size(-1) // 2 if gated else x.size(-1)))
    def activate(x: Tensor, act: str, gated: bool) -> Tensor:
        return kernels.activate(x, act, gated)

    @operator("attend", lambda q, *rest: q.new_empty(q.size(0), q.size(1) * q.size(2)), ("k_cache", "v_cache"))
    def attend(
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        cos: Tensor | None,
        sin: Tensor | None,
        k_cache: Tensor,
        v_cache: Tensor,
        row: Tensor,
        position: Tensor,
        scale: float,
        softcap: float | None,
        kind: str,
        window: int | None,
    ) -> Tensor:
        rope = None if cos is None else (cos, sin)
        where = {"scale": scale, "softcap": softcap, "kind": kind, "window": window}
        return kernels.attend(q, k, v, rope, (k_cache, v_cache), row, position, **where)
