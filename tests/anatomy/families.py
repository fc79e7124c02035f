"""Tiny models of the families that people train, and what is to be found in them with no arguments.

Each family is built from its library's own class, so that a new version that renames something fails here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

VOCABULARY = 11
TOKENS = {"vocab_size": VOCABULARY, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
SMALL = {
    "hidden_size": 8,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "max_position_embeddings": 16,
    "use_cache": False,
    **TOKENS,
}
BERT = {key: value for key, value in SMALL.items() if key != "num_key_value_heads"}
GPT = {"n_layer": 2, "n_embd": 8, "n_head": 2, "n_positions": 16, "use_cache": False, **TOKENS}
IMAGE = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16, "image_size": 8}

DEBERTA = {**BERT, "relative_attention": True, "pos_att_type": ["c2p", "p2c"]}
STATE = {"hidden_size": 8, "num_hidden_layers": 2, "state_size": 4, "use_cache": False, **TOKENS}


@dataclass(frozen=True)
class Family:
    """A model and what is right for it."""

    name: str
    build: Callable[[], nn.Module]
    writers: tuple[str, ...]
    """Names in a block; of several stacks, those of the last."""
    blocks: tuple[str, ...] = ("2",)
    """Number of blocks, with the label of the stack where there are several."""
    others: tuple[str, ...] = ("embedding", "final_norm", "head")
    """Groups besides the blocks."""
    inputs: Callable[[], dict[str, Any]] = lambda: {"input_ids": torch.arange(12).reshape(2, 6) % VOCABULARY}
    layers: int = 2
    """L, by which a rule scales."""
    has_value_path: bool = True


def hugging_face(config: str, model: str, **options: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        import transformers

        return getattr(transformers, model)(getattr(transformers, config)(**options))

    return build


def causal(name: str, **options: Any) -> Callable[[], nn.Module]:
    return hugging_face(f"{name}Config", f"{name}ForCausalLM", **(SMALL | options))


def encoder_and_decoder() -> dict[str, torch.Tensor]:
    tokens = torch.arange(12).reshape(2, 6) % VOCABULARY
    return {"input_ids": tokens, "decoder_input_ids": tokens}


def image(size: int) -> Callable[[], dict[str, torch.Tensor]]:
    return lambda: {"pixel_values": torch.linspace(-1, 1, 2 * 3 * size * size).reshape(2, 3, size, size)}


class OfTorch(nn.Module):
    """Tokens to logits around torch's own layers."""

    def __init__(self, stack: nn.Module, memory: bool) -> None:
        super().__init__()
        self.embedding, self.stack, self.head = nn.Embedding(VOCABULARY, 8), stack, nn.Linear(8, VOCABULARY)
        self.memory = memory

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(input_ids)
        return self.head(self.stack(x, x) if self.memory else self.stack(x))


def torch_encoder(norm_first: bool) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True, norm_first=norm_first)
        final = nn.LayerNorm(8) if norm_first else None
        return OfTorch(nn.TransformerEncoder(layer, 2, final, enable_nested_tensor=False), memory=False)

    return build


def torch_decoder(norm_first: bool) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        layer = nn.TransformerDecoderLayer(8, 2, 16, dropout=0.0, batch_first=True, norm_first=norm_first)
        return OfTorch(nn.TransformerDecoder(layer, 2, nn.LayerNorm(8) if norm_first else None), memory=True)

    return build


class XTransformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        from x_transformers import Decoder, TransformerWrapper

        layers = Decoder(dim=8, depth=2, heads=2, attn_dim_head=4, ff_glu=True)
        self.net = TransformerWrapper(num_tokens=VOCABULARY, max_seq_len=16, attn_layers=layers)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.net(input_ids)


def lora() -> nn.Module:
    import peft

    return peft.get_peft_model(
        causal("Llama")(), peft.LoraConfig(r=2, target_modules=["q_proj", "o_proj", "down_proj"])
    )


def homemade() -> nn.Module:
    """A block whose matrices stand side by side, under names of its own."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first_norm, self.second_norm = nn.LayerNorm(8), nn.LayerNorm(8)
            self.to_qkv, self.back = nn.Linear(8, 24), nn.Linear(8, 8)
            self.widen, self.narrow = nn.Linear(8, 20), nn.Linear(20, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            query, key, value = self.to_qkv(self.first_norm(x)).chunk(3, dim=-1)
            x = x + self.back(nn.functional.scaled_dot_product_attention(query, key, value))
            return x + self.narrow(nn.functional.gelu(self.widen(self.second_norm(x))))

    class Net(OfTorch):
        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            return self.head(self.stack(self.embedding(input_ids)))

    return Net(nn.Sequential(Block(), Block()), memory=False)


LLAMA = ("self_attn.o_proj.weight", "mlp.down_proj.weight")
POST = ("attention.output.dense.weight", "output.dense.weight")
TORCH = ("self_attn.out_proj.weight", "linear2.weight")
TIED = ("embedding", "final_norm")
T5_BLOCK = ("layer.0.SelfAttention.o.weight", "layer.1.EncDecAttention.o.weight", "layer.2.DenseReluDense.wo.weight")
STACKS = ("encoder 2", "decoder 2")

FAMILIES: Sequence[Family] = (
    Family(
        "GPT-2",
        hugging_face("GPT2Config", "GPT2LMHeadModel", **GPT),
        ("attn.c_proj.weight", "mlp.c_proj.weight"),
        others=TIED,
    ),
    Family(
        "OpenAI GPT",
        hugging_face("OpenAIGPTConfig", "OpenAIGPTLMHeadModel", **{k: v for k, v in GPT.items() if k != "use_cache"}),
        ("attn.c_proj.weight", "mlp.c_proj.weight"),
        others=("embedding",),
    ),
    Family("Llama", causal("Llama"), LLAMA),
    Family("Qwen3", causal("Qwen3", head_dim=4), LLAMA),
    Family("Gemma2", causal("Gemma2", head_dim=4), LLAMA, others=TIED),
    Family("OLMo2", causal("Olmo2"), LLAMA),
    Family("GPT-NeoX", causal("GPTNeoX"), ("attention.dense.weight", "mlp.dense_4h_to_h.weight")),
    Family("Phi", causal("Phi"), ("self_attn.dense.weight", "mlp.fc2.weight")),
    Family("Phi-3", causal("Phi3"), LLAMA),
    Family(
        "OPT",
        hugging_face(
            "OPTConfig",
            "OPTForCausalLM",
            **{
                **TOKENS,
                "hidden_size": 8,
                "word_embed_proj_dim": 8,
                "num_attention_heads": 2,
                "ffn_dim": 16,
                "num_hidden_layers": 2,
                "max_position_embeddings": 16,
                "use_cache": False,
            },
        ),
        ("self_attn.out_proj.weight", "fc2.weight"),
        others=TIED,
    ),
    Family(
        "BLOOM",
        hugging_face(
            "BloomConfig",
            "BloomForCausalLM",
            **{**TOKENS, "hidden_size": 8, "n_layer": 2, "n_head": 2, "use_cache": False},
        ),
        ("self_attention.dense.weight", "mlp.dense_4h_to_h.weight"),
        others=TIED,
    ),
    Family(
        "Falcon",
        hugging_face(
            "FalconConfig",
            "FalconForCausalLM",
            **{**TOKENS, "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "use_cache": False},
        ),
        ("self_attention.dense.weight", "mlp.dense_4h_to_h.weight"),
        others=TIED,
        has_value_path=False,
    ),
    Family("BERT", hugging_face("BertConfig", "BertForMaskedLM", **BERT), POST, others=("embedding", "head")),
    Family("RoBERTa", hugging_face("RobertaConfig", "RobertaForMaskedLM", **BERT), POST, others=("embedding", "head")),
    Family(
        "ALBERT (one shared block)",
        hugging_face("AlbertConfig", "AlbertForMaskedLM", **{**BERT, "embedding_size": 4, "num_hidden_layers": 6}),
        ("attention.dense.weight", "ffn_output.weight"),
        blocks=("1",),
        others=("embedding", "head"),
        layers=6,
    ),
    Family(
        "DistilBERT",
        hugging_face(
            "DistilBertConfig",
            "DistilBertForMaskedLM",
            dim=8,
            n_layers=2,
            n_heads=2,
            hidden_dim=16,
            vocab_size=11,
            max_position_embeddings=16,
        ),
        ("attention.out_lin.weight", "ffn.lin2.weight"),
        others=("embedding", "head"),
    ),
    Family(
        "T5",
        hugging_face(
            "T5Config",
            "T5ForConditionalGeneration",
            d_model=8,
            num_heads=2,
            d_kv=4,
            d_ff=16,
            num_layers=2,
            vocab_size=11,
            pad_token_id=0,
            eos_token_id=0,
            decoder_start_token_id=0,
        ),
        T5_BLOCK,
        blocks=STACKS,
        others=("embedding", "encoder.final_norm", "decoder.final_norm"),
        inputs=encoder_and_decoder,
    ),
    Family(
        "BART",
        hugging_face(
            "BartConfig",
            "BartForConditionalGeneration",
            **{
                **TOKENS,
                "d_model": 8,
                "encoder_layers": 2,
                "decoder_layers": 2,
                "encoder_attention_heads": 2,
                "decoder_attention_heads": 2,
                "encoder_ffn_dim": 16,
                "decoder_ffn_dim": 16,
                "max_position_embeddings": 16,
                "decoder_start_token_id": 0,
                "use_cache": False,
            },
        ),
        ("self_attn.out_proj.weight", "encoder_attn.out_proj.weight", "fc2.weight"),
        blocks=STACKS,
        others=("embedding", "encoder.embedding", "decoder.embedding"),
        inputs=encoder_and_decoder,
    ),
    Family(
        "ViT",
        hugging_face("ViTConfig", "ViTForImageClassification", patch_size=4, **IMAGE),
        ("attention.o_proj.weight", "mlp.fc2.weight"),
        inputs=image(8),
    ),
    Family(
        "Swin (stages counted through)",
        hugging_face(
            "SwinConfig",
            "SwinForImageClassification",
            image_size=16,
            patch_size=2,
            embed_dim=8,
            depths=[1, 2],
            num_heads=[1, 2],
            window_size=2,
        ),
        ("attention.o_proj.weight", "mlp.fc2.weight"),
        blocks=("3",),
        others=("embedding", "final_norm", "head", "other"),
        inputs=image(16),
        layers=3,
    ),
    Family(
        "Mixtral (stacked experts)",
        causal("Mixtral", num_local_experts=3),
        ("self_attn.o_proj.weight", "mlp.experts.down_proj"),
    ),
    Family(
        "DeBERTa",
        hugging_face("DebertaConfig", "DebertaForMaskedLM", **DEBERTA),
        POST,
        others=("embedding", "head"),
        has_value_path=False,
    ),
    Family(
        "DeBERTa v2, v3",
        hugging_face("DebertaV2Config", "DebertaV2ForMaskedLM", **DEBERTA),
        POST,
        others=("embedding", "head"),
    ),
    Family(
        "XLNet (bare matrices)",
        hugging_face(
            "XLNetConfig", "XLNetLMHeadModel", vocab_size=VOCABULARY, d_model=8, n_layer=2, n_head=2, d_inner=16
        ),
        ("rel_attn.o", "ff.layer_2.weight"),
        others=("embedding", "head"),
        has_value_path=False,
    ),
    Family(
        "Mamba",
        hugging_face("MambaConfig", "MambaForCausalLM", **STATE),
        ("mixer.out_proj.weight",),
        others=TIED,
        has_value_path=False,
    ),
    Family(
        "RWKV",
        hugging_face("RwkvConfig", "RwkvForCausalLM", **STATE, attention_hidden_size=8),
        ("attention.output.weight", "feed_forward.value.weight"),
        has_value_path=False,
    ),
    Family(
        "Jamba (attention in the last of two)",
        causal(
            "Jamba",
            attn_layer_period=2,
            attn_layer_offset=1,
            expert_layer_period=4,
            expert_layer_offset=3,
            use_mamba_kernels=False,
        ),
        ("feed_forward.down_proj.weight", "self_attn.o_proj.weight"),
        has_value_path=False,
    ),
    Family(
        "Qwen3-Next (linear attention, then attention)",
        causal(
            "Qwen3Next",
            head_dim=4,
            layer_types=["linear_attention", "full_attention"],
            linear_num_key_heads=2,
            linear_num_value_heads=2,
            linear_key_head_dim=4,
            linear_value_head_dim=4,
            num_experts=2,
            num_experts_per_tok=1,
            moe_intermediate_size=12,
            shared_expert_intermediate_size=12,
        ),
        ("mlp.experts.down_proj", "mlp.shared_expert.down_proj.weight", "self_attn.o_proj.weight"),
        has_value_path=False,
    ),
    Family("Gemma", causal("Gemma", head_dim=4), LLAMA, others=TIED),
    Family("Qwen2", causal("Qwen2"), LLAMA),
    Family("Mistral", causal("Mistral"), LLAMA),
    Family("StarCoder2", causal("Starcoder2"), ("self_attn.o_proj.weight", "mlp.c_proj.weight"), others=TIED),
    Family("StableLM", causal("StableLm"), LLAMA),
    Family("OLMo (norms without gain)", causal("Olmo"), LLAMA, others=("embedding", "head")),
    Family(
        "ELECTRA",
        hugging_face("ElectraConfig", "ElectraForMaskedLM", **BERT),
        POST,
        others=("embedding", "final_norm", "head"),
    ),
    Family(
        "MPNet",
        hugging_face("MPNetConfig", "MPNetForMaskedLM", **BERT),
        ("attention.attn.o.weight", "output.dense.weight"),
        others=("embedding", "head"),
    ),
    Family(
        "RoFormer", hugging_face("RoFormerConfig", "RoFormerForMaskedLM", **BERT), POST, others=("embedding", "head")
    ),
    Family(
        "DINOv2",
        hugging_face("Dinov2Config", "Dinov2ForImageClassification", patch_size=4, **IMAGE),
        ("attention.o_proj.weight", "mlp.fc2.weight"),
        inputs=image(8),
    ),
    Family(
        "DeiT",
        hugging_face("DeiTConfig", "DeiTForImageClassification", patch_size=4, **IMAGE),
        ("attention.o_proj.weight", "mlp.fc2.weight"),
        inputs=image(8),
    ),
    Family("nn.TransformerEncoder, pre", torch_encoder(True), TORCH),
    Family("nn.TransformerEncoder, post", torch_encoder(False), TORCH, others=("embedding", "head")),
    Family(
        "nn.TransformerDecoder, pre",
        torch_decoder(True),
        ("self_attn.out_proj.weight", "multihead_attn.out_proj.weight", "linear2.weight"),
    ),
    Family(
        "nn.TransformerDecoder, post",
        torch_decoder(False),
        ("self_attn.out_proj.weight", "multihead_attn.out_proj.weight", "linear2.weight"),
        others=("embedding", "head"),
    ),
    Family("x-transformers (sublayers listed)", XTransformer, ("1.to_out.weight", "1.ff.2.weight"), blocks=("4",)),
    Family("Llama with LoRA (peft)", lora, ("self_attn.o_proj.base_layer.weight", "mlp.down_proj.base_layer.weight")),
    Family("your own block", homemade, ("back.weight", "narrow.weight"), others=("embedding", "head")),
)


def table() -> str:
    """For the README: what the tests hold every family to."""
    rows = ["| model | blocks | residual writers in a block | other depths |", "|---|---|---|---|"]
    for family in FAMILIES:
        writers = ", ".join(f"`{name.removesuffix('.weight')}`" for name in family.writers)
        others = ", ".join(family.others)
        rows.append(f"| {family.name} | {', '.join(family.blocks)} | {writers} | {others} |")
    return "\n".join(rows)
