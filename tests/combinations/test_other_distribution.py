"""``pytorch_lightning`` is a second copy of Lightning: there everything is bit for bit what it is in ``lightning``."""

import csv
import json

import lightning.pytorch
import pytest
import torch

from lightning_norms.callbacks.admin_profile import AdminProfile
from lightning_norms.callbacks.after_step import AfterStep
from lightning_norms.callbacks.lr_fallback import LRFallback
from lightning_norms.callbacks.unit_matrices import UnitMatrices
from lightning_norms.model.decoder import Decoder as OurDecoder
from lightning_norms.model.decoder import DecoderConfig
from lightning_norms.placements import Admin, PreNorm, ProRes
from tests.callbacks.fallback_runs import RESUMING, assert_same, lessons, what
from tests.combinations.four import BASE, Taken, assert_norms, assert_rates, assert_rescaled, run, warm, weights
from tests.stand_ins import VOCABULARY, Decoder, seeded

other = pytest.importorskip("pytorch_lightning")
pytestmark = [pytest.mark.filterwarnings(f"ignore:{words}") for words in RESUMING]
PACKAGES = {"lightning": lightning.pytorch, "pytorch_lightning": other}


def module_of(package, faults=(), decoder=None, lr=BASE, optimizers=1):
    """A learner of one of both packages; batches by the step, so that a resume has its own."""

    class Learner(package.LightningModule):
        automatic_optimization = optimizers == 1

        def __init__(self):
            super().__init__()
            self.decoder = seeded(lambda: Decoder(3)) if decoder is None else seeded(decoder)
            self.data = lessons().dataset[:][0].unflatten(0, (16, 8))

        def training_step(self, batch, batch_idx):
            tokens = self.data[self.trainer.global_step % 16]
            logits = self.decoder(tokens)
            loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
            return loss * dict(faults).get(self.trainer.global_step, 1.0)

        def train_dataloader(self):
            return lessons()

        def configure_optimizers(self):
            return [Taken(self.parameters(), lr=lr) for _ in range(optimizers)]

    return Learner()


def trainer_of(package):
    def make(folder, *callbacks, **options):
        quiet = {"enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
        options = {"logger": False, "log_every_n_steps": 1, "max_epochs": -1, "default_root_dir": folder} | options
        return package.Trainer(accelerator="cpu", devices=1, callbacks=list(callbacks), **quiet, **options)

    return make


def save_at(package, path, step):
    class SaveAt(package.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            if trainer.global_step == step:
                trainer.save_checkpoint(path)

    return SaveAt()


@pytest.mark.parametrize("at", [10, 22])
def test_all_four_and_a_resume(at, tmp_path):
    """A loss eight times as high at step 20: rates, norms, event, weights, and the same from a checkpoint on."""
    ends = []
    for name, package in PACKAGES.items():
        folder, make = tmp_path / name, trainer_of(package)
        straight, resumed = module_of(package, {20: 8.0}), module_of(package, {20: 8.0})
        before = weights(straight)
        four = run(folder, straight, save_at(package, folder / "run.ckpt", at), make=make)
        assert what(four.fallback) == [(20, "divergence", "rollback")]
        assert_rescaled(before, four.naive.start)
        assert_rates(straight.trainer.optimizers[0].trace, [warm(step, cut_at=20) for step in range(23)])
        assert_norms(four.monitor, four.naive.norms)
        again = run(folder, resumed, make=make, ckpt_path=folder / "run.ckpt")
        assert what(again.fallback) == what(four.fallback)
        assert_same(weights(resumed), weights(straight))
        assert again.monitor.history.steps == list(range(24))
        ends.append((weights(straight), four.fallback.events, four.monitor.history.state_dict()))
    (one, events, history), (two, other_events, other_history) = ends
    assert_same(one, two)
    assert events == other_events
    assert torch.equal(history["values"].nan_to_num(), other_history["values"].nan_to_num())


@pytest.mark.parametrize("average", ["WeightAveraging", "EMAWeightAveraging", "StochasticWeightAveraging"])
def test_its_averages_go_back_too(average, tmp_path):
    """A NaN at step 9, back to step 6: the averaged end weights are those of the same run in ``lightning``."""
    ends = []
    for name, package in PACKAGES.items():
        arguments = {"swa_lrs": 0.05, "swa_epoch_start": 1} if average.startswith("Stochastic") else {}
        if average.startswith("EMA"):
            arguments = {"decay": 0.9}
        module = module_of(package, {9: float("nan")})
        average_of = getattr(package.callbacks, average)(**arguments)
        four = run(tmp_path / name, module, average_of, make=trainer_of(package), max_steps=-1, max_epochs=2)
        assert what(four.fallback) == [(9, "non_finite", "rollback")]
        ends.append(weights(module))
    assert all(bool(torch.isfinite(each).all()) for each in ends[0].values())
    assert_same(*ends)


def test_its_logger_gets_our_keys_and_events_stand_beside_them(tmp_path):
    """One event in the log folder; effective rate, gradient norms and counts in the table."""
    logger = other.loggers.CSVLogger(tmp_path, name="run", version="0")
    module = module_of(other, {20: 8.0})
    run(tmp_path, module, make=trainer_of(other), logger=logger)
    rows = list(csv.DictReader((tmp_path / "run/0/metrics.csv").read_text().splitlines()))
    used = [float(row["learning_rate/effective/0"]) for row in rows if row["learning_rate/effective/0"]]
    assert used[:8] == pytest.approx([BASE * warm(step) for step in range(8)])
    assert used[-1] == pytest.approx(BASE / 2)
    assert len([row for row in rows if row["grad_norm/total"]]) == 24
    assert [row["fallback/rollbacks"] for row in rows if row["fallback/rollbacks"]][-1] == "1.0"
    (line,) = (tmp_path / "run/0/events.jsonl").read_text().splitlines()
    assert (json.loads(line)["step"], json.loads(line)["action"]) == (20, "rollback")


def test_the_callbacks_of_placements(tmp_path):
    """UnitMatrices: rows and columns of length 1 after training; AfterStep: one count a step; AdminProfile: omegas."""

    def decoder(placement):
        return lambda: OurDecoder(
            DecoderConfig(vocab_size=VOCABULARY, d_model=8, n_heads=2, n_layers=2, placement=placement)
        )

    make = trainer_of(other)
    module = module_of(other, decoder=decoder(PreNorm()))
    make(tmp_path, UnitMatrices(), max_steps=3).fit(module)
    lengths = module.decoder.embedding.weight.norm(dim=1)
    torch.testing.assert_close(lengths, torch.ones(VOCABULARY), rtol=0, atol=1e-5)
    torch.optim.SGD([torch.zeros(1)])  # from now on its step has hooks, and a subclass that calls it ends twice
    module = module_of(other, decoder=decoder(ProRes()))
    make(tmp_path, AfterStep(), max_steps=3).fit(module)
    counts = [float(each) for name, each in module.named_buffers() if each.numel() == 1 and "taken" in name]
    assert counts
    assert set(counts) == {3.0}
    profile = AdminProfile()
    make(tmp_path, profile, max_steps=1).fit(module_of(other, decoder=decoder(Admin())))
    omegas = profile.state_dict()["omegas"]
    assert len(omegas) == 4
    assert omegas[0] == 1.0
    assert omegas == sorted(omegas)


def test_two_optimizers_are_refused_there_too(tmp_path):
    with pytest.raises(ValueError, match=r"LRFallback needs a loss for its optimizer.*\(Taken, Taken\)"):
        trainer_of(other)(tmp_path, LRFallback(), max_steps=1).fit(module_of(other, optimizers=2))
