"""Adds a LoRA to the weights of a checkpoint and writes a lit folder, which loads as any other.

python scripts/merge_lora.py --checkpoint_dir checkpoints/Qwen3-4B --lora_path adapters/french --out_dir checkpoints/fr
python generate/base.py --checkpoint_dir checkpoints/fr --prompts "Hello"
"""

import sys
from pathlib import Path
from typing import Literal

if __name__ == "__main__":  # from a bare clone, and from any folder
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from lit_gen.checkpoint import load_config, load_model, weight_format
from lit_gen.download import fetch_default_model
from lit_gen.export import save_lit
from lit_gen.lora import load_lora, merge_lora
from lit_gen.lora_rows import check_use
from lit_gen.utils import UserError, run_cli


def main(
    *,
    out_dir: Path,
    lora_path: Path,
    checkpoint_dir: Path | None = None,
    check_base: bool = True,
    dtype: Literal["float32", "bfloat16", "float16"] | None = None,
) -> None:
    """Adds a LoRA to the weights of a checkpoint, in float32, and writes a lit folder.

    Args:
        out_dir: Where to; made if it does not exist.
        lora_path: A PEFT folder or a lit_model_lora.safetensors.
        checkpoint_dir: A Hugging Face folder, a lit folder or a .gguf file; by default SmolLM2-135M-Instruct, fetched.
        check_base: Refuse an adapter whose config names another model than the path of the checkpoint does.
        dtype: Of the weights; by default the file's own (float32 for a quantized .gguf file).
    """
    source = checkpoint_dir or fetch_default_model()
    config = load_config(source)
    if format := weight_format(source, None, "32-true"):
        raise UserError(f"{source} has {format} weights, to which no LoRA can be added: take the original")
    lora = load_lora(lora_path, config, source if check_base else None)
    check_use(config, {lora_path.name: lora}, merge=True)
    model = load_model(source, getattr(torch, dtype) if dtype else None, torch.device("cpu"))
    save_lit(merge_lora(model, lora), out_dir, source)
    print(f"{out_dir}: {len(lora)} weights with {lora_path}", file=sys.stderr)


if __name__ == "__main__":
    run_cli(main)
