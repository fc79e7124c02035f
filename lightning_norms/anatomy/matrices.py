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
    r"(q|k|v|qk|kv|vk|qkv|kqv|vqk|query|key|value|queries|keys|values|query_key_value|query_key|key_value|attn|receptance)"
    r"(_?[ab])?(_?(proj|projection|lin|linear|attn|layer|matrix|weight|proj_with_mqa|global|net|head))*$|^in_proj",
    re.IGNORECASE,
)
"""Words for what reads a stream for attention or a state-space mixer: query, key, value, or several in one matrix."""
POSITION = re.compile(r"(^|_)(r|rel|pos|position|relative)(_|$)", re.IGNORECASE)
"""Words for what reads relative positions, as in Transformer-XL and DeBERTa, and never writes into the stream."""
MODULATOR = re.compile(
    r"router|(^|_)(gates?|gating)(_|$)|^g(_?[ab12])?(_proj)?$|modulation|ada_?ln|^sr$|sequence_reduction", re.IGNORECASE
)
"""Words for routers, gates, adaptive norms, and what shortens the sequence that keys and values read."""
WRITER = re.compile(r"(^|_)(o|out|output|proj|dense|c_proj|wo|projection)(_|$)|out_?(proj|lin)|dense$", re.IGNORECASE)
SURE_WRITER = re.compile(r"^(w_?|to_?|linear_?|lin_?|attn_?)?(o|out|output)(_|$)|^c_proj$", re.IGNORECASE)
"""Words for the output of an attention, and those of them that stand for nothing else."""
ADAPTERS = re.compile(r"^(lora_|modules_to_save$|ia3_|oft_|hada_|lokr_|loha_)")
EXPERTS_IN, EXPERTS_OUT = re.compile(r"gate_up_proj|up_proj|w1|v1|w3|wi"), re.compile(r"down_proj|w2|wo")
TABLE = re.compile(r"bias|table|emb|token|a_log|^time_|lambda|gamma|scale|alpha|beta", re.IGNORECASE)
"""Words for bare parameters that are added or multiplied, not mapped through."""
GENERIC = ("weight", "base_layer", "parametrizations", "original", "original0", "original1", "weight_g")
"""Parts of a parameter's name that no author of a network chose."""
WIDTHS = (
    ("in_features", "out_features"),
    ("nx", "nf"),
    ("in_channels", "out_channels"),
    ("input_size", "output_size"),
)
"""Attributes for what a module reads and gives: Linear, Hugging Face's Conv1D, convolutions."""
WEIGHTS = ("parametrizations.weight.original0", "parametrizations.weight.original", "weight", "weight_g")
"""The matrix of a Linear or Conv1D, or the magnitude of a weight-normed one, which scales it too."""


@dataclass(frozen=True)
class Projection:
    """One matrix inside a block, and the widths it maps: 0 if its owner does not say so (a bare parameter)."""

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
        return READER.match(self.word) is not None and not self.is_of_positions

    @property
    def only_modulates(self) -> bool:
        """Whether it reads positions, routes or gates, by its name: it multiplies what others write."""
        return self.is_of_positions or any(MODULATOR.search(word) for word in self.name.split("."))

    @property
    def is_of_positions(self) -> bool:
        """Whether it reads relative positions, by its name."""
        return POSITION.search(self.word) is not None


def projections_of(module: nn.Module, path: str) -> list[Projection]:
    """The matrices that ``module`` itself holds, without those of its children; ``path`` is its name in the block."""
    projections = [*_linear(module, path), *_packed_attention(module, path), *_bare(module, path)]
    return list({id(projection.parameter): projection for projection in projections}.values())


def children_of(module: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
    """Named children of an unwrapped module, without adapters such as LoRA's and without parametrizations."""
    for name, child in module.named_children():
        if not ADAPTERS.match(name) and name != "parametrizations":
            yield join(path, clean_name(name)), unwrap(child)


def all_projections(block: nn.Module, path: str = "") -> Iterator[Projection]:
    """Every matrix of a block, in the order of registration, without adapters."""
    yield from projections_of(block, path)
    for name, child in children_of(block, path):
        yield from all_projections(child, name)


def is_matrix(parameter: nn.Parameter) -> bool:
    """Whether a parameter can map one space to another: no vector, also not one of shape [1, 1, d]."""
    return parameter.is_floating_point() and parameter.ndim > 1 and parameter.numel() > max(parameter.shape)


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
    groups = getattr(module, "groups", 1)
    if widths and name and not (groups > 1 and groups == widths[0]):  # a depthwise convolution maps no features
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


def _bare(module: nn.Module, path: str) -> Iterator[Projection]:
    """Parameters that no module wraps: experts stacked in one tensor, attention by einsum. Names say what they are."""
    kind = type(module).__name__.lower()
    if width_in_and_out(module) or isinstance(module, nn.MultiheadAttention) or "norm" in kind or "embedding" in kind:
        return
    for name, parameter in module._parameters.items():
        if parameter is not None and is_matrix(parameter) and not TABLE.search(name):
            yield Projection(join(path, name), parameter, 0, 0)
