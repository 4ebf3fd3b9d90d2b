"""Generates text with a base model and a trained adapter v2: loads both, then does what generate/base.py does.

python generate/adapter_v2.py --adapter_path out/v2 --checkpoint_dir checkpoints/Qwen3-0.6B --prompts "Hello"

An adapter without a prefix (trained with --adapter.length 0) can be folded into a checkpoint of its own, which
generate/base.py reads: scripts/merge_adapter_v2.py.
"""

import sys
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # from a bare clone, and from any folder
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from generate.base import run
from lit_gen import GPT
from lit_gen.adapter_v2 import load_adapter_v2, open_adapter_v2
from lit_gen.checkpoint import load_config
from lit_gen.download import fetch_default_model
from lit_gen.fabric import Precision, Quantize, setup_fabric
from lit_gen.utils import run_cli
from lit_gen.wheel import sha256_of


def main(
    prompts: str | list[str] = "What food do llamas eat?",
    *,
    adapter_path: Path,
    checkpoint_dir: Path | None = None,
    precision: Precision | None = None,
    quantize: Quantize | None = None,
    **kwargs: Any,
) -> None:
    """Generates text with a base model and an adapter that scripts/finetune.py --method adapter_v2 has trained on it.

    Args:
        prompts: A text, a JSON list of texts, a .txt file (a prompt a line), a .jsonl file (objects), or - for stdin.
        adapter_path: lit_model_adapter_v2.safetensors, or the folder that holds it.
        checkpoint_dir: The base: a Hugging Face folder, a lit folder or a .gguf file; by default SmolLM2-135M-Instruct.
        precision: By default 32-true on a CPU, and 16 bits on a GPU.
        quantize: Keep the weights of linear layers in 8 or 4 bits; nf4 and bnb-int8 are for GPUs.
    """
    path, fabric = checkpoint_dir or fetch_default_model(), setup_fabric(precision, quantize)
    file = open_adapter_v2(adapter_path, load_config(path)).file  # a wrong one is refused before any work

    def load(*how: Any) -> GPT:
        return load_adapter_v2(GPT.from_checkpoint(path, *how), file)

    run(fabric, path, load, prompts, quantize=quantize, adapters={f"({file.name})": sha256_of(file)}, **kwargs)


if __name__ == "__main__":
    run_cli(main)
