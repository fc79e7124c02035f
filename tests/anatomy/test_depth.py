"""Cases 42, 43: depth is read from the module tree, whatever wrappers and families do to names."""

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from lightning_norms.anatomy.depth import DepthMap, is_norm
from lightning_norms.anatomy.names import clean_name
from lightning_norms.anatomy.stacks import find_stacks
from tests.stand_ins import Block, Decoder, Module


def layers(n, width=4):
    return nn.ModuleList(nn.TransformerEncoderLayer(width, 1, 8) for _ in range(n))


def holder(**children):
    module = nn.Module()
    for name, child in children.items():
        module.add_module(name, child)
    return module


@pytest.mark.parametrize(
    ("name", "clean"),
    [
        ("model._orig_mod.layers.3.linear1.weight", "model.layers.3.linear1.weight"),
        ("layers.3._checkpoint_wrapped_module.linear1.weight", "layers.3.linear1.weight"),
        ("_fsdp_wrapped_module.layers.3.x", "layers.3.x"),
        ("module.layers.3._fsdp_wrapped_module._checkpoint_wrapped_module.x", "layers.3.x"),
        ("blocks.0._orig_mod", "blocks.0"),
        ("_orig_mod", ""),
        ("modules.module_list.x", "modules.module_list.x"),
    ],
)
def test_clean_name(name, clean):
    assert clean_name(name) == clean


def test_groups_of_a_decoder_are_in_depth_order():
    depth = DepthMap.of(Module(Decoder(layers=3)))
    assert depth.groups == ("embedding", "block_00", "block_01", "block_02", "final_norm", "head")
    assert depth.group_of("decoder.blocks.2.attention.writer.weight") == "block_02"
    assert depth.group_of("somebody.else") == "other"


def test_depth_is_a_number_and_pads_to_its_stack():
    depth = DepthMap.of(holder(h=layers(12)))
    assert depth.groups.index(depth.group_of("h.10.norm1.weight")) > depth.groups.index(
        depth.group_of("h.2.norm1.bias")
    )
    assert find_stacks(holder(h=layers(101)))[0].group(7) == "block_007"


@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
def test_encoder_and_decoder_are_kept_apart():
    depth = DepthMap.of(nn.Transformer(4, 1, 2, 3, 8))
    assert depth.group_of("encoder.layers.0.linear1.weight") == "encoder.block_00"
    assert depth.group_of("decoder.layers.0.linear1.weight") == "decoder.block_00"
    assert depth.groups == (
        *("encoder.block_00", "encoder.block_01", "encoder.final_norm"),
        *("decoder.block_00", "decoder.block_01", "decoder.block_02", "decoder.final_norm"),
    )


def test_lists_inside_a_block_are_no_depth():
    block = holder(mlp=holder(experts=nn.ModuleList(holder(w=nn.Linear(2, 2)) for _ in range(8))), norm=nn.LayerNorm(2))
    depth = DepthMap.of(holder(layers=nn.ModuleList([block])))
    assert depth.group_of("layers.0.mlp.experts.7.w.weight") == "block_00"
    adapted = holder(base_model=holder(model=holder(model=holder(layers=layers(2)))))
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.default.weight"
    assert DepthMap.of(adapted).group_of(name) == "block_00"


@pytest.mark.parametrize("keys", [["0", "1", "10"], ["12", "13"]])
def test_numbered_module_dict(keys):
    blocks = holder(layers=nn.ModuleDict({key: Block(4) for key in keys}))
    assert DepthMap.of(blocks).groups == tuple(f"block_{int(key):02d}" for key in keys)


def test_a_pipeline_is_no_stack_but_repeats_are():
    assert find_stacks(nn.Sequential(nn.Linear(2, 2), nn.GELU(), nn.Linear(2, 2))) == ()
    assert find_stacks(nn.Sequential(nn.Embedding(3, 4), Block(4))) == ()
    assert [len(stack.blocks) for stack in find_stacks(nn.Sequential(Block(4), Block(4)))] == [2]


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_wrapped_blocks_are_found_and_compiled_stacks_are_marked():
    plain = Decoder(layers=2)
    groups = DepthMap.of(plain).groups
    plain.blocks[0] = checkpoint_wrapper(plain.blocks[0])
    plain.blocks[1] = torch.compile(plain.blocks[1])
    module = Module(plain)
    assert DepthMap.of(module).groups == groups
    assert not find_stacks(module)[0].compiled
    module.decoder = torch.compile(plain)
    assert any("_orig_mod" in name for name, _ in module.named_parameters())
    assert DepthMap.of(module).groups == groups
    assert find_stacks(module)[0].compiled


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_module_compiled_in_place_is_marked():
    decoder = Decoder(layers=2)
    decoder.compile()
    assert find_stacks(Module(decoder))[0].compiled


def test_tied_head_counts_once():
    decoder = Decoder(layers=1)
    decoder.head.weight = decoder.embedding.weight
    depth = DepthMap.of(decoder)
    assert list(depth.by_name.values()).count("embedding") == 1
    assert depth.group_of("embedding.weight") == "embedding"
    assert depth.group_of("head.bias") == "head"


def test_module_without_blocks():
    depth = DepthMap.of(
        holder(embed=nn.Embedding(3, 2), norm=nn.LayerNorm(2), mlp=nn.Linear(2, 2), head=nn.Linear(2, 1))
    )
    assert depth.stacks == ()
    assert depth.groups == ("embedding", "head", "other")
    assert DepthMap.of(nn.Identity()).groups == ()


@pytest.mark.parametrize(
    ("family", "options", "first", "expected"),
    [
        ("GPT2", {"n_layer": 2, "n_embd": 8, "n_head": 2}, "transformer.h.1.mlp.c_fc.weight", "block_01"),
        ("Llama", {"num_hidden_layers": 2}, "model.layers.1.mlp.up_proj.weight", "block_01"),
        ("Bert", {"num_hidden_layers": 2}, "bert.encoder.layer.1.output.dense.weight", "block_01"),
        ("T5", {"num_layers": 2}, "decoder.block.1.layer.2.DenseReluDense.wo.weight", "decoder.block_01"),
    ],
)
def test_hugging_face_families(family, options, first, expected):
    transformers = pytest.importorskip("transformers")
    small = {"hidden_size": 8, "num_attention_heads": 2, "num_key_value_heads": 2, "intermediate_size": 16}
    small |= {"d_model": 8, "num_heads": 2, "d_kv": 4, "d_ff": 16} if family == "T5" else {}
    tokens = {"vocab_size": 11, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    config = getattr(transformers, f"{family}Config")(**(tokens | (options if family == "GPT2" else small | options)))
    auto = transformers.AutoModelForSeq2SeqLM if family == "T5" else transformers.AutoModelForCausalLM
    model = transformers.BertForMaskedLM(config) if family == "Bert" else auto.from_config(config)
    depth = DepthMap.of(model)
    assert depth.group_of(first) == expected
    assert "embedding" in depth.groups
    if family in ("GPT2", "Llama"):
        assert "final_norm" in depth.groups
    if family == "T5":
        assert {"encoder.final_norm", "decoder.final_norm"} <= set(depth.groups)


def test_is_norm_knows_look_alikes():
    class DyT(nn.Module):
        def __init__(self):
            super().__init__()
            self.alpha, self.gain = nn.Parameter(torch.ones(())), nn.Parameter(torch.ones(4))

    assert is_norm(DyT())
    assert not is_norm(nn.Linear(4, 1, bias=False))
    assert not is_norm(nn.Embedding(1, 4))
    assert not is_norm(nn.LayerNorm(4, elementwise_affine=False))
