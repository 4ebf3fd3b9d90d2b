"""Chat templates: where a checkpoint keeps its own, and rendering it as Hugging Face does, in a sandbox.

A template is code from the internet. It runs in Jinja's immutable sandbox, sees the messages and plain values only, and
whatever goes wrong in it becomes one line.
"""

import json
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Scope
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from lit_gen.utils import UserError

# What an expression of a template can raise, beside Jinja's own errors: it calls methods of str, list, dict and int.
TEMPLATE_ERRORS = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)


class GenerationTag(Extension):
    """`{% generation %}` ... `{% endgeneration %}` marks the assistant's words for training; here it only groups."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> Scope:
        """Returns what is between the tags, in a scope of its own."""
        line = next(parser.stream).lineno
        return Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(line)


def find_chat_template(folder: Path, config: dict[str, Any]) -> str | None:
    """The chat template of a checkpoint folder, None if it has none.

    In this order: chat_template.jinja, additional_chat_templates/*.jinja, `chat_template` in tokenizer_config.json (a
    string, or a list of `{"name", "template"}`). Of several it is the one named "default", or the only one.
    """
    if (folder / "chat_template.jinja").is_file():
        return read_text(folder / "chat_template.jinja")
    files = sorted((folder / "additional_chat_templates").glob("*.jinja"))
    templates = {file.stem: read_text(file) for file in files} or config.get("chat_template")
    if isinstance(templates, list) and all(isinstance(entry, dict) for entry in templates):
        templates = {entry.get("name"): entry.get("template") for entry in templates}
    if isinstance(templates, dict):
        templates = templates.get("default", next(iter(templates.values())) if len(templates) == 1 else None)
    if not isinstance(templates, str | None):
        raise UserError(f"{folder}/tokenizer_config.json: chat_template is neither a string nor a list of templates")
    return templates


def read_text(path: Path) -> str:
    """Reads a template file, line ends as they are."""
    try:
        return path.read_bytes().decode()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {path}: {error}") from None


def render(template: str, messages: list[dict[str, Any]], **context: Any) -> str:
    """Renders the messages of one conversation.

    Args:
        template: Jinja source.
        messages: `{"role": ..., "content": ...}` dicts, oldest first. Keys whose value is None are left out, as
            Hugging Face does, so that a template can ask whether a key is there.
        context: what the template sees beside `messages`: `tools`, `documents`, `add_generation_prompt`, the special
            tokens by name, and whatever else this template reads (`enable_thinking`).

    Raises:
        UserError: the messages are no list of dicts, or the template refuses them, is wrong, or leaves the sandbox.
    """
    if not (isinstance(messages, list) and messages and all(isinstance(message, dict) for message in messages)):
        raise UserError('messages must be a list like [{"role": "user", "content": "Hi"}] with at least one message')
    messages = [{key: value for key, value in message.items() if value is not None} for message in messages]
    try:
        return compile_template(template).render(messages=messages, **context)
    except (jinja2.TemplateError, *TEMPLATE_ERRORS) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UserError(f"the chat template cannot render these messages: {reason}") from None


@lru_cache(maxsize=8)
def compile_template(source: str) -> jinja2.Template:
    """Compiles a template once, with the filters and functions that templates on the hub rely on."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = to_json
    environment.globals |= {"raise_exception": raise_exception, "strftime_now": strftime_now}
    return environment.from_string(source)


def to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as it is; Jinja's own filter would write `<` as `\\u003c`."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def raise_exception(message: str) -> None:
    """Lets a template refuse messages that its model was not trained on."""
    raise jinja2.TemplateError(message)


def strftime_now(format: str) -> str:
    """The date, for templates that tell the model what day it is."""
    return datetime.now().strftime(format)
