"""A process group over MPI for stock PyTorch: `mpi4py` under every operation of `torch.distributed`.

Only ranks that an MPI launcher has started may load it: `register(load(rank, world_size))`, and then
`init_process_group(BACKEND, ...)`. Importing this package loads neither torch nor mpi4py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dthpc.comm.mpi.runtime import Runtime

BACKEND = "mpi4py"
"""The name for `init_process_group`; `mpi` is the name of torch's own back end, which its wheels lack."""


def register(runtime: Runtime) -> None:
    """Make `BACKEND` known to `torch.distributed`, for CPU and CUDA tensors; a second call replaces the runtime."""
    import torch.distributed as dist

    from dthpc.comm.mpi.group import creator

    # torch refuses a name that it knows, and replaces its creator in this table only.
    if BACKEND.upper() in dist.Backend._plugins:
        dist.Backend._plugins[BACKEND.upper()] = dist.Backend._BackendPlugin(creator(runtime), True)
        return
    dist.Backend.register_backend(BACKEND, creator(runtime), extended_api=True, devices=["cpu", "cuda"])
