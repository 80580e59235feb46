from __future__ import annotations

import os
from pathlib import Path

import pytest

from dthpc.slurm.client import SlurmClient
from dthpc.slurm.mpi_types import ask_mpi_types, parse_mpi_list, why_unloadable

OLD = """srun: MPI types are...
srun: none
srun: openmpi
srun: pmi2
"""
NEW = """MPI plugin types are...
\tnone
\tpmix
\tcray_shasta
\tpmi2
specific pmix plugin versions available: pmix_v4,pmix_v5
"""
# As srun 22.05 says it where Slurm has its plugin and the machine no PMIx.
NO_PMIX = """srun: error:  mpi/pmix_v4: init: (null) [0]: mpi_pmix.c:195: pmi/pmix: can not load PMIx library
srun: error: Couldn't load specified plugin name for mpi/pmix: Plugin init() callback failed
srun: error: Invalid MPI type 'pmix', --mpi=list for acceptable types
"""


def test_both_forms_of_the_list_are_read() -> None:
    assert parse_mpi_list(OLD) == ("none", "openmpi", "pmi2")
    assert parse_mpi_list(NEW) == ("cray_shasta", "none", "pmi2", "pmix", "pmix_v4", "pmix_v5")


@pytest.fixture
def old_srun(tmp_path: Path) -> SlurmClient:
    """A srun that prints its list where errors go, and can load pmi2 alone."""
    (tmp_path / "list").write_text(OLD)
    (tmp_path / "no-pmix").write_text(NO_PMIX)
    command = tmp_path / "srun"
    command.write_text(f"""#!/bin/sh
case "$1" in
    --mpi=list) cat {tmp_path}/list >&2 ;;
    --mpi=pmi2) echo "srun: error: Unable to allocate resources: Invalid account" >&2; exit 1 ;;
    *) cat {tmp_path}/no-pmix >&2; exit 1 ;;
esac
""")
    command.chmod(0o755)
    return SlurmClient(environment={"PATH": f"{tmp_path}:{os.environ['PATH']}"})


def test_the_list_is_read_from_wherever_srun_prints_it(old_srun: SlurmClient) -> None:
    assert ask_mpi_types(old_srun) == ("none", "openmpi", "pmi2")


def test_a_listed_type_that_cannot_be_loaded_is_told_with_sruns_reason(old_srun: SlurmClient) -> None:
    assert why_unloadable(old_srun, "pmi2") is None  # what srun says there is of something else
    told = why_unloadable(old_srun, "pmix")
    assert told == "mpi/pmix_v4: init: (null) [0]: mpi_pmix.c:195: pmi/pmix: can not load PMIx library"
