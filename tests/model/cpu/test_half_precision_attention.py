"""Half-precision attention on a CPU: exact in float64 arithmetic, no worse than torch's kernel, nothing big is kept."""

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from lightning_norms.model.attention import CausalSelfAttention, Passage
from lightning_norms.model.cpu import half_precision_attention
from lightning_norms.model.cpu.half_precision_attention import _Attention, attend, wants
from lightning_norms.model.residual import Inner, Site

TIMES = (1, 5, 64, 65, 200)


def drawn(time, dtype, spread=1.0, seed=0):
    """Queries, keys, values and a gradient, laid out as the decoder has them."""
    generator = torch.Generator().manual_seed(seed)
    spreads = (spread, spread, 1.0, 1.0)
    numbers = [torch.randn(2, time, 3, 16, generator=generator, dtype=torch.float64) * each for each in spreads]
    q, k, v, g = (x.to(dtype).transpose(1, 2) for x in numbers)
    return [x.detach().requires_grad_() for x in (q, k, v)], g


def reference(inputs, gradient):
    """Result and gradients by torch in float64."""
    exact = [x.detach().double().requires_grad_() for x in inputs]
    mixed = scaled_dot_product_attention(*exact, is_causal=True)
    return mixed, *torch.autograd.grad(mixed, exact, gradient.double())


def computed(function, inputs, gradient):
    mixed = function(*inputs)
    return mixed, *torch.autograd.grad(mixed, inputs, gradient)


def errors(found, exact):
    pairs = [(x.detach().double(), y.detach()) for x, y in zip(found, exact, strict=True)]
    return [float((x - y).norm() / y.norm()) for x, y in pairs]


@pytest.mark.parametrize("time", TIMES)
def test_bands_and_their_gradients_are_attention(time):
    inputs, gradient = drawn(time, torch.float64)
    exact = reference(inputs, gradient)
    for found, wanted in zip(computed(_Attention.apply, inputs, gradient), exact, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("time", TIMES[1:])  # of one token, queries and keys have no gradient
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("spread", [1.0, 3.0])
def test_no_worse_than_torchs_own_kernel(time, dtype, spread):
    inputs, gradient = drawn(time, dtype, spread)
    exact = reference(inputs, gradient)
    ours = errors(computed(attend, inputs, gradient), exact)
    torchs = errors(computed(lambda *x: scaled_dot_product_attention(*x, is_causal=True), inputs, gradient), exact)
    precision = torch.finfo(dtype).eps
    for mine, theirs in zip(ours, torchs, strict=True):
        assert mine <= 1.4 * theirs + 0.1 * precision


@pytest.mark.parametrize("time", [60, 200])
def test_autocast_does_not_take_the_logits_back_to_half_precision(time):
    inputs, gradient = drawn(time, torch.bfloat16, spread=3.0)
    plain = computed(attend, inputs, gradient)
    with torch.autocast("cpu", torch.bfloat16):
        within = computed(attend, inputs, gradient)
    assert all(torch.equal(one, other) for one, other in zip(plain, within, strict=True))


def test_nothing_of_size_time_by_time_is_kept():
    inputs, _ = drawn(300, torch.bfloat16)
    kept = []

    def keep(tensor):
        kept.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        attend(*inputs)
    assert kept == [inputs[0].numel()] * 3


def test_torch_func_differentiates_it():
    (q, k, v), _ = drawn(200, torch.float64)
    found = torch.func.grad(lambda query: _Attention.apply(query, k, v).square().sum())(q.detach())
    mixed = scaled_dot_product_attention(q, k, v, is_causal=True).square().sum()
    torch.testing.assert_close(found, torch.autograd.grad(mixed, q)[0], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    ("dtype", "dropout", "keys", "grad", "wanted"),
    [
        (torch.bfloat16, 0.0, 8, True, True),
        (torch.float16, 0.0, 8, True, True),
        (torch.float32, 0.0, 8, True, False),
        (torch.bfloat16, 0.1, 8, True, False),  # it draws no dropout
        (torch.bfloat16, 0.0, 9, True, False),  # new tokens behind a memory
        (torch.bfloat16, 0.0, 8, False, False),  # torch's forward is as fast
    ],
)
def test_when_it_is_used(dtype, dropout, keys, grad, wanted):
    query, key = torch.zeros(1, 2, 8, 4, dtype=dtype), torch.zeros(1, 2, keys, 4, dtype=dtype)
    with torch.set_grad_enabled(grad):
        assert wants(query, key, dropout) is wanted
    assert not wants(query.to("meta"), key.to("meta"), dropout)


@pytest.mark.parametrize("kv_heads", [4, 2])
def test_the_decoders_attention_uses_it_where_heads_are_not_shared(monkeypatch, kv_heads):
    calls = []
    real = half_precision_attention.attend
    monkeypatch.setattr(half_precision_attention, "attend", lambda *x: calls.append(1) or real(*x))
    torch.manual_seed(0)
    attention = CausalSelfAttention(Site("attention", 16, 1, 1, 16, 4, kv_heads), Inner(), bias=False, dropout=0.0)
    x = torch.randn(2, 9, 16)
    exact = attention(x, Passage(lambda y: y))
    with torch.autocast("cpu", torch.bfloat16):
        half = attention(x, Passage(lambda y: y))
    assert len(calls) == (kv_heads == 4)
    torch.testing.assert_close(half.float(), exact, rtol=0.05, atol=0.01)
