"""What a LoRA consists of: low-rank updates of rows of our weights; and where linear layers of files lie in them."""

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from lit_gen.config import Config
from lit_gen.hf_weights import placements
from lit_gen.model import GPT
from lit_gen.shards import Reader
from lit_gen.utils import UserError

LINEAR = re.compile(r"lm_head\.weight|h\.\d+\.(attn\.(qkv|proj)\.weight|mlp\.(fc|proj)(\.weight)?|mlp\.gate\.weight)")


@dataclass(frozen=True, eq=False)
class Part:
    """scale * b @ a, which is added to some rows of a weight (of all experts' weights, one below the other).

    Attributes:
        rows: n of them.
        a, b: (r, in) and (n, r), float32.
    """

    rows: slice
    a: Tensor
    b: Tensor
    scale: float


LoRA = dict[str, list[Part]]  # by our parameters' names, such as h.0.attn.qkv.weight


@dataclass(frozen=True)
class Place:
    """Where the weight of a Hugging Face linear layer lies in ours: rows of a parameter, and how many inputs it has."""

    param: str
    rows: slice
    in_features: int
    grouped: bool = False  # see `hf_weights.Placement`


def shapes(config: Config) -> dict[str, tuple[int, ...]]:
    """The shapes of a model's parameters, the tied head included."""
    with torch.device("meta"):
        return {name: tuple(p.shape) for name, p in GPT(config).named_parameters(remove_duplicate=False)}


def linear_places(config: Config) -> dict[str, Place]:
    """Every linear layer of the architecture, by the canonical name of its weight (`hf_weights.canonical`)."""
    shape_of, table = shapes(config), placements(config)
    found = {}
    for name, placement in table.items():
        if not LINEAR.fullmatch(placement.param):
            continue
        *_, N, K = shape_of[placement.param]
        rows = slice(0, N)
        for index in placement.at:  # an expert, rows of it, or both
            first = rows.start + (index * N if isinstance(index, int) else index.start)
            rows = slice(first, first + (N if isinstance(index, int) else index.stop - index.start))
        found[name] = Place(placement.param, rows, K, placement.grouped)
    if config.tie_embeddings:  # the table has tensors of files
        V, C = shape_of["lm_head.weight"]
        found["embed_out.weight" if config.model_type == "gpt_neox" else "lm_head.weight"] = Place(
            "lm_head.weight", slice(0, V), C
        )
    return found


def read_pair(reader: Reader, path: Path, a_name: str, b_name: str, place: Place) -> tuple[Tensor, Tensor]:
    """a (r, in) and b (n, r) of a file, float32; UserError if they do not fit to `place`, or are no finite numbers."""
    a_shape, b_shape = reader.shapes[a_name], reader.shapes[b_name]
    n, K = place.rows.stop - place.rows.start, place.in_features
    r = a_shape[0] if a_shape else 0
    if a_shape != (r, K) or b_shape != (n, r) or r == 0:
        raise UserError(
            f"{path} is for another model: {a_name} and {b_name} have the shapes {a_shape} and {b_shape}, "
            f"and here a ({n}, {K}) weight needs (r, {K}) and ({n}, r)"
        )
    a, b = reader.read(a_name), reader.read(b_name)
    for name, tensor in ((a_name, a), (b_name, b)):
        if not tensor.is_floating_point() or tensor.dtype.itemsize < 2:
            raise UserError(f"{name} of {path} is stored as {tensor.dtype}, which is not supported; save it as floats")
        if not tensor.isfinite().all():
            raise UserError(f"{name} of {path} has numbers that are not finite; take a sound adapter")
    return a.float(), b.float()


def digest(lora: LoRA) -> str:
    """What tells one LoRA from another: a hash of all its numbers."""
    sha = hashlib.sha256()
    for param, parts in sorted(lora.items()):
        for part in parts:
            sha.update(f"{param} {part.rows} {part.scale} {tuple(part.a.shape)}".encode())
            for tensor in (part.a, part.b):
                sha.update(tensor.float().contiguous().numpy().tobytes())
    return sha.hexdigest()
