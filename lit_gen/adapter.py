"""LLaMA-Adapter (Zhang et al. 2023, https://arxiv.org/abs/2303.16199): upper layers attend to a learnt prefix, too.

    y = attention(x) + gate * softmax(q @ k_prefix.T * scale) @ v_prefix        before the output projection

Keys and values of the prefix come from the layer's own projection, with whatever it does to others (norms of queries
and keys, clipping; a softcap of scores too), but are not rotated: the prefix has no position. It is no part of the
text, so it is in no mask, takes no cache column and counts for no length. Gates, one for each head, begin at 0, where
the model is what it was without.
"""

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from lit_gen.attend import attend
from lit_gen.cache import Step
from lit_gen.config import Config
from lit_gen.durable import partial_path, publish
from lit_gen.made_for import check_base, shape_of
from lit_gen.model import GPT, CausalSelfAttention
from lit_gen.shards import SafetensorsReader
from lit_gen.utils import UserError

METHOD, FILE = "adapter", "lit_model_adapter.safetensors"


@dataclass(frozen=True)
class AdapterConfig:
    """The numbers of an adapter.

    Attributes:
        length: tokens of the prefix; 0 is for adapter v2 only, which then has none.
        start_layer: the first layer that has a prefix, from 0.
    """

    length: int = 10
    start_layer: int = 2

    def prefixed(self, config: Config, method: str = METHOD) -> range:
        """The layers that get a prefix; UserError if these numbers do not go with the model."""
        if (
            not all(type(n) is int and n >= 0 for n in (self.length, self.start_layer))
            or self.length > config.block_size
        ):
            most = f"whole numbers >= 0, and a length up to {config.block_size}"
            raise UserError(f"an adapter of length {self.length} from layer {self.start_layer} on: give {most}")
        if self.length == 0 and method != METHOD:
            return range(0)
        if self.length == 0 or self.start_layer >= config.n_layer:
            reason = f"an adapter of length {self.length} from layer {self.start_layer} on would change nothing"
            raise UserError(f"{reason} in a model of {config.n_layer} layers: choose other numbers")
        return range(self.start_layer, config.n_layer)


class Prefix(nn.Module):
    """What one layer attends to beside its text.

    Training computes keys and values at every call. A generation does so once and keeps them with the layer's cache, so
    that the next one sees weights that were trained in between.
    """

    def __init__(self, config: Config, length: int, **factory: torch.dtype | torch.device) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(length, config.n_embd, **factory))  # about as large as a norm's output
        self.gate = nn.Parameter(torch.zeros(config.n_head, 1, **factory))

    def forward(self, y: Tensor, q: Tensor, attn: CausalSelfAttention, step: Step | None) -> Tensor:
        """Adds to the attention y what rotated queries q see here: (B, nh, T, hs) each."""
        k, v = self._project(attn) if step is None else self._keep(attn)  # (1, ng, length, hs) each
        k, v = k.expand(len(q), -1, -1, -1), v.expand(len(q), -1, -1, -1)
        seen = attend(q, k, v, q.new_zeros(1, 1, 1, k.size(2)), attn.scale, attn.softcap)  # (B, nh, T, hs)
        return self._add(y, seen, self.gate[:, :, None])

    def add_to_tokens(
        self, y: Tensor, q: Tensor, rope: tuple[Tensor, Tensor] | None, attn: CausalSelfAttention
    ) -> Tensor:
        """The same by the C++ kernels, each token by itself: y (N, nh * hs), q (N, nh, hs) before it is rotated."""
        k, v = self._keep(attn)
        row = torch.zeros(len(q), dtype=torch.int64)
        where = {"scale": attn.scale, "softcap": attn.softcap}
        last = torch.full_like(row, k.size(2) - 1)  # every token sees all columns
        seen = attn.kernels.attend(q, None, None, rope, (k, v), row, last, **where)
        return self._add(y.view(q.shape), seen.view(q.shape), self.gate).view(y.shape)

    @staticmethod
    def _add(y: Tensor, seen: Tensor, gate: Tensor) -> Tensor:
        """In the gate's precision, which is higher under autocast. A product and a sum: every element by itself."""
        return (y + seen * gate).to(y.dtype)

    def _project(self, attn: CausalSelfAttention) -> tuple[Tensor, Tensor]:
        _, k, v = attn.project(self.weight[None])
        return k.transpose(1, 2), v.transpose(1, 2)

    def _keep(self, attn: CausalSelfAttention) -> tuple[Tensor, Tensor]:
        cache = attn.kv_cache
        if cache.prefix is None:
            with torch.inference_mode(False), torch.no_grad():
                k, v = self._project(attn)
                cache.prefix = k.contiguous(), v.contiguous()
        return cache.prefix


def add_adapter(model: GPT, config: AdapterConfig = AdapterConfig()) -> GPT:  # noqa: B008 (it is frozen)
    """Gives a model an untrained adapter, whose parameters are then the only ones with gradients; returns the model."""
    assert not has_adapter(model), "the model has an adapter already"
    prefixed = config.prefixed(model.config)
    model.requires_grad_(False)
    add_prefixes(model, config.length, prefixed)
    return model


def add_prefixes(model: GPT, length: int, layers: range) -> None:
    for attn in (model.h[layer].attn for layer in layers):
        factory = {"dtype": model.wte.weight.dtype, "device": attn.qkv.weight.device}
        attn.prefix = Prefix(model.config, length, **factory).train(model.training)


def has_adapter(model: GPT) -> bool:
    return any(block.attn.prefix is not None for block in model.h)


def adapter_parameters(model: GPT) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters of an adapter, by the names that its file has."""
    for layer, block in enumerate(model.h):
        if block.attn.prefix is not None:
            yield from block.attn.prefix.named_parameters(f"h.{layer}.attn.prefix")


def save_adapter(model: GPT, file: Path) -> None:
    """Writes the adapter of a model, and what it was made for; the file is there whole or not at all."""
    write_adapter(file, METHOD, dict(adapter_parameters(model)), model.config)


def load_adapter(model: GPT, path: Path) -> GPT:
    """Gives a model the adapter of a file, or of the folder that holds it, without gradients.

    Raises:
        UserError: the file is none, or is for another model; the model is then as it was.
    """
    assert not has_adapter(model), "the model has an adapter already"
    adapter = open_adapter(path, model.config)
    add_prefixes(model, adapter.config.length, adapter.prefixed)
    adapter.copy(adapter_parameters(model))
    return model.requires_grad_(False)


def open_adapter(path: Path, config: Config) -> "AdapterFile":
    """Checks a file, or the one in that folder, without the weights of the model; raises like `load_adapter`."""
    adapter = AdapterFile(path, METHOD, FILE, config)
    with torch.device("meta"):
        model = GPT(config)
        add_prefixes(model, adapter.config.length, adapter.prefixed)
    adapter.check({name: tuple(p.shape) for name, p in adapter_parameters(model)})
    return adapter


def write_adapter(file: Path, method: str, tensors: Mapping[str, Tensor], config: Config) -> None:
    """Writes parameters with the method's name, its numbers and the shape of the base model."""
    gates = [int(name.split(".")[1]) for name in tensors if name.endswith(".prefix.gate")]
    length = len(tensors[f"h.{gates[0]}.attn.prefix.weight"]) if gates else 0
    metadata = {"method": method, "length": str(length), "start_layer": str(min(gates, default=0))}
    metadata["base"] = shape_of(config)
    save_file({name: tensor.detach().contiguous() for name, tensor in tensors.items()}, partial_path(file), metadata)
    publish(partial_path(file), file)


class AdapterFile:
    """An adapter's file, of which nothing is believed before it is checked.

    Attributes:
        file: its path.
        config: its numbers.
        prefixed: the layers that have a prefix.
    """

    def __init__(self, path: Path, method: str, name: str, config: Config) -> None:
        self.file = path / name if os.path.isdir(path) else path
        if not os.path.isfile(self.file):  # False also for an impossible name
            what = f"there is no adapter at {str(self.file)[:200]}"
            raise UserError(f"{what}: give a {name}, or the folder that holds it")
        self._reader = SafetensorsReader([self.file])
        metadata = self._reader.metadata
        if metadata.get("method") != method:
            raise UserError(f"{self.file} is no file of method {method}, but of {metadata.get('method')!a:.40}")
        try:
            self.config = AdapterConfig(int(metadata["length"]), int(metadata["start_layer"]))
        except (KeyError, ValueError):
            raise UserError(f"{self.file} does not say what it was made for; train it again") from None
        check_base(self.file, metadata, config)
        self.prefixed = self.config.prefixed(config, method)

    def check(self, expected: Mapping[str, tuple[int, ...]]) -> None:
        """UserError unless the file has exactly tensors of these names and shapes."""
        found = self._reader.shapes
        for name in [*expected, *found]:
            if name not in found or name not in expected:
                what = "lacks" if name in expected else "has a surplus tensor"
                raise UserError(f"{self.file} {what} {name!a:.80}: it is damaged, or for another model")
            if found[name] != expected[name]:
                raise UserError(f"{self.file}: {name} has shape {found[name]} where {expected[name]} is needed")
            if not (value := self._reader.read(name)).is_floating_point() or value.dtype.itemsize < 2:
                raise UserError(f"{self.file}: {name} is stored as {value.dtype}, which is no float of 16 or 32 bits")
            if not value.isfinite().all():
                raise UserError(f"{self.file}: {name} has numbers that are not finite; take a sound adapter")

    @property
    def prefix_counts(self) -> bool:
        """Whether a gate of the prefix is open."""
        return any(self._reader.read(name).any() for name in self._reader.shapes if name.endswith("prefix.gate"))

    @torch.no_grad()
    def copy(self, targets: Iterable[tuple[str, Tensor]]) -> None:
        for name, target in targets:
            target.copy_(self._reader.read(name))
