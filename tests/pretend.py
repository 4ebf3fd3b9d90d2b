"""Devices that a machine does not have: tensors on them have their numbers on the CPU, and no device is mixed up.

The CPU's own kernels compute, so results can be compared bit for bit. Refused is what GPUs refuse: tensors of two
devices in one operation. Noted is what costs time there: copies from one device to another, and questions that the host
has to wait for.
"""

from collections import Counter
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

CPU = torch.device("cpu")
KIND = "lazy"  # a kind of device that PyTorch knows, and does not try to find in the machine
COPIES = {"aten::copy_", "aten::_to_copy"}
INDEXED = {"aten::index", "aten::index_put_", "aten::_index_put_impl_"}  # by indices on the CPU, too
WAITED_FOR = {"aten::_local_scalar_dense", "aten::nonzero", "aten::_unique2", "aten::equal"}


def devices(n: int) -> list[torch.device]:
    return [torch.device(KIND, i) for i in range(n)]


class OnDevice(Tensor):
    """A tensor that says it is on `device`; `held` has its numbers."""

    @staticmethod
    def __new__(cls, held: Tensor, device: torch.device) -> "OnDevice":
        how = {"strides": held.stride(), "storage_offset": held.storage_offset(), "dtype": held.dtype}
        with torch.inference_mode(False):  # views of a tensor that was made outside of it have to be of its kind
            tensor = Tensor._make_wrapper_subclass(cls, held.shape, device=device, **how)
        tensor.held = held
        return tensor

    @classmethod
    def __torch_dispatch__(cls, func: Any, *rest: Any) -> None:
        raise AssertionError(f"{func} outside of Pretend()")


class Pretend(ExitStack):
    """While it is entered there are such devices.

    Attributes:
        copies: how many tensors went from one device to another, by the two.
        waits: operations for which the host has to wait.
    """

    def __init__(self) -> None:
        super().__init__()
        self.copies: Counter[tuple[str, str]] = Counter()
        self.waits: list[str] = []

    def __enter__(self) -> "Pretend":
        super().__enter__()
        self.enter_context(_Dispatch(self))
        self.enter_context(_Function(self))
        known = torch.is_autocast_enabled
        self.enter_context(patch.object(torch, "is_autocast_enabled", lambda kind: kind != KIND and known(kind)))
        return self


class _Function(TorchFunctionMode):
    """What PyTorch does not hand to dispatch modes."""

    def __init__(self, pretend: Pretend) -> None:
        super().__init__()
        self.pretend = pretend

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is Tensor.tolist and isinstance(args[0], OnDevice):
            self.pretend.waits.append("tolist")
            return args[0].held.tolist()
        if func is torch.tensor and kwargs.get("device") is not None:
            return torch.tensor(*args, **kwargs | {"device": CPU}).to(kwargs["device"])
        if func is Tensor.__getitem__ and isinstance(args[1], list):
            return args[0][torch.tensor(args[1]).to(args[0].device)]
        if func is Tensor.new_tensor:
            return torch.tensor(*args[1:], dtype=args[0].dtype).to(args[0].device)
        return func(*args, **kwargs)


class _Dispatch(TorchDispatchMode):
    """Computes with what is held, on one device at a time."""

    def __init__(self, pretend: Pretend) -> None:
        super().__init__()
        self.pretend = pretend

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs, name = dict(kwargs or {}), func._schema.name
        if name == "aten::to":  # a copy, or not
            with self:
                return func.decompose(*args, **kwargs)
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        ours = [x for x in tensors if isinstance(x, OnDevice)]
        target = kwargs.get("device") or (ours[0].device if ours else CPU)
        if name in COPIES:
            target = kwargs.get("device") or args[0].device
            if (source := tensors[-1].device) != target:
                self.pretend.copies[str(source), str(target)] += 1
                if target == CPU:
                    self.pretend.waits.append("copy to the CPU")
        else:
            free = [id(x) for x in args[1] if x is not None] if name in INDEXED else []
            there = {x.device for x in tensors if isinstance(x, OnDevice) or (x.dim() and id(x) not in free)}
            if len(there) > 1:  # a single number on the CPU may go anywhere
                raise RuntimeError(f"{name} of tensors on {', '.join(sorted(map(str, there)))}")
        if ours and name in WAITED_FOR:
            self.pretend.waits.append(name)
        if target.type == KIND and "device" in kwargs:
            kwargs["device"] = CPU
        wrappers = {id(x.held): x for x in ours}  # operations in place return what they were given

        def held(x: Any) -> Any:
            return x.held if isinstance(x, OnDevice) else x

        def wrap(x: Any) -> Any:
            if not isinstance(x, Tensor):
                return x
            return wrappers[id(x)] if id(x) in wrappers else OnDevice(x, target)

        out = func(*tree_map(held, args), **tree_map(held, kwargs))
        return tree_map(wrap, out) if target.type == KIND else out
