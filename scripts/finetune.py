"""Fine-tunes a model on prompts and responses: all of its weights, a LoRA, or an adapter (v1 or v2).

    python scripts/finetune.py --data dolly.jsonl --out_dir out/dolly --sample_prompts '["What is fish oil?"]'
    python generate/lora.py --lora_path out/dolly --prompts "What is fish oil?"

A line of the data is {"prompt": "...", "response": "..."}, or {"messages": [{"role": ..., "content": ...}, ...]} which
ends with what the assistant is to say. The response and its end are learnt, nothing before it. --val_rows of the lines
are held out; the loss on them is printed before and after. Kill it, and the same command with --resume true goes on
from the last checkpoint. --lora.r 16 --lora.targets '["all"]' and the like are the method's own options.
"""

import hashlib
import json
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

if __name__ == "__main__":  # from a bare clone, and from any folder
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger

from generate.callback import GenerateCallback
from lit_gen import GPT, Tokenizer
from lit_gen.adapter import AdapterConfig
from lit_gen.checkpoint import load_config, weight_format
from lit_gen.download import fetch_default_model
from lit_gen.examples import Batches, Example, read_examples
from lit_gen.finetuning import FILES, Finetune, Method, check_checkpoint, check_options, prepare, save
from lit_gen.lora import LoRAConfig
from lit_gen.made_for import shape_of
from lit_gen.prompts import encode_prompt, read_prompts
from lit_gen.settings import check_count, is_number
from lit_gen.utils import UserError, run_cli

LAST = Path("trainer/last.ckpt")  # of the Trainer, in the output folder
ALWAYS = {"num_sanity_val_steps": 0, "log_every_n_steps": 1, "enable_model_summary": False, "gradient_clip_val": 1.0}


def check(out_dir: Path, method: Method, base: Path, precision: str, resume: bool, seed: int) -> None:
    """UserError for what could not go well in the end."""
    last = out_dir / LAST
    if not 0 <= seed < 2**62:  # numbers of epochs are added to it
        raise UserError(f"seed is {seed}, but must be a whole number from 0 to 2**62 - 1")
    if out_dir.exists() and not out_dir.is_dir():
        raise UserError(f"{out_dir} is no folder; give another --out_dir")
    if out_dir.exists() and base.exists() and out_dir.samefile(base):
        raise UserError(f"{out_dir} is the folder of the model to fine-tune; give another --out_dir")
    if resume != last.is_file():
        state = "has no checkpoint to resume from" if resume else "has a checkpoint: add --resume true"
        raise UserError(f"{out_dir} {state}, or give another --out_dir")
    if not resume and (out_dir / FILES[method]).exists():
        raise UserError(f"{out_dir} has a {FILES[method]} already; give another --out_dir")
    if (format := weight_format(base, None, precision)) and method == "full":
        raise UserError(f"{base} has {format} weights, which cannot be trained: take the original, or --method lora")


def split(examples: list[Example], val_rows: int, seed: int) -> tuple[list[Example], list[Example]]:
    """Holds out some rows, which the seed chooses: those to train on, and the others."""
    if not 0 <= val_rows < len(examples):
        raise UserError(f"--val_rows {val_rows} of {len(examples)} rows: leave some to train on")
    order = torch.randperm(len(examples), generator=torch.Generator().manual_seed(seed)).tolist()
    return [examples[i] for i in sorted(order[val_rows:])], [examples[i] for i in order[:val_rows]]


def fit(
    load: Callable[[], GPT],
    tokenizer: Tokenizer,
    rows: list[Example],
    samples: list[list[int]],
    out_dir: Path,
    resume: Path | None,
    seed: int,
    made_with: dict[str, str],
    *,
    val_rows: int = 32,
    epochs: int = 1,
    max_steps: int = -1,
    batch_size: int = 4,
    accumulate: int = 1,
    learning_rate: float = 2e-4,
    warmup_steps: int = 10,
    sample_every: int = 50,
    sample_tokens: int = 64,
    save_every: int = 50,
) -> tuple[GPT, dict[str, Any]]:
    """Trains what `load` returns, which is called when nothing is found wrong: the model, and numbers to be printed.

    Args:
        val_rows: Rows that are held out, to tell the loss on them before and after.
        epochs: Passes over the data.
        max_steps: Stop after so many steps of the optimizer; -1 does not.
        batch_size: Rows in a batch.
        accumulate: Batches to a step of the optimizer.
        learning_rate: Of AdamW, after `warmup_steps` steps.
        sample_every: Steps between samples, of up to `sample_tokens` tokens.
        save_every: Steps between checkpoints of the Trainer.
    """
    counts = {"epochs": epochs, "warmup_steps": warmup_steps, "sample_every": sample_every, "save_every": save_every}
    batches = {"batch_size": batch_size, "accumulate": accumulate}
    check_counts(learning_rate, max_steps, counts | batches | {"sample_tokens": sample_tokens})
    rates = {"learning_rate": learning_rate, "warmup_steps": warmup_steps}  # Lightning takes those of the checkpoint
    made_with |= {name: str(count) for name, count in {"val_rows": val_rows, **batches, **rates}.items()}
    check_checkpoint(resume, made_with, epochs)
    train, held_out = split(rows, val_rows, seed)
    torch.manual_seed(seed)
    module = Finetune(load(), learning_rate, warmup_steps, made_with)
    callbacks = [ModelCheckpoint(out_dir / LAST.parent, every_n_train_steps=save_every, save_top_k=0, save_last=True)]
    if samples:
        callbacks.append(GenerateCallback(samples, tokenizer, every_n_steps=sample_every, max_new_tokens=sample_tokens))
    how = {"max_epochs": epochs, "max_steps": max_steps, "accumulate_grad_batches": accumulate, "devices": 1, **ALWAYS}
    trainer = Trainer(callbacks=callbacks, logger=loggers(out_dir), precision=made_with["precision"], **how)
    before = validate(trainer, module, held_out, batch_size)
    trainer.fit(module, Batches(train, batch_size, seed), ckpt_path=resume, weights_only=True)
    losses = {"val_loss_before": before, "val_loss_after": validate(trainer, module, held_out, batch_size)}
    return module.model, {"rows": len(train), "held_out": len(held_out), "steps": trainer.global_step, **losses}


def check_counts(learning_rate: float, max_steps: int, counts: dict[str, int]) -> None:
    if max_steps != -1:
        check_count("max_steps", max_steps)
    for name, count in counts.items():
        check_count(name, count)
    if not (is_number(learning_rate) and 0 <= learning_rate <= 1e30):
        raise UserError(f"learning_rate is {learning_rate}, but must be a number from 0 to 1e30")


def loggers(out_dir: Path) -> list[Logger]:
    """For a .csv file, and for TensorBoard if it is installed."""
    own = CSVLogger(out_dir, "logs")
    return [own, *([TensorBoardLogger(out_dir, "logs", version=own.version)] if find_spec("tensorboard") else [])]


def validate(trainer: Trainer, module: Finetune, held_out: list[Example], batch_size: int) -> float | None:
    """Mean loss of a token of the held-out responses; None if no row is held out."""
    if not held_out:
        return None
    (losses,) = trainer.validate(module, Batches(held_out, batch_size, seed=0), verbose=False)
    return round(losses["val_loss"], 4)


def main(
    *,
    data: Path,
    out_dir: Path,
    method: Method = "lora",
    checkpoint_dir: Path | None = None,
    precision: Literal["32-true", "bf16-mixed", "bf16-true"] = "32-true",
    chat: bool | None = None,
    max_length: int = 512,
    lora: LoRAConfig = LoRAConfig(),  # noqa: B008 (they are frozen)
    adapter: AdapterConfig = AdapterConfig(),  # noqa: B008
    sample_prompts: list[str] | None = None,
    resume: bool = False,
    seed: int = 1234,
    **kwargs: Any,
) -> None:
    """Fine-tunes a model on the responses of a .jsonl file, and prints a JSON line with the loss before and after.

    Args:
        data: The .jsonl file.
        out_dir: Gets the trained weights, logs (CSV, and TensorBoard if it is installed) and checkpoints.
        method: What is trained; the result is a lit folder (full), or a file to be loaded beside the base.
        checkpoint_dir: A Hugging Face folder, a lit folder or a .gguf file; by default SmolLM2-135M-Instruct, fetched.
        precision: bf16-mixed keeps weights in float32, bf16-true does not.
        chat: Put prompts and responses into the chat template; by default if there is one.
        max_length: Longer rows, in tokens, are left out.
        sample_prompts: Prompts to generate from during the training.
        resume: Go on from the last checkpoint.
    """
    base = checkpoint_dir or fetch_default_model()
    config, tokenizer = load_config(base), Tokenizer(base)
    check(out_dir, method, base, precision, resume, seed)
    check_options(method, lora, adapter, config)
    rows = read_examples(data, tokenizer, min(max_length, config.block_size), chat)
    in_chat = tokenizer.chat_template is not None if chat is None else chat
    prompts = read_prompts(sample_prompts) if sample_prompts else ()
    samples = [encode_prompt(prompt, tokenizer, chat=in_chat) for prompt in prompts]

    def load() -> GPT:
        model = GPT.from_checkpoint(base, torch.bfloat16 if precision == "bf16-true" else torch.float32)
        return prepare(model, method, lora, adapter)

    own = lora if method == "lora" else adapter if method.startswith("adapter") else "none"
    made_with = {"method": method, "its options": str(own), "model": shape_of(config), "precision": precision}
    made_with |= {"seed": str(seed), "data": hashlib.sha256(str(rows).encode()).hexdigest()}
    last = out_dir / LAST if resume else None
    model, numbers = fit(load, tokenizer, rows, samples, out_dir, last, seed, made_with, **kwargs)
    save(model, method, out_dir, base, numbers["val_loss_after"])
    print(json.dumps({"method": method, **numbers, "out_dir": str(out_dir)}))


if __name__ == "__main__":
    run_cli(main)
