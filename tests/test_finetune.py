"""Fine-tuning from end to end: what is learnt is what is generated; resumed jobs end with the same bits."""

import json
from pathlib import Path
from types import ModuleType

import pytest
import torch
from conftest import llama_config, randomized, run_script, save_byte_tokenizer
from safetensors.torch import load_file

from generate import adapter, adapter_v2, base, lora
from lit_gen.examples import read_examples
from lit_gen.export import save_lit
from lit_gen.finetuning import FILES
from lit_gen.model import GPT
from lit_gen.quantize import quantize_model
from lit_gen.tokenizer import Tokenizer
from scripts import finetune, merge_adapter_v2, merge_lora

METHODS = ["full", "lora", "adapter", "adapter_v2"]
SCRIPTS = {"lora": (lora, "--lora_path"), "adapter": (adapter, "--adapter_path")}
SCRIPTS["adapter_v2"] = (adapter_v2, "--adapter_path")
ROWS = [
    {"prompt": f"{name} {verb} a {thing}.", "response": f" {name} is {'happy' if verb == 'gets' else 'sad'} now."}
    for name in ("Tom", "Lily", "Ben", "Sue", "Max")
    for verb in ("gets", "loses")
    for thing in ("ball", "dog", "cake", "hat")
]
PROMPTS = ["Tom gets a hat.", "Sue loses a ball.", "Ben"]


def cli(capsys: pytest.CaptureFixture, script: ModuleType, *args: object, **options: object) -> tuple[int, str, str]:
    """Exit status, stdout and stderr of a script with these arguments."""
    given = [str(arg) for arg in args]
    for name, value in options.items():
        given += [f"--{name}", value if isinstance(value, str) else json.dumps(value, default=str).strip('"')]
    repeated = {"repeated": ("lora_path",)} if script is lora else {}
    return run_script(capsys, script.main, *given, **repeated)


def train(capsys: pytest.CaptureFixture, **options: object) -> dict:
    """The line that the script prints at its end. Options of other methods are left out."""
    others = tuple(name for name in ("lora.", "adapter.") if not options.get("method", "lora").startswith(name[:-1]))
    options = {name: value for name, value in options.items() if not name.startswith(others)}
    status, out, err = cli(capsys, finetune, **options)
    assert status == 0, err
    return json.loads(out.splitlines()[-1])


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("data") / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return file


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory, data: Path) -> Path:
    """A lit folder with a small model, and a tokenizer that knows the words of the data."""
    folder = tmp_path_factory.mktemp("lit")
    save_byte_tokenizer(folder / "source", 320, data.read_text())
    config = llama_config(vocab_size=320, n_layer=3, tie_embeddings=True)
    model, generator = randomized(config), torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        if "norm" not in name and "ln_f" not in name:
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.05)
    save_lit(model, folder / "model", folder / "source")
    return folder / "model"


LEARN = {"epochs": 12, "batch_size": 8, "val_rows": 8, "adapter.start_layer": 0}
LEARN |= {"lora.targets": ["all", "lm_head"], "lora.r": 16, "sample_prompts": PROMPTS, "sample_tokens": 8}
RATES = {"full": 5e-3, "lora": 1e-2, "adapter": 3e-2, "adapter_v2": 3e-2}


def texts(capsys: pytest.CaptureFixture, script: ModuleType, folder: Path, *args: object, **options: object) -> str:
    options = {"prompts": PROMPTS, "max_new_tokens": 24, "checkpoint_dir": folder, **options}
    status, out, err = cli(capsys, script, *args, **options)
    assert status == 0, err
    return out


@pytest.mark.parametrize("method", METHODS)
def test_what_is_learnt_is_generated_by_the_method_s_script(
    method: str, checkpoint: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    out_dir = tmp_path / "out"
    how = LEARN | ({"lora.targets": ["all"]} if method == "lora" else {})  # the head is tied
    options = {"data": data, "checkpoint_dir": checkpoint, "out_dir": out_dir, "method": method}
    line = train(capsys, **options, **how, learning_rate=RATES[method], sample_every=20)
    assert (line["rows"], line["held_out"], line["steps"]) == (32, 8, 48)
    limit = {"full": 0.2, "lora": 0.95, "adapter": 0.99, "adapter_v2": 0.85}[method]
    assert line["val_loss_after"] < limit * line["val_loss_before"]
    (logs,) = (out_dir / "logs").iterdir()
    assert (logs / "metrics.csv").read_text().count("\n") > 48
    assert (logs / "samples.csv").read_text().count("\n") >= 1 + 2 * len(PROMPTS)
    plain = texts(capsys, base, checkpoint)
    if method == "full":
        tuned = texts(capsys, base, out_dir)
        assert [line.split(" is ")[1] for line in tuned.splitlines()[:2]] == ["happy now.", "sad now."]
    else:
        script, option = SCRIPTS[method]
        tuned = texts(capsys, script, checkpoint, option, out_dir)
        assert tuned == texts(capsys, script, checkpoint, option, out_dir / FILES[method])
        stored = load_file(out_dir / FILES[method])
        assert not any(name.endswith(("qkv.weight", "wte.weight", "linear.weight")) for name in stored)
    assert tuned != plain


def test_a_merged_lora_gives_base_py_the_same_texts(checkpoint: Path, data: Path, tmp_path: Path, capsys) -> None:
    how = LEARN | {"lora.targets": ["q", "v", "fc"], "epochs": 6}
    options = {"data": data, "checkpoint_dir": checkpoint, "out_dir": tmp_path / "out", "learning_rate": 1e-2}
    train(capsys, **options, **how)
    expected = texts(capsys, lora, checkpoint, "--lora_path", tmp_path / "out")
    assert expected == texts(capsys, lora, checkpoint, "--lora_path", tmp_path / "out", merge=False)
    status, _, err = cli(
        capsys, merge_lora, checkpoint_dir=checkpoint, lora_path=tmp_path / "out", out_dir=tmp_path / "merged"
    )
    assert status == 0, err
    assert texts(capsys, base, tmp_path / "merged") == expected != texts(capsys, base, checkpoint)


def test_an_adapter_v2_without_prefix_folds_into_a_checkpoint(checkpoint: Path, data: Path, tmp_path, capsys) -> None:
    out, options = tmp_path / "out", {"data": data, "checkpoint_dir": checkpoint, "method": "adapter_v2"}
    line = train(capsys, **options, out_dir=out, **(LEARN | {"adapter.length": 0}), learning_rate=3e-2)
    assert line["val_loss_after"] < 0.8 * line["val_loss_before"]
    expected = texts(capsys, adapter_v2, checkpoint, "--adapter_path", out)
    folded = {"checkpoint_dir": checkpoint, "adapter_path": out, "out_dir": tmp_path / "folded"}
    assert cli(capsys, merge_adapter_v2, **folded)[0] == 0
    assert texts(capsys, base, tmp_path / "folded") == expected != texts(capsys, base, checkpoint)


def test_the_loss_is_that_of_the_responses_alone(checkpoint: Path, data: Path, tmp_path: Path, capsys) -> None:
    """Against float64, row by row: every token of a response counts once, whatever the batches."""
    options = {"data": data, "checkpoint_dir": checkpoint, "method": "full", "val_rows": 39, "max_steps": 1}
    line = train(capsys, **options, out_dir=tmp_path / "out", batch_size=7, learning_rate=0.0)
    examples = read_examples(data, Tokenizer(checkpoint), 256)
    model = GPT.from_checkpoint(checkpoint).double()
    order = torch.randperm(40, generator=torch.Generator().manual_seed(1234)).tolist()
    losses = []
    for tokens, start in (examples[i] for i in order[:39]):
        logits = model(torch.tensor([tokens]))[0].log_softmax(-1)
        losses += [-logits[t - 1, tokens[t]].item() for t in range(start, len(tokens))]
    assert line["val_loss_before"] == line["val_loss_after"] == pytest.approx(sum(losses) / len(losses), abs=1e-4)


@pytest.mark.parametrize(("method", "save_every"), [("full", 3), *((method, 4) for method in METHODS)])
def test_a_resumed_job_ends_with_the_same_bits(
    method: str, save_every: int, checkpoint: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """Epochs of 5 batches and 3 steps, interrupted after one or within; with dropout, accumulation and samples."""
    options = {"data": data, "checkpoint_dir": checkpoint, "method": method, "batch_size": 7, "accumulate": 2}
    options |= {
        "epochs": 9,
        "save_every": save_every,
        "adapter.start_layer": 1,
        "sample_prompts": ["Tom"],
        "sample_every": 3,
    }
    options |= {"sample_tokens": 4, "lora.dropout": 0.2, "val_rows": 8}
    train(capsys, **options, out_dir=tmp_path / "whole", max_steps=14)
    train(capsys, **options, out_dir=tmp_path / "parts", max_steps=10)  # the last checkpoint is of step 8 or 9
    (tmp_path / "parts" / FILES[method]).unlink()
    line = train(capsys, **options, out_dir=tmp_path / "parts", max_steps=14, resume=True)
    assert line["steps"] == 14
    kept = torch.load(tmp_path / "whole/trainer/last.ckpt", weights_only=True)
    assert kept["epoch"] == 3 and kept["global_step"] == 12  # a pass over the data is a pass
    whole, parts = (load_file(tmp_path / name / FILES[method]) for name in ("whole", "parts"))
    assert whole.keys() == parts.keys() and all(torch.equal(whole[name], parts[name]) for name in whole)
    kept = torch.load(tmp_path / "parts/trainer/last.ckpt", weights_only=True)["state_dict"]
    assert method == "full" or not any(name.endswith("qkv.weight") for name in kept)  # only what is trained


class Evil:
    def __reduce__(self) -> tuple:
        return (Path(__file__).with_name("evil").touch, ())


def test_a_checkpoint_that_holds_code_is_not_run(checkpoint: Path, data: Path, tmp_path: Path, capsys) -> None:
    options = {"data": data, "checkpoint_dir": checkpoint, "out_dir": tmp_path, "max_steps": 2, "save_every": 1}
    train(capsys, **options)
    file = tmp_path / "trainer/last.ckpt"
    torch.save(torch.load(file, weights_only=True) | {"evil": Evil()}, file)
    status, _, err = cli(capsys, finetune, **options, resume=True)
    assert status == 2 and "last.ckpt is damaged, or none of this script's" in err and err.count("\n") == 1
    assert not Path(__file__).with_name("evil").exists()


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
@pytest.mark.parametrize("method", METHODS)
def test_16_bits_train_too(method: str, precision: str, checkpoint: Path, data: Path, tmp_path: Path, capsys) -> None:
    options = {"data": data, "checkpoint_dir": checkpoint, "out_dir": tmp_path / "out", "method": method}
    options |= {"epochs": 4, "batch_size": 8, "learning_rate": RATES[method], "adapter.start_layer": 0}
    line = train(capsys, **options, precision=precision, sample_prompts=["Tom"], sample_every=8, sample_tokens=4)
    assert line["val_loss_after"] < line["val_loss_before"]
    tensors = load_file(tmp_path / "out" / FILES[method])
    assert {t.dtype for t in tensors.values()} == {torch.float32 if precision == "bf16-mixed" else torch.bfloat16}


def test_a_lora_is_trained_on_a_quantised_base(checkpoint: Path, data: Path, tmp_path: Path, capsys) -> None:
    quantised = tmp_path / "int8"
    save_lit(quantize_model(GPT.from_checkpoint(checkpoint), "int8"), quantised, checkpoint)
    options = {"data": data, "checkpoint_dir": quantised, "epochs": 3, "learning_rate": 1e-2, "batch_size": 8}
    line = train(capsys, **options, out_dir=tmp_path / "out")
    assert line["val_loss_after"] < line["val_loss_before"]
    status, _, err = cli(capsys, finetune, **options, out_dir=tmp_path / "full", method="full")
    assert status == 2 and "int8 weights, which cannot be trained" in err


def test_bad_input_is_one_line_before_weights_are_read(
    checkpoint: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bad.jsonl").write_text('{"prompt": "a", "response": "b"}\n{"prompt": "a"}\n')
    (tmp_path / "done").mkdir()
    (tmp_path / "done" / FILES["lora"]).touch()
    (tmp_path / "half/trainer").mkdir(parents=True)
    (tmp_path / "half/trainer/last.ckpt").touch()
    monkeypatch.setattr(GPT, "from_checkpoint", lambda *_: pytest.fail("read the weights"))
    fine = {"data": data, "checkpoint_dir": checkpoint, "out_dir": tmp_path / "out"}
    for wrong, message in (
        ({"data": tmp_path / "bad.jsonl"}, "bad.jsonl, line 2: it has no prompt, or no response"),
        ({"data": tmp_path / "none.jsonl"}, "none.jsonl"),
        ({"checkpoint_dir": tmp_path / "nowhere"}, "nowhere does not exist"),
        ({"out_dir": checkpoint}, "is the folder of the model to fine-tune"),
        ({"out_dir": tmp_path / "done"}, "has a lit_model_lora.safetensors already"),
        ({"out_dir": tmp_path / "half"}, "has a checkpoint: add --resume true"),
        ({"resume": True}, "has no checkpoint to resume from"),
        ({"out_dir": data}, "rows.jsonl is no folder"),
        ({"max_steps": 0}, "max_steps is 0"),
        ({"max_steps": -7}, "max_steps is -7"),
        ({"seed": 10**23}, "but must be a whole number from 0"),
        ({"sample_prompts": ["Tom"], "sample_tokens": 0}, "sample_tokens is 0"),
        ({"val_rows": 40}, "--val_rows 40 of 40 rows"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"max_length": 3}, "raise --max_length"),
        ({"learning_rate": -1.0}, "learning_rate is -1.0"),
        ({"lora.r": 0}, "rank >= 1"),
        ({"lora.targets": ["q", "x"]}, "unknown: 'x'"),
        ({"method": "adapter", "adapter.start_layer": 3}, "would change nothing in a model of 3 layers"),
        ({"method": "adapter", "adapter.length": 0}, "would change nothing"),
        ({"method": "full", "lora.r": 4}, "--lora options do not go with --method full"),
        ({"method": "lora", "adapter.length": 4}, "--adapter options do not go with --method lora"),
        ({"method": "lora2"}, "method"),
        ({"chat": True}, "no chat template"),
    ):
        status, out, err = cli(capsys, finetune, **(fine | wrong))
        assert (status, out) == (2, "") and message in err and err.count("\n") == 1, (wrong, err)
    assert not (tmp_path / "out").exists()


def test_a_job_goes_on_with_what_it_was_made_with_only(
    checkpoint: Path, data: Path, tmp_path: Path, capsys, monkeypatch
) -> None:
    options = {"data": data, "checkpoint_dir": checkpoint, "out_dir": tmp_path / "out", "val_rows": 32, "epochs": 2}
    train(capsys, **options, save_every=1)
    other = tmp_path / "other.jsonl"
    other.write_text(data.read_text().replace("Tom", "Tim"))
    monkeypatch.setattr(GPT, "from_checkpoint", lambda *_: pytest.fail("read the weights"))
    for wrong, message in (
        ({"method": "adapter_v2"}, "method = 'lora', not 'adapter_v2'"),
        ({"lora.r": 4}, "its options = "),
        ({"lora.alpha": 3}, "its options = "),
        ({"batch_size": 2}, "batch_size = '4', not '2'"),
        ({"accumulate": 2}, "accumulate = '1', not '2'"),
        ({"seed": 3}, "seed = '1234', not '3'"),
        ({"val_rows": 8}, "val_rows = '32', not '8'"),
        ({"learning_rate": 0.5}, "learning_rate = "),
        ({"warmup_steps": 3}, "warmup_steps = '10', not '3'"),
        ({"data": other}, "data = "),
        ({"precision": "bf16-true"}, "precision = '32-true', not 'bf16-true'"),
        ({"epochs": 1}, "in epoch 2 already: resume with --epochs 2 or more"),
    ):
        status, out, err = cli(capsys, finetune, **(options | wrong), resume=True)
        assert (status, out) == (2, "") and message in err and err.count("\n") == 1, (wrong, err)
    assert not (tmp_path / "out" / FILES["adapter_v2"]).exists()


def test_a_training_that_diverges_writes_no_weights(checkpoint: Path, data: Path, tmp_path: Path, capsys) -> None:
    options = {"data": data, "checkpoint_dir": checkpoint, "out_dir": tmp_path / "out", "method": "full"}
    status, out, err = cli(capsys, finetune, **options, learning_rate=1e30, warmup_steps=1, epochs=2)
    assert status == 2 and "the training diverged" in err.splitlines()[-1]
    assert not (tmp_path / "out" / FILES["full"]).exists()


@pytest.mark.parametrize("method", METHODS)
def test_stories_from_end_to_end(method: str, stories: Path, tmp_path: Path, capsys, monkeypatch) -> None:
    """Fine-tuned, generated with the method's script, merged or folded, generated with base.py: the same texts."""
    file = tmp_path / "rows.jsonl"
    ending = " {0} gave the {1} to a big red bird."
    rows = [(name, thing) for name in ("Tom", "Lily", "Ben", "Sue") for thing in ("ball", "dog", "cake", "hat", "car")]
    pairs = [{"prompt": f"{n} had a {t}.", "response": ending.format(n, t)} for n, t in rows]
    file.write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    options = {"data": file, "checkpoint_dir": stories, "out_dir": tmp_path / "out", "method": method}
    options |= {"epochs": 12, "val_rows": 4, "adapter.length": 0 if method == "adapter_v2" else 10}
    options |= {"lora.targets": ["all"], "learning_rate": {"adapter": 3e-2}.get(method, 1e-2)}
    line = train(capsys, **options)
    assert line["val_loss_after"] < (0.9 if method == "adapter" else 0.2) * line["val_loss_before"]
    asked = {"prompts": ["Tom had a cake.", "Sue had a dog.", "Once upon a time"], "max_new_tokens": 40}
    if method == "full":
        tuned = texts(capsys, base, tmp_path / "out", **asked)
    else:
        script, option = SCRIPTS[method]
        tuned = texts(capsys, script, stories, option, tmp_path / "out", **asked)
    if method != "adapter":
        assert "to a big red bird" in tuned.splitlines()[0] and "dog to a big" in tuned.splitlines()[1]
    if method == "lora":
        merged = {"checkpoint_dir": stories, "lora_path": tmp_path / "out", "out_dir": tmp_path / "merged"}
        assert cli(capsys, merge_lora, **merged)[0] == 0
        assert texts(capsys, base, tmp_path / "merged", **asked) == tuned
    if method == "adapter_v2":
        folded = {"checkpoint_dir": stories, "adapter_path": tmp_path / "out", "out_dir": tmp_path / "folded"}
        assert cli(capsys, merge_adapter_v2, **folded)[0] == 0
        assert texts(capsys, base, tmp_path / "folded", **asked) == tuned
