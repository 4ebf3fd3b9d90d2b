"""A .gguf file seen as a Hugging Face folder: a config.json dict and tensors under their Hugging Face names.

`GGUFCheckpoint` is all that others use; above it is the file format (docs/gguf.md of github.com/ggml-org/ggml). The
head of a file is parsed here and not by `gguf.GGUFReader`, which trusts the lengths that it finds and takes seconds for
a large vocabulary; the dequantisation is the gguf package's. What metadata and names mean is in `gguf_config.py`.
"""

import math
import mmap
import struct
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np
import torch
from torch import Tensor

from lit_gen.gguf_config import hf_config, hf_names
from lit_gen.utils import UserError

SCALARS = dict(enumerate("BbHhIif?")) | dict(zip((10, 11, 12), "Qqd", strict=True))  # value type -> struct code
STRING, ARRAY = 8, 9
LONGEST = 1 << 24  # bytes of a string or elements of an array; vocabularies stay below 2^19


class StoredTensor(NamedTuple):
    shape: tuple[int, ...]  # rows first; the file has the reverse
    type: gguf.GGMLQuantizationType
    rows: np.ndarray  # (rows, bytes per row), uint8, memory-mapped; (E, I, C) has E * I rows, a vector one per element


class Cursor:
    """Walks through the head of a file and never past its end, whatever a length field says."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data, self.pos = data, 0

    def take(self, count: int) -> bytes:
        if count > len(self.data) - self.pos:
            raise UserError(f"damaged or incomplete: {count} bytes wanted at byte {self.pos} of {len(self.data)}")
        self.pos += count
        return self.data[self.pos - count : self.pos]

    def numbers(self, codes: str) -> tuple[Any, ...]:
        return struct.unpack("<" + codes, self.take(struct.calcsize("<" + codes)))

    def length(self) -> int:
        (length,) = self.numbers("Q")
        if length > LONGEST:
            raise UserError(f"damaged: a length of {length} at byte {self.pos - 8}")
        return length

    def strings(self, count: int) -> list[str]:
        """So many strings, in one loop without calls: a vocabulary and its merges are hundreds of thousands."""
        data, pos, n_bytes, found = self.data, self.pos, len(self.data), []
        try:
            for _ in range(count):
                start = pos + 8
                length = int.from_bytes(data[pos:start], "little")
                pos = start + length
                if pos > n_bytes or length > LONGEST:
                    raise UserError(f"damaged or incomplete: a string of {length} bytes at byte {start} of {n_bytes}")
                found.append(data[start:pos].decode())
        except UnicodeDecodeError:
            raise UserError(f"damaged: the string at byte {start} is not UTF-8") from None
        self.pos = pos
        return found

    def value(self, kind: int) -> Any:
        if kind in SCALARS:
            return self.numbers(SCALARS[kind])[0]
        if kind == STRING:
            return self.strings(1)[0]
        if kind != ARRAY:
            raise UserError(f"damaged: unknown value type {kind} at byte {self.pos}")
        (kind,), count = self.numbers("I"), self.length()
        if kind in SCALARS:
            return list(self.numbers(f"{count}{SCALARS[kind]}"))
        if kind != STRING:
            raise UserError(f"damaged: unknown array element type {kind} at byte {self.pos}")
        return self.strings(count)


Heads = dict[str, tuple[tuple[int, ...], int, int]]  # tensor name -> shape, type number, offset from the first one


def read_gguf(path: Path) -> tuple[dict[str, Any], dict[str, StoredTensor], mmap.mmap]:
    """Returns the metadata, the memory-mapped tensors and the map of a file, every size checked against the file's."""
    data = map_file(path)
    state = path.stat()
    metadata, heads, base = _read_head(path, (state.st_ino, state.st_size, state.st_mtime_ns))
    return dict(metadata), map_tensors(np.frombuffer(data, np.uint8), base, heads), data


def map_file(path: Path) -> mmap.mmap:
    try:
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:  # ValueError: an empty file cannot be mapped
        raise UserError(f"cannot be read: {error}") from None


@lru_cache(maxsize=1)  # config, tokenizer and weights are read apart, and a large vocabulary takes time
def _read_head(path: Path, state: tuple[int, ...]) -> tuple[dict[str, Any], Heads, int]:
    """Metadata, tensors, and where the first tensor begins; `state` tells this file from a later one of its name."""
    data = map_file(path)
    cursor = Cursor(data)
    if data[:4] != b"GGUF":
        raise UserError(f"not a GGUF file: it begins with {data[:4]!r}")
    _, version, n_tensors, n_fields = cursor.numbers("IIQQ")
    if version not in (2, 3):
        raise UserError(f"GGUF version {version:#x} is not supported (2 and 3, little-endian, are)")
    metadata: dict[str, Any] = {}
    for _ in range(n_fields):
        key = cursor.strings(1)[0]
        if key in metadata:
            raise UserError(f"damaged: metadata key {key!r} occurs twice")
        metadata[key] = cursor.value(*cursor.numbers("I"))
    alignment = metadata.get("general.alignment", 32)
    if not (isinstance(alignment, int) and alignment >= 8 and alignment & (alignment - 1) == 0):
        raise UserError(f"damaged: general.alignment is {alignment!r}, not a power of two from 8 on")
    heads: Heads = {}
    for _ in range(n_tensors):
        name, (n_dims,) = cursor.strings(1)[0], cursor.numbers("I")
        if name in heads or not 1 <= n_dims <= 4:
            raise UserError(f"damaged: tensor {name!r} occurs twice or has {n_dims} dimensions")
        heads[name] = (cursor.numbers(f"{n_dims}Q")[::-1], *cursor.numbers("IQ"))
        if heads[name][2] % alignment:
            raise UserError(f"damaged: tensor {name} has the offset {heads[name][2]}, not a multiple of {alignment}")
    return metadata, heads, -(-cursor.pos // alignment) * alignment


def map_tensors(data: np.ndarray, base: int, heads: Heads) -> dict[str, StoredTensor]:
    """Cuts the bytes from `base` on into tensors."""
    tensors, end = {}, base
    for name, (shape, number, offset) in sorted(heads.items(), key=lambda item: item[1][2]):
        try:
            kind = gguf.GGMLQuantizationType(number)
            block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
            gguf.quants.dequantize(np.zeros((1, block_bytes), np.uint8), kind)
        except (ValueError, KeyError, NotImplementedError):
            raise UserError(f"tensor {name} has type {number}, which the gguf package cannot dequantise") from None
        n_rows, width = (shape[0], 1) if len(shape) == 1 else (math.prod(shape[:-1]), shape[-1])
        if 0 in shape or width % block or base + offset < end:
            raise UserError(f"damaged: tensor {name} has type {kind.name}, shape {shape} and offset {offset}")
        row_bytes, start = width // block * block_bytes, base + offset
        end = start + n_rows * row_bytes
        if end > len(data):
            raise UserError(f"incomplete: tensor {name} ends at byte {end}, the file at {len(data)}; download it again")
        tensors[name] = StoredTensor(shape, kind, data[start:end].reshape(n_rows, row_bytes))
    return tensors


class Source(NamedTuple):
    """Where the rows of one Hugging Face tensor are."""

    stored: StoredTensor
    first: int  # its first row, not 0 for all but the first expert of a stack
    shape: tuple[int, ...]
    heads: int  # rows of this many heads are stored in another order; 0: in ours


class GGUFCheckpoint:
    """A .gguf file seen as a Hugging Face checkpoint.

    Attributes:
        config: what config.json would hold (hub-era names: `model_type`, `rope_theta`, `rope_scaling`, ...).
        shapes: Hugging Face tensor name to shape, rows first: all tensors that a model of this config has, no other.
        metadata: the file's own key-value pairs, with `tokenizer.ggml.*` in it.

    Raises:
        UserError: the file is not GGUF, damaged, incomplete, of an unsupported architecture or type, or it lacks a
            tensor or a metadata key, or has one that its architecture should not have.
    """

    config: dict[str, Any]
    shapes: dict[str, tuple[int, ...]]
    metadata: dict[str, Any]

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        try:
            self.metadata, stored, self._map = read_gguf(self.path)
            self.config = hf_config(self.metadata, {name: tensor.shape for name, tensor in stored.items()})
            if self.config["model_type"] in ("llama", "mixtral") and "rope_freqs.weight" in stored:
                add_rope_factors(self.config, stored.pop("rope_freqs.weight"))
            self._sources = find_sources(self.config, stored)
        except UserError as error:
            raise UserError(f"{path}: {error}") from None
        self.shapes = {name: source.shape for name, source in self._sources.items()}

    def read(self, name: str, start: int = 0, stop: int | None = None, columns: slice | None = None) -> Tensor:
        """Dequantises rows [start, stop) of a tensor (elements of a vector). Only these rows ever exist as float32.

        Of a matrix only these columns are returned.

        Returns:
            A tensor of its own, float32, `(stop - start, *shapes[name][1:])`.
        """
        source = self._sources[name]
        index = np.arange(source.shape[0])
        if source.heads:  # llama.cpp rotates the pairs (0, 1), (2, 3), ...; Hugging Face (0, hs/2), (1, hs/2 + 1), ...
            index = index.reshape(source.heads, -1, 2).swapaxes(1, 2).reshape(-1)
        rows = source.stored.rows[source.first + index[start:stop]]  # a copy, of the quantised bytes
        assert len(rows), f"no rows of {name} in [{start}, {stop})"
        if hasattr(self._map, "madvise"):
            self._map.madvise(mmap.MADV_DONTNEED)  # pages that were read would count as this process's memory
        rows = rows.reshape(1, -1)  # as one row: the package goes through 16 rows at a time, which is slow
        values = gguf.quants.dequantize(rows, source.stored.type).reshape(-1, *source.shape[1:])
        if name.endswith("norm.weight") and self.config["model_type"] in ("gemma2", "gemma3_text"):
            values -= 1  # stored as 1 + w
        return torch.from_numpy(values if columns is None else values[:, columns])


def find_sources(config: dict[str, Any], stored: dict[str, StoredTensor]) -> dict[str, Source]:
    """Maps every Hugging Face name to its place in the file. No tensor may be missing, and none left over."""
    sources, left = {}, dict(stored)
    permuted = config["model_type"] in ("llama", "mixtral")
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    for name, hf_name in hf_names(config).items():
        if (tensor := left.pop(name, None)) is None:
            raise UserError(f"tensor {name} is missing")
        n_head = heads.get(name.split(".")[2], 0) if name.startswith("blk.") else 0
        if n_head and tensor.shape[0] != n_head * config["head_dim"]:
            raise UserError(f"tensor {name} has shape {tensor.shape}, not {n_head} heads of {config['head_dim']} rows")
        if "{}" not in hf_name:
            sources[hf_name] = Source(tensor, 0, tensor.shape, n_head if permuted else 0)
            continue
        n_expert = config.get("num_experts") or config["num_local_experts"]  # Mixtral's name for it
        if len(tensor.shape) != 3 or tensor.shape[0] != n_expert:
            raise UserError(f"tensor {name} has shape {tensor.shape}, not a stack of {n_expert} experts")
        for expert in range(tensor.shape[0]):
            sources[hf_name.format(expert)] = Source(tensor, expert * tensor.shape[1], tensor.shape[1:], 0)
    if left:
        raise UserError(f"tensor {min(left)} is none that a {config['model_type']} model of this config has")
    return sources


def add_rope_factors(config: dict[str, Any], stored: StoredTensor) -> None:
    """Llama 3.1's rotary scaling, which a GGUF file keeps as a divisor for each frequency instead of parameters."""
    factors = gguf.quants.dequantize(stored.rows.copy(), stored.type).reshape(-1).tolist()
    if len(factors) != config["head_dim"] // 2 or not all(0 < factor < float("inf") for factor in factors):
        raise UserError(f"tensor rope_freqs.weight is not {config['head_dim'] // 2} positive numbers")
    if config["rope_scaling"] is not None:
        raise UserError("has both rope_freqs.weight and rope.scaling metadata; which one holds is not known")
    config["rope_scaling"] = {"rope_type": "factors", "factors": factors}
