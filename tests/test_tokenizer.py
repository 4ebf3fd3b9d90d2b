"""Text to ids and back: BOS, EOS, stops, special text, streaming; on tokenizers trained here and on real ones."""

import io
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import sentencepiece
import tokenizers
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from lit_gen.tokenizer import Tokenizer
from lit_gen.utils import UserError

CORPUS = [
    "Once upon a time a small llama lived on a green hill, and every morning it walked down to the river to drink.",
    "The river was cold; the llama did not mind. It said: 'I'll be back by noon', and nobody answered.",
    "Numbers such as 3, 14, 159 and 2653 are read digit by digit, or three digits at a time.",
    "Größe, naïve café, Straße, señor: accents are two bytes each. Привет, мир! こんにちは世界",
    "def add(a, b):\n    return a + b\n\nprint(add(1, 2))  # a comment with  two spaces",
] * 8
SPECIAL = ["<unk>", "<s>", "</s>", "<|im_end|>"]  # ids 0 to 3
KINDS = ["byte_level", "byte_fallback", "unigram", "word_piece", "words", "sentencepiece", "sentencepiece_unigram"]


def byte_level() -> tokenizers.Tokenizer:
    lib = tokenizers.Tokenizer(models.BPE())
    lib.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    lib.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    lib.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=500, special_tokens=SPECIAL, initial_alphabet=alphabet)
    )
    lib.add_tokens(["é→é"])  # not all of it is in the byte alphabet
    return lib


def byte_fallback() -> tokenizers.Tokenizer:
    """Llama 2's layout. The alphabet is small, so that most of Unicode goes through bytes."""
    lib = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    lib.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    strip = decoders.Strip(content=" ", left=1)
    lib.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), strip])
    special = SPECIAL + [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=special, limit_alphabet=60)
    lib.train_from_iterator((line for text in CORPUS for line in text.split()), trainer)
    state = json.loads(lib.to_str())
    state["added_tokens"] = state["added_tokens"][: len(SPECIAL)]  # the byte tokens are ordinary ones
    return tokenizers.Tokenizer.from_str(json.dumps(state))


def unigram() -> tokenizers.Tokenizer:
    lib = tokenizers.Tokenizer(models.Unigram())
    lib.pre_tokenizer = pre_tokenizers.Metaspace()
    lib.decoder = decoders.Metaspace()
    lib.train_from_iterator(CORPUS, trainers.UnigramTrainer(vocab_size=220, special_tokens=SPECIAL, unk_token="<unk>"))
    return lib


def word_piece() -> tokenizers.Tokenizer:
    lib = tokenizers.Tokenizer(models.WordPiece(unk_token="<unk>"))
    lib.pre_tokenizer = pre_tokenizers.Whitespace()
    lib.decoder = decoders.WordPiece()
    lib.train_from_iterator(CORPUS, trainers.WordPieceTrainer(vocab_size=300, special_tokens=SPECIAL))
    return lib


def words() -> tokenizers.Tokenizer:
    """No decoder: tokens are joined with spaces."""
    lib = tokenizers.Tokenizer(models.WordLevel(unk_token="<unk>"))
    lib.pre_tokenizer = pre_tokenizers.Whitespace()
    lib.train_from_iterator(CORPUS, trainers.WordLevelTrainer(vocab_size=100, special_tokens=SPECIAL))
    return lib


def sentencepiece_model(model_type: str, **options: object) -> bytes:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS),
        model_writer=model,
        model_type=model_type,
        vocab_size=420,
        minloglevel=2,
        **options,
    )
    return model.getvalue()


def llama_like() -> bytes:
    return sentencepiece_model(
        "bpe",
        byte_fallback=True,
        control_symbols=["<|im_end|>"],
        remove_extra_whitespaces=False,
        normalization_rule_name="identity",
        character_coverage=0.98,
    )


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A folder for each kind, with nothing but the tokenizer."""
    root = tmp_path_factory.mktemp("tokenizers")
    for kind in KINDS:
        (root / kind).mkdir()
    for train in (byte_level, byte_fallback, unigram, word_piece, words):
        train().save(str(root / train.__name__ / "tokenizer.json"))
    (root / "sentencepiece" / "tokenizer.model").write_bytes(llama_like())
    squeezed = sentencepiece_model("unigram", hard_vocab_limit=False, control_symbols=["<|im_end|>"])
    (root / "sentencepiece_unigram" / "tokenizer.model").write_bytes(squeezed)
    return {kind: root / kind for kind in KINDS}


@pytest.fixture(scope="session")
def trained(folders: dict[str, Path]) -> dict[str, Tokenizer]:
    return {kind: Tokenizer(folder) for kind, folder in folders.items()}


@pytest.fixture
def folder(tmp_path: Path, folders: dict[str, Path]):
    """Makes a folder: a kind of tokenizer and JSON files, given as dicts or text."""

    def make(kind: str, **files: object) -> Path:
        copy = tmp_path / f"folder{len(list(tmp_path.iterdir()))}"
        shutil.copytree(folders[kind], copy)
        for name, content in files.items():
            (copy / f"{name}.json").write_text(content if isinstance(content, str) else json.dumps(content))
        return copy

    return make


# Real tokenizers -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("gpt2", "ggml-vocab-gpt-2.gguf.out"),
        ("gpt-neox-20b", "ggml-vocab-mpt.gguf.out"),
        ("phi-3", "ggml-vocab-phi-3.gguf.out"),
        ("smollm2", "smollm2.out"),
    ],
)
def test_ids_of_46_hard_texts_are_those_of_llama_cpp(shared: Path, name: str, expected: str) -> None:
    texts, golden = hard_texts(shared, expected)
    tokenizer = Tokenizer(shared / "data" / "tokenizers" / name)
    for text, ids in zip(texts, golden, strict=True):
        assert tokenizer.encode(text, add_special_tokens=False).tolist() == ids, text
        assert tokenizer.decode(ids) == text


def hard_texts(shared: Path, expected: str) -> tuple[list[str], list[list[int]]]:
    """The texts of llama.cpp's tokenizer test and the ids of one vocabulary."""
    data = shared / "data" / "tokenizers" / "gguf-vocab"
    with (data / "ggml-vocab.inp").open(newline="", encoding="utf-8") as file:
        texts = file.read().split("\n__ggml_vocab_test__\n")[:46]
    golden = [[int(i) for i in line.split()] for line in (data / expected).read_text().split("\n")[:46]]
    return texts, golden


# BOS and EOS ---------------------------------------------------------------------------------------------------------

BOS_CASES = [  # kind, post-processor that adds BOS, tokenizer_config.json, BOS expected
    ("byte_level", False, {"bos_token": "<s>"}, False),
    ("byte_level", True, {"bos_token": "<s>"}, True),
    ("byte_level", True, {"bos_token": "<s>", "add_bos_token": False}, False),
    ("byte_level", False, {"bos_token": {"content": "<s>"}, "add_bos_token": True}, True),
    ("byte_level", True, {"bos_token": "<s>", "add_bos_token": True}, True),
    ("byte_level", False, {"bos_token": None, "add_bos_token": True}, False),
    ("byte_level", True, {"bos_token": "<s>", "add_eos_token": False}, False),
    ("sentencepiece", False, {}, False),
    ("sentencepiece", False, {"tokenizer_class": "LlamaTokenizer"}, True),
    ("sentencepiece", False, {"tokenizer_class": "GemmaTokenizerFast"}, True),
    ("sentencepiece", False, {"tokenizer_class": "T5Tokenizer"}, False),
    ("sentencepiece", False, {"tokenizer_class": "LlamaTokenizer", "add_bos_token": False}, False),
    ("sentencepiece", False, {"tokenizer_class": "T5Tokenizer", "add_bos_token": True}, True),
]


def add_bos_processor(path: Path) -> None:
    lib = tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))
    lib.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    lib.save(str(path / "tokenizer.json"))


@pytest.mark.parametrize(("kind", "processor", "config", "bos"), BOS_CASES)
def test_text_begins_with_bos_exactly_when_the_files_say_so(folder, kind, processor, config, bos) -> None:
    path = folder(kind, tokenizer_config=config)
    if processor:
        add_bos_processor(path)
    tokenizer = Tokenizer(path)
    bare = tokenizer.encode("Hello", add_special_tokens=False).tolist()
    assert 1 not in bare
    assert tokenizer.encode("Hello").tolist() == [1] * bos + bare
    assert tokenizer.encode("").tolist() == [1] * bos
    assert tokenizer.encode("<s>Hello").tolist().count(1) == 1  # typed: that is the BOS
    assert tokenizer.encode("<s><s>").tolist() == [1, 1]  # typed twice: kept, and none added
    assert tokenizer.encode("Hello").dtype == torch.int64 and tokenizer.encode("").shape == (bos,)


@pytest.mark.parametrize("config", [{}, *({"add_bos_token": b, "add_eos_token": e} for b in (0, 1) for e in (0, 1))])
@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback", "unigram"])
def test_ids_equal_those_of_transformers(folder, kind: str, config: dict) -> None:
    transformers = pytest.importorskip("transformers")
    config = {key: bool(value) for key, value in config.items()} | {"bos_token": "<s>", "eos_token": "</s>"}
    path = folder(kind, tokenizer_config=config)
    add_bos_processor(path)
    reference = transformers.PreTrainedTokenizerFast(tokenizer_file=str(path / "tokenizer.json"), **config)
    tokenizer = Tokenizer(path)
    for text in ["", "Hello", " two  spaces ", "a</s>b", "größe 🔥 世界\n\n", *CORPUS[:5]]:
        assert tokenizer.encode(text).tolist() == reference(text)["input_ids"], text
        ids = reference(text)["input_ids"]
        for skip in (True, False):
            assert tokenizer.decode(ids, skip_special_tokens=skip) == reference.decode(ids, skip_special_tokens=skip)


def test_eos_is_appended_only_when_asked_for(folder) -> None:
    config = {"tokenizer_class": "LlamaTokenizer", "add_eos_token": True}
    tokenizer = Tokenizer(folder("sentencepiece", tokenizer_config=config))
    ids = tokenizer.encode("Hello").tolist()
    assert ids[0] == 1 and ids[-1] == 2 and tokenizer.encode("").tolist() == [1, 2]


def test_class_is_inferred_from_the_model_type(folder) -> None:
    path = folder("sentencepiece", config={"model_type": "mistral", "vocab_size": 420})
    assert Tokenizer(path).encode("Hello")[0] == 1
    assert Tokenizer(folder("sentencepiece", config={"model_type": "t5"})).encode("Hello")[0] != 1


def test_bos_is_found_in_the_other_files(folder) -> None:
    assert Tokenizer(folder("byte_level")).bos_id is None
    assert Tokenizer(folder("byte_level", special_tokens_map={"bos_token": "</s>"})).bos_id == 2
    assert Tokenizer(folder("byte_level", config={"bos_token_id": 3})).bos_id == 3
    generation = {"bos_token_id": [1, 2]}
    assert Tokenizer(folder("byte_level", config={"bos_token_id": 3}, generation_config=generation)).bos_id == 1
    null = Tokenizer(folder("byte_level", tokenizer_config={"bos_token": None}, config={"bos_token_id": 3}))
    assert null.bos_id is None  # the file says that there is none


# Stops ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("files", "stops", "eos", "warned"),
    [
        ({}, set(), None, False),
        ({"tokenizer_config": {"eos_token": "</s>"}}, {2}, 2, False),
        ({"tokenizer_config": {"eos_token": {"content": "</s>"}}, "generation_config": {}}, {2}, 2, False),
        ({"tokenizer_config": {"eos_token": "</s>"}, "generation_config": {"eos_token_id": [3, 2]}}, {2, 3}, 2, False),
        ({"tokenizer_config": {"eos_token": "<s>"}, "generation_config": {"eos_token_id": 2}}, {2}, 2, True),
        ({"tokenizer_config": {"eos_token": None}, "generation_config": {"eos_token_id": 2}}, {2}, 2, False),
        ({"generation_config": {"eos_token_id": None}, "config": {"eos_token_id": [2, 3]}}, {2, 3}, 2, False),
        ({"config": {"text_config": {"eos_token_id": 3}, "eos_token_id": None}}, {3}, 3, False),
        ({"tokenizer_config": {"eos_token": "</s>"}, "config": {"eos_token_id": 3}}, {2}, 2, False),
    ],
)
def test_stop_ids(folder, capsys: pytest.CaptureFixture, files, stops, eos, warned) -> None:
    tokenizer = Tokenizer(folder("byte_level", **files))
    assert tokenizer.stop_ids == frozenset(stops) and tokenizer.eos_id == eos
    out, err = capsys.readouterr()
    assert out == "" and len(err.splitlines()) == warned
    if warned:
        assert "[2]" in err and "at 1;" in err


@pytest.mark.parametrize(
    "files",
    [
        {"generation_config": {"eos_token_id": [2, 512]}, "config": {"vocab_size": 512}},
        {"generation_config": {"eos_token_id": -1}},
        {"generation_config": {"eos_token_id": 2}, "config": {"text_config": {"vocab_size": 2}}},
        {"generation_config": {"eos_token_id": "2"}},
        {"generation_config": {"eos_token_id": [True]}},
        {"generation_config": {"bos_token_id": 10**6}},
        {"config": {"vocab_size": "many"}},
        {"generation_config": []},
        {"tokenizer_config": '{"eos_token": '},
        {"tokenizer_config": {"chat_template": 3}},
    ],
)
def test_settings_that_cannot_be_meant_are_refused_in_one_line(folder, files) -> None:
    with pytest.raises(UserError) as error:
        Tokenizer(folder("byte_level", **files))
    assert "\n" not in str(error.value) and "folder" in str(error.value)


def test_stop_may_lie_between_tokenizer_and_padded_vocabulary(folder) -> None:
    path = folder("byte_level", generation_config={"eos_token_id": 511}, config={"vocab_size": 512})
    assert Tokenizer(path).stop_ids == {511}


def test_pad_is_a_row_of_the_model(folder) -> None:
    pad = {"tokenizer_config": {"pad_token": "<|im_end|>", "eos_token": "</s>"}}
    assert Tokenizer(folder("byte_level", **pad)).pad_id == 3
    assert Tokenizer(folder("byte_level", config={"pad_token_id": -1, "eos_token_id": 2})).pad_id == 0
    assert Tokenizer(folder("byte_level", config={"eos_token_id": [2, 3]})).pad_id == 2
    assert Tokenizer(folder("byte_level", **pad, config={"vocab_size": 3})).pad_id == 0
    assert Tokenizer(folder("byte_level")).pad_id == 0


def test_trailing_commas_and_nan_are_read(folder) -> None:
    config = '{"eos_token": "</s>", "model_max_length": NaN, "additional_special_tokens": ["<s>",],\n}'
    assert Tokenizer(folder("byte_level", tokenizer_config=config)).stop_ids == {2}


# Special text


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback", "sentencepiece"])
def test_special_text_is_a_token_or_ordinary_text(trained, kind: str) -> None:
    tokenizer = trained[kind]
    for text in ("<|im_end|>", "a <|im_end|>b", "</s>", "<s>Hi</s> there<|im_end|>"):
        special = {1, 2, tokenizer.backend.id_of("<|im_end|>")}
        parsed = tokenizer.encode(text, add_special_tokens=False)
        assert sum(i in special for i in parsed.tolist()) == text.count("<")
        ordinary = tokenizer.encode(text, add_special_tokens=False, parse_special=False)
        assert not special.intersection(ordinary.tolist())
        assert tokenizer.decode(ordinary) == text
        assert torch.equal(tokenizer.encode(text, add_special_tokens=False), parsed)  # the switch leaves no trace


def test_sentencepiece_parses_special_text_as_transformers_does(folder) -> None:
    """Both settings of `legacy`; ids by hand: the word after a control token has its own space, or not."""
    bare = Tokenizer(folder("sentencepiece"))
    word, inner = bare.encode("llama").tolist(), bare.encode("a llama").tolist()
    for legacy in (True, False):
        tokenizer = Tokenizer(folder("sentencepiece", tokenizer_config={"legacy": legacy}))
        ids = tokenizer.encode("llama</s>llama").tolist()
        assert ids[: len(word) + 1] == [*word, 2]
        assert (ids[len(word) + 1 :] == word) == legacy
        assert tokenizer.decode(ids, skip_special_tokens=False) == ("llama</s> llama" if legacy else "llama</s>llama")
        assert tokenizer.encode("a llama").tolist() == inner


def test_added_tokens_beside_a_sentencepiece_model(folder) -> None:
    decoder = {
        "420": {"content": "<|user|>", "special": True, "rstrip": True},
        "421": {"content": "<tool>", "special": False, "lstrip": True},
    }
    path = folder("sentencepiece", tokenizer_config={"added_tokens_decoder": decoder}, added_tokens={"<old>": 425})
    tokenizer = Tokenizer(path)
    hi = tokenizer.encode("Hi", add_special_tokens=False).tolist()
    assert tokenizer.vocab_size == 426
    assert tokenizer.encode("<|user|>\nHi").tolist() == [420, *hi]
    assert tokenizer.encode("Hi  <tool><old>").tolist() == [*hi, 421, 425]
    assert tokenizer.decode([420, *hi, 421, *hi, 422, 425, 999]) == "Hi<tool> Hi<old>"
    assert tokenizer.decode([420, *hi], skip_special_tokens=False) == "<|user|> Hi"


@pytest.mark.parametrize(
    "decoder", [["a"], {"x": {"content": "a"}}, {"9": {}}, {"9": {"content": ""}}, {"-1": {"content": "a"}}]
)
def test_damaged_added_tokens_are_refused(folder, decoder) -> None:
    with pytest.raises(UserError, match="added_tokens_decoder is damaged"):
        Tokenizer(folder("sentencepiece", tokenizer_config={"added_tokens_decoder": decoder}))


def test_named_tokens_of_the_vocabulary_are_special(tmp_path: Path, folders) -> None:
    """tokenizer_config.json names as EOS a token that tokenizer.json holds as an ordinary one."""
    state = json.loads((folders["byte_level"] / "tokenizer.json").read_text())
    state["added_tokens"] = [token for token in state["added_tokens"] if token["content"] != "</s>"]
    (tmp_path / "tokenizer.json").write_text(json.dumps(state))
    assert Tokenizer(tmp_path).decode([2]) == "</s>"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    tokenizer = Tokenizer(tmp_path)
    assert tokenizer.decode([2]) == "" and tokenizer.stop_ids == {2} and tokenizer.encode("a</s>")[-1] == 2


def test_broken_folder_after_a_gguf_round_trip(shared: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """Says EOS is 1 where generation_config says 2, adds BOS twice, knows ids without a row."""
    transformers = pytest.importorskip("transformers")
    path = shutil.copytree(shared / "data" / "tokenizers" / "smollm2", tmp_path / "broken")
    lib = tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))
    lib.post_processor = processors.TemplateProcessing(single="<|im_start|> $A", special_tokens=[("<|im_start|>", 1)])
    lib.add_special_tokens(["<CLS>", "<SEP>", "<PAD>", "<MASK>", "<FILL_ME>"])
    lib.save(str(path / "tokenizer.json"))
    config = json.loads((path / "tokenizer_config.json").read_text())
    config |= {"eos_token": "<|im_start|>", "add_prefix_space": True}
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    (path / "generation_config.json").write_text('{"eos_token_id": 2}')

    tokenizer = Tokenizer(path)
    assert tokenizer.stop_ids == {2} and tokenizer.eos_id == 2
    assert "[2]" in (err := capsys.readouterr().err) and "at 1;" in err and err.count("\n") == 1
    ids = tokenizer.encode_chat([{"role": "user", "content": "Hi"}]).tolist()
    assert ids[0] == 1 and ids[1] != 1 and ids.count(1) == 3 and ids.count(2) == 2
    reference = transformers.PreTrainedTokenizerFast(tokenizer_file=str(path / "tokenizer.json"))
    reference.chat_template = config["chat_template"]
    chat = [{"role": "user", "content": "Hi"}]
    assert ids == reference.apply_chat_template(chat, add_generation_prompt=True, tokenize=True)["input_ids"]
    assert tokenizer.encode("Hello").tolist() == [1, 19556]
    assert tokenizer.encode("<FILL_ME>", add_special_tokens=False).tolist() == [49156] and tokenizer.vocab_size == 49157
    (path / "generation_config.json").write_text('{"eos_token_id": [2, 49155]}')
    with pytest.raises(UserError, match="49155 is outside the model's vocabulary of 49152"):
        Tokenizer(path)


# Text in, text out ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_text_that_is_not_unicode_is_refused(trained, kind: str) -> None:
    with pytest.raises(UserError, match="character 2"):
        trained[kind].encode("ab\ud83d")
    with pytest.raises(UserError, match="must be text"):
        trained[kind].encode(b"ab")
    assert trained[kind].encode("", add_special_tokens=False).shape == (0,)


@pytest.mark.parametrize("kind", KINDS)
def test_ids_without_text_give_none(trained, kind: str) -> None:
    tokenizer = trained[kind]
    ids = tokenizer.encode("a green hill", add_special_tokens=False).tolist()
    odd = [tokenizer.vocab_size, *ids, -1, 10**6, 2**40]
    assert tokenizer.decode(odd) == tokenizer.decode(ids) == tokenizer.decode(torch.tensor(odd)) == "a green hill"
    assert tokenizer.decode([]) == "" == tokenizer.decode(torch.tensor([], dtype=torch.int64))


def test_truncation_and_padding_stored_in_the_file_are_ignored(folder) -> None:
    path = folder("byte_level")
    lib = tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))
    whole = lib.encode(CORPUS[0]).ids
    lib.enable_truncation(max_length=4)
    lib.enable_padding(length=200)
    lib.save(str(path / "tokenizer.json"))
    assert Tokenizer(path).encode(CORPUS[0]).tolist() == whole


def test_vocab_and_merges_files(tmp_path: Path) -> None:
    lib = byte_level()
    lib.model.save(str(tmp_path))
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<extra>": 600}))
    tokenizer = Tokenizer(tmp_path)
    for text in CORPUS[:5]:
        assert tokenizer.encode(text).tolist() == lib.encode(text).ids
    assert tokenizer.bos_id is None and tokenizer.eos_id is None  # GPT-2's <|endoftext|> is not in this vocabulary
    assert tokenizer.encode("a<extra>").tolist()[-1] == tokenizer.vocab_size - 1
    (tmp_path / "merges.txt").write_text("#version: 0.2\nzq xj\n")
    with pytest.raises(UserError, match="merges.txt is damaged"):
        Tokenizer(tmp_path)


def test_what_is_no_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="neither a checkpoint folder"):
        Tokenizer(tmp_path / "nowhere")
    with pytest.raises(UserError, match="has no tokenizer"):
        Tokenizer(tmp_path)
    (tmp_path / "tokenizer.model").write_text("IQ== 0\nIg== 1\n")
    with pytest.raises(UserError, match="tiktoken"):
        Tokenizer(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"\x00\x01 not a model")
    with pytest.raises(UserError, match="no SentencePiece model"):
        Tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0"')
    with pytest.raises(UserError, match="damaged"):
        Tokenizer(tmp_path)


def test_transformers_is_not_imported() -> None:
    code = "import sys, lit_gen.tokenizer; print('transformers' in sys.modules)"
    root = Path(__file__).resolve().parents[1]
    result = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "False"


# Streaming


def pieces(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    stream = tokenizer.stream()
    return [*(stream.push(i) for i in ids), stream.flush()]


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_pieces_add_up_to_decode_for_any_ids(trained, kind: str, data: st.DataObject) -> None:
    tokenizer = trained[kind]
    any_id = st.integers(-1, tokenizer.vocab_size + 3)
    space = [i for i in range(tokenizer.vocab_size) if tokenizer.backend.token_of(i) in ("▁", "Ġ", "▁▁")]
    runs = st.one_of(any_id, st.integers(0, 262), st.sampled_from([0, 1, 2, 3, *space]))  # bytes, spaces, special ones
    ids = data.draw(st.lists(runs, max_size=30))
    assert "".join(pieces(tokenizer, ids)) == tokenizer.decode(ids)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text(max_size=40) | st.text("a llamaé🔥世 \n", max_size=40))
def test_pieces_add_up_to_decode_for_any_text(trained, kind: str, text: str) -> None:
    tokenizer = trained[kind]
    ids = tokenizer.encode(text).tolist()
    assert "".join(pieces(tokenizer, ids)) == tokenizer.decode(ids)


@pytest.mark.parametrize(
    ("decoder", "words", "text"),
    [
        (decoders.Sequence([decoders.Fuse(), decoders.Replace("ab", "c")]), ["xa", "by"], "xcy"),
        (decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 0, 1)]), ["a ", "b "], "a b"),
    ],
)
def test_what_a_later_token_rewrites_is_held_back(tmp_path: Path, decoder, words: list[str], text: str) -> None:
    lib = tokenizers.Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=words[0]))
    lib.decoder = decoder
    lib.save(str(tmp_path / "tokenizer.json"))
    tokenizer, ids = Tokenizer(tmp_path), list(range(len(words)))
    assert tokenizer.decode(ids) == text == "".join(pieces(tokenizer, ids))


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback", "sentencepiece"])
def test_rows_stream_side_by_side_with_their_spaces(trained, kind: str) -> None:
    tokenizer = trained[kind]
    texts = ["This is a test string", " Hello  world", "a 🔥🔥 fire", "   ", "größe"]
    rows = [tokenizer.encode(text, add_special_tokens=False).tolist() for text in texts]
    streams, shown = [tokenizer.stream() for _ in rows], [""] * len(rows)
    for step in range(max(map(len, rows))):
        for row, ids in enumerate(rows):
            shown[row] += streams[row].push(ids[step]) if step < len(ids) else ""
            assert "\ufffd" not in shown[row] and texts[row].startswith(shown[row])
    assert [text + stream.flush() for text, stream in zip(shown, streams, strict=True)] == texts


def test_text_appears_as_soon_as_it_is_final(trained) -> None:
    tokenizer = trained["byte_level"]
    ids = tokenizer.encode("a🔥b").tolist()
    assert pieces(tokenizer, ids) == ["a", "", "", "", "🔥", "b", ""]
    assert pieces(tokenizer, ids[:3]) == ["a", "", "", "\ufffd"]
    words = tokenizer.encode(CORPUS[0]).tolist()
    assert all(piece for piece in pieces(tokenizer, words)[:-1])
    words = trained["sentencepiece"].encode(CORPUS[0]).tolist()
    assert all(piece for piece in pieces(trained["sentencepiece"], words)[1:-1])


@pytest.mark.parametrize("kind", ["byte_fallback", "unigram", "word_piece", "words", "sentencepiece"])
def test_cost_of_a_token_does_not_grow_with_the_row(trained, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer, decoded = trained[kind], []
    decode = tokenizer.backend.decode
    monkeypatch.setattr(tokenizer.backend, "decode", lambda ids, *rest: decoded.extend(ids) or decode(ids, *rest))
    ids = tokenizer.encode("a 🔥🔥 fire on the hill " * 20, add_special_tokens=False).tolist()
    pieces(tokenizer, ids)
    assert len(decoded) < 8 * len(ids)
