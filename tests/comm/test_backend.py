from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from dthpc.comm.backend import choose_backend
from dthpc.errors import UserError

CPU = torch.device("cpu")
GPU = torch.device("cuda", 0)


def comm(backend: str) -> SimpleNamespace:
    return SimpleNamespace(backend=backend)


@pytest.mark.parametrize("wanted", ["auto", "gloo"])
def test_ranks_on_cpus_talk_by_gloo(wanted: str) -> None:
    name, reason = choose_backend(comm(wanted), CPU)
    assert name == "gloo"
    assert reason


def test_gloo_may_be_asked_for_on_gpus() -> None:
    assert choose_backend(comm("gloo"), GPU)[0] == "gloo"


def test_what_cannot_work_is_refused_with_the_way_out() -> None:
    with pytest.raises(UserError, match=r"comm\.backend=nccl: .*CPU.*comm\.backend=gloo"):
        choose_backend(comm("nccl"), CPU)
    with pytest.raises(UserError, match=r"comm\.backend=glo: .*did you mean gloo"):
        choose_backend(comm("glo"), CPU)
    with pytest.raises(UserError, match=r"comm\.backend=mpi"):
        choose_backend(comm("mpi"), CPU)


def test_on_gpus_cpu_tensors_still_have_a_way() -> None:
    if not dist.is_nccl_available():
        with pytest.raises(UserError, match="no NCCL"):
            choose_backend(comm("auto"), GPU)
        return
    assert choose_backend(comm("auto"), GPU)[0] == "cpu:gloo,cuda:nccl"
