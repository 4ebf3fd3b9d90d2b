"""Converts a Hugging Face folder or a .gguf file to a lit folder: lit_model.safetensors and lit_config.json.

    python scripts/convert_hf_checkpoint.py --checkpoint_dir checkpoints/SmolLM2-135M-Instruct --out_dir checkpoints/lit

Generation reads Hugging Face folders and .gguf files as they are; a lit folder is for those who want to edit weights by
our names, in our fused layout.
"""

import sys
from pathlib import Path
from typing import Literal

if __name__ == "__main__":  # from a bare clone, and from any folder
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from lit_gen.checkpoint import load_model
from lit_gen.export import save_lit
from lit_gen.utils import run_cli


def main(
    *,
    checkpoint_dir: Path,
    out_dir: Path,
    dtype: Literal["float32", "bfloat16", "float16"] | None = None,
) -> None:
    """Converts a Hugging Face folder or a .gguf file to a lit folder.

    Args:
        checkpoint_dir: What to convert.
        out_dir: Where to; made if it does not exist.
        dtype: Of the weights; by default the file's own (float32 for a quantized .gguf file).
    """
    model = load_model(checkpoint_dir, getattr(torch, dtype) if dtype else None, torch.device("cpu"))
    save_lit(model, out_dir, checkpoint_dir)
    print(f"{out_dir}: {sum(p.numel() for p in model.parameters()):,} parameters", file=sys.stderr)


if __name__ == "__main__":
    run_cli(main)
