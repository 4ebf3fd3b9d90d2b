"""The tokenizer inside a .gguf file, rebuilt from its `tokenizer.*` metadata.

`tokenizer.ggml.model` is `gpt2` (byte-level BPE; `tokenizer.ggml.pre` names the rule that cuts text into words) or
`llama` (SentencePiece BPE: pieces with scores). Facts: src/llama-vocab.cpp of github.com/ggml-org/llama.cpp.
"""

import struct
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import Regex, models, pre_tokenizers

from lit_gen.tokenizer_backends import Added, HuggingFace, SentencePiece, add_tokens
from lit_gen.utils import UserError

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)  # token types; SentencePiece has the same numbers

# The rules, as the models' own tokenizer.json files have them: patterns applied one after the other, each to the pieces
# that the one before it left. A match is a piece, and so is what lies between two matches.
CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
ENDING = r"\s*[\r\n]+|\s+(?!\S)|\s+"
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
WORD = rf"{CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}%s| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{ENDING}"
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
CASED = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+%s|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*%s"
    rf"|\p{{N}}%s| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{ENDING}"
)
LLAMA3, QWEN2 = [WORD % "{1,3}"], [WORD % ""]
TEKKEN, GPT4O = [CASED % ("", "", "")], [CASED % (f"{CONTRACTION}?", f"{CONTRACTION}?", "{1,3}")]
DIGITS = [r"\p{N}", GPT2]
FALCON = [r"[\p{P}\$\+<=>\^~\|`]+", GPT2, "[0-9][0-9][0-9]"]
DEFAULT = [r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]"]
DEEPSEEK_CODER = [r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", r"\p{N}"]
DEEPSEEK3 = [
    r"\p{N}{1,3}",
    "[一-龥぀-ゟ゠-ヿ]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{ENDING}",
]
PRE_RULES: dict[str, list[str]] = {
    "default": DEFAULT,
    "falcon": FALCON,
    "deepseek-coder": DEEPSEEK_CODER,
    "deepseek-v3": DEEPSEEK3,
    **dict.fromkeys(("gpt-2", "mpt", "olmo", "phi-2", "jais", "exaone4", "trillion", "granite-docling"), [GPT2]),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"), DIGITS),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "lfm2"), LLAMA3),
    **dict.fromkeys(("dbrx", "smaug-bpe", "glm4", "chatglm-bpe"), LLAMA3),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez", "stablelm2", "hunyuan"), QWEN2),
    "tekken": TEKKEN,
    **dict.fromkeys(("gpt-4o", "llama4"), GPT4O),
}
# These take a word that is a token as it stands, without merging, and begin with BOS unless the file says otherwise.
WHOLE_WORDS_FIRST = {"llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "lfm2", "tekken"}
# Files older than `tokenizer.ggml.pre`: the rule of the architectures that have only ever had one.
PRE_OF_ARCHITECTURE = {"gpt2": "gpt-2", "gptneox": "gpt-2", "mpt": "mpt", "falcon": "falcon", "starcoder": "starcoder"}
# A file has one EOS id, and chat models end a turn with another token. Files that do not name it (`eot_token_id`) are
# searched for these, as llama.cpp does.
TURN_ENDS = ("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>")
PHI3_PLAIN = ("<s>", "<|endoftext|>")
STOP_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")


Settings = dict[str, Any]  # a JSON object


class Vocabulary:
    """The checked metadata of one file: as many types and scores as tokens, ids inside the vocabulary."""

    def __init__(self, path: Path) -> None:
        from lit_gen.gguf import read_gguf

        try:
            self.meta = read_gguf(path)[0]
        except UserError as error:
            raise UserError(f"{path}: {error}") from None
        self.path = path
        self.model = self.get("ggml.model", str, None)
        self.pre = self.get("ggml.pre", str, None)
        tokens = self.strings("ggml.tokens")
        self.tokens = [token or f"[EMPTY_{i}]" for i, token in enumerate(tokens)]
        if not tokens or len(set(self.tokens)) < len(tokens):
            self.fail(f"tokenizer.ggml.tokens has {len(tokens)} tokens, {len(set(self.tokens))} different ones")
        self.types = self.numbers("ggml.token_type", NORMAL)
        if not set(self.types) <= {0, NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE}:
            self.fail("tokenizer.ggml.token_type has an unknown type")
        self.unk_id = self.id_of("unknown_token_id")

    def fail(self, what: str) -> None:
        raise UserError(f"{self.path}: {what}; use the tokenizer files of the original model")

    def get(self, name: str, kind: type, default: Any) -> Any:
        """Value of `tokenizer.<name>`."""
        value = self.meta.get(f"tokenizer.{name}", default)
        if value is not default and not isinstance(value, kind):
            self.fail(f"tokenizer.{name} is {str(value)[:40]!r}, not of type {kind.__name__}")
        return value

    def strings(self, name: str) -> list[str]:
        """A list of strings."""
        values = self.get(name, list, [])
        if not all(isinstance(value, str) for value in values):
            self.fail(f"tokenizer.{name} is not a list of strings")
        return values

    def numbers(self, name: str, default: float) -> list[Any]:
        """A list with a number for every token."""
        values = self.get(name, list, [default] * len(self.tokens))
        if len(values) != len(self.tokens) or not all(isinstance(value, int | float) for value in values):
            self.fail(f"tokenizer.{name} is not one number for each of {len(self.tokens)} tokens")
        return values

    def id_of(self, name: str) -> int | None:
        """Id under `tokenizer.ggml.<name>`."""
        token_id = self.get(f"ggml.{name}", int, None)
        if token_id is not None and not 0 <= token_id < len(self.tokens):
            self.fail(f"tokenizer.ggml.{name} is {token_id}, but there are {len(self.tokens)} tokens")
        return token_id

    def token(self, name: str) -> str | None:
        """Token whose id is `tokenizer.ggml.<name>`."""
        token_id = self.id_of(name)
        return None if token_id is None else self.tokens[token_id]


def load_gguf_tokenizer(path: Path) -> tuple[HuggingFace | SentencePiece, Settings, Settings, Settings]:
    """Returns the tokenizer of a .gguf file, and its metadata as they would stand in tokenizer_config.json,
    generation_config.json and config.json."""
    vocab = Vocabulary(path)
    if vocab.model == "gpt2":
        if vocab.pre is None:
            vocab.pre = PRE_OF_ARCHITECTURE.get(vocab.meta.get("general.architecture"), "default")
        if vocab.pre not in PRE_RULES:
            vocab.fail(f"unknown tokenizer.ggml.pre {vocab.pre!r} (known: {', '.join(sorted(PRE_RULES))})")
        backend, bos_default = byte_level_bpe(vocab), vocab.pre in WHOLE_WORDS_FIRST
    elif vocab.model == "llama":
        backend, bos_default = sentencepiece_bpe(vocab), True
    else:
        vocab.fail(f"tokenizer.ggml.model {vocab.model!r} is not supported (gpt2 and llama are)")
    control = {token for token, kind in zip(vocab.tokens, vocab.types, strict=True) if kind == CONTROL}
    stops = {vocab.id_of(key) for key in STOP_KEYS} - {None}
    if vocab.id_of("eot_token_id") is None:
        stops |= {backend.id_of(token) for token in TURN_ENDS if token in control}
    names = {"bos": "bos_token_id", "eos": "eos_token_id", "unk": "unknown_token_id", "pad": "padding_token_id"}
    config = {f"{name}_token": vocab.token(key) for name, key in names.items()}
    config["add_bos_token"] = vocab.get("ggml.add_bos_token", bool, bos_default)
    config["add_eos_token"] = vocab.get("ggml.add_eos_token", bool, False)
    config["chat_template"] = vocab.get("chat_template", str, None)
    return backend, config, {"eos_token_id": sorted(stops)}, {"vocab_size": len(vocab.tokens)}


def byte_level_bpe(vocab: Vocabulary) -> HuggingFace:
    """BPE over bytes written as characters: the tokens, the merges in order, and the words of `tokenizer.ggml.pre`."""
    merges = []
    for merge in vocab.strings("ggml.merges"):
        left, _, right = merge[1:].partition(" ")  # a token may itself begin with a space, none has one inside
        merges.append((merge[:1] + left, right))
    whole_words = vocab.pre in WHOLE_WORDS_FIRST
    try:
        bpe = models.BPE({t: i for i, t in enumerate(vocab.tokens)}, merges, ignore_merges=whole_words)
    except Exception as error:  # noqa: BLE001 (the library raises plain Exception)
        vocab.fail(f"tokenizer.ggml.merges does not fit the tokens: {error}")
    lib = tokenizers.Tokenizer(bpe)
    words = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in PRE_RULES[vocab.pre]]
    lib.pre_tokenizer = pre_tokenizers.Sequence([*words, pre_tokenizers.ByteLevel(False, use_regex=False)])
    lib.decoder = tokenizers.decoders.ByteLevel()
    kinds = zip(vocab.tokens, vocab.types, strict=True)
    add_tokens(lib, {t: Added(i, k == CONTROL) for i, (t, k) in enumerate(kinds) if k in (CONTROL, USER_DEFINED)})
    return HuggingFace(lib)


def sentencepiece_bpe(vocab: Vocabulary) -> SentencePiece:
    """SentencePiece's own algorithm on the file's pieces and scores: best-scored pair first, bytes for what is left.

    They are written as the protobuf that the library reads (sentencepiece_model.proto in google/sentencepiece).
    """
    scores = vocab.numbers("ggml.scores", 0.0)
    unk_id = vocab.unk_id or 0
    # Files call <unk> a control token or padding unknown; a SentencePiece model has one unknown piece.
    types = [UNUSED if kind == UNKNOWN else int(kind) or NORMAL for kind in vocab.types]
    types[unk_id] = UNKNOWN
    parts = []
    for token, score, kind in zip(vocab.tokens, scores, types, strict=True):
        parts.append(field(1, field(1, token.encode()) + b"\x15" + struct.pack("<f", score) + b"\x18" + varint(kind)))
    prefix = vocab.get("ggml.add_space_prefix", bool, True)
    squeeze = vocab.get("ggml.remove_extra_whitespaces", bool, False)
    bpe = b"\x18\x02" + field(45, vocab.tokens[unk_id].encode())  # model_type: BPE, unk_piece
    bpe += varint(35 << 3) + varint(BYTE in types) + varint(40 << 3) + varint(unk_id)  # byte_fallback, unk_id
    rules = field(1, b"identity") + bytes((0x18, prefix, 0x20, squeeze, 0x28, 1))  # name, spaces are escaped
    model = b"".join(parts) + field(2, bpe) + field(3, rules)
    # The turn marks of Phi-3 take the line end after them; no metadata says so.
    is_phi3 = vocab.meta.get("general.architecture") == "phi3"
    marks = [i for i, kind in enumerate(types) if is_phi3 and kind == CONTROL and vocab.tokens[i] not in PHI3_PLAIN]
    stripping = {vocab.tokens[i]: Added(i, rstrip=True) for i in marks}
    try:
        return SentencePiece(model, stripping, legacy=True)  # the text after a control token begins with a space
    except RuntimeError as error:
        vocab.fail(f"its pieces are not a SentencePiece model ({' '.join(str(error).split())})")


def varint(value: int) -> bytes:
    """A protobuf integer: seven bits a byte, lowest first."""
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def field(number: int, content: bytes) -> bytes:
    """A length-delimited protobuf field."""
    return varint(number << 3 | 2) + varint(len(content)) + content
