"""The first step from inside, against the same numbers computed by hand; and each flag on a model that deserves it."""

import copy
import math

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import LambdaLR

from lightning_norms import LinearWarmup, Warmup, diagnose
from lightning_norms.anatomy.writers import residual_writers, scale_
from lightning_norms.diagnosing.depth_probe import DepthProbe
from lightning_norms.rescale_rules import GPT2Rescale
from tests.stand_ins import VOCABULARY, Block, Decoder, Module, loader, seeded, trainer

RATE = 0.5


def looked(folder, module, *callbacks, **options):
    return diagnose(module, loader(), trainer(folder, *callbacks, **options), trials=False).look


def flags(look):
    return {flag.name: flag for flag in look.flags}


@pytest.fixture
def module():
    return seeded(lambda: Module(Decoder(layers=3), learning_rate=RATE, optimizer=torch.optim.SGD))


@pytest.fixture
def by_hand(module):
    """The first step of a copy, in plain PyTorch."""
    decoder = copy.deepcopy(module.decoder)
    tokens = next(iter(loader()))[0]
    streams = [decoder.embedding(tokens)]
    for block in decoder.blocks:
        streams.append(block(streams[-1]))
        streams[-1].retain_grad()
    logits = decoder.head(decoder.exit(streams[-1]))
    loss = cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    return decoder, tokens, streams, logits, loss


def test_every_size_by_depth_is_what_plain_pytorch_says(tmp_path, module, by_hand):
    decoder, tokens, streams, logits, loss = by_hand
    look = looked(tmp_path, module)
    assert look.first_loss == pytest.approx(loss.item())
    rms = [stream.square().mean().sqrt().item() for stream in streams]
    assert look.profile("stream_rms").values == pytest.approx(rms[1:])
    changes = [(b - a).square().mean().sqrt().item() / r for a, b, r in zip(streams, streams[1:], rms, strict=False)]
    assert look.profile("block_change").values == pytest.approx(changes, rel=1e-5)
    assert look.profile("stream_gradient").values == pytest.approx(
        [s.grad.norm().item() for s in streams[1:]], rel=1e-5
    )
    groups = look.profile("parameter_gradient").groups
    assert groups == ("embedding", "block_00", "block_01", "block_02", "final_norm", "head")
    parts = (decoder.embedding, *decoder.blocks, decoder.exit, decoder.head)
    norms = [math.sqrt(sum(p.grad.square().sum().item() for p in part.parameters())) for part in parts]
    assert look.profile("parameter_gradient").values == pytest.approx(norms, rel=1e-5)
    weights = [math.sqrt(sum(p.square().sum().item() for p in part.parameters())) for part in parts]
    updates = [RATE * norm / weight for norm, weight in zip(norms, weights, strict=True)]
    assert look.profile("first_update").values == pytest.approx(updates, rel=1e-4)
    assert look.logits_rms == pytest.approx(logits[:, :-1].square().mean().sqrt().item())
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter -= RATE * parameter.grad
        change = decoder(tokens) - logits
    assert look.logit_change == pytest.approx(change[:, :-1].square().mean().sqrt().item(), rel=1e-4)


def test_branches_and_norms_are_what_plain_pytorch_says(tmp_path, module, by_hand):
    decoder, _, streams, _, _ = by_hand
    look = looked(tmp_path, module)
    x, block = streams[0], decoder.blocks[0]
    attention = block.attention(block.norm_1(x))
    middle = x + attention
    feed_forward = block.feed_forward(block.norm_2(middle))
    together = (attention.square().mean() + feed_forward.square().mean()) / 2 / x.square().mean()
    assert look.profile("branch_ratio").values[0] == pytest.approx(together.sqrt().item(), rel=1e-5)
    profile = look.profile("norm_input")
    assert profile.groups[:2] == ("decoder.blocks.0.norm_1", "decoder.blocks.0.norm_2")
    assert profile.groups[-1] == "decoder.exit"
    sigma = [each.var(-1, correction=0).mean().sqrt().item() for each in (x, middle)]
    assert profile.values[:2] == pytest.approx(sigma, rel=1e-5)


def test_rms_norms_divide_by_their_root_mean_square():
    norm = nn.RMSNorm(4)
    probe = DepthProbe(nn.Sequential(norm), (), ())
    probe.attach()
    norm(torch.tensor([[3.0, 3.0, 3.0, 3.0]]))
    probe.detach()
    norm(torch.tensor([[9.0, 9.0, 9.0, 9.0]]))
    assert probe.squares["norm"]["0"].item() == pytest.approx(9.0)  # no variance, and not of the second call


def test_the_loss_of_knowing_nothing_and_of_a_constant(tmp_path, module):
    look = looked(tmp_path, module)
    assert look.classes == VOCABULARY
    assert look.uniform_loss == pytest.approx(math.log(VOCABULARY))
    assert look.labels == 2 * 5  # batch of two, six tokens each
    assert 0 < look.constant_loss <= look.uniform_loss


def test_with_accumulation_the_update_is_the_mean_gradient_s(tmp_path, module):
    twice = seeded(lambda: Module(Decoder(layers=3), learning_rate=RATE, optimizer=torch.optim.SGD))
    look = looked(tmp_path, twice, accumulate_grad_batches=2)
    decoder = module.decoder
    stream = decoder.blocks[0](decoder.embedding(next(iter(loader()))[0]))
    assert look.profile("stream_rms").values[0] == pytest.approx(
        stream.square().mean().sqrt().item()
    )  # the first batch's
    for batch, _ in zip(loader(), range(2), strict=False):
        logits = decoder(batch[0])
        (cross_entropy(logits[:, :-1].flatten(0, 1), batch[0][:, 1:].flatten()) / 2).backward()
    norms = [math.sqrt(sum(p.grad.square().sum().item() for p in b.parameters())) for b in decoder.blocks]
    values = dict(
        zip(look.profile("parameter_gradient").groups, look.profile("parameter_gradient").values, strict=True)
    )
    assert [values[f"block_0{i}"] for i in range(3)] == pytest.approx(norms, rel=1e-5)


# --- flags ----------------------------------------------------------------------------------------------------------


def test_a_missing_and_a_double_final_norm(tmp_path):
    bare = seeded(lambda: Module(Decoder(layers=2)))
    assert not set(flags(looked(tmp_path, bare))) & {"no final norm", "double final norm"}
    bare.decoder.exit = nn.Identity()
    found = flags(looked(tmp_path, bare))["no final norm"]
    assert found.evidence["spread"] > 0.01

    class Closed(Block):
        def forward(self, x):
            return self.norm_2(x + self.attention(x))

    double = seeded(lambda: Module(Decoder(layers=2)))
    double.decoder.blocks = seeded(lambda: nn.ModuleList(Closed(8) for _ in range(2)))
    look = looked(tmp_path, double)
    assert "decoder.exit follows" in flags(look)["double final norm"].sentence
    assert look.post_norm is True


def test_an_init_that_has_the_rescale_already(tmp_path, module):
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in module.decoder.parameters():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=0.2, generator=generator)
    assert "rescaled init" not in flags(looked(tmp_path, module))
    for matrix in residual_writers(module):
        scale_(matrix, GPT2Rescale().gain(matrix.layer, matrix.layers))
    assert flags(looked(tmp_path, module))["rescaled init"].evidence["factor"] == pytest.approx(1 / math.sqrt(6))


def test_a_norm_that_its_eps_rules(tmp_path, module):
    nn.init.normal_(module.decoder.embedding.weight, std=1e-4)
    assert flags(looked(tmp_path, module))["eps"].evidence["variance_over_eps"] < 0.1


def test_updates_below_the_last_digit_of_bfloat16(tmp_path):
    tiny = seeded(lambda: Module(Decoder(layers=2), learning_rate=1e-6))
    assert "rounded updates" not in flags(looked(tmp_path, tiny))
    assert flags(looked(tmp_path, tiny, precision="bf16-true"))["rounded updates"].evidence["share"] > 0.9


def test_a_schedule_that_wastes_its_first_step(tmp_path):
    class FromZero(Module):
        def configure_optimizers(self):
            optimizer = super().configure_optimizers()
            scheduler = LambdaLR(optimizer, lambda step: min(1.0, step / 10))
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    assert "idle first step" in flags(looked(tmp_path, seeded(FromZero)))


def test_warmups_that_are_too_short_or_longer_than_the_run(tmp_path):
    short = flags(looked(tmp_path, seeded(Module), Warmup(LinearWarmup(100)), max_steps=5000))["short warmup"]
    assert short.evidence == {"warmup_steps": 100.0, "wanted": pytest.approx(2000.0)}
    long = flags(looked(tmp_path, seeded(Module), Warmup(LinearWarmup(100)), max_steps=50))
    assert "warmup longer than the run" in long


def test_blocks_that_get_no_gradient_at_all(tmp_path, module):
    nn.init.zeros_(module.decoder.head.weight)
    found = flags(looked(tmp_path, module))["no gradient"]
    assert found.evidence["groups"] == 5  # all but the head
    assert "block_00" in found.sentence


def test_double_precision_is_no_trap(tmp_path, module):
    assert flags(looked(tmp_path, module, precision="64-true")).keys() == flags(looked(tmp_path, module)).keys()
