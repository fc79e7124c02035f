"""Which text a run trains on and is validated on, encoded: computed on first use, then kept."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from lightning_norms.data.corpus import EMBEDDED, embedded, from_files
from lightning_norms.data.encoding import TokenFile, build_tokenizer, encode
from lightning_norms.data.splitting import Part, Split
from lightning_norms.data.tokenizing import Tokenizer
from lightning_norms.data.tokens import Tokens

logger = logging.getLogger(__name__)

Patterns = str | list[str]


@dataclass(frozen=True, eq=False, kw_only=True)
class TextSource:
    """Training and validation text as token streams.

    Args:
        train: Files, folders or globs; None for the text that Python ships.
        val: Named validation sets of files, folders or globs; None to split them off the training text.
        split: How to split off validation text if ``val`` is None; None for no validation.
        tokens: Recipe of the tokenizer.
        folder: The cache folder of encoded text.
    """

    train: Patterns | None
    val: dict[str, Patterns] | None
    split: Split | None
    tokens: Tokens
    folder: Path

    def __post_init__(self) -> None:
        if self.train is not None:
            _check_patterns("train", self.train)
        if self.val is not None and not isinstance(self.val, Mapping):
            form = "{name: files, ...}, such as {books: books/*.txt}"
            raise ValueError(f"TextDataModule: val must be a mapping {form}, got {self.val!r}")
        for name, patterns in (self.val or {}).items():
            _check_patterns(f"val[{name!r}]", patterns)
        if not isinstance(self.tokens, Tokens):
            names = ", ".join(sorted(kind.__name__ for kind in Tokens.__subclasses__()))
            raise ValueError(f"TextDataModule: tokens must be one of {names}, got {self.tokens!r}")

    @property
    def val_names(self) -> list[str]:
        """Names of the validation sets, in order."""
        if self.val is not None:
            return list(self.val)
        if self.split is None:
            return []
        return list(EMBEDDED) if self.train is None else ["val"]

    @cached_property
    def train_parts(self) -> tuple[Part, ...]:
        """The training text."""
        split = self.split if self.val is None else None
        if self.train is None:
            return tuple(Part(embedded(name), split) for name in EMBEDDED)
        return (Part(from_files("train", self.train), split),)

    @cached_property
    def val_parts(self) -> dict[str, Part]:
        """The text of each validation set."""
        if self.val is None:
            sides = [Part(part.corpus, part.split, validation=True) for part in self.train_parts if part.split]
            return dict(zip(self.val_names, sides, strict=True))
        parts = {name: Part(from_files(name, patterns)) for name, patterns in self.val.items()}
        trained = {document.name for part in self.train_parts for document in part.corpus.documents}
        for name, part in parts.items():
            if both := trained.intersection(document.name for document in part.corpus.documents):
                logger.warning("validation set %r holds %d file(s) that are trained on: %s", name, len(both), min(both))
        return parts

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of every stream."""
        return build_tokenizer(self.tokens, self.train_parts if self.tokens.learns else (), self.folder)

    @cached_property
    def train_stream(self) -> TokenFile:
        """The training text as tokens."""
        return encode(self.train_parts, self.tokenizer, self.folder)

    @cached_property
    def val_streams(self) -> dict[str, TokenFile]:
        """Each validation set as tokens."""
        return {name: encode([part], self.tokenizer, self.folder) for name, part in self.val_parts.items()}

    @cached_property
    def fingerprint(self) -> str:
        """Sha256 of all text, training and validation, in order."""
        # The two sides of a split are one corpus: each fingerprint once.
        parts = (*self.train_parts, *self.val_parts.values())
        fingerprints = dict.fromkeys(part.corpus.fingerprint for part in parts)
        return hashlib.sha256(" ".join(fingerprints).encode()).hexdigest()


def _check_patterns(name: str, value: object) -> None:
    listed = value if isinstance(value, list | tuple) else [value]
    if not listed or not all(isinstance(item, str) and item for item in listed):
        raise ValueError(f"TextDataModule: {name} must be a file, folder or glob, or a list of them, got {value!r}")
