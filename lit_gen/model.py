"""The model: a decoder-only transformer with the switches of `config.Config`, a cache, and a position for every token.

Read it from the bottom: GPT.forward, Block.forward, CausalSelfAttention.forward.

    B  rows of the batch                 nh  query heads
    T  tokens per row in this call       ng  key/value heads (query groups)
    S  cache columns looked at           hs  head size
    C  embedding size                    V   vocabulary size
"""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from lit_gen.attend import attend
from lit_gen.cache import KVCache, Step, additive, visible
from lit_gen.config import Config
from lit_gen.kernels import Kernels
from lit_gen.layers import MLP, MoE, Norm, Residual
from lit_gen.lora_layers import RowLoRA
from lit_gen.rope import apply_rope, rope_table, signed_sin


class CausalSelfAttention(nn.Module):
    def __init__(self, config: Config, layer: int) -> None:
        super().__init__()
        nh, ng, hs = config.n_head, config.n_query_groups, config.head_size
        self.qkv = nn.Linear(config.n_embd, (nh + 2 * ng) * hs, bias=config.qkv_bias)  # rows: Config.qkv_rows
        self.proj = nn.Linear(nh * hs, config.n_embd, bias=config.proj_bias)
        self.norm_q = self.norm_k = None
        if config.qk_norm == "full":
            self.norm_q, self.norm_k = Norm(config, nh * hs), Norm(config, ng * hs)
        elif config.qk_norm:
            own = config.qk_norm == "per_head"
            self.norm_q = Norm(config, hs, config.qk_norm_bias, nh if own else None)
            self.norm_k = Norm(config, hs, config.qk_norm_bias, ng if own else None)
        self.n_head, self.n_query_groups, self.head_size = nh, ng, hs
        self.norm_full, self.clip = config.qk_norm == "full", config.clip_qkv
        self.scale = config.attn_scale if config.attn_scale is not None else hs**-0.5
        self.softcap = config.attn_softcap
        self.rope, self.kind, self.window = config.rope_layers[layer], config.layer_types[layer], config.window
        self.kv_cache: KVCache | None = None
        self.kernels: Kernels | None = None  # set by `pack_model`
        self.prefix: nn.Module | None = None  # set by `add_adapter`

    def forward(
        self, x: Tensor, ropes: list[tuple[Tensor, Tensor]], masks: dict[str, Tensor | None], step: Step | None
    ) -> Tensor:
        B, T, _ = x.shape
        nh, ng, hs = self.n_head, self.n_query_groups, self.head_size
        q, k, v = self.project(x)  # (B, T, nh or ng, hs)
        if step is not None and step.row is not None:
            return self.proj(self._attend_tokens(q, k, v, ropes, step).view(B, T, nh * hs))
        if self.rope >= 0:
            cos, sin = ropes[self.rope]  # (B or 1, T, 1, n_elem)
            q, k = apply_rope(torch.cat((q, k), dim=2), cos, sin).split((nh, ng), dim=2)
        if step is None:
            k, v = k.transpose(1, 2), v.transpose(1, 2)  # (B, ng, T, hs)
        elif step.fresh:  # fresh rows see their own tokens only, which are at hand
            self.kv_cache.update(k, v, step)
            k, v = k.transpose(1, 2), v.transpose(1, 2)
        else:
            k, v = self.kv_cache.update(k, v, step)  # (B, ng, S, hs)
        q = q.transpose(1, 2)
        y = attend(q, k, v, masks[self.kind], self.scale, self.softcap)  # (B, nh, T, hs)
        if self.prefix is not None:
            y = self.prefix(y, q, self, step)
        return self.proj(y.transpose(1, 2).reshape(B, T, nh * hs))

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries (B, T, nh, hs), keys (B, T, ng, hs), not yet rotated, and values (B, T, ng, hs) of x (B, T, C)."""
        B, T, _ = x.shape
        nh, ng, hs = self.n_head, self.n_query_groups, self.head_size
        qkv = self.qkv(x)  # (B, T, (nh + 2 * ng) * hs)
        if self.clip is not None:
            qkv = qkv.clamp(-self.clip, self.clip)
        q, k, v = qkv.view(B, T, nh + 2 * ng, hs).split((nh, ng, ng), dim=2)
        if self.norm_q is not None:
            if self.norm_full:  # over all heads at once
                q, k = q.flatten(2), k.flatten(2)
            q, k = self.norm_q(q).view(B, T, nh, hs), self.norm_k(k).view(B, T, ng, hs)
        return q.to(v.dtype), k.to(v.dtype), v  # under autocast a LayerNorm gives float32

    def _attend_tokens(self, q: Tensor, k: Tensor, v: Tensor, ropes: list[tuple[Tensor, Tensor]], step: Step) -> Tensor:
        """The same by the C++ kernels, each token by itself: (B * T, nh * hs)."""
        rope, cache = ropes[self.rope] if self.rope >= 0 else None, (self.kv_cache.k, self.kv_cache.v)
        where = {"kind": self.kind, "window": self.window, "scale": self.scale, "softcap": self.softcap}
        q, k, v = (x.flatten(0, 1) for x in (q, k, v))  # (B * T, nh or ng, hs)
        y = self.kernels.attend(q, k, v, rope, cache, step.row, step.position, **where)
        return y if self.prefix is None else self.prefix.add_to_tokens(y, q, rope, self)


class Block(nn.Module):
    def __init__(self, config: Config, layer: int) -> None:
        super().__init__()
        size = config.n_embd
        self.norm_1 = Norm(config, size) if config.pre_norm else nn.Identity()
        self.attn = CausalSelfAttention(config, layer)
        self.post_attention_norm = Norm(config, size) if config.post_norm else nn.Identity()
        self.norm_2 = Norm(config, size) if config.pre_norm and not config.shared_norm else nn.Identity()
        self.mlp = MoE(config) if config.moe_layers[layer] else MLP(config)
        self.post_mlp_norm = Norm(config, size) if config.post_norm else nn.Identity()
        self.add = Residual(config.residual_scale)
        self.parallel, self.shared = config.parallel_residual, config.shared_norm

    def forward(self, x: Tensor, *where: object) -> Tensor:  # (B, T, C); where: CausalSelfAttention.forward
        normed = self.norm_1(x)
        attention = self.post_attention_norm(self.attn(normed, *where))
        if self.parallel:
            normed = normed if self.shared else self.norm_2(x)
            return self.add(self.add(x, attention), self.post_mlp_norm(self.mlp(normed)))
        x = self.add(x, attention)
        return self.add(x, self.post_mlp_norm(self.mlp(self.norm_2(x))))


class GPT(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.h = nn.ModuleList(Block(config, layer) for layer in range(config.n_layer))
        self.ln_f = Norm(config, config.n_embd)
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=config.lm_head_bias)
        if config.tie_embeddings:
            self.lm_head.weight = self.wte.weight
        # Plain attributes, not buffers: casting the model must not cast the tables, and a mask belongs to one call.
        self.mask_cache: dict[str, Tensor | None] = {}
        self.cache_epoch = 0  # how often the caches were set up; who holds an older number has lost them
        self.cache_version = 0  # how often their memory may have changed
        self.group_rows: int | None = None  # twice as many rows go through the devices in two groups, and so on
        self.row_length: Tensor | None = None  # (rows,) int64, how long each cache row will get; see `_rope_rows`
        self._tables: list[tuple[Tensor, Tensor]] = []
        self.loras: RowLoRA | None = None  # which adapter each row has, if there are some beside the weights
        self.merged: set[str] = set()  # digests of those that are in the weights

    @classmethod
    def from_checkpoint(
        cls,
        path: Path | str,
        dtype: torch.dtype | None = None,
        device: torch.device | str | Sequence[torch.device] = "cpu",
    ) -> "GPT":
        """Loads a Hugging Face folder, a lit folder or a .gguf file, in eval mode and without gradients.

        Args:
            dtype: of the parameters; None takes the file's own (float32 for quantized GGUF files).
            device: of the parameters; of several each gets some of the layers (`spread.Spread`).

        Raises:
            UserError: if a tensor is missing, surplus, truncated or misshapen, or the architecture is not supported.
        """
        from lit_gen.checkpoint import load_model

        return load_model(Path(path), dtype, torch.device(device) if isinstance(device, str) else device)

    @torch.inference_mode(False)
    def set_kv_cache(self, batch_size: int, max_seq_length: int | None = None) -> None:
        """Makes the caches right for `batch_size` rows of up to `max_seq_length` columns, zero-filled.

        The memory is reused when the shape is the same. Old contents could not be seen in any case.
        """
        self.cache_version += 1
        try:
            for block in self.h:
                self._set_cache(block.attn, batch_size, max_seq_length or self.config.block_size)
        except RuntimeError:  # out of memory: no half of a cache stays behind
            self.clear_kv_cache()
            raise
        self.cache_epoch += 1
        self.set_row_length([0] * batch_size)

    def _set_cache(self, attn: CausalSelfAttention, batch_size: int, S: int) -> None:
        shape, cache = (batch_size, attn.n_query_groups, S, attn.head_size), attn.kv_cache
        same = (shape, attn.qkv.weight.device, self._compute_dtype())
        if cache is not None and (cache.k.shape, cache.k.device, cache.k.dtype) == same:
            cache.k.zero_()
            cache.v.zero_()
            cache.prefix = None
        else:
            attn.kv_cache = None  # the old memory goes before the new is taken
            attn.kv_cache = KVCache(*shape, dtype=self._compute_dtype(), device=attn.qkv.weight.device)

    @torch.inference_mode(False)
    def resize_kv_cache(self, batch_size: int, max_seq_length: int) -> None:
        """Gives the caches another shape and keeps what fits into it."""
        tensors = [x for cache in self._caches() for x in (cache.k, cache.v)]  # memory may have run out in between
        if all(x.shape[::2] == (batch_size, max_seq_length) for x in tensors):
            return
        self.cache_version += 1
        for cache in self._caches():
            cache.resize(batch_size, max_seq_length)

    def move_kv_cache(self, source: int, target: int, columns: slice = slice(None)) -> None:
        """Copies the keys and values of one row of the batch to another; a source of -1 means zeros."""
        for cache in self._caches():
            cache.move(source, target, columns)

    def set_row_length(self, length: Sequence[int]) -> None:
        """How long each row of the batch will get, (batch_size,): longrope chooses its table by it."""
        self.row_length = torch.tensor(length, dtype=torch.int64, device=self.wte.weight.device)

    def _caches(self) -> list[KVCache]:
        return [block.attn.kv_cache for block in self.h if block.attn.kv_cache is not None]

    @property
    def cache_bytes(self) -> int:
        """Memory of the caches, in bytes."""
        return sum(cache.k.nbytes + cache.v.nbytes for cache in self._caches())

    def clear_kv_cache(self) -> None:
        """Drops the caches and their memory."""
        self.cache_version += 1
        for block in self.h:
            block.attn.kv_cache = None
        self.row_length, self.mask_cache = None, {}
        if self.loras is not None:
            self.loras.set_rows(None)

    def forward(
        self,
        idx: Tensor,
        input_pos: Tensor | None = None,
        last: Tensor | None = None,
        *,
        rows: slice | Tensor | None = None,
        span: int | None = None,
    ) -> Tensor:
        """Logits of a batch.

            model(idx)                     training: causal, no cache
            model(idx, rows=slice(2, 3))   the same, and keys and values are kept in cache row 2: a fresh prompt
            model(idx, input_pos)          goes on from what the cache holds
            model(idx, input_pos, rows=t)  the same for tokens of several rows, one after the other (`by_token` only)

        Args:
            idx: (B, T) int64 token ids. Rows that are shorter are padded on the right, with any id. (Rows of a longrope
                model take a table by their length, which is `last` + 1 if `last` is given, else T.)
            input_pos: (B, T) int64, each token's position in its row's text, which is also its cache column; -1 is
                padding, which writes nothing and sees nothing (`cache.positions` makes it of an attention_mask).
            last: (B,) int64, the column of idx whose logits are wanted in each row; None gives all of them. It may be
                on the device of idx, or on that of the logits, where it is needed (`devices`).
            rows: the cache rows of this call, B of them; None is the first B. Or, with B = 1, the cache row of each
                token, (T,) int64; `last` is then (n,), the columns of idx whose logits are wanted.
            span: how many cache columns to look at, more than any position; None is all. It only saves time.

        Returns:
            (B, V) or (n, V) if `last` is given, else (B, T, V).
        """
        B, T = idx.shape
        if self.group_rows is not None and B >= 2 * self.group_rows and (input_pos is not None or rows is not None):
            return self._in_groups(idx, input_pos, last, rows, span)
        position = torch.arange(T, device=idx.device)[None] if input_pos is None else input_pos  # (1 or B, T)
        step = self._step(idx, input_pos, rows, span)
        by_token = step is not None and step.row is not None
        ropes = self._rope_rows(position.expand(B, T) if by_token else position, last, step)
        self.mask_cache = self._masks(position, step)
        if not by_token:
            return self.run_layers(idx, ropes, self.mask_cache, step, last)
        # As one row, so that there are few different shapes: (1, B * T).
        ropes = [(cos.flatten(0, 1)[None], sin.flatten(0, 1)[None]) for cos, sin in ropes]
        if last is not None:
            last = last.contiguous() if isinstance(step.rows, Tensor) else torch.arange(B) * T + last
        logits = self.run_layers(idx.reshape(1, B * T), ropes, {}, step, last)
        return logits.view(B, T, -1) if last is None else logits

    def _in_groups(
        self, idx: Tensor, input_pos: Tensor | None, last: Tensor | None, rows: slice | None, span: int | None
    ) -> Tensor:
        """`forward` of some rows after others: devices that share the layers work on them at the same time."""
        B, n_rows = len(idx), self.h[0].attn.kv_cache.k.size(0)
        last = None if last is None else last.to(self.devices[1])  # now, while no device has to be waited for
        rows, n, logits = range(B) if rows is None else range(n_rows)[rows], B // self.group_rows, []
        for start, stop in ((i * B // n, (i + 1) * B // n) for i in range(n)):
            some = [None if tensor is None else tensor[start:stop] for tensor in (idx, input_pos, last)]
            own = rows[start:stop]
            logits.append(self(*some, rows=slice(own.start, own.stop, own.step), span=span))
        return torch.cat(logits)

    def run_layers(
        self,
        idx: Tensor,
        ropes: list[tuple[Tensor, Tensor]],
        masks: dict[str, Tensor | None],
        step: Step | None,
        last: Tensor | None,
    ) -> Tensor:
        """The part of `forward` that is the same for all calls, and that may be compiled."""
        if self.loras is not None:
            self.loras.enter(step, last)
        x = self.wte(idx)  # (B, T, C)
        if self.config.embedding_scale != 1.0:  # rounded to the model's dtype first, as Gemma was trained
            x = x * x.new_tensor(self.config.embedding_scale)
        x = self.run_blocks(x, ropes, masks, step)
        if last is not None:
            # (B, C): one column per row reaches the head
            x = x[torch.arange(len(x), device=x.device), last.to(x.device)]
        logits = self.lm_head(self.ln_f(x))
        if self.config.logit_scale != 1.0:
            logits = logits * self.config.logit_scale
        if self.config.final_softcap is not None:
            logits = torch.tanh(logits / self.config.final_softcap) * self.config.final_softcap
        return logits

    def run_blocks(self, x: Tensor, *where: object) -> Tensor:
        """x (B, T, C) through all blocks; `pack_model` puts a `tape.Tape` here, which does the same."""
        for block in self.h:
            x = block(x, *where)
        return x

    def _step(self, idx: Tensor, input_pos: Tensor | None, rows: slice | None, span: int | None) -> Step | None:
        if input_pos is None and rows is None:
            return None
        cache = self.h[0].attn.kv_cache
        if cache is None:
            raise RuntimeError(
                "model(idx, input_pos) needs a cache: call model.set_kv_cache(batch_size, max_seq_length)"
            )
        (B, T), (n_rows, _, S, _) = idx.shape, cache.k.shape
        rows, span = slice(0, B) if rows is None else rows, span or S
        if isinstance(rows, Tensor):
            if not self.by_token or rows.shape != (T,) or B != 1 or input_pos is None:
                raise ValueError("rows (T,) need idx (1, T), input_pos and a model with kernels (`pack_model`)")
            if rows.min() < 0 or rows.max() >= n_rows:  # kernels do not look
                raise ValueError(f"rows {rows.min().item()} to {rows.max().item()} of a cache of {n_rows} rows")
        elif len(range(*rows.indices(n_rows))) != B:
            raise ValueError(f"{B} rows of tokens, but {rows} of a cache of {n_rows} rows")
        needed = T
        if input_pos is not None:  # a GPU would have to be waited for
            needed = int(input_pos.max()) + 1 if input_pos.device.type == "cpu" else 0
        if needed > S or span > S or (input_pos is not None and needed > span):
            raise ValueError(f"column {needed - 1} of a cache of {S} columns, of which {span} are looked at")
        if self.by_token:
            position = torch.arange(T).expand(B, T) if input_pos is None else input_pos
            rows = slice(*rows.indices(n_rows)) if isinstance(rows, slice) else rows
            return Step.of_tokens(position, rows, span, fresh=input_pos is None)
        return Step(rows, T, fresh=True) if input_pos is None else Step.at(input_pos, rows, span, cache)

    @property
    def devices(self) -> tuple[torch.device, torch.device]:
        """Where token ids come in, and where logits come out."""
        return self.wte.weight.device, self.lm_head.weight.device

    @property
    def on_cpu(self) -> bool:
        """Whether no part of the model is on a GPU."""
        return all(tensor.device.type == "cpu" for tensor in (*self.parameters(), *self.buffers()))

    @property
    def by_token(self) -> bool:
        """Whether kernels take the tokens of a call one by one, so that they may belong to any rows."""
        return self.h[0].attn.kernels is not None

    @property
    def adapters(self) -> list[str]:
        """The adapters that rows may ask for."""
        return [] if self.loras is None else self.loras.names

    def _compute_dtype(self) -> torch.dtype:
        device = self.wte.weight.device.type
        return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else self.wte.weight.dtype

    def _masks(self, position: Tensor, step: Step | None) -> dict[str, Tensor | None]:
        """One mask for each kind of layer; None where plain causal attention over the call's own tokens is right."""
        if step is not None and step.row is not None:  # kernels know what a position sees
            return {}
        fresh = step is None or step.fresh
        span = position.size(1) if step is None else step.span
        masks: dict[str, Tensor | None] = {}
        for kind in set(self.config.layer_types):
            if fresh and (kind == "full" or span <= self.config.window):
                masks[kind] = None
            else:
                masks[kind] = additive(visible(position, span, kind, self.config.window), self._compute_dtype())
        return masks

    def _rope_rows(self, position: Tensor, last: Tensor | None, step: Step | None) -> list[tuple[Tensor, Tensor]]:
        """cos and signed sin of each kind of rope for these positions: (B or 1, T, 1, n_elem) each.

        longrope has two tables, for short and for long rows. Which one a row uses is fixed by how long it will get
        (`row_length`, set by whoever admits it; without that, by how long it is now), never by its neighbours.
        """
        needed = position.size(1) if step is None else self.h[0].attn.kv_cache.k.size(2)
        tables = self._rope_tables(max(needed, position.size(1)), position.device)
        rows = []
        for rope, (cos, sin) in zip(self.config.ropes, tables, strict=True):  # (K, S, n_elem)
            if len(cos) == 1:
                cos, sin = cos[0, position], sin[0, position]  # (B or 1, T, n_elem)
            else:
                table = (self._lengths(position, last, step) > rope.original_max_seq_len).long()
                cos, sin = cos[table, position], sin[table, position]
            rows.append((cos[:, :, None], signed_sin(sin)[:, :, None]))
        dtype = self._compute_dtype()
        return [(cos.to(dtype), sin.to(dtype)) for cos, sin in rows]

    def _lengths(self, position: Tensor, last: Tensor | None, step: Step | None) -> Tensor:
        """How long each row gets, (B or 1, 1); of a call with a cache row for each token (1, T)."""
        if step is not None and isinstance(step.rows, Tensor):
            return self.row_length[step.rows][None]
        fresh = step is None or step.fresh
        length = last.to(position.device) + 1 if fresh and last is not None else position.amax(-1) + 1  # (B or 1,)
        return (length if step is None else torch.maximum(length, self.row_length[step.rows]))[:, None]

    def _rope_tables(self, length: int, device: torch.device) -> list[tuple[Tensor, Tensor]]:
        if not self._tables or self._tables[0][0].size(1) < length or self._tables[0][0].device != device:
            with torch.inference_mode(False):  # a table made in inference mode could not be used in training
                self._tables = [rope_table(rope, length, device) for rope in self.config.ropes]
        return self._tables

    @property
    def cos(self) -> Tensor:
        """(block_size, n_elem) float32, the cosines of the first kind of rope; for inspection."""
        return self._rope_tables(self.config.block_size, self.wte.weight.device)[0][0][0]
