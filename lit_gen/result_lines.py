"""The lines of an output file: what became of one prompt, as objects for JSON."""

from collections.abc import Sequence
from typing import Any

from lit_gen import openai_batch
from lit_gen.prompt_lines import Prompt
from lit_gen.stopping import Row
from lit_gen.tokenizer import Tokenizer


def result_lines(prompt: Prompt, rows: Sequence[Row], tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """An object per row, in the order of samples; for an OpenAI batch line one object with all of them.

        {"index": 0, "id": 0, "prompt": "...", "text": "...", "token_ids": [5, 7], "finish_reason": "stop"}

    index: the prompt's place, from 0. id: the user's, or the index. sample: only if the prompt has several rows.
    prompt: text, messages or token ids, as given. score: only after a search (see beams.py). logprobs: only if
    asked for, per token its `id`, its `logprob` and `top`, pairs of id and log-probability. error: only if the finish
    reason is "error" or "nan".

    With the finish reason "error" nothing was generated, so text, token_ids and logprobs are left out, however late the
    error was found; prompt too if the line could not be read:

        {"index": 1, "id": 1, "prompt": "...", "finish_reason": "error", "error": "line 2 of ..."}

    Args:
        prompt: of these rows.
        rows: finished rows of the prompt, in any order (for OpenAI all of them); ignored if the prompt has an error.
        tokenizer: of the model.
    """
    if prompt.openai is not None:
        return [openai_batch.render(prompt, rows, tokenizer)]
    name = {"index": prompt.index, "id": prompt.index if prompt.id is None else prompt.id}
    if prompt.error is not None:
        return [name | {"finish_reason": "error", "error": prompt.error}]
    given = next(value for value in (prompt.text, prompt.messages, prompt.ids) if value is not None)
    lines = []
    for row in sorted(rows, key=lambda row: row.sample):
        line = name | ({"sample": row.sample} if row.settings.n > 1 else {}) | {"prompt": given}
        if row.finish_reason == "error":
            lines.append(line | {"finish_reason": "error", "error": row.error})
            continue
        line |= {"text": row.text, "token_ids": row.tokens, "finish_reason": row.finish_reason}
        if row.score is not None:
            line["score"] = row.score
        if row.logprobs is not None:
            line["logprobs"] = _logprobs(row)
        if row.finish_reason == "nan":
            line["error"] = row.error or openai_batch.NAN
        lines.append(line)
    return lines


def _logprobs(row: Row) -> list[dict[str, Any]]:
    """JSON has no -inf, the log-probability of a token that cannot be: OpenAI's -9999 stands for it."""

    def finite(logprob: float) -> float:
        return max(openai_batch.LEAST_LOGPROB, logprob)

    pairs = zip(row.tokens, row.logprobs, strict=True)
    return [
        {"id": token, "logprob": finite(chosen), "top": [[other, finite(value)] for other, value in top]}
        for token, (chosen, top) in pairs
    ]
