"""Callbacks that act on steps: on optimizers made anew, on skipped steps, and on steps that go past Lightning."""

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import nn

from lightning_norms.callbacks.after_step import AfterStep
from lightning_norms.callbacks.depth_monitor import DepthMonitor
from lightning_norms.callbacks.lr_fallback import LRFallback
from lightning_norms.callbacks.unit_matrices import UnitMatrices, unit_matrices
from lightning_norms.callbacks.warmup import Warmup
from lightning_norms.metrics import GRAD_NORM, UPDATE_RATIO
from lightning_norms.schedules import LinearWarmup
from tests import stand_ins
from tests.callbacks.fallback_runs import Learner, what
from tests.stand_ins import trainer

pytestmark = pytest.mark.filterwarnings("ignore:DepthMonitor. there are no depths")


class Counter(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("taken", torch.zeros((), dtype=torch.long))

    def after_step(self):
        self.taken += 1


def unit_norms(module):
    return [weight.norm(dim=along).sub(1).abs().max().item() for weight, along in unit_matrices(module).items()]


def monitor():
    return DepthMonitor(every_n_steps=1, table=False, picture=False)


# Optimizers made anew in mid-run.


@pytest.mark.parametrize("hook", ["on_train_epoch_start", "on_train_batch_start"])
@pytest.mark.parametrize("way", ["setup_optimizers", "new list", "one more"])
def test_every_callback_goes_on_with_an_optimizer_made_anew(way, hook, tmp_path):
    class Anew(stand_ins.Module):
        def change(self):
            lone = torch.optim.AdamW([nn.Parameter(torch.ones(1))])
            made = {"new list": lambda: [self.configure_optimizers()], "one more": lambda: [*before, lone]}
            before = self.trainer.optimizers
            if way in made:
                self.trainer.optimizers = made[way]()
            else:
                self.trainer.strategy.setup_optimizers(self.trainer)

        def on_train_epoch_start(self):
            if hook == "on_train_epoch_start" and self.current_epoch == 1:
                self.change()

        def on_train_batch_start(self, batch, batch_idx):
            if hook == "on_train_batch_start" and self.current_epoch == 1 and batch_idx == 0:
                self.change()

    module = Anew()
    module.counter = Counter()
    depth = monitor()
    run = trainer(tmp_path, AfterStep(), UnitMatrices(), depth, max_steps=-1, max_epochs=2, limit_train_batches=3)
    run.fit(module, stand_ins.loader())
    assert module.counter.taken == run.global_step == 6
    assert max(unit_norms(module)) < 1e-6
    assert len(depth.history.steps) == 6


# Steps that LRFallback skips.


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize(("fault", "fallback", "action"), [
    ("nan", {}, "skip"), ("spike", {}, "skip"), ("nan", {"max_skips": 0}, "rollback"),
])  # fmt: skip
def test_no_order_of_the_callbacks_falsifies_the_picture_of_a_skipped_step(fault, fallback, action, order, tmp_path):
    true, ours = monitor(), monitor()
    faults = {30: fault}
    trainer(tmp_path, true, max_steps=31).fit(Learner(faults))
    watched = LRFallback(**fallback)
    trainer(tmp_path, *[ours, watched][::order], max_steps=33).fit(Learner(faults))
    assert what(watched)[0][::2] == (30, action)
    column = {name: at for at, name in enumerate(ours.history.state_dict()["columns"])}
    assert column == {name: at for at, name in enumerate(true.history.state_dict()["columns"])}
    expected, actual = (history.state_dict()["values"][30] for history in (true.history, ours.history))
    gradients = [at for name, at in column.items() if name.startswith(GRAD_NORM.of(""))]
    updates = [at for name, at in column.items() if name.startswith(UPDATE_RATIO.of(""))]
    torch.testing.assert_close(actual[gradients], expected[gradients], rtol=0, atol=0, equal_nan=True)
    assert actual[gradients].isnan().all() if fault == "nan" else (actual[gradients] > 0).all()
    assert (actual[updates] == 0).all()


@pytest.mark.parametrize("order", [1, -1])
def test_a_skipped_step_calls_no_after_step_and_normalises_nothing(order, tmp_path):
    class Uneven(Learner):
        """Its matrices do not have length 1 when the bad step comes."""

        def on_train_batch_start(self, batch, batch_idx):
            if self.trainer.global_step == 12 and not self.kept:
                with torch.no_grad():
                    self.decoder.head.weight.mul_(1.5)
                self.kept.append(self.decoder.head.weight.detach().clone())

        def on_train_batch_end(self, outputs, batch, batch_idx):
            super().on_train_batch_end(outputs, batch, batch_idx)
            if self.trainer.global_step == 13:
                self.kept.append(self.decoder.head.weight.detach().clone())

    module = Uneven({12: "nan"})
    module.kept, module.counter = [], Counter()
    fallback = LRFallback()
    trainer(tmp_path, *[fallback, AfterStep(), UnitMatrices()][::order], max_steps=15).fit(module)
    assert what(fallback) == [(12, "non_finite", "skip")]
    assert torch.equal(*module.kept)
    assert module.counter.taken == 14


def test_a_fused_step_that_the_scaler_skips_is_not_taken(tmp_path):
    class Overflows(stand_ins.Module):
        def training_step(self, batch, batch_idx):
            return super().training_step(batch, batch_idx) * (float("inf") if batch_idx == 1 else 1.0)

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), fused=True)

    module = Overflows()
    module.counter = Counter()
    scaler = MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu", init_scale=4.0))
    trainer(tmp_path, AfterStep(), max_steps=4, plugins=[scaler]).fit(module, stand_ins.loader())
    assert module.counter.taken == 3


# Steps past Lightning.


class PastLightning(LightningModule):
    """Steps an optimizer in the given way, of which Lightning learns nothing."""

    automatic_optimization = False

    def __init__(self, way):
        super().__init__()
        self.decoder, self.counter, self.way = stand_ins.seeded(lambda: stand_ins.Decoder(2)), Counter(), way
        self.losses = []

    def training_step(self, batch, batch_idx):
        loss = stand_ins.Module.training_step(self, batch, batch_idx)
        if self.way == "accumulates":
            self.manual_backward(loss / 2)
            if batch_idx % 2:
                self.optimizers().step()
                self.optimizers().zero_grad()
            return
        self.zero_grad()
        self.manual_backward(loss)
        if self.way == "by hand":
            with torch.no_grad():
                for parameter in self.parameters():
                    parameter.data -= 0.01 * parameter.grad
        else:
            self.own.step()

    def configure_optimizers(self):
        self.own = torch.optim.SGD(self.parameters(), lr=0.01)
        wrapper = torch.optim.SGD(self.parameters(), lr=0.01)
        return None if self.way == "none configured" else wrapper


SILENT = {
    "Warmup": "the warmup has no effect",
    "DepthMonitor": "nothing is recorded",
    "AfterStep": "after_step\\(\\) is not called",
    "UnitMatrices": "the matrices do not keep length 1",
}


@pytest.mark.filterwarnings("ignore:`LightningModule.configure_optimizers` returned `None`")
@pytest.mark.parametrize("way", ["an inner optimizer", "by hand", "none configured"])
def test_steps_past_lightning_are_said_once_by_each_callback(way, tmp_path):
    callbacks = [Warmup(LinearWarmup(2)), monitor(), AfterStep(), UnitMatrices()]
    run = trainer(tmp_path, *callbacks, max_steps=-1, max_epochs=2)
    with pytest.warns(UserWarning, match="no optimizer step was seen in 3 batches although the weights move") as caught:
        run.fit(PastLightning(way), stand_ins.loader())
    said = [str(warning.message) for warning in caught if "no optimizer step was seen" in str(warning.message)]
    owner = "an optimizer" if way == "none configured" else "SGD"
    assert len(said) == 4
    for name, consequence in SILENT.items():
        (sentence,) = [text for text in said if text.startswith(f"{name}: ")]
        assert f"{consequence.replace(chr(92), '')}: {owner} is stepped past Lightning." in sentence


def test_a_module_that_accumulates_by_hand_is_left_in_peace(tmp_path):
    callbacks = [Warmup(LinearWarmup(2)), monitor(), AfterStep(), UnitMatrices()]
    module = PastLightning("accumulates")
    trainer(tmp_path, *callbacks, max_steps=-1, max_epochs=1).fit(module, stand_ins.loader())  # a warning is an error
    assert module.counter.taken == 4
