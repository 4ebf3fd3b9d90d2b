"""Text to token ids and back, for every layout of tokenizer files, with BOS, EOS and stops as the checkpoint has them.

`tokenizer_files.py` says which files are read, `tokenizer_backends.py` wraps the libraries, `gguf_tokenizer.py` reads
a .gguf file's, `chat.py` renders templates.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lit_gen import chat
from lit_gen.tokenizer_backends import HuggingFace, SentencePiece, TextStream
from lit_gen.tokenizer_files import find_stop_ids, id_list, read_files, token_text
from lit_gen.utils import UserError

# SentencePiece tokenizers that begin with BOS if no file says otherwise: by class, by model type if none is named.
BOS_CLASSES = ("LlamaTokenizer", "GemmaTokenizer")
BOS_MODEL_TYPES = ("llama", "mistral", "mixtral", "phi3", "gemma")


class Tokenizer:
    """The tokenizer of a checkpoint.

    Args:
        path: a Hugging Face folder, a lit folder (which holds the same files), a .gguf file, or a folder whose only
            tokenizer is one .gguf file. Of several tokenizer.json is used, then tokenizer.model, then vocab.json.

    Attributes:
        vocab_size: number of ids that the tokenizer knows, with added tokens. The model may have more rows, or fewer.
        bos_id, eos_id: None if no file names one.
        pad_id: a row of the embedding to fill rectangles with. Padding is known by length, never by this id.
        stop_ids: ids that end a row. generation_config.json wins over the tokenizer's EOS (if they differ, one line on
            stderr says so), that over config.json.
        chat_template: Jinja source, None if there is none.

    Raises:
        UserError: no tokenizer, a damaged one, or a BOS or stop id that the model has no row for.
    """

    def __init__(self, path: Path | str) -> None:
        path = Path(path)
        self.backend, config, generation, model = read_files(path)
        self.chat_template: str | None = config.get("chat_template")
        # "bos_token" and the like, with those that only this model has; templates use them by name.
        texts = {key: token_text(value) for key, value in config.items() if key.endswith("_token")}
        self.special_tokens = {key: text for key, text in texts.items() if text is not None}
        self.vocab_size = self.backend.size

        own_eos, self.bos_id = self._id("eos"), self._id("bos")
        stops = find_stop_ids(path, own_eos, generation, model)
        self.stop_ids = frozenset(stops)
        self.eos_id = own_eos if own_eos in self.stop_ids else next(iter(stops), None)
        if "bos_token" not in config:
            named = id_list(path, "bos_token_id", generation) or id_list(path, "bos_token_id", model)
            self.bos_id = next(iter(named), None)
        n_rows = next(iter(id_list(path, "vocab_size", model)), self.vocab_size)
        for token_id in self.stop_ids | ({self.bos_id} - {None}):
            if not 0 <= token_id < n_rows:
                raise UserError(
                    f"{path}: BOS or EOS id {token_id} is outside the model's vocabulary of {n_rows}; correct it in "
                    "generation_config.json, tokenizer_config.json or config.json"
                )
        pads = [self._id("pad"), generation.get("pad_token_id"), model.get("pad_token_id"), *stops, 0]
        pad_id = next(pad for pad in pads if isinstance(pad, int))
        self.pad_id = pad_id if 0 <= pad_id < n_rows else 0  # -1, or a token that was added without a row for it

        self.add_bos, self.add_eos = config.get("add_bos_token"), config.get("add_eos_token")
        self.file_decides = isinstance(self.backend, HuggingFace) and self.add_bos is None and self.add_eos is None
        if self.add_bos is None and isinstance(self.backend, SentencePiece):
            name, kind = config.get("tokenizer_class"), str(model.get("model_type"))
            self.add_bos = str(name).startswith(BOS_CLASSES) if name else kind.startswith(BOS_MODEL_TYPES)

    def _id(self, name: str) -> int | None:
        """Id of the token that the files call `<name>_token`."""
        text = self.special_tokens.get(f"{name}_token")
        return None if text is None else self.backend.id_of(text)

    def encode(self, text: str, *, add_special_tokens: bool = True, parse_special: bool = True) -> Tensor:
        """Returns the ids of `text`, (T,) int64. Empty text gives BOS alone, or nothing if this tokenizer adds none.

        Args:
            text: any text without lone surrogates.
            add_special_tokens: put BOS and EOS where the files say: an explicit `add_bos_token` or `add_eos_token`,
                else the post-processor of tokenizer.json, else the class's default. A text that begins with BOS gets no
                second one.
            parse_special: "<|im_end|>" typed in the text becomes that token, as Hugging Face does by default. False
                makes it ordinary text, for text that must not control the model.
        """
        if not isinstance(text, str):
            raise UserError(f"a prompt must be text, not {type(text).__name__}")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise UserError(f"the prompt is not valid Unicode: a lone surrogate at character {error.start}") from None
        by_file = add_special_tokens and self.file_decides
        ids = self.backend.encode(text, parse_special=parse_special, add_special_tokens=by_file)
        if by_file and self.bos_id is not None and ids[:2] == [self.bos_id] * 2:
            typed = self.backend.encode(text, parse_special=parse_special)
            ids = ids[len(ids) > len(typed) :]
        elif add_special_tokens and not by_file:
            if self.add_bos and self.bos_id is not None and ids[:1] != [self.bos_id]:
                ids = [self.bos_id, *ids]
            if self.add_eos and self.eos_id is not None:
                ids = [*ids, self.eos_id]
        return torch.tensor(ids, dtype=torch.int64)

    def encode_chat(self, messages: list[dict[str, Any]], **kwargs: Any) -> Tensor:
        """Returns the ids of a conversation up to the answer, (T,) int64. The arguments are `render_chat`'s."""
        ids = self.encode(self.render_chat(messages, **kwargs), add_special_tokens=False)  # the template writes BOS
        return ids[1:] if self.bos_id is not None and ids[:2].tolist() == [self.bos_id] * 2 else ids

    def render_chat(self, messages: list[dict[str, Any]], *, add_generation_prompt: bool = True, **kwargs: Any) -> str:
        """Returns the text of a conversation in the form that the model was trained on.

        Args:
            messages: `{"role": ..., "content": ...}` dicts, oldest first.
            add_generation_prompt: end with the words that begin an answer.
            kwargs: passed to the template: `tools`, `documents`, and what else it reads.

        Raises:
            UserError: there is no template, or it cannot render these messages.
        """
        if self.chat_template is None:
            raise UserError(
                "this checkpoint has no chat template; put chat_template.jinja in its folder, or give plain prompts"
            )
        context = {"tools": None, "documents": None, **self.special_tokens, **kwargs}
        return chat.render(self.chat_template, messages, add_generation_prompt=add_generation_prompt, **context)

    def decode(self, tokens: Tensor | Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Returns the text of `tokens`, (T,). An id that no token has (the model may have more rows) gives no text."""
        ids = tokens.tolist() if isinstance(tokens, Tensor) else [int(token) for token in tokens]
        return self.backend.decode(ids, skip_special_tokens=skip_special_tokens)

    def stream(self) -> TextStream:
        """Returns an empty row: `push(token)` gives the text that is final now, `flush()` the rest.

        The pieces add up to `decode` of all tokens; the cost of a token does not grow with the row.
        """
        return self.backend.stream()
