"""A fault on rank 1 of two gloo processes: ``python -m tests.callbacks.fallback_on_two_ranks KIND FOLDER [FAULT ...]``.

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
FAULTS = ("none", "nan", "spike", "high", "stall", "resume", "stall_after_resume", "hopeless")


class Faulty(Module):
    """Something goes wrong with the loss of rank 1 alone, or, for the stall, with the gradients of a block."""

    fault = "none"

    def training_step(self, batch, batch_idx):
        loss, step = super().training_step(batch, batch_idx), self.trainer.global_step
        if self.global_rank == 0:
            return loss
        if self.fault in ("nan", "hopeless") and (step == 5 or (step > 5 and self.fault == "hopeless")):
            return loss * float("nan")
        if (self.fault == "spike" and step == 20) or (self.fault in ("high", "resume") and step >= 20):
            return loss * 20
        return loss

    def on_after_backward(self):
        start = {"stall": 5, "stall_after_resume": 13}.get(self.fault, STEPS)
        if start <= self.trainer.global_step < start + 4:
            for parameter in self.trainer.optimizers[0].param_groups[0]["params"]:
                if id(parameter) in self.bottom and parameter.grad is not None:
                    parameter.grad *= 1e-4

    def on_train_start(self):
        self.bottom = {id(parameter) for parameter in self.decoder.blocks[0].parameters()}

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
    """Whole weights at the start and at the end, and what each step did; collectives, so every rank must be here."""

    def on_train_start(self, trainer, module):
        self.start, self.moved = whole(trainer, module), {}
        self.last = self.start

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        now = whole(trainer, module)
        self.moved[trainer.global_step - 1] = not same(now, self.last)
        self.last = now


def whole(trainer, module):
    if isinstance(trainer.strategy, FSDPStrategy):
        from torch.distributed.fsdp import FullyShardedDataParallel

        with FullyShardedDataParallel.summon_full_params(trainer.strategy.model, writeback=False):
            return [each.detach().clone() for each in module.parameters()]
    weights = [each.detach() for each in module.parameters()]
    return [each.full_tensor() if hasattr(each, "full_tensor") else each.clone() for each in weights]


def same(one, other):
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def options(kind):
    if kind == "fsdp2":
        strategy = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
    elif kind == "fsdp1":
        strategy = CPUFSDP(auto_wrap_policy={Block}, use_orig_params=True, state_dict_type="sharded")
    else:
        strategy = "ddp"
    return {"devices": 2, "strategy": strategy, "use_distributed_sampler": False}


def fit(kind, fault, folder, *callbacks, steps=STEPS, checkpoint=None):
    """One run; what this rank can say about it."""
    module = seeded(lambda: (Sharded if kind == "fsdp2" else Faulty)(Decoder()))
    module.fault = fault
    fallback, watch, error = LRFallback(), Watch(), ""
    extra = {"enable_checkpointing": bool(callbacks)}
    run = trainer(folder, fallback, *callbacks, watch, max_steps=steps, **options(kind), **extra)
    try:
        run.fit(module, ckpt_path=checkpoint)
    except FallbackExhaustedError as exhausted:
        error = str(exhausted)
    return {
        "events": [(event.step, event.cause, event.action) for event in fallback.events],
        "evidence": [event.evidence for event in fallback.events],
        "factor": fallback.ladder.factor,
        "start": watch.start,
        "moved": watch.moved,
        "weights": watch.last,
        "error": error,
    }


def resume(kind, folder, fault, saved_after):
    """Straight through, and again from a checkpoint."""
    often = ModelCheckpoint(folder / "checkpoints", "{step}", every_n_train_steps=2, save_top_k=-1)
    straight = fit(kind, fault, folder / "straight", often)
    again = {}
    for step in saved_after:
        checkpoint = folder / "checkpoints" / f"step={step}.ckpt"
        again[step] = fit(kind, fault, folder / f"from_{step}", checkpoint=checkpoint)
    return straight | {"again": again}


def main(kind, folder, faults):
    for fault in faults:
        if fault == "resume":
            seen = resume(kind, folder / fault, fault, (22, 24, 28))
        elif fault == "stall_after_resume":
            seen = resume(kind, folder / fault, fault, (10,))
        else:
            seen = fit(kind, fault, folder / fault)
        rank = torch.distributed.get_rank()
        (folder / fault).mkdir(parents=True, exist_ok=True)
        torch.save(seen, folder / fault / f"rank_{rank}.pt")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3:] or FAULTS)
    print("held")
