"""For which model a file with adapters was made: the shape of its base, in the file's metadata."""

import json
from collections.abc import Mapping
from pathlib import Path

from lit_gen.config import Config
from lit_gen.utils import UserError

SHAPE = ("model_type", "vocab_size", "n_layer", "n_embd", "n_head", "n_query_groups", "head_size", "intermediate_size")


def shape_of(config: Config) -> str:
    """What tells models of different shapes apart, as text for the metadata of a file."""
    return json.dumps({name: getattr(config, name) for name in SHAPE})


def check_base(file: Path, metadata: Mapping[str, str], config: Config) -> None:
    """UserError if a file was made for a model of another shape, or does not say for which."""
    try:
        made_for, here = json.loads(metadata.get("base", "")), json.loads(shape_of(config))
        differ = [name for name in here if made_for.get(name) != here[name]]
    except (ValueError, AttributeError, RecursionError):
        raise UserError(f"{file} does not say for which model it is; save it again") from None
    if differ:
        name = differ[0]
        raise UserError(f"{file} is for another model: {name} is {made_for.get(name)!a:.40} there, {here[name]} here")
