"""FSDP2: each rank keeps a share of every matrix and gathers one block at a time."""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh

from lightning_norms.model.decoder import Decoder


def shard(decoder: Decoder, mesh: DeviceMesh) -> None:
    """Shard ``decoder`` in place, over a mesh with the dimensions ``data_parallel`` and ``tensor_parallel``.

    ::

        rank 0 | rank 1      embedding, head, final norm      gathered for the whole step
        rank 0 | rank 1      block 1                          gathered while it runs
        rank 0 | rank 1      block 2

    A decoder that is sharded already, as at a second fit, stays as it is. Needs torch 2.6.

    Args:
        decoder: the whole network, on this rank's device.
        mesh: mesh that Lightning's ``ModelParallelStrategy`` gives to ``configure_model``.

    Raises:
        ValueError: if the mesh asks for tensor parallelism.
    """
    from torch.distributed.fsdp import FSDPModule, fully_shard

    if isinstance(decoder, FSDPModule):
        return
    ranks = mesh["tensor_parallel"].size()
    if ranks > 1:
        raise ValueError(
            f"tensor_parallel_size is {ranks}, but this decoder is sharded over data ranks only: give "
            f"ModelParallelStrategy data_parallel_size={mesh.size()} and tensor_parallel_size=1."
        )
    for block in decoder.blocks:
        fully_shard(block, mesh=mesh["data_parallel"])
    fully_shard(decoder, mesh=mesh["data_parallel"])


def check_is_real(decoder: Decoder) -> None:
    """Refuse a decoder on the meta device: a strategy would fill it with torch's defaults, not its own initialization.

    Raises:
        ValueError: if a weight is on the meta device.
    """
    if any(parameter.is_meta for parameter in decoder.parameters()):
        raise ValueError(
            "the decoder is on the meta device, where its initialization is lost: build DecoderModule outside of "
            'torch.device("meta") and init_module(empty_init=True).'
        )
