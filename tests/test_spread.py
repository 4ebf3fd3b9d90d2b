"""Layers spread over devices: every split, every family with the bits of one device, and nothing on a wrong one.

A machine without GPUs has no second device, so tensors pretend to be on some (`pretend.py`).
"""

import copy
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import pretend
import pytest
import test_adapter
import test_adapter_v2
import torch
from conftest import llama_config, neox_config, randomized
from families import FAMILIES
from pretend import OnDevice, Pretend
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from generate.base import generate
from lit_gen import plan
from lit_gen.adapter import load_adapter, save_adapter
from lit_gen.adapter_v2 import load_adapter_v2, save_adapter_v2
from lit_gen.export import save_lit
from lit_gen.kernels import load_kernels
from lit_gen.lora import merge_lora
from lit_gen.lora_parts import Part
from lit_gen.lora_rows import attach_loras
from lit_gen.model import GPT
from lit_gen.pack import pack_model
from lit_gen.plan import Plan, plan_batch
from lit_gen.quantize import quantize_model
from lit_gen.settings import Request
from lit_gen.spread import Spread, Stages, parse_devices, split_layers
from lit_gen.tape import Tape
from lit_gen.utils import UserError

CPU = torch.device("cpu")
MOE = {"n_expert": 4, "n_expert_per_token": 2, "moe_intermediate_size": 32, "moe_layers": [True, False, True, True]}
PROMPTS = [[5], [1, 2, 3, 4, 5, 6, 7], list(range(20, 61)), list(range(100, 70, -2)), [9] * 12]


def rows_of(model: GPT, prompts: list = PROMPTS, **settings: object) -> list[tuple]:
    """Tokens of each prompt, and log-probabilities, which differ where the last bits of logits do."""
    settings = {"max_new_tokens": 6, "logprobs": 2, **settings}
    rows = generate(model, prompts, **settings)
    return [(row.tokens, row.logprobs) for row in sorted(rows, key=lambda row: row.index)]


def save(model: GPT, folder: Path) -> None:
    """Without a tokenizer."""
    (folder / "source").mkdir()
    save_lit(model, folder, folder / "source")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A lit folder of a random model with these fields; made once."""
    made = {}

    def make(neox: bool = False, **fields: object) -> Path:
        key = repr((neox, fields))
        if key not in made:
            made[key] = tmp_path_factory.mktemp("model")
            config = (neox_config if neox else llama_config)(**{"n_layer": 4, "vocab_size": 300, **fields})
            save(randomized(config), made[key])
        return made[key]

    return make


# ---- the split ----


@pytest.mark.parametrize(
    ("n", "counts"), [(1, [30]), (2, [15, 15]), (3, [10] * 3), (4, [8, 8, 7, 7]), (8, [4] * 6 + [3] * 2)]
)
def test_thirty_equal_layers(n: int, counts: list[int]) -> None:
    assert split_layers([7] * 30, n) == counts
    assert split_layers([0.5] * 126, n)[-1] >= 126 // n  # 126 layers on 8: none is lost


@pytest.mark.parametrize("seed", range(20))
def test_no_split_is_better_balanced(seed: int) -> None:
    """Against all splits there are, with layers of different sizes."""
    generator = torch.Generator().manual_seed(seed)
    n, n_devices = 3 + seed % 6, 1 + seed % 3
    layers = torch.randint(1, 9, (n,), generator=generator).tolist()

    def loads(cuts: tuple[int, ...]) -> list[int]:
        return sorted((sum(layers[a:b]) for a, b in itertools.pairwise((0, *cuts, n))), reverse=True)

    counts = split_layers(layers, n_devices)
    assert sum(counts) == n and min(counts) >= 1 and len(counts) == n_devices
    best = min(loads(cuts) for cuts in itertools.combinations(range(1, n), n_devices - 1))
    assert loads(tuple(itertools.accumulate(counts[:-1]))) == best


@pytest.mark.parametrize("n", [0, 31, 400])
def test_more_devices_than_layers(n: int) -> None:
    with pytest.raises(UserError, match=f"^{n} devices cannot share 30 layers: give from 1 to 30 devices$"):
        split_layers([1] * 30, n)


def test_layers_of_a_model_with_a_large_vocabulary() -> None:
    """Embedding and head come on top, and where a layer is a mixture of experts it counts for what it holds."""
    assert Spread.of(llama_config(n_layer=30, vocab_size=20_000), [CPU] * 4).counts == (8, 8, 7, 7)
    experts = MOE | {"moe_intermediate_size": 999, "moe_layers": [True, False, False, False]}
    assert Spread.of(llama_config(n_layer=4, **experts), [CPU] * 2).counts == (1, 3)
    assert str(Spread.of(llama_config(), [CPU, CPU])) == "layers: 1 on cpu, 1 on cpu"


def test_names_of_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert parse_devices("auto") == [CPU] and parse_devices(["cpu", "cpu"]) == [CPU] * 2
    for wrong, message in (
        (4, r'needs 4 GPUs, but there are 0: give fewer, or a list such as \["cpu", "cpu"\]'),
        (0, "is 0: give a number of GPUs, auto, or a list"),
        ("4 GPUs", "is '4 GPUs': give"),
        ([], r"is \[\]: give"),
        (["cpu", "cuda:0"], "names 'cuda:0', but there is cpu$"),
        (["cpu", "\x1b"], "names"),
    ):
        with pytest.raises(UserError, match=f"^--devices {message}"):
            parse_devices(wrong)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    for name in ("LOCAL_RANK", "SLURM_LOCALID", "LOCAL_WORLD_SIZE", "SLURM_NTASKS_PER_NODE"):
        monkeypatch.delenv(name, raising=False)
    assert [d.index for d in parse_devices(3)] == [0, 1, 2] and len(parse_devices("auto")) == 8
    assert parse_devices(["cuda:7", "cpu"]) == [torch.device("cuda", 7), CPU]
    with pytest.raises(UserError, match="names 'cuda', but there is cpu, cuda:0, cuda:1"):
        parse_devices(["cuda"])
    monkeypatch.setenv("LOCAL_RANK", "1")  # torchrun: each process has its own
    assert [d.index for d in parse_devices(3)] == [3, 4, 5]
    with pytest.raises(UserError, match="needs 5 GPUs for each of at least 2 processes, but there are 8"):
        parse_devices(5)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert [d.index for d in parse_devices("auto")] == [4, 5, 6, 7]


# ---- the same rows ----


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_gives_what_it_gives_on_one_device(name: str, family: Callable) -> None:
    """4 layers on 3 devices; log-probabilities are of the last bits. B = 1, then 3, then 1 again."""
    made = family(name)
    plain, packed = copy.deepcopy(made.model), pack_model(copy.deepcopy(made.model))
    spread = pack_model(GPT.from_checkpoint(made.folder, torch.float32, [CPU] * 3))
    some = PROMPTS[:3]
    for prompts in (some[:1], some, some[:1]):
        assert rows_of(spread, prompts) == rows_of(packed, prompts)
    expected = rows_of(plain, some, max_new_tokens=3)
    with Pretend() as there:
        pretended = GPT.from_checkpoint(made.folder, torch.float32, pretend.devices(3))
        assert rows_of(pretended, some, max_new_tokens=3) == expected
    assert there.copies["lazy:0", "lazy:1"] and there.copies["lazy:1", "lazy:2"]


SETTINGS = {
    "all at once": {},
    "continuous": {"max_batch_size": 2},
    "padding left": {"padding_side": "left"},
    "padding right": {"padding_side": "right", "max_batch_size": 3},
    "pieces": {"prefill_budget": 16},
    "sampled": {"temperature": 1.0, "top_p": 0.9, "top_k": 40, "min_p": 0.001, "num_samples": 2},
    "penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.4, "logit_bias": {7: 3.0}},
    "guesses": {"speculate": 4, "max_new_tokens": 12, "logprobs": None},  # when to guess is a matter of time
}


OTHERS = {"sliding": {"layer_types": ["sliding", "full"] * 2, "window": 8}, "moe": MOE, "neox": {"neox": True}}
WAYS = [({}, how) for how in SETTINGS] + [
    (fields, how) for fields in OTHERS.values() for how in ("all at once", "padding left")
]


@pytest.mark.parametrize(("fields", "how"), WAYS)
def test_every_way_to_run_rows(fields: dict, how: str, folder: Callable) -> None:
    path, settings = folder(**fields), {"max_new_tokens": 4, **SETTINGS[how]}
    packed, plain = pack_model(GPT.from_checkpoint(path)), GPT.from_checkpoint(path)
    expected = rows_of(packed, **settings)
    for n in (2, 4):
        spread = pack_model(GPT.from_checkpoint(path, None, [CPU] * n))
        spread.group_rows = 1 if packed.by_token and n == 4 else None
        assert rows_of(spread, **settings) == expected
    some = PROMPTS[:3]
    expected = rows_of(plain, some, **settings)
    with Pretend():
        assert rows_of(GPT.from_checkpoint(path, None, pretend.devices(3)), some, **settings) == expected


@pytest.mark.parametrize("format", ["int8", "int4"])
def test_quantised_weights(format: str, folder: Callable, tmp_path: Path) -> None:
    """Rounded after loading, each on its device; and as a folder holds them."""
    path = folder(tie_embeddings=True)
    model = GPT.from_checkpoint(path)
    save(quantize_model(copy.deepcopy(model), format), tmp_path)
    packed, plain = pack_model(GPT.from_checkpoint(tmp_path)), GPT.from_checkpoint(tmp_path)
    assert rows_of(pack_model(GPT.from_checkpoint(path, None, [CPU] * 3), format)) == rows_of(packed)
    assert rows_of(pack_model(GPT.from_checkpoint(tmp_path, None, [CPU] * 3))) == rows_of(packed)
    few = {"prompts": PROMPTS[:2], "max_new_tokens": 2}
    expected = rows_of(plain, **few)
    with Pretend():
        assert rows_of(pack_model(GPT.from_checkpoint(path, None, pretend.devices(3)), format), **few) == expected
        assert rows_of(GPT.from_checkpoint(tmp_path, None, pretend.devices(3)), **few) == expected


@pytest.mark.parametrize("version", [1, 2])
def test_adapters(version: int, folder: Callable, tmp_path: Path) -> None:
    module, write, load = (
        (test_adapter, save_adapter, load_adapter)
        if version == 1
        else (test_adapter_v2, save_adapter_v2, load_adapter_v2)
    )
    path, file = folder(), tmp_path / "adapter.safetensors"
    write(module.trained(GPT.from_checkpoint(path)), file)
    plain, packed = load(GPT.from_checkpoint(path), file), pack_model(load(GPT.from_checkpoint(path), file))
    assert rows_of(plain) != rows_of(GPT.from_checkpoint(path))
    assert rows_of(pack_model(load(GPT.from_checkpoint(path, None, [CPU] * 3), file))) == rows_of(packed)
    expected = rows_of(plain, max_new_tokens=3)
    with Pretend():
        assert rows_of(load(GPT.from_checkpoint(path, None, pretend.devices(3)), file), max_new_tokens=3) == expected


def test_loras_beside_the_weights(folder: Callable) -> None:
    generator = torch.Generator().manual_seed(0)

    def lora(n: int) -> dict:
        def part(start: int, stop: int, size: int) -> Part:
            a, b = torch.randn(n, size, generator=generator), torch.randn(stop - start, n, generator=generator)
            return Part(slice(start, stop), a * 0.3, b * 0.3, 1.0)

        return {f"h.{i}.attn.qkv.weight": [part(0, 64, 64)] for i in range(4)} | {"lm_head.weight": [part(0, 300, 64)]}

    loras, path = {"a": lora(2), "b": lora(3)}, folder()
    prompts = [Request(ids, {"lora": name}) for ids, name in zip(PROMPTS, ("a", "b", "base", "a", "b"), strict=True)]
    packed = pack_model(attach_loras(GPT.from_checkpoint(path), loras))
    assert rows_of(pack_model(attach_loras(GPT.from_checkpoint(path, None, [CPU] * 3), loras)), prompts) == rows_of(
        packed, prompts
    )
    expected = rows_of(attach_loras(GPT.from_checkpoint(path), loras), prompts, max_new_tokens=3)
    with Pretend():
        spread = attach_loras(GPT.from_checkpoint(path, None, pretend.devices(3)), loras)
        assert rows_of(spread, prompts, max_new_tokens=3) == expected


@pytest.mark.skipif(load_kernels() is None, reason="there is no C++ compiler, or LIT_GEN_KERNELS=0")
def test_each_device_has_a_tape_of_its_own(folder: Callable) -> None:
    model = pack_model(GPT.from_checkpoint(folder(), None, [CPU] * 3))
    expected = rows_of(model)
    tapes = model.run_blocks.runs
    assert len(tapes) == 3 and all(isinstance(tape, Tape) and tape.recording is not None for tape in tapes)
    twin = copy.deepcopy(model)
    assert twin.run_blocks is not model.run_blocks and twin.run_blocks.model() is twin
    for block in model.h:
        block.mlp.proj.weight.zero_()
    assert rows_of(twin) == expected != rows_of(model)


@pytest.mark.skipif(load_kernels() is None, reason="there is no C++ compiler, or LIT_GEN_KERNELS=0")
@pytest.mark.parametrize("group_rows", [1, 2, 3])
def test_groups_of_rows_have_the_same_bits(group_rows: int, folder: Callable) -> None:
    model = pack_model(GPT.from_checkpoint(folder(), None, [CPU] * 2))
    generator = torch.Generator().manual_seed(0)
    idx, position = torch.randint(300, (7, 5), generator=generator), torch.arange(5).expand(7, 5).clone()
    position[3, :2], position[3, 2:], last = -1, torch.arange(3), torch.tensor([4, 0, 2, 4, 1, 3, 4])

    def logits() -> list[Tensor]:
        model.set_kv_cache(9, 16)
        found = [model(idx, rows=slice(0, 7)), model(idx, position, last), model(idx[:, :1], position[:, 4:] + 1)]
        found += [model(idx, position, last, rows=slice(-8, -1)), model(idx[:4], rows=slice(0, 8, 2)), model(idx)]
        return [*found, *(block.attn.kv_cache.k.clone() for block in model.h)]

    expected, calls = logits(), []
    model.group_rows, run = group_rows, model.run_blocks
    model.run_blocks = lambda x, *where: calls.append(x.shape[:2].numel()) or run(x, *where)
    assert all(torch.equal(a, b) for a, b in zip(logits(), expected, strict=True))
    assert sum(calls) == 5 * 7 * 4 + 7 + 4 * 5 and len(calls) == 4 * (7 // group_rows) + max(1, 4 // group_rows) + 1


# ---- where things are ----


def held(model: GPT) -> Iterator[tuple[str, Tensor]]:
    """All tensors of a model by the name of what holds them: parameters, buffers, caches and whatever else."""
    for name, module in model.named_modules():
        own = [*module._parameters.values(), *module._buffers.values()]
        if name:
            own += [v for v in vars(module).values() if isinstance(v, Tensor)]
        yield from ((name, tensor) for tensor in own if tensor is not None)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("format", [None, "int4"])
def test_everything_is_where_the_plan_says(format: str | None, tied: bool, folder: Callable, tmp_path: Path) -> None:
    path = folder(tie_embeddings=tied)
    if format:
        save(quantize_model(GPT.from_checkpoint(path), format), tmp_path)
        path = tmp_path
    devices = pretend.devices(3)
    with Pretend():
        model = GPT.from_checkpoint(path, None, devices)
        model.set_kv_cache(2, 8)
        spread, found = model.run_blocks.spread, list(held(model))
        assert sum(spread.counts) == 4 and max(spread.counts) <= 2
        assert len(found) > 4 * 8 and all(isinstance(tensor, OnDevice) for _, tensor in found)
        for name, tensor in found:
            layer = int(name.split(".")[1]) if name.startswith("h.") else None
            stage = (
                0 if name.startswith("wte") else 2 if layer is None else sum(layer >= n for n in accumulated(spread))
            )
            assert tensor.device == devices[stage], name
        assert (model.lm_head.weight is model.wte.weight) is False and model.devices == (devices[0], devices[2])
    same = GPT.from_checkpoint(path, None, [CPU] * 3)
    assert (same.lm_head.weight is same.wte.weight) == (tied and not format)


def accumulated(spread: Spread) -> list[int]:
    return list(itertools.accumulate(spread.counts))


def test_a_border_is_crossed_once_in_a_step(folder: Callable) -> None:
    """By the activations, cos, sin, a mask, and where to write: in a step of many layers and of few."""
    for n_layer in (4, 9):
        with Pretend() as there, torch.no_grad():
            model = GPT.from_checkpoint(folder(n_layer=n_layer), None, pretend.devices(3))
            model.set_kv_cache(2, 64)
            idx, position, last = (torch.tensor(x).to("lazy:0") for x in ([[1], [2]], [[3], [7]], [0, 0]))
            there.copies.clear(), there.waits.clear()
            logits = model(idx, position, last.to("lazy:2"), span=64)
            assert logits.device == torch.device("lazy:2") and there.waits == []
        x, ropes, mask, step = 1, 2, 1, 2
        assert there.copies == dict.fromkeys([("lazy:0", "lazy:1"), ("lazy:1", "lazy:2")], x + ropes + mask + step) | {
            ("lazy:0", "lazy:2"): 1  # `last`, moved above
        }


def test_nothing_waits_between_prompts_or_groups(folder: Callable) -> None:
    """So that a device works on the next while others still have the last: work is queued without looking at it."""
    with Pretend() as there, torch.no_grad():
        model = GPT.from_checkpoint(folder(), None, pretend.devices(2))
        model.set_kv_cache(4, 64)
        idx, position = (torch.tensor(x).to("lazy:0") for x in ([[1], [2], [3], [4]], [[3], [7], [0], [9]]))
        last, order, run = torch.zeros(4, dtype=torch.int64).to("lazy:0"), [], model.run_blocks
        model.run_blocks = lambda x, *where: order.append((len(x), there.copies["lazy:0", "lazy:1"])) or run(x, *where)
        model.group_rows = 2
        there.copies.clear(), there.waits.clear()
        model(idx, position, last, span=64)
        assert order == [(2, 1), (2, 7)]  # `last` goes first: later it would have to wait for the last device
        for prompt in range(2):
            model(idx[:, :1].view(1, 4), None, last[:1].to("lazy:1"), rows=slice(prompt, prompt + 1))
        assert there.waits == []


@pytest.mark.parametrize("wrong", ["wte", "cache", "mask", "rope", "norm"])
def test_the_pretended_devices_refuse_what_gpus_refuse(wrong: str, folder: Callable) -> None:
    """Whatever is on a wrong device is an error, so that the tests above mean something."""
    with Pretend(), torch.no_grad():
        model = GPT.from_checkpoint(folder(), None, pretend.devices(2))
        model.set_kv_cache(1, 8)
        first, second = model.h[0], model.h[3]
        if wrong == "wte":
            model.wte.to("lazy:1")
        elif wrong == "cache":
            second.attn.kv_cache = copy.copy(first.attn.kv_cache)
        elif wrong == "norm":
            second.norm_2 = first.norm_2
        else:
            stages, index = model.run_blocks, 0 if wrong == "rope" else 1
            run = stages.runs[1]

            def mixed(x: Tensor, *where: object) -> Tensor:
                where = list(where)
                where[index] = kept[index]
                return run(x, *where)

            kept, run_first = [], stages.runs[0]
            stages.runs = [lambda x, *where: kept.extend(where) or run_first(x, *where), mixed]
        with pytest.raises(RuntimeError, match="of tensors on lazy:0, lazy:1"):
            model(torch.tensor([[1]]).to("lazy:0"), torch.tensor([[2]]).to("lazy:0"))


# ---- memory ----


def test_rows_that_fit_on_the_fullest_device(monkeypatch: pytest.MonkeyPatch) -> None:
    config = llama_config(n_layer=3)  # 2 and 1 layers
    layer = 64 + (4 + 2 + 2) * 16 * 64 + 64 * 64 + 64 + 3 * 64 * 128
    weights, row = (4 * (2 * layer + 512 * 64), 4 * (layer + 64 + 512 * 64)), 256 * 2 * 2 * 16 * 4  # row: of a layer
    devices, free = pretend.devices(2), {}
    monkeypatch.setattr(plan, "free_memory", lambda device: free[device])
    free.update(zip(devices, (weights[0] + 10 * 2 * row * 10 // 8, 10**9), strict=True))
    got = plan_batch(config, torch.float32, devices, 200, 1000, None)
    assert got == Plan(10, 256, 10 * 3 * row, sum(weights), sum(free.values()))
    free.update(zip(devices, (10**9, weights[1] + 7 * row * 10 // 8 + 4), strict=True))
    assert plan_batch(config, torch.float32, devices, 200, 1000, None).rows == 7
    tied = plan_batch(llama_config(n_layer=3, tie_embeddings=True), torch.float32, devices, 200, 1, None)
    assert tied.weight_bytes == sum(weights)  # the head is a copy
    free[CPU] = sum(weights) + 10 * 3 * row * 10 // 8
    assert plan_batch(config, torch.float32, [CPU] * 2, 200, 1000, None) == plan_batch(
        config, torch.float32, CPU, 200, 1000, None
    )


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peak memory can be reset on Linux only")
def test_loading_takes_less_memory_than_a_layer_beside_the_devices(tmp_path: Path) -> None:
    """5 layers of 36 MB on 4 devices, which are "meta" here: what is left is what the host needs meanwhile."""

    class Reads(TorchDispatchMode):
        """A copy to a device reads what it copies, and so the file; one to "meta" would not."""

        def __torch_dispatch__(
            self, func: object, types: object, args: tuple = (), kwargs: dict | None = None
        ) -> object:
            if func is torch.ops.aten.copy_.default and args[0].is_meta and not args[1].is_meta:
                nonlocal read
                read += args[1].nbytes
                args[1].sum()
            return func(*args, **(kwargs or {}))

    read = 0
    sizes = {"n_embd": 1024, "n_head": 16, "n_query_groups": 4, "head_size": 64, "intermediate_size": 2048}
    config = llama_config(n_layer=5, **sizes)
    model = GPT(config)
    layer = sum(p.nbytes for p in model.h[0].parameters())
    save(model, tmp_path)
    del model
    meta = [torch.device("meta")] * 4
    GPT.from_checkpoint(tmp_path, None, meta)  # what is imported once
    a, b = torch.randn(8, 1024), torch.randn(1024, 8)
    lora = {f"h.{i}.attn.proj.weight": [Part(slice(0, 1024), a, b, 1.0)] for i in range(5)}
    before = status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    with Reads():
        model = merge_lora(GPT.from_checkpoint(tmp_path, None, meta), lora)
    taken = status("VmHWM") - before
    print(f"{taken / layer:.2f} layers of {layer / 1e6:.0f} MB")
    assert layer > 30e6 and read > 5 * layer and all(p.is_meta for p in model.parameters()) and model.merged
    assert taken < 1.3 * layer


def status(field: str) -> int:
    """A line of /proc/self/status, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))


# ---- GPUs; not run yet: none was at hand ----


def assert_devices_agree(path: Path, devices: list[torch.device]) -> None:
    expected, model = rows_of(GPT.from_checkpoint(path), logprobs=None), GPT.from_checkpoint(path, None, devices)
    assert rows_of(model, logprobs=None) == expected
    model.group_rows = 1
    assert rows_of(model, logprobs=None) == expected
    assert all(t.device == devices[model.run_blocks.spread.stage(n)] for n, t in model.named_parameters())


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("fields", [{}, {"tie_embeddings": True}, MOE, {"neox": True}])
def test_two_gpus(fields: dict, folder: Callable) -> None:
    gpus = [torch.device("cuda", i) for i in range(2)]
    assert_devices_agree(folder(**fields), gpus)
    free = [torch.cuda.mem_get_info(gpu)[0] for gpu in gpus]
    got = plan_batch(llama_config(n_layer=4), torch.float32, gpus, 64, 4, None)
    assert got.rows == 4 and got.free_bytes == pytest.approx(sum(free), rel=0.1)


@pytest.mark.skipif(torch.cuda.device_count() < 1, reason="needs a GPU")
@pytest.mark.parametrize("order", [("cuda:0", "cpu"), ("cpu", "cuda:0"), ("cpu", "cuda:0", "cpu")])
def test_a_gpu_and_the_cpu(order: tuple[str, ...], folder: Callable) -> None:
    assert_devices_agree(folder(), [torch.device(name) for name in order])


def test_stages_are_for_several_devices_only(folder: Callable) -> None:
    assert not isinstance(GPT.from_checkpoint(folder()).run_blocks, Stages)
