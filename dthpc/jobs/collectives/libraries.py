"""Which libraries this launch can measure, and the driver of each in a group."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

from dthpc.comm.collectives import Channel
from dthpc.comm.hierarchical import HierarchicalAllReduce
from dthpc.comm.spread import split_by_node
from dthpc.errors import UserError
from dthpc.jobs.collectives.drivers import ChannelDriver, Driver, MessageDriver, RawGlooDriver, TorchDriver
from dthpc.jobs.collectives.groups import Partition, Place
from dthpc.jobs.collectives.settings import BACKENDS, Settings

if TYPE_CHECKING:
    from dthpc.context import RankContext

LAUNCHED = ("PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK", "PALS_RANKID")
"""Variables of which an MPI launcher sets one; without, importing mpi4py may abort the process on some sites."""


@dataclass(frozen=True)
class Libraries:
    """What is measured."""

    names: tuple[str, ...]
    """In the order of `BACKENDS`."""

    told: dict[str, str]
    """What each is, with its version."""

    left_out: tuple[str, ...]
    """Why the others are not."""


def find_libraries(settings: Settings, context: RankContext) -> Libraries:
    """The libraries that work here, of those that are wanted.

    Raises:
        UserError: one that was asked for by name does not work here.
    """
    names, told, left_out = [], {}, []
    for name in settings.backends or BACKENDS:
        try:
            told[name] = _probe(name, settings, context)
            names.append(name)
        except UserError as error:
            if settings.backends is not None:
                raise
            left_out.append(f"{name}: {error.why}")
    return Libraries(tuple(names), told, tuple(left_out))


def _probe(name: str, settings: Settings, context: RankContext) -> str:
    """What a library is; raises `UserError` where it does not work here."""
    on_gpu = context.device.type == "cuda"
    if name in ("gloo", "raw_gloo"):
        if not dist.is_gloo_available():
            raise _unfit(name, "this build of torch has no Gloo", "another build of torch")
        if name == "raw_gloo" and on_gpu:
            raise _unfit(name, "ranks compute on GPUs, and it is measured in CPU memory", "gloo")
        direct = "ProcessGroupGloo called directly, " if name == "raw_gloo" else ""
        interface = os.environ.get("GLOO_SOCKET_IFNAME", "of the host name")
        return f"{direct}torch {torch.__version__}, interface {interface}"
    if name == "nccl":
        if not on_gpu or not dist.is_nccl_available():
            raise _unfit(name, "ranks compute on CPUs" if not on_gpu else "this build of torch has no NCCL", "gloo")
        version: Any = torch.cuda.nccl.version
        return f"NCCL {'.'.join(map(str, version()))}"
    return _probe_mpi(name, settings, context)


def _probe_mpi(name: str, settings: Settings, context: RankContext) -> str:
    if not any(variable in os.environ for variable in LAUNCHED):
        raise _unfit(name, "no MPI launcher has started the ranks", "comm.backend=mpi")
    if name == "raw_mpi":
        from dthpc.jobs.collectives.mpi_driver import NUMPY_DTYPES

        if settings.dtype not in NUMPY_DTYPES or settings.redop == "avg" or context.device.type != "cpu":
            raise _unfit(name, "it is measured in CPU memory, in NumPy's formats, without averages", "job.dtype=fp32")
    from dthpc.comm.mpi import BACKEND, register
    from dthpc.comm.mpi.runtime import load

    if BACKEND not in context.backend:
        register(load(context.identity.rank, context.identity.world_size))
    from mpi4py import MPI

    library = str(MPI.Get_library_version()).replace("\0", "").splitlines()[0].strip()
    return f"{'mpi4py on NumPy buffers, ' if name == 'raw_mpi' else ''}{library}"


def _unfit(name: str, why: str, instead: str) -> UserError:
    return UserError(why, key="job.backends", value=name, instead=instead)


def make_drivers(
    libraries: Libraries, partition: Partition, context: RankContext, timeout: timedelta
) -> list[MessageDriver]:
    """The drivers of this rank's group; collective over all ranks."""
    return [_driver(name, partition, context, timeout) for name in libraries.names]


def _driver(name: str, partition: Partition, context: RankContext, timeout: timedelta) -> MessageDriver:
    rank = context.identity.rank
    members = partition.group_of(rank)
    if name == "raw_mpi":
        from dthpc.jobs.collectives.mpi_driver import RawMpiDriver

        return RawMpiDriver(members, rank)
    if name == "raw_gloo":
        place = f"dthpc/collectives/{partition.name}/{members[0]}"
        return RawGlooDriver(PrefixStore(place, _get_default_store()), members, rank, timeout)
    group, owned = _group(name, members, context.backend, timeout)
    return TorchDriver(name, group, owned, context.device if name == "nccl" else torch.device("cpu"))


def _group(name: str, members: Sequence[int], default: str, timeout: timedelta) -> tuple[Any, bool]:
    """The group of some ranks over a backend: the one of all ranks that is there already, or a new one."""
    backend = _name_of_mpi() if name == "mpi" else name
    if len(members) == dist.get_world_size() and default.removeprefix("cpu:") == backend:
        return dist.group.WORLD, False
    made = dist.new_group(list(members), backend=backend, timeout=timeout, use_local_synchronization=True)
    # MPI connects ranks only while they are inside of it: none may go on to another library before all are here.
    dist.barrier(made)
    return made, True


def make_two_levels(
    libraries: Libraries, world: Partition, places: Sequence[Place], context: RankContext, timeout: timedelta
) -> list[Driver]:
    """dthpc's own all-reduce in one step and in three, over each back end of torch.distributed; collective.

    Returns:
        Nothing where the ranks are on one node, or unevenly on several.
    """
    split = split_by_node([str(place.node) for place in places])
    if split is None:
        return []
    drivers: list[Driver] = []
    for name in libraries.names:
        if name in ("gloo", "mpi") and context.device.type == "cpu":
            drivers += _two_levels(name, world, split, context, timeout)
    return drivers


def _two_levels(
    name: str,
    world: Partition,
    split: tuple[list[list[int]], list[list[int]]],
    context: RankContext,
    timeout: timedelta,
) -> list[Driver]:
    rank = context.identity.rank
    everyone, owned = _group(name, world.groups[0], context.backend, timeout)
    node, cross = (_group(name, _of(rank, level), context.backend, timeout)[0] for level in split)
    levels = HierarchicalAllReduce(Channel(node), Channel(cross))
    return [
        ChannelDriver(f"{name}+flat", Channel(everyone).all_reduce, everyone, [everyone] if owned else []),
        ChannelDriver(f"{name}+levels", levels.all_reduce, everyone, [node, cross]),
    ]


def _of(rank: int, level: Sequence[list[int]]) -> list[int]:
    return next(members for members in level if rank in members)


def _name_of_mpi() -> str:
    from dthpc.comm.mpi import BACKEND

    return BACKEND
