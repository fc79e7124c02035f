"""A lock on a run folder: one process works in it at a time, also across grids and hosts of a cluster.

The lock is ``flock`` on a file in the folder. It ends with the processes that hold it, so nothing is left behind after
``kill -9``. It works between hosts if the shared file system supports it: NFS does, Lustre when mounted with ``flock``.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def alone(place: Path, on_wait: Callable[[], object]) -> Iterator[int | None]:
    """Hold the lock of a run folder; yields its descriptor, or None where the system has no such locks.

    Args:
        place: The run folder.
        on_wait: Called when another process holds the lock, before waiting for it.

    Raises:
        ValueError: If the file system has no locks.
    """
    try:
        import fcntl
    except ImportError:  # Windows
        yield None
        return
    with (place / "lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            on_wait()
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS):
                raise
            raise ValueError(f"{place} is on a file system without locks (flock): give another --folder.") from None
        yield file.fileno()
