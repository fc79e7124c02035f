"""The four callbacks in one run of a small decoder, and what they must have done there, worked out by other means."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from lightning.pytorch import Callback

from lightning_norms.callbacks.depth_monitor import DepthMonitor
from lightning_norms.callbacks.lr_fallback import LRFallback
from lightning_norms.callbacks.residual_rescale import ResidualRescale
from lightning_norms.callbacks.warmup import Warmup
from lightning_norms.schedules import LinearWarmup
from tests.callbacks.fallback_runs import Learner
from tests.stand_ins import Decoder, seeded, trainer

LAYERS, BASE, W = 3, 0.1, 8
FACTOR = 1 / math.sqrt(2 * LAYERS)


class Taken(torch.optim.SGD):
    """Writes down what each step that moved something used: learning rate by group, size of the clipped gradient."""

    def __init__(self, params, lr=BASE, momentum=0.9, **more):
        super().__init__(params, lr=lr, momentum=momentum, **more)
        self.trace, self.sizes, self.largest = [], [], []

    def step(self, closure=None):
        loss = None if closure is None else closure()
        gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        if gradients:
            self.trace.append([float(group["lr"]) for group in self.param_groups])
            self.sizes.append(math.sqrt(sum(float(each.double().square().sum()) for each in gradients)))
            self.largest.append(max(float(each.abs().max()) for each in gradients))
        super().step()
        return loss


def learner(faults=(), decoder=None, **options):
    """Three blocks that learn; a huge loss, or a NaN, at the optimizer steps of ``faults``."""
    decoder = seeded(lambda: Decoder(LAYERS)) if decoder is None else decoder
    return Learner(faults, decoder=decoder, learning_rate=BASE, optimizer=Taken, **options)


def group_of(name):
    """Depth group of a parameter of the stand-in decoder, by hand."""
    words = ("decoder", "_orig_mod", "_checkpoint_wrapped_module")
    parts = [part for part in name.split(".") if part not in words]
    return f"block_{int(parts[1]):02d}" if parts[0] == "blocks" else {"exit": "final_norm"}.get(parts[0], parts[0])


class Naive(Callback):
    """Gradient norms by depth, one parameter at a time in float64; and the weights when training starts."""

    def __init__(self):
        self.norms, self.start = [], {}

    def on_train_start(self, trainer, pl_module):
        self.start = weights(pl_module)

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        owned = {id(p) for group in optimizer.param_groups for p in group["params"]}
        squares = {}
        for name, parameter in pl_module.named_parameters():
            if id(parameter) in owned and parameter.requires_grad:
                grad = parameter.grad
                square = 0.0 if grad is None else float(grad.double().square().sum())
                squares[group_of(name)] = squares.get(group_of(name), 0.0) + square
        squares["total"] = sum(squares.values())
        self.norms.append({group: math.sqrt(square) for group, square in squares.items()})


@dataclass
class Four:
    """The callbacks, in the order of a user's list."""

    fallback: LRFallback
    rescale: ResidualRescale = field(default_factory=ResidualRescale)
    warmup: Warmup = field(default_factory=lambda: Warmup(LinearWarmup(W)))
    monitor: DepthMonitor | None = field(
        default_factory=lambda: DepthMonitor(every_n_steps=1, table=False, picture=False)
    )
    naive: Naive = field(default_factory=Naive)

    @property
    def all(self):
        return [each for each in (self.naive, self.rescale, self.warmup, self.monitor, self.fallback) if each]


def run(folder, module, *others, before=(), monitored=True, make=trainer, ckpt_path=None, **options):
    """Fits ``module`` with the four callbacks between ``before`` and ``others``."""
    options = {"max_steps": 24} | options
    fallback = options.pop("fallback", None) or LRFallback(max_skips=0, snapshot_every_n_steps=6)
    four = Four(fallback) if monitored else Four(fallback, monitor=None)
    make(folder, *before, *four.all, *others, **options).fit(module, ckpt_path=ckpt_path)
    return four


def weights(module):
    return {name: parameter.detach().clone() for name, parameter in module.named_parameters()}


def warm(step, cut_at=None):
    """Warmup x fallback at the step-th step that was taken."""
    return min(1.0, (step + 1) / W) * (0.5 if cut_at is not None and step >= cut_at else 1.0)


def assert_rates(trace, expected, rel=1e-9):
    """First group's learning rates against factors on the base."""
    assert len(trace) == len(expected)
    for (rate, *_), factor in zip(trace, expected, strict=True):
        assert abs(rate - BASE * factor) <= rel * BASE * factor


def assert_norms(monitor, naive, rel=1e-5, prefix=""):
    """Every recorded gradient norm is the naive one."""
    history = monitor.history.state_dict()
    values = {name: history["values"][:, number].tolist() for number, name in enumerate(history["columns"])}
    steps = monitor.history.steps
    assert steps == list(range(len(naive)))
    for row, norms in enumerate(naive):
        for group, norm in norms.items():
            seen = values[f"grad_norm/{prefix}{group}"][row]
            assert abs(seen - norm) <= rel * norm or (math.isnan(seen) and math.isnan(norm)), (row, group, seen, norm)


def assert_rescaled(before, start, factor=FACTOR, dtype=None):
    """The writers x factor, all else bit for bit."""
    for name, old in before.items():
        old = old if dtype is None else old.to(dtype)
        expected = old * factor if name.endswith("writer.weight") else old
        assert torch.equal(start[name], expected), name
