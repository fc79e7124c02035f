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
"""What reads a stream for attention: query, key, value, or several of them in one matrix."""
ADAPTERS = re.compile(r"^(lora_|modules_to_save$|ia3_|oft_|hada_|lokr_|loha_)")
EXPERTS_IN, EXPERTS_OUT = re.compile(r"gate_up_proj|up_proj|w1|w3|wi"), re.compile(r"down_proj|w2|wo")
GENERIC = ("weight", "base_layer", "parametrizations", "original", "original0", "original1", "weight_g")
"""Parts of a parameter's name that no author of a network chose."""
WIDTHS = (("in_features", "out_features"), ("nx", "nf"), ("in_channels", "out_channels"))
"""Attributes for what a module reads and gives: Linear, Hugging Face's Conv1D, convolutions."""


@dataclass(frozen=True)
class Projection:
    """One matrix inside a block."""

    name: str
    """Cleaned name of the parameter, from the block."""
    parameter: nn.Parameter
    owner: nn.Module
    """The module that holds the matrix."""
    inputs: int
    """Width that it reads; 0 if the module does not say so (stacked experts)."""
    outputs: int
    """Width that it gives."""

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
    """What a matrix's owner maps, by what it says of itself: under FSDP1 the shape of its shard says nothing.

    Example:
        >>> width_in_and_out(nn.Linear(3, 5))
        (3, 5)
    """
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
    """The matrix of a Linear or Conv1D: its weight, or the magnitude of a weight-normed one, which scales it too."""
    widths = width_in_and_out(module)
    if not widths:
        return
    parametrized: Any = getattr(module, "parametrizations", None)
    if parametrized is not None and "weight" in parametrized:
        name = "original0" if hasattr(parametrized.weight, "original0") else "original"
        parameter = getattr(parametrized.weight, name)
        yield Projection(join(path, f"parametrizations.weight.{name}"), parameter, module, *widths)
        return
    for name in ("weight", "weight_g"):  # the second is the older weight norm's
        weight = module._parameters.get(name)
        if weight is not None:
            yield Projection(join(path, name), weight, module, *widths)
            return


def _packed_attention(module: nn.Module, path: str) -> Iterator[Projection]:
    """The in_proj_weight of nn.MultiheadAttention, or its three separate ones."""
    width = getattr(module, "embed_dim", None)
    if isinstance(module, nn.MultiheadAttention) and isinstance(width, int):
        for name, inputs, outputs in (
            ("in_proj_weight", width, 3 * width),
            ("q_proj_weight", width, width),
            ("k_proj_weight", module.kdim, width),
            ("v_proj_weight", module.vdim, width),
        ):
            parameter = module._parameters.get(name)
            if parameter is not None:
                yield Projection(join(path, name), parameter, module, inputs, outputs)


def _experts(module: nn.Module, path: str) -> Iterator[Projection]:
    """Experts stacked in one tensor [experts, ., .]: up and down by name, since their orientation differs by family."""
    stacked = {name: p for name, p in module._parameters.items() if p is not None and p.ndim == 3}
    down = {name for name in stacked if EXPERTS_OUT.fullmatch(name)}
    for name, parameter in stacked.items() if down else ():
        if name in down or EXPERTS_IN.fullmatch(name):
            yield Projection(join(path, name), parameter, module, 0, 0)
