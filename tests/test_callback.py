"""Generation inside training: the same losses to the last bit, nothing left behind, the same samples on all ranks."""

import copy
import csv
import json
import os
import random
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import llama_config, randomized, save_byte_tokenizer
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from test_generate_base import some_prompts
from torch import Tensor, nn

from generate.base import generate
from generate.callback import GenerateCallback, generate_in_training
from lit_gen import GPT, Tokenizer
from lit_gen.adapter import AdapterConfig, add_adapter
from lit_gen.adapter_v2 import add_adapter_v2
from lit_gen.cache import KVCache, rectangle
from lit_gen.undisturbed import undisturbed
from lit_gen.utils import UserError

PROMPTS = ["a", "def test", [5, 6, 7, 8, 9], "import torch"]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    save_byte_tokenizer(folder, 300, Path(__file__).read_text())
    return Tokenizer(folder)


class Module(LightningModule):
    """A model with dropout behind it, trained on texts of different lengths."""

    def __init__(self, model: GPT, lr: float = 1e-2) -> None:
        super().__init__()
        self.model, self.dropout, self.lr, self.losses = model, nn.Dropout(0.3), lr, []

    def training_step(self, batch: list[list[int]]) -> Tensor:
        idx, input_pos, _ = rectangle(batch, "right")
        logits = self.dropout(self.model(idx))[:, :-1]
        target = idx[:, 1:].masked_fill(input_pos[:, 1:] < 0, -100)
        loss = F.cross_entropy(logits.flatten(0, 1).float(), target.flatten())
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam([p for p in self.parameters() if p.requires_grad], self.lr)


def make(method: str = "full") -> GPT:
    torch.manual_seed(0)
    model = randomized(llama_config(vocab_size=300)).requires_grad_(True).train()
    if method == "adapter":
        return add_adapter(model, AdapterConfig(4, 0))
    if method == "adapter_v2":
        return add_adapter_v2(model, AdapterConfig(4, 0))
    if method == "lora":
        lora = pytest.importorskip("lit_gen.lora")
        return lora.add_lora(model, lora.LoRAConfig(r=4, dropout=0.2))
    return model


def fit(module: Module, folder: Path, *callbacks: GenerateCallback, epochs: int = 2, **how: object) -> Trainer:
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)
    data = torch.utils.data.DataLoader(
        some_prompts(12, longest=20, vocab=300), batch_size=2, shuffle=True, collate_fn=list
    )
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    how = {"logger": False, "max_epochs": epochs, "accelerator": "cpu", "devices": 1, **quiet, **how}
    trainer = Trainer(default_root_dir=folder, callbacks=list(callbacks), **how)
    trainer.fit(module, data)
    return trainer


def dice(texts: list[str]) -> float:
    """A metric that uses every random state."""
    return torch.rand(1).item() + np.random.rand() + random.random() + len(texts)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
@pytest.mark.parametrize("method", ["full", "lora", "adapter", "adapter_v2"])
def test_losses_are_bit_equal_with_the_callback_on_and_off(
    method: str, precision: str, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    modules = []
    for on in (False, True):
        modules.append(Module(make(method)))
        every = {"every_n_steps": 1, "every_n_epochs": 1, "metrics": {"dice": dice}, "max_new_tokens": 6}
        callbacks = [GenerateCallback(PROMPTS, tokenizer, **every)] if on else []
        fit(modules[-1], tmp_path, *callbacks, precision=precision)
    assert len(modules[0].losses) == 12 and modules[0].losses == modules[1].losses
    assert modules[0].losses[-1] != modules[0].losses[0]
    for (name, a), (_, b) in zip(*(m.state_dict().items() for m in modules), strict=True):
        assert torch.equal(a, b), name


def state(model: GPT) -> dict[str, object]:
    """Everything that a generation touches, as comparable values."""
    rng = (torch.get_rng_state().tolist(), str(np.random.get_state()), random.getstate())
    caches = [
        (block.attn.kv_cache, block.attn.kv_cache and block.attn.kv_cache.k.clone().tolist()) for block in model.h
    ]
    modes = [module.training for module in model.modules()]
    grads = [(p.requires_grad, p.is_inference()) for p in model.parameters()]
    tables = [t.is_inference() for pair in model._tables for t in pair]
    other = (model.mask_cache, model.row_length, model.cache_epoch, torch.is_grad_enabled(), set(tables))
    return {"rng": rng, "caches": caches, "modes": modes, "grads": grads, "other": other}


@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize("fails", [True, False])
def test_nothing_is_left_behind(tokenizer: Tokenizer, cached: bool, fails: bool) -> None:
    model = add_adapter(randomized(llama_config(vocab_size=300)), AdapterConfig(4, 0)).train()
    model.h[1].mlp.eval()  # as users freeze parts
    model(torch.tensor([[1, 2, 3]]))
    if cached:
        model.set_kv_cache(2, 8)
        model(torch.tensor([[1, 2], [3, 4]]), rows=slice(0, 2))
    before, calls = state(model), []

    def on_step() -> None:
        calls.append(model.training)
        assert not any(module.training for module in model.modules() if not isinstance(module, KVCache))
        torch.rand(1), np.random.rand(), random.random()
        if fails and len(calls) == 3:
            raise ZeroDivisionError

    try:
        generate_in_training(model, tokenizer, PROMPTS, max_new_tokens=40, on_step=on_step, temperature=1.0)
    except ZeroDivisionError:
        assert fails
    assert len(calls) >= 3 and state(model) == before
    model(torch.tensor([[4] * 70])).sum().backward()  # longer than what the rope tables were made for at first
    assert model.h[0].attn.prefix.gate.grad is not None


def test_a_generation_that_is_under_way_goes_on(tokenizer: Tokenizer, tiny_llama: GPT) -> None:
    prompts, model = some_prompts(5), tiny_llama
    expected = {row.index: row.tokens for row in generate(model, prompts, max_new_tokens=12, max_batch_size=2)}
    rows, got = generate(model, prompts, max_new_tokens=12, max_batch_size=2), {}
    for row in rows:
        got[row.index] = row.tokens
        generate_in_training(model, tokenizer, PROMPTS, max_new_tokens=3)
    assert got == expected and model.cache_bytes == 0


def test_samples_are_those_of_generate_in_the_order_of_the_prompts(tokenizer: Tokenizer) -> None:
    model = make().train()
    prompts = [*PROMPTS, "a", "a"]
    settings = {"max_new_tokens": 9, "temperature": 1.0, "num_samples": 2, "stop_ids": {40}}
    ids = [tokenizer.encode(p) if isinstance(p, str) else p for p in prompts]
    rows = list(generate(copy.deepcopy(model).eval(), ids, tokenizer=tokenizer, **settings))
    expected = [(r.prompt_index, r.sample, r.text, r.finish_reason) for r in sorted(rows, key=lambda r: r.index)]
    samples = generate_in_training(model, tokenizer, prompts, max_batch_size=2, **settings)
    assert [(s.prompt_index, s.sample, s.text, s.finish_reason) for s in samples] == expected
    assert len({s.text for s in samples if s.prompt == "a"}) > 4  # equal prompts, different samples
    assert [s.prompt for s in samples[:6:2]] == ["a", "def test", tokenizer.decode(PROMPTS[2])]


def read_samples(folder: Path) -> list[dict[str, str]]:
    with next(folder.rglob("samples.csv")).open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize(
    ("every", "accumulate", "steps"),
    [
        ({"every_n_steps": 4}, 1, [4, 8, 12]),
        ({"every_n_steps": 2}, 3, [2, 4]),
        ({"every_n_epochs": 2}, 1, [12]),
        ({"every_n_steps": 5, "every_n_epochs": 1}, 1, [5, 6, 10, 12]),
    ],
)
def test_it_runs_when_it_should_and_logs_texts_and_metrics(
    every: dict, accumulate: int, steps: list[int], tokenizer: Tokenizer, tmp_path: Path, capsys
) -> None:
    metrics = {"length": lambda texts: sum(map(len, texts)), "n": len}
    callback = GenerateCallback(PROMPTS, tokenizer, **every, metrics=metrics, max_new_tokens=4)
    how = {"logger": CSVLogger(tmp_path, version=0), "accumulate_grad_batches": accumulate, "log_every_n_steps": 50}
    trainer = fit(Module(make()), tmp_path, callback, **how)
    rows = read_samples(tmp_path)
    assert [(int(row["step"]), int(row["prompt_index"])) for row in rows] == [(s, i) for s in steps for i in range(4)]
    assert rows[1]["prompt"] == "def test" and len({row["text"] for row in rows}) > 1
    with next(tmp_path.rglob("metrics.csv")).open(newline="") as file:
        logged = {int(row["step"]): row for row in csv.DictReader(file) if row["n"]}
    assert sorted(logged) == steps
    for step in steps:
        texts = [row["text"] for row in rows if row["step"] == str(step)]
        assert float(logged[step]["length"]) == sum(map(len, texts)) and float(logged[step]["n"]) == 4
    assert trainer.callback_metrics["n"] == 4  # a ModelCheckpoint could monitor it
    shown = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step ")]
    assert len(shown) == 4 * len(steps) and shown[0].startswith(f"step {steps[0]}: 'a' -> ")


def test_texts_go_to_tensorboard(tokenizer: Tokenizer, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logger = TensorBoardLogger(tmp_path)
    callback = GenerateCallback(PROMPTS, tokenizer, every_n_epochs=2, metrics={"n": len}, max_new_tokens=4)
    fit(Module(make()), tmp_path, callback, logger=logger)
    events = EventAccumulator(logger.log_dir)
    events.Reload()
    names = [name for name in events.Tags()["tensors"] if name.startswith("samples/")]
    assert names == [f"samples/{i}/text_summary" for i in range(4)]
    (event,) = events.Tensors(names[1])
    assert event.step == 12 and event.tensor_proto.string_val[0].decode().startswith("    def test\n")
    assert [(event.step, event.value) for event in events.Scalars("n")] == [(12, 4.0)]


def test_a_resumed_job_does_not_repeat_the_last_samples(tokenizer: Tokenizer, tmp_path: Path) -> None:
    every = {"every_n_steps": 6, "max_new_tokens": 3}
    trainer = fit(Module(make()), tmp_path, epochs=1, accumulate_grad_batches=1)
    trainer.save_checkpoint(tmp_path / "at6.ckpt")
    callback = GenerateCallback(PROMPTS, tokenizer, **every)
    how = {"logger": CSVLogger(tmp_path, version=0), "max_epochs": 2}
    module = Module(make())
    data = torch.utils.data.DataLoader(some_prompts(12, longest=20, vocab=300), batch_size=2, collate_fn=list)
    trainer = Trainer(callbacks=[callback], accelerator="cpu", devices=1, enable_progress_bar=False, **how)
    trainer.fit(module, data, ckpt_path=tmp_path / "at6.ckpt", weights_only=True)
    assert [row["step"] for row in read_samples(tmp_path)] == ["12"] * 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "needs every_n_steps or every_n_epochs"),
        ({"every_n_steps": 0}, "a whole number above 0"),
        ({"every_n_steps": 1, "temperature": -1}, "temperature is -1"),
        ({"every_n_steps": 1, "max_new_token": 4}, "max_new_token"),
        ({"every_n_steps": 1, "max_new_tokens": 10_000}, "exceeds the model's context"),
        ({"every_n_steps": 1, "prompts": []}, "there is no prompt"),
        ({"every_n_steps": 1, "prompts": ["fine", [300]]}, "prompt 1 has the token 300"),
    ],
)
def test_what_cannot_run_is_said_before_the_first_step(arguments: dict, message: str, tokenizer, tmp_path) -> None:
    module = Module(make())
    with pytest.raises((UserError, TypeError), match=message):
        fit(module, tmp_path, GenerateCallback(**{"prompts": PROMPTS, "tokenizer": tokenizer, **arguments}))
    assert not module.losses


def test_a_module_without_a_model_is_refused(tokenizer: Tokenizer, tmp_path: Path) -> None:
    module = Module(make())
    module.second = make()
    with pytest.raises(UserError, match="holds one GPT, not 2"):
        fit(module, tmp_path, GenerateCallback(PROMPTS, tokenizer, every_n_steps=1))


def test_undisturbed_keeps_autocast_but_not_its_weights() -> None:
    """litgpt#837: weights that were rounded in inference mode could not be trained."""
    model, idx = make().train(), torch.tensor([[1, 2, 3]])
    with torch.autocast("cpu", torch.bfloat16):
        with undisturbed(model), torch.inference_mode():
            assert model(idx).dtype == torch.bfloat16
        model(idx).float().sum().backward()
    assert all(p.grad is not None for p in model.parameters())


# Two processes

SCRIPT = """
import sys, json
sys.path[:0] = {path!r}
import os, torch
from pathlib import Path
from test_callback import *
from generate import callback
folder, rank = Path({folder!r}), int(os.environ["LOCAL_RANK"])
tokenizer = Tokenizer(folder)
ddp = {{"strategy": "ddp", "devices": 2, "use_distributed_sampler": True}}
report = {{}}
for name, prompts in (("off", None), ("four", PROMPTS), ("one", PROMPTS[:1]), ("three", PROMPTS[:3])):
    module, found = Module(make("adapter"), lr=1e-5), []
    metrics = {{"seen": lambda texts: found.append(texts) or len(texts)}}
    every = {{"every_n_steps": 1, "metrics": metrics, "max_new_tokens": 12, "stop_ids": {stop}}}
    trainer = fit(module, folder, *([GenerateCallback(prompts, tokenizer, **every)] if prompts else []), **ddp)
    report[name] = [module.losses, found, {{k: float(v) for k, v in trainer.callback_metrics.items()}}]

def on_step():
    if rank == 1:
        raise ZeroDivisionError("on purpose")

try:
    fit(Module(make()), folder, GenerateCallback(PROMPTS, tokenizer, every_n_steps=1, on_step=on_step), **ddp)
except (ZeroDivisionError, RuntimeError) as error:
    report["error"] = [type(error).__name__, str(error)]
(folder / f"report{{rank}}.json").write_text(json.dumps(report))
"""


def test_two_ranks_share_the_prompts_and_all_finish(tmp_path: Path) -> None:
    """Prompts that stop at different steps; fewer prompts than ranks, and no multiple of them; an error on one rank."""
    save_byte_tokenizer(tmp_path, 300, Path(__file__).read_text())
    tokenizer = Tokenizer(tmp_path)
    settings, model = {"max_new_tokens": 12}, make("adapter")
    ids = [tokenizer.encode(p).tolist() if isinstance(p, str) else p for p in PROMPTS]
    free = {row.index: row.tokens for row in generate(model, ids, **settings)}
    stop = {free[0][1], free[1][7]}
    samples = generate_in_training(model, tokenizer, PROMPTS, **settings, stop_ids=stop)
    expected = [sample.text for sample in samples]
    assert len({len(row.tokens) for row in generate(model, ids, **settings, stop_ids=stop)}) > 2

    with socket.socket() as free_port:
        free_port.bind(("127.0.0.1", 0))
        port = free_port.getsockname()[1]
    tests, script = Path(__file__).parent, tmp_path / "script.py"
    script.write_text(SCRIPT.format(path=[str(tests), str(tests.parent)], folder=str(tmp_path), stop=sorted(stop)))
    env = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen([sys.executable, script], env={**env, "LOCAL_RANK": str(rank)}, stderr=subprocess.PIPE)
        for rank in range(2)
    ]
    for rank in ranks:
        assert rank.communicate(timeout=240)[1] is not None and rank.returncode == 0

    reports = [json.loads((tmp_path / f"report{rank}.json").read_text()) for rank in range(2)]
    for report in reports:
        for name, n in (("four", 4), ("one", 1), ("three", 3)):
            losses, found, metrics = report[name]
            assert losses == report["off"][0] and len(losses) == 6
            assert len(found) == 6 and found[0] == expected[:n] and metrics["seen"] == n
    assert reports[0]["off"][0] != reports[1]["off"][0]  # different data on the two
    assert reports[0]["error"][0] == "RuntimeError" and "rank 1 could not generate: Zero" in reports[0]["error"][1]
    assert reports[1]["error"] == ["ZeroDivisionError", "on purpose"]
