"""Text encoded once to a memory-mapped file of token ids, kept in a cache folder.

::

    <key>.tokens    [ token ids, little endian | description, JSON | its length, 8 bytes | mark, 8 bytes ]

The name is a hash of everything that decides the content, so a file is never out of date. It is written under a
temporary name and then renamed, so that two processes which start at once do no harm; the mark comes last, so that
a file which was cut off is noticed and made again.
"""

from __future__ import annotations

import hashlib
import json
import os
import uuid
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from lightning_norms.data.splitting import Part
from lightning_norms.data.tokenizing import BOUNDARY, Tokenizer, from_plain
from lightning_norms.data.tokens import Tokens

FORMAT = "1"
_MARK = b"LNTOKENS"
_TAIL_BYTES = 8 + len(_MARK)


class DamagedFileError(ValueError):
    """A cache file is cut off or changed."""


def cache_folder(given: str | None) -> Path:
    """The folder for encoded text: ``given``, else $LIGHTNING_NORMS_CACHE, else ~/.cache/lightning_norms."""
    return Path(given or os.environ.get("LIGHTNING_NORMS_CACHE") or "~/.cache/lightning_norms").expanduser()


class TokenFile:
    """A stream of token ids on disk; pickles as its path, not as its content.

    Args:
        path: The file.

    Raises:
        FileNotFoundError: If there is none.
        DamagedFileError: If it is cut off or changed.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        description = self._description()
        self._dtype = np.dtype(description["dtype"])
        self._length: int = description["tokens"]
        self.counts: list[int] = description["counts"]
        self._array: NDArray[Any] | None = None
        if self.path.stat().st_size != self._length * self._dtype.itemsize + description["size"] + _TAIL_BYTES:
            raise DamagedFileError(f"{self.path} has another size than it says")
        if _checksum(self.path, self._length * self._dtype.itemsize) != description["checksum"]:
            raise DamagedFileError(f"{self.path} has another content than it says")

    def _description(self) -> dict[str, Any]:
        with self.path.open("rb") as file:
            length = file.seek(0, os.SEEK_END)
            file.seek(max(0, length - _TAIL_BYTES))
            tail = file.read()
            size = int.from_bytes(tail[:8], "little")
            if len(tail) != _TAIL_BYTES or tail[8:] != _MARK or size > length - _TAIL_BYTES:
                raise DamagedFileError(f"{self.path} is cut off")
            file.seek(length - _TAIL_BYTES - size)
            return {**json.loads(file.read(size)), "size": size}

    @property
    def array(self) -> NDArray[Any]:
        """The token ids: [tokens], unsigned, read from disk as they are needed."""
        if self._array is None:
            self._array = np.memmap(self.path, dtype=self._dtype, mode="r", shape=(self._length,))
        return self._array

    def __len__(self) -> int:
        return self._length

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_array": None}  # a memory map would be pickled as all of its content


def encoded(parts: Sequence[Part], tokenizer: Tokenizer, folder: Path) -> TokenFile:
    """The token stream of these parts: boundary, document, boundary, document, ...; from the cache if it is there.

    Args:
        parts: The text, in order.
        tokenizer: How it becomes tokens.
        folder: The cache folder; made if it does not exist.

    Raises:
        ValueError: If the text is not UTF-8, or the tokenizer changes bytes of it.
        OSError: If the folder cannot be written.
    """
    state = json.dumps(tokenizer.to_plain(), sort_keys=True)
    path = folder / f"{_key(FORMAT, state, *(part.key for part in parts))}.tokens"
    try:
        return TokenFile(path)
    except (FileNotFoundError, NotADirectoryError, DamagedFileError):
        with _replacing(path) as file:
            _write(file, _pieces(parts), tokenizer)
    return TokenFile(path)


def built(recipe: Tokens, parts: Sequence[Part], folder: Path) -> Tokenizer:
    """The recipe's tokenizer, learnt once from these parts and then read from the cache folder."""
    if not recipe.learns:
        return recipe.build(lambda: iter(()))
    path = folder / f"{_key(FORMAT, repr(recipe), *(part.key for part in parts))}.tokenizer.json"
    try:
        return from_plain(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, AttributeError):  # not there, cut off, or something else altogether
        tokenizer = recipe.build(lambda: (text for _, text in _pieces(parts)))
    with _replacing(path) as file:
        file.write(json.dumps(tokenizer.to_plain()).encode("utf-8"))
    return tokenizer


def _pieces(parts: Iterable[Part]) -> Iterator[tuple[bool, str]]:
    return (piece for part in parts for piece in part.pieces())


def _write(file: BinaryIO, pieces: Iterable[tuple[bool, str]], tokenizer: Tokenizer) -> None:
    dtype = np.min_scalar_type(tokenizer.vocab_size - 1).newbyteorder("<")
    token_bytes = np.asarray(tokenizer.token_bytes, dtype=np.int64)
    counts = np.zeros(tokenizer.vocab_size, dtype=np.int64)
    boundary = np.asarray(BOUNDARY, dtype=dtype).tobytes()
    checksum = 0
    for is_start, text in pieces:
        tokens = tokenizer.encode_array(text, dtype)
        occurrences = np.bincount(tokens, minlength=len(counts))
        counted, size = int(occurrences @ token_bytes), len(text.encode("utf-8"))
        if counted != size:
            raise ValueError(
                f"the tokenizer changes the text: its tokens stand for {counted} bytes, not {size}, "
                f"of {text[:40]!r}...; "
                "bits per byte would be wrong (has it a normalizer, a prefix space or unknown tokens?)"
            )
        data = boundary * is_start + tokens.tobytes()
        file.write(data)
        checksum = zlib.crc32(data, checksum)
        counts += occurrences
        counts[BOUNDARY] += is_start
    description = {"dtype": dtype.str, "tokens": int(counts.sum()), "checksum": checksum, "counts": counts.tolist()}
    encoded_description = json.dumps(description).encode("utf-8")
    file.write(encoded_description + len(encoded_description).to_bytes(8, "little") + _MARK)


def _checksum(path: Path, size: int, block: int = 1 << 20) -> int:
    # Read, and not through the memory map: every page that a map has touched counts as memory of this process.
    checksum = 0
    with path.open("rb", buffering=0) as file:
        for start in range(0, size, block):
            checksum = zlib.crc32(file.read(min(block, size - start)), checksum)
    return checksum


def _key(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode("utf-8")).hexdigest()[:32]


@contextmanager
def _replacing(path: Path) -> Iterator[BinaryIO]:
    """A new file under a name that nobody else has, which takes the place of ``path`` when it is complete."""
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = temporary.open("xb")
    except OSError as error:
        raise OSError(
            f"cannot write the cache folder {str(path.parent)!r} ({error.strerror}): "
            "set data.cache_dir or LIGHTNING_NORMS_CACHE to a folder that can be written"
        ) from None
    try:
        with file:
            yield file
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
