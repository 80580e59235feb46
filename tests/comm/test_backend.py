from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from omegaconf import OmegaConf

from dthpc.comm.backend import Facts, candidates, check_choice, choose, wanted_of, wants_mpi, without_mpi
from dthpc.errors import UserError
from dthpc.rundir import RunDir
from tests.comm import launched
from tests.mpi_installations import FAMILIES

CPU = Facts("cpu", world_size=4)
GPU = Facts("cuda", nccl=True, world_size=4)
BY_MPI = Facts("cpu", world_size=4, launcher="mpiexec", no_mpi=None, mpi_library="mpich 4")


def comm(backend: Any = "auto", **axes: str) -> SimpleNamespace:
    return SimpleNamespace(backend=backend, axes=SimpleNamespace(**axes))


def spec(backend: Any, facts: Facts, **axes: str) -> str:
    return choose(wanted_of(comm(backend, **axes)), facts).spec


def refused(backend: Any, facts: Facts, **axes: str) -> str:
    with pytest.raises(UserError) as caught:
        choose(wanted_of(comm(backend, **axes)), facts)
    return str(caught.value)


@pytest.mark.parametrize(
    ("backend", "facts", "name"),
    [
        ("auto", CPU, "gloo"),
        ("gloo", CPU, "gloo"),
        ("gloo", GPU, "gloo"),
        ("auto", GPU, "cpu:gloo,cuda:nccl"),
        ("nccl", GPU, "cpu:gloo,cuda:nccl"),
        ("auto", Facts("cuda", nccl=False), "gloo"),
        ("auto", BY_MPI, "cpu:mpi4py"),
        ("mpi", BY_MPI, "cpu:mpi4py"),
        ("gloo", BY_MPI, "gloo"),
        ("auto", Facts("cpu", world_size=1, launcher="mpiexec", no_mpi=None), "gloo"),
        ("mpi", Facts("cuda", nccl=True, no_mpi=None), "cpu:mpi4py,cuda:mpi4py"),
        ({"cpu": "gloo", "cuda": "nccl"}, GPU, "cpu:gloo,cuda:nccl"),
        ({"cpu": "gloo", "cuda": "nccl"}, CPU, "gloo"),
        ("cpu:gloo,cuda:nccl", GPU, "cpu:gloo,cuda:nccl"),
        ({"cuda": "gloo"}, GPU, "gloo"),
        (OmegaConf.create({"cpu": "mpi"}), Facts("cuda", nccl=True, no_mpi=None), "cpu:mpi4py,cuda:nccl"),
    ],
)
def test_the_choice_follows_from_what_is_wanted_and_what_is_there(backend: Any, facts: Facts, name: str) -> None:
    decision = choose(wanted_of(comm(backend)), facts)
    assert decision.spec == name
    assert decision.reason


def test_auto_tells_why_it_leaves_mpi() -> None:
    decision = choose(
        wanted_of(comm()), Facts("cpu", world_size=2, launcher="mpiexec", no_mpi="mpi4py is not installed")
    )
    assert decision.reason == "ranks compute on the CPU; gloo: MPI is not taken: mpi4py is not installed"
    assert not decision.uses_mpi


def test_mpi_that_was_taken_on_evidence_gives_way_to_gloo() -> None:
    decision = choose(wanted_of(comm()), BY_MPI)
    assert decision.tentative
    assert "mpiexec started the ranks" in decision.reason
    assert without_mpi(decision, "rank 3 on n1: no library").spec == "gloo"
    assert not choose(wanted_of(comm("mpi")), BY_MPI).tentative


def test_what_cannot_work_is_refused_with_the_way_out() -> None:
    assert "comm.backend=nccl: NCCL moves GPU memory, and this rank computes on the CPU" in refused("nccl", CPU)
    assert "comm.backend=gloo" in refused("nccl", CPU)
    assert "no NCCL" in refused("nccl", Facts("cuda"))
    assert "comm.backend.cpu=nccl: NCCL moves GPU memory only" in refused({"cpu": "nccl"}, GPU)
    no_launcher = Facts("cpu", no_mpi="no MPI launcher started this process", mpi_library="mpich 4")
    assert "comm.backend=mpi: no MPI launcher started this process. Instead: submit with comm.backend=mpi" in refused(
        "mpi", no_launcher
    )
    assert "pip install" in refused("mpi", Facts("cpu", no_mpi="mpi4py is not installed"))
    assert "comm.axes.tp=nccl" in refused("auto", CPU, tp="nccl")


@pytest.mark.parametrize(
    ("backend", "axes", "told"),
    [
        ("glo", {}, r"comm\.backend=glo: .*did you mean gloo"),
        ({"gpu": "nccl"}, {}, r"comm\.backend=gpu: no such device type"),
        ({"cuda": "ncl"}, {}, r"comm\.backend\.cuda=ncl: .*did you mean nccl"),
        ("auto", {"tp": "mpy"}, r"comm\.axes\.tp=mpy: .*did you mean mpi"),
    ],
)
def test_words_that_mean_nothing_are_told_with_the_nearest(backend: Any, axes: dict[str, str], told: str) -> None:
    with pytest.raises(UserError, match=told):
        wanted_of(comm(backend, **axes))
    assert len(check_choice(comm(backend, **axes), gpus=True)) == 1


def test_axes_have_back_ends_of_their_own() -> None:
    decision = choose(wanted_of(comm("gloo", tp="mpi", pp="gloo")), BY_MPI)
    assert decision.spec == "gloo"
    assert decision.axis_specs() == {"tp": "cpu:mpi4py"}
    assert decision.uses_mpi
    on_gpu = choose(wanted_of(comm("auto", shard="gloo")), GPU)
    assert (on_gpu.spec, on_gpu.axis_specs()) == ("cpu:gloo,cuda:nccl", {"shard": "gloo"})


def test_the_launcher_knows_who_needs_it() -> None:
    assert [wants_mpi(comm(word)) for word in ("auto", "gloo", "mpi", "cpu:mpi")] == [False, False, True, True]
    assert wants_mpi(comm("gloo", tp="mpi"))


def test_before_submission_only_what_is_sure_is_refused() -> None:
    assert check_choice(comm("mpi"), gpus=False) == []
    (error,) = check_choice(comm("nccl"), gpus=False)
    assert "cluster.gpus_per_node" in str(error)


def test_only_libraries_that_work_are_measured() -> None:
    assert candidates(wanted_of(comm()), CPU) == ["gloo"]
    assert candidates(wanted_of(comm()), BY_MPI) == ["mpi", "gloo"]
    assert candidates(wanted_of(comm()), GPU) == ["nccl", "gloo"]
    assert candidates(wanted_of(comm({"cpu": "gloo"})), BY_MPI) == ["gloo"]


@pytest.mark.parametrize("family", FAMILIES)
def test_auto_takes_mpi_where_its_launcher_started_the_ranks(family: str, tmp_path: Path) -> None:
    RunDir(tmp_path).attempt(0).path.mkdir(parents=True)
    found = launched.start(tmp_path, family, 2, comm={})
    assert [one.get("error") for one in found] == [None, None]
    assert [(one["backend"], one["sum"]) for one in found] == [("cpu:mpi4py", 3.0)] * 2
    for one in found:
        assert "started the ranks, and mpi4py has" in one["backend_reason"]
        assert f"mpi: {'Open MPI' if family == 'Open MPI' else 'mpiexec'}" in one["backend_reason"]


@pytest.mark.parametrize(
    ("backend", "shown"), [(None, "comm.backend=null: "), (["gloo", "mpi"], "comm.backend=[gloo,mpi]: ")]
)
def test_what_is_no_backend_is_told_as_it_was_written(backend: Any, shown: str) -> None:
    assert refused(backend, CPU).startswith(shown)
