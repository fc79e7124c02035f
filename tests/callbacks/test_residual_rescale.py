"""Cases 3, 4, 5, 9, 15, 42: only these matrices, exactly once in the life of the weights."""

import copy
import logging
import math
import pickle
import subprocess
import sys

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import LearningRateFinder
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from lightning_norms.callbacks.residual_rescale import ResidualRescale
from lightning_norms.rescale_rules import ConstantRescale, DeepNormRescale, DepthRescale, GPT2Rescale
from tests.stand_ins import Decoder, Evaluated, Module, loader, seeded, trainer


class AtStart(Callback):
    """Keeps the weights as they are when training starts, under their clean names."""

    def on_train_start(self, trainer, pl_module):
        self.weights = {name: p.detach().clone() for name, p in pl_module.named_parameters()}


def weights(module):
    return {name: p.detach().clone() for name, p in module.named_parameters()}


def fitted(module, callback, folder, **options):
    """``module`` before and at train start, as factor by name where they differ by one factor."""
    before, seen = weights(module), AtStart()
    trainer(folder, callback, seen, max_steps=1, **options).fit(module, loader())
    changed = {}
    for name, old in before.items():
        if not torch.equal(old, seen.weights[name]):
            changed[name.removeprefix("decoder.")] = (seen.weights[name] / old).nanmean().item()
    return changed


def of_writers(layers, factor):
    parts = ("attention", "feed_forward")
    return {
        f"blocks.{i}.{part}.writer.weight": pytest.approx(factor(i), rel=1e-6) for i in range(layers) for part in parts
    }


@pytest.mark.parametrize(
    ("rule", "factor"),
    [
        (GPT2Rescale(), lambda i: 8**-0.5),
        (DepthRescale(), lambda i: (i + 1) ** -0.5),
        (ConstantRescale(0.3), lambda i: 0.3),
    ],
)
def test_only_the_writers_change(tmp_path, rule, factor):
    changed = fitted(seeded(lambda: Module(Decoder(layers=4))), ResidualRescale(rule), tmp_path)
    expected = of_writers(4, factor)
    if rule == DepthRescale():
        expected = {name: value for name, value in expected.items() if ".0." not in name}  # 1 / sqrt(1)
    assert changed == expected


def test_deep_norm_changes_the_value_path(tmp_path):
    changed = fitted(seeded(lambda: Module(Decoder(layers=24, width=4))), ResidualRescale(DeepNormRescale()), tmp_path)
    parts = ("attention.value", "attention.writer", "feed_forward.up", "feed_forward.writer")
    assert changed == {
        f"blocks.{i}.{part}.weight": pytest.approx(0.26864, abs=5e-6) for i in range(24) for part in parts
    }


def hugging_face(family, **options):
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, f"{family}Config")(vocab_size=11, bos_token_id=0, eos_token_id=0, **options)
    return Module(seeded(lambda: transformers.AutoModelForCausalLM.from_config(config)))


def llama():
    return hugging_face("Llama", hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2)


def gpt2(**options):
    return hugging_face("GPT2", **({"n_layer": 8, "n_embd": 128, "n_head": 2} | options))


def test_llama_four_tensors(tmp_path):
    changed = fitted(llama(), ResidualRescale(pattern=r"(o_proj|down_proj)\.weight"), tmp_path)
    names = ("self_attn.o_proj", "mlp.down_proj")
    assert changed == {f"model.layers.{i}.{name}.weight": pytest.approx(0.5) for i in range(2) for name in names}


def test_gpt2_sixteen_transposed_matrices(tmp_path):
    module = gpt2()
    changed = fitted(module, ResidualRescale(pattern="c_proj", when="always"), tmp_path)
    assert len(changed) == 16
    assert all(name.endswith("c_proj.weight") for name in changed)


def test_gpt2_that_has_it_already_is_left_alone(tmp_path, caplog):
    module, callback = gpt2(), ResidualRescale(pattern="c_proj")
    with caplog.at_level(logging.INFO):
        assert fitted(module, callback, tmp_path) == {}
    deviation = torch.cat([block.attn.c_proj.weight.flatten() for block in gpt2().decoder.transformer.h]).std().item()
    assert deviation == pytest.approx(0.005, rel=0.05)
    assert [line for line in caplog.messages if "already has GPT2Rescale()" in line] == [
        "ResidualRescale: this init already has GPT2Rescale(); nothing changed."
    ]
    assert module.residual_rescaled


def test_gpt2_without_it_ends_at_the_right_deviation(tmp_path):
    module, seen = gpt2(), AtStart()
    for block in module.decoder.transformer.h:
        for writer in (block.attn.c_proj, block.mlp.c_proj):
            seeded(lambda writer=writer: nn.init.normal_(writer.weight, std=0.02))
    trainer(tmp_path, ResidualRescale(pattern="c_proj"), seen, max_steps=1).fit(module, loader())
    for name, weight in seen.weights.items():
        if name.endswith("c_proj.weight"):
            assert weight.std().item() == pytest.approx(0.005, rel=0.05)


def test_deep_norm_of_a_fused_transposed_matrix(tmp_path):
    module = gpt2(n_layer=2, n_embd=8)
    callback = ResidualRescale(DeepNormRescale(), pattern="c_proj", value_pattern="c_attn|c_fc", when="always")
    before, seen = weights(module), AtStart()
    trainer(tmp_path, callback, seen, max_steps=1).fit(module, loader())
    name = "decoder.transformer.h.1.attn.c_attn.weight"
    assert torch.equal(seen.weights[name][:, :16], before[name][:, :16])
    assert torch.equal(seen.weights[name][:, 16:], before[name][:, 16:] * 0.5)
    name = "decoder.transformer.h.1.mlp.c_fc.weight"
    assert torch.equal(seen.weights[name], before[name] * 0.5)


class TorchEncoder(nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True) for _ in range(layers))
        self.head = nn.Linear(8, 11)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def test_deep_norm_of_in_proj_scales_the_last_third_of_rows(tmp_path):
    module = seeded(lambda: Module(TorchEncoder(24)))
    callback = ResidualRescale(DeepNormRescale(), pattern=r"out_proj|linear2", value_pattern=r"in_proj_weight|linear1")
    before, seen = weights(module), AtStart()
    trainer(tmp_path, callback, seen, max_steps=1).fit(module, loader())
    name, beta = "decoder.layers.23.self_attn.in_proj_weight", 192**-0.25
    assert torch.equal(seen.weights[name][:16], before[name][:16])
    torch.testing.assert_close(seen.weights[name][16:], before[name][16:] * beta)
    changed = {key.split(".", 3)[-1] for key, old in before.items() if not torch.equal(old, seen.weights[key])}
    assert changed == {f"{part}.weight" for part in ("self_attn.out_proj", "linear1", "linear2")} | {
        "self_attn.in_proj_weight"
    }


def test_fused_but_interleaved_is_refused(tmp_path):
    module = Module(Decoder(layers=1))
    module.decoder.blocks[0].query_key_value = nn.Linear(8, 24)
    callback = ResidualRescale(DeepNormRescale(), pattern="writer", value_pattern="query_key_value")
    with pytest.raises(ValueError, match=r"cannot find the value third of .*query_key_value\.weight \[24, 8\]"):
        trainer(tmp_path, callback).fit(module, loader())


def test_no_match_raises(tmp_path):
    with pytest.raises(ValueError, match=r"(?s)matches nothing.*self_attn\.o_proj"):
        trainer(tmp_path, ResidualRescale(pattern="c_proj")).fit(llama(), loader())
    pipeline = Module(nn.Sequential(nn.Embedding(11, 8), nn.Linear(8, 8), nn.Linear(8, 11)))
    with pytest.raises(
        ValueError, match=r"(?s)no residual writers were found: give pattern=.*no list of repeated blocks"
    ):
        trainer(tmp_path, ResidualRescale()).fit(pipeline, loader())


def test_says_what_it_did_in_one_line(tmp_path, caplog):
    with caplog.at_level(logging.INFO):
        fitted(Module(Decoder(layers=3)), ResidualRescale(DepthRescale()), tmp_path)
    assert [line for line in caplog.messages if "ResidualRescale" in line] == [
        "ResidualRescale: DepthRescale(), L=3: 6 of 6 matrices, factor 0.5774 to 1."
    ]


def test_wrapped_blocks_are_the_same_matrices(tmp_path):
    decoder = seeded(lambda: Decoder(layers=2))
    decoder.blocks[1] = checkpoint_wrapper(decoder.blocks[1])
    changed = fitted(Module(decoder), ResidualRescale(), tmp_path)
    assert {name.replace("_checkpoint_wrapped_module.", "") for name in changed} == set(of_writers(2, float))


def test_frozen_and_tied(tmp_path):
    decoder = seeded(lambda: Decoder(layers=3))
    decoder.blocks[0].feed_forward.writer.weight.requires_grad_(False)
    decoder.blocks[2].attention.writer.weight = decoder.blocks[1].attention.writer.weight
    changed = fitted(Module(decoder), ResidualRescale(), tmp_path)
    expected = of_writers(3, lambda i: 6**-0.5)
    del expected["blocks.0.feed_forward.writer.weight"], expected["blocks.2.attention.writer.weight"]
    assert changed == expected


def test_all_frozen_changes_and_marks_nothing(tmp_path, caplog):
    module = Module(Decoder(layers=2))
    module.decoder.blocks.requires_grad_(False)
    with caplog.at_level(logging.INFO):
        assert fitted(module, ResidualRescale(), tmp_path) == {}
    assert "0 of 4 matrices, all frozen." in caplog.text
    assert not hasattr(module, "residual_rescaled")


# --- once ---------------------------------------------------------------------------------------------------------


def test_twice_through_one_or_two_callbacks_changes_once(tmp_path):
    module = seeded(lambda: Module(Decoder(layers=2)))
    assert fitted(module, callback := ResidualRescale(), tmp_path)
    assert module.residual_rescaled
    assert fitted(module, callback, tmp_path) == {}
    assert fitted(module, ResidualRescale(when="always"), tmp_path) == {}
    assert fitted(copy.deepcopy(module), ResidualRescale(), tmp_path) == {}


def test_one_callback_serves_two_modules(tmp_path):
    callback = ResidualRescale()
    for seed in range(2):
        module = seeded(lambda: Module(Decoder(layers=2)), seed)
        assert fitted(module, callback, tmp_path) == of_writers(2, lambda i: 0.5)


def test_one_trainer_fits_twice(tmp_path):
    module, run = Module(Decoder(layers=2)), trainer(tmp_path, ResidualRescale(), max_steps=2)
    run.fit(module, loader())
    after = weights(module)
    run.fit_loop.epoch_loop.max_steps = 2
    run.fit(module, loader())
    assert all(torch.equal(p, after[name]) for name, p in module.named_parameters())


@pytest.mark.parametrize("finder", [False, True])
@pytest.mark.parametrize("with_callback", [True, False])
def test_resume_keeps_the_checkpoint_bit_for_bit(tmp_path, with_callback, finder):
    run = trainer(tmp_path, *([ResidualRescale()] if with_callback else []))
    run.fit(Findable(Decoder(layers=2)), loader(batches=4))
    run.save_checkpoint(tmp_path / "run.ckpt")
    saved = torch.load(tmp_path / "run.ckpt", weights_only=True)["state_dict"]
    module, callback, seen = Findable(Decoder(layers=2)), ResidualRescale(), AtStart()
    others = [LearningRateFinder(num_training_steps=3, update_attr=False)] if finder else []
    again = trainer(tmp_path, callback, seen, *others, max_steps=6, enable_checkpointing=True)
    again.fit(module, loader(batches=4), ckpt_path=tmp_path / "run.ckpt")
    assert all(torch.equal(seen.weights[name], saved[name]) for name in seen.weights)
    assert getattr(module, "residual_rescaled", False) is with_callback
    assert callback.state_dict()["rescaled"] is with_callback
    assert fitted(module, ResidualRescale(), tmp_path) == {}


def test_evaluation_leaves_weights_alone(tmp_path):
    module, run = Evaluated(Decoder(layers=2)), trainer(tmp_path, ResidualRescale())
    before = weights(module)
    run.validate(module, loader(), verbose=False)
    run.test(module, loader(), verbose=False)
    run.predict(module, loader())
    assert all(torch.equal(p, before[name]) for name, p in module.named_parameters())


class Findable(Module):
    learning_rate = 1e-3

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.learning_rate)


def test_once_beside_the_learning_rate_finder(tmp_path):
    module, seen = seeded(lambda: Findable(Decoder(layers=2))), AtStart()
    before = weights(module)
    finder = LearningRateFinder(num_training_steps=3, update_attr=False)
    trainer(tmp_path, ResidualRescale(), seen, finder, enable_checkpointing=True).fit(module, loader())
    name = "decoder.blocks.1.attention.writer.weight"
    assert torch.equal(seen.weights[name], before[name] * 0.5)
    assert torch.equal(seen.weights["decoder.head.weight"], before["decoder.head.weight"])


# --- trained weights ------------------------------------------------------------------------------------------------


def test_trained_weights_are_refused_and_always_means_always(tmp_path):
    trained = Module(Decoder(layers=2))
    trainer(tmp_path, max_steps=20).fit(trained, loader())
    loaded = Module(Decoder(layers=2))
    loaded.load_state_dict(trained.state_dict())
    before = weights(loaded)
    with pytest.raises(ValueError, match=r"these weights have been trained .*`when: always`"):
        trainer(tmp_path, ResidualRescale()).fit(loaded, loader())
    assert all(torch.equal(p, before[name]) for name, p in loaded.named_parameters())
    assert fitted(loaded, ResidualRescale(when="always"), tmp_path) == of_writers(2, lambda i: 0.5)


# --- arguments and state ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"rule": "gpt2"}, TypeError),
        ({"rule": GPT2Rescale}, TypeError),
        ({"when": "never"}, ValueError),
        ({"pattern": "("}, ValueError),
        ({"value_pattern": "v_proj"}, ValueError),
    ],
)
def test_unusable_arguments_are_refused_when_built(options, error):
    with pytest.raises(error, match="ResidualRescale: "):
        ResidualRescale(**options)


def test_state_is_plain_and_survives(tmp_path):
    callback = ResidualRescale()
    assert callback.state_dict() == {"rescaled": False}
    fitted(Module(Decoder(layers=2)), callback, tmp_path)
    state = callback.state_dict()
    done = {"rescaled": True, "rule": "GPT2Rescale()", "matrices": 4}
    assert state == done | {"lowest_factor": 0.5, "highest_factor": 0.5}
    torch.save(state, tmp_path / "state.pt")
    other = pickle.loads(pickle.dumps(ResidualRescale()))
    other.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert other.state_dict() == state
    assert math.isfinite(state["lowest_factor"])


@pytest.mark.slow
def test_two_ranks(tmp_path):
    command = [sys.executable, "-m", "tests.callbacks.two_ranks", "rescale_ddp", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("held") >= 1


# --- copies ---------------------------------------------------------------------------------------------------------


class Shadow:
    def __init__(self, module):
        self.shadow_params = [p.detach().clone() for p in module.parameters()]


class Averages(Callback):
    def __init__(self, module):
        self.average = copy.deepcopy(module)
        self.shadow = {name: p.detach().clone() for name, p in module.named_parameters()}


def with_copies(decoder):
    module = Module(decoder)
    module.teacher, module.hidden = copy.deepcopy(decoder).requires_grad_(False), [copy.deepcopy(decoder)]
    module.shadow = Shadow(decoder)
    return module, Averages(decoder)


@pytest.mark.parametrize("build", [lambda: Decoder(layers=3), lambda: TorchCopies(3)])
def test_a_copy_of_the_student_stays_a_copy(tmp_path, build):
    module, averages = with_copies(seeded(build))
    before = weights(module.decoder)
    module.start = weights(module.decoder)  # a record of the start, not a copy that trains on
    ResidualRescale(DepthRescale()).on_fit_start(trainer(tmp_path, averages), module)
    after = dict(module.decoder.named_parameters())
    changed = [name for name, old in before.items() if not torch.equal(after[name], old)]
    assert len(changed) == 4  # two writers in all blocks but the lowest, whose factor is 1
    assert all(torch.equal(module.start[name], old) for name, old in before.items())
    copies = [[*net.parameters()] for net in (module.teacher, module.hidden[0], averages.average)]
    for copied in (*copies, module.shadow.shadow_params, averages.shadow.values()):
        assert all(torch.equal(tensor, weight) for tensor, weight in zip(copied, after.values(), strict=True))


class TorchCopies(TorchEncoder):
    """nn.TransformerEncoder starts with equal blocks."""

    def __init__(self, layers):
        super().__init__(1)
        self.layers = nn.ModuleList(copy.deepcopy(self.layers[0]) for _ in range(layers))


def test_a_frozen_block_of_the_stack_is_no_copy(tmp_path):
    module = seeded(lambda: Module(TorchCopies(3)))
    module.decoder.layers[0].requires_grad_(False)
    assert not [name for name in fitted(module, ResidualRescale(), tmp_path) if ".0." in name]
