"""A snapshot is a copy, complete, and comes back bit for bit; whatever it should leave alone stays."""

import copy
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import nn
from torch.optim import LBFGS, SGD, Adadelta, Adafactor, Adagrad, Adam, AdamW, RMSprop
from torch.optim.swa_utils import AveragedModel

from lightning_norms.rescue.averages import find_averages
from lightning_norms.rescue.snapshot import Snapshot
from tests.stand_ins import Module, lightning_callback, loader, seeded, trainer

OPTIMIZERS = {
    "AdamW plain": partial(AdamW, lr=0.01, foreach=False),
    "AdamW foreach": partial(AdamW, lr=0.01, foreach=True),
    "AdamW fused": partial(AdamW, lr=0.01, fused=True),
    "AdamW amsgrad": partial(AdamW, lr=0.01, amsgrad=True),
    "AdamW lr tensor": partial(AdamW, lr=torch.tensor(0.01)),
    "SGD": partial(SGD, lr=0.1),
    "SGD momentum": partial(SGD, lr=0.1, momentum=0.9, weight_decay=0.1),
    "Adafactor": partial(Adafactor, lr=0.01),
    "RMSprop": partial(RMSprop, lr=0.01, momentum=0.9, centered=True),
    "Adagrad": partial(Adagrad, lr=0.1),
    "Adadelta": partial(Adadelta, lr=1.0),
    "LBFGS": partial(LBFGS, lr=0.1, max_iter=3),
}
all_optimizers = pytest.mark.parametrize("kind", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())


class Net(nn.Module):
    """Matrices, vectors, a scalar, BatchNorm's float and whole-number buffers, one that checkpoints do not hold."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 1))
        self.gate = nn.Parameter(torch.tensor(1.0))
        self.register_buffer("seen", torch.zeros(()), persistent=False)

    def forward(self, x):
        self.seen += 1
        return self.gate * self.layers(x)


def net():
    return seeded(Net)


def batches(number, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(8, 4, generator=generator) for _ in range(number)]


def step(net, optimizer, batch):
    def closure():
        optimizer.zero_grad()
        loss = net(batch).square().mean() + (net(batch) - 1).abs().mean()
        loss.backward()
        return loss

    return optimizer.step(closure).item()


def train(net, optimizer, number, seed=1):
    return [step(net, optimizer, batch) for batch in batches(number, seed)]


def everything(net, *optimizers):
    """An independent copy of all there is, made by other means than the code under test."""
    states = [optimizer.state_dict()["state"] for optimizer in optimizers]
    return copy.deepcopy((dict(net.named_parameters()), dict(net.named_buffers()), states))


def equal(one, other):
    """Same structure, same bits."""
    if isinstance(one, torch.Tensor):
        return type(one) is type(other) and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(equal(a, b) for a, b in zip(one, other, strict=True))
    return one == other


# Exactly back


@all_optimizers
def test_back_bit_for_bit_and_the_same_way_again(kind):
    model = net()
    optimizer = kind(model.parameters())
    train(model, optimizer, 3)
    there = everything(model, optimizer)
    snapshot = Snapshot.take(model, [optimizer], step=3)
    first = train(model, optimizer, 4, seed=2)
    assert not equal(everything(model, optimizer), there)
    assert snapshot.restore(model, [optimizer]) == ()
    assert equal(everything(model, optimizer), there)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert train(model, optimizer, 4, seed=2) == first  # equal moments: the loss does not jump (to the last bit)
    snapshot.restore(model, [optimizer])  # and once more from the same snapshot
    assert equal(everything(model, optimizer), there)


@all_optimizers
def test_before_the_first_step(kind):
    model = net()
    optimizer = kind(model.parameters())
    there = everything(model, optimizer)
    snapshot = Snapshot.take(model, [optimizer])
    first = train(model, optimizer, 3)
    snapshot.restore(model, [optimizer])
    assert equal(everything(model, optimizer), there)
    assert train(model, optimizer, 3) == first


@all_optimizers
def test_a_step_without_gradients_after_it_changes_nothing(kind):
    """What the rest of ``optimizer.step`` is when a callback restores inside the closure."""
    if kind.func is LBFGS:
        pytest.skip("LBFGS has no single closure per step")
    model = net()
    optimizer = kind(model.parameters())
    train(model, optimizer, 2)
    there = everything(model, optimizer)
    snapshot = Snapshot.take(model, [optimizer])
    train(model, optimizer, 2)

    def closure():
        model(batches(1)[0]).sum().backward()
        snapshot.restore(model, [optimizer])

    optimizer.step(closure)
    assert equal(everything(model, optimizer), there)


def test_in_place_so_that_views_and_graphs_stay_true():
    model = net()
    optimizer = Adam(model.parameters())
    train(model, optimizer, 2)
    places = [each.data_ptr() for each in [*model.parameters(), *model.buffers()]]
    moments = [state["exp_avg"].data_ptr() for state in optimizer.state.values()]
    snapshot = Snapshot.take(model, [optimizer])
    train(model, optimizer, 2)
    snapshot.restore(model, [optimizer])
    assert [each.data_ptr() for each in [*model.parameters(), *model.buffers()]] == places
    assert [state["exp_avg"].data_ptr() for state in optimizer.state.values()] == moments


def test_non_finite_numbers_leave_no_trace():
    model = net()
    optimizer = AdamW(model.parameters())
    train(model, optimizer, 2)
    there = everything(model, optimizer)
    snapshot = Snapshot.take(model, [optimizer])
    step(model, optimizer, torch.full((8, 4), torch.nan))
    assert not torch.isfinite(model.layers[0].weight).any()
    snapshot.restore(model, [optimizer])
    assert equal(everything(model, optimizer), there)


def test_two_optimizers_and_a_parameter_outside_of_the_module():
    model, outside = net(), nn.Parameter(torch.ones(2))
    first, second = AdamW(model.layers.parameters()), SGD([model.gate, outside], lr=0.1, momentum=0.9)
    outside.grad = torch.ones(2)
    step(model, first, batches(1)[0])
    second.step()
    there, there_outside = everything(model, first, second), outside.detach().clone()
    snapshot = Snapshot.take(model, [first, second])
    outside.grad = torch.ones(2)
    step(model, first, batches(1)[0])
    second.step()
    snapshot.restore(model, [first, second])
    assert equal(everything(model, first, second), there)
    assert torch.equal(outside, there_outside)
    assert outside.grad is None


def test_entries_that_belong_to_no_parameter():
    model = net()
    optimizer = SGD(model.parameters(), lr=0.1)
    optimizer.state["count"] = 3
    snapshot = Snapshot.take(model, [optimizer])
    optimizer.state["count"], optimizer.state["new"] = 4, [1]
    snapshot.restore(model, [optimizer])
    assert dict(optimizer.state) == {"count": 3}


# A copy


def test_the_snapshot_shares_no_memory_with_the_run():
    model = net()
    optimizer = LBFGS(model.parameters(), max_iter=3)
    train(model, optimizer, 2)
    snapshot = Snapshot.take(model, [optimizer])
    kept = copy.deepcopy(snapshot.state_dict())
    train(model, optimizer, 2)
    assert equal(snapshot.state_dict(), kept)
    snapshot.restore(model, [optimizer])
    train(model, optimizer, 2)
    assert equal(snapshot.state_dict(), kept)


def big():
    model = nn.ModuleDict({"body": nn.Linear(2000, 2000, bias=False), "head": nn.Linear(1000, 1000, bias=False)})
    model["body"].requires_grad_(False)
    optimizer = Adam(model.parameters())
    model["head"](torch.ones(1, 1000)).sum().backward()
    optimizer.step()
    return model, optimizer


def test_memory_is_that_of_the_trained_part_and_stays_so():
    model, optimizer = big()
    snapshot = Snapshot.take(model, [optimizer])
    places = {tensor.data_ptr() for tensor in snapshot._entries.values()}
    for _ in range(2):
        snapshot = Snapshot.take(model, [optimizer], reuse=snapshot)
    assert {tensor.data_ptr() for tensor in snapshot._entries.values()} == places
    assert snapshot.bytes == 3 * 4 * 1_000_000 + 4  # weights, two moments, one counter
    assert all(tensor.device.type == "cpu" for tensor in snapshot._entries.values())


def test_reuse_takes_what_fits_and_spends_the_old_one():
    model = net()
    optimizer = AdamW(model.parameters())
    start = Snapshot.take(model, [optimizer])
    train(model, optimizer, 2)
    there = everything(model, optimizer)
    snapshot = Snapshot.take(model, [optimizer], step=2, reuse=start)
    for use in (partial(start.restore, model, [optimizer]), start.state_dict):
        with pytest.raises(RuntimeError, match="step 0 is spent"):
            use()
    assert (start.bytes, snapshot.step) == (0, 2)
    train(model, optimizer, 2)
    snapshot.restore(model, [optimizer])
    assert equal(everything(model, optimizer), there)


# Left alone


def test_a_cut_made_before_stays_and_so_do_groups_schedules_and_random_numbers():
    model = net()
    optimizer = AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
    snapshot = Snapshot.take(model, [optimizer])
    train(model, optimizer, 2)
    schedule.step()
    for rate in (5e-4, 2.5e-4):
        optimizer.param_groups[0].update(lr=rate, weight_decay=0.5, betas=(0.8, 0.9))
        before = schedule.state_dict(), torch.get_rng_state().clone()
        snapshot.restore(model, [optimizer])
        group = optimizer.param_groups[0]
        assert (group["lr"], group["weight_decay"], group["betas"]) == (rate, 0.5, (0.8, 0.9))
        assert equal((schedule.state_dict(), torch.get_rng_state()), before)


def test_frozen_parameters_are_not_touched():
    model = net()
    model.gate.requires_grad_(False)
    optimizer = AdamW(model.parameters())
    snapshot = Snapshot.take(model, [optimizer])
    with torch.no_grad():
        model.gate.fill_(7)
    snapshot.restore(model, [optimizer])
    assert model.gate.item() == 7


def test_unfrozen_since_keeps_its_weight_and_loses_its_moments():
    model = net()
    head, body = model.layers[2], model.layers[0]
    body.requires_grad_(False)
    optimizer = AdamW([*head.parameters(), model.gate])
    train(model, optimizer, 2)
    there = head.weight.detach().clone()
    snapshot = Snapshot.take(model, [optimizer])
    body.requires_grad_(True)
    optimizer.add_param_group({"params": list(body.parameters())})
    train(model, optimizer, 2)
    moved = body.weight.detach().clone()
    assert snapshot.restore(model, [optimizer]) == ("layers.0.weight", "layers.0.bias")
    assert torch.equal(head.weight, there)
    assert torch.equal(body.weight, moved)
    assert set(optimizer.state) == {*head.parameters(), model.gate}
    train(model, optimizer, 1)


def test_frozen_since_is_restored():
    model = net()
    optimizer = AdamW(model.parameters())
    train(model, optimizer, 2)
    there = everything(model, optimizer)
    snapshot = Snapshot.take(model, [optimizer])
    train(model, optimizer, 2)
    model.layers[0].requires_grad_(False)
    assert snapshot.restore(model, [optimizer]) == ()
    model.layers[0].requires_grad_(True)
    assert equal(everything(model, optimizer), there)


def test_frozen_for_the_moment_of_the_snapshot_only():
    """toggle_optimizer freezes the other network of a GAN while one steps."""
    model = net()
    optimizer = AdamW(model.parameters())
    train(model, optimizer, 2)
    there = everything(model, optimizer)
    model.gate.requires_grad_(False)
    snapshot = Snapshot.take(model, [optimizer])
    model.gate.requires_grad_(True)
    train(model, optimizer, 2)
    snapshot.restore(model, [optimizer])
    assert equal(everything(model, optimizer), there)


def test_a_new_optimizer_gets_the_moments():
    model = net()
    optimizer = AdamW(model.parameters())
    train(model, optimizer, 3)
    there = everything(model, optimizer)
    snapshot = Snapshot.take(model, [optimizer])
    first = train(model, optimizer, 2)
    new = AdamW(model.parameters())
    snapshot.restore(model, [new])
    assert equal(everything(model, new), there)
    assert train(model, new, 2) == first
    again = copy.deepcopy(there)
    snapshot.restore(model, [new])
    assert equal(everything(model, new), again)  # the moments that it got were a copy


# Odd modules


def test_tied_weights_are_kept_once_and_stay_tied():
    model = nn.ModuleDict({"one": nn.Linear(3, 3, bias=False), "two": nn.Linear(3, 3, bias=False)})
    model["two"].weight = model["one"].weight
    there = model["one"].weight.detach().clone()
    snapshot = Snapshot.take(model, [])
    assert snapshot.bytes == 36
    with torch.no_grad():
        model["two"].weight.zero_()
    snapshot.restore(model, [])
    assert torch.equal(model["one"].weight, there)
    assert model["two"].weight is model["one"].weight


def test_buffers_that_are_expanded_empty_none_or_of_a_new_shape():
    model = nn.Module()
    model.register_buffer("expanded", torch.arange(3.0).expand(1000, 3))
    model.register_buffer("empty", torch.zeros(0))
    model.register_buffer("none", None)
    model.register_buffer("cache", torch.ones(2))
    model.register_buffer("gone", torch.ones(1))
    model.channels_last = nn.Parameter(torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last))
    picture = model.channels_last.detach().clone()
    snapshot = Snapshot.take(model, [])
    assert snapshot.bytes == 4 * (3 + 2 + 1 + 120)
    with torch.no_grad():
        model.channels_last.zero_()
    model.expanded[0] = 7
    model.cache = torch.zeros(5)
    model.later = torch.zeros(1)
    del model.gone
    snapshot.restore(model, [])
    assert torch.equal(model.expanded, torch.arange(3.0).expand(1000, 3))
    assert torch.equal(model.cache, torch.ones(2))
    assert torch.equal(model.channels_last, picture)
    model.cache.zero_()
    snapshot.restore(model, [])
    assert torch.equal(model.cache, torch.ones(2))


def test_lazy_parameters_are_left_out_until_they_have_a_shape():
    model = nn.Sequential(nn.LazyLinear(2))
    snapshot = Snapshot.take(model, [])
    assert snapshot.bytes == 0
    model(torch.ones(1, 3))
    assert snapshot.restore(model, []) == ("0.weight", "0.bias")


def test_half_precision_and_whole_numbers_keep_their_type():
    model = nn.Module()
    model.short = nn.Parameter(torch.tensor([1.0, 2.0], dtype=torch.bfloat16))
    model.register_buffer("number", torch.tensor(2**40 + 1))
    there = everything(model)
    snapshot = Snapshot.take(model, [])
    with torch.no_grad():
        model.short.zero_()
        model.number.zero_()
    snapshot.restore(model, [])
    assert equal(everything(model), there)


class Quantized(torch.Tensor):
    """A tensor that is more than its numbers."""


def test_a_tensor_subclass_is_copied_by_its_own_means():
    weight = nn.Parameter(torch.ones(2))
    optimizer = SGD([weight], lr=0.1)
    optimizer.state[weight]["moment"] = torch.ones(2).as_subclass(Quantized)
    snapshot = Snapshot.take(nn.Module(), [optimizer])
    optimizer.state[weight]["moment"].zero_()
    for _ in range(2):
        snapshot.restore(nn.Module(), [optimizer])
        assert equal(optimizer.state[weight]["moment"], torch.ones(2).as_subclass(Quantized))
        optimizer.state[weight]["moment"].zero_()


# Averages


@pytest.mark.parametrize("inside", [False, True], ids=["beside the module", "a part of it"])
def test_an_average_comes_back(inside):
    model = net()
    average = AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9), use_buffers=True)
    average.requires_grad_(False)
    owner = nn.ModuleDict({"net": model, "ema": average}) if inside else model
    optimizer = SGD(model.parameters(), lr=0.1)
    averages = [] if inside else [average]
    for _ in range(2):
        train(model, optimizer, 1)
        average.update_parameters(model)
    there = everything(average)
    snapshot = Snapshot.take(owner, [optimizer], averages=averages)
    step(model, optimizer, torch.full((8, 4), torch.nan))
    average.update_parameters(model)
    assert not equal(everything(average), there)
    snapshot.restore(owner, [optimizer], averages=averages)
    assert equal(everything(average), there)


def test_the_average_of_a_frozen_weight_is_not_kept():
    model = net()
    model.layers.requires_grad_(False)
    small = Snapshot.take(model, [], averages=[AveragedModel(model)]).bytes
    # The gate and the buffers of each, and the average's counter.
    assert small == 2 * (4 + sum(buffer.nbytes for buffer in model.buffers())) + 8


# In Lightning


class Rewind(Callback):
    """Takes a snapshot after batch 2 and goes back to it before step 5."""

    def tools(self, trainer):
        return getattr(trainer.precision_plugin, "scaler", None), find_averages(trainer.callbacks)

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        if trainer.global_step == 5:
            self.unknown = self.snapshot.restore(pl_module, trainer.optimizers, *self.tools(trainer))

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        wrapped = pl_module.optimizers()
        if batch_idx == 2:
            self.snapshot = Snapshot.take(pl_module, [wrapped], *self.tools(trainer), step=trainer.global_step)
            self.there = everything(pl_module, *trainer.optimizers)
        if batch_idx == 4:
            self.moved = everything(pl_module, *trainer.optimizers)
        if batch_idx == 5:
            self.back = everything(pl_module, *trainer.optimizers)
            self.step = trainer.global_step


FP16 = partial(MixedPrecision, "16-mixed", "cpu")


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
def test_inside_the_closure(tmp_path, precision, fused):
    if fused and precision == "fp16":
        pytest.skip("a fused optimizer under a GradScaler must see a gradient")
    rewind = Rewind()
    plugins = [] if precision == "fp32" else [FP16(scaler=torch.amp.GradScaler("cpu", init_scale=1024))]
    module = seeded(partial(Module, fused=fused))
    run = trainer(tmp_path, rewind, max_steps=6, plugins=plugins)
    run.fit(module, loader())
    assert equal(rewind.back, rewind.there)
    assert not equal(rewind.moved, rewind.there)
    assert (rewind.step, run.global_step, rewind.unknown, rewind.snapshot.step) == (6, 6, (), 3)


def test_the_scaler_comes_back():
    model = net()
    optimizer, scaler = AdamW(model.parameters()), torch.amp.GradScaler("cpu", init_scale=1024)

    def scaled(batch):
        scaler.scale(model(batch).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()

    scaled(batches(1)[0])
    there = scaler.state_dict()
    snapshot = Snapshot.take(model, [optimizer], scaler)
    scaled(batches(1)[0])
    scaled(torch.full((8, 4), torch.nan))
    assert scaler.state_dict() != there
    snapshot.restore(model, [optimizer], scaler)
    assert scaler.state_dict() == there
    Snapshot.take(model, [], torch.amp.GradScaler("cpu", enabled=False)).restore(model, [], scaler)


class AverageNow(Callback):
    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        average = find_averages(trainer.callbacks)[0]._average_model
        if batch_idx == 2:
            self.there = everything(average)
        if batch_idx == 4:
            self.moved = everything(average)
            rewind = next(each for each in trainer.callbacks if isinstance(each, Rewind))
            rewind.snapshot.restore(pl_module, trainer.optimizers, None, find_averages(trainer.callbacks))
            self.back = everything(average)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [("EMAWeightAveraging", {"decay": 0.5}), ("StochasticWeightAveraging", {"swa_lrs": 0.01, "swa_epoch_start": 2})],
)
def test_the_average_of_lightnings_callbacks(tmp_path, name, arguments):
    watch = AverageNow()
    # Before the average's callback, the snapshot would hold the average one update behind.
    trainer(tmp_path, lightning_callback(name)(**arguments), Rewind(), watch, max_steps=5).fit(seeded(Module), loader())
    assert equal(watch.back, watch.there)
    if name == "EMAWeightAveraging":
        assert not equal(watch.moved, watch.there)


def test_a_callback_that_counts_by_itself():
    model, callback = net(), Callback()
    callback._average_model, callback.n_averaged = net(), torch.tensor(2)
    snapshot = Snapshot.take(model, [], averages=find_averages([callback]))
    callback.n_averaged += 1
    with torch.no_grad():
        callback._average_model.gate.zero_()
    snapshot.restore(model, [], averages=[callback])
    assert (callback.n_averaged, callback._average_model.gate) == (2, 1)


def test_only_averages_are_found():
    metric, plain = Callback(), Callback()
    metric.metric, plain.module = nn.Linear(1, 1), net()
    schema = Callback()
    schema.schema = nn.Linear(1, 1)
    average, ema = Callback(), Callback()
    average.kept, ema.ema_model = AveragedModel(net()), net()
    lightnings = lightning_callback("EMAWeightAveraging")()
    assert find_averages([metric, average, plain, ema, schema, lightnings]) == (
        average,
        ema,
    )


# State


@all_optimizers
def test_through_a_checkpoint(kind, tmp_path):
    model = net()
    optimizer = kind(model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=1024)
    train(model, optimizer, 2)
    average = AveragedModel(model)
    there = everything(model, optimizer)
    state = Snapshot.take(model, [optimizer], scaler, [average], step=2).state_dict()
    weights = {entry["name"]: entry["value"] for entry in state["entries"] if entry["kind"] == "parameter"}
    assert torch.equal(weights["layers.0.weight"], model.layers[0].weight)
    torch.save(state, tmp_path / "state.pt")
    loaded = torch.load(tmp_path / "state.pt", weights_only=True)
    snapshot = Snapshot.from_state(loaded)
    for entry in loaded["entries"]:
        if entry["kind"] == "parameter":
            entry["value"].fill_(7)  # from_state made a copy
    assert snapshot.step == 2
    train(model, optimizer, 2)
    with torch.no_grad():
        average.module.gate.zero_()
    snapshot.restore(model, [optimizer], scaler, [average])
    assert equal(everything(model, optimizer), there)
    assert torch.equal(average.module.gate, model.gate)
    assert equal(snapshot.state_dict(), state)


@pytest.mark.slow
def test_two_ranks_with_sharded_weights(tmp_path):
    command = [sys.executable, "-m", "tests.rescue.snapshots_on_two_ranks", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in tmp_path.glob("held_*")) == ["held_0", "held_1"]
