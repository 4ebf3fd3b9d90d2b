"""The two tokenizer libraries, `tokenizers` and `sentencepiece`, made alike, and text that grows token by token.

`Tokenizer` (tokenizer.py) decides which files are read and where BOS and EOS go; here is only text to ids and back.
"""

import codecs
import json
import re
from collections.abc import Iterable
from copy import copy
from itertools import groupby
from typing import NamedTuple

import sentencepiece
import tokenizers
from tokenizers import AddedToken

# Decoders that only append when a token comes after a whole character; what another one gives is shown at the end.
GROWING_DECODERS = {"none", "Replace", "ByteFallback", "Fuse", "Strip", "Metaspace", "WordPiece"}
NO_DUMMY_PREFIX = b"\x1a\x02\x18\x00"  # protobuf, merged into a model: normalizer_spec (3) { add_dummy_prefix (3): 0 }
BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")


def byte_level_alphabet() -> dict[str, int]:
    """The byte that each character of a byte-level token stands for (GPT-2, `bytes_to_unicode`): printable Latin-1
    characters stand for themselves, the other 68 bytes are numbered from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


class ByteStream:
    """Text of one row of a byte-level tokenizer: tokens are bytes, and UTF-8 says when a character is complete."""

    def __init__(self, backend: "HuggingFace") -> None:
        self.backend = backend
        self.utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        """Adds a token and returns the text that is final now, `""` while only a part of a character is there."""
        return self.utf8.decode(self.backend.token_bytes(token)) if self.backend.shows(token) else ""

    def flush(self) -> str:
        """Ends the row: returns what was held back (an incomplete character is U+FFFD, as in `decode`)."""
        return self.utf8.decode(b"", final=True)

    def fork(self) -> "ByteStream":
        """Another one that has come just as far."""
        other = ByteStream(self.backend)
        other.utf8.setstate(self.utf8.getstate())
        return other


class WindowStream:
    """Text of one row of any other tokenizer: what decoding a few earlier tokens together with the new ones adds.

    A word-start token decodes without its space when nothing stands before it, so something must: the context, a few
    tokens that have been returned already. Their number does not grow, so neither does the cost per token.
    """

    def __init__(self, backend: "HuggingFace | SentencePiece") -> None:
        self.backend = backend
        self.context: list[int] = []  # returned tokens that end at a border
        self.context_text = ""
        self.held: list[int] = []  # tokens whose text may still change

    def push(self, token: int) -> str:
        """Adds a token and returns the text that is final now, `""` while later tokens can still change it."""
        if not self.backend.shows(token):
            return ""
        self.held.append(token)
        return "" if self.backend.holds(token) else self.flush()

    def flush(self) -> str:
        """Ends the row: returns what was held back, as `decode` shows it."""
        piece = self.backend.decode(self.context + self.held)[len(self.context_text) :]
        text = self.backend.decode(self.held)
        if text:
            self.context, self.context_text = self.held, text
        elif not self.context_text:  # only spaces so far, which the decoder strips from the beginning
            self.context = self.context + self.held
            self.context_text = piece
        self.held = []
        return piece

    def fork(self) -> "WindowStream":
        """Another one that has come just as far."""
        other = copy(self)
        other.held = self.held.copy()  # the only list that is changed in place
        return other


TextStream = ByteStream | WindowStream


class HuggingFace:
    """A tokenizer of the `tokenizers` library (tokenizer.json, vocab.json + merges.txt, GGUF byte-level BPE)."""

    def __init__(self, lib: tokenizers.Tokenizer) -> None:
        lib.no_truncation()  # files saved after training may carry both; they would change what a prompt encodes to
        lib.no_padding()
        self.lib = lib
        added = lib.get_added_tokens_decoder()
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self.size = max([lib.get_vocab_size(with_added_tokens=False), *(token_id + 1 for token_id in added)])
        decoder = json.loads(lib.decoder.__getstate__()) if lib.decoder else {"type": "none"}
        steps = decoder.get("decoders", [decoder])
        kinds = [step["type"] for step in steps]
        self.byte_level, self.byte_fallback = kinds == ["ByteLevel"], "ByteFallback" in kinds
        after_fuse = kinds[kinds.index("Fuse") :] if "Fuse" in kinds else []
        # On the fused text a replacement could reach across tokens, and so does cutting spaces at the end.
        reaches = "Replace" in after_fuse or any(step.get("stop") for step in steps)
        self.growing = GROWING_DECODERS.issuperset(kinds) and not reaches
        self.alphabet = byte_level_alphabet()

    def encode(self, text: str, *, parse_special: bool, add_special_tokens: bool = False) -> list[int]:
        """Ids of `text`; `add_special_tokens` runs the file's own post-processor."""
        self.lib.encode_special_tokens = not parse_special
        return self.lib.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Text of `ids`; those that no token has, negative ones too, are left out."""
        return self.lib.decode([i for i in ids if 0 <= i < 1 << 32], skip_special_tokens=skip_special_tokens)

    def id_of(self, token: str) -> int | None:
        """Id of a whole token, None if there is none."""
        return self.lib.token_to_id(token)

    def token_of(self, token_id: int) -> str | None:
        """The token that has this id, as the vocabulary spells it."""
        return self.lib.id_to_token(token_id) if 0 <= token_id < 1 << 32 else None

    def shows(self, token_id: int) -> bool:
        """Whether `decode` leaves a trace of this token."""
        return token_id not in self.special_ids and self.token_of(token_id) is not None

    def holds(self, token_id: int) -> bool:
        """Whether a later token can change this one's text: a run of byte tokens is UTF-8 as a whole or not at all."""
        return not self.growing or (self.byte_fallback and BYTE_TOKEN.fullmatch(self.token_of(token_id)) is not None)

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes of a token of a byte-level vocabulary; an added token outside the byte alphabet is plain text."""
        token = self.token_of(token_id)
        values = [self.alphabet.get(character) for character in token]
        return token.encode() if None in values else bytes(values)

    def stream(self) -> TextStream:
        """An empty row that turns into text."""
        return ByteStream(self) if self.byte_level else WindowStream(self)


class Added(NamedTuple):
    """A token beside the SentencePiece vocabulary, or a control piece of it. `lstrip`, `rstrip`: takes the spaces."""

    id: int
    special: bool = True
    lstrip: bool = False
    rstrip: bool = False


class SentencePiece:
    """A SentencePiece model (tokenizer.model, GGUF `llama`) and tokens added to it.

    SentencePiece never sees control tokens in text; they are cut out of it first, as Hugging Face does. `legacy` is the
    setting of tokenizer_config.json: the text after such a token begins with a space of its own (true), or does not.
    """

    def __init__(self, model: bytes, added: dict[str, Added], *, legacy: bool) -> None:
        self.lib = sentencepiece.SentencePieceProcessor(model_proto=model)
        self.after_special = self.lib
        if not legacy:
            self.after_special = sentencepiece.SentencePieceProcessor(model_proto=model + NO_DUMMY_PREFIX)
        n_pieces = self.lib.get_piece_size()
        pieces = self.lib.id_to_piece(range(n_pieces))
        control = self.lib.is_control(list(range(n_pieces)))
        self.added = {pieces[i]: Added(i) for i in range(n_pieces) if control[i]} | added
        self.added_text = {token.id: text for text, token in self.added.items()}
        self.special_ids = frozenset(token.id for token in self.added.values() if token.special)
        self.size = max([n_pieces, *(token.id + 1 for token in self.added.values())])
        longest_first = sorted(self.added, key=len, reverse=True)
        self.borders = re.compile(f"({'|'.join(map(re.escape, longest_first))})") if longest_first else None

    def encode(self, text: str, *, parse_special: bool, add_special_tokens: bool = False) -> list[int]:
        """Ids of `text`. There is no post-processor, so `add_special_tokens` must be False."""
        assert not add_special_tokens, "SentencePiece has no post-processor"
        if not (parse_special and self.borders):
            return self.lib.encode(text)
        parts = self.borders.split(text)  # text, token, text, ..., token, text
        tokens = [None, *(self.added[part] for part in parts[1::2]), None]
        ids: list[int] = []
        for before, part, after in zip(tokens, parts[0::2], tokens[1:], strict=False):
            part = part.lstrip() if before and before.rstrip else part
            part = part.rstrip() if after and after.lstrip else part
            ids += (self.after_special if before else self.lib).encode(part)
            ids += [after.id] if after else []
        return ids

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Text of `ids`; those that no token has, negative ones too, are left out."""
        skipped = self.special_ids if skip_special_tokens else frozenset()
        text, at_start = "", True
        shown = [i for i in ids if 0 <= i < self.size and i not in skipped]
        for is_added, run in groupby(shown, key=self.added_text.__contains__):
            if is_added:
                text += "".join(self.added_text[i] for i in run)
            elif at_start:
                text += self.lib.decode(self.known(run))
            else:  # not the beginning: the leading space stays, as it does after <unk>
                unk = [self.lib.unk_id()]
                text += self.lib.decode(unk + self.known(run))[len(self.lib.decode(unk)) :]
            at_start = False
        return text

    def known(self, ids: Iterable[int]) -> list[int]:
        """Those of `ids` that are pieces of the model; added ids may leave a gap after it."""
        return [i for i in ids if i < self.lib.get_piece_size()]

    def id_of(self, token: str) -> int | None:
        """Id of a whole token, None if there is none."""
        if token in self.added:
            return self.added[token].id
        token_id = self.lib.piece_to_id(token)
        return token_id if self.lib.id_to_piece(token_id) == token else None  # an unknown piece gives the id of <unk>

    def token_of(self, token_id: int) -> str | None:
        """The token that has this id, as the vocabulary spells it."""
        if token_id in self.added_text:
            return self.added_text[token_id]
        return self.lib.id_to_piece(token_id) if 0 <= token_id < self.lib.get_piece_size() else None

    def shows(self, token_id: int) -> bool:
        """Whether `decode` leaves a trace of this token."""
        return token_id not in self.special_ids and self.token_of(token_id) is not None

    def holds(self, token_id: int) -> bool:
        """Whether a later token can change this one's text: a byte may be a part of a character."""
        return token_id not in self.added_text and self.lib.is_byte(token_id)

    def stream(self) -> TextStream:
        """An empty row that turns into text."""
        return WindowStream(self)


def add_tokens(lib: tokenizers.Tokenizer, added: dict[str, Added]) -> None:
    """Adds tokens to a `tokenizers` tokenizer; one that its vocabulary has keeps its id."""
    for text, token in sorted(added.items(), key=lambda item: item[1].id):
        entry = AddedToken(text, special=token.special, lstrip=token.lstrip, rstrip=token.rstrip, normalized=False)
        (lib.add_special_tokens if token.special else lib.add_tokens)([entry])
