"""Small modules that stand in for a user's: a decoder that names its writers, and a LightningModule around any net."""

from __future__ import annotations

import lightning.pytorch.callbacks
import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

VOCABULARY = 11


class Attention(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.query, self.key, self.value, self.writer = (nn.Linear(width, width) for _ in range(4))
        self.value_path = (self.value, self.writer)

    def forward(self, x):
        attended = nn.functional.scaled_dot_product_attention(self.query(x), self.key(x), self.value(x), is_causal=True)
        return self.writer(attended)


class FeedForward(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.writer = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.value_path = (self.up, self.writer)

    def forward(self, x):
        return self.writer(torch.relu(self.up(x)))


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.feed_forward = Attention(width), FeedForward(width)

    def forward(self, x):
        x = x + self.attention(self.norm_1(x))
        return x + self.feed_forward(self.norm_2(x))


class Decoder(nn.Module):
    """Takes token numbers [batch, time], gives logits [batch, time, vocabulary]."""

    def __init__(self, layers=3, width=8):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.exit = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.exit(x))


class Module(LightningModule):
    """Next-token training of ``decoder``; ``losses`` are the undivided training losses."""

    def __init__(self, decoder=None, learning_rate=0.01, optimizer=torch.optim.AdamW, **options):
        super().__init__()
        self.decoder = Decoder() if decoder is None else decoder
        self.make_optimizer = lambda parameters: optimizer(parameters, lr=learning_rate, **options)
        self.losses = []

    def training_step(self, batch, batch_idx):
        logits = self.decoder(batch[0])
        logits = getattr(logits, "logits", logits)
        loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch[0][:, 1:].flatten())
        self.losses.append(loss.detach())
        return loss

    def configure_optimizers(self):
        return self.make_optimizer(self.parameters())


class Evaluated(Module):
    """A module that validates, tests and predicts, too."""

    def validation_step(self, batch, batch_idx):
        return self.decoder(batch[0])

    test_step = predict_step = validation_step


def loader(batches=8, batch_size=2, time=6):
    """The same random tokens each time, in the same order."""
    tokens = torch.randint(VOCABULARY, (batches * batch_size, time), generator=torch.Generator().manual_seed(0))
    return DataLoader(TensorDataset(tokens), batch_size=batch_size)


def trainer(folder, *callbacks, **options):
    """A quiet one-process CPU trainer."""
    defaults = {
        "accelerator": "cpu",
        "devices": 1,
        "max_epochs": -1,
        "max_steps": 4,
        "logger": False,
        "log_every_n_steps": 1,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "default_root_dir": folder,
    }
    return Trainer(callbacks=list(callbacks), **(defaults | options))


def lightning_callback(name):
    """A class of Lightning's callbacks; the test is skipped where Lightning is too old to have it."""
    if not hasattr(lightning.pytorch.callbacks, name):
        pytest.skip(f"this Lightning has no {name}")
    return getattr(lightning.pytorch.callbacks, name)


def seeded(build, seed=0):
    """``build()`` with its random numbers pinned, and the global generator left alone."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return build()
