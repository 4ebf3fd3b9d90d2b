"""torch.compile: the same tokens, and few graphs whatever lengths and numbers of rows come by."""

import pytest
import torch
from conftest import llama_config, needs_onednn_bfloat16, randomized
from test_generate_base import some_prompts
from torch._dynamo.utils import counters

from generate.base import generate
from lit_gen import linear, pack
from lit_gen.compiled import compile_model
from lit_gen.kernels import load_kernels
from lit_gen.model import GPT
from lit_gen.pack import pack_model
from lit_gen.settings import Request

pytestmark = pytest.mark.skipif(load_kernels() is None, reason="no C++ compiler, which torch.compile needs as well")


def tokens(model: GPT, prompts: list[list[int]], **how: object) -> list[list[int]]:
    requests = [Request(p, {"max_new_tokens": 3 + i % 7}) for i, p in enumerate(prompts)]
    return [row.tokens for row in sorted(generate(model, requests, **how), key=lambda row: row.index)]


def test_compiled_rows_are_the_eager_ones_and_nothing_is_compiled_again() -> None:
    """12 jobs of prompts of 5 to 16 tokens, 1 and 4 at a time: at most three graphs, none of them broken."""
    torch._dynamo.reset()
    counters.clear()
    eager = pack_model(randomized(llama_config()).bfloat16())
    compiled = compile_model(pack_model(randomized(llama_config()).bfloat16()))
    for seed in range(12):
        prompts = some_prompts(4, vocab=100, seed=seed)
        how = {"max_batch_size": 1 if seed % 2 else 4, "speculate": 2 * (seed % 3 == 0)}
        assert tokens(compiled, prompts, **how) == tokens(eager, prompts, **how)
    assert counters["stats"]["unique_graphs"] <= 3
    assert not counters["graph_break"]


@needs_onednn_bfloat16
def test_weights_packed_for_a_cpu_that_multiplies_16_bits_are_compiled_too(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (linear, pack):
        monkeypatch.setattr(module, "multiplies", lambda dtype: True)
    torch._dynamo.reset()
    eager, compiled = (pack_model(randomized(llama_config()).bfloat16()) for _ in range(2))
    assert isinstance(eager.h[0].mlp.fc, linear.PackedLinear)
    prompts = some_prompts(3, vocab=100, seed=5)
    assert tokens(compile_model(compiled), prompts) == tokens(eager, prompts)
