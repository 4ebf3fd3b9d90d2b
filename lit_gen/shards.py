"""The weight files of a Hugging Face folder as one set of tensors that can be read a few rows at a time."""

from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from lit_gen.utils import UserError

MAPPED_BYTES = 16 * 2**20  # a file is mapped anew after so many bytes: mapped pages count as this process's memory


class Reader(Protocol):
    """The tensors of a checkpoint by their Hugging Face names."""

    shapes: dict[str, tuple[int, ...]]

    def read(self, name: str, start: int = 0, stop: int | None = None, columns: slice | None = None) -> Tensor:
        """Rows [start, stop) of a tensor, and of a (N, K) one perhaps only some columns."""


class SafetensorsReader:
    def __init__(self, files: list[Path]) -> None:
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.metadata: dict[str, str] = {}
        self._file_of: dict[str, Path] = {}
        for file in files:
            with self._open(file) as handle:
                self.metadata |= handle.metadata() or {}
                for name in handle.keys():
                    self.shapes[name] = tuple(handle.get_slice(name).get_shape())
                    self._file_of[name] = file
        self._current: tuple[Path, Any] | None = None
        self._read = 0

    @staticmethod
    def _open(file: Path) -> Any:
        try:
            return safe_open(file, framework="pt")
        except (SafetensorError, OSError) as error:
            size = file.stat().st_size if file.is_file() else 0
            raise UserError(
                f"{file} ({size} bytes) is not a whole safetensors file ({error}); download it again"
            ) from None

    def read(self, name: str, start: int = 0, stop: int | None = None, columns: slice | None = None) -> Tensor:
        file = self._file_of[name]
        if self._current is None or self._current[0] != file or self._read > MAPPED_BYTES:
            self._current, self._read = None, 0  # unmaps the old one first
            self._current = (file, self._open(file))
        part = self._current[1].get_slice(name)
        if columns is None:
            tensor = part[start:stop] if self.shapes[name] else part[...]
            self._read += tensor.nbytes
        else:
            tensor = part[start:stop, columns]
            self._read += len(tensor) * self.shapes[name][1] * tensor.element_size()  # pages hold more than is wanted
        return tensor


class BinReader:
    """pytorch_model*.bin, by the unpickler that knows tensors only; memory-mapped where the file's format allows."""

    def __init__(self, files: list[Path]) -> None:
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._file_of: dict[str, Path] = {}
        self._current: tuple[Path, dict[str, Tensor]] | None = None
        for file in files:
            for name, tensor in self._open(file).items():
                self.shapes[name], self._file_of[name] = tuple(tensor.shape), file

    def _open(self, file: Path) -> dict[str, Tensor]:
        if self._current is None or self._current[0] != file:
            self._current = None
            try:
                with open(file, "rb") as handle:
                    mappable = handle.read(2) == b"PK"
                content = torch.load(file, map_location="cpu", weights_only=True, mmap=mappable)
            except Exception as error:  # whatever a damaged or hostile file provokes in the unpickler
                reason = str(error).splitlines()[0] if str(error) else type(error).__name__
                raise UserError(
                    f"{file} cannot be loaded as plain tensors ({reason}); use a safetensors file"
                ) from None
            if not isinstance(content, dict) or not all(isinstance(t, Tensor) for t in content.values()):
                raise UserError(f"{file} does not hold a dict of tensors; use a safetensors file")
            self._current = (file, content)
        return self._current[1]

    def read(self, name: str, start: int = 0, stop: int | None = None, columns: slice | None = None) -> Tensor:
        tensor = self._open(self._file_of[name])[name]
        tensor = tensor[start:stop] if tensor.dim() else tensor
        return tensor if columns is None else tensor[:, columns]
