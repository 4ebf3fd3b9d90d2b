"""Signals that ask a job to end: noted when they come, acted upon between two steps."""

import signal
import threading
from types import FrameType, TracebackType
from typing import Any


class Interrupted(Exception):
    """The job was asked to end; the command line turns this into exit status 128 + signum, as a shell would.

    Attributes:
        signum: the signal that asked, SIGINT (Ctrl-C) or SIGTERM (kill, a scheduler).
    """

    def __init__(self, signum: int) -> None:
        super().__init__(f"interrupted by {signal.Signals(signum).name}")
        self.signum = signum


class Interrupts:
    """Notes SIGINT and SIGTERM instead of letting them break in on a step; `check` between the steps acts on them.

    A second signal of the same kind ends the process at once, by the system's own doing (two that come within one
    call into a library count as one). A signal that was ignored before, as under nohup, stays ignored. Signal
    handlers belong to the main thread: in any other this does nothing.

        with Interrupts() as interrupts:
            for step in steps:
                step()
                interrupts.check()

    Attributes:
        signum: the first signal that came, or None.
    """

    def __init__(self) -> None:
        self.signum: int | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "Interrupts":
        if threading.current_thread() is threading.main_thread():
            for signum in (signal.SIGINT, signal.SIGTERM):
                before = signal.getsignal(signum)
                if before not in (signal.SIG_IGN, None):  # None: a handler that is not Python's cannot be put back
                    self._before[signum] = before
                    signal.signal(signum, self._note)
        return self

    def _note(self, signum: int, frame: FrameType | None) -> None:
        if self.signum is None:
            self.signum = signum
        signal.signal(signum, signal.SIG_DFL)

    def check(self) -> None:
        """Raises `Interrupted` if a signal has come."""
        if self.signum is not None:
            raise Interrupted(self.signum)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for signum, before in self._before.items():
            signal.signal(signum, before)
        self._before.clear()
