"""lm-eval's `generation_kwargs` in the terms of this project."""

from dataclasses import fields
from typing import Any

from lm_eval.models.utils import normalize_gen_kwargs

from lit_gen.beams import Beams
from lit_gen.settings import Settings
from lit_gen.utils import UserError

OWN = ("max_new_tokens", "stop", "n", "logprobs", "lora")  # settings that lm-eval has another name for, or none
NEUTRAL = {"num_return_sequences": 1, "use_cache": True}  # what others need and is so here anyway
SEARCH = {"num_beams": "n", "length_penalty": "length_penalty", "early_stopping": "early_stopping"}


def settings_of(gen_kwargs: dict[str, Any], max_gen_toks: int) -> tuple[dict[str, Any], Beams]:
    """The settings of a row, and how its text is searched for; UserError for what means nothing here."""
    kwargs = dict(normalize_gen_kwargs(gen_kwargs, max_gen_toks))
    settings = {"max_new_tokens": kwargs.pop("max_gen_toks"), "stop": [stop for stop in kwargs.pop("until") if stop]}
    if not kwargs.pop("do_sample"):
        kwargs["temperature"] = 0.0
    if kwargs.get("top_k") == 0:  # Hugging Face's way to keep all
        del kwargs["top_k"]
    beams = Beams(**{name: kwargs.pop(other) for other, name in SEARCH.items() if other in kwargs})
    known = [field.name for field in fields(Settings) if field.name not in OWN]
    for name, value in kwargs.items():
        if name in known:
            settings[name] = value
        elif name not in NEUTRAL or value != NEUTRAL[name]:
            names = ", ".join(["until", "max_gen_toks", "do_sample", *known, *SEARCH])
            raise UserError(f"generation_kwargs has {name}={value!r:.40}, but may have {names}")
    beams.check(Settings(**settings))
    return settings, beams
