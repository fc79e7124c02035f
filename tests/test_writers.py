"""Case 4: the matrices that write into the stream, and no others."""

import pytest
from torch import nn

from lightning_norms.writers import describe, residual_writers, value_path
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
    with pytest.raises(
        ValueError, match=r"(?s)no block names its residual writers.*layers: 2 x TransformerEncoderLayer"
    ):
        residual_writers(nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 1, 8), 2, enable_nested_tensor=False))
    with pytest.raises(ValueError, match="Linear: no list of repeated blocks"):
        residual_writers(nn.Linear(2, 2))


def test_uneven_match_is_refused():
    with pytest.raises(ValueError, match=r"does not match all blocks alike \(0 in block 0; 2 in blocks 1, 2\)"):
        residual_writers(Decoder(), pattern=r"[12]\.(attention|feed_forward)\.writer")


def test_description_fits_a_screen():
    wide = nn.ModuleList(nn.ModuleList(nn.Linear(2, 2) for _ in range(40)) for _ in range(3))
    assert len(describe(wide).splitlines()) < 16
