"""Every family with no arguments: blocks, depth names and residual writers, and that these are what they claim."""

import pytest
import torch
from torch import nn

from lightning_norms.anatomy.depth import DepthMap
from lightning_norms.anatomy.describe import describe
from lightning_norms.anatomy.verify import check_writers
from lightning_norms.anatomy.writers import residual_writers, scale_, value_path
from lightning_norms.callbacks.residual_rescale import ResidualRescale
from lightning_norms.rescale_rules import GPT2Rescale
from tests.anatomy.families import FAMILIES
from tests.stand_ins import Module, loader, seeded, trainer

pytest.importorskip("transformers")
pytest.importorskip("x_transformers")
pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
every_family = pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)


def build(family):
    return seeded(family.build).eval()


@torch.no_grad()
def logits(family, model):
    output = model(**family.inputs())
    return getattr(output, "logits", output)


@every_family
def test_blocks_and_depth_names(family):
    depth = DepthMap.of(build(family))
    counted = [f"{stack.label} {len(stack.blocks)}".lstrip() for stack in depth.stacks]
    assert tuple(counted) == family.blocks
    assert {group for group in depth.groups if "block_" not in group} == set(family.others)
    for stack in depth.stacks:
        assert list(stack.groups) == [f"{stack.label}.block_{i:02d}".lstrip(".") for i in range(len(stack.blocks))]
    assert [group for group in depth.groups if group in family.others] == list(
        dict.fromkeys(sorted(family.others, key=depth.groups.index))
    )


@every_family
def test_residual_writers(family):
    matrices = residual_writers(build(family))
    last = [each for each in matrices if each.stack == matrices[-1].stack]
    found = dict.fromkeys(name for each in last for name in family.writers if each.name.endswith("." + name))
    assert tuple(found) == family.writers
    # Where a stack lists sublayers, each of its blocks has one.
    per_block = 1 if family.blocks == ("4",) else len(family.writers)
    assert len(last) == per_block * int(family.blocks[-1].split()[-1])
    assert {each.layers for each in matrices} == {family.layers}
    assert all(each.writer for each in matrices)


def make_readable(model):
    """Biases at zero, matrices of size one: what a branch gives is what its matrices say."""
    generator = torch.Generator().manual_seed(2)
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1:
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator))
        elif name.endswith("bias"):
            parameter.data.zero_()


@every_family
def test_nothing_in_a_block_reaches_the_stream_but_through_the_writers(family):
    """With the writers at zero no other matrix of the blocks matters; with any of them back, it does."""
    model = build(family)
    adapters = [parameter for name, parameter in model.named_parameters() if "lora_" in name]
    for parameter in adapters:
        parameter.data.zero_()  # adapters are no part of the model's own init
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    assert not check_writers(model, residual_writers(model), lambda: logits(family, model), spared=adapters)
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())


@pytest.mark.parametrize("family", [f for f in FAMILIES if f.has_value_path], ids=lambda family: family.name)
def test_the_value_path_is_the_way_of_the_values(family):
    """With its other matrices at zero nothing arrives at the writers; query and key are not on it."""
    model = build(family)
    make_readable(model)
    matrices = value_path(model)
    writers = [each for each in matrices if each.writer]
    assert [each.name for each in writers] == [each.name for each in residual_writers(model)]
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for each in matrices:
        if not each.writer:
            scale_(each, 0.0)
    arrived = []
    for owner in {id(each.owner): each.owner for each in writers if not each.name.endswith("down_proj")}.values():
        owner.register_forward_pre_hook(lambda _, inputs: arrived.append(inputs[0].abs().max().item()))
    logits(family, model)
    assert max(arrived, default=0.0) == 0.0
    touched = {name for name, parameter in model.named_parameters() if not torch.equal(parameter, before[name])}
    assert not [name for name in touched if any(f".{part}" in name for part in ("q_proj", "k_proj", "query.", "key."))]


@every_family
def test_rescale_touches_exactly_the_writers(family, tmp_path):
    model = build(family)
    names = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    expected = [each.parameter for each in residual_writers(model)]
    module = Module(nn.Identity(), learning_rate=0.0)
    module.decoder, module.training_step = model, lambda *_: None
    callback = ResidualRescale(GPT2Rescale(), when="always")
    callback.on_fit_start(trainer(tmp_path), module)
    factor = (2 * family.layers) ** -0.5
    for name, parameter in model.named_parameters():
        scaled = name in names and any(parameter is each for each in expected)
        torch.testing.assert_close(parameter.detach(), before[name] * (factor if scaled else 1), rtol=1e-6, atol=0)
    assert callback.state_dict().get("matrices", 0) == (0 if "LoRA" in family.name else len(expected))


@every_family
def test_fresh_weights_are_seen_as_fresh(family, tmp_path, caplog):
    """No family's own init is taken for trained weights; only GPT-2's already has the factor."""
    callback = ResidualRescale()
    module = Module(build(family))
    callback.on_fit_start(trainer(tmp_path), module)
    assert (callback.state_dict().get("matrices", 0) == 0) == (family.name in ("GPT-2", "Llama with LoRA (peft)"))


@every_family
def test_description_names_every_writer(family):
    text = describe(build(family))
    first = text.split(f"{family.blocks[-1].split()[0]}.")[-1] if len(family.blocks) > 1 else text
    for name in family.writers if family.blocks != ("4",) else family.writers[:1]:
        assert name in first
    assert "no sublayer recognised" not in text


def test_a_fit_with_no_arguments(tmp_path):
    """The three callbacks together on a model of somebody else's, two lines and nothing to configure."""
    from lightning_norms.callbacks.depth_monitor import DepthMonitor
    from lightning_norms.callbacks.warmup import Warmup
    from lightning_norms.schedules import LinearWarmup

    monitor = DepthMonitor(every_n_steps=1, table=False, picture=False)
    model = Module(next(family for family in FAMILIES if family.name == "Llama").build())
    trainer(tmp_path, Warmup(LinearWarmup(4)), ResidualRescale(), monitor).fit(model, loader())
    assert [key for key in monitor.history.columns if key.startswith("grad_norm/")] == [
        f"grad_norm/{group}" for group in ("embedding", "block_00", "block_01", "final_norm", "head", "total")
    ]
