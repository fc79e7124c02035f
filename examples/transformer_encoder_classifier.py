"""torch's own nn.TransformerEncoder, 24 post-norm layers deep, as a classifier: which symbol comes most often?

    python examples/transformer_encoder_classifier.py             about a minute
    python examples/transformer_encoder_classifier.py --plain     the same without our callbacks

What you see: accuracy on fresh sequences of 0.81, 0.83, 0.85 (seeds 0, 1, 2); with --plain 0.15, 0.14, 0.14, where
guessing is right one time in eight. No spike, no NaN. nn.TransformerEncoder copies one layer, so that all layers
start with the same numbers. examples/cli_with_your_module.yaml trains the same module from YAML.
"""

import argparse

import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer, seed_everything
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_norms import DepthMonitor, LinearWarmup, LRFallback, ResidualRescale, Warmup


class Counts(LightningDataModule):
    """Sequences of symbols; the label is the symbol that comes most often."""

    def __init__(self, symbols: int = 8, length: int = 24, batch_size: int = 32, batches: int = 300) -> None:
        super().__init__()
        self.symbols, self.length, self.batch_size, self.batches = symbols, length, batch_size, batches

    def sequences(self, batches: int, seed: int) -> DataLoader:
        generator = torch.Generator().manual_seed(seed)
        weights = torch.rand(batches * self.batch_size, self.symbols, generator=generator) ** 3
        tokens = torch.multinomial(weights, self.length, replacement=True, generator=generator)
        labels = nn.functional.one_hot(tokens, self.symbols).sum(1).argmax(1)
        return DataLoader(TensorDataset(tokens, labels), batch_size=self.batch_size)

    def train_dataloader(self) -> DataLoader:
        return self.sequences(self.batches, seed=0)

    def val_dataloader(self) -> DataLoader:
        return self.sequences(10, seed=1)


class Classifier(LightningModule):
    def __init__(self, layers: int = 24, width: int = 32, symbols: int = 8, learning_rate: float = 3e-3) -> None:
        super().__init__()
        self.embedding = nn.Embedding(symbols, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, symbols)
        self.learning_rate = learning_rate

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(self.embedding(tokens)).mean(1))

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        loss = nn.functional.cross_entropy(self(batch[0]), batch[1])
        self.log("loss", loss.detach(), prog_bar=True)
        return loss

    def validation_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        self.log("accuracy", (self(batch[0]).argmax(1) == batch[1]).float().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.learning_rate)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--plain", action="store_true", help="without our callbacks")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--learning_rate", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    seed_everything(chosen.seed)
    ours = [Warmup(LinearWarmup(60)), ResidualRescale(), DepthMonitor(every_n_steps=10), LRFallback()]
    trainer = Trainer(
        max_steps=chosen.steps,
        max_epochs=-1,
        accelerator="cpu",
        devices=1,
        callbacks=[] if chosen.plain else ours,
        logger=False,
        enable_checkpointing=False,
    )
    module, data = Classifier(chosen.layers, learning_rate=chosen.learning_rate), Counts()
    trainer.fit(module, data)
    (numbers,) = trainer.validate(module, data, verbose=False)
    print(f"accuracy after {trainer.global_step} steps: {numbers['accuracy']:.3f}")


if __name__ == "__main__":
    main()
