"""Warmup multiplies the learning rate whoever writes it, whenever, and on optimizers that are made anew in mid-run."""

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import LearningRateMonitor
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import nn
from torch.optim import LBFGS, SGD, lr_scheduler
from torch.utils.data import DataLoader

from lightning_norms.callbacks.warmup import Warmup
from lightning_norms.learning_rate import factors_of, follow
from lightning_norms.schedules import LinearWarmup
from tests.callbacks.test_warmup import Cut

LENGTH = 4
FACTORS = [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


class Recording(SGD):
    """Writes down the learning rate of every update."""

    def __init__(self, params, trace, lr=0.1):
        super().__init__(params, lr=lr)
        self.trace = trace

    def step(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        group = self.param_groups[0]
        self.trace.append(float(group["lr"]))
        with torch.no_grad():  # not by its parent's step, which may have hooks of its own
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter -= group["lr"] * parameter.grad
        return loss


class Module(LightningModule):
    """Calls ``write(group, step)`` in the hook ``where``."""

    def __init__(self, write=None, where="training_step", automatic=True):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(2, 1)
        self.write, self.where, self.automatic_optimization = write, where, automatic
        self.trace = []

    def at(self, where):
        if where == self.where and self.write is not None:
            for group in self.trainer.optimizers[0].param_groups:
                self.write(group, len(self.trace))

    def on_train_batch_start(self, batch, batch_idx):
        self.at("on_train_batch_start")

    def on_before_optimizer_step(self, optimizer):
        self.at("on_before_optimizer_step")

    def on_before_zero_grad(self, optimizer):
        self.at("on_before_zero_grad")

    def training_step(self, batch, batch_idx):
        self.at("training_step")
        loss = self.layer(batch).square().mean()
        if not self.automatic_optimization:
            self.optimizers().zero_grad()
            self.manual_backward(loss)
            self.optimizers().step()
        return loss

    def configure_optimizers(self):
        return Recording(self.parameters(), self.trace)


def fit(module, *callbacks, steps=6, **options):
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    options = {"accelerator": "cpu", "enable_model_summary": False, "max_steps": steps, **quiet, **options}
    trainer = Trainer(callbacks=list(callbacks), **options)
    trainer.fit(module, DataLoader(torch.ones(32, 2), 4))
    return module.trace


def set_a_plan(group, step):
    group["lr"] = 0.3 / (step + 1)


def multiply(group, step):
    group["lr"] = group["lr"] * 0.9


def multiply_in_place(group, step):
    group["lr"] *= 0.9


SCALER = {"init_scale": 4.0}
PRECISIONS = {
    "32-true": lambda: None,
    "bf16-mixed": lambda: [MixedPrecision("bf16-mixed", "cpu")],
    "16-mixed": lambda: [MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu", **SCALER))],
}


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("automatic", [True, False], ids=["automatic", "manual"])
@pytest.mark.parametrize("where", ["training_step", "on_train_batch_start", "on_before_optimizer_step"])
@pytest.mark.parametrize("write", [set_a_plan, multiply, multiply_in_place])
def test_a_rate_written_by_the_module_is_multiplied(write, where, automatic, precision):
    plain = fit(Module(write, where, automatic), plugins=PRECISIONS[precision]())
    ours = fit(Module(write, where, automatic), Warmup(LinearWarmup(LENGTH)), plugins=PRECISIONS[precision]())
    assert ours == pytest.approx([rate * factor for rate, factor in zip(plain, FACTORS, strict=True)], rel=1e-12)


def test_a_callback_that_multiplies_beside_a_monitor_never_sees_a_factor(tmp_path):
    class Multiplies(Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            multiply(trainer.optimizers[0].param_groups[0], batch_idx)

    plain = fit(Module(), Multiplies())
    monitor = LearningRateMonitor()
    order = [Warmup(LinearWarmup(LENGTH)), Multiplies(), monitor]
    ours = fit(Module(), *order, logger=CSVLogger(tmp_path), log_every_n_steps=1)
    assert ours == pytest.approx([rate * factor for rate, factor in zip(plain, FACTORS, strict=True)], rel=1e-12)
    assert monitor.lrs["lr-Recording"][1:] == pytest.approx(ours, rel=1e-12)


def test_a_scheduler_that_is_stepped_by_a_hook_of_the_optimizer_never_sees_a_factor():
    class Hooked(Module):
        def configure_optimizers(self):
            optimizer = super().configure_optimizers()
            scheduler = lr_scheduler.ExponentialLR(optimizer, 0.9)
            optimizer.register_step_post_hook(lambda *_: scheduler.step())
            return optimizer

    assert fit(Hooked(), Warmup(LinearWarmup(LENGTH))) == pytest.approx(
        [0.1 * 0.9**step * factor for step, factor in enumerate(FACTORS)], rel=1e-12
    )


def test_a_step_that_calls_its_parents_step_first_uses_the_factor_to_its_end():
    class DecaysAfterwards(SGD):
        def step(self, closure=None):
            loss = super().step(closure)
            trace.append(self.param_groups[0]["lr"])
            return loss

    trace, module = [], Module()
    module.configure_optimizers = lambda: DecaysAfterwards(module.parameters(), lr=0.1)
    SGD(nn.Linear(1, 1).parameters(), lr=0.1)  # from now on the parent's step() has hooks of its own
    fit(module, Warmup(LinearWarmup(LENGTH)))
    assert trace == pytest.approx([0.1 * factor for factor in FACTORS], rel=1e-12)


def test_lbfgs_reads_its_rate_before_the_closure():
    parameter = nn.Parameter(torch.zeros(1))
    optimizer = LBFGS([parameter], lr=0.1, max_iter=1)
    factors_of(optimizer).set("warmup", lambda clock: 0.5)

    def closure():
        optimizer.zero_grad()
        loss = 0.5 * (parameter - 1).square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)  # LBFGS begins with min(1, 1 / |gradient|) * lr * gradient
    assert parameter.item() == pytest.approx(0.05)


def test_an_optimizer_that_writes_its_own_rate_is_named_once():
    class Decays(SGD):
        def step(self, closure=None):
            loss = super().step(closure)
            multiply(self.param_groups[0], 0)
            return loss

    module = Module()
    module.configure_optimizers = lambda: Decays(module.parameters(), lr=0.1)
    with pytest.warns(UserWarning, match=r"Decays writes its own learning rate inside step\(\).*\(warmup\)") as caught:
        fit(module, Warmup(LinearWarmup(LENGTH)))
    assert len([warning for warning in caught if "Decays writes" in str(warning.message)]) == 1


# Optimizers made anew in mid-run.


class MadeAnew(Module):
    """Replaces its optimizer before its fourth step, in the hook ``where``."""

    def __init__(self, anew, where="on_train_batch_start", automatic=True):
        super().__init__(lambda group, step: anew(self) if step == 3 and not self.done else None, where, automatic)
        self.done = False

    def at(self, where):
        before = self.done
        super().at(where)
        self.done = before or (where == self.where and len(self.trace) == 3)


def set_up_again(module):
    module.trainer.strategy.setup_optimizers(module.trainer)


def assign_a_list(module):
    module.trainer.optimizers = [Recording(module.parameters(), module.trace, lr=0.2)]


@pytest.mark.parametrize("precision", ["32-true", "16-mixed"])
@pytest.mark.parametrize("where", ["on_train_batch_start", "on_before_zero_grad"])
@pytest.mark.parametrize("anew", [set_up_again, assign_a_list])
def test_an_optimizer_made_anew_is_warmed_up_from_where_the_old_one_stood(anew, where, precision):
    module = MadeAnew(anew, where)
    warmup = Warmup(LinearWarmup(6))
    fit(module, warmup, plugins=PRECISIONS[precision]())
    later = 0.2 if anew is assign_a_list else 0.1
    first = 3 if where == "on_train_batch_start" else 4  # a step that is under way is that of the old optimizer
    expected = [(0.1 if step < first else later) * (step + 1) / 6 for step in range(6)]
    assert module.trace == pytest.approx(expected, rel=1e-12)
    assert warmup.state_dict() == {"steps": [6]}
    new = module.trainer.optimizers[0]
    assert new.param_groups[0]["lr"] == later
    assert not new._optimizer_step_pre_hooks


def test_a_further_optimizer_is_warmed_up_from_its_own_first_step():
    class Joins(Module):
        def training_step(self, batch, batch_idx):
            if len(self.trainer.optimizers) > 1:
                self.trainer.optimizers[1].step()
            return super().training_step(batch, batch_idx)

        def on_train_batch_end(self, outputs, batch, batch_idx):
            if batch_idx == 1:
                extra = Recording([nn.Parameter(torch.ones(1))], self.joined)
                self.trainer.optimizers = [*self.trainer.optimizers, extra]

    module = Joins(automatic=False)
    module.joined = []
    module.optimizers = lambda: module.trainer.strategy._lightning_optimizers[0]
    warmup = Warmup(LinearWarmup(LENGTH))
    fit(module, warmup, steps=-1, max_epochs=1, limit_train_batches=6)
    assert module.trace == pytest.approx([0.1 * factor for factor in FACTORS], rel=1e-12)
    assert module.joined == pytest.approx([0.1 * factor for factor in FACTORS[:4]], rel=1e-12)
    assert warmup.state_dict() == {"steps": [6, 4]}


def test_an_optimizer_that_is_dropped_keeps_nothing_of_ours():
    class Alternates(Module):
        """One optimizer in even epochs, the other one in odd epochs; none of both between them."""

        def on_train_epoch_start(self):
            self.both = getattr(self, "both", None) or [
                *self.trainer.optimizers,
                Recording(self.parameters(), self.trace),
            ]
            self.trainer.optimizers = [self.both[self.current_epoch % 2]]

    module = Alternates()
    fit(module, Warmup(LinearWarmup(6)), steps=-1, max_epochs=3, limit_train_batches=2)
    assert module.trace == pytest.approx([0.1 * (step + 1) / 6 for step in range(6)], rel=1e-12)
    assert not any(hooks for optimizer in module.both for name, hooks in vars(optimizer).items() if "_hooks" in name)


def test_fewer_optimizers_than_before_leave_no_hook():
    one, other = (Recording([nn.Parameter(torch.ones(1))], []) for _ in range(2))
    all_factors = [factors_of(optimizer) for optimizer in (one, other)]
    for factors in all_factors:
        factors.set("warmup", lambda clock: 0.5)
    assert follow(all_factors, []) == all_factors
    assert [factors.optimizer for factors in follow(all_factors, [other])] == [other]
    assert not any(hooks for name, hooks in vars(one).items() if "_hooks" in name)
    other.step()
    assert other.trace == [0.05]


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize("anew", [set_up_again, assign_a_list])
def test_the_other_factors_go_along(anew, order):
    module = MadeAnew(anew)
    fit(module, *[Warmup(LinearWarmup(6)), Cut(at=1)][::order])
    later = 0.2 if anew is assign_a_list else 0.1
    cut = [1.0, *[0.5] * 5]
    expected = [(0.1 if step < 3 else later) * (step + 1) / 6 * cut[step] for step in range(6)]
    assert module.trace == pytest.approx(expected, rel=1e-12)
