"""One job over several processes: which part of the rows is this process's, and the file it goes to."""

import re
from collections.abc import Mapping
from pathlib import Path

from lit_gen.utils import UserError, say

LAUNCHERS = (("RANK", "WORLD_SIZE"), ("SLURM_PROCID", "SLURM_NTASKS"))  # torchrun's comes first: it may run under srun


def shard_of(shard: str | None, environ: Mapping[str, str]) -> tuple[int, int]:
    """This process's number and how many there are: of "i/n" if given, else as torchrun or srun say, else (0, 1).

    What a launcher says is repeated on stderr: such variables may also be left over. SLURM counts only if it says which
    task this is: SLURM_NTASKS alone is also set in an interactive allocation.

    Raises:
        UserError: not two whole numbers with 0 <= i < n, or of torchrun's two variables only one is set.
    """
    if shard is not None:
        return _numbers(*shard.partition("/")[::2], f"--shard is {shard!r:.40}", "write it as i/n, such as 0/4")
    for rank, size in LAUNCHERS:
        if rank in environ or (size in environ and rank == "RANK"):
            values = (environ.get(rank, ""), environ.get(size, ""))
            what = f"{rank} is {values[0]!r:.40} and {size} is {values[1]!r:.40}"
            index, count = _numbers(*values, what, "set or unset both, or give --shard i/n")
            if count > 1:
                say(f"shard {index}/{count} (from {rank} and {size}; --shard 0/1 takes all)")
            return index, count
    return 0, 1


def _numbers(index: str, count: str, what: str, remedy: str) -> tuple[int, int]:
    if not all(re.fullmatch("[0-9]{1,9}", text) for text in (index, count)):
        raise UserError(f"{what}, but must be two whole numbers: {remedy}")
    if not int(index) < int(count):
        raise UserError(f"{what}, but shards are counted from 0, so the number must be less than the count: {remedy}")
    return int(index), int(count)


def shard_path(out: Path, index: int, count: int) -> Path:
    """The file of shard `index` of `count`: out.jsonl becomes out-00003-of-00008.jsonl; alone it is `out` itself."""
    return out if count == 1 else out.with_name(f"{out.stem}-{index:05}-of-{count:05}{out.suffix}")


def shard_counts(out: Path) -> list[int]:
    """The numbers of shards of which files lie beside `out`."""
    name = re.compile(rf"{re.escape(out.stem)}-[0-9]{{5,9}}-of-([0-9]{{5,9}}){re.escape(out.suffix)}")
    try:
        return sorted({int(match[1]) for file in out.parent.iterdir() if (match := name.fullmatch(file.name))})
    except OSError as error:
        raise UserError(f"cannot read {out.parent}: {error.strerror or error}") from None


def refuse_other_counts(out: Path, count: int) -> None:
    """UserError if another number of processes wrote files beside `out`: their rows would be done again."""
    others = [other for other in shard_counts(out) if other != count]
    if others:
        raise UserError(
            f"beside {out} lie files of {others[0]} processes, but this is one of {count}: go on with {others[0]}, "
            "move them elsewhere, or give another --out"
        )


def processes_here(environ: Mapping[str, str]) -> int:
    """How many processes torchrun or srun started on this machine, as far as they say; at least 1."""
    if "LOCAL_WORLD_SIZE" in environ:
        counts = [environ["LOCAL_WORLD_SIZE"]]
    else:  # such as "4(x2),3": two machines with 4 and one with 3
        counts = re.findall(r"(?:^|,)([0-9]+)", environ.get("SLURM_STEP_TASKS_PER_NODE", ""))
    return max([1, *(int(count) for count in counts if count.isdecimal())])


def find_shards(out: Path) -> list[Path]:
    """The files of the shards of `out`, in order.

    Raises:
        UserError: there is none, one is missing, or there are those of two different counts.
    """
    counts = shard_counts(out)
    if not counts:
        raise UserError(f"there is no shard such as {shard_path(out, 0, 2)}: give --out as it was given to the job")
    if len(counts) > 1:
        raise UserError(
            f"beside {out} lie shards of {counts[0]} and of {counts[1]}: move those of the other job elsewhere"
        )
    paths = [shard_path(out, index, counts[0]) for index in range(counts[0])]
    for path in paths:
        if not path.is_file():
            raise UserError(f"the shard {path} is missing: run it, with --shard i/n if need be")
    return paths
