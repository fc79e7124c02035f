"""Files in the log folder of a run, which may be a URL: written where Lightning writes its own."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

Folder = str | os.PathLike[str]


def find_log_folder(trainer: Any) -> str | None:
    """Return the folder of a Trainer's logs; None for a ``fast_dev_run``, which leaves no files.

    Every rank must call this: Lightning asks the first one.
    """
    folder = trainer.log_dir or trainer.default_root_dir
    return None if getattr(trainer, "fast_dev_run", False) else str(folder)


def write_file(folder: Folder, name: str, content: bytes) -> str:
    """Write a file, which is complete or absent at every moment, and make its folder; return its place."""
    path = _local_path(folder)
    if path is None:
        files, root = _open(folder)
        files.makedirs(root, exist_ok=True)
        files.pipe_file(f"{root}/{name}", content)
        return f"{str(folder).rstrip('/')}/{name}"
    path.mkdir(parents=True, exist_ok=True)
    part = (path / name).with_suffix(".part")
    part.write_bytes(content)
    return str(part.replace(path / name))


def append_line(folder: Folder, name: str, line: str) -> None:
    """Add a line to a file, made if it is absent; return when it is on the disk."""
    path = _local_path(folder)
    if path is None:  # object stores cannot append
        before = read_file(folder, name) if has_file(folder, name) else b""
        write_file(folder, name, before + _behind(before[-1:], line))
        return
    path.mkdir(parents=True, exist_ok=True)
    with (path / name).open("ab+") as file:
        file.seek(max(file.tell() - 1, 0))
        file.write(_behind(file.read(1), line))
        file.flush()
        os.fsync(file.fileno())


def read_file(folder: Folder, name: str) -> bytes:
    """Return what a file holds; FileNotFoundError if it is absent."""
    path = _local_path(folder)
    if path is not None:
        return (path / name).read_bytes()
    files, root = _open(folder)
    content: bytes = files.cat_file(f"{root}/{name}")
    return content


def has_file(folder: Folder, name: str) -> bool:
    """Return whether the folder has the file."""
    path = _local_path(folder)
    if path is not None:
        return (path / name).exists()
    files, root = _open(folder)
    return bool(files.exists(f"{root}/{name}"))


def is_url(folder: Folder) -> bool:
    """Return whether a folder is not simply a path."""
    return "://" in str(folder)


def _behind(last: bytes, line: str) -> bytes:
    """Return the line as bytes; a process that died in the middle of its own line, ending in ``last``, gets an end."""
    return (b"" if last in (b"", b"\n") else b"\n") + f"{line}\n".encode()


def _local_path(folder: Folder) -> Path | None:
    """Return None for a URL of another protocol than ``file``."""
    text = str(folder)
    if text.startswith("file://"):
        return Path(text.removeprefix("file://"))
    return None if is_url(text) else Path(text)


def _open(folder: Folder) -> tuple[Any, str]:
    from fsspec.core import url_to_fs  # type: ignore[import-untyped]  # a dependency of Lightning

    files, root = url_to_fs(str(folder))
    return files, root.rstrip("/")
