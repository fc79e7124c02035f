"""What every placement of the package keeps, found by walking: a new class is under contract by itself."""

import copy
import inspect

import pytest
import torch
from torch import nn

from lightning_norms.anatomy.fresh_weights import looks_trained
from lightning_norms.anatomy.writers import residual_writers, value_path
from lightning_norms.model.decoder import Decoder, DecoderConfig
from lightning_norms.model.placements import catalogue
from lightning_norms.model.serialization import from_plain, to_plain
from tests.model.placements.stacks import all_placements

pytestmark = pytest.mark.filterwarnings("ignore:.*give `qk_norm")
IDS = lambda placement: type(placement).__name__  # noqa: E731
SUBLAYERS = ("attention.", "feed_forward.")
SILENT = {
    # The branch's factor is 0: its matrices wait for one step.
    "ReZero": SUBLAYERS,
    "SkipInit": SUBLAYERS,
    "ResPostNorm": SUBLAYERS,
    "ProRes": (*SUBLAYERS, "before"),
    # The query is 0, so the gain of what it is multiplied with waits.
    "AttentionResiduals": ("key_norm",),
    # The token's map is 0, so its factor waits, and so does the norm in front of it.
    "DynamicHyperConnections": ("_size", "stream_norm"),
    "MHC": ("residual.size",),
}
"""Parts of the names of parameters that have no gradient at step 0; all of them have one after a few steps."""


def decoder_of(placement):
    torch.manual_seed(0)
    return Decoder(
        DecoderConfig(vocab_size=11, n_layers=3, d_model=16, n_heads=2, context_length=8, placement=placement)
    )


def silent_after_backward(decoder, tokens):
    decoder.zero_grad()
    nn.functional.cross_entropy(decoder(tokens).flatten(0, 1), tokens.roll(-1, 1).flatten()).backward()
    return {name for name, p in decoder.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0}


@pytest.mark.parametrize("placement", all_placements(), ids=IDS)
def test_shape_and_dtype_are_kept(placement):
    decoder, tokens = decoder_of(placement), torch.randint(0, 11, (2, 8))
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        logits = copy.deepcopy(decoder).to(dtype)(tokens)
        assert (logits.shape, logits.dtype) == ((2, 8, 11), dtype)


@pytest.mark.parametrize("placement", all_placements(), ids=IDS)
def test_every_parameter_gets_a_gradient(placement):
    decoder, tokens = decoder_of(placement), torch.randint(0, 11, (2, 8))
    names = [name for name, _ in decoder.named_parameters()]
    parts = SILENT.get(type(placement).__name__, ())
    silent = silent_after_backward(decoder, tokens)
    assert silent == {name for name in names if any(part in name for part in parts)}
    for _ in range(3):
        for module in decoder.modules():
            if hasattr(module, "after_step"):
                module.after_step()
        with torch.no_grad():
            for p in decoder.parameters():
                p.sub_(0 if p.grad is None else 0.1 * p.grad)
        silent = silent_after_backward(decoder, tokens)
    assert silent == set()


@pytest.mark.parametrize("placement", all_placements(), ids=IDS)
def test_causal_and_in_eval_as_in_train(placement):
    decoder, tokens = decoder_of(placement).double(), torch.randint(0, 11, (1, 8))
    changed = tokens.clone()
    changed[0, 5] = (changed[0, 5] + 1) % 11
    difference = (decoder(tokens) - decoder(changed)).abs().amax(-1)[0]
    assert difference[:5].max() == 0
    assert difference[5] > 0
    assert torch.equal(decoder.train()(tokens), decoder.eval()(tokens))


@pytest.mark.parametrize("placement", all_placements(), ids=IDS)
@pytest.mark.parametrize("value_residual", [0.0, 0.5])
def test_activation_checkpointing_changes_nothing(placement, value_residual):
    """Same logits, same gradients: no module counts its forwards."""
    grads, tokens = [], torch.randint(0, 11, (2, 8))
    for on in (False, True):
        torch.manual_seed(0)
        config = DecoderConfig(
            vocab_size=11, n_layers=2, d_model=16, n_heads=2, context_length=8, placement=placement, dropout=0.1,
            activation_checkpointing=on, value_residual=value_residual,
        )  # fmt: skip
        decoder = Decoder(config)
        torch.manual_seed(1)
        decoder(tokens).square().sum().backward()
        grads.append([p.grad for p in decoder.parameters()])
    for one, other in zip(*grads, strict=True):
        assert (one is None and other is None) or torch.equal(one, other)


@pytest.mark.parametrize("placement", all_placements(), ids=IDS)
def test_plain_data_and_state_round_trip(placement):
    config = decoder_of(placement).config
    assert from_plain(to_plain(config)) == config
    one, other = decoder_of(placement), decoder_of(placement)
    with torch.no_grad():
        for p in one.parameters():
            p.add_(torch.randn_like(p))
    other.load_state_dict(one.state_dict())
    tokens = torch.randint(0, 11, (2, 8))
    assert torch.equal(one(tokens), other(tokens))


@pytest.mark.parametrize("placement", all_placements(), ids=IDS)
def test_fresh_weights_look_fresh_and_name_their_writers(placement):
    """What ResidualRescale asks of a network before it touches one."""
    decoder = decoder_of(placement)
    assert not looks_trained(decoder)
    assert len(residual_writers(decoder)) == 2 * 3
    assert len(value_path(decoder)) == 4 * 3


@pytest.mark.parametrize("placement", all_placements(), ids=IDS)
def test_documented(placement):
    """One line, then an equation or a picture, a trade-off in a sentence, the source; and the catalogue's line."""
    text = inspect.getdoc(placement)
    first, _, rest = text.partition("\n")
    assert first.endswith((".", '"'))
    assert len(first) <= 117
    assert "``" in first or "::" in rest, "an equation or a picture"
    assert "\nSource: " in text
    assert len(rest.strip()) > 80
    assert placement.equation
    assert placement.trade_off
    assert catalogue.source(type(placement))
