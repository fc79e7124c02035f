"""From documents to checked pieces of text, and which pieces are for training and which for validation.

::

    document   |--------------------------------------------|
    chunks     |-----|------|-----|------|-----|------|-----|    a few KB each, cut after a line
    validation        ######                     ############    drawn by hash, about one in ten
    training   |-----|      |-----------------|                  neighbours are joined to one document
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

from lightning_norms.data.corpus import Corpus, Document

CHUNK_BYTES = 4096  # where a cut is first allowed
LONGEST_CHUNK_BYTES = 16 * CHUNK_BYTES  # a line longer than this is cut between two characters
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


def chunks(document: Document, size: int = CHUNK_BYTES) -> Iterator[str]:
    r"""The text of a document, without its byte order mark, in pieces that each end with a line.

    Args:
        document: What to read; must be UTF-8 without NUL.
        size: The piece ends at the first end of a line after this many bytes.

    Raises:
        ValueError: With the document's name and the byte position, if a byte is not UTF-8 or is NUL.

    Example:
        >>> list(chunks(Document.of_text("note", "one\r\ntwo\nthree"), size=2))
        ['one\r\n', 'two\n', 'three']
    """
    position = 0
    for raw in _cut(document, size):
        start = len(_BYTE_ORDER_MARK) if position == 0 and raw.startswith(_BYTE_ORDER_MARK) else 0
        if raw[start:]:
            yield _decode(raw, start, position, document.name)
        position += len(raw)


def _cut(document: Document, size: int) -> Iterator[bytes]:
    rest = b""
    for block in document.blocks():
        buffer, start = rest + block, 0
        while end := _end(buffer, start, size):
            yield buffer[start:end]
            start = end
        rest = buffer[start:]
    if rest:
        yield rest


def _end(buffer: bytes, start: int, size: int) -> int:
    """End of the piece that begins at ``start``; 0 if the buffer does not reach that far."""
    newline = buffer.find(b"\n", start + size - 1, start + LONGEST_CHUNK_BYTES)
    if newline >= 0:
        return newline + 1
    end = start + LONGEST_CHUNK_BYTES
    if end >= len(buffer):
        return 0
    # Never inside a character: UTF-8 has at most three continuation bytes (10xxxxxx) after the first.
    for _ in range(3):
        end -= buffer[end] & 0xC0 == 0x80
    return end


def _decode(raw: bytes, start: int, position: int, name: str) -> str:
    try:
        text = raw[start:].decode("utf-8")
    except UnicodeDecodeError as error:
        where = start + error.start
        raise ValueError(
            f"{name}: byte 0x{raw[where]:02x} at position {position + where} is not UTF-8: "
            "convert the file to UTF-8 or leave it out"
        ) from None
    if "\0" in text:
        raise ValueError(
            f"{name}: NUL byte at position {position + raw.index(0)}: this is not a text file (or it is UTF-16): "
            "convert it to UTF-8 or leave it out"
        )
    return text


@dataclass(frozen=True)
class Split:
    r"""Which chunks of a corpus are for validation: each is drawn by its own hash, so the split needs no memory.

    .. math:: \text{validation} \iff \text{sha256}(\text{seed, corpus, index}) / 2^{64} < \text{fraction}

    Args:
        fraction: Expected share of validation chunks, in [0, 1).
        seed: Another seed draws other chunks.

    Example:
        >>> sum(Split(0.1).is_validation("code", index) for index in range(1000))
        91
    """

    fraction: float
    seed: int = 0

    def is_validation(self, corpus: str, index: int) -> bool:
        """Whether chunk number ``index`` of ``corpus`` is for validation."""
        digest = hashlib.sha256(f"{self.seed} {corpus} {index}".encode()).digest()
        return int.from_bytes(digest[:8], "little") < self.fraction * 2.0**64


@dataclass(frozen=True)
class Part:
    """One side of a corpus, or all of it.

    Args:
        corpus: The text.
        split: How the corpus is split; None takes all of it.
        validation: Whether this is the validation side of the split.
    """

    corpus: Corpus
    split: Split | None = None
    validation: bool = False

    @property
    def key(self) -> str:
        """Everything that decides the text of this part, for the name of a cache file."""
        layout = f"{CHUNK_BYTES} {LONGEST_CHUNK_BYTES} {self._chunk_size}"
        return f"{self.corpus.name} {self.corpus.fingerprint} {self.split} {self.validation} {layout}"

    @property
    def _chunk_size(self) -> int:
        # A small text is cut finer: as a single chunk, a one-page note could not be split at all.
        return CHUNK_BYTES if self.split is None else min(CHUNK_BYTES, max(64, self.corpus.size // 64))

    def pieces(self) -> Iterator[tuple[bool, str]]:
        """The text in order, as pairs: whether a document starts here, and the piece of text."""
        index = 0
        for document in self.corpus.documents:
            is_start = True
            for text in chunks(document, self._chunk_size):
                is_ours = self.split is None or self.split.is_validation(self.corpus.name, index) == self.validation
                if is_ours:
                    yield is_start, text
                is_start = not is_ours
                index += 1
