"""Converts a lit folder back to a Hugging Face folder, tensor for tensor what it was converted from.

python scripts/convert_lit_checkpoint.py --checkpoint_dir checkpoints/lit --out_dir checkpoints/hf
"""

import sys
from pathlib import Path

if __name__ == "__main__":  # from a bare clone, and from any folder
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from lit_gen.checkpoint import load_model
from lit_gen.export import save_hf
from lit_gen.utils import run_cli


def main(*, checkpoint_dir: Path, out_dir: Path) -> None:
    """Converts a lit folder (or any other checkpoint) to a Hugging Face folder.

    Args:
        checkpoint_dir: What to convert. Its config.json, or that of the .gguf file, becomes the new folder's.
        out_dir: Where to; made if it does not exist.
    """
    model = load_model(checkpoint_dir, None, torch.device("cpu"))
    save_hf(model, out_dir, checkpoint_dir)
    print(f"{out_dir}: {sum(p.numel() for p in model.parameters()):,} parameters", file=sys.stderr)


if __name__ == "__main__":
    run_cli(main)
