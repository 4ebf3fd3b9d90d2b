"""Blocks played back from a list of kernel calls: bit for bit what they give when they run, for any tokens."""

import copy
import threading
import weakref
from collections.abc import Callable, Iterator

import pytest
import torch
from conftest import llama_config, needs_onednn_bfloat16, randomized
from families import FAMILIES
from torch import Tensor, nn

from generate.base import generate
from lit_gen import GPT, linear, pack, tape
from lit_gen.kernels import Kernels, load_kernels
from lit_gen.pack import pack_model

pytestmark = pytest.mark.skipif(load_kernels() is None, reason="there is no C++ compiler, or LIT_GEN_KERNELS=0")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
PROMPTS = [[1, 2, 3], [50], [7, 8, 9, 10, 11, 12, 13]]
# Their blocks compute something that no kernel does: experts, clipped projections, weights for each head's norm.
NOT_PLAYED = {"mixtral", "qwen3_moe", "qwen3_moe-plain-weights", "stablelm-parallel", "olmo"}


@pytest.fixture(autouse=True)
def without_gradients():
    with torch.no_grad():
        yield


def calls(model: GPT, first: list[int]) -> Iterator[Tensor]:
    """Logits of a prompt, two prompts packed, and steps of one to five rows: fresh and later, in all orders.

    The first call, which is recorded, has tokens of these cache rows.
    """
    generator = torch.Generator().manual_seed(0)
    model.set_kv_cache(6, 64)
    model.set_row_length([40] * 6)
    for cache_rows in (first, [0] * 9, [1] * 2 + [3] * 17, [0], [3, 1, 0], [1], [0, 3, 1, 1, 1]):
        rows = torch.tensor(cache_rows)
        filled = [0] * 6 if len(set(cache_rows)) < 3 and len(rows) > 1 else [20] * 6
        position = []
        for row in cache_rows:
            position.append(filled[row])
            filled[row] += 1
        idx = torch.randint(100, (1, len(rows)), generator=generator)
        yield model(idx, torch.tensor([position]), torch.arange(len(rows)), rows=rows)


def assert_played_as_run(model: GPT) -> bool:
    """Runs each call twice, played back and not; whether the model can be played back."""
    usual, recorded = model.run_blocks, []
    for first in ([5], [5, 4], [2] * 7):
        played = [logits.clone() for logits in calls(model, first)]
        recorded.append(usual.recording is not None)
        model.run_blocks = usual._run
        for expected, logits in zip(calls(model, first), played, strict=True):
            assert torch.equal(logits, expected)
        model.run_blocks = usual
    assert len(set(recorded)) == 1
    return recorded[0]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FAMILIES)
def test_played_back_blocks_give_the_bits_of_blocks_that_run(family: Callable, name: str, dtype: torch.dtype) -> None:
    model = pack_model(copy.deepcopy(family(name).model).to(dtype))
    assert assert_played_as_run(model) == (name not in NOT_PLAYED)


@pytest.mark.parametrize("quantize", ["int8", "int4"])
def test_quantised_blocks_are_played_back(quantize: str) -> None:
    assert assert_played_as_run(pack_model(randomized(llama_config()), quantize))


@needs_onednn_bfloat16
@pytest.mark.parametrize("changes", [{}, {"pre_norm": False, "post_norm": True}])
def test_products_of_onednn_are_made_between_the_calls(changes: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (linear, pack):
        monkeypatch.setattr(module, "multiplies", lambda dtype: True)  # as on a CPU with AMX
    model = pack_model(randomized(llama_config(**changes)).bfloat16())
    assert isinstance(model.h[0].mlp.fc, linear.PackedLinear)
    assert assert_played_as_run(model)


def tokens(model: GPT, prompts: list[list[int]]) -> list[list[int]]:
    return [row.tokens for row in sorted(generate(model, prompts, max_new_tokens=6), key=lambda row: row.index)]


def test_a_hook_is_called_in_every_step() -> None:
    model, seen = pack_model(randomized(llama_config())), []
    next(generate(model, [[1, 2, 3]], max_new_tokens=2))
    handle = model.h[1].mlp.fc.register_forward_hook(lambda module, args, out: seen.append(out.shape))
    [row] = generate(model, [[1, 2, 3]], max_new_tokens=5)
    assert len(seen) == 5
    handle.remove()
    assert tokens(model, [[1, 2, 3]])[0][:5] == row.tokens and len(seen) == 5


def test_a_layer_that_was_swapped_is_used_by_the_next_generation() -> None:
    model, prompts = pack_model(randomized(llama_config())), PROMPTS
    before = tokens(model, prompts)
    other = pack_model(randomized(llama_config(), seed=1))
    model.h[1].mlp.fc = other.h[1].mlp.fc
    changed = tokens(model, prompts)
    assert changed != before
    plain = randomized(llama_config())
    plain.h[1].mlp.fc.weight.copy_(randomized(llama_config(), seed=1).h[1].mlp.fc.weight)
    assert changed == tokens(plain, prompts)


def test_recording_holds_no_more_for_a_long_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Results of all layers are held while calls are noted: of a prompt of thousands of tokens that would be GB."""
    held = []

    class Weighed(tape.Recording):
        def __init__(self, kernels: Kernels, calls: list[tuple], *others: object) -> None:
            held.append(sum(call[-1].nbytes for call in calls))
            super().__init__(kernels, calls, *others)

    monkeypatch.setattr(tape, "Recording", Weighed)
    for n in (1, 2, 200):
        model = pack_model(randomized(llama_config()))
        model.set_kv_cache(1, 256)
        model(torch.arange(n)[None], rows=slice(0, 1))
    assert len(held) == 3 and len(set(held)) == 1


def test_what_was_recorded_serves_later_generations_of_any_size() -> None:
    model = pack_model(randomized(llama_config()))
    expected = [tokens(model, [prompt])[0] for prompt in PROMPTS]
    recording = model.run_blocks.recording
    longer = [[*prompt, *range(90)] for prompt in PROMPTS * 3]  # a larger cache, elsewhere in memory
    plain = randomized(llama_config())
    assert tokens(model, longer) == tokens(plain, longer)
    assert tokens(model, PROMPTS) == expected == tokens(plain, PROMPTS)
    assert model.run_blocks.recording is recording is not None


def test_a_number_that_was_changed_is_used_by_the_next_generation() -> None:
    model, plain = pack_model(randomized(llama_config())), randomized(llama_config())
    before = tokens(model, PROMPTS)
    for block in (*model.h, *plain.h):
        block.attn.scale *= 3
    assert tokens(model, PROMPTS) == tokens(plain, PROMPTS) != before


def test_a_block_that_computes_with_pytorch_is_never_played_back() -> None:
    class Doubled(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x).mul_(2)  # in place: what comes out lies where a kernel's result did

    model = pack_model(randomized(llama_config()))
    model.h[0].mlp = Doubled(model.h[0].mlp)
    assert not assert_played_as_run(model)


def test_a_copy_has_weights_of_its_own() -> None:
    model, prompts = pack_model(randomized(llama_config())), PROMPTS
    expected = tokens(model, prompts)
    twin = copy.deepcopy(model)
    assert twin.run_blocks.recording is None  # it has addresses of the other's weights
    for block in model.h:
        block.mlp.proj.weight.zero_()
    assert tokens(twin, prompts) == expected != tokens(model, prompts)


def test_what_a_hook_did_is_not_recorded() -> None:
    model, other = pack_model(randomized(llama_config())), pack_model(randomized(llama_config(), seed=1))
    expected = tokens(pack_model(randomized(llama_config())), PROMPTS)
    handle = model.h[0].mlp.register_forward_hook(lambda module, args, out: other.h[0].mlp(*args))
    assert tokens(model, PROMPTS) != expected
    handle.remove()
    assert tokens(model, PROMPTS) == expected


def test_a_global_hook_is_called_too() -> None:
    model, seen = pack_model(randomized(llama_config())), set()
    tokens(model, PROMPTS)
    handle = nn.modules.module.register_module_forward_hook(lambda module, args, out: seen.add(module))
    tokens(model, PROMPTS)
    handle.remove()
    assert model.h[1].mlp.fc in seen


def step_of(model: GPT) -> Tensor:
    """Logits of a prompt in the caches as they are."""
    return model(torch.tensor([[1, 2, 3]]), torch.arange(3)[None])


def test_each_autocast_dtype_is_recorded_by_itself() -> None:
    model = pack_model(randomized(llama_config()).bfloat16())
    usual, logits = model.run_blocks, {}
    for how in (usual, usual._run):
        model.run_blocks = how
        for dtype in (torch.bfloat16, torch.float16):
            with torch.autocast("cpu", dtype=dtype):
                model.set_kv_cache(1, 16)
                logits[how is usual, dtype] = step_of(model)
    assert all(torch.equal(logits[True, dtype], logits[False, dtype]) for dtype in (torch.bfloat16, torch.float16))


def test_caches_of_another_dtype_are_not_written_to() -> None:
    model = pack_model(randomized(llama_config()))
    model.set_kv_cache(1, 16)
    step_of(model)
    assert model.run_blocks.recording is not None
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model.set_kv_cache(1, 16)
    with pytest.raises(AssertionError, match="one dtype"):
        step_of(model)


def test_caches_that_were_put_aside_are_used_again() -> None:
    model = pack_model(randomized(llama_config()))
    model.set_kv_cache(1, 16)
    expected = step_of(model)
    kept = [block.attn.kv_cache for block in model.h]
    for block in model.h:
        block.attn.kv_cache = None
    model.set_kv_cache(1, 16)
    model(torch.tensor([[7, 8, 9]]), torch.arange(3)[None])
    for block, cache in zip(model.h, kept, strict=True):
        block.attn.kv_cache = cache
    step, at = torch.tensor([[4]]), torch.tensor([[3]])
    played, model.run_blocks = model(step, at), model.run_blocks._run
    assert torch.equal(played, model(step, at)) and torch.equal(step_of(model), expected)


def test_memory_is_given_back_at_once() -> None:
    model = pack_model(randomized(llama_config()))
    model.set_kv_cache(1, 16)
    step_of(model), step_of(model)
    cache, gone = weakref.ref(model.h[0].attn.kv_cache.k), weakref.ref(model)
    model.clear_kv_cache()
    assert cache() is None
    del model
    assert gone() is None


def test_results_of_two_threads_do_not_meet() -> None:
    model = pack_model(randomized(llama_config()))
    model.set_kv_cache(2, 64)
    idx, wrong = torch.randint(100, (2, 40), generator=torch.Generator().manual_seed(0)), []
    expected = [model(idx[r : r + 1], rows=slice(r, r + 1)) for r in range(2)]

    def work(r: int) -> None:
        with torch.no_grad():
            for _ in range(60):
                wrong.append(not torch.equal(model(idx[r : r + 1], rows=slice(r, r + 1)), expected[r]))

    threads = [threading.Thread(target=work, args=(r,)) for r in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(wrong) == 120 and not any(wrong)


def test_rows_and_positions_of_any_kind_mean_the_same() -> None:
    model, idx = pack_model(randomized(llama_config())), torch.tensor([[1, 2, 3], [4, 5, 6]])
    at = torch.arange(3).expand(2, 3)
    model.set_kv_cache(4, 16)
    expected = model(idx, at, rows=slice(1, 4, 2))
    written = model.h[0].attn.kv_cache.k[:, 0, 0].any(-1)
    assert written.tolist() == [False, True, False, True]
    assert torch.equal(model(idx, at.int(), rows=slice(-2, None)), expected)
    rows = torch.tensor([2, 2, 2, 3, 3, 3]).int()
    assert torch.equal(model(idx.view(1, 6), at.int().reshape(1, 6), rows=rows).view_as(expected), expected)
