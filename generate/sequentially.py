"""Generates text as base.py does, from a model whose layers are spread over the devices of one machine.

    python generate/sequentially.py --devices 4 --checkpoint_dir checkpoints/Qwen3-32B --prompts "Hello"
    python generate/sequentially.py --devices '["cuda:0", "cuda:2"]' --lora_path adapters/french --prompts rows.jsonl

Each device gets layers that follow each other, and about as many bytes as every other one (see lit_gen/spread.py).
"""

import sys
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # from a bare clone, and from any folder
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from generate.base import run
from lit_gen import GPT
from lit_gen.checkpoint import load_config
from lit_gen.download import fetch_default_model
from lit_gen.fabric import Precision, Quantize, setup_fabric
from lit_gen.settings import check_count
from lit_gen.source import open_trained
from lit_gen.spread import Spread, parse_devices
from lit_gen.utils import UserError, run_cli, say


def main(
    prompts: str | list[str] = "What food do llamas eat?",
    *,
    devices: int | str | list[str] = "auto",
    group_rows: int = 128,
    lora_path: Path | None = None,
    adapter_path: Path | None = None,
    check_base: bool = True,
    checkpoint_dir: Path | None = None,
    precision: Precision | None = None,
    quantize: Quantize | None = None,
    **kwargs: Any,
) -> None:
    """Generates text for a list of prompts of any lengths, with the layers of the model on several devices.

    Args:
        prompts: A text, a JSON list of texts, a .txt file (a prompt a line), a .jsonl file (objects), or - for stdin.
        devices: How many GPUs; auto for all; or a JSON list, such as ["cuda:0", "cuda:2"] or ["cpu", "cpu"].
        group_rows: Twice as many rows go through the devices in two groups, so that these work at the same time.
        lora_path: A PEFT folder or a lit_model_lora.safetensors, to be added to the weights.
        adapter_path: lit_model_adapter.safetensors or lit_model_adapter_v2.safetensors, or the folder that holds it.
        check_base: Refuse a LoRA whose config names another model than the path of the checkpoint does.
        checkpoint_dir: A Hugging Face folder, a lit folder or a .gguf file; by default SmolLM2-135M-Instruct, fetched.
        precision: By default 32-true on a CPU, and 16 bits on a GPU.
        quantize: Keep the weights of linear layers in 8 or 4 bits.
    """
    check_count("group_rows", group_rows)
    places = parse_devices(devices)
    if len(places) > 1 and kwargs.get("compile"):
        raise UserError(f"--compile goes with one device, not with {len(places)}: leave it out")
    path = checkpoint_dir or fetch_default_model()
    config = load_config(path)
    spread = Spread.of(config, places)
    fabric = setup_fabric(precision, quantize, places)
    added = {"lora": lora_path, "adapter": adapter_path, "check_base": check_base}
    trained = open_trained(path, config, fabric.strategy.precision.precision, **added)

    def load(dtype: torch.dtype, device: torch.device) -> GPT:
        say(str(spread))
        model = trained.add(GPT.from_checkpoint(path, dtype, places))
        model.group_rows = group_rows if len(places) > 1 else None
        return model

    adapters = {trained.name: trained.digest} if trained.name else None
    run(fabric, path, load, prompts, quantize=quantize, adapters=adapters, **kwargs)


if __name__ == "__main__":
    run_cli(main)
