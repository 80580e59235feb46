from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from dthpc.comm.mpi_library import MpiLibrary
from dthpc.errors import UserError
from dthpc.launch.mpi import choose_plugin, mistakes, plan_mpi, usable_plugins, wants_mpi
from dthpc.launch.planning import make_plan
from dthpc.launch.preflight import judge_launch
from dthpc.rundir import RunDir
from tests.launch.sites import make_config, make_site
from tests.mpi_installations import FAMILIES, python_of

MPICH_WHEEL = MpiLibrary("MPICH", Path("/venv/lib/libmpi.so.12"), "mpich 5.0.2")
MPICH = MpiLibrary("MPICH", Path("/opt/mpich/lib/libmpi.so.12"))
OPENMPI = MpiLibrary("Open MPI", Path("/opt/openmpi/lib/libmpi.so.40"))
CRAY = MpiLibrary("Cray MPICH", Path("/opt/cray/pe/lib64/libmpi_cray.so.12"))
DEBIAN = ("cray_shasta", "none", "pmi2", "pmix", "pmix_v4")


def config(**cluster: Any) -> Any:
    made = make_config(**cluster)
    made.comm.backend = "mpi"
    return made


@pytest.mark.parametrize(
    ("library", "offered", "plugin"),
    [
        (MPICH_WHEEL, DEBIAN, "pmi2"),
        (MPICH, DEBIAN, "pmi2"),
        (MPICH, ("none", "pmix"), "pmix"),
        (OPENMPI, DEBIAN, "pmix"),
        (CRAY, DEBIAN, "cray_shasta"),
        (CRAY, ("none", "pmi2"), "pmi2"),
        (None, DEBIAN, "pmix"),
        (MPICH_WHEEL, None, "pmi2"),
    ],
)
def test_slurm_wires_each_library_up_in_a_way_that_both_know(
    library: MpiLibrary | None, offered: tuple[str, ...] | None, plugin: str
) -> None:
    assert choose_plugin(config(), library, offered)[0] == plugin
    assert plugin in usable_plugins(library)


def test_a_slurm_that_lacks_what_the_library_needs_is_told() -> None:
    with pytest.raises(UserError, match=r"mpich 5\.0\.2 needs pmi2, and this Slurm offers none, pmix"):
        choose_plugin(config(), MPICH_WHEEL, ("none", "pmix"))
    with pytest.raises(UserError, match=r"Open MPI needs pmix, and this Slurm offers none, pmi2.*pip install mpich"):
        choose_plugin(config(), OPENMPI, ("none", "pmi2"))


def test_what_the_user_asks_is_taken_if_slurm_has_it() -> None:
    asked = config()
    asked.comm.mpi_plugin = "pmix_v4"
    assert choose_plugin(asked, MPICH, DEBIAN) == ("pmix_v4", "asked by comm.mpi_plugin=pmix_v4")
    with pytest.raises(UserError, match=r"comm\.mpi_plugin=pmix_v4: this Slurm does not offer it .*none, pmi2"):
        choose_plugin(asked, MPICH, ("none", "pmi2"))
    given = config(srun={"mpi": "pmi2"})
    assert choose_plugin(given, OPENMPI, DEBIAN) == ("pmi2", "asked by cluster.srun.mpi=pmi2")


def test_contradictions_and_unknown_words_are_mistakes() -> None:
    wrong = config(srun={"mpi": "pmix"})
    assert mistakes(wrong) == []
    wrong.comm.mpi_plugin = "pmi2"
    assert [error.key for error in mistakes(wrong)] == ["cluster.srun.mpi"]
    wrong.comm.mpi_plugin = "pmi3"
    assert [str(error.value) for error in mistakes(wrong)] == ["pmi3"]


def test_only_runs_by_mpi_ask_for_it(tmp_path: Path) -> None:
    made = make_config(tmp_path)
    assert not wants_mpi(made)
    assert plan_mpi(made, DEBIAN) is None
    assert not any(
        word.startswith("--mpi") for word in make_plan(made, RunDir(tmp_path / "r"), make_site()).srun_options
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_a_plan_for_slurm_has_the_plugin_in_its_srun(family: str, tmp_path: Path) -> None:
    made = config(python=str(python_of(family)))
    plan = make_plan(made, RunDir(tmp_path / "r"), make_site(mpi_types=DEBIAN), {})
    plugin = "pmix" if family == "Open MPI" else "pmi2"
    assert f"--mpi={plugin}" in plan.srun_options
    assert plan.mpi["launcher"] == []
    assert plan.environment.get("MPIR_CVAR_CH4_NETMOD") == (None if family == "Open MPI" else "ofi")
    assert f"can use {plugin}" in plan.site["decisions"]["reasons"]["mpi"]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_local_plan_has_the_launcher_of_its_library(family: str, tmp_path: Path) -> None:
    python = python_of(family)
    plan = make_plan(config(kind="local", python=str(python)), RunDir(tmp_path / "r"), None, {})
    assert plan.mpi["launcher"][0] == str(python.parent / "mpiexec")
    assert plan.mpi["launcher"][-1] == "-n"
    assert plan.srun_options == []


def test_what_is_absent_is_refused_before_anything_starts(tmp_path: Path) -> None:
    bare = tmp_path / "bin" / "python"
    found = [
        verdict for verdict in judge_launch(config(kind="local", python=str(bare)), env={}) if verdict.check == "mpi"
    ]
    assert [verdict.status for verdict in found] == ["error"]
    assert found[0].note.startswith(f"comm.backend=mpi: {bare} has no mpi4py")
    one_axis = config(kind="local", python=str(bare))
    one_axis.comm.backend, one_axis.comm.axes.tp = "gloo", "mpi"
    with pytest.raises(UserError, match=rf"comm\.axes\.tp=mpi: {bare} has no mpi4py"):
        plan_mpi(one_axis, None, {})
    nothing = {"MPI4PY_LIBMPI": str(tmp_path / "libmpi.so")}
    python_of("MPICH")
    with pytest.raises(UserError, match=r"finds no MPI library"):
        plan_mpi(config(kind="local"), None, nothing)
    # What the batch script loads may bring it.
    later = plan_mpi(config(setup=["module load mpi"], python=sys.executable), DEBIAN, nothing)
    assert later is not None
    assert (later.library, later.plugin) == (None, "pmix")
    with pytest.raises(UserError, match="container"):
        plan_mpi(config(kind="local", container={"runtime": "apptainer", "image": "i.sif"}), None, {})
