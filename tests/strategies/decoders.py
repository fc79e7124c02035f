"""DecoderModule, and the meta device: ``python -m tests.strategies.decoders KIND FOLDER``."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from lightning.pytorch import Callback, seed_everything
from lightning.pytorch.strategies import ModelParallelStrategy

from lightning_norms.anatomy.sharding import reshard
from lightning_norms.callbacks.depth_monitor import DepthMonitor
from lightning_norms.callbacks.residual_rescale import ResidualRescale
from lightning_norms.data.text import TextDataModule
from lightning_norms.model.decoder import DecoderConfig
from lightning_norms.module import DecoderModule
from lightning_norms.placements import PostNorm
from tests.stand_ins import Decoder, Module, loader, seeded, trainer
from tests.strategies.runs import shard, whole

RANKS = {"single": 1, "ddp": 2, "fsdp2": 2}
STEPS, SAVED = 6, 3
CONFIG = {"d_model": 16, "n_heads": 2, "n_layers": 2, "context_length": 16}


def data(folder, ranks):
    """The same windows in every global batch, however many ranks share it."""
    (folder / "text.txt").write_text("The quick brown fox jumps over the lazy dog.\n" * 200)
    return TextDataModule(
        str(folder / "text.txt"), context_length=16, batch_size=8 // ranks, cache_dir=str(folder / "c")
    )


def module(**config):
    seed_everything(0, verbose=False)
    return DecoderModule(DecoderConfig(**(CONFIG | config), placement=PostNorm()), learning_rate=0.01)


class Weights(Callback):
    def on_train_start(self, trainer, module):
        self.start = dict(zip(names(module), whole(trainer, module), strict=True))

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if trainer.global_step == SAVED:
            trainer.save_checkpoint(self.path)

    def on_train_end(self, trainer, module):
        self.end = dict(zip(names(module), whole(trainer, module), strict=True))


def names(module):
    return [name for name, _ in module.named_parameters()]


def fit(kind, folder, checkpoint=None):
    """With a validation before and after, which FSDP2's root must survive; the weights, and a whole checkpoint."""
    monitor, weights = DepthMonitor(every_n_steps=1, table=False, picture=False), Weights()
    weights.path = folder / ("again.ckpt" if checkpoint else "run.ckpt")
    strategy = {"single": "auto", "ddp": "ddp"}.get(kind) or ModelParallelStrategy(
        2, 1, save_distributed_checkpoint=False
    )
    options = {"devices": RANKS[kind], "strategy": strategy, "num_sanity_val_steps": 1, "limit_val_batches": 1}
    options |= {"val_check_interval": 2, "check_val_every_n_epoch": None, "max_steps": STEPS, "gradient_clip_val": 1.0}
    run = trainer(folder, ResidualRescale(), monitor, weights, **options)
    learner = module()
    run.fit(learner, data(folder, RANKS[kind]), ckpt_path=checkpoint)
    losses = {key: float(value) for key, value in run.callback_metrics.items() if key.startswith("val/")}
    reshard(learner)  # the last validation has left the root whole
    sharded = sum(hasattr(parameter, "device_mesh") for parameter in learner.parameters())
    shares = {"start": weights.start, "end": weights.end, "sharded": sharded, "losses": losses}
    return shares | {"history": monitor.history.state_dict()}


class OnMeta(Module):
    """A foreign module as torchtitan's users write it."""

    def configure_model(self):
        with torch.device("meta"):
            self.decoder = Decoder(layers=2)
        shard(self.decoder, self.device_mesh["data_parallel"])


class InOnePiece(Module):
    """Everything in FSDP2's root, which a validation leaves unsharded."""

    def configure_model(self):
        from torch.distributed.fsdp import FSDPModule, fully_shard

        if not isinstance(self.decoder, FSDPModule):
            fully_shard(self.decoder, mesh=self.device_mesh["data_parallel"])

    def validation_step(self, batch, batch_idx):
        return self.decoder(batch[0])


class AtFitStart(Callback):
    """Stands before the rescale: what the strategy has filled in."""

    def on_fit_start(self, trainer, module):
        self.filled = dict(zip(names(module), whole(trainer, module), strict=True))

    def on_train_start(self, trainer, module):
        reshard(module)  # what the next forward will gather
        self.start = dict(zip(names(module), whole(trainer, module), strict=True))


def meta(folder):
    seed_everything(0, verbose=False)
    weights, options = AtFitStart(), {"devices": 2, "use_distributed_sampler": False, "max_steps": 1}
    learner = OnMeta()
    del learner.decoder
    trainer(folder, weights, ResidualRescale(), strategy=ModelParallelStrategy(2, 1), **options).fit(learner, loader())
    found = {"filled": weights.filled, "start": weights.start, "marked": learner.residual_rescaled}
    validated, weights = seeded(lambda: InOnePiece(Decoder(layers=2))), AtFitStart()
    options |= {"strategy": ModelParallelStrategy(2, 1)}
    trainer(folder, **options).validate(validated, loader(), verbose=False)
    options |= {"strategy": ModelParallelStrategy(2, 1)}
    trainer(folder, weights, ResidualRescale(), **options).fit(validated, loader())
    found["validated_before"] = {"filled": weights.filled, "start": weights.start}
    with torch.device("meta"):
        ours = module(vocab_size=256)
    for key, built, strategy in (
        ("refusal", ours, ModelParallelStrategy(2, 1)),
        ("tensor_parallel", module(), ModelParallelStrategy(1, 2)),
    ):
        try:
            trainer(folder, strategy=strategy, devices=2, max_steps=1).fit(built, data(folder, 2))
        except ValueError as error:
            found[key] = str(error)
    return found


def main(kind, folder):
    if kind == "meta":
        return meta(folder)
    run = fit(kind, folder)
    return run | {"resumed": fit(kind, folder, folder / "run.ckpt")}


if __name__ == "__main__":
    torch.set_num_threads(1)
    where = Path(sys.argv[2])
    results = main(sys.argv[1], where)
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    torch.save(results, where / f"rank_{rank}.pt")
