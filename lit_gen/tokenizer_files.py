"""The files around a tokenizer: which of them is read, and what they say about special tokens and stops."""

import json
import re
import sys
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from lit_gen.chat import find_chat_template
from lit_gen.gguf_tokenizer import load_gguf_tokenizer
from lit_gen.tokenizer_backends import Added, HuggingFace, SentencePiece, add_tokens
from lit_gen.utils import UserError, read_json

Settings = dict[str, Any]  # a JSON object

TIKTOKEN_LINE = re.compile(rb"[A-Za-z0-9+/]+={0,2} \d+\r?\n")


class Files(NamedTuple):
    """A tokenizer and what the files around it say."""

    backend: HuggingFace | SentencePiece
    config: Settings  # tokenizer_config.json
    generation: Settings  # generation_config.json
    model: Settings  # config.json, of the text model


def read_files(path: Path) -> Files:
    """Reads the tokenizer at `path`, a folder or a .gguf file, whose metadata then stand for the settings files."""
    if path.suffix == ".gguf" and path.is_file():
        return Files(*load_gguf_tokenizer(path))
    if not path.is_dir():
        raise UserError(f"{path} is neither a checkpoint folder nor a .gguf file")
    config = read_object(path / "special_tokens_map.json") | read_object(path / "tokenizer_config.json")
    generation, model = read_object(path / "generation_config.json"), read_object(path / "config.json")
    if isinstance(model.get("text_config"), dict):
        model |= model["text_config"]
    ggufs = sorted(path.glob("*.gguf"))
    if (path / "tokenizer.json").is_file():
        backend = load_tokenizer_json(path / "tokenizer.json", config)
    elif (path / "tokenizer.model").is_file():
        backend = load_sentencepiece(path / "tokenizer.model", config)
    elif (path / "vocab.json").is_file() and (path / "merges.txt").is_file():
        backend = load_vocab_and_merges(path, config)
    elif len(ggufs) == 1:
        backend, *embedded = load_gguf_tokenizer(ggufs[0])
        config, generation, model = (a | b for a, b in zip(embedded, (config, generation, model), strict=True))
    else:
        raise UserError(
            f"{path} has no tokenizer: tokenizer.json, tokenizer.model, vocab.json with merges.txt, or one .gguf file "
            f"(it has {len(ggufs)}); copy the tokenizer files of the original model there"
        )
    config["chat_template"] = find_chat_template(path, config)
    return Files(backend, config, generation, model)


def load_tokenizer_json(file: Path, config: Settings) -> HuggingFace:
    """Reads tokenizer.json. What tokenizer_config.json calls BOS, EOS, ... is special, even if this file forgets it."""
    try:
        lib = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # noqa: BLE001 (the library raises plain Exception)
        raise UserError(f"{file} is damaged: {' '.join(str(error).split())}; download it again") from None
    add_tokens(lib, named_tokens(lib, config))
    return HuggingFace(lib)


def load_vocab_and_merges(folder: Path, config: Settings) -> HuggingFace:
    """Reads GPT-2's files. Its one special token is the default of `config`'s BOS and EOS."""
    try:
        lib = tokenizers.Tokenizer(models.BPE.from_file(str(folder / "vocab.json"), str(folder / "merges.txt")))
    except Exception as error:  # noqa: BLE001 (the library raises plain Exception)
        raise UserError(f"{folder}: vocab.json or merges.txt is damaged: {error}; download them again") from None
    lib.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=bool(config.get("add_prefix_space")))
    lib.decoder = decoders.ByteLevel()
    for name in ("bos_token", "eos_token"):
        config.setdefault(name, "<|endoftext|>")
    add_tokens(lib, named_tokens(lib, config) | added_tokens(folder, config))
    return HuggingFace(lib)


def named_tokens(lib: tokenizers.Tokenizer, config: Settings) -> dict[str, Added]:
    """Tokens that `config` names as BOS, EOS, ... and that `lib` has, but not as special ones."""
    special = {token.content for token in lib.get_added_tokens_decoder().values() if token.special}
    names = {token_text(value) for key, value in config.items() if key.endswith("_token")} - special - {None}
    return {text: Added(lib.token_to_id(text)) for text in names if lib.token_to_id(text) is not None}


def load_sentencepiece(file: Path, config: Settings) -> SentencePiece:
    """Reads tokenizer.model and the tokens added beside it; fills in the model's own BOS and EOS."""
    data = file.read_bytes()
    if not data:
        raise UserError(f"{file} is empty; download it again")
    if TIKTOKEN_LINE.match(data):
        raise UserError(f"{file} is a tiktoken file, not a SentencePiece model; use the model's tokenizer.json")
    try:
        backend = SentencePiece(data, added_tokens(file.parent, config), legacy=config.get("legacy") is not False)
    except RuntimeError as error:
        raise UserError(f"{file} is no SentencePiece model ({' '.join(str(error).split())})") from None
    for name, token_id in (("bos_token", backend.lib.bos_id()), ("eos_token", backend.lib.eos_id())):
        if token_id >= 0:
            config.setdefault(name, backend.token_of(token_id))
    return backend


def added_tokens(folder: Path, config: Settings) -> dict[str, Added]:
    """Tokens beside the vocabulary: added_tokens.json (old), `added_tokens_decoder` of tokenizer_config.json (new)."""
    try:
        added = {text: Added(int(i), special=False) for text, i in read_object(folder / "added_tokens.json").items()}
        for i, entry in (config.get("added_tokens_decoder") or {}).items():
            flags = (bool(entry.get(flag)) for flag in ("special", "lstrip", "rstrip"))
            added[entry["content"]] = Added(int(i), *flags)
    except (AttributeError, KeyError, TypeError, ValueError):
        added = {"": Added(-1)}
    if not all(isinstance(text, str) and text and token.id >= 0 for text, token in added.items()):
        raise UserError(f"{folder}: added_tokens.json or added_tokens_decoder is damaged; download it again")
    return added


def find_stop_ids(path: Path, own_eos: int | None, generation: Settings, model: Settings) -> list[int]:
    """Ids that end a row, of the first that has any: generation_config.json, the tokenizer (`own_eos`), config.json."""
    stops = id_list(path, "eos_token_id", generation)
    if stops and own_eos is not None and own_eos not in stops:
        what = f"generation_config.json ends a row at token {stops}, the tokenizer at {own_eos}; the former is used"
        print(f"warning: {path}: {what}", file=sys.stderr)
    return stops or ([] if own_eos is None else [own_eos]) or id_list(path, "eos_token_id", model)


def id_list(path: Path, key: str, settings: Settings) -> list[int]:
    """The whole numbers under `key`, which may hold one, a list or null."""
    value = settings.get(key)
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(isinstance(token_id, int) and not isinstance(token_id, bool) for token_id in ids):
        raise UserError(f"{path}: {key} is {value!r}, neither a whole number nor a list of them; correct the file")
    return ids


def token_text(value: Any) -> str | None:
    """A token in a settings file: text, `{"content": text}` or null."""
    value = value.get("content") if isinstance(value, dict) else value
    return value if isinstance(value, str) else None


def read_object(file: Path) -> Settings:
    """A JSON object from a file that need not be there."""
    value = read_json(file) if file.is_file() else {}
    if not isinstance(value, dict):
        raise UserError(f"{file} does not hold a JSON object; download it again")
    return value


def unpack_gguf_tokenizer(path: Path, folder: Path) -> None:
    """Writes the tokenizer of a .gguf file as the files that a Hugging Face folder has."""
    backend, config, generation, _ = load_gguf_tokenizer(path)
    if isinstance(backend, HuggingFace):
        backend.lib.save(str(folder / "tokenizer.json"))
    else:
        (folder / "tokenizer.model").write_bytes(backend.lib.serialized_model_proto())
        config["legacy"] = True
    for name, settings in (("tokenizer_config.json", config), ("generation_config.json", generation)):
        (folder / name).write_text(json.dumps(settings, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
