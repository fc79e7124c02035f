"""Small runs that learn something, and what may go wrong in them: for the tests of LRFallback."""

from __future__ import annotations

import torch
from lightning.pytorch import Callback
from torch.utils.data import DataLoader, TensorDataset

from lightning_norms.callbacks.lr_fallback import LRFallback
from tests.callbacks.test_warmup import Module as Scheduled
from tests.stand_ins import VOCABULARY, Decoder, Module, seeded, trainer

RESUMING = (
    ".*resuming from a checkpoint that ended before the epoch.*",
    ".*callbacks used to create the checkpoint need to be provided.*",
    ".*Be aware that when using `ckpt_path`.*",
    ".*`lr_scheduler.step\\(\\)` before `optimizer.step\\(\\)`.*",
)


GLITCHES = {"glitch": 10.0, "large glitch": 300.0}


class Learner(Module):
    """Learns x -> (3x + 1) mod 11, with a fifth of surprises; ``faults`` are {optimizer step: kind}.

    A fault depends on the step, and would come back in a replay: what a comparison says is tested by itself.
    """

    can_replay_step = False

    def __init__(self, faults=(), layers=2, decoder=None, learning_rate=1e-2, **options):
        super().__init__(decoder or seeded(lambda: Decoder(layers)), learning_rate, **options)
        self.faults = dict(faults)
        self.modes = []
        self.hugeness = 1.0
        self.decoder.head.register_forward_pre_hook(lambda head, inputs: (inputs[0] * self.hugeness,))

    def fault(self):
        return self.faults.get(self.trainer.global_step)

    def training_step(self, batch, batch_idx):
        self.modes.append(self.training)
        kind = self.fault()
        if kind == "poison":
            batch = [torch.randint(VOCABULARY, batch[0].shape, generator=torch.Generator().manual_seed(1))]
        self.hugeness = 100.0 if kind == "huge" else 1.0
        loss = super().training_step(batch, batch_idx)
        return loss * {"nan": float("nan"), "inf": float("inf"), "spike": 3.0, "high": 8.0}.get(kind, 1.0)

    def on_after_backward(self):
        if self.fault() == "inf_gradient":
            self.decoder.head.weight.grad[0, 0] = float("inf")
        for group in self.trainer.optimizers[0].param_groups:
            if self.fault() in GLITCHES:
                group["lr"] = GLITCHES[self.fault()] * group["lr"]

    def on_train_batch_end(self, outputs, batch, batch_idx):
        glitch = GLITCHES.get(self.faults.get(self.trainer.global_step - 1))
        for group in self.trainer.optimizers[0].param_groups if glitch else ():
            group["lr"] = group["lr"] / glitch

    def train_dataloader(self):
        return lessons()


class Faulty(Scheduled):
    """The recording module of the warmup tests; NaN at some steps."""

    bad = ()
    can_replay_step = False

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        loss = loss - loss.detach() + 1.0  # only what is asked for is to happen
        return loss * float("nan") if self.trainer.global_step in self.bad else loss


def lessons(batches=16, batch_size=8, time=6):
    columns = [torch.randint(VOCABULARY, (batches * batch_size,), generator=torch.Generator().manual_seed(0))]
    surprise = torch.Generator().manual_seed(1)
    for _ in range(time):
        column = (3 * columns[-1] + 1) % VOCABULARY
        guess = torch.randint(VOCABULARY, column.shape, generator=surprise)
        columns.append(torch.where(torch.rand(column.shape, generator=surprise) < 0.2, guess, column))
    return DataLoader(TensorDataset(torch.stack(columns, dim=1)), batch_size=batch_size)


class Watch(Callback):
    """After each optimizer step: weights, and what of the optimizer's state; at the hook before it too."""

    def __init__(self, *steps):
        self.steps, self.before, self.after, self.used = steps, {}, {}, []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.global_step in self.steps and trainer.global_step not in self.before:
            self.before[trainer.global_step] = everything(trainer, pl_module)

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.global_step - 1 in self.steps:
            self.after[trainer.global_step - 1] = everything(trainer, pl_module)


def everything(trainer, pl_module):
    """Copies of all that a step may move, by name."""
    found = {f"weights/{name}": each for name, each in pl_module.named_parameters()}
    found |= {f"buffers/{name}": each for name, each in pl_module.named_buffers()}
    for number, optimizer in enumerate(trainer.optimizers):
        names = {id(each): name for name, each in pl_module.named_parameters()}
        for parameter, state in optimizer.state.items():
            found |= {f"state/{number}/{names[id(parameter)]}/{entry}": each for entry, each in state.items()}
    return {
        name: each.detach().clone() if isinstance(each, torch.Tensor) else torch.tensor(float(each))
        for name, each in found.items()
        if each is not None
    }


def assert_same(one, other):
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert torch.equal(value, other[name]), name


def fit(folder, module, *callbacks, fallback=None, steps=60, ckpt_path=None, **options):
    """Fits with a fallback, first in the list; returns the fallback."""
    fallback = LRFallback() if fallback is None else fallback
    trainer(folder, fallback, *callbacks, max_steps=steps, **options).fit(module, ckpt_path=ckpt_path)
    return fallback


def what(fallback):
    return [(event.step, event.cause, event.action) for event in fallback.events]


def is_finite(module):
    return all(bool(torch.isfinite(each).all()) for each in [*module.parameters(), *module.buffers()])
