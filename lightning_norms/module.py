"""The LightningModule around the decoder: loss, metrics, parameter groups. Everything else is a callback."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torchmetrics import MeanMetric
from typing_extensions import override

from lightning_norms.data.tokenizing import BOUNDARY, Tokenizer
from lightning_norms.data.tokenizing import from_plain as tokenizer_from_plain
from lightning_norms.metrics import (
    TOKENS_PER_SECOND,
    TRAIN_LOSS,
    VAL_BITS_PER_BYTE,
    VAL_LOSS,
    VAL_PERPLEXITY,
    BitsPerByte,
)
from lightning_norms.model.decoder import Decoder, DecoderConfig
from lightning_norms.model.generation import Sampling, generate
from lightning_norms.model.serialization import from_plain, to_plain
from lightning_norms.model.sharding import check_is_real, shard

IGNORED = -100
"""Target value of positions that are not scored."""


class _ValidationSet:
    """Metrics of one validation set: no child module of the model, so that they are not part of its weights."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.loss = MeanMetric()
        self.bits_per_byte = BitsPerByte()


class DecoderModule(LightningModule):
    """A decoder that learns to predict the next token of ``{"inputs": [batch, time], "targets": [batch, time]}``.

    AdamW with weight decay on matrices only; warmup, rescale and monitors are callbacks.

    Args:
        decoder: shape of the network, or the plain mapping that a checkpoint holds. Without a ``vocab_size`` the
            network is built when the data is known.
        learning_rate: AdamW's learning rate before any scheduler or warmup.
        betas: AdamW's decay rates of both moments.
        eps: AdamW's epsilon.
        weight_decay: AdamW's weight decay on tensors with two or more axes; gains and biases have none.
        scheduler: torch scheduler that is stepped every optimizer step.
        sampling: how ``predict`` draws tokens.
        max_new_tokens: largest number of tokens that ``predict`` adds to a prompt.

    Raises:
        ValueError: if a number is out of its range; the message names it.

    Example:
        >>> module = DecoderModule(DecoderConfig(vocab_size=256, n_layers=2))
        >>> module(torch.zeros(1, 5, dtype=torch.long)).shape
        torch.Size([1, 5, 256])
    """

    decoder: Decoder

    def __init__(
        self,
        decoder: DecoderConfig,
        learning_rate: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.98),
        eps: float = 1e-8,
        weight_decay: float = 0.1,
        scheduler: Callable[[Optimizer], LRScheduler] | None = None,
        sampling: Sampling | None = None,
        max_new_tokens: int = 64,
    ) -> None:
        super().__init__()
        self.config: DecoderConfig = from_plain(decoder) if isinstance(decoder, Mapping) else decoder
        self.sampling: Sampling = from_plain(sampling) if isinstance(sampling, Mapping) else sampling or Sampling()
        self.learning_rate, self.eps, self.weight_decay = learning_rate, eps, weight_decay
        self.betas: tuple[float, float] = (betas[0], betas[1])
        self.scheduler, self.max_new_tokens = scheduler, max_new_tokens
        self.tokenizer: Tokenizer | None = None
        self.residual_rescaled = False
        self._check_numbers()
        self._save_plain_hyper_parameters()
        self._validation: list[_ValidationSet] = []
        self._token_bytes: Tensor | None = None
        self._clock: tuple[int, float] = (0, 0.0)
        if self.config.vocab_size is not None:
            self.decoder = Decoder(self.config)

    def _check_numbers(self) -> None:
        limits = {"learning_rate": math.inf, "eps": math.inf, "weight_decay": math.inf, "betas": 1.0}
        for key, limit in limits.items():
            value = getattr(self, key)
            for number in value if key == "betas" else [value]:
                if not (isinstance(number, (int, float)) and 0 <= number < limit):
                    raise ValueError(f"{key} is {value!r}, but it must be a number with 0 <= {key} < {limit:g}.")

    def _save_plain_hyper_parameters(self) -> None:
        # Plain data, not objects: a checkpoint must load with weights_only=True. The scheduler is a function, so it
        # stays with the configuration of the run.
        keys = ("learning_rate", "betas", "eps", "weight_decay", "max_new_tokens")
        numbers = {key: to_plain(getattr(self, key)) for key in keys}
        self.save_hyperparameters({"decoder": to_plain(self.config), "sampling": to_plain(self.sampling), **numbers})

    # -- built when the data is known ----------------------------------------------------------------------------

    @override
    def configure_model(self) -> None:
        """Build the network if the data has to give its vocabulary's size, check that both fit, and shard (FSDP2)."""
        data = self._data()
        if not hasattr(self, "decoder"):
            self.config = replace(self.config, vocab_size=getattr(data, "vocab_size", None))
            self.decoder = Decoder(self.config)
            self.hparams["decoder"] = to_plain(self.config)
        for key in ("vocab_size", "context_length"):
            ours, theirs = getattr(self.config, key), getattr(data, key, None)
            if theirs is not None and theirs > ours:
                raise ValueError(
                    f"the data's {key} is {theirs}, but the model's is {ours}: give model.decoder.{key} and "
                    f"data.{key} the same value."
                )
        check_is_real(self.decoder)
        if self.device_mesh is not None:
            shard(self.decoder, self.device_mesh)

    def _data(self) -> Any:
        return getattr(self._trainer, "datamodule", None) if self._trainer is not None else None

    @override
    def setup(self, stage: str) -> None:
        data = self._data()
        self.tokenizer = getattr(data, "tokenizer", self.tokenizer)
        self._token_bytes = getattr(data, "token_bytes", None)
        self._validation = [_ValidationSet(name) for name in getattr(data, "val_names", [])]

    def kv_cache_bytes(self, positions: int, bytes_per_number: int) -> int:
        """Count the bytes of keys and values that generation keeps for one text of ``positions`` tokens."""
        config = self.config
        head_width = config.d_model // config.n_heads
        return 2 * config.n_layers * config.kv_heads * head_width * positions * bytes_per_number

    # -- training ------------------------------------------------------------------------------------------------

    def forward(self, inputs: Tensor) -> Tensor:
        """Compute logits ``[batch, time, vocab_size]`` for tokens ``[batch, time]``."""
        logits: Tensor = self.decoder(inputs)
        return logits

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """Compute the mean cross-entropy in nats per token, in float32."""
        logits = self.decoder(batch["inputs"]).flatten(0, 1).float()
        loss = F.cross_entropy(logits, batch["targets"].flatten(), ignore_index=IGNORED)
        self.log(TRAIN_LOSS.name, loss.detach(), prog_bar=True)
        return loss

    def on_fit_start(self) -> None:
        """Print the loss of a model that knows only token frequencies: a dead run stays exactly there."""
        entropy = getattr(self._data(), "unigram_entropy", None)
        if entropy is not None:
            rank_zero_info(f"unigram entropy of the training data: {entropy:.4f} nats/token (a dead run sits here)")

    def on_train_start(self) -> None:
        """Start the clock of tokens per second; refuse a placement whose steps nothing counts."""
        waits = any(hasattr(module, "after_step") for module in self.decoder.modules())
        callbacks: list[Any] = self.trainer.callbacks  # type: ignore[attr-defined]  # set by its callback connector
        if waits and not any(getattr(callback, "calls_after_step", False) for callback in callbacks):
            name = type(self.config.placement).__name__
            raise ValueError(f"{name} changes with every step: give the trainer callbacks=[AfterStep()].")
        self._clock = (0, time.perf_counter())

    def on_train_batch_end(self, outputs: Any, batch: dict[str, Tensor], batch_idx: int) -> None:
        """Log tokens per second over all ranks, at the logging interval."""
        count = self._clock[0] + batch["inputs"].numel() * self.trainer.world_size
        self._clock = (count, self._clock[1])
        every = self.trainer.log_every_n_steps  # type: ignore[attr-defined]  # set by the trainer's logger connector
        if every and self.trainer.global_step % every == 0:
            now = time.perf_counter()
            self.log(TOKENS_PER_SECOND.name, count / (now - self._clock[1]))
            self._clock = (0, now)

    def configure_optimizers(self) -> Any:
        """Build AdamW with two groups, matrices with weight decay and the rest without, and the scheduler, if any."""
        parameters = [p for p in self.parameters() if p.requires_grad]
        groups = [
            {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": self.weight_decay},
            {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
        ]
        # The fused kernel unscales gradients by itself, which Lightning refuses to combine with clipping in fp16.
        fused = self._trainer is None or self.trainer.precision != "16-mixed"
        optimizer = torch.optim.AdamW(groups, lr=self.learning_rate, betas=self.betas, eps=self.eps, fused=fused)
        if self.scheduler is None:
            return optimizer
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": self.scheduler(optimizer), "interval": "step"}}

    # -- validation ----------------------------------------------------------------------------------------------

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int, dataloader_idx: int = 0) -> None:
        """Sum nats, tokens and bytes; the mean is taken once, over the whole set."""
        targets = batch["targets"].flatten()
        logits = self.decoder(batch["inputs"]).flatten(0, 1).float()
        nats = F.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="sum")
        scored = targets[targets != IGNORED]
        while len(self._validation) <= dataloader_idx:  # loaders without a data module have no names
            self._validation.append(_ValidationSet(str(len(self._validation))))
        metrics = self._validation[dataloader_idx]
        if scored.numel():
            metrics.loss.to(self.device).update(nats / scored.numel(), weight=scored.numel())
        if self._token_bytes is not None:
            self._token_bytes = self._token_bytes.to(self.device)
            metrics.bits_per_byte.to(self.device).update(nats, self._token_bytes[scored].sum())

    def on_validation_epoch_end(self) -> None:
        """Log loss, perplexity and bits per byte of each validation set."""
        for metrics in self._validation:
            if metrics.loss.update_called:
                loss = metrics.loss.compute()
                self.log_dict(
                    {VAL_LOSS.of(metrics.name): loss, VAL_PERPLEXITY.of(metrics.name): loss.exp()}, sync_dist=True
                )
            if metrics.bits_per_byte.update_called:
                value = metrics.bits_per_byte.compute().float()
                self.log(VAL_BITS_PER_BYTE.of(metrics.name), value, prog_bar=True, sync_dist=True)
            metrics.loss.reset()
            metrics.bits_per_byte.reset()

    # -- text and checkpoints --------------------------------------------------------------------------------------

    def predict_step(self, batch: list[str], batch_idx: int, dataloader_idx: int = 0) -> list[str]:
        """Continue each prompt."""
        return [self.continue_text(prompt) for prompt in batch]

    @torch.no_grad()
    def continue_text(self, prompt: str, generator: torch.Generator | None = None) -> str:
        """Return ``prompt`` with the model's continuation.

        An empty prompt starts a document. A prompt that leaves no room in the context loses its beginning.

        Raises:
            ValueError: if there is no tokenizer (it comes with the data module, and is kept in checkpoints).
        """
        if self.tokenizer is None:
            raise ValueError("no tokenizer is known: fit with a TextDataModule, or load a checkpoint of such a run.")
        room = max(1, self.config.context_length - self.max_new_tokens)
        ids = [BOUNDARY, *self.tokenizer.encode(prompt)][-room:]
        start = torch.tensor([ids], device=self.device)
        out = generate(self.decoder, start, self.max_new_tokens, self.sampling, generator)
        return prompt + self.tokenizer.decode(out[0, len(ids) :].tolist())

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add what belongs to the weights: the tokenizer, and whether the residual writers were rescaled."""
        checkpoint["lightning_norms"] = {
            "tokenizer": None if self.tokenizer is None else self.tokenizer.to_plain(),
            "residual_rescaled": self.residual_rescaled,
        }

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Restore the tokenizer and whether the residual writers were rescaled."""
        ours = checkpoint.get("lightning_norms", {})
        self.residual_rescaled = ours.get("residual_rescaled", False)
        if self.tokenizer is None and ours.get("tokenizer"):
            self.tokenizer = tokenizer_from_plain(ours["tokenizer"])
