"""LRFallback in projects as they are: files of every kind, optimizers that it cannot watch, state out of its sight."""

import math

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader

from benchmarks.optimizers import Sharp
from lightning_norms.callbacks.lr_fallback import FallbackExhaustedError, LRFallback
from tests.callbacks.fallback_runs import what
from tests.stand_ins import lightning_callback, trainer


class Net(LightningModule):
    """Its weights become NaN in the update of step ``broken_at``, with a finite gradient."""

    def __init__(self, broken_at=-1, optimizer=torch.optim.Adam, manual=False):
        super().__init__()
        seed_everything(0, verbose=False)
        self.net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
        self.broken_at, self.make, self.automatic_optimization = broken_at, optimizer, not manual
        self.starts = []

    def loss(self, batch):
        return nn.functional.mse_loss(self.net(batch), batch[:, :1])

    def training_step(self, batch, batch_idx):
        self.starts.append([parameter.detach().clone() for parameter in self.parameters()])
        if self.automatic_optimization:
            return self.loss(batch)
        self.manual_backward(self.loss(batch))
        self.inner.step()
        self.inner.zero_grad()
        return None

    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
        optimizer.step(closure=optimizer_closure)
        if batch_idx == self.broken_at:
            with torch.no_grad():
                self.net[2].weight[0, 0] = math.nan

    def configure_optimizers(self):
        self.inner = self.make(self.parameters(), lr=1e-2)
        return None if not self.automatic_optimization else self.inner

    def train_dataloader(self):
        return DataLoader(torch.randn(160, 8, generator=torch.Generator().manual_seed(0)), 8)


def is_healthy(path):
    state = torch.load(path, weights_only=True)["state_dict"]
    return all(bool(tensor.isfinite().all()) for tensor in state.values())


class ByHand(Callback):
    def __init__(self, folder, weights_only):
        self.folder, self.weights_only = folder, weights_only

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        trainer.save_checkpoint(self.folder / f"{batch_idx}.ckpt", weights_only=self.weights_only)


@pytest.mark.parametrize("weights_only", [False, True])
@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize("kind", ["ModelCheckpoint", "by hand", "averaged"])
def test_no_file_holds_weights_that_are_not_finite(kind, order, weights_only, tmp_path):
    files = ModelCheckpoint(tmp_path, every_n_train_steps=1, save_top_k=-1, save_weights_only=weights_only)
    callbacks = [LRFallback(), ByHand(tmp_path, weights_only) if kind == "by hand" else files]
    if kind == "averaged":
        callbacks.insert(0, lightning_callback("EMAWeightAveraging")(decay=0.5))
    run = trainer(tmp_path, *callbacks[::order], max_steps=9, enable_checkpointing=kind != "by hand")
    run.fit(Net(broken_at=5))
    paths = list(tmp_path.glob("*.ckpt"))
    assert len(paths) >= 9
    assert [path.name for path in paths if not is_healthy(path)] == []


def test_what_is_saved_after_a_last_step_that_broke_the_weights_is_healthy(tmp_path):
    fallback = LRFallback()
    run = trainer(tmp_path, fallback, max_steps=6)
    run.fit(Net(broken_at=5))
    assert what(fallback) == [(5, "non_finite", "rollback")]
    run.save_checkpoint(tmp_path / "end.ckpt")
    assert is_healthy(tmp_path / "end.ckpt")


def test_the_trainer_has_its_own_method_back_after_fit(tmp_path):
    run = trainer(tmp_path, LRFallback(), max_steps=2)
    run.fit(Net())
    assert "save_checkpoint" not in vars(run)


def test_a_second_gradient_within_a_step_switches_it_off_in_one_sentence(tmp_path):
    fallback, module = LRFallback(), Net(optimizer=Sharp)
    with pytest.warns(UserWarning, match="LRFallback cannot judge Sharp, which takes a second gradient"):
        trainer(tmp_path, fallback, max_steps=4).fit(module)
    assert fallback.events == []
    assert not torch.equal(module.starts[0][0], module.starts[3][0])  # it trains


def test_a_closure_that_is_called_twice_is_noticed_whatever_the_class(tmp_path):
    class Twice(torch.optim.Optimizer):
        def __init__(self, params, lr):
            super().__init__(params, {"lr": lr})

        def step(self, closure):
            closure()
            for parameter in self.param_groups[0]["params"]:
                parameter.data.add_(parameter.grad, alpha=0.05)
            return closure()

    with pytest.warns(UserWarning, match="LRFallback cannot judge Twice") as caught:
        trainer(tmp_path, LRFallback(), max_steps=4).fit(Net(optimizer=Twice))
    assert sum("cannot judge" in str(warning.message) for warning in caught) == 1


@pytest.mark.filterwarnings("ignore:.*returned `None`, this fit will run with no optimizer.*")
def test_an_optimizer_that_is_stepped_past_lightning_is_named_once(tmp_path):
    with pytest.warns(UserWarning, match="LRFallback: no optimizer step was seen") as caught:
        trainer(tmp_path, LRFallback(), max_steps=-1, max_epochs=2).fit(Net(manual=True))
    assert sum("no optimizer step was seen" in str(warning.message) for warning in caught) == 1


def test_state_out_of_sight_is_named_as_the_likely_cause(tmp_path):
    class Memory(Net):
        memory = 0.0

        def loss(self, batch):
            bad = math.nan if self.trainer.global_step == 5 else 0.0
            self.memory = self.memory + bad  # for ever NaN
            return super().loss(batch) + self.memory

    fallback = LRFallback()
    with pytest.raises(FallbackExhaustedError, match="state that is neither weight nor buffer"):
        trainer(tmp_path, fallback, max_steps=60, max_epochs=-1).fit(Memory())
    first, second = fallback.events[:2]
    assert "neither weight nor buffer" not in first.message + second.message  # nothing was put back before these
    assert "neither weight nor buffer" in fallback.events[2].message


@pytest.mark.filterwarnings("ignore:.*Initializing zero-element tensors.*", "ignore:Lazy modules are a new feature.*")
def test_lazy_modules_go_back_to_the_weights_of_their_first_batch(tmp_path):
    class Lazy(Net):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.LazyLinear(16), nn.LazyBatchNorm1d(), nn.Tanh(), nn.LazyLinear(1))

        def training_step(self, batch, batch_idx):
            loss = self.loss(batch)
            self.starts.append([parameter.detach().clone() for parameter in self.parameters()])
            return loss * (math.nan if batch_idx in (3, 4, 5, 6) else 1.0)

    fallback, module = LRFallback(), Lazy()
    trainer(tmp_path, fallback, max_steps=8).fit(module)
    assert (6, "non_finite", "rollback") in what(fallback)
    assert all(map(torch.equal, module.starts[0], module.starts[7]))


@pytest.mark.parametrize("by", ["setup_optimizers", "a list"])
def test_the_cut_holds_on_optimizers_that_are_made_anew(by, tmp_path):
    class Anew(Net):
        def on_train_batch_start(self, batch, batch_idx):
            if batch_idx == 12 and by == "setup_optimizers":
                self.trainer.strategy.setup_optimizers(self.trainer)
            elif batch_idx == 12:
                self.trainer.optimizers = [torch.optim.Adam(self.parameters(), lr=1e-2)]

        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            return loss * (math.nan if batch_idx in (5, 6, 7, 8) else 1.0)

        def on_train_batch_end(self, outputs, batch, batch_idx):
            self.rates = fallback._intervention._factors[0].used()

    fallback, module = LRFallback(), Anew()
    trainer(tmp_path, fallback, max_steps=15).fit(module)
    assert [action for *_, action in what(fallback)][:2] == ["skip", "rollback"]
    assert module.rates == pytest.approx([0.5e-2])
