"""Somebody's project, alive: existing_project_before.py with two lines changed, both marked.

    python examples/existing_project_after.py     about 20 seconds

Prints a loss far below 1, and before that where the gradient went at every depth.
"""

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import nn
from torch.utils.data import DataLoader

from lightning_norms import DepthMonitor, LinearWarmup, ResidualRescale, Warmup  # 1: the import


class Encoder(LightningModule):
    def __init__(self, layers: int = 18, width: int = 32, symbols: int = 32, length: int = 16) -> None:
        super().__init__()
        self.embedding = nn.Embedding(symbols, width)
        self.position = nn.Parameter(0.02 * torch.randn(length, width))
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True) for _ in range(layers)
        )
        for parameter in self.layers.parameters():
            if parameter.ndim > 1:
                nn.init.xavier_uniform_(parameter)
        self.head = nn.Linear(width, symbols)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(length))

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        x = self.embedding(batch[:, :-1]) + self.position
        for layer in self.layers:
            x = layer(x, src_mask=self.mask, is_causal=True)
        loss = nn.functional.cross_entropy(self.head(x).flatten(0, 1), batch[:, 1:].flatten())
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=3e-3)


def sequences(count: int = 1600, symbols: int = 32, length: int = 16) -> torch.Tensor:
    columns = [torch.randint(0, symbols, (count,))]
    for _ in range(length):
        columns.append((5 * columns[-1] + 3) % symbols)
    return torch.stack(columns, dim=1)


def main() -> None:
    seed_everything(0)
    data = DataLoader(sequences(), batch_size=8)
    quiet = {"logger": False, "enable_checkpointing": False}
    ours = [Warmup(LinearWarmup(60)), ResidualRescale(), DepthMonitor()]  # 2: callbacks
    trainer = Trainer(max_epochs=1, accelerator="cpu", devices=1, callbacks=ours, **quiet)
    trainer.fit(Encoder(), data)
    print(f"loss after {trainer.global_step} steps: {trainer.callback_metrics['loss']:.3f}")


if __name__ == "__main__":
    main()
