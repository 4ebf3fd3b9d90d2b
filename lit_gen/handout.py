"""Prompts handed out one by one to the processes of a torchrun: none idles as long as there is a prompt to begin.

The next prompt goes to whoever has room for it and asks first. They ask the store that torchrun keeps for them,
on one machine or several: a number there, which `add` raises atomically, says how many prompts are given away. Which
are done only the output files say. What the store knows ends with its torchrun, so a prompt whose process died is
given away again when the command is run again, to anybody.
"""

import contextlib
import errno
import json
import os
import time
import uuid
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist

from lit_gen.job import SHARD, differences
from lit_gen.prompts import is_stream
from lit_gen.results import Results
from lit_gen.rows import Keys
from lit_gen.shard import refuse_other_counts
from lit_gen.utils import UserError, say

PIECE = 2**22  # bytes; a store takes 2**23 at once


@contextlib.contextmanager
def _answering() -> Iterator[None]:
    """Around, or on, what asks the store: OSError if it is gone, or if a process has not come for half an hour."""
    try:
        yield
    except dist.DistError:
        raise OSError(errno.ECONNRESET, "torchrun or one of its processes is gone: the same command goes on") from None


def is_handed_out(shard: str | None, out: os.PathLike | None, prompts: Any, environ: Mapping[str, str]) -> bool:
    """Whether the prompts are to be handed out: there is a torchrun with several processes, and they write files.

    Without --out a text does not say which prompt it is of, so there each process keeps to its shard.

    Raises:
        UserError: they cannot be handed out from here.
    """
    size = int(environ.get("WORLD_SIZE", 1))
    if shard is not None or out is None or environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True" or size == 1:
        return False
    if is_stream(prompts):
        raise UserError(f"the {size} processes of torchrun cannot share stdin or a pipe: put the prompts into a file")
    refuse_other_counts(Path(out), size)
    return True


@_answering()
def join_handout(rank: int, size: int) -> "Handout":
    """Meets the other processes of this torchrun."""
    if rank == 0:
        say(f"prompts go to whichever of the {size} processes has room")
    return Handout(next(dist.rendezvous("env://"))[0], rank, size)


class Handout:
    """One process's view of what is handed out. Made by all of them at about the same time; each waits for the others.

    Args:
        store: of them all.
        rank, size: this one's number, and how many there are.

    Attributes:
        rank, size: as above.
    """

    def __init__(self, store: "dist.Store", rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self._seen, self._given = 0, 0  # prompts that came by here, and those that are given away, as far as is known
        self._told = 0  # times that all told each other something
        self._store = dist.PrefixStore(self._meet(store), store)

    @_answering()
    def _meet(self, store: "dist.Store") -> str:
        """A name that exactly those who meet here know.

        After a restart (--max-restarts) the store still has what the dead wrote, and the number of the restart differs
        between machines. So the first process calls everyone by a name that is new each time, until all have answered.
        """
        name = uuid.uuid4().hex
        store.set(f"lit_gen/{self.rank}", name)
        if self.rank > 0:
            first = store.get(f"{name}/call").decode()
            store.add(f"{first}/here", 1)
            return first
        while store.add(f"{name}/here", 0) < self.size - 1:
            for key in (f"lit_gen/{rank}" for rank in range(1, self.size)):
                if store.check([key]):
                    store.set(f"{store.get(key).decode()}/call", name)
            time.sleep(0.05)
        return name

    @_answering()
    def tell(self, data: bytes) -> list[bytes]:
        """What every process tells at this point, in order; waits for all."""
        self._told += 1
        pieces = [data[start : start + PIECE] for start in range(0, len(data), PIECE)]
        for i, piece in enumerate(pieces):
            self._store.set(f"{self._told}/{self.rank}/{i}", piece)
        self._store.set(f"{self._told}/{self.rank}", str(len(pieces)))
        counts = [int(self._store.get(f"{self._told}/{rank}")) for rank in range(self.size)]
        return [
            b"".join(self._store.get(f"{self._told}/{rank}/{i}") for i in range(n)) for rank, n in enumerate(counts)
        ]

    def compare(self, results: Results) -> tuple[Keys, bool]:
        """The rows in the files of the others, and whether all files are finished.

        Raises:
            UserError: the others have another job: other prompts, another model.
        """
        jobs = [json.loads(data) for data in self.tell(json.dumps([results.fingerprint, results.finished]).encode())]
        for rank, (fingerprint, _) in enumerate(jobs):
            changes = [change for change in differences(jobs[0][0], fingerprint) if not change.startswith(f"{SHARD} ")]
            if changes:
                raise UserError(f"process {rank} has another {'; '.join(changes)}, of process 0: give both the same")
        keys = Keys()
        for rank, data in enumerate(self.tell(pack_keys(results.done.keys()))):
            for key in unpack_keys(data) if rank != self.rank else ():
                keys.mark(key)
        return keys, all(finished for _, finished in jobs)

    @_answering()
    def takes_next(self) -> bool:
        """Whether the next prompt is this process's. All have to ask about the same prompts, in the same order."""
        self._seen += 1
        if self._given < self._seen:
            self._given = self._store.add("given", 1)
        return self._given == self._seen

    @_answering()
    def leave(self) -> None:
        """Waits until all are here: torchrun ends the others when one fails, and its store with the first machine."""
        self._store.add("left", 1)
        while self._store.add("left", 0) < self.size:
            time.sleep(0.2)


def pack_keys(keys: np.ndarray) -> bytes:
    """Keys (2, N), int64, as few bytes: those of neighbours differ little."""
    keys = keys[:, np.lexsort(keys[::-1])]
    return zlib.compress(np.diff(keys, prepend=0).astype("<i8").tobytes())


def unpack_keys(data: bytes) -> list[tuple[int, int]]:
    """The keys of `pack_keys`, in order."""
    differences = np.frombuffer(zlib.decompress(data), dtype="<i8").reshape(2, -1)
    return list(zip(*differences.cumsum(axis=1).tolist(), strict=True))
