"""Which row of a job a line of its output file is, and where in the file it lies."""

import json
import os
import re
from array import array
from typing import Any

import numpy as np

BLOCK = 2**16
LIMIT = 2**63  # index and sample are kept in 64 bits

Key = tuple[int, int]  # place of the prompt in the input, sample of that prompt


def key_of(line: Any) -> Key | None:
    """Which row a line is: by "index" and "sample", or by the "id" of OpenAI's batch format; None if it is no row."""
    if not isinstance(line, dict):
        return None
    if "index" in line:
        key = (line["index"], line.get("sample", 0))
    elif "custom_id" in line and (match := re.fullmatch(r"batch_req_([0-9]{1,18})", str(line.get("id")))):
        key = (int(match[1]), 0)
    else:
        return None
    return key if all(type(part) is int and 0 <= part < LIMIT for part in key) else None


def parse_line(data: bytes) -> Any:
    """A line of the file as JSON; ValueError if it is damaged."""
    try:
        return json.loads(data.decode())
    except RecursionError:
        raise ValueError("brackets are nested too deep") from None


class Keys:
    """A set of keys: a bit each, in blocks."""

    def __init__(self) -> None:
        self._blocks: dict[Key, int] = {}  # (sample, index // 1024): a bit for each of 1024 indices

    def __contains__(self, key: Key) -> bool:
        return bool(self._blocks.get((key[1], key[0] >> 10), 0) >> (key[0] & 1023) & 1)

    def __len__(self) -> int:
        return sum(map(int.bit_count, self._blocks.values()))

    def mark(self, key: Key) -> None:
        block = (key[1], key[0] >> 10)
        self._blocks[block] = self._blocks.get(block, 0) | 1 << (key[0] & 1023)


class Rows(Keys):
    """The keys in the file and where their lines lie: 32 bytes a row, in input order or not."""

    def __init__(self) -> None:
        super().__init__()
        self._columns = tuple(array("q") for _ in range(4))  # index, sample, offset, length

    def __len__(self) -> int:
        return len(self._columns[0])

    def add(self, key: Key, offset: int, length: int) -> None:
        assert key not in self, f"row {key} is there already"
        self.mark(key)
        for column, value in zip(self._columns, (*key, offset, length), strict=True):
            column.append(value)

    def keys(self) -> np.ndarray:
        """Index and sample (2, N), int64, in the order of the file."""
        return np.array(self._columns[:2], dtype=np.int64)

    def places(self) -> tuple[np.ndarray, np.ndarray]:
        """Offset and length (N,) of each line, int64, in input order."""
        index, sample, offset, length = (np.array(column, dtype=np.int64) for column in self._columns)
        order = np.lexsort((sample, index))
        return offset[order], length[order]

    def in_order(self, size: int) -> bool:
        """Whether the first `size` bytes of the file are exactly these rows, in input order."""
        offset, length = self.places()
        return size == length.sum() and bool(np.array_equal(offset, np.cumsum(length) - length))


def end_of_last_line(fd: int) -> int:
    """Bytes up to and with the last line break; read from the end, so that a torn gigabyte of zeros takes no memory."""
    end = os.fstat(fd).st_size
    while end > 0:
        start = max(0, end - BLOCK)
        found = os.pread(fd, end - start, start).rfind(b"\n")
        if found >= 0:
            return start + found + 1
        end = start
    return 0
