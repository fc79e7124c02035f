"""The decoder laid out for one token at a time computes what the decoder computes, and leaves it as it was."""

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lightning_norms.model.attention import QKNorm
from lightning_norms.model.cpu.token_by_token import lay_out, product
from lightning_norms.model.decoder import Decoder, DecoderConfig
from lightning_norms.model.feed_forward import GELU, ReLU, SwiGLU
from lightning_norms.model.generation import WORTH_LAYING_OUT, KeyValueMemory, Sampling, generate
from lightning_norms.model.norms import RMSNorm
from lightning_norms.model.positions import Rotary
from tests.model.placements.stacks import all_placements

WITH_BANDS = {"vocab_size": 300, "d_model": 128, "n_layers": 2}
OPTIONS = [
    {"bias": True},
    {"norm": RMSNorm(), "feed_forward": SwiGLU(), "positions": Rotary(), "n_kv_heads": 2},
    {"feed_forward": ReLU(), "n_kv_heads": 1, "tied_head": False},
    {"feed_forward": GELU("tanh"), "qk_norm": QKNorm(over="width"), "value_residual": 0.5, "dropout": 0.3},
]


@pytest.fixture(params=[1, 2, 3], autouse=True)
def threads(request):
    """Of torch, and as they were afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def token_by_token(decoder, tokens):
    """Logits of a prompt of three and of every token after it."""
    memories = [KeyValueMemory(64) for _ in decoder.blocks]
    starts = [0, *range(3, tokens.shape[1])]
    ends = [*starts[1:], tokens.shape[1]]
    return torch.cat([decoder(tokens[:, i:j], memories, i) for i, j in zip(starts, ends, strict=True)], dim=1)


@pytest.mark.parametrize("options", [{"placement": each} for each in all_placements()] + OPTIONS, ids=repr)
@pytest.mark.filterwarnings("ignore:.*give `qk_norm")
def test_every_design_says_the_same(options):
    torch.manual_seed(0)
    decoder = Decoder(DecoderConfig(**WITH_BANDS, **options)).eval()
    for parameter in decoder.parameters():
        parameter.data += 0.02 * torch.randn_like(parameter)
    twin = lay_out(decoder)
    assert twin is not decoder
    for batch in (1, 2):
        tokens = torch.randint(0, 300, (batch, 9))
        with torch.no_grad():
            torch.testing.assert_close(token_by_token(twin, tokens), decoder(tokens), atol=1e-5, rtol=0)


@pytest.mark.parametrize(("out", "width"), [(512, 128), (128, 512), (128, 128), (257, 128), (8, 16), (1, 30_000)])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_product_is_linear_whatever_the_shape(out, width, bias, dtype):
    torch.manual_seed(0)
    weight, added = torch.randn(out, width, dtype=dtype), torch.randn(out, dtype=dtype) if bias else None
    times = product(weight, added)
    for shape in ((1, 1), (1,), (), (2, 3), (1, 5)):
        x = torch.randn(*shape, width, dtype=dtype)
        expected = F.linear(x, weight, added)
        assert times(x).shape == expected.shape
        torch.testing.assert_close(times(x), expected, atol=1e-6 * width, rtol=1e-5)


def test_gelu_of_one_row_says_the_same():
    """And is left alone where there is more than a row."""
    x = torch.randn(1, 1, 512, generator=torch.Generator().manual_seed(0))
    decoder = lay_out(Decoder(DecoderConfig(vocab_size=9)).eval())
    gelu = vars(decoder.blocks[0].__self__.feed_forward.__self__)["activation"]
    assert gelu(x).shape == x.shape
    torch.testing.assert_close(gelu(x), F.gelu(x), atol=1e-6, rtol=1e-6)
    assert torch.equal(gelu(x.expand(1, 3, 512)), F.gelu(x.expand(1, 3, 512)))


def test_rows_are_in_bands_where_there_are_cores(threads):
    """Three threads share 512 rows as two: bands are even. A small matrix has none."""
    assert isinstance(product(torch.zeros(64, 64), None), functools.partial)
    with torch.profiler.profile(record_shapes=True) as profile:
        product(torch.zeros(512, 128), None)(torch.zeros(1, 1, 128))
    shapes = [event.input_shapes for event in profile.events() if event.name == "aten::bmm"]
    assert shapes == ([] if threads == 1 else [[[2, 1, 128], [2, 128, 256]]])


def test_the_decoder_is_as_it_was():
    decoder = Decoder(DecoderConfig(**WITH_BANDS)).eval()
    tokens = torch.randint(0, 300, (2, 9))
    state = {name: value.clone() for name, value in decoder.state_dict().items()}
    before = [sorted(vars(module)) for module in decoder.modules()]
    with torch.no_grad():
        logits = decoder(tokens)
        twin = lay_out(decoder)
        twin(tokens)
        assert torch.equal(decoder(tokens), logits)
    assert [sorted(vars(module)) for module in decoder.modules()] == before
    assert all(torch.equal(value, state[name]) for name, value in decoder.state_dict().items())
    assert twin.embedding is decoder.embedding
    writer = decoder.blocks[0].attention.writer.weight
    with torch.no_grad():
        writer.zero_()
        assert not torch.equal(twin(tokens), logits), "a square matrix is shared, not copied"


def test_no_block_calls_a_module(monkeypatch):
    """The decoder, its embedding, positions, entry and exit are called as modules, whatever the depth."""
    called, usual = [], nn.Module.__call__
    monkeypatch.setattr(nn.Module, "__call__", lambda self, *args: called.append(self) or usual(self, *args))
    twin = lay_out(Decoder(DecoderConfig(vocab_size=9, n_layers=7)).eval())
    twin(torch.zeros(1, 1, dtype=torch.long))
    assert called == [twin, twin.embedding, twin.positions, twin.entry, twin.exit]


def hook(decoder):
    """On one norm of one block."""
    decoder.blocks[1].attention_residual.before.register_forward_hook(lambda *_: None)


def compiled(decoder):
    """One block; nothing is compiled until it is called."""
    decoder.blocks[0].compile()


def other_weights(decoder):
    """As of a sharded matrix: a kind of parameter that is not torch's own."""
    kind = type("Other", (nn.Parameter,), {})
    decoder.blocks[0].attention.query.weight = kind(torch.zeros(64, 64))


@pytest.mark.parametrize("change", [hook, compiled, other_weights])
@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_a_decoder_whose_calls_are_more_than_forwards_is_left_alone(change):
    decoder = Decoder(DecoderConfig(vocab_size=9)).eval()
    change(decoder)
    assert lay_out(decoder) is decoder


def test_a_parametrized_matrix_keeps_its_parametrization():
    decoder = Decoder(DecoderConfig(vocab_size=9)).eval()
    tokens = torch.zeros(1, 1, dtype=torch.long)
    torch.nn.utils.parametrizations.weight_norm(decoder.blocks[0].attention.query)
    decoder.blocks[0].attention.query.parametrizations.weight.original0.data *= 3
    with torch.no_grad():
        torch.testing.assert_close(lay_out(decoder)(tokens), decoder(tokens), atol=1e-6, rtol=0)


def test_under_autocast_it_is_half_precision_as_before():
    decoder = Decoder(DecoderConfig(**WITH_BANDS)).eval()
    tokens = torch.randint(0, 300, (1, 9))
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        logits = lay_out(decoder)(tokens)
        assert logits.dtype == torch.bfloat16
        torch.testing.assert_close(logits, decoder(tokens), atol=0.02, rtol=0.02)


def test_generation_lays_out_long_texts_only(monkeypatch):
    seen = []
    monkeypatch.setattr("lightning_norms.model.generation.lay_out", lambda decoder: seen.append(decoder) or decoder)
    decoder = Decoder(DecoderConfig(vocab_size=9)).eval()
    prompt = torch.zeros(1, 1, dtype=torch.long)
    generate(decoder, prompt, WORTH_LAYING_OUT - 1, Sampling(temperature=0))
    assert seen == []
    generate(decoder, prompt, WORTH_LAYING_OUT, Sampling(temperature=0))
    assert seen == [decoder]
