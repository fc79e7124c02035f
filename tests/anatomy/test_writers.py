"""Case 4: the matrices that write into the stream, and no others."""

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.utils import parametrizations

from lightning_norms.anatomy.describe import describe
from lightning_norms.anatomy.writers import residual_writers, scale_, value_path
from tests.stand_ins import Decoder, Module


def names(matrices):
    return [matrix.name.removeprefix("decoder.blocks.") for matrix in matrices]


def test_declared_writers_in_depth_order():
    matrices = residual_writers(Module(Decoder(layers=2)))
    each = ["attention.writer.weight", "feed_forward.writer.weight"]
    assert names(matrices) == [f"{index}.{name}" for index in range(2) for name in each]
    assert [(matrix.layer, matrix.layers) for matrix in matrices] == [(1, 2), (1, 2), (2, 2), (2, 2)]


def test_declared_value_path():
    path = [name.split(".", 1)[1] for name in names(value_path(Module(Decoder(layers=1))))]
    assert path == [
        *("attention.value.weight", "attention.writer.weight"),
        *("feed_forward.up.weight", "feed_forward.writer.weight"),
    ]


def test_pattern_leaves_biases_and_norms_alone():
    matrices = residual_writers(Module(Decoder(layers=1)), pattern=r"\.0\.(attention|norm_1)")
    assert names(matrices) == [f"0.attention.{name}.weight" for name in ("query", "key", "value", "writer")]


def test_both_patterns_make_a_value_path():
    matrices = value_path(Decoder(layers=2), pattern=r"writer\.", value_pattern=r"(value|up|writer)\.")
    assert len(matrices) == 8
    with pytest.raises(ValueError, match="give both pattern= "):
        value_path(Decoder(), pattern="writer")


def test_shared_tensors_come_once():
    decoder = Decoder(layers=3)
    for block in decoder.blocks:
        block.attention.writer.weight = decoder.blocks[0].attention.writer.weight
    decoder.blocks[2] = decoder.blocks[1]
    assert names(residual_writers(decoder)) == [
        *("blocks.0.attention.writer.weight", "blocks.0.feed_forward.writer.weight"),
        "blocks.1.feed_forward.writer.weight",
    ]


def test_no_match_lists_what_was_seen():
    with pytest.raises(ValueError, match=r"(?s)pattern='c_proj' matches nothing.*blocks: 3 x Block.*attention\.query"):
        residual_writers(Decoder(), pattern="c_proj")
    lonely = nn.ModuleList(nn.ModuleList([nn.Linear(2, 3)]) for _ in range(2))
    with pytest.raises(ValueError, match=r"(?s)no residual writers were found: give pattern=.*0\.0\.weight \[3, 2\]"):
        residual_writers(lonely)
    with pytest.raises(ValueError, match="Linear: no list of repeated blocks"):
        residual_writers(nn.Linear(2, 2))


def test_uneven_match_is_refused():
    with pytest.raises(ValueError, match=r"does not match all blocks alike \(0 in block 0; 2 in blocks 1, 2\)"):
        residual_writers(Decoder(), pattern=r"[12]\.(attention|feed_forward)\.writer")


class PlainBlock(nn.Module):
    """A Llama-like block that declares nothing."""

    def __init__(self, width=8):
        super().__init__()
        self.attn = nn.ModuleDict({name: nn.Linear(width, width) for name in ("q_proj", "k_proj", "v_proj", "o_proj")})
        self.mlp = nn.ModuleDict({"w1": nn.Linear(width, 20), "w2": nn.Linear(20, width), "w3": nn.Linear(width, 20)})


def plain(layers=2):
    return nn.ModuleList(PlainBlock() for _ in range(layers))


FOUND = ["0.attn.o_proj.weight", "0.mlp.w2.weight", "1.attn.o_proj.weight", "1.mlp.w2.weight"]


def test_found_by_tree_and_shape():
    assert names(residual_writers(plain())) == FOUND
    path = [name.removeprefix("0.") for name in names(value_path(plain())) if name.startswith("0.")]
    assert path == ["attn.v_proj.weight", "attn.o_proj.weight", *(f"mlp.{name}.weight" for name in ("w1", "w2", "w3"))]


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_found_through_wrappers():
    net = plain()
    net[0] = checkpoint_wrapper(net[0])
    net[1].mlp = torch.compile(net[1].mlp)
    net[1].attn.o_proj = checkpoint_wrapper(net[1].attn.o_proj)
    assert names(residual_writers(net)) == FOUND
    assert names(residual_writers(torch.compile(net))) == FOUND


@pytest.mark.parametrize("normed", [parametrizations.weight_norm, pytest.param(nn.utils.weight_norm, id="older")])
@pytest.mark.filterwarnings("ignore:.*weight_norm.*is deprecated:FutureWarning")
def test_weight_norm_is_scaled_by_its_magnitude(normed):
    net = plain(1)
    normed(net[0].attn.o_proj)
    inputs = torch.linspace(-1, 1, 8)
    before = net[0].attn.o_proj(inputs) - net[0].attn.o_proj.bias
    matrices = residual_writers(net)
    assert len(matrices) == 2
    for matrix in matrices:
        scale_(matrix, 0.25)
    torch.testing.assert_close(net[0].attn.o_proj(inputs) - net[0].attn.o_proj.bias, before / 4)


@pytest.mark.parametrize("pattern", [None, r"o_proj"])
def test_a_parametrization_that_undoes_a_factor_is_refused(pattern):
    net = plain(1)
    parametrizations.spectral_norm(net[0].attn.o_proj)
    with pytest.raises(ValueError, match=r"o_proj.* cannot be scaled: its weight is parametrized by _SpectralNorm"):
        residual_writers(net, pattern)


def test_experts_and_dense_blocks_may_alternate():
    net = plain(2)
    net[1].mlp = nn.ModuleDict(
        {"router": nn.Linear(8, 3), "experts": nn.ModuleList(PlainBlock().mlp for _ in range(3))}
    )
    assert [len([each for each in residual_writers(net) if each.layer == layer]) for layer in (1, 2)] == [2, 4]


def test_a_block_with_an_unknown_half_is_an_error_and_not_left_out():
    net = plain(3)
    del net[1].mlp
    net[1].mystery = nn.Conv2d(8, 8, 3)
    with pytest.raises(
        ValueError,
        match=r"(?s)no sublayer claims 1\.mystery\.weight \[8, 8, 3, 3\]: give pattern=.*of 0:.*attn\..*of 1:",
    ):
        residual_writers(net)


def test_transposed_registration_and_grouped_heads():
    """Phi-3 registers its output projection first; grouped heads make q and o the only square ones."""
    block = PlainBlock()
    attention = {
        "o_proj": nn.Linear(8, 8),
        "q_proj": nn.Linear(8, 8),
        "k_proj": nn.Linear(8, 4),
        "v_proj": nn.Linear(8, 4),
    }
    block.attn = nn.ModuleDict(attention)
    assert names(residual_writers(nn.ModuleList([block]))) == FOUND[:2]


def with_parts(**parts):
    net = plain(2)
    for name, part in parts.items():
        setattr(net[1].attn, name, part)
    return net


def table(*shape):
    return nn.Parameter(torch.randn(shape))


@pytest.mark.parametrize(
    ("net", "name"),
    [
        (with_parts(extra=nn.Linear(8, 8)), r"1\.attn\.extra\.weight \[8, 8\]"),
        (with_parts(mix=table(8, 2, 4)), r"1\.attn\.mix \[8, 2, 4\]"),
        (with_parts(memory=nn.LSTM(8, 8)), r"1\.attn\.memory\.weight_ih_l0 \[32, 8\]"),
        (with_parts(norm=nn.ModuleDict({"fc1": nn.Linear(8, 4), "fc2": nn.Linear(4, 8)})), r"1\.attn\.norm\.fc2"),
    ],
    ids=["square", "bare", "recurrent", "network inside a norm"],
)
def test_a_matrix_that_no_sublayer_claims_is_an_error(net, name):
    with pytest.raises(ValueError, match=rf"(?s)no sublayer claims {name}.*give pattern=.*of 0:.*of 1:.*\? 1\.attn"):
        residual_writers(net)
    assert names(residual_writers(net, r"(o_proj|w2)\.weight")) == FOUND


@pytest.mark.parametrize(
    "parts",
    [
        {"pos_key_proj": nn.Linear(8, 8)},
        {"r_net": nn.Linear(8, 8, bias=False)},
        {"linear_pos": nn.Linear(8, 8)},
        {"g_proj": nn.Linear(8, 8)},
        {"router": nn.Linear(8, 8)},
        {"relative_position_bias_table": table(9, 2)},
        {"time_mix": table(1, 1, 8)},
        {"local": nn.Conv1d(8, 8, 3, groups=8)},
        {"positions": nn.Embedding(5, 8)},
        {"indexer": nn.ModuleDict({"wq_b": nn.Linear(8, 8), "wk": nn.Linear(8, 4), "weights": nn.Linear(8, 2)})},
    ],
    ids=lambda parts: next(iter(parts)),
)
def test_positions_gates_routers_and_tables_write_nothing(parts):
    assert names(residual_writers(with_parts(**parts))) == FOUND


def test_an_attention_of_bare_matrices():
    net = plain(2)
    for block in net:
        block.attn = nn.ParameterDict({name: table(8, 2, 4) for name in ("wq", "wk", "wv", "wo")})
    assert names(residual_writers(net))[:2] == ["0.attn.wo", "0.mlp.w2.weight"]
    assert set(names(value_path(net))[:2]) == {"0.attn.wv", "0.attn.wo"}


def test_a_reader_without_its_writer_is_an_error():
    net = plain(2)
    net[1].cross = nn.ModuleDict({"query": nn.Linear(8, 4), "value": nn.Linear(8, 4)})
    with pytest.raises(ValueError, match=r"no sublayer claims 1\.cross\.query\.weight \[4, 8\]"):
        residual_writers(net)


def test_a_stream_of_another_width_inside_the_block_is_refused():
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 11, "hidden_size": 8, "embedding_size": 8, "num_attention_heads": 2, "num_hidden_layers": 2}
    config = transformers.MobileBertConfig(**sizes, intra_bottleneck_size=16, intermediate_size=32)
    with pytest.raises(ValueError, match=r"no sublayer claims encoder\.layer\.0\..*bottleneck"):
        residual_writers(transformers.MobileBertModel(config))


def test_description_fits_a_screen():
    wide = nn.ModuleList(nn.ModuleList(nn.Linear(2, 2) for _ in range(40)) for _ in range(3))
    assert len(describe(wide).splitlines()) < 16
