"""All callbacks under ``ddp_spawn``, sent to the ranks by pickle: ``python -m tests.strategies.spawned FOLDER``."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_norms.callbacks.lr_fallback import LRFallback
from lightning_norms.callbacks.residual_rescale import ResidualRescale
from lightning_norms.callbacks.warmup import Warmup
from lightning_norms.schedules import LinearWarmup
from tests.stand_ins import Decoder, seeded, trainer
from tests.strategies.runs import SAVED, STEPS, CountedMonitor, Learner, Seen


class Spawned(Learner):
    """One that can be pickled."""

    data_ranks = 2

    def __init__(self):
        super().__init__(seeded(Decoder))
        del self.make_optimizer

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01, foreach=False)


class Report(Seen):
    """Written by each rank, as nothing else comes back."""

    def __init__(self, folder, monitor, fallback):
        self.folder, self.monitor, self.fallback = folder, monitor, fallback

    def on_train_end(self, trainer, module):
        super().on_train_end(trainer, module)
        report = {
            "history": self.monitor.history.state_dict(),
            "collectives": self.monitor.collectives,
            "events": [(event.step, event.cause, event.action) for event in self.fallback.events],
            "rates": self.rates,
            "start": self.start,
            "end": self.end,
        }
        torch.save(report, self.folder / f"rank_{trainer.global_rank}.pt")


def main(folder):
    module, monitor, fallback = Spawned(), CountedMonitor(every_n_steps=2), LRFallback()
    often = ModelCheckpoint(folder / "saved", "{step}", every_n_train_steps=SAVED, save_top_k=-1)
    callbacks = (
        Warmup(LinearWarmup(8)),
        ResidualRescale(),
        monitor,
        fallback,
        often,
        Report(folder, monitor, fallback),
    )
    options = {"devices": 2, "strategy": "ddp_spawn", "use_distributed_sampler": False, "enable_checkpointing": True}
    trainer(folder, *callbacks, max_steps=STEPS, **options).fit(module)
    try:  # the trained weights have come back
        trainer(folder, ResidualRescale()).fit(module)
        second = ""
    except ValueError as error:
        second = str(error)
    end = [parameter.detach() for parameter in module.parameters()]
    torch.save({"end": end, "recorded": monitor.history.steps, "second": second}, folder / "main.pt")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
