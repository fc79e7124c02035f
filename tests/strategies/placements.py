"""AfterStep, AdminProfile and UnitMatrices: ``python -m tests.strategies.placements KIND FOLDER``."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from lightning.pytorch import Callback
from torch.utils.data import DataLoader, DistributedSampler

from lightning_norms.callbacks.admin_profile import AdminProfile
from lightning_norms.callbacks.after_step import AfterStep
from lightning_norms.callbacks.unit_matrices import UnitMatrices
from lightning_norms.model.decoder import Decoder, DecoderConfig
from lightning_norms.model.initialization import Xavier
from lightning_norms.placements import NGPT, Admin, PreNorm, ProRes
from tests.stand_ins import VOCABULARY, Module, loader, seeded, trainer
from tests.strategies.runs import CPUFSDP, RANKS, shard, strategy, whole

CONFIG = {"vocab_size": VOCABULARY, "d_model": 8, "n_heads": 2, "n_layers": 2, "context_length": 8}
CONFIG["initialization"] = Xavier()  # large enough for omegas that differ
CASES = {
    "after_step": (ProRes(PreNorm(), warmup_steps=4), AfterStep),
    "admin": (Admin(), AdminProfile),
    "unit": (NGPT(), UnitMatrices),
}


class Learner(Module):
    """Every rank has the same batches: a mean over ranks is then what one process has, and so is rank 0's profile."""

    def train_dataloader(self):
        data = loader(batches=4).dataset
        return DataLoader(data, batch_size=4, sampler=DistributedSampler(data, 1, 0, shuffle=False))

    def validation_step(self, batch, batch_idx):
        return self.decoder(batch[0])

    val_dataloader = train_dataloader


class Sharded(Learner):
    def configure_model(self):
        shard(self.decoder, self.device_mesh["data_parallel"])


class Seen(Callback):
    """Weights right after the first batch's profile, and at the end. The sanity check leaves FSDP2's root unsharded."""

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if batch_idx == 0:
            self.start = whole(trainer, module)

    def on_train_end(self, trainer, module):
        self.end, self.buffers = whole(trainer, module), [buffer.clone() for buffer in module.buffers()]


def run(kind, name, folder):
    placement, callback = CASES[name]
    module = seeded(
        lambda: (Sharded if kind == "fsdp2" else Learner)(Decoder(DecoderConfig(**CONFIG, placement=placement)))
    )
    chosen, seen = callback(), Seen()
    options = {"devices": RANKS[kind], "strategy": strategy(kind), "use_distributed_sampler": False}
    if kind.startswith("fsdp1"):
        options["strategy"] = CPUFSDP(use_orig_params=True, state_dict_type="sharded")
    options |= {"num_sanity_val_steps": 2, "limit_val_batches": 0.5, "check_val_every_n_epoch": 1}
    try:
        trainer(folder, chosen, seen, max_steps=6, **options).fit(module)
    except ValueError as error:
        return {"refusal": str(error)}
    return {"start": seen.start, "end": seen.end, "buffers": seen.buffers, "state": chosen.state_dict()}


if __name__ == "__main__":
    torch.set_num_threads(1)
    where = Path(sys.argv[2])
    results = {name: run(sys.argv[1], name, where) for name in CASES}
    torch.save(results, where / f"rank_{torch.distributed.get_rank()}.pt")
