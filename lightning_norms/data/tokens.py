"""What a token is: recipes for the YAML, each of which builds a tokenizer.

::

    Tokens (recipe)  --build(training text)-->  Tokenizer  --to_plain()-->  dict of str, for a checkpoint
    Bytes                                       ByteTokenizer
    BytePairs                                   BytePairTokenizer
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from typing_extensions import override

from lightning_norms.checks import check_whole
from lightning_norms.data.tokenizing import (
    BOUNDARY_TEXT,
    BytePairTokenizer,
    ByteTokenizer,
    Tokenizer,
    import_tokenizers,
)

Texts = Callable[[], Iterator[str]]
"""Returns the training text from its start, in pieces."""


@dataclass(frozen=True)
class Tokens(ABC):
    """A recipe for a tokenizer, chosen in YAML by the short name of its class.

    ::

        data:
          tokens:
            class_path: BytePairs
            init_args: {vocab_size: 4096}
    """

    @property
    def learns(self) -> bool:
        """Whether :meth:`build` reads the training text (so that its result is worth keeping in the cache)."""
        return False

    @abstractmethod
    def build(self, texts: Texts) -> Tokenizer:
        """Build the tokenizer; ``texts()`` returns the training text, for recipes that learn from it."""


@dataclass(frozen=True)
class Bytes(Tokens):
    """One token per UTF-8 byte: 256 tokens, nothing to learn, any text in any language.

    Example:
        >>> Bytes().build(lambda: iter(())).vocab_size
        256
    """

    @override
    def build(self, texts: Texts) -> Tokenizer:
        return ByteTokenizer()


@dataclass(frozen=True)
class BytePairs(Tokens):
    """Byte-level byte-pair encoding, learned from the training text or read from a file.

    Needs the ``tokenizers`` library: ``pip install 'lightning-norms[bpe]'``.

    Args:
        vocab_size: Most tokens to learn, 257 (256 bytes and the boundary) or more; a short text gives fewer.
        path: A ``tokenizer.json`` to read instead, with its own vocabulary size. It must be byte-level, change no byte
            of the text (no normalizer, no prefix space) and have a special token with id 0.

    Raises:
        ImportError: If ``tokenizers`` is not installed.
        FileNotFoundError: If there is no file ``path``.
        ValueError: If ``vocab_size`` is too small or the file is no such tokenizer.

    Example:
        >>> tokenizer = BytePairs(vocab_size=258).build(lambda: iter(["ab ab ab"]))
        >>> [tokenizer.decode([token]) for token in tokenizer.encode("abc")], tokenizer.token_bytes[257]
        (['ab', 'c'], 2)

    Source: Sennrich, Haddow and Birch (2016), arXiv:1508.07909; byte level: Radford et al. (2019), GPT-2.
    """

    vocab_size: int = 2048
    path: str | None = None

    def __post_init__(self) -> None:
        check_whole("BytePairs", "vocab_size", self.vocab_size, 257)

    @property
    @override
    def learns(self) -> bool:
        return self.path is None

    @override
    def build(self, texts: Texts) -> Tokenizer:
        return self._learn(texts) if self.path is None else self._read(Path(self.path).expanduser())

    def _read(self, path: Path) -> Tokenizer:
        if not path.is_file():
            raise FileNotFoundError(f"BytePairs: path: there is no file {str(path)!r} (searched from {Path.cwd()})")
        try:
            return BytePairTokenizer(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"BytePairs: path {str(path)!r}: {error}") from None

    def _learn(self, texts: Texts) -> Tokenizer:
        library = import_tokenizers()
        learner = library.Tokenizer(library.models.BPE())
        learner.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
        learner.decoder = library.decoders.ByteLevel()
        trainer = library.trainers.BpeTrainer(
            vocab_size=self.vocab_size,
            special_tokens=[BOUNDARY_TEXT],
            initial_alphabet=sorted(library.pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        )
        learner.train_from_iterator(texts(), trainer)
        return BytePairTokenizer(learner.to_str())
