from __future__ import annotations

from pathlib import Path

import pytest

from dthpc.comm.fabric.devices import FABRICS
from dthpc.comm.fabric.model import NodeNetwork
from dthpc.comm.fabric.presets import environment_of, find_plugin, needed, preset, unpinned
from dthpc.comm.fabric.settings import check_settings
from dthpc.config.compose import config_folder


@pytest.mark.parametrize("fabric", FABRICS)
def test_each_preset_pins_every_library_and_names_the_source_of_each_line(fabric: str) -> None:
    made = preset(fabric)
    assert {"NCCL_NET", "FI_PROVIDER", "OMPI_MCA_pml"} <= set(made)
    assert ("tcp" in made.get("UCX_TLS", "").split(",")) == (fabric == "tcp")
    assert check_settings(made, NodeNetwork("n")) == []
    lines = (config_folder() / "comm" / f"{fabric}.yaml").read_text().split("environment:\n")[1].splitlines()
    for place, line in enumerate(lines):
        if not line.lstrip().startswith("#"):
            assert lines[place - 1].lstrip().startswith("#"), f"{line} has no source"


def test_there_is_none_for_other_fabrics() -> None:
    assert preset("omnipath") == {}


def test_null_takes_a_line_out_and_libraries_get_their_own_lines_only() -> None:
    assert environment_of({"NCCL_NET": "IB", "UCX_TLS": None}) == {"NCCL_NET": "IB"}
    both = {"NCCL_NET": "IB", "UCX_TLS": "rc", "FI_PROVIDER": "efa", "GLOO_SOCKET_IFNAME": "eth0"}
    assert set(needed(both, {"nccl"})) == {"NCCL_NET", "FI_PROVIDER", "GLOO_SOCKET_IFNAME"}
    assert set(needed(both, {"mpi"})) == {"UCX_TLS", "FI_PROVIDER", "GLOO_SOCKET_IFNAME"}
    assert set(needed(both, {"gloo"})) == {"GLOO_SOCKET_IFNAME"}


def test_only_an_asked_preset_insists_on_a_plugin(tmp_path: Path) -> None:
    left, remark = unpinned(preset("efa"), {"LD_LIBRARY_PATH": str(tmp_path)})
    if find_plugin({}) is None:
        assert "NCCL_NET" not in left
        assert remark is not None
        assert "aws-ofi-nccl" in remark
    (tmp_path / "libnccl-net-ofi.so").touch()
    assert unpinned(preset("efa"), {"LD_LIBRARY_PATH": str(tmp_path)}) == (preset("efa"), None)
    assert unpinned(preset("roce"), {}) == (preset("roce"), None)
