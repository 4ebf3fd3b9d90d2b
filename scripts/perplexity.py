"""How good a model is after its weights were rounded: perplexity on a text, accuracy on questions with given answers.

    python scripts/perplexity.py --text book.txt --precision bfloat16
    python scripts/perplexity.py --text book.txt --precision bfloat16 --quantize int4
    python scripts/perplexity.py --questions hellaswag.jsonl --limit 200

The text is cut into windows, each of which is read from its start, without the one before: short windows cost little
and give higher numbers than published ones, so compare only what the same options printed. A line of the questions is
{"query": "...", "choices": ["...", ...], "gold": 0}; the score of an answer is the sum of the log-probabilities of its
tokens after the query and a space, by itself ("accuracy") or divided by its length in characters ("accuracy_norm").
"""

import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

if __name__ == "__main__":  # from a bare clone, and from any folder
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from lit_gen import GPT, Tokenizer
from lit_gen.cache import rectangle
from lit_gen.download import fetch_default_model
from lit_gen.pack import pack_model, weight_bytes
from lit_gen.quantize import Format
from lit_gen.utils import UserError, run_cli


@torch.no_grad()
def log_probabilities(model: GPT, texts: list[list[int]]) -> list[Tensor]:
    """For each text (T,) the log-probabilities (T - 1,) float32 of all its tokens but the first."""
    idx, _, _ = rectangle(texts, "right")  # (B, T); what stands behind a text is not seen by it
    logits, following = model(idx)[:, :-1], idx[:, 1:]  # (B, T - 1, V), (B, T - 1)
    losses = F.cross_entropy(logits.flatten(0, 1).float(), following.flatten(), reduction="none").view_as(following)
    return [-loss[: len(text) - 1] for loss, text in zip(losses, texts, strict=True)]


def perplexity(model: GPT, ids: list[int], window: int) -> float:
    """exp of the mean negative log-probability of the tokens, but for the first of each window."""
    windows = [ids[start : start + window] for start in range(0, len(ids) - 1, window)]
    scores = [log_probabilities(model, [text])[0] for text in tqdm(windows, unit="window", disable=None)]
    return math.exp(-torch.cat(scores).double().mean())


def accuracy(model: GPT, tokenizer: Tokenizer, questions: list[dict[str, Any]]) -> dict[str, float]:
    """The share of questions whose right answer has the highest score, and with scores per character."""
    right = torch.zeros(2)
    for question in tqdm(questions, unit="question", disable=None):
        n_query = len(tokenizer.encode(question["query"]))
        texts = [tokenizer.encode(f"{question['query']} {choice}").tolist() for choice in question["choices"]]
        scores = log_probabilities(model, texts)
        sums = torch.stack([score[n_query - 1 :].sum() for score in scores])
        lengths = torch.tensor([len(choice) for choice in question["choices"]])
        right += torch.tensor([values.argmax() == question["gold"] for values in (sums, sums / lengths)])
    shares = (right / len(questions)).tolist()
    return {"questions": len(questions), "accuracy": round(shares[0], 4), "accuracy_norm": round(shares[1], 4)}


def read_questions(file: Path, limit: int) -> Iterator[dict[str, Any]]:
    """The first lines of a file, checked."""
    with _open(file) as lines:
        for number, line in zip(range(1, limit + 1), lines, strict=False):
            try:
                question = json.loads(line)
                query, choices, gold = (question[key] for key in ("query", "choices", "gold"))
                fine = query and isinstance(query, str) and all(c and isinstance(c, str) for c in choices)
                fine = fine and type(gold) is int and 0 <= gold < len(choices)
            except (ValueError, KeyError, TypeError, RecursionError):
                fine = False
            if not fine:
                raise UserError(
                    f'{file}, line {number}: it is not {{"query": text, "choices": [text, ...], "gold": index}}'
                )
            yield question


def _open(file: Path) -> Any:
    try:
        return file.open(encoding="utf-8", errors="replace")
    except OSError as error:
        raise UserError(f"cannot read {file}: {error.strerror}") from None


def main(
    *,
    checkpoint_dir: Path | None = None,
    precision: Literal["float32", "bfloat16", "float16"] = "float32",
    quantize: Format | None = None,
    text: Path | None = None,
    tokens: int = 20_000,
    window: int = 512,
    questions: Path | None = None,
    limit: int = 200,
) -> None:
    """Prints a JSON line: the perplexity on a text, the accuracy on questions with given answers, or both.

    Args:
        checkpoint_dir: A Hugging Face folder, a lit folder or a .gguf file; by default SmolLM2-135M-Instruct, fetched.
        precision: Of activations, and of weights that are not quantised.
        quantize: Round the weights to int8 or int4 first.
        text: A text file.
        tokens: So many tokens of the text are read.
        window: Tokens that are read together.
        questions: A .jsonl file of questions.
        limit: So many questions are read.
    """
    if min(tokens, window) < 2 or limit < 1:
        raise UserError("perplexity needs --tokens >= 2, --window >= 2 and --limit >= 1")
    if text is None and questions is None:
        raise UserError("give a --text, a .jsonl file of --questions, or both")
    path = checkpoint_dir or fetch_default_model()
    tokenizer, asked = Tokenizer(path), list(read_questions(questions, limit)) if questions else []
    ids = tokenizer.encode(_open(text).read())[:tokens].tolist() if text else []
    if (text and len(ids) < 2) or (questions and not asked):
        raise UserError(f"{text if text and len(ids) < 2 else questions} is empty")
    model = pack_model(GPT.from_checkpoint(path, getattr(torch, precision)), quantize)
    line = {"model": path.name, "precision": precision, "quantize": quantize, "weight_bytes": weight_bytes(model)}
    if text:
        line |= {"tokens": len(ids), "window": window, "perplexity": round(perplexity(model, ids, window), 4)}
    print(json.dumps(line | (accuracy(model, tokenizer, asked) if asked else {})))


if __name__ == "__main__":
    run_cli(main)
