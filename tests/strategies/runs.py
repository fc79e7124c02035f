"""One training run under any strategy, and what it left: ``python -m tests.strategies.runs FOLDER KIND ...``.

Every KIND trains the same weights on the same global batches. From step 20 on every loss is 20 times too high.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, DistributedSampler

from lightning_norms.callbacks.depth_monitor import DepthMonitor
from lightning_norms.callbacks.lr_fallback import LRFallback
from lightning_norms.callbacks.residual_rescale import ResidualRescale
from lightning_norms.callbacks.warmup import Warmup
from lightning_norms.learning_rate import effective_learning_rates
from lightning_norms.schedules import LinearWarmup
from tests.callbacks.fallback_on_two_ranks import CPUFSDP
from tests.callbacks.fallback_on_two_ranks import whole as parameters
from tests.stand_ins import Block, Decoder, Module, loader, seeded, trainer

STEPS, SAVED, HIGH = 28, 12, 20
LAUNCHES = {1: ("single",), 2: ("ddp", "fsdp2", "fsdp1", "fsdp1_flat", "tp"), 4: ("hsdp", "tp_fsdp", "fsdp1_hybrid")}
RANKS = {kind: ranks for ranks, kinds in LAUNCHES.items() for kind in kinds}


class Learner(Module):
    data_ranks = 1

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss * 20 if self.trainer.global_step >= HIGH else loss

    def train_dataloader(self):
        rank = self.global_rank * self.data_ranks // self.trainer.world_size  # data ranks come first in the mesh
        sampler = DistributedSampler(loader(batches=4).dataset, self.data_ranks, rank, shuffle=False)
        return DataLoader(sampler.dataset, batch_size=4 // self.data_ranks, sampler=sampler)


def shard(decoder, mesh):
    from torch.distributed.fsdp import fully_shard

    for block in decoder.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(decoder, mesh=mesh)


def split(decoder, mesh):
    """Tensor parallel feed-forwards: every rank has some of the hidden units."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    plan = {"feed_forward.up": ColwiseParallel(), "feed_forward.writer": RowwiseParallel()}
    for block in decoder.blocks:
        parallelize_module(block, mesh, plan)


class FSDP2(Learner):
    def configure_model(self):
        shard(self.decoder, self.device_mesh["data_parallel"])


class HSDP(Learner):
    def configure_model(self):
        from torch.distributed.device_mesh import init_device_mesh

        shard(self.decoder, init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))


class TensorParallel(Learner):
    def configure_model(self):
        split(self.decoder, self.device_mesh["tensor_parallel"])


class Both(TensorParallel):
    def configure_model(self):
        super().configure_model()
        shard(self.decoder, self.device_mesh["data_parallel"])


KINDS = {"fsdp2": FSDP2, "hsdp": HSDP, "tp": TensorParallel, "tp_fsdp": Both}


class HybridFSDP(CPUFSDP):
    """Two copies of the network, each in two shards."""

    def _setup_model(self, model):
        from torch.distributed.device_mesh import init_device_mesh

        self.kwargs["device_mesh"] = init_device_mesh("cpu", (2, 2))
        return super()._setup_model(model)


def strategy(kind):
    if kind == "fsdp1_hybrid":
        from torch.distributed.fsdp import ShardingStrategy

        wrapping = {"auto_wrap_policy": {Block}, "use_orig_params": True, "state_dict_type": "sharded"}
        made = HybridFSDP(**wrapping)
        made.kwargs["sharding_strategy"] = ShardingStrategy.HYBRID_SHARD
        return made
    if kind.startswith("fsdp1"):
        whole_names = kind == "fsdp1"
        return CPUFSDP(auto_wrap_policy={Block}, use_orig_params=whole_names, state_dict_type="sharded")
    if kind in KINDS:
        tensor_ranks = 2 if kind.startswith("tp") else 1
        return ModelParallelStrategy(RANKS[kind] // tensor_ranks, tensor_ranks)
    return "ddp" if kind == "ddp" else "auto"


class Collectives(TorchDispatchMode):
    """Notes every collective of this process, whoever calls it and through whichever door."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if any(kind.__name__ == "DTensor" for kind in types):
            return NotImplemented  # what it does inside comes here, too
        if "c10d" in function.namespace and "wait" not in function.name():
            self.seen.append(function.name())
        return function(*args, **(kwargs or {}))


class CountedMonitor(DepthMonitor):
    """The collectives of each optimizer step: those of a record, and those of its neighbours."""

    def on_train_start(self, *arguments):
        super().on_train_start(*arguments)
        self.collectives = []

    def on_train_batch_start(self, *arguments):
        self.mode = Collectives()
        with self.mode:
            super().on_train_batch_start(*arguments)

    def on_before_optimizer_step(self, *arguments):
        with self.mode:
            super().on_before_optimizer_step(*arguments)

    def _measure_update(self, *arguments):
        with self.mode:
            super()._measure_update(*arguments)

    def on_train_batch_end(self, *arguments):
        with self.mode:
            super().on_train_batch_end(*arguments)
        self.collectives.append(self.mode.seen)


class CountedFallback(LRFallback):
    def on_train_start(self, *arguments):
        super().on_train_start(*arguments)
        self.collectives = []

    def on_before_optimizer_step(self, *arguments):
        mode = Collectives()
        with mode:
            super().on_before_optimizer_step(*arguments)
        self.collectives.append(mode.seen)


def whole(trainer, module):
    """Copies, as the whole of a replicated DTensor is the weight itself."""
    return [parameter.clone() for parameter in parameters(trainer, module)]


class Seen(Callback):
    """Whole weights at the start, at the saved step and at the end; the learning rate of every step."""

    def on_train_start(self, trainer, module):
        self.start, self.rates = whole(trainer, module), []

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.rates.append(effective_learning_rates(trainer.optimizers))
        if trainer.global_step == SAVED:
            self.saved = whole(trainer, module)

    def on_train_end(self, trainer, module):
        self.end = whole(trainer, module)


def fit(kind, folder, *callbacks, checkpoint=None, steps=STEPS):
    """A run with ``callbacks``, on the ranks that ``kind`` asks for."""
    module = seeded(lambda: KINDS.get(kind, Learner)(Decoder(), foreach=False))
    module.data_ranks = RANKS[kind] // (2 if kind.startswith("tp") else 1)
    options = {"devices": RANKS[kind], "strategy": strategy(kind), "use_distributed_sampler": False}
    trainer(folder, *callbacks, max_steps=steps, enable_checkpointing=True, **options).fit(module, ckpt_path=checkpoint)
    return module


def everything(kind, folder, checkpoint=None):
    """All callbacks together, and what they and the weights say."""
    monitor, fallback, seen = CountedMonitor(every_n_steps=2, table=False, picture=False), CountedFallback(), Seen()
    rescale = ResidualRescale()
    often = ModelCheckpoint(folder / "saved", "{step}", every_n_train_steps=SAVED, save_top_k=-1)
    callbacks = (Warmup(LinearWarmup(8)), rescale, monitor, fallback, often, seen)
    module = fit(kind, folder, *callbacks, checkpoint=checkpoint)
    return {
        "history": monitor.history.state_dict(),
        "collectives": monitor.collectives,
        "fallback_collectives": fallback.collectives,
        "events": [(event.step, event.cause, event.action) for event in fallback.events],
        "evidence": [event.evidence for event in fallback.events],
        "factor": fallback.rescue.ladder.factor,
        "rescale": rescale.state_dict(),
        "marked": module.residual_rescaled,
        "rates": seen.rates,
        "start": seen.start,
        "saved": getattr(seen, "saved", None),
        "end": seen.end,
    }


def plain(kind, folder, steps=8, **options):
    """Warmup and the monitor alone."""
    monitor = CountedMonitor(every_n_steps=2, table=False, picture=False, **options)
    fit(kind, folder, Warmup(LinearWarmup(8)), monitor, steps=steps)
    return monitor


def flat(kind, folder):
    """FSDP1 without original parameters: nothing that needs a matrix, so no rescale."""
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        monitor = plain(kind, folder)
    try:
        fit(kind, folder, ResidualRescale(), steps=1)
        refusal = ""
    except ValueError as error:
        refusal = str(error)
    said = [str(each.message) for each in warned if "DepthMonitor" in str(each.message)]
    history = monitor.history.state_dict()
    return {"history": history, "collectives": monitor.collectives, "refusal": refusal, "warned": "".join(said)}


def main(kind, folder):
    if kind == "fsdp1_flat":
        return flat(kind, folder)
    if kind == "fsdp1_hybrid":
        monitor = plain(kind, folder)
        return {"history": monitor.history.state_dict(), "collectives": monitor.collectives}
    run = everything(kind, folder)
    if kind == "single":
        run["plain"] = plain(kind, folder / "plain").history.state_dict()
    if kind == "ddp":
        run["collectives_without_stream"] = plain(kind, folder / "plain", steps=2, stream=False).collectives
    run["resumed"] = everything(kind, folder / "again", folder / "saved" / f"step={SAVED}.ckpt")
    return run


if __name__ == "__main__":
    torch.set_num_threads(1)
    for chosen in sys.argv[2:]:
        where = Path(sys.argv[1]) / chosen
        results = main(chosen, where)
        rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
        torch.save(results, where / f"rank_{rank}.pt")
