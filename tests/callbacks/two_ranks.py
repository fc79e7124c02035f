"""What must hold on both of two gloo processes: ``python -m tests.callbacks.two_ranks CHECK FOLDER``."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from lightning.pytorch import Callback
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.utils.data import DataLoader, DistributedSampler

from lightning_norms.anatomy.fused_qkv import Fused
from lightning_norms.anatomy.writers import Matrix, scale_
from lightning_norms.callbacks.depth_monitor import DepthMonitor
from lightning_norms.callbacks.residual_rescale import ResidualRescale
from lightning_norms.rescale_rules import DeepNormRescale
from tests.stand_ins import Decoder, Module, loader, seeded, trainer


class Sharded(Module):
    def configure_model(self):
        from torch.distributed.fsdp import fully_shard

        for block in self.decoder.blocks:
            fully_shard(block, mesh=self.device_mesh["data_parallel"])
        fully_shard(self.decoder, mesh=self.device_mesh["data_parallel"])

    def train_dataloader(self):
        data = loader(batches=16).dataset
        sampler = DistributedSampler(data, num_replicas=2, rank=self.global_rank, shuffle=False)
        return DataLoader(data, batch_size=2, sampler=sampler)


class WeightsAtStart(Callback):
    def on_train_start(self, trainer, pl_module):
        weights = [each.weight for each in writers(pl_module)]
        self.weights = [
            each.full_tensor() if hasattr(each, "full_tensor") else each.detach().clone() for each in weights
        ]


def writers(module):
    return [part for block in module.decoder.blocks for part in (block.attention.writer, block.feed_forward.writer)]


def build(kind=Module):
    return seeded(lambda: kind(Decoder(layers=2)))


def rescale_ddp(folder):
    """Once at the start, equal on both ranks, and not again on resume."""
    module, seen = build(), WeightsAtStart()
    before = [each.weight.detach().clone() for each in writers(module)]
    options = {"devices": 2, "strategy": "ddp"}
    run = trainer(folder, ResidualRescale(), seen, **options)
    run.fit(module, loader())
    assert all(torch.equal(now, old * 0.5) for now, old in zip(seen.weights, before, strict=True))
    run.save_checkpoint(folder / "run.ckpt")
    saved = torch.load(folder / "run.ckpt", weights_only=True)["state_dict"]
    again = WeightsAtStart()
    trainer(folder, ResidualRescale(), again, max_steps=6, **options).fit(
        build(), loader(), ckpt_path=folder / "run.ckpt"
    )
    names = [f"decoder.blocks.{i}.{part}.writer.weight" for i in range(2) for part in ("attention", "feed_forward")]
    assert all(torch.equal(now, saved[name]) for now, name in zip(again.weights, names, strict=True))


def fused_third(mesh):
    """Only the value third of a sharded qkv matrix changes, wherever the shards end."""
    from torch.distributed.tensor import Shard, distribute_tensor

    whole = torch.arange(96.0).reshape(12, 8)[:, :4].contiguous()
    for dimension in range(2):
        parameter = torch.nn.Parameter(distribute_tensor(whole, mesh, [Shard(dimension)]))
        matrix = Matrix("in_proj_weight", parameter, torch.nn.Linear(4, 12), None, "", 1, 1, False, Fused(1, (4, 4, 4)))
        scale_(matrix, 0.5)
        assert torch.equal(parameter.full_tensor(), torch.cat([whole[:8], whole[8:] * 0.5]))


def sharded(folder):
    """Norms, streams and rescale of sharded weights equal those of one process; every rank sees the same."""
    strategy = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
    monitor, seen = DepthMonitor(every_n_steps=1), WeightsAtStart()
    rescale = ResidualRescale(DeepNormRescale())
    module = build(Sharded)
    before = [each.weight.detach().clone() for each in writers(module)]
    options = {"devices": 2, "strategy": strategy, "use_distributed_sampler": False}
    trainer(folder, rescale, monitor, seen, **options).fit(module)
    assert all(torch.allclose(now, old * 0.5, atol=1e-7) for now, old in zip(seen.weights, before, strict=True))
    fused_third(module.device_mesh["data_parallel"])
    rank = torch.distributed.get_rank()
    torch.save((monitor.history.state_dict(), before), folder / f"rank_{rank}.pt")


if __name__ == "__main__":
    torch.set_num_threads(1)
    {"rescale_ddp": rescale_ddp, "sharded": sharded}[sys.argv[1]](Path(sys.argv[2]))
    print("held")
