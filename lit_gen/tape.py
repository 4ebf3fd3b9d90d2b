"""The blocks of a model as one list of kernel calls, recorded once and then run for any tokens without Python.

A decode step of SmolLM2-135M is 300 kernel calls. From Python each costs some 10 microseconds beyond its work, and the
other threads fall asleep in between: a third of a step. But for the addresses of what comes in, the number of tokens
and the memory for results, the calls are the same each time. So they are noted while the blocks run as usual, and then
played back. A model whose blocks do anything else than call kernels, or oneDNN's products, always runs as usual.
"""

import threading
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.module import _global_forward_hooks, _global_forward_pre_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from lit_gen.cache import KVCache, Step
from lit_gen.kernels import ATTEND, CALL, N_COLUMNS, N_ROWS, Kernels, as_integer
from lit_gen.linear import PRODUCT, product
from lit_gen.model import GPT

WIDTH = CALL._length_
KEPT = 16 * 2**20  # bytes of memory for results that stay for the next call
EMPTY = {torch.ops.aten.new_empty.default, torch.ops.aten.empty_like.default}


class Tape:
    """Runs the blocks of a packed model, or those of some layers, by playback where that is possible.

    A generation looks at the modules once, and what was recorded holds as long as they are the same: layers may be
    swapped between generations. Nothing is recorded or played back while a module has a forward hook, or while another
    thread is at it.
    """

    def __init__(self, model: GPT, kernels: Kernels, layers: range | None = None) -> None:
        self.model, self.kernels = weakref.ref(model), kernels  # weak: it is the model's own tape
        self.layers = range(len(model.h)) if layers is None else layers
        self.lock = threading.Lock()
        self.key: tuple | None = None
        self.recording: Recording | None = None
        self.version = -1  # of the caches
        self.modules: list[nn.Module] = []  # held, so that no other one gets their number
        self.signature: list = []
        self.attentions: list[nn.Module] = []
        self.hooks: list[dict] = []

    def __reduce__(self) -> tuple:
        return Tape, (self.model(), self.kernels, self.layers)  # addresses are of no use to a copy

    def __call__(self, x: Tensor, ropes: list[tuple[Tensor, Tensor]], masks: dict, step: Step | None) -> Tensor:
        """x (B, T, C) through the blocks: (B, T, C)."""
        as_usual = torch.compiler.is_compiling() or step is None or step.row is None or not x.numel()
        if as_usual or not self.lock.acquire(blocking=False):
            return self._run(x, ropes, masks, step)
        try:
            return self._play(x, ropes, masks, step)
        finally:
            self.lock.release()

    def _play(self, x: Tensor, ropes: list[tuple[Tensor, Tensor]], masks: dict, step: Step) -> Tensor:
        model = self.model()
        if model.cache_version != self.version:
            self._look(model)
        if any(self.hooks) or model.loras is not None:  # rows' adapters are PyTorch's products, of all tokens
            return self._run(x, ropes, masks, step)
        # Caches are not kept: one has to go before a larger one is made.
        caches = [attn._modules["kv_cache"]._buffers for attn in self.attentions]
        caches = [cache[name] for cache in caches for name in ("k", "v")]
        given = [t.contiguous() for t in (x, step.row, step.position, *(table for pair in ropes for table in pair))]
        dtypes = x.dtype, given[-1].dtype, caches[0].dtype, torch.get_autocast_dtype("cpu")
        key, given = (*dtypes, torch.is_autocast_enabled("cpu")), given + caches
        if key != self.key:
            self._record(key, given, len(ropes), masks, step)
        return self._run(x, ropes, masks, step) if self.recording is None else self.recording.play(given)

    def _look(self, model: GPT) -> None:
        """Whether any module is another one, or has another tensor, number or object."""
        blocks, signature = [model.h[layer] for layer in self.layers], []
        modules = [m for block in blocks for m in block.modules() if not isinstance(m, KVCache)]
        for module in modules:
            signature.append(id(module))
            for value in (*vars(module).values(), *module._parameters.values(), *module._buffers.values()):
                if isinstance(value, Tensor) and value.layout is torch.strided:
                    signature.append(value.data_ptr())
                else:
                    signature.append(value if isinstance(value, bool | int | float | str) else id(value))
        if signature != self.signature:
            self.modules, self.signature, self.key = modules, signature, None
        self.hooks = [hooks for m in modules for hooks in (m._forward_hooks, m._forward_pre_hooks)]
        self.hooks += [_global_forward_hooks, _global_forward_pre_hooks]
        self.attentions, self.version = [block.attn for block in blocks], model.cache_version

    def _record(self, key: tuple, given: list[Tensor], n_ropes: int, masks: dict, step: Step) -> None:
        """Runs two tokens: every result is held meanwhile, and the strides of a single one would say nothing."""
        tokens = given[: 3 + 2 * n_ropes]  # the tensors that have something of each token
        if tokens[1].numel() == 1:  # one of padding beside it
            tokens = [torch.cat((t, t), dim=min(t.dim() - 1, 1)) for t in tokens]
            tokens[2][1] = -1
        tokens = [t.narrow(min(t.dim() - 1, 1), 0, 2).clone() for t in tokens]
        (x, row, position, *tables), calls = tokens, []
        ropes = list(zip(tables[::2], tables[1::2], strict=True))
        watch, self.key, self.recording = Watch(calls), None, None
        try:
            self.kernels.here.record = calls.append
            with watch:
                y = self._run(x, ropes, masks, replace(step, row=row, position=position))
        finally:
            self.kernels.here.record = None
        given = tokens + given[len(tokens) :]
        self.recording = None if watch.other else Recording(self.kernels, calls, given, y)
        self.key = key

    def _run(self, x: Tensor, *where: Any) -> Tensor:
        blocks = self.model().h
        for layer in self.layers:
            x = blocks[layer](x, *where)
        return x


class Watch(TorchDispatchMode):
    """Notes oneDNN's products as calls, and whether PyTorch computes anything else."""

    def __init__(self, calls: list[tuple]) -> None:
        super().__init__()
        self.calls, self.other = calls, False

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func._schema.name == PRODUCT:
            self.calls.append((PRODUCT, args[0], list(args[1:3]), out))
        elif func not in EMPTY:  # a view lies where one of the arguments does
            known = {start_of(x) for x in tensors(args) if x.layout is torch.strided}
            made = list(tensors(tuple(out) if isinstance(out, tuple | list) else (out,)))
            strange = [x for x in made if start_of(x) not in known]
            self.other |= func._schema.is_mutable or bool(strange) or not made  # a number, not a tensor, was made
        return out


def tensors(args: tuple) -> Iterator[Tensor]:
    return (x for x in args if isinstance(x, Tensor))


def start_of(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


@dataclass
class Product:
    """A product of oneDNN: the places of x and of its result, and how many elements of each a token has."""

    x: int
    size: int
    out: int
    out_size: int
    weights: list  # the weight and the bias
    before: int  # kernel calls


class Recording:
    """Calls with everything that changes from one use to the next written down: where a number or an address stands.

    Each address that changes is an offset from a place: an input, or a slot, which is memory for one result. A slot is
    taken again as soon as nothing reads it any more.
    """

    def __init__(self, kernels: Kernels, calls: list[tuple], given: list[Tensor], y: Tensor) -> None:
        self.kernels, self.arena, self.dtype = kernels, torch.empty(0, dtype=torch.uint8), y.dtype
        n = given[1].numel()
        places = {start_of(tensor): number for number, tensor in enumerate(given)}
        assert len(places) == len(given), "inputs share memory"
        last = {start_of(t): i for i, call in enumerate(calls) for t in tensors(call)} | {start_of(y): len(calls)}
        sizes, free, patches, table, rows = [], [], [], [], []
        self.products: list[Product] = []
        for i, call in enumerate(calls):
            size = call[-1].nbytes // n
            slot = next((slot for slot in free if sizes[slot] == size), len(sizes))
            if slot == len(sizes):
                sizes.append(size)
            else:
                free.remove(slot)
            places[start_of(call[-1])] = len(given) + slot
            if call[0] is PRODUCT:
                assert call[1].is_contiguous(), "a product reads another call's whole result"
                x, out = (places[start_of(call[i])] for i in (1, -1))
                elements = call[1].numel() // n, out, call[-1].numel() // n
                self.products.append(Product(x, *elements, call[2], len(table)))
            else:
                for column, tensor in enumerate(call):
                    place = places.get(start_of(tensor)) if isinstance(tensor, Tensor) else None
                    if place is not None:  # else a weight, which stays where it is
                        base = given[place].data_ptr() if place < len(given) else start_of(tensor)
                        patches.append((len(table) * WIDTH + column, place, tensor.data_ptr() - base))
                rows.append((len(table) * WIDTH + N_ROWS[call[0]], call[N_ROWS[call[0]]] // n))
                table.append([*map(as_integer, call)] + [0] * (WIDTH - len(call)))
            for start in {start_of(t) for t in tensors(call)}:
                if last[start] == i and places.get(start, 0) >= len(given):
                    free.append(places[start] - len(given))
        # Held as long as they are read: a layer may be dropped before it is looked for.
        self.weights = [t for call in calls for t in tensors(call) if start_of(t) not in places]
        self.out, self.shape = places[start_of(y)], y.shape[2:]
        self.slots = np.cumsum([0, *(-(-size // 64) * 64 for size in sizes)])  # bytes of a token before each slot
        self.table = np.array(table, dtype=np.int64)
        self.where, self.place, self.offset = np.array(patches, dtype=np.int64).T
        self.rows_at, self.rows_per_token = np.array(rows, dtype=np.int64).T
        self.columns_at = np.flatnonzero(self.table[:, 0] == ATTEND) * WIDTH + N_COLUMNS

    def play(self, given: list[Tensor]) -> Tensor:
        """The result for these inputs, of which the first is x (B, T, C) and the last a cache: (B, T, C)."""
        n, x, arena = given[1].numel(), given[0], self.arena
        y = torch.empty(*x.shape[:2], *self.shape, dtype=self.dtype)
        if (needed := int(self.slots[-1]) * n) > arena.numel():
            arena = torch.empty(needed, dtype=torch.uint8)
            self.arena = arena if needed <= KEPT else self.arena

        def at(place: int, size: int) -> Tensor:  # (n, size)
            if place < len(given) or place == self.out:
                return (y if place == self.out else given[place]).view(n, size)
            start = int(self.slots[place - len(given)]) * n
            return arena[start : start + n * size * self.dtype.itemsize].view(self.dtype).view(n, size)

        flat, start = self.table.reshape(-1), 0
        bases = [*(t.data_ptr() for t in given), *(self.slots[:-1] * n + arena.data_ptr()).tolist()]
        bases[self.out] = y.data_ptr()  # instead of the slot, which the next call would overwrite
        flat[self.where] = np.array(bases, dtype=np.int64)[self.place] + self.offset
        flat[self.rows_at], flat[self.columns_at] = self.rows_per_token * n, given[-1].size(2)
        for p in self.products:
            self._calls(start, p.before)
            at(p.out, p.out_size).copy_(product(at(p.x, p.size), *p.weights))
            start = p.before
        self._calls(start, len(self.table))
        return y

    def _calls(self, start: int, stop: int) -> None:
        if stop > start:
            self.kernels.run(self.table[start:].ctypes.data, stop - start)
