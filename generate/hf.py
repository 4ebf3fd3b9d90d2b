"""A model behind transformers' own `generate`: its searches, logits processors, stops and streamers, and our forward.

    python generate/hf.py --prompts '["What food do llamas eat?", "Hi"]' --num_beams 4 --repetition_penalty 1.3

    model = GPTForCausalLM.from_pretrained("checkpoints/SmolLM2-135M-Instruct")
    ids = model.generate(**tokenizer(texts, padding=True, return_tensors="pt"), num_beams=4)

In float32 the ids are those of transformers' own model. Read GPTForCausalLM, then lit_gen/hf_cache.py.
"""

import sys
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # from a bare clone, and from any folder
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor

from lit_gen import GPT, Tokenizer
from lit_gen.checkpoint import load_config, weight_format
from lit_gen.download import fetch_default_model
from lit_gen.fabric import Precision, Quantize, setup_fabric
from lit_gen.hf_cache import CallerCache, check_shapes, padded_logits
from lit_gen.hf_job import checkpoint_options, read_ids, rows_at_a_time, search_options, search_texts
from lit_gen.prepare import prepare_model
from lit_gen.undisturbed import in_eval_mode
from lit_gen.utils import UserError, printable, run_cli, say

try:
    from transformers import Cache, GenerationConfig, GenerationMixin, PreTrainedConfig, PreTrainedModel
    from transformers.modeling_outputs import CausalLMOutputWithPast
    from transformers.utils.deprecation import deprecate_kwarg
except ImportError as error:
    needed = f"generate/hf.py needs transformers: pip install 'transformers>=5.24' ({error})"
    if __name__ == "__main__":
        sys.exit(say(f"error: {needed}") or 2)
    raise ImportError(needed) from error


class GPTCache(CallerCache, Cache):
    """Our cache, and one in transformers' eyes."""


class GPTForCausalLM(PreTrainedModel, GenerationMixin):
    """A GPT with the face of transformers' models: their `forward`, and `generate`.

    A row has the same bits alone and in a batch where it has them in base.py, if no option looks at the padding.

    Args:
        model: as it is: packed or not, with adapters or not.
        generation_config: what `generate` does by default; None is transformers' own default.
        pad_to_multiple: fill up prompts to a multiple of so many columns.
        cache_length: columns of every cache. Both together bound how many shapes a compiler meets.
    """

    def __init__(
        self,
        model: GPT,
        generation_config: GenerationConfig | None = None,
        pad_to_multiple: int = 1,
        cache_length: int | None = None,
    ) -> None:
        V, context = model.config.vocab_size, model.config.block_size
        super().__init__(PreTrainedConfig(vocab_size=V, max_position_embeddings=context))
        check_shapes(pad_to_multiple, cache_length)
        self.model, self.pad_to_multiple, self.cache_length = model, pad_to_multiple, cache_length
        self.generation_config = generation_config or GenerationConfig()

    @classmethod
    def from_pretrained(
        cls, path: Path | str, dtype: torch.dtype | None = None, device: torch.device | str = "cpu", **shapes: Any
    ) -> "GPTForCausalLM":
        """As `GPT.from_checkpoint`, with generation_config.json; `pack_model(model.model)` then makes it fast."""
        defaults = checkpoint_options(Path(path), Tokenizer(path))
        return cls(GPT.from_checkpoint(path, dtype, device), defaults, **shapes)

    def save_pretrained(self, *_: Any, **__: Any) -> None:
        raise NotImplementedError("transformers could not load it: save model.model as lit_gen does")

    @property
    def device(self) -> torch.device:
        return self.model.wte.weight.device

    @property
    def dtype(self) -> torch.dtype:  # a packed model may have no parameters
        return self.model.wte.weight.dtype

    def new_cache(self, columns: int = 0) -> GPTCache:
        """An empty cache for one batch of any size, which grows beyond `columns` unless `cache_length` is set."""
        return GPTCache(self.cache_length or columns, fixed=self.cache_length is not None)

    @deprecate_kwarg("past_key_values", "5.40.0", new_name="cache")
    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: GPTCache | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        return_dict: bool = True,
        tokenizer: Any = None,
    ) -> CausalLMOutputWithPast | tuple:
        """Logits (B, T, V) of input_ids (B, T), and their loss if there are labels (B, T), -100 for those not to learn.

        Args:
            attention_mask: (B, past + T), 1 for tokens, 0 for padding on either side. All positions follow from it.
            cache: that of an earlier call, or `new_cache()`; of such a call no gradients are recorded.
            use_cache: whether to begin one; None does so unless gradients are recorded.
            logits_to_keep: logits of so many last columns, or of these, (n,); 0 is all. 1 means each row's last token,
                also where padding follows.
            tokenizer: not used; `generate` passes it on with stop_strings.
        """
        if cache is None and (use_cache or (use_cache is None and not torch.is_grad_enabled())):
            cache = self.new_cache()
        how = {"position_ids": position_ids, "keep": logits_to_keep, "multiple": self.pad_to_multiple}
        logits, V = padded_logits(self.model, input_ids, attention_mask, cache, **how), self.config.vocab_size
        loss = None if labels is None else self.loss_function(logits=logits, labels=labels, vocab_size=V)
        output = CausalLMOutputWithPast(loss=loss, logits=logits, cache=cache)
        return output if return_dict else output.to_tuple()

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """transformers' `generate`, in eval mode. Only sampling draws random numbers: PyTorch's, as it does there."""
        with in_eval_mode(self):
            return super().generate(*args, **kwargs)

    def _prepare_position_ids_for_generation(self, *_: Any) -> None:
        """None: `forward` knows them from the mask, also for rows that are padded on the right."""

    def _prepare_cache_for_generation(
        self, generation_config: GenerationConfig, model_kwargs: dict[str, Any], _: Any, __: int, columns: int
    ) -> None:
        given, kind = model_kwargs.get("cache"), generation_config.cache_implementation
        if kind not in (None, "dynamic"):
            raise UserError(f"cache_implementation={kind!r} is transformers' own: leave it out, or set cache_length")
        if given is None and generation_config.use_cache:
            model_kwargs["cache"] = self.new_cache(columns)
        elif given is not None and not isinstance(given, GPTCache):
            raise UserError(f"{type(given).__name__} is none of this model's: leave it out, or give model.new_cache()")


def main(
    prompts: str | list[str] = "What food do llamas eat?",
    *,
    checkpoint_dir: Path | None = None,
    precision: Precision | None = None,
    quantize: Quantize | None = None,
    chat: bool | None = None,
    max_batch_size: int | None = None,
    stop: list[str] | None = None,
    seed: int = 1234,
    assistant_dir: Path | None = None,
    compile: bool = False,
    pad_to_multiple: int = 1,
    cache_length: int | None = None,
    **kwargs: Any,
) -> None:
    """Generates text by the searches of transformers; texts go to stdout in the order of the prompts.

    Options that are not given are those of the checkpoint's generation_config.json. No --out here, see base.py.

    Args:
        prompts: A text, a JSON list of texts, a .txt file (a prompt a line), a .jsonl file (objects), or - for stdin.
        checkpoint_dir: A Hugging Face folder, a lit folder or a .gguf file; by default SmolLM2-135M-Instruct, fetched.
        precision: By default 32-true on a CPU, and 16 bits on a GPU.
        quantize: Keep the weights of linear layers in 8 or 4 bits; nf4 and bnb-int8 are for GPUs.
        chat: Put prompts into the checkpoint's chat template; by default if there is one.
        max_batch_size: Prompts that run at a time: 16, or 1 with guesses.
        stop: Texts that end a row.
        seed: Of sampling. As always in transformers, a sampled row depends on its neighbours.
        assistant_dir: Checkpoint of a smaller model with the same vocabulary, which guesses tokens.
        compile: Use torch.compile, which pays for long jobs on a GPU.
        pad_to_multiple: Fill up prompts to a multiple of so many columns, so that there are few shapes.
        cache_length: Columns of every cache, so that all have one shape.
    """
    check_shapes(pad_to_multiple, cache_length)
    path, options = checkpoint_dir or fetch_default_model(), search_options(**kwargs)
    tokenizer, config = Tokenizer(path), load_config(path)
    ids = read_ids(prompts, tokenizer, config, chat, options["max_new_tokens"], cache_length)
    size, fabric = rows_at_a_time(max_batch_size, options, assistant_dir, config), setup_fabric(precision, quantize)

    def load(path: Path) -> GPTForCausalLM:
        format = weight_format(path, quantize, fabric.strategy.precision.precision)
        defaults, shapes = checkpoint_options(path, tokenizer), (pad_to_multiple, cache_length)
        model = prepare_model(fabric, lambda *how: GPT.from_checkpoint(path, *how), format, compile=compile)
        return GPTForCausalLM(model.module, defaults, *shapes)

    model, options["assistant_model"] = load(path), assistant_dir and load(assistant_dir)
    torch.manual_seed(seed)
    with fabric.autocast():
        for text in search_texts(model, tokenizer, ids, size, stop or [], **options):
            print(printable(text) if sys.stdout.isatty() else text, flush=True)


if __name__ == "__main__":
    run_cli(main)
