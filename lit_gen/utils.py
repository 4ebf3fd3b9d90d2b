"""What every script needs around the model: errors a user can act on, tolerant JSON, and the command line."""

import json
import os
import re
import sys
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from lit_gen.interrupt import Interrupted


class UserError(ValueError):
    """Bad input: the message is one line that says what is wrong, which thing it is and what to do about it."""


def read_json(path: Path) -> Any:
    """Reads a JSON file; a trailing comma, which some published checkpoints have, is forgiven."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from None
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        try:
            return json.loads(re.sub(r",(\s*[}\]])", r"\1", text))
        except json.JSONDecodeError:
            raise UserError(f"{path} is not JSON: {error}") from None
    except (ValueError, RecursionError) as error:  # numbers of thousands of digits, or thousands of brackets
        raise UserError(f"{path} is not acceptable JSON: {error}") from None


def printable(text: str) -> str:
    r"""`text` for a terminal: control characters other than line break and tab become visible, such as `\x1b`.

    Model output may hold escape sequences, and marks that reverse the direction of writing. Works piece by piece.
    """
    unsafe = r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
    return re.sub(unsafe, lambda match: ascii(match.group())[1:-1], text)


def say(message: str) -> None:
    """Prints one line to stderr; what would steer a terminal, and line breaks, which names may hold, become visible."""
    print(printable(message).replace("\n", "\\n"), file=sys.stderr)


def run_cli(main: Callable[..., Any], repeated: Collection[str] = ()) -> None:
    """Runs `main` with the command line's arguments; an error that a user can act on becomes one line on stderr.

    Options named in `repeated` take lists, and may be given several times, for an element each.

    Exit status: 2 for a `UserError`, 1 for an error of the system (a full disk), 128 + n after signal n.
    """
    from jsonargparse import ArgumentParser, auto_cli

    class Parser(ArgumentParser):
        def error(self, message: str, ex: Exception | None = None) -> None:
            sys.exit(_report(f"{' '.join(message.split())} (-h lists the options)"))

    if sys.stdout is None:
        sys.exit(_report("stdout is closed, and texts would go there"))
    sys.stdout.reconfigure(errors="backslashreplace")  # a character that its encoding lacks may not end the job
    try:
        args = sys.argv[1:]
        for name in repeated:  # --name+ is jsonargparse's way to say "one more"
            args = [re.sub(rf"^--{name}(?==|$)", f"--{name}+", argument) for argument in args]
        auto_cli(main, args=args, as_positional=False, parser_class=Parser, allow_abbrev=False)
        sys.stdout.flush()
    except UserError as error:
        sys.exit(_report(str(error)))
    except Interrupted as error:
        _report(str(error))
        sys.exit(128 + error.signum)
    except KeyboardInterrupt:
        _report("interrupted")
        sys.exit(130)
    except BrokenPipeError:  # the reader, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    except OSError as error:
        _report(f"{error.strerror or error}{'' if error.filename is None else ': ' + str(error.filename)}")
        sys.exit(1)


def _report(message: str) -> int:
    say(f"error: {message}")
    return 2
