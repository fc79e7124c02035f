"""Pretrain Hugging Face's GPT-2 on text that ships with Python, in a LightningModule of your own.

    python examples/hf_gpt2_pretraining.py     about a minute; needs `pip install transformers`

What you see: GPT-2's init already has 1/sqrt(2L) on its residual writers, so ResidualRescale says so and changes
nothing; bits per byte fall to about 3.2 (a uniform guess is 8), and the table shows the gradient norm of all 12
blocks. Nothing is downloaded: the model starts from its config, and the text is Python's own library.
"""

import argparse

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from transformers import GPT2Config, GPT2LMHeadModel

from lightning_norms import DepthMonitor, LinearWarmup, LRFallback, ResidualRescale, TextDataModule, Warmup


class GPT2(LightningModule):
    def __init__(self, vocab_size: int, context_length: int = 64, layers: int = 12, width: int = 64) -> None:
        super().__init__()
        config = GPT2Config(
            vocab_size=vocab_size, n_positions=context_length, n_embd=width, n_layer=layers, n_head=4, use_cache=False
        )
        config.bos_token_id = config.eos_token_id = 0
        self.model = GPT2LMHeadModel(config)

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        logits = self.model(batch["inputs"]).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten())
        self.log("loss", loss.detach(), prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3, betas=(0.9, 0.98), weight_decay=0.1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--layers", type=int, default=12)
    chosen = parser.parse_args()
    seed_everything(0)
    data = TextDataModule(context_length=64, batch_size=8)  # bytes: nats per token are nats per byte
    data.prepare_data()
    data.setup("fit")
    module = GPT2(data.vocab_size, layers=chosen.layers)
    ours = [Warmup(LinearWarmup(60)), ResidualRescale(), DepthMonitor(every_n_steps=10), LRFallback()]
    trainer = Trainer(
        max_steps=chosen.steps,
        max_epochs=-1,
        limit_val_batches=0,
        accelerator="cpu",
        devices=1,
        callbacks=ours,
        logger=False,
        enable_checkpointing=False,
    )
    trainer.fit(module, data)
    bits = trainer.callback_metrics["loss"] / torch.log(torch.tensor(2.0))
    print(f"bits per byte of the last batch, step {trainer.global_step}: {bits:.2f}")


if __name__ == "__main__":
    main()
