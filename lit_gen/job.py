"""The side file of a job, `<out>.job.json`: what the rows in `<out>` are made from, and whether they are all there."""

import json
import os
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lit_gen.durable import partial_path, publish
from lit_gen.utils import UserError, read_json
from lit_gen.wheel import sha256_of

SHARD = "shard"  # the one part of a fingerprint in which the shards of a job differ


@dataclass
class Job:
    """What a side file says.

    Attributes:
        fingerprint: everything that decides the rows, as plain JSON.
        finished: all rows are in the file, in input order.
        lines: how many there then are.
    """

    fingerprint: dict[str, Any]
    finished: bool = False
    lines: int = 0


def job_path(out: Path) -> Path:
    """The side file of the output file `out`."""
    return out.with_name(out.name + ".job.json")


def read_job(out: Path) -> Job | None:
    """The job of `out`, or None if it has no side file; UserError if that is damaged."""
    path = job_path(out)
    if not os.path.lexists(path):
        return None
    try:
        job = Job(**read_json(path))
        kinds = (type(job.fingerprint), type(job.finished), type(job.lines))
    except (UserError, TypeError) as error:
        reason = str(error) if isinstance(error, UserError) else f"{path} is not the side file of a job"
        raise UserError(f"{reason}; delete it and {out} to begin anew") from None
    if kinds != (dict, bool, int):
        raise UserError(f"{path} is not the side file of a job; delete it and {out} to begin anew")
    return job


def write_job(out: Path, job: Job) -> None:
    """Writes the side file: after a crash at any moment the old or the new one is there, whole."""
    path = job_path(out)
    partial = partial_path(path)
    with partial.open("w", encoding="utf-8") as file:
        file.write(json.dumps(asdict(job), indent=1, allow_nan=False) + "\n")
        file.flush()
        os.fsync(file.fileno())
    publish(partial, path)


def refuse_overlap(stats_json: os.PathLike | None, prompts: str | list[str], out: Path | None) -> None:
    """UserError if --stats_json cannot be written, or would overwrite the prompts, the output file or its side file."""
    if stats_json is not None and (os.path.isdir(stats_json) or not Path(stats_json).parent.is_dir()):
        raise UserError(f"cannot write --stats_json {stats_json}: give a file in a folder that exists")
    files = [Path(prompts)] if isinstance(prompts, str) and os.path.isfile(prompts) else []
    if out is not None:
        real = Path(os.path.realpath(out))
        files += [real, job_path(real)]
    for file in files:
        if stats_json is not None and os.path.realpath(stats_json) == os.path.realpath(file):
            raise UserError(f"--stats_json {stats_json} would overwrite {file}: give another one")


def differences(old: Any, new: Any, name: str = "") -> Iterator[str]:
    """Each part in which two fingerprints differ, such as 'settings.seed (was 1, is 2)'."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in [*old, *(key for key in new if key not in old)]:
            inner = f"{name}.{key}" if name else str(key)
            if key not in old or key not in new:
                sides = (_short(side[key]) if key in side else "absent" for side in (old, new))
                yield "{} (was {}, is {})".format(inner, *sides)
            else:
                yield from differences(old[key], new[key], inner)
    elif old != new:
        yield f"{name} (was {_short(old)}, is {_short(new)})"


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:24]}...{text[-12:]}"


def fingerprint_job(
    prompts: str, checkpoint: Path, options: dict[str, Any], shard: tuple[int, int], handed_out: bool = False
) -> dict[str, Any]:
    """What decides the rows of a job: the digest of its prompts, the model, the options; and which part it has.

    The undivided job names no part, nor does a merged file, which is the undivided job's. The files of a job whose
    prompts were handed out do not say which rows they have; they cannot go on as files of shards that do.
    """
    index, count = shard
    part = {SHARD: f"{index}/{count}" + ", handed out" * handed_out} if count > 1 else {}
    return {"prompts": prompts, "model": fingerprint_model(checkpoint), **options, **part}


def fingerprint_model(checkpoint: Path) -> dict[str, str]:
    """The sha256 of every file of a checkpoint that decides what it generates, by name.

    Those are weights (*.safetensors, *.bin, *.gguf), settings and tokenizer (*.json, *.model, vocab.txt, merges.txt)
    and chat templates (*.jinja, also of additional_chat_templates/). Side files of jobs are none of them, so results
    may lie in the checkpoint's folder. Files are only streamed through the hash, never interpreted.

    The cost is one read of the files: 1 GB/s on a processor core with SHA instructions (measured), so a quarter of a
    second for 270 MB, 15 s for a model of 7B parameters in 16 bit, and more where the disk is slower. What fits into
    memory is then in the page cache, where loading finds it.

    Args:
        checkpoint: a checkpoint folder, or a .gguf file.

    Raises:
        UserError: there is no such file, or one cannot be read.
    """
    try:
        if checkpoint.is_file():
            return {checkpoint.name: sha256_of(checkpoint)}
        files = [*checkpoint.iterdir(), *(checkpoint / "additional_chat_templates").glob("*.jinja")]
        names = sorted(file.relative_to(checkpoint).as_posix() for file in files if file.is_file())
        decides = re.compile(r".+\.(safetensors|bin|gguf|model|jinja|(?<!\.job\.)json)|(vocab|merges)\.txt")
        return {name: sha256_of(checkpoint / name) for name in names if decides.fullmatch(name)}
    except OSError as error:
        raise UserError(f"cannot read {error.filename or checkpoint}: {error.strerror or error}") from None
