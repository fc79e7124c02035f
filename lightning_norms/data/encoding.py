"""Text encoded once to a memory-mapped array of token ids, kept in a cache folder.

::

    <key>.npy             token ids, unsigned, as ``numpy.load(..., mmap_mode="r")`` reads them
    <key>.json            occurrences of every token, and a checksum of the array's file
    <key>.tokenizer.json  a tokenizer that was learned from the text

The key is a hash of everything that decides the content, so a file is never out of date. Files are written under a
temporary name and then renamed, so that two processes may start at once; a damaged file is noticed and written again.
"""

from __future__ import annotations

import hashlib
import json
import os
import uuid
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from lightning_norms.data.splitting import Part
from lightning_norms.data.tokenizing import BOUNDARY, Tokenizer, from_plain
from lightning_norms.data.tokens import Tokens

FORMAT = "2"


@dataclass(frozen=True, eq=False)
class TokenFile:
    """A stream of token ids on disk; pickles as its path, not as its content.

    Args:
        path: File of the ids, ``.npy``.
        counts: Occurrences of each token in the stream: [vocab_size].
    """

    path: Path
    counts: list[int]

    @cached_property
    def array(self) -> NDArray[Any]:
        """The token ids: [tokens], unsigned, read from disk as they are needed."""
        array: NDArray[Any] = np.load(self.path, mmap_mode="r")
        return array

    def __len__(self) -> int:
        return sum(self.counts)

    def __reduce__(self) -> tuple[type, tuple[Path, list[int]]]:
        return type(self), (self.path, self.counts)  # a memory map would be pickled as all of its content


def cache_folder(cache_dir: str | None) -> Path:
    """The folder for encoded text: ``cache_dir``, else $LIGHTNING_NORMS_CACHE, else ~/.cache/lightning_norms."""
    return Path(cache_dir or os.environ.get("LIGHTNING_NORMS_CACHE") or "~/.cache/lightning_norms").expanduser()


def encode(parts: Sequence[Part], tokenizer: Tokenizer, folder: Path) -> TokenFile:
    """Encode the text to boundary, document, boundary, document, ...; or find it in the cache.

    Args:
        parts: The text, in order.
        tokenizer: Encodes the text.
        folder: The cache folder; made if it does not exist.

    Raises:
        ValueError: If the text is not UTF-8, or the tokenizer changes bytes of it.
        OSError: If the folder cannot be written.
    """
    state = json.dumps(tokenizer.to_plain(), sort_keys=True)
    path = folder / f"{_hash(FORMAT, state, *(part.key for part in parts))}.npy"
    counts = _read_counts(path)
    if counts is None:
        with _replace(path) as file:
            counts = _write_tokens(file, _pieces(parts), tokenizer)
        with _replace(path.with_suffix(".json")) as file:
            file.write(json.dumps({"checksum": _checksum(path), "counts": counts}).encode("utf-8"))
    return TokenFile(path, counts)


def build_tokenizer(recipe: Tokens, parts: Sequence[Part], folder: Path) -> Tokenizer:
    """Build the recipe's tokenizer, which is learned from these parts once and then read from the cache folder."""
    if not recipe.learns:
        return recipe.build(lambda: iter(()))
    path = folder / f"{_hash(FORMAT, repr(recipe), *(part.key for part in parts))}.tokenizer.json"
    try:
        return from_plain(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError, AttributeError):  # missing, cut off, or something else altogether
        tokenizer = recipe.build(lambda: (text for _, text in _pieces(parts)))
    with _replace(path) as file:
        file.write(json.dumps(tokenizer.to_plain()).encode("utf-8"))
    return tokenizer


def _pieces(parts: Iterable[Part]) -> Iterator[tuple[bool, str]]:
    return (piece for part in parts for piece in part.pieces())


def _read_counts(path: Path) -> list[int] | None:
    """Occurrences of each token in an encoded file; None if the file is missing or damaged."""
    try:
        description = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
        counts: list[int] = description["counts"]
        return counts if description["checksum"] == _checksum(path) else None
    except (FileNotFoundError, NotADirectoryError, ValueError, KeyError, TypeError):
        return None


def _write_tokens(file: BinaryIO, pieces: Iterable[tuple[bool, str]], tokenizer: Tokenizer) -> list[int]:
    dtype = np.min_scalar_type(tokenizer.vocab_size - 1).newbyteorder("<")
    token_bytes = np.asarray(tokenizer.token_bytes, dtype=np.int64)
    counts = np.zeros(tokenizer.vocab_size, dtype=np.int64)
    boundary = np.asarray(BOUNDARY, dtype=dtype).tobytes()
    _write_header(file, dtype, 0)
    for is_start, text in pieces:
        tokens = tokenizer.encode_array(text, dtype)
        occurrences = np.bincount(tokens, minlength=len(counts))
        _check_bytes(text, int(occurrences @ token_bytes))
        file.write(boundary * is_start + tokens.tobytes())
        counts += occurrences
        counts[BOUNDARY] += is_start
    file.seek(0)
    _write_header(file, dtype, int(counts.sum()))  # numpy leaves room in a header for a growing first axis
    return [int(count) for count in counts]


def _write_header(file: BinaryIO, dtype: np.dtype[Any], length: int) -> None:
    npy.write_array_header_1_0(file, {"descr": dtype.str, "fortran_order": False, "shape": (length,)})


def _check_bytes(text: str, counted: int) -> None:
    size = len(text.encode("utf-8"))
    if counted != size:
        raise ValueError(
            f"the tokenizer changes the text: its tokens stand for {counted} bytes, not {size}, of {text[:40]!r}...; "
            "bits per byte would be wrong (does it have a normalizer, a prefix space or unknown tokens?)"
        )


def _checksum(path: Path) -> int:
    # Read, not mapped: every page that a map has touched counts as memory of this process.
    checksum = 0
    with path.open("rb", buffering=0) as file:
        while block := file.read(1 << 20):
            checksum = zlib.crc32(block, checksum)
    return checksum


def _hash(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode("utf-8")).hexdigest()[:32]


@contextmanager
def _replace(path: Path) -> Iterator[BinaryIO]:
    """Open a file under a temporary name that takes the place of ``path`` once it is complete."""
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
