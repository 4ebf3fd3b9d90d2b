"""Rounds the weights of a checkpoint to 8 or 4 bits once, and writes a lit folder that loads directly.

    python scripts/quantize.py --checkpoint_dir checkpoints/Qwen3-4B --format int8 --out_dir checkpoints/Qwen3-4B-int8
    python generate/base.py --checkpoint_dir checkpoints/Qwen3-4B-int8 --prompts "Hello"

The result is, bit for bit, what `generate/base.py --quantize int8` makes of the checkpoint each time it is loaded in
the same dtype. The folder is smaller, and loading it needs less memory.
"""

import sys
from pathlib import Path
from typing import Literal

if __name__ == "__main__":  # from a bare clone, and from any folder
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from lit_gen.checkpoint import LIT_MODEL, load_model
from lit_gen.download import fetch_default_model
from lit_gen.export import save_lit
from lit_gen.quantize import Format, quantize_model
from lit_gen.utils import run_cli


def main(
    *,
    out_dir: Path,
    checkpoint_dir: Path | None = None,
    format: Format = "int8",
    dtype: Literal["float32", "bfloat16", "float16"] | None = None,
) -> None:
    """Rounds the weights of a checkpoint to 8 or 4 bits and writes a lit folder.

    Args:
        out_dir: Where to; made if it does not exist.
        checkpoint_dir: A Hugging Face folder, a lit folder or a .gguf file; by default SmolLM2-135M-Instruct, fetched.
        format: int8 (a factor for each output) or int4 (a factor and a least value for each 32 inputs).
        dtype: Of what is not rounded, embeddings and norms; by default the file's own (float32 of a .gguf file).
    """
    source = checkpoint_dir or fetch_default_model()
    model = load_model(source, getattr(torch, dtype) if dtype else None, torch.device("cpu"))
    quantize_model(model, format)
    save_lit(model, out_dir, source)
    print(f"{out_dir}: {(out_dir / LIT_MODEL).stat().st_size / 1e6:,.1f} MB of weights", file=sys.stderr)


if __name__ == "__main__":
    run_cli(main)
