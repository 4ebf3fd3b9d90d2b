"""Generates text as base.py does, from a model with a LoRA: merged into the weights, or several side by side.

    python generate/lora.py --lora_path adapters/french --prompts "Hello"
    python generate/lora.py --lora_path fr=adapters/french --lora_path de=adapters/german --merge false \\
        --prompts rows.jsonl          # {"prompt": "Hello", "lora": "de"}
"""

import os
import re
import sys
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # from a bare clone, and from any folder
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from generate.base import run
from lit_gen import GPT
from lit_gen.checkpoint import load_config, weight_format
from lit_gen.download import fetch_default_model
from lit_gen.fabric import Precision, Quantize, setup_fabric, uses_bitsandbytes
from lit_gen.lora import load_lora, merge_lora
from lit_gen.lora_layers import BASE
from lit_gen.lora_parts import digest
from lit_gen.lora_rows import attach_loras, check_use
from lit_gen.utils import UserError, run_cli

UNNAMED = "default"


def main(
    prompts: str | list[str] = "What food do llamas eat?",
    *,
    lora_path: list[str] | str,
    merge: bool = True,
    check_base: bool = True,
    checkpoint_dir: Path | None = None,
    precision: Precision | None = None,
    quantize: Quantize | None = None,
    **kwargs: Any,
) -> None:
    """Generates text for a list of prompts of any lengths, from a model with a LoRA.

    Args:
        prompts: A text, a JSON list of texts, a .txt file (a prompt a line), a .jsonl file (objects), or - for stdin.
        lora_path: A PEFT folder or a lit_model_lora.safetensors, or name=path; may be given several times.
        merge: Add it to the weights. false keeps adapters beside them, for rows that name one ("lora" in .jsonl, or
            --lora); a row that names none has the one without a name, or the only one, or else the model as it is.
        check_base: Refuse an adapter whose config names another model than the path of the checkpoint does.
        checkpoint_dir: A Hugging Face folder, a lit folder or a .gguf file; by default SmolLM2-135M-Instruct, fetched.
        precision: By default 32-true on a CPU, and 16 bits on a GPU.
        quantize: Keep the weights of linear layers in 8 or 4 bits; nf4 and bnb-int8 are for GPUs.
    """
    path = checkpoint_dir or fetch_default_model()
    paths, config = by_name([lora_path] if isinstance(lora_path, str) else lora_path), load_config(path)
    if merge and len(paths) > 1:
        raise UserError(f"{len(paths)} adapters cannot all be in the weights: add --merge false, or give one")
    fabric = setup_fabric(precision, quantize)
    if merge and (format := weight_format(path, None, fabric.strategy.precision.precision)):
        raise UserError(f"{path} has {format} weights, to which no LoRA can be added: give --merge false")
    if not merge and uses_bitsandbytes(fabric):
        raise UserError(f"--quantize {quantize} does not go with --merge false: take int8 or int4")
    loras = {name: load_lora(folder, config, path if check_base else None) for name, folder in paths.items()}
    check_use(config, loras, merge)
    adapters = {} if merge else {BASE: ""}
    adapters |= {"(merged)" if merge else name: digest(lora) for name, lora in loras.items()}

    def load(dtype: torch.dtype, device: torch.device) -> GPT:
        model = GPT.from_checkpoint(path, dtype, device)
        if merge:
            return merge_lora(model, *loras.values())
        return attach_loras(model, loras, UNNAMED if UNNAMED in loras else None)

    run(fabric, path, load, prompts, quantize=quantize, adapters=adapters, **kwargs)


def by_name(paths: list[str]) -> dict[str, Path]:
    """The adapters of `name=path` and `path`, by name."""
    found = {}
    for text in paths:
        match = None if os.path.exists(text) else re.fullmatch(r"([\w.-]+)=(.+)", text)
        name, path = (match[1], match[2]) if match else (UNNAMED, text)
        if name in found or name == BASE:
            what = (
                f"the adapter {name} is given twice" if name in found else f'"{BASE}" is the model without an adapter'
            )
            raise UserError(f"{what}: give each --lora_path a name of its own, as in french={path}")
        found[name] = Path(path)
    if not found:
        raise UserError("--lora_path names no adapter: give a folder")
    return found


if __name__ == "__main__":
    run_cli(main, repeated=("lora_path",))
