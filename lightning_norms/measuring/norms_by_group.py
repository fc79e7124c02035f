"""Pure measurements on tensors, computed and kept on the device: norms by group, total norm, update ratio."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_norms.anatomy.sharding import to_local


@dataclass(frozen=True)
class _Section:
    """Positions of the parameters that are cut into equally many pieces, and the numbers of their groups."""

    pieces: int
    members: list[int]
    groups: Tensor


class GroupNorms:
    """L2 norms of many tensors by group, in a handful of kernels, without a copy to the host.

    One ``_foreach_norm`` per device and dtype over local shards in float32, one sum by group, and one all-reduce over
    all ranks (none when nothing is sharded).

    Args:
        parameters: the parameters, each once. Their gradients, updates or values are measured.
        groups: the group of each parameter.
        process_group: ranks that hold the rest of each parameter where the tensors do not say so (FSDP1).
    """

    def __init__(
        self, parameters: Sequence[Tensor], groups: Sequence[str], process_group: dist.ProcessGroup | None = None
    ) -> None:
        self.parameters = list(parameters)
        self.groups = tuple(dict.fromkeys(groups))
        self.device = self.parameters[0].device if self.parameters else torch.device("cpu")
        numbers = [self.groups.index(group) for group in groups]
        pieces = [process_group.size() if process_group else _pieces(p) for p in self.parameters]
        self.is_sharded = any(count > 1 for count in pieces)  # else every rank has everything
        self._is_plain = len({(p.device, p.dtype) for p in self.parameters}) == 1 and not self.is_sharded
        self._sections: list[_Section] = []  # usually one
        for count in dict.fromkeys(pieces):
            members = [i for i, other in enumerate(pieces) if other == count]
            groups_of_members = torch.tensor([numbers[i] for i in members], device=self.device)
            self._sections.append(_Section(count, members, groups_of_members))

    @torch.no_grad()
    def of(self, tensors: Sequence[Tensor | None]) -> Tensor:
        """Norms of one tensor per parameter, in the order of ``parameters``: float32 [groups]. None counts 0."""
        squares = self._sum(self.shares(tensors))
        if leave_float32(float(squares.sum())):
            squares = self._sum(self.wide_shares(tensors))
        return squares.sqrt_().float()

    def gradients(self) -> list[Tensor | None]:
        """The gradients as they are now, for :meth:`of` and :meth:`shares`."""
        return [parameter.grad for parameter in self.parameters]

    @torch.no_grad()
    def shares(self, tensors: Sequence[Tensor | None]) -> Tensor:
        """This rank's share of the squared norms, without a collective: the sum over all ranks (if sharded) is whole.

        What several ranks hold alike counts in part on each: half of the square of a tensor in 2 pieces on 4 ranks.
        """
        if self._is_plain and all(tensor is not None and tensor.layout is torch.strided for tensor in tensors):
            # The usual case, and a millisecond cheaper than looking at every tensor's kind.
            squares = _norms([tensor for tensor in tensors if tensor is not None]).square_()
            return torch.zeros(len(self.groups), device=self.device).index_add_(0, self._sections[0].groups, squares)
        local = [_local(tensor, p) for tensor, p in zip(tensors, self.parameters, strict=True)]
        total = torch.zeros(len(self.groups), device=self.device)
        for section in self._sections:
            part = self._squares([local[i] for i in section.members])
            if self.is_sharded:
                part *= section.pieces / dist.get_world_size()
            total.index_add_(0, section.groups, part)
        return total

    @torch.no_grad()
    def wide_shares(self, tensors: Sequence[Tensor | None]) -> Tensor:
        """:meth:`shares` in float64 for values of any size, 1e20 or 1e-24: slow, one read from the device a tensor.

        The result is on the CPU where the device has no float64, as on Apple GPUs.
        """
        place = "cpu" if self.device.type == "mps" else self.device
        total = torch.zeros(len(self.groups), dtype=torch.float64, device=place)
        for section in self._sections:
            norms = [_scaled_norm(_local(tensors[i], self.parameters[i])) for i in section.members]
            part = torch.tensor(norms, dtype=torch.float64, device=place).square_()
            if self.is_sharded:
                part *= section.pieces / dist.get_world_size()
            total.index_add_(0, section.groups.to(place), part)
        return total

    def _sum(self, shares: Tensor) -> Tensor:
        if self.is_sharded:
            dist.all_reduce(shares)
        return shares

    def _squares(self, tensors: Sequence[Tensor | None]) -> Tensor:
        squares = torch.zeros(len(tensors), device=self.device)
        buckets: dict[tuple[torch.device, torch.dtype], dict[int, Tensor]] = {}
        for i, tensor in enumerate(tensors):
            if tensor is not None and tensor.numel():
                buckets.setdefault((tensor.device, tensor.dtype), {})[i] = tensor
        for bucket in buckets.values():
            norms = _norms(list(bucket.values())).to(squares)
            squares[torch.tensor(list(bucket), device=self.device)] = norms.square_()
        return squares


def _norms(tensors: list[Tensor]) -> Tensor:
    """L2 norms of tensors of one device and dtype, computed at least in float32: float32 [tensors]."""
    # A half-precision norm is neither precise (bfloat16) nor safe (float16 ends at 65504).
    wide = torch.float32 if tensors[0].dtype in (torch.float16, torch.bfloat16) else None
    return torch.stack(list(torch._foreach_norm(tensors, 2, dtype=wide))).float()


def _scaled_norm(tensor: Tensor | None) -> float:
    """L2 norm of a tensor by way of its largest entry, so that no square leaves the range of its dtype."""
    if tensor is None or not tensor.numel():
        return 0.0
    tensor = tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor
    peak = float(torch.linalg.vector_norm(tensor, torch.inf))
    if not 0 < peak < math.inf:
        return peak
    return peak * float(torch.linalg.vector_norm(tensor / peak))


def leave_float32(total: float) -> bool:
    """Whether squares that sum up to ``total`` in float32, or have it as their norm, may be too large or too small.

    NaN is NaN at any precision.

    Example:
        >>> leave_float32(1.0), leave_float32(float("inf")), leave_float32(0.0), leave_float32(float("nan"))
        (False, True, True, False)
    """
    return total in (0.0, math.inf)


def total_norm(norms: Tensor) -> Tensor:
    """Norm of everything from the norms of its disjoint groups: root of the sum of squares, never their sum."""
    total: Tensor = torch.linalg.vector_norm(norms)
    return total


def update_ratio(update: Tensor, weight: Tensor) -> Tensor:
    """Norm of a step's weight change / norm of the weights before it [groups]: about 1e-3 is usual for SGD.

    A weight of norm 0 (ReZero's gate at the start) has no ratio: the result is inf, or NaN if it did not move either.

    Source: Andrej Karpathy, CS231n notes, "Ratio of weights:updates".
    """
    return update / weight


def _local(tensor: Tensor | None, parameter: Tensor) -> Tensor | None:
    """This rank's dense share of ``tensor``."""
    if tensor is None or (type(tensor) is Tensor and tensor.layout is torch.strided):
        return tensor  # the usual case, and looking for attributes that a tensor lacks is slow
    if tensor.layout == torch.sparse_coo:
        return tensor.coalesce().values()  # embeddings with sparse=True; a row may be listed twice before this
    if any(placement.is_partial() for placement in getattr(tensor, "placements", ())):
        tensor = tensor.redistribute(placements=parameter.placements)  # type: ignore[attr-defined]
    return to_local(tensor)


def _pieces(parameter: Tensor) -> int:
    """The number of different pieces that a parameter is cut into; 1 if every rank has all of it."""
    mesh = getattr(parameter, "device_mesh", None)
    if mesh is None:
        return 1
    # Not `is_shard()`: the strided shards of tensor parallel + FSDP say no to it.
    sharded = (not placement.is_replicate() for placement in parameter.placements)  # type: ignore[attr-defined]
    return math.prod(mesh.size(dimension) for dimension, cut in enumerate(sharded) if cut)
