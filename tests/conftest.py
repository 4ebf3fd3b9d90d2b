"""Fixtures that several test files share."""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from families import make_hf_model, save_hf_model
from torch import nn

from lit_gen.checkpoint import load_model
from lit_gen.config import Config, Rope
from lit_gen.model import GPT
from lit_gen.utils import run_cli

needs_onednn_bfloat16 = pytest.mark.skipif(
    not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="oneDNN packs no bfloat16 on a CPU without AVX-512"
)


@pytest.fixture(scope="session")
def shared() -> Path:
    """The optional folder of larger test data that lies beside the repository; tests that need it skip without it."""
    path = Path(os.environ.get("LIT_GEN_SHARED", Path(__file__).resolve().parents[2] / "shared"))
    if not path.is_dir():
        pytest.skip(f"no test data at {path} (set LIT_GEN_SHARED)")
    return path


@pytest.fixture(scope="session")
def stories(shared: Path) -> Path:
    """A trained Llama of 260,032 parameters with exact expected outputs."""
    return shared / "data/models/stories260K"


class Family(NamedTuple):
    hf: nn.Module  # transformers' own model, float32
    model: GPT  # ours, loaded from the folder
    folder: Path  # where transformers saved it


@pytest.fixture(scope="session")
def family(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Family]:
    """Makes a family of `families.FAMILIES` once: the same random weights in transformers and here."""
    made: dict[str, Family] = {}

    def make(name: str) -> Family:
        if name not in made:
            hf = make_hf_model(name)
            folder = save_hf_model(hf, tmp_path_factory.mktemp(name))
            made[name] = Family(hf, load_model(folder, torch.float32, torch.device("cpu")), folder)
        return made[name]

    return make


def randomized(config: Config, seed: int = 0) -> GPT:
    """A model with every parameter random and large enough (std 0.2) that logits are no ties; biases too."""
    model, generator = GPT(config).eval().requires_grad_(False), torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        offset = 1.0 if "norm" in name and "bias" not in name else 0.0
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2 + offset)
    return model


SIZES = {"n_layer": 2, "n_head": 4, "head_size": 16, "n_embd": 64, "intermediate_size": 128, "vocab_size": 512}
SIZES |= {"block_size": 256}


def llama_config(**changes: object) -> Config:
    return Config(**{**SIZES, "n_query_groups": 2, **changes})


def neox_config(**changes: object) -> Config:
    kinds = {"norm": "layer", "norm_bias": True, "parallel_residual": True, "gated": False, "act": "gelu"}
    biases = dict.fromkeys(("qkv_bias", "proj_bias", "mlp_bias"), True)
    return Config(**{**SIZES, "model_type": "gpt_neox", "ropes": [Rope(n_elem=4)], **kinds, **biases, **changes})


@pytest.fixture
def tiny_llama() -> GPT:
    return randomized(llama_config())


@pytest.fixture
def tiny_neox() -> GPT:
    return randomized(neox_config())


@pytest.fixture(params=["llama", "neox"])
def tiny(request: pytest.FixtureRequest) -> GPT:
    return randomized(llama_config() if request.param == "llama" else neox_config())


def save_byte_tokenizer(folder: Path, vocab_size: int, text: str = "", **config: str) -> None:
    """A byte-level tokenizer with BOS <s> and EOS </s>, its merges learnt from `text`; 258 ids are the bytes alone."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    library = Tokenizer(models.BPE())
    library.pre_tokenizer, library.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    learn = {"initial_alphabet": pre_tokenizers.ByteLevel.alphabet(), "special_tokens": ["<s>", "</s>"]}
    library.train_from_iterator([text], trainers.BpeTrainer(vocab_size=vocab_size, show_progress=False, **learn))
    folder.mkdir(exist_ok=True)
    library.save(str(folder / "tokenizer.json"))
    names = {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True}
    (folder / "tokenizer_config.json").write_text(json.dumps(names | config))


def run_script(capsys: pytest.CaptureFixture, main: Callable, *args: object, **how: object) -> tuple[int, str, str]:
    """Exit status, stdout and stderr of a script's `main` with these arguments; `how`: options of `run_cli`."""
    argv, sys.argv = sys.argv, ["script.py", *map(str, args)]
    try:
        run_cli(main, **how)
        status = 0
    except SystemExit as exit:
        status = exit.code
    finally:
        sys.argv = argv
    out, err = capsys.readouterr()
    return status, out, err
