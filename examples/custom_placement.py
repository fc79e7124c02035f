"""A placement of your own, in a file of your own: one class, and YAML knows it by its path.

    python examples/custom_placement.py

What you see: three blocks of `x + f(N x) / 2` train for 60 steps; the checkpoint, loaded again, has the same placement
and the same loss. On the command line: `--model.decoder.placement=custom_placement.HalfBranch` (the folder of this file
must be on PYTHONPATH).
"""

from dataclasses import dataclass

import torch
from lightning.pytorch import Trainer, seed_everything
from torch import nn
from torch.utils.data import DataLoader

from lightning_norms import DecoderConfig, DecoderModule
from lightning_norms.norms import Norm
from lightning_norms.placements import Placement, Residual, Site


@dataclass(frozen=True)
class HalfBranch(Placement):
    """``x + share f(N(x))``.

    Args:
        share: constant on the branch.
    """

    equation = "x + share f(N x)"
    trade_off = "smaller branches; the embedding keeps a larger share"
    final_norm = True

    share: float = 0.5

    def wrap(self, site: Site, norm: Norm) -> nn.Module:
        """Pre-norm, and less of the branch."""
        return Residual(before=norm(site.width), scale=self.share)


def counting(windows: int) -> DataLoader:
    """Tokens that count upwards from a random start."""
    starts = torch.randint(0, 32, (windows, 1))
    rows = (starts + torch.arange(17)) % 32
    return DataLoader([{"inputs": row[:-1], "targets": row[1:]} for row in rows], batch_size=16)


def main() -> None:
    """Train, save, load."""
    seed_everything(0)
    config = DecoderConfig(vocab_size=32, d_model=32, n_layers=3, context_length=16, placement=HalfBranch(share=0.5))
    module = DecoderModule(config, learning_rate=3e-3)
    trainer = Trainer(
        max_steps=60, logger=False, enable_checkpointing=False, enable_progress_bar=False, accelerator="cpu"
    )
    trainer.fit(module, counting(1024), counting(16))
    trainer.save_checkpoint("half_branch.ckpt")
    again = DecoderModule.load_from_checkpoint("half_branch.ckpt")
    batch = next(iter(counting(16)))
    with torch.no_grad():
        losses = [
            nn.functional.cross_entropy(m(batch["inputs"]).flatten(0, 1), batch["targets"].flatten())
            for m in (module, again)
        ]
    print(f"placement in the checkpoint: {again.config.placement}")
    print(f"loss after 60 steps: {losses[0]:.3f}, loaded again: {losses[1]:.3f} (ln 32 = 3.466 is a guess)")


if __name__ == "__main__":
    main()
