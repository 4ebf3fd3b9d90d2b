"""What a model is made of: one dataclass for all families, filled from a checkpoint's config.json by `hf_config.py`.

A family is a set of switches here, never a name: `model.py` reads these fields and nothing else.
"""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

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
        return cls(**config_from_hf(source))

    @classmethod
    def from_json(cls, path: str | Path) -> "Config":
        """Reads what `to_json` wrote (`lit_config.json`)."""
        fields = read_json(Path(path))
        try:
            ropes = [Rope(**rope) for rope in fields.pop("ropes")]
            return cls(ropes=ropes, **fields)
        except (TypeError, KeyError) as error:
            raise UserError(f"{path} is not a lit config ({error}); convert the checkpoint again") from None

    def to_json(self, path: str | Path) -> None:
        Path(path).write_text(json.dumps(asdict(self), indent=2) + "\n")
