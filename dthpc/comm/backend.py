"""Which library carries the collectives: NCCL between GPUs, Gloo between CPUs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dthpc.errors import UserError, nearest

if TYPE_CHECKING:
    import torch

BACKENDS = ("auto", "gloo", "nccl")


def choose_backend(comm: Any, device: torch.device) -> tuple[str, str]:
    """Decide the backend of the default process group.

    Args:
        comm: the `comm` group of the configuration.
        device: where this rank computes.

    Returns:
        The name for `init_process_group`, and the reason in words. With GPUs, CPU tensors (checkpoints, agreement on a
        stop) still travel by Gloo, so the name is `cpu:gloo,cuda:nccl`.

    Raises:
        UserError: the wanted backend can't work here; the message says how to mend it.
    """
    wanted = str(comm.backend)
    if wanted not in BACKENDS:
        raise UserError(
            "there is no such backend",
            key="comm.backend",
            value=wanted,
            instead=nearest(wanted, BACKENDS),
        )
    on_gpu = device.type == "cuda"
    if wanted == "nccl" and not on_gpu:
        raise UserError(
            "NCCL moves GPU memory, and this rank computes on the CPU",
            key="comm.backend",
            value=wanted,
            instead="comm.backend=gloo, or ask for GPUs with cluster.gpus_per_node",
        )
    if wanted == "gloo" or not on_gpu:
        reason = "asked by comm.backend=gloo" if wanted == "gloo" else f"ranks compute on the {device.type}"
        return "gloo", reason
    if not _has_nccl():
        raise UserError(
            "this build of torch has no NCCL",
            key="comm.backend",
            value=wanted,
            instead="comm.backend=gloo, or install a CUDA build of torch",
        )
    return "cpu:gloo,cuda:nccl", "ranks compute on GPUs"


def _has_nccl() -> bool:
    import torch.distributed

    return torch.distributed.is_nccl_available()
