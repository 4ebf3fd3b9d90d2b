"""Folds an adapter v2 into a checkpoint and writes a lit folder, which loads as any other.

    python scripts/merge_adapter_v2.py --checkpoint_dir checkpoints/Qwen3-4B --adapter_path out/v2 --out_dir out/merged
    python generate/base.py --checkpoint_dir out/merged --prompts "Hello"

Scales, biases and norms can be folded, a prefix cannot: an ordinary checkpoint has no place for it. So an adapter is
refused that was trained with one (scripts/finetune.py --adapter.length 0 trains without). The folder stays a lit one:
its layers have biases that a Hugging Face config of the family may not know.
"""

import sys
from pathlib import Path
from typing import Literal

if __name__ == "__main__":  # from a bare clone, and from any folder
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from lit_gen.adapter_v2 import UNFOLDABLE, fold_adapter_v2, load_adapter_v2, open_adapter_v2
from lit_gen.checkpoint import load_config, load_model, weight_format
from lit_gen.download import fetch_default_model
from lit_gen.export import save_lit
from lit_gen.utils import UserError, run_cli


def main(
    *,
    out_dir: Path,
    adapter_path: Path,
    checkpoint_dir: Path | None = None,
    dtype: Literal["float32", "bfloat16", "float16"] | None = None,
) -> None:
    """Folds an adapter v2 without a prefix into the weights of a checkpoint, in float32, and writes a lit folder.

    Args:
        out_dir: Where to; made if it does not exist.
        adapter_path: lit_model_adapter_v2.safetensors, or the folder that holds it.
        checkpoint_dir: A Hugging Face folder, a lit folder or a .gguf file; by default SmolLM2-135M-Instruct, fetched.
        dtype: Of the weights; by default the file's own (float32 for a quantized .gguf file).
    """
    source = checkpoint_dir or fetch_default_model()
    if format := weight_format(source, None, "32-true"):
        raise UserError(f"{source} has {format} weights, into which no adapter can be folded: take the original")
    if open_adapter_v2(adapter_path, load_config(source)).prefix_counts:
        raise UserError(UNFOLDABLE)
    model = load_model(source, getattr(torch, dtype) if dtype else None, torch.device("cpu"))
    save_lit(fold_adapter_v2(load_adapter_v2(model, adapter_path)), out_dir, source)
    print(f"{out_dir}: {source} with {adapter_path}", file=sys.stderr)


if __name__ == "__main__":
    run_cli(main)
