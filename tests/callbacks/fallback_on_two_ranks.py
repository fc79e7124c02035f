"""A fault on rank 1 of two gloo processes: ``python -m tests.callbacks.fallback_on_two_ranks KIND FOLDER FAULT ...``.

KIND is ddp, fsdp2 or fsdp1. Each rank leaves what it saw in ``FOLDER/FAULT/rank_0.pt`` and ``rank_1.pt``.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
from torch.utils.data import DataLoader, DistributedSampler

from lightning_norms.callbacks.lr_fallback import FallbackExhaustedError, LRFallback
from tests.stand_ins import Block, Decoder, Module, loader, seeded, trainer

STEPS = 32
SAVED = {"late_resume": (22, 24, 28), "resume": (22,), "stall_after_resume": (10,)}
"""Optimizer steps from whose checkpoints these faults are resumed: in the middle of an incident, after it, before."""

FLAKY = {"flaky nan": float("nan"), "flaky inf": float("inf"), "flaky spike": 1e6}


class Faulty(Module):
    """Something goes wrong with the loss of rank 1 alone or, for a stall, with the gradients of the first block."""

    fault = ""

    def training_step(self, batch, batch_idx):
        loss, step = super().training_step(batch, batch_idx), self.trainer.global_step
        if self.global_rank == 0:
            return loss
        if (self.fault == "nan" and step == 5) or (self.fault == "hopeless" and step >= 5):
            return loss * float("nan")
        if (self.fault == "spike" and step == 20) or (self.fault in ("high", "resume", "late_resume") and step >= 20):
            return loss * 20
        return loss

    def on_after_backward(self):
        if self.fault in FLAKY and self.trainer.global_step == 20 and self.global_rank == 1:
            self.decoder.head.weight.grad[0, 0] = FLAKY[self.fault]  # behind the reduction: rank 0 has the sound one
        start = {"stall": 5, "stall_after_resume": 13}.get(self.fault, STEPS)
        if start <= self.trainer.global_step < start + 4:
            for parameter in self.decoder.blocks[0].parameters():
                if parameter.grad is not None:
                    parameter.grad *= 1e-4

    def train_dataloader(self):
        data = loader(batches=4).dataset
        sampler = DistributedSampler(data, num_replicas=2, rank=self.global_rank, shuffle=False)
        return DataLoader(data, batch_size=2, sampler=sampler)  # two batches an epoch on each rank


class Sharded(Faulty):
    def configure_model(self):
        from torch.distributed.fsdp import fully_shard

        for block in self.decoder.blocks:
            fully_shard(block, mesh=self.device_mesh["data_parallel"])
        fully_shard(self.decoder, mesh=self.device_mesh["data_parallel"])


class CPUFSDP(FSDPStrategy):
    """Lightning refuses exactly ``FSDPStrategy`` without a GPU; torch can do it."""

    def _setup_model(self, model):
        from torch.distributed.fsdp import FullyShardedDataParallel

        return FullyShardedDataParallel(model, device_id=torch.device("cpu"), **self.kwargs)


class Watch(Callback):
    """Whole weights after every step, and where a step did not lead to new ones; all ranks must be here for that."""

    def on_train_start(self, trainer, module):
        self.history, self.returned = [whole(trainer, module)], {}

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        now = whole(trainer, module)
        earlier = [steps for steps, weights in enumerate(self.history) if same(now, weights)]
        if earlier:
            self.returned[trainer.global_step - 1] = earlier[0]
        self.history.append(now)


def whole(trainer, module):
    if isinstance(trainer.strategy, FSDPStrategy):
        from torch.distributed.fsdp import FullyShardedDataParallel

        with FullyShardedDataParallel.summon_full_params(trainer.strategy.model, writeback=False):
            return [each.detach().clone() for each in module.parameters()]
    weights = [each.detach() for each in module.parameters()]
    return [each.full_tensor() if hasattr(each, "full_tensor") else each.clone() for each in weights]


def same(one, other):
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def strategy(kind):
    if kind == "fsdp2":
        return ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
    if kind == "fsdp1":
        return CPUFSDP(auto_wrap_policy={Block}, use_orig_params=True, state_dict_type="sharded")
    return "ddp"


def fit(kind, fault, folder, *callbacks, checkpoint=None):
    """One run, and what this rank can say about it."""
    module = seeded(lambda: (Sharded if kind == "fsdp2" else Faulty)(Decoder()))
    module.fault = fault
    fallback, watch, error = LRFallback(), Watch(), ""
    options = {"devices": 2, "strategy": strategy(kind), "use_distributed_sampler": False}
    options |= {"max_steps": 40 if fault == "hopeless" else STEPS, "enable_checkpointing": bool(callbacks)}
    try:
        trainer(folder, fallback, *callbacks, watch, **options).fit(module, ckpt_path=checkpoint)
    except FallbackExhaustedError as exhausted:
        error = str(exhausted)
    return {
        "events": [(event.step, event.cause, event.action) for event in fallback.events],
        "evidence": [event.evidence for event in fallback.events],
        "factor": fallback.rescue.ladder.factor,
        "returned": watch.returned,
        "weights": watch.history[-1],
        "error": error,
    }


def main(kind, folder, faults):
    for fault in faults:
        steps = SAVED.get(fault, ())
        often = ModelCheckpoint(folder / fault / "saved", "{step}", every_n_train_steps=2, save_top_k=-1)
        seen = fit(kind, fault, folder / fault, *([often] if steps else []))
        seen["resumed"] = {
            step: fit(kind, fault, folder / fault / "again", checkpoint=folder / fault / "saved" / f"step={step}.ckpt")
            for step in steps
        }
        torch.save(seen, folder / fault / f"rank_{torch.distributed.get_rank()}.pt")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3:])
