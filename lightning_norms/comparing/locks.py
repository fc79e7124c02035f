"""One run's folder, one process that works in it: also between grids, and between the hosts of a cluster.

The lock is ``flock`` on a file in the folder. It ends with the processes that hold it, so nothing has to be tidied up
after ``kill -9``. Between hosts it holds where the shared file system says so: NFS does, Lustre if it is mounted with
``flock``.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def alone(place: Path, on_wait: Callable[[], object]) -> Iterator[int | None]:
    """Hold a run's folder, also against other grids; gives the lock, where the system has such locks.

    Raises:
        ValueError: if the file system has none.
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
