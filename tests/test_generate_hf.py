"""generate/hf.py: transformers' searches over our model give the ids of its own model, and leave nothing behind."""

import copy
import json
from collections.abc import Callable, Iterator
from functools import partial
from inspect import signature
from pathlib import Path

import pytest
import torch
from adapters import random_lora
from conftest import Family, llama_config, randomized, run_script, save_byte_tokenizer
from test_generate_base import some_prompts
from test_generate_base import tokens as tokens_of_base
from tokenizers import Tokenizer as Library
from tokenizers import decoders, models, pre_tokenizers
from torch import Tensor
from torch._dynamo.utils import counters
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)
from transformers.generation import BaseStreamer

from generate import hf
from generate.base import generate
from generate.hf import GPTForCausalLM
from lit_gen.adapter import AdapterConfig, add_adapter
from lit_gen.cache import rectangle
from lit_gen.checkpoint import load_model
from lit_gen.compiled import compile_model
from lit_gen.download import fetch_default_model
from lit_gen.hf_job import fill_padding, search_options
from lit_gen.kernels import load_kernels
from lit_gen.lora import LoRAConfig, add_lora, merge_lora
from lit_gen.lora_rows import attach_loras
from lit_gen.model import GPT
from lit_gen.pack import pack_model
from lit_gen.tokenizer import Tokenizer
from lit_gen.utils import UserError

SEARCHES = {
    "greedy": {},
    "no cache": {"use_cache": False},
    "prompts in pieces": {"prefill_chunk_size": 5},
    "sampling": {"do_sample": True, "temperature": 0.9, "top_k": 20},
    "three samples": {"do_sample": True, "top_p": 0.95, "num_return_sequences": 3},
    "4 beams": {"num_beams": 4, "num_return_sequences": 3},
    "sampled beams": {"num_beams": 3, "do_sample": True},
    "repetition penalty": {"repetition_penalty": 1.3},
    "no 3-gram twice": {"no_repeat_ngram_size": 3},
    "min_new_tokens": {"min_new_tokens": 12},
    "all at once": {
        "num_beams": 4,
        "repetition_penalty": 1.3,
        "no_repeat_ngram_size": 3,
        "min_new_tokens": 5,
        "length_penalty": 0.5,
    },
}


def left_padded(prompts: list[list[int]]) -> dict[str, Tensor]:
    idx, input_pos, _ = rectangle(prompts, "left")
    return {"input_ids": idx, "attention_mask": (input_pos >= 0).long()}


def ragged(lengths: tuple[int, ...] = (3, 17, 9, 1, 12), seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return left_padded([torch.randint(3, 128, (n,), generator=generator).tolist() for n in lengths])


def wrapped(family: Family, packed: bool = False, **shapes: int) -> GPTForCausalLM:
    model = load_model(family.folder, torch.float32, torch.device("cpu")) if packed else family.model
    options = GenerationConfig.from_pretrained(family.folder)
    return GPTForCausalLM(pack_model(model) if packed else model, options, **shapes)


def ids(model: torch.nn.Module, inputs: dict[str, Tensor], seed: int = 0, **options: object) -> Tensor:
    torch.manual_seed(seed)
    return model.generate(**inputs, **{"max_new_tokens": 16, "pad_token_id": 0, **options})


# The ids of transformers' own model


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "packed"])
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3_text"])
def test_every_search_gives_the_ids_of_transformers_own_model(
    family: Callable[[str], Family], name: str, packed: bool
) -> None:
    """Gemma 3 here has a window of 8 columns, and 2 ends rows: some end early."""
    tiny = family(name)
    model, inputs = wrapped(tiny, packed), ragged()
    for search, options in SEARCHES.items():
        assert torch.equal(ids(model, inputs, **options), ids(tiny.hf, inputs, **options)), search


def test_scores_are_transformers_and_streamers_get_the_tokens(family: Callable[[str], Family]) -> None:
    class Streamer(BaseStreamer):
        def __init__(self) -> None:
            self.seen = []

        def put(self, value: Tensor) -> None:
            self.seen.append(value.tolist())

        def end(self) -> None:
            self.seen.append("end")

    tiny, inputs = family("qwen3"), ragged()
    both, how = (
        (wrapped(tiny), tiny.hf),
        {"return_dict_in_generate": True, "output_scores": True, "output_logits": True},
    )
    ours, theirs = (ids(model, inputs, num_beams=4, num_return_sequences=2, **how) for model in both)
    torch.testing.assert_close(ours.sequences_scores, theirs.sequences_scores, rtol=1e-4, atol=1e-4)
    assert torch.equal(ours.beam_indices, theirs.beam_indices)
    for a, b in zip(ours.logits, theirs.logits, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    streamers = Streamer(), Streamer()
    for model, streamer in zip(both, streamers, strict=True):
        ids(model, inputs, streamer=streamer)
    assert streamers[0].seen == streamers[1].seen
    assert len(streamers[0].seen) > 5


def test_stop_strings_end_rows_where_they_do_in_transformers(family: Callable[[str], Family]) -> None:
    vocab = {chr(32 + i) if i < 95 else f"<{i}>": i for i in range(128)}
    library = Library(models.BPE(vocab=vocab, merges=[]))
    library.pre_tokenizer, library.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer, tiny, inputs = PreTrainedTokenizerFast(tokenizer_object=library), family("llama"), ragged()
    free = ids(tiny.hf, inputs)
    characters = [row[n].item() for row, n in zip(free[:2, 17:], (4, 7), strict=True)]
    stops = {"stop_strings": tokenizer.convert_ids_to_tokens(characters), "tokenizer": tokenizer}
    ours, theirs = (ids(model, inputs, **stops) for model in (wrapped(tiny), tiny.hf))
    assert torch.equal(ours, theirs)
    assert not torch.equal(theirs[:, : free.size(1)], free[:, : theirs.size(1)])


def test_guesses_of_an_assistant_or_of_the_prompt_change_nothing(family: Callable[[str], Family]) -> None:
    """Main model and assistant have a cache each; right guesses, wrong ones, and those of transformers' model."""
    tiny, other, inputs = family("llama"), family("qwen3"), ragged((5,))
    model, greedy = wrapped(tiny), ids(tiny.hf, inputs, max_new_tokens=30)
    for assistant in (wrapped(other), wrapped(tiny, packed=True), other.hf):
        assert torch.equal(ids(model, inputs, max_new_tokens=30, assistant_model=assistant), greedy)
    assert torch.equal(ids(tiny.hf, inputs, max_new_tokens=30, assistant_model=wrapped(other)), greedy)
    again = {name: x.repeat(1, 4) for name, x in inputs.items()}
    for shapes in ({}, {"pad_to_multiple": 8, "cache_length": 64}):
        guessed = ids(wrapped(tiny, **shapes), again, prompt_lookup_num_tokens=4)
        assert torch.equal(guessed, ids(tiny.hf, again))


def test_padding_on_the_right_gives_the_new_tokens_of_padding_on_the_left(family: Callable[[str], Family]) -> None:
    prompts = [[5, 6, 7, 8, 9], [70], [11, 12]]
    model, new = wrapped(family("gemma3_text")), []
    for side in ("left", "right"):
        idx, input_pos, _ = rectangle(prompts, side)
        new.append(ids(model, {"input_ids": idx, "attention_mask": (input_pos >= 0).long()})[:, 5:])
    assert torch.equal(*new)
    alone = [ids(model, left_padded([prompt]))[0, len(prompt) :].tolist() for prompt in prompts]
    assert [row[: len(one)] for row, one in zip(new[0].tolist(), alone, strict=True)] == alone


@pytest.mark.skipif(load_kernels() is None, reason="no C++ compiler")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_of_a_packed_model_have_the_bits_of_the_row_alone(dtype: torch.dtype) -> None:
    model, prompts = GPTForCausalLM(pack_model(randomized(llama_config()).to(dtype))), some_prompts(6, 40)
    how = {"return_dict_in_generate": True, "output_logits": True, "max_new_tokens": 8}
    batch = torch.stack(ids(model, left_padded(prompts), **how).logits, dim=1)  # (B, T, V)
    for row, prompt in zip(batch, prompts, strict=True):
        assert torch.equal(torch.stack(ids(model, left_padded([prompt]), **how).logits, dim=1)[0], row)


def test_longrope_rows_are_those_of_base_py(family: Callable[[str], Family]) -> None:
    """Each row takes the table of the length that it may get (here beyond 32), as in base.py, also in a batch."""
    model = family("phi3-longrope").model
    prompts = [(row * 31)[:n] for row, n in zip(some_prompts(5, vocab=128), (28, 5, 31, 24, 27), strict=True)]
    new = ids(GPTForCausalLM(model), left_padded(prompts), max_new_tokens=8)[:, 31:]
    assert new.tolist() == tokens_of_base(model, prompts)


# A model with the face of transformers'


def test_logits_and_gradients_are_transformers_and_labels_give_the_loss(family: Callable[[str], Family]) -> None:
    tiny, inputs = family("qwen3"), ragged()
    model, theirs = copy.deepcopy(wrapped(tiny)).requires_grad_(True).train(), copy.deepcopy(tiny.hf).train()
    real = inputs["attention_mask"].bool()
    labels = inputs["input_ids"].masked_fill(~real | (real.cumsum(1) == 1), -100)  # before the first one is padding
    ours, reference = model(**inputs, labels=labels), theirs(**inputs, labels=labels)
    torch.testing.assert_close(ours.logits[real], reference.logits[real], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(ours.loss, reference.loss, rtol=1e-5, atol=1e-5)
    assert ours.cache is None
    assert not model(**inputs, use_cache=True).logits.requires_grad
    ours.loss.backward()
    reference.loss.backward()
    embedding = theirs.get_input_embeddings().weight.grad
    torch.testing.assert_close(model.model.wte.weight.grad, embedding, rtol=1e-3, atol=1e-4)
    assert model(**inputs, return_dict=False)[0].shape == (5, 17, 128)
    some = model(**inputs, logits_to_keep=torch.tensor([16, 2])).logits
    torch.testing.assert_close(some, ours.logits[:, [16, 2]])


@torch.no_grad()
@pytest.mark.parametrize("packed", [False, True], ids=["plain", "packed"])
def test_caches_in_use_at_the_same_time_do_not_meet(family: Callable[[str], Family], packed: bool) -> None:
    """Two batches of other sizes step by step in turn, and a copy of a cache that goes another way."""
    model = wrapped(family("gemma3_text"), packed)
    batches, caches = [ragged((9, 4)), ragged((2, 11, 7), seed=1)], [None, None]
    for _ in range(12):
        for b, inputs in enumerate(batches):
            new = inputs["input_ids"] if caches[b] is None else inputs["input_ids"][:, -1:]
            out = model(new, inputs["attention_mask"], cache=caches[b], use_cache=True, logits_to_keep=1)
            whole = model(**inputs, use_cache=False).logits[:, -1:]
            torch.testing.assert_close(out.logits, whole, rtol=1e-4, atol=1e-4)
            caches[b] = out.cache
            token, mask = out.logits.argmax(-1), inputs["attention_mask"]
            batches[b] = {
                "input_ids": torch.cat([inputs["input_ids"], token], 1),
                "attention_mask": torch.cat([mask, torch.ones_like(token)], 1),
            }
    fork = copy.deepcopy(caches[0])
    fork.crop(-5)
    inputs = {name: x[:, : fork.length] for name, x in batches[0].items()}
    longer = {name: torch.cat([x, torch.ones(2, 3, dtype=torch.long)], 1) for name, x in inputs.items()}
    went_on = ids(model, longer, cache=fork)
    assert torch.equal(went_on, ids(family("gemma3_text").hf, longer))
    last = model(batches[0]["input_ids"][:, -1:], batches[0]["attention_mask"], cache=caches[0]).logits
    torch.testing.assert_close(last, model(**batches[0], use_cache=False).logits[:, -1:], rtol=1e-4, atol=1e-4)


def test_what_the_model_cannot_do_is_refused_in_one_line(family: Callable[[str], Family]) -> None:
    model, inputs = wrapped(family("llama"), cache_length=20), ragged()
    cases = [("cache_length", {}), ("transformers' own", {"cache_implementation": "static"})]
    for message, options in [*cases, ("none of this model's", {"cache": DynamicCache()})]:
        with pytest.raises(UserError, match=message):
            ids(model, inputs, **options)
    cache = model(**inputs).cache if not torch.is_grad_enabled() else model(**inputs, use_cache=True).cache
    with pytest.raises(UserError, match="2 rows of tokens"):
        model(inputs["input_ids"][:2, :1], cache=cache)
    with pytest.raises(UserError, match="attention_mask"):
        model(inputs["input_ids"][:, :1], inputs["attention_mask"], cache=cache)
    with pytest.raises(UserError, match="pad_to_multiple"):
        GPTForCausalLM(model.model, pad_to_multiple=0)
    with pytest.raises(NotImplementedError):
        model.save_pretrained("somewhere")


def test_adapters_take_part(tiny_llama: GPT) -> None:
    """A LoRA beside the weights is as merged; a prefix is that of base.py."""
    lora, prompts = random_lora(tiny_llama, {"q_proj", "down_proj"}), some_prompts(4, 20)
    inputs, base = left_padded(prompts), GPTForCausalLM(copy.deepcopy(tiny_llama))
    beside = attach_loras(copy.deepcopy(tiny_llama), {"one": lora}, "one")
    merged = ids(GPTForCausalLM(merge_lora(copy.deepcopy(tiny_llama), lora)), inputs, num_beams=3)
    assert torch.equal(ids(GPTForCausalLM(beside), inputs, num_beams=3), merged)
    assert torch.equal(ids(GPTForCausalLM(pack_model(beside)), inputs, num_beams=3), merged)
    assert not torch.equal(ids(base, inputs, num_beams=3), merged)
    prefixed = add_adapter(tiny_llama, AdapterConfig(4, 0))
    for block in prefixed.h:
        torch.nn.init.constant_(block.attn.prefix.gate, 0.7)
    new = ids(GPTForCausalLM(prefixed), inputs, max_new_tokens=8)[:, inputs["input_ids"].size(1) :]
    assert new.tolist() == tokens_of_base(prefixed, prompts)


# Nothing stays behind


def test_training_between_generations_leaves_no_trace_and_they_leave_none_in_training() -> None:
    """Dropout of a LoRA draws random numbers in every step: losses have the same bits with generations in between."""

    def train(searches: bool) -> Iterator[tuple[GPT, float, list[Tensor]]]:
        torch.manual_seed(0)
        model = add_lora(randomized(llama_config()).train(), LoRAConfig(r=4, dropout=0.3))
        wrapper, trained = GPTForCausalLM(model), [p for p in model.parameters() if p.requires_grad]
        optimizer, prompts = torch.optim.Adam(trained, 0.05), left_padded(some_prompts(4, 20))
        modes = [module.training for module in model.modules()]
        for step in range(3):
            inputs = left_padded(some_prompts(3, 30, seed=step))
            loss = wrapper(**inputs, labels=inputs["input_ids"]).loss
            loss.backward()
            found = []
            if searches:  # between the two halves of a step
                before = [p.grad.clone() for p in trained], torch.get_rng_state()
                found = [wrapper.generate(**prompts, max_new_tokens=8, pad_token_id=0, num_beams=n) for n in (1, 3)]
                assert all(torch.equal(p.grad, kept) for p, kept in zip(trained, before[0], strict=True))
                assert torch.equal(torch.get_rng_state(), before[1])
                assert [module.training for module in model.modules()] == modes
                assert all(block.attn.kv_cache is None for block in model.h)
                assert not any(output.requires_grad for output in found)
            yield model, loss.item(), found
            optimizer.step()
            optimizer.zero_grad()

    quiet = [loss for _, loss, _ in train(searches=False)]
    losses, texts = [], set()
    for model, loss, (greedy, beams) in train(searches=True):
        losses.append(loss)
        fresh, prompts = GPTForCausalLM(copy.deepcopy(model).eval()), left_padded(some_prompts(4, 20))
        assert torch.equal(greedy, fresh.generate(**prompts, max_new_tokens=8, pad_token_id=0))
        assert torch.equal(beams, fresh.generate(**prompts, max_new_tokens=8, pad_token_id=0, num_beams=3))
        texts.add(str(greedy.tolist()))
    assert losses == quiet
    assert len(set(losses)) == 3
    assert len(texts) > 1


def test_a_generation_of_base_py_that_is_under_way_is_not_disturbed(tiny_llama: GPT) -> None:
    prompts = some_prompts(5, 20)
    expected, wrapper = tokens_of_base(tiny_llama, prompts, max_batch_size=2), GPTForCausalLM(tiny_llama)
    rows = []
    for row in generate(tiny_llama, prompts, max_batch_size=2, max_new_tokens=8):
        ids(wrapper, left_padded(some_prompts(3, 9, seed=5)), max_new_tokens=3)
        rows.append(row)
    assert [row.tokens for row in sorted(rows, key=lambda row: row.index)] == expected


# Few shapes


@torch._dynamo.config.patch(cache_size_limit=64)
def test_50_ragged_prompts_are_5_shapes() -> None:
    """Prompts of 1 to 64 tokens: multiples of 16, and the step. Without multiples each length is one."""
    torch._dynamo.reset()
    counters.clear()
    model, plain = randomized(llama_config(n_layer=1)), GPTForCausalLM(randomized(llama_config(n_layer=1)))
    model.run_layers = torch.compile(model.run_layers, dynamic=False, backend="eager")
    wrapper, prompts = GPTForCausalLM(model, pad_to_multiple=16, cache_length=80), some_prompts(50, 64)
    for i, prompt in enumerate(prompts):
        new = ids(wrapper, left_padded([prompt]), max_new_tokens=3)
        if i % 10 == 0:
            assert torch.equal(new, ids(plain, left_padded([prompt]), max_new_tokens=3))
    assert counters["stats"]["unique_graphs"] == 5
    assert not counters["graph_break"]
    wrapper.pad_to_multiple = 1
    for n in (9, 18, 27):
        ids(wrapper, left_padded([prompts[0][:1] * n]), max_new_tokens=3)
    assert counters["stats"]["unique_graphs"] == 5 + 3


@pytest.mark.skipif(load_kernels() is None, reason="no C++ compiler")
def test_steps_through_torch_compile_give_the_same_beams_and_two_graphs_at_most(monkeypatch) -> None:
    """As --compile does, but for what the compiler makes of a graph, which tests/test_compiled.py looks at."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    torch._dynamo.reset()
    counters.clear()
    plain, model = (pack_model(randomized(llama_config())) for _ in range(2))
    wrapper, plain = GPTForCausalLM(compile_model(model)), GPTForCausalLM(plain)
    for seed in range(4):
        inputs = left_padded(some_prompts(3, 30, seed=seed))
        assert torch.equal(ids(wrapper, inputs, num_beams=2), ids(plain, inputs, num_beams=2))
    assert 0 < counters["stats"]["unique_graphs"] <= 2


# Real models


def test_stories_beams_are_the_best_ones(stories: Path) -> None:
    """All four beams of eight prompts in one batch, against a float64 search."""
    cases = json.loads((stories / "expected_beam4.json").read_text())["prompts"]
    inputs = left_padded([case["ids"] for case in cases])
    for packed in (False, True):
        model = GPTForCausalLM.from_pretrained(stories, torch.float32)
        model.generation_config.eos_token_id = None
        model = GPTForCausalLM(pack_model(model.model), model.generation_config) if packed else model
        how = {"max_new_tokens": 20, "num_beams": 4, "num_return_sequences": 4, "length_penalty": 0.0}
        out = ids(model, inputs, return_dict_in_generate=True, output_scores=True, **how)
        new = out.sequences[:, inputs["input_ids"].size(1) :].view(8, 4, -1).tolist()
        assert new == [[beam["ids"] for beam in case["beams"]] for case in cases]
        scores = torch.tensor([[beam["score"] for beam in case["beams"]] for case in cases])
        torch.testing.assert_close(out.sequences_scores.view(8, 4), scores, rtol=0, atol=1e-3)


@pytest.mark.long
def test_smollm2_is_that_of_transformers() -> None:
    """With a seed without ties: with seed 0 a draw is between two tokens that differ by 4e-6, less than the logits."""
    path = fetch_default_model()
    file = next(path.glob("*.gguf"))
    theirs = AutoModelForCausalLM.from_pretrained(path, gguf_file=file.name, dtype=torch.float32)
    tokenizer, texts = (
        Tokenizer(path),
        ("What food do llamas eat?", "Hi", "Write one sentence about the sea.", "1 + 1 ="),
    )
    inputs = left_padded([tokenizer.encode(text).tolist() for text in texts])
    for packed in (False, True):
        model = GPTForCausalLM.from_pretrained(path, torch.float32)
        model = GPTForCausalLM(pack_model(model.model), model.generation_config) if packed else model
        for search, options in SEARCHES.items():
            how = {"eos_token_id": 2, "pad_token_id": 2, "max_new_tokens": 32, **options}
            assert torch.equal(ids(model, inputs, seed=1, **how), ids(theirs, inputs, seed=1, **how)), search


# The script


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder that transformers made, with a tokenizer whose "</s>" ends a row."""
    folder = tmp_path_factory.mktemp("hf") / "model"
    save_byte_tokenizer(folder, 300, "def import return class of the rows and the sea is as it was before " * 3)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=300, max_position_embeddings=128, bos_token_id=0, eos_token_id=1, **sizes)
    model, generator = LlamaForCausalLM(config).eval(), torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator) * 0.2
        parameter.data.copy_(noise + (1.0 if "norm" in name else 0.0))
    model.generation_config.repetition_penalty = 1.2
    model.save_pretrained(folder)
    return folder


def cli(capsys: pytest.CaptureFixture, folder: Path, *args: object) -> tuple[int, str, str]:
    return run_script(capsys, hf.main, "--checkpoint_dir", folder, *args)


def test_texts_are_those_of_transformers_in_the_order_of_the_prompts(folder: Path, capsys) -> None:
    """Options that are not given are the checkpoint's. Padding does not count as a repetition: each row is as alone."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), Tokenizer(folder)
    prompts = ["def f(x):", "a", "import torch", "class Row: pass", "9"]
    searches = [{}, {"num_beams": 4, "no_repeat_ngram_size": 3, "num_return_sequences": 2, "repetition_penalty": 1.7}]
    for options in [*searches, {"num_beams": 2, "generation_config": {"renormalize_logits": True}}]:
        how, expected = {**options, **options.get("generation_config", {})}, ""
        how.pop("generation_config", None)
        for prompt in prompts:
            idx = tokenizer.encode(prompt)[None]
            for row in model.generate(idx, max_new_tokens=12, pad_token_id=1, **how)[:, idx.size(1) :]:
                expected += tokenizer.decode(row) + "\n"
        args = [x for name, value in options.items() for x in (f"--{name}", json.dumps(value))]
        args += ["--prompts", json.dumps(prompts), "--max_new_tokens", 12, "--max_batch_size", 3]
        assert cli(capsys, folder, *args)[:2] == (0, expected), options


def test_padding_is_each_rows_own_first_token() -> None:
    """A penalty counts what stands in the padding: with any other token a row would depend on its neighbours."""
    idx, input_pos, _ = rectangle([[7, 8, 9], [5], [6, 6]], "left")
    assert fill_padding(idx, input_pos).tolist() == [[7, 8, 9], [5, 5, 5], [6, 6, 6]]


def test_help_lists_every_option(folder: Path, capsys) -> None:
    listed = cli(capsys, folder, "-h")[1]
    options = [*signature(hf.main).parameters, *signature(search_options).parameters]
    assert [name for name in options if f"--{name} " not in listed and name != "kwargs"] == []


def test_stops_guesses_seeds_and_weights_in_other_forms(folder: Path, capsys) -> None:
    few = ["--prompts", "def f(x):", "--max_new_tokens", 20]
    _, plain, _ = cli(capsys, folder, *few)
    stop = plain[6:8]
    assert cli(capsys, folder, *few, "--stop", json.dumps(["never", stop]))[1] == plain.partition(stop)[0] + "\n"
    assert cli(capsys, folder, *few, "--assistant_dir", folder)[1] == plain
    assert cli(capsys, folder, *few, "--prompt_lookup_num_tokens", 3)[1] == plain
    assert cli(capsys, folder, *few, "--pad_to_multiple", 16, "--cache_length", 64)[1] == plain
    sampled = [cli(capsys, folder, *few, "--do_sample", "true", "--seed", seed)[1] for seed in (1, 1, 2)]
    assert sampled[0] == sampled[1] != sampled[2]
    for option in (["--quantize", "int8"], ["--precision", "bf16-mixed"], ["--precision", "bf16-true"]):
        status, out, _ = cli(capsys, folder, *few, "--num_beams", 2, *option)
        assert (status, len(out) > 1) == (0, True)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--out", "x.jsonl"], "--out"),
        (["--max_new_tokens", 500], "context of 128"),
        (["--pad_to_multiple", 0], "pad_to_multiple is 0"),
        (["--generation_config", '{"num_beamz": 2}'], "num_beamz"),
        (["--generation_config", '{"output_scores": true}'], "output_scores"),
        (["--num_beams", 0], "num_beams"),
        (["--do_sample", "true", "--temperature", -1], "strictly positive"),
        (["--early_stopping", "perhaps"], "early_stopping"),
        (["--prompt_lookup_num_tokens", 3, "--max_batch_size", 2], "max_batch_size"),
        (["--cache_length", 4], "cache_length"),
        (["--prompts", "ROWS"], "line 1 of"),
        (["--prompts", "IDS"], "vocabulary of 300"),
        (["--assistant_dir", "OTHER"], "vocabulary"),
    ],
)
def test_what_does_not_work_is_one_line_and_status_2(
    folder: Path, tmp_path: Path, capsys, args: list, message: str
) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "temperature": 1}\n')
    (tmp_path / "ids.jsonl").write_text('{"prompt": [1, 300]}\n')
    (tmp_path / "other").mkdir()
    config = json.loads((folder / "config.json").read_text()) | {"vocab_size": 299}
    (tmp_path / "other/config.json").write_text(json.dumps(config))
    places = {"ROWS": tmp_path / "rows.jsonl", "IDS": tmp_path / "ids.jsonl", "OTHER": tmp_path / "other"}
    status, out, err = cli(
        capsys, folder, *["--prompts", "a", "--max_new_tokens", 8], *(places.get(arg, arg) for arg in args)
    )
    last = err.splitlines()[-1]
    assert (status, out) == (2, "")
    assert last.startswith("error: ") and message in last, last
