"""Shapes, exact parameter counts, and short messages for a configuration that cannot be."""

import pytest
import torch

from lightning_norms.model import decoder as decoder_module
from lightning_norms.model.attention import CausalSelfAttention, Passage
from lightning_norms.model.decoder import Decoder, DecoderConfig
from lightning_norms.model.feed_forward import SwiGLU
from lightning_norms.model.norms import RMSNorm
from lightning_norms.model.placements.single_stream import PostNorm
from lightning_norms.model.positions import Rotary, Sinusoidal
from lightning_norms.model.residual import Inner, Site
from lightning_norms.model.serialization import from_plain, to_plain

MODERN = {"positions": Rotary(), "norm": RMSNorm(), "feed_forward": SwiGLU(), "n_kv_heads": 2}


@pytest.mark.parametrize(
    ("changes", "parameters"),
    [
        ({}, 3_740_160),
        ({"placement": PostNorm(final_norm=True)}, 3_740_160),
        ({"norm": RMSNorm()}, 3_737_856),
        ({"feed_forward": SwiGLU()}, 3_731_968),
        ({"n_kv_heads": 4}, 3_478_016),
        ({"n_kv_heads": 2}, 3_346_944),
        ({"n_kv_heads": 1}, 3_281_408),
        (MODERN, 3_270_912),
    ],
    ids=lambda v: "-".join(v) or "baseline" if isinstance(v, dict) else str(v),
)
def test_parameter_counts(changes, parameters):
    config = DecoderConfig(vocab_size=2048, d_model=256, n_heads=8, n_layers=4, context_length=256, **changes)
    assert sum(p.numel() for p in Decoder(config).parameters()) == parameters


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("n_layers", 0),
        ("d_model", -8),
        ("n_heads", 5),
        ("n_kv_heads", 3),
        ("context_length", None),
        ("vocab_size", 0),
        ("dropout", 1.0),
        ("dropout", float("nan")),
        ("value_residual", 1.0),
        ("ff_multiplier", 0.0),
        ("ff_multiplier", float("inf")),
    ],
)
def test_errors_name_the_key_and_the_value(key, value):
    with pytest.raises(ValueError, match=key) as error:
        DecoderConfig(**{key: value})
    message = str(error.value)
    assert repr(value) in message
    assert "\n" not in message


def test_unknown_vocabulary_and_too_many_tokens_are_refused():
    with pytest.raises(ValueError, match="vocab_size is not given"):
        Decoder(DecoderConfig())
    with pytest.raises(ValueError, match="65 tokens, but context_length is 64"):
        Decoder(DecoderConfig(vocab_size=5))(torch.zeros(1, 65, dtype=torch.long))


def test_causal():
    """A later token never changes an earlier logit."""
    decoder = Decoder(DecoderConfig(vocab_size=11, **MODERN)).double()
    tokens = torch.randint(0, 11, (1, 12))
    changed = tokens.clone()
    changed[0, 7] = (changed[0, 7] + 1) % 11
    difference = (decoder(tokens) - decoder(changed)).abs().amax(dim=-1)[0]
    assert difference[:7].max() == 0
    assert difference[7] > 0


def test_eval_equals_train_without_dropout_and_not_with_it():
    """Case 12."""
    tokens = torch.randint(0, 11, (2, 8))
    for dropout in (0.0, 0.5):
        decoder = Decoder(DecoderConfig(vocab_size=11, dropout=dropout))
        assert torch.equal(decoder.train()(tokens), decoder.eval()(tokens)) == (dropout == 0)


def test_value_residual_mixes_block_1s_values_into_later_ones():
    """One token attends to itself alone, so what the writer reads is its value."""
    sites = [Site("attention", 16, layer, 2, 16, 2, 2) for layer in (1, 2)]
    first, second = (CausalSelfAttention(site, Inner(), False, 0.0, value_residual=0.25) for site in sites)
    x, passage = torch.randn(3, 1, 16), Passage(lambda h: h)
    torch.testing.assert_close(first(x, passage), first.writer(first.value(x)))
    mixed = 0.75 * second.value(x) + 0.25 * first.value(x)
    torch.testing.assert_close(second(x, passage), second.writer(mixed))
    with pytest.raises(ValueError, match="block 1"):
        second(x, Passage(lambda h: h))


def test_activation_checkpointing_is_for_training(monkeypatch):
    calls = []
    real = decoder_module.checkpoint
    monkeypatch.setattr(decoder_module, "checkpoint", lambda *a, **k: (calls.append(1), real(*a, **k))[1])
    decoder = Decoder(DecoderConfig(vocab_size=11, activation_checkpointing=True))
    decoder(torch.zeros(1, 4, dtype=torch.long))
    assert len(calls) == 4
    decoder.eval()(torch.zeros(1, 4, dtype=torch.long))
    assert len(calls) == 4


def test_tied_head_is_one_tensor():
    tied, free = (Decoder(DecoderConfig(vocab_size=11, tied_head=tie)) for tie in (True, False))
    assert tied.head.weight is tied.embedding.weight
    assert free.head.weight is not free.embedding.weight


def test_config_round_trips_through_plain_data():
    config = DecoderConfig(
        vocab_size=11, placement=PostNorm(final_norm=True), **{**MODERN, "positions": Sinusoidal(2.0)}
    )
    assert from_plain(to_plain(config)) == config


def test_plain_data_names_a_class_that_is_not_there():
    for class_path in ("mine.Placement", "os.PathLike", "os.system"):
        with pytest.raises(ValueError, match=f"{class_path}.*import"):
            from_plain({"class_path": class_path})
