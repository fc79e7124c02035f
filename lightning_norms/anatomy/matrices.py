"""The matrices of a block and what they map: Linear, transposed Conv1D, packed attention, stacked experts."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from lightning_norms.anatomy.names import clean_name, join, unwrap

READER = re.compile(
    r"^(w_?|to_?|linear_?|lin_?|c_)?"
    r"(q|k|v|qk|kv|vk|qkv|kqv|vqk|query|key|value|queries|keys|values|query_key_value|query_key|key_value|attn)"
    r"(_?[ab])?(_?(proj|projection|lin|linear|attn|layer|matrix|weight|proj_with_mqa|global))*$|^in_proj_weight$",
    re.IGNORECASE,
)
"""Words for what reads a stream for attention: query, key, value, or several of them in one matrix."""
ADAPTERS = re.compile(r"^(lora_|modules_to_save$|ia3_|oft_|hada_|lokr_|loha_)")
EXPERTS_IN, EXPERTS_OUT = re.compile(r"gate_up_proj|up_proj|w1|w3|wi"), re.compile(r"down_proj|w2|wo")
GENERIC = ("weight", "base_layer", "parametrizations", "original", "original0", "original1", "weight_g")
"""Parts of a parameter's name that no author of a network chose."""
WIDTHS = (("in_features", "out_features"), ("nx", "nf"), ("in_channels", "out_channels"))
"""Attributes for what a module reads and gives: Linear, Hugging Face's Conv1D, convolutions."""
WEIGHTS = ("parametrizations.weight.original0", "parametrizations.weight.original", "weight", "weight_g")
"""The matrix of a Linear or Conv1D, or the magnitude of a weight-normed one, which scales it too."""


@dataclass(frozen=True)
class Projection:
    """One matrix inside a block, and the widths it maps: 0 if its owner does not say so (stacked experts)."""

    name: str
    parameter: nn.Parameter
    inputs: int
    outputs: int

    @property
    def word(self) -> str:
        """The name that its author gave it: the last one that is no number and no library's."""
        words = [word for word in self.name.split(".") if word not in GENERIC and not word.isdigit()]
        return words[-1] if words else ""

    @property
    def reads(self) -> bool:
        """Whether it is a query, key or value matrix, by its name."""
        return READER.match(self.word) is not None


def projections_of(module: nn.Module, path: str) -> list[Projection]:
    """The matrices that ``module`` itself holds, without those of its children; ``path`` is its name in the block."""
    projections = [*_linear(module, path), *_packed_attention(module, path), *_experts(module, path)]
    return list({id(projection.parameter): projection for projection in projections}.values())


def children_of(module: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
    """Named children of an unwrapped module, without adapters such as LoRA's and without parametrizations."""
    for name, child in module.named_children():
        if not ADAPTERS.match(name) and name != "parametrizations":
            yield join(path, clean_name(name)), unwrap(child)


def width_in_and_out(owner: nn.Module) -> tuple[int, int] | None:
    """What a matrix's owner maps, by what it says of itself: under FSDP1 the shape of its shard says nothing."""
    for names in WIDTHS:
        inputs, outputs = (getattr(owner, name, None) for name in names)
        if isinstance(inputs, int) and isinstance(outputs, int):
            return inputs, outputs
    return None


def refuses_scaling(owner: nn.Module) -> str | None:
    """Why scaling the parameter of a matrix would not scale the matrix; None if it does."""
    parametrized: Any = getattr(owner, "parametrizations", None)
    kinds = [type(part).__name__ for part in parametrized.weight] if parametrized and "weight" in parametrized else []
    unknown = [kind for kind in kinds if kind != "_WeightNorm"]
    return f"its weight is parametrized by {', '.join(unknown)}" if unknown else None


def _linear(module: nn.Module, path: str) -> Iterator[Projection]:
    widths = width_in_and_out(module)
    parameters = dict(module.named_parameters(remove_duplicate=False)) if widths else {}
    name = next((name for name in WEIGHTS if name in parameters), None)
    if widths and name:
        yield Projection(join(path, name), parameters[name], *widths)


def _packed_attention(module: nn.Module, path: str) -> Iterator[Projection]:
    """The in_proj_weight of nn.MultiheadAttention, or its three separate ones."""
    width = getattr(module, "embed_dim", None)
    if isinstance(module, nn.MultiheadAttention) and isinstance(width, int):
        inputs = {"in_proj": width, "q_proj": width, "k_proj": module.kdim, "v_proj": module.vdim}
        for name, reads in inputs.items():
            parameter = module._parameters.get(f"{name}_weight")
            if parameter is not None:
                gives = 3 * width if name == "in_proj" else width
                yield Projection(join(path, f"{name}_weight"), parameter, reads, gives)


def _experts(module: nn.Module, path: str) -> Iterator[Projection]:
    """Experts stacked in one tensor [experts, ., .]: up and down by name, since their orientation differs by family."""
    stacked = {name: p for name, p in module._parameters.items() if p is not None and p.ndim == 3}
    if any(EXPERTS_OUT.fullmatch(name) for name in stacked):
        for name, parameter in stacked.items():
            if EXPERTS_OUT.fullmatch(name) or EXPERTS_IN.fullmatch(name):
                yield Projection(join(path, name), parameter, 0, 0)
