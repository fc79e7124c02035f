"""The cached forward is the uncached one; sampling keeps what it says it keeps."""

import pytest
import torch

from lightning_norms.model.attention import QKNorm
from lightning_norms.model.decoder import Decoder, DecoderConfig
from lightning_norms.model.generation import KeyValueMemory, Sampling, generate
from lightning_norms.model.positions import Learned, Rotary, Sinusoidal
from lightning_norms.placements import PostNorm
from tests.model.placements.stacks import all_placements

EVERY_PLACEMENT = [(placement, Rotary(), 2) for placement in all_placements()]
EVERY_ATTENTION = [
    (PostNorm(), positions, kv_heads)
    for positions in (Learned(), Sinusoidal(), Rotary(), Rotary(scale=2.0))
    for kv_heads in (4, 2, 1)
]


@pytest.mark.parametrize(("placement", "positions", "kv_heads"), EVERY_PLACEMENT + EVERY_ATTENTION, ids=repr)
@pytest.mark.filterwarnings("ignore:.*give `qk_norm")
def test_cached_logits_equal_uncached(placement, positions, kv_heads):
    """Token by token, and in chunks of uneven length, against one forward over everything."""
    torch.manual_seed(0)
    config = DecoderConfig(vocab_size=11, d_model=32, n_kv_heads=kv_heads, positions=positions, placement=placement)
    decoder = Decoder(config).eval()
    tokens = torch.randint(0, 11, (3, 12))
    with torch.no_grad():
        whole = decoder(tokens)
        for lengths in ([1] * 12, [5, 1, 4, 2]):
            memories = [KeyValueMemory(64) for _ in decoder.blocks]
            start, parts = 0, []
            for length in lengths:
                parts.append(decoder(tokens[:, start : start + length], memories, start))
                start += length
            torch.testing.assert_close(torch.cat(parts, dim=1), whole, atol=1e-5, rtol=0)


@pytest.mark.parametrize("over", ["head", "width"])
@pytest.mark.parametrize("rotary", ["before", "after"])
@pytest.mark.parametrize("value_residual", [0.0, 0.5])
def test_cached_logits_equal_uncached_with_what_attention_can_do(over, rotary, value_residual):
    torch.manual_seed(0)
    options = {"positions": Rotary(), "qk_norm": QKNorm(over=over, rotary=rotary), "value_residual": value_residual}
    decoder = Decoder(DecoderConfig(vocab_size=11, d_model=32, n_kv_heads=2, **options)).eval()
    tokens, memories = torch.randint(0, 11, (3, 12)), [KeyValueMemory(64) for _ in range(4)]
    with torch.no_grad():
        parts = [decoder(tokens[:, i : i + 3], memories, i) for i in range(0, 12, 3)]
        torch.testing.assert_close(torch.cat(parts, dim=1), decoder(tokens), atol=1e-5, rtol=0)


def test_greedy_generation_is_the_argmax_of_the_uncached_forward():
    torch.manual_seed(1)
    decoder = Decoder(DecoderConfig(vocab_size=11, context_length=12)).eval()
    prompt = torch.randint(0, 11, (2, 3))
    out = generate(decoder, prompt, max_new_tokens=6, sampling=Sampling(temperature=0))
    assert out.shape == (2, 9)
    assert torch.equal(out[:, 3:], decoder(out).argmax(-1)[:, 2:-1])


def test_stops_at_context_length_and_says_when_there_is_no_room():
    decoder = Decoder(DecoderConfig(vocab_size=11, context_length=12)).eval()
    assert generate(decoder, torch.zeros(1, 3, dtype=torch.long), max_new_tokens=99).shape == (1, 12)
    for length in (0, 12):
        with pytest.raises(ValueError, match=f"the prompt has {length} tokens.*context_length, 12"):
            generate(decoder, torch.zeros(1, length, dtype=torch.long), max_new_tokens=1)


def test_generation_repeats_with_a_seeded_generator():
    decoder = Decoder(DecoderConfig(vocab_size=11)).eval()
    prompt = torch.zeros(2, 1, dtype=torch.long)
    runs = [generate(decoder, prompt, 20, generator=torch.Generator().manual_seed(s)) for s in (7, 7, 8)]
    assert torch.equal(runs[0], runs[1])
    assert not torch.equal(runs[0], runs[2])


@pytest.mark.parametrize(
    ("sampling", "kept"),
    [
        (Sampling(), {0, 1, 2, 3}),
        (Sampling(temperature=0), {0}),
        (Sampling(top_k=1), {0}),
        (Sampling(top_k=2), {0, 1}),
        (Sampling(top_k=99), {0, 1, 2, 3}),
        (Sampling(top_p=0.5), {0}),
        (Sampling(top_p=0.51), {0, 1}),
        (Sampling(top_p=0.8), {0, 1}),
        (Sampling(top_p=0.81), {0, 1, 2}),
    ],
    ids=repr,
)
def test_sampling_draws_from_the_documented_set(sampling, kept):
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05], dtype=torch.float64).log().repeat(4000, 1)
    drawn = sampling.draw(logits, torch.Generator().manual_seed(0))
    assert set(drawn.tolist()) == kept


def test_temperature_sharpens():
    """At temperature 1/2 probabilities are squared: 4 : 1 becomes 16 : 1."""
    logits = torch.tensor([0.8, 0.2]).log().repeat(20000, 1)
    share = (Sampling(temperature=0.5).draw(logits, torch.Generator().manual_seed(0)) == 0).double().mean().item()
    assert share == pytest.approx(16 / 17, abs=0.01)


@pytest.mark.parametrize(
    ("key", "value"),
    [("temperature", -1.0), ("temperature", float("nan")), ("top_k", 0), ("top_p", 0.0), ("top_p", 1.5)],
)
def test_senseless_sampling_is_refused(key, value):
    with pytest.raises(ValueError, match=f"{key} is"):
        Sampling(**{key: value})
