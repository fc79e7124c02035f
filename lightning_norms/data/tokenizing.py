"""Tokenizers: text to token ids and back, without loss, with the exact number of bytes that each token stands for.

Token 0 is the boundary before each document. It stands for no text: zero bytes, and nothing when decoded.
"""

from __future__ import annotations

import importlib
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

BOUNDARY = 0
BOUNDARY_TEXT = "<|boundary|>"


class Tokenizer(ABC):
    """Text to token ids and back, without loss."""

    name: ClassVar[str]

    @property
    def vocab_size(self) -> int:
        """Number of tokens, the boundary included."""
        return len(self.token_bytes)

    @property
    @abstractmethod
    def token_bytes(self) -> Sequence[int]:
        """UTF-8 bytes of text that each token stands for: [vocab_size]; 0 for the boundary."""

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """Encode ``text`` to token ids, without a boundary."""

    def encode_array(self, text: str, dtype: np.dtype[Any]) -> NDArray[Any]:
        """Encode ``text`` to an array of token ids: [tokens]; files are encoded piece by piece with it."""
        return np.asarray(self.encode(text), dtype=dtype)

    @abstractmethod
    def decode(self, tokens: Iterable[int]) -> str:
        """Decode token ids to text; boundaries are left out, broken UTF-8 gives U+FFFD."""

    def to_plain(self) -> dict[str, str]:
        """The name and the arguments of this tokenizer, which any checkpoint can hold; see :func:`from_plain`."""
        return {"tokenizer": self.name}


def from_plain(state: Mapping[str, str]) -> Tokenizer:
    """Restore a tokenizer from what its ``to_plain()`` returned.

    Args:
        state: What :meth:`Tokenizer.to_plain` returned, for instance as read from a checkpoint.

    Raises:
        ValueError: If it is not such a state.

    Example:
        >>> from_plain(ByteTokenizer().to_plain()).decode([104, 105])
        'hi'
    """
    kinds = {kind.name: kind for kind in Tokenizer.__subclasses__()}
    name = state.get("tokenizer", "")
    if name not in kinds:
        raise ValueError(f"a tokenizer's state has a key 'tokenizer' in {sorted(kinds)}, but this one has {name!r}")
    return kinds[name](**{key: value for key, value in state.items() if key != "tokenizer"})


class ByteTokenizer(Tokenizer):
    """One token per UTF-8 byte: the id is the byte; NUL is the boundary and may not be in the text.

    Example:
        >>> tokenizer = ByteTokenizer()
        >>> tokenizer.encode("aé"), tokenizer.decode([97, 0, 195, 169]), tokenizer.vocab_size
        ([97, 195, 169], 'aé', 256)
    """

    name = "bytes"
    token_bytes = (0, *[1] * 255)

    @override
    def encode(self, text: str) -> list[int]:
        return list(self._to_bytes(text))

    @override
    def encode_array(self, text: str, dtype: np.dtype[Any]) -> NDArray[Any]:
        # Without a Python number per token: ten times as fast.
        return np.frombuffer(self._to_bytes(text), dtype=np.uint8).astype(dtype, copy=False)

    @override
    def decode(self, tokens: Iterable[int]) -> str:
        return bytes(token for token in tokens if token != BOUNDARY).decode("utf-8", errors="replace")

    @staticmethod
    def _to_bytes(text: str) -> bytes:
        data = text.encode("utf-8")
        if BOUNDARY in data:
            raise ValueError(
                f"text must not contain NUL, the document boundary, but byte {data.index(BOUNDARY)} is one"
            )
        return data


class BytePairTokenizer(Tokenizer):
    """Byte-level byte-pair encoding by the ``tokenizers`` library.

    Args:
        json: The library's own description of a tokenizer (the text of a ``tokenizer.json``).

    Raises:
        ImportError: If ``tokenizers`` is not installed.
        ValueError: If it is no such description, or token 0 is not a special token.
    """

    name = "byte_pairs"

    def __init__(self, json: str) -> None:
        library = import_tokenizers()
        try:
            self._inner: Any = library.Tokenizer.from_str(json)
        except Exception as error:  # the library raises bare Exception
            raise ValueError(f"this is not a tokenizer.json of the tokenizers library: {error}") from None
        self._json = json
        # Text that happens to spell a special token is text, and nothing may be cut off or padded.
        self._inner.encode_special_tokens = True
        self._inner.no_truncation()
        self._inner.no_padding()
        boundary = self._inner.get_added_tokens_decoder().get(BOUNDARY)
        if boundary is None or not boundary.special:
            raise ValueError(
                f"token 0 must be a special token, the boundary before a document, but it is "
                f"{self._inner.id_to_token(BOUNDARY)!r}: train it with special_tokens=[{BOUNDARY_TEXT!r}] first"
            )

    @cached_property
    @override
    def token_bytes(self) -> Sequence[int]:
        # In a byte-level vocabulary each character of a special alphabet stands for one byte.
        alphabet = set(import_tokenizers().pre_tokenizers.ByteLevel.alphabet())
        lengths = [0] * (max(self._inner.get_vocab().values()) + 1)
        for token, number in self._inner.get_vocab().items():
            lengths[number] = len(token) if alphabet.issuperset(token) else len(token.encode("utf-8"))
        for number, added in self._inner.get_added_tokens_decoder().items():
            lengths[number] = len(added.content.encode("utf-8"))
        lengths[BOUNDARY] = 0
        return tuple(lengths)

    @override
    def encode(self, text: str) -> list[int]:
        # A batch of one: only this form skips the positions in the text, a third of the time.
        return list(self._inner.encode_batch_fast([text], add_special_tokens=False)[0].ids)

    @override
    def decode(self, tokens: Iterable[int]) -> str:
        return str(self._inner.decode(list(tokens), skip_special_tokens=True))

    @override
    def to_plain(self) -> dict[str, str]:
        return {"tokenizer": self.name, "json": self._json}

    def __reduce__(self) -> tuple[type, tuple[str]]:
        return type(self), (self._json,)


def import_tokenizers() -> Any:
    """Import the optional ``tokenizers`` package; ImportError with what to install if it is missing."""
    # Set before its first use: otherwise the library prints a warning into every run that forks data workers.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        return importlib.import_module("tokenizers")
    except ImportError:
        raise ImportError("BytePairs needs the tokenizers library: pip install 'lightning-norms[bpe]'") from None
