"""One job of several processes that hold a model together: rank 0 does the job, the others compute along.

Rank 0 alone reads prompts, keeps the batch, samples and writes; its calls of the model are made on all ranks:

    rank 0     tell "forward" ── compute ── notes ──  tell "move_kv_cache" ── ...  ──  tell "end"
    others     listen         ── compute ── notes ──  listen               ── ...

So ranks have nothing to disagree about: there is one sampler, one output file to resume, one decision when a row ends.
In the notes after each call every rank says whether it ran out of memory, and which signal it got.
"""

import errno
import json
import signal
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import partial
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from lit_gen.interrupt import Interrupts
from lit_gen.model import GPT
from lit_gen.plan import is_out_of_memory
from lit_gen.tensor_parallel import connected

CALLS = ("set_kv_cache", "resize_kv_cache", "move_kv_cache", "set_row_length", "clear_kv_cache", "forward")
PATIENCE = timedelta(days=7)  # between two calls: rank 0 may wait for a disk, or for a reader of its output
LOAD, END = "load", "end"


class Ranks:
    """The ranks of one machine, as this one sees them. On rank 0 `with` ends the others' work when it is left.

    Every wait of a rank ends at once when another process dies, since its connections then close. One that hangs is
    noticed by those that wait for its part of a result, after the timeout.

    Args:
        mesh: of all processes, (machines, ranks of each), as Fabric's `ModelParallelStrategy` makes it.
        timeout: in seconds.

    Attributes:
        mesh: of this machine's ranks, one-dimensional.
        rank: number of this process.
        shard: this machine's share of the prompts.
    """

    def __init__(self, mesh: DeviceMesh, timeout: float) -> None:
        machines, size, limit = mesh["data_parallel"], mesh["tensor_parallel"].size(), timedelta(seconds=timeout)
        self._limit = limit
        # Groups of our own, since those of a mesh have a timeout that cannot be chosen.
        self.mesh = DeviceMesh.from_group(dist.new_subgroups(size, timeout=limit)[0], mesh.device_type)
        self.rank, self.shard = self.mesh.get_local_rank(), f"{machines.get_local_rank()}/{machines.size()}"
        # Short messages go through main memory, also beside GPUs: nothing of them has to wait for a device.
        self._calls, self._notes = (
            dist.new_subgroups(size, timeout=wait, backend="gloo")[0] for wait in (PATIENCE, limit)
        )
        self._interrupts = Interrupts()
        self._calling = False

    def lead(self, model: GPT) -> GPT:
        """Lets the others, who load the same now, take part in every call of this model."""
        for name in CALLS:
            setattr(model, name, partial(self._call, name, getattr(model, name)))
        return model

    def loading(self) -> None:
        """Tells the others to load their parts."""
        self._tell(LOAD)

    def follow(self, load: Callable[[], GPT]) -> None:
        """What ranks other than 0 do: they load when they are told to, and make the calls that rank 0 makes."""
        model, self._interrupts = None, Interrupts()
        with self._interrupts:
            while (call := self._listen())[0] != END:
                if call[0] == LOAD:
                    model = load()
                else:
                    name, args, kwargs = call
                    with torch.inference_mode():
                        self._together(name, model if name == "forward" else getattr(model, name), args, kwargs)

    def _call(self, name: str, method: Callable, *args: Any, **kwargs: Any) -> Any:
        if self._calling:  # by another one of them, which the others also make
            return method(*args, **kwargs)
        self._calling = True
        try:
            self._tell(name, args, kwargs)
            return self._together(name, method, args, kwargs)
        finally:
            self._calling = False

    def _together(self, name: str, method: Callable, args: Any, kwargs: dict[str, Any]) -> Any:
        """Makes a call; then the ranks compare notes.

        Raises:
            MemoryError: a rank has no memory for the cache.
            OSError: this rank has no memory in the middle of a step, in which the others now wait for it.
        """
        failure = result = None
        try:
            result = method(*args, **kwargs)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            if name == "forward":
                what = f"rank {self.rank} ran out of memory in a step ({str(error):.100}): lower --max_batch_size"
                raise OSError(errno.ENOMEM, f"{what} or --prefill_budget") from error
            failure = error
        notes = torch.tensor([failure is not None, self._interrupts.signum or 0], dtype=torch.int64)
        with connected():
            dist.reduce(notes, op=dist.ReduceOp.MAX, group=self._notes, group_dst=0)
        if self.rank == 0:
            anywhere, signum = notes.tolist()
            if signum and callable(signal.getsignal(signum)):  # else it came here as well
                signal.raise_signal(signum)
            if anywhere:
                raise failure or MemoryError("another rank has no memory")
        return result

    def _tell(self, name: str, args: Any = (), kwargs: dict[str, Any] | None = None) -> None:
        data = json.dumps([name, args, kwargs or {}], default=_plain).encode()
        self._send(torch.tensor([len(data)]))
        self._send(torch.frombuffer(bytearray(data), dtype=torch.uint8))

    def _listen(self) -> list[Any]:
        size = torch.empty(1, dtype=torch.int64)
        self._send(size)
        data = torch.empty(int(size), dtype=torch.uint8)
        self._send(data)
        return json.loads(data.numpy().tobytes(), object_hook=partial(_restored, device=self.mesh.device_type))

    def _send(self, tensor: Tensor) -> None:
        """From rank 0 to the others, into their `tensor`."""
        with connected():
            work = dist.broadcast(tensor, group=self._calls, group_src=0, async_op=True)
            work.wait(self._limit if self.rank == 0 else PATIENCE)

    def __enter__(self) -> "Ranks":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with suppress(ConnectionError):  # who is gone needs no telling
            self._tell(END)


def _plain(value: Tensor | slice) -> dict[str, list]:
    if isinstance(value, slice):
        return {"slice": [value.start, value.stop]}
    return {"tensor": value.tolist()}


def _restored(value: dict[str, Any], device: str) -> Any:
    if value.keys() == {"slice"}:
        return slice(*value["slice"])
    if value.keys() == {"tensor"}:
        return torch.tensor(value["tensor"], dtype=torch.int64, device=device)
    return value
