"""Layers split over ranks: PyTorch's `parallelize_module` cuts a model's parameters and joins what the ranks compute.

    x ── qkv, fc: some of the rows ── attention of some heads, activation ── proj: some of the columns ── sum ── x

The parameters are plain tensors of a rank's own size, not DTensors: our kernels, quantisation and LoRA take them as
they are, and no operation pays for PyTorch's dispatch of DTensors, which is a multiple of what a small product costs.
Sums are formed in the order of the ranks, so that all ranks have the same bits, whatever stands beside a row.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

from lit_gen.cut import Cut, check_ranks, cuts_of
from lit_gen.lora_parts import LoRA, shapes
from lit_gen.model import GPT


@contextmanager
def connected() -> Iterator[None]:
    """Makes a ConnectionError of what PyTorch raises when a rank has ended, or does not answer in time."""
    try:
        yield
    except RuntimeError as error:
        reason = " ".join(str(error).split())
        raise ConnectionError(f"another rank has ended or does not answer ({reason:.200})") from error


def sum_over(mesh: DeviceMesh, x: Tensor) -> Tensor:
    """The sum of the ranks' tensors, the same bits on all ranks."""
    if x.device.type != "cpu":
        with connected():
            dist.all_reduce(x, group=mesh.get_group())
        return x
    # gloo adds in an order that depends on where in the tensor an element is, and so on a row's neighbours.
    first, *others = gather(mesh, x)
    total = first.float()
    for part in others:
        total = total + part
    return total.to(x.dtype)


def gather(mesh: DeviceMesh, x: Tensor) -> Tensor:
    """The ranks' tensors, (ranks, *x.shape), on all ranks."""
    parts = x.new_empty(mesh.size(), *x.shape)
    with connected():
        dist.all_gather_single(parts.flatten(), x.flatten(), group=mesh.get_group())
    return parts


class Split(ParallelStyle):
    """Keeps a part of a module's parameters.

    Attributes:
        cuts: what is kept of each parameter, by name.
        before, after: change the module's input and output.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device, self.cuts = device, dict[str, Cut]()
        self.before: Callable[[Tensor], Tensor] | None = None
        self.after: Callable[[Tensor], Tensor] | None = None

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for name, parameter in module.named_parameters(recurse=False):
            shape = self.cuts[name].shape(parameter.shape) if name in self.cuts else parameter.shape
            part = parameter.new_zeros(shape, device=self.device) if 0 not in shape else None
            setattr(module, name, None if part is None else nn.Parameter(part, requires_grad=False))
        if isinstance(module, nn.Linear):
            module.out_features, module.in_features = module.weight.shape
        if self.before is not None:
            module.register_forward_pre_hook(lambda _, args: self.before(*args))
        if self.after is not None:
            module.register_forward_hook(lambda _, args, out: self.after(out))
        return module


def split_model(model: GPT, mesh: DeviceMesh, device: torch.device) -> dict[str, Cut]:
    """Leaves of an empty model what this rank keeps, on its device; returns that by the parameters' names.

    The same calls of the model on all ranks then give the same results; but logits are whole on rank 0 alone.

    Raises:
        UserError: the heads cannot be shared by so many ranks.
    """
    config, rank, ranks = model.config, mesh.get_local_rank(), mesh.size()
    check_ranks(config, ranks)
    cuts, plan = cuts_of(config, rank, ranks), {}
    for name, _ in model.named_parameters(remove_duplicate=False):
        module, _, kind = name.rpartition(".")
        style = plan.setdefault(module, Split(device))
        if name in cuts:
            style.cuts[kind] = cuts[name]
    for layer, moe in enumerate(config.moe_layers):
        for name in ("attn.proj", "mlp" if moe else "mlp.proj"):
            plan[f"h.{layer}.{name}"].after = lambda x: sum_over(mesh, x)
        if config.qk_norm == "full":
            for name, heads in (("norm_q", config.n_head), ("norm_k", config.n_query_groups)):
                norm = plan.setdefault(f"h.{layer}.attn.{name}", Split(device))
                norm.before, norm.after = _over_all_heads(mesh, heads)
    words = cuts["wte.weight"]
    plan["wte"].before, plan["wte"].after = _by_word(mesh, words.rows, words.size)
    plan["lm_head"].after = lambda x: _whole_logits(mesh, x, config.vocab_size)
    parallelize_module(model, mesh, plan)
    if config.tie_embeddings:
        model.lm_head.weight = model.wte.weight
    for block in model.h:
        block.attn.n_head //= ranks
        block.attn.n_query_groups = max(1, block.attn.n_query_groups // ranks)
    return cuts


def _by_word(mesh: DeviceMesh, rows: Tensor, size: int) -> tuple[Callable[[Tensor], Tensor], ...]:
    """Looks up the tokens that are this rank's, and adds the ranks' vectors, of which all but one are zero."""
    first, here = mesh.get_local_rank() * size, [torch.empty(0)]

    def before(idx: Tensor) -> Tensor:  # (B, T)
        here[0] = (idx >= first) & (idx < first + len(rows))
        return torch.where(here[0], idx - first, 0)

    def after(x: Tensor) -> Tensor:  # (B, T, C)
        return sum_over(mesh, x * here[0][..., None])

    return before, after


def _over_all_heads(mesh: DeviceMesh, heads: int) -> tuple[Callable[[Tensor], Tensor], ...]:
    """A norm over all heads at once, of which this rank has some: the others' are fetched, and dropped behind it."""
    copies = max(1, mesh.size() // heads)  # of each key head
    mine = mesh.get_local_rank() // copies

    def before(x: Tensor) -> Tensor:  # (B, T, n) -> (B, T, heads * hs)
        return gather(mesh, x)[::copies].movedim(0, -2).flatten(-2)

    def after(x: Tensor) -> Tensor:  # (B, T, heads * hs) -> (B, T, n)
        return x.unflatten(-1, (mesh.size() // copies, -1))[..., mine, :].contiguous()

    return before, after


def _whole_logits(mesh: DeviceMesh, x: Tensor, vocab_size: int) -> Tensor:
    """On rank 0 the logits (..., V) of the whole vocabulary, of which each rank has a part; elsewhere that part."""
    first, x = mesh.get_local_rank() == 0, x.contiguous()
    parts = x.new_empty(mesh.size(), *x.shape) if first else None
    with connected():
        dist.gather(x, None if parts is None else list(parts), group=mesh.get_group(), group_dst=0)
    return x if parts is None else parts.movedim(0, -2).flatten(-2)[..., :vocab_size]


def split_lora(lora: LoRA, model: GPT, cuts: dict[str, Cut]) -> LoRA:
    """What a LoRA adds to this rank's parts of the weights."""
    whole, found = shapes(model.config), {}
    for param, parts in lora.items():
        cut = cuts.get(param, Cut())
        rows = cut.flat_rows(whole[param])
        for part in parts:
            mine = (rows >= part.rows.start) & (rows < part.rows.stop)
            if mine.any():
                start = int(mine.nonzero()[0])
                a = part.a if cut.columns is None else part.a[:, cut.columns]
                own = {"rows": slice(start, start + int(mine.sum())), "b": part.b[rows[mine] - part.rows.start]}
                found.setdefault(param, []).append(replace(part, a=a, **own))
    return found
