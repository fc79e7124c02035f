"""What a skip, a rollback and a restart leave behind, bit for bit."""

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import nn
from torch.optim import SGD, Adafactor, AdamW, RMSprop

from lightning_norms.callbacks.lr_fallback import LRFallback
from lightning_norms.callbacks.warmup import Warmup
from lightning_norms.learning_rate import factors_of
from lightning_norms.schedules import LinearWarmup
from tests.callbacks.fallback_runs import Learner, Watch, assert_same, everything, fit, is_finite, what
from tests.stand_ins import Decoder, seeded

pytestmark = pytest.mark.filterwarnings("ignore:Warmup takes .* optimizer steps, but")
OPTIMIZERS = {
    "adamw": {"optimizer": AdamW, "foreach": False, "weight_decay": 0.1},
    "foreach": {"optimizer": AdamW, "foreach": True, "weight_decay": 0.1},
    "fused": {"optimizer": AdamW, "fused": True, "weight_decay": 0.1},
    "amsgrad": {"optimizer": AdamW, "amsgrad": True},
    "sgd": {"optimizer": SGD, "momentum": 0.9, "weight_decay": 0.1},
    "adafactor": {"optimizer": Adafactor, "weight_decay": 0.1},
    "rmsprop": {"optimizer": RMSprop, "momentum": 0.9, "weight_decay": 0.1},
}
CLIPPED = {"gradient_clip_val": 0.5}


def scaled():
    return {"plugins": [MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu", init_scale=1024))]}


PRECISIONS = {"32": dict, "bf16": lambda: {"precision": "bf16-mixed"}, "16": scaled}
RUNS = [
    *((optimizer, "32", clipped) for optimizer in OPTIMIZERS for clipped in (False, True)),
    *((optimizer, "bf16", True) for optimizer in ("adamw", "sgd")),
    *((optimizer, "16", clipped) for optimizer, clipped in (("adamw", True), ("fused", False), ("sgd", True))),
]


class Normed(Learner):
    """Has buffers that every forward pass changes, and one that a NaN would stay in."""

    def __init__(self, faults, **options):
        super().__init__(faults, decoder=seeded(lambda: Decoder(2)), **options)
        self.statistics = nn.BatchNorm1d(8)
        self.register_buffer("constant", torch.ones(3))
        self.decoder.exit.register_forward_hook(self.normalise)

    def normalise(self, module, inputs, output):
        if self.fault() == "nan":
            output = output * float("nan")
        return output + 0.1 * self.statistics(output.flatten(0, 1)).view_as(output)


class Clock(Callback):
    """The factor clock and the scale after each step."""

    def __init__(self):
        self.clocks, self.scales = [], []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.clocks.append(factors_of(trainer.optimizers[0]).clock)
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        self.scales.append(scaler.get_scale() if scaler else None)


@pytest.mark.parametrize(
    ("optimizer", "precision", "clipped", "step"),
    # Under a scaler a NaN is the scaler's, and the very first loss has nothing to be high against.
    [(*run, step) for run in RUNS for step in (0, 7) if step or run[1] != "16"],
)
def test_a_skipped_step_moves_nothing(optimizer, precision, clipped, step, tmp_path):
    """Weights, moments, running statistics, step counters and the warmup's clock are bit-equal; clip, AMP or not."""
    kind = "huge" if step else "nan"
    module, watch, clock = Normed({step: kind}, **OPTIMIZERS[optimizer]), Watch(step), Clock()
    options = PRECISIONS[precision]() | (CLIPPED if clipped else {})
    fallback = fit(tmp_path, module, Warmup(LinearWarmup(20)), watch, clock, steps=10, **options)
    assert what(fallback) == [(step, "non_finite" if kind == "nan" else "spike", "skip")]
    assert_same(watch.before[step], watch.after[step])
    assert clock.clocks == [*range(1, step + 1), step, *range(step + 1, 10)]
    assert set(clock.scales) <= {None, 1024.0}
    assert is_finite(module)
    assert not torch.equal(module.statistics.running_mean, watch.after[step]["buffers/statistics.running_mean"])


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize(("optimizer", "precision"), [("adamw", "16"), ("fused", "16"), ("adamw", "bf16")])
def test_what_is_judged_is_undivided_and_unscaled(optimizer, precision, accumulate, tmp_path):
    """Losses and gradient norms of the last 16 steps are those in full precision, up to rounding."""
    seen = {}
    for name in ("32", precision):
        module = Learner(**OPTIMIZERS[optimizer])
        options = PRECISIONS[name]() | {"accumulate_grad_batches": accumulate}
        seen[name] = fit(tmp_path, module, steps=20, **options).rescue.watch.spike
        means = torch.stack(module.losses).view(20, accumulate).mean(1)[-16:]
        assert seen[name].losses == pytest.approx(means.tolist(), rel=1e-5)
    assert seen["32"].losses == pytest.approx(seen[precision].losses, rel=0.03)
    assert seen["32"].norms == pytest.approx(seen[precision].norms, rel=0.2)


@pytest.mark.parametrize("accumulate", [1, 3])
def test_running_statistics_go_back_to_before_the_window(accumulate, tmp_path):
    """Three micro-batches have changed them; the step is skipped, so all three are undone."""
    module, watch = Normed({4: "nan"}), Watch(4)
    fit(tmp_path, module, watch, steps=6, accumulate_grad_batches=accumulate)
    assert_same(watch.before[4], watch.after[4])
    assert watch.after[4]["buffers/statistics.num_batches_tracked"] == 4 * accumulate


def test_a_buffer_that_other_code_changes_between_steps_stays(tmp_path):
    """A counter kept in on_train_batch_end is not the forward pass's."""

    class Counts(Normed):
        def on_train_batch_end(self, outputs, batch, batch_idx):
            self.constant += 1

    module = Counts({4: "nan"})
    fit(tmp_path, module, steps=6)
    assert module.constant.tolist() == [7.0] * 3


class Snapshots(Callback):
    """Everything after some step, and again at the first forward pass after the event."""

    def __init__(self, at):
        self.at, self.kept, self.back = at, None, None

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.global_step == self.at:
            self.kept = everything(trainer, pl_module)

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        fallback = trainer.callbacks[0]
        if self.back is None and fallback.rescue.ladder.rollbacks + fallback.rescue.ladder.restarts == 1:
            self.back = everything(trainer, pl_module)


@pytest.mark.parametrize("max_rollbacks", [1, 0], ids=["rollback", "restart"])
@pytest.mark.parametrize(("optimizer", "precision", "clipped"), RUNS)
def test_going_back_is_bit_for_bit(optimizer, precision, clipped, max_rollbacks, tmp_path):
    """Case 25: at step 9 weights, buffers, moments and counters equal those of step 6 (of step 0 after a restart)."""
    at = 6 if max_rollbacks else 0
    module, kept = Normed({9: "huge"}, **OPTIMIZERS[optimizer]), Snapshots(at)
    fallback = LRFallback(max_skips=0, max_rollbacks=max_rollbacks, snapshot_every_n_steps=6)
    options = PRECISIONS[precision]() | (CLIPPED if clipped else {})
    fit(tmp_path, module, kept, fallback=fallback, steps=12, **options)
    assert what(fallback) == [(9, "divergence", "rollback" if max_rollbacks else "restart")]
    assert_same(kept.kept, kept.back)
    assert is_finite(module)


@pytest.mark.parametrize("optimizer", ["adamw", "fused", "sgd"])
def test_the_same_batches_give_the_same_losses_again(optimizer, tmp_path):
    """Case 31: from step 16 on, an epoch of 16 batches, and once more; the cut is 1 - 1e-12, so nothing differs."""
    module = Learner({31: "nan"}, **OPTIMIZERS[optimizer])
    fallback = LRFallback(max_skips=0, snapshot_every_n_steps=16, cut=1 - 1e-12)
    fit(tmp_path, module, fallback=fallback, steps=47)
    assert what(fallback) == [(31, "non_finite", "rollback")]
    torch.testing.assert_close(torch.stack(module.losses[32:47]), torch.stack(module.losses[16:31]), rtol=0, atol=1e-6)


def test_a_ramp_after_a_restart_under_amp_is_that_in_full_precision(tmp_path):
    """Lightning puts the factors on before the step is judged in full precision, and after it under a GradScaler."""
    used = {}
    for name in ("32", "16"):

        class Used(Callback):
            def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
                used.setdefault(name, []).append(factors_of(trainer.optimizers[0]).used()[0])  # noqa: B023

        fallback = LRFallback(max_skips=0, max_rollbacks=0, restart_warmup_steps=4, recovery_steps=6)
        fit(tmp_path, Learner({3: "huge"}), Used(), fallback=fallback, steps=12, **PRECISIONS[name]())
        assert [action for *_, action in what(fallback)] == ["restart"]
    assert used["32"] == pytest.approx(used["16"], rel=1e-12)
    ramp = [0.25, 0.5, 0.75, 1, 1, 1, 1, 1]
    recovery = [0.5 + 0.5 * min(6, quiet) / 6 for quiet in range(1, 9)]
    expected = [0.01 * a * b for a, b in zip(ramp, recovery, strict=True)]
    assert used["32"][4:] == pytest.approx(expected, rel=1e-12)
