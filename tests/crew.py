"""The other ranks of a split model: processes that make the calls which rank 0, the test, makes."""

import os
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from itertools import count
from multiprocessing.queues import Queue
from pathlib import Path

import psutil
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh

from lit_gen.checkpoint import load_model
from lit_gen.cut import Cut
from lit_gen.lora import load_lora, merge_lora
from lit_gen.model import GPT
from lit_gen.pack import pack_model
from lit_gen.quantize import Format
from lit_gen.ranks import Ranks
from lit_gen.tensor_parallel import split_lora, split_model

CPU = torch.device("cpu")


class Connection:
    """This process among so many ranks as are wanted, connected anew when that changes."""

    def __init__(self, rank: int, folder: Path) -> None:
        self.rank, self.folder, self.size = rank, folder, 0

    def ranks(self, size: int, number: int) -> Ranks:
        """Of the connection of this number."""
        if size != self.size:
            self.close()
            self.size = size
            where = {"rank": self.rank, "world_size": size, "timeout": timedelta(seconds=60)}
            dist.init_process_group("gloo", init_method=f"file://{self.folder}/{number}", **where)
            mesh = init_device_mesh("cpu", (1, size), mesh_dim_names=("data_parallel", "tensor_parallel"))
            self.known = Ranks(mesh, timeout=60)
        return self.known

    def close(self) -> None:
        if self.size:
            dist.destroy_process_group()
            self.size = 0


def load_part(
    ranks: Ranks,
    folder: Path,
    dtype: torch.dtype = torch.float32,
    quantize: Format | None = None,
    lora: Path | None = None,
    pack: bool = True,
) -> tuple[GPT, dict[str, Cut]]:
    cuts = {}

    def split(model: GPT) -> dict[str, Cut]:
        cuts.update(split_model(model, ranks.mesh, CPU))
        return cuts

    model = load_model(folder, dtype, CPU, split)
    if lora is not None:
        merge_lora(model, split_lora(load_lora(lora, model.config), model, cuts))
    return pack_model(model, quantize) if pack else model, cuts


def _work(rank: int, folder: Path, jobs: Queue) -> None:
    torch.set_num_threads(1)
    connection = Connection(rank, folder)
    for size, number, args, how, room in iter(jobs.get, None):
        if rank >= size:
            connection.close()
            continue
        ranks, limits = connection.ranks(size, number), resource.getrlimit(resource.RLIMIT_AS)

        def load(ranks: Ranks = ranks, args: tuple = args, how: dict = how, room: int | None = room) -> GPT:
            model = load_part(ranks, *args, **how)[0]
            if room is not None:
                most = psutil.Process().memory_info().vms + room
                resource.setrlimit(resource.RLIMIT_AS, (most, resource.RLIM_INFINITY))
            return model

        ranks.follow(load)
        resource.setrlimit(resource.RLIMIT_AS, limits)
    connection.close()


@contextmanager
def crew(most: int, folder: Path) -> Iterator[Callable]:
    """Yields a function like `load_part`, with the number of ranks first; as a context it gives their model.

    `room`: bytes of memory that the other ranks may take after they have loaded.
    """
    context, environ = mp.get_context("spawn"), os.environ.get("PYTHONPATH", "")
    queues, connection = [context.Queue() for _ in range(most - 1)], Connection(0, folder)
    numbers = count()
    others = [context.Process(target=_work, args=(i + 1, folder, jobs)) for i, jobs in enumerate(queues)]
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parents[1]), str(Path(__file__).parent), environ])
    for other in others:
        other.start()

    @contextmanager
    def load(size: int, *args: object, room: int | None = None, **how: object) -> Iterator[GPT]:
        number = next(numbers)
        for jobs in queues:
            jobs.put((size, number, args, how, room))
        ranks = connection.ranks(size, number)
        with ranks:
            ranks.loading()
            yield ranks.lead(load_part(ranks, *args, **how)[0])

    load.processes = others
    yield load
    for jobs in queues:
        jobs.put(None)
    for other in others:
        other.join(60)
        assert other.exitcode == 0, other.exitcode
    connection.close()
