"""``TextDataModule``: text files, or the text that Python ships, as batches for a language model."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch import LightningDataModule
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor
from torch.utils.data import DataLoader
from typing_extensions import override

from lightning_norms.checks import check_number, check_whole
from lightning_norms.data.encoding import TokenFile, cache_folder
from lightning_norms.data.loading import Batch, TrainingBatches, ValidationBatches, build_loader
from lightning_norms.data.sampling import ValidationOrder, WindowOrder
from lightning_norms.data.sources import TextSource
from lightning_norms.data.splitting import Split
from lightning_norms.data.tokenizing import Tokenizer
from lightning_norms.data.tokens import Bytes, Tokens

logger = logging.getLogger(__name__)

BYTES = Bytes()
OWNER = "TextDataModule"


class TextDataModule(LightningDataModule):
    """Text as batches ``{"inputs": [B, T], "targets": [B, T]}`` of int64 token ids; a target of -100 is not scored.

    Training visits windows in an order that is a pure function of (seed, step, rank), one pass per epoch, and resumes
    at exactly the next batch with ``fit(ckpt_path=...)``. Validation makes every byte of the text a target exactly
    once, in one fixed shuffled order, so that ``limit_val_batches`` takes a representative sample.

    Args:
        train: Files, folders or globs to train on. None trains on the text that Python ships: code and prose.
        val: Named validation sets, each of files, folders or globs. None splits the training text: the embedded one
            into sets ``code`` and ``prose``, the user's into one set ``val``.
        context_length: Tokens per window, T.
        batch_size: Windows per training batch and rank, B.
        val_batch_size: Windows per validation batch and rank; None takes ``batch_size``.
        tokens: Kind of token: :class:`~lightning_norms.data.tokens.Bytes` or
            :class:`~lightning_norms.data.tokens.BytePairs`.
        val_fraction: Share of the text that is split off for validation, in [0, 1); 0 for no validation.
        seed: Seed of the order of training windows. None takes the run's (``seed_everything``), or 0 without one.
        split_seed: Seed of the validation split; separate from ``seed``, so that runs with several seeds are validated
            on the same text.
        cache_dir: Folder of encoded text; None takes $LIGHTNING_NORMS_CACHE or ~/.cache/lightning_norms.
        num_workers: Processes per loader that prepare batches ahead.

    Raises:
        ValueError: If an argument is out of range, or a text is empty, too short or not UTF-8.
        FileNotFoundError: If there is no such file.

    Example:
        >>> data = TextDataModule(context_length=128, batch_size=4)
        >>> data.vocab_size, data.val_names
        (256, ['code', 'prose'])
    """

    # No save_hyperparameters(): the recipe is a dataclass, and a checkpoint that holds one cannot be resumed
    # (Lightning loads with weights_only=True).

    def __init__(
        self,
        train: str | list[str] | None = None,
        val: dict[str, str | list[str]] | None = None,
        context_length: int = 64,
        batch_size: int = 8,
        val_batch_size: int | None = None,
        tokens: Tokens = BYTES,
        val_fraction: float = 0.1,
        seed: int | None = None,
        split_seed: int = 0,
        cache_dir: str | None = None,
        num_workers: int = 0,
    ) -> None:
        super().__init__()
        # Lightning keeps the seed of seed_everything in the environment, so that every process of a run sees it.
        seed = int(os.environ.get("PL_GLOBAL_SEED", "0")) if seed is None else seed
        self.context_length = check_whole(OWNER, "context_length", context_length, 1)
        self.batch_size = check_whole(OWNER, "batch_size", batch_size, 1)
        self.val_batch_size = val_batch_size
        if val_batch_size is not None:
            check_whole(OWNER, "val_batch_size", val_batch_size, 1)
        self.val_fraction = check_number(OWNER, "val_fraction", val_fraction, lowest=0, below=1)
        self.seed = check_whole(OWNER, "seed", seed, 0)
        self.split_seed = check_whole(OWNER, "split_seed", split_seed, 0)
        self.num_workers = check_whole(OWNER, "num_workers", num_workers, 0)
        self.train, self.val, self.tokens, self.cache_dir = train, val, tokens, cache_dir
        split = Split(val_fraction, split_seed) if val_fraction else None
        self._source = TextSource(train=train, val=val, split=split, tokens=tokens, folder=cache_folder(cache_dir))
        self._restored_batches = 0
        self._is_logged = False

    # --- the text: encoded on first use of one of these, or by Lightning before a run ---

    @property
    def val_names(self) -> list[str]:
        """Names of the validation sets in the order of their loaders."""
        return self._source.val_names

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the text; store its ``to_plain()`` in a checkpoint."""
        return self._source.tokenizer

    @property
    def vocab_size(self) -> int:
        """Number of tokens, the boundary included."""
        return self.tokenizer.vocab_size

    @property
    def token_bytes(self) -> Tensor:
        """UTF-8 bytes that each token stands for: int64 [vocab_size]; 0 for the boundary."""
        return torch.tensor(self.tokenizer.token_bytes, dtype=torch.int64)

    @property
    def train_tokens(self) -> int:
        """Tokens of the training stream, one boundary per document included."""
        return len(self._source.train_stream)

    @property
    def unigram_entropy(self) -> float:
        r"""Loss of a model that knows only token frequencies, nats/token: :math:`-\sum_t p_t \ln p_t`."""
        total = self.train_tokens
        return -sum(count / total * math.log(count / total) for count in self._source.train_stream.counts if count)

    @property
    def fingerprint(self) -> str:
        """Sha256 of all text, training and validation, in order."""
        return self._source.fingerprint

    # --- hooks of Lightning ---

    @override
    def prepare_data(self) -> None:
        _ = self._source.train_stream, self._source.val_streams

    @override
    def setup(self, stage: str | None = None) -> None:
        for name, stream in self._source.val_streams.items():
            if len(stream) < 2:
                raise ValueError(
                    f"validation set {name!r} of {self._source.val_parts[name].corpus} is empty: "
                    "give more text, another val, val_fraction or split_seed"
                )
        if stage in ("fit", None):
            self._train_order()
            # A fit without a checkpoint starts over; with one, load_state_dict comes next.
            self._restored_batches = 0
        self._log_sizes()

    @override
    def train_dataloader(self) -> DataLoader[Batch]:
        batches = TrainingBatches(self._source.train_stream, self._train_order(), self._rank)
        return build_loader(batches, self.num_workers, start=self._trained_batches)

    @override
    def val_dataloader(self) -> list[DataLoader[Batch]]:
        """One loader per set of :attr:`val_names`."""
        return [
            build_loader(self._val_batches(stream), self.num_workers) for stream in self._source.val_streams.values()
        ]

    def _val_batches(self, stream: TokenFile) -> ValidationBatches:
        size = self.val_batch_size or self.batch_size
        order = ValidationOrder(len(stream), self.context_length, size, self._ranks)
        return ValidationBatches(stream, order, self._rank)

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"batches": self._trained_batches(), **self._order_settings()}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._restored_batches = int(state_dict["batches"])
        changed = {
            name: f"{state_dict[name]} -> {now}"
            for name, now in self._order_settings().items()
            if name in state_dict and state_dict[name] != now
        }
        if changed:
            logger.warning("the data order differs from the checkpoint's, some text may come twice: %s", changed)

    # --- order and position ---

    @property
    def _sharding(self) -> Mapping[str, int]:
        # As for Lightning's own sampler: the data-parallel rank, which under tensor parallelism is not the global rank.
        arguments = self.trainer.distributed_sampler_kwargs if self.trainer is not None else None
        return arguments or {"num_replicas": 1, "rank": 0}

    @property
    def _ranks(self) -> int:
        return self._sharding["num_replicas"]

    @property
    def _rank(self) -> int:
        return self._sharding["rank"]

    def _order_settings(self) -> dict[str, int]:
        return {
            "seed": self.seed,
            "context_length": self.context_length,
            "batch_size": self.batch_size,
            "ranks": self._ranks,
            "train_tokens": self.train_tokens,
        }

    def _train_order(self) -> WindowOrder:
        try:
            return WindowOrder(self.train_tokens, self.context_length, self.batch_size, self._ranks, self.seed)
        except ValueError as error:
            corpora = ", ".join(str(part.corpus) for part in self._source.train_parts)
            raise ValueError(f"training text of {corpora}: {error}") from None

    def _trained_batches(self) -> int:
        # Lightning's own count ignores loaders that prefetch, callbacks that peek at a batch, and a batch that failed
        # half-way. Before the state of the loops is restored, ours is the larger one.
        if self.trainer is None:
            return self._restored_batches
        progress = self.trainer.fit_loop.epoch_loop.batch_progress
        return max(self._restored_batches, int(progress.total.processed))  # type: ignore[attr-defined]

    @rank_zero_only
    def _log_sizes(self) -> None:
        if self._is_logged:
            return
        self._is_logged = True
        sizes = {"train": self.train_tokens, **{f"val/{name}": len(s) for name, s in self._source.val_streams.items()}}
        logger.info("text %s: tokens %s, vocabulary of %d", self.fingerprint[:12], sizes, self.vocab_size)
