"""Proof, on this machine and with these weights, that a row's result does not depend on how many rows stand beside it.

Everything else that a step does is done row by row; matrix products are where libraries choose another order of sums
for another number of rows. So each kind of product in the model runs with several numbers of rows, and the results are
compared bit for bit.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from lit_gen.linear import PackedLinear
from lit_gen.model import GPT
from lit_gen.pack import KernelLinear
from lit_gen.utils import UserError, say

COUNTS = (1, 2, 3, 7, 8, 16, 17, 31, 32, 33, 64, 65, 100, 128, 300, 1024)  # of rows
LARGE = 2**14  # so many outputs has only the head, which sees one token of each row: up to 128 rows are tried
LIMITS = (None, 512, 128, 32)  # rows that a PackedLinear takes at once: fewer where it fails with more


def prove_invariance(model: GPT, wanted: bool | str) -> None:
    """Makes sure that rows get the same bits in every batch.

    Args:
        model: after `pack_model`.
        wanted: True: or there is an error. "auto": a line on stderr says where it is not so; our own kernels are not
            run, since they have the property by the way they are written, nor GPUs, which do not promise it. False:
            nothing is looked at.

    Raises:
        UserError: `wanted` is True, and this hardware, or this version of PyTorch, breaks the property.
    """
    if wanted is False or (wanted == "auto" and not model.on_cpu):
        return
    kinds = [kind for kind in _kinds(model) if wanted is True or not isinstance(kind[1], KernelLinear)]
    broken = [] if model.on_cpu else ["attention on a GPU was never shown to have it"]
    broken = broken or [what for what, layer in kinds if not _holds(layer, model)]
    if not broken:
        return
    reason = f"{', '.join(broken):.200} (torch {torch.__version__}, {model.wte.weight.dtype})"
    if wanted is True:
        remedy = "install a C++ compiler, or take --batch_invariant auto"
        raise UserError(f"rows would not get the same bits in every batch: {reason}: {remedy}")
    say(f"a row's last bits may depend on its neighbours here: {reason}")


def _kinds(model: GPT) -> Iterator[tuple[str, nn.Module]]:
    """One linear layer of each shape and class, and what to call it."""
    seen = set()
    for name, layer in model.named_modules():
        shape = getattr(layer, "in_features", None), getattr(layer, "out_features", None)
        kind = (type(layer), *shape)
        if None not in shape and kind not in seen:
            seen.add(kind)
            yield f"{name} ({shape[0]} to {shape[1]})", layer


@torch.no_grad()
def _holds(layer: nn.Module, model: GPT) -> bool:
    """Whether a row has the same bits for all COUNTS; a packed layer may be told to take fewer rows at once."""
    weight, generator = model.wte.weight, torch.Generator().manual_seed(0)
    counts = [n for n in COUNTS if n <= 128 or layer.out_features < LARGE]
    x = torch.randn(max(counts), layer.in_features, generator=generator).to(weight.device, weight.dtype)  # (M, K)
    for limit in LIMITS if isinstance(layer, PackedLinear) else LIMITS[:1]:
        if limit is not None:
            for other in model.modules():
                if isinstance(other, PackedLinear) and other.shape == layer.shape:
                    other.rows_at_once = limit
        whole = layer.forward(x)  # without hooks, in which ranks would wait for each other
        if all(torch.equal(layer.forward(some), part) for some, part in _ends(x, whole, counts)):
            return True
    return False


def _ends(x: Tensor, whole: Tensor, counts: Sequence[int]) -> Iterator[tuple[Tensor, Tensor]]:
    """The last and the first n rows of both, for each n."""
    for n in counts:
        yield x[-n:], whole[-n:]
        yield x[:n], whole[:n]
