"""Files that one process writes at a time and that a crash at any moment leaves whole (on POSIX systems)."""

import contextlib
import errno
import os
import re
import stat
from pathlib import Path

from lit_gen.utils import UserError

# what file systems say, network ones above all, that have no locks or cannot write down a folder
UNSUPPORTED = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL)


def partial_path(path: Path) -> Path:
    """Where a file lies while it is being written; a killed process may leave it, and the next one overwrites it."""
    return path.with_name(f".{path.name}.partial")


def publish(partial: Path, path: Path) -> None:
    """Gives a file that is whole and on the disk its name, durably."""
    os.replace(partial, path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    except OSError as error:
        if error.errno not in UNSUPPORTED:
            raise
    finally:
        os.close(folder)


def refuse_device(path: Path) -> None:
    """UserError if a path, or a link on its way, lies in /dev or /proc: /dev/stdout may be a file, but not ours."""
    link = os.path.abspath(path)
    for _ in range(40):  # as many links as Linux follows
        if re.match("/(dev|proc)/(?!shm/)", link):
            raise UserError(f"{path} is a device or a stream, so results would not be safe there: give another --out")
        if not os.path.islink(link):
            return
        link = os.path.normpath(os.path.join(os.path.dirname(link), os.readlink(link)))


def open_locked(path: Path) -> int:
    """Opens a file for appending, creating it if need be, and locks it for this process while it is open.

    Raises:
        UserError: another process has it, it cannot be written, or it is no plain file.
    """
    while True:
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        except OSError as error:
            raise UserError(f"cannot write {path}: {error.strerror}") from None
        with contextlib.ExitStack() as on_error:
            on_error.callback(os.close, fd)
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise UserError(f"{path} is no plain file, so results would not be safe there: give another --out")
            lock(fd, path)
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(fd), os.stat(path)):  # else another process just put a new file there
                    on_error.pop_all()
                    return fd


def lock(fd: int, path: Path) -> None:
    """Locks an open file until all copies of its descriptor are closed; UserError if another process has it."""
    import fcntl  # on POSIX systems only

    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UserError(f"another process is writing {path}: wait for it, or give another --out") from None
    except OSError as error:
        if error.errno not in UNSUPPORTED:
            raise
