"""The 18-layer toy that dies without a spike, with and without LRFallback, and healthy controls beside it.

    python benchmarks/stall_toy.py --seeds 8

The next symbol is a fixed function of the last, x -> (5x + 3) mod 32: ln 32 = 3.466 is guessing. Prints end losses and
what the fallback did, as a Markdown table; about six minutes on one core for eight seeds.
"""

from __future__ import annotations

import argparse
import logging
import tempfile
import warnings
from dataclasses import dataclass
from statistics import median

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_norms import LRFallback

SYMBOLS, LENGTH, WIDTH = 32, 16, 32


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    name: str
    layers: int = 18
    norm_first: bool = False
    xavier: bool = True
    learning_rate: float = 3e-3
    fallback: bool = True
    steps: int = 120


ROWS = (
    Row("post-norm 18, 3e-3, cold, unprotected", fallback=False, steps=300),
    Row("post-norm 18, 3e-3, cold, LRFallback", steps=300),
    Row("pre-norm 18, 3e-3, LRFallback", norm_first=True),
    Row("post-norm 6, default init, 1e-3, LRFallback", layers=6, xavier=False, learning_rate=1e-3),
    Row("post-norm 24, default init, 1e-3, LRFallback", layers=24, xavier=False, learning_rate=1e-3),
)


class Toy(LightningModule):
    """A stack of torch's own encoder layers over a next-symbol task."""

    def __init__(self, row: Row) -> None:
        super().__init__()
        self.row = row
        self.embedding = nn.Embedding(SYMBOLS, WIDTH)
        self.position = nn.Parameter(0.02 * torch.randn(LENGTH, WIDTH))
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=row.norm_first
            )
            for _ in range(row.layers)
        )  # fmt: skip
        for parameter in self.layers.parameters():
            if row.xavier and parameter.ndim > 1:
                nn.init.xavier_uniform_(parameter)
        self.norm = nn.LayerNorm(WIDTH) if row.norm_first else nn.Identity()
        self.head = nn.Linear(WIDTH, SYMBOLS)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(LENGTH))
        self.losses: list[float] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """Cross-entropy of the next symbol."""
        x = self.embedding(batch[:, :-1]) + self.position
        for layer in self.layers:
            x = layer(x, src_mask=self.mask, is_causal=True)
        loss = nn.functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1), batch[:, 1:].flatten())
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Adam, cold."""
        return torch.optim.Adam(self.parameters(), lr=self.row.learning_rate)


def sequences(count: int) -> Tensor:
    """Random starts, each followed by its own orbit: [count, LENGTH + 1]."""
    columns = [torch.randint(0, SYMBOLS, (count,))]
    for _ in range(LENGTH):
        columns.append((5 * columns[-1] + 3) % SYMBOLS)
    return torch.stack(columns, dim=1)


def run(row: Row, seed: int, folder: str) -> tuple[float, list[str]]:
    """End loss (mean of the last 10 steps) and the events, as ``action@step``."""
    seed_everything(seed, verbose=False)
    fallback = LRFallback()
    trainer = Trainer(
        max_epochs=1, accelerator="cpu", devices=1, logger=False, enable_checkpointing=False, default_root_dir=folder,
        enable_progress_bar=False, enable_model_summary=False, callbacks=[fallback] if row.fallback else [],
    )  # fmt: skip
    toy = Toy(row)
    trainer.fit(toy, DataLoader(sequences(8 * row.steps), batch_size=8))
    return sum(toy.losses[-10:]) / 10, [f"{event.cause}/{event.action}@{event.step}" for event in fallback.events]


def main() -> None:
    """Run every row by every seed, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=8)
    seeds = range(parser.parse_args().seeds)
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    print("| run | end loss, median (lowest to highest) | below 1.0 | events |\n|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for row in ROWS:
            results = [run(row, seed, folder) for seed in seeds]
            losses = sorted(loss for loss, _ in results)
            below = sum(loss < 1.0 for loss in losses)
            events = (
                ", ".join(" ".join(each) or "none" for _, each in results) if any(e for _, e in results) else "none"
            )
            spread = f"{median(losses):.3f} ({losses[0]:.3f} to {losses[-1]:.3f})"
            print(f"| {row.name} | {spread} | {below} of {len(losses)} | {events} |", flush=True)


if __name__ == "__main__":
    main()
