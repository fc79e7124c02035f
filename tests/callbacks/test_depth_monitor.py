"""Cases 36, 37, 38, 39, 42, 44, 47: the true gradient norm by depth, cheaply, with any logger and to the last step."""

import copy
import math
import pickle
import subprocess
import sys

import pytest
import torch
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_norms.callbacks.depth_monitor import PICTURE, DepthMonitor
from lightning_norms.metrics import GRAD_NORM, STREAM_RMS, UPDATE_RATIO
from tests.stand_ins import Decoder, Module, loader, seeded, trainer

BLOCKS = ["block_00", "block_01", "block_02"]
OUTSIDE = ["embedding", "final_norm", "head"]


class Memory(Logger):
    """A logger that keeps what it was given."""

    name, version = "memory", 0

    def __init__(self):
        super().__init__()
        self.rows = []

    def log_metrics(self, metrics, step=None):
        self.rows.append((step, dict(metrics)))

    def log_hyperparams(self, *args, **kwargs):
        pass


def quiet(**options):
    return DepthMonitor(**({"every_n_steps": 1, "table": False, "picture": False} | options))


def watch(folder, module=None, monitor=None, data=None, **options):
    """Rows that a logger got from ``monitor`` over a short run."""
    memory = Memory()
    module = seeded(Module) if module is None else module
    run = trainer(folder, monitor or quiet(), logger=memory, **options)
    run.fit(module, data or loader())
    return [row for row in memory.rows if any(key.startswith("grad_norm") for key in row[1])]


class Reference(Module):
    """Also measures its gradients itself, one parameter at a time, before clipping."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.naive, self.previous = [], None

    def on_before_optimizer_step(self, optimizer):
        squares = {}
        for name, parameter in self.named_parameters():
            group = ("block_0" + name.split(".")[2]) if "blocks" in name else name.split(".")[1]
            group = {"exit": "final_norm"}.get(group, group)
            squares[group] = squares.get(group, 0.0) + float(parameter.grad.double().square().sum())
        self.naive.append({group: math.sqrt(square) for group, square in squares.items()})


# --- what is measured -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("clip", [None, 0.01])
def test_norms_are_the_naive_ones_before_clipping(tmp_path, clip):
    module = seeded(Reference)
    rows = watch(tmp_path, module, gradient_clip_val=clip)
    assert [step for step, _ in rows] == [0, 1, 2, 3]
    for (_, logged), naive in zip(rows, module.naive, strict=True):
        assert set(naive) == {*BLOCKS, *OUTSIDE}
        for group, value in naive.items():
            assert logged[GRAD_NORM.of(group)] == pytest.approx(value, rel=1e-6)
        total = math.sqrt(sum(value**2 for value in naive.values()))
        assert logged[GRAD_NORM.of("total")] == pytest.approx(total, rel=1e-6)
        assert clip is None or total > clip


@pytest.mark.parametrize("fused", [False, True])
def test_norms_are_unscaled_under_a_grad_scaler(tmp_path, fused):
    scaler = torch.amp.GradScaler("cpu", init_scale=1024)
    (_, plain), *_ = watch(tmp_path, max_steps=1)
    module = seeded(lambda: Module(optimizer=torch.optim.AdamW, fused=fused))
    (_, mixed), *_ = watch(tmp_path, module, max_steps=1, plugins=[MixedPrecision("16-mixed", "cpu", scaler=scaler)])
    for key, value in plain.items():
        assert mixed[key] == pytest.approx(value, rel=0.01)


def test_a_step_that_the_scaler_skips_is_shown_without_an_update(tmp_path):
    class Overflows(Module):
        def training_step(self, batch, batch_idx):
            return super().training_step(batch, batch_idx) * (1e38 if batch_idx == 0 else 1.0)

    plugins = [MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu", init_scale=1024))]
    rows = watch(tmp_path, seeded(Overflows), plugins=plugins)
    assert [step for step, _ in rows] == [0, 1, 2, 3]
    assert not math.isfinite(rows[0][1]["grad_norm/total"])
    assert "update_ratio/total" not in rows[0][1]
    assert rows[1][1]["update_ratio/total"] > 0


def test_accumulation_is_one_value_a_window_equal_to_the_large_batch(tmp_path):
    whole = watch(tmp_path, data=loader(2, batch_size=8), max_steps=2)
    parts = watch(tmp_path, data=loader(8, batch_size=2), max_steps=2, accumulate_grad_batches=4)
    assert [step for step, _ in parts] == [step for step, _ in whole] == [0, 1]
    for (_, small), (_, large) in zip(parts, whole, strict=True):
        assert small.keys() == large.keys()
        for key, value in large.items():
            assert small[key] == pytest.approx(value, rel=1e-5 if key.startswith("grad") else 2e-3)


def test_a_short_last_window_counts(tmp_path):
    assert len(watch(tmp_path, data=loader(7), max_steps=-1, max_epochs=1, accumulate_grad_batches=3)) == 3


def test_stream_and_update_ratio_are_the_naive_ones(tmp_path):
    module = seeded(Module)
    before = copy.deepcopy(module)
    ((_, logged),) = watch(tmp_path, module, max_steps=1)
    x = before.decoder.embedding(next(iter(loader()))[0])
    for group, block in zip(BLOCKS, before.decoder.blocks, strict=True):
        x = block(x)
        assert logged[STREAM_RMS.of(group)] == pytest.approx(x.square().mean().sqrt().item(), rel=1e-6)
    pairs = {"head": (before.decoder.head, module.decoder.head), "total": (before, module)}
    pairs["block_01"] = (before.decoder.blocks[1], module.decoder.blocks[1])
    for group, (old, new) in pairs.items():
        change = sum((a - b).double().square().sum() for a, b in zip(old.parameters(), new.parameters(), strict=True))
        weight = sum(parameter.double().square().sum() for parameter in old.parameters())
        assert logged[UPDATE_RATIO.of(group)] == pytest.approx((change / weight).sqrt().item(), rel=1e-4)


def test_switches_leave_things_out(tmp_path):
    ((_, logged),) = watch(tmp_path, monitor=quiet(stream=False, updates=False), max_steps=1)
    assert set(logged) == {GRAD_NORM.of(group) for group in (*BLOCKS, *OUTSIDE, "total")}


def test_frozen_groups_are_absent_and_come_back_at_their_depth(tmp_path):
    class Thawing(Module):
        def on_train_batch_start(self, batch, batch_idx):
            self.decoder.embedding.requires_grad_(batch_idx >= 2)

    monitor = quiet()
    rows = watch(tmp_path, seeded(Thawing), monitor)
    assert ["grad_norm/embedding" in logged for _, logged in rows] == [False, False, True, True]
    assert monitor.history.profile("grad_norm/").groups == ("embedding", *BLOCKS, "final_norm", "head")


def test_unused_parameters_count_zero(tmp_path):
    module = seeded(Module)
    module.decoder.blocks[1].extra = nn.Linear(2, 2)
    module.unused_embedding = nn.Linear(2, 2)
    module.decoder.embedding.requires_grad_(False)
    ((_, logged),) = watch(tmp_path, module, max_steps=1)
    assert logged["grad_norm/block_01"] > 0
    assert [key for key, value in logged.items() if value == 0] == ["grad_norm/embedding", "update_ratio/embedding"]


def test_compiled_network_keeps_its_names_and_says_nothing_of_the_stream(tmp_path):
    module = seeded(Module)
    # Lightning only unwraps a compiled LightningModule; the eager backend needs no compiler.
    module.decoder = torch.compile(module.decoder, backend="eager")
    rows = watch(tmp_path, module, max_steps=2)
    assert set(rows[1][1]) == {
        key.of(group) for key in (GRAD_NORM, UPDATE_RATIO) for group in (*BLOCKS, *OUTSIDE, "total")
    }
    plain = watch(tmp_path, max_steps=2)
    assert rows[1][1]["grad_norm/block_00"] == pytest.approx(plain[1][1]["grad_norm/block_00"], rel=1e-4)


def test_module_without_blocks(tmp_path):
    class Flat(Module):
        def __init__(self):
            super().__init__(nn.Sequential(nn.Embedding(11, 4), nn.Linear(4, 11)))

    monitor = DepthMonitor(every_n_steps=1)
    with pytest.warns(UserWarning, match="no depths to tell apart.*no list of repeated blocks"):
        ((_, logged),) = watch(tmp_path, Flat(), monitor, max_steps=1)
    assert {key for key in logged if key.startswith("grad")} == {
        GRAD_NORM.of(group) for group in ("embedding", "other", "total")
    }


class TwoOptimizers(Module):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def configure_optimizers(self):
        matrices = [p for p in self.parameters() if p.ndim > 1]
        vectors = [p for p in self.parameters() if p.ndim < 2]
        return torch.optim.SGD(matrices, lr=0.1), torch.optim.Adam(vectors, lr=0.01)

    def training_step(self, batch, batch_idx):
        first, second = self.optimizers()
        first.zero_grad()
        second.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        first.step()
        if batch_idx % 2 == 0:
            second.step()


def test_two_optimizers_are_counted_and_named_apart(tmp_path):
    monitor = quiet(every_n_steps=2)
    rows = watch(tmp_path, seeded(TwoOptimizers), monitor, max_steps=12)
    assert monitor.state_dict()["counts"] == [8, 4]
    with_second = [step for step, logged in rows if "grad_norm/optimizer_1.total" in logged]
    assert [step for step, logged in rows if "grad_norm/optimizer_0.total" in logged] == [0, 2, 4, 6]
    assert with_second == [0, 4]
    groups = {key.removeprefix("grad_norm/optimizer_1.") for key in rows[0][1] if "grad_norm/optimizer_1" in key}
    assert groups == {*BLOCKS, "final_norm", "head", "total"}
    assert rows[0][1]["update_ratio/optimizer_1.block_00"] > 0


# --- what it costs ------------------------------------------------------------------------------------------------


class Counter(TorchDispatchMode):
    """Counts copies of a single number to the host."""

    def __init__(self):
        super().__init__()
        self.reads = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.reads += function is torch.ops.aten._local_scalar_dense.default
        return function(*args, **(kwargs or {}))


def test_deep_run_costs_two_writes_and_no_read_of_single_numbers(tmp_path):
    memory, decoder = Memory(), seeded(lambda: Decoder(layers=48, width=4))
    run = trainer(tmp_path, quiet(every_n_steps=10), logger=memory, max_steps=20)
    with Counter() as counter:
        run.fit(Module(decoder, optimizer=torch.optim.SGD), loader(batches=20, time=2))
    assert [step for step, _ in memory.rows] == [0, 10]
    assert len(memory.rows[0][1]) == 48 * 3 + 4 * 2
    assert counter.reads < 20  # Lightning's own, at the start


def test_other_steps_have_no_hooks(tmp_path):
    class Looking(Module):
        hooked = ()

        def training_step(self, batch, batch_idx):
            self.hooked += (any(block._forward_hooks for block in self.decoder.blocks),)
            return super().training_step(batch, batch_idx)

    module = Looking()
    watch(tmp_path, module, quiet(every_n_steps=3), max_steps=6)
    assert module.hooked == (True, False, False, True, False, False)
    assert not any(block._forward_hooks for block in module.decoder.blocks)
    assert not module.trainer.optimizers[0]._optimizer_step_post_hooks


def test_weights_after_20_steps_are_equal_bit_for_bit(tmp_path):
    modules = []
    for monitor in ([], [quiet(every_n_steps=3)]):
        module = seeded(Module)
        module.decoder.blocks[0].attention.query = nn.Sequential(
            module.decoder.blocks[0].attention.query, nn.Dropout(0.1)
        )
        torch.manual_seed(1)
        trainer(tmp_path, *monitor, max_steps=20).fit(module, loader())
        modules.append(module)
    for one, other in zip(*(module.parameters() for module in modules), strict=True):
        assert torch.equal(one, other)


# --- state ----------------------------------------------------------------------------------------------------------


def test_interrupted_run_equals_an_uninterrupted_one(tmp_path):
    straight, first, second, memory = (*(quiet(every_n_steps=3) for _ in range(3)), Memory())
    rows = watch(tmp_path, monitor=straight, data=loader(batches=1), max_steps=8)
    assert [step for step, _ in rows] == [0, 3, 6]
    run = trainer(tmp_path, first)
    run.fit(seeded(Module), loader(batches=1))
    run.save_checkpoint(tmp_path / "run.ckpt")
    again = trainer(tmp_path, second, logger=memory, max_steps=8)
    again.fit(seeded(Module, 1), loader(batches=1), ckpt_path=tmp_path / "run.ckpt")
    assert memory.rows == rows[2:]
    assert second.history.logged_steps == [0, 3, 6]
    assert torch.equal(second.history.state_dict()["values"], straight.history.state_dict()["values"])


def test_two_fits_of_one_trainer_go_on_and_another_trainer_starts_afresh(tmp_path):
    monitor, memory, module = quiet(every_n_steps=3), Memory(), Module()
    run = trainer(tmp_path, monitor, logger=memory)
    run.fit(module, loader(batches=4))
    run.fit_loop.epoch_loop.max_steps = 8
    run.fit(module, loader(batches=4))
    assert [step for step, _ in memory.rows] == monitor.history.logged_steps == [0, 3, 6]
    trainer(tmp_path, monitor).fit(Module(Decoder(layers=1)), loader())
    assert monitor.history.steps == [0, 3]
    assert monitor.history.profile("grad_norm/").stacks() == {"": (1,)}


def test_a_fresh_run_after_a_very_short_one_starts_at_step_0(tmp_path):
    monitor = quiet(every_n_steps=3)
    for steps in (2, 4):
        trainer(tmp_path, monitor, max_steps=steps).fit(Module(), loader())
    assert monitor.history.logged_steps == [0, 3]


def test_state_and_callback_can_be_pickled(tmp_path):
    monitor = quiet()
    watch(tmp_path, monitor=monitor)
    torch.save(monitor.state_dict(), tmp_path / "state.pt")
    other = pickle.loads(pickle.dumps(quiet()))
    other.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert other.state_dict()["counts"] == [4]
    assert other.history.profile("grad_norm/") == monitor.history.profile("grad_norm/")


@pytest.mark.parametrize("steps", [0, -1, 1.5, True, "10"])
def test_unusable_interval_is_refused_when_built(steps):
    with pytest.raises(ValueError, match="every_n_steps must be a whole number of at least 1"):
        DepthMonitor(every_n_steps=steps)


@pytest.mark.parametrize(("every", "steps"), [(1, [0, 1, 2, 3, 4, 5]), (3, [0, 3]), (8, [0])])
def test_interval_is_the_loggers_where_none_is_given(tmp_path, every, steps):
    monitor, memory = DepthMonitor(table=False, picture=False), Memory()
    trainer(tmp_path, monitor, logger=memory, max_steps=6, log_every_n_steps=every).fit(Module(), loader())
    assert monitor.history.steps == steps
    assert [step for step, values in memory.rows if "grad_norm/total" in values] == steps


def test_where_loggers_get_nothing_it_says_so(tmp_path):
    monitor, module = DepthMonitor(), Module()
    with pytest.warns(UserWarning, match="log_every_n_steps is 0, so nothing is recorded: give every_n_steps"):
        trainer(tmp_path, monitor, max_steps=2, log_every_n_steps=0).fit(module, loader())
    assert monitor.history.steps == []
    assert not list(tmp_path.rglob("*.png"))


def test_works_in_the_other_lightning_package(tmp_path):
    package = pytest.importorskip("pytorch_lightning")
    from lightning_norms.callbacks.residual_rescale import ResidualRescale

    class Other(package.LightningModule):
        def __init__(self):
            super().__init__()
            self.decoder = seeded(Decoder)

        def training_step(self, batch, batch_idx):
            return self.decoder(batch[0]).square().mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    module, monitor = Other(), quiet(every_n_steps=2)
    quietly = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    options = {"accelerator": "cpu", "max_steps": 4, "enable_model_summary": False, "log_every_n_steps": 1}
    run = package.Trainer(callbacks=[ResidualRescale(), monitor], default_root_dir=tmp_path, **quietly, **options)
    run.fit(module, loader())
    assert module.residual_rescaled
    assert monitor.history.steps == [0, 2]


# --- loggers and the end of a run -----------------------------------------------------------------------------------


def test_every_logger_gets_the_rows(tmp_path):
    loggers = [CSVLogger(tmp_path / "csv"), Memory(), TensorBoardLogger(tmp_path / "board")]
    run = trainer(tmp_path, DepthMonitor(every_n_steps=2, table=False), logger=loggers)
    run.fit(Module(), loader())
    lines = (tmp_path / "csv/lightning_logs/version_0/metrics.csv").read_text().splitlines()
    assert "grad_norm/block_02" in lines[0].split(",")
    assert len(lines) == 3
    assert [step for step, _ in loggers[1].rows] == [0, 2]
    assert (tmp_path / "csv/lightning_logs/version_0" / PICTURE).exists()
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(loggers[2].log_dir)
    board.Reload()
    assert board.Tags()["images"] == ["grad_norm_by_depth"]
    assert [event.step for event in board.Scalars("grad_norm/total")] == [0, 2]


def test_without_logger_the_end_shows_a_table_and_a_picture(tmp_path, capsys):
    trainer(tmp_path, DepthMonitor(every_n_steps=2)).fit(Module(), loader())
    shown = capsys.readouterr().out
    assert "block_02" in shown
    assert "bottom/top gradient ratio: " in shown
    assert shown.count("Gradient norm by depth (L2, before clipping)") == 1
    assert str(tmp_path / PICTURE) in shown.replace("\n", "")
    assert (tmp_path / PICTURE).read_bytes().startswith(b"\x89PNG")


def test_killed_run_still_shows_its_picture_once(tmp_path, capsys):
    class Killed(Module):
        def on_before_optimizer_step(self, optimizer):
            if self.trainer.global_step == 2:
                raise RuntimeError("killed")

    module = Killed()
    with pytest.raises(RuntimeError, match="killed"):
        trainer(tmp_path, DepthMonitor(every_n_steps=1)).fit(module, loader())
    assert capsys.readouterr().out.count("bottom/top gradient ratio: ") == 1
    assert (tmp_path / PICTURE).exists()
    assert not any(block._forward_hooks for block in module.decoder.blocks)


def test_a_failing_picture_does_not_end_a_finished_run(tmp_path, monkeypatch):
    monkeypatch.setattr("lightning_norms.reports.depth_picture.depth_heat_map", lambda *_: 1 / 0)
    with pytest.warns(UserWarning, match="the run is fine, but its table or picture failed: ZeroDivisionError"):
        trainer(tmp_path, DepthMonitor(every_n_steps=2, table=False)).fit(Module(), loader())


def test_dead_run_with_nan_still_ends_with_a_picture(tmp_path, capsys):
    class Dead(Module):
        def training_step(self, batch, batch_idx):
            return super().training_step(batch, batch_idx) * (math.nan if batch_idx else 1.0)

    trainer(tmp_path, DepthMonitor(every_n_steps=1)).fit(Dead(), loader())
    assert "nan at step 3" in capsys.readouterr().out
    assert (tmp_path / PICTURE).exists()


def test_logged_steps_never_go_back(tmp_path):
    class Rewinding(Module):
        def on_train_batch_start(self, batch, batch_idx):
            if batch_idx == 5:
                self.trainer.fit_loop.epoch_loop._batches_that_stepped = 1

    steps = [step for step, _ in watch(tmp_path, Rewinding(), max_steps=8)]
    assert steps == sorted(steps)
    assert len(steps) == 8


@pytest.mark.slow
def test_sharded_norms_are_the_true_ones_on_every_rank(tmp_path):
    command = [sys.executable, "-m", "tests.callbacks.two_ranks", "sharded", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    (zero, before), (one, _) = (torch.load(tmp_path / f"rank_{rank}.pt", weights_only=True) for rank in range(2))
    from lightning_norms.callbacks.residual_rescale import ResidualRescale
    from lightning_norms.rescale_rules import DeepNormRescale

    module, monitor = seeded(lambda: Module(Decoder(layers=2))), quiet()
    assert torch.equal(before[0], module.decoder.blocks[0].attention.writer.weight)
    trainer(tmp_path, ResidualRescale(DeepNormRescale()), monitor).fit(module, loader(batches=8, batch_size=4))
    single = monitor.history.state_dict()
    assert zero["columns"] == one["columns"] == single["columns"]
    assert torch.equal(zero["values"], one["values"])
    torch.testing.assert_close(zero["values"][:1], single["values"][:1], rtol=1e-4, atol=1e-7)
    torch.testing.assert_close(zero["values"], single["values"], rtol=2e-2, atol=1e-4)
