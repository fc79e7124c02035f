"""diagnose on other people's models: the right word, the number behind it, and nothing of theirs changed."""

import copy
import json
import os
import random
import re

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer, seed_everything
from lightning.pytorch.plugins import MixedPrecision
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_norms
from lightning_norms import (
    DecoderConfig,
    DecoderModule,
    LRFallback,
    ResidualRescale,
    Warmup,
    Xavier,
    diagnose,
)
from lightning_norms.diagnosing.borrowing import is_left_out
from lightning_norms.diagnosing.changes import recommended_warmup
from lightning_norms.diagnosing.labels import LossWatcher
from lightning_norms.placements import Placement, PostNorm
from lightning_norms.reports.diagnosis.data import Facts, Verdict
from lightning_norms.schedules import LinearWarmup

VOCABULARY, TIME, WIDTH = 11, 8, 16


def loader(batches=8, size=8, shuffle=True):
    """x -> (3x + 2) mod 11: a model that looks at the last symbol can learn it."""
    tokens = [torch.randint(VOCABULARY, (batches * size, 1), generator=torch.Generator().manual_seed(0))]
    for _ in range(TIME - 1):
        tokens.append((3 * tokens[-1] + 2) % VOCABULARY)
    return DataLoader(TensorDataset(torch.cat(tokens, 1)), batch_size=size, shuffle=shuffle)


def blocks(count, width=WIDTH, norm_first=True, dropout=0.0):
    kind = {"dropout": dropout, "batch_first": True, "norm_first": norm_first}
    return nn.ModuleList(nn.TransformerEncoderLayer(width, 2, 2 * width, **kind) for _ in range(count))


class Net(nn.Module):
    def __init__(self, layers, norm=True, head=1.0):
        super().__init__()
        self.embedding, self.layers = nn.Embedding(VOCABULARY, WIDTH), layers
        self.norm = nn.LayerNorm(WIDTH) if norm else nn.Identity()
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.head.weight.data *= head

    def forward(self, tokens):
        x = self.embedding(tokens)
        for layer in self.layers if isinstance(self.layers, nn.ModuleList) else [self.layers]:
            x = layer(x)
        return self.head(self.norm(x))


class Mine(LightningModule):
    """Somebody's module; ``batches`` counts what it was given."""

    def __init__(self, net, lr=1e-2, manual=False):
        super().__init__()
        self.save_hyperparameters({"lr": lr})
        self.net, self.automatic_optimization = net, not manual
        self.batches = []

    def training_step(self, batch, batch_idx):
        self.batches.append(int(batch[0].sum()))
        logits = self.net(batch[0][:, :-1])
        logits = getattr(logits, "logits", logits)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch[0][:, 1:].flatten())
        self.log("loss", loss)
        if self.automatic_optimization:
            return loss
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        return None

    def configure_optimizers(self):
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=self.hparams.lr)


def made(build, seed=0):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return build()


def trainer(folder, *callbacks, **options):
    given = {"accelerator": "cpu", "devices": 1, "max_steps": 300, "logger": False, "default_root_dir": folder}
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    return Trainer(callbacks=list(callbacks), **(given | quiet | options))


def names(flags):
    return {flag.name for flag in flags}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


# --- other people's models ------------------------------------------------------------------------------------------


def test_a_healthy_stack_trains(folder):
    found = diagnose(made(lambda: Mine(Net(blocks(3)))), loader(), trainer(folder), steps=40)
    assert found.verdict is Verdict.TRAINS
    assert names(found.causes) == {"no causal mask"}  # its blocks do see the next token
    assert found.look.classes == VOCABULARY
    assert found.look.first_loss == pytest.approx(found.trials[0].losses[0], abs=0)
    assert found.facts.blocks == {"": 3}
    assert found.look.labels == 40 * 8 * (TIME - 1)  # of the whole trial, not of its first step
    wrong = [loss - excess for loss, excess in zip(found.trials[0].losses, found.trials[0].excess, strict=True)]
    assert np.mean(wrong) == pytest.approx(found.look.constant_loss, abs=0.01)
    assert "every block kept its gradient" in found.summary[0]
    assert list(folder.iterdir()) == []


def test_torch_s_encoder_starts_with_identical_layers(folder):
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 32, dropout=0.0, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
    found = diagnose(made(lambda: Mine(Net(encoder, norm=False))), loader(), trainer(folder), trials=False)
    assert "identical blocks" in names(found.look.flags)
    assert found.look.post_norm is True
    assert any("identical weights" in line for line in found.summary)


def test_a_head_thirty_times_too_large(folder):
    found = diagnose(made(lambda: Mine(Net(blocks(2), head=30.0))), loader(), trainer(folder), steps=30)
    (cause,) = [cause for cause in found.causes if cause.name == "large logits"]
    assert cause.evidence["logits_rms"] == pytest.approx(found.look.logits_rms)
    assert found.look.logits_rms > 10
    assert "ln 11 = 2.398" in cause.sentence


def test_a_frozen_model_has_nothing_to_train(folder):
    found = diagnose(Mine(Net(blocks(2)).requires_grad_(False)), loader(), trainer(folder))
    assert not found.trains
    assert [cause.name for cause in found.causes] == ["frozen"]
    assert "trainable" in " ".join(found.summary)


def test_frozen_blocks_are_named_and_do_not_count_as_stalled(folder):
    net = made(lambda: Net(blocks(3)))
    net.layers.requires_grad_(False)
    found = diagnose(Mine(net), loader(), trainer(folder), steps=40)
    assert "frozen" in names(found.look.flags)
    assert found.verdict is Verdict.TRAINS


def test_a_model_without_blocks(folder):
    net = made(lambda: nn.Sequential(nn.Embedding(VOCABULARY, 16), nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 11)))
    found = diagnose(Mine(net), loader(), trainer(folder), steps=40)
    assert found.verdict is Verdict.TRAINS
    assert "no blocks" in names(found.look.flags)
    assert [trial.name for trial in found.trials] == ["as given", "warmup", "lr/3", "lr/10"]
    assert any(note.startswith("rescale was not tried") for note in found.notes)


def test_manual_optimization_counts_its_own_steps(folder):
    automatic = diagnose(made(lambda: Mine(Net(blocks(2)))), loader(), trainer(folder), steps=12)
    manual = diagnose(made(lambda: Mine(Net(blocks(2)), manual=True)), loader(), trainer(folder), steps=12)
    assert manual.facts.manual
    assert manual.trials[0].losses == automatic.trials[0].losses
    assert len(manual.trials[1].losses) == 12


@pytest.mark.parametrize(("scale", "verdicts"), [(1.0, {"trains"}), (400.0, {"undecided"})])
def test_hugging_face_gpt2_with_a_sound_and_with_a_broken_init(folder, scale, verdicts):
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": VOCABULARY, "n_positions": 16, "n_embd": WIDTH, "n_layer": 4, "n_head": 2}
    none = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": None, "eos_token_id": None}
    gpt = made(lambda: transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **none)))
    with torch.no_grad():
        for parameter in gpt.parameters():
            if parameter.ndim > 1:
                parameter.mul_(scale)
    found = diagnose(Mine(gpt), loader(), trainer(folder), steps=40)
    assert found.verdict.value in verdicts, found.summary
    assert ("large logits" in {cause.name for cause in found.causes}) == (scale > 1)


def test_a_learning_rate_that_is_far_too_high(folder):
    torch.manual_seed(0)
    found = diagnose(made(lambda: Mine(Net(blocks(3)), lr=3.0)), loader(), trainer(folder), steps=40)
    assert found.verdict in (Verdict.DIVERGES, Verdict.SPIKES)
    assert not found.trains


def test_nan_is_a_verdict_and_ends_a_trial(folder):
    found = diagnose(made(lambda: Mine(Net(blocks(2)), lr=1e30)), loader(), trainer(folder), steps=40)
    assert found.verdict is Verdict.NON_FINITE
    assert len(found.trials[0].losses) < 5
    json.loads(found.to_json(), parse_constant=lambda word: pytest.fail(word))


def test_the_other_copy_of_lightning(folder):
    """``pytorch_lightning`` is a second set of the same classes, and each refuses the other's modules."""
    other = pytest.importorskip("pytorch_lightning")
    net = made(lambda: Net(blocks(2)))

    class Theirs(other.LightningModule):
        training_step, configure_optimizers = Mine.training_step, Mine.configure_optimizers

        def __init__(self):
            super().__init__()
            self.save_hyperparameters({"lr": 1e-2})
            self.net, self.batches = net, []

    found = diagnose(Theirs(), loader(), steps=5)
    assert found.trials[0].losses == diagnose(Mine(net), loader(), steps=5).trials[0].losses


@pytest.mark.parametrize(("optimizer", "word"), [(None, "no optimizer"), (torch.optim.LBFGS, "LBFGS")])
def test_optimizers_that_cannot_be_watched_are_named(folder, optimizer, word):
    class Other(Mine):
        def configure_optimizers(self):
            return None if optimizer is None else optimizer(self.parameters())

    with pytest.raises(ValueError, match=word):
        diagnose(Other(Net(blocks(2))), loader(), trainer(folder), steps=5)


def test_a_module_that_writes_to_its_logger_by_hand(folder):
    class Chatty(Mine):
        def training_step(self, batch, batch_idx):
            self.logger.experiment.add_scalar("x", 1.0, batch_idx)
            self.logger.log_metrics({"y": 1.0}, step=batch_idx)
            return super().training_step(batch, batch_idx)

    found = diagnose(made(lambda: Chatty(Net(blocks(2)))), loader(), trainer(folder, logger=True), steps=4)
    assert len(found.trials[0].losses) == 4
    assert list(folder.iterdir()) == []


def test_a_gradient_scaler_is_given_back_and_takes_no_part_in_the_numbers(folder):
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    mixed = MixedPrecision("16-mixed", "cpu", scaler=scaler)
    before = scaler.state_dict()
    found = diagnose(made(lambda: Mine(Net(blocks(2)))), loader(), trainer(folder, plugins=[mixed]), steps=6)
    exact = diagnose(made(lambda: Mine(Net(blocks(2)))), loader(), trainer(folder), steps=6)
    assert scaler.state_dict() == before
    assert found.trials[0].losses == pytest.approx(exact.trials[0].losses, rel=0.02)
    assert found.trials[0].grad_norms == pytest.approx(exact.trials[0].grad_norms, rel=0.1)
    for name in ("stream_gradient", "parameter_gradient"):
        assert found.look.profile(name).values == pytest.approx(exact.look.profile(name).values, rel=0.1)


def test_no_batch_is_said(folder):
    with pytest.raises(ValueError, match="no batch"):
        diagnose(Mine(Net(blocks(2))), loader(), trainer(folder, limit_train_batches=0), steps=4)


def test_a_module_that_cannot_be_copied_is_named(folder):
    module = Mine(Net(blocks(2)))
    module.generator = (number for number in range(3))
    with pytest.raises(ValueError, match="Mine cannot be copied"):
        diagnose(module, loader(), trainer(folder))


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ({"steps": 0}, "steps must be a whole number of at least 1, got 0"),
        ({"n_seeds": 1.5}, r"n_seeds must be a whole number of at least 1, got 1\.5"),
        ({"seeds": 3}, "seeds must be a list of whole numbers, got 3; their number is n_seeds"),
        ({"seeds": []}, "seeds must be a list"),
        ({"seeds": [0, -1]}, "a seed must be a whole number of at least 0, got -1"),
        ({"seeds": [4, 4]}, "names a seed twice"),
        ({"seeds": [4], "n_seeds": 2}, "either seeds or n_seeds"),
    ],
    ids=str,
)
def test_wrong_numbers_are_named(folder, arguments, word):
    with pytest.raises(ValueError, match=word):
        diagnose(Mine(Net(blocks(2))), loader(), trainer(folder), **arguments)


# --- nothing of the user's changes ----------------------------------------------------------------------------------


def everything(module):
    """Tensors, flags and Python state of a module."""
    tensors = {name: tensor.clone() for name, tensor in [*module.named_parameters(), *module.named_buffers()]}
    modes = [part.training for part in module.modules()]
    kinds = [parameter.requires_grad for parameter in module.parameters()]
    return tensors, modes, kinds, sorted(vars(module)), list(module.batches)


def standing(given):
    """What a Trainer is set to and where it stands."""
    lists = list(given.callbacks), list(given.loggers), given.datamodule, given.fit_loop
    limits = given.limit_val_batches, given.num_sanity_val_steps, given.should_stop, given.training
    return lists, limits, given.global_step, given.state.fn, given.state.status, given.strategy.lightning_module


def random_states():
    return torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()


def test_module_trainer_random_numbers_and_folder_are_left_as_they_were(folder):
    module = made(lambda: Mine(Net(blocks(2, dropout=0.1))))
    module.net.layers[0].eval()
    warmup, given = Warmup(LinearWarmup(5)), trainer(folder, logger=True, enable_checkpointing=True)
    given.callbacks.append(warmup)
    before, states, environment = everything(module), random_states(), dict(os.environ)
    kept = standing(given)
    diagnose(module, loader(), given, steps=6, n_seeds=2)
    after = everything(module)
    assert before[0].keys() == after[0].keys()
    assert all(torch.equal(tensor, after[0][name]) for name, tensor in before[0].items())
    assert before[1:] == after[1:]
    assert random_states() == states
    assert dict(os.environ) == environment
    assert module._trainer is None
    assert standing(given) == kept
    assert warmup.state_dict() == {"steps": []}
    assert list(folder.iterdir()) == []


def test_the_trial_as_given_is_the_run_itself_bit_for_bit(folder):
    """Same weights, same batches, same dropout, same schedule as ``Trainer.fit`` would have."""
    seen = []

    class Losses(Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            seen.append(float(outputs["loss"]))

    module = made(lambda: Mine(Net(blocks(2, dropout=0.1))))
    torch.manual_seed(3)
    found = diagnose(module, loader(), trainer(folder, Warmup(LinearWarmup(9))), steps=10)
    trainer(folder, Warmup(LinearWarmup(9)), Losses(), max_steps=10).fit(module, loader())
    assert list(found.trials[0].losses) == seen
    assert found.trials[0].learning_rates[:3] == pytest.approx([1e-2 / 9, 2e-2 / 9, 3e-2 / 9])


def test_every_trial_sees_the_same_batches(folder):
    counts = {}

    class Batches(Callback):
        def on_train_end(self, trainer, pl_module):
            counts.setdefault(tuple(pl_module.batches), 0)
            counts[tuple(pl_module.batches)] += 1

    diagnose(made(lambda: Mine(Net(blocks(2)))), loader(), trainer(folder, Batches()), steps=10)
    by_length = {len(batches): count for batches, count in counts.items()}
    assert by_length == {2: 2, 10: 7}  # a look, and another after the rescale, see their batch twice; seven trials


def test_a_loader_with_a_generator_of_its_own_gives_every_trial_the_same_batches_too(folder):
    data = loader()
    own = torch.Generator().manual_seed(9)
    data = DataLoader(data.dataset, batch_size=8, shuffle=True, generator=own)
    before = own.get_state()
    found = diagnose(made(lambda: Mine(Net(blocks(2)))), data, trainer(folder), steps=10)
    assert torch.equal(own.get_state(), before)
    assert len({trial.losses[0] for trial in found.trials if not re.search("rescale|init", trial.name)}) == 1
    assert not any("different batches" in note for note in found.notes)


def test_data_that_goes_on_where_it_stopped_is_said(folder):
    class Stream(torch.utils.data.IterableDataset):
        position = 0

        def __iter__(self):
            while True:
                Stream.position += 1
                yield torch.full((TIME,), Stream.position % VOCABULARY)

    pairs = DataLoader(Stream(), batch_size=8, collate_fn=lambda rows: (torch.stack(rows),))
    found = diagnose(made(lambda: Mine(Net(blocks(2)))), pairs, trainer(folder), steps=6)
    assert any("different batches in the warmup trial" in note for note in found.notes)


def test_the_same_seed_gives_the_same_diagnosis(folder):
    def once():
        seed_everything(5, verbose=False)
        return diagnose(Mine(Net(blocks(2, dropout=0.1))), loader(), trainer(folder), steps=8).to_json()

    assert once() == once()


def test_a_module_that_was_fitted_before_can_be_diagnosed(folder):
    module = made(lambda: Mine(Net(blocks(2))))
    owner = trainer(folder, max_steps=2)
    owner.fit(module, loader())
    found = diagnose(module, loader(), owner, steps=4)
    assert module.trainer is owner
    assert owner.global_step == 2
    assert len(found.trials[0].losses) == found.trials[0].planned_steps == 2
    assert any("because the run itself has no more" in note for note in found.notes)


# --- the configuration as given -------------------------------------------------------------------------------------


def decoder(layers=2, placement=None, learning_rate=1e-2):
    placement = PostNorm() if placement is None else placement
    sizes = {"vocab_size": VOCABULARY, "context_length": TIME, "d_model": WIDTH, "n_heads": 2, "n_layers": layers}
    config = DecoderConfig(**sizes, placement=placement, initialization=Xavier(), tied_head=False)
    return made(lambda: DecoderModule(config, learning_rate=learning_rate))


class Tokens(LightningDataModule):
    vocab_size, context_length = VOCABULARY, TIME

    def train_dataloader(self):
        tokens = loader().dataset.tensors[0]
        pairs = [{"inputs": row[:-1], "targets": row[1:]} for row in tokens]
        return DataLoader(pairs, batch_size=8, shuffle=True)


def test_our_decoder_gets_every_trial_and_yaml_for_each(folder):
    found = diagnose(decoder(), Tokens(), trainer(folder), steps=6)
    tried = [trial.name for trial in found.trials]
    assert tried == ["as given", "warmup", "lr/3", "lr/10", "rescale", "DeepNorm-style init", "warmup + rescale", "PreNorm", "DeepNorm"]  # noqa: E501  # fmt: skip
    patches = {trial.name: trial.patch for trial in found.trials}
    assert patches["lr/10"] == {"model": {"init_args": {"learning_rate": 1e-3}}}
    assert [each["class_path"] for each in patches["warmup + rescale"]["trainer"]["callbacks"]] == ["Warmup", "ResidualRescale"]  # noqa: E501  # fmt: skip
    assert not next(trial for trial in found.trials if trial.name == "DeepNorm").keeps_model
    assert found.rescaled_look is not None
    branch = found.look.profile("branch_ratio"), found.rescaled_look.profile("branch_ratio")
    assert branch[1].values[0] / branch[0].values[0] == pytest.approx(0.5, rel=0.2)  # 1/sqrt(2L) of L = 2, on the first


def test_warmup_and_rescale_of_the_configuration_are_in_every_trial(folder):
    given = trainer(folder, Warmup(LinearWarmup(20)), ResidualRescale())
    found = diagnose(decoder(), Tokens(), given, steps=6)
    assert found.facts.warmup_steps == 20
    assert found.facts.callbacks == ("Warmup", "ResidualRescale")
    assert found.trials[0].learning_rates[0] == pytest.approx(1e-2 / 20)
    assert next(t for t in found.trials if t.name == "lr/10").learning_rates[0] == pytest.approx(1e-3 / 20)
    tried = {trial.name for trial in found.trials}
    assert not tried & {"warmup", "rescale", "warmup + rescale", "DeepNorm-style init"}
    assert any("the configuration has ResidualRescale" in note for note in found.notes)


@pytest.mark.parametrize(
    ("asked", "warmup", "total", "expected"), [(None, 8, 12, 12), (None, 60, 95, 90), (None, 500, 5, 5), (7, 60, 95, 7)]
)
def test_trials_are_long_enough_for_the_warmup_and_no_longer_than_the_run(folder, asked, warmup, total, expected):
    given = trainer(folder, Warmup(LinearWarmup(warmup)), max_steps=total)
    found = diagnose(made(lambda: Mine(nn.Embedding(VOCABULARY, VOCABULARY))), loader(), given, steps=asked)
    assert found.trials[0].planned_steps == len(found.trials[0].losses) == expected
    beyond = any("of its learning rate; increase steps" in note for note in found.notes)
    assert beyond == (warmup > expected)


def test_a_fallback_is_left_out_and_said(folder):
    found = diagnose(decoder(), Tokens(), trainer(folder, LRFallback()), steps=4)
    assert "LRFallback" in found.facts.left_out
    assert "LRFallback" not in found.facts.callbacks
    assert not (folder / "events.jsonl").exists()


def test_what_writes_watches_or_rescues_is_left_out(folder):
    assert is_left_out(LRFallback())
    assert is_left_out(lightning_norms.DepthMonitor())
    assert not is_left_out(Warmup())


@pytest.mark.parametrize(
    ("beta2", "total", "steps"),
    [(0.98, 300, 100), (0.999, 300, 100), (0.98, None, 100), (None, 500, 50), (0.9, 300, 20)],
)
def test_the_warmup_for_the_whole_run(beta2, total, steps):
    facts = Facts(module="M", parameters=1, trainable=1, beta2=beta2, total_steps=total)
    assert recommended_warmup(facts) == steps


def test_seeds_give_every_gain_a_spread_and_new_weights_where_they_can_be_made(folder):
    def rebuild(seed):
        return made(lambda: Mine(Net(blocks(2))), seed), loader()

    module = made(lambda: Mine(Net(blocks(2))))
    found = diagnose(module, loader(), trainer(folder), steps=6, n_seeds=2, rebuild=rebuild)
    first, second = [trial for trial in found.trials if trial.name == "as given"]
    assert first.losses[0] != second.losses[0]
    assert all(fix.spread is not None for fix in found.fixes)
    alone = diagnose(module, loader(), trainer(folder), steps=6, n_seeds=2)
    assert any("the weights start the same" in note for note in alone.notes)


def test_half_precision_and_accumulation(folder):
    exact = diagnose(made(lambda: Mine(Net(blocks(2)))), loader(), trainer(folder), steps=8)
    mixed = diagnose(made(lambda: Mine(Net(blocks(2)))), loader(), trainer(folder, precision="bf16-mixed"), steps=8)
    assert mixed.facts.precision == "bf16-mixed"
    assert mixed.trials[0].losses == pytest.approx(exact.trials[0].losses, rel=0.05)
    assert mixed.trials[0].losses != exact.trials[0].losses
    module = made(lambda: Mine(Net(blocks(2))))
    found = diagnose(module, loader(), trainer(folder, accumulate_grad_batches=2), steps=5)
    assert len(found.trials[0].losses) == 5
    assert found.facts.accumulate == 2


# --- the stall ------------------------------------------------------------------------------------------------------


def test_a_deep_post_norm_stack_stalls_and_says_where(folder):
    found = diagnose(decoder(18, learning_rate=1e-2), Tokens(), trainer(folder), steps=25)
    assert found.verdict is Verdict.STALLS, found.summary
    assert found.trials[0].stalled_steps >= 10
    (cause,) = [cause for cause in found.causes if cause.name == "cut off by the updates"]
    assert cause.evidence["share_first"] > 0.03 > 1e-2 > cause.evidence["share_last"]
    assert len(found.shallow_look.profile("stream_rms").values) == 18 // 4
    claims = {claim.name: claim.holds for claim in found.claims}
    assert claims["bottom gradients at init"] is False  # the popular sentence, and not so here


# --- labels --------------------------------------------------------------------------------------------------------


def test_labels_that_are_not_scored_do_not_count():
    with LossWatcher() as watcher:
        nn.functional.cross_entropy(torch.zeros(4, 3), torch.tensor([0, -100, 1, -100]))
    assert watcher.labels == 2
    with LossWatcher() as values:
        nn.functional.mse_loss(torch.zeros(4, 2), torch.tensor([[0.0, 1], [2, 1], [0, 1], [2, 1]]))
    assert (values.classes, values.labels) == (None, 4)


def test_watching_changes_no_result_and_no_gradient():
    net, tokens = made(lambda: Net(blocks(2))), loader().dataset.tensors[0][:8]
    other = copy.deepcopy(net)
    for each, watcher in ((net, None), (other, LossWatcher())):
        if watcher is not None:
            watcher.start()
        loss = nn.functional.cross_entropy(each(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        if watcher is not None:
            watcher.stop()
        loss.backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(net.parameters(), other.parameters(), strict=True))


def test_a_placement_of_one_s_own_is_tried_as_it_is(folder):
    class Mine(PostNorm):
        pass

    assert issubclass(Mine, Placement)
    found = diagnose(decoder(placement=Mine()), Tokens(), trainer(folder), trials=False)
    assert found.look.post_norm is True
