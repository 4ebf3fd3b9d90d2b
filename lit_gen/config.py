"""What a model is made of: one dataclass for all families, filled from a checkpoint's config.json by `hf_config.py`.

A family is a set of switches here, never a name: `model.py` reads these fields and nothing else.
"""

import json
import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

from lit_gen.utils import UserError, read_json


@dataclass
class Rope:
    """One kind of rotary position embedding; the formulas are in `rope.py`."""

    base: float = 10000.0
    n_elem: int = 0  # leading elements of each head that are rotated
    kind: str = "default"  # default | linear | dynamic | llama3 | yarn | longrope | factors
    factor: float = 1.0  # context extension
    original_max_seq_len: int | None = None  # context the model was pre-trained with
    attention_factor: float | None = None  # multiplies cos and sin; None: the kind's own formula
    low_freq_factor: float | None = None  # llama3
    high_freq_factor: float | None = None
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    short_factor: list[float] | None = None  # longrope: divisors for rows up to original_max_seq_len ...
    long_factor: list[float] | None = None  # ... and beyond
    factors: list[float] | None = None  # GGUF's rope_freqs: divisors of the frequencies

    def __post_init__(self) -> None:
        check_types(self)
        divisors = [
            self.base,
            self.factor,
            *(self.short_factor or []),
            *(self.long_factor or []),
            *(self.factors or []),
        ]
        if not all(0 < value < math.inf for value in divisors) or self.n_elem < 0 or self.n_elem % 2:
            raise UserError(f"a rotary embedding of the model's config makes no sense: {self}")
        if self.kind == "llama3" and not 0 < self.low_freq_factor < self.high_freq_factor:
            raise UserError("low_freq_factor of the model's rotary embedding is not below high_freq_factor")
        if self.kind in ("yarn", "longrope", "llama3") and (self.original_max_seq_len or 0) < 2:
            raise UserError(f"original_max_position_embeddings is {self.original_max_seq_len}, which makes no sense")


def check_types(config: Any) -> None:
    """Raises for a field that is not of its declared type: config files say what they like."""
    for name, hint in get_type_hints(type(config)).items():
        value = getattr(config, name)
        allowed = get_args(hint) if isinstance(hint, UnionType) else (hint,)
        kinds = tuple(get_origin(kind) or kind for kind in allowed)
        kinds += (int,) if float in kinds else ()  # 10000 for 10000.0
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            raise UserError(f"{name} of the model's config is {str(value)[:40]!r}, which is of the wrong type")
        element = next((get_args(kind)[0] for kind in allowed if get_origin(kind) is list), None)
        if isinstance(value, list) and not all(
            isinstance(x, (int, float) if element is float else element) for x in value
        ):
            raise UserError(f"{name} of the model's config holds a value of the wrong type: {str(value)[:40]}")


@dataclass
class Config:
    model_type: str = "llama"  # only to name tensors as the family's Hugging Face files do
    block_size: int = 4096  # the context: columns a row may use
    vocab_size: int = 0  # rows of the embedding and of the head
    n_layer: int = 0
    n_embd: int = 0
    n_head: int = 0
    n_query_groups: int = 0  # key/value heads: n_head is MHA, 1 is MQA, between is GQA
    head_size: int = 0
    intermediate_size: int = 0
    # norms
    norm: str = "rms"  # rms | layer
    norm_eps: float = 1e-5
    norm_offset: bool = False  # the file stores weight - 1 (Gemma)
    norm_affine: bool = True
    norm_bias: bool = False
    pre_norm: bool = True  # norm_1 and norm_2 before attention and MLP
    post_norm: bool = False  # post_attention_norm and post_mlp_norm after them
    parallel_residual: bool = False  # attention and MLP read the same x
    shared_norm: bool = False  # ... and the same norm_1
    # attention
    qkv_bias: bool = False
    proj_bias: bool = False
    qk_norm: str | None = None  # head: over each head | full: over all heads | per_head: own weights for each head
    qk_norm_bias: bool = False
    clip_qkv: float | None = None
    attn_scale: float | None = None  # None: head_size ** -0.5
    attn_softcap: float | None = None
    layer_types: list[str] = field(default_factory=list)  # per layer: full | sliding | chunked
    window: int | None = None  # columns a sliding layer sees, itself included; the chunk of a chunked layer
    ropes: list[Rope] = field(default_factory=lambda: [Rope()])
    rope_layers: list[int] = field(default_factory=list)  # per layer: index into ropes, -1 for no positions (NoPE)
    # MLP and mixture of experts
    gated: bool = True  # act(gate) * up; else act(fc)
    act: str = "silu"  # silu | gelu | gelu_tanh | relu
    mlp_bias: bool = False
    moe_layers: list[bool] = field(default_factory=list)  # per layer; empty: none
    n_expert: int = 0
    n_expert_per_token: int = 0
    moe_intermediate_size: int = 0
    norm_topk: bool = True  # the chosen experts' weights are scaled to add up to 1
    # embedding, head and scalars
    tie_embeddings: bool = False
    lm_head_bias: bool = False
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    final_softcap: float | None = None

    def __post_init__(self) -> None:
        check_types(self)
        self.n_query_groups = self.n_query_groups or self.n_head
        self.head_size = self.head_size or self.n_embd // max(self.n_head, 1)
        self.layer_types = self.layer_types or ["full"] * self.n_layer
        self.rope_layers = self.rope_layers or [0] * self.n_layer
        self.moe_layers = self.moe_layers or [False] * self.n_layer
        for rope in self.ropes:
            rope.n_elem = rope.n_elem or self.head_size
        self._check()

    def _check(self) -> None:
        for name in ("vocab_size", "block_size", "n_layer", "n_embd", "n_head", "n_query_groups", "head_size"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 0 or (value == 0 and self.n_layer > 0):
                raise UserError(f"the model's config has {name}={value!r}, which must be a positive whole number")
        if self.n_query_groups and self.n_head % self.n_query_groups:
            raise UserError(f"{self.n_head} query heads cannot share {self.n_query_groups} key/value heads evenly")
        if not all(rope.n_elem <= self.head_size for rope in self.ropes):
            raise UserError(f"the model's config rotates more than the {self.head_size} elements of a head")
        known = (self.norm in ("rms", "layer"), self.act in ("silu", "gelu", "gelu_tanh", "relu"))
        known += (
            self.qk_norm in (None, "head", "full", "per_head"),
            set(self.layer_types) <= {"full", "sliding", "chunked"},
        )
        known += (all(-1 <= layer < len(self.ropes) for layer in self.rope_layers),)
        if not all(known) or self.intermediate_size < 0:
            raise UserError("the model's config has a norm, act, qk_norm, layer type, rope or size that does not exist")
        if any(self.moe_layers) and not 0 < self.n_expert_per_token <= self.n_expert:
            raise UserError(f"the model's config sends a token to {self.n_expert_per_token} of {self.n_expert} experts")
        for name in ("layer_types", "rope_layers", "moe_layers"):
            if len(getattr(self, name)) != self.n_layer:
                raise UserError(f"the model's config lists {len(getattr(self, name))} {name} for {self.n_layer} layers")
        if any(kind != "full" for kind in self.layer_types) and not self.window:
            raise UserError("the model's config has windowed layers but no window size")

    @property
    def qkv_rows(self) -> dict[str, slice]:
        """Rows of the fused projection that make q, k and v: the one place that knows the layout, q | k | v."""
        q, kv = self.n_head * self.head_size, self.n_query_groups * self.head_size
        return {"q": slice(0, q), "k": slice(q, q + kv), "v": slice(q + kv, q + 2 * kv)}

    @classmethod
    def from_hf(cls, source: dict[str, Any] | str | Path) -> "Config":
        """Reads a Hugging Face config.json: its dict, its path or its folder.

        Raises:
            UserError: if the model type, or any field that changes the maths, is not supported; the field is named.
        """
        from lit_gen.hf_config import config_from_hf

        if not isinstance(source, dict):
            path = Path(source)
            source = read_json(path / "config.json" if path.is_dir() else path)
        try:
            return cls(**config_from_hf(source))
        except (TypeError, ValueError, KeyError, AttributeError, ArithmeticError) as error:
            if isinstance(error, UserError):
                raise
            raise UserError(f"config.json has a field that makes no sense ({type(error).__name__}: {error})") from None

    @classmethod
    def from_json(cls, path: str | Path) -> "Config":
        """Reads what `to_json` wrote (`lit_config.json`)."""
        fields = read_json(Path(path))
        try:
            ropes = [Rope(**rope) for rope in fields.pop("ropes")]
            return cls(ropes=ropes, **fields)
        except (TypeError, KeyError, AttributeError) as error:
            raise UserError(f"{path} is not a lit config ({error}); convert the checkpoint again") from None

    def to_json(self, path: str | Path) -> None:
        Path(path).write_text(json.dumps(asdict(self), indent=2) + "\n")
