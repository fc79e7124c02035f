"""Sharded weights come back on both of two gloo processes: ``python -m tests.rescue.snapshots_on_two_ranks FOLDER``."""

from __future__ import annotations

import copy
import sys
from pathlib import Path

import torch
from lightning.pytorch import Callback
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.utils.data import DataLoader, DistributedSampler

from lightning_norms.rescue.snapshot import Snapshot
from tests.stand_ins import Decoder, Module, loader, seeded, trainer


class Sharded(Module):
    def configure_model(self):
        from torch.distributed.fsdp import fully_shard

        for block in self.decoder.blocks:
            fully_shard(block, mesh=self.device_mesh["data_parallel"])
        fully_shard(self.decoder, mesh=self.device_mesh["data_parallel"])

    def validation_step(self, batch, batch_idx):
        return self.decoder(batch[0])

    def train_dataloader(self):
        data = loader(batches=16).dataset
        sampler = DistributedSampler(data, num_replicas=2, rank=self.global_rank, shuffle=False)
        return DataLoader(data, batch_size=2, sampler=sampler)

    val_dataloader = train_dataloader


def everything(trainer, module):
    """All local shards of the parameters that the optimizer knows, and of its state."""
    optimizer = trainer.optimizers[0]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    tensors = [
        *parameters,
        *(value for parameter in parameters for value in optimizer.state.get(parameter, {}).values()),
    ]
    return copy.deepcopy([getattr(tensor.detach(), "_local_tensor", tensor.detach()) for tensor in tensors])


def equal(one, other):
    return len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


class Check(Callback):
    """The start, right after a validation that leaves FSDP2's root unsharded, and a later step, inside a closure."""

    def on_train_start(self, trainer, module):
        self.first = everything(trainer, module)
        self.start = Snapshot.take(module, trainer.optimizers)
        numbers = sum(parameter.to_local().numel() for parameter in module.parameters())
        assert self.start.bytes == 4 * numbers, "the start holds this rank's shards only"

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if batch_idx == 1:
            self.later = Snapshot.take(module, trainer.optimizers, step=2)
            self.there = everything(trainer, module)
        if batch_idx == 2:
            assert not equal(everything(trainer, module), self.there)
        if batch_idx == 3:
            assert equal(everything(trainer, module), self.there)
            trainer.optimizers[0].state.clear()
            self.later.restore(module, trainer.optimizers)
            assert equal(everything(trainer, module), self.there)
            whole = next(iter(trainer.optimizers[0].state.values()))["exp_avg"].full_tensor()
            assert whole.shape == trainer.optimizers[0].param_groups[0]["params"][0].shape
        if batch_idx == 5:
            assert self.start.restore(module, trainer.optimizers) == ()
            assert equal(everything(trainer, module), self.first)
            self.loss = float(module.losses[0])
            with torch.no_grad():
                module.training_step(next(iter(module.train_dataloader())), 0)
            assert float(module.losses[-1]) == self.loss, "the next forward must see the restored weights"

    def on_before_optimizer_step(self, trainer, module, optimizer):
        if trainer.global_step == 3:
            self.later.restore(module, trainer.optimizers)


if __name__ == "__main__":
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    strategy = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
    module = seeded(lambda: Sharded(Decoder(layers=2)))
    options = {"devices": 2, "strategy": strategy, "use_distributed_sampler": False, "num_sanity_val_steps": 2}
    trainer(folder, Check(), max_steps=6, **options).fit(module)
    (folder / f"held_{torch.distributed.get_rank()}").touch()
