"""Signals end a job between two steps, with its rows safe."""

import json
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from lit_gen.interrupt import Interrupted, Interrupts
from lit_gen.results import Results

KINDS = [signal.SIGINT, signal.SIGTERM]


def in_child(function: Callable[..., None]) -> tuple[multiprocessing.Process, multiprocessing.connection.Connection]:
    """A process of its own that runs `function(connection)`, and our end of the connection."""
    ours, theirs = multiprocessing.Pipe()
    child = multiprocessing.get_context("fork").Process(target=function, args=(theirs,), daemon=True)
    child.start()
    return child, ours


@pytest.mark.parametrize("signum", KINDS)
def test_a_signal_ends_the_job_after_the_step_and_the_same_command_goes_on(signum: int, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"

    def job(connection) -> None:
        try:
            with Interrupts() as interrupts, Results.open(out, {}) as results:
                for index in range(9, -1, -1):
                    if (index, 0) in results.done:
                        continue
                    connection.send(index)
                    connection.recv()  # the signal comes within this step
                    results.write({"index": index})
                    interrupts.check()
                results.finish()
        except Interrupted as error:
            sys.exit(128 + error.signum)

    child, connection = in_child(job)
    for index in (9, 8, 7):
        assert connection.recv() == index
        if index == 7:
            os.kill(child.pid, signum)
        connection.send("go on")
    child.join()
    assert child.exitcode == 128 + signum
    assert [json.loads(line)["index"] for line in out.read_text().splitlines()] == [9, 8, 7]
    child, connection = in_child(job)
    for index in range(6, -1, -1):
        assert connection.recv() == index
        connection.send("go on")
    child.join()
    assert child.exitcode == 0
    assert [json.loads(line)["index"] for line in out.read_text().splitlines()] == list(range(10))


@pytest.mark.parametrize("signum", KINDS)
def test_a_second_signal_ends_the_process_at_once(signum: int) -> None:
    def stubborn(connection) -> None:
        with Interrupts() as interrupts:
            connection.send("ready")
            while interrupts.signum is None:
                signal.sigtimedwait([], 0.01)
            connection.send(interrupts.signum)
            connection.recv()  # the second comes; nobody ever answers

    child, connection = in_child(stubborn)
    assert connection.recv() == "ready"
    os.kill(child.pid, signum)
    assert connection.recv() == signum and child.is_alive()
    os.kill(child.pid, signum)
    child.join(20)
    assert child.exitcode == -signum


def test_the_first_signal_counts_and_the_handlers_of_before_come_back() -> None:
    seen = []
    before = [signal.signal(signum, lambda number, frame: seen.append(number)) for signum in KINDS]
    ours = [signal.getsignal(signum) for signum in KINDS]
    try:
        with pytest.raises(Interrupted, match="^interrupted by SIGTERM$") as error, Interrupts() as interrupts:
            interrupts.check()
            signal.raise_signal(signal.SIGTERM)
            signal.raise_signal(signal.SIGINT)
            assert seen == []
            interrupts.check()
        assert error.value.signum == signal.SIGTERM
        assert [signal.getsignal(signum) for signum in KINDS] == ours
        signal.raise_signal(signal.SIGINT)
        assert seen == [signal.SIGINT]
    finally:
        for signum, handler in zip(KINDS, before, strict=True):
            signal.signal(signum, handler)


def test_an_ignored_signal_stays_ignored() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with Interrupts() as interrupts:
            signal.raise_signal(signal.SIGINT)
            interrupts.check()
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_outside_the_main_thread_nothing_is_caught() -> None:
    before = [signal.getsignal(signum) for signum in KINDS]
    found = []

    def work() -> None:
        with Interrupts() as interrupts:
            interrupts.check()
            found.extend(signal.getsignal(signum) for signum in KINDS)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == before
