"""The command line's ends, and JSON as it is found in checkpoints."""

import io
import sys
from pathlib import Path

import pytest

from lit_gen.interrupt import Interrupted
from lit_gen.utils import UserError, read_json, run_cli


@pytest.mark.parametrize(
    ("error", "status", "line"),
    [
        (UserError("the thing is wrong: mend it"), 2, "error: the thing is wrong: mend it"),
        (KeyboardInterrupt(), 130, "error: interrupted"),
        (Interrupted(15), 143, "error: interrupted by SIGTERM"),
        (OSError(28, "No space left on device"), 1, "error: No space left on device"),
        (UserError("a \x1b[31mred\u202e\nname"), 2, r"error: a \x1b[31mred\u202e\nname"),
        (OSError(2, "No such file", "\x1b]0;x\x07"), 1, r"error: No such file: \x1b]0;x\x07"),
    ],
)
def test_errors_end_with_one_line_and_their_own_status(error, status, line, capsys, monkeypatch) -> None:
    def main(number: int = 1) -> None:
        raise error

    monkeypatch.setattr(sys, "argv", ["script.py"])
    with pytest.raises(SystemExit) as end:
        run_cli(main)
    out, err = capsys.readouterr()
    assert (end.value.code, out, err) == (status, "", line + "\n")


def test_a_character_that_the_encoding_of_stdout_lacks_is_spelled(monkeypatch) -> None:
    stdout = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", stdout)
    monkeypatch.setattr(sys, "argv", ["script.py"])
    run_cli(lambda: print("a→\ud800"))
    assert stdout.buffer.getvalue() == b"a\\u2192\\ud800\n"


def test_a_bug_is_not_hidden_as_bad_input(monkeypatch) -> None:
    def main() -> None:
        raise ValueError("a bug of ours")

    monkeypatch.setattr(sys, "argv", ["script.py"])
    with pytest.raises(ValueError, match="a bug of ours"):
        run_cli(main)


@pytest.mark.parametrize("arguments", [["--numbr", "1"], ["--num", "1"], ["--number", "x"], ["stray"]])
def test_bad_arguments_are_one_line_and_status_2(arguments, capsys, monkeypatch) -> None:
    def main(number: int = 1, other: str = "") -> None:
        pytest.fail("ran")

    monkeypatch.setattr(sys, "argv", ["script.py", *arguments])
    with pytest.raises(SystemExit) as end:
        run_cli(main)
    out, err = capsys.readouterr()
    assert end.value.code == 2 and out == "" and err.startswith("error: ") and err.count("\n") == 1


def test_json_with_trailing_commas_is_read_and_damage_is_named(tmp_path: Path) -> None:
    file = tmp_path / "x.json"
    file.write_text('{"a": [1, 2,], "b": "c,]",}')
    assert read_json(file)["a"] == [1, 2]
    for content in (b"{", b"\xff", b"[" * 100_000, b"9" * 5000):
        file.write_bytes(content)
        with pytest.raises(UserError, match=r"x\.json") as error:
            read_json(file)
        assert "\n" not in str(error.value)
    with pytest.raises(UserError, match="No such file"):
        read_json(tmp_path / "none.json")
