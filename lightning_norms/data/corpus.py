"""Where text comes from: the corpus that Python itself ships, or the user's files.

::

    Document  one text, opened anew for each pass, so that nothing large stays in memory
    Corpus    a named, ordered tuple of documents, with a sha256 fingerprint of their bytes
"""

from __future__ import annotations

import glob
import hashlib
import importlib
import io
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import BinaryIO

READ_BYTES = 1 << 20


@dataclass(frozen=True)
class Document:
    r"""One text: its name in messages, its size and how to open it.

    Args:
        name: Name in error messages, such as the path of the file.
        size: Bytes of text.
        open: Opens the text for reading bytes from its start; called once per pass.

    Example:
        >>> document = Document.of_text("note", "aé")
        >>> document.size, document.open().read()
        (3, b'a\xc3\xa9')
    """

    name: str
    size: int
    open: Callable[[], BinaryIO | io.FileIO]

    @classmethod
    def of_text(cls, name: str, text: str) -> Document:
        """A document that is held in memory."""
        data = text.encode("utf-8")
        return cls(name, len(data), partial(io.BytesIO, data))

    @classmethod
    def of_file(cls, path: Path) -> Document:
        """A document that is a file."""
        return cls(str(path), path.stat().st_size, partial(io.FileIO, path))

    def blocks(self) -> Iterator[bytes]:
        """The bytes of the text, a megabyte at a time."""
        with self.open() as stream:
            while block := stream.read(READ_BYTES):
                yield block


@dataclass(frozen=True)
class Corpus:
    """A named, ordered tuple of documents.

    Args:
        name: Short name; the train/validation split is drawn from it.
        documents: The documents in reading order.

    Example:
        >>> corpus = Corpus("notes", (Document.of_text("a", "one"), Document.of_text("b", "two")))
        >>> corpus.size, str(corpus), corpus.fingerprint[:8]
        (6, 'notes (a and 1 more)', 'a5aceaae')
    """

    name: str
    documents: tuple[Document, ...]

    def __str__(self) -> str:
        others = len(self.documents) - 1
        first = self.documents[0].name if self.documents else "nothing"
        return f"{self.name} ({first} and {others} more)" if others > 0 else f"{self.name} ({first})"

    @property
    def size(self) -> int:
        """Bytes of text in all documents."""
        return sum(document.size for document in self.documents)

    @cached_property
    def fingerprint(self) -> str:
        """Sha256 of the documents' sizes and bytes in order; file names do not matter."""
        digest = hashlib.sha256()
        for document in self.documents:
            # The size first: "ab" + "c" and "a" + "bc" are different corpora.
            digest.update(document.size.to_bytes(8, "little"))
            for block in document.blocks():
                digest.update(block)
        return digest.hexdigest()


def _read_code() -> Iterator[Document]:
    folder = Path(sysconfig.get_path("stdlib"))
    return (Document.of_file(path) for path in sorted(folder.glob("*.py")) if path.stat().st_size)


def _read_prose() -> Iterator[Document]:
    topics: Mapping[str, str] = importlib.import_module("pydoc_data.topics").topics
    return (Document.of_text(f"pydoc_data.topics[{key!r}]", topics[key]) for key in sorted(topics))


EMBEDDED: dict[str, Callable[[], Iterator[Document]]] = {"code": _read_code, "prose": _read_prose}


def embedded(name: str) -> Corpus:
    """The text that Python ships: ``"code"`` is its standard library, ``"prose"`` its reference manual.

    About 4.7 MB of code and 0.5 MB of prose on Python 3.11. Another Python version ships other text: compare
    :attr:`Corpus.fingerprint` before comparing numbers.

    Args:
        name: ``"code"`` (top-level modules of the standard library) or ``"prose"`` (``pydoc_data.topics``).

    Raises:
        ValueError: If there is no such part.
        FileNotFoundError: If this Python was installed without that text.

    Example:
        >>> embedded("prose").documents[0].name
        "pydoc_data.topics['assert']"
    """
    if name not in EMBEDDED:
        raise ValueError(f"the embedded corpus has the parts {sorted(EMBEDDED)}, not {name!r}")
    try:
        documents = tuple(EMBEDDED[name]())
    except (ImportError, OSError):
        documents = ()
    if not documents:
        raise FileNotFoundError(
            f"this Python ships no {name!r} text (the sources of its standard library are missing): give data.train"
        )
    return Corpus(name, documents)


def from_files(name: str, patterns: str | Iterable[str]) -> Corpus:
    """The corpus of the files that match, each once, sorted by path.

    A folder stands for every file below it, except hidden ones. Empty files are skipped.

    Args:
        name: Name of the corpus.
        patterns: One or several of: a file, a folder, a glob such as ``"books/**/*.txt"``.

    Raises:
        FileNotFoundError: If a pattern matches no file at all.
        ValueError: If all files are empty.
    """
    listed = [patterns] if isinstance(patterns, str) else patterns
    paths = sorted({path for pattern in listed for path in _find_files(name, pattern)}, key=lambda path: path.parts)
    documents = tuple(Document.of_file(path) for path in paths if path.stat().st_size)
    if not documents:
        raise ValueError(f"data: {name!r} has no text: {', '.join(map(str, paths[:3]))} is empty (0 bytes)")
    return Corpus(name, documents)


def _find_files(name: str, pattern: str) -> list[Path]:
    path = Path(pattern).expanduser()
    if path.is_file():
        return [path]
    if path.is_dir():
        candidates: Iterable[Path] = (below for below in path.rglob("*") if not _is_hidden(below.relative_to(path)))
        problem = f"the folder {pattern!r} holds no file"
    elif glob.has_magic(pattern):
        candidates = map(Path, glob.glob(str(path), recursive=True))  # noqa: PTH207 - Path.glob refuses absolute ones
        problem = f"the glob {pattern!r} matches no file"
    else:
        candidates = ()
        problem = f"there is no file or folder {pattern!r} (searched from {Path.cwd()})"
    files = [candidate for candidate in candidates if candidate.is_file()]
    if not files:
        raise FileNotFoundError(f"data: {name!r}: {problem}")
    return files


def _is_hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)
