"""The model: equal to transformers for every family, each row of a batch equal to the row alone, every switch alive."""

from collections.abc import Callable
from dataclasses import fields, replace

import pytest
import torch
from conftest import Family, llama_config, randomized
from families import FAMILIES
from torch import Tensor

from lit_gen.cache import rectangle
from lit_gen.config import Config, Rope
from lit_gen.model import GPT

Make = Callable[[str], Family]


def ids(*lengths: int, vocab: int = 128, seed: int = 0) -> list[list[int]]:
    """Prompts of these lengths with different contents; id 0, the usual padding, is among them."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, vocab, (n,), generator=generator).tolist() for n in lengths]


@torch.no_grad()
def stepwise(model: GPT, prompts: list[list[int]], then: list[list[int]], side: str | None = None) -> list[Tensor]:
    """Logits (1 + len(then), V) of each row: those after its prompt, and after each token of `then`, fed one by one."""
    total = [len(p) + len(t) for p, t in zip(prompts, then, strict=True)]
    model.set_kv_cache(len(prompts), max(total))
    model.row_length.copy_(torch.tensor(total))
    if side is None:
        first = [
            model(torch.tensor([p]), last=torch.tensor([len(p) - 1]), rows=slice(b, b + 1))
            for b, p in enumerate(prompts)
        ]
        logits = [torch.cat(first)]
    else:
        idx, input_pos, last = rectangle(prompts, side)
        logits = [model(idx, input_pos, last)]
    for step in range(len(then[0])):
        idx = torch.tensor([row[step : step + 1] for row in then])
        position = torch.tensor([[len(p) + step] for p in prompts])
        logits.append(model(idx, position, torch.zeros(len(prompts), dtype=torch.int64)))
    return list(torch.stack(logits, dim=1))


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("T", [24, 48])  # longer than the windows of 8; up to and beyond longrope's 32
def test_logits_equal_transformers(family: Make, name: str, T: int) -> None:
    hf, model, _ = family(name)
    idx = torch.tensor(ids(T, T))
    with torch.no_grad():
        expected, logits = hf(idx, use_cache=False).logits, model(idx)
    assert (logits - expected).abs().max() <= 1e-4 * expected.abs().max()


@pytest.mark.parametrize("name", FAMILIES)
def test_prefill_and_steps_equal_transformers(family: Make, name: str) -> None:
    hf, model, _ = family(name)
    (text,) = ids(48, seed=1)
    with torch.no_grad():
        expected = hf(torch.tensor([text]), use_cache=False).logits[0, 35:]
    logits = stepwise(model, [text[:36]], [text[36:]])[0]
    assert (logits - expected).abs().max() <= 1e-4 * expected.abs().max()


@pytest.mark.parametrize("name", FAMILIES)
def test_row_of_a_batch_equals_the_row_alone(family: Make, name: str) -> None:
    """3 tokens beside 400, windows of 8 that are shorter than the padding, and prompts that hold the padding's id."""
    model = family(name).model
    prompts, then = ids(3, 400, 37, 1), ids(6, 6, 6, 6, seed=2)
    alone = [stepwise(model, [p], [t])[0] for p, t in zip(prompts, then, strict=True)]
    for side in (None, "left", "right"):
        for row, expected in zip(stepwise(model, prompts, then, side), alone, strict=True):
            assert (row - expected).abs().max() <= 1e-4
            assert torch.equal(row.argmax(-1), expected.argmax(-1))


# Field -> a family that has it, and a value it must notice. Fields of Rope are named "ropes.<field>".
MUTANTS: dict[str, tuple[str, object]] = {
    "norm": ("llama", "layer"),
    "norm_eps": ("llama", 0.1),
    "norm_offset": ("gemma", False),
    "norm_affine": ("olmo", True),
    "norm_bias": ("gpt_neox", False),
    "pre_norm": ("olmo2", True),
    "post_norm": ("gemma2", False),
    "parallel_residual": ("gpt_neox", False),
    "shared_norm": ("phi", False),
    "qkv_bias": ("qwen2", False),
    "proj_bias": ("phi", False),
    "qk_norm": ("qwen3", None),
    "qk_norm_bias": ("phi-qk-norm", False),
    "clip_qkv": ("olmo", None),
    "attn_scale": ("gemma2", None),
    "attn_softcap": ("gemma2", None),
    "layer_types": ("gemma3_text", ["full"] * 4),
    "window": ("mistral-window", 9),
    "ropes": ("gpt_neox", [Rope()]),
    "rope_layers": ("smollm3", [0] * 4),
    "gated": ("llama", False),
    "act": ("gpt_neox", "gelu_tanh"),
    "mlp_bias": ("gpt_neox", False),
    "moe_layers": ("qwen3_moe", [True] * 4),
    "n_expert": ("mixtral", 7),
    "n_expert_per_token": ("mixtral", 3),
    "moe_intermediate_size": ("mixtral", 95),
    "norm_topk": ("qwen3_moe-plain-weights", True),
    "tie_embeddings": ("llama", True),
    "lm_head_bias": ("phi", False),
    "embedding_scale": ("gemma", 1.0),
    "residual_scale": ("granite", 1.0),
    "logit_scale": ("granite", 1.0),
    "final_softcap": ("gemma2", None),
    "vocab_size": ("llama", 127),
    "n_layer": ("llama", 3),
    "n_embd": ("llama", 60),
    "n_head": ("llama", 2),
    "n_query_groups": ("llama", 4),
    "head_size": ("llama", 8),
    "intermediate_size": ("llama", 95),
    "ropes.base": ("llama", 5000.0),
    "ropes.n_elem": ("gpt_neox", 8),
    "ropes.kind": ("llama3", "default"),
    "ropes.factor": ("llama-linear", 2.0),
    "ropes.original_max_seq_len": ("llama3", 32),
    "ropes.attention_factor": ("llama-yarn", 1.5),
    "ropes.low_freq_factor": ("llama3", 2.0),
    "ropes.high_freq_factor": ("llama3", 9.0),
    "ropes.beta_fast": ("llama-yarn", 2.0),
    "ropes.beta_slow": ("llama-yarn", 0.1),
    "ropes.mscale": ("llama-yarn-mscale", 0.5),
    "ropes.mscale_all_dim": ("llama-yarn-mscale", 2.0),
    "ropes.truncate": ("llama-yarn-mscale", True),
    "ropes.short_factor": ("phi3-longrope", [1.0] * 8),
    "ropes.long_factor": ("phi3-longrope", [1.0] * 8),
    "ropes.factors": ("llama-factors", [1.0] * 8),
}
# model_type only names tensors, and block_size only limits lengths: neither is part of the maths.
NOT_MATHS = {"model_type", "block_size"}


def test_the_mutants_cover_every_field_of_the_config() -> None:
    names = {f.name for f in fields(Config)} | {f"ropes.{f.name}" for f in fields(Rope)}
    assert names - NOT_MATHS == set(MUTANTS)


@pytest.mark.parametrize("field", MUTANTS)
def test_a_wrong_switch_does_not_go_unnoticed(family: Make, field: str) -> None:
    """Either the weights no longer fit, or the logits leave transformers' by more than the tests above allow."""
    name, value = MUTANTS[field]
    base = "llama" if name == "llama-factors" else name
    hf, model, _ = family(base)
    config = model.config
    if name == "llama-factors":  # a kind that only GGUF files have; its reference is made of the plain kind
        config = replace(config, ropes=[replace(config.ropes[0], kind="factors", factors=[1.0 + i for i in range(8)])])
        hf = load(config, model)
    changed = replace(config, ropes=[replace(r, **{field[6:]: value}) for r in config.ropes]) if "." in field else None
    try:
        mutant = load(changed or replace(config, **{field: value}), model)
    except (RuntimeError, ValueError):  # shapes or names do not fit
        return
    worst = 0.0
    for T in (24, 48):
        idx = torch.tensor(ids(T, T))
        with torch.no_grad():
            expected = hf(idx, use_cache=False).logits if base == name else hf(idx)
            worst = max(worst, ((mutant(idx) - expected).abs().max() / expected.abs().max()).item())
    assert not worst <= 1e-4


def load(config: Config, model: GPT) -> GPT:
    mutant = GPT(replace(config)).eval()
    mutant.load_state_dict(model.state_dict())
    if mutant.config.tie_embeddings != model.config.tie_embeddings and mutant.config.tie_embeddings:
        mutant.lm_head.weight = mutant.wte.weight
    return mutant


def test_positions_of_a_left_padded_row_count_from_its_first_token(tiny_llama: GPT) -> None:
    """huggingface/transformers#18388: one position vector for all rows hides in float32 and degrades bfloat16."""
    model, prompts = tiny_llama.bfloat16(), ids(3, 7, vocab=512)
    seen = []
    hook = model.h[0].register_forward_pre_hook(lambda _, args: seen.append(args[1][0]))
    with torch.no_grad():
        stepwise(model, prompts, [[5], [6]], "left")
        stepwise(model, prompts[:1], [[5]])
    hook.remove()
    (cos, sin), (step_cos, _), (alone_cos, alone_sin), (alone_step_cos, _) = seen
    assert torch.equal(cos[0, 4], torch.ones_like(cos[0, 4]))  # the first real token stands at position 0
    assert torch.equal(cos[0, 4:], alone_cos[0]) and torch.equal(sin[0, 4:], alone_sin[0])
    assert torch.equal(step_cos[0], alone_step_cos[0])  # and the first new one at 3


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_padding_never_makes_nan(tiny_llama: GPT, side: str, dtype: torch.dtype) -> None:
    """pytorch/pytorch#103749: a query that sees nothing must not turn into NaN and spread."""
    model, prompts = tiny_llama.to(dtype), ids(1, 9, vocab=512)
    values = []
    for block in model.h:
        block.register_forward_hook(lambda _, __, out: values.append(out))
    idx, input_pos, last = rectangle(prompts, side)
    with torch.no_grad():
        model.set_kv_cache(2, 10)
        values.append(model(idx, input_pos, last))
    values += [t for block in model.h for t in (block.attn.kv_cache.k, block.attn.kv_cache.v)]
    assert all(t.isfinite().all() for t in values)


def test_steps_after_a_padded_prefill_do_not_see_the_padding(tiny: GPT) -> None:
    """huggingface/transformers#30670: the mask was right at prefill and missing in every step after it."""
    prompts, then = ids(2, 12, vocab=512), ids(16, 16, vocab=512, seed=3)
    for side in ("left", "right"):
        for row, p, t in zip(stepwise(tiny, prompts, then, side), prompts, then, strict=True):
            assert (row - stepwise(tiny, [p], [t])[0]).abs().max() <= 1e-4


def test_result_does_not_depend_on_the_size_of_the_cache(tiny: GPT) -> None:
    """huggingface/transformers#30414: zero keys beyond the written end took part in attention."""
    (prompt,), results = ids(5, vocab=512), []
    for size in (13, 64, 256):
        tiny.set_kv_cache(1, size)
        logits = [tiny(torch.tensor([prompt]), last=torch.tensor([4]), rows=slice(0, 1))]
        for position in range(5, 12):
            token = logits[-1].argmax(-1, keepdim=True)
            logits.append(tiny(token, torch.tensor([[position]]), torch.tensor([0])))
        results.append(torch.cat(logits))
    assert all((r - results[0]).abs().max() <= 1e-5 for r in results)


def test_prefill_in_chunks_equals_prefill_at_once(tiny: GPT) -> None:
    """pytorch/pytorch#108108: is_causal with fewer queries than keys aligns the triangle at the wrong corner."""
    (prompt,) = ids(12, vocab=512)
    tiny.set_kv_cache(1, 12)
    whole, chunks = tiny(torch.tensor([prompt]), rows=slice(0, 1)), []
    for start, stop in ((0, 5), (5, 10), (10, 12)):
        chunks.append(tiny(torch.tensor([prompt[start:stop]]), torch.arange(start, stop)[None]))
    assert (torch.cat(chunks, dim=1) - whole).abs().max() <= 1e-5


@pytest.mark.parametrize("side", ["left", "right"])
def test_what_stands_in_the_padding_does_not_matter(tiny: GPT, side: str) -> None:
    """torchtune#947: padding was found by its id, so a prompt that held that id lost a token."""
    prompts, results = ids(1, 2, 5, 9, 9, vocab=512), []
    idx, input_pos, last = rectangle(prompts, side)
    for pad in (0, 2, 511, prompts[3][0]):
        tiny.set_kv_cache(5, 10)
        results.append(tiny(torch.where(input_pos < 0, pad, idx), input_pos, last))
        more = tiny(torch.full((5, 1), 7), (input_pos.amax(1) + 1)[:, None], torch.zeros(5, dtype=torch.int64))
        results[-1] = torch.stack((results[-1], more))
    assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.parametrize("chunked", [False, True])
def test_windows_count_positions_not_columns_of_padding(chunked: bool) -> None:
    kinds = ["chunked" if chunked else "sliding", "full"]
    model = randomized(llama_config(layer_types=kinds, window=4))
    prompts, then = ids(9, 2, 30, vocab=512), ids(9, 9, 9, vocab=512, seed=3)
    for side in ("left", "right"):
        for row, p, t in zip(stepwise(model, prompts, then, side), prompts, then, strict=True):
            text = torch.tensor([p + t])
            assert (row - model(text)[0, len(p) - 1 :]).abs().max() <= 1e-4  # no cache, no padding


def test_rope_tables_are_float32_in_a_bfloat16_model() -> None:
    """huggingface/transformers#25681: bfloat16 positions above 256 fall together."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)  # what Fabric does while it builds a bf16-true model
    try:
        model = GPT(llama_config(block_size=1024)).to(torch.bfloat16)
        cos = model.cos
    finally:
        torch.set_default_dtype(before)
    assert cos.dtype == torch.float32 and len(cos.unique(dim=0)) == 1024
    assert abs(cos[257, 0].item() - 0.819306) < 1e-6


@pytest.mark.parametrize("name", ["phi3-longrope"])
def test_a_short_row_keeps_its_rope_table_beside_a_row_that_outgrows_it(family: Make, name: str) -> None:
    """transformers takes the table by the longest row of the batch, so a short row changes with its neighbours."""
    hf, model, _ = family(name)
    prompts, then = ids(10, 30), ids(8, 8, seed=5)  # 18 tokens in all, and 38: longer than the 32 of the short table
    for row, p, t in zip(stepwise(model, prompts, then), prompts, then, strict=True):
        expected = hf(torch.tensor([p + t]), use_cache=False).logits[0, len(p) - 1 :]
        assert (row - expected).abs().max() <= 1e-4 * expected.abs().max()


def test_a_cache_is_right_whatever_was_in_it_before(tiny: GPT) -> None:
    """litgpt#1595: the second prompt saw the first one's keys."""
    p1, p2, p3 = ids(40, 4, 90, vocab=512)
    expected = {tuple(p): tiny(torch.tensor([p]))[0, -1] for p in (p1, p2, p3)}

    def last_logits(prompt: list[int]) -> Tensor:
        return tiny(torch.tensor([prompt]), torch.arange(len(prompt))[None], torch.tensor([len(prompt) - 1]))[0]

    for prepare in ("set", "clear and set", "neither"):
        tiny.set_kv_cache(1, 128)
        for prompt in (p1, p2, p1, p3):
            if prepare == "clear and set":
                tiny.clear_kv_cache()
            if prepare != "neither":
                tiny.set_kv_cache(1, 128)
            assert (last_logits(prompt) - expected[tuple(prompt)]).abs().max() <= 1e-4
    for block in tiny.h:  # large and finite: a weight of 0 times NaN would be NaN
        block.attn.kv_cache.k.fill_(1e6)
        block.attn.kv_cache.v.fill_(1e6)
    assert (last_logits(p2) - expected[tuple(p2)]).abs().max() <= 1e-4


@pytest.mark.parametrize("side", ["left", "right"])
def test_no_mask_of_an_earlier_batch_is_used(tiny: GPT, side: str) -> None:
    """A padding mask that is rebuilt only when the length changes goes stale for the next batch of that length."""
    for lengths in ([2, 8, 8], [8, 2, 8], [8], [5, 1, 4, 5]):
        prompts, then = ids(*lengths, vocab=512, seed=len(lengths)), ids(*[4] * len(lengths), vocab=512)
        for row, p, t in zip(stepwise(tiny, prompts, then, side), prompts, then, strict=True):
            assert (row - tiny(torch.tensor([p + t]))[0, len(p) - 1 :]).abs().max() <= 1e-4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_cache_has_the_dtype_of_the_activations(tiny_llama: GPT, dtype: torch.dtype) -> None:
    model = tiny_llama.to(dtype)
    stepwise(model, ids(3, 5, vocab=512), [[1, 2], [3, 4]])
    assert {block.attn.kv_cache.k.dtype for block in model.h} == {dtype}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("inside", [True, False])
def test_cache_follows_autocast(tiny_llama: GPT, dtype: torch.dtype, inside: bool) -> None:
    """lit-llama#468: mixed precision met a cache of another dtype. `inside`: is the cache made under autocast?"""
    (text,) = ids(9, vocab=512)
    with torch.autocast("cpu", dtype):
        expected = tiny_llama(torch.tensor([text]))[0]
        if inside:
            tiny_llama.set_kv_cache(1, 9)
    if not inside:
        tiny_llama.set_kv_cache(1, 9)
    with torch.autocast("cpu", dtype):
        logits = [tiny_llama(torch.tensor([text[:5]]), rows=slice(0, 1))[0]]
        logits += [tiny_llama(torch.tensor([[text[i]]]), torch.tensor([[i]]))[0] for i in range(5, 9)]
    assert {block.attn.kv_cache.k.dtype for block in tiny_llama.h} == {dtype}
    assert torch.equal(torch.cat(logits).argmax(-1), expected.argmax(-1))
    assert (torch.cat(logits) - expected).abs().max() <= 0.15  # 16-bit rounding of logits around 6


def test_cached_equals_uncached(tiny: GPT) -> None:
    """torchtune#959: the causal mask existed on the cached path only."""
    prompts, then = ids(3, 7, vocab=512), ids(12, 12, vocab=512, seed=1)
    for row, p, t in zip(stepwise(tiny, prompts, then), prompts, then, strict=True):
        for step in range(len(t) + 1):
            uncached = tiny(torch.tensor([p + t[:step]]))[0, -1]
            assert (row[step] - uncached).abs().max() <= 1e-4


def test_input_pos_without_a_cache_is_refused(tiny_llama: GPT) -> None:
    with pytest.raises(RuntimeError, match="set_kv_cache"):
        tiny_llama(torch.tensor([[1]]), torch.tensor([[0]]))


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_grouped_keys_are_cached_unexpanded_and_rows_stay_equal(groups: int) -> None:
    model = randomized(llama_config(n_query_groups=groups))
    prompts, then = ids(3, 11, vocab=512), ids(5, 5, vocab=512, seed=1)
    rows = stepwise(model, prompts, then, "left")
    assert model.cache_bytes == 2 * 2 * groups * 16 * 4 * 2 * 16  # layers, k and v, groups, hs, bytes, rows, columns
    for row, p, t in zip(rows, prompts, then, strict=True):
        assert (row - model(torch.tensor([p + t]))[0, len(p) - 1 :]).abs().max() <= 1e-4


def test_cache_of_smollm2_takes_23040_bytes_a_token() -> None:
    sizes = {"n_layer": 30, "n_head": 9, "n_query_groups": 3, "n_embd": 576, "head_size": 64, "vocab_size": 64}
    model = GPT(Config(**sizes, intermediate_size=8, block_size=8192)).bfloat16()
    model.set_kv_cache(25, 512)
    allocated = sum(t.nbytes for t in model.buffers())
    assert model.cache_bytes == allocated == 294_912_000 == 25 * 512 * 23_040
    model.clear_kv_cache()
    assert model.cache_bytes == 0


def test_step_mask_of_64_rows_of_8192_columns_stays_below_4_mib(tiny_llama: GPT) -> None:
    model = randomized(llama_config(n_layer=1, block_size=8192)).bfloat16()
    model.set_kv_cache(64, 8192)
    model(torch.ones(64, 1, dtype=torch.int64), torch.full((64, 1), 8191), torch.zeros(64, dtype=torch.int64))
    masks = [mask for mask in model.mask_cache.values() if mask is not None]
    assert [tuple(mask.shape) for mask in masks] == [(64, 1, 1, 8192)]
    assert sum(mask.nbytes for mask in masks) <= 4 * 2**20


def test_head_runs_on_one_column_per_row(tiny_llama: GPT) -> None:
    idx, seen = torch.tensor(ids(9, 9, vocab=512)), []
    tiny_llama.lm_head.register_forward_pre_hook(lambda _, args: seen.append(tuple(args[0].shape)))
    last = torch.tensor([2, 8])
    picked, full = tiny_llama(idx, last=last), tiny_llama(idx)
    assert seen[0] == (2, 64) and (picked - full[[0, 1], last]).abs().max() <= 1e-5


def test_training_works_beside_a_cache_and_after_inference_mode(tiny: GPT) -> None:
    """flash-attention#299: tables that were cached in inference mode broke the backward pass."""
    with torch.inference_mode():
        stepwise(tiny, ids(3, 5, vocab=512), [[1], [2]])
    tiny.requires_grad_(True).train()
    loss = torch.nn.functional.cross_entropy(tiny(torch.tensor(ids(8, 8, vocab=512))).flatten(0, 1), torch.arange(16))
    loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in tiny.parameters())


def test_columns_and_rows_outside_the_cache_are_refused(tiny_llama: GPT) -> None:
    """The flat write would otherwise land in another head or row."""
    tiny_llama.set_kv_cache(2, 8)
    one, two = torch.tensor([[5]]), torch.tensor([[5], [6]])
    for call in (
        lambda: tiny_llama(two, torch.tensor([[8], [1]])),
        lambda: tiny_llama(two, torch.tensor([[4], [1]]), span=4),
        lambda: tiny_llama(two, torch.tensor([[4], [1]]), span=9),
        lambda: tiny_llama(one, torch.tensor([[0]]), rows=slice(0, 2)),
        lambda: tiny_llama(torch.ones(3, 1, dtype=torch.int64), torch.zeros(3, 1, dtype=torch.int64)),
        lambda: tiny_llama(torch.ones(1, 9, dtype=torch.int64), rows=slice(0, 1)),
    ):
        with pytest.raises(ValueError, match="cache of"):
            call()


@pytest.mark.parametrize("kind", ["head", "per_head", "full"])
def test_qk_norms_work_under_autocast(kind: str) -> None:
    from conftest import neox_config

    model, (text,) = randomized(neox_config(qk_norm=kind)), ids(9, vocab=512)
    with torch.autocast("cpu", torch.bfloat16), torch.inference_mode():
        expected = model(torch.tensor([text]))[0]
        model.set_kv_cache(1, 9)
        logits = [model(torch.tensor([text[:5]]), rows=slice(0, 1))[0]]
        logits += [model(torch.tensor([[text[i]]]), torch.tensor([[i]]))[0] for i in range(5, 9)]
    assert (torch.cat(logits) - expected).abs().max() <= 0.15
    model.set_kv_cache(1, 9)  # after inference mode, in float32 again
    with torch.no_grad():
        model(torch.tensor([text]), rows=slice(0, 1))
    assert model.h[0].attn.kv_cache.k.dtype == torch.float32


def test_a_reused_cache_is_zero_filled(tiny_llama: GPT) -> None:
    """A masked column has weight 0, and 0 times an old NaN would be NaN."""
    tiny_llama.set_kv_cache(1, 8)
    for block in tiny_llama.h:
        block.attn.kv_cache.k.fill_(float("nan"))
    tiny_llama.set_kv_cache(1, 8)
    assert tiny_llama(torch.tensor([[5]]), torch.tensor([[0]])).isfinite().all()


def test_the_scale_of_embeddings_is_rounded_to_the_dtype_of_the_model() -> None:
    """Gemma multiplies by sqrt(3072) = 55.43 rounded to bfloat16, 55.5."""
    model = randomized(llama_config(embedding_scale=3072**0.5)).bfloat16()
    seen = []
    model.h[0].register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    model(torch.tensor([[5, 6]]))
    assert torch.equal(seen[0], model.wte.weight[[5, 6]][None] * torch.tensor(55.5, dtype=torch.bfloat16))
