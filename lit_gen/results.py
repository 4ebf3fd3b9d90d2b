"""The output file of a job: a JSON line per row, durable, resumable after any crash, at the end in input order.

Rows are appended as they finish. Whatever kills the job, opening the file again drops what was torn and says which rows
are there; when all are, `finish` sorts the file, and its bytes are those of a job that was never disturbed.
"""

import contextlib
import json
import os
import stat
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from tqdm import tqdm

from lit_gen.durable import lock, open_locked, partial_path, publish, refuse_device
from lit_gen.job import Job, differences, job_path, read_job, write_job
from lit_gen.rows import Rows, end_of_last_line, key_of, parse_line
from lit_gen.utils import UserError

FSYNC_SECONDS = 5  # what a power cut may cost; killing the process alone costs at most the row that was being written


class Results:
    """The output file, locked while it is open. Made by `Results.open`; leaves the file resumable however it ends.

    Attributes:
        path: the file.
        done: rows in it: `key in done` with key = (index, sample or 0), and `len(done)`.
        dropped: damaged lines that were found when it was opened, and whose rows are not done.
        finished: all rows are there, in input order: the file is complete.
    """

    def __init__(self, path: Path, fd: int, job: Job) -> None:
        self.path, self.done, self.dropped, self.finished = path, Rows(), 0, False
        self._fd, self._job = fd, job
        self._size = 0  # bytes, up to the end of the last whole line
        self._synced = (0, 0)  # rows and bytes that are known to be on the disk
        self._sync_time = time.monotonic()
        self._created: list[Path] = []  # files that were not there before

    @classmethod
    def open(cls, path: Path, fingerprint: dict[str, Any]) -> "Results":
        """Opens the file of a job, new or to go on.

        Args:
            path: the output file; `<path>.job.json` will lie beside it.
            fingerprint: what decides the rows (prompts, model, settings), as plain JSON. It is kept in the side file,
                and a file with another one is refused.

        Raises:
            UserError: the file belongs to another job or to none, another process is writing it, or it cannot be
                written. Nothing in it has then changed.
        """
        refuse_device(path)
        path = Path(os.path.realpath(path))  # replacing a link would not change the file that it points to
        fingerprint = json.loads(json.dumps(fingerprint, allow_nan=False))
        with contextlib.ExitStack() as on_error:
            created = [] if path.exists() else [path]
            fd = open_locked(path)
            on_error.callback(os.close, fd)
            on_error.callback(_remove_if_empty, fd, created)
            try:
                job, size = read_job(path), os.fstat(fd).st_size
                if job is None and size:
                    raise UserError(f"{path} exists but is not of such a job (no {job_path(path)}): give another --out")
                if size and (changes := "; ".join(differences(job.fingerprint, fingerprint))):
                    raise UserError(
                        f"{path} was begun with another {changes}: give another --out, or delete {path} and "
                        f"{job_path(path)} to begin anew"
                    )
                for leftover in (partial_path(path), partial_path(job_path(path))):
                    leftover.unlink(missing_ok=True)
                if job is None:
                    created.append(job_path(path))
                if job is None or not size:  # new, or nothing came of it yet, so it may still become another job's
                    job = Job(fingerprint)
                    write_job(path, job)
                results = cls(path, fd, job)
                results._resume()
                results._created = created
            except OSError as error:
                raise UserError(f"cannot write {error.filename or path}: {error.strerror or error}") from None
            on_error.pop_all()
        return results

    def _resume(self) -> None:
        """Finds the rows that are there; cuts what is torn or damaged off the end.

        Damage between sound lines, and a row that is there twice, stay until `finish` leaves them out.
        """
        end, size, bad = end_of_last_line(self._fd), os.fstat(self._fd).st_size, 0
        bar = tqdm(total=end, desc="resume", unit="B", unit_scale=True, delay=2, file=sys.stderr, disable=None)
        with open(self._fd, "rb", closefd=False) as file, bar:
            offset = file.seek(0)
            for data in file:
                if offset == end:
                    break
                try:
                    key = key_of(parse_line(data))
                except ValueError:
                    bad += 1
                else:
                    if key is None:
                        raise UserError(f"{self.path}: the line at byte {offset} is not of this job; remove it")
                    if key not in self.done:
                        self.done.add(key, offset, len(data))
                    self._size = offset + len(data)
                offset += len(data)
                bar.update(len(data))
        self.dropped = bad + (end < size)
        self.finished = self._job.finished and self._job.lines == len(self.done) and self.done.in_order(size)
        if not self.finished:
            if self._size < size:
                os.ftruncate(self._fd, self._size)
            os.fsync(self._fd)
        self._synced = (len(self.done), self._size)

    @property
    def fingerprint(self) -> dict[str, Any]:
        """What decides the rows, as plain JSON."""
        return self._job.fingerprint

    def reopen(self) -> None:
        """More rows may follow those of a finished file: of several that share a job another one is not finished."""
        self._job, self.finished = Job(self._job.fingerprint), False
        write_job(self.path, self._job)

    def write(self, line: dict[str, Any]) -> None:
        """Appends a finished row: it survives the death of this process at once, a power cut FSYNC_SECONDS later.

        Raises:
            OSError: the disk is full or broken. What was written in part is cut off again and the file is closed; the
                message says how many rows are safe, and is the one line for the user.
        """
        assert not self.finished, "no row can follow those of a finished job"
        # half a surrogate pair has no UTF-8, but \udxxx is how JSON writes it
        data = json.dumps(line, ensure_ascii=False, allow_nan=False).encode("utf-8", "backslashreplace") + b"\n"
        key = key_of(line)
        assert key is not None and key not in self.done, f"{key} is no new row"
        start, written = self._size, 0
        try:
            while written < len(data):
                written += os.write(self._fd, data[written:])
            self._size = start + len(data)
            self.done.add(key, start, len(data))
        except OSError as error:
            with contextlib.suppress(OSError):  # what fails here too is dropped when the file is opened again
                os.ftruncate(self._fd, self._size)
                os.fsync(self._fd)
                self._synced = (len(self.done), self._size)
            raise self._failed(error) from None
        finally:
            if self._fd >= 0 and self._size == start:  # an interrupt between two parts of a line
                os.ftruncate(self._fd, start)
        self.sync_if_due()

    def sync_if_due(self) -> None:
        """Makes rows durable that have been in the file for long; to be called often. OSError as for `write`."""
        if self._size > self._synced[1] and time.monotonic() - self._sync_time >= FSYNC_SECONDS:
            self._sync()

    def _sync(self) -> None:
        try:
            os.fsync(self._fd)
        except OSError as error:  # the rows since the last time may be lost though they can be read: do them again
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, self._synced[1])
            raise self._failed(error) from None
        self._synced, self._sync_time = (len(self.done), self._size), time.monotonic()

    def _failed(self, error: OSError) -> OSError:
        """Closes the file; the error to raise."""
        os.close(self._fd)
        self._fd = -1
        what = f"{error.strerror}: {self._synced[0]} rows are safe in {self.path}"
        return OSError(error.errno, f"{what}; mend this, and the same command goes on")

    def finish(self) -> None:
        """Puts the file into input order, if it is not, and marks the job as finished.

        The sorted copy replaces the file in one step, so that a crash at any moment leaves one of the two. Memory holds
        32 bytes a row, the disk for a while twice the file. A file that is finished already is not touched.

        Raises:
            OSError: as `write` does, with all rows safe.
        """
        if self.finished:
            return
        self._sync()
        try:
            if not self.done.in_order(self._size):
                self._sort()
            self._job = Job(self._job.fingerprint, finished=True, lines=len(self.done))
            write_job(self.path, self._job)
        except OSError as error:
            partial_path(self.path).unlink(missing_ok=True)
            raise self._failed(error) from None
        self.finished = True

    def _sort(self) -> None:
        partial = partial_path(self.path)
        with partial.open("wb") as file:
            os.fchmod(file.fileno(), stat.S_IMODE(os.fstat(self._fd).st_mode))
            lock(file.fileno(), self.path)
            for offset, length in zip(*(column.tolist() for column in self.done.places()), strict=True):
                line = os.pread(self._fd, length, offset)
                if len(line) != length or not line.endswith(b"\n"):
                    raise UserError(f"{self.path} was changed by another program: run the same command again")
                file.write(line)
            file.flush()
            os.fsync(file.fileno())
            publish(partial, self.path)
            os.dup2(file.fileno(), self._fd, inheritable=False)  # the lock goes over without a gap

    def close(self) -> None:
        """Makes the rows durable and releases the file; done by `with` too."""
        if self._fd >= 0:
            if not self.finished:
                self._sync()
            os.close(self._fd)
            self._fd = -1

    def discard(self) -> None:
        """Closes the file of a job that is not run after all; leaves no empty one that was not there before."""
        if self._fd >= 0 and not self.finished:
            _remove_if_empty(self._fd, self._created)
        self.close()

    def __enter__(self) -> "Results":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _remove_if_empty(fd: int, created: list[Path]) -> None:
    """Removes the files that were created for an output file, open as `fd`, to which nothing was written."""
    if os.fstat(fd).st_size == 0:
        for path in created:
            path.unlink(missing_ok=True)
