"""The parent's end of a worker: starts it, asks it, ends it."""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from scripts.peers.worker import Job, Settings

SCRIPTS = Path(__file__).resolve().parents[1]


class Missing(Exception):
    """The engine is not installed in its interpreter, or cannot take the model."""


class Failed(Exception):
    """The engine cannot do what it was asked; it can be asked for something else."""


class Worker:
    """An engine in a process of its own. It computes while it is asked and sleeps otherwise.

    Raises:
        Missing: the engine cannot be started.
    """

    def __init__(self, settings: Settings, python: Path | None = None) -> None:
        self.settings, self.errors = settings, tempfile.TemporaryFile()
        self.command = [str(python or sys.executable), "-m", "peers.worker"]
        self.json = json.dumps(asdict(settings))
        # Unbound, threads at times share a core, and each parallel region then takes milliseconds.
        self.env = os.environ | {"OMP_PROC_BIND": "true", "OMP_PLACES": "cores", "TOKENIZERS_PARALLELISM": "false"}
        self.env |= {"OMP_NUM_THREADS": str(settings.threads), "PYTHONPATH": f"{SCRIPTS}{os.pathsep}{SCRIPTS.parent}"}
        self.env |= {"HF_HUB_OFFLINE": "1"}
        self._prepare()
        self.started = time.perf_counter()
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": self.errors}
        self.process = subprocess.Popen([*self.command, "serve", self.json], env=self.env, text=True, **pipes)
        try:
            hello = self._read()
            if "missing" in hello:
                raise Failed(f"{self.command[0]} has no {hello['missing']}")
        except Failed as error:
            self.close()
            raise Missing(f"{settings.name} is left out: {error}") from None
        except KeyboardInterrupt:
            self.close()
            raise
        self.ready = time.perf_counter()
        self.about, self.continuous, self.laps = hello["about"], hello["continuous"], hello["laps"]

    def ask(self, jobs: Sequence[Job], slots: int, static: bool = True) -> dict[str, Any]:
        """Runs jobs: {"seconds", "tokens", "extra", "idle_cpu"}; in static batches, or as the engine likes best."""
        return self._ask({"jobs": jobs, "slots": slots, "static": static})

    def step(self, rows: int, columns: int, repeats: int) -> list[float]:
        """Seconds of each of so many decode steps of `rows` rows that see `columns` columns (lit_gen only)."""
        return self._ask({"step": [rows, columns, repeats]})["seconds"]

    def close(self) -> None:
        with contextlib.suppress(BrokenPipeError):  # it ended before it had read all
            self.process.stdin.close()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()
        self.errors.close()

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        try:
            print(json.dumps(request), file=self.process.stdin, flush=True)
        except BrokenPipeError:
            pass  # it ended: reading says how
        if "error" in (found := self._read()):
            raise Failed(found["error"])
        return found

    def _read(self) -> dict[str, Any]:
        line = self.process.stdout.readline()
        if not line:
            raise Failed(f"it ended with status {self.process.wait()}: {self._last_error()}")
        return json.loads(line)

    def _last_error(self) -> str:
        self.errors.seek(0)
        lines = self.errors.read().decode(errors="replace").split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), "it said nothing")

    def _prepare(self) -> None:
        """Converts the model to the engine's own format, in another process: what that loads shall not disturb."""
        if Path(self.settings.made).exists():
            return
        Path(self.settings.made).parent.mkdir(parents=True, exist_ok=True)
        output = {"stdout": self.errors, "stderr": self.errors}
        if subprocess.run([*self.command, "prepare", self.json], env=self.env, **output).returncode:
            raise Missing(f"{self.settings.name} is left out: it could not convert the model: {self._last_error()}")
