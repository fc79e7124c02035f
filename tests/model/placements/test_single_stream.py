"""Each placement against worked examples, the papers' constants, and its norm count and widths."""

import math

import pytest
import torch
from torch import nn

from lightning_norms.model.attention import QKNorm
from lightning_norms.model.decoder import Decoder, DecoderConfig
from lightning_norms.model.feed_forward import ReLU
from lightning_norms.model.norms import Derf, DyT, L2Norm, LayerNorm, RMSNorm, ScaleNorm
from lightning_norms.model.placements.learned_gates import next_omega
from lightning_norms.model.residual import Site
from lightning_norms.placements import (
    B2T,
    KEEL,
    LNS,
    MHC,
    NGPT,
    Admin,
    AttentionResiduals,
    BeamNorm,
    CompleteP,
    DeepNorm,
    DSInit,
    GLMDeepNorm,
    HybridNorm,
    HybridNormStar,
    HyperConnections,
    MixNorm,
    NormFormer,
    OutputNorm,
    ParallelBlock,
    PeriNorm,
    PostNorm,
    PreNorm,
    ProRes,
    ResiDual,
    ResPostNorm,
    ReZero,
    Sandwich,
    SiameseNorm,
    SkipInit,
    SubNorm,
    TFixup,
)

X0 = torch.tensor([1.0, 2.0, 3.0, 6.0], dtype=torch.float64)
F1 = lambda z: z * torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=z.dtype)  # noqa: E731
F2 = lambda z: z.roll(1, dims=-1)  # noqa: E731
NORM = LayerNorm(eps=0.0)


def one_block(placement, layer=1, layers=1, norm=NORM):
    """Stream after two sublayers, and what the head would read."""
    x = placement.entry(4, norm).double()(X0)
    for kind, branch in (("attention", F1), ("feed_forward", F2)):
        x = placement.wrap(Site(kind, 4, layer, layers, 4), norm).double()(x, branch)
    return x, placement.exit(4, norm).double()(x)


POST = [0.538462, -1.307692, -0.538462, 1.307692]
PRE = [1.619039, 0.093896, 2.365223, 12.198022]
PRE_READ = [-0.514261, -0.834392, -0.357636, 1.706289]
SANDWICH = [1.970532, 0.370329, 2.064659, 7.594480]
SANDWICH_READ = [-0.376165, -0.960876, -0.341772, 1.678812]
DEEP_24 = [-0.393871, -1.001370, -0.269018, 1.664258]
# (placement, norm, block number, number of blocks): two sublayers = one block, eps 0, worked out in float64
GOLDEN = {
    "PostNorm": (PostNorm(), NORM, 1, 1, POST, POST),
    "PreNorm": (PreNorm(), NORM, 1, 1, PRE, PRE_READ),
    "DeepNorm, L=1": (DeepNorm(), NORM, 1, 1, [0.347015, -1.273732, -0.492619, 1.419336], None),
    "DeepNorm, L=24": (DeepNorm(), NORM, 1, 24, DEEP_24, DEEP_24),
    "Sandwich": (Sandwich(), NORM, 1, 1, SANDWICH, SANDWICH_READ),
    "PeriNorm": (PeriNorm(), NORM, 1, 1, SANDWICH, SANDWICH_READ),
    "OutputNorm": (OutputNorm(), NORM, 1, 1, [1.656165, 0.346173, 2.378186, 7.619475], None),
    "ResPostNorm, gains 1": (ResPostNorm(1.0), NORM, 1, 1, [1.656165, 0.346173, 2.378186, 7.619475], None),
    "ResPostNorm": (ResPostNorm(), NORM, 1, 1, [1.0, 2.0, 3.0, 6.0], None),
    "ResiDual": (
        ResiDual(), NORM, 1, 1, (POST, [3.633660, 5.019804, 11.393212, 29.953324]),
        [-0.306518, -2.020570, -0.643941, 2.971029],
    ),
    "B2T": (B2T(), NORM, 1, 1, [-0.491906, -0.945057, -0.238718, 1.675682], None),
    "LNS, l=4": (LNS(), NORM, 4, 8, [1.300370, 1.013777, 2.695479, 9.128464], None),
    "MixNorm, below": (MixNorm(), NORM, 1, 4, POST, None),
    "MixNorm, above": (MixNorm(), NORM, 2, 4, PRE, PRE_READ),
    "KEEL, a=48": (KEEL(), NORM, 2, 24, [-1.029878, -0.565544, -0.022907, 1.618328], None),
    "KEEL, block 1": (KEEL(), NORM, 1, 24, PRE_READ, PRE_READ),
    "HybridNorm": (HybridNorm(), NORM, 2, 2, [0.653464, -1.586984, -0.653464, 1.586984], None),
    "HybridNormStar, block 1": (HybridNormStar(), NORM, 1, 2, PRE, PRE_READ),
    "HybridNormStar, block 2": (HybridNormStar(), NORM, 2, 2, [0.653464, -1.586984, -0.653464, 1.586984], None),
    "ReZero, w=.5": (ReZero(0.5), NORM, 1, 1, [10.5, 4.75, 9.5, 21.75], [10.5, 4.75, 9.5, 21.75]),
    "SkipInit, w=.5": (SkipInit(0.5), NORM, 1, 1, [10.5, 4.75, 9.5, 21.75], None),
    "CompleteP, m=4": (CompleteP(base_layers=2), NORM, 1, 8, [1.145040, 1.491753, 2.854096, 7.578156], None),
    "BeamNorm": (BeamNorm(), RMSNorm(eps=0.0), 1, 2, [1.624313, 1.470173, 2.427151, 5.003284], None),
    "SiameseNorm, l=1": (
        SiameseNorm(), NORM, 1, 1,
        ([0.383642, -1.227009, -0.689966, 1.533333], [1.622006, 0.106339, 2.360628, 12.187206]),
        [-0.078514, -1.029855, -0.522615, 1.630984],
    ),
    "NGPT": (NGPT(), NORM, 1, 1, [0.175352, 0.274522, 0.421045, 0.846529], [0.175352, 0.274522, 0.421045, 0.846529]),
    "AttentionResiduals": (AttentionResiduals(), NORM, 1, 1, None, PRE_READ),
    "HyperConnections": (HyperConnections(2), NORM, 1, 1, (PRE, PRE), PRE_READ),
    "TFixup": (TFixup(), NORM, 1, 1, [32.0, 8.0, 18.0, 42.0], [32.0, 8.0, 18.0, 42.0]),
    "DSInit": (DSInit(), NORM, 3, 8, POST, POST),
    "GLMDeepNorm, 2L=sqrt(48)": (GLMDeepNorm(), NORM, 1, 48**0.5 / 2, DEEP_24, None),
    "Admin, omega 1": (Admin(), NORM, 1, 1, POST, POST),
    # x + F1(N x) + F2(N x), by hand from N x0 = (-1.069045, -.534522, 0, 1.603567)
    "ParallelBlock": (ParallelBlock(), NORM, 1, 1, [1.534522, -0.138089, 2.465478, 12.414270], None),
    "ParallelBlock, 2": (ParallelBlock(2), NORM, 1, 1, [1.534522, -0.138089, 2.465478, 12.414270], None),
}  # fmt: skip


@pytest.mark.parametrize(("placement", "norm", "layer", "layers", "stream", "read"), GOLDEN.values(), ids=GOLDEN)
def test_golden_vectors(placement, norm, layer, layers, stream, read):
    got_stream, got_read = one_block(placement, layer, layers, norm)
    if stream is not None:
        wanted = stream if isinstance(stream, tuple) else (stream,)
        for got, want in zip(got_stream if isinstance(stream, tuple) else (got_stream,), wanted, strict=True):
            torch.testing.assert_close(got, torch.tensor(want, dtype=torch.float64), atol=1e-6, rtol=0)
    if read is not None:
        torch.testing.assert_close(got_read, torch.tensor(read, dtype=torch.float64), atol=1e-6, rtol=0)


def test_golden_mean_of_attention_residuals():
    placement = AttentionResiduals()
    written, _ = one_block(placement)
    mean = placement.exit(4, NORM).double()[0](written)
    wanted = torch.tensor([0.539680, 0.031299, 0.788408, 4.066007], dtype=torch.float64)
    torch.testing.assert_close(mean, wanted, atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    ("norm", "out"),
    [
        (LayerNorm(0.0), [-1.069045, -0.534522, 0.0, 1.603567]),
        (LayerNorm(0.0, gain=False), [-1.069045, -0.534522, 0.0, 1.603567]),
        (RMSNorm(0.0), [0.282843, 0.565685, 0.848528, 1.697056]),
        (ScaleNorm(), [0.282843, 0.565685, 0.848528, 1.697056]),
        (L2Norm(), [0.141421, 0.282843, 0.424264, 0.848528]),
        (DyT(), [0.462117, 0.761594, 0.905148, 0.995055]),
        (Derf(), [0.520500, 0.842701, 0.966105, 0.999978]),
    ],
    ids=repr,
)
def test_golden_norms(norm, out):
    torch.testing.assert_close(norm(4).double()(X0), torch.tensor(out, dtype=torch.float64), atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    ("norm", "parameters"),
    [
        (LayerNorm(), 32), (LayerNorm(bias=False), 16), (LayerNorm(gain=False), 0), (RMSNorm(), 16),
        (RMSNorm(gain=False), 0), (ScaleNorm(), 1), (L2Norm(), 0), (DyT(), 33), (Derf(), 34),
    ],
    ids=repr,
)  # fmt: skip
def test_norms_keep_the_dtype_and_learn_what_they_say(norm, parameters):
    module = norm(16)
    assert sum(p.numel() for p in module.parameters()) == parameters
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        assert module.to(dtype)(torch.randn(3, 16, dtype=dtype)).dtype == dtype
    module(torch.randn(3, 16, dtype=dtype, requires_grad=True)).square().sum().backward()
    assert all(p.grad is not None for p in module.parameters())


@pytest.mark.parametrize("make", [DyT, Derf])
@pytest.mark.parametrize("alpha", [0.0, float("nan"), "steep"])
def test_senseless_steepness_is_refused(make, alpha):
    with pytest.raises(ValueError, match="alpha is"):
        make(alpha)


@pytest.mark.parametrize(
    ("layers", "alpha", "beta"),
    [(6, 1.8612, 0.3799), (12, 2.2134, 0.3195), (24, 2.6321, 0.2686), (48, 3.1302, 0.2259), (1000, 6.6874, 0.1057)],
)
def test_deepnorm_constants(layers, alpha, beta):
    site = Site("attention", 4, 1, layers)
    assert DeepNorm().wrap(site, NORM).skip == pytest.approx(alpha, abs=5e-5)
    assert DeepNorm().gain(site) == pytest.approx(beta, abs=5e-5)


@pytest.mark.parametrize(
    ("layers", "sub", "fixup"),
    [(6, 1.5764, 0.3689), (12, 1.7827, 0.3102), (24, 1.9675, 0.2608), (48, 2.1364, 0.2193), (96, 2.2929, 0.1844)],
)
def test_gains_of_the_value_path(layers, sub, fixup):
    site = Site("feed_forward", 4, 4, layers)
    assert SubNorm().gain(site) == pytest.approx(sub, abs=5e-5)
    assert TFixup().gain(site) == pytest.approx(fixup, abs=5e-5)
    assert GLMDeepNorm().gain(site) == pytest.approx((2 * layers) ** -0.5)
    assert GLMDeepNorm().wrap(site, NORM).skip == pytest.approx((2 * layers) ** 0.5)
    assert B2T(rescale=True).gain(site) == B2T(rescale=True).query_key_gain(site) == pytest.approx(layers**-0.5)
    assert DSInit(0.5).gain(site) == DSInit(0.5).query_key_gain(site) == 0.25
    for placement in (PreNorm(), PostNorm(), B2T(), SubNorm(), TFixup(), GLMDeepNorm(), DeepNorm()):
        assert placement.query_key_gain(site) == 1.0


def test_minimax_alpha_and_keel_alpha():
    assert DeepNorm().wrap(Site("attention", 4, 1, 80), NORM).skip == pytest.approx(3.5565588, abs=5e-8)
    skips = [KEEL().wrap(Site(kind, 4, layer, 3), NORM).skip for layer in (1, 2, 3) for kind in ("attention", "ff")]
    assert skips == [1.0, 1.0, 6.0, 6.0, 6.0, 6.0]


D, H, FF = 16, 8, 64  # width, width of a head, hidden width
BLOCK = [D, D]
COUNTS = {  # widths of the norms of three blocks, sorted
    PreNorm(): [D] * 7,
    PostNorm(): [D] * 6,
    PostNorm(final_norm=True): [D] * 7,
    DeepNorm(): [D] * 6,
    GLMDeepNorm(): [D] * 6,
    SubNorm(): [D] * 10 + [FF] * 3,
    Sandwich(): [D] * 13,
    PeriNorm(): [D] * 13,
    PeriNorm(embedding_norm=True): [D] * 14,
    OutputNorm(): [D] * 7,
    ResPostNorm(): [D] * 7,
    ResiDual(): [D] * 7,
    B2T(): [D] * 6,
    MixNorm(fraction=1 / 3): [D] * 7,
    LNS(): [D] * 7,
    HybridNorm(): [H] * 9 + [D] * 4,
    HybridNormStar(): [H] * 9 + [D] * 5,
    NormFormer(): [D] * 10 + [FF] * 3,
    KEEL(): [D] * 11,
    SiameseNorm(): [D] * 21,
    ParallelBlock(): [D] * 4,
    ParallelBlock(2): [D] * 7,
    ReZero(): [],
    SkipInit(): [],
    TFixup(): [],
    DSInit(): [D] * 6,
    Admin(): [D] * 6,
    ProRes(): [D] * 7,
    CompleteP(): [D] * 7,
    BeamNorm(): [D] * 13,
    HyperConnections(): [D] * 7,
    NGPT(): [],
}


def built(placement, layers=3, **changes):
    config = {"vocab_size": 11, "n_layers": layers, "d_model": D, "n_heads": 2, "placement": placement} | changes
    if placement.wants_qk_norm:
        config = {"qk_norm": QKNorm(L2Norm())} | config
    return Decoder(DecoderConfig(**config))


@pytest.mark.parametrize("placement", COUNTS, ids=repr)
def test_number_and_width_of_norms(placement):
    """Case 2: pre-norm ends with exactly one norm, post-norm with none after the last block."""
    norms = [module for module in built(placement).modules() if isinstance(module, nn.LayerNorm)]
    assert sorted(norm.normalized_shape[0] for norm in norms) == sorted(COUNTS[placement])


@pytest.mark.parametrize("placement", [PreNorm(), PostNorm(), PostNorm(final_norm=True), DeepNorm()], ids=repr)
def test_the_head_reads_a_normalised_stream(placement):
    decoder, x = Decoder(DecoderConfig(vocab_size=11, n_layers=3, placement=placement)), 3 * torch.randn(64, 64)
    for residual in [block.feed_forward_residual for block in decoder.blocks]:
        x = residual(x, torch.zeros_like)
    assert decoder.exit(x).var().item() == pytest.approx(1.0, abs=0.05)


def test_deepnorm_with_an_empty_branch_only_normalises():
    """Case 5: alpha multiplies the stream, not the branch."""
    norm = LayerNorm(eps=1e-6)
    residual = DeepNorm().wrap(Site("attention", 16, 1, 24), norm)
    assert residual.skip == pytest.approx(2.63215, abs=1e-5)
    x = torch.randn(7, 16)
    torch.testing.assert_close(residual(x, torch.zeros_like), norm(16)(x), atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", ["alpha", "beta"])
@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_deepnorm_refuses_senseless_constants(name, value):
    with pytest.raises(ValueError, match=f"{name} must be a number above 0"):
        DeepNorm(**{name: value})


SENSELESS = [
    (lambda: KEEL(alpha=0.0), "KEEL: alpha must be"),
    (lambda: MixNorm(fraction=1.5), "fraction is"),
    (lambda: CompleteP(base_layers=0), "base_layers must be"),
    (lambda: CompleteP(exponent=-1), "exponent is"),
    (lambda: DSInit(a=2.0), "a is"),
    (lambda: ParallelBlock(norms=3), "norms is 3"),
    (lambda: HyperConnections(streams=0), "HyperConnections: streams must be"),
    (lambda: MHC(iterations=0), "MHC: iterations must be"),
    (lambda: AttentionResiduals(block_size=0), "block_size must be"),
    (lambda: NGPT(rate=0.0), "rate must be"),
    (lambda: ProRes(warmup_steps=0), "warmup_steps must be"),
    (lambda: ProRes(B2T()).wrap(Site("attention", 4, 1, 1), NORM), "one stream"),
    (lambda: ResPostNorm().wrap(Site("attention", 4, 1, 1), LayerNorm(gain=False)), "no gain"),
]


@pytest.mark.parametrize(("make", "message"), SENSELESS, ids=[message for _, message in SENSELESS])
def test_senseless_arguments_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_output_norm_warns_without_qk_norm_and_only_then():
    with pytest.warns(UserWarning, match="OutputNorm.*qk_norm: QKNorm"):
        Decoder(DecoderConfig(vocab_size=5, placement=OutputNorm()))
    Decoder(DecoderConfig(vocab_size=5, placement=OutputNorm(), qk_norm=QKNorm()))


def test_rezero_shares_one_gate_a_block():
    """Gates are two for two blocks; at step 0 they alone (and what is outside of the blocks) get a gradient."""
    decoder = built(ReZero(), layers=2)
    gates = [p for name, p in decoder.named_parameters() if "gate" in name]
    assert [p.tolist() for p in gates] == [[0.0], [0.0]]
    decoder(torch.arange(11)[None]).pow(2).sum().backward()
    moved = {name for name, p in decoder.named_parameters() if p.grad is not None and p.grad.abs().sum() > 0}
    assert {name for name in moved if "blocks" in name} == {
        f"blocks.{i}.attention_residual.gate.weight" for i in (0, 1)
    }


def test_sublns_inner_norm_makes_the_value_matrix_scale_free():
    """Attention is linear in v and ReLU homogeneous, so the norm before the writer takes their factor out."""
    decoder = built(SubNorm(), norm=LayerNorm(eps=0.0), feed_forward=ReLU()).double()
    tokens = torch.arange(11)[None]
    before = decoder(tokens)
    with torch.no_grad():
        for block in decoder.blocks:
            block.attention.value.weight.mul_(3.0)
            block.feed_forward.up.weight.mul_(3.0)
    torch.testing.assert_close(decoder(tokens), before, atol=1e-12, rtol=0)
    with torch.no_grad():
        decoder.blocks[0].attention.writer.weight.mul_(3.0)
    assert (decoder(tokens) - before).abs().max() > 1e-6


def test_normformer_scales_each_head_before_the_writer():
    gain = NormFormer().inner(Site("attention", 4, 1, 1, 4, heads=2), NORM).writer
    with torch.no_grad():
        gain.weight.copy_(torch.tensor([2.0, 3.0]))
    assert gain(torch.ones(5, 4))[0].tolist() == [2.0, 2.0, 3.0, 3.0]


def test_admin_profile_follows_its_recursion():
    """omega^2 grows by each branch's variance on a normalised stream, and a profile is of real forwards."""
    torch.manual_seed(0)
    decoder = built(Admin(), layers=4, d_model=64)
    tokens = torch.randint(0, 11, (8, 16))
    residuals = [r for block in decoder.blocks for r in (block.attention_residual, block.feed_forward_residual)]
    for residual in residuals:
        residual.begin_profile()
    decoder(tokens)
    omegas = [1.0]
    for residual in residuals:
        omegas.append(residual.end_profile(omegas[-1]))
    assert omegas[1:] == sorted(omegas[1:])
    for residual, omega in zip(residuals, omegas[:-1], strict=True):
        torch.testing.assert_close(residual.skip.weight, torch.full((64,), omega))
    omega = 1.0
    for i in range(1, 5):  # unit variance: sqrt(1 + sum of the branches' variances)
        omega = next_omega(omega, 1.0, 0.5)
        assert omega == pytest.approx(math.sqrt(1 + i / 2))
    assert next_omega(2.0, stream=0.04, branch=0.02) == pytest.approx(math.sqrt(4.5))  # relative to a small stream
    residuals[0].begin_profile()
    with pytest.raises(ValueError, match="no omega was measured"):
        residuals[0].end_profile(1.0)


@pytest.mark.parametrize("placement", [MixNorm(rest=OutputNorm()), ProRes(OutputNorm()), ResPostNorm()], ids=repr)
def test_combinations_pass_the_warning_on(placement):
    assert placement.wants_qk_norm
    assert not MixNorm().wants_qk_norm


def test_ngpt_turns_before_it_normalises():
    attention = built(NGPT(), n_kv_heads=1).blocks[0].attention
    assert (type(attention.query_norm), type(attention.key_norm)) == (nn.Identity, nn.Identity)
    x = torch.randn(3, 2, H)
    torch.testing.assert_close(attention.turned_query_norm(x).norm(dim=-1), torch.full((3, 2), H**0.5))
    torch.testing.assert_close(attention.turned_key_norm(x[:, :1]).norm(dim=-1), torch.full((3, 1), H**0.5))


def test_ngpts_rate_is_stored_so_that_adam_moves_it_as_it_moves_a_weight():
    rate = NGPT(rate=0.1).wrap(Site("attention", 16, 1, 1), NORM).rate
    torch.testing.assert_close(rate.weight, torch.full((16,), 0.25))  # width^(-1/2), the size of a weight
    torch.testing.assert_close(rate(torch.ones(16)), torch.full((16,), 0.1))
    residual = NGPT(rate=0.1).wrap(Site("attention", 16, 1, 1), NORM)
    h = nn.functional.normalize(torch.randn(16), dim=0)
    forward = residual(h, lambda x: x.roll(1))
    with torch.no_grad():
        residual.rate.weight.neg_()
    torch.testing.assert_close(residual(h, lambda x: x.roll(1)), forward)  # |a| acts


@pytest.mark.parametrize("over", ["head", "width"])
@pytest.mark.parametrize("rotary", ["before", "after"])
def test_qk_norm_stands_where_it_says(over, rotary):
    decoder = built(PreNorm(), qk_norm=QKNorm(RMSNorm(), over, rotary), n_kv_heads=1)
    attention = decoder.blocks[0].attention
    slots = (attention.query_norm, attention.key_norm), (attention.turned_query_norm, attention.turned_key_norm)
    filled, empty = slots if rotary == "before" else slots[::-1]
    assert [type(slot) for slot in empty] == [nn.Identity, nn.Identity]
    widths = [sum(p.numel() for p in slot.parameters()) for slot in filled]
    assert widths == ([H, H] if over == "head" else [D, H])
    seen = filled[0](torch.randn(2, 3, 2, H)).square().mean((-1,) if over == "head" else (-1, -2))
    torch.testing.assert_close(seen, torch.ones_like(seen), atol=1e-4, rtol=0)


def test_qk_norm_is_refused_where_it_cannot_be():
    with pytest.raises(ValueError, match="leave it out"):
        built(HybridNorm(), qk_norm=QKNorm())
    with pytest.raises(ValueError, match="over is 'heads'"):
        QKNorm(over="heads")
