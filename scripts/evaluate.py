"""Evaluates a model on tasks of EleutherAI's lm-eval, in batches in which each text has the score it would have alone.

    pip install -e '.[eval]'
    python scripts/evaluate.py --tasks hellaswag,piqa --precision bf16-true
    python scripts/evaluate.py --tasks my_task.yaml --limit 100 --out results.json --log_samples true
    python scripts/evaluate.py --tasks gsm8k --apply_chat_template true --use_cache cache/gsm8k   # again: goes on

A task is a name that lm-eval knows, whose data comes from the Hugging Face Hub, or a YAML file, whose data may lie on
this machine: `dataset_path: json` and `dataset_kwargs: {data_files: {test: questions.jsonl}}`. lm-eval's --use_cache
keeps each result as soon as it is there; its name here gets a digest of the model and of what changes its numbers, so
that it never answers for another model. (It holds Python pickles: use only what you made yourself.)
"""

import hashlib
import json
import sys
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

if __name__ == "__main__":  # from a bare clone, and from any folder
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from lit_gen import Tokenizer
from lit_gen.download import fetch_default_model
from lit_gen.fabric import Precision, Quantize, setup_fabric
from lit_gen.job import fingerprint_model
from lit_gen.source import Source, open_source
from lit_gen.utils import UserError, run_cli


@dataclass
class Asking:
    """How lm-eval asks; raises UserError for what does not go together.

    Args:
        limit: Only the first questions of each task: so many, or a share of them if below 1.
        num_fewshot: Examples before each question; by default the task's own number.
        apply_chat_template: Put prompts into the checkpoint's chat template.
        fewshot_as_multiturn: Make examples turns of the conversation; by default if there is a chat template.
        system_instruction: What stands before all prompts.
        gen_kwargs: Settings of generated texts beside the tasks', such as {"temperature": 0.7, "do_sample": true}.
        cache_requests: Keep prompts, too, in lm-eval's own folder.
    """

    limit: float | None = None
    num_fewshot: int | None = None
    apply_chat_template: bool = False
    fewshot_as_multiturn: bool | None = None
    system_instruction: str | None = None
    gen_kwargs: dict[str, Any] | None = None
    cache_requests: bool = False

    def __post_init__(self) -> None:
        if self.limit is not None and not self.limit > 0:
            raise UserError(f"limit is {self.limit}, but must be a number of questions, or a share of them below 1")
        if self.num_fewshot is not None and self.num_fewshot < 0:
            raise UserError(f"num_fewshot is {self.num_fewshot}, but must be a whole number >= 0")
        if self.fewshot_as_multiturn is None:
            self.fewshot_as_multiturn = self.apply_chat_template
        if self.fewshot_as_multiturn and not self.apply_chat_template:
            raise UserError("--fewshot_as_multiturn true needs --apply_chat_template true")


def evaluate(
    source: Source,
    names: list[str],
    *,
    batch_size: int | None = None,
    max_length: int | None = None,
    seed: int | None = None,
    include_path: Path | None = None,
    use_cache: Path | None = None,
    out: Path | None = None,
    log_samples: bool = False,
    **kwargs: Any,
) -> dict[str, Any]:
    """Returns lm-eval's results.

    Args:
        batch_size: Texts that run at a time; by default, and at most, as many as fit into memory.
        max_length: Most tokens of a text; by default the model's context. Longer ones are cut at the beginning.
        seed: Of examples and of sampled texts; by default lm-eval's, 1234.
        include_path: A folder with more tasks.
        use_cache: Begin of the name of a file that keeps what is computed, and may have it already.
        out: File for lm-eval's results, JSON.
        log_samples: Write what was asked and answered, too, in files beside --out.
    """
    from lm_eval import simple_evaluate

    from scripts.evaluate_lm import LitGenLM
    from scripts.evaluate_settings import settings_of
    from scripts.evaluate_tasks import load_tasks, output_files, write_results

    asking, tokenizer = Asking(**kwargs), Tokenizer(source.path)
    if asking.apply_chat_template and tokenizer.chat_template is None:
        raise UserError(f"{source.path} has no chat template: leave --apply_chat_template out")
    settings_of(asking.gen_kwargs or {}, 1)  # raises for what it does not know
    lm = LitGenLM(source, tokenizer, batch_size, max_length, 1234 if seed is None else seed)
    manager, tasks = load_tasks(names, include_path)
    files = output_files(out, list(manager.load(tasks)["tasks"]), log_samples)
    how = asdict(asking)
    if use_cache is not None:
        numbers = json.dumps([fingerprint_model(source.path), lm.get_model_info()], sort_keys=True)
        how["use_cache"] = f"{use_cache}-{hashlib.sha256(numbers.encode()).hexdigest()[:12]}"
    if seed is not None:
        how |= {f"{name}_random_seed": seed for name in ("numpy", "torch", "fewshot")}
    how |= {"batch_size": batch_size, "device": str(source.device), "log_samples": log_samples}
    results = simple_evaluate(model=lm, tasks=tasks, task_manager=manager, **how)
    write_results(results, files)
    return results


def main(
    tasks: str | list[str],
    *,
    checkpoint_dir: Path | None = None,
    lora_path: Path | None = None,
    adapter_path: Path | None = None,
    check_base: bool = True,
    precision: Precision | None = None,
    quantize: Quantize | None = None,
    batch_invariant: bool | Literal["auto"] = "auto",
    **kwargs: Any,
) -> None:
    """Evaluates a model on tasks of lm-eval, and prints its table.

    Args:
        tasks: Names, patterns or YAML files, with commas between them or as a JSON list.
        checkpoint_dir: A Hugging Face folder, a lit folder or a .gguf file; by default SmolLM2-135M-Instruct, fetched.
        lora_path: A PEFT folder or a lit_model_lora.safetensors, to be added to the weights.
        adapter_path: lit_model_adapter.safetensors or lit_model_adapter_v2.safetensors, or the folder that holds it.
        check_base: Refuse a LoRA whose config names another model than the path of the checkpoint does.
        precision: By default 32-true on a CPU, and 16 bits on a GPU.
        quantize: Keep the weights of linear layers in 8 or 4 bits; nf4 and bnb-int8 are for GPUs.
        batch_invariant: true proves that rows get the same bits in every batch or ends; false does not look.
    """
    names = [name for name in (tasks.split(",") if isinstance(tasks, str) else tasks) if name]
    if find_spec("lm_eval") is None:
        raise UserError("evaluation needs a package: pip install 'lm-eval>=0.4.12'")
    path, fabric = checkpoint_dir or fetch_default_model(), setup_fabric(precision, quantize)
    parts = {"lora": lora_path, "adapter": adapter_path, "check_base": check_base}
    source = open_source(path, fabric, quantize=quantize, batch_invariant=batch_invariant, **parts)
    results = evaluate(source, names, **kwargs)

    from lm_eval.utils import make_table

    print(make_table(results))
    if results.get("groups"):
        print(make_table(results, "groups"))


if __name__ == "__main__":
    run_cli(main)
