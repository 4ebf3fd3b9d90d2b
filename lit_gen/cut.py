"""Which part of each weight a rank keeps when layers are split over several; and tensors of files, whole or such parts.

    attn.qkv, mlp.fc       rows: this rank's heads of q, k and v; its part of gate and of up
    attn.proj, mlp.proj    columns: what the rows above feed; the ranks' products have to be added
    wte, lm_head           rows: of the vocabulary

Norms and routers are whole everywhere. A mixture of experts is split inside of each expert, so that ranks have equal
work whichever experts are chosen.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from lit_gen.config import Config
from lit_gen.hf_weights import Placement, ungroup
from lit_gen.shards import Reader
from lit_gen.utils import UserError

CHUNK_BYTES = 2**23  # read at a time; less is returned to the system and fetched again, page by page


@dataclass(frozen=True, eq=False)
class Cut:
    """A part of a weight (..., N, K) or of a vector (N,).

    Attributes:
        rows: those that are kept, (n,) int64, ascending; None keeps all.
        columns: those that are kept, if there are columns; None keeps all.
        size: how many rows the part has, the last of them zeros; None: those that are kept.
    """

    rows: Tensor | None = None
    columns: slice | None = None
    size: int | None = None

    def shape(self, whole: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the part."""
        *lead, N, K = whole if len(whole) > 1 else (*whole, 1)
        rows = self.size if self.size is not None else N if self.rows is None else len(self.rows)
        columns = K if self.columns is None else len(range(K)[self.columns])
        return (*lead, rows, columns) if len(whole) > 1 else (rows,)

    def of(self, tensor: Tensor) -> Tensor:
        """The part of a whole (N, K), without the zeros."""
        tensor = tensor if self.rows is None else tensor[self.rows]
        return tensor if self.columns is None else tensor[:, self.columns]

    def flat_rows(self, whole: tuple[int, ...]) -> Tensor:
        """The rows that are kept of a weight of this shape, when all stacks lie one below the other."""
        *lead, N, _ = whole if len(whole) > 1 else (*whole, 1)
        rows = torch.arange(N) if self.rows is None else self.rows
        return (torch.arange(torch.Size(lead).numel())[:, None] * N + rows).flatten()


WHOLE = Cut()


def check_ranks(config: Config, ranks: int) -> None:
    """Raises unless each of so many ranks can have the same number of query heads, and the key/value heads of these."""

    def possible(n: int) -> bool:
        return config.n_head % n == 0 and (config.n_query_groups % n == 0 or n % config.n_query_groups == 0)

    if not possible(ranks):
        sizes = ", ".join(str(n) for n in range(1, config.n_head + 1) if possible(n))
        raise UserError(
            f"n_query_groups {config.n_query_groups} (of n_head {config.n_head}) cannot be shared by a world size of "
            f"{ranks}: take one of {sizes}"
        )
    sizes = {"intermediate_size": config.intermediate_size, "moe_intermediate_size": config.moe_intermediate_size}
    for name, size in sizes.items():
        if 0 < size < ranks:
            raise UserError(f"{name} {size} cannot be shared by a world size of {ranks}: take fewer ranks")


def cuts_of(config: Config, rank: int, ranks: int) -> dict[str, Cut]:
    """What rank `rank` of `ranks` keeps, by our parameters' names; those that are not named it keeps whole.

    Where there are fewer key/value heads than ranks, several have the same one. A bias behind a sum over ranks belongs
    to rank 0 alone: the others keep none of its rows, so that it is added once.
    """
    hs, ng, groups = config.head_size, config.n_query_groups, _share(config.n_query_groups, rank, ranks)
    if ng < ranks:
        groups = range(rank * ng // ranks, rank * ng // ranks + 1)
    q, kv = (range(heads.start * hs, heads.stop * hs) for heads in (_share(config.n_head, rank, ranks), groups))
    parts = zip(config.qkv_rows.values(), (q, kv, kv), strict=True)
    qkv = torch.cat([part.start + torch.arange(some.start, some.stop) for part, some in parts])
    size = -(-config.vocab_size // ranks)
    first = min(rank * size, config.vocab_size)
    words = Cut(torch.arange(first, min(first + size, config.vocab_size)), size=size)
    once = WHOLE if rank == 0 else Cut(torch.arange(0))
    cuts = {"wte.weight": words, "lm_head.weight": words, "lm_head.bias": words}
    for layer, moe in enumerate(config.moe_layers):
        attn, mlp = f"h.{layer}.attn", f"h.{layer}.mlp"
        cuts |= {f"{attn}.qkv.{kind}": Cut(qkv) for kind in ("weight", "bias")}
        cuts |= {f"{attn}.proj.weight": Cut(columns=slice(q.start, q.stop)), f"{attn}.proj.bias": once}
        if config.qk_norm == "per_head":
            for name, rows in (("norm_q", q), ("norm_k", kv)):
                heads = torch.arange(rows.start // hs, rows.stop // hs)
                cuts |= {f"{attn}.{name}.{kind}": Cut(heads) for kind in ("weight", "bias")}
        size = config.moe_intermediate_size if moe else config.intermediate_size
        mine, stacks = _share(size, rank, ranks), 2 if moe or config.gated else 1  # gate | up
        fc = Cut(torch.cat([i * size + torch.arange(mine.start, mine.stop) for i in range(stacks)]))
        proj, kind = Cut(columns=slice(mine.start, mine.stop)), "" if moe else ".weight"
        cuts |= {f"{mlp}.fc{kind}": fc, f"{mlp}.fc.bias": fc, f"{mlp}.proj{kind}": proj, f"{mlp}.proj.bias": once}
    return cuts


def _share(size: int, rank: int, ranks: int) -> range:
    return range(size * rank // ranks, size * (rank + 1) // ranks)


def copy_tensor(reader: Reader, name: str, place: Placement, target: Tensor, cut: Cut, config: Config) -> None:
    """Reads a tensor of the file, or what `cut` keeps of it, a few rows at a time into its place in a parameter.

    Args:
        target: the parameter, which has the shape of the part.
    """
    shape, at = reader.shapes[name], place.at
    if at and isinstance(at[0], int) and target.dim() == 2:  # one head's norm is one row of the parameter
        rows = torch.arange(len(target)) if cut.rows is None else cut.rows
        target[rows == at[0]] = read_floats(reader, name).to(target)
        return
    if len(shape) == 3:  # a stack of experts, one by one
        for expert in range(shape[0]):
            target[expert].copy_(cut.of(read_floats(reader, name, expert, expert + 1)[0]))
        return
    if at and isinstance(at[0], int):  # one expert
        target, at = target[at[0]], at[1:]
    start = at[0].start if at else 0
    rows = torch.arange(start + shape[0]) if cut.rows is None else cut.rows
    mine = ((rows >= start) & (rows < start + shape[0])).nonzero().flatten()
    order = torch.arange(shape[0])  # row of the file for each of ours
    order = (ungroup(order, config) if place.grouped else order)[rows[mine] - start]
    integer = None if target.is_floating_point() else target.dtype
    to = int(mine[0]) if len(mine) else 0
    for first, last in _chunks(order, shape):
        part = read_floats(reader, name, first, last, integer, cut.columns)
        target[to : to + last - first].copy_(part)
        to += last - first


def _chunks(order: Tensor, shape: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    """Rows `order` of a tensor as pieces [start, stop) of rows that follow each other, none of them large."""
    most = max(1, CHUNK_BYTES // (4 * max(1, torch.Size(shape[1:]).numel())))
    breaks = (order.diff() != 1).nonzero().flatten() + 1
    for run in order.tensor_split(breaks.tolist()):
        for piece in run.split(most) if len(run) else ():
            yield int(piece[0]), int(piece[-1]) + 1


def read_floats(
    reader: Reader,
    name: str,
    start: int = 0,
    stop: int | None = None,
    integer: torch.dtype | None = None,
    columns: slice | None = None,
) -> Tensor:
    """Rows of a tensor of floats, or of this dtype of integers; UserError if it is of another kind."""
    tensor = reader.read(name, start, stop, columns)
    if integer is not None and tensor.dtype != integer:
        raise UserError(f"{name} is stored as {tensor.dtype} where {integer} is needed; quantise the checkpoint again")
    if integer is None and (not tensor.is_floating_point() or tensor.dtype.itemsize < 2):
        raise UserError(
            f"{name} is stored as {tensor.dtype}, a quantized format that is not supported; load a float file"
        )
    return tensor
