"""Generates text as base.py does, from a model whose layers are split over several processes, a device each.

python generate/tp.py --devices 3 --prompts '["What food do llamas eat?", "Write one sentence about the sea."]'
torchrun --nproc-per-node 2 generate/tp.py --checkpoint_dir checkpoints/Qwen3-0.6B --prompts in.jsonl --out out.jsonl
"""

import sys
from pathlib import Path
from typing import Any, Literal

if __name__ == "__main__":  # from a bare clone, and from any folder
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from generate.base import run
from lit_gen import GPT
from lit_gen.checkpoint import load_config, load_model, weight_format
from lit_gen.cut import Cut, check_ranks
from lit_gen.download import fetch_default_model
from lit_gen.fabric import Precision, Quantize, setup_ranks
from lit_gen.lora import load_lora, merge_lora
from lit_gen.lora_parts import LoRA, digest
from lit_gen.lora_rows import check_use
from lit_gen.prepare import prepare_model
from lit_gen.ranks import Ranks
from lit_gen.tensor_parallel import split_lora, split_model
from lit_gen.utils import UserError, run_cli


def main(
    prompts: str | list[str] = "What food do llamas eat?",
    *,
    devices: int | Literal["auto"] = "auto",
    timeout: int = 600,
    lora_path: Path | None = None,
    check_base: bool = True,
    shard: str | None = None,
    checkpoint_dir: Path | None = None,
    precision: Precision | None = None,
    quantize: Quantize | None = None,
    compile: bool = False,
    **kwargs: Any,
) -> None:
    """Generates text for a list of prompts of any lengths, from a model whose layers are split over several processes.

    Args:
        prompts: A text, a JSON list of texts, a .txt file (a prompt a line), a .jsonl file (objects), or - for stdin.
        devices: Over how many processes of this machine the model is split; auto: as torchrun says, or all GPUs.
        timeout: Seconds that a process waits for another one's part of a result. One that dies is noticed at once.
        lora_path: A LoRA to add to the weights: a PEFT folder or a lit_model_lora.safetensors.
        check_base: Refuse an adapter whose config names another model than the path of the checkpoint does.
        shard: i/n: only the prompts i, i + n, ...; by default the share of this machine, if torchrun says of several.
        checkpoint_dir: A Hugging Face folder, a lit folder or a .gguf file; by default SmolLM2-135M-Instruct, fetched.
        precision: By default 32-true on a CPU, and 16 bits on a GPU.
        quantize: Keep the weights of linear layers in 8 or 4 bits: int8 or int4.
        compile: Not possible here.
    """
    if compile or quantize in ("nf4", "bnb-int8"):
        what = "--compile true" if compile else f"--quantize {quantize}"
        raise UserError(f"{what} does not go with a model that is split: leave it out, or take --quantize int8")
    fabric = setup_ranks(precision, devices, timeout)
    ranks = Ranks(fabric.strategy.device_mesh, timeout)

    def part(path: Path, lora: LoRA, dtype: torch.dtype, device: torch.device) -> GPT:
        """This rank's part of the model."""
        cuts: dict[str, Cut] = {}

        def split(model: GPT) -> dict[str, Cut]:
            cuts.update(split_model(model, ranks.mesh, device))
            return cuts

        model = load_model(path, dtype, device, split)
        return model if digest(lora) in model.merged else merge_lora(model, split_lora(lora, model, cuts))

    def read_lora(path: Path) -> LoRA:
        return {} if lora_path is None else load_lora(lora_path, load_config(path), path if check_base else None)

    def follow() -> GPT:
        path = checkpoint_dir or fetch_default_model()
        format = weight_format(path, quantize, fabric.strategy.precision.precision)
        return prepare_model(fabric, lambda *how: part(path, read_lora(path), *how), format)

    if ranks.rank:
        return ranks.follow(follow)
    with ranks:
        path = checkpoint_dir or fetch_default_model()
        config, lora = load_config(path), read_lora(path)
        check_ranks(config, ranks.mesh.size())
        check_use(config, {"(merged)": lora}, merge=True)
        if shard is not None and ranks.shard != "0/1":
            raise UserError(f"--shard {shard} would be that of each machine: leave it out, or start each by itself")

        def load(*how: Any) -> GPT:
            ranks.loading()
            return ranks.lead(part(path, lora, *how))

        adapters, shard = {"(merged)": digest(lora)} if lora else None, shard or ranks.shard
        run(fabric, path, load, prompts, quantize=quantize, adapters=adapters, shard=shard, **kwargs)


if __name__ == "__main__":
    run_cli(main)
